"""What a test asks about the SwanLab test server (tests/servers/swanlab_server.py), and how the real SDK finds it.

    with ServerProcess("swanlab_server", folder) as server:
        subprocess.run([...], env=environment(server, folder))
        assert points(server, run, "loss") == [(0, 1.0), (1, 0.5)]

All answers come from the server's own state, where every row counts at once, whatever its lag. Must not know: swanlab.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from servers.process import ServerProcess
from servers.swanlab_store import object_name

API_KEY = "0123456789abcdefghijk"  # 21 characters, as many as a real one


def environment(server: ServerProcess, home: Path, api_key: str = API_KEY) -> dict[str, str]:
    """Ours, with the SDK sent to `server` and its own files kept below `home`."""
    clean = {name: value for name, value in os.environ.items() if not name.upper().startswith("SWANLAB_")}
    return clean | {
        "SWANLAB_API_KEY": api_key,
        "SWANLAB_API_HOST": server.url,
        "SWANLAB_WEB_HOST": server.url,
        "SWANLAB_ROOT": str(home / "swanlab"),
        "HOME": str(home),
        "no_proxy": "127.0.0.1",
        "NO_PROXY": "127.0.0.1",
    }


def run_state(server: ServerProcess, run: str) -> dict[str, Any]:
    """Everything the server holds of one run; KeyError when there is none."""
    state: dict[str, Any] = server.state()["runs"][run]
    return state


def points(server: ServerProcess, run: str, key: str) -> list[tuple[int, Any]]:
    """(index, value) of a scalar in the order of arrival; a row that came twice is there twice."""
    return [(index, value) for index, value, _ in run_state(server, run)["scalars"].get(key, [])]


def media(server: ServerProcess, run: str, key: str) -> list[tuple[int, list[bytes]]]:
    """(index, content of its objects) of a media key in the order of arrival."""
    rows = run_state(server, run)["media"].get(key, [])
    return [(index, [content(server, run, path) for path in paths]) for index, paths, _ in rows]


def content(server: ServerProcess, run: str, path: str) -> bytes:
    """One uploaded object, by the path that the media row gives."""
    return (server.folder / "objects" / object_name(f"{run}/{path}")).read_bytes()
