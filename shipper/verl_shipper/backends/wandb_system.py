"""The facts of a node made into rows of wandb's history, beside the charts of training. Pure.

    {"system/<node>/gpu/0/power_w": 650.5, …, "system/elapsed_s": 15.2, "_timestamp": …, "_shipper": …}

Such a row has no `trainer/global_step`, so no chart over it changes. Its own axis is `system/elapsed_s`: seconds since
the run began.

Why not wandb's stream of system events, which its "System" section shows: the server tells a sample of it, and a count
that lags, never which lines it has. Measured with wandb 0.31 and a server whose counts lag 4 s: a process that began
within that time after another, which was killed or had ended well, overwrote 49 and 50 of its 50 lines. Rows of the
history are recognised by their id.

Must not know: SDK, network. Never raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from verl_shipper.backends.base import Item
from verl_shipper.backends.system_facts import PREFIX, elapsed_s, facts_of

ELAPSED_KEY = f"{PREFIX}/elapsed_s"


def system_values(item: Item, created_ns: int, ignored: Counter[str]) -> Iterator[tuple[str, float]]:
    """Names and numbers of a row; nothing when the record has no facts."""
    facts = facts_of(item.record, ignored)
    if facts:
        yield from facts.items()
        yield ELAPSED_KEY, elapsed_s(item.record, created_ns)
