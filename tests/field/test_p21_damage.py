"""P21: damage in the middle, and a damaged state file. The daemon starts, and loses at most what was damaged."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support import oracle
from support.daemon import SHIPPER, Daemon, shipper
from support.mlflow_server import MlflowServer
from support.processes import wait_for
from support.site import Site
from support.spools import build_stream, flip_byte, frames, segments
from support.trainer import as_user, run_script, usable_root

pytestmark = pytest.mark.alone

RUNS = ("r1", "r2", "r3")
SEGMENTS = 5
PER_SEGMENT = 1000
RECORDS = SEGMENTS * PER_SEGMENT  # a start, n = 0 .. 4997, an end

MORE = """
import sys
from verl_shipper_client import Client

project, first = sys.argv[1], int(sys.argv[2])
for run_id in ("r1", "r2", "r3"):
    with Client(project, "exp", run_id=run_id) as client:
        for step in range(first, first + 10):
            client.log({"n": float(step)}, step=step)
"""


def _build(site: Site) -> dict[str, Path]:
    return {
        run_id: build_stream(site.spool, run_id, segment_count=SEGMENTS, records_per_segment=PER_SEGMENT)
        for run_id in RUNS
    }


def _wait_all(daemon: Daemon) -> oracle.Status:
    """Until each run is accounted for in full and nothing is pending."""
    return daemon.wait_until(
        lambda status: (
            all(status["backends"]["file"]["runs"].get(run_id, {"logged": 0})["logged"] >= RECORDS for run_id in RUNS)
            and status["backends"]["file"]["pending"] == 0
        ),
        timeout_s=60,
        what=f"{RECORDS} records of each run are accounted for",
    )


def _values(site: Site, run_id: str) -> list[int]:
    lines = oracle.read_lines(site.output("field", "exp", run_id))
    oracle.assert_once_in_order(lines, gaps=True)
    return [int(value) for _, value in oracle.values(lines, "n")]


def _make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _flip(path: Path) -> None:
    middle = frames(path)[500]
    flip_byte(path, middle.start + 25)


def _flip_length(path: Path) -> None:
    flip_byte(path, frames(path)[500].start + 9)


def _zero_page(path: Path) -> None:
    """A page of NULs in the middle, as a lost write leaves it."""
    with open(path, "r+b") as file:
        file.seek(16384)
        file.write(bytes(4096))


def _dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


# what is done to segment 3 (values 1999 .. 2998), and how many records it may cost at most
DAMAGES: dict[str, tuple[Callable[[Path], None], int]] = {
    "one byte of a payload": (_flip, 1),
    "one byte of a length": (_flip_length, 1),
    "a page of zeros": (_zero_page, 4096 // 40 + 2),
    "a directory in its place": (_make_directory, PER_SEGMENT),
    "removed": (os.unlink, PER_SEGMENT),
    "a dangling link": (_dangling_link, PER_SEGMENT),
    "emptied": (lambda path: os.truncate(path, 0), PER_SEGMENT),
    "cut in half": (lambda path: os.truncate(path, path.stat().st_size // 2), PER_SEGMENT // 2 + 2),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_p21_damage_in_a_segment_costs_the_damaged_records_and_no_other_run(site: Site, damage: str) -> None:
    act, cost_max = DAMAGES[damage]
    act(segments(_build(site)["r2"])[2])

    with Daemon(site, *site.file_backend()) as daemon:
        status = _wait_all(daemon)

    for run_id in ("r1", "r3"):
        assert _values(site, run_id) == list(range(RECORDS - 2))
    found = _values(site, "r2")
    lost = sorted(set(range(RECORDS - 2)) - set(found))
    assert 1 <= len(lost) <= cost_max, f"{len(lost)} lost: {lost[:3]} .. {lost[-3:]}"
    assert all(1999 <= value <= 2998 for value in lost), f"lost outside of segment 3: {lost[:3]} .. {lost[-3:]}"
    assert found == sorted(found)
    dropped = status["backends"]["file"]["runs"]["r2"]["dropped"]
    assert sum(dropped.values()) == len(lost), f"{len(lost)} lost, told: {dropped}"
    oracle.assert_law(status, pending=0)


@pytest.mark.skipif(not usable_root(), reason="needs root to become another user")
def test_p21_a_segment_of_mode_000_is_a_gap_of_known_size(open_folder: Path) -> None:
    site = Site(open_folder)
    segments(_build(site)["r2"])[3].chmod(0)
    for path in [site.root, *site.root.rglob("*")]:
        os.chown(path, 1500, 1500)

    with Daemon(site, *site.file_backend(), launcher=[*as_user(1500), *SHIPPER]) as daemon:
        status = _wait_all(daemon)

    for run_id in ("r1", "r3"):
        assert _values(site, run_id) == list(range(RECORDS - 2))
    lost = set(range(RECORDS - 2)) - set(_values(site, "r2"))
    assert lost == set(range(2999, 3999))
    assert sum(status["backends"]["file"]["runs"]["r2"]["dropped"].values()) == PER_SEGMENT
    oracle.assert_law(status, pending=0)


def _half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


STATE_DAMAGES: dict[str, Callable[[Path], object]] = {
    "0 bytes": lambda path: path.write_bytes(b""),
    "4096 NULs": lambda path: path.write_bytes(bytes(4096)),
    "cut in half": _half,
    "garbage": lambda path: path.write_bytes(os.urandom(8192)),
    "a directory": _make_directory,
    "removed": os.unlink,
}


def _databases(folder: Path) -> list[Path]:
    """Files of the daemon's state, found by what SQLite writes at their head."""
    return [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.read_bytes()[:15] == b"SQLite format 3"
    ]


def test_p21_a_damaged_state_file_loses_nothing_and_repeats_nothing(site: Site) -> None:
    """One damage after the other, each behind a clean stop."""
    _survive(site, "stopped", ["0 bytes", "garbage", "a directory", "removed"], None)


def test_p21_a_state_file_damaged_behind_a_kill_loses_nothing_and_repeats_nothing(
    site: Site, mlflow_server: MlflowServer
) -> None:
    """The same when SQLite's own journals are still there; at MLflow too."""
    _survive(site, "killed", ["4096 NULs", "cut in half", "0 bytes", "removed"], mlflow_server)


def _survive(site: Site, how: str, damages: list[str], server: MlflowServer | None) -> None:
    tracking = site.mlflow_backend(server.uri) if server else []
    project = f"p21-{time.time_ns()}"
    for run_id in RUNS:
        build_stream(site.spool, run_id, project=project, records_per_segment=300)
    with Daemon(site, *site.file_backend(), *tracking) as daemon:
        daemon.wait_settled(300 * len(RUNS))
        expected = list(range(298))

        for number, damage in enumerate(damages):
            if how == "killed":
                daemon.kill()
            else:
                daemon.stop()
            databases = _databases(site.state)
            assert databases, "no state found"
            for path in databases:
                STATE_DAMAGES[damage](path)

            daemon.start()
            first = 1000 * (number + 1)
            run_script(site, MORE, project, first)
            expected += range(first, first + 10)
            for run_id in RUNS:
                _wait_values(site.output(project, "exp", run_id), expected, damage)
        status = daemon.wait_settled(len(RUNS) * 10)

    oracle.assert_law(status, pending=0)
    for run_id in RUNS:
        oracle.assert_once_in_order(oracle.read_lines(site.output(project, "exp", run_id)))
    runs = oracle.mlflow_runs(server.uri, project, "n") if server else []
    assert len(runs) == (len(RUNS) if server else 0)
    for run in runs:
        oracle.assert_exactly(run.history("n"), [(n, float(n)) for n in expected], f"mlflow {run.name}")


def _wait_values(output: Path, expected: list[int], damage: str) -> None:
    def so_far() -> list[int]:
        lines = oracle.complete_lines(output)
        return [int(value) for _, value in oracle.values(lines, "n")]

    wait_for(lambda: len(so_far()) >= len(expected), 60, f"{output.name} is complete after {damage}")
    assert so_far() == expected, f"{output.name} after {damage}"


def test_flush_after_the_state_was_lost_repeats_nothing(site: Site, tmp_path: Path) -> None:
    """Sibling: an archive is flushed, the state is gone, it is flushed again into the same output."""
    build_stream(site.spool, "r1", records_per_segment=300)
    login = Site(tmp_path / "login")

    first = shipper(login, "flush", site.spool, *login.file_backend())
    shutil.rmtree(login.state)
    second = shipper(login, "flush", site.spool, *login.file_backend())

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    lines = oracle.read_lines(login.output("field", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    assert [int(value) for _, value in oracle.values(lines, "n")] == list(range(298))


def test_an_orphaned_folder_without_a_header_disturbs_nobody(site: Site) -> None:
    """Sibling: folders and files that are no streams lie in the spool; all others are delivered."""
    _build(site)
    (site.spool / "not-a-stream").mkdir()
    (site.spool / "stray.txt").write_text("hello")
    (site.spool / ("f" * 32)).mkdir()
    (site.spool / ("e" * 32)).symlink_to(site.spool / ("e" * 32))
    began_s = time.monotonic()

    with Daemon(site, *site.file_backend()) as daemon:
        status = _wait_all(daemon)

    assert time.monotonic() - began_s < 60
    for run_id in RUNS:
        assert _values(site, run_id) == list(range(RECORDS - 2))
    oracle.assert_law(status, pending=0)
