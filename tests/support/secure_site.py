"""Trackers as a company has them: TLS by a private authority, reachable only through a proxy that asks for a password.

    with SecureSite(site, mlflow_server) as secure:
        secure.proxy, secure.servers["wandb"], secure.authority.ca
        with secure.daemon(HTTPS_PROXY=secure.proxy_url()) as daemon: ...

The daemon gets the environment of a unit file and nothing else (`env -i`); what it is configured with stands in a file.
Names below `.corp.test` are known to the proxy alone. Must not know: what a test expects.
"""

from __future__ import annotations

import contextlib
import sys
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import yaml

from servers.process import ServerProcess
from support.daemon import Daemon, shipper
from support.mlflow_server import MlflowServer
from support.site import Site
from support.web import Authority, PasswordProxy

USER, PASSWORD = "svc", "SENTINEL-p@ss:w/rd"
KEYS = {"wandb": "k" * 40, "swanlab": "0123456789abcdefghijk"}


@final
class SecureSite:
    """Servers of `names`, the proxy, the authority. MLflow stands beside the proxy as it is; with `forward` among the
    names a server of that name can be put in front of it, over TLS."""

    def __init__(self, site: Site, mlflow: MlflowServer, *names: str) -> None:
        self.site = site
        self.mlflow = mlflow
        self.authority = Authority(site.root / "authority")
        self.servers = {name: self._server(name) for name in names}
        self.proxy_port = 0
        self.proxy: PasswordProxy | None = None
        self.proxies = contextlib.ExitStack()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> SecureSite:
        with contextlib.ExitStack() as opened:
            for server in self.servers.values():
                opened.enter_context(server)
            opened.enter_context(self.proxies)
            self.start_proxy()
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def start_proxy(self) -> None:
        """Start it, or start it again at the same port."""
        self.proxy = self.proxies.enter_context(PasswordProxy(USER, PASSWORD, port=self.proxy_port))
        self.proxy_port = self.proxy.port
        self.proxy.names |= {f"{name}.corp.test": "127.0.0.1" for name in self.servers}

    def stop_proxy(self) -> None:
        self.proxies.close()

    def proxy_url(self, password: str = PASSWORD) -> str:
        return f"http://{USER}:{urllib.parse.quote(password, safe='')}@127.0.0.1:{self.proxy_port}"

    def connects(self, *, welcome: bool = True) -> dict[str, int]:
        """How often the proxy was asked for each host, with the right password or without."""
        assert self.proxy is not None, "started"
        return {host: count for (host, was_right), count in self.proxy.connects.items() if was_right is welcome}

    def config(self, **sections: Mapping[str, Any]) -> Path:
        """A file with a section for every tracker; `sections` add to them or change them."""
        backends: dict[str, dict[str, Any]] = {"mlflow": {"tracking_uri": self.mlflow.uri}}
        for name, server in self.servers.items():
            if name not in KEYS:
                continue
            key = self.site.root / f"{name}.key"
            key.touch(0o600)
            key.write_text(KEYS[name])
            backends[name] = {"base_url": server.url, "api_key_file": str(key), "settle_s": 0.5}
        for name, more in sections.items():
            backends[name] |= more
        path = self.site.root / "shipper.yaml"
        places = {"spool_dir": str(self.site.spool), "state_dir": str(self.site.state)}
        path.write_text(yaml.safe_dump({"backends": backends, **places}))
        return path

    def daemon(self, config: Path, **environment: str) -> Daemon:
        """Not started yet. `environment` is all it gets."""
        told = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **environment}
        bare = ["env", "-i", *(f"{name}={value}" for name, value in told.items())]
        return Daemon(self.site, "--config", config, launcher=[*bare, sys.executable, "-m", "verl_shipper"])

    def doctor(self, config: Path, **environment: str) -> str:
        """What `verl-shipper doctor` prints in that environment; trackers that fail are expected."""
        return shipper(self.site, "doctor", "--config", config, env=environment, timeout_s=120).stdout

    def status(self) -> str:
        """`verl-shipper status` as a person reads it."""
        return shipper(self.site, "status", env={"COLUMNS": "1000"}).stdout

    def _server(self, name: str) -> ServerProcess:
        host = f"{name}.corp.test"
        certificate = self.authority.certificate(host, "localhost")
        folder = self.site.root / f"{name}-server"
        return ServerProcess(f"{name}_server", folder, host=host, certificate=certificate, ca=str(self.authority.ca))
