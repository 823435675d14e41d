"""What `verl-shipper doctor --verl` says: is the plugin active in driver, TaskRunner and workers, and why.

    verl       is it there, which version, and by which road that version finds a plugin
    driver     imported once, in a process of its own: are verl's classes changed?
    workers    the same road in Ray's processes; a cluster that runs already has its own environment
    asked      nothing is shipped unless the job names us, or is to be taken over
    seen       processes whose records have come to this machine

Must not know: Ray, torch. On failure: a Finding.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

from verl_shipper.checks import Finding, Level
from verl_shipper.command import verl_version
from verl_shipper.store import open_store_read_only
from verl_shipper_spool.errors import CorruptionError
from verl_shipper_spool.header import SCALARS, StreamHeader, decode_header, read_header
from verl_shipper_spool.location import TAKEOVER_VARIABLE
from verl_shipper_spool.verl_names import (
    MODULES_SINCE,
    MODULES_VARIABLE,
    PLUGIN_GROUP,
    PLUGIN_MODULE,
    PLUGIN_NAME,
    PLUGINS_SINCE,
    POLICY_VARIABLE,
    TRUE_WORDS,
)

IMPORT_S = 120.0  # verl imports torch; a cold disk takes its time
RUNS_SHOWN = 3
CLUSTER_FILE = "/tmp/ray/ray_current_cluster"  # noqa: S108 - Ray's own place for the address of a cluster that runs
PROBE = f"""
import verl
import verl.utils.tracking as t
print({PLUGIN_NAME!r} in t.Tracking.supported_backend and hasattr(t.Tracking.__init__, "__verl_shipper__"))
"""


def verl_findings() -> Iterator[Finding]:
    """Which verl, and by which road it finds the plugin."""
    version = verl_version()
    if not version:
        what = f"verl is not installed for this Python ({sys.executable})"
        yield Finding(Level.WARN, what, "run the trainer's own: PYTHON -m verl_shipper doctor --verl")
        return
    shown = metadata.version("verl")
    if version >= PLUGINS_SINCE:
        yield _entry_point(shown)
    elif version >= MODULES_SINCE:
        modules = os.environ.get(MODULES_VARIABLE, "").split(",")
        hint = f"export {MODULES_VARIABLE}={PLUGIN_MODULE}, or start it with `verl-shipper run -- CMD`"
        if PLUGIN_MODULE in modules:
            yield Finding(Level.OK, f"verl {shown} loads the plugin, which {MODULES_VARIABLE} names")
        else:
            yield Finding(Level.FAIL, f"verl {shown} loads what {MODULES_VARIABLE} names, and it names no plugin", hint)
    else:
        what = f"verl {shown} loads no plugins by itself"
        yield Finding(Level.WARN, what, f"import {PLUGIN_MODULE} before verl: docs/verl.md, older versions")


def _entry_point(shown: str) -> Finding:
    found = [entry.name for entry in metadata.entry_points(group=PLUGIN_GROUP) if entry.value == PLUGIN_MODULE]
    if not found:
        what = f"verl {shown} finds no entry point of ours in {PLUGIN_GROUP}"
        return Finding(Level.FAIL, what, "pip install verl-shipper into this environment, again if it was a checkout")
    policy = os.environ.get(POLICY_VARIABLE, "auto").strip().lower()
    if policy != "auto" and PLUGIN_NAME not in [name.strip() for name in policy.split(",")]:
        what = f"{POLICY_VARIABLE}={policy} keeps verl {shown} from loading the plugin"
        return Finding(Level.FAIL, what, f"unset {POLICY_VARIABLE}, or add {PLUGIN_NAME} to it")
    return Finding(Level.OK, f"verl {shown} loads the plugin by its entry point")


def driver_findings() -> Iterator[Finding]:
    """Whether an import of verl, here and now, ends with its classes changed."""
    if not verl_version():
        return
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=IMPORT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding(Level.WARN, f"verl could not be imported to look: {type(error).__name__}")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        yield Finding(
            Level.FAIL, f"verl cannot be imported here: {last[:200]}", "mend that first; training needs it too"
        )
    elif done.stdout.split()[-1:] == ["True"]:
        yield Finding(Level.OK, "an import of verl loads the plugin")
    else:
        yield Finding(Level.FAIL, "an import of verl does not load the plugin", "see the line above")


def worker_findings() -> Iterator[Finding]:
    """What is known of Ray's processes without starting any."""
    version = verl_version()
    if not version:
        return
    address = os.environ.get("RAY_ADDRESS") or _running_cluster()
    by = "the entry point" if version >= PLUGINS_SINCE else MODULES_VARIABLE
    if not address:
        yield Finding(Level.OK, f"Ray is started by the job: TaskRunner and workers inherit its environment, and {by}")
    elif version >= PLUGINS_SINCE:
        what = (
            f"Ray runs already at {address}: its workers load the plugin where the package is installed on their node"
        )
        yield Finding(Level.OK, what)
    else:
        what = f"Ray runs already at {address}: its workers get {MODULES_VARIABLE} from verl's main_ppo only"
        hint = f"elsewhere: '+ray_kwargs.ray_init.runtime_env.env_vars.{MODULES_VARIABLE}={PLUGIN_MODULE}'"
        yield Finding(Level.WARN, what, hint)


def asked_findings() -> Iterator[Finding]:
    """Whether anything would be shipped."""
    takeover = os.environ.get(TAKEOVER_VARIABLE, "")
    if takeover.strip().lower() in TRUE_WORDS:
        yield Finding(
            Level.OK, f"{TAKEOVER_VARIABLE}={takeover}: whatever trackers a job lists are shipped, not called"
        )
        return
    hint = f"put {PLUGIN_NAME} there, or export {TAKEOVER_VARIABLE}=1, or start with `verl-shipper run -- CMD`"
    yield Finding(Level.OK, f"a job ships what its trainer.logger lists as {PLUGIN_NAME}, and nothing else", hint)


def seen_findings(spool: str, state_file: str) -> Iterator[Finding]:
    """Processes that have shipped something through this machine, by run, newest first."""
    runs: dict[str, list[StreamHeader]] = {}
    for header in {each.stream_id: each for each in (*_waiting(spool), *_taken(state_file))}.values():
        if header.stream_class == SCALARS:
            runs.setdefault(header.run_id, []).append(header)
    newest = sorted(runs.values(), key=lambda headers: max(each.created_ns for each in headers), reverse=True)
    for headers in newest[:RUNS_SHOWN]:
        heads = {each.writer_id: each.process.pid for each in headers if not each.forked}
        helpers = {each.writer_id for each in headers if each.forked}
        who = f"its trainer (pid {', '.join(map(str, heads.values()))})" if heads else "no trainer"
        first = headers[0]
        what = (
            f"run {first.run_id} ({first.project or '-'}/{first.experiment or '-'}): {who} and {len(helpers)} workers"
        )
        yield Finding(Level.OK, what)
    if not runs:
        yield Finding(Level.OK, "no process has shipped anything through this machine yet")


def _waiting(spool: str) -> Iterator[StreamHeader]:
    """Streams that trainers have left for a daemon."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(spool)
    for name in names:
        with contextlib.suppress(OSError, CorruptionError):
            yield read_header(os.path.join(spool, name))


def _taken(state_file: str) -> Iterator[StreamHeader]:
    """Streams that the daemon has taken, delivered ones too."""
    database = open_store_read_only(state_file)
    if database is None:
        return
    with contextlib.closing(database), contextlib.suppress(sqlite3.Error):
        for (content,) in database.execute("SELECT header FROM streams"):
            with contextlib.suppress(CorruptionError):
                yield decode_header(content)


def _running_cluster() -> str:
    try:
        with open(CLUSTER_FILE, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""
