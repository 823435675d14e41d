"""A daemon whose configuration changes while records flow: what is meant happens, and nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support import oracle
from support.daemon import Daemon
from support.processes import wait_for
from support.site import Site
from support.trainer import Ledger, counting_trainer

SOON_S = 30.0


@pytest.fixture
def config(site: Site) -> Path:
    path = site.root / "shipper.yaml"
    path.write_text(file_only(site))
    return path


def file_only(site: Site, more: str = "") -> str:
    return f"backends:\n  file: {{dir: {site.out}}}\n{more}"


def replaced(path: Path, text: str) -> None:
    """As an editor does it: a new file takes the old one's name."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)


def told(daemon: Daemon, words: str, count: int = 1) -> None:
    wait_for(lambda: daemon.words().count(words) >= count, SOON_S, f"the daemon says {words!r} {count} times")


def test_records_flow_through_every_change_of_the_file(site: Site, config: Path) -> None:
    """A frequency, a second backend, a broken file, a mended one, one backend less: the first has every record once."""
    ledger = Ledger(site.root / "ledger")
    both = file_only(site, "  console: {}\n")
    with Daemon(site, "--config", config) as daemon, counting_trainer(site, ledger, pace_s=0.002) as trainer:
        ledger.wait_for(100)
        (lane,) = daemon.lanes()

        replaced(config, both)
        told(daemon, "delivering to file, console")
        daemon.wait_until(lambda status: status["backends"].get("console", {}).get("delivered"), SOON_S, "both deliver")
        lanes = daemon.lanes()
        assert lane not in lanes, "its orders name all backends, so it was replaced"

        config.write_text(both + "  wandbb: {}\n")  # in place, as a shell does it
        told(daemon, "did you mean 'wandb'?")
        problems = daemon.wait_until(lambda status: status["daemon"]["problems"], SOON_S, "a problem")
        assert "the old one stays in use" in problems["daemon"]["problems"][0]
        assert daemon.lanes() == lanes

        replaced(config, file_only(site, "sampling: {run_may_choose: none}\n"))
        told(daemon, "configuration: mended")
        told(daemon, "taken over; delivering to file\n")
        daemon.wait_until(lambda status: not status["daemon"]["problems"], SOON_S, "no problem any more")
        wait_for(lambda: len(daemon.lanes()) == 1, SOON_S, "the lane that nobody wants is gone")

        ledger.wait_for(ledger.last() + 200)
        trainer.kill()
        wait_for(lambda: not site.stream_folders(), SOON_S, "what the dead trainer left is taken")
        status = daemon.wait_settled(len(ledger.values()) + 2, backends=["file"], timeout_s=SOON_S)

    oracle.assert_law(status)
    (output,) = (site.out).rglob("*.jsonl")
    lines = oracle.read_lines(output)
    oracle.assert_once_in_order(lines)
    oracle.assert_ledger([int(value) for _, value in oracle.values(lines, "n")], ledger.values(), 1, "file")
    assert status["backends"]["file"]["dropped"] == {}
    assert "Traceback" not in daemon.words()
    assert "starting it again" not in daemon.words(), "a lane that is replaced has not died"


def test_a_frequency_counts_from_the_moment_it_is_written(site: Site, config: Path) -> None:
    ledger = Ledger(site.root / "ledger")
    with Daemon(site, "--config", config) as daemon:
        counting_trainer(site, ledger, run_id="before", count=50, pace_s=0).wait()
        daemon.wait_settled(52)
        replaced(config, file_only(site, "sampling: {log_frequency: 10}\n"))
        told(daemon, "taken over")
        counting_trainer(site, ledger, run_id="after", count=51, pace_s=0).wait()
        status = daemon.wait_settled(52 + 53)

    oracle.assert_law(status, pending=0)
    runs = status["backends"]["file"]["runs"]
    assert (runs["before"]["delivered"], runs["before"]["sampled_out"]) == (52, 0)
    assert (runs["after"]["delivered"], runs["after"]["sampled_out"]) == (2 + 6, 45)


def test_a_hangup_loads_the_file_again_and_does_not_end_the_daemon(site: Site, config: Path) -> None:
    with Daemon(site, "--config", config) as daemon:
        config.write_text(file_only(site, "node_quota_bytes: 77000000\n"))
        os.kill(daemon.pid, signal.SIGHUP)
        told(daemon, "taken over")
        counting_trainer(site, Ledger(site.root / "ledger"), count=5, pace_s=0).wait()
        daemon.wait_settled(7)

        config.write_text("nonsense: 1\n")
        for _ in range(3):
            os.kill(daemon.pid, signal.SIGHUP)
        status = daemon.wait_until(lambda status: status["daemon"]["problems"], SOON_S, "a problem")
        assert "unknown key 'nonsense'" in status["daemon"]["problems"][0]


def test_a_configuration_behind_a_link_that_is_turned_is_seen(site: Site) -> None:
    """As Kubernetes changes a mounted configuration: `..data` is a link to a folder, turned by a rename."""
    mount = site.root / "mount"
    for name, more in (("one", ""), ("two", "node_quota_bytes: 77000000\nlog_level: INFO\n")):
        (mount / name).mkdir(parents=True)
        (mount / name / "shipper.yaml").write_text(file_only(site, more))
    (mount / "..data").symlink_to("one")
    (mount / "shipper.yaml").symlink_to("..data/shipper.yaml")
    with Daemon(site, "--config", mount / "shipper.yaml") as daemon:
        (mount / "..next").symlink_to("two")
        (mount / "..next").replace(mount / "..data")

        told(daemon, "taken over")


def test_a_place_that_changes_waits_for_a_restart_and_is_told(site: Site, config: Path) -> None:
    with Daemon(site, "--config", config) as daemon:
        replaced(config, file_only(site, f"state_dir: {site.root}/other\nnode_quota_bytes: 1000\n"))
        status = daemon.wait_until(lambda status: status["daemon"]["problems"], SOON_S, "it is told")
        assert "state_dir changed" in status["daemon"]["problems"][0]
        assert "restart" in status["daemon"]["problems"][0]
        assert not (site.root / "other").exists()

        replaced(config, file_only(site))
        daemon.wait_until(lambda status: not status["daemon"]["problems"], SOON_S, "it is well again")


def test_a_backend_that_comes_back_has_lost_what_went_meanwhile_and_says_so(site: Site, config: Path) -> None:
    """What a backend had not got when it was taken out may be freed; its account shows that, and nothing is pending."""
    ledger = Ledger(site.root / "ledger")
    both = file_only(site, "  mlflow: {tracking_uri: 'http://127.0.0.1:9'}\n")
    replaced(config, both)
    with Daemon(site, "--config", config) as daemon:
        counting_trainer(site, ledger, run_id="one", count=20, pace_s=0).wait()
        daemon.wait_settled(22, backends=["file"])
        assert daemon.status()["backends"]["mlflow"]["pending"] == 22

        replaced(config, file_only(site))
        told(daemon, "delivering to file\n")
        counting_trainer(site, ledger, run_id="two", count=20, pace_s=0).wait()
        daemon.wait_settled(44, backends=["file"])
        spool = site.state / "spool"
        wait_for(lambda: not list(spool.iterdir()), SOON_S, "all streams are freed")

        replaced(config, both)
        told(daemon, "delivering to file, mlflow")
        counting_trainer(site, ledger, run_id="three", count=20, pace_s=0).wait()
        status = daemon.wait_settled(66, backends=["file"])
        oracle.assert_law(status)
        runs = status["backends"]["mlflow"]["runs"]
        assert runs["two"]["dropped"] == {"reclaimed": 22}
        assert runs["one"]["pending"] + sum(runs["one"]["dropped"].values()) == 22
        assert runs["three"]["pending"] == 22
        assert {"delivered": 66, "pending": 0}.items() <= status["backends"]["file"].items()
