"""What `verl-shipper doctor` finds out about a wandb server: key, way, certificate, clock; who the key belongs to.

Must not know: records. On failure: a Finding.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from verl_shipper.backends.road import road_of
from verl_shipper.backends.secrets import diagnose_key
from verl_shipper.backends.wandb_api import VIEWER
from verl_shipper.backends.wandb_wish import KEY_NAMES, PROXY_KEY, base_url, entity_of, mode_of
from verl_shipper.checks import Answer, Finding, Level, probe
from verl_shipper.folders import disk_findings, folder_findings


def findings(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about the server that `settings` name; with mode offline, about the folder."""
    if mode_of(settings) == "offline":
        folder = os.path.abspath(str(settings.get("dir") or os.environ.get("WANDB_DIR") or "."))
        yield from folder_findings(folder, private=False)
        yield from disk_findings(folder, "offline runs")
        return
    url = base_url(settings)
    key = yield from diagnose_key(KEY_NAMES, settings, urlsplit(url).hostname)
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Basic {base64.b64encode(f'api:{key.value}'.encode()).decode()}"
    body = json.dumps({"query": VIEWER, "variables": {}}).encode()
    way = road_of("wandb", settings, proxy_key=PROXY_KEY).probing()
    answer = yield from probe(f"{url}/graphql", method="POST", headers=headers, body=body, **way)
    if answer is not None and key is not None:
        yield _viewer(answer, url, key.origin, entity_of(settings))


def _viewer(answer: Answer, url: str, origin: str, chosen: str) -> Finding:
    """Whose key it is."""
    hint = f"the key is from {origin}; make a new one at {url}/authorize and put it there"
    if answer.status in (401, 403):
        return Finding(Level.FAIL, f"key refused ({answer.status})", hint)
    try:
        viewer = json.loads(answer.body)["data"]["viewer"]
        entity = chosen or viewer["entity"] or viewer["username"]
    except (ValueError, KeyError, TypeError):
        if answer.status == 200 and b'"viewer"' in answer.body:
            return Finding(Level.FAIL, "key refused", hint)
        return Finding(Level.FAIL, f"{url} answered {answer.status}, is it a wandb server?", "check base_url")
    return Finding(Level.OK, f"key accepted, runs go to entity {entity}")
