"""The backend for OpenTelemetry collectors: what arrives, what its answers mean, where its settings are from."""

from __future__ import annotations

import base64
import logging
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from servers.faults import Fault, Rule
from servers.process import ServerProcess
from support.batches import batch, item, metrics, run_info
from support.memory import FakeMemory
from support.mlflow_server import MlflowServer, free_port
from support.mlflow_trackers import TestTracker
from support.otlp_collector import SECRET, collector, own_world, server
from support.rollouts import rollout, span
from support.web import Authority, PasswordProxy, Reply, WebServer
from verl_shipper.backends.base import Delivered, Outcome, Park, Reject, Retry
from verl_shipper.backends.otlp import OtlpBackend
from verl_shipper_spool.record import RecordKind

__all__ = ["collector", "own_world", "server"]  # fixtures


def made(place: ServerProcess | str, run_id: str = "run1", **settings: Any) -> OtlpBackend:
    url = place if isinstance(place, str) else place.url
    return OtlpBackend(run_info(run_id=run_id), {"endpoint": url, **settings}, FakeMemory())


def upload(place: ServerProcess | str, *items: Any, **settings: Any) -> Outcome:
    backend = made(place, **settings)
    try:
        return backend.upload(batch(*items, run=backend.run))
    finally:
        backend.close()


def arrived(server: ServerProcess, run_id: str) -> list[dict[str, Any]]:
    return [each for each in server.state()["spans"] if each["resource"]["verl_shipper.run_id"] == run_id]


# What arrives


def test_a_rollout_arrives_as_one_tree_of_spans_in_the_words_of_genai(server: ServerProcess) -> None:
    assert upload(server, *rollout(100), run_id="tree") == Delivered()

    spans = arrived(server, "tree")
    (root,) = [each for each in spans if not each["parent_id"]]
    assert len({each["trace_id"] for each in spans}) == 1
    assert {each["parent_id"] for each in spans} == {"", root["span_id"]}
    assert [each["attributes"].get("gen_ai.operation.name") for each in spans] == [
        "chat",
        None,
        "execute_tool",
        "chat",
        "invoke_agent",
    ]
    assert root["attributes"]["verl.step"] == 1
    assert root["attributes"]["verl.reward"] == 1.0
    assert root["attributes"]["verl.validate"] is False
    assert root["resource"]["service.name"] == "verl"


def test_what_the_collector_decodes_is_the_span_that_was_frozen(server: ServerProcess) -> None:
    told = span(200, "mine", step=4, rank=3, status="error", attributes={"error": "ValueError: no", "n": 1})

    upload(server, told, run_id="golden")

    (found,) = arrived(server, "golden")
    decoded = Span.FromString(base64.b64decode(found["bytes"]))
    assert decoded.trace_id == told.record.body["trace_id"]
    assert decoded.span_id == told.record.body["span_id"]
    assert MessageToDict(decoded, preserving_proto_field_name=True) == {
        "trace_id": base64.b64encode(decoded.trace_id).decode(),
        "span_id": base64.b64encode(decoded.span_id).decode(),
        "name": "mine",
        "kind": "SPAN_KIND_INTERNAL",
        "start_time_unix_nano": "1790000000123456989",
        "end_time_unix_nano": "1790000000123457989",
        "attributes": [
            {"key": "verl.error", "value": {"string_value": "ValueError: no"}},
            {"key": "verl.n", "value": {"int_value": "1"}},
            {"key": "verl.step", "value": {"int_value": "4"}},
            {"key": "verl.rank", "value": {"int_value": "3"}},
            {"key": "error.type", "value": {"string_value": "ValueError"}},
        ],
        "status": {"message": "ValueError: no", "code": "STATUS_CODE_ERROR"},
    }
    assert found["resource"]["service.instance.id"] == "golden/3"


def test_the_same_batch_again_is_the_same_spans_again(server: ServerProcess) -> None:
    for _ in range(3):
        upload(server, *rollout(300), run_id="again")

    spans = arrived(server, "again")
    assert [(len(spans), each["came"]) for each in spans] == [(5, 3)] * 5


@pytest.mark.parametrize("compression", ["gzip", "none"])
def test_a_request_is_compressed_as_it_says(server: ServerProcess, compression: str) -> None:
    upload(server, span(1), compression=compression)

    assert server.state()["encodings"][-1] == compression


def test_all_that_is_no_span_is_delivered_counted_and_never_sent(server: ServerProcess) -> None:
    before = len(server.requests())
    others = [
        item(RecordKind.RUN_START, {"config": {"a": 1}}, ordinal=1, step=None),
        metrics(2, {"a": 1.0, "b": {"c": 2}, "t": "text"}),
        item(RecordKind.GENERATIONS, {"columns": [], "rows": []}, ordinal=3),
        item(RecordKind.TEXT, {"a": "b"}, ordinal=4),
        item(RecordKind.FILE, {"offset": 0}, ordinal=5),  # a part, and the last one
        item(RecordKind.FILE, {"offset": 1, "size": 2, "sha256": b""}, ordinal=6),
        item(RecordKind.RUN_FINISH, {"exit_code": 0}, ordinal=7, step=None),
    ]

    assert upload(server, *others) == Delivered(ignored={"metrics": 3, "generations": 1, "text": 1, "file": 1})
    assert len(server.requests()) == before


def test_content_that_is_not_to_be_captured_stays_here_and_is_counted(server: ServerProcess) -> None:
    outcome = upload(server, *rollout(400), run_id="private", capture_content=False)

    assert outcome == Delivered(ignored={"content": 10})
    told = str(arrived(server, "private"))
    assert "What is 2+2?" not in told
    assert "calc" not in told
    assert "gen_ai.usage.input_tokens" in told


# What answers mean


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault.RATE_LIMIT, Retry),
        (Fault.BUSY, Retry),
        (Fault.ERROR, Retry),
        (Fault.TIMEOUT, Retry),
        (Fault.RESET, Retry),
        (Fault.LOST, Retry),
        (Fault.REFUSED, Park),
        (Fault.FORBIDDEN, Park),
        (Fault.BAD, Reject),
        (Fault.TOO_LARGE, Reject),
    ],
)
def test_every_fault_has_its_outcome(server: ServerProcess, fault: Fault, kind: type[Outcome]) -> None:
    with server.failing(Rule(fault)):
        outcome = upload(server, *rollout(500))

    assert isinstance(outcome, kind), outcome
    assert not isinstance(outcome, Reject) or outcome.items is None


def test_a_refused_request_of_one_span_names_its_record(server: ServerProcess) -> None:
    with server.failing(Rule(Fault.BAD)):
        outcome = upload(server, metrics(0), span(1), metrics(2))

    assert isinstance(outcome, Reject)
    assert outcome.items == [1]


def test_retry_after_is_obeyed_and_asks_all_runs_of_the_process(server: ServerProcess) -> None:
    with server.failing(Rule(Fault.RATE_LIMIT, retry_after_s=30)):
        outcome = upload(server, span(1))
        before = len(server.requests())
        other = upload(server, span(2), run_id="other")

    assert isinstance(outcome, Retry)
    assert outcome.after_s == 30
    assert isinstance(other, Retry)
    assert other.after_s is not None
    assert 25 < other.after_s <= 30
    assert len(server.requests()) == before


def test_of_spans_that_were_refused_in_part_nobody_knows_which(server: ServerProcess) -> None:
    server.options(refuse=["poison"])

    outcome = upload(server, span(601), span(602, "poison"), metrics(3), run_id="part")

    assert isinstance(outcome, Reject)
    assert outcome.items is None
    assert outcome.reason == f"{server.url}/v1/traces refused 1 of 2 spans: scripted"


def test_spans_that_were_all_refused_are_named(server: ServerProcess) -> None:
    server.options(refuse=["poison"])

    outcome = upload(server, span(1, "poison"), metrics(2), span(3, "poison"))

    assert isinstance(outcome, Reject)
    assert outcome.items == [0, 2]


def test_a_span_that_cannot_be_one_is_named_and_the_others_arrive(server: ServerProcess) -> None:
    outcome = upload(server, span(701), span(702, span_id=b""), run_id="broken")

    assert isinstance(outcome, Reject)
    assert outcome.items == [1]
    assert len(arrived(server, "broken")) == 1


def test_a_warning_is_told_once_and_nothing_is_refused(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    server.options(warning="too many\nattributes")
    backend = made(server)

    with caplog.at_level(logging.WARNING):
        outcomes = [backend.upload(batch(span(number))) for number in range(2)]
    backend.close()

    assert outcomes == [Delivered(), Delivered()]
    (record,) = caplog.records
    assert record.message.endswith("takes all spans and says: too many attributes")


@pytest.mark.parametrize(
    ("answer", "is_taken"),
    [
        (["application/json", "{}"], True),
        (["application/json", '{"partialSuccess": {"rejectedSpans": "0"}}'], True),
        (["application/json", '{"partialSuccess": {"rejectedSpans": "1"}}'], False),
        (["text/plain", ""], True),
        (["text/html", "<html>log in</html>"], False),
        (["text/plain", "hello there"], False),
        (["application/json", "[1]"], False),
    ],
)
def test_an_answer_of_200_counts_only_when_it_is_one_of_the_protocol(
    server: ServerProcess, answer: list[str], is_taken: bool
) -> None:
    server.options(answer=answer)

    outcome = upload(server, span(1))

    assert isinstance(outcome, Delivered) == is_taken, outcome
    assert isinstance(outcome, Delivered | Park | Reject)


def test_another_server_is_no_collector(server: ServerProcess) -> None:
    with WebServer() as web:
        web.reply = Reply(404, body=b"nothing here")
        outcome = upload(web.url, span(1))

    assert isinstance(outcome, Park)
    assert "is it a collector for OTLP over HTTP?" in outcome.reason


def test_nobody_there_is_retried_and_opening_says_so_too() -> None:
    backend = made(f"http://127.0.0.1:{free_port()}")

    assert isinstance(backend.open(), Retry)
    assert isinstance(backend.upload(batch(span(1))), Retry)
    backend.close()


def test_opening_sends_no_span_and_is_not_hindered_by_who_refuses_to_be_asked_for_nothing(
    server: ServerProcess,
) -> None:
    backend = made(server)
    empty = server.state()["empty"]

    assert backend.open() is None
    assert server.state()["empty"] == empty + 1
    with server.failing(Rule(Fault.BAD)):
        assert backend.open() is None
    with server.failing(Rule(Fault.REFUSED)):
        assert isinstance(backend.open(), Park)
    backend.close()


def test_no_reason_shows_a_header_that_a_server_echoes(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.options(headers={"x-team": "another"})
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-team={SECRET}")

    outcome = upload(server, span(1))

    assert isinstance(outcome, Park)
    assert "unauthorized" in outcome.reason
    assert "headers_file" in outcome.reason
    assert SECRET not in outcome.reason


def test_a_replaced_header_is_taken_without_a_restart(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "headers"
    path.touch(0o600)
    path.write_text("Authorization: Bearer old-old-old\n")
    server.options(headers={"Authorization": "Bearer new-new-new"})
    backend = made(server, headers_file=str(path))

    assert isinstance(backend.upload(batch(span(1))), Park)
    path.write_text("Authorization: Bearer new-new-new\n")
    assert backend.upload(batch(span(1))) == Delivered()
    path.chmod(0o644)
    assert isinstance(backend.upload(batch(span(1))), Park)
    backend.close()


# The way


def test_the_way_leads_through_a_proxy_and_past_a_private_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "authority")
    with WebServer(authority.certificate("otel.test")) as web, PasswordProxy("svc", "password") as proxy:
        web.reply = Reply(200, body=b"")
        proxy.names["otel.test"] = "127.0.0.1"
        url = f"https://otel.test:{web.port}"
        monkeypatch.setenv("https_proxy", f"http://svc:password@127.0.0.1:{proxy.port}")
        distrusted = upload(url, span(1))
        trusted = upload(url, span(1), ca_file=str(authority.ca))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(authority.ca))
        by_variable = upload(url, span(1))

    assert isinstance(distrusted, Park)
    assert "certificate" in distrusted.reason
    assert trusted == by_variable == Delivered()


# A receiver of somebody else's


@pytest.mark.filterwarnings("ignore")
def test_a_real_receiver_takes_a_rollout_and_reads_its_words(mlflow_server: MlflowServer) -> None:
    tracker = TestTracker(mlflow_server.uri, "otlp-receiver")
    experiment = tracker.client.create_experiment("otlp-receiver")
    headers = {"x-mlflow-experiment-id": experiment}

    for _ in range(2):
        assert upload(mlflow_server.uri, *rollout(800), headers=headers) == Delivered()

    (trace,) = tracker.client.search_traces(locations=[experiment])
    kinds = {each.name: each.span_type for each in trace.data.spans}
    assert len(trace.data.spans) == 5
    assert kinds["LLMServerClient.generate"] in ("CHAT_MODEL", "LLM")
    assert kinds["CalcTool.execute"] == "TOOL"
    (root,) = [each for each in trace.data.spans if each.parent_id is None]
    assert "What is 2+2?" in str(root.inputs)
