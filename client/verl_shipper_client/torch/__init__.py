"""PyTorch without verl: one run for all ranks of a job, profiler traces, memory snapshots. Manual: docs/pytorch.md.

    from verl_shipper_client.torch import DistributedClient

    with DistributedClient("pretrain", "1b", config=config) as client:
        client.log({"loss": loss}, step=step)

`lightning.py` is for Lightning, `huggingface.py` for Hugging Face's Trainer. torch is imported when it
is needed.
"""

from __future__ import annotations

from verl_shipper_client.torch.distributed import DistributedClient
from verl_shipper_client.torch.profiler import memory_snapshot, profiler_handler

__all__ = ["DistributedClient", "memory_snapshot", "profiler_handler"]
