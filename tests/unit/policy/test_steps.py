"""Which steps are kept when one in so many is wanted."""

from __future__ import annotations

import pytest

from verl_shipper.policy.steps import WINDOWS_MAX, Steps, Verdict

KEEP, DROP, WAIT = Verdict.KEEP, Verdict.DROP, Verdict.WAIT


def _seen(*steps: int, every: int = 10, patient: bool = False) -> Steps:
    made = Steps([every], patient=patient)
    for step in steps:
        made.see(step)
    return made


def _kept(steps: list[int], every: int) -> list[int]:
    """What is kept of steps that come in order and end, each judged as soon as it can be."""
    made, kept = Steps([every]), []
    for step, behind in zip(steps, [*steps[1:], None], strict=True):
        made.see(step)
        verdict = made.verdict(every, step)
        if verdict is WAIT:
            made.see(behind) if behind is not None else made.close()
            verdict = made.verdict(every, step)
        assert verdict is not WAIT
        kept += [step] if verdict is KEEP else []
    return kept


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [
        (range(96), 10, [*range(0, 100, 10), 95]),
        (range(1, 96), 10, [1, *range(10, 100, 10), 95]),
        (range(1, 31), 10, [1, 10, 20, 30]),
        (range(3, 8), 100, [3, 7]),
        ([5], 10, [5]),
        (range(1, 60, 4), 10, [1, 9, 17, 29, 37, 49, 57]),
        ([2, 4, 27, 1000, 1001], 10, [2, 4, 27, 1000, 1001]),
        (range(-25, 6), 10, [-25, -20, -10, 0, 5]),
        ([2**64 - 3, 2**64 - 2, 2**64 - 1], 10, [2**64 - 3, 2**64 - 1]),
    ],
)
def test_of_each_window_the_last_step_is_kept_and_the_first_of_all(
    steps: range | list[int], every: int, expected: list[int]
) -> None:
    assert _kept(list(steps), every) == expected


@pytest.mark.parametrize(
    ("seen", "asked", "patient", "expected"),
    [
        ([1, 2], 1, False, KEEP),
        ([1], 1, False, KEEP),
        ([1], 1, True, WAIT),
        ([1, 2], 2, False, WAIT),
        ([1, 2, 3], 2, False, DROP),
        ([1, 10], 10, False, KEEP),
        ([1, 10], 10, True, WAIT),
        ([1, 10, 11], 10, True, KEEP),
        ([1, 7, 12], 7, False, KEEP),
        ([1, 7, 12], 5, False, DROP),  # out of order, in a window whose last step is another
        ([1, 7, 12], 10, False, KEEP),  # a multiple that comes late
        ([1, 7, 12, 11], 12, False, WAIT),
    ],
)
def test_a_verdict_follows_from_the_steps_so_far(seen: list[int], asked: int, patient: bool, expected: Verdict) -> None:
    assert _seen(*seen, patient=patient).verdict(10, asked) is expected


def test_the_newest_step_is_kept_once_nothing_more_comes() -> None:
    made = _seen(1, 97)

    made.close()

    assert made.verdict(10, 97) is KEEP


def test_a_step_behind_a_silent_end_is_judged_like_any_other() -> None:
    made = _seen(1, 97)
    made.close()

    made.see(98)

    assert made.verdict(10, 98) is WAIT
    assert made.verdict(10, 97) is KEEP  # its other half was let go
    made.close()
    assert made.verdict(10, 98) is KEEP


def test_seeing_a_step_again_changes_nothing() -> None:
    made = _seen(1, 5, 14)
    before = made.state()

    for step in (14, 5, 1, 14):
        made.see(step)

    assert made.state() == before


def test_only_some_windows_are_remembered() -> None:
    made = _seen(*range(1, 10_000, 7))

    assert len(made.state()["last"]) == WINDOWS_MAX


def test_a_later_process_goes_on_from_the_state() -> None:
    made = _seen(3, 9, 12)
    other = Steps([10])

    other.restore(made.state())

    assert [other.verdict(10, step) for step in (3, 9, 8, 12)] == [KEEP, KEEP, DROP, WAIT]


def test_a_state_of_other_intervals_does_no_harm() -> None:
    other = Steps([4])

    other.restore(_seen(3, 9, 12).state())

    assert other.verdict(4, 12) is KEEP
    assert other.verdict(4, 9) is DROP
