"""The link of one stream to the daemon, as a value fed with events. No socket, no clock, no thread.

    (state, event) → state            what it means
    OFFLINE    HELLO      GREETING    we said who we are
    GREETING   WELCOME    STREAMING   the daemon told where to begin
    GREETING   SILENCE    OFFLINE     nobody answered
    STREAMING  WELCOME    STREAMING   rewind: the daemon has less than we thought
    STREAMING  ACK        STREAMING   so much is safe there
    STREAMING  SILENCE    OFFLINE     bytes in flight and no answer: start again
    any        GREET      OFFLINE     the daemon is new: say hello at once
    any        REFUSE     REFUSED     it does not want us now
    REFUSED    RETRY      OFFLINE     ask again

A late answer in another state is taken for what it says: offsets only ever tell what the daemon has.
Invariant: 0 ≤ acked ≤ sent after every event, except that a WELCOME may move `sent` back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from verl_shipper_spool.wire import Ack, FromDaemon, Greet, Refuse, Welcome

WINDOW_BYTES = 8 * 1024 * 1024  # unacknowledged bytes in flight; bounds the daemon's debt and our memory
SILENCE_S = 5.0  # no answer for so long means: begin again
HELLO_PAUSE_S_MIN = 0.2
HELLO_PAUSE_S_MAX = 5.0
REFUSED_PAUSE_S = 30.0


class State(enum.Enum):
    OFFLINE = "offline"
    GREETING = "greeting"
    STREAMING = "streaming"
    REFUSED = "refused"


class Event(enum.Enum):
    HELLO = "hello"
    WELCOME = "welcome"
    ACK = "ack"
    GREET = "greet"
    REFUSE = "refuse"
    SILENCE = "silence"
    RETRY = "retry"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.OFFLINE, Event.HELLO): State.GREETING,
    (State.OFFLINE, Event.WELCOME): State.STREAMING,
    (State.OFFLINE, Event.ACK): State.OFFLINE,
    (State.OFFLINE, Event.GREET): State.OFFLINE,
    (State.OFFLINE, Event.REFUSE): State.REFUSED,
    (State.GREETING, Event.WELCOME): State.STREAMING,
    (State.GREETING, Event.ACK): State.GREETING,
    (State.GREETING, Event.GREET): State.OFFLINE,
    (State.GREETING, Event.REFUSE): State.REFUSED,
    (State.GREETING, Event.SILENCE): State.OFFLINE,
    (State.STREAMING, Event.WELCOME): State.STREAMING,
    (State.STREAMING, Event.ACK): State.STREAMING,
    (State.STREAMING, Event.GREET): State.OFFLINE,
    (State.STREAMING, Event.REFUSE): State.REFUSED,
    (State.STREAMING, Event.SILENCE): State.OFFLINE,
    (State.REFUSED, Event.WELCOME): State.STREAMING,
    (State.REFUSED, Event.ACK): State.REFUSED,
    (State.REFUSED, Event.GREET): State.OFFLINE,
    (State.REFUSED, Event.REFUSE): State.REFUSED,
    (State.REFUSED, Event.RETRY): State.OFFLINE,
}


@dataclass(slots=True)
class Link:
    """State and offsets of one stream's link."""

    state: State = State.OFFLINE
    acked: int = 0  # below: durable at the daemon
    sent: int = 0  # below: handed to the socket
    answered_at_s: float = 0.0
    hello_at_s: float = 0.0
    hello_pause_s: float = HELLO_PAUSE_S_MIN
    refused_reason: str = ""

    def receive(self, message: FromDaemon, now_s: float) -> None:
        """Take a message of the daemon about this stream."""
        self.answered_at_s = now_s
        match message:
            case Welcome(_, offset):
                self._step(Event.WELCOME)
                self.acked = max(self.acked, offset)
                self.sent = offset
                self.hello_pause_s = HELLO_PAUSE_S_MIN
            case Ack(_, offset):
                self._step(Event.ACK)
                self.acked = max(self.acked, offset)
                self.sent = max(self.sent, offset)
            case Greet():
                self._step(Event.GREET)
                self.hello_at_s = now_s
            case Refuse(_, reason):
                self._step(Event.REFUSE)
                self.refused_reason = reason
                self.hello_at_s = now_s + REFUSED_PAUSE_S

    def tick(self, now_s: float) -> None:
        """Let time pass: silence ends an attempt, a pause ends a refusal."""
        waiting = self.state is State.GREETING or (self.state is State.STREAMING and self.sent > self.acked)
        if waiting and now_s - self.answered_at_s > SILENCE_S:
            self._step(Event.SILENCE)
            self.hello_at_s = now_s + self.hello_pause_s
            self.hello_pause_s = min(self.hello_pause_s * 2, HELLO_PAUSE_S_MAX)
        elif self.state is State.REFUSED and now_s >= self.hello_at_s:
            self._step(Event.RETRY)

    def hello_due(self, now_s: float) -> bool:
        return self.state is State.OFFLINE and now_s >= self.hello_at_s

    def hello_sent(self, now_s: float) -> None:
        self._step(Event.HELLO)
        self.answered_at_s = now_s

    def hello_failed(self, now_s: float) -> None:
        """The socket has no peer: nothing left this process."""
        self.hello_at_s = now_s + self.hello_pause_s
        self.hello_pause_s = min(self.hello_pause_s * 2, HELLO_PAUSE_S_MAX)

    def room_bytes(self) -> int:
        """How many more bytes may be in flight."""
        if self.state is not State.STREAMING:
            return 0
        return max(WINDOW_BYTES - max(self.sent - self.acked, 0), 0)

    def data_sent(self, end_offset: int, now_s: float) -> None:
        if self.sent <= self.acked:
            self.answered_at_s = now_s  # silence is counted from the first byte in flight
        self.sent = end_offset

    def _step(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]
