"""What a sick tracker makes of a batch: retried, refused in part, or parked; never lost, never doubled."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.batches import TIME_NS, batch, item, metrics
from support.fault_http import BlackHole, FaultServer, Mode
from support.memory import FakeMemory
from support.mlflow_server import MlflowServer
from support.mlflow_trackers import TestTracker, delivered, empty_database, origin, own_environment, tracker
from verl_shipper.backends import mlflow as mlflow_module
from verl_shipper.backends.base import Park, Reject, Retry
from verl_shipper_spool.record import RecordKind

__all__ = ["empty_database", "origin", "own_environment", "tracker"]  # fixtures
pytestmark = pytest.mark.filterwarnings("ignore")


@contextmanager
def answering(status: int, body: bytes, **headers: str) -> Iterator[str]:
    """URI of a server that gives every request the same answer."""

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response_only(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_PATCH = _serve  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def poisoned(tracker: TestTracker, monkeypatch: pytest.MonkeyPatch, *bad: str) -> list[int]:
    """Make the tracker refuse metrics of these names, as it does bad ones; returns the sizes of all requests."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    real = MlflowClient.log_batch
    sizes: list[int] = []

    def log_batch(client: Any, run_id: str, **entities: Any) -> None:
        sizes.append(len(entities["metrics"]))
        for metric in entities["metrics"]:
            if metric.key in bad:
                raise MlflowException.invalid_parameter_value(f"Invalid value for {metric.key}")
        real(client, run_id, **entities)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    return sizes


@pytest.fixture
def project(own_environment: None, mlflow_server: MlflowServer) -> TestTracker:
    return TestTracker(mlflow_server.uri, f"faults-{id(object())}-{TIME_NS}")


@pytest.mark.parametrize("mode", [Mode.ERROR, Mode.BUSY, Mode.RESET, Mode.RATE_LIMIT])
def test_an_outage_is_retried_and_ends_well(project: TestTracker, mode: Mode) -> None:
    memory = FakeMemory()
    own = TestTracker(project.uri, f"{project.project}-{mode.name}")
    with FaultServer(own.uri, retry_after_s=0) as server:
        backend = own.opened(memory, tracking_uri=server.url)
        sent = batch(metrics(0), metrics(1))
        server.mode = mode

        outcomes = [backend.upload(sent), own.backend(memory, tracking_uri=server.url).open()]

        server.mode = Mode.PASS
        assert all(isinstance(outcome, Retry) for outcome in outcomes), outcomes
        delivered(backend, sent)
    assert own.points("n") == [(0, 0.0), (1, 1.0)]


def test_retry_after_is_handed_to_the_lane(own_environment: None) -> None:
    with FaultServer(mode=Mode.RATE_LIMIT, retry_after_s=7) as server:
        outcome = TestTracker(server.url, "p").backend().open()

    assert isinstance(outcome, Retry)
    assert outcome.after_s == 7.0


def test_what_a_server_asks_of_one_run_all_runs_obey(own_environment: None) -> None:
    """Uploads of other runs may be under way when it asks: their next requests must not come before its time."""
    with FaultServer(mode=Mode.RATE_LIMIT, retry_after_s=1) as server:
        tracker = TestTracker(server.url, "p")
        began_s = time.monotonic()
        outcomes = [tracker.backend(own_id=own_id).open() for own_id in ("a", "b", "c")]
        assert server.seen(Mode.RATE_LIMIT) == 1
        time.sleep(max(began_s + 1.2 - time.monotonic(), 0))
        tracker.backend(own_id="b").open()
        assert server.seen(Mode.RATE_LIMIT) == 2

    assert all(isinstance(outcome, Retry) and 0 < (outcome.after_s or 0) <= 1 for outcome in outcomes), outcomes


def test_a_lost_answer_is_sent_again_and_shown_once(project: TestTracker) -> None:
    own = TestTracker(project.uri, f"{project.project}-lost")
    with FaultServer(own.uri) as server:
        backend = own.opened(tracking_uri=server.url)
        sent = batch(metrics(0), metrics(1))
        server.mode = Mode.SWALLOW
        lost = [backend.upload(sent), backend.upload(sent)]
        server.mode = Mode.PASS
        delivered(backend, sent)

    assert all(isinstance(outcome, Retry) for outcome in lost)
    assert own.points("n") == [(0, 0.0), (1, 1.0)]


def test_the_backend_says_whether_a_batch_gets_on(project: TestTracker) -> None:
    own = TestTracker(project.uri, f"{project.project}-on")
    start = item(RecordKind.RUN_START, {"config": {"lr": 1}}, ordinal=0, step=None)
    with FaultServer(own.uri) as server:
        backend = own.opened(tracking_uri=server.url)
        refuse = backend._tracker.client.log_batch

        def log_batch(*arguments: Any, metrics: Any = (), **more: Any) -> None:
            server.mode = Mode.RESET if metrics else Mode.PASS
            refuse(*arguments, metrics=metrics, **more)

        backend._tracker.client.log_batch = log_batch
        sent = batch(start, metrics(1))
        outcomes = [backend.upload(sent) for _ in range(2)]

    assert [isinstance(outcome, Retry) and outcome.progressed for outcome in outcomes] == [True, False]


def test_a_server_that_never_answers_is_given_up_after_the_timeout(own_environment: None) -> None:
    with BlackHole() as hole:
        outcome = TestTracker(hole.url, "p").backend(timeout_s=1).open()

    assert isinstance(outcome, Retry)
    assert "timed out" in outcome.reason.lower() or "timeout" in outcome.reason.lower()


def test_nobody_at_the_address_is_retried(own_environment: None) -> None:
    with BlackHole() as hole:
        uri = hole.url
    outcome = TestTracker(uri, "p").backend().open()

    assert isinstance(outcome, Retry)
    assert "refused" in outcome.reason.lower()


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_parks_and_says_what_to_set(own_environment: None, status: int) -> None:
    with answering(status, b"not you") as uri:
        outcome = TestTracker(uri, "p").backend().open()

    assert isinstance(outcome, Park)
    assert "MLFLOW_TRACKING_TOKEN" in outcome.reason


def test_no_reason_shows_the_password_of_the_address(own_environment: None) -> None:
    with answering(500, b"{}") as uri:
        outcome = TestTracker(uri.replace("//", "//me:SENTINEL@"), "p").backend().open()

    assert isinstance(outcome, Retry)
    assert "SENTINEL" not in outcome.reason


@pytest.mark.parametrize(("status", "body"), [(404, b"<html>nothing here</html>"), (302, b""), (405, b"{}")])
def test_something_that_is_no_mlflow_server_parks(own_environment: None, status: int, body: bytes) -> None:
    with answering(status, body) as uri:
        outcome = TestTracker(uri, "p").backend().open()

    assert isinstance(outcome, Park)


def test_a_server_that_takes_no_traces_refuses_spans_and_nothing_else(
    project: TestTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_shipper.backends import mlflow_http

    own = TestTracker(project.uri, f"{project.project}-old")
    monkeypatch.setattr(mlflow_http, "OTLP_PATH", "/v1/no-such-path")
    ids = {"trace_id": b"\x01" * 16, "span_id": b"\x02" * 8, "parent_id": None}
    spans = [item(RecordKind.SPAN, ids | {"start_ns": 1, "end_ns": 2}, ordinal=number) for number in (1, 2)]

    outcome = own.opened().upload(batch(metrics(0), *spans, metrics(3)))

    reason = "this server takes no traces, MLflow 3.4 does"
    assert outcome == Reject(reason, [1, 2], {1: reason, 2: reason})
    assert own.points("n") == [(0, 0.0), (3, 3.0)]


def test_refused_records_are_named_and_the_others_arrive(tracker: TestTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = poisoned(tracker, monkeypatch, "bad")
    items = [metrics(number, {"bad": 1.0} if number in (50, 77) else {"n": number}) for number in range(100)]

    outcome = tracker.opened().upload(batch(*items))

    assert isinstance(outcome, Reject)
    assert outcome.items == [50, 77]
    assert "Invalid value for bad" in outcome.reason
    assert [step for step, _ in tracker.points("n")] == [step for step in range(100) if step not in (50, 77)]
    assert len(sizes) < 40


def test_requests_that_were_answered_are_not_repeated(tracker: TestTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    backend = tracker.opened()
    sent = batch(metrics(0, {f"k{number}": number for number in range(1200)}))
    real = MlflowClient.log_batch
    sizes: list[int] = []

    def log_batch(client: Any, run_id: str, **entities: Any) -> None:
        sizes.append(len(entities["metrics"]))
        if len(sizes) == 2:
            raise ConnectionError("reset")
        real(client, run_id, **entities)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)

    assert isinstance(backend.upload(sent), Retry)
    delivered(backend, sent)

    assert sizes == [500, 500, 500, 200]
    assert len(tracker.run().data.metrics) == 1200


def test_a_slow_tracker_makes_progress_upload_by_upload(tracker: TestTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tracker.opened()
    sent = batch(metrics(0, {f"k{number}": number for number in range(1200)}))
    monkeypatch.setattr(mlflow_module, "SEND_S_MAX", 0.001)

    outcomes = []
    for _attempt in range(5):
        outcomes.append(backend.upload(sent))
        if not isinstance(outcomes[-1], Retry):
            break

    assert isinstance(outcomes[0], Retry)
    assert outcomes[0].reason.startswith("slow server: 1 of 3")
    assert not isinstance(outcomes[-1], Retry)
    assert len(tracker.run().data.metrics) == 1200


def test_a_locked_database_is_retried(
    own_environment: None, empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    path = tmp_path / "locked.db"
    shutil.copy(empty_database, path)
    own = TestTracker(f"sqlite:///{path}", "locked")
    backend = own.opened()
    sent = batch(metrics(0))

    with closing(sqlite3.connect(path)) as other, pytest.MonkeyPatch.context() as patch:
        shorten_busy_timeout(patch)
        other.execute("BEGIN EXCLUSIVE")
        outcome = backend.upload(sent)
        other.rollback()

    assert isinstance(outcome, Retry)
    assert "database is locked" in outcome.reason
    delivered(backend, sent)
    assert own.points("n") == [(0, 0.0)]


def shorten_busy_timeout(patch: pytest.MonkeyPatch) -> None:
    """MLflow waits 20 s for a lock; a test need not."""
    import sqlalchemy

    real = sqlalchemy.text
    patch.setattr(sqlalchemy.sql, "text", lambda text: real(text.replace("busy_timeout = 20000", "busy_timeout = 100")))


def test_a_killed_server_that_comes_back_gets_everything_once(own_environment: None, tmp_path: Path) -> None:
    server = MlflowServer(tmp_path / "server")
    memory = FakeMemory()
    own = TestTracker(server.uri, "killed")
    try:
        server.start()
        backend = own.opened(memory)
        delivered(backend, batch(metrics(0)), memory)
        sent = batch(metrics(1))
        server.kill()
        down = backend.upload(sent)
        server.start()
        delivered(backend, sent, memory)

        assert isinstance(down, Retry)
        assert own.points("n") == [(0, 0.0), (1, 1.0)]
    finally:
        server.stop()
