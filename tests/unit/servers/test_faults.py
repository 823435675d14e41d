"""Each fault of servers/faults.py, as a client with a real socket meets it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from servers.faults import Fault, Rule
from servers.process import ServerProcess
from support.processes import wait_for

ANSWER_S = 10.0


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("wandb_server", tmp_path_factory.mktemp("faults")) as server:
        yield server


@pytest.fixture
def server(started: ServerProcess) -> Iterator[ServerProcess]:
    started.rules()
    yield started
    started.rules()


def send(
    server: ServerProcess, name: str, padding: str = "", timeout_s: float = ANSWER_S
) -> tuple[int, http.client.HTTPMessage]:
    """Ask for a run called `name` to be made; status and headers of the answer."""
    query = {"query": "mutation UpsertBucket { x }", "variables": {"project": "p", "name": name, "notes": padding}}
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)) as connection:
        connection.request("POST", "/graphql", json.dumps(query).encode(), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers


def applied(server: ServerProcess, name: str) -> bool:
    return f"tester/p/{name}" in server.state()["runs"]


STATUSES = {
    Fault.ERROR: 500,
    Fault.BUSY: 503,
    Fault.BAD: 400,
    Fault.REFUSED: 401,
    Fault.FORBIDDEN: 403,
    Fault.TIMEOUT: 408,
    Fault.TOO_LARGE: 413,
    Fault.RATE_LIMIT: 429,
}


@pytest.mark.parametrize(("fault", "status"), STATUSES.items(), ids=lambda value: getattr(value, "value", None))
def test_an_error_is_answered_and_nothing_is_applied(server: ServerProcess, fault: Fault, status: int) -> None:
    with server.failing(Rule(fault)):
        assert send(server, fault.value)[0] == status

    assert not applied(server, fault.value)
    assert send(server, fault.value)[0] == 200
    assert applied(server, fault.value)


def test_a_rate_limit_says_when_to_come_again(server: ServerProcess) -> None:
    server.rules(Rule(Fault.RATE_LIMIT, retry_after_s=2), Rule(Fault.BUSY))

    assert send(server, "limited")[1]["Retry-After"] == "2"
    server.rules(Rule(Fault.RATE_LIMIT, retry_after_s=0.5))
    assert send(server, "limited")[1]["Retry-After"] == "0.5"
    server.rules(Rule(Fault.RATE_LIMIT))
    assert send(server, "limited")[1]["Retry-After"] is None


def test_a_lost_answer_was_applied(server: ServerProcess) -> None:
    with server.failing(Rule(Fault.LOST)):
        assert send(server, "lost")[0] == 503

    assert applied(server, "lost")


@pytest.mark.parametrize(("fault", "is_applied"), [(Fault.RESET, False), (Fault.SWALLOW, True)])
def test_a_cut_connection_is_reset(server: ServerProcess, fault: Fault, is_applied: bool) -> None:
    with server.failing(Rule(fault)), pytest.raises(ConnectionResetError) as caught:
        send(server, fault.value)

    assert not isinstance(caught.value, http.client.RemoteDisconnected)  # FIN
    assert applied(server, fault.value) is is_applied


def test_slow_answers_late_and_as_usual(server: ServerProcess) -> None:
    begun_s = time.monotonic()
    with server.failing(Rule(Fault.SLOW, slow_s=0.3)):
        assert send(server, "slow")[0] == 200

    assert time.monotonic() - begun_s >= 0.3
    assert applied(server, "slow")


def test_a_hang_lasts_until_the_rules_change(server: ServerProcess) -> None:
    ends: list[BaseException] = []

    def ask() -> None:
        try:
            send(server, "hung")
        except OSError as error:
            ends.append(error)

    server.rules(Rule(Fault.HANG))
    with pytest.raises(TimeoutError):
        send(server, "hung", timeout_s=0.3)
    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: len([r for r in server.requests() if r["fault"] == "hang"]) == 2, ANSWER_S, "it came in")
    assert asking.is_alive()
    server.rules()
    asking.join(ANSWER_S)

    assert [type(end) for end in ends] == [ConnectionResetError]
    assert not applied(server, "hung")
    assert send(server, "hung")[0] == 200


def test_a_stopped_server_takes_connections_and_never_answers(server: ServerProcess) -> None:
    server.pause()
    try:
        with pytest.raises(TimeoutError):
            send(server, "stopped", timeout_s=0.3)
    finally:
        server.resume()

    assert send(server, "stopped")[0] == 200


def test_a_killed_server_refuses_until_it_is_started_again_at_its_port(tmp_path: Path) -> None:
    with ServerProcess("wandb_server", tmp_path) as server:
        assert send(server, "before")[0] == 200
        server.kill()
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", server.port), ANSWER_S):
            pass

        server.start()
        assert applied(server, "before")


def test_a_rule_counts_its_times_and_the_next_rule_follows(server: ServerProcess) -> None:
    server.rules(Rule(Fault.BUSY, times=2), Rule(Fault.ERROR, times=1))

    assert [send(server, "times")[0] for _ in range(4)] == [503, 503, 500, 200]


def test_each_distinct_body_meets_its_own_tries(server: ServerProcess) -> None:
    server.rules(Rule(Fault.LOST, each=2))

    statuses = [(send(server, "one")[0], send(server, "two")[0]) for _ in range(3)]

    assert statuses == [(503, 503), (503, 503), (200, 200)]


def test_a_rule_chooses_by_path_content_and_size(server: ServerProcess) -> None:
    server.rules(
        Rule(Fault.BUSY, path="^PUT /storage"),
        Rule(Fault.FORBIDDEN, path="^POST /graphql", contains='"this one"'),
        Rule(Fault.TOO_LARGE, above_bytes=10_000),
    )

    assert send(server, "this one")[0] == 403
    assert send(server, "another", padding="x" * 10_000)[0] == 413
    assert send(server, "another", padding="x" * 5_000)[0] == 200


def test_every_request_is_noted_with_the_fault_it_met(server: ServerProcess) -> None:
    before = len(server.requests())
    with server.failing(Rule(Fault.BUSY, times=1)):
        send(server, "noted")
        send(server, "noted")

    noted = server.requests()[before:]
    assert [(r["method"], r["path"], r["fault"]) for r in noted] == [
        ("POST", "/graphql", "busy"),
        ("POST", "/graphql", None),
    ]
    assert noted[0]["bytes"] > 0
    assert noted[0]["time_s"] < noted[1]["time_s"]
