"""The SwanLab test server, used by the real SDK in a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from servers.faults import Fault, Rule
from servers.process import ServerProcess
from support.swanlab_reader import API_KEY, environment, media, points, run_state

SDK_S_MAX = 60
RUN = "abcdefghijk0123456789"

# Arguments: JSON of run, steps [first, end), media.
TRAINER = """
import json, sys
import swanlab
told = json.loads(sys.argv[1])
swanlab.merge_settings(swanlab.Settings(probe={name: False for name in (
    "hardware", "runtime", "requirements", "git", "swanlab", "monitor")}))
run = swanlab.init(project="p", name="n", description="d", tags=["t"], group="g", job_type="j", mode="online",
                   id=told["run"], resume="allow", config={"lr": 0.5, "deep": {"er": [1, 2]}}, log_dir=sys.argv[2])
for step in range(*told["steps"]):
    if step == told.get("pause_at"):
        sys.stdin.readline()
    run.log({"a": step / 2, "b/c": -step}, step=step)
if told.get("media"):
    run.log({"text": swanlab.Text("hello", caption="why")}, step=0)
    table = swanlab.echarts.Table()
    table.add(["in", "out"], [["x", "y"]])
    run.log({"table": table}, step=0)
run.finish()
"""

READER = """
import json, sys
import swanlab
run = swanlab.Api().run("tester/p/" + sys.argv[1])
told = run.metrics(keys=["a"])
print(json.dumps({"name": run.name, "state": run.state, "metrics": told}, default=str))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("swanlab_server", tmp_path / "server") as started:
        yield started


def train(server: ServerProcess, folder: Path, **told: Any) -> None:
    ended = sdk(server, folder, TRAINER, json.dumps({"run": RUN, "steps": [0, 5], **told}), str(folder / "swanlog"))
    assert ended.returncode == 0, ended.stdout + ended.stderr


def sdk(server: ServerProcess, folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    with started(server, folder, program, *arguments) as process:
        output, errors = process.communicate(timeout=SDK_S_MAX)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@contextlib.contextmanager
def started(server: ServerProcess, folder: Path, program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program that uses the SDK; does not outlive the block."""
    folder.mkdir(exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=environment(server, folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SDK_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


class Caller:
    """Speaks to the server without the SDK."""

    def __init__(self, server: ServerProcess, key: str = API_KEY) -> None:
        self.url = server.url
        self.headers: dict[str, str] = {}
        login = self("POST", "/api/login/api_key", {}, authorization=key)
        self.headers = {"Cookie": f"sid={login['sid']}"}

    def __call__(self, method: str, path: str, body: object = None, **headers: str) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = self.headers | {"Content-Type": "application/json"} | headers
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return json.loads(answer.read())

    def created(self) -> tuple[str, str]:
        """A project and a run in it: (project cuid, createdAt in seconds)."""
        self("POST", "/api/projects/tester", {"name": "p", "visibility": "PRIVATE"})
        stamp = "2026-01-01T00:00:00.000000Z"
        body = {"name": "n", "cuid": RUN, "createdAt": stamp}
        self("POST", "/api/project/tester/p/experiment", body)
        return self("GET", "/api/project/tester/p")["cuid"], str(int(time.time()) - 60)

    def log(self, project: str, *rows: tuple[int, Any]) -> None:
        stamp = "2026-01-01T00:00:00.123456789Z"
        metrics = [{"key": "a", "index": index, "data": value, "create_time": stamp} for index, value in rows]
        body = {"type": "scalar", "projectId": project, "experimentId": RUN, "metrics": metrics}
        self("POST", "/api/house/metrics", body)


@contextlib.contextmanager
def refused(status: int, code: str) -> Iterator[None]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        yield
    with caught.value as answer:
        assert (answer.code, str(json.loads(answer.read())["code"])) == (status, code)


def test_the_sdk_delivers_a_run_with_all_its_parts(server: ServerProcess, tmp_path: Path) -> None:
    train(server, tmp_path / "sdk", steps=[0, 1000], media=True)

    run = run_state(server, RUN)
    assert points(server, RUN, "a") == [(step, step / 2) for step in range(1000)]
    assert points(server, RUN, "b/c") == [(step, -step) for step in range(1000)]
    assert (run["state"], run["created"], run["doubles"], run["project"], run["name"]) == ("FINISHED", 1, 0, "p", "n")
    assert run["config"] == {"lr": 0.5, "deep": {"er": [1, 2]}}
    assert (run["description"], run["labels"], run["job"], run["cluster"]) == ("d", [{"name": "t"}], "j", "g")
    assert run["series"] == {"a": "FLOAT", "b/c": "FLOAT", "text": "TEXT", "table": "ECHARTS"}
    assert media(server, RUN, "text") == [(0, [b"hello"])]
    assert run["media"]["text"][0][2] == [{"caption": "why"}]
    [(index, [table])] = media(server, RUN, "table")
    assert index == 0
    assert b'"y"' in table


def test_a_run_goes_on_over_a_kill_of_the_server(server: ServerProcess, tmp_path: Path) -> None:
    told = json.dumps({"run": RUN, "steps": [0, 10], "pause_at": 5})
    with started(server, tmp_path / "sdk", TRAINER, told, str(tmp_path / "swanlog")) as trainer:
        wait_for(lambda: len(server.state()["runs"].get(RUN, {}).get("scalars", {}).get("a", [])) == 5)
        server.kill()
        assert trainer.stdin is not None
        trainer.stdin.write("go on\n")
        trainer.stdin.flush()
        server.start()
        output, _ = trainer.communicate(timeout=SDK_S_MAX)

    assert trainer.returncode == 0, output
    assert points(server, RUN, "a") == [(step, step / 2) for step in range(10)]
    assert run_state(server, RUN)["state"] == "FINISHED"


def test_a_resumed_run_drops_what_is_there_and_goes_on(server: ServerProcess, tmp_path: Path) -> None:
    caller = Caller(server)
    project, _ = caller.created()
    caller.log(project, *((step, step / 2) for step in range(5)))

    server.kill()
    server.start()
    train(server, tmp_path / "sdk", steps=[3, 8])

    run = run_state(server, RUN)
    assert points(server, RUN, "a") == [(step, step / 2) for step in range(8)]
    assert (run["created"], run["doubles"], run["state"]) == (2, 0, "FINISHED")


def test_a_run_resumed_within_the_lag_is_doubled(server: ServerProcess, tmp_path: Path) -> None:
    caller = Caller(server)
    project, _ = caller.created()
    caller.log(project, *((step, step / 2) for step in range(5)))

    server.options(lag_s=3600)
    train(server, tmp_path / "sdk", steps=[3, 8])

    assert [step for step, _ in points(server, RUN, "a")] == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]
    assert run_state(server, RUN)["doubles"] == 2


def test_the_api_of_the_sdk_reads_the_points_back(server: ServerProcess, tmp_path: Path) -> None:
    caller = Caller(server)
    project, _ = caller.created()
    caller.log(project, (1, 0.5), (0, 2.0))

    ended = sdk(server, tmp_path / "sdk", READER, RUN)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert (told["name"], told["state"]) == ("n", "RUNNING")
    assert '"index": 0, "data": 2.0' in json.dumps(told["metrics"])


def test_a_row_is_hidden_until_it_is_old_enough(server: ServerProcess) -> None:
    caller = Caller(server)
    project, since = caller.created()
    path = f"/api/house/metrics/summaries/{project}/{RUN}?all=true&createdAt={since}"
    caller.log(project, (3, 1.0), (7, 2.0), (5, "nan"))
    column = {"experimentId": RUN, "key": "a", "createdAt": since}

    server.options(lag_s=3600)
    young = (
        caller("GET", path),
        caller("POST", "/api/house/metrics/scalar", {"projectId": project, "columns": [column]}),
    )
    server.options(lag_s=0)
    old = caller("GET", path), caller("POST", "/api/house/metrics/scalar", {"projectId": project, "columns": [column]})

    assert young[0] == {"log": [], "media": [], "scalar": []}
    assert young[1][0]["metrics"] == []
    assert old[0]["scalar"] == [{"key": "a", "step": 7}]
    assert [(point["index"], point["data"]) for point in old[1][0]["metrics"]] == [(3, 1.0), (5, "nan"), (7, 2.0)]


def test_the_same_row_twice_stays_two_rows_over_a_kill(server: ServerProcess) -> None:
    caller = Caller(server)
    project, _ = caller.created()
    with server.failing(Rule(Fault.LOST, path="house/metrics", times=1)), refused(503, "503"):
        caller.log(project, (1, 0.5))

    server.kill()
    server.start()
    caller.log(project, (1, 0.5))

    assert points(server, RUN, "a") == [(1, 0.5), (1, 0.5)]
    assert run_state(server, RUN)["doubles"] == 1


def test_a_post_with_one_bad_row_stores_nothing(server: ServerProcess) -> None:
    caller = Caller(server)
    project, _ = caller.created()

    for bad in ((2, "big"), (-1, 0.5), (2, float("nan"))):
        with refused(400, "Bad_Request"):
            caller.log(project, (1, 0.5), bad)

    assert points(server, RUN, "a") == []


def test_a_session_of_an_old_key_is_refused(server: ServerProcess) -> None:
    caller = Caller(server, key="old")
    caller.created()

    server.options(api_key="new")

    with refused(401, "Unauthorized"):
        caller("GET", "/api/project/tester/p")
    with refused(401, "Unauthorized"):
        Caller(server, key="old")
    assert Caller(server, key="new")("GET", "/api/project/tester/p")["version"] == 1


def test_what_is_not_there_is_a_404_in_json(server: ServerProcess) -> None:
    caller = Caller(server)

    with refused(404, "Not_Found"):
        caller("GET", "/api/nothing")
    with refused(404, "Resource_Not_Found"):
        caller("GET", "/api/project/tester/p")
    project, _ = caller.created()
    with refused(404, "Resource_Not_Found"):
        caller("GET", "/api/project/tester/p/runs/other")
    with refused(404, "Resource_Not_Found"):
        caller("POST", f"/api/house/experiments/other{project}/heartbeat", {})


def test_an_object_needs_a_signed_url(server: ServerProcess) -> None:
    caller = Caller(server)
    caller.created()
    [url] = caller("POST", "/api/resources/presigned/put", {"experimentId": RUN, "paths": ["media/é/x"]})["urls"]

    for address in (url, url.partition("?")[0]):
        request = urllib.request.Request(address, b"content", method="PUT")
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200
            assert address == url

    assert server.state()["objects"] == {f"{RUN}/media/é/x": 7}
