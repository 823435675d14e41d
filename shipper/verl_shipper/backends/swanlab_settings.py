"""Settings of the backend `swanlab`, declared. Must not know: what is done with them."""

from __future__ import annotations

from verl_shipper.backends.sdk.settings import shared_settings
from verl_shipper.schema import Key, Kind

SETTINGS = (
    Key(
        "base_url",
        Kind.URL,
        "the API of a self-hosted server: scheme, host, port",
        "SwanLab can be run on your own machines",
        "https://swanlab.example.com",
        default="https://api.swanlab.cn",
        variables=("SWANLAB_API_HOST", "SWANLAB_HOST"),
    ),
    Key(
        "web_url",
        Kind.URL,
        "its pages",
        "shown in the package's own words only",
        "https://swanlab.example.com",
        otherwise="the API's",
        variables=("SWANLAB_WEB_HOST",),
    ),
    Key(
        "workspace",
        Kind.TEXT,
        "account or team",
        "a key may belong to several teams",
        "rl-team",
        otherwise="the key's own",
        variables=("SWANLAB_WORKSPACE",),
    ),
    Key(
        "description",
        Kind.TEXT,
        "as in `swanlab.init`",
        "a sentence for those who look later",
        "'reward v2'",
        otherwise="none",
    ),
    Key(
        "mode",
        Kind.CHOICE,
        "`cloud` is `online`; `offline` and `local` write a folder that `swanlab sync` takes",
        "for nodes without a way out; `local` is also what a `log_dir` and no key mean, when nobody says more",
        "offline",
        default="online",
        variables=("SWANLAB_MODE",),
        choices=("online", "cloud", "offline", "local"),
    ),
    Key(
        "log_dir",
        Kind.PATH,
        "where those folders go: `<log_dir>/run-…-<id>`, for `swanlab sync DIR --id ID`",
        "they grow with the run",
        "./swanlab_logs",
        default="swanlog",
        variables=("SWANLAB_LOG_DIR",),
    ),
    *shared_settings("swanlab", "SwanLab", settle_s=15.0),
)
