"""P09: integers and steps beyond the comfortable range. Here a tracker shows them, or says which it refuses and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support import oracle
from support.daemon import shipper
from support.four_trackers import FourTrackers
from support.mlflow_server import MlflowServer
from support.site import Site
from support.trainer import run_script

TRAINER = """
import sys
import numpy as np
from verl_shipper_client import Client

project, run_id, steps, values = sys.argv[1:]
with Client(project, "exp", run_id=run_id) as client:
    for place, step in enumerate(eval(steps)):
        client.log({"n": place, f"at/{place}": float(place)}, step=step)
    client.log({f"v/{place}": value for place, value in enumerate(eval(values))}, step=6)
    client.log({"n": 100.0, "after": 1.0}, step=7)
"""
PUBLISHED = "[2**31, 2**48 + 1, 2**53 + 1, 2**63, -1, 3.0, np.int64(5), None]"
VALUES = "[2**64, -2**63 - 1, 10**30]"
SIBLINGS = """[-2**31, 2**32, 2**48, np.int32(4), np.float64(2.0), 2**63 - 1, -2**63, True, 2**64, 10**30, 3.5, "7",
    float("nan"), np.uint64(2**63 + 5), -5, 0]"""
VALUES_TOO = "[2**63, 2**63 - 1, -2**63, 2**53 + 1, 10**308, 10**309, -10**400, np.uint64(2**64 - 1), 1e-320]"
# The steps as they are kept: what is no whole number of 64 bits is no step.
STEPS = {
    "published": [2**31, 2**48 + 1, 2**53 + 1, None, -1, 3, 5, None],
    "siblings": [-(2**31), 2**32, 2**48, 4, 2, 2**63 - 1, -(2**63), 1, *[None] * 6, -5, 0],
}
NUMBERS: dict[str, list[float | None]] = {
    "published": [2.0**64, -(2.0**63), 1e30],
    "siblings": [2.0**63, 2.0**63, -(2.0**63), 2.0**53, 1e308, None, None, 2.0**64, 1e-320],
}


def test_p09_numbers_and_steps_out_of_the_ordinary_are_shown_or_refused_with_a_reason(
    site: Site, mlflow_server: MlflowServer
) -> None:
    with FourTrackers(site, mlflow_server) as trackers, trackers.daemon() as daemon:
        run_script(site, TRAINER, trackers.project, "published", PUBLISHED, VALUES)
        run_script(site, TRAINER, trackers.project, "siblings", SIBLINGS, VALUES_TOO)
        status = daemon.wait_settled(12 + 20, timeout_s=120)
        oracle.assert_law(status, pending=0)

        for name in trackers.names:
            for run_id, steps in STEPS.items():
                figures = status["backends"][name]["runs"][run_id]
                shown = [_shown(name, steps[: place + 1]) for place in range(len(steps))]
                for place, step in enumerate(shown):
                    expected = [] if step == REFUSED else [(step, float(place))]
                    assert trackers.values(name, run_id, f"at/{place}") == expected, (name, run_id, place)
                assert figures["dead_lettered"] == shown.count(REFUSED), (name, figures)
                assert trackers.values(name, run_id, "after") == [(7, 1.0)], name
                for place, number in enumerate(NUMBERS[run_id]):
                    values = [float(value) for _, value in trackers.values(name, run_id, f"v/{place}")]
                    assert values == ([] if number is None else [number]), (name, run_id, place)
                assert figures["ignored_values"].get("not_a_number", 0) == NUMBERS[run_id].count(None), name
                # Under one name: all that the tracker does not refuse; SwanLab counts what is not above the last step.
                told = len(trackers.values(name, run_id, "n"))
                late = sum(figures["ignored_values"].get(reason, 0) for reason in ("same_step", "late_step"))
                assert told + late == len(steps) + 1 - shown.count(REFUSED), (name, run_id, told, late)
        letters = shipper(site, "dead-letters", "list").stdout
    assert f"step {2**48 + 1}; SwanLab takes 0 to 2^48" in letters
    assert "step -1; SwanLab takes 0 to 2^48" in letters


REFUSED = "refused"


def _shown(name: str, steps: Sequence[int | None]) -> Any:
    """Where a tracker shows the last of these steps: without one at 0 (MLflow) or at the last one before it."""
    if name == "swanlab" and steps[-1] is not None and not 0 <= steps[-1] <= 2**48:
        return REFUSED
    if steps[-1] is not None or name == "file":
        return steps[-1]
    if name == "mlflow":
        return 0
    known = [step for step in steps if step is not None and (name == "wandb" or 0 <= step <= 2**48)]
    return known[-1] if known else 0
