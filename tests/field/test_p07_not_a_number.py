"""P07: NaN and infinities. Here every tracker shows them as well as it can, and no neighbour of theirs is lost."""

from __future__ import annotations

import math
from typing import Any

from support import oracle
from support.four_trackers import FourTrackers
from support.mlflow_server import MlflowServer
from support.site import Site
from support.trainer import run_script

TRAINER = """
import sys
import numpy as np
from verl_shipper_client import Client

project, = sys.argv[1:]
nan, inf = float("nan"), float("inf")
with Client(project, "exp", run_id="published", config={"lr": nan, "clip": inf}) as client:
    client.log({"loss": nan, "loss32": np.float32("nan"), "kl": inf, "g": -inf, "ok": 1.0}, step=1)
with Client(project, "exp", run_id="siblings") as client:
    client.log({"only": -nan}, step=0)                                  # a step of nothing else
    client.log({"deep": {"er": {"nan": np.float16("nan")}}, "list": [nan], "array": np.array([np.inf])}, step=7)
    client.log({"half": np.float16("inf"), "minus": np.float64("-inf"), "zero_d": np.array(nan), "ok": -0.0}, step=3)
    client.log({"only": 2.0, "ok": 1e308}, step=8)
    client.log_generations([("q", "a", nan), ("q2", "a2", -inf), ("q3", "a3", 1.0)], step=8)
"""
LARGEST = 1.7976931348623157e308  # as MLflow shows an infinity, docs/delivery-guarantees.md
SHOWN: dict[str, dict[str, Any]] = {
    "file": {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"},
    "mlflow": {"nan": "nan", "inf": LARGEST, "-inf": -LARGEST},
    "wandb": {"nan": "nan", "inf": math.inf, "-inf": -math.inf},
    "swanlab": {"nan": "nan", "inf": "nan", "-inf": "nan"},
}


def test_p07_not_a_number_is_shown_as_such_and_costs_no_neighbour(site: Site, mlflow_server: MlflowServer) -> None:
    with FourTrackers(site, mlflow_server) as trackers, trackers.daemon() as daemon:
        run_script(site, TRAINER, trackers.project)
        status = daemon.wait_settled(10, timeout_s=120)
        oracle.assert_law(status, pending=0)

        def points(name: str, run_id: str, key: str) -> list[tuple[int | None, Any]]:
            return [
                (step, "nan" if isinstance(value, float) and math.isnan(value) else value)
                for step, value in trackers.values(name, run_id, key)
            ]

        for name in trackers.names:
            assert status["backends"][name]["delivered"] == 10, name
            as_shown = SHOWN[name]
            for key, word in {"loss": "nan", "loss32": "nan", "kl": "inf", "g": "-inf"}.items():
                assert points(name, "published", key) == [(1, as_shown[word])], (name, key)
            assert points(name, "published", "ok") == [(1, 1.0)], name
            for key, step, word in (
                ("deep/er/nan", 7, "nan"),
                ("list", 7, "nan"),
                ("array", 7, "inf"),
                ("half", 3, "inf"),
                ("minus", 3, "-inf"),
                ("zero_d", 3, "nan"),
            ):
                assert points(name, "siblings", key) == [(step, as_shown[word])], (name, key)
            assert points(name, "siblings", "only") == [(0, as_shown["nan"]), (8, 2.0)], name
            assert sorted(points(name, "siblings", "ok")) == [(3, -0.0), (8, 1e308)], name
            ((at, rows),) = trackers.tables(name, "siblings")
            assert (at, len(rows), rows[2][:2]) == (8, 3, ["q3", "a3"]), name
            assert [str(row[2]).lower() for row in rows[:2]] == ["nan", "-infinity"], (name, rows)
