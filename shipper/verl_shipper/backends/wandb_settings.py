"""Settings of the backend `wandb`, declared. Must not know: what is done with them."""

from __future__ import annotations

from verl_shipper.backends.sdk.settings import shared_settings
from verl_shipper.backends.wandb_wish import SETTLE_S
from verl_shipper.schema import Key, Kind

SETTINGS = (
    Key(
        "base_url",
        Kind.URL,
        "a self-hosted server",
        "scheme, host and port as people see it in their browser",
        "https://wandb.example.com",
        default="https://api.wandb.ai",
        variables=("WANDB_BASE_URL",),
    ),
    Key(
        "entity",
        Kind.TEXT,
        "account or team",
        "a key may belong to several teams",
        "rl-team",
        otherwise="the key's own",
        variables=("WANDB_ENTITY",),
    ),
    Key(
        "notes",
        Kind.TEXT,
        "as in `wandb.init`",
        "a sentence for those who look later",
        "'reward v2'",
        otherwise="none",
    ),
    Key(
        "wandb_proxy",
        Kind.URL,
        "proxy for W&B alone, whatever `NO_PROXY` says",
        "where only some trackers are behind it",
        "http://USER:PASSWORD@proxy.example.com:8080",
        otherwise="`HTTPS_PROXY`, `NO_PROXY`",
    ),
    Key(
        "log_artifact",
        Kind.FLAG,
        "tables as artifacts, too, as wandb does it; without, they are files of the run",
        "without artifacts a table costs half the traffic",
        "no",
        default=True,
    ),
    Key(
        "save_code",
        Kind.FLAG,
        "whether wandb may save code",
        "the lane has none of yours: it would save its own",
        "yes",
        default=False,
    ),
    Key(
        "mode",
        Kind.CHOICE,
        "`offline` writes a folder that `wandb sync` takes",
        "for nodes without a way out",
        "offline",
        default="online",
        choices=("online", "offline"),
        variables=("WANDB_MODE",),
    ),
    Key(
        "dir",
        Kind.PATH,
        "where offline runs go: `<dir>/wandb/offline-run-…`",
        "they grow with the run",
        "/data/wandb",
        otherwise="the daemon's folder",
        variables=("WANDB_DIR",),
    ),
    *shared_settings("wandb", "wandb", settle_s=SETTLE_S),
)
