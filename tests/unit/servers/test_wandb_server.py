"""Our wandb server keeps what the real SDK sends, and is as hard on its clients as the vendor's."""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from servers.process import ServerProcess
from support.processes import wait_for
from support.wandb_reader import body, rows, run, table, tables

KEY = "a" * 40
SDK_S_MAX = 60.0
PRELUDE = """
import sys
import wandb
run = wandb.init(
    project=sys.argv[1], id=sys.argv[2], resume="allow", name="a name", group="a group", job_type="train", tags=["t"],
    config={"lr": 0.1, "deep": {"x": 1}},
    settings=wandb.Settings(
        x_disable_stats=True, x_disable_meta=True, console="off", x_save_requirements=False,
        x_file_stream_transmit_interval=1, **{
            f"x_{road}_retry_wait_{bound}_seconds": 1
            for road in ("file_stream", "file_transfer", "graphql") for bound in ("min", "max")
        },
    ),
)
"""
COUNT = """query ShipperCount($entity: String, $project: String!, $run: String!) {
  project(name: $project, entityName: $entity) { run(name: $run) { id historyLineCount state } } }"""
HISTORY = """query ShipperHistory($entity: String, $project: String!, $run: String!) {
  project(name: $project, entityName: $entity) { run(name: $run) {
    history(minStep: $minStep, maxStep: $maxStep, samples: $samples) } } }"""
FILES = """query ShipperFiles($entity: String, $project: String!, $run: String!, $names: [String], $first: Int) {
  project(name: $project, entityName: $entity) { run(name: $run) {
    files(names: $names, first: $first) { edges { node { name sizeBytes } } } } } }"""
TELEMETRY = '{"_wandb": {"value": {"t": {"1": [1]}}}}'  # the SDK resumes no run without it
RESUME = "query RunResumeStatus($project: String, $entity: String, $name: String!) { model }"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("wandb_server", tmp_path_factory.mktemp("wandb")) as made:
        yield made


@pytest.fixture
def server(started: ServerProcess) -> Iterator[ServerProcess]:
    """One healthy server for all tests of this file. Use projects of your own; options are put back."""
    yield started
    started.options(api_key=None, entity="tester", lag_s=0)


@pytest.fixture(scope="module")
def smoke(started: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run `r1` of project `smoke`, made by the real SDK, as it was at its end."""
    script = """
for step in range(1000):
    run.log({"loss": 1 / (step + 1), "odd": float("nan")}, step=step, commit=True)
run.log({"val/gen": wandb.Table(columns=["in", "out"], data=[[1, "x"], [2, "y"]]), "page": wandb.Html("<b>hi</b>")})
run.finish()
"""
    printed(started, tmp_path_factory.mktemp("smoke"), "smoke", "r1", script)
    return run(started, "smoke", "r1")


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("wandb_server", tmp_path / "server") as made:
        yield made


@contextmanager
def sdk(server: ServerProcess, folder: Path, project: str, run_id: str, script: str) -> Iterator[subprocess.Popen[str]]:
    """The real SDK in a process of its own, with `run` ready for `script`."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {
        "WANDB_BASE_URL": server.url,
        "WANDB_API_KEY": KEY,
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(folder),
        "WANDB_DATA_DIR": str(folder),
        "WANDB_CACHE_DIR": str(folder),
        "WANDB_CONFIG_DIR": str(folder),
    }
    command = [sys.executable, "-c", PRELUDE + script, project, run_id]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def printed(server: ServerProcess, folder: Path, project: str, run_id: str, script: str) -> str:
    """What `script` printed, once it ended well."""
    with sdk(server, folder, project, run_id, script) as process:
        words, _ = process.communicate(timeout=SDK_S_MAX)
        assert process.returncode == 0
        return words.strip()


def send(
    server: ServerProcess, method: str, path: str, content: bytes | None = None, **headers: str
) -> tuple[int, Any]:
    """Status and parsed answer."""
    url = path if path.startswith("http") else server.url + path
    request = urllib.request.Request(url, content, {k.replace("_", "-"): v for k, v in headers.items()}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def ask(server: ServerProcess, query: str, **variables: Any) -> Any:
    """The `data` of a GraphQL answer."""
    status, answer = send(server, "POST", "/graphql", json.dumps({"query": query, "variables": variables}).encode())
    assert status == 200, answer
    return answer["data"]


def begin(server: ServerProcess, project: str, run_id: str, **variables: Any) -> Any:
    given = {"project": project, "name": run_id, **variables}
    return ask(server, "mutation UpsertBucket($name: String) { upsertBucket }", **given)["upsertBucket"]


def stream(server: ServerProcess, project: str, run_id: str, offset: int, lines: list[str], **more: Any) -> None:
    files = {"wandb-history.jsonl": {"offset": offset, "content": lines}}
    path = f"/files/tester/{project}/{run_id}/file_stream"
    assert send(server, "POST", path, json.dumps({"files": files, **more}).encode())[0] == 200


def line(step: int, **values: Any) -> str:
    return json.dumps({"_step": step, **values})


def test_the_real_sdk_delivers_rows_and_ends_its_run(smoke: dict[str, Any]) -> None:
    assert [row["_step"] for row in smoke["history"]] == list(range(1001))
    assert smoke["history"][999]["loss"] == 0.001
    assert math.isnan(smoke["history"][999]["odd"])
    assert (smoke["lines"], smoke["rewrites"], smoke["conflicts"], smoke["gaps"]) == (1001, 0, 0, 0)
    assert (smoke["state"], smoke["exit_code"], smoke["created"]) == ("finished", 0, 1)
    names = [smoke[name] for name in ("display_name", "group", "job_type", "tags")]
    assert names == ["a name", "a group", "train", ["t"]]
    assert (smoke["config"]["lr"], smoke["config"]["deep"]) == (0.1, {"x": 1})
    assert smoke["summary"]["loss"] == 0.001


def test_the_real_sdk_delivers_a_table_and_html(server: ServerProcess, smoke: dict[str, Any]) -> None:
    assert tables(server, "smoke", "r1", "val/gen") == [(1000, [[1, "x"], [2, "y"]])]
    assert b"<b>hi</b>" in body(server, "smoke", "r1", rows(server, "smoke", "r1")[1000]["page"]["path"])
    kept = [artifact for artifact in server.state()["artifacts"] if artifact["run"] == "tester/smoke/r1"]
    assert [(artifact["type"], artifact["state"]) for artifact in kept] == [("run_table", "COMMITTED")]
    assert kept[0]["files"] == ["val/gen.table.json"]


def test_a_resumed_run_continues_at_the_line_count(
    server: ServerProcess, smoke: dict[str, Any], tmp_path: Path
) -> None:
    script = """
print(run.starting_step)
for step in range(1001, 1006):
    run.log({"value": step}, step=step, commit=True)
run.finish(exit_code=5)
"""
    assert printed(server, tmp_path, "smoke", "r1", script) == "1001"

    told = run(server, "smoke", "r1")
    assert [row["_step"] for row in told["history"]] == list(range(1006))
    assert (told["created"], told["state"], told["exit_code"]) == (1, "failed", 5)
    assert (told["rewrites"], told["conflicts"], told["gaps"]) == (0, 0, 0)


def test_a_resume_within_the_count_lag_overwrites_rows_as_at_the_vendor(server: ServerProcess, tmp_path: Path) -> None:
    begin(server, "lag", "r1", config=TELEMETRY)
    stream(server, "lag", "r1", 0, [line(step) for step in range(5)])
    server.options(lag_s=60)
    script = "print(run.starting_step)\nfor _ in range(5): run.log({'other': 1})\nrun.finish()"

    assert printed(server, tmp_path, "lag", "r1", script) == "0"

    told = run(server, "lag", "r1")
    assert (told["lines"], told["conflicts"]) == (5, 5)


def test_a_server_killed_and_restarted_in_the_middle_of_a_run_loses_nothing(
    own_server: ServerProcess, tmp_path: Path
) -> None:
    script = """
def log(start, end):
    for step in range(start, end):
        run.log({"value": step}, step=step, commit=True)
log(0, 500)
input()
log(500, 1000)
print("logged", flush=True)
run.log({"t": wandb.Table(columns=["a"], data=[[1]])})
run.finish()
"""
    with sdk(own_server, tmp_path, "killed", "r1", script) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        wait_for(lambda: [told["lines"] for told in own_server.state()["runs"].values()] == [500], SDK_S_MAX, "rows")
        own_server.kill()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "logged\n"
        own_server.start()
        assert process.wait(SDK_S_MAX) == 0

    told = run(own_server, "killed", "r1")
    assert [row["_step"] for row in told["history"]] == list(range(1001))
    assert (told["state"], told["created"], told["conflicts"], told["gaps"]) == ("finished", 1, 0, 0)
    assert tables(own_server, "killed", "r1", "t") == [(1000, [[1]])]


def test_lines_lie_at_their_offsets_and_repetitions_are_judged(server: ServerProcess) -> None:
    begin(server, "offsets", "r1")
    stream(server, "offsets", "r1", 0, [line(0), line(1)])
    stream(server, "offsets", "r1", 1, [line(1), line(2)])
    stream(server, "offsets", "r1", 0, [line(0, other=1)])
    stream(server, "offsets", "r1", 4, [line(4)])

    told = run(server, "offsets", "r1")
    assert told["history"] == [{"_step": 0, "other": 1}, {"_step": 1}, {"_step": 2}, None, {"_step": 4}]
    assert (told["lines"], told["rewrites"], told["conflicts"], told["gaps"]) == (5, 1, 1, 1)


def test_counts_history_and_resume_lag_behind_the_lines(server: ServerProcess) -> None:
    where = {"project": "p", "run": "r1"}
    begin(server, "p", "r1", config=TELEMETRY)
    stream(server, "p", "r1", 0, [line(0), line(1)])

    server.options(lag_s=60)
    assert ask(server, COUNT, **where)["project"]["run"]["historyLineCount"] == 0
    assert ask(server, HISTORY, **where, minStep=0, maxStep=9, samples=9)["project"]["run"]["history"] == []
    bucket = ask(server, RESUME, project="p", name="r1")["model"]["bucket"]
    assert (bucket["historyLineCount"], bucket["historyTail"]) == (0, "[]")
    assert begin(server, "p", "r1")["bucket"]["historyLineCount"] == 0

    def count() -> int:
        counted: int = ask(server, COUNT, **where)["project"]["run"]["historyLineCount"]
        return counted

    server.options(lag_s=0.2)
    wait_for(lambda: count() == 2, 10, "the lag ends")
    bucket = ask(server, RESUME, project="p", name="r1")["model"]["bucket"]
    assert (bucket["historyLineCount"], json.loads(bucket["historyTail"])) == (2, [line(1)])
    assert json.loads(bucket["wandbConfig"]) == {"t": {"1": [1]}}


def test_what_does_not_exist_is_null(server: ServerProcess) -> None:
    begin(server, "there", "r1")

    assert ask(server, COUNT, project="not there", run="r1") == {"project": None}
    assert ask(server, COUNT, project="there", run="r2") == {"project": {"run": None}}
    assert ask(server, RESUME, project="there", name="r2")["model"]["bucket"] is None


def test_history_is_read_by_step_and_as_stored(server: ServerProcess) -> None:
    lines = [f'{{"_step":{step},"odd":NaN}}' for step in range(10)]
    begin(server, "read", "r1")
    stream(server, "read", "r1", 0, lines)

    def read(start: int, end: int, samples: int) -> Any:
        sent = {"project": "read", "run": "r1", "minStep": start, "maxStep": end, "samples": samples}
        return ask(server, HISTORY, **sent)["project"]["run"]["history"]

    assert read(2, 5, 100) == lines[2:5]
    assert read(0, 10, 4) == lines[:4]
    assert read(10, 20, 4) == []


@pytest.mark.parametrize("name", ["plain.txt", "media/table/val/gen_0_ab.table.json", "ä %41?#&+/\U0001f680 .json"])
def test_files_have_a_size_once_they_are_uploaded(server: ServerProcess, name: str) -> None:
    begin(server, "files", "r1")
    created = ask(
        server, "mutation CreateRunFiles($files: [String!]!) { x }", project="files", run="r1", files=[name, "b"]
    )
    where = {"project": "files", "run": "r1", "names": [name, "b", "never announced"], "first": 10}

    def nodes() -> list[Any]:
        edges = ask(server, FILES, **where)["project"]["run"]["files"]["edges"]
        return [edge["node"] for edge in edges]

    assert nodes() == [{"name": name, "sizeBytes": 0}, {"name": "b", "sizeBytes": 0}]
    content = b'{"data": [[1]]}'
    assert send(server, "PUT", created["createRunFiles"]["files"][0]["uploadUrl"], content)[0] == 200
    assert nodes()[0] == {"name": name, "sizeBytes": len(content)}
    assert run(server, "files", "r1")["files"][name] == len(content)
    assert table(server, "files", "r1", name) == [[1]]


def test_no_upload_leaves_the_folder(server: ServerProcess) -> None:
    begin(server, "escape", "r1")

    status, _ = send(server, "PUT", f"/storage/runs/tester/escape/r1/{quote('../../x', safe='')}", b"x")

    assert status == 400


def artifact(server: ServerProcess, digest: str, client_id: str) -> Any:
    sent: dict[str, Any] = {
        "projectName": "artifacts",
        "runName": "r1",
        "artifactTypeName": "run_table",
        "clientID": client_id,
    }
    sent |= {"artifactCollectionName": "t", "digest": digest, "enableDigestDeduplication": True}
    answer = ask(server, "mutation CreateArtifact($input: CreateArtifactInput!) { x }", input=sent)
    return answer["createArtifact"]["artifact"]


def test_an_artifact_of_known_digest_is_committed_at_once(server: ServerProcess) -> None:
    begin(server, "artifacts", "r1")
    made = artifact(server, "digest 1", "client 1")
    assert (made["state"], made["artifactSequence"]["latestArtifact"]) == ("PENDING", None)
    assert artifact(server, "digest 1", "client 1")["id"] == made["id"]

    manifest = ask(
        server,
        "mutation CreateArtifactManifest($artifactID: ID!) { x }",
        artifactID=made["id"],
        includeUpload=True,
    )["createArtifactManifest"]["artifactManifest"]
    send(server, "PUT", manifest["file"]["uploadUrl"], b"{}")
    ask(server, "mutation CommitArtifact($artifactID: ID!) { x }", artifactID=made["id"])

    again = artifact(server, "digest 1", "client 2")
    assert (again["id"], again["state"]) == (made["id"], "COMMITTED")
    other = artifact(server, "digest 2", "client 3")
    assert (other["state"], other["artifactSequence"]["latestArtifact"]) == ("PENDING", {"id": made["id"]})


def test_a_wrong_key_is_refused_until_it_is_right(server: ServerProcess) -> None:
    query = json.dumps({"query": "query Viewer { viewer { id } }"}).encode()
    right = "Basic " + base64.b64encode(b"api:right").decode()
    server.options(api_key="right", entity="someone")

    assert send(server, "POST", "/graphql", query)[0] == 401
    assert send(server, "POST", "/graphql", query, Authorization=right[:-4])[0] == 401
    assert send(server, "POST", "/files/someone/p/r/file_stream", b"{}")[0] == 401
    assert send(server, "GET", "/")[0] == 401
    status, answer = send(server, "POST", "/graphql", query, Authorization=right)
    assert (status, answer["data"]["viewer"]["entity"]) == (200, "someone")


def test_what_is_not_known_is_refused_by_name(server: ServerProcess) -> None:
    status, answer = send(server, "POST", "/graphql", json.dumps({"query": "query Surprise { x }"}).encode())
    assert (status, "Surprise" in answer["errors"][0]["message"]) == (400, True)
    for method, path in (("GET", "/"), ("GET", "/graphql"), ("POST", "/files/tester/p/none/file_stream")):
        assert send(server, method, path, None if method == "GET" else b"{}")[0] == 404


def test_lines_that_are_no_json_are_refused_and_not_kept(server: ServerProcess) -> None:
    begin(server, "broken", "r1")
    files = {"wandb-history.jsonl": {"offset": 0, "content": ["{}", "{"]}}

    assert send(server, "POST", "/files/tester/broken/r1/file_stream", json.dumps({"files": files}).encode())[0] == 400
    assert run(server, "broken", "r1")["lines"] == 0


def test_kill_9_keeps_everything_that_was_answered(own_server: ServerProcess) -> None:
    begin(own_server, "p", "r1", config='{"lr": {"value": 1}}', tags=["a"], displayName="n", groupName="g")
    packed = gzip.compress(json.dumps({"files": {"wandb-history.jsonl": {"offset": 0, "content": [line(0)]}}}).encode())
    path = "/files/tester/p/r1/file_stream"
    assert send(own_server, "POST", path, packed, Content_Encoding="gzip")[0] == 200
    stream(own_server, "p", "r1", 1, [line(1)], complete=True, exitcode=3)
    send(own_server, "PUT", "/storage/runs/tester/p/r1/f", b"abc")
    before = own_server.state()

    own_server.kill()
    with (own_server.folder / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"op": "stream", "torn')
    own_server.start()
    assert own_server.state() == before
    assert (before["runs"]["tester/p/r1"]["exit_code"], before["uploads_bytes"]) == (3, 3)

    stream(own_server, "p", "r1", 2, [line(2)])
    own_server.kill()
    own_server.start()
    assert run(own_server, "p", "r1")["lines"] == 3
