"""What `verl-shipper doctor` finds out about SwanLab: way, certificate, key; or the folder of offline runs.

Must not know: records. On failure: a Finding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from verl_shipper.backends.road import road_of
from verl_shipper.backends.secrets import diagnose_key
from verl_shipper.checks import Answer, Finding, Level, probe
from verl_shipper.folders import disk_findings, folder_findings


def findings(url: str, key_variables: Sequence[str], settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about the server at `url`: one log-in, which changes nothing there."""
    key = yield from diagnose_key(key_variables, settings, urlsplit(url).hostname)
    headers = {"authorization": key.value if key is not None else "", "Content-Length": "0"}
    way = road_of("swanlab", settings).probing()
    answer = yield from probe(f"{url}/api/login/api_key", method="POST", headers=headers, **way)
    if answer is not None:
        yield _judged(answer, url, is_asked=key is not None)


def folder(log_dir: str) -> Iterator[Finding]:
    """Findings about the place of offline and local runs."""
    yield from folder_findings(log_dir, private=False)
    yield from disk_findings(os.path.abspath(log_dir), "offline runs")


def _judged(answer: Answer, url: str, *, is_asked: bool) -> Finding:
    if answer.status in (401, 403):
        what = f"the key is refused ({answer.status})" if is_asked else "the server wants a key"
        return Finding(Level.FAIL, what, "put a valid key there: the page of your account's settings shows it")
    try:
        user = json.loads(answer.body)["userInfo"]["username"] if answer.status in (200, 201) else None
    except (ValueError, KeyError, TypeError):
        user = None
    if user is None:
        hint = "give the address of the API: backends.swanlab.base_url, or SWANLAB_API_HOST"
        return Finding(Level.FAIL, f"{url} does not answer like SwanLab ({answer.status})", hint)
    return Finding(Level.OK, f"the key is taken, for user {user}")
