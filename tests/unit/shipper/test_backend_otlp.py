"""The backend for OpenTelemetry collectors: what arrives, what its answers mean, where its settings are from."""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Iterator
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
from support.rollouts import rollout, span
from support.web import Authority, PasswordProxy, Reply, WebServer
from verl_shipper.backends import otlp, otlp_http
from verl_shipper.backends.base import Delivered, Outcome, Park, Reject, Retry
from verl_shipper.backends.otlp import OtlpBackend
from verl_shipper.backends.otlp_http import partial_success
from verl_shipper.backends.otlp_settings import endpoint_of, headers_of, is_compressed, resource_attributes
from verl_shipper.checks import Finding, Level
from verl_shipper.config import Request
from verl_shipper.config_show import effective, json_of, lines_of
from verl_shipper.errors import ConfigError
from verl_shipper_spool.record import RecordKind

SECRET = "hush0123456789hush"


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("otlp_server", tmp_path_factory.mktemp("otlp") / "server") as started:
        yield started


@pytest.fixture(autouse=True)
def own_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    otlp_http._wait_until_s.clear()


@pytest.fixture
def server(collector: ServerProcess) -> Iterator[ServerProcess]:
    yield collector
    collector.rules()
    collector.options(headers={}, refuse=[], warning="", answer=None)


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
        item(RecordKind.FILE, {"path": "x"}, ordinal=5),
        item(RecordKind.RUN_FINISH, {"exit_code": 0}, ordinal=6, step=None),
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


# Settings


@pytest.mark.parametrize(
    ("settings", "variables", "url"),
    [
        ({}, {}, "http://localhost:4318/v1/traces"),
        ({"endpoint": "http://c:4318/"}, {}, "http://c:4318/v1/traces"),
        ({"endpoint": "http://c/otlp/v1/traces"}, {}, "http://c/otlp/v1/traces"),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e/base"}, "http://e/base/v1/traces"),
        ({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/as-it-is"}, "http://t/as-it-is"),
        (
            {},
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://e"},
            "http://t/x",
        ),
        ({"endpoint": "http://c"}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x"}, "http://c/v1/traces"),
    ],
)
def test_the_endpoint_is_the_settings_then_the_variables(
    settings: dict[str, str], variables: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert endpoint_of(settings) == url


def test_headers_of_variables_are_decoded_and_stand_beside_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b%3D, x-other = c ")

    found, origin = headers_of({"headers": {"X-Scope-OrgID": "rl"}})

    assert found == {"X-Scope-OrgID": "rl", "api-key": "a b=", "x-other": "c"}
    assert origin == "environment OTEL_EXPORTER_OTLP_HEADERS"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "api-key=traces")
    assert headers_of({})[0] == {"api-key": "traces"}


def test_secret_headers_are_read_from_a_private_file_or_a_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "otel_exporter_otlp_headers"
    path.touch(0o600)
    path.write_text("Authorization: Basic dTpw:\n\nx-team = rl\n")
    expected = {"Authorization": "Basic dTpw:", "x-team": "rl"}

    assert headers_of({"headers_file": str(path)}) == (expected, f"file {path}")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert headers_of({}) == (expected, "systemd credential otel_exporter_otlp_headers")


def test_the_resource_is_told_by_settings_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resource_attributes({}) == {"service.name": "verl"}
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=from-attributes,team=a%2Cb")
    assert resource_attributes({}) == {"service.name": "from-attributes", "team": "a,b"}
    monkeypatch.setenv("OTEL_SERVICE_NAME", "from-variable")
    assert resource_attributes({"resource_attributes": {"team": "mine"}}) == {
        "service.name": "from-variable",
        "team": "mine",
    }
    assert resource_attributes({"service_name": "mine"})["service.name"] == "mine"


def test_compression_is_a_setting_or_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_compressed({})
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    assert not is_compressed({})
    assert is_compressed({"compression": "gzip"})


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"endpoint": "localhost:4318"}, "backends.otlp.endpoint"),
        ({"headers": {"Authorization": f"Bearer {SECRET}"}}, "backends.otlp.headers"),
        ({"headers": {"x-api-key": SECRET}}, "backends.otlp.headers"),
        ({"headers": {"Content-Type": "text/plain"}}, "backends.otlp.headers"),
        ({"headers": {"x team": SECRET}}, "backends.otlp.headers"),
        ({"headers": {"x-team": f"{SECRET}\r\nx-evil: 1"}}, "backends.otlp.headers"),
        ({"headers_file": "/no/such/file"}, "backends.otlp.headers_file"),
        ({"compression": "zstd"}, "backends.otlp.compression"),
        ({"timeout_s": 0}, "backends.otlp.timeout_s"),
        ({"ca_file": "/no/such/file"}, "backends.otlp.ca_file"),
    ],
)
def test_settings_that_cannot_work_are_refused_without_a_secret(settings: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OtlpBackend.check(settings)

    assert caught.value.where == where
    assert caught.value.hint
    assert SECRET not in caught.value.line()


@pytest.mark.parametrize("content", ["", SECRET, f"Authorization {SECRET}\n"])
def test_a_file_of_headers_without_headers_is_refused_without_showing_it(tmp_path: Path, content: str) -> None:
    path = tmp_path / "headers"
    path.touch(0o600)
    path.write_text(content)

    with pytest.raises(ConfigError) as caught:
        OtlpBackend.check({"headers_file": str(path)})
    assert SECRET not in caught.value.line()


def test_variables_that_are_no_pairs_are_refused_without_showing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", SECRET)

    with pytest.raises(ConfigError) as caught:
        OtlpBackend.check({})
    assert SECRET not in caught.value.line()


@pytest.mark.parametrize("package", sorted(otlp.PACKAGES))
def test_a_missing_package_is_one_line_that_says_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(otlp.PACKAGES, package, "no_such_package.at_all")

    with pytest.raises(ConfigError, match=r"is not installed.*pip install 'verl-shipper\[otlp\]'"):
        OtlpBackend.check({})


def test_variables_for_another_protocol_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")

    (note,) = OtlpBackend.decide({}).notes
    assert "grpc" in note
    assert not OtlpBackend.decide({"endpoint": "http://c:4318"}).notes


def test_a_file_of_settings_is_accepted_and_no_value_of_a_header_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "backends:\n  otlp:\n    endpoint: http://c:4318\n"
        f"    headers: {{X-Team: {SECRET}}}\n    resource_attributes: team=rl,zone=a%2Cb\n"
    )

    config = Request(str(path), (), state_dir=str(tmp_path / "state")).load()

    assert config.backends["otlp"]["headers"] == {"X-Team": SECRET}
    assert config.backends["otlp"]["resource_attributes"] == {"team": "rl", "zone": "a,b"}
    shown = effective(config)
    told = str(json_of(shown)) + "\n".join(lines_of(shown))
    assert SECRET not in told
    assert "X-Team" in told


@pytest.mark.parametrize("text", [SECRET, f"[{SECRET}]"])
def test_headers_that_are_no_map_are_refused_without_showing_them(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"backends:\n  otlp:\n    headers: {text}\n")

    with pytest.raises(ConfigError) as caught:
        Request(str(path), ()).load()
    assert "headers" in caught.value.line()
    assert SECRET not in caught.value.line()


# Doctor


def diagnosed(**settings: Any) -> list[Finding]:
    return list(OtlpBackend.diagnose(settings))


def test_doctor_asks_with_an_empty_request(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    server.options(headers={"x-team": SECRET})
    empty = server.state()["empty"]
    refused = diagnosed(endpoint=server.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-team={SECRET}")
    accepted = diagnosed(endpoint=server.url)

    assert [each.what for each in refused if each.level is Level.FAIL] == ["it wants a key (401)"]
    assert {each.level for each in accepted} == {Level.OK}
    assert accepted[-1].what == "an empty request is accepted"
    assert server.state()["empty"] == empty + 1
    assert SECRET not in str(refused + accepted)


def test_doctor_tells_a_server_that_is_no_collector(tmp_path: Path) -> None:
    with WebServer() as web:
        web.reply = Reply(404, body=b"")
        (*_, last) = diagnosed(endpoint=web.url)
        web.reply = Reply(200, {"Content-Type": "text/html"}, b"<html>")
        (*_, page) = diagnosed(endpoint=web.url)

    assert (last.level, page.level) == (Level.FAIL, Level.FAIL)
    assert "port 4318" in last.hint
    (nobody,) = diagnosed(endpoint=f"http://127.0.0.1:{free_port()}")
    assert nobody.level is Level.FAIL


def test_an_answer_of_nothing_is_success() -> None:
    assert partial_success("", b"") == (0, "")
