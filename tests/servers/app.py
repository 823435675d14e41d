"""What every test server is made of: faults, a journal that survives kill -9, and a door for the test.

    POST /_control/rules     replace the rules (JSON list of Rule)      GET /_control/requests   all requests so far
    POST /_control/options   change the server's options                GET /_control/state      what the server holds

A server is a subclass of TrackerServer in a module that ends with `main(ItsServer)`; it is started with
`python -m servers.<module> --port N --folder DIR`. Every change of its state goes through `keep(change)`, which appends
it to the journal and applies it; a restart applies the journal again. Binds 127.0.0.1 only.
"""

from __future__ import annotations

import abc
import argparse
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from servers.faults import Faults, Rule, middleware

BODY_BYTES_MAX = 256 * 1024 * 1024


class TrackerServer(abc.ABC):
    """One tracker. `options` are what a test may turn while it runs (accepted key, count lag, …)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults = Faults()
        self.options: dict[str, Any] = dict(self.defaults())
        folder.mkdir(parents=True, exist_ok=True)
        self._journal_path = folder / "journal.jsonl"
        if self._journal_path.exists():
            for line in self._journal_path.read_bytes().splitlines():
                try:
                    change = json.loads(line)
                except ValueError:
                    continue  # empty, or torn by a kill: its request was not answered
                self.apply(change)
        self._journal = self._journal_path.open("ab", buffering=0)
        self._journal.write(b"\n")  # ends a torn line; what follows must stand on one of its own

    @classmethod
    def defaults(cls) -> Mapping[str, Any]:
        """Options and their values at the start. `api_key` None: every key is accepted."""
        return {"api_key": None}

    @abc.abstractmethod
    def apply(self, change: dict[str, Any]) -> None:
        """Change the state in memory. Called for new changes and, in order, for those of earlier lives."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """What the server holds, as JSON, for a test to judge."""

    @abc.abstractmethod
    def routes(self) -> list[web.RouteDef]:
        """The tracker's own paths."""

    def keep(self, change: dict[str, Any]) -> None:
        """Make a change durable, then visible."""
        self._journal.write(json.dumps(change).encode() + b"\n")
        self.apply(change)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[middleware(self.faults)], client_max_size=BODY_BYTES_MAX)
        app.add_routes(
            [
                web.get("/_control/state", self._state),
                web.get("/_control/requests", self._requests),
                web.post("/_control/rules", self._rules),
                web.post("/_control/options", self._options),
                *self.routes(),
            ]
        )
        return app

    async def _state(self, _: web.Request) -> web.Response:
        return web.json_response(self.state())

    async def _requests(self, _: web.Request) -> web.Response:
        return web.json_response(self.faults.requests)

    async def _rules(self, request: web.Request) -> web.Response:
        self.faults.replace([Rule.from_json(rule) for rule in await request.json()])
        return web.json_response({})

    async def _options(self, request: web.Request) -> web.Response:
        self.options.update(await request.json())
        return web.json_response(self.options)


def main(server_class: type[TrackerServer]) -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=server_class.__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--certificate", type=Path, help="PEM file with certificate and key: speak TLS")
    arguments = parser.parse_args()
    context = None
    if arguments.certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(arguments.certificate)
    web.run_app(
        server_class(arguments.folder).app(),
        host="127.0.0.1",
        port=arguments.port,
        print=lambda *_: None,
        access_log=None,
        shutdown_timeout=0.5,
        reuse_address=True,
        ssl_context=context,
    )
