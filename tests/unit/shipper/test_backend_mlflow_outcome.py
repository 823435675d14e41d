"""What an exception of the MLflow SDK means, and how a culprit is found in a refused request."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from verl_shipper.backends.base import Outcome, Park, Reject, Retry
from verl_shipper.backends.mlflow_outcome import Answer, RefusedError, classify
from verl_shipper.backends.mlflow_plan import deliver
from verl_shipper.backends.sdk.http import retry_after_s


class FakeMlflowError(Exception):
    """Has what MlflowException has."""

    def __init__(self, text: str, code: str = "INTERNAL_ERROR", status: int = 500) -> None:
        super().__init__(text)
        self.error_code = code
        self._status = status

    def get_http_status_code(self) -> int:
        return self._status


class RequestException(OSError):  # noqa: N818 - the name is the point
    """Stands in for the type of that name."""

    def __init__(self, text: str, response: object = None) -> None:
        super().__init__(text)
        self.response = response


class SSLCertVerificationError(OSError):
    """Stands in for the type of that name."""


class MissingSchema(RequestException, ValueError):  # noqa: N818 - the name is the point
    """Stands in for the type of that name."""


def caused(outer: BaseException, inner: BaseException) -> BaseException:
    outer.__cause__ = inner
    return outer


REFUSED = caused(FakeMlflowError("API request failed"), RequestException("Connection refused"))
OUTCOMES: list[tuple[BaseException, Answer | None, type[Outcome], str]] = [
    (REFUSED, None, Retry, "Connection refused"),
    (FakeMlflowError("timed out"), None, Retry, "timed out"),
    (FakeMlflowError("x"), Answer(500), Retry, "x"),
    (FakeMlflowError("x"), Answer(503), Retry, "x"),
    (FakeMlflowError("x"), Answer(408), Retry, "x"),
    (FakeMlflowError("x"), Answer(425), Retry, "x"),
    (FakeMlflowError("x"), Answer(429), Retry, "x"),
    (FakeMlflowError("x"), Answer(302), Park, "unexpected answer 302"),
    (REFUSED, Answer(302), Retry, "Connection refused"),
    (FakeMlflowError("(sqlite3.OperationalError) database is locked\n[SQL: …]", status=503), None, Retry, "locked"),
    (FakeMlflowError("x", "INVALID_PARAMETER_VALUE", 400), None, Reject, "x"),
    (FakeMlflowError("x", "INVALID_PARAMETER_VALUE", 400), Answer(400), Reject, "x"),
    (FakeMlflowError("x"), Answer(413), Reject, "x"),
    (FakeMlflowError("x"), Answer(422), Reject, "x"),
    (FakeMlflowError("x"), Answer(501), Reject, "x"),
    (FakeMlflowError("x", "UNAUTHENTICATED", 401), Answer(401), Park, "MLFLOW_TRACKING_TOKEN"),
    (FakeMlflowError("x", "PERMISSION_DENIED", 403), None, Park, "MLFLOW_TRACKING_TOKEN"),
    (FakeMlflowError("no run", "RESOURCE_DOES_NOT_EXIST", 404), Answer(404), Park, "removed at the tracker: no run"),
    (
        FakeMlflowError("run must be in the 'active' state", "INVALID_PARAMETER_VALUE", 400),
        Answer(400),
        Park,
        "removed",
    ),
    (FakeMlflowError("x", "ENDPOINT_NOT_FOUND", 404), Answer(404), Park, "is there an MLflow server"),
    (RequestException("x", SimpleNamespace(status_code=401)), None, Park, "key refused"),
    (RequestException("x", SimpleNamespace(status_code=502)), None, Retry, "x"),
    (caused(FakeMlflowError("x"), SSLCertVerificationError("self-signed")), None, Park, "certificate not trusted"),
    (MissingSchema("no scheme"), None, Park, "not an address"),
    (ModuleNotFoundError("No module named 'boto3'"), None, Park, "pip install"),
    (AttributeError("no log_spans"), None, Park, "upgrade"),
    (ValueError("Value out of range"), None, Reject, "out of range"),
    (TypeError("x"), None, Reject, "x"),
    (caused(FakeMlflowError("x"), OverflowError("too large")), None, Reject, "too large"),
    (PermissionError(errno.EACCES, "Permission denied"), None, Reject, "artifact store is not writable"),
    (OSError(errno.ENOSPC, "No space left on device"), None, Retry, "No space left"),
    (RuntimeError("who knows"), None, Retry, "who knows"),
]


@pytest.mark.parametrize(("error", "answer", "kind", "words"), OUTCOMES)
def test_what_happened_decides_the_outcome(
    error: BaseException, answer: Answer | None, kind: type[Any], words: str
) -> None:
    outcome: Any = classify(error, answer)

    assert type(outcome) is kind
    assert words in outcome.reason
    assert "\n" not in outcome.reason


def test_retry_after_is_honoured() -> None:
    assert classify(FakeMlflowError("x"), Answer(429, 7.0)) == Retry("x", 7.0)


def test_an_earlier_good_answer_does_not_hide_an_error() -> None:
    assert isinstance(classify(REFUSED, Answer(200)), Retry)


def test_no_reason_shows_a_secret() -> None:
    outcome = classify(FakeMlflowError("API request to http://me:SENTINEL@host/api failed, Bearer SENTINEL123"), None)

    assert "SENTINEL" not in str(outcome)
    assert "host/api" in str(outcome)


def test_reasons_are_short() -> None:
    assert len(str(classify(FakeMlflowError("x" * 100_000)))) < 500


def test_an_endless_chain_of_causes_ends() -> None:
    one, two = FakeMlflowError("one"), FakeMlflowError("two")
    one.__cause__, two.__cause__ = two, one

    assert isinstance(classify(one), Retry)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("1e9", 3600.0),
        ("Thu, 01 Jan 1970 00:02:00 GMT", 20.0),
        ("soon", None),
        ("nan", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_may_be_seconds_or_a_date(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, now_s=100.0) == seconds


# Halving


def tracker_that_refuses(bad: set[int], sent: list[Sequence[int]]) -> Any:
    def send(items: Sequence[int]) -> None:
        sent.append(items)
        poison = bad.intersection(items)
        if poison:
            raise RefusedError(Reject(f"bad {min(poison)}"))

    return send


def test_refused_items_are_found_by_halving_and_the_others_get_through() -> None:
    sent: list[Sequence[int]] = []

    refused = deliver(tracker_that_refuses({15, 37}, sent), range(100))

    assert refused == {15: "bad 15", 37: "bad 37"}
    assert len(sent) < 40
    assert {i for items in sent for i in items if not {15, 37}.intersection(items)} == set(range(100)) - {15, 37}


def test_a_refusal_that_holds_for_all_is_not_halved() -> None:
    sent: list[Sequence[int]] = []

    def send(items: Sequence[int]) -> None:
        sent.append(items)
        raise RefusedError(Reject("no traces here"), is_for_all=True)

    assert deliver(send, range(50)) == dict.fromkeys(range(50), "no traces here")
    assert len(sent) == 1


def test_halving_stops_at_the_deadline_and_leaves_the_rest_to_the_lane() -> None:
    sent: list[Sequence[int]] = []

    with pytest.raises(RefusedError) as caught:
        deliver(tracker_that_refuses({15}, sent), range(100), deadline_s=0.0)

    assert caught.value.outcome == Reject("bad 15", None)
    assert len(sent) == 1


def test_an_outage_is_not_halved() -> None:
    def send(_items: Sequence[int]) -> None:
        raise RefusedError(Retry("down"))

    with pytest.raises(RefusedError, match="down"):
        deliver(send, range(50))
