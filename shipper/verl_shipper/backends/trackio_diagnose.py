"""What `verl-shipper doctor` finds out about a trackio store: the package, the folder, its disk.

Must not know: records. On failure: a Finding.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator

from verl_shipper.checks import Finding, Level
from verl_shipper.folders import NETWORK_KINDS, disk_findings, existing, file_system, folder_findings

REMOTES = ("TRACKIO_SPACE_ID", "TRACKIO_BUCKET_ID", "TRACKIO_SERVER_URL")


def findings(folder: str) -> Iterator[Finding]:
    """Findings about the store in `folder`."""
    yield Finding(Level.OK, f"trackio {importlib.metadata.version('trackio')}")
    yield from folder_findings(folder, private=False)
    yield from disk_findings(folder, "trackio's store")
    kind = file_system(existing(folder))
    if kind in NETWORK_KINDS:
        what = f"{folder} is on a network ({kind}), where two machines that write one database can break it"
        yield Finding(Level.WARN, what, "choose a folder on a local disk: backends.trackio.dir")
    named = [name for name in REMOTES if os.environ.get(name)]
    if named:
        what = f"{', '.join(named)}: not used, runs go to {folder} only"
        hint = "bring them to a Space with: trackio sync --project PROJECT --space-id SPACE"
        yield Finding(Level.WARN, what, hint)
