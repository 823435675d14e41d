"""Four real trackers behind one daemon: a folder, MLflow, wandb and SwanLab, and what each of them shows.

    with FourTrackers(site, mlflow_server) as trackers, trackers.daemon() as daemon:
        …                                                  a trainer that logs into `trackers.project`
        trackers.values("wandb", run_id, "loss")           [(step, value), …], doubles and all
        trackers.tables("mlflow", run_id)                  [(step, [row, …]), …], a row is a list of cells

Both SDKs are the real ones and talk to our own small servers. With `front` MLflow stands behind servers/forward_server.
Must not know: what a test expects. On failure: KeyError or AssertionError when a tracker has no such run.
"""

from __future__ import annotations

import contextlib
import functools
import html
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, final

from servers.process import ServerProcess
from support import oracle, swanlab_reader, wandb_reader
from support.daemon import Daemon
from support.mlflow_server import MlflowServer
from support.site import Site
from verl_shipper.backends.mlflow_run import RUN_TAG, tag_value
from verl_shipper.backends.swanlab import cuid
from verl_shipper.backends.wandb_rows import RESERVED, STEP_KEY

ALL = ("file", "mlflow", "wandb", "swanlab")
KEY = {"wandb": "k" * 40, "swanlab": "0123456789abcdefghijk"}
SETTLE_S = 0.5
ANSWER_S = 60.0
Point = tuple[int | None, Any]


@final
class FourTrackers:
    """The trackers of one test, or some of them (`names`), and one project of its own in each."""

    def __init__(
        self, site: Site, mlflow: MlflowServer | None = None, names: Sequence[str] = ALL, *, front: bool = False
    ) -> None:
        self.site = site
        self.names = names
        self.project = f"p{time.time_ns()}"
        self.mlflow_uri = mlflow.uri if mlflow is not None else ""
        self.servers: dict[str, ServerProcess] = {
            name: ServerProcess(f"{name}_server", site.root / f"{name}-server")
            for name in ("wandb", "swanlab")
            if name in names
        }
        if front:
            self.servers["mlflow"] = ServerProcess("forward_server", site.root / "mlflow-front")
        self._open = contextlib.ExitStack()

    def __enter__(self) -> FourTrackers:
        with contextlib.ExitStack() as opened:
            for server in self.servers.values():
                opened.enter_context(server)
            if "mlflow" in self.servers:
                self.servers["mlflow"].options(upstream=self.mlflow_uri)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def key_file(self, name: str) -> Path:
        """Where the daemon finds the key of a tracker."""
        return self.site.root / f"{name}.key"

    def put_key(self, name: str, key: str | None = None) -> None:
        """Write the key as an operator would: a private file, replaced whole."""
        fresh = self.key_file(name).with_suffix(".new")
        fresh.touch(0o600)
        fresh.write_text(key or KEY[name])
        fresh.replace(self.key_file(name))

    def arguments(self) -> list[str]:
        """What `verl-shipper run` is told about all trackers."""
        told: list[str] = []
        for name in self.names:
            told += ["--backend", name]
            for key, value in self._settings(name).items():
                told += ["--set", f"backends.{name}.{key}={value}"]
        return told

    def daemon(self, *more: str | Path, site: Site | None = None) -> Daemon:
        """A daemon for these trackers; `site`: at another spool than the first one's."""
        return Daemon(site or self.site, *self.arguments(), *more)

    def values(self, name: str, run_id: str, key: str) -> list[Point]:
        """(step, value) of every point that the tracker has under exactly this name."""
        if name == "file":
            return oracle.values(self.lines(run_id), key)
        if name == "mlflow":
            return self.mlflow.points(run_id, key)
        if name == "wandb":
            return [(row[STEP_KEY], row[key]) for row in self.wandb_rows(run_id) if key in row]
        return list(swanlab_reader.points(self.servers["swanlab"], cuid(run_id), key))

    def series(self, name: str, run_id: str) -> dict[str, list[Point]]:
        """`values` of every metric: the tracker is asked once, where it can be."""
        found: dict[str, list[Point]] = {}
        if name == "mlflow":
            found = {key: self.mlflow.points(run_id, key) for key in self.keys(name, run_id)}
        elif name == "swanlab":
            held = swanlab_reader.run_state(self.servers["swanlab"], cuid(run_id))["scalars"]
            found = {key: [(index, value) for index, value, _ in rows] for key, rows in held.items()}
        else:
            rows = (
                [(line.step, line.data) for line in oracle.of_kind(self.lines(run_id), "metrics")]
                if name == "file"
                else [(row.get(STEP_KEY), row) for row in self.wandb_rows(run_id)]
            )
            for step, row in rows:
                for key in row.keys() - (RESERVED if name == "wandb" else set()):
                    found.setdefault(key, []).append((step, row[key]))
        return found

    def keys(self, name: str, run_id: str) -> set[str]:
        """Names of all metrics."""
        if name == "file":
            return {key for line in oracle.of_kind(self.lines(run_id), "metrics") for key in line.data}
        if name == "mlflow":
            return set(self.mlflow.run(run_id)["metrics"])
        if name == "wandb":
            return {key for row in self.wandb_rows(run_id) for key in row} - RESERVED
        return set(swanlab_reader.run_state(self.servers["swanlab"], cuid(run_id))["scalars"])

    def tables(self, name: str, run_id: str) -> list[tuple[int | None, list[list[Any]]]]:
        """Every table of generations, or part of one, with its step."""
        if name == "file":
            return [(line.step, line.data["rows"]) for line in oracle.of_kind(self.lines(run_id), "generations")]
        if name == "mlflow":
            return [
                (_step_of(path), [list(row.values()) for row in json.loads(self.mlflow.artifact(run_id, path))])
                for path in self.mlflow.artifacts(run_id, "val_generations")
            ]
        if name == "wandb":
            found = [
                (row[STEP_KEY], told["path"])
                for row in self.wandb_rows(run_id)
                for key, told in row.items()
                if key.startswith("val/generations")
            ]
            server = self.servers["wandb"]
            return [(step, wandb_reader.table(server, self.project, run_id, path)) for step, path in found]
        server, run = self.servers["swanlab"], cuid(run_id)
        held = swanlab_reader.run_state(server, run)["media"]
        return [
            (step, [list(row.values()) for row in json.loads(content)["rowData"]])
            for key in held
            if key.startswith("val/generations")
            for step, contents in swanlab_reader.media(server, run, key)
            for content in contents
        ]

    def texts(self, name: str, run_id: str) -> list[tuple[int | None, str]]:
        """Every text with its step."""
        if name == "file":
            lines = oracle.of_kind(self.lines(run_id), "text")
            return [(line.step, text) for line in lines for text in line.data.values()]
        if name == "mlflow":
            paths = self.mlflow.artifacts(run_id, "text")
            return [(_step_of(path), self.mlflow.artifact(run_id, path).decode()) for path in paths]
        if name == "wandb":
            pages = [
                (row[STEP_KEY], told["path"])
                for row in self.wandb_rows(run_id)
                for told in row.values()
                if isinstance(told, dict) and told.get("_type") == "html-file"
            ]
            bodies = [
                (step, wandb_reader.body(self.servers["wandb"], self.project, run_id, path)) for step, path in pages
            ]
            return [
                (step, html.unescape(body.decode().removeprefix("<pre>").removesuffix("</pre>")))
                for step, body in bodies
            ]
        server, run = self.servers["swanlab"], cuid(run_id)
        held = swanlab_reader.run_state(server, run)["media"]
        media = [each for key in held if "val/gen" not in key for each in swanlab_reader.media(server, run, key)]
        return [(step, content.decode()) for step, contents in media for content in contents]

    def runs(self, name: str) -> int:
        """How many runs the tracker has in this project."""
        if name == "file":
            return len(list((self.site.out / self.project).glob("*.jsonl")))
        if name == "mlflow":
            return len(self.mlflow.runs())
        held = self.servers[name].state()["runs"]
        return sum(self.project in (run.get("project"), key.split("/")[-2:][0]) for key, run in held.items())

    def config(self, name: str, run_id: str) -> dict[str, Any]:
        """The configuration that the tracker shows (MLflow: params, as texts)."""
        if name == "file":
            return dict(oracle.of_kind(self.lines(run_id), "run_start")[-1].data["config"])
        if name == "mlflow":
            return self.mlflow.run(run_id)["params"]  # type: ignore[no-any-return]
        if name == "wandb":
            return dict(self.wandb_run(run_id)["config"])
        return dict(swanlab_reader.run_state(self.servers["swanlab"], cuid(run_id))["config"])

    def lines(self, run_id: str) -> list[oracle.Line]:
        """The run at the backend `file`, strictly read."""
        found = [path for path in self.site.out.rglob("*.jsonl") if path.stem.endswith(run_id)]
        assert len(found) == 1, f"{len(found)} files of {run_id}"
        return oracle.read_lines(found[0])

    def wandb_run(self, run_id: str) -> dict[str, Any]:
        return wandb_reader.run(self.servers["wandb"], self.project, run_id)

    def wandb_rows(self, run_id: str) -> list[dict[str, Any]]:
        return wandb_reader.rows(self.servers["wandb"], self.project, run_id)

    @functools.cached_property
    def mlflow(self) -> MlflowRest:
        return MlflowRest(self.mlflow_uri, self.project)

    def assert_values(self, run_id: str, key: str, expected: Iterable[Point], names: Sequence[str] = ()) -> None:
        """All trackers (or `names`) hold exactly these points, each once."""
        wanted = list(expected)
        for name in names or self.names:
            oracle.assert_exactly(self.values(name, run_id, key), wanted, f"{name} {run_id} {key}")

    def _settings(self, name: str) -> dict[str, object]:
        if name == "file":
            return {"dir": self.site.out}
        if name == "mlflow":
            return {"tracking_uri": self.servers[name].url if name in self.servers else self.mlflow_uri}
        if not self.key_file(name).exists():
            self.put_key(name)
        return {"base_url": self.servers[name].url, "api_key_file": self.key_file(name), "settle_s": SETTLE_S}


@final
class MlflowRest:
    """What MLflow tells by its REST interface about one experiment. Costs no import of mlflow."""

    def __init__(self, uri: str, project: str) -> None:
        self._uri = uri
        self._project = project
        self._ids: dict[str, str] = {}  # MLflow's own, by ours

    def runs(self) -> list[dict[str, Any]]:
        """All runs: {"info", "metrics": latest, "params", "tags"}."""
        try:
            named = self._ask("mlflow/experiments/get-by-name", experiment_name=self._project)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return []
        body = {"experiment_ids": [named["experiment"]["experiment_id"]], "max_results": 1000}
        return [_flat(run) for run in self._ask("mlflow/runs/search", body).get("runs", [])]

    def run(self, run_id: str) -> dict[str, Any]:
        """The one run of ours."""
        found = [run for run in self.runs() if run["tags"].get(RUN_TAG) == tag_value(run_id)]
        assert len(found) == 1, f"{len(found)} runs at mlflow for {run_id!r} in {self._project!r}"
        return found[0]

    def points(self, run_id: str, key: str) -> list[Point]:
        if run_id not in self._ids:
            self._ids[run_id] = self.run(run_id)["info"]["run_id"]
        told = self._ask("mlflow/metrics/get-history", run_id=self._ids[run_id], metric_key=key)
        return [(int(point.get("step", 0)), float(point["value"])) for point in told.get("metrics", [])]

    def artifacts(self, run_id: str, folder: str) -> list[str]:
        """Paths of all files below a folder."""
        told = self._ask("mlflow/artifacts/list", run_id=self.run(run_id)["info"]["run_id"], path=folder)
        found: list[str] = []
        for entry in told.get("files", []):
            found += self.artifacts(run_id, entry["path"]) if entry.get("is_dir") else [entry["path"]]
        return sorted(found)

    def artifact(self, run_id: str, path: str) -> bytes:
        query = urllib.parse.urlencode({"run_id": self.run(run_id)["info"]["run_id"], "path": path})
        with urllib.request.urlopen(f"{self._uri}/get-artifact?{query}", timeout=ANSWER_S) as answer:
            content: bytes = answer.read()
        return content

    def _ask(self, where: str, /, body: dict[str, Any] | None = None, **query: str) -> dict[str, Any]:
        url = f"{self._uri}/api/2.0/{where}?{urllib.parse.urlencode(query)}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            told: dict[str, Any] = json.loads(answer.read())
        return told


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    held = run.get("data", {})
    lists = {
        name: {each["key"]: each["value"] for each in held.get(name, [])} for name in ("metrics", "params", "tags")
    }
    return {"info": run["info"], **lists}


def _step_of(path: str) -> int | None:
    word = path.rpartition("/")[2].split(".")[0].removeprefix("step_")
    return int(word) if word.lstrip("-").isdigit() else None
