"""`verl-shipper doctor`: every danger is one line with what to type next, and no line shows a secret."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from support.daemon import Daemon, shipper
from support.mlflow_server import MlflowServer, free_port
from support.site import Site
from support.web import Reply, WebServer
from verl_shipper.backends.base import Backend
from verl_shipper.backends.file import FileBackend
from verl_shipper.checks import Finding, Level
from verl_shipper.cli import main

SENTINEL = "SENTINEL"


@pytest.fixture(autouse=True)
def environment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in site.env().items():
        if name.startswith(("VERL_SHIPPER", "HOME")):
            monkeypatch.setenv(name, value)
    monkeypatch.delenv("VERL_SHIPPER_SOCKET", raising=False)


def doctor(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


def findings(*arguments: str | Path) -> list[dict[str, str]]:
    result = doctor("--json", *arguments)
    found: list[dict[str, str]] = json.loads(result.stdout)
    assert result.exit_code == any(finding["level"] == "fail" for finding in found)
    return found


def about(topic: str, *words: str, found: list[dict[str, str]] | None = None) -> dict[str, str]:
    """The one finding of a topic with these words."""
    everything = findings() if found is None else found
    (one,) = [each for each in everything if each["topic"] == topic and all(word in each["what"] for word in words)]
    return one


# --- the command ----------------------------------------------------------------------------------------------


def test_on_a_fresh_machine_nothing_fails_and_nothing_is_made(site: Site) -> None:
    result = doctor(*site.file_backend(), "--backend", "console")

    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert {line.split()[0] for line in lines} == {"ok", "warn"}
    assert [line.split()[1] for line in lines if line.startswith("ok")][:2] == ["spool", "socket"]
    assert len({line.index(line.split()[2]) for line in lines}) == 1, "aligned"
    assert not site.spool.exists()
    assert not site.state.exists()


def test_json_holds_the_same_findings_as_the_lines(site: Site) -> None:
    lines = doctor(*site.file_backend()).stdout.splitlines()

    for line, finding in zip(lines, findings(*site.file_backend()), strict=True):
        assert finding.keys() == {"level", "topic", "what", "hint"}
        assert line.split()[:2] == [finding["level"], finding["topic"]]
        assert finding["hint"] or finding["level"] == "ok"


def test_without_a_backend_the_machine_is_looked_at_all_the_same() -> None:
    assert about("backends", "no backend")["level"] == "warn"


def test_what_the_command_line_cannot_mean_ends_with_2() -> None:
    for arguments in (["--backend", "mlfow"], ["--set", "spol_dir=x"], ["--config", "/nowhere.yaml"]):
        result = doctor(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")


def test_settings_that_cannot_work_fail_and_the_rest_is_looked_at(site: Site) -> None:
    found = findings(*site.file_backend(), "--backend", "console", "--set", "backends.console.stream=x")

    assert about("console", "not one of stdout, stderr", found=found)["level"] == "fail"
    assert about("file", "writable", found=found)["level"] == "ok"


def test_a_key_behind_set_is_refused_and_not_repeated() -> None:
    result = doctor("--backend", "mlflow", "--set", f"backends.mlflow.api_key={SENTINEL}")

    assert result.exit_code == 1
    assert "unknown setting 'api_key'" in result.stdout
    assert SENTINEL not in result.output


def test_a_check_that_breaks_is_a_finding_without_its_text(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_settings: Mapping[str, Any]) -> Iterator[Finding]:
        yield Finding(Level.OK, "http://user:SENTINEL@host \x1b[31m")
        raise RuntimeError(SENTINEL)

    monkeypatch.setattr(FileBackend, "diagnose", broken)
    found = findings(*site.file_backend(), "--backend", "console")

    assert about("file", "broke: RuntimeError", found=found)["level"] == "fail"
    assert SENTINEL not in json.dumps(found)
    assert "u001b" not in json.dumps(found)


def test_a_backend_has_no_findings_unless_it_says_so() -> None:
    assert list(Backend.diagnose({})) == []


# --- this machine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "level"), [(0o755, "warn"), (0o777, "fail")])
def test_a_spool_of_the_wrong_mode_is_told_with_the_command(site: Site, mode: int, level: str) -> None:
    site.spool.mkdir()
    site.spool.chmod(mode)

    finding = about("spool", f"{mode:04o}")

    assert finding["level"] == level
    assert finding["hint"].startswith("chmod ")


def test_a_spool_below_tmp_is_a_danger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_SHIPPER_SPOOL_DIR", "/tmp/nobody/made/this")

    finding = about("spool", "below /tmp")

    assert finding["level"] == "warn"
    assert "export VERL_SHIPPER_SPOOL_DIR=" in finding["hint"]


def test_a_socket_name_that_is_too_long_has_a_stand_in(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = site.root / ("x" * (150 - len(str(site.root))))
    monkeypatch.setenv("VERL_SHIPPER_SPOOL_DIR", str(folder))

    finding = about("socket", "/dev/shm/verl-shipper-", "stands in")

    assert finding["level"] == "ok"


def test_an_address_that_cannot_be_one_fails_and_the_rest_is_looked_at() -> None:
    found = findings("--socket", "http://x")

    assert about("socket", "http://x", found=found)["level"] == "fail"
    assert [finding["topic"] for finding in found if finding["level"] != "fail"]


def test_a_socket_left_behind_is_a_warning(site: Site) -> None:
    (site.spool / "run").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(site.socket)

    finding = about("socket", "left behind")

    assert finding["level"] == "warn"
    assert "verl-shipper run" in finding["hint"]


def test_what_is_no_socket_fails(site: Site) -> None:
    (site.spool / "run").mkdir(parents=True)
    Path(site.socket).write_text("")

    assert about("socket", "is no socket")["level"] == "fail"


def test_a_network_address_where_nobody_is_costs_seconds_only() -> None:
    found = findings("--socket", f"tcp://127.0.0.1:{free_port()}")

    assert about("daemon", "none has run", found=found)["level"] == "warn"


def test_a_damaged_state_fails_and_says_what_becomes_of_it(site: Site) -> None:
    site.state.mkdir(mode=0o700)
    (site.state / "daemon.sqlite3").write_bytes(b"no database at all, certainly not" * 100)

    finding = about("state", "daemon.sqlite3")

    assert finding["level"] == "fail"
    assert "sets a damaged file aside" in finding["hint"]


# --- the daemon -----------------------------------------------------------------------------------------------


def test_a_daemon_is_asked_and_notices_nothing(site: Site) -> None:
    assert about("daemon", "none has run")["level"] == "warn"

    with Daemon(site, *site.file_backend()) as daemon:
        found = findings(*site.file_backend())
        after = daemon.status()["daemon"]

    finding = about("daemon", f"pid {daemon.pid} runs since 20", "answers at", found=found)
    assert finding["level"] == "ok"
    assert about("socket", "somebody listens", found=found)["level"] == "ok"
    assert (after["open_streams"], after["rejected_messages"]) == (0, 0)
    assert about("daemon", f"pid {daemon.pid} runs", found=found) == finding


def test_a_daemon_that_hangs_or_is_gone_is_told_apart(site: Site) -> None:
    with Daemon(site, *site.file_backend()) as daemon:
        daemon.pause()
        hung = about("daemon")
        daemon.resume()
        daemon.kill()
        gone = about("daemon")

    assert hung["level"] == "fail"
    assert "does not answer" in hung["what"]
    assert f"kill {daemon.pid}" in hung["hint"]
    assert gone["level"] == "warn"
    assert "not running" in gone["what"]


def test_a_daemon_with_another_state_folder_is_told(site: Site, tmp_path: Path) -> None:
    with Daemon(site, *site.file_backend()):
        finding = about("daemon", found=findings("--state-dir", tmp_path / "another"))

    assert "another state folder" in finding["what"]
    assert "--state-dir" in finding["hint"]


# --- MLflow ---------------------------------------------------------------------------------------------------


def mlflow_findings(site: Site, uri: str, **env: str) -> tuple[int, list[dict[str, str]]]:
    """In a process of its own, since MLflow keeps much in its process."""
    result = shipper(site, "doctor", "--json", *site.mlflow_backend(uri), env=env)
    assert SENTINEL not in result.stdout + result.stderr
    assert result.stderr == ""
    return result.returncode, [each for each in json.loads(result.stdout) if each["topic"] == "mlflow"]


def test_a_healthy_mlflow_server_is_asked_with_the_key_and_passes(site: Site, mlflow_server: MlflowServer) -> None:
    code, found = mlflow_findings(site, mlflow_server.uri, MLFLOW_TRACKING_TOKEN=SENTINEL)

    assert code == 0
    assert {finding["level"] for finding in found} == {"ok"}
    about("mlflow", "/version answers 200", "directly", found=found)
    about("mlflow", "clock agrees", found=found)
    about("mlflow", "the server is MLflow 3.", found=found)
    about("mlflow", "experiments can be listed (MLFLOW_TRACKING_TOKEN)", found=found)


def test_a_key_that_mlflow_refuses_fails_with_the_variables_to_set(site: Site) -> None:
    login = {"MLFLOW_TRACKING_USERNAME": "svc", "MLFLOW_TRACKING_PASSWORD": SENTINEL}
    with WebServer() as server:
        server.reply = Reply(401, body=b"go away")
        code, found = mlflow_findings(site, server.url, **login)

    assert code == 1
    refused = about("mlflow", "key refused (401)", found=found)
    assert refused["level"] == "fail"
    assert "MLFLOW_TRACKING_TOKEN" in refused["what"]
    assert len({headers["authorization"] for _, headers in server.requests}) == 1, "we ask as the SDK does"


def test_a_server_that_is_not_there_is_one_line_and_the_sdk_is_not_asked(site: Site) -> None:
    uri = f"http://user:{SENTINEL}@127.0.0.1:{free_port()}"
    code, found = mlflow_findings(site, uri)

    assert code == 1
    assert "nothing listens" in about("mlflow", found=found)["what"]


def test_verification_that_a_user_switched_off_is_a_warning(site: Site) -> None:
    _, found = mlflow_findings(site, f"https://127.0.0.1:{free_port()}", MLFLOW_TRACKING_INSECURE_TLS="true")

    assert about("mlflow", "is not verified", found=found)["level"] == "warn"


def test_a_database_that_does_not_exist_is_not_made(site: Site) -> None:
    code, found = mlflow_findings(site, f"sqlite:///{site.root}/mlflow.db")

    assert code == 0
    about("mlflow", "does not exist yet; the daemon makes it", found=found)
    assert not (site.root / "mlflow.db").exists()


def test_a_database_that_is_none_fails(site: Site) -> None:
    (site.root / "mlflow.db").write_bytes(b"nothing of the kind" * 1000)
    code, found = mlflow_findings(site, f"sqlite:///{site.root}/mlflow.db")

    assert code == 1
    assert about("mlflow", "own client fails", found=found)["level"] == "fail"
