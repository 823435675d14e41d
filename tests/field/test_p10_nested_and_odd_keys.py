"""P10: nested dicts, odd keys, no dict at all. What the client writes the daemon reads; what clashes is counted."""

from __future__ import annotations

from support import oracle
from support.daemon import Daemon, shipper
from support.four_trackers import FourTrackers
from support.mlflow_server import MlflowServer
from support.oracle import Status
from support.site import Site
from support.trainer import run_script

TRAINER = """
import collections, enum, sys, types
import numpy as np
from decimal import Decimal
from omegaconf import OmegaConf
from verl_shipper_client import Client

class Kind(enum.Enum):
    RED = 1
    BLUE = 2

class Word(str, enum.Enum):
    RED = "red"

class View(collections.abc.Mapping):
    def __init__(self, **held): self.held = held
    def __getitem__(self, key): return self.held[key]
    def __iter__(self): return iter(self.held)
    def __len__(self): return len(self.held)

def deep(count, wrap, leaf=1.0):
    for _ in range(count):
        leaf = wrap(leaf)
    return leaf

def itself():
    data = {"ok": 1.0}
    data["data"] = data
    return data

def knot():
    data = {"ok": 1.0}
    data.update({f"way{i}": {"on": {"and": data}} for i in range(9)})
    return data

def two():
    left, right = {"ok": 1.0}, {"right": 2.0}
    left["r"], right["l"] = right, left
    return left

def view():
    data = View(ok=1.0)
    data.held["view"] = data
    return data

def cell():
    data = []
    data.append(data)
    return {"cell": data, "cells": [data, data], "ok": 1.0}

step = 0
with Client(sys.argv[1], "exp", run_id="published") as client:
    for data in (PUBLISHED):
        client.log(data, step=(step := step + 1))
    assert client.errors == 0
step = 0
with Client(sys.argv[1], "exp", run_id="siblings") as client:
    for data in (SIBLINGS):
        client.log(data, step=(step := step + 1))
    client.log({"last": 1.0}, step=step + 1)
    assert client.errors == 0
"""
LONG = '"k" * 9_999'
PLAIN = "3: 1.0, 2.5: 2.0, None: 3.0, True: 4.0, b'by': 5.0, ('t', b'u', None, 1): 6.0, (): 7.0, -1: 8.0"
PLAIN_NAMES = {"3": 1.0, "2.5": 2.0, "None": 3.0, "True": 4.0, "by": 5.0, "t/u/None/1": 6.0, "": 7.0, "-1": 8.0}
FOREIGN = "np.int64(4): 1.0, np.float32(0.5): 2.0, np.bool_(False): 3.0, np.str_('s'): 4.0, 2**70: 5.0, Word.RED: 6.0"
FOREIGN_NAMES = {"4": 1.0, "0.5": 2.0, "False": 3.0, "s": 4.0, str(2**70): 5.0, "red": 6.0}
# A record as Python text, the numbers that every tracker shows of it, and what is counted.
Row = tuple[str, dict[str, float], dict[str, int]]
PUBLISHED: list[Row] = [
    (
        '{"a": {"b": 1.0, "c": {"d": 2.0}}, "a/b": 9.0, 3: 1.0, ("x", 1): 2.0, "": 4.0, " lead": 5.0, "ok": 1.0}',
        {"a/b": 1.0, "a/c/d": 2.0, "3": 1.0, "x/1": 2.0, "": 4.0, " lead": 5.0, "ok": 1.0},
        {"key_clash": 1},
    ),
    ("{}", {}, {}),
    ("itself()", {"ok": 1.0}, {"inside_itself": 1}),
]
SIBLINGS: list[Row] = [
    # Keys of every type, alone and beside a value that needs a second look: the name is the same.
    (f"{{{PLAIN}}}", PLAIN_NAMES, {}),
    (f"{{{PLAIN}, 'odd': object()}}", PLAIN_NAMES, {"not_a_number": 1}),
    (f"{{{FOREIGN}}}", FOREIGN_NAMES, {}),
    (f"{{{FOREIGN}, 'odd': 1j}}", FOREIGN_NAMES, {"not_a_number": 1}),
    ("{Kind.RED: 1.0, Kind.BLUE: 2.0, Decimal('0.5'): 3.0}", {"Kind.RED": 1.0, "Kind.BLUE": 2.0, "0.5": 3.0}, {}),
    ("{object(): 1.0, object(): 2.0}", {"<object object>": 1.0}, {"key_clash": 1}),
    ("{float('nan'): 1.0, float('inf'): 2.0}", {"nan": 1.0, "inf": 2.0}, {}),
    # One name twice: the first in order keeps it.
    ('{3: 1.0, "3": 2.0}', {"3": 1.0}, {"key_clash": 1}),
    ('{"3": 1.0, 3: 2.0, 3.5: 3.0, "3.5": 4.0}', {"3": 1.0, "3.5": 3.0}, {"key_clash": 2}),
    ('{"a/b": 1.0, "a": {"b": 2.0}, ("a", "b"): 3.0}', {"a/b": 1.0}, {"key_clash": 2}),
    ('{"a": {"b": {"c": 1.0}, "b/c": 2.0}, "a/b": {"c": 3.0}}', {"a/b/c": 1.0}, {"key_clash": 2}),
    ('{"a": 1.0, "b": {"": 2.0}, "b/": 3.0}', {"a": 1.0, "b/": 2.0}, {"key_clash": 1}),
    ('{"a": "text", "b": {"c": None}, "b/c": 1.0}', {"b/c": 1.0}, {"text": 1, "none": 1}),  # no number, no clash
    ('{b"n": 1.0, "n": 2.0, "None": 3.0, None: 4.0}', {"n": 1.0, "None": 3.0}, {"key_clash": 2}),
    # Half of a UTF-16 pair in a key; several of them look the same.
    (r'{"cut \ud83d": 1.0, "\U0001F600": 2.0}', {"cut \ufffd": 1.0, "\U0001f600": 2.0}, {}),
    (r'{"\ud800": 1.0, "\udfff": 2.0, "\ufffd": 3.0, "ok": 4.0}', {"\ufffd": 1.0, "ok": 4.0}, {"key_clash": 2}),
    (r'{"\ud83d\ude00": 1.0, ("\udcff", 1): 2.0}', {"\U0001f600": 1.0, "\ufffd/1": 2.0}, {}),
    # Depth, below and beyond every limit on the way.
    ('deep(31, lambda x: {"d": x}, {"n": 1.0})', {"d/" * 31 + "n": 1.0}, {}),
    ('{"deep": deep(32, lambda x: {"d": x}), "ok": 1.0}', {"ok": 1.0}, {"too_deep": 1}),
    *(
        (f'{{"deep": deep({count}, lambda x: {{"d": x}}), "ok": 1.0}}', {"ok": 1.0}, {"too_deep": 1})
        for count in (500, 1000, 1023, 100_000)
    ),
    *(
        (f'{{"deep": deep({count}, lambda x: [x]), "ok": 1.0}}', {"ok": 1.0}, {"not_a_number": 1})
        for count in (1000, 1023, 100_000)
    ),
    ('{"deep": deep(1000, lambda x: {("t", 1): [x]}), "ok": 1.0}', {"ok": 1.0}, {"not_a_number": 1}),
    ('{deep(400, lambda x: (x,), "t"): 1.0, "ok": 1.0}', {"<too deep>": 1.0, "ok": 1.0}, {}),
    # What contains itself, on every way.
    ("knot()", {"ok": 1.0}, {"inside_itself": 9}),
    ("two()", {"ok": 1.0, "r/right": 2.0}, {"inside_itself": 1}),
    ("view()", {"ok": 1.0}, {"inside_itself": 1}),
    ("cell()", {"ok": 1.0}, {"not_a_number": 2}),
    # Dicts of other types, and none.
    ("collections.OrderedDict(a=1.0)", {"a": 1.0}, {}),
    ("collections.defaultdict(dict, a={'b': 1.0})", {"a/b": 1.0}, {}),
    ("collections.Counter('aab')", {"a": 2.0, "b": 1.0}, {}),
    ("collections.ChainMap({'a': 1.0}, {'b': {'c': 2.0}})", {"a": 1.0, "b/c": 2.0}, {}),
    ("types.MappingProxyType({'a': np.float32(0.5)})", {"a": 0.5}, {}),
    ("View(a=1.0, b=View(c=2.0))", {"a": 1.0, "b/c": 2.0}, {}),
    ("{'v': View(a=1.0), 'ok': 1.0}", {"v/a": 1.0, "ok": 1.0}, {}),
    (
        "OmegaConf.create({'a': {'b': 1.0}, 'missing': '???', 'same': '${a.b}', 'broken': '${no.such}', 'one': [1.0]})",
        {"a/b": 1.0, "same": 1.0},
        {"not_a_number": 3},
    ),
    ("{'c': OmegaConf.create({'a': 1.0, 'missing': '???'}), 'ok': 1.0}", {"c/a": 1.0, "ok": 1.0}, {"not_a_number": 1}),
    ("None", {}, {"none": 1}),
    ("0.5", {"value": 0.5}, {}),
    ("[0.5]", {"value": 0.5}, {}),
    ("[('a', 1.0)]", {}, {"not_a_number": 1}),
    ("'text'", {}, {"text": 1}),
    ("object()", {}, {"not_a_number": 1}),
    ('{"": 1.0}', {"": 1.0}, {}),
    ('{"": {"": {"": 1.0}}, "//": 2.0, "/": 3.0}', {"//": 1.0, "/": 3.0}, {"key_clash": 1}),
    ('{"a": {}, "b": {"c": {}}, "d": []}', {}, {"not_a_number": 1}),
    # Names of 10,000 characters that differ in the last one, and a path of such.
    (f'{{{LONG} + "a": 1.0, {LONG} + "b": 2.0}}', {"k" * 9_999 + "a": 1.0, "k" * 9_999 + "b": 2.0}, {}),
    (f'{{{LONG}: {{{LONG}: {{"n": 1.0}}}}, "ok": 1.0}}', {"k" * 9_999 + "/" + "k" * 9_999 + "/n": 1.0, "ok": 1.0}, {}),
    ('{f"k{i}": {"n": float(i)} for i in range(100)}', {f"k{i}/n": float(i) for i in range(100)}, {}),
]
RUNS = {"published": PUBLISHED, "siblings": SIBLINGS}
RECORDS = len(PUBLISHED) + len(SIBLINGS) + 5


def source() -> str:
    """The trainer with all records in it."""
    program = TRAINER
    for word, rows in (("PUBLISHED", PUBLISHED), ("SIBLINGS", SIBLINGS)):
        program = program.replace(f"({word})", "(" + "".join(f"{text},\n" for text, _, _ in rows) + ")")
    return program


def expected(run_id: str) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by name, over all records of a run."""
    points: dict[str, list[tuple[int, float]]] = {}
    for step, (_, numbers, _) in enumerate(RUNS[run_id], 1):
        for name, number in numbers.items():
            points.setdefault(name, []).append((step, number))
    if run_id == "siblings":
        points["last"] = [(len(SIBLINGS) + 1, 1.0)]
    return points


def assert_counted(status: Status, name: str) -> None:
    """Every record is delivered, and everything in them that no tracker can show is counted with its reason."""
    figures = status["backends"][name]
    assert figures["delivered"] == figures["logged"] == RECORDS, name
    for run_id, rows in RUNS.items():
        ignored: dict[str, int] = {}
        for _, _, counts in rows:
            for reason, count in counts.items():
                ignored[reason] = ignored.get(reason, 0) + count
        assert figures["runs"][run_id]["ignored_values"] == ignored, (name, run_id)


def test_p10_any_key_and_any_nesting_arrives_or_is_counted(site: Site, mlflow_server: MlflowServer) -> None:
    with FourTrackers(site, mlflow_server) as trackers, trackers.daemon("--backend", "console") as daemon:
        run_script(site, source(), trackers.project)
        status = daemon.wait_settled(RECORDS, timeout_s=120)
        oracle.assert_law(status, pending=0)

        for name in (*trackers.names, "console"):
            assert_counted(status, name)
        for name in trackers.names:
            for run_id in RUNS:
                points = expected(run_id)
                renamed: dict[str, str] = status["backends"][name]["runs"][run_id]["renamed"]
                shown = {renamed.get(key, key): key for key in points}
                assert len(shown) == len(points), (name, run_id)
                series = trackers.series(name, run_id)
                assert series.keys() == shown.keys(), (name, run_id)
                for each in shown:
                    found = [(step, float(value)) for step, value in series[each]]
                    oracle.assert_exactly(found, points[shown[each]], f"{name} {run_id} {each[:60]}")
            file = trackers.lines("siblings")
        words = daemon.words()

    oracle.assert_once_in_order(file)
    assert "step:1 - a/b:1.0 - a/c/d:2.0 - 3:1.0 - x/1:2.0 - :4.0 -  lead:5.0 - ok:1.0" in words
    assert f"step:{len(SIBLINGS) + 1} - last:1.0" in words


LIARS = """
import sys
from verl_shipper_client import Client

class Hides(dict):
    def items(self):
        return [(key, value) for key, value in super().items() if not key.startswith("_")]

class Grows(dict):
    def __iter__(self):
        return iter([*super().keys(), "grown"])
    def __len__(self):
        return 9

class Raises(dict):
    def items(self):
        raise RuntimeError("not now")

class Hostile:
    def __getattribute__(self, name):
        raise RuntimeError("do not touch")
    def __hash__(self):
        return 1
    def __str__(self):
        raise RuntimeError("no text")

with Client(sys.argv[1], "exp", run_id="r") as client:
    for step, data in enumerate((Hides(a=1.0, _b=2.0), Grows(a=1.0), Raises(a=1.0), {Hostile(): 1.0, "ok": 1.0},
                                 {"in": Hides(a=1.0, _b=2.0), "ok": 1.0}, {"in": Raises(a=1.0), "ok": 1.0})):
        client.log(data, step=step)
    client.log({"last": 1.0}, step=9)
    assert client.errors == 0
"""


def test_p10_dicts_that_lie_cost_at_most_their_own_record(site: Site) -> None:
    with Daemon(site, *site.file_backend()) as daemon:
        run_script(site, LIARS, "lies")
        status = daemon.wait_settled(9)
        oracle.assert_law(status, pending=0)
        told = shipper(site, "status", env={"COLUMNS": "300"}).stdout

    figures = status["backends"]["file"]
    lines = oracle.read_lines(site.output("lies", "exp", "r"))
    assert figures["delivered"] == len(lines)
    assert figures["dropped"] in ({}, {"unreadable": 9 - len(lines)})
    assert len(lines) == 9 or f"{9 - len(lines)} records dropped: unreadable" in told
    assert oracle.values(lines, "last") == [(9, 1.0)]
    assert {line.step: line.data for line in lines}[2] == {"a": 1.0}
    assert oracle.values(lines, "ok")[0][0] == 3
