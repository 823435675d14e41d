"""A gateway on the loopback between SwanLab's package and the server, inside the package's own process.

    package ── http://127.0.0.1:PORT ──▶ gateway ── the real way: TLS, proxy ──▶ server

The package gives a batch up at any 4xx, sends it again unseen when an answer was lost, and stamps its own time. Here
every write passes and is judged by its real answer:

    2xx                       exactly the points in the body are acknowledged
    5xx, time-out, reset      may be applied or not: nothing is let through until `settle_s` later, and then only what
                              the server's summary does not show (steps of a key only ever rise)
    connection refused        not sent; the package tries again
    401, 403                  the lane is told to park and ends this process
    404 of the run            the same
    408, 429                  nothing is sent before Retry-After is over
    400, 413, 422             halved until single points are refused; the others are delivered
    what the package sees     200, or 503: it keeps its data

Points carry the wall time of their capture instead of the package's. Uploads go to signed addresses; those are
replaced by addresses here, so that an upload is judged and tried again as well.

Source of the paths: swanlab 0.10, sdk/internal/core_python. Must not know: batches. Nothing is raised into the package.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import requests

from verl_shipper.backends.road import Road
from verl_shipper.backends.swanlab_api import CLOCK_SLACK_S, seconds_of, tops_of
from verl_shipper.backends.swanlab_ledger import Ledger, Point
from verl_shipper.backends.swanlab_upstream import UPLOAD_TIMEOUT_S, AgainError, Upstream, is_good, line_of, said

PAUSE_S_MIN = 0.2
WAIT_IN_CALL_S_MAX = 15.0  # the package itself waits 60 s for an answer
SIGNED_MAX = 4096
HOPELESS_POINTS = 32  # so many refused one by one and none taken: it is not the points
PASSED_ON = ("authorization", "content-type", "cookie", "x-swanlab-sdk-version", "user-agent", "accept")
AGAIN = (503, b'{"code": "Try_Again", "message": "kept by verl-shipper"}')
DONE = (200, b"{}")
Reply = tuple[int, bytes]


class RefusedEntriesError(Exception):
    """The server does not take this body: 400, 413, 422."""


class Gateway:
    """One server for one run. `url` is what the package is told to talk to."""

    def __init__(self, base_url: str, settle_s: float, ledger: Ledger, road: Road) -> None:
        self._upstream = Upstream(base_url, ledger, road)
        self._settle_s = settle_s
        self._ledger = ledger
        self._write_lock = threading.Lock()
        self._cookie = ""
        self._created_s = 0
        self._settled: dict[tuple[str, str], int] = {}  # last index of every kind and key that was taken or refused
        self._signed: dict[str, tuple[str, str]] = {}  # address and path of an upload, by its number
        self._numbers = itertools.count()
        self._bad_files: dict[str, str] = {}
        self.tops: dict[str, int] = {}  # what the package was told about a run that it resumed
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_class(self.answer))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="gateway", daemon=True).start()

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        """What the package gets for a request."""
        try:
            hold_s = self._ledger.hold_s()
            if hold_s > WAIT_IN_CALL_S_MAX:
                return AGAIN
            time.sleep(hold_s)
            if path.startswith("/upload/"):
                return self._upload(path.rpartition("/")[2], headers, body)
            self._cookie = headers.get("cookie", self._cookie)
            if (method, path) == ("POST", "/api/house/metrics"):
                return self._metrics(headers, json.loads(body))
            if path.endswith("/profile") and body and json.loads(body).get("config") == {}:
                # Of a writer that was told no configuration; it would wipe that of the one that was.
                self._ledger.config_state = "taken"
                return DONE
            if method == "POST" and path.endswith("/series"):
                return self._series(path, headers, json.loads(body))
            return self._other(method, path, headers, body)
        except AgainError:
            return AGAIN
        except Exception as error:  # noqa: BLE001 - whatever it was, the package must keep its data
            self._ledger.trouble("down", f"{type(error).__name__}: {line_of(error)}")
            return AGAIN

    # -- writes of data ----------------------------------------------------------------------------------------------

    def _metrics(self, headers: dict[str, str], body: dict[str, Any]) -> Reply:
        if body["type"] == "log":
            return DONE  # lines of a terminal; ours has nothing to say
        with self._write_lock:
            began_s = time.monotonic()
            while True:
                try:
                    self._deliver(headers, body)
                    break
                except AgainError:
                    # With answers lost one after the other, the package's own pauses would add up.
                    spent_s = time.monotonic() - began_s + self._settle_s
                    if not self._upstream.unsure_s or self._ledger.hold_s() or spent_s > WAIT_IN_CALL_S_MAX:
                        raise
        self._ledger.well()
        return DONE

    def _deliver(self, headers: dict[str, str], body: dict[str, Any]) -> None:
        kind = body["type"]
        # Steps of a key only ever rise, so the last one that was settled tells for all.
        entries = [each for each in body["metrics"] if each["index"] > self._settled.get((kind, each["key"]), -1)]
        if self._upstream.unsure_s:
            entries = self._without_applied(kind, entries, body)
        if kind == "media":
            entries = self._without_bad_files(entries)
        for entry in entries:
            time_ns = self._ledger.time_ns(_point(kind, entry))
            if time_ns is not None:
                entry["create_time"] = stamp(time_ns)

        def post(part: list[dict[str, Any]]) -> None:
            self._post("/api/house/metrics", headers, {**body, "metrics": part})
            self._ledger.took(_point(kind, each) for each in part)
            self._settled.update(((kind, each["key"]), each["index"]) for each in part)

        self._halve(entries, post, lambda entry, reason: self._ledger.refuse([_point(kind, entry)], reason))

    def _without_applied(self, kind: str, entries: list[dict[str, Any]], body: dict[str, Any]) -> list[dict[str, Any]]:
        """Those that the server does not have, after a write of which nobody knows whether it was applied."""
        left_s = self._upstream.unsure_s + self._settle_s - time.monotonic()
        if left_s > WAIT_IN_CALL_S_MAX:
            raise AgainError
        time.sleep(max(left_s, PAUSE_S_MIN))
        path = f"/api/house/metrics/summaries/{body['projectId']}/{body['experimentId']}"
        question = {"all": True, "createdAt": max(self._created_s - CLOCK_SLACK_S, 0)}
        answer = self._upstream.send("GET", path, {"cookie": self._cookie}, None, params=question)
        self._upstream.judge(answer)
        tops = tops_of(answer.json())
        applied = [each for each in entries if each["index"] <= tops.get(each["key"], -1)]
        self._ledger.took(_point(kind, each) for each in applied)
        self._upstream.unsure_s = 0.0
        return [each for each in entries if each["index"] > tops.get(each["key"], -1)]

    def _without_bad_files(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those whose files the server has."""
        whole = []
        for entry in entries:
            bad = next((self._bad_files[path] for path in entry["data"] if path in self._bad_files), None)
            if bad is None:
                whole.append(entry)
            else:
                self._ledger.refuse([("media", entry["key"], entry["index"])], bad)
        return whole

    def _halve(
        self,
        entries: list[dict[str, Any]],
        post: Callable[[list[dict[str, Any]]], None],
        refuse: Callable[[dict[str, Any], str], None],
    ) -> None:
        """Deliver all entries but those that the server refuses one by one. In order: parts in front come first."""
        parts = [entries] if entries else []
        delivered = 0
        refused: list[tuple[dict[str, Any], str]] = []
        try:
            while parts:
                part = parts.pop()
                try:
                    post(part)
                    delivered += len(part)
                except RefusedEntriesError as error:
                    if len(part) > 1:
                        half = len(part) // 2
                        parts += [part[half:], part[:half]]
                        continue
                    refused.append((part[0], str(error)))
                    if not delivered and len(refused) >= HOPELESS_POINTS:
                        refused = []
                        self._ledger.trouble("gone", f"the server refuses every point: {error}")
                        raise AgainError from error
        finally:
            for entry, reason in refused:
                refuse(entry, reason)

    def _series(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Reply:
        def post(part: list[dict[str, Any]]) -> None:
            self._post(path, headers, {**body, "series": part}, is_data=False)

        # A key without its series has no chart of its own making; its points say themselves whether they are taken.
        self._halve(body["series"], post, lambda _entry, _reason: None)
        return DONE

    def _post(self, path: str, headers: dict[str, str], body: dict[str, Any], *, is_data: bool = True) -> None:
        content = json.dumps(body).encode()
        answer = self._upstream.send("POST", path, headers, content, is_data=is_data)
        if answer.status_code in (400, 413, 422):
            raise RefusedEntriesError(f"SwanLab answered {answer.status_code}: {said(answer)}")
        self._upstream.judge(answer, is_data=is_data)

    # -- uploads -----------------------------------------------------------------------------------------------------

    def _sign(self, body: bytes, answer: requests.Response) -> Reply:
        """The signed addresses, replaced by ours."""
        paths, urls = json.loads(body)["paths"], answer.json().get("urls")
        if not isinstance(urls, list) or len(urls) != len(paths):
            self._ledger.trouble("down", "SwanLab gave no addresses to upload to")
            raise AgainError
        ours = []
        for path, url in zip(paths, urls, strict=True):
            number = str(next(self._numbers))
            self._signed[number] = (url, path)
            ours.append(f"{self.url}/upload/{number}")
        for number in list(self._signed)[:-SIGNED_MAX]:
            del self._signed[number]
        return 200, json.dumps({"urls": ours}).encode()

    def _upload(self, number: str, headers: dict[str, str], body: bytes) -> Reply:
        if number not in self._signed:
            return AGAIN
        url, path = self._signed[number]
        kept = {"content-type": headers.get("content-type", "application/octet-stream")}
        answer = self._upstream.send("PUT", url, kept, body, timeout=UPLOAD_TIMEOUT_S)
        if is_good(answer):
            del self._signed[number]
            return DONE
        if answer.status_code in (400, 413, 422):
            self._bad_files[path] = f"the upload was answered {answer.status_code}: {said(answer)}"
            return DONE
        if answer.status_code in (408, 429):
            self._upstream.judge(answer)
        self._ledger.trouble("down", f"an upload was answered {answer.status_code}: {said(answer)}")
        return AGAIN

    # -- everything else ---------------------------------------------------------------------------------------------

    def _other(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        """Requests that may be repeated."""
        answer = self._upstream.send(method, path, headers, body)
        status = answer.status_code
        is_login = path == "/api/login/api_key"
        is_question = method == "GET" or path.endswith(("/heartbeat", "/api/login/api_key"))
        if status in (401, 403) and is_login:
            # At the beginning the package has to see it, or it would try for long.
            self._ledger.trouble("key", f"key refused ({status}) by {self._upstream.base_url}")
            return status, answer.content
        if status == 404 and not is_question and not path.startswith("/api/projects/"):
            self._ledger.trouble(
                "gone", f"{self._upstream.base_url} does not know the run any more (404): {said(answer)}"
            )
            raise AgainError
        if status in (401, 403, 408, 429) or status >= 500:
            self._upstream.judge(answer)
        if is_good(answer):
            self._look_at(method, path, body, answer)
            if path == "/api/resources/presigned/put":
                return self._sign(body, answer)
        elif path.endswith("/profile") and b'"config"' in body[:16]:
            self._ledger.config_state = "refused"
        return status, answer.content

    def _look_at(self, method: str, path: str, body: bytes, answer: requests.Response) -> None:
        """Facts that pass by."""
        if method == "POST" and path.endswith("/experiment"):
            told = answer.json()
            self._created_s = seconds_of(told.get("createdAt") or json.loads(body).get("createdAt"))
        elif method == "GET" and "/house/metrics/summaries/" in path:
            self.tops = tops_of(answer.json())
        elif path.endswith("/profile") and "config" in json.loads(body):
            self._ledger.config_state = "taken"
        elif path.endswith("/state"):
            self._ledger.end_state = str(json.loads(body).get("state"))


def _point(kind: str, entry: dict[str, Any]) -> Point:
    return kind, entry["key"], entry["index"]


def stamp(time_ns: int) -> str:
    """A time as SwanLab writes it, with nanoseconds."""
    seconds, rest = divmod(time_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


def _handler_class(answer: Callable[[str, str, dict[str, str], bytes], Reply]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _serve(self) -> None:
            is_chunked = "chunked" in self.headers.get("Transfer-Encoding", "")
            body = self._chunks() if is_chunked else self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items() if name.lower() in PASSED_ON}
            status, content = answer(self.command, self.path, headers, body)
            with contextlib.suppress(OSError):
                self.send_response_only(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def _chunks(self) -> bytes:
            content = b""
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _serve  # noqa: N815 - names of http.server

        def log_message(self, *_: object) -> None:
            pass

    return Handler
