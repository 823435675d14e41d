"""The link of a stream: its table, its clock, its offsets."""

from __future__ import annotations

import pytest

from verl_shipper_client.link import (
    HELLO_PAUSE_S_MAX,
    HELLO_PAUSE_S_MIN,
    REFUSED_PAUSE_S,
    SILENCE_S,
    TRANSITIONS,
    WINDOW_BYTES,
    Event,
    Link,
    State,
)
from verl_shipper_spool.wire import Ack, FromDaemon, Greet, Refuse, Welcome

ID = "a" * 32
MESSAGES: dict[Event, FromDaemon] = {
    Event.WELCOME: Welcome(ID, 10),
    Event.ACK: Ack(ID, 10),
    Event.GREET: Greet(ID),
    Event.REFUSE: Refuse(ID, "full"),
}


def _link_in(state: State, now_s: float = 0.0) -> Link:
    """A link that came into a state by events, as it would in life."""
    link = Link()
    if state is State.REFUSED:
        link.receive(MESSAGES[Event.REFUSE], now_s)
    elif state is not State.OFFLINE:
        link.hello_sent(now_s)
        if state is State.STREAMING:
            link.receive(Welcome(ID, 0), now_s)
            link.data_sent(100, now_s)
    assert link.state is state
    return link


def _cause(link: Link, event: Event) -> None:
    if event is Event.HELLO:
        link.hello_sent(0.0)
    elif event is Event.SILENCE:
        link.tick(SILENCE_S + 0.1)
    elif event is Event.RETRY:
        link.tick(REFUSED_PAUSE_S)
    else:
        link.receive(MESSAGES[event], 0.0)


@pytest.mark.parametrize(("state", "event"), TRANSITIONS, ids=lambda value: value.value)
def test_every_entry_of_the_table_is_reached_by_what_it_stands_for(state: State, event: Event) -> None:
    link = _link_in(state)

    _cause(link, event)

    assert link.state is TRANSITIONS[state, event]


def test_the_table_knows_every_message_in_every_state() -> None:
    assert {(state, event) for state in State for event in MESSAGES} <= set(TRANSITIONS)


def test_a_welcome_tells_where_to_begin_and_rewinds() -> None:
    link = _link_in(State.STREAMING)
    link.data_sent(500, 1.0)

    link.receive(Welcome(ID, 200), 2.0)

    assert (link.acked, link.sent) == (200, 200)


def test_an_ack_never_moves_back() -> None:
    link = _link_in(State.STREAMING)
    link.receive(Ack(ID, 80), 1.0)
    link.receive(Ack(ID, 40), 1.0)

    assert link.acked == 80


def test_an_ack_of_more_than_was_sent_is_believed() -> None:
    link = _link_in(State.STREAMING)

    link.receive(Ack(ID, 900), 1.0)

    assert (link.acked, link.sent) == (900, 900)


def test_the_window_bounds_what_is_in_flight() -> None:
    link = _link_in(State.STREAMING)
    link.receive(Ack(ID, 100), 0.0)
    assert link.room_bytes() == WINDOW_BYTES

    link.data_sent(100 + WINDOW_BYTES, 0.0)
    assert link.room_bytes() == 0

    link.receive(Ack(ID, 600), 0.0)
    assert link.room_bytes() == 500


@pytest.mark.parametrize("state", [State.OFFLINE, State.GREETING, State.REFUSED])
def test_nothing_is_sent_before_a_welcome(state: State) -> None:
    assert _link_in(state).room_bytes() == 0


def test_an_idle_link_is_never_silent() -> None:
    link = _link_in(State.STREAMING)
    link.receive(Ack(ID, 100), 0.0)

    link.tick(10_000.0)

    assert link.state is State.STREAMING


def test_silence_is_counted_from_the_first_byte_in_flight() -> None:
    link = _link_in(State.STREAMING)
    link.receive(Ack(ID, 100), 0.0)
    link.data_sent(200, 1000.0)
    link.data_sent(300, 1000.0 + SILENCE_S - 1)
    states = []
    for wait_s in (SILENCE_S - 0.1, SILENCE_S + 0.1):
        link.tick(1000.0 + wait_s)
        states.append(link.state)

    assert states == [State.STREAMING, State.OFFLINE]


def test_hellos_come_ever_more_slowly_until_somebody_answers() -> None:
    link = Link()
    now_s, pauses = 0.0, []
    for _ in range(8):
        assert link.hello_due(now_s)
        link.hello_failed(now_s)
        pauses.append(link.hello_at_s - now_s)
        now_s = link.hello_at_s

    assert pauses[0] == HELLO_PAUSE_S_MIN
    assert pauses == sorted(pauses)
    assert pauses[-1] == HELLO_PAUSE_S_MAX
    link.hello_sent(now_s)
    link.receive(Welcome(ID, 0), now_s)
    assert link.hello_pause_s == HELLO_PAUSE_S_MIN


def test_a_new_daemon_is_greeted_at_once() -> None:
    link = _link_in(State.STREAMING)

    link.receive(Greet(ID), 7.0)

    assert link.hello_due(7.0)


def test_a_refusal_is_respected_for_a_while_and_told() -> None:
    link = _link_in(State.STREAMING)
    link.receive(Refuse(ID, "node spool is full"), 100.0)
    assert link.refused_reason == "node spool is full"

    link.tick(100.0 + REFUSED_PAUSE_S - 0.1)
    assert not link.hello_due(100.0 + REFUSED_PAUSE_S - 0.1)

    link.tick(100.0 + REFUSED_PAUSE_S)
    assert link.hello_due(100.0 + REFUSED_PAUSE_S)


def test_acknowledgements_count_while_refused() -> None:
    link = _link_in(State.STREAMING)
    link.receive(Refuse(ID, "full"), 1.0)

    link.receive(Ack(ID, 60), 1.0)

    assert (link.state, link.acked) == (State.REFUSED, 60)
