"""`verl-shipper push`: the right run, every file once, whole, and nothing that is still written."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.daemon import SHIPPER, shipper
from support.disk import require_disks, small_disk
from support.site import Site
from support.spools import build_stream
from support.streams import make_header
from unit.client.spooled import bodies
from verl_shipper import push as pushing
from verl_shipper.errors import ConfigError, ShipperError
from verl_shipper.push import found_files, purpose_of, push, step_of
from verl_shipper.push_run import RunName, find_run
from verl_shipper.show import stream_folders
from verl_shipper_client import Client
from verl_shipper_spool.header import HEADER_NAME, decode_header, encode_header, start_ticks, this_process
from verl_shipper_spool.record import RecordKind

RUN = RunName("run-1", "proj", "exp")
OLD_NS = 10**18  # so long ago that nobody writes there


def write(path: Path, content: bytes, *, is_old: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if is_old:
        os.utime(path, ns=(OLD_NS, OLD_NS))
    return path


def spooled(spool: Path) -> dict[str, bytes]:
    """Files in a spool by name, put together."""
    made: dict[bytes, bytearray] = {}
    whole: dict[str, bytes] = {}
    for body in bodies(spool, RecordKind.FILE):
        content = made.setdefault(body["file_id"], bytearray())
        assert body["offset"] == len(content)
        content += body["data"]
        if "sha256" in body:
            assert body["name"] not in whole, "twice"
            whole[body["name"]] = bytes(content)
    return whole


def alive(spool: Path, run_id: str, **process: Any) -> Path:
    """A stream of a writer that lives: this process, if nothing else is said."""
    header = make_header(run_id=run_id, process=replace(this_process(), **process))
    folder = build_stream(spool, run_id=run_id)
    (folder / HEADER_NAME).write_bytes(encode_header(replace(header, stream_id=folder.name)))
    return folder


# Which files


def test_a_folder_gives_all_files_but_hidden_and_temporary_ones(tmp_path: Path) -> None:
    for name in ("a_step12.json", "deep/er/b.bin", ".hidden", ".git/x", "c.tmp", "d~", "e.part"):
        write(tmp_path / "out" / name, name.encode())
    os.symlink("/nonexistent", tmp_path / "out" / "dangling")
    os.mkfifo(tmp_path / "out" / "pipe")
    assert [each.name for each in found_files([str(tmp_path / "out")], None)] == ["a_step12.json", "deep/er/b.bin"]
    named = found_files([str(tmp_path / "out")], "eval")
    assert [each.name for each in named] == ["eval/a_step12.json", "eval/deep/er/b.bin"]
    one = str(tmp_path / "out" / "a_step12.json")
    assert found_files([one], "../x.json")[0].name == "x.json"
    assert [each.name for each in found_files([one, one], "n")] == ["n/a_step12.json"] * 2
    for nothing in ("", str(tmp_path / "none")):
        with pytest.raises(ShipperError):
            found_files([nothing], None)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("actor_train_step12_rank0-of-8_pid7_20260101.json.gz", 12),
        ("global_step_40/trace.json", 40),
        ("step7.json", 7),
        ("step1_mb3_step2.json", 2),
        ("timestep9.json", None),
        ("steps.json", None),
        ("x", None),
    ],
)
def test_the_step_is_read_from_the_name(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_what_a_file_is_for_is_told_by_its_profiler_or_its_name() -> None:
    assert purpose_of("x.bin", "torch") == "profile"
    assert purpose_of("x.bin", "torch_memory") == "memory"
    assert purpose_of("w/torch_memory_rank0_pid12.pickle", "") == "memory"
    assert purpose_of("actor_step5_rank0-of-2_pid1.json.gz", "") == "profile"
    assert purpose_of("a.pt.trace.json", "") == "profile"
    assert purpose_of("answers.json", "") == "file"


# What is shipped


def test_files_are_spooled_whole_large_json_compressed_and_a_second_push_ships_nothing(tmp_path: Path) -> None:
    spool, out = tmp_path / "spool", tmp_path / "out"
    large = json.dumps(list(range(400_000))).encode()
    write(out / "large_step3.json", large)
    write(out / "small.json", b"{}")
    write(out / "empty.txt", b"")
    write(out / "made.json.gz", os.urandom(1_200_000))
    report = push(str(spool), RUN, found_files([str(out)], None))
    assert len(report.shipped) == 4
    assert ("large_step3.json", len(large), 3) in report.shipped
    found = spooled(spool)
    assert gzip.decompress(found.pop("large_step3.json.gz")) == large
    assert found == {name: (out / name).read_bytes() for name in ("small.json", "empty.txt", "made.json.gz")}

    again = push(str(spool), RUN, found_files([str(out)], None))
    assert (again.shipped, again.known) == ([], 4)
    os.utime(out / "small.json", ns=(OLD_NS + 1, OLD_NS + 1))  # touched, not changed
    assert push(str(spool), RUN, found_files([str(out)], None)).known == 4
    write(out / "small.json", b"{1}")
    assert [name for name, _, _ in push(str(spool), RUN, found_files([str(out)], None)).shipped] == ["small.json"]
    other = push(str(spool), replace(RUN, run_id="run-2"), found_files([str(out)], None))
    assert len(other.shipped) == 4
    headers = [decode_header((Path(each) / HEADER_NAME).read_bytes()) for each in stream_folders(str(spool))]
    assert all(header.forked for header in headers)
    assert len(headers) == 6  # two a push that shipped something


def test_ranks_that_push_one_folder_at_once_ship_each_file_once(tmp_path: Path) -> None:
    spool, out = tmp_path / "spool", tmp_path / "out"
    for rank in range(6):
        write(out / f"step1_rank{rank}.json.gz", os.urandom(300_000))
    command = [*SHIPPER, "push", str(out), "--run-id", "r", "--spool-dir", str(spool)]
    pushes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    told = [process.communicate(timeout=60)[0] for process in pushes]
    assert [process.returncode for process in pushes] == [0] * 4
    assert sorted(line.split()[1] for line in told) == ["0", "0", "0", "6"]
    assert len(spooled(spool)) == 6


def test_a_file_that_is_written_is_awaited_and_one_that_never_rests_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "CHANGING_S", 4.0)
    monkeypatch.setattr(pushing, "STABLE_S", 1.0)
    out = tmp_path / "out"
    slow, restless = write(out / "slow", b"", is_old=False), write(out / "restless", b"", is_old=False)
    own = write(out / "rank0_pid77_x", b"own", is_old=False)
    over = threading.Event()

    def grow() -> None:
        began_s = time.monotonic()
        while not over.wait(0.1):
            for path in [restless] + [slow] * (time.monotonic() - began_s < 1.0):
                with path.open("ab") as file:
                    file.write(b"x")

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        report = push(str(tmp_path / "spool"), RUN, found_files([str(out)], None, "77"))
    finally:
        over.set()
        writer.join()
    assert [name for name, _, _ in report.shipped] == [own.name, slow.name]
    assert report.changing == [str(restless)]
    assert "push again later" in report.line()
    assert spooled(tmp_path / "spool")["slow"] == slow.read_bytes()


def test_a_file_that_cannot_be_shipped_is_named_and_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "FILE_BYTES_MAX", 1000)
    out = tmp_path / "out"
    write(out / "a", b"a")
    write(out / "large", b"x" * 2000)
    write(out / "z", b"z")
    gone = found_files([str(out)], None)
    write(out / "gone", b"x").unlink()
    report = push(str(tmp_path / "spool"), RUN, [*gone, replace(gone[0], path=str(out / "gone"))])
    assert [name for name, _, _ in report.shipped] == ["a", "z"]
    assert len(report.failed) == 2


def test_notes_torn_by_a_power_failure_cost_a_file_id_no_more(tmp_path: Path) -> None:
    spool, out = tmp_path / "spool", tmp_path / "out"
    write(out / "a", b"a")
    push(str(spool), RUN, found_files([str(out)], None))
    (notes,) = (spool / "pushed").iterdir()
    notes.write_bytes(notes.read_bytes()[:-9] + b"\0\0")
    assert len(push(str(spool), RUN, found_files([str(out)], None)).shipped) == 1
    assert push(str(spool), RUN, found_files([str(out)], None)).known == 1


def test_a_full_spool_names_the_file_and_a_later_push_ships_it(tmp_path: Path) -> None:
    require_disks()
    out = tmp_path / "out"
    write(out / "a.bin", os.urandom(100_000))
    write(out / "large.bin", os.urandom(9_000_000))
    with small_disk(tmp_path, 6) as disk:
        spool = disk / "spool"
        report = push(str(spool), RUN, found_files([str(out)], None))
        assert [name for name, _, _ in report.shipped] == ["a.bin"]
        assert "the spool takes no more" in report.failed[0]
        subprocess.run(["mount", "-o", "remount,size=32m", str(disk)], check=True)
        again = push(str(spool), RUN, found_files([str(out)], None))
        assert ([name for name, _, _ in again.shipped], again.known) == (["large.bin"], 1)


# Which run


def test_the_run_is_named_given_or_of_the_one_that_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_SHIPPER_RUN_ID", raising=False)
    spool = tmp_path / "spool"
    with pytest.raises(ConfigError, match=r"no run is alive.*say --run-id"):
        find_run(str(spool), None)
    build_stream(spool, run_id="dead")
    with pytest.raises(ConfigError, match=r"no run is alive.*dead"):
        find_run(str(spool), None)
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        alive(spool, "living", pid=sleeper.pid, start_ticks=start_ticks(sleeper.pid))
        assert find_run(str(spool), None).run_id == "living"
        alive(spool, "other", pid=sleeper.pid, start_ticks=start_ticks(sleeper.pid))
        with pytest.raises(ConfigError, match=r"several runs are alive.*other \(project/experiment\)"):
            find_run(str(spool), None)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert find_run(str(spool), "dead") == RunName("dead", "field", "exp", 1)
    assert find_run(str(spool), "unheard of") == RunName("unheard of")
    monkeypatch.setenv("VERL_SHIPPER_RUN_ID", "other")
    assert find_run(str(spool), None).project == "project"
    assert find_run(str(spool), "dead").run_id == "dead"


def test_a_hook_of_a_trainer_pushes_to_its_run_and_a_flush_delivers(site: Site) -> None:
    """As verl runs it: `/bin/sh -c COMMAND` in a rank's process, while another run lives beside it."""
    out = site.root / "profiles"
    trace = os.urandom(1_500_000)
    write(out / "actor_step4_rank0-of-1_pid1_x.json.gz", trace)
    program = f"""
import os, subprocess, sys
from verl_shipper_client import Client
other = subprocess.Popen([sys.executable, "-c", "import sys; from verl_shipper_client import Client; "
    "Client(run_id='other'); print(1, flush=True); sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
other.stdout.readline()
with Client(project="proj", experiment="exp", run_id="mine") as client:
    client.log({{"n": 1.0}}, step=4)
    for _ in range(2):
        done = subprocess.run(["/bin/sh", "-c", '{sys.executable} -m verl_shipper push "$VERL_PROFILE_SAVE_PATH"'],
            env=os.environ | {{"VERL_PROFILE_SAVE_PATH": {str(out)!r}, "VERL_PROFILE_TOOL": "torch"}}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        print(done.returncode, done.stdout, end="")
other.stdin.close()
other.wait()
"""
    environment = {key: value for key, value in site.env().items() if key != "VERL_SHIPPER_RUN_ID"}
    trainer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    lines = trainer.stdout.splitlines()
    assert lines[0] == "0 pushed 1 files, 1.5 MB, to run mine (proj/exp)"
    assert lines[1] == "0 pushed 0 files, 0.0 MB, to run mine (proj/exp); 1 pushed before"
    records = site.root / "records"
    done = shipper(site, "flush", "--backend", "file", "--set", f"backends.file.dir={records}", timeout_s=90)
    assert done.returncode == 0, done.stderr
    shelf = records / "proj" / "exp-mine.files" / "profiles" / "step_4"
    assert [path.read_bytes() for path in shelf.iterdir()] == [trace]


def test_the_command_says_what_it_did_for_people_and_programs(site: Site) -> None:
    write(site.root / "a.txt", b"abc")
    with Client(project="p", experiment="e", run_id="r", spool_dir=site.spool):
        done = shipper(site, "push", "a.txt", "--json", "--step", "9", "--purpose", "memory")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == {
        "run_id": "r",
        "shipped": [{"name": "a.txt", "bytes": 3, "step": 9}],
        "known": 0,
        "changing": [],
        "failed": [],
    }
    assert shipper(site, "push", "none.txt", "--run-id", "r").returncode == 1
    unknown = shipper(site, "push", "a.txt", "--spool-dir", site.root / "nowhere")
    assert unknown.returncode == 2
    assert "--run-id" in unknown.stderr
