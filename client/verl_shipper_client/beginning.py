"""How a process's part of a run begins: the header of its streams, its first record.

Must not know: sockets, how records are kept. Raises nothing that a configuration causes.
"""

from __future__ import annotations

import time
from typing import Any

from verl_shipper_client.values import plain
from verl_shipper_spool.header import SCALARS, StreamHeader, new_id, this_process
from verl_shipper_spool.redact import redact


def header_of(run_id: str, names: tuple[str, str], rank: int, world: int, *, is_head: bool) -> StreamHeader:
    """Of this process's scalars, new at every call. `names`: project and experiment."""
    return StreamHeader(
        stream_id=new_id(),
        writer_id=new_id(),
        stream_class=SCALARS,
        run_id=run_id,
        project=names[0],
        experiment=names[1],
        rank=rank,
        world=world,
        created_ns=time.time_ns(),
        forked=not is_head,
        process=this_process(),
    )


def body_of_start(header: StreamHeader, config: Any) -> dict[str, Any]:
    """Of a run_start record; secrets are taken out of the configuration."""
    shown = redact(plain(config))
    if not isinstance(shown, dict):
        shown = {} if shown is None else {"config": shown}
    body: dict[str, Any] = {"project": header.project, "experiment": header.experiment, "config": shown}
    body |= {"node": header.process.node, "rank": header.rank, "world": header.world}
    # What a helper of the run says of itself is no beginning of the run.
    return body | {"forked": True} if header.forked else body
