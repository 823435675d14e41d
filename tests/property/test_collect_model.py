"""Whatever is done to files, and whenever the collector is killed: no line and no row comes twice, and none is missing.

A model writes, appends, truncates, rewrites, renames and removes; kills come at any of the points where something has
just become durable or was about to. Every line and every row is one of a kind, so that what arrived can be compared.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.collecting import Collected, Killed
from support.seeds import seeded
from verl_shipper.collect import logs, tables
from verl_shipper.collect.ledger import Ledger
from verl_shipper.collect.streams import Streams

ROUNDS = 8
ACTIONS = 60


class Killer:
    """Kills at a random call of what changes the world."""

    def __init__(self, chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chance = chance
        self.is_armed = False
        self.kills = 0
        places: list[tuple[Any, str]] = [
            (Ledger, name) for name in ("intend", "settle", "put", "put_plan", "add", "move")
        ]
        places += [(Streams, "append"), (Streams, "sync"), (Streams, "end")]
        for owner, name in places:
            monkeypatch.setattr(owner, name, self.around(getattr(owner, name)))

    def around(self, real: Any) -> Any:
        def act(*given: Any, **named: Any) -> Any:
            self.perhaps()
            result = real(*given, **named)
            self.perhaps()
            return result

        return act

    def perhaps(self) -> None:
        if self.is_armed and self.chance.random() < 0.02:
            self.kills += 1
            raise Killed


class Model:
    """What lies in the folder, and what must come of it."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder = folder
        self.chance = chance
        self.numbers = itertools.count()
        self.ever: set[int] = set()

    def fresh(self, count: int) -> list[int]:
        made = list(itertools.islice(self.numbers, count))
        self.ever.update(made)
        return made

    def text(self, path: Path, count: int) -> str:
        numbers = self.fresh(count)
        if path.name[0].isdigit():
            return "".join(json.dumps({"output": str(number), "input": "x" * 20}) + "\n" for number in numbers)
        return "".join(json.dumps({"step": number, "data": {"n": number}}) + "\n" for number in numbers)

    def act(self) -> None:
        name = self.chance.choice(["1.jsonl", "2.jsonl", "3.jsonl", "a.jsonl", "b.jsonl"])
        path = self.folder / name
        is_dump = name[0].isdigit()
        action = self.chance.choice(["write", "append", "append", "append", "copy", "rename", "remove", "same", "torn"])
        count = self.chance.randrange(1, 30)
        if action == "write" or (is_dump and action in ("append", "torn")):
            path.write_text(self.text(path, count))
        elif action == "append":
            with open(path, "a") as file:
                file.write(self.text(path, count))
        elif action == "torn":
            with open(path, "a") as file:
                file.write('{"step": 5, "da\n')
        elif action == "copy" and path.exists() and is_dump:
            shutil.copyfile(path, self.folder / f"{self.chance.randrange(4, 9)}0.jsonl.new")
        elif action == "same" and path.exists() and is_dump:
            path.write_text(path.read_text())
        elif action == "rename" and path.exists() and not is_dump:
            path.rename(self.folder / f"c{next(self.numbers)}.jsonl")
        elif action == "remove" and path.exists():
            path.unlink()

    def present(self) -> set[int]:
        found = set()
        for path in self.folder.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    value = json.loads(line)
                    found.add(int(value["output"]) if "output" in value else value["step"])
        return found


@pytest.mark.parametrize("daemon_takes", [True, False])
def test_every_line_and_row_comes_once_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daemon_takes: bool
) -> None:
    chance = seeded(f"collect model {daemon_takes}")
    monkeypatch.setattr(tables, "PART_BYTES", 200)
    monkeypatch.setattr(logs, "RECORDS_MAX", 5)
    monkeypatch.setattr("verl_shipper.collect.collector.TURN_S", 0.001)
    monkeypatch.setattr("verl_shipper.collect.place.COST_SHARE", 1.0)
    monkeypatch.setattr("verl_shipper.collect.collector.CHORES_S", 0.0)
    killer = Killer(chance, monkeypatch)
    for number in range(ROUNDS):
        root = tmp_path / str(number)
        root.mkdir()
        bench = Collected(root)
        model = Model(bench.folder, chance)
        killer.is_armed = True
        for _ in range(ACTIONS):
            model.act()
            try:
                bench.turn(chance.randrange(0, 6))
            except Killed:
                bench.kill()
            if daemon_takes and chance.random() < 0.3:
                bench.take()
            if chance.random() < 0.02:
                bench.kill()
        while killer.is_armed:
            try:
                bench.settle()
                killer.is_armed = False
            except Killed:
                bench.kill()
        expected, arrived = model.present(), numbers(bench)

        assert [each for each, times in arrived.items() if times > 1] == [], f"round {number}: twice"
        assert expected - arrived.keys() == set(), f"round {number}: missing"
        assert arrived.keys() <= model.ever
        bench.close()
        shutil.rmtree(root)
    assert killer.kills > ROUNDS, "the killer sleeps"


def numbers(bench: Collected) -> Counter[int]:
    found: Counter[int] = Counter()
    for _, record in bench.records():
        if record.kind.name == "METRICS":
            found[record.body["n"]] += 1
        elif record.kind.name == "GENERATIONS":
            column = record.body["columns"].index("output")
            found.update(int(row[column]) for row in record.body["rows"])
    return found


def test_a_kill_between_any_two_steps_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point once, from the first on, until one comes that is never reached."""
    monkeypatch.setattr(tables, "PART_BYTES", 200)
    calls = itertools.count()
    fatal = [-1]

    def around(real: Any) -> Any:
        def act(*given: Any, **named: Any) -> Any:
            if next(calls) == fatal[0]:
                raise Killed
            result = real(*given, **named)
            if next(calls) == fatal[0]:
                raise Killed
            return result

        return act

    for owner, name in [
        (Ledger, "intend"),
        (Ledger, "settle"),
        (Streams, "append"),
        (Streams, "sync"),
        (Ledger, "put"),
    ]:
        monkeypatch.setattr(owner, name, around(getattr(owner, name)))
    for number in range(10_000):
        root = tmp_path / str(number)
        root.mkdir()
        bench = Collected(root)
        model = Model(bench.folder, random.Random(1))
        for name in ("1.jsonl", "a.jsonl"):
            (bench.folder / name).write_text(model.text(bench.folder / name, 12))
        (bench.folder / "x.pickle").write_bytes(os.urandom(600_000))
        calls, fatal[0] = itertools.count(), number
        was_killed = False
        try:
            bench.settle()
        except Killed:
            was_killed = True
            bench.kill()
        fatal[0] = -1
        bench.settle()

        assert numbers(bench) == Counter(model.ever), f"killed at {number}"
        assert sum("sha256" in record.body for record in bench.of("file")) == 1, f"killed at {number}"
        bench.close()
        shutil.rmtree(root)
        if not was_killed:
            assert number > 40
            return
