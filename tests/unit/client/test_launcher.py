"""Launchers: rank and size are believed together; a fact is the same on all ranks of one job and of no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from verl_shipper_client import launcher
from verl_shipper_client.launcher import Place, detect, shared_facts

# As real ones were seen to say it: torch 2.13, Slurm 22.05, Open MPI 5.0, MPICH 5.0 (rank 1 of 2).
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_spymc6o_/none_t084g6c2/attempt_0/1/error.json",
}
SRUN = {
    "SLURM_CLUSTER_NAME": "feas",
    "SLURM_JOB_ID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
}
SBATCH = {"SLURM_CLUSTER_NAME": "feas", "SLURM_JOB_ID": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "3"}
SALLOC = {"SLURM_CLUSTER_NAME": "feas", "SLURM_JOB_ID": "3", "SLURM_NTASKS": "8"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
DEEPSPEED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}


def _set(monkeypatch: pytest.MonkeyPatch, *worlds: Mapping[str, str]) -> None:
    for world in worlds:
        for name, value in world.items():
            monkeypatch.setenv(name, value)


def _said(place: Place) -> tuple[str, int, int]:
    return place.launcher, place.rank, place.world


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (TORCHRUN, ("torchrun", 1, 2)),
        (DEEPSPEED, ("env", 1, 2)),
        (OPEN_MPI, ("mpi", 1, 2)),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, ("mpi", 1, 2)),
        (MPICH, ("mpi", 1, 2)),
        (SRUN, ("slurm", 1, 2)),
        ({}, ("", 0, 1)),
    ],
    ids=["torchrun", "deepspeed", "open-mpi", "mvapich", "mpich", "srun", "nothing"],
)
def test_every_launcher_says_rank_and_size(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: tuple[str, int, int]
) -> None:
    _set(monkeypatch, variables)

    assert _said(detect()) == said


@pytest.mark.parametrize(
    ("variables", "launcher_name"),
    [
        ([SRUN | {"SLURM_PROCID": "0"}, TORCHRUN], "torchrun"),
        ([OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"}, TORCHRUN], "torchrun"),
        ([SBATCH, OPEN_MPI], "mpi"),
        ([SRUN | {"SLURM_PROCID": "0"}, MPICH], "mpi"),
    ],
    ids=["srun-torchrun", "mpirun-torchrun", "sbatch-mpirun", "srun-bootstrapped-hydra"],
)
def test_the_innermost_launcher_goes_first(
    monkeypatch: pytest.MonkeyPatch, variables: list[dict[str, str]], launcher_name: str
) -> None:
    _set(monkeypatch, *variables)

    assert _said(detect()) == (launcher_name, 1, 2)


@pytest.mark.parametrize(
    "variables",
    [
        SALLOC,
        SALLOC | {"SLURM_PROCID": "0"},
        SBATCH,
        SALLOC | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
    ],
    ids=["salloc", "salloc-procid", "sbatch", "interactive-step"],
)
def test_a_program_beside_srun_is_one_process(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    _set(monkeypatch, variables)

    assert _said(detect()) == ("", 0, 1)
    assert shared_facts(detect()) == ()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "3"}, ("", 3, 1)),
        ({"WORLD_SIZE": "4"}, ("", 0, 1)),
        ({"RANK": "5", "WORLD_SIZE": "2"}, ("", 5, 1)),
        ({"RANK": "x", "WORLD_SIZE": "2"}, ("", 0, 1)),
        ({"RANK": "", "WORLD_SIZE": ""}, ("", 0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "9" * 400}, ("", 1, 1)),
        ({"RANK": "3"} | SRUN, ("slurm", 1, 2)),
        (TORCHRUN | {"WORLD_SIZE": "0"}, ("", 1, 1)),
        ({"SLURM_PROCID": "5"}, ("", 5, 1)),
        (SRUN | {"SLURM_PROCID": "9", "SLURM_HET_SIZE": "2"}, ("slurm", 9, 10)),
    ],
)
def test_half_a_launcher_is_none_but_its_rank_is_kept(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: tuple[str, int, int]
) -> None:
    _set(monkeypatch, variables)

    assert _said(detect()) == said


def test_ranks_and_restarts_of_one_torchrun_share_facts_and_two_torchruns_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def facts(path: str) -> tuple[str, ...]:
        _set(monkeypatch, TORCHRUN | {"TORCHELASTIC_ERROR_FILE": path})
        return shared_facts(detect())

    first = facts("/tmp/torchelastic_a/none_b/attempt_0/1/error.json")

    assert first
    assert facts("/tmp/torchelastic_a/none_b/attempt_3/0/error.json") == first
    assert facts("/tmp/torchelastic_c/none_d/attempt_0/1/error.json") != first


def test_torchrun_over_several_nodes_has_no_fact_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, TORCHRUN | {"LOCAL_WORLD_SIZE": "1"})

    assert shared_facts(detect()) == ()


@pytest.mark.parametrize("path", ["", "error.json", "a/attempt_0/1/error.json", "/x/1/error.json", "\0", "/"])
def test_an_error_file_of_another_shape_is_no_fact(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(os, "environ", TORCHRUN | {launcher.ERROR_FILE: path})

    assert launcher.agent_folder() == ""


def test_a_step_of_slurm_is_the_same_for_all_ranks_and_after_a_requeue(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(**changed: str) -> tuple[str, ...]:
        _set(monkeypatch, SRUN | changed)
        return shared_facts(detect())

    first = facts()

    assert first
    assert facts(SLURM_PROCID="0", SLURM_RESTART_COUNT="1") == first
    assert facts(SLURM_STEP_ID="1") != first
    assert facts(SLURM_STEP_ID="0", SLURM_JOB_ID="3") != first
    assert facts(SLURM_JOB_ID="2", SLURM_CLUSTER_NAME="other") != first


def test_a_step_of_one_task_is_somebodys_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SRUN | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})

    assert _said(detect()) == ("slurm", 0, 1)
    assert shared_facts(detect()) == ()


TELL = "import json, sys; from verl_shipper_client import launcher as l; print(json.dumps(l.shared_facts(l.detect())))"
START = """
import os, subprocess, sys
variables = dict(pair.split("=") for pair in sys.argv[2].split(","))
for rank in "01":
    changed = {name: rank if name.endswith("RANK") else value for name, value in variables.items()}
    words = [sys.executable, "-c", sys.argv[1]]
    if sys.argv[3] == "wrapped":
        words = ["/bin/sh", "-c", 'x=1; "$@"; exit $?', "sh", *words]
    subprocess.run(words, env=os.environ | changed, check=True)
"""


def _facts_of_job(variables: Mapping[str, str], wrapped: str = "") -> list[list[str]]:
    """What both ranks of a small job say, each started by one process of its own."""
    given = ",".join(f"{name}={value}" for name, value in variables.items())
    done = subprocess.run(
        [sys.executable, "-c", START, TELL, given, wrapped], capture_output=True, text=True, check=True, timeout=60
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH, DEEPSPEED], ids=["open-mpi", "mpich", "deepspeed"])
@pytest.mark.parametrize("wrapped", ["", "wrapped"])
def test_on_one_node_the_launchers_process_is_the_fact(variables: dict[str, str], wrapped: str) -> None:
    first, second = _facts_of_job(variables, wrapped)
    other, _ = _facts_of_job(variables, wrapped)

    assert first == second
    assert first
    assert other != first


def test_torchrun_without_an_error_file_is_found_by_its_process() -> None:
    variables = {name: value for name, value in TORCHRUN.items() if name != launcher.ERROR_FILE}

    first, second = _facts_of_job(variables)

    assert first == second
    assert len(first) > 1


def test_variables_set_inside_the_process_are_no_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, DEEPSPEED)  # as a script does for itself; the process did not begin with them

    assert _said(detect()) == ("env", 1, 2)
    assert shared_facts(detect()) == ()


class _Ray(types.SimpleNamespace):
    """The part of Ray that is asked."""

    WORKER_MODE = 1

    def __init__(self, mode: int = 1, job: str = "01000000", session: str = "session_x") -> None:
        context = types.SimpleNamespace(
            worker=types.SimpleNamespace(mode=mode), get_job_id=lambda: job, get_session_name=lambda: session
        )
        super().__init__(is_initialized=lambda: True, get_runtime_context=lambda: context)


def _train(rank: int, world: int, trial: str = "") -> Any:
    context = types.SimpleNamespace(
        get_world_rank=lambda: rank,
        get_world_size=lambda: world,
        get_experiment_name=lambda: "exp",
        get_trial_id=lambda: trial,
    )
    return types.SimpleNamespace(get_context=lambda: context)


def test_in_a_ray_worker_the_variables_that_ray_start_inherited_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SRUN)
    monkeypatch.setitem(sys.modules, "ray", _Ray())

    assert _said(detect()) == ("", 0, 1)

    monkeypatch.setitem(sys.modules, "ray.train", _train(3, 4))
    assert _said(detect()) == ("ray", 3, 4)

    monkeypatch.delitem(sys.modules, "ray.train")
    _set(monkeypatch, DEEPSPEED)
    assert _said(detect()) == ("ray", 1, 2)


def test_a_driver_of_ray_is_not_one_of_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SRUN)
    monkeypatch.setitem(sys.modules, "ray", _Ray(mode=0))

    assert _said(detect()) == ("slurm", 1, 2)


def test_workers_of_one_ray_job_and_trial_share_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(ray: _Ray, train: Any) -> tuple[str, ...]:
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setitem(sys.modules, "ray.train", train)
        return shared_facts(detect())

    first = facts(_Ray(), _train(0, 2, "t1"))

    assert first
    assert facts(_Ray(), _train(1, 2, "t1")) == first
    assert facts(_Ray(), _train(1, 2, "t2")) != first
    assert facts(_Ray(job="02000000"), _train(0, 2, "t1")) != first
    assert facts(_Ray(session="session_y"), _train(0, 2, "t1")) != first
    assert facts(_Ray(session=""), _train(0, 2, "t1")) == ()


def test_a_broken_ray_is_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SRUN)
    monkeypatch.setitem(sys.modules, "ray", object())

    assert _said(detect()) == ("slurm", 1, 2)


def test_a_process_that_is_none_of_ours_is_looked_at_without_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 2**22 + 1)
    row = next(row for row in launcher.ROWS if row.launcher == launcher.ENV)
    monkeypatch.setattr(launcher, "_environment", lambda pid, names: {"RANK": "1"} if pid == "self" else {})

    assert launcher._starter(row) == ()


def test_the_walk_up_ends_at_the_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in launcher.ROWS if row.launcher == launcher.ENV)
    monkeypatch.setattr(launcher, "_environment", lambda pid, names: {"RANK": "1"})

    assert launcher._starter(row) == ()


def test_no_launcher_imports_torch_or_ray(tmp_path: Path) -> None:
    code = (
        "import sys, verl_shipper_client.torch as t\n"
        "t.DistributedClient('p', 'e', spool_dir=sys.argv[1]).finish(timeout_s=0)\n"
        "print(sorted({'torch', 'ray', 'transformers', 'lightning', 'mpi4py'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.strip() == "[]"
