"""A test server in a process of its own: started, told to fail, killed and started again on the same port.

    with ServerProcess("wandb_server", folder) as server:
        server.rules(Rule(Fault.RATE_LIMIT, path="file_stream", times=3, retry_after_s=1))
        … server.url … server.kill() … server.start() … server.state()

Must not know: any tracker. On failure to start: AssertionError with the server's last words.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from servers.faults import Rule
from support.mlflow_server import free_port

TESTS = Path(__file__).parents[1]
START_S_MAX = 30.0
ANSWER_S = 30.0


@final
class ServerProcess:
    """One server with its state in `folder`. `module` is the file's name in this folder."""

    def __init__(
        self, module: str, folder: Path, *, host: str = "127.0.0.1", certificate: Path | None = None, ca: str = ""
    ) -> None:
        """`host` is what clients are told, and may be a name that only a proxy knows. `certificate`: speak TLS with
        it; it is good for `host` and for localhost, and vouched for by `ca`."""
        self.module = module
        self.folder = folder
        self.port = free_port()
        self.url = f"{'https' if certificate else 'http'}://{host}:{self.port}"
        self._control = f"https://localhost:{self.port}" if certificate else f"http://127.0.0.1:{self.port}"
        self._arguments = [f"--certificate={certificate}"] if certificate else []
        self._context = ssl.create_default_context(cafile=ca) if certificate else None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start, or start again with the state it had; returns when it answers. Options and rules begin anew."""
        assert self._process is None
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"servers.{self.module}", *self._told()],
                cwd=TESTS,
                env=os.environ | {"PYTHONPATH": str(TESTS)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline_s = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline_s and self._process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, OSError):
                self.requests()
                return
            time.sleep(0.05)
        words = (self.folder / "server.log").read_text(errors="replace")[-2000:]
        self.kill()
        raise AssertionError(f"{self.module} did not start: {words}")

    def _told(self) -> list[str]:
        return [f"--port={self.port}", f"--folder={self.folder}", *self._arguments]

    def kill(self) -> None:
        """SIGKILL: connections are refused from now on, what was answered is kept."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: connections are accepted by the kernel and never answered."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def rules(self, *rules: Rule) -> None:
        """Replace all rules; none: healthy."""
        self._call("rules", [rule.to_json() for rule in rules])

    def options(self, **options: Any) -> None:
        self._call("options", options)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._call("state")
        return state

    def requests(self) -> list[dict[str, Any]]:
        requests: list[dict[str, Any]] = self._call("requests")
        return requests

    @contextlib.contextmanager
    def failing(self, *rules: Rule) -> Iterator[None]:
        """Rules for the time of a block."""
        self.rules(*rules)
        try:
            yield
        finally:
            self.rules()

    def _call(self, what: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._control}/_control/{what}", data, {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._context)
        )
        with opener.open(request, timeout=ANSWER_S) as answer:
            return json.loads(answer.read())
