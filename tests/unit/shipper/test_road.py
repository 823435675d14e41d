"""The road: one reading of proxies and authorities for everybody, and one line that names who stands in the way."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from support.mlflow_server import free_port
from support.web import Authority, PasswordProxy, Reply, WebServer
from verl_shipper.backends import road as road_module
from verl_shipper.backends.base import Park, Retry
from verl_shipper.backends.mlflow_http import CERTIFICATE, INSECURE, mlflow_road
from verl_shipper.backends.road import Culprit, Road, road_of
from verl_shipper.backends.sdk.http import Http, RefusedError
from verl_shipper.backends.swanlab_ledger import Ledger
from verl_shipper.backends.swanlab_upstream import AgainError, Upstream
from verl_shipper.checks import CA_VARIABLES
from verl_shipper.errors import ConfigError

SENTINEL = "SENTINEL"
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXY_VARIABLES, *map(str.upper, PROXY_VARIABLES), *CA_VARIABLES, CERTIFICATE, INSECURE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Iterator[WebServer]:
    with WebServer(authority.certificate("localhost", "tracker.test")) as running:
        running.reply = Reply(body=b"{}")
        yield running


def made(folder: Path, **settings: Any) -> Road:
    return road_of("wandb", {"work_dir": str(folder), **settings}, proxy_key="wandb_proxy")


def answer(road: Road, url: str) -> Any:
    return Http(url, road, timeout_s=5).ask("GET", "/", key_hint="")


def refusal(road: Road, url: str) -> Park | Retry:
    with pytest.raises(RefusedError) as refused:
        answer(road, url)
    outcome = refused.value.outcome
    assert isinstance(outcome, Park | Retry)
    assert SENTINEL not in outcome.reason
    assert "\n" not in outcome.reason
    return outcome


# --- whom to trust --------------------------------------------------------------------------------------------


def test_a_ca_file_is_trusted(server: WebServer, authority: Authority, tmp_path: Path) -> None:
    assert answer(made(tmp_path, ca_file=str(authority.ca)), server.url) == {}


@pytest.mark.parametrize("variable", CA_VARIABLES)
def test_an_authority_of_the_environment_is_trusted_by_every_road(
    server: WebServer, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(authority.ca))

    road = made(tmp_path)

    assert answer(road, server.url) == {}
    assert {name: road.environment(server.url)[name] for name in CA_VARIABLES} == dict.fromkeys(
        CA_VARIABLES, str(authority.ca)
    )


def test_a_ca_file_stands_beside_the_environments_authority(
    server: WebServer, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Authority(tmp_path / "other")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(other.ca))
    with WebServer(other.certificate("localhost")) as others:
        others.reply = Reply(body=b"{}")
        road = made(tmp_path, ca_file=str(authority.ca))

        assert answer(road, server.url) == {}
        assert answer(road, others.url) == {}


def test_a_ca_file_stands_beside_the_systems_authorities(authority: Authority, tmp_path: Path) -> None:
    path = made(tmp_path, ca_file=str(authority.ca)).authorities("https://tracker.test")

    assert path is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(path)
    assert context.cert_store_stats()["x509_ca"] > 50


def test_mlflows_own_variable_stands_beside_a_ca_file(
    server: WebServer, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Authority(tmp_path / "other")
    monkeypatch.setenv(CERTIFICATE, str(authority.ca))
    road = mlflow_road({"ca_file": str(other.ca), "lock_dir": str(tmp_path)})

    assert answer(road, server.url) == {}


def test_to_verify_and_not_to_verify_is_refused(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSECURE, "true")

    with pytest.raises(ConfigError, match=INSECURE):
        mlflow_road({"ca_file": str(authority.ca)})


def test_an_unknown_authority_parks_and_says_whom_we_trust(server: WebServer, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")

    outcome = refusal(made(tmp_path, ca_file=str(other.ca)), server.url)

    assert isinstance(outcome, Park)
    assert f"certificate of localhost:{server.port} is not trusted" in outcome.reason
    assert f"{other.ca} (backends.wandb.ca_file)" in outcome.reason


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), ("", "no certificate"), ("no PEM", "no certificate"), ("folder", "cannot read|no cert")],
)
def test_a_ca_file_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "ca.pem"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)

    with pytest.raises(ConfigError, match=words) as refused:
        made(tmp_path, ca_file=str(path))

    assert "backends.wandb.ca_file" in refused.value.line()
    assert "\n" not in refused.value.line()


def test_an_authority_of_the_environment_that_is_missing_parks_with_its_name(
    server: WebServer, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")

    outcome = refusal(made(tmp_path, ca_file=str(authority.ca)), server.url)

    assert "/nowhere/ca.pem" in outcome.reason


def test_an_authority_that_vanishes_parks_what_swanlabs_package_sends(
    server: WebServer, authority: Authority, tmp_path: Path
) -> None:
    own = tmp_path / "own.pem"
    own.write_bytes(authority.ca.read_bytes())
    ledger = Ledger()
    upstream = Upstream(server.url, ledger, road_of("swanlab", {"ca_file": str(own), "work_dir": str(tmp_path)}))
    own.unlink()

    with pytest.raises(AgainError):
        upstream.send("GET", "/", {}, None)

    trouble = ledger.told(with_waiting=False)["trouble"]
    assert trouble["kind"] == "road"
    assert str(own) in trouble["reason"]


# --- proxies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["setting", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"])
def test_a_proxy_with_a_password_is_used_and_looks_the_name_up(
    server: WebServer, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with PasswordProxy("svc", "p@ss:w/rd") as proxy:
        proxy.names["tracker.test"] = "127.0.0.1"
        url = f"http://svc:p%40ss%3Aw%2Frd@localhost:{proxy.port}"
        settings = {"wandb_proxy": url} if how == "setting" else {}
        if not settings:
            monkeypatch.setenv(how, url)
        road = made(tmp_path, ca_file=str(authority.ca), **settings)

        assert answer(road, f"https://tracker.test:{server.port}") == {}
        assert proxy.connects == {("tracker.test", True): 1}
        assert SENTINEL not in repr(road)
        assert {road.environment(server.url)[name] for name in ("https_proxy", "HTTPS_PROXY")} == {url}


@pytest.mark.parametrize(
    "no_proxy", ["127.0.0.0/8", "127.0.0.1", "127.0.0.1:PORT", "*", "10.0.0.0/8, 127.0.0.0/8", "x.test,127.0.0.1"]
)
def test_what_no_proxy_names_is_reached_directly_by_every_road(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_proxy: str
) -> None:
    with WebServer() as server:
        server.reply = Reply(body=b"{}")
        url = f"http://127.0.0.1:{server.port}"
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
        monkeypatch.setenv("NO_PROXY", no_proxy.replace("PORT", str(server.port)))
        road = made(tmp_path)

        assert answer(road, url) == {}
        for name, value in road.environment(url).items():
            monkeypatch.setenv(name, value)
        assert requests.get(url, timeout=5).ok


@pytest.mark.parametrize("no_proxy", ["127.0.0.1:1", "10.0.0.0/8", "est", "other.test", ""])
def test_what_no_proxy_does_not_name_goes_by_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_proxy: str
) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:3128")
    monkeypatch.setenv("no_proxy", no_proxy)
    road = made(tmp_path)

    assert road.arguments("https://127.0.0.1:5000")["proxies"]["https"] == "http://proxy.invalid:3128"
    assert road.arguments("https://tracker.test")["proxies"]["https"] == "http://proxy.invalid:3128"


def test_names_below_a_domain_are_reached_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:3128")
    for no_proxy in ("corp.test", ".corp.test", "*.corp.test"):
        monkeypatch.setenv("no_proxy", no_proxy)
        assert made(tmp_path).arguments("https://tracker.corp.test")["proxies"]["https"] == "", no_proxy


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("pair", ["", f"svc:{SENTINEL}@"])
def test_a_proxy_that_wants_another_password_parks_with_its_name(
    server: WebServer, authority: Authority, tmp_path: Path, scheme: str, pair: str
) -> None:
    with PasswordProxy("svc", "password") as proxy:
        road = made(tmp_path, ca_file=str(authority.ca), wandb_proxy=f"http://{pair}localhost:{proxy.port}")

        outcome = refusal(road, f"{scheme}://tracker.test:{server.port}")

    assert isinstance(outcome, Park)
    what = "refuses its user and password" if pair else "wants a user and a password"
    assert f"proxy localhost:{proxy.port} {what} (407)" in outcome.reason
    assert "backends.wandb.wandb_proxy" in outcome.reason


def test_a_proxy_that_forbids_is_named_with_its_answer(server: WebServer, tmp_path: Path) -> None:
    with PasswordProxy() as proxy:
        proxy.refuses = 403
        outcome = refusal(made(tmp_path, wandb_proxy=f"http://localhost:{proxy.port}"), server.url)

    assert isinstance(outcome, Retry)
    assert f"proxy localhost:{proxy.port} does not connect us" in outcome.reason
    assert "403" in outcome.reason


def test_a_proxy_that_is_down_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("https_proxy", f"http://svc:{SENTINEL}@127.0.0.1:{port}")

    outcome = refusal(made(tmp_path), "https://tracker.test")

    assert isinstance(outcome, Retry)
    assert f"nothing listens at proxy 127.0.0.1:{port} (https_proxy)" in outcome.reason


def test_a_name_that_does_not_resolve_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, *_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    outcome = refusal(made(tmp_path), "https://tracker.invalid")
    assert outcome == Retry("name lookup of tracker.invalid failed: Name or service not known")

    monkeypatch.setenv("https_proxy", "http://proxy.invalid:3128")
    outcome = refusal(made(tmp_path), "https://tracker.invalid")
    assert "name lookup of proxy.invalid failed (for proxy proxy.invalid:3128 (https_proxy))" in outcome.reason


def test_a_proxy_that_cannot_be_read_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="proxy") as refused:
        made(tmp_path, wandb_proxy=f"http://svc:{SENTINEL}@proxy:port")

    assert SENTINEL not in refused.value.line()


def test_whatever_else_goes_wrong_is_nobodys_fault_on_the_way(tmp_path: Path) -> None:
    road = made(tmp_path)

    assert road.culprit(ValueError("odd"), "https://tracker.test") is None
    assert road.culprit(TimeoutError("read"), "https://tracker.test") is None
    assert isinstance(road.culprit(ValueError("odd"), "nonsense"), Culprit)


def test_authorities_are_read_once_and_again_when_they_change_or_are_swept(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.pem"
    own.write_bytes(authority.ca.read_bytes())
    road = made(tmp_path / "work", ca_file=str(own))
    first = road.authorities("https://tracker.test")
    assert first is not None

    with monkeypatch.context() as patch:
        patch.setattr(road_module, "CERTIFICATE", None)  # to read would fail
        assert road.authorities("https://tracker.test") == first
    Path(first).unlink()
    assert road.authorities("https://tracker.test") == first
    assert Path(first).exists()

    other = Authority(tmp_path / "other")
    own.write_bytes(authority.ca.read_bytes() + other.ca.read_bytes())
    second = road.authorities("https://tracker.test")
    assert second not in (None, first)


def test_the_file_of_authorities_is_private_to_its_folder_and_made_once(authority: Authority, tmp_path: Path) -> None:
    road = made(tmp_path / "work", ca_file=str(authority.ca))

    paths = {road.authorities("https://a.test") for _ in range(3)}

    assert len(paths) == 1
    assert len(os.listdir(tmp_path / "work")) == 1
