"""Which names are wanted, and every how many steps."""

from __future__ import annotations

import pytest

from support.samples import ODD_BODIES
from verl_shipper.policy.patterns import EVERY_MAX, NAMES_MAX, UNWANTED, Names, names_of
from verl_shipper.policy.sampling import Sampling
from verl_shipper.values import flatten_metrics


def _names(**values: object) -> Names:
    return Names(Sampling.of(values))


@pytest.mark.parametrize(
    ("include", "exclude", "name", "wanted"),
    [
        ([], [], "actor/loss", True),
        (["actor/*"], [], "actor/loss", True),
        (["actor/*"], [], "critic/loss", False),
        (["actor/*", "critic/*"], [], "critic/loss", True),
        (["actor/*"], ["*/grad"], "actor/grad", False),
        ([], ["actor/*"], "actor/a/b/c", False),  # a star crosses slashes
        ([], ["Actor/*"], "actor/a", True),  # letters as they are
        ([], ["actor"], "actor/a", True),  # whole names
        (["val"], [], "val/x", False),  # validation's names must be included, too
        ([], ["[z-a]", "[", "[!]", "\\"], "a", True),  # patterns that match nothing
        (["a?"], [], "a\n", True),
    ],
)
def test_a_name_is_wanted_when_it_is_included_and_not_excluded(
    include: list[str], exclude: list[str], name: str, wanted: bool
) -> None:
    assert (_names(include=include, exclude=exclude).every(name) != UNWANTED) is wanted


@pytest.mark.parametrize(
    ("frequency", "name", "every"),
    [
        (10, "actor/loss", 10),
        ({"actor/*": 5, "*": 10}, "actor/loss", 5),
        ({"*": 10, "actor/*": 5}, "critic/loss", 10),
        ({"*loss": 7, "act*": 3}, "actor/loss", 7),  # the most letters
        ({"actor/*": 5, "*/loss": 6, "*ctor/los*": 2}, "actor/loss", 2),
        ({"a*": 5, "*b": 6}, "ab", 5),  # the first of equals
        ({"actor/*": 5}, "critic/loss", 1),
        ({"*": 1}, "critic/loss", 1),
        ({"*": 0}, "critic/loss", 1),
        ({"*": 10**30}, "critic/loss", EVERY_MAX),
        (10, "val-core/math/acc", 1),
        ({"*acc": 10, "[v]al*": 5, "?al*": 4}, "val-core/math/acc", 1),
        ({"val*": 3, "*": 10}, "val-core/math/acc", 3),
        (10, "eval_loss", 1),
        (10, "test/score", 1),
        (10, "validation.loss", 1),
        (10, "value/loss", 10),
        (10, "testament", 10),
        (10, "critic/val/x", 10),
    ],
)
def test_the_pattern_with_the_most_letters_says_every_how_many_steps(frequency: object, name: str, every: int) -> None:
    assert _names(log_frequency=frequency).every(name) == every


def test_all_that_the_names_of_a_body_are_is_told() -> None:
    names = _names(log_frequency={"a*": 5, "b*": 7}, exclude=["c"])

    assert names.groups({"a": 1, "b": {"x": 1, "y": {"z": 2}}, "c": 0, "d": 3}) == {5, 7, UNWANTED, 1}
    assert names.groups({}) == frozenset()


def test_the_same_set_of_names_is_judged_once() -> None:
    names = _names(log_frequency={"a": 5})

    assert [names.groups({"a": value, "b": 0}) for value in range(3)] == [{5, 1}] * 3
    assert len(names._shapes) == 1


def test_keys_that_are_equal_but_have_different_names_are_not_mixed_up() -> None:
    names = _names(log_frequency={"1": 5, "True": 7})

    assert [set(names.groups(body)) for body in ({1: 0}, {True: 0}, {1: 0})] == [{5}, {7}, {5}]


def test_names_that_never_repeat_do_not_fill_the_memory() -> None:
    names = _names(log_frequency={"a*": 5})
    for number in range(NAMES_MAX + 100):
        names.groups({f"a{number}": 1, f"b{number}": 2})

    assert len(names._known) <= NAMES_MAX
    assert sum(len(shape) for shape in names._shapes) <= NAMES_MAX


@pytest.mark.parametrize("body", ODD_BODIES)
def test_names_are_those_of_the_flat_metrics(body: dict[object, object]) -> None:
    names = list(names_of(body))

    assert flatten_metrics(body).numbers.keys() <= set(names)
    assert _names(log_frequency=3, exclude=["zz"]).groups(body) <= {1, 3}


@pytest.mark.parametrize(
    ("values", "trivial"),
    [({}, True), ({"log_frequency": 1}, True), ({"log_frequency": 2}, False), ({"include": ["*"]}, False)],
)
def test_sampling_that_keeps_all_names_at_all_steps_is_trivial(values: dict[str, object], trivial: bool) -> None:
    assert _names(**values).is_trivial is trivial
