"""Places: the same for trainer and daemon, never in /tmp, short enough for a socket."""

from __future__ import annotations

import os
import pwd
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_shipper_spool.errors import UsageError
from verl_shipper_spool.location import (
    SOCKET_PATH_BYTES_MAX,
    SOCKET_VARIABLE,
    SPOOL_VARIABLE,
    STATE_VARIABLE,
    is_private,
    socket_address,
    spool_dir,
    state_dir,
)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> str:
    for variable in (SPOOL_VARIABLE, SOCKET_VARIABLE, STATE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/home/ann")
    return "/home/ann"


def test_by_default_everything_is_below_the_home_and_per_node() -> None:
    base = f"/home/ann/.local/state/verl-shipper/{os.uname().nodename}"

    spool = spool_dir()

    assert spool == f"{base}/spool"
    assert state_dir(spool) == f"{base}/state"
    assert socket_address(spool) == f"ipc://{base}/spool/run/ingest.sock"


def test_an_argument_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPOOL_VARIABLE, "/e/spool")
    monkeypatch.setenv(STATE_VARIABLE, "/e/state")
    monkeypatch.setenv(SOCKET_VARIABLE, "/e/s.sock")

    assert (spool_dir(), spool_dir("/a/spool"), spool_dir(Path("/p"))) == ("/e/spool", "/a/spool", "/p")
    assert (state_dir("/x"), state_dir("/x", "/a/state"), state_dir("/x", Path("/p"))) == ("/e/state", "/a/state", "/p")
    assert (socket_address("/x"), socket_address("/x", "/a.sock")) == ("ipc:///e/s.sock", "ipc:///a.sock")


def test_a_spool_given_by_hand_has_its_own_state_and_socket() -> None:
    assert state_dir("/data/spool") == "/data/spool.state"
    assert socket_address("/data/spool") == "ipc:///data/spool/run/ingest.sock"
    assert state_dir("/data/spool") != state_dir("/data/other")


def test_relative_places_and_homes_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    assert spool_dir("s") == str(tmp_path / "s")
    assert spool_dir("~/s") == "/home/ann/s"
    assert state_dir("/x", "t") == str(tmp_path / "t")
    assert socket_address("/x", "s.sock") == f"ipc://{tmp_path}/s.sock"
    assert socket_address("/x", "ipc://s.sock") == f"ipc://{tmp_path}/s.sock"


def test_a_path_too_long_for_a_socket_has_a_short_stand_in_the_same_for_everybody() -> None:
    spool = "/data/" + "x" * SOCKET_PATH_BYTES_MAX

    address = socket_address(spool)

    path = address.removeprefix("ipc://")
    assert len(path) <= SOCKET_PATH_BYTES_MAX
    assert path.startswith(f"/dev/shm/verl-shipper-{os.getuid()}/")
    assert address == socket_address(spool) == socket_address("/y", f"{spool}/run/ingest.sock")
    assert address != socket_address(spool + "y")


def test_length_is_counted_in_bytes_up_to_the_limit() -> None:
    longest = "/" + "x" * (SOCKET_PATH_BYTES_MAX - 1)

    assert socket_address("/s", longest) == f"ipc://{longest}"
    assert socket_address("/s", longest + "x") != f"ipc://{longest}x"
    assert "/dev/shm/" in socket_address("/s", "/" + "ü" * (SOCKET_PATH_BYTES_MAX // 2))


def test_nothing_is_ever_in_tmp_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp")
    for long in ("", "x" * 200):
        spool = spool_dir() + long
        for place in (spool, state_dir(spool), socket_address(spool).removeprefix("ipc://")):
            assert not place.startswith("/tmp")


@pytest.mark.parametrize("value", [None, "", "relative"])
def test_without_a_home_variable_the_password_file_tells(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", value)

    assert spool_dir().startswith(pwd.getpwuid(os.getuid()).pw_dir)


def test_a_user_without_a_name_has_a_place_of_his_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)

    assert spool_dir().startswith("/var/tmp/verl-shipper-987654321/")
    assert os.path.isabs(socket_address(spool_dir()).removeprefix("ipc://"))


def test_a_tcp_address_is_taken_as_it_is() -> None:
    assert socket_address("/x", "tcp://10.0.0.1:7000") == "tcp://10.0.0.1:7000"


@pytest.mark.parametrize("address", ["tcp://host", "tcp://host:port", "ipc://", "http://host:80", "inproc://x"])
def test_an_address_of_an_unknown_form_is_the_callers_mistake(address: str) -> None:
    with pytest.raises(UsageError, match="is neither a path") as caught:
        socket_address("/x", address)

    assert caught.value.hint


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A folder of our own where everybody may make folders."""
    folder = Path("/dev/shm") / f"test-{uuid.uuid4().hex}"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


def test_a_socket_in_shared_memory_is_trusted_in_a_folder_of_our_own_alone(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = str(shared_memory / "x.sock")
    assert is_private(socket)

    shared_memory.chmod(0o755)
    assert not is_private(socket)
    shared_memory.chmod(0o700)
    link = shared_memory / "link"
    link.symlink_to(shared_memory)
    assert not is_private(str(link / "x.sock"))
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)
    assert not is_private(socket)


def test_a_socket_elsewhere_or_not_there_yet_is_nobody_elses(tmp_path: Path) -> None:
    assert is_private(str(tmp_path / "x.sock"))
    assert is_private(f"/dev/shm/{uuid.uuid4().hex}/x.sock")
