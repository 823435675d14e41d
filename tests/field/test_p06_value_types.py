"""P06: scalars that are no Python floats. Numbers arrive the same everywhere; all else is counted and costs nobody."""

from __future__ import annotations

from collections import Counter

from support import odd_values, oracle
from support.daemon import shipper
from support.four_trackers import FourTrackers
from support.mlflow_server import MlflowServer
from support.odd_values import PUBLISHED, PUBLISHED_IGNORED
from support.oracle import Status
from support.site import Site
from support.trainer import TESTS, run_script

TRAINER = """
import sys
from verl_shipper_client import Client

project, tests = sys.argv[1:]
sys.path.append(tests)
from support import odd_values

with Client(project, "exp", run_id="published") as client:
    client.log(odd_values.published() | {"ok": 1.0}, step=1)
    assert client.errors == 0
with Client(project, "exp", run_id="siblings") as client:
    numbers, others = odd_values.numbers(), odd_values.others()
    client.log({name: value for name, (value, _) in numbers.items()} | {"ok": 1.0}, step=1)
    client.log({name: value for name, (value, _) in others.items()} | {"ok": 1.0}, step=2)
    client.log({"in": {name: value for name, (value, _) in odd_values.others().items()}, "ok": 1.0}, step=3)
    for step, (name, (value, _)) in enumerate((numbers | odd_values.others()).items(), FIRST):
        client.log({"before": 1.0, "alone": {name: value}, "after": 2.0}, step=step)
    assert client.errors == 0
""".replace("FIRST", str(FIRST := 10))


def test_p06_numbers_of_every_type_arrive_and_all_else_is_counted(site: Site, mlflow_server: MlflowServer) -> None:
    with FourTrackers(site, mlflow_server) as trackers, trackers.daemon("--backend", "console") as daemon:
        run_script(site, TRAINER, trackers.project, TESTS)
        status = daemon.wait_settled(records(), timeout_s=120)

        for name in (*trackers.names, "console"):
            assert_counted(status, name)
        numbers = {key: number for key, (_, number) in odd_values.numbers().items()}
        everywhere: dict[str, list[tuple[int | None, float]]] = {
            "ok": [(step, 1.0) for step in (1, 2, 3)],
            "before": [(step, 1.0) for step in range(FIRST, FIRST + len(numbers) + len(odd_values.others()))],
            "after": [(step, 2.0) for step in range(FIRST, FIRST + len(numbers) + len(odd_values.others()))],
            **{key: [(1, number)] for key, number in numbers.items()},
            **{f"alone/{key}": [(step, number)] for step, (key, number) in enumerate(numbers.items(), FIRST)},
        }
        for name in trackers.names:
            assert shown(trackers, name, "published") == {
                key: [(1, number)] for key, number in (PUBLISHED | {"ok": 1.0}).items()
            }, name
            found = shown(trackers, name, "siblings")
            assert found.keys() == everywhere.keys(), name
            for key, points in everywhere.items():
                assert found[key] == points, (name, key)
        told = shipper(site, "status", env={"COLUMNS": "400"}).stdout
        words = daemon.words()

    assert "values that it cannot show" in told
    printed = next(line for line in words.splitlines() if line.startswith("step:1 - f32:"))
    pairs = dict(pair.split(":") for pair in printed.split(" - ")[1:])
    assert {key: float(value) for key, value in pairs.items()} == PUBLISHED | {"ok": 1.0}
    printed = next(line for line in words.splitlines() if line.startswith("step:1 - float64:"))
    pairs = dict(pair.split(":") for pair in printed.split(" - ")[1:])
    assert {key: float(value) for key, value in pairs.items()} == numbers | {"ok": 1.0}


def records() -> int:
    """Of both runs, with their beginnings and ends."""
    return 3 + 2 + 3 + len(odd_values.numbers()) + len(odd_values.others())


def assert_counted(status: Status, name: str) -> None:
    """The account of one backend: every record delivered, every other value counted with its reason."""
    oracle.assert_law(status, pending=0)
    figures = status["backends"][name]
    assert figures["delivered"] == figures["logged"] == records(), name
    once = Counter(reason for _, reason in odd_values.others().values())
    assert figures["runs"]["published"]["ignored_values"] == PUBLISHED_IGNORED, name
    assert figures["runs"]["siblings"]["ignored_values"] == {reason: 3 * count for reason, count in once.items()}, name


def shown(trackers: FourTrackers, name: str, run_id: str) -> dict[str, list[tuple[int | None, float]]]:
    """All points in the order of their steps, as floats: how a tracker writes a whole number is its own affair."""
    series = trackers.series(name, run_id).items()
    return {key: sorted((step or 0, float(value)) for step, value in points) for key, points in series}
