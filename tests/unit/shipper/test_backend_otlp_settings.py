"""Where the settings of the OTLP backend are from, what is refused, and what `doctor` says; no secret is ever shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servers.process import ServerProcess
from support.mlflow_server import free_port
from support.otlp_collector import SECRET, collector, own_world, server
from support.web import Reply, WebServer
from verl_shipper.backends import otlp
from verl_shipper.backends.otlp import OtlpBackend
from verl_shipper.backends.otlp_http import partial_success
from verl_shipper.backends.otlp_settings import endpoint_of, headers_of, is_compressed, resource_attributes
from verl_shipper.checks import Finding, Level
from verl_shipper.config import Request
from verl_shipper.config_show import effective, json_of, lines_of
from verl_shipper.errors import ConfigError

__all__ = ["collector", "own_world", "server"]  # fixtures


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
