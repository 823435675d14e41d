"""The trainer's side of verl-shipper.

    from verl_shipper_client import Client

    with Client(project="rlhf", experiment="qwen2-7b-grpo", config=config) as client:
        client.log({"actor/loss": loss}, step=step)

Depends on pyzmq and msgpack only; never imports torch, numpy or a tracker.
"""

from __future__ import annotations

from verl_shipper_client.client import Client
from verl_shipper_client.span import Span

__all__ = ["Client", "Span"]
