"""The link under random events: no pair without an entry, no offset out of order, no greeting without an end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from verl_shipper_client.link import HELLO_PAUSE_S_MAX, REFUSED_PAUSE_S, SILENCE_S, WINDOW_BYTES, Link, State
from verl_shipper_spool.wire import Ack, Greet, Refuse, Welcome

ID = "a" * 32
_offsets = st.integers(0, 3 * WINDOW_BYTES)


class LinkMachine(RuleBasedStateMachine):
    """A sender that does what a sender may do, and a daemon that says whatever it likes whenever it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.link = Link()
        self.now_s = 0.0
        self.acked_before = 0

    @rule(by_s=st.floats(0.0, 2 * REFUSED_PAUSE_S))
    def time_passes(self, by_s: float) -> None:
        self.now_s += by_s
        self.link.tick(self.now_s)

    @precondition(lambda self: self.link.hello_due(self.now_s))
    @rule(peer=st.booleans())
    def greet(self, peer: bool) -> None:
        if peer:
            self.link.hello_sent(self.now_s)
        else:
            self.link.hello_failed(self.now_s)

    @precondition(lambda self: self.link.room_bytes() > 0)
    @rule(part=st.floats(0.0, 1.0))
    def send(self, part: float) -> None:
        size = max(int(self.link.room_bytes() * part), 1)
        self.link.data_sent(self.link.sent + size, self.now_s)

    @rule(offset=_offsets)
    def hear_welcome(self, offset: int) -> None:
        self.link.receive(Welcome(ID, offset), self.now_s)
        assert self.link.sent == offset
        assert self.link.state is State.STREAMING

    @rule(offset=_offsets)
    def hear_ack(self, offset: int) -> None:
        before = self.link.sent
        self.link.receive(Ack(ID, offset), self.now_s)
        assert self.link.sent >= before
        assert self.link.acked >= offset

    @rule()
    def hear_greet(self) -> None:
        self.link.receive(Greet(ID), self.now_s)
        assert self.link.hello_due(self.now_s)

    @rule()
    def hear_refusal(self) -> None:
        self.link.receive(Refuse(ID, "full"), self.now_s)
        assert self.link.room_bytes() == 0

    @invariant()
    def what_is_acknowledged_stays_so(self) -> None:
        assert 0 <= self.acked_before <= self.link.acked
        self.acked_before = self.link.acked

    @invariant()
    def never_more_in_flight_than_the_window(self) -> None:
        assert self.link.sent - self.link.acked <= WINDOW_BYTES

    @invariant()
    def waiting_has_an_end(self) -> None:
        link = self.link
        if link.state is State.OFFLINE:
            assert link.hello_at_s <= self.now_s + HELLO_PAUSE_S_MAX
        if link.state is State.REFUSED:
            assert link.hello_at_s <= self.now_s + REFUSED_PAUSE_S

    def teardown(self) -> None:
        """Left alone, every link asks again in the end."""
        if self.link.state is State.STREAMING and self.link.sent <= self.link.acked:
            return  # nothing to ask for
        self.now_s += max(SILENCE_S, REFUSED_PAUSE_S) + 0.1
        self.link.tick(self.now_s)
        self.now_s += HELLO_PAUSE_S_MAX
        assert self.link.hello_due(self.now_s)


TestLink = LinkMachine.TestCase
TestLink.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
