"""The MLflow SDK, tamed: loaded late, silent, without retries of its own, and with its HTTP answers in sight.

The lane decides about retries, so every call of the SDK is tried once, within `timeout_s`. Whatever is wrong comes
out of `Tracker.ask` as RefusedError with the Outcome inside. The SDK hides status and Retry-After of most answers;
they are read off its own session, and noted per thread. A server that asks to wait (Retry-After) asks all runs of
this process: until then their calls are refused before they are made.

Must not know: records, batches. On failure: RefusedError.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

from verl_shipper.backends.base import Outcome, Park, Reject, Retry
from verl_shipper.backends.mlflow_outcome import Answer, RefusedError, classify, code_of
from verl_shipper.backends.mlflow_spans import request_of
from verl_shipper.backends.road import Road, road_of
from verl_shipper.backends.sdk.http import outcome_of, retry_after_s
from verl_shipper.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_S = 15.0
CERTIFICATE, INSECURE = "MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_INSECURE_TLS"
OTLP_PATH = "/v1/traces"
NO_SUCH_PLACE = frozenset({404, 405, 501})

_seen = threading.local()
_wait_until_s: dict[str, float] = {}  # by URI, monotonic; a lost update between threads costs one request
_preparing = threading.Lock()


class Tracker:
    """One tracking server or database. `open` first."""

    def __init__(
        self, uri: str, road: Road, *, timeout_s: float = TIMEOUT_S, artifact_location: str | None = None
    ) -> None:
        self.uri = uri
        self.road = road
        self.is_http = urlsplit(uri).scheme in ("http", "https")
        self.timeout_s = timeout_s
        self.artifact_location = artifact_location or default_artifact_location(uri)
        self.client: Any = None

    def open(self) -> None:
        """Load the SDK and make its client; a database is created here when it does not exist."""
        self.client = self.ask(self._new_client)

    def ask(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(*args, **kwargs)`, one call of the SDK. Raises RefusedError for whatever goes wrong in it."""
        left_s = _wait_until_s.get(self.uri, 0.0) - time.monotonic()
        if left_s > 0:
            raise RefusedError(Retry("the server asked to wait", left_s), status=429)
        _seen.answer = None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            answer: Answer | None = _seen.answer
            status = answer.status if answer is not None else 0
            if answer is not None and answer.retry_after_s:
                _wait_until_s[self.uri] = time.monotonic() + answer.retry_after_s
            raise RefusedError(self._outcome(error, answer), status=status, code=code_of(error)) from error

    def _outcome(self, error: Exception, answer: Answer | None) -> Outcome:
        """What an error means: proxy, certificate and name lookup are told apart from the tracker's own refusals."""
        if isinstance(error, ConfigError):
            return Park(error.line())
        culprit = self.road.refusal(answer.status if answer is not None else 0, self.uri) if self.is_http else None
        if culprit is None and self.is_http and (answer is None or answer.status < 300):
            culprit = self.road.culprit(error, self.uri)
        return outcome_of(culprit) if culprit is not None else classify(error, answer)

    def send_spans(self, spans: list[Any], experiment_id: str, run_id: str) -> None:
        """Send OpenTelemetry spans and link the traces whose root is among them to the run."""
        try:
            self.ask(self._post_spans if self.is_http else self._store_spans, spans, experiment_id, run_id)
        except RefusedError as refused:
            if refused.status in NO_SUCH_PLACE and refused.code != "RESOURCE_DOES_NOT_EXIST":
                raise RefusedError(Reject("this server takes no traces, MLflow 3.4 does"), is_for_all=True) from refused
            raise

    def _new_client(self) -> Any:
        with _preparing:
            prepare_environment(self.timeout_s, self.artifact_location, self.road.environment(self.uri))
            authorities = self.road.authorities(self.uri) if self.road.ca_file else None
            if authorities is not None:
                os.environ[CERTIFICATE] = authorities
            from mlflow.tracking import MlflowClient

            silence()
            watch_answers()
            return MlflowClient(tracking_uri=self.uri)

    def _post_spans(self, spans: list[Any], experiment_id: str, run_id: str) -> None:
        from mlflow.utils.credentials import get_default_host_creds
        from mlflow.utils.rest_utils import http_request, verify_rest_response

        headers = {
            "Content-Type": "application/x-protobuf",
            "x-mlflow-experiment-id": experiment_id,
            "x-mlflow-run-id": run_id,
        }
        body = request_of(spans).SerializeToString()
        creds = get_default_host_creds(self.uri)
        response = http_request(creds, OTLP_PATH, "POST", data=body, extra_headers=headers)
        verify_rest_response(response, OTLP_PATH)

    def _store_spans(self, spans: list[Any], experiment_id: str, run_id: str) -> None:
        from mlflow.entities import Span
        from mlflow.tracing.client import TracingClient

        entities = [Span.from_otel_proto(span) for span in spans]
        TracingClient(tracking_uri=self.uri).log_spans(experiment_id, entities)
        roots = [entity.trace_id for entity in entities if entity.parent_id is None]
        if roots:
            self.client.link_traces_to_run(roots, run_id)


def mlflow_road(settings: Mapping[str, Any]) -> Road:
    """The way to MLflow, whose own variables count beside ours. Raises ConfigError for what contradicts itself."""
    road = road_of("mlflow", settings)
    if road.ca_file and os.environ.get(INSECURE, "").lower() in ("1", "true"):
        hint = f"unset {INSECURE}"
        raise ConfigError(f"{INSECURE} forbids to verify what ca_file is for", where=f"{road.where}.ca_file", hint=hint)
    own = os.environ.get(CERTIFICATE) or ""
    return replace(road, base_files=(own,)) if road.ca_file and own else road


def prepare_environment(timeout_s: float, artifact_location: str | None, road: Mapping[str, str]) -> None:
    """What the SDK reads from the environment of the lane's process. The road and the first four are ours to decide."""
    os.environ.update(road)
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(int(timeout_s), 1))
    os.environ["MLFLOW_ENABLE_ASYNC_LOGGING"] = "false"
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    if artifact_location is not None:
        # Otherwise a new database gives its default experiment a folder below our working directory.
        os.environ.setdefault("_MLFLOW_SERVER_ARTIFACT_ROOT", artifact_location)


def silence() -> None:
    """The SDK prints tracebacks with values in them for what we report in one line."""
    for name in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def watch_answers() -> None:
    """Make the SDK's sessions note every answer, and hand over an error's answer instead of only saying "too many"."""
    from mlflow.utils import request_utils

    session_of = getattr(request_utils, "_get_request_session", None)
    if session_of is None or getattr(session_of, "is_watched", False):
        return  # an SDK built otherwise: its error codes must do

    def watched(*args: Any, **kwargs: Any) -> Any:
        session = session_of(*args, **kwargs)
        if note_answer not in session.hooks["response"]:
            session.hooks["response"].append(note_answer)
            for adapter in session.adapters.values():
                if adapter.max_retries.total == 0:
                    adapter.max_retries = adapter.max_retries.new(status_forcelist=frozenset())
        return session

    watched.is_watched = True  # type: ignore[attr-defined]
    request_utils._get_request_session = watched  # noqa: SLF001 - the one door all its requests go through


def note_answer(response: Any, *_args: object, **_kwargs: object) -> None:
    _seen.answer = Answer(response.status_code, retry_after_s(response.headers.get("Retry-After"), time.time()))


def database_path(uri: str) -> str | None:
    """Path of the file behind a `sqlite:///` URI, None for everything else."""
    scheme, separator, rest = uri.partition(":///")
    return os.path.abspath(rest.partition("?")[0]) if separator and scheme.partition("+")[0] == "sqlite" else None


def default_artifact_location(uri: str) -> str | None:
    """A database file has no server that keeps artifacts: they go beside it."""
    path = database_path(uri)
    return None if path is None else os.path.join(os.path.dirname(path), "mlartifacts")
