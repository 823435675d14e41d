"""A copy of a client is the same client here, and a helper of the same run anywhere else."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from unit.client.conftest import MakeClient
from unit.client.spooled import records
from verl_shipper_client import Client, copies
from verl_shipper_spool.header import HEADER_NAME, SCALARS, StreamHeader, decode_header
from verl_shipper_spool.record import RecordKind


def _headers(spool: Path) -> list[StreamHeader]:
    return [decode_header(path.read_bytes()) for path in spool.glob(f"*/{HEADER_NAME}")]


def test_a_deep_copy_or_a_round_trip_in_one_process_is_the_same_client(make: MakeClient) -> None:
    client = make()

    assert copy.deepcopy({"module": [client]})["module"][0] is client
    assert copy.copy(client) is client
    assert pickle.loads(pickle.dumps(client)) is client


def test_clients_of_different_runs_stay_apart(make: MakeClient) -> None:
    first, second = make(run_id="a"), make(run_id="b")

    assert pickle.loads(pickle.dumps([first, second])) == [first, second]


OTHER = """
import pickle, sys
data = sys.stdin.buffer.read()
first, second = pickle.loads(data), pickle.loads(data)
assert first is second
if sys.argv[1] == "log":
    first.log({"there": 1.0}, step=7)
    first.finish(exit_code=3, timeout_s=0)
"""


def _in_another_process(client: Client, what: str, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OTHER, what],
        input=pickle.dumps(client),
        capture_output=True,
        check=False,
        timeout=60,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr.decode()


def test_elsewhere_it_is_a_helper_of_the_run_however_often_it_arrives(
    make: MakeClient, spool: Path, tmp_path: Path
) -> None:
    client = make(run_id="r", rank=2, world=4)

    _in_another_process(client, "log", tmp_path)

    found = records(spool)
    assert [(each.body, each.step) for each in found if each.kind is RecordKind.METRICS] == [({"there": 1.0}, 7)]
    assert len([each for each in found if each.kind is RecordKind.RUN_START]) == 1
    assert not [each for each in found if each.kind is RecordKind.RUN_FINISH], "it does not end the run"
    there = [header for header in _headers(spool) if header.forked]
    assert {(each.run_id, each.rank, each.world, each.project) for each in there} == {("r", 2, 4, "project")}


def test_a_helper_that_logs_nothing_leaves_nothing(make: MakeClient, spool: Path, tmp_path: Path) -> None:
    client = make()
    before = len(_headers(spool))

    _in_another_process(client, "look", tmp_path)

    assert len(_headers(spool)) == before


def test_a_relative_spool_means_the_same_place_from_another_folder(
    make: MakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    client = make(spool_dir="here")
    (tmp_path / "elsewhere").mkdir()

    _in_another_process(client, "log", tmp_path / "elsewhere")

    assert any(header.forked for header in _headers(tmp_path / "here"))


POOL = """
import multiprocessing, os, sys, warnings
from verl_shipper_client import Client

warnings.simplefilter("ignore")

def work(arguments):
    client, number = arguments
    client.log({"child": float(number)}, step=number)
    return os.getpid()

if __name__ == "__main__":
    client = Client("p", "e", run_id="r", spool_dir=sys.argv[1])
    with multiprocessing.get_context(sys.argv[2]).Pool(2) as pool:
        pids = set(pool.map(work, [(client, number) for number in range(20)], chunksize=1))
        pool.close()
        pool.join()
    print(*pids)
    client.finish(timeout_s=0)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pool_of_processes_logs_to_the_run(spool: Path, tmp_path: Path, method: str) -> None:
    script = tmp_path / "pool.py"
    script.write_text(POOL)

    done = subprocess.run(
        [sys.executable, str(script), str(spool), method], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.returncode == 0, done.stderr
    found = [record for record in records(spool) if record.kind is RecordKind.METRICS]
    assert sorted(record.step or 0 for record in found) == list(range(20))
    helpers = [header for header in _headers(spool) if header.forked and header.stream_class == SCALARS]
    assert sorted(header.process.pid for header in helpers) == sorted(map(int, done.stdout.split())), "one a process"


def test_a_copy_does_not_keep_its_original_alive(spool: Path) -> None:
    client = Client("p", "e", run_id="gone", spool_dir=spool)
    client.finish(timeout_s=0)
    data = pickle.dumps(client)
    del client
    gc.collect()

    helper = pickle.loads(data)

    assert isinstance(helper, copies.Helper)
    assert pickle.loads(pickle.dumps(helper)) is helper
