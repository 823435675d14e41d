"""Faults that a test server commits, and the middleware that commits them.

    HANG        answers nothing until the rules change      BAD          400
    RESET       cuts the connection, applies nothing        REFUSED      401
    ERROR       500, applies nothing                        FORBIDDEN    403
    BUSY        503, applies nothing                        TIMEOUT      408
    LOST        applies, then answers 503                   TOO_LARGE    413
    SWALLOW     applies, then cuts the connection           RATE_LIMIT   429 with Retry-After
    SLOW        waits `slow_s`, then answers as usual

A rule says which requests meet a fault and how often. The first rule that fits a request decides. Every request is
noted with the fault it met. Must not know: any tracker.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from aiohttp import web


class Fault(enum.Enum):
    """What happens to a request."""

    HANG = "hang"
    RESET = "reset"
    ERROR = "error"
    BUSY = "busy"
    LOST = "lost"
    SWALLOW = "swallow"
    SLOW = "slow"
    BAD = "bad"
    REFUSED = "refused"
    FORBIDDEN = "forbidden"
    TIMEOUT = "timeout"
    TOO_LARGE = "too_large"
    RATE_LIMIT = "rate_limit"


STATUS = {
    Fault.ERROR: 500,
    Fault.BUSY: 503,
    Fault.BAD: 400,
    Fault.REFUSED: 401,
    Fault.FORBIDDEN: 403,
    Fault.TIMEOUT: 408,
    Fault.TOO_LARGE: 413,
    Fault.RATE_LIMIT: 429,
}
CONTROL = "/_control/"
ABORT = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close throws the connection away


@dataclass(frozen=True, slots=True)
class Rule:
    """Which requests meet `fault`. All given conditions must hold."""

    fault: Fault
    path: str = ""  # regular expression, searched in "METHOD path"
    contains: str = ""  # text that the body must contain
    above_bytes: int | None = None  # only bodies larger than this
    times: int | None = None  # how many requests in all; None: for ever
    each: int | None = None  # how many tries of every distinct (path, body)
    retry_after_s: float | None = None
    slow_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fault": self.fault.value}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Rule:
        return cls(**{**value, "fault": Fault(value["fault"])})


@dataclass(slots=True)
class Faults:
    """The rules in force, how often each was used, and every request that came in."""

    rules: list[Rule] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # set when these rules are over
    _used: Counter[int] = field(default_factory=Counter)
    _tries: Counter[str] = field(default_factory=Counter)

    def replace(self, rules: list[Rule]) -> None:
        self.rules = rules
        self.changed.set()
        self.changed = asyncio.Event()
        self._used.clear()
        self._tries.clear()

    def choose(self, method: str, path: str, body: bytes) -> Rule | None:
        """The rule that this request meets; counts it as used."""
        for number, rule in enumerate(self.rules):
            if self._fits(number, rule, f"{method} {path}", body):
                self._used[number] += 1
                return rule
        return None

    def _fits(self, number: int, rule: Rule, line: str, body: bytes) -> bool:
        if rule.path and not re.search(rule.path, line):
            return False
        if rule.contains and rule.contains.encode() not in body:
            return False
        if rule.above_bytes is not None and len(body) <= rule.above_bytes:
            return False
        if rule.times is not None and self._used[number] >= rule.times:
            return False
        if rule.each is not None:
            key = hashlib.sha256(f"{number} {line}\0".encode() + body).hexdigest()
            self._tries[key] += 1
            return self._tries[key] <= rule.each
        return True


def middleware(faults: Faults) -> Any:
    """aiohttp middleware that lets every request outside /_control/ meet the rules."""

    @web.middleware
    async def commit(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path.startswith(CONTROL):
            return await handler(request)
        body = await request.read()
        rule = faults.choose(request.method, request.path_qs, body)
        faults.requests.append(
            {
                "time_s": time.monotonic(),
                "method": request.method,
                "path": request.path_qs,
                "bytes": len(body),
                "fault": rule.fault.value if rule else None,
            }
        )
        return await handler(request) if rule is None else await _commit(rule, faults, request, handler)

    return commit


async def _commit(
    rule: Rule,
    faults: Faults,
    request: web.Request,
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> web.StreamResponse:
    match rule.fault:
        case Fault.HANG:
            await faults.changed.wait()
            return _cut(request)
        case Fault.RESET:
            return _cut(request)
        case Fault.SWALLOW:
            await handler(request)
            return _cut(request)
        case Fault.LOST:
            await handler(request)
            return _answer(503, rule)
        case Fault.SLOW:
            await asyncio.sleep(rule.slow_s)
            return await handler(request)
        case _:
            return _answer(STATUS[rule.fault], rule)


def _cut(request: web.Request) -> web.Response:
    """RST instead of an answer."""
    if request.transport is not None:
        connection = request.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
        request.transport.abort()
    return web.Response()


def _answer(status: int, rule: Rule) -> web.Response:
    headers = {} if rule.retry_after_s is None else {"Retry-After": f"{rule.retry_after_s:g}"}
    return web.json_response(
        {"code": status, "message": "scripted", "error": "scripted"}, status=status, headers=headers
    )
