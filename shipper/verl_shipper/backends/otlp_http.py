"""One request to a collector, and what its answer means: OTLP/HTTP 1.10, https://opentelemetry.io/docs/specs/otlp/

    what happened                                      outcome
    200                                                None: it has everything
    200 with partial_success.rejected_spans            Reject: those of the request if all, else "one of them"
    400, 413, 422                                      Reject
    429, 502, 503, 504; no connection, no answer       Retry, after what Retry-After says
    408, 425, other 5xx                                Retry: the protocol would have the data dropped, we keep it
    401, 403, certificate not trusted, bad address     Park
    200 that is no OTLP; any other status              Park: this is not the server we look for

The protocol says that a partial success must not be sent again. The same request is not; its halves are, until the
refused span stands alone, and what was taken already comes again with the ids it had.

A collector that asks to wait (Retry-After) asks all runs of this process. Must not know: spans, batches. Nothing here
raises, and no reason shows the value of a header.
"""

from __future__ import annotations

import gzip
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from verl_shipper.backends.base import Outcome, Park, Reject, Retry
from verl_shipper.backends.otlp_settings import KEY_HINT
from verl_shipper.backends.road import Road
from verl_shipper.backends.sdk.http import outcome_of, retry_after_s
from verl_shipper.errors import ConfigError
from verl_shipper.route import shown
from verl_shipper_spool.redact import REDACTED, scrub

LOG = logging.getLogger(__name__)

PROTOBUF = "application/x-protobuf"
WAITS = frozenset({429, 502, 503, 504})
REFUSES = frozenset({400, 413, 422})
SAID_CHARS_MAX = 150
SECRET_CHARS_MIN = 6  # a shorter value may stand in any sentence
GZIP_LEVEL = 1  # token ids: six times faster than the usual 6, and 5 % longer

_wait_until_s: dict[str, float] = {}  # by address, monotonic; a lost update between threads costs one request


class Collector:
    """A session with one collector. Used by one thread at a time."""

    def __init__(self, url: str, road: Road, *, timeout_s: float, compressed: bool) -> None:
        self.url = url
        self._road = road
        self._timeout_s = timeout_s
        self._compressed = compressed
        self._session: Any = None
        self._has_warned = False

    def send(self, body: bytes, count: int, headers: Mapping[str, str]) -> Outcome | None:
        """Send a request with `count` spans; None when the collector has all of them."""
        import requests

        left_s = _wait_until_s.get(self.url, 0.0) - time.monotonic()
        if left_s > 0:
            return Retry("the collector asked to wait", left_s)
        sent = {**headers, "Content-Type": PROTOBUF, "User-Agent": "verl-shipper"}
        if self._compressed:
            body = gzip.compress(body, GZIP_LEVEL, mtime=0)
            sent["Content-Encoding"] = "gzip"
        try:
            answer = self._opened().post(
                self.url,
                body,
                headers=sent,
                timeout=self._timeout_s,
                allow_redirects=False,
                **self._road.arguments(self.url),
            )
        except ConfigError as error:
            return Park(error.line())
        except (requests.exceptions.InvalidURL, requests.exceptions.MissingSchema) as error:
            return Park(f"not an address: {_clean(str(error), headers)}")
        except (requests.exceptions.RequestException, ValueError, OSError) as error:
            culprit = self._road.culprit(error, self.url)
            if culprit is not None:
                return outcome_of(culprit)
            return Retry(f"no answer from {shown(self.url)}: {_clean(str(error), headers)}")
        return self._outcome(answer, count, headers)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _opened(self) -> Any:
        import requests

        if self._session is None:
            self._session = requests.Session()
            self._session.trust_env = False  # what the environment says is in the road; netrc would replace our key
        return self._session

    def _outcome(self, answer: Any, count: int, headers: Mapping[str, str]) -> Outcome | None:
        status, place = answer.status_code, shown(self.url)
        culprit = self._road.refusal(status, self.url)
        if culprit is not None:
            return outcome_of(culprit)
        if status == 200:
            return self._judged(answer, count, headers)
        said = _clean(answer.text if _is_text(answer) else answer.content.decode("utf-8", "ignore"), headers)
        told = f"{place} answered {status}{f': {said}' if said else ''}"
        if status in (401, 403):
            return Park(f"{told}; {KEY_HINT}")
        if status in REFUSES:
            return Reject(told)
        if status in WAITS or status in (408, 425) or (status >= 500 and status != 501):
            after_s = retry_after_s(answer.headers.get("Retry-After"), time.time())
            if after_s:
                _wait_until_s[self.url] = time.monotonic() + after_s
            return Retry(told, after_s)
        return Park(f"{told}; is it a collector for OTLP over HTTP?")

    def _judged(self, answer: Any, count: int, headers: Mapping[str, str]) -> Outcome | None:
        """A 200: all, some or none were taken."""
        try:
            rejected, said = partial_success(answer.headers.get("Content-Type", ""), answer.content)
        except ValueError:
            return Park(f"{shown(self.url)} answers 200, but not as a collector for OTLP over HTTP does")
        said = _clean(said, headers)
        if rejected > 0:
            what = f"{shown(self.url)} refused {min(rejected, count)} of {count} spans"
            return Reject(f"{what}{f': {said}' if said else ''}", range(count) if rejected >= count else None)
        if said and not self._has_warned:
            self._has_warned = True
            LOG.warning("%s takes all spans and says: %s", shown(self.url), said)
        return None


def partial_success(content_type: str, content: bytes) -> tuple[int, str]:
    """How many spans were refused, and the collector's words. Raises ValueError for an answer that is no OTLP."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    kind = content_type.partition(";")[0].strip().lower()
    if not content.strip():
        return 0, ""
    if kind == "application/json":
        told = json.loads(content)
        if not isinstance(told, dict):
            raise ValueError("not an answer to OTLP")
        partial = told.get("partialSuccess") or {}
        if not isinstance(partial, dict):
            raise ValueError("not an answer to OTLP")
        return int(partial.get("rejectedSpans") or 0), str(partial.get("errorMessage") or "")
    if kind.startswith("text/html"):
        raise ValueError("a page")
    try:
        found = ExportTraceServiceResponse.FromString(content)
    except DecodeError as error:
        raise ValueError("not an answer to OTLP") from error
    return found.partial_success.rejected_spans, found.partial_success.error_message


def _is_text(answer: Any) -> bool:
    kind = answer.headers.get("Content-Type", "")
    return kind.startswith("text/") or "json" in kind


def _clean(text: str, headers: Mapping[str, str]) -> str:
    """Words of a stranger in one line: short, printable, without what we sent as headers."""
    for value in headers.values():
        for secret in (value, value.rpartition(" ")[2]):
            if len(secret) >= SECRET_CHARS_MIN:
                text = text.replace(secret, REDACTED)
    printable = "".join(sign if sign.isprintable() else " " for sign in text)
    return scrub(" ".join(printable.split()))[:SAID_CHARS_MAX]
