"""`verl-shipper push`: reads arguments, calls one function, prints one line.

Must not know: how files become records. On failure: ShipperError, as every command.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

import click

EXIT_REMAINS = 4


@click.command()
@click.option("--step", type=int, metavar="N", help="Training step (default: as the name tells, `step12`, `step_12`).")
@click.option("--name", metavar="NAME", help="Name at the trackers; of a folder, in front of its files' names.")
@click.option("--run-id", metavar="ID", help="Run that they belong to (default: the trainer's that calls us).")
@click.option("--project", metavar="P", help="Its project, when the spool does not tell.")
@click.option("--experiment", metavar="E", help="Its experiment, likewise.")
@click.option("--purpose", type=click.Choice(["profile", "memory", "file"]), help="What they are (default: by name).")
@click.option("--spool-dir", metavar="DIR", help="Spool of the trainer.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
def push(
    step: int | None,
    name: str | None,
    run_id: str | None,
    project: str | None,
    experiment: str | None,
    purpose: str | None,
    spool_dir: str | None,
    as_json: bool,
    paths: Sequence[str],
) -> None:
    """Hand files, or all files below folders, to the trackers of a run. Each is sent once, however often it is pushed.

    \b
    verl-shipper push trace.json.gz --step 12
    global_profiler.finish_hook_cmd='verl-shipper push "$VERL_PROFILE_SAVE_PATH"'
    """
    from verl_shipper import push as pushing
    from verl_shipper.push_run import find_run
    from verl_shipper_spool.location import EXPERIMENT_VARIABLE, PROJECT_VARIABLE
    from verl_shipper_spool.location import spool_dir as place_of

    spool = place_of(spool_dir)
    files = pushing.found_files(paths, name, os.environ.get("VERL_PROFILE_PID", ""))
    run = find_run(spool, run_id)
    run = replace(
        run,
        project=project or run.project or os.environ.get(PROJECT_VARIABLE, ""),
        experiment=experiment or run.experiment or os.environ.get(EXPERIMENT_VARIABLE, ""),
    )
    report = pushing.push(spool, run, files, step=step, purpose=purpose)
    if as_json:
        shipped = [{"name": each, "bytes": size, "step": at} for each, size, at in report.shipped]
        told = {"run_id": run.run_id, "shipped": shipped, "known": report.known}
        click.echo(json.dumps({**told, "changing": report.changing, "failed": report.failed}, indent=2))
    else:
        click.echo(report.line())
    sys.exit(1 if report.failed else EXIT_REMAINS if report.changing else 0)
