"""Bad input: one clear line on standard error, the documented exit code, and nothing lost.

1  the world refuses      2  configuration or command line      3  another daemon      4  something remains
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support import oracle
from support.daemon import Daemon, shipper
from support.site import Site
from support.trainer import Ledger, counting_trainer

pytestmark = pytest.mark.alone

WORLD = 1
USAGE = 2
HELD = 3


def _assert_one_line(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert result.returncode == code, f"exit code {result.returncode}: {result.stderr}"
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, f"one clear line, not {len(lines)}: {result.stderr}"
    for word in words:
        assert word in lines[0], f"{word!r} is not in: {lines[0]}"


@pytest.mark.parametrize("uri", ["htp://nowhere", "mlflow.example", "http://", "ftp://host/path"])
def test_a_tracking_uri_that_cannot_work_is_refused_at_start(site: Site, uri: str) -> None:
    result = shipper(site, "run", *site.mlflow_backend(uri), timeout_s=20)

    _assert_one_line(result, USAGE, "tracking_uri")


def test_a_server_that_is_not_there_is_shown_and_loses_nothing(site: Site) -> None:
    ledger = Ledger(site.root / "ledger")
    with Daemon(site, *site.file_backend(), *site.mlflow_backend("http://127.0.0.1:9")) as daemon:
        counting_trainer(site, ledger, count=50, pace_s=0).wait()
        daemon.wait_settled(52, backends=["file"])
        status = daemon.wait_until(lambda status: status["backends"]["mlflow"]["last_error"], 30, "an error is told")
        words = daemon.words()

    oracle.assert_law(status)
    assert status["backends"]["mlflow"]["pending"] == 52
    assert "127.0.0.1:9" in status["backends"]["mlflow"]["last_error"]
    assert "Traceback" not in words


@pytest.mark.parametrize(("name", "advice"), [("fiel", "'file'"), ("oracle9", "mlflow")])
def test_an_unknown_backend_is_refused_with_the_nearest_or_the_known_names(site: Site, name: str, advice: str) -> None:
    result = shipper(site, "run", "--backend", name, timeout_s=20)

    _assert_one_line(result, USAGE, name, advice)


def test_a_backend_without_its_setting_is_refused(site: Site) -> None:
    result = shipper(site, "run", "--backend", "file", "--set", "backends.file.dri=/x", timeout_s=20)

    _assert_one_line(result, USAGE, "backends.file.dir")


def test_a_misspelled_setting_of_a_backend_is_refused(site: Site) -> None:
    result = shipper(site, "run", *site.file_backend(), "--set", "backends.file.dri=/x", timeout_s=20)

    _assert_one_line(result, USAGE, "dri")


@pytest.mark.parametrize(
    "content",
    [
        "backends: [",
        "backends:\n  fiel:\n    dir: x\n",
        "just words",
        "backends: {file: {dir: 5",
        "\x00\x01",
        "nonsense: 1\n",
    ],
    ids=["unclosed", "unknown backend", "no mapping", "torn", "binary", "unknown key"],
)
def test_a_malformed_configuration_is_one_line_with_the_file(site: Site, content: str) -> None:
    path = site.root / "shipper.yaml"
    path.write_text(content)

    result = shipper(site, "run", "--config", path, timeout_s=20)

    _assert_one_line(result, USAGE)


def test_a_configuration_file_that_is_not_there_is_one_line(site: Site) -> None:
    result = shipper(site, "run", "--config", site.root / "absent.yaml", timeout_s=20)

    assert result.returncode == USAGE
    assert "absent.yaml" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("setting", ["novalue", "=x", "backends.file", "no.such.key=1"])
def test_a_malformed_set_is_one_line(site: Site, setting: str) -> None:
    result = shipper(site, "run", *site.file_backend(), "--set", setting, timeout_s=20)

    _assert_one_line(result, USAGE)


@pytest.mark.parametrize("address", ["carrier://pigeon", "tcp://host:port", "ipc://"])
def test_a_socket_address_of_an_unknown_form_is_one_line(site: Site, address: str) -> None:
    result = shipper(site, "run", *site.file_backend(), "--socket", address, timeout_s=20)

    _assert_one_line(result, USAGE, address)


def test_a_spool_that_is_a_file_is_one_line(site: Site) -> None:
    site.spool.write_text("not a folder")

    result = shipper(site, "run", *site.file_backend(), timeout_s=20)

    _assert_one_line(result, USAGE, str(site.spool))
    assert "--state-dir" not in result.stderr, "the advice names the wrong folder"


@pytest.mark.parametrize("which", ["spool", "state"])
def test_a_place_that_cannot_be_made_is_one_line(site: Site, which: str) -> None:
    setattr(site, which, Path("/proc/no/such/place"))

    result = shipper(site, "run", *site.file_backend(), timeout_s=20)

    _assert_one_line(result, USAGE, "/proc/no")
    assert ("--state-dir" in result.stderr) == (which == "state"), "the advice names the wrong folder"


def test_a_second_daemon_on_the_same_spool_is_one_line(site: Site) -> None:
    with Daemon(site, *site.file_backend()) as daemon:
        result = shipper(site, "run", *site.file_backend(), timeout_s=20)

    _assert_one_line(result, HELD, str(daemon.pid))


def test_an_output_that_cannot_be_written_parks_or_retries_and_loses_nothing(site: Site) -> None:
    """A file stands where the output folder should be: the daemon lives, tells, and delivers once it is away."""
    ledger = Ledger(site.root / "ledger")
    site.out.rmdir()
    site.out.write_text("in the way")

    with Daemon(site, *site.file_backend()) as daemon:
        counting_trainer(site, ledger, count=50, pace_s=0).wait()
        status = daemon.wait_until(
            lambda status: status["backends"]["file"]["last_error"] or status["backends"]["file"]["parked"], 30, "told"
        )
        assert status["backends"]["file"]["delivered"] == 0
        os.unlink(site.out)
        status = daemon.wait_settled(52, timeout_s=90)

    oracle.assert_law(status, pending=0)
    assert len(oracle.read_lines(site.output("count", "exp", "r1"))) == 52


def test_flush_and_cat_of_a_place_that_is_not_there_are_one_line(site: Site) -> None:
    for command in (["flush", "/no/such/folder", *site.file_backend()], ["cat", "/no/such/folder"]):
        result = shipper(site, *command, timeout_s=30)

        assert result.returncode in (WORLD, USAGE), f"{command}: {result.returncode} {result.stderr}"
        assert "/no/such/folder" in result.stderr
        assert "Traceback" not in result.stderr


def test_status_without_any_state_is_no_traceback(site: Site) -> None:
    result = shipper(site, "status", "--json", timeout_s=30)

    assert result.returncode in (0, WORLD)
    assert "Traceback" not in result.stderr
