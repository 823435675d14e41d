"""P18: where the socket lives: paths too long for a socket, cleaners that remove it, a /tmp that is not ours."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from support import oracle
from support.daemon import SHIPPER, Daemon
from support.site import Site
from support.trainer import Ledger, as_user, counting_trainer, run_script, usable_root
from verl_shipper_spool.location import SOCKET_PATH_BYTES_MAX, short_socket_path, socket_address, spool_dir, state_dir

pytestmark = pytest.mark.alone

# Says whether the daemon took everything while the trainer lived: over the socket, as nothing else is that quick.
TRAINER = """
import json, sys
from verl_shipper_client import Client

client = Client("p18", "exp", run_id=sys.argv[1])
for step in range(100):
    client.log({"n": float(step)}, step=step)
print(json.dumps(client.finish(exit_code=0, timeout_s=10)))
"""


def test_p18a_a_path_of_150_characters_with_a_space_works_over_the_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("a place with spaces " + "x" * 130)
    site = Site(deep)
    assert len(str(site.spool)) > 150

    with Daemon(site, *site.file_backend()) as daemon:
        result = run_script(site, TRAINER, "r1")
        daemon.wait_settled(102)
    site.close()

    assert json.loads(result.stdout) is True, "trainer and daemon did not meet at the socket"
    lines = oracle.read_lines(site.output("p18", "exp", "r1"))
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(100)], "file")


@pytest.mark.parametrize("length", [20, 99, 100, 101, 107, 108, 500])
def test_every_socket_path_fits_and_is_the_same_for_both_sides(length: int) -> None:
    path = "/" + "p" * (length - 1)

    short = short_socket_path(path)

    assert len(os.fsencode(short)) <= SOCKET_PATH_BYTES_MAX
    assert short == short_socket_path(path)
    assert (short == path) == (length <= SOCKET_PATH_BYTES_MAX)
    assert short_socket_path(path + "q") != short


def test_p18b_removing_the_socket_and_then_its_folder_loses_no_record(site: Site) -> None:
    place = site.root / "run"
    place.mkdir()
    env = {"VERL_SHIPPER_SOCKET": str(place / "s.sock")}
    ledger = Ledger(site.root / "ledger")

    with (
        Daemon(site, *site.file_backend(), env=env) as daemon,
        counting_trainer(site, ledger, count=1000, pace_s=0.005, env=env) as trainer,
    ):
        ledger.wait_for(200)
        for path in place.iterdir():
            path.unlink()
        ledger.wait_for(500)
        shutil.rmtree(place)
        trainer.wait()
        status = daemon.wait_settled(1002, timeout_s=60)

    lines = oracle.read_lines(site.output("count", "exp", "r1"))
    oracle.assert_once_in_order(lines)
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(1000)], "file")
    oracle.assert_law(status, pending=0)


def test_a_new_client_meets_the_daemon_again_after_its_socket_was_removed(site: Site) -> None:
    """Sibling: a cleaner took the socket of an idle daemon; the next run still arrives while the daemon lives on."""
    place = site.root / "run"
    place.mkdir()
    env = {"VERL_SHIPPER_SOCKET": str(place / "s.sock")}

    with Daemon(site, *site.file_backend(), env=env) as daemon:
        shutil.rmtree(place)
        run_script(site, TRAINER, "r1", env=env)
        daemon.wait_settled(102, timeout_s=60)

    lines = oracle.read_lines(site.output("p18", "exp", "r1"))
    oracle.assert_exactly(oracle.values(lines, "n"), [(n, float(n)) for n in range(100)], "file")


def test_p18c_no_default_lies_in_a_tmp_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VERL_SHIPPER_SPOOL_DIR", "VERL_SHIPPER_SOCKET", "VERL_SHIPPER_STATE_DIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")

    spool = spool_dir()

    for place in (spool, state_dir(spool), socket_address(spool).removeprefix("ipc://")):
        assert place.startswith("/home/somebody/"), place


@pytest.mark.skipif(not usable_root(), reason="needs root to hide /tmp from the daemon")
def test_p18c_a_daemon_with_a_private_tmp_meets_its_trainers_by_default(open_folder: Path) -> None:
    site = Site(open_folder)
    unset = {"VERL_SHIPPER_SPOOL_DIR": "", "VERL_SHIPPER_STATE_DIR": ""}
    launcher = [*as_user("-", "/tmp"), *SHIPPER]

    with Daemon(site, *site.file_backend(), env=unset, launcher=launcher) as daemon:
        result = run_script(site, TRAINER, "r1", env=unset)
        output = site.output("p18", "exp", "r1")
        assert json.loads(result.stdout) is True, f"they did not meet:\n{daemon.words()}"

    lines = oracle.read_lines(output)
    oracle.assert_once_in_order(lines)
