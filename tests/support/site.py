"""A site: one isolated place for a daemon and its trainers, with its own home, spool, state and output.

    <root>/home   HOME of every process        <root>/state  VERL_SHIPPER_STATE_DIR
    <root>/spool  VERL_SHIPPER_SPOOL_DIR       <root>/out    output of the backend `file`

Must not know: how to start a process. On failure: as the operating system said it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from verl_shipper_spool.location import socket_address


class Site:
    """Places and environment. `spool` and `state` may be put elsewhere, for example on a disk that will fail."""

    def __init__(self, root: Path, *, spool: Path | None = None, state: Path | None = None) -> None:
        self.root = root
        self.home = root / "home"
        self.spool = spool or root / "spool"
        self.state = state or root / "state"
        self.out = root / "out"
        for folder in (self.home, self.out):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def socket(self) -> str:
        """Path of the socket where daemon and trainers of this spool meet."""
        return socket_address(str(self.spool)).removeprefix("ipc://")

    def env(self, **extra: str) -> dict[str, str]:
        """A bare environment, as a service manager gives it, plus `extra`."""
        return {
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "TMPDIR": str(self.root),
            "VERL_SHIPPER_SPOOL_DIR": str(self.spool),
            "VERL_SHIPPER_STATE_DIR": str(self.state),
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "true",
            **extra,
        }

    def file_backend(self) -> list[str]:
        """Arguments that turn on the backend `file` with this site's output."""
        return ["--backend", "file", "--set", f"backends.file.dir={self.out}"]

    def mlflow_backend(self, uri: str, **settings: object) -> list[str]:
        """Arguments that turn on the backend `mlflow` at `uri`; `settings` are those of its section."""
        arguments = ["--backend", "mlflow", "--set", f"backends.mlflow.tracking_uri={uri}"]
        for key, value in settings.items():
            arguments += ["--set", f"backends.mlflow.{key}={value}"]
        return arguments

    def output(self, project: str, experiment: str, run_id: str) -> Path:
        """File of one run at the backend `file`."""
        return self.out / project / f"{experiment}-{run_id}.jsonl"

    def stream_folders(self) -> list[Path]:
        """Client streams on disk, oldest first."""
        if not self.spool.is_dir():
            return []
        return sorted(
            (path for path in self.spool.iterdir() if (path / "stream").exists()),
            key=lambda path: (path / "stream").stat().st_mtime_ns,
        )

    def close(self) -> None:
        """Remove the stand-in of a socket whose path was too long; all else lies below `root`."""
        if self.socket.startswith("/dev/shm/"):
            with contextlib.suppress(OSError):
                os.unlink(self.socket)
