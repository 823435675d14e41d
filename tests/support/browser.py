"""A page as a person sees it: headless Chromium, driven over its own debugging protocol.

    with Browser(folder) as browser:
        browser.open(url)
        browser.wait_for("What is 6*7?")      text that the page shows
        browser.click("Got it")               the first thing with exactly this text, if it is there
        browser.shoot(path)

Protocol: https://chromedevtools.github.io/devtools-protocol/, domains Page and Runtime. Must not know: the pages.
On failure: AssertionError with what the page shows; no Chromium on the machine is `find_chromium() == None`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from support.processes import descendants, wait_gone

START_S = 60.0
STOP_S = 20.0
WAIT_S = 60.0
LOOK_S = 0.2
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ADDRESS = re.compile(r"DevTools listening on (ws://\S+)")
MESSAGE_BYTES_MAX = 64 * 1024 * 1024  # a picture comes as one message


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One window of one Chromium with a fresh profile in `folder`."""

    def __init__(self, folder: Path, width: int = 1500, height: int = 950) -> None:
        program = find_chromium()
        assert program is not None, "no Chromium on this machine; apt-get install chromium"
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "chromium.log"
        self._command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        self._command += ["--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}"]
        self._command += [f"--window-size={width},{height}", "about:blank"]
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count(1)

    def __enter__(self) -> Browser:
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
        try:
            self._do(self._connect())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):
            self._do(self._session.close())
        self._end()

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def text(self) -> str:
        """What the page shows."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def wait_for(self, *texts: str, timeout_s: float = WAIT_S) -> None:
        """Wait until the page shows all of these."""
        deadline_s = time.monotonic() + timeout_s
        while missing := [text for text in texts if text not in self.text()]:
            assert time.monotonic() < deadline_s, f"the page never showed {missing}:\n{self.text()[:4000]}"
            time.sleep(LOOK_S)

    def click(self, text: str) -> bool:
        """Click the innermost element with exactly this text, or this label; False when there is none."""
        found = self.evaluate(
            f"""(() => {{
                const all = [...document.querySelectorAll('button, a, [role=button], [role=tab], span, div')];
                const named = all.filter(e => e.getAttribute('aria-label') === {json.dumps(text)}
                                              || (e.innerText || '').trim() === {json.dumps(text)});
                if (!named.length) return false;
                named[named.length - 1].click();
                return true;
            }})()"""
        )
        return bool(found)

    def settle(self, quiet_s: float = 2.0, timeout_s: float = WAIT_S) -> None:
        """Wait until what the page shows has not changed for a while."""
        deadline_s, changed_s, shown = time.monotonic() + timeout_s, time.monotonic(), ""
        while time.monotonic() - changed_s < quiet_s and time.monotonic() < deadline_s:
            now = str(self.evaluate("document.body.innerHTML.length + '/' + document.body.innerText"))
            if now != shown:
                shown, changed_s = now, time.monotonic()
            time.sleep(LOOK_S)

    def evaluate(self, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer.get("result", {}).get("value")

    def shoot(self, path: Path) -> None:
        """A picture of what the window shows."""
        answer = self._call("Page.captureScreenshot", format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    async def _connect(self) -> None:
        deadline_s = time.monotonic() + START_S
        while not (found := ADDRESS.search(self._log.read_text(errors="replace"))):
            assert time.monotonic() < deadline_s, self._log.read_text(errors="replace")[-2000:]
            assert self._process.poll() is None, self._log.read_text(errors="replace")[-2000:]
            await asyncio.sleep(LOOK_S)
        self._session = aiohttp.ClientSession()
        host = found[1].removeprefix("ws://").partition("/")[0]
        async with self._session.get(f"http://{host}/json/list") as answer:
            pages = [page for page in await answer.json() if page["type"] == "page"]
        self._socket = await self._session.ws_connect(
            pages[0]["webSocketDebuggerUrl"], max_msg_size=MESSAGE_BYTES_MAX, autoping=True
        )

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._do(self._ask(method, arguments))
        return answer

    async def _ask(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": arguments})
        while True:
            message = await self._socket.receive_json(timeout=WAIT_S)
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def _do(self, act: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(act)

    def _end(self) -> None:
        self._loop.close()
        below = descendants(self._process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        wait_gone(below, STOP_S)
