"""The process that loads SwanLab's package: one run, points as they are told, nothing of its own.

    init          the run, with its configuration; answers the last step of every key of a run that was there
    log           rows of points; what becomes of them is told by `health`
    health        which points the server has not answered for, which it refused, what is wrong
    finish        the end of the run, as far as the package says so

Online the package keeps nothing on disk (the spool is ours) and talks to the gateway of this process; offline and
local it writes its own folder. It is told to collect nothing about the machine.

Started by sdk/child.py only. Must not know: cursors. What the package raises is the answer.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from verl_shipper.backends.road import road_of
from verl_shipper.backends.sdk.serve import serve
from verl_shipper.backends.swanlab_gateway import Gateway
from verl_shipper.backends.swanlab_ledger import Ledger

PROBES = ("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor")


class Run:
    """The one run of this process."""

    def __init__(self) -> None:
        self.run: Any = None
        self.ledger = Ledger()
        self.gateway: Gateway | None = None
        self.time_ns = 0  # of the row that is being logged

    def init(
        self,
        *,
        where: dict[str, Any],
        config: dict[str, Any],
        folder: str,
        url: str,
        settle_s: float,
        ca_file: str = "",
        api_key: str = "",
    ) -> dict[str, Any]:
        """Create or resume the run. `where`: arguments of swanlab.init; `folder`: the name of its folder, offline."""
        is_online = where["mode"] == "online"
        if is_online:
            self.gateway = Gateway(
                url, settle_s, self.ledger, road_of("swanlab", {"ca_file": ca_file or None, "work_dir": os.getcwd()})
            )
            os.environ["SWANLAB_API_HOST"] = self.gateway.url
            os.environ["SWANLAB_API_KEY"] = api_key  # not before: others can see what a process began with
            os.environ["no_proxy"] = os.environ["NO_PROXY"] = _no_proxy()
        import swanlab

        settings: dict[str, Any] = {
            "interactive": False,
            "probe": dict.fromkeys(PROBES, False),
            "terminal": {"proxy_type": "none"},
        }
        if is_online:
            settings["core"] = {"skip_store": True, "record_interval": 0.5}
        else:
            settings["run"] = {"dir": folder}
        if config:
            self.ledger.config_state = "waiting"
        self.run = swanlab.init(
            **{key: value for key, value in where.items() if value is not None},
            config=config,
            settings=swanlab.Settings(**settings),
        )
        if not is_online:
            with contextlib.suppress(AttributeError):
                self._keep_time()
        return {"tops": self.gateway.tops if self.gateway else {}, "folder": "" if is_online else str(self.run.dir)}

    def log(self, *, rows: list[list[Any]]) -> dict[str, Any]:
        """Each row: step, time, numbers, media. `done` of them are under way; `refused`: why no more."""
        for done, (step, time_ns, scalars, media) in enumerate(rows):
            try:
                objects = {key: _media(kind, content) for key, kind, content in media}
            except Exception as error:  # noqa: BLE001 - whatever it dislikes about a text or a table
                return {"done": done, "refused": f"{type(error).__name__}: {error}"[:300]}
            if self.gateway is not None:
                self.ledger.expect((("scalar", key, step) for key in scalars), time_ns)
                self.ledger.expect((("media", key, step) for key in objects), time_ns)
            self.time_ns = time_ns
            self.run.log({**scalars, **objects}, step=step)
        return {"done": len(rows), "refused": ""}

    def health(self, *, with_waiting: bool) -> dict[str, Any]:
        return self.ledger.told(with_waiting=with_waiting)

    def finish(self, *, state: str, error: str) -> None:
        self.run.finish(state=state, error=None if state == "success" else error)

    def _keep_time(self) -> None:
        """Have the package stamp rows with the time of their capture; it has no public place for that."""
        emitter = self.run._components.emitter  # noqa: SLF001 - see above
        emit = emitter.emit

        def emit_stamped(event: Any) -> None:
            if self.time_ns and hasattr(event, "timestamp"):
                event.timestamp.FromNanoseconds(self.time_ns)
            emit(event)

        emitter.emit = emit_stamped


def _media(kind: str, content: Any) -> Any:
    import swanlab

    if kind == "text":
        return swanlab.Text(content)
    table = swanlab.echarts.Table()
    table.add(content["columns"], content["rows"])
    return table


def _no_proxy() -> str:
    """The package speaks to us directly."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    return ",".join(filter(None, ("127.0.0.1", known)))


if __name__ == "__main__":
    run = Run()
    serve({name: getattr(run, name) for name in ("init", "log", "health", "finish")})
