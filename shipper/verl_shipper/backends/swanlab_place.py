"""Where SwanLab's runs go: a server, or a folder of its own.

    mode         the setting, else SWANLAB_MODE, else online; without a key, and with a folder given, local
    log_dir      the setting, else SWANLAB_LOG_DIR, else ./swanlog
    base_url     the setting, else SWANLAB_API_HOST, SWANLAB_HOST, else SwanLab's own

Must not know: network, SDK. Never raises.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from verl_shipper.backends.base import Decided
from verl_shipper.backends.sdk import parts
from verl_shipper.backends.secrets import find_key
from verl_shipper.errors import ConfigError

DEFAULT_URL = "https://api.swanlab.cn"
KEY_VARIABLES = ("SWANLAB_API_KEY",)
MODE_VARIABLE = "SWANLAB_MODE"
MODES = {"online": "online", "cloud": "online", "offline": "offline", "local": "local"}


def decided(settings: Mapping[str, Any]) -> Decided:
    """Who gave a folder and no key wants a folder: SwanLab works without logging in."""
    is_given = settings.get("log_dir") or os.environ.get("SWANLAB_LOG_DIR")
    if not is_given or settings.get("mode") is not None or os.environ.get(MODE_VARIABLE):
        return Decided(settings)
    try:
        if find_key(KEY_VARIABLES, settings, urlsplit(base_url(settings)).hostname) is not None:
            return Decided(settings)
    except ConfigError:
        return Decided(settings)  # there is a key that cannot be used, which the lane will say
    note = f"there is no key, so runs go to {os.path.abspath(log_dir(settings))} (mode local; look: swanlab watch)"
    hint = "for the server set SWANLAB_API_KEY or api_key_file, or mode to online"
    return Decided({**settings, "mode": "local"}, (f"{note}; {hint}",))


def mode_of(settings: Mapping[str, Any]) -> str:
    """`online`, `offline`, `local`, or a word that `check` refuses."""
    return parts.mode_of(settings, MODE_VARIABLE, MODES)


def log_dir(settings: Mapping[str, Any]) -> str:
    """Where folders of offline and local runs go."""
    return str(settings.get("log_dir") or os.environ.get("SWANLAB_LOG_DIR") or "swanlog")


def base_url(settings: Mapping[str, Any]) -> str:
    """The server that counts: scheme, host and port, as SwanLab's package takes it."""
    found = settings.get("base_url") or os.environ.get("SWANLAB_API_HOST") or os.environ.get("SWANLAB_HOST")
    text = str(found or DEFAULT_URL)
    parts = urlsplit(text if "://" in text else f"https://{text}")
    return f"{parts.scheme}://{parts.netloc}"
