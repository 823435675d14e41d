"""The probe: one line that names the step that failed, real servers, real certificates, and no secret in any line."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fault_http import BlackHole
from support.mlflow_server import free_port
from support.web import Authority, PasswordProxy, Reply, WebServer
from verl_shipper.checks import CA_VARIABLES, Answer, Finding, Level, clock_finding, probe
from verl_shipper.route import bypasses, shown

SENTINEL = "SENTINEL"
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXY_VARIABLES, *map(str.upper, PROXY_VARIABLES), *CA_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def server(authority: Authority) -> Iterator[WebServer]:
    with WebServer(authority.certificate("localhost")) as running:
        yield running


def asked(url: str, **options: Any) -> tuple[list[Finding], Answer | None]:
    findings, steps = [], probe(url, **options)
    while True:
        try:
            findings.append(next(steps))
        except StopIteration as end:
            return findings, end.value


def refused(url: str, **options: Any) -> Finding:
    """The one finding of a probe that fails."""
    (finding,), answer = asked(url, **options)
    assert (finding.level, answer) == (Level.FAIL, None)
    assert finding.hint
    return finding


# --- certificates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", ["as configured", *CA_VARIABLES])
def test_a_private_authority_is_trusted_wherever_it_is_named(
    server: WebServer, authority: Authority, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if origin in CA_VARIABLES:
        monkeypatch.setenv(origin, str(authority.ca))

    findings, answer = asked(server.url, ca=None if origin in CA_VARIABLES else str(authority.ca))

    assert answer is not None
    assert (answer.status, answer.body) == (200, b"fine")
    assert [finding.level for finding in findings] == [Level.OK, Level.OK]
    assert f"trusted by {authority.ca} ({origin})" in findings[0].what


def test_an_unknown_authority_is_refused_and_the_certificate_is_named(server: WebServer) -> None:
    finding = refused(server.url)

    assert "certificate" in finding.what
    assert "not trusted" in finding.what
    assert "SSL_CERT_FILE" in finding.hint
    assert server.requests == []


def test_a_certificate_for_another_name_is_refused(authority: Authority) -> None:
    with WebServer(authority.certificate("other.test")) as server:
        finding = refused(server.url, ca=str(authority.ca))

    assert "localhost" in finding.what
    assert "name" in finding.hint


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_an_authority_that_cannot_be_read_is_named(server: WebServer, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)

    finding = refused(server.url, ca=str(path))

    assert str(path) in finding.what


def test_plain_http_behind_an_https_address_is_called_so() -> None:
    with WebServer() as server:
        finding = refused(server.url.replace("http://", "https://"))

    assert "TLS" in finding.what
    assert "http://" in finding.hint


# --- proxies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["https_proxy", "HTTPS_PROXY", "ALL_PROXY"])
def test_a_proxy_that_wants_a_password_gets_it(
    server: WebServer, authority: Authority, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PasswordProxy("svc", f"{SENTINEL}:@/") as proxy:
        monkeypatch.setenv(variable, f"http://svc:{SENTINEL}%3A%40%2F@localhost:{proxy.port}")
        findings, answer = asked(server.url, ca=str(authority.ca))

    assert answer is not None
    assert f"by proxy localhost:{proxy.port} ({variable})" in findings[0].what
    assert [line for line, _ in proxy.requests] == [f"CONNECT localhost:{server.port} HTTP/1.1"]
    assert SENTINEL not in repr(findings)


@pytest.mark.parametrize(("login", "word"), [("", "wants a user"), (f"svc:{SENTINEL}@", "refuses its user")])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_refuses_the_password_is_named(scheme: str, login: str, word: str) -> None:
    with PasswordProxy("svc", "right") as proxy:
        finding = refused(f"{scheme}://tracker.invalid", proxy=f"http://{login}localhost:{proxy.port}")

    assert f"proxy localhost:{proxy.port} {word}" in finding.what
    assert f"http://USER:PASSWORD@localhost:{proxy.port}" in finding.hint
    assert SENTINEL not in repr(finding)


def test_a_proxy_of_the_environment_is_mended_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with PasswordProxy("svc", "right") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"localhost:{proxy.port}")
        finding = refused("https://tracker.invalid")

    assert finding.hint.startswith("export HTTPS_PROXY=http://USER:PASSWORD@")


def test_a_proxy_that_does_not_connect_us_is_named() -> None:
    with PasswordProxy() as proxy:
        proxy.refuses = 403
        finding = refused("https://tracker.invalid", proxy=f"localhost:{proxy.port}")

    assert f"proxy localhost:{proxy.port} does not connect us to tracker.invalid:443: it answers 403" in finding.what
    assert "NO_PROXY=tracker.invalid" in finding.hint


def test_plain_requests_go_by_the_proxy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with WebServer() as server, PasswordProxy("svc", "p") as proxy:
        monkeypatch.setenv("http_proxy", f"http://svc:p@localhost:{proxy.port}")
        _, answer = asked(f"{server.url}/version")

    assert answer is not None
    assert answer.body == b"fine"
    assert [line for line, _ in proxy.requests] == [f"GET {server.url}/version HTTP/1.1"]


def test_no_proxy_leads_past_the_proxy_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://localhost:{free_port()}")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8,localhost")
    with WebServer() as server:
        findings, answer = asked(server.url)

    assert answer is not None
    assert "directly (NO_PROXY)" in findings[0].what


@pytest.mark.parametrize(
    ("host", "no_proxy", "expected"),
    [
        ("tracker.corp", "*", True),
        ("tracker.corp", "corp", True),
        ("tracker.corp", ".corp", True),
        ("tracker.corp", "*.corp", True),
        ("tracker.corp", "other, tracker.corp:443", True),
        ("tracker.corp", "tracker.corp:80", False),
        ("trackercorp", "corp", False),
        ("10.1.2.3", "10.0.0.0/8", True),
        ("10.1.2.3", "10.1.2.3", True),
        ("11.1.2.3", "10.0.0.0/8", False),
        ("::1", "::1", True),
        ("fd00::7", "fd00::/8", True),
        ("tracker.corp", "", False),
        ("tracker.corp", ",,", False),
    ],
)
def test_no_proxy_lists_names_addresses_and_networks(host: str, no_proxy: str, *, expected: bool) -> None:
    assert bypasses(host, 443, no_proxy) is expected


@pytest.mark.parametrize("proxy", ["socks5://u:SENTINEL@localhost:1080", "https://u:SENTINEL@localhost:3128"])
def test_a_proxy_of_another_kind_is_not_guessed_about(proxy: str) -> None:
    (finding,), answer = asked("https://tracker.invalid", proxy=proxy)

    assert (finding.level, answer) == (Level.WARN, None)
    assert SENTINEL not in repr(finding)


# --- no way ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proxied", [False, True])
def test_a_name_that_does_not_resolve_is_a_name_lookup(*, proxied: bool) -> None:
    name = "no-such-host.invalid"

    finding = refused("http://tracker/" if proxied else f"http://{name}/", proxy=f"{name}:3128" if proxied else None)

    assert f"name lookup of {name} failed" in finding.what
    assert ("proxy" in finding.what) is proxied
    assert f"getent hosts {name}" in finding.hint


def test_a_name_that_cannot_be_one_is_a_name_lookup_too() -> None:
    assert "name lookup" in refused(f"http://{'x' * 70}.test/").what


@pytest.mark.parametrize("proxied", [False, True])
def test_a_port_where_nobody_listens_is_called_so(*, proxied: bool) -> None:
    place = f"localhost:{free_port()}"

    finding = refused("https://tracker" if proxied else f"https://{place}", proxy=place if proxied else None)

    assert f"nothing listens at {'proxy ' if proxied else ''}{place}" in finding.what


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("proxied", [False, True])
def test_a_black_hole_costs_no_more_than_the_time_limit(scheme: str, *, proxied: bool) -> None:
    with BlackHole() as hole:
        began_s = time.monotonic()
        url = f"{scheme}://tracker" if proxied else hole.url.replace("http://", f"{scheme}://")
        finding = refused(url, proxy=hole.url if proxied else None, timeout_s=0.3)
        took_s = time.monotonic() - began_s

    assert "does not answer in time" in finding.what
    assert finding.what.startswith("proxy") is proxied
    assert took_s < 5


@pytest.mark.parametrize(("words", "expected"), [(b"SSH-2.0-OpenSSH_9\r\n", "no HTTP"), (b"", "closes the connection")])
def test_what_is_no_http_is_called_so(words: bytes, expected: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(words)

        thread = threading.Thread(target=serve)
        thread.start()
        finding = refused(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()

    assert expected in finding.what


def test_an_answer_without_an_end_is_cut_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    connection.sendall(b"event\n")
                    time.sleep(0.01)

        thread = threading.Thread(target=drip)
        thread.start()
        _, answer = asked(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3)
        thread.join()

    assert answer is not None
    assert answer.body.startswith(b"event")


@pytest.mark.parametrize("url", ["", "tracker", "ftp://tracker", "http://", "http://tracker:port", "http://[::1"])
def test_what_is_no_address_is_called_so(url: str) -> None:
    assert "address" in refused(url).what


# --- answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "level"), [(200, Level.OK), (401, Level.OK), (404, Level.OK), (503, Level.WARN)])
def test_any_answer_of_the_server_is_an_answer(status: int, level: Level) -> None:
    with WebServer() as server:
        server.reply = Reply(status)
        findings, answer = asked(server.url, method="POST", body=b"{}", headers={"X-Key": SENTINEL})

    assert answer is not None
    assert answer.status == status
    assert findings[0].level is level
    assert f"answers {status}" in findings[0].what
    assert server.requests[0][1]["x-key"] == SENTINEL
    assert SENTINEL not in repr((findings, answer))


def test_a_redirect_is_told_with_its_place_and_not_followed() -> None:
    with WebServer() as server:
        server.reply = Reply(302, {"Location": f"https://u:{SENTINEL}@elsewhere/login?token={SENTINEL}"})
        findings, answer = asked(server.url)

    assert answer is not None
    assert findings[0].level is Level.WARN
    assert "https://elsewhere/login" in findings[0].what
    assert SENTINEL not in repr(findings)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("shift_s", "level", "word"), [(0, Level.OK, "agrees"), (60, Level.WARN, "behind"), (-60, Level.WARN, "ahead of")]
)
def test_a_clock_that_differs_by_more_than_five_seconds_is_told(shift_s: float, level: Level, word: str) -> None:
    with WebServer() as server:
        server.reply = Reply(clock_shift_s=shift_s)
        findings, _ = asked(server.url)

    assert findings[1].level is level
    assert word in findings[1].what


@pytest.mark.parametrize("headers", [{}, {"date": "yesterday"}, {"date": "Mon, 01 Jan 2024 00:00:00 GMT", "age": "9"}])
def test_a_server_that_does_not_tell_the_time_is_not_judged(headers: dict[str, str]) -> None:
    assert clock_finding(Answer(200, headers, b""), time.time()) is None


def test_user_and_password_in_the_address_are_sent_and_not_shown() -> None:
    with WebServer() as server:
        findings, _ = asked(server.url.replace("//", f"//user:{SENTINEL}@") + f"/?key={SENTINEL}")

    assert server.requests[0][1]["authorization"].startswith("Basic ")
    assert SENTINEL not in repr(findings)
    assert shown(f"http://user:{SENTINEL}@[::1]:5000/a?b={SENTINEL}") == "http://[::1]:5000/a"


def test_a_key_that_no_header_can_carry_is_refused_unseen() -> None:
    with WebServer() as server:
        finding = refused(server.url, headers={"Authorization": f"Bearer {SENTINEL}\r\nX: y"})

    assert "key" in finding.what
    assert SENTINEL not in repr(finding)
