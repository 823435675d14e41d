"""The real server behind the gateway: one request at a time, and what a bad answer means.

    no answer, 5xx            trouble `down`; a write of data is unsure then, unless there was no connection
    401, 403                  trouble `key`
    407, certificate          trouble `road`: the operator must look
    408, 425, 429             trouble `rate`: nothing is sent before Retry-After is over
    else but 2xx              trouble `gone`: run deleted, or not the server we look for

Proxies and certificates: road.py. Must not know: points.
On failure: AgainError; the trouble is in the ledger.
"""

from __future__ import annotations

import time
from typing import Any

import requests
import urllib3.exceptions
from requests.cookies import RequestsCookieJar

from verl_shipper.backends.road import Culprit, Road
from verl_shipper.backends.sdk.http import retry_after_s
from verl_shipper.backends.swanlab_ledger import Ledger
from verl_shipper.errors import ConfigError
from verl_shipper_spool.redact import scrub

TIMEOUT_S = (10.0, 30.0)  # connect, read; the package itself waits 60 s
UPLOAD_TIMEOUT_S = (10.0, 50.0)
PAUSE_S = 5.0  # after a 429 or 408 that names no time


class AgainError(Exception):
    """The package is to keep what it has and to come again."""


class Upstream:
    """One server. `unsure_s`: monotonic time of the last write that may or may not have been applied; 0: none."""

    def __init__(self, base_url: str, ledger: Ledger, road: Road) -> None:
        self.base_url = base_url
        self.unsure_s = 0.0
        self._ledger = ledger
        self._session = requests.Session()
        self._session.cookies = _NoCookies()
        self._road = road

    def send(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes | None,
        *,
        is_data: bool = False,
        timeout: tuple[float, float] = TIMEOUT_S,
        params: Any = None,
    ) -> requests.Response:
        """The server's answer, whatever it is. `path` may be an address of another host."""
        url = path if "://" in path else self.base_url + path
        try:
            answer = self._session.request(
                method,
                url,
                data=body,
                headers=headers,
                params=params,
                timeout=timeout,
                auth=_as_it_is,
                allow_redirects=False,
                **self._road.arguments(url),
            )
        except ConfigError as error:
            self._blame(Culprit(error.line(), is_lasting=True))
            raise AgainError from error
        except requests.exceptions.RequestException as error:
            culprit = self._road.culprit(error, url)
            if is_data and culprit is None and _was_sent(error):
                self.unsure_s = time.monotonic()
            self._blame(culprit or Culprit(f"no answer from {self.base_url}: {line_of(error)}", is_lasting=False))
            raise AgainError from error
        culprit = self._road.refusal(answer.status_code, url)
        if culprit is not None:
            self._blame(culprit)
            raise AgainError
        return answer

    def _blame(self, culprit: Culprit) -> None:
        self._ledger.trouble("road" if culprit.is_lasting else "down", culprit.text)

    def judge(self, answer: requests.Response, *, is_data: bool = False) -> None:
        """Raise AgainError for anything but a good answer, and note why."""
        status = answer.status_code
        if is_good(answer):
            return
        reason = f"{self.base_url} answered {status}: {said(answer)}"
        if status in (401, 403):
            self._ledger.trouble("key", f"key refused: {reason}")
        elif status in (408, 425, 429):
            after_s = retry_after_s(answer.headers.get("Retry-After"), time.time())
            self._ledger.trouble("rate", reason, PAUSE_S if after_s is None else after_s)
        elif status >= 500:
            if is_data:
                self.unsure_s = time.monotonic()
            self._ledger.trouble("down", reason)
        else:
            self._ledger.trouble("gone", reason)
        raise AgainError


class _NoCookies(RequestsCookieJar):
    """The package keeps its own."""

    def set_cookie(self, cookie: Any, *args: Any, **kwargs: Any) -> None:
        pass


def _was_sent(error: BaseException) -> bool:
    """Whether the server may have seen the request: not when there was no connection."""
    seen: list[BaseException] = [error]
    while seen:
        each = seen.pop()
        if isinstance(each, requests.exceptions.ConnectTimeout | urllib3.exceptions.NewConnectionError):
            return False
        seen += [part for part in (*each.args, getattr(each, "reason", None)) if isinstance(part, BaseException)]
    return True


def is_good(answer: requests.Response) -> bool:
    """2xx and nothing else: who is sent on to another place has delivered nothing."""
    return 200 <= answer.status_code < 300


def _as_it_is(request: Any) -> Any:
    """`requests` would put netrc's password into the header that carries the key."""
    return request


def said(answer: requests.Response) -> str:
    return scrub(" ".join(answer.text.split()))[:150]


def line_of(error: BaseException) -> str:
    return scrub((str(error).strip().splitlines() or [type(error).__name__])[0])[:200]
