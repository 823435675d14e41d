"""What makes verl's own calls ours: `verl_shipper_client.verl_plugin` puts it together."""
