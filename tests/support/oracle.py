"""The oracle: what must be true at the destinations, whatever happened on the way.

    file      every line is strict JSON; ids are unique; ordinals of a stream come in order and without a gap
    mlflow    one run per run id; every (step, value) of a key once
    status    logged = delivered + sampled_out + dead_lettered + sum(dropped) + pending, per backend and per run

Must not know: daemons, kills. On failure: AssertionError that names the first few records in question.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

MLFLOW_READER = Path(__file__).with_name("mlflow_reader.py")
Status = dict[str, Any]  # the JSON of `verl-shipper status --json`

FIGURES = {"logged", "delivered", "sampled_out", "dead_lettered", "dropped", "pending", "parked", "last_error"}


@dataclass(frozen=True, slots=True)
class Line:
    """One record at the backend `file`."""

    kind: str
    run_id: str
    rank: int
    seq: int
    step: int | None
    time_ns: int
    data: Any
    id: str

    @property
    def stream_id(self) -> str:
        return self.id.partition(":")[0]

    @property
    def ordinal(self) -> int:
        return int(self.id.partition(":")[2])


def read_lines(path: Path) -> list[Line]:
    """All records of a file, strictly: a torn last line, a bare NaN or an unknown field is an error."""
    if not path.exists():
        return []
    content = path.read_bytes()
    assert content.endswith(b"\n") or not content, f"{path} ends in a torn line: {content[-80:]!r}"
    return [_line(text) for text in content.decode("utf-8").splitlines()]


def complete_lines(path: Path) -> list[Line]:
    """Records of a file that may be growing: an unfinished last line is not yet one."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    return [_line(text) for text in whole.decode("utf-8").splitlines()]


def _line(text: str) -> Line:
    fields = json.loads(text, parse_constant=_not_json)
    assert set(fields) == set(Line.__slots__), f"fields {sorted(fields)}"
    return Line(**fields)


def _not_json(word: str) -> Any:
    raise AssertionError(f"not strict JSON: {word}")


def assert_once_in_order(lines: Sequence[Line], *, gaps: bool = False) -> None:
    """Every id once; ordinals of each stream ascend from 0, and without a gap unless `gaps`."""
    doubles = [line_id for line_id, count in Counter(line.id for line in lines).items() if count > 1]
    assert not doubles, f"{len(doubles)} records twice: {doubles[:5]}"
    by_stream: dict[str, list[int]] = defaultdict(list)
    for line in lines:
        by_stream[line.stream_id].append(line.ordinal)
    for stream_id, ordinals in by_stream.items():
        assert ordinals == sorted(ordinals), f"stream {stream_id} is out of order: {_first_descent(ordinals)}"
        if not gaps:
            assert ordinals == list(range(len(ordinals))), f"stream {stream_id} has gaps: {ordinals[:5]}..."


def _first_descent(ordinals: Sequence[int]) -> str:
    for before, after in pairwise(ordinals):
        if after < before:
            return f"{after} behind {before}"
    return "nowhere"


def values(lines: Iterable[Line], key: str) -> list[tuple[int | None, Any]]:
    """(step, value) of a metric, in the order of the file."""
    return [(line.step, line.data[key]) for line in lines if line.kind == "metrics" and key in line.data]


def of_kind(lines: Iterable[Line], kind: str) -> list[Line]:
    return [line for line in lines if line.kind == kind]


def assert_exactly(found: Sequence[Any], expected: Iterable[Any], where: str) -> None:
    """`found` holds each of `expected` once and nothing else; order is not looked at."""
    want = Counter(expected)
    have = Counter(found)
    missing = sorted((want - have).elements(), key=str)
    surplus = sorted((have - want).elements(), key=str)
    assert not missing, f"{where}: {len(missing)} missing of {sum(want.values())}: {missing[:8]}"
    assert not surplus, f"{where}: {len(surplus)} too many or twice: {surplus[:8]}"


def assert_ledger(found: Sequence[int], ledger: Sequence[int], kills: int, where: str) -> None:
    """Every value of the ledger once; beyond the ledger at most one value per kill of a writer."""
    doubles = [value for value, count in Counter(found).items() if count > 1]
    assert not doubles, f"{where}: twice: {sorted(doubles)[:8]}"
    missing = sorted(set(ledger) - set(found))
    assert not missing, f"{where}: {len(missing)} of {len(ledger)} missing: {missing[:8]}"
    extra = sorted(set(found) - set(ledger))
    assert len(extra) <= kills, f"{where}: {len(extra)} records that nobody logged: {extra[:8]}"


def assert_law(status: Status, *, pending: int | None = None) -> None:
    """The law of accounting holds for every backend, in total and per run, and the runs add up to the total."""
    assert status["backends"], "no backend in status"
    for name, total in status["backends"].items():
        assert set(total) >= FIGURES, f"{name} lacks {FIGURES - set(total)}"
        runs = total.get("runs", {})
        for where, figures in [(name, total), *((f"{name}/{run}", runs[run]) for run in runs)]:
            assert figures["logged"] == accounted(figures), f"{where}: the law is broken: {figures}"
            if pending is not None and where == name:
                assert figures["pending"] == pending, f"{where}: {figures['pending']} pending"
        for figure in ("logged", "delivered", "sampled_out", "dead_lettered", "pending"):
            added = sum(run[figure] for run in runs.values())
            assert added == total[figure], f"{name}: runs add up to {added} {figure}, total says {total[figure]}"


def accounted(figures: dict[str, Any]) -> int:
    """The right side of the law."""
    dropped: int = sum(figures["dropped"].values())
    return dropped + sum(int(figures[name]) for name in ("delivered", "sampled_out", "dead_lettered", "pending"))


@dataclass(frozen=True, slots=True)
class MlflowRun:
    """One run as MLflow's own client tells it; `points` holds every point of the keys asked for, doubles included."""

    mlflow_id: str
    name: str
    status: str
    tags: dict[str, str]
    params: dict[str, str]
    latest: dict[str, float]
    points: dict[str, list[list[float]]]
    artifacts: list[str]

    def history(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of every point."""
        return [(int(step), value) for step, value in self.points[key]]


def mlflow_runs(uri: str, project: str, *keys: str) -> list[MlflowRun]:
    """All runs of a project at MLflow."""
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(MLFLOW_READER), uri, project, *keys],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, f"cannot read mlflow at {uri}:\n{result.stderr[-3000:]}"
    return [MlflowRun(**run) for run in json.loads(result.stdout)]


def mlflow_run(uri: str, project: str, run_id: str, *keys: str) -> MlflowRun:
    """The one MLflow run of `run_id`: it names our id in one of its tags. There must be exactly one."""
    runs = [run for run in mlflow_runs(uri, project, *keys) if any(run_id in tag for tag in run.tags.values())]
    assert len(runs) == 1, f"{len(runs)} runs at mlflow for {run_id!r} in {project!r}"
    return runs[0]
