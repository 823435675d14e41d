"""Whatever stands in a file or behind `--set`: a configuration, or ConfigErrors of one line; never anything else."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_shipper.config import examine_config
from verl_shipper.config_keys import ALIASES, RUN_MAY_CHOOSE, SAMPLING, TOP, TRAINER
from verl_shipper.errors import ConfigError

PATHS = [key.path for key in (*TOP, RUN_MAY_CHOOSE, *TRAINER)] + [f"sampling.{key.path}" for key in SAMPLING]
PATHS += [*ALIASES, *(f"backends.file.sampling.{key.path}" for key in SAMPLING), "backends.file.dir", "backends"]
PATHS += [
    "backends.wandb.tags",
    "trainer.wandb.save_code",
    "trainer",
    "sampling",
    "sampling.traces",
    "actor_rollout_ref",
]
ODD = [
    "on",
    "no",
    "1e-3",
    "010",
    "1:30",
    "2026-01-01",
    "~",
    "???",
    "${oc.env:NOBODY_SET_THIS}",
    "${x",
    "${trainer.logger}",
]
ODD += [
    "[a, b]",
    '["console","wandb"]',
    "{a: 1}",
    "all",
    "none",
    "-1",
    "0",
    "10",
    ".nan",
    "console,file",
    "'",
    '"',
    "\x00",
]
ODD += ["\ud800", "*x", "&x 1", "!!int x", "<<", "- a", "a: b", "\t", "# c", "é…"]

FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

leaves: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(ODD[:22]), st.text(max_size=8), st.dates()
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*"ab*", "rate"]), inner, max_size=3),
    max_leaves=5,
)


def nested(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in pairs:
        *sections, name = path.split(".")
        place = found
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[name] = value
    return found


def check(text: str, overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c.yaml")
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            config, problems = examine_config(str(path), overrides, ["console"])
        except ConfigError as error:
            problems = [error]
        for problem in problems:
            assert problem.hint
            assert "\n" not in problem.line()
        if not problems:
            told = [config.backends, config.sampling, list(config.run_may_choose), config.project, config.experiment]
            assert json.loads(json.dumps(told)) == told
            assert config == examine_config(str(path), overrides, ["console"])[0]


@FEW
@given(st.lists(st.tuples(st.sampled_from(PATHS), values), max_size=5), st.booleans())
def test_any_values_at_any_keys(pairs: list[tuple[str, Any]], in_flow: bool) -> None:
    check(yaml.safe_dump(nested(pairs), default_flow_style=in_flow, allow_unicode=True), [])


@FEW
@given(st.lists(st.tuples(st.sampled_from(PATHS), st.sampled_from(ODD) | st.text(max_size=8)), max_size=4))
def test_any_overrides(pairs: list[tuple[str, str]]) -> None:
    check("", [f"{path}={text}" for path, text in pairs])


@FEW
@given(
    st.lists(st.sampled_from([*ODD, *PATHS, ":", ": ", "\n", "  ", "[", "{", "}", "]", ","]), max_size=12).map("".join)
)
def test_any_text(text: str) -> None:
    check(text, [])
