"""Every key of the configuration that is not a backend's own: declared once, read by loader, `config show` and manual.

    TOP        the daemon's own
    SAMPLING   what is delivered; for all backends below `sampling`, for one below `backends.NAME.sampling`
    RUN_MAY_CHOOSE  which of that a run may decide by itself
    TRAINER    keys of a trainer's own configuration that mean something here, and what they mean (ALIASES)

Must not know: values, places, backends.
"""

from __future__ import annotations

from typing import Any

from verl_shipper.policy.sampling import LOG_MODES, RANK_0, RANK_MODES, RANK_TIMEOUT_S
from verl_shipper.policy.wishes import CHOICES, MAY_CHOOSE
from verl_shipper.schema import ALL, Key, Kind
from verl_shipper_spool.location import (
    EXPERIMENT_VARIABLE,
    PROJECT_VARIABLE,
    SOCKET_VARIABLE,
    SPOOL_VARIABLE,
    STATE_VARIABLE,
    UNNAMED,
)

# 10 GiB of node disk: a weekend of a tracker's outage for a node of eight ranks with traces.
NODE_QUOTA_BYTES = 10 * 1024**3
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

LOGGER_VARIABLE = "VERL_LOGGER"
TRACE = "actor_rollout_ref.rollout.trace"
MODEL_PATH = "actor_rollout_ref.model.path"  # where a trainer's tokenizer comes from
OWN_SECTIONS = ("trainer", "actor_rollout_ref")  # a trainer's, with many keys that are none of ours

TOP = (
    Key(
        "spool_dir",
        Kind.PATH,
        "the trainers' spool, where the socket is too",
        "who agrees on it agrees on the socket; set it where home is slow or shared in a way that you do not want",
        "/scratch/spool",
        otherwise="see [places](#places)",
        variables=(SPOOL_VARIABLE,),
    ),
    Key(
        "state_dir",
        Kind.PATH,
        "the daemon's own spool and state",
        "it needs a local disk with room for `node_quota_bytes`",
        "/var/lib/verl-shipper",
        otherwise="see [places](#places)",
        variables=(STATE_VARIABLE,),
    ),
    Key(
        "socket",
        Kind.TEXT,
        "a path, `ipc://PATH` or `tcp://HOST:PORT`; the daemon listens at the spool's own socket as well",
        "for trainers that cannot see the spool folder",
        "/run/verl-shipper/ingest.sock",
        otherwise="see [places](#places)",
        variables=(SOCKET_VARIABLE,),
    ),
    Key(
        "adopt",
        Kind.PATHS,
        "spool folders to look after, read from disk where the socket is not reached",
        "several users' or jobs' spools can share one daemon",
        "[/scratch/a/spool, /scratch/b/spool]",
        otherwise="the spool",
    ),
    Key(
        "node_quota_bytes",
        Kind.COUNT,
        "disk for what trackers have not taken yet; beyond it trainers are refused and keep their records",
        "a weekend's outage of a tracker for a node of eight ranks with traces",
        "53687091200",
        default=NODE_QUOTA_BYTES,
        unit="bytes",
        low=1,
    ),
    Key(
        "log_level",
        Kind.CHOICE,
        "what goes to stderr",
        "the daemon is silent as long as all is well",
        "INFO",
        default="WARNING",
        choices=LOG_LEVELS,
    ),
)

SAMPLING = (
    Key(
        "log_frequency",
        Kind.FREQUENCY,
        "every so many steps are delivered; a map says it per pattern of metric names, the pattern with the most "
        "letters wins. First and last step always arrive, validation metrics are exempt unless a pattern names them",
        "most of what a tracker costs is the number of rows",
        "{'*': 100, 'actor/*': 10}",
        default=1,
        unit="steps",
        low=1,
    ),
    Key(
        "log_mode",
        Kind.CHOICE,
        "what a delivered step shows of those left out since the one before: its own values, or their `mean`, `min`, "
        "`max`",
        "a spike between two delivered steps can be kept visible",
        "mean",
        default="last",
        choices=LOG_MODES,
    ),
    Key(
        "log_val_generations",
        Kind.ROWS,
        "so many samples of each validation, the same prompts every time",
        "whole validation sets are large, and only the same prompts can be compared over time",
        "20",
        default=ALL,
        unit="samples",
        low=0,
    ),
    Key(
        "include",
        Kind.PATTERNS,
        "only metrics whose names match one of these; empty for all",
        "a second tracker may want the few curves that people look at",
        "['actor/*', 'critic/score/*']",
        default=[],
        otherwise="all",
    ),
    Key(
        "exclude",
        Kind.PATTERNS,
        "no metrics whose names match one of these; stronger than `include`",
        "timings and memory of every step can be most of the volume",
        "['timing_s/*', 'perf/*']",
        default=[],
        otherwise="none",
    ),
    Key(
        "rank",
        Kind.CHOICE,
        "whose metrics are delivered: rank 0 only, `all` with the rank in the name, or one number over the ranks of "
        "this node",
        "ranks log the same or nearly the same; the tracker need not have it eight times",
        "mean",
        default=RANK_0,
        choices=RANK_MODES,
    ),
    Key(
        "rank_timeout_s",
        Kind.NUMBER,
        "a rank that is this much later than the first at the same step is left out of `mean`, `min`, `max`, `sum`",
        "a rank that died must not hold back the others",
        "120",
        default=RANK_TIMEOUT_S,
        unit="seconds",
        low=0.1,
        high=86400,
    ),
    Key(
        "traces.enabled",
        Kind.FLAG,
        "whether rollout traces are delivered",
        "not every tracker shows traces, and one copy is enough",
        "no",
        default=True,
    ),
    Key(
        "traces.rate",
        Kind.NUMBER,
        "the share of traces that is delivered, chosen by trace id: the same ones after any restart",
        "traces are the largest part of all records",
        "0.1",
        default=1.0,
        low=0,
        high=1,
    ),
    Key(
        "traces.max_samples_per_step_per_worker",
        Kind.COUNT,
        "so many samples of a step are traced per worker",
        "bounds a step whatever its batch size is",
        "8",
        otherwise="all",
        unit="samples",
        low=1,
    ),
    Key(
        "traces.max_length",
        Kind.COUNT,
        "longer texts of a trace are cut, with a mark that says so",
        "a long context can be megabytes per turn",
        "2048",
        otherwise="no limit",
        unit="characters",
        low=1,
    ),
    Key(
        "traces.include_prompt",
        Kind.FLAG,
        "whether a trace holds the prompt",
        "prompts repeat at every turn; leave them out where they are known anyway",
        "no",
        default=True,
    ),
    Key(
        "traces.token2text",
        Kind.FLAG,
        "decode token ids to text, in the daemon",
        "a reader wants words; decoding costs time that trainers need",
        "yes",
        default=False,
    ),
    Key(
        "traces.tokenizer",
        Kind.PATH,
        "folder of the tokenizer that decodes, or its name in the local Hugging Face cache",
        "must be the model's own",
        "/models/qwen2-7b",
        otherwise=f"`{MODEL_PATH}`, with `token2text`",
    ),
)

RUN_MAY_CHOOSE = Key(
    "sampling.run_may_choose",
    Kind.WISHES,
    "what a run's own configuration may decide where nothing is said here",
    "cost is the operator's business, the rest may be the user's",
    "[log_frequency]",
    default=list(MAY_CHOOSE),
    choices=CHOICES,
)

ENABLED = Key(
    "enabled",
    Kind.FLAG,
    "`no` turns the backend off and keeps its section",
    "for an hour without a tracker",
    "no",
    default=True,
)


def _trainers(path: str, kind: Kind, meaning: str, example: str, **more: Any) -> Key:
    return Key(path, kind, meaning, "as in a trainer's own configuration: one file may serve both", example, **more)


LOGGER = _trainers(
    "trainer.logger",
    Kind.TEXTS,
    "which backends; their sections hold settings then. With `shipper` in it the list is the trainer's own, and "
    "the sections decide",
    "['console', 'wandb']",
    variables=(LOGGER_VARIABLE,),
    otherwise="none",
)

TRAINER = (
    LOGGER,
    _trainers(
        "trainer.project_name",
        Kind.TEXT,
        "project of runs that name none",
        "llm_rlhf",
        variables=(PROJECT_VARIABLE,),
        otherwise=f"`{UNNAMED}`",
    ),
    _trainers(
        "trainer.experiment_name",
        Kind.TEXT,
        "experiment of runs that name none",
        "qwen2-7b-grpo",
        variables=(EXPERIMENT_VARIABLE,),
        otherwise=f"`{UNNAMED}`",
    ),
    _trainers(
        f"{TRACE}.backend",
        Kind.TEXT,
        "traces go to this backend only, unless `traces.enabled` says otherwise; `shipper` and nothing: to all",
        "mlflow",
        otherwise="all",
    ),
)

# A trainer's key → ours. `trainer.NAME.SETTING` is `backends.NAME.SETTING` for every backend NAME as well.
ALIASES = {
    "trainer.log_frequency": "sampling.log_frequency",
    "trainer.log_val_generations": "sampling.log_val_generations",
    "trainer.wandb_proxy": "backends.wandb.wandb_proxy",
    f"{TRACE}.token2text": "sampling.traces.token2text",
    f"{TRACE}.max_length": "sampling.traces.max_length",
    f"{TRACE}.include_prompt": "sampling.traces.include_prompt",
    f"{TRACE}.max_samples_per_step_per_worker": "sampling.traces.max_samples_per_step_per_worker",
}
