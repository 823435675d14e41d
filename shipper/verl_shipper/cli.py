"""The command line. Thin: reads arguments, calls one function, prints one line for what a person did wrong.

Exit codes: 0 done, 1 something in the world, 2 usage or configuration, 3 another daemon is at work, 4 something remains
(run -- CMD: the command's own code).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from verl_shipper import __version__
from verl_shipper.errors import ShipperError
from verl_shipper.push_command import push
from verl_shipper_spool.redact import scrub

EXIT_USAGE = 2
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class _Group(click.Group):
    """Turns our errors into one line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ShipperError as error:
            click.echo(f"verl-shipper: {scrub(error.line())}", err=True)
            ctx.exit(error.exit_code)
        except BrokenPipeError:  # `verl-shipper cat … | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)
        except OSError as error:
            place = f" [{error.filename}]" if error.filename else ""
            click.echo(f"verl-shipper: {error.strerror or error}{place}", err=True)
            ctx.exit(ShipperError.exit_code)


@click.group(cls=_Group, context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="verl-shipper")
def main() -> None:
    """Ships training metrics, generations and traces to every tracker, off the critical path."""


main.add_command(push)


def _config_options(command: Any) -> Any:
    for option in (
        click.option("--state-dir", metavar="DIR", help="The daemon's own spool and state."),
        click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override one configuration key."),
        click.option(
            "--backend", "backends", metavar="NAME", multiple=True, help="Deliver to this tracker (repeatable)."
        ),
        click.option("--config", "config_path", metavar="FILE", help="Configuration, YAML."),
    ):
        command = option(command)
    return command


@main.command()
@_config_options
@click.option("--socket", metavar="ADDR", help="Listen here: a path, ipc://PATH or tcp://HOST:PORT.")
@click.option("--adopt", metavar="DIR", multiple=True, help="Client spool to look after (default: the user's spool).")
@click.option(
    "--drain-timeout", metavar="SECONDS", default=60.0, show_default=True, help="After CMD: wait for delivery."
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(
    config_path: str | None,
    backends: Sequence[str],
    overrides: Sequence[str],
    state_dir: str | None,
    socket: str | None,
    adopt: Sequence[str],
    drain_timeout: float,
    command: Sequence[str],
) -> None:
    """Run the daemon; with a command after `--`, beside it.

    \b
    verl-shipper run --backend file --set backends.file.dir=./records
    verl-shipper run -- python -m verl.trainer.main_ppo trainer.logger='["console","mlflow"]' …
    """
    from verl_shipper import serve

    request = replace(_request(config_path, overrides, backends, state_dir, socket, adopt), command=tuple(command))
    config = _load(request)
    sys.exit(serve.beside(config, command, drain_timeout, request) if command else serve.serve(config, request))


@main.command()
@_config_options
@click.option(
    "--patience", metavar="SECONDS", default=60.0, show_default=True, help="Give up after so long without progress."
)
@click.argument("folders", nargs=-1, metavar="[DIR]...")
def flush(
    config_path: str | None,
    backends: Sequence[str],
    overrides: Sequence[str],
    state_dir: str | None,
    patience: float,
    folders: Sequence[str],
) -> None:
    """Deliver everything in spool folders and end. Exit code 0 only when nothing remains.

    Without a folder: what the user's own daemon has not delivered yet, running or not.

    \b
    verl-shipper flush /scratch/job42/spool --backend mlflow --set backends.mlflow.tracking_uri=http://tracker:5000
    """
    from verl_shipper import serve
    from verl_shipper.progress import Progress

    config = _load(_request(config_path, overrides, backends, state_dir))
    with Progress() as progress:
        code = serve.flush(config, folders, patience, progress.show)
    progress.summary()
    sys.exit(code)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--state-dir", metavar="DIR", help="The daemon's own spool and state.")
def status(as_json: bool, watch: bool, state_dir: str | None) -> None:
    """Show what became of every record, per backend and run.

    \b
    verl-shipper status --watch
    """
    from verl_shipper.status import report

    folder = _state_dir(state_dir)
    if as_json:
        click.echo(json.dumps(report(folder).to_json(), indent=2))
        return
    from rich.console import Console
    from rich.live import Live

    from verl_shipper.show import status_table

    console = Console()
    if not watch:
        console.print(status_table(report(folder)))
        return
    try:
        with Live(status_table(report(folder)), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(1.0)
                live.update(status_table(report(folder)), refresh=True)
    except KeyboardInterrupt:
        return


@main.command()
@_config_options
@click.option("--socket", metavar="ADDR", help="The daemon's address, as given to `run`.")
@click.option("--verl", "with_verl", is_flag=True, help="Look at the verl of this Python, too.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def doctor(
    config_path: str | None,
    backends: Sequence[str],
    overrides: Sequence[str],
    state_dir: str | None,
    socket: str | None,
    with_verl: bool,
    as_json: bool,
) -> None:
    """Check this machine, the daemon and the way to every tracker. Exit code 1 when something fails.

    \b
    verl-shipper doctor --backend mlflow --set backends.mlflow.tracking_uri=http://tracker:5000
    verl-shipper doctor --verl
    """
    from verl_shipper import doctor as examination
    from verl_shipper.checks import Level

    config = _load(_request(config_path, overrides, backends, state_dir, socket), need_backends=False, with_faults=True)
    colors = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
    width = examination.width_of(config)
    lines = []
    for line in examination.examine(config, with_verl=with_verl):
        lines.append(line)
        level = line.finding.level
        if not as_json:
            click.echo(f"{click.style(f'{level.value:<4}', fg=colors[level])}  {line.text(width)}")
    if as_json:
        click.echo(json.dumps([line.to_json() for line in lines], indent=2))
    sys.exit(int(any(line.finding.level is Level.FAIL for line in lines)))


@main.command()
@click.argument("path", metavar="DIR|STREAM")
def cat(path: str) -> None:
    """Print the records of a spool or of one stream as JSON lines.

    \b
    verl-shipper cat ~/.local/state/verl-shipper/$(hostname)/spool | jq .data
    """
    from verl_shipper.show import record_lines, stream_folders

    for folder in stream_folders(path):
        for line in record_lines(folder):
            click.echo(line)


@main.group("dead-letters")
def dead_letters() -> None:
    """Records that a tracker refused for good.

    \b
    verl-shipper dead-letters list
    verl-shipper dead-letters retry --backend mlflow
    """


@dead_letters.command("list")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--state-dir", metavar="DIR", help="The daemon's own spool and state.")
def letters_list(as_json: bool, state_dir: str | None) -> None:
    """List dead letters with the tracker's reason.

    \b
    verl-shipper dead-letters list --json | jq .
    """
    from dataclasses import asdict

    from verl_shipper.letters import letters

    found = letters(_state_dir(state_dir))
    if as_json:
        click.echo(json.dumps([asdict(letter) for letter in found], indent=2))
        return
    for letter in found:
        wanted = f" ({letter.wanted} is asked for)" if letter.wanted else ""
        step = "-" if letter.step is None else letter.step
        what = f"run {letter.run_id} {letter.kind} step {step}"
        click.echo(f"{letter.backend} {letter.letter_id}: {what}: {letter.reason}{wanted}")
    click.echo(f"{len(found)} dead letters", err=True)


def _letters_command(what: str, text: str) -> None:
    @dead_letters.command(what, help=f"{text}\n\n\b\nverl-shipper dead-letters {what} --backend mlflow 12 13")
    @click.option("--backend", metavar="NAME", help="Only of this backend.")
    @click.option("--run", "run_id", metavar="RUN_ID", help="Only of this run.")
    @click.option("--all", "everything", is_flag=True, help="All of them.")
    @click.option("--state-dir", metavar="DIR", help="The daemon's own spool and state.")
    @click.argument("ids", nargs=-1, type=int)
    def act(
        backend: str | None, run_id: str | None, everything: bool, state_dir: str | None, ids: Sequence[int]
    ) -> None:
        from verl_shipper.letters import want

        if not (ids or run_id or backend or everything):
            raise click.UsageError(f"say which: ids, --run, --backend or --all (dead-letters {what} --all)")
        if ids and not backend:
            raise click.UsageError("ids are counted per backend: add --backend NAME")
        count = want(_state_dir(state_dir), what, backend, ids, run_id)
        click.echo(f"{count} dead letters marked to {what}; the daemon acts on it within seconds")


_letters_command("retry", "Send dead letters again.")
_letters_command("discard", "Throw dead letters away; they are then counted as dropped (discarded).")


@main.group("config")
def config_group() -> None:
    """Look at the configuration before it is used.

    \b
    verl-shipper config check --config shipper.yaml
    verl-shipper config show --config shipper.yaml --set sampling.log_frequency=10
    """


@config_group.command("show")
@_config_options
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def config_show(
    config_path: str | None, backends: Sequence[str], overrides: Sequence[str], state_dir: str | None, as_json: bool
) -> None:
    """Show what is in effect, and where each value comes from. Secrets are masked.

    \b
    verl-shipper config show --config shipper.yaml
    """
    from verl_shipper.config_show import effective, json_of, lines_of

    config = _load(_request(config_path, overrides, backends, state_dir), need_backends=False)
    shown = effective(config)
    if as_json:
        click.echo(json.dumps(json_of(shown), indent=2))
        return
    for line in lines_of(shown):
        click.echo(line)


@config_group.command("check")
@_config_options
def config_check(
    config_path: str | None, backends: Sequence[str], overrides: Sequence[str], state_dir: str | None
) -> None:
    """Say everything that is wrong with a configuration, a line each; exit code 2 then. Touches no network.

    \b
    verl-shipper config check --config shipper.yaml
    """
    request = _request(config_path, overrides, backends, state_dir)
    problems, config = request.problems()
    for problem in problems:
        click.echo(problem.line(), err=True)
    if problems:
        sys.exit(EXIT_USAGE)
    click.echo(f"ok: delivers to {', '.join(config.backends)}")


@main.command()
@click.option("--out", default="demo-out", show_default=True, metavar="DIR", help="Where everything goes.")
@click.option("--steps", default=300, show_default=True, help="Training steps.")
def demo(out: str, steps: int) -> None:
    """Train a tiny policy for real and ship it to file, console and MLflow (embedded sqlite).

    \b
    verl-shipper demo --out /tmp/demo
    """
    from verl_shipper.demo.show import run_demo

    sys.exit(run_demo(out, steps))


def _request(
    path: str | None,
    overrides: Sequence[str],
    backends: Sequence[str],
    state_dir: str | None,
    socket: str | None = None,
    adopt: Sequence[str] = (),
) -> Any:
    from verl_shipper.config import Request

    return Request(path, tuple(overrides), tuple(backends), state_dir, socket, tuple(adopt))


def _load(request: Any, **wishes: bool) -> Any:
    from verl_shipper.logs import log_to_stderr

    config = request.load(**wishes)
    log_to_stderr(config.log_level, "verl-shipper: %(message)s")
    return config


def _state_dir(given: str | None) -> str:
    from verl_shipper_spool.location import spool_dir, state_dir

    return state_dir(spool_dir(), given)
