"""Settings, environment and a run's own names made into what wandb is told. Pure, but for the environment it reads.

Must not know: network, SDK. On failure: ConfigError for what `check` would refuse.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from verl_shipper.backends.base import RunInfo
from verl_shipper.backends.paths import component
from verl_shipper.backends.road import Road, road_of
from verl_shipper.backends.sdk import parts
from verl_shipper.backends.sdk.run_lock import lock_path
from verl_shipper.backends.wandb_api import RunAddress
from verl_shipper.backends.wandb_run import Wish
from verl_shipper.values import visible

KEY_NAMES = ("WANDB_API_KEY",)
PROXY_KEY = "wandb_proxy"
MODE_ALIASES = {"run": "online", "dryrun": "offline"}  # wandb's older words
DEFAULT_URL = "https://api.wandb.ai"
SETTLE_S = 10.0  # the server's counts lag 2 to 4 s on a quiet day (wandb/wandb #12421)
TRANSMIT_S = 2  # whole seconds, how often the SDK sends
ROADS = ("file_stream", "graphql", "file_transfer")
RETRY_WAIT_S_MAX = 15.0
TRY_S = 30.0  # one request; a server that hangs longer is asked anew
PROJECT_FORBIDDEN = re.compile(r"[/\\#?%:\x00-\x1f\x7f\ud800-\udfff]")
NAME_CHARS_MAX = 128
RUN_FORBIDDEN = re.compile(r"[^\w\-.]", re.ASCII)


def wish_of(run: RunInfo, settings: Mapping[str, Any], entity: str, key: str) -> Wish:
    """How a run is to be written."""
    address = RunAddress(entity, project_name(run.project), run_name(run.run_id))
    url = base_url(settings)
    identity = (url, address.entity, address.project, address.run_id)
    work_dir = settings.get("work_dir") or os.path.join(os.path.expanduser("~"), ".cache", "verl-shipper")
    folder = os.path.join(str(work_dir), component(f"{address.project}-{address.run_id}", RUN_FORBIDDEN))
    return Wish(
        address=address,
        where=_where(run, settings, address),
        settings=_sdk_settings(settings),
        environment=child_environment(road_of("wandb", settings), url, folder),
        api_key=key,
        folder=folder,
        lock_path=lock_path(settings.get("lock_dir"), "wandb", *identity),
        settle_s=float(settings.get("settle_s", SETTLE_S)),
        with_artifacts=bool(settings.get("log_artifact", True)),
    )


def entity_of(settings: Mapping[str, Any]) -> str:
    """The account or team that was chosen; empty for the key's own."""
    return str(settings.get("entity") or os.environ.get("WANDB_ENTITY") or "")


def mode_of(settings: Mapping[str, Any]) -> str:
    """`online`, `offline`, or a word that `check` refuses."""
    return parts.mode_of(settings, "WANDB_MODE", MODE_ALIASES)


def _where(run: RunInfo, settings: Mapping[str, Any], address: RunAddress) -> dict[str, Any]:
    """Arguments of wandb.init."""
    tags = settings.get("tags")
    is_offline = mode_of(settings) == "offline"
    return {
        "entity": address.entity or None,
        "project": address.project,
        "id": address.run_id,
        "name": visible(run.experiment)[:NAME_CHARS_MAX] or None,
        "group": settings.get("group"),
        "job_type": settings.get("job_type"),
        "notes": settings.get("notes"),
        "tags": [tags] if isinstance(tags, str) else tags,
        "resume": None if is_offline else "allow",
        "mode": "offline" if is_offline else "online",
        "dir": offline_dir(settings) if is_offline else None,
    }


def _sdk_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of wandb.Settings; those that a version does not know are left out by the child."""
    proxy = settings.get(PROXY_KEY) or None
    return {
        "console": "off",
        "http_proxy": proxy,
        "https_proxy": proxy,
        "quiet": True,
        "save_code": bool(settings.get("save_code", False)),
        "silent": True,
        # Its waits between tries; the rest of its patience (7 days) suits us.
        **{f"x_{road}_retry_wait_min_seconds": 1.0 for road in ROADS},
        **{f"x_{road}_retry_wait_max_seconds": RETRY_WAIT_S_MAX for road in ROADS},
        **{f"x_{road}_timeout_seconds": TRY_S for road in ROADS},
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_file_stream_transmit_interval": TRANSMIT_S,
        "x_save_requirements": False,
        "x_skip_transaction_log": True,
    }


def base_url(settings: Mapping[str, Any]) -> str:
    """The server that counts."""
    return str(settings.get("base_url") or os.environ.get("WANDB_BASE_URL") or DEFAULT_URL).rstrip("/")


def offline_dir(settings: Mapping[str, Any]) -> str:
    """Where the `wandb` folder of runs without a server is."""
    return os.path.abspath(str(settings.get("dir") or os.environ.get("WANDB_DIR") or "."))


def project_name(project: str) -> str:
    """The project's name as far as W&B takes it."""
    return component(project, PROJECT_FORBIDDEN, bytes_max=128) if project else "uncategorized"


def run_name(run_id: str) -> str:
    """The run's id as far as W&B takes it."""
    return component(run_id, RUN_FORBIDDEN, bytes_max=64)


def child_environment(road: Road, url: str, folder: str) -> dict[str, str]:
    """What the SDK sees: our settings, nobody else's, and no folder but its own. No key, and no proxy of our settings:
    the child is told them later, where nobody else can look."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    own = {f"WANDB_{name}_DIR": os.path.join(folder, "wandb") for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    return {
        **kept,
        **road.environment(url),
        **own,
        "WANDB_BASE_URL": url,
        "WANDB_ERROR_REPORTING": "false",
    }
