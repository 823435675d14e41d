"""What the contract suite knows of each tracker: one small Kit for a backend.

To have a new backend pass the suite: subclass Kit, add a line to KITS, `pytest tests/contract -k NAME`. A kit says

    settings          the section `backends.<name>`, as JSON
    points(run)       every number that the tracker shows of a run, as (key, step, value), in the order of their arrival
                      (of steps, where a tracker knows no arrival); asserts whatever else must hold of one run there

and makes the tracker fail, each until `heal`:

    gone()            nobody can reach it                 hang(run)       no request of this run gets an answer
    break_run(run)    nothing of this run is taken        lose_answers()  what comes is applied, its answer is lost
    poison()          body and step of a record that is refused for good from now on

A failure that a tracker cannot have stays unwritten: its tests are skipped with the reason. Three flags tell of a
tracker's nature: `repeats`, `takes_late`, `hangs_alone`; `record(…)` is what a test logs in place of a record where a
tracker shows no numbers. A kit lives as long as the session; every test has runs of its own.

Must not know: tests, lanes.
"""

from __future__ import annotations

import abc
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from contract.kit import NO_STEP, Kit, Point
from contract.trackio_kit import TrackioKit
from servers.faults import Fault, Rule
from servers.process import ServerProcess
from support import swanlab_reader, wandb_reader
from support.fault_http import FaultServer, Mode
from support.four_trackers import MlflowRest
from support.mlflow_trackers import TestTracker, _dispose
from verl_shipper.backends import known_names
from verl_shipper.backends.base import RunInfo
from verl_shipper_spool.record import Record, RecordKind

__all__ = ["KITS", "Kit", "names"]
SETTLE_S = 0.5


class FileKit(Kit):
    """A folder. Gone: a file has its place. Hanging: the run's file is a pipe that nobody reads."""

    backend = "file"

    def __init__(self, folder: Path, fixture: Callable[[str], Any]) -> None:
        super().__init__(folder, fixture)
        self._out, self._away = folder / "out", folder / "away"
        self._pipes: list[Path] = []

    @property
    def settings(self) -> dict[str, Any]:
        return {"dir": str(self._out)}

    def points(self, run: RunInfo) -> list[Point]:
        lines = [json.loads(line) for line in self._path(run).read_bytes().splitlines()]
        assert len({line["id"] for line in lines}) == len(lines)
        told = [(line["step"], line["data"]) for line in lines if line["kind"] == "metrics"]
        return [(key, step, float(value)) for step, data in told for key, value in data.items()]

    def gone(self) -> None:
        self._out.rename(self._away)
        self._out.touch()

    def hang(self, run: RunInfo) -> None:
        path = self._path(run)
        path.rename(path.with_suffix(".kept"))
        os.mkfifo(path)
        self._pipes.append(path)

    def break_run(self, run: RunInfo) -> None:
        self._path(run).mkdir(parents=True)

    def heal(self) -> None:
        if self._away.exists():
            self._out.unlink()
            self._away.rename(self._out)
        for path in self._pipes:
            pipe = path.with_suffix(".pipe")
            path.rename(pipe)
            path.with_suffix(".kept").rename(path)
            os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))  # whoever waits for a reader goes on
        self._pipes.clear()

    def _path(self, run: RunInfo) -> Path:
        return self._out / run.project / f"{run.experiment}-{run.run_id}.jsonl"


class ConsoleKit(Kit):
    """Standard output, which tells no run from another: every test has a file of its own as its terminal."""

    backend = "console"
    repeats = True

    def __init__(self, folder: Path, fixture: Callable[[str], Any]) -> None:
        super().__init__(folder, fixture)
        self.path = folder / "terminal"
        self._before = sys.__stdout__
        self._terminal = self.path.open("a")
        sys.__stdout__ = self._terminal  # type: ignore[misc]

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def run(self) -> RunInfo:
        os.truncate(self.path, 0)
        return super().run()

    def points(self, run: RunInfo) -> list[Point]:
        found: list[Point] = []
        for line in self.path.read_text().splitlines():
            at, *pairs = line.partition("step:")[2].split(" - ")
            named = [pair.rpartition(":") for pair in pairs if not pair.startswith(("text:", "generations:", "file:"))]
            found += [(key, None if at == "None" else int(at), float(value)) for key, _, value in named]
        return found

    def gone(self) -> None:
        sys.__stdout__ = None  # type: ignore[misc]

    def heal(self) -> None:
        sys.__stdout__ = self._terminal  # type: ignore[misc]

    def close(self) -> None:
        sys.__stdout__ = self._before  # type: ignore[misc]
        self._terminal.close()


class MlflowKit(Kit):
    """What a server and a database have in common. A run without a place: its experiment is deleted."""

    backend = "mlflow"
    hangs_alone = False
    uri: str  # past all faults

    def points(self, run: RunInfo) -> list[Point]:
        tracker = TestTracker(self.uri, run.project)
        return [(key, *point) for key in tracker.run().data.metrics for point in tracker.points(key)]

    def break_run(self, run: RunInfo) -> None:
        client = TestTracker(self.uri, run.project).client
        client.delete_experiment(client.create_experiment(run.project))

    def poison(self) -> tuple[dict[Any, Any], int]:
        return {"poison": 1.0}, NO_STEP


class MlflowServerKit(MlflowKit):
    """A real server behind one that is sick."""

    def __init__(self, folder: Path, fixture: Callable[[str], Any]) -> None:
        super().__init__(folder, fixture)
        self.uri = fixture("mlflow_server").uri
        self._way = FaultServer(self.uri)

    @property
    def settings(self) -> dict[str, Any]:
        places = {"work_dir": str(self.folder / "work"), "lock_dir": str(self.folder / "locks")}
        return {"tracking_uri": self._way.url, "timeout_s": 4, **places}

    def points(self, run: RunInfo) -> list[Point]:
        """By REST: the SDK in this process has the backend's own short time limit."""
        rest = MlflowRest(self.uri, run.project)
        (found,) = rest.runs()
        return [(key, *point) for key in found["metrics"] for point in rest.points(run.run_id, key)]

    def gone(self) -> None:
        self._way.mode = Mode.RESET

    def hang(self, run: RunInfo) -> None:
        self._way.mode = Mode.HANG

    def lose_answers(self) -> None:
        self._way.mode = Mode.SWALLOW

    def heal(self) -> None:
        self._way.mode = Mode.PASS

    def close(self) -> None:
        self._way.close()


class MlflowDatabaseKit(MlflowKit):
    """A database file. Gone: its first page is. (What locks it does not hang it: MLflow waits 20 s, then says so.)"""

    def __init__(self, folder: Path, fixture: Callable[[str], Any]) -> None:
        super().__init__(folder, fixture)
        self._path = folder / "mlflow.db"
        self._path.write_bytes(fixture("empty_database").read_bytes())
        self.uri = f"sqlite:///{self._path}"
        self._head = b""

    @property
    def settings(self) -> dict[str, Any]:
        places = {"work_dir": str(self.folder / "work"), "lock_dir": str(self.folder / "locks")}
        return {"tracking_uri": self.uri, **places}

    def gone(self) -> None:
        self._head = self._write(b"\xff" * 100)

    def heal(self) -> None:
        if self._head:
            self._write(self._head)
            self._head = b""

    def close(self) -> None:
        self.heal()
        _dispose(self.uri)

    def _write(self, head: bytes) -> bytes:
        """Put these bytes at the beginning; returns what was there."""
        # To close the file drops SQLite's locks of this process: only while no transaction is under way, as before an
        # outage, or can begin, as in one.
        with self._path.open("r+b") as file:
            before = file.read(len(head))
            file.seek(0)
            file.write(head)
        return before


class ServerKit(Kit):
    """A real SDK and a server of ours in a process of its own. Gone: it cuts every connection (a test that killed it
    and started it again would leave a process behind). `name_of(run)`: what all requests of a run contain."""

    module: ClassVar[str]
    secret = "k" * 40
    writes: ClassVar[str]  # the requests that bring numbers

    def __init__(self, folder: Path, fixture: Callable[[str], Any]) -> None:
        super().__init__(folder, fixture)
        self._key = folder / "key"
        self._key.touch(0o600)
        self._key.write_text(self.secret)
        self.server = ServerProcess(self.module, folder / "server")
        self.server.start()

    @property
    def settings(self) -> dict[str, Any]:
        places = {"work_dir": str(self.folder / "work"), "lock_dir": str(self.folder / "locks")}
        return {"base_url": self.server.url, "api_key_file": str(self._key), "settle_s": SETTLE_S, **places}

    @abc.abstractmethod
    def name_of(self, run: RunInfo) -> str: ...

    def gone(self) -> None:
        self.server.rules(Rule(Fault.RESET))

    def hang(self, run: RunInfo) -> None:
        self.server.rules(*self._of(run, Fault.HANG))

    def break_run(self, run: RunInfo) -> None:
        self.server.rules(*self._of(run, Fault.ERROR))

    def lose_answers(self) -> None:
        self.server.rules(Rule(Fault.LOST, self.writes, each=2))

    def heal(self) -> None:
        self.server.rules()

    def close(self) -> None:
        self.server.kill()

    def _of(self, run: RunInfo, fault: Fault) -> Iterator[Rule]:
        yield Rule(fault, path=self.name_of(run))
        yield Rule(fault, contains=self.name_of(run))


class WandbKit(ServerKit):
    backend = "wandb"
    module = "wandb_server"
    writes = "file_stream"

    def name_of(self, run: RunInfo) -> str:
        return run.run_id

    def points(self, run: RunInfo) -> list[Point]:
        told = wandb_reader.run(self.server, run.project, run.run_id)
        assert (told["created"], told["conflicts"], told["gaps"]) == (1, 0, 0)
        rows = [(row["trainer/global_step"], row) for row in told["history"] if "trainer/global_step" in row]
        return [
            (key, step, float(value))
            for step, row in rows
            for key, value in row.items()
            if not key.startswith("_") and key != "trainer/global_step" and not isinstance(value, dict)
        ]

    def poison(self) -> tuple[dict[Any, Any], int]:
        return {f"{n}" * 60: 0.123456789012345 for n in range(40_000)}, 0  # wandb drops lines beyond 10 MB silently


class SwanlabKit(ServerKit):
    backend = "swanlab"
    module = "swanlab_server"
    writes = "house/metrics"
    takes_late = False

    def name_of(self, run: RunInfo) -> str:
        from verl_shipper.backends.swanlab import cuid

        return cuid(run.run_id)

    def points(self, run: RunInfo) -> list[Point]:
        told = swanlab_reader.run_state(self.server, self.name_of(run))
        assert told["doubles"] == 0
        scalars = told["scalars"].items()
        return [(key, step, float(value)) for key, rows in scalars for step, value, _ in rows]

    def poison(self) -> tuple[dict[Any, Any], int]:
        self.server.rules(Rule(Fault.BAD, "POST .*house/metrics", contains="poison"))
        return {"poison": 1.0}, 0


class OtlpKit(ServerKit):
    """A collector shows no numbers, so each metrics record of a test becomes a span that carries them as attributes."""

    backend = "otlp"
    module = "otlp_server"
    writes = "v1/traces"

    @property
    def settings(self) -> dict[str, Any]:
        return {"endpoint": self.server.url, "headers_file": str(self._key), "timeout_s": 4}

    def __init__(self, folder: Path, fixture: Callable[[str], Any]) -> None:
        super().__init__(folder, fixture)
        self._key.write_text(f"x-key: {self.secret}\n")

    def name_of(self, run: RunInfo) -> str:
        return run.run_id

    def record(self, record: Record) -> Record:
        if record.kind is not RecordKind.METRICS:
            return record
        body = {
            "trace_id": uuid.uuid4().bytes,
            "span_id": uuid.uuid4().bytes[:8],
            "parent_id": None,
            "name": "numbers",
            "start_ns": record.time_ns,
            "end_ns": record.time_ns,
            "inputs": None,
            "outputs": None,
            "status": "ok",
            "attributes": record.body,
        }
        return replace(record, kind=RecordKind.SPAN, body=body)

    def points(self, run: RunInfo) -> list[Point]:
        told = [span for span in self.server.state()["spans"] if span["resource"]["verl_shipper.run_id"] == run.run_id]
        found: list[Point] = []
        for span in sorted(told, key=lambda each: int(each["start_ns"])):
            step = span["attributes"].pop("verl.step", None)
            for name, value in span["attributes"].items():
                if name != "verl.rank":
                    found += ((key, step, number) for key, number in self._leaves(name.removeprefix("verl."), value))
        return found

    def poison(self) -> tuple[dict[Any, Any], int]:
        self.server.options(refuse=["poison"])
        return {"poison": 1.0}, 0

    def _leaves(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Numbers as they are; what became JSON text, part by part."""
        if isinstance(value, str) and value.startswith("{"):
            value = json.loads(value)
        if isinstance(value, dict):
            for key, part in value.items():
                yield from self._leaves(f"{name}/{key}", part)
        else:
            yield name, float(value) if isinstance(value, int | float) else value


KITS: dict[str, type[Kit]] = {
    "file": FileKit,
    "console": ConsoleKit,
    "trackio": TrackioKit,
    "mlflow-http": MlflowServerKit,
    "mlflow-sqlite": MlflowDatabaseKit,
    "wandb": WandbKit,
    "swanlab": SwanlabKit,
    "otlp": OtlpKit,
}


def names() -> list[str]:
    """Kits whose backend is there."""
    return [name for name, kit in KITS.items() if kit.backend in known_names()]
