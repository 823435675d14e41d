"""P31: works in the shell, not as a service. Here a bare environment, a private authority and a proxy with a password
are enough for every tracker, and each that is missing is named in one line."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from support import oracle, swanlab_reader, wandb_reader
from support.four_trackers import MlflowRest
from support.mlflow_server import MlflowServer
from support.secure_site import SecureSite
from support.site import Site
from support.trainer import run_script
from support.web import Authority
from verl_shipper.backends.swanlab import cuid
from verl_shipper.backends.wandb_rows import STEP_KEY

STEPS = 20
RECORDS = STEPS + 3  # with beginning, table and end
DIRECT = {"NO_PROXY": "10.0.0.0/8,127.0.0.0/8,.local"}
TRAINER = """
import sys
from verl_shipper_client import Client

project, run_id = sys.argv[1:]
config = {"trainer": {"wandb_proxy": "http://other:SENTINEL-trainer@127.0.0.1:9"}}
with Client(project, "exp", run_id=run_id, config=config) as client:
    for step in range(20):
        client.log({"n": float(step)}, step=step)
    client.log_generations([("question", "answer", 1.0)], step=19)
"""
# The trainer is elsewhere: a shell with a proxy of its own, of which the daemon knows nothing.
TRAINERS_SHELL = {"https_proxy": "http://trainer:SENTINEL-trainer@127.0.0.1:9", "WANDB_MODE": "disabled"}


@pytest.fixture
def project() -> str:
    return f"p31-{time.time_ns()}"


@pytest.fixture
def secure(site: Site, mlflow_server: MlflowServer) -> Iterator[SecureSite]:
    with SecureSite(site, mlflow_server, "wandb") as made:
        yield made


def train(site: Site, project: str, run_id: str = "r1") -> None:
    run_script(site, TRAINER, project, run_id, env=TRAINERS_SHELL)


def assert_wandb(secure: SecureSite, project: str, run_id: str = "r1") -> None:
    rows = wandb_reader.rows(secure.servers["wandb"], project, run_id)
    assert [(row[STEP_KEY], row["n"]) for row in rows if "n" in row] == [(step, float(step)) for step in range(STEPS)]
    tables = wandb_reader.tables(secure.servers["wandb"], project, run_id, "val/generations")
    assert [table for _, table in tables] == [[["question", "answer", 1.0]]]


def assert_mlflow(secure: SecureSite, project: str, run_id: str = "r1") -> None:
    found = MlflowRest(secure.mlflow.uri, project)
    assert found.points(run_id, "n") == [(step, float(step)) for step in range(STEPS)]


def assert_nothing_shows_the_password(site: Site, *texts: str) -> None:
    for text in (*texts, *(path.read_text(errors="replace") for path in site.root.glob("*.log"))):
        assert "SENTINEL" not in text


@pytest.mark.parametrize("how", ["unit file without HOME", "settings"])
def test_p31a_a_bare_service_reaches_wandb_by_the_proxy_and_mlflow_directly(
    secure: SecureSite, site: Site, project: str, how: str
) -> None:
    home = {"HOME": str(site.home)} if how == "settings" else {}
    if how == "settings":
        settings = {"ca_file": str(secure.authority.ca), "wandb_proxy": secure.proxy_url()}
        config, environment = secure.config(wandb=settings), home
    else:
        environment = {"HTTPS_PROXY": secure.proxy_url(), "HTTP_PROXY": secure.proxy_url(), **DIRECT, **home}
        environment["SSL_CERT_FILE"] = str(secure.authority.ca)
        config = secure.config()
    with secure.daemon(config, **environment) as daemon:
        train(site, project)
        status = daemon.wait_settled(RECORDS, timeout_s=120)
        words = secure.status()

    oracle.assert_law(status, pending=0)
    assert_wandb(secure, project)
    assert_mlflow(secure, project)
    connects = secure.connects()
    assert set(connects) == {"wandb.corp.test"}, connects
    assert secure.connects(welcome=False) == {}
    doctor = secure.doctor(config, **environment)
    assert f"by proxy 127.0.0.1:{secure.proxy_port}" in doctor
    assert str(secure.authority.ca) in doctor
    assert "key accepted" in doctor
    assert_nothing_shows_the_password(site, words, doctor)


def broken(secure: SecureSite, fault: str) -> tuple[dict[str, str], str]:
    """An environment in which one thing is wrong, and the words that name it."""
    proxy = f"proxy 127.0.0.1:{secure.proxy_port}"
    environment = good(secure)
    if fault == "wrong password":
        environment["HTTPS_PROXY"] = secure.proxy_url("SENTINEL-wrong")
        return environment, f"{proxy} refuses its user and password (407)"
    if fault == "no password":
        environment["HTTPS_PROXY"] = f"http://127.0.0.1:{secure.proxy_port}"
        return environment, f"{proxy} wants a user and a password (407)"
    if fault == "wrong authority":
        other = Authority(secure.site.root / "other-authority")
        environment["SSL_CERT_FILE"] = str(other.ca)
        return environment, "certificate of {host}:{port}, reached by " + f"{proxy} (HTTPS_PROXY), is not trusted"
    if fault == "no proxy":
        del environment["HTTPS_PROXY"]
        return environment, "name lookup of {host} failed"
    secure.stop_proxy()
    return environment, f"nothing listens at {proxy}"


def good(secure: SecureSite) -> dict[str, str]:
    return {"HTTPS_PROXY": secure.proxy_url(), "SSL_CERT_FILE": str(secure.authority.ca), **DIRECT}


FAULTS = ("wrong password", "no password", "wrong authority", "no proxy", "proxy down")


@pytest.mark.parametrize("fault", FAULTS)
def test_p31b_what_stands_in_the_way_is_named_in_one_line_and_costs_only_time(
    secure: SecureSite, site: Site, project: str, fault: str
) -> None:
    config = secure.config()
    environment, words = broken(secure, fault)
    words = words.format(host="wandb.corp.test", port=secure.servers["wandb"].port)
    with secure.daemon(config, **environment) as daemon:
        train(site, project)
        daemon.wait_settled(RECORDS, backends=["mlflow"], timeout_s=60)
        told = daemon.wait_until(lambda status: words in str(status["backends"]["wandb"]["last_error"]), 60, words)
        shown = secure.status()
        assert [words in line for line in shown.splitlines()].count(True) == 1, shown
        doctor = secure.doctor(config, **environment)
        assert [words in line for line in doctor.splitlines()].count(True) == 1, doctor
        oracle.assert_law(told)
        figures = told["backends"]["wandb"]
        assert (figures["pending"], figures["delivered"], figures["dead_lettered"]) == (RECORDS, 0, 0)
        assert secure.servers["wandb"].state()["runs"] == {}
        if fault == "proxy down":
            secure.start_proxy()
            daemon.wait_settled(RECORDS, timeout_s=120)
        else:
            daemon.stop()
    if fault != "proxy down":
        with secure.daemon(config, **good(secure)) as daemon:
            daemon.wait_settled(RECORDS, timeout_s=120)
            oracle.assert_law(daemon.status(), pending=0)

    assert_wandb(secure, project)
    assert_mlflow(secure, project)
    assert_nothing_shows_the_password(site, shown, doctor)


def test_p31c_swanlab_takes_the_same_road(site: Site, mlflow_server: MlflowServer, project: str) -> None:
    with SecureSite(site, mlflow_server, "swanlab") as secure:
        config = secure.config(swanlab={"ca_file": str(secure.authority.ca)})
        environment = {"HTTPS_PROXY": secure.proxy_url("SENTINEL-wrong"), **DIRECT}
        words = f"proxy 127.0.0.1:{secure.proxy_port} refuses its user and password (407)"
        with secure.daemon(config, **environment) as daemon:
            train(site, project)
            daemon.wait_until(lambda status: words in str(status["backends"]["swanlab"]["last_error"]), 60, words)
            shown, doctor = secure.status(), secure.doctor(config, **environment)
        assert words in shown
        assert words in doctor
        environment["HTTPS_PROXY"] = secure.proxy_url()
        with secure.daemon(config, **environment) as daemon:
            status = daemon.wait_settled(RECORDS, timeout_s=120)
        oracle.assert_law(status, pending=0)

        run = cuid("r1")
        points = swanlab_reader.points(secure.servers["swanlab"], run, "n")
        assert points == [(step, float(step)) for step in range(STEPS)]
        assert len(swanlab_reader.media(secure.servers["swanlab"], run, "val/generations")) == 1
        assert set(secure.connects()) == {"swanlab.corp.test"}
        assert_nothing_shows_the_password(site, shown, doctor)


SPANS = """
from verl_shipper_client import Client
import sys

with Client(sys.argv[1], "exp", run_id="r1") as client:
    for step in range(20):
        client.log({"n": float(step)}, step=step)
    client.log_generations([("question", "answer", 1.0)], step=19)
    with client.span("rollout"):
        pass
"""


def test_p31e_mlflow_takes_the_same_road_with_points_artifacts_and_traces(
    site: Site, mlflow_server: MlflowServer, project: str
) -> None:
    with SecureSite(site, mlflow_server, "forward") as secure:
        front = secure.servers["forward"]
        front.options(upstream=mlflow_server.uri)
        other = Authority(site.root / "other-authority")
        config = secure.config(mlflow={"tracking_uri": front.url, "ca_file": str(other.ca)})
        environment = {"HTTPS_PROXY": secure.proxy_url(), "NO_PROXY": "10.0.0.0/8"}
        untrusted = f"certificate of forward.corp.test:{front.port}"
        with secure.daemon(config, **environment) as daemon:
            run_script(site, SPANS, project)
            daemon.wait_until(
                lambda status: untrusted in str(status["backends"]["mlflow"]["last_error"]), 60, untrusted
            )
            shown = secure.status()
            assert f"{other.ca} (backends.mlflow.ca_file)" in shown
            assert untrusted in secure.doctor(config, **environment)
        secure.config(mlflow={"tracking_uri": front.url, "ca_file": str(secure.authority.ca)})
        wrong = environment | {"HTTPS_PROXY": secure.proxy_url("SENTINEL-wrong")}
        words = f"proxy 127.0.0.1:{secure.proxy_port} refuses its user and password (407)"
        with secure.daemon(config, **wrong) as daemon:
            daemon.wait_until(lambda status: words in str(status["backends"]["mlflow"]["last_error"]), 60, words)
        with secure.daemon(config, **environment) as daemon:
            status = daemon.wait_settled(RECORDS + 1, timeout_s=120)
        oracle.assert_law(status, pending=0)

        assert status["backends"]["mlflow"]["delivered"] == RECORDS + 1
        assert_mlflow(secure, project)
        paths = [request["path"] for request in front.requests()]
        for part in ("/v1/traces", "log-batch", "mlflow-artifacts"):
            assert any(part in path for path in paths), part
        assert set(secure.connects()) == {"forward.corp.test"}
        doctor = secure.doctor(config, **environment)
        assert f"and {secure.authority.ca} (backends.mlflow.ca_file)" in doctor
        assert "experiments can be listed" in doctor
        assert_nothing_shows_the_password(site, shown, doctor)


def test_p31d_an_authority_that_cannot_be_used_ends_the_start_with_one_line(secure: SecureSite, site: Site) -> None:
    for path, words in (("/nowhere/ca.pem", "No such file"), (str(site.root / "shipper.yaml"), "no certificate")):
        config = secure.config(wandb={"ca_file": path})
        daemon = secure.daemon(config, **DIRECT)
        daemon.start(wait=False)
        assert daemon.process is not None
        assert daemon.process.wait(timeout=30) == 2
        (line,) = daemon.words().strip().splitlines()
        assert words in line
        assert "backends.wandb.ca_file" in line
