"""Settings of the backend `trackio`, declared. Must not know: what is done with them."""

from __future__ import annotations

from verl_shipper.schema import Key, Kind

NUMBERS_MAX = 64

SETTINGS = (
    Key(
        "dir",
        Kind.PATH,
        "trackio's store: a database for each project, and a file for each trace; `TRACKIO_DIR=<dir> trackio show` "
        "shows it",
        "a service has another home than you",
        "/data/trackio",
        otherwise="trackio's own, `~/.cache/huggingface/trackio`",
        variables=("TRACKIO_DIR",),
    ),
    Key(
        "numbers_max",
        Kind.COUNT,
        "a longer list of numbers in a trace, token ids or logprobs, is shown as its length, and counted as "
        "`long_list`",
        "trackio stores a trace four times over, for its search; lists of 2,048 make it 6 times as large",
        "100000",
        default=NUMBERS_MAX,
        unit="numbers",
        low=0,
    ),
)
