"""The configurations that docs/choosing-a-tracker.md recommends name only what exists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl_shipper.backends import BUILT_IN, load_backend
from verl_shipper.policy.sampling import Sampling, TraceSampling

DOCUMENT = Path(__file__).parents[2] / "docs" / "choosing-a-tracker.md"
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def samplings(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every `sampling` section of a configuration."""
    for section in (config, *config.get("backends", {}).values()):
        if "sampling" in section:
            yield section["sampling"]


def test_there_is_one_example_for_each_choice() -> None:
    assert len(EXAMPLES) == 5


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_names_known_trackers_and_settings(example: str) -> None:
    config = yaml.safe_load(example)

    assert set(config) <= {"trainer", "sampling", "backends"}
    assert set(config["trainer"]["logger"]) <= set(BUILT_IN)
    for name, settings in config.get("backends", {}).items():
        assert name in config["trainer"]["logger"]
        assert set(settings) - {"sampling"} <= set(load_backend(name).settings_known or ())


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_names_known_knobs_of_sampling(example: str) -> None:
    for section in samplings(yaml.safe_load(example)):
        assert set(section) <= set(Sampling.__slots__)
        assert set(section.get("traces", {})) <= set(TraceSampling.__slots__)
        assert Sampling.of(section) != Sampling() or section == {"log_frequency": 1}


def test_knobs_that_the_text_names_exist() -> None:
    named = re.findall(r"`sampling\.([\w.]+)`", DOCUMENT.read_text(encoding="utf-8"))

    assert len(named) > 5
    for name in named:
        head, _, tail = name.partition(".")
        assert head in Sampling.__slots__
        assert not tail or tail in TraceSampling.__slots__
