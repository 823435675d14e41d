"""What a run asks for, and how much of it it gets."""

from __future__ import annotations

from typing import Any

import pytest

from support.samples import ODD_BODIES, ODD_VALUES
from verl_shipper.policy.sampling import Sampling
from verl_shipper.policy.wishes import CHOICES, LOGGER, MAY_CHOOSE, effective, is_wanted, wishes_of

CONFIG = {
    "trainer": {"log_frequency": 5, "log_val_generations": 10, "logger": ["console", "wandb"], "wandb_proxy": "http://p"},
    "actor_rollout_ref": {
        "model": {"path": "/models/m"},
        "rollout": {
            "trace": {
                "backend": "mlflow",
                "token2text": True,
                "max_length": 100,
                "include_prompt": False,
                "max_samples_per_step_per_worker": 3,
            }
        },
    },
}  # fmt: skip
TRACES = {
    "backend": "mlflow",
    "token2text": True,
    "include_prompt": False,
    "max_length": 100,
    "max_samples_per_step_per_worker": 3,
    "tokenizer": "/models/m",
}
BACKENDS = ("console", "mlflow", "wandb")


def test_wishes_stand_where_verl_has_them() -> None:
    assert wishes_of(CONFIG) == {
        "log_frequency": 5,
        "log_val_generations": 10,
        "traces": TRACES,
        "logger": ["console", "wandb"],
        "wandb_proxy": "http://p",
    }


def test_a_tokenizer_of_its_own_goes_before_the_models() -> None:
    model = {"path": "/models/m", "tokenizer_path": "/models/t"}
    assert wishes_of({"actor_rollout_ref": {"model": model}}) == {"traces": {"tokenizer": "/models/t"}}


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"log_val_generations": 0}, {}),
        ({"log_val_generations": -1}, {}),
        ({"log_val_generations": True}, {}),
        ({"log_val_generations": "10"}, {}),
        ({"log_frequency": 0}, {}),
        ({"log_frequency": 2.5}, {}),
        ({"log_frequency": {"a*": 3, "b": 0, 5: 7, "c": "x"}}, {"log_frequency": {"a*": 3}}),
        ({"log_frequency": {}}, {}),
        ({"logger": "console, wandb"}, {"logger": ["console", "wandb"]}),
        ({"logger": "wandb"}, {"logger": ["wandb"]}),
        ({"logger": []}, {}),
        ({"logger": [3, None]}, {}),
        ({"logger": {"wandb": 1}}, {}),
        ({"wandb_proxy": ""}, {}),
        ({"unknown": 1}, {}),
    ],
)
def test_a_wish_that_makes_no_sense_is_none(trainer: dict[str, Any], expected: dict[str, Any]) -> None:
    assert wishes_of({"trainer": trainer}) == expected


@pytest.mark.parametrize("value", [*ODD_VALUES, *ODD_BODIES])
def test_a_configuration_may_be_anything(value: Any) -> None:
    places = [
        value,
        {"trainer": value, "actor_rollout_ref": value},
        {"trainer": dict.fromkeys(CHOICES, value), "actor_rollout_ref": {"model": value, "rollout": value}},
        {"actor_rollout_ref": {"model": {"path": value}, "rollout": {"trace": dict.fromkeys(TRACES, value)}}},
    ]
    for config in places:
        wishes = wishes_of(config)
        Sampling.of(effective({}, wishes, CHOICES, "mlflow", BACKENDS))
        is_wanted(wishes, CHOICES, "mlflow")


def test_what_an_operator_set_stands_and_a_run_fills_in_the_rest() -> None:
    given = {"log_frequency": 100, "traces": {"max_length": 7}, "rank": "all"}

    values = effective(given, wishes_of(CONFIG), MAY_CHOOSE, "mlflow", BACKENDS)

    assert values["log_frequency"] == 100
    assert values["log_val_generations"] == 10
    assert values["rank"] == "all"
    assert values["traces"]["max_length"] == 7
    assert values["traces"]["token2text"] is True


@pytest.mark.parametrize("name", MAY_CHOOSE)
def test_a_run_chooses_only_what_it_may(name: str) -> None:
    others = [other for other in MAY_CHOOSE if other != name]

    values = effective({}, wishes_of(CONFIG), others, "mlflow", BACKENDS)

    assert not values.get(name)


@pytest.mark.parametrize(
    ("backend", "enabled"),
    [("mlflow", True), ("wandb", False), ("console", False)],
)
def test_traces_go_to_the_backend_that_the_run_names(backend: str, enabled: bool) -> None:
    values = effective({}, wishes_of(CONFIG), MAY_CHOOSE, backend, BACKENDS)

    assert Sampling.of(values).traces.enabled is enabled


def test_a_backend_of_traces_that_nobody_has_here_is_no_choice() -> None:
    config = {"actor_rollout_ref": {"rollout": {"trace": {"backend": "weave"}}}}

    assert Sampling.of(effective({}, wishes_of(config), MAY_CHOOSE, "mlflow", BACKENDS)).traces.enabled


@pytest.mark.parametrize(
    ("logger", "may_choose", "wanted"),
    [
        (["wandb"], (LOGGER,), True),
        (["console"], (LOGGER,), False),
        (["console", "shipper"], (LOGGER,), True),
        (["console"], MAY_CHOOSE, True),
        (None, (LOGGER,), True),
    ],
)
def test_a_run_wants_a_backend_that_it_names_or_all(
    logger: list[str] | None, may_choose: tuple[str, ...], wanted: bool
) -> None:
    assert is_wanted(wishes_of({"trainer": {"logger": logger}}), may_choose, "wandb") is wanted


def test_without_a_configuration_there_are_no_wishes() -> None:
    assert wishes_of(None) == {}
    assert Sampling.of(effective({}, {}, CHOICES, "mlflow", BACKENDS)) == Sampling()
