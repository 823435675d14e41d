"""The configurations that docs/choosing-a-tracker.md recommends are accepted as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from verl_shipper.config import check_backends, load_config
from verl_shipper.policy.sampling import Sampling, TraceSampling

DOCUMENT = Path(__file__).parents[2] / "docs" / "choosing-a-tracker.md"
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_there_is_one_example_for_each_choice() -> None:
    assert len(EXAMPLES) == 5


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_accepted_and_means_the_trackers_it_names(example: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(example, encoding="utf-8")

    config = load_config(str(path))

    check_backends(config)
    assert list(config.backends) == yaml.safe_load(example)["trainer"]["logger"]


def test_knobs_that_the_text_names_exist() -> None:
    named = re.findall(r"`sampling\.([\w.]+)`", DOCUMENT.read_text(encoding="utf-8"))

    assert len(named) > 5
    for name in named:
        head, _, tail = name.partition(".")
        assert head in Sampling.__slots__
        assert not tail or tail in TraceSampling.__slots__
