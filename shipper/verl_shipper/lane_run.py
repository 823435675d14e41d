"""What a lane knows of one run: its intake, its backend, the state of its delivery.

Must not know: cursors' storage, the order of the stages. What a backend raises becomes an outcome or a line in the log.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from verl_shipper.backends.base import Backend, Outcome, Retry, RunInfo
from verl_shipper.lane_intake import Intake
from verl_shipper.lane_store import LaneStore, Sealed
from verl_shipper.policy.delivery import Delivery

log = logging.getLogger(__name__)

LOOK_S_MIN = 0.05  # how often a busy run is looked at for news, and a quiet one
LOOK_S_MAX = 1.0


@dataclass(slots=True)
class RunLane:
    """One run at this lane's backend."""

    run: RunInfo
    backend: Backend
    settings: dict[str, Any]  # the backend's own copy; what the run asks for comes in before it is opened
    intake: Intake
    delivery: Delivery = Delivery.IDLE
    attempt: int = 0
    due_s: float = 0.0
    hangs: int = 0  # uploads in a row that did not come back, over restarts of the lane
    refusals: int = 0  # records in a row that the tracker did not take, found one by one
    opened: bool = False
    must_ask: bool = True  # streams have come of which only the backend can say what is there
    has_outbox: bool = True  # until looked
    news_at_s: float | None = None
    look_s: float = 0.0
    look_pause_s: float = LOOK_S_MIN
    started_s: float = 0.0
    active_s: float = 0.0
    future: Future[Outcome] | None = None
    sealed: Sealed | None = None


class StoreMemory:
    """A backend's notes about one run."""

    def __init__(self, store: LaneStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id

    def get(self, key: str) -> Any:
        return self._store.get_note(self._run_id, key)

    def put(self, key: str, value: Any) -> None:
        self._store.put_note(self._run_id, key, value)


def outcome_of(run: RunLane, future: Future[Outcome]) -> Outcome:
    """What a backend answered; a Retry for what is no answer."""
    error = future.exception()
    if error is not None:
        log.warning("run %s: backend raised", run.run.run_id, exc_info=error)
        return Retry(f"{type(error).__name__}: {error}")
    outcome = future.result()
    return outcome if isinstance(outcome, Outcome) else Retry(f"the backend answered {outcome!r:.100}, no outcome")


def close_backend(run: RunLane) -> None:
    if run.opened:
        run.opened = False
        run.must_ask = True
        try:
            run.backend.close()
        except Exception:
            log.warning("run %s: backend raised while it closed", run.run.run_id, exc_info=True)
