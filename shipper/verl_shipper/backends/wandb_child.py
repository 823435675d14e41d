"""The process that loads wandb: one run, rows as they are told, nothing of its own.

    init          the run, with its configuration; answers where wandb would write the next row
    log           rows with their numbers; answers the files that belong to them
    attach        files of rows that are there already, once more
    put_file      a shipped file as an artifact of its own; answers how far it has come
    health        whether wandb's own sender has given up, and which artifacts are not committed yet
    finish        the end of the run, as far as wandb says so

wandb is told to keep no transaction log (the spool is ours), to collect nothing about the machine, and to number rows
as we do. Started by sdk/child.py only. Must not know: servers, cursors. What wandb raises is the answer.
"""

from __future__ import annotations

import contextlib
import html
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import wandb
from wandb.sdk.artifacts._internal_artifact import InternalArtifact

from verl_shipper.backends.sdk.serve import serve
from verl_shipper.backends.wandb_system import ELAPSED_KEY

ARTIFACTS_AT_ONCE = 8
PROXY_VARIABLES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
ROW_ERRORS = (ValueError, TypeError, KeyError)  # what wandb raises for a row it does not like


class Flag:
    """Set once. Tables hold their run and its settings, and wandb copies tables deeply: this copies as itself."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def __deepcopy__(self, _: object) -> Flag:
        return self


FATAL = Flag()


class Run:
    """The one run of this process."""

    def __init__(self) -> None:
        self.run: Any = None
        self.step_key = ""
        self.with_artifacts = True
        self.facts: set[str] = set()  # names of facts of nodes that have their axis
        self.artifacts: list[Future[Any]] = []  # not committed yet
        self.files: dict[str, Future[Any]] = {}  # the same of shipped files, by key
        # A wait that times out cancels the upload it waits for; so each has a thread to wait for ever.
        self.waiting = ThreadPoolExecutor(ARTIFACTS_AT_ONCE, thread_name_prefix="artifact")

    def init(
        self,
        *,
        where: dict[str, Any],
        config: dict[str, Any],
        settings: dict[str, Any],
        step_key: str,
        with_artifacts: bool,
    ) -> dict[str, Any]:
        """Create or resume the run. `where`: arguments of wandb.init."""
        if settings.get("https_proxy"):
            # wandb verifies the key before it looks at its settings, by a process that it starts with this.
            os.environ.update(dict.fromkeys(PROXY_VARIABLES, settings["https_proxy"]))
            os.environ.update(no_proxy="", NO_PROXY="")
        known = wandb.Settings.model_fields
        chosen = {key: value for key, value in settings.items() if key in known}
        if "stop_fn" in known:
            chosen |= {"stop_fn": FATAL.set, "stop_on_fatal_error": True}
        self.run = wandb.init(
            **{key: value for key, value in where.items() if value is not None},
            config=config,
            settings=wandb.Settings(**chosen),
        )
        self.with_artifacts = with_artifacts
        self.step_key = step_key
        self.run.define_metric(step_key, hidden=True)
        self.run.define_metric("*", step_metric=step_key, step_sync=False)
        return {"starting_step": self.run.starting_step, "folder": self.run.dir}

    def log(self, *, rows: list[list[Any]]) -> dict[str, Any]:
        """Each row: its number, its values, its media. `done` of them are under way, `refused` says why no more."""
        files: list[str] = []
        for done, (number, values, media) in enumerate(rows):
            try:
                objects = self._media(number, media)
                if ELAPSED_KEY in values:
                    self._place_facts(values.keys() - self.facts)
                self.run.log({**values, **objects}, step=number, commit=True)
            except ROW_ERRORS as error:
                return {"done": done, "files": files, "refused": f"{type(error).__name__}: {error}"[:300]}
            files += [_file_name(self.run.dir, each) for each in objects.values()]
        return {"done": len(rows), "files": files, "refused": ""}

    def attach(self, *, rows: list[list[Any]]) -> list[str]:
        """As `log`, but the rows themselves are at the server."""
        made = [each for number, _, media in rows for each in self._media(number, media).values()]
        return [_file_name(self.run.dir, each) for each in made]

    def put_file(self, *, key: str, content: dict[str, Any]) -> str:
        """Begin, or look: "pending", then "committed", by the server's word. A failure is raised once; then anew."""
        if key not in self.files:
            self.files[key] = self.waiting.submit(self._log_file(**content).wait)
        if not self.files[key].done():
            return "pending"
        return str(self.files.pop(key).result().state).lower()

    def health(self) -> dict[str, Any]:
        refused = sum(each.done() and each.exception() is not None for each in self.artifacts)
        self.artifacts = [each for each in self.artifacts if not each.done()]
        return {"fatal": FATAL.is_set(), "artifacts_pending": len(self.artifacts), "artifacts_refused": refused}

    def finish(self, *, exit_code: int) -> None:
        self.run.finish(exit_code=exit_code)

    def _place_facts(self, names: Iterable[str]) -> None:
        """Give facts of nodes their own axis, and keep them out of the run's summary. Name by name: of two patterns
        that match, wandb takes any."""
        for name in names:
            self.facts.add(name)
            axis = None if name == ELAPSED_KEY else ELAPSED_KEY
            with contextlib.suppress(wandb.Error, *ROW_ERRORS):  # a name that it does not like has the common axis
                self.run.define_metric(name, step_metric=axis, step_sync=False, hidden=axis is None, summary="none")

    def _media(self, number: int, media: list[list[Any]]) -> dict[str, Any]:
        """Objects whose files are on their way, by key."""
        objects = {}
        for key, kind, content in media:
            if kind == "file":
                self._log_file(**content)
                continue
            if kind == "table":
                made: Any = wandb.Table(columns=content["columns"], data=content["rows"], allow_mixed_types=True)
                if self.with_artifacts and self.run.settings.mode == "online":
                    self._log_artifact(made, key)
            else:
                made = wandb.Html(f"<pre>{html.escape(content)}</pre>", inject=False, data_is_not_path=True)
            made.bind_to_run(self.run, key, number)
            objects[key] = made
        return objects

    def _log_file(self, *, path: str, name: str, kind: str, entry: str, aliases: list[str], metadata: Any) -> Any:
        artifact = wandb.Artifact(name, kind, metadata=metadata)
        artifact.add_file(path, entry, skip_cache=True, policy="immutable")  # nobody changes it, so no copies of it
        return self.run.log_artifact(artifact, aliases=aliases)

    def _log_artifact(self, table: Any, key: str) -> None:
        """The table as an artifact, the way wandb itself would, but remembered: it must be committed, too."""
        artifact = InternalArtifact(f"run-{self.run.id}-{key}", "run_table")
        artifact.add(table, key)
        logged = self.run.log_artifact(artifact)
        self.artifacts.append(self.waiting.submit(logged.wait))


def _file_name(folder: str, media: Any) -> str:
    return os.path.relpath(media._path, folder)  # noqa: SLF001 - the name of the file at the server has no public place


if __name__ == "__main__":
    run = Run()
    handlers = {name: getattr(run, name) for name in ("init", "log", "attach", "put_file", "health", "finish")}
    serve(handlers)
