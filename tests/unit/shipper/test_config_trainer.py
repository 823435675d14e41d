"""A trainer's own sections: what of them means something here, and that all the rest is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_shipper.backends import known_names
from verl_shipper.config import Config, check_backends, load_config
from verl_shipper.config_names import near_miss
from verl_shipper.errors import ConfigError

TRAINER_KEYS = [
    "balance_batch",
    "total_epochs",
    "total_training_steps",
    "project_name",
    "experiment_name",
    "logger",
    "log_val_generations",
    "rollout_data_dir",
    "validation_data_dir",
    "nnodes",
    "n_gpus_per_node",
    "save_freq",
    "esi_redundant_time",
    "resume_mode",
    "resume_from_path",
    "val_before_train",
    "val_only",
    "test_freq",
    "critic_warmup",
    "default_hdfs_dir",
    "del_local_ckpt_after_load",
    "default_local_dir",
    "max_actor_ckpt_to_keep",
    "max_critic_ckpt_to_keep",
    "max_ckpt_to_keep",
    "ray_wait_register_center_timeout",
    "device",
    "seed",
    "use_legacy_worker_impl",
    "use_v1",
    "v1",
    "rl_insight",
    "npu_profile",
    "profile_steps",
    "controller_nsight_options",
    "worker_nsight_options",
    "remove_previous_ckpt_in_save",
    "sft",
    "val_generations_to_log_to_wandb",
    "checkpoint",
    "profiler",
    "config_name",
    "hybrid_engine",
]
ROLLOUT_KEYS = [
    "name",
    "mode",
    "temperature",
    "top_k",
    "top_p",
    "prompt_length",
    "response_length",
    "dtype",
    "gpu_memory_utilization",
    "ignore_eos",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "free_cache_engine",
    "tensor_model_parallel_size",
    "data_parallel_size",
    "max_num_batched_tokens",
    "max_model_len",
    "max_num_seqs",
    "disable_log_stats",
    "do_sample",
    "n",
    "over_sample_rate",
    "multi_stage_wake_up",
    "engine_kwargs",
    "val_kwargs",
    "multi_turn",
    "calculate_log_probs",
    "agent",
    "update_weights_bucket_megabytes",
    "trace",
    "skip_rollout",
    "skip_dump_dir",
    "profiler",
    "enable_chunked_prefill",
    "load_format",
    "layered_summon",
    "log_prob_micro_batch_size",
    "prometheus",
    "quantization",
    "skip_tokenizer_init",
]
TRACE_KEYS = ["_target_", "backend", "token2text", "project_name", "experiment_name", "max_samples_per_step_per_worker"]
OURS = ("logger", "project_name", "experiment_name", "log_frequency", "log_val_generations", "wandb_proxy")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VERL_LOGGER", "VERL_PROJECT", "VERL_EXPERIMENT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def _load(tmp_path: Path, content: str, *overrides: str, backends: tuple[str, ...] = ()) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    found = load_config(str(path), overrides, backends)
    check_backends(found)
    return found


# Left alone


def test_no_key_of_verl_is_taken_for_a_misspelled_one_of_ours(tmp_path: Path) -> None:
    foreign = [key for key in TRAINER_KEYS if key not in OURS]
    assert [key for key in foreign if near_miss(key, {*OURS, *known_names()})] == []

    trainer = "".join(f"  {key}: whatever\n" for key in foreign)
    rollout = "".join(f"    {key}: whatever\n" for key in ROLLOUT_KEYS if key != "trace")
    others = "".join(f"  {key}: {{path: x}}\n" for key in ("actor", "ref", "model", "hybrid_engine", "nccl_timeout"))
    trace = "".join(f"      {key}: null\n" for key in TRACE_KEYS)
    content = (
        f"trainer:\n  logger: [console]\n{trainer}actor_rollout_ref:\n{others}  rollout:\n{rollout}    trace:\n{trace}"
    )

    assert _load(tmp_path, content).sampling == {"console": {}}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("projet_name", "project_name"),
        ("project_names", "project_name"),
        ("projectName", "project_name"),
        ("experiment-name", "experiment_name"),
        ("experimentname", "experiment_name"),
        ("log_freqency", "log_frequency"),
        ("log_freq", "log_frequency"),
        ("log_val_generation", "log_val_generations"),
        ("loggers", "logger"),
        ("wandb_proxi", "wandb_proxy"),
        ("swanlb", "swanlab"),
    ],
)
def test_what_can_only_be_a_misspelled_one_of_ours_is_told(tmp_path: Path, written: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"config.yaml:3: trainer.{written}\]; did you mean trainer.{meant}\?"):
        _load(tmp_path, f"trainer:\n  logger: console\n  {written}: x\n")


# What it means


def test_a_setting_of_a_tracker_may_stand_in_the_trainers_section(tmp_path: Path) -> None:
    content = (
        "trainer:\n  logger: [console, wandb, swanlab, mlflow]\n"
        "  wandb: {save_code: True, log_artifact: False}\n  wandb_proxy: http://proxy.example.com:8080\n"
        "  swanlab: {log_dir: ./swanlab_logs, mode: local}\n  mlflow: {tracking_uri: 'http://tracker:5000'}\n"
    )

    assert _load(tmp_path, content).backends == {
        "console": {},
        "wandb": {"save_code": True, "log_artifact": False, "wandb_proxy": "http://proxy.example.com:8080"},
        "swanlab": {"log_dir": "./swanlab_logs", "mode": "local"},
        "mlflow": {"tracking_uri": "http://tracker:5000"},
    }
    ours = "backends: {wandb: {save_code: no, wandb_proxy: 'http://other'}}\n"
    assert _load(tmp_path, ours + content).backends["wandb"]["save_code"] is False


def test_a_setting_of_a_tracker_that_is_not_used_is_checked_and_harmless(tmp_path: Path) -> None:
    assert _load(tmp_path, "trainer: {logger: console, wandb_proxy: 'http://p', wandb: {save_code: yes}}").backends == {
        "console": {}
    }
    with pytest.raises(ConfigError, match="save_code"):
        _load(tmp_path, "trainer: {logger: console, wandb: {save_code: sometimes}}")


@pytest.mark.parametrize("backend", ["null", "shipper", "''"])
def test_traces_go_everywhere_unless_one_backend_is_named(tmp_path: Path, backend: str) -> None:
    content = (
        f"trainer: {{logger: [console, wandb]}}\nactor_rollout_ref: {{rollout: {{trace: {{backend: {backend}}}}}}}"
    )

    assert _load(tmp_path, content).sampling == {"console": {}, "wandb": {}}


def test_traces_go_to_the_backend_that_is_named_alone(tmp_path: Path) -> None:
    content = "trainer: {logger: [console, wandb, swanlab]}\nactor_rollout_ref: {rollout: {trace: {backend: wandb}}}\n"
    off = {"traces": {"enabled": False}}

    found = _load(tmp_path, content)
    assert found.sampling == {"console": off, "wandb": {}, "swanlab": off}
    assert found.origins["backends.console.sampling.traces.enabled"].endswith("config.yaml:2")
    found = _load(tmp_path, content, "backends.console.sampling.traces.enabled=yes", backends=("console", "wandb"))
    assert found.sampling == {"console": {"traces": {"enabled": True}}, "wandb": {}}


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("mlflw", "did you mean 'mlflow'?"),
        ("weave", "known backends"),
        ("mlflow", r"not among the backends \(console\)"),
    ],
)
def test_a_backend_for_traces_that_is_not_there_is_told(tmp_path: Path, backend: str, words: str) -> None:
    content = f"trainer: {{logger: [console]}}\nactor_rollout_ref: {{rollout: {{trace: {{backend: {backend}}}}}}}\n"

    with pytest.raises(ConfigError, match=words) as raised:
        _load(tmp_path, content)
    assert "config.yaml:2: actor_rollout_ref.rollout.trace.backend" in raised.value.line()


def test_the_models_tokenizer_decodes_unless_another_is_named(tmp_path: Path) -> None:
    content = (
        "trainer: {logger: [console]}\nactor_rollout_ref:\n  model: {path: /models/x}\n"
        "  rollout: {trace: {token2text: True}}\n"
    )

    assert _load(tmp_path, content).sampling["console"]["traces"] == {"token2text": True, "tokenizer": "/models/x"}
    found = _load(tmp_path, content, "sampling.traces.tokenizer=/other")
    assert found.sampling["console"]["traces"]["tokenizer"] == "/other"
    assert _load(tmp_path, content, "sampling.traces.token2text=no").sampling["console"]["traces"] == {
        "token2text": False
    }
    elsewhere = content.replace("/models/x", "'${oc.env:VERL_SHIPPER_TEST_ABSENT}'")
    assert _load(tmp_path, elsewhere).sampling["console"]["traces"] == {"token2text": True}


# What backends say about themselves


def test_choices_that_are_declared_are_those_that_the_backends_know() -> None:
    from verl_shipper.backends import load_backend, mlflow, swanlab, swanlab_place, wandb
    from verl_shipper.backends.sdk.parts import SETTLE_S_MAX
    from verl_shipper.schema import Key

    def key(backend: str, path: str) -> Key:
        (found,) = [each for each in load_backend(backend).settings_known or () if getattr(each, "path", "") == path]
        assert isinstance(found, Key)
        return found

    assert key("wandb", "mode").choices == tuple(wandb.MODES)
    assert key("swanlab", "mode").choices == tuple(swanlab_place.MODES)
    assert key("swanlab", "settle_s").default == swanlab.SETTLE_S
    assert key("swanlab", "settle_s").high == key("wandb", "settle_s").high == SETTLE_S_MAX
    assert key("mlflow", "timeout_s").high == mlflow.SEND_S_MAX
