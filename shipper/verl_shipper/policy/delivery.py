"""The delivery of one run at one backend, as a table.

IDLE      nothing under way
SENDING   the first batch of the outbox is being uploaded
WAITING   a retry is due later
PARKED    an operator must act; looked at slowly
"""

from __future__ import annotations

import enum


class Delivery(enum.Enum):
    IDLE = "idle"
    SENDING = "sending"
    WAITING = "waiting"
    PARKED = "parked"


class Step(enum.Enum):
    SEND = "send"
    DELIVERED = "delivered"
    REJECTED = "rejected"
    RETRY = "retry"
    PARK = "park"


TRANSITIONS: dict[tuple[Delivery, Step], Delivery] = {
    (Delivery.IDLE, Step.SEND): Delivery.SENDING,
    (Delivery.WAITING, Step.SEND): Delivery.SENDING,
    (Delivery.PARKED, Step.SEND): Delivery.SENDING,
    (Delivery.SENDING, Step.DELIVERED): Delivery.IDLE,
    (Delivery.SENDING, Step.REJECTED): Delivery.IDLE,
    (Delivery.SENDING, Step.RETRY): Delivery.WAITING,
    (Delivery.SENDING, Step.PARK): Delivery.PARKED,
}


def halves(count: int) -> tuple[range, range]:
    """Two halves of a rejected batch, to find the one item that the tracker refuses in log2(count) steps."""
    assert count >= 2, count
    middle = count // 2
    return range(middle), range(middle, count)
