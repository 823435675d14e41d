"""P32: the key on the run's page, in the debug log, in the uploaded configuration. Here none is in anything we write,
send as data, or show to other processes; and it still opens the door that it is for."""

from __future__ import annotations

import base64
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from servers.faults import Fault, Rule
from servers.process import ServerProcess
from support import oracle, swanlab_reader, wandb_reader
from support.daemon import Daemon, shipper
from support.four_trackers import MlflowRest
from support.mlflow_server import MlflowServer
from support.processes import descendants, wait_for
from support.site import Site
from support.trainer import run_script
from verl_shipper.backends.swanlab import cuid
from verl_shipper.backends.wandb_rows import STEP_KEY

MARK = "SENTINEL"
WANDB_KEY = f"{MARK}1" + "k" * 31
SWANLAB_KEY = f"{MARK}4" + "0" * 12
PROXY = f"http://svc:{MARK}5-proxy@127.0.0.1:9"
MLFLOW_USER = f"svc:{MARK}6-mlflow"
MARKS = [
    MARK.encode(),
    *(base64.b64encode(pair.encode())[4:20] for pair in (f"api:{WANDB_KEY}", MLFLOW_USER, f"svc:{MARK}5-proxy")),
]
# What only looks like a secret, and the user's own words.
KEPT = {
    "max_tokens": 4096,
    "eos_token": "</s>",
    "token_id": 7,
    "num_key_value_heads": 8,
    "author": "somebody",
    "tokenizer": "some/tokenizer",
}
WORDS = "the password=hunter2 and Authorization: Bearer hunter2hunter2"
TRAINER = f"""
import sys
from verl_shipper_client import Client

config = {{
    "swanlab": {{"api_key": "{MARK}2", "secret_access_key": "{MARK}2"}},
    "headers": [["x", [["Authorization", "Bearer {MARK}3.{MARK}3"]]], {{"Proxy-Authorization": "{MARK}3"}}],
    "env": ["WANDB_API_KEY={MARK}7", {{"name": "HF_TOKEN", "value": "{MARK}7"}}],
    "argv": ["train.py", "--api-key", "{MARK}8", "+trainer.wandb.api_key={MARK}8"],
    "url": "https://{MARK}9@git.example.com/x?access_token={MARK}9",
    "trainer": {{"wandb_proxy": "{PROXY}"}},
    "db": "postgresql+psycopg2://u:{MARK}0@h/db",
    "pem": "-----BEGIN PRIVATE KEY-----\\n{MARK}\\n-----END PRIVATE KEY-----",
    "kept": {KEPT!r},
}}
with Client(sys.argv[1], "exp", run_id="r1", config=config) as client:
    for step in range(int(sys.argv[2]), int(sys.argv[3])):
        client.log({{"n": float(step)}}, step=step)
    client.log({{"poison": 1.0}}, step=step)
    client.log_generations([({WORDS!r}, "answer", 1.0)], step=step)
"""


class Place:
    """Daemon, servers and everything that they wrote."""

    def __init__(self, site: Site, mlflow: MlflowServer) -> None:
        self.site = site
        self.project = f"p32-{time.time_ns()}"
        self.servers = {
            name: ServerProcess(f"{name}_server", site.root / f"{name}-server")
            for name in ("wandb", "swanlab", "forward")
        }
        self.mlflow = mlflow
        self.key_file = site.root / "swanlab.key"
        self.key_file.touch(0o600)
        self.key_file.write_text(SWANLAB_KEY)
        self.config = site.root / "shipper.yaml"
        self.environment = {
            "WANDB_API_KEY": WANDB_KEY,
            "HTTPS_PROXY": PROXY,
            "HTTP_PROXY": PROXY,
            "NO_PROXY": "127.0.0.0/8",
            "COLUMNS": "1000",
        }

    def start(self) -> None:
        for server in self.servers.values():
            server.start()
        front = self.servers["forward"]
        front.options(upstream=self.mlflow.uri)
        front.rules(Rule(Fault.BAD, path="log-batch", contains="poison"))
        self.servers["wandb"].options(api_key=WANDB_KEY)
        self.servers["swanlab"].options(api_key=SWANLAB_KEY)
        backends = {
            "file": {"dir": str(self.site.out)},
            "mlflow": {"tracking_uri": front.url.replace("//", f"//{MLFLOW_USER}@")},
            "wandb": {"base_url": self.servers["wandb"].url, "settle_s": 0.5, "wandb_proxy": ""},
            "swanlab": {
                "base_url": self.servers["swanlab"].url,
                "api_key_file": str(self.key_file),
                "settle_s": 0.5,
            },
        }
        self.config.write_text(yaml.safe_dump({"backends": backends, "log_level": "DEBUG"}))

    def daemon(self) -> Daemon:
        return Daemon(self.site, "--config", self.config, env=self.environment)

    def said(self, *arguments: str | Path) -> str:
        """What a command of ours prints, whatever it is told."""
        result = shipper(self.site, *arguments, env=self.environment, timeout_s=120)
        return result.stdout + result.stderr

    def written(self) -> Iterator[tuple[str, bytes]]:
        """Name and content of all files but those that hold what the user gave us."""
        given = {self.config, self.key_file, *self.site.root.glob("train-*.py")}
        for folder, _, names in os.walk(self.site.root):
            for name in names:
                path = Path(folder, name)
                if path not in given and path.is_file():
                    lines = path.read_bytes().splitlines(keepends=True)
                    # Of the one call that a key is for, SwanLab's server notes the key.
                    yield str(path), b"".join(line for line in lines if not line.startswith(b'{"what": "login"'))


@pytest.fixture
def place(site: Site, mlflow_server: MlflowServer) -> Iterator[Place]:
    made = Place(site, mlflow_server)
    try:
        made.start()
        yield made
    finally:
        for server in made.servers.values():
            server.kill()


def assert_clean(name: str, content: bytes | str) -> None:
    content = content.encode() if isinstance(content, str) else content
    for mark in MARKS:
        at = content.find(mark)
        assert at < 0, f"{name}: …{content[max(at - 150, 0) : at + 60]!r}…"


def assert_processes_clean(pid: int) -> None:
    """No argument is secret, and no environment holds a secret that the daemon was not given in its own."""
    inherited = set(environ(pid).split(b"\0"))
    for each in (pid, *descendants(pid)):
        with open(f"/proc/{each}/cmdline", "rb") as file:
            assert_clean(f"arguments of {each}", file.read())
        for line in set(environ(each).split(b"\0")) - inherited:
            assert_clean(f"environment of {each}", line)


def crash_a_lane(daemon: Daemon, number: signal.Signals) -> None:
    before = daemon.lanes()
    os.kill(before[0], number)
    wait_for(lambda: len(now := daemon.lanes()) == len(before) and now != before, 60, "a new lane")


def environ(pid: int) -> bytes:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read()


def test_p32a_no_secret_is_in_anything_that_is_written_sent_or_shown(place: Place, site: Site) -> None:
    wandb = place.servers["wandb"]
    said = {}
    with place.daemon() as daemon:
        run_script(site, TRAINER, place.project, 0, 10)
        daemon.wait_settled(14, timeout_s=120)
        assert_processes_clean(daemon.pid)
        wandb.options(api_key="f" * 40)
        run_script(site, TRAINER, place.project, 10, 20)
        daemon.wait_until(lambda status: status["backends"]["wandb"]["parked"] == 1, 90, "wandb is parked")
        for number in (signal.SIGABRT, signal.SIGSEGV):
            crash_a_lane(daemon, number)
        said["doctor"] = place.said("doctor", "--config", place.config)
        said["status"] = place.said("status")
        said["status --json"] = place.said("status", "--json")
        wandb.options(api_key=WANDB_KEY)
        status = daemon.wait_settled(28, timeout_s=150)
        for stream in sorted(path for path in (site.state / "spool").glob("*") if path.is_dir()):
            said[f"cat {stream.name}"] = place.said("cat", stream)
        said["dead-letters"] = place.said("dead-letters", "list")
        assert_processes_clean(daemon.pid)
        oracle.assert_law(status, pending=0)
        assert status["backends"]["mlflow"]["dead_lettered"] == 2

        for name, content in place.written():
            assert_clean(name, content)
    assert "PARKED: key refused" in said["status"]
    assert "2 dead letters" in said["dead-letters"]
    for name, text in said.items():
        assert text, name
        assert_clean(name, text)
    for name, content in place.written():
        assert_clean(name, content)
    for name, server in place.servers.items():
        assert_clean(f"state of {name}", str(server.state()))

    # The keys have opened their doors, and what is no secret has passed.
    rows = wandb_reader.rows(wandb, place.project, "r1")
    assert [(row[STEP_KEY], row["n"]) for row in rows if "n" in row] == [(step, float(step)) for step in range(20)]
    assert wandb_reader.run(wandb, place.project, "r1")["config"]["kept"] == KEPT
    swanlab = swanlab_reader.run_state(place.servers["swanlab"], cuid("r1"))
    assert len(swanlab["scalars"]["n"]) == 20
    assert swanlab["config"]["kept"] == KEPT
    found = MlflowRest(place.mlflow.uri, place.project)
    assert found.run("r1")["params"]["kept/num_key_value_heads"] == "8"
    tables = wandb_reader.tables(wandb, place.project, "r1", "val/generations")
    assert [table[0][0] for _, table in tables] == [WORDS, WORDS]


def test_p32b_a_key_that_others_can_read_is_refused_with_the_command_to_type(place: Place, site: Site) -> None:
    place.key_file.chmod(0o644)
    advice = f"chmod 600 {place.key_file}"
    with place.daemon() as daemon:
        run_script(site, TRAINER, place.project, 0, 10)
        daemon.wait_until(lambda status: advice in str(status["backends"]["swanlab"]["last_error"]), 60, advice)
        assert place.servers["swanlab"].state()["runs"] == {}
        assert not any("login" in request["path"] for request in place.servers["swanlab"].requests())
        assert advice in place.said("doctor", "--config", place.config)

        place.key_file.chmod(0o600)
        daemon.wait_settled(14, timeout_s=120)
    for name, content in place.written():
        assert_clean(name, content)
