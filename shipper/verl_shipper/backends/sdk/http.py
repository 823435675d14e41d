"""Questions to a tracker's server by plain HTTP, and what an answer means.

    what happened                                outcome
    no connection, time-out, broken answer       Retry
    408, 425, 429, 5xx                           Retry, after what Retry-After says
    401, 403                                     Park: the key is refused
    certificate not trusted, bad URL, 407        Park: the operator must look
    other statuses                               Park: this is not the server we look for

A question changes nothing at the server and is never anybody's data: nothing here rejects a record. Proxies and
certificates: road.py. Must not know: which tracker. On failure: RefusedError with the outcome.
"""

from __future__ import annotations

import email.utils
import time
from typing import Any

from verl_shipper.backends.base import Outcome, Park, Retry
from verl_shipper.backends.road import Culprit, Road
from verl_shipper.errors import ConfigError
from verl_shipper_spool.redact import scrub

TIMEOUT_S = 15.0
REASON_CHARS_MAX = 300
RETRY_AFTER_S_MAX = 3600.0


class RefusedError(Exception):
    """The question was not answered; `outcome` says what that means. `status` is HTTP's, 0 without an answer."""

    def __init__(self, outcome: Outcome, status: int = 0) -> None:
        super().__init__(str(outcome))
        self.outcome = outcome
        self.status = status


class Http:
    """A session with one server."""

    def __init__(self, base_url: str, road: Road, *, timeout_s: float = TIMEOUT_S) -> None:
        import requests

        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._session = requests.Session()
        self._road = road

    def ask(self, method: str, path: str, *, key_hint: str, **arguments: Any) -> Any:
        """The JSON of a 2xx answer. `key_hint` is told when the key is refused. Raises RefusedError."""
        import requests

        url = self.base_url + path
        try:
            way = self._road.arguments(url)
            answer = self._session.request(method, url, timeout=self._timeout_s, **way, **arguments)
            if answer.ok:
                return answer.json() if answer.content else {}
        except ConfigError as error:
            raise RefusedError(Park(error.line())) from error
        except (requests.exceptions.InvalidURL, requests.exceptions.MissingSchema) as error:
            raise RefusedError(Park(f"not an address: {_line(error)}")) from error
        except (requests.exceptions.RequestException, ValueError) as error:
            culprit = self._road.culprit(error, url)
            if culprit is not None:
                raise RefusedError(outcome_of(culprit)) from error
            raise RefusedError(Retry(f"no answer from {self.base_url}: {_line(error)}")) from error
        culprit = self._road.refusal(answer.status_code, url)
        if culprit is not None:
            raise RefusedError(outcome_of(culprit))
        raise RefusedError(self._outcome(answer, key_hint), answer.status_code)

    def close(self) -> None:
        self._session.close()

    def _outcome(self, answer: Any, key_hint: str) -> Outcome:
        status = answer.status_code
        said = scrub(" ".join(answer.text.split()))[: REASON_CHARS_MAX // 2]
        if status in (401, 403):
            return Park(f"key refused ({status}) by {self.base_url}; {key_hint}")
        if status in (408, 425, 429) or status >= 500:
            return Retry(
                f"{self.base_url} answered {status}: {said}",
                retry_after_s(answer.headers.get("Retry-After"), time.time()),
            )
        return Park(f"{self.base_url} answered {status}, is it the right server? {said}")


def outcome_of(culprit: Culprit) -> Outcome:
    """What a hindrance on the way means for whatever is to pass it."""
    return Park(culprit.text) if culprit.is_lasting else Retry(culprit.text)


def retry_after_s(header: str | None, now_s: float) -> float | None:
    """Seconds that a Retry-After header asks for: it holds a number or a date."""
    if not header:
        return None
    try:
        wait_s = float(header)
    except ValueError:
        try:
            wait_s = email.utils.parsedate_to_datetime(header).timestamp() - now_s
        except (TypeError, ValueError):
            return None
    return min(max(wait_s, 0.0), RETRY_AFTER_S_MAX) if wait_s == wait_s else None  # noqa: PLR0124 - NaN


def _line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return scrub(text)[:REASON_CHARS_MAX]
