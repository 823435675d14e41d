"""A run's configuration as MLflow params: flat, text, without secrets. Pure.

    {"optim": {"lr": 1e-4, "betas": [0.9, 0.95]}, "tag": None}
        →   optim/lr = 0.0001, optim/betas = [0.9, 0.95], tag = None

MLflow takes 6000 characters a value and cuts longer ones without a word; here the cut can be seen.

Must not know: requests. Never raises.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verl_shipper.values import key_text, to_json, visible
from verl_shipper_spool.redact import redact

VALUE_CHARS_MAX = 6000
CUT = " … [cut by verl-shipper]"


def params_of(config: Any) -> dict[str, str]:
    """Text of every leaf of `config` by its path. Of two leaves with one path the first stays."""
    params: dict[str, str] = {}
    if isinstance(config, Mapping):
        _collect(to_json(redact(config)), "", params)
    return params


def _collect(config: Mapping[str, Any], prefix: str, params: dict[str, str]) -> None:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            _collect(value, f"{prefix}{key_text(key)}/", params)
        else:
            params.setdefault(prefix + key_text(key), _text(value))


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else visible(str(value))
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - len(CUT)] + CUT
