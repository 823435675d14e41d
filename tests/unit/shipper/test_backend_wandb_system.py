"""The facts of nodes at W&B, with the real SDK: their own axis, charts and summary of the training left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers.process import ServerProcess
from support.batches import TIME_NS, batch, item, metrics
from support.wandb_tracker import WandbTracker, finish, start
from verl_shipper.backends.base import Item
from verl_shipper.backends.wandb_rows import ROW_BYTES_MAX, STEP_KEY, plan
from verl_shipper.backends.wandb_system import ELAPSED_KEY
from verl_shipper_spool.record import RecordKind

SECOND = 10**9


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("wandb_server", tmp_path_factory.mktemp("wandb")) as made:
        yield made


@pytest.fixture
def wandb(server: ServerProcess, tmp_path: Path) -> Iterator[WandbTracker]:
    made = WandbTracker(server, tmp_path)
    yield made
    made.close()


def facts(ordinal: int, node: str = "n", **values: Any) -> Item:
    body = {"node": node, "values": values}
    return item(RecordKind.SYSTEM, body, ordinal=ordinal, step=None, time_ns=TIME_NS + 15 * ordinal * SECOND)


def axes(run: dict[str, Any]) -> dict[str, str]:
    """The x axis of every defined metric, as the server was told: by number in wandb's telemetry of definitions."""
    told = run["config"]["_wandb"]["m"]
    return {each["1"]: told[each["5"] - 1]["1"] for each in told if "1" in each and "5" in each}


def test_facts_have_their_own_axis_and_are_in_no_summary(wandb: WandbTracker) -> None:
    mixed = [
        metrics(1, {"loss": 1.0}),
        facts(2, cpu=5.0),
        metrics(3, {"loss": 2.0, "system/mine": 7.0}),
        facts(4, cpu=6.0),
    ]
    wandb.deliver(wandb.backend(), batch(start(), *mixed, facts(5, node="x*y", cpu=1.0), finish(6), run=wandb.run))

    rows = wandb.rows()
    assert [set(row) & {STEP_KEY, ELAPSED_KEY} for row in rows] == [
        *({STEP_KEY}, {ELAPSED_KEY}, {STEP_KEY}, {ELAPSED_KEY}, {ELAPSED_KEY}),
    ]
    assert [(row[ELAPSED_KEY], row["system/n/cpu"]) for row in rows if "system/n/cpu" in row] == [(30, 5), (60, 6)]
    run = wandb.at_server()
    assert axes(run)["system/n/cpu"] == ELAPSED_KEY
    assert not {"system/n/cpu", ELAPSED_KEY} & run["summary"].keys()
    assert (run["summary"]["loss"], run["summary"]["system/mine"]) == (2.0, 7.0)
    assert axes(run).get("system/mine") != ELAPSED_KEY  # a user's own name
    assert run["events"] == []
    wandb.assert_clean()


def test_facts_are_kept_without_a_server(wandb: WandbTracker) -> None:
    backend = wandb.backend(mode="offline", dir=str(wandb.folder / "out"), api_key_file=None)
    wandb.deliver(backend, batch(start(), metrics(1), facts(2, cpu=5.0), run=wandb.run))
    wandb.deliver(backend, batch(facts(3, cpu=5.0), finish(4), run=wandb.run))
    (folder,) = (wandb.folder / "out" / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    assert file.read_bytes().count(b"system/n/cpu") >= 2


def test_a_row_that_wandb_would_drop_without_a_word_is_refused() -> None:
    huge: Any = {f"{n:0400}": 0.123456789012345 for n in range(ROW_BYTES_MAX // 400)}
    made = plan(batch(metrics(0), facts(1, **huge)), {})
    assert (list(made.refused), len(made.rows)) == ([1], 1)
