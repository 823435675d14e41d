"""Which run a file belongs to, and whose node is sampled."""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.collecting import Collected, dump, samples, steps
from verl_shipper.collect import sampling
from verl_shipper.collect.runs import own_run_id

LONG_AGO_NS = 10**18


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Collected]:
    made = Collected(tmp_path)
    yield made
    made.close()


def collect(bench: Collected) -> set[str]:
    """The run of one dump."""
    (bench.folder / "1.jsonl").write_text(dump(samples(1, 1)))
    bench.settle()
    return bench.runs_of("generations")


def test_an_entry_may_name_the_run(bench: Collected) -> None:
    bench.begin_run("other")
    bench.entries = [bench.entry(run_id="mine")]

    assert collect(bench) == {"mine"}


def test_the_newest_run_of_the_entrys_names_is_taken(bench: Collected) -> None:
    for number, name in enumerate(("e", "e", "f")):
        bench.begin_run(f"r{number}", is_live=False, created_ns=LONG_AGO_NS + number, project="p", experiment=name)
    bench.entries = [bench.entry(project="p", experiment="e")]

    assert collect(bench) == {"r1"}


def test_without_names_the_only_run_that_lives_here_is_taken(bench: Collected) -> None:
    bench.begin_run("gone", is_live=False, project="p", experiment="e")
    bench.begin_run("alive", created_ns=LONG_AGO_NS, project="p", experiment="e")

    assert collect(bench) == {"alive"}


def test_of_two_that_live_none_is_guessed(bench: Collected) -> None:
    bench.begin_run("one")
    bench.begin_run("two")

    assert collect(bench) == {own_run_id("", "", str(bench.folder))}


def test_a_run_that_began_after_the_file_was_written_is_never_its_run(bench: Collected) -> None:
    (bench.folder / "0.jsonl").write_text(dump(samples(0, 1)))
    os.utime(bench.folder / "0.jsonl", (1_000_000, 1_000_000))
    bench.begin_run("young", project="p", experiment="e")
    bench.settle()

    assert bench.runs_of("generations") == {own_run_id("", "", str(bench.folder))}


def test_the_file_loggers_path_names_project_and_experiment(bench: Collected) -> None:
    bench.entries = [bench.entry(kind="metrics", recursive=True)]
    bench.begin_run("r", is_live=False, created_ns=LONG_AGO_NS, project="llm", experiment="grpo")
    for folder, name in (("llm", "grpo"), ("llm", "old")):
        (bench.folder / folder).mkdir(exist_ok=True)
        (bench.folder / folder / f"{name}.jsonl").write_text(dump(steps(0, 1)))
    bench.settle()

    path = str(bench.folder / "llm" / "old.jsonl")
    assert bench.runs_of("metrics") == {"r", own_run_id("llm", "old", path)}


def test_a_file_keeps_its_run_as_long_as_it_is_the_same(bench: Collected) -> None:
    bench.entries = [bench.entry(kind="metrics")]
    bench.begin_run("first", is_live=True, created_ns=LONG_AGO_NS)
    path = bench.folder / "x.jsonl"
    path.write_text(dump(steps(0, 1)))
    bench.settle()
    bench.begin_run("second", is_live=True)
    with open(path, "a") as file:
        file.write(dump(steps(1, 2)))
    bench.settle()

    assert bench.runs_of("metrics") == {"first"}


def test_streams_are_those_of_a_helper_of_the_run(bench: Collected) -> None:
    bench.begin_run("r", created_ns=LONG_AGO_NS, project="p", experiment="e")
    bench.entries = [bench.entry(rank=3)]
    collect(bench)

    (start,) = bench.of("run_start")
    assert start.body["forked"] is True
    assert (start.body["project"], start.body["experiment"], start.body["rank"]) == ("p", "e", 3)


class FakeFacts:
    """What node_facts.py promises."""

    closed = 0

    def sample(self) -> dict[str, float]:
        return {"cpu/percent": 12.5}

    def close(self) -> None:
        FakeFacts.closed += 1


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("fake_node_facts")
    module.NodeFacts = FakeFacts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_node_facts", module)
    monkeypatch.setattr(sampling, "FACTS", "fake_node_facts")


def test_every_run_that_lives_here_gets_one_sample_of_the_node_each_time(tmp_path: Path, facts: None) -> None:
    bench = Collected(tmp_path, interval_s=1.0)
    bench.entries = []
    bench.begin_run("dead", is_live=False)
    bench.start()
    bench.turn(3)
    assert bench.of("system") == []
    bench.begin_run("one")
    bench.begin_run("two")
    bench.until(lambda: len(bench.of("system")) >= 4, "two samples for each")

    assert bench.runs_of("system") == {"one", "two"}
    for record in bench.of("system"):
        assert (record.step, record.body) == (None, {"node": os.uname().nodename, "values": {"cpu/percent": 12.5}})
    bench.close()


def test_a_sampler_that_cannot_be_had_or_hangs_is_told_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sampling, "FACTS", "no_such_module_anywhere")
    bench = Collected(tmp_path, interval_s=1.0)
    bench.begin_run("one", created_ns=LONG_AGO_NS)
    assert collect(bench) == {"one"}
    collector = bench.collector
    assert collector is not None
    bench.until(collector.problems, "it is told")
    assert "no_such_module_anywhere" in collector.problems()[0]
    bench.close()

    sampler = sampling.Sampler(1.0)
    monkeypatch.setattr(sampler, "_turn", lambda: None)
    now_s = time.monotonic()
    sampler.due(now_s)
    sampler.due(now_s + 2 * sampling.HUNG_S)
    assert "do not come" in sampler.problem
