"""The spool: bytes and files under both halves of verl-shipper. Format v1 is described in spool/README.md."""
