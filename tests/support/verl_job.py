"""Real verl jobs without a GPU: `python -m verl.trainer.main_ppo` with ordinary overrides, in a Ray of its own.

This knows the command line, the environment, the end of a job; `verl/kit` holds what stands in for GPU and model.
Promises: no process of a job outlives its run, whatever became of it; no cluster of somebody else's is joined.
Must not know: what is tested. verl itself is imported by the job alone, never by the process of the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.processes import children, descendants, kill, wait_for, wait_gone

KIT = Path(__file__).parents[1] / "verl" / "kit"
KIT_ENV = {"PYTHONPATH": str(KIT), "VERL_USE_EXTERNAL_MODULES": "fake_engine"}
RAY = str(Path(sys.executable).with_name("ray"))
JOB_S = 500.0  # a job takes about a minute of two idle cores, nearly all of it imports in ten processes
SFT_RANKS = 2
CLUSTER_S = 120.0
LAST_WORDS_S = 20.0  # how long Ray may take to end what it started
# Ray's own sockets lie below its folder and may have 107 characters: pytest's folders are too long for it.
RAY_TMP_PREFIX = "vr-"
# What a user's shell could bring in that would change a job under test.
_NOT_INHERITED = ("RAY_", "VERL_", "WANDB_", "MLFLOW_", "SWANLAB_", "TENSORBOARD_", "HYDRA_", "CUDA_", "PYTEST_")


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a job."""

    exit_code: int
    output: str  # stdout and stderr of the driver; Ray sends the actors' there, too

    def check(self) -> Finished:
        assert self.exit_code == 0, f"the job ended with {self.exit_code}:\n{self.output[-6000:]}"
        return self


def make_inputs(folder: Path) -> Path:
    """A tiny model with a tokenizer, and data. Takes seconds: make them once for many jobs."""
    command = [sys.executable, str(KIT / "make_inputs.py"), str(folder)]
    subprocess.run(command, check=True, env=job_environment(folder), capture_output=True, timeout=JOB_S)
    return folder


def job_environment(folder: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a job's driver: what is set here reaches every actor of a Ray which that driver starts."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_NOT_INHERITED)}
    return inherited | {
        **KIT_ENV,
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **(extra or {}),
    }


def ppo_overrides(inputs: Path, folder: Path) -> list[str]:
    """The command line of a small GRPO run: two steps, validation before the first and after the last."""
    model, rollout = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={inputs}/train.parquet",
        f"data.val_files={inputs}/val.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=512",
        "data.max_response_length=256",
        "data.dataloader_num_workers=0",
        f"{model}.path={inputs}/model",
        f"{model}.use_remove_padding=False",  # would need flash attention
        f"+{model}.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        f"{rollout}.name=vllm",
        f"{rollout}.n=2",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.agent.num_workers=2",
        f"{rollout}.multi_turn.function_tool_path={KIT}/calculator.py",
        f"reward.custom_reward_function.path={KIT}/reward.py",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "trainer.log_val_generations=2",
        "trainer.resume_mode=disable",
        'trainer.logger=["console","file"]',
        "trainer.project_name=sums",
        "trainer.experiment_name=first",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"hydra.run.dir={folder}/hydra",
    ]


def fully_async_overrides(inputs: Path, folder: Path) -> list[str]:
    """A small fully async run: the rollouter has a GPU of its own; two versions of the weights, each validated."""
    return [
        *ppo_overrides(inputs, folder),
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=forgetful",
        "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=fake_checkpoint",
        "async_training.trigger_parameter_sync_step=1",
        "async_training.staleness_threshold=0",
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=1",
        "rollout.n=2",
        "rollout.total_rollout_steps=8",
        "trainer.total_training_steps=null",
        "trainer.test_freq=1",
    ]


def sft_overrides(inputs: Path, folder: Path) -> list[str]:
    """The command line of a small supervised training: two steps, validation after each."""
    return [
        f"data.train_files={inputs}/sft_train.parquet",
        f"data.val_files={inputs}/sft_val.parquet",
        "data.train_batch_size=4",
        "data.micro_batch_size_per_gpu=2",
        "data.use_dynamic_bsz=False",
        "data.max_length=128",
        "data.num_workers=0",
        f"model.path={inputs}/model",
        "model.use_remove_padding=False",
        "+model.override_config.attn_implementation=sdpa",
        "engine.strategy=fsdp2",
        "engine.use_torch_compile=False",
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={SFT_RANKS}",
        "trainer.total_training_steps=2",
        "trainer.test_freq=1",
        "trainer.resume_mode=disable",
        'trainer.logger=["console","file"]',
        "trainer.project_name=sums",
        "trainer.experiment_name=sft",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"hydra.run.dir={folder}/hydra",
    ]


def ray_overrides(ray_folder: Path) -> list[str]:
    """A Ray of the job's own, which counts CPUs and GPUs that the machine need not have."""
    return [
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.address=local",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=200000000",
        f"+ray_kwargs.ray_init._temp_dir={ray_folder}",
    ]


@contextlib.contextmanager
def ray_folder() -> Iterator[Path]:
    """Where a Ray keeps its sessions. Its logs are gone with it."""
    path = Path(tempfile.mkdtemp(prefix=RAY_TMP_PREFIX, dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run_job(
    folder: Path,
    inputs: Path,
    extra_overrides: Sequence[str] = (),
    extra_env: Mapping[str, str] | None = None,
    timeout_s: float = JOB_S,
) -> Finished:
    """Run `python -m verl.trainer.main_ppo` to its end. Later overrides win: `extra_overrides` may change anything."""
    with ray_folder() as ray:
        arguments = [*ppo_overrides(inputs, folder), *ray_overrides(ray), *extra_overrides]
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
        return run_command(command, folder, job_environment(folder, extra_env), timeout_s)


def run_fully_async(
    folder: Path,
    inputs: Path,
    extra_overrides: Sequence[str] = (),
    extra_env: Mapping[str, str] | None = None,
    timeout_s: float = JOB_S,
) -> Finished:
    """Run verl's fully async policy to its end: its trainer actor logs metrics, its rollouter actor generations."""
    with ray_folder() as ray:
        more = ["ray_kwargs.ray_init.num_cpus=64", "ray_kwargs.ray_init.num_gpus=2"]  # each of the two actors wants 10
        arguments = [*fully_async_overrides(inputs, folder), *ray_overrides(ray), *more, *extra_overrides]
        command = [sys.executable, "-m", "verl.experimental.fully_async_policy.fully_async_main", *arguments]
        return run_command(command, folder, job_environment(folder, extra_env), timeout_s)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster of one node that runs before a job comes."""

    address: str  # for RAY_ADDRESS
    dashboard: str  # for `ray job submit --address`


def run_job_on(
    cluster: Cluster,
    folder: Path,
    inputs: Path,
    extra_overrides: Sequence[str] = (),
    extra_env: Mapping[str, str] | None = None,
    timeout_s: float = JOB_S,
) -> Finished:
    """Run a job on a cluster that runs already. The shell's environment does not travel there: what the actors need is
    named in the job's runtime environment, as a user has to."""
    travelling = [f"+ray_kwargs.ray_init.runtime_env.env_vars.{key}={value}" for key, value in KIT_ENV.items()]
    arguments = [*ppo_overrides(inputs, folder), *travelling, *extra_overrides]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    env = job_environment(folder, {"RAY_ADDRESS": cluster.address, **(extra_env or {})})
    return run_command(command, folder, env, timeout_s)


def submit_job_to(
    cluster: Cluster,
    folder: Path,
    inputs: Path,
    extra_overrides: Sequence[str] = (),
    extra_env: Mapping[str, str] | None = None,
    timeout_s: float = JOB_S,
) -> Finished:
    """`ray job submit`: the driver, too, runs on the cluster; `extra_env` goes into the runtime environment."""
    runtime_env = {"env_vars": KIT_ENV | dict(extra_env or {})}
    submit = [RAY, "job", "submit", f"--address={cluster.dashboard}", f"--runtime-env-json={json.dumps(runtime_env)}"]
    arguments = [*ppo_overrides(inputs, folder), *extra_overrides]
    command = [*submit, "--", sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    return run_command(command, folder, job_environment(folder), timeout_s)


@contextlib.contextmanager
def ray_cluster(folder: Path, extra_env: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """Start a cluster as an operator would, without a job's environment."""
    before = set(children(os.getpid()))
    hidden = {*KIT_ENV, "VERL_FILE_LOGGER_PATH"}
    env = {key: value for key, value in job_environment(folder).items() if key not in hidden} | dict(extra_env or {})
    port, dashboard_port = free_port(), free_port()
    with ray_folder() as temp:
        command = [RAY, "start", "--head", "--block", f"--port={port}", f"--dashboard-port={dashboard_port}"]
        command += ["--num-cpus=16", "--num-gpus=1", f"--temp-dir={temp}"]
        path = folder / "cluster.txt"
        with open(path, "wb") as file:
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT)
            try:
                wait_for(lambda: "Ray runtime started" in path.read_text(), CLUSTER_S, "the cluster starts")
                yield Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}")
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WORDS_S)
                _end(process, before)


def run_sft(
    folder: Path,
    inputs: Path,
    extra_overrides: Sequence[str] = (),
    extra_env: Mapping[str, str] | None = None,
    timeout_s: float = JOB_S,
) -> Finished:
    """Run `torchrun -m verl.trainer.sft_trainer` to its end: one process a rank, no Ray."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={SFT_RANKS}"]
    arguments = [*sft_overrides(inputs, folder), *extra_overrides]
    command = [sys.executable, *torchrun, "-m", "verl.trainer.sft_trainer", *arguments]
    return run_command(command, folder, job_environment(folder, extra_env), timeout_s)


def run_command(command: Sequence[str], folder: Path, env: Mapping[str, str], timeout_s: float = JOB_S) -> Finished:
    """Run one command in `folder` to its end and end all that it left."""
    before = set(children(os.getpid()))
    path = folder / "output.txt"
    with open(path, "wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=dict(env), stdout=file, stderr=subprocess.STDOUT)
        try:
            exit_code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            exit_code = -signal.SIGKILL
        finally:
            _end(process, before)
    return Finished(exit_code, path.read_text(errors="replace"))


def _end(process: subprocess.Popen[bytes], before: set[int]) -> None:
    """Orphans of a job become children of the test process (see conftest), so that none escapes."""

    def left() -> list[int]:
        mine = [pid for pid in children(os.getpid()) if pid not in before]
        return [*mine, *(pid for parent in mine for pid in descendants(parent))]

    if process.poll() is not None:
        with contextlib.suppress(AssertionError):
            wait_gone(left(), LAST_WORDS_S)
    while pids := left():
        for pid in pids:
            kill(pid)
        wait_gone(pids, LAST_WORDS_S)
    process.wait(LAST_WORDS_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def metrics(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """What verl's own file logger wrote: (step, data) for each `Tracking.log`."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(entry["step"], entry["data"]) for entry in map(json.loads, lines)]
