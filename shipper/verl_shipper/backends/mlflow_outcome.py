"""What an exception of the MLflow SDK means for a batch. Pure: exception and answer in, Outcome out.

    what happened                                           outcome
    no connection, time-out, broken answer                  Retry
    408, 409, 425, 429, 5xx, database locked                Retry, after what Retry-After says
    database damaged, here or behind a server               Retry: MLflow calls it a bad request, which it is not
    401, 403                                                Park: the key is refused
    run or experiment deleted or missing                    Park: somebody removed it
    400, 413, 422, 501, value that the client refuses       Reject
    artifact folder of the server that is not ours          Reject, so that metrics go on
    other statuses, certificate not trusted, bad URL        Park: this is not the server we look for
    a package that is not installed or too old              Park
    anything else                                           Retry

The SDK wraps everything in MlflowException, mostly without a status; therefore the whole chain of causes is read, and
the HTTP answer that was seen last on this thread (mlflow_http.py) has the last word.

Must not know: what was sent. Never raises, never shows a secret.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from verl_shipper.backends.base import Outcome, Park, Reject, Retry
from verl_shipper_spool.redact import scrub

REASON_CHARS_MAX = 300
RETRY_STATUSES = frozenset({408, 409, 425, 429})
REJECT_STATUSES = frozenset({400, 413, 422, 501})
KEY_HINT = "set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"

GONE = "must be in the 'active' state"
DAMAGED = re.compile(r"(?:\w+: )?\((?:\w+\.)+DatabaseError\)")  # as SQLAlchemy says it, behind MLflow's error code


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer of the tracker: its status, and its Retry-After in seconds."""

    status: int
    retry_after_s: float | None = None


class RefusedError(Exception):
    """A call to the tracker failed; `outcome` says what that means.

    `status` is HTTP's (0: no answer), `code` MLflow's own. `is_for_all`: no part of the request would fare better.
    """

    def __init__(self, outcome: Outcome, *, status: int = 0, code: str = "", is_for_all: bool = False) -> None:
        super().__init__(str(outcome))
        self.outcome = outcome
        self.status = status
        self.code = code
        self.is_for_all = is_for_all


def classify(error: BaseException, answer: Answer | None = None) -> Outcome:
    """The outcome of a call that ended in `error`. `answer`: the last HTTP answer of the call, if there was one."""
    links = chain(error)
    reason = reason_of(links)
    if DAMAGED.match(str(error)):
        return Retry(reason)
    early = _by_type(links, reason)
    if early is not None:
        return early
    status = answer.status if answer is not None and answer.status >= 300 else status_of(links)
    if code_of(error) == "RESOURCE_DOES_NOT_EXIST" or GONE in str(error):
        return Park(f"removed at the tracker: {reason}")
    if status in (401, 403):
        return Park(f"key refused ({status}): {reason}; {KEY_HINT}")
    if status in REJECT_STATUSES:
        return Reject(reason)
    if status in RETRY_STATUSES or status >= 500 or status == 0:
        return Retry(reason, answer.retry_after_s if answer is not None else None)
    return Park(f"unexpected answer {status}, is there an MLflow server? {reason}")


def chain(error: BaseException) -> list[BaseException]:
    """`error` and what caused it, outermost first."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or link.__context__
    return links


def code_of(error: BaseException) -> str:
    """MLflow's own error code, empty when there is none."""
    code = getattr(error, "error_code", "")
    return code if isinstance(code, str) else ""


def status_of(links: list[BaseException]) -> int:
    """The HTTP status behind an error, 0 when there is none to be found."""
    for link in links:
        response = getattr(link, "response", None)
        status = getattr(response, "status_code", None)
        if isinstance(status, int):
            return status
    tell = getattr(links[0], "get_http_status_code", None)
    return int(tell()) if callable(tell) else 0


def reason_of(links: list[BaseException]) -> str:
    """One line for a person: what was said first, and at the bottom."""
    texts = [_line(link) for link in (links[0], links[-1])]
    text = texts[0] if texts[1] in texts[0] else f"{texts[0]}: {texts[1]}"
    return text if len(text) <= REASON_CHARS_MAX else f"{text[: REASON_CHARS_MAX - 1]}…"


def _line(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return scrub(first)[: REASON_CHARS_MAX // 2]


def _by_type(links: list[BaseException], reason: str) -> Outcome | None:
    """What the types in the chain say by themselves. By name: this module does not import the SDK."""
    names = {kind.__name__ for link in links for kind in type(link).__mro__}
    if "ImportError" in names or isinstance(links[0], AttributeError | NotImplementedError):
        return Park(f"{reason}; install or upgrade what is missing, for example pip install 'verl-shipper[mlflow]'")
    if "SSLCertVerificationError" in names or "CERTIFICATE_VERIFY_FAILED" in str(links[0]):
        return Park(f"certificate not trusted: {reason}; see MLFLOW_TRACKING_SERVER_CERT_PATH")
    if names & {"InvalidUrlException", "InvalidURL", "MissingSchema", "InvalidSchema"}:
        return Park(f"not an address: {reason}")
    if names & {"NoCredentialsError", "DefaultCredentialsError"}:
        return Park(f"no credentials for the artifact store: {reason}")
    if "RequestException" in names:
        # Without an answer, whatever answers came before it: the connection is what failed.
        has_answer = any(getattr(link, "response", None) is not None for link in links)
        return None if has_answer else Retry(reason)
    if any(isinstance(link, OSError) and link.errno in (errno.EACCES, errno.EPERM, errno.EROFS) for link in links):
        return Reject(f"the artifact store is not writable from here: {reason}")
    if isinstance(links[0], ValueError | TypeError) or "OverflowError" in names:
        return Reject(reason)
    return None
