"""Names that nobody knows, and the nearest ones that somebody does. Pure functions.

    backends.wandb.log_frequency   →  backends.wandb.sampling.log_frequency   (right name, wrong place)
    sampling.log_freqency          →  sampling.log_frequency                  (right place, wrong name)

A trainer's own sections hold a hundred keys that are none of ours: there only a name that can hardly be meant otherwise
is told (`near_miss`), and `save_freq` is none.

Must not know: values.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import SequenceMatcher, get_close_matches

from verl_shipper.config_keys import OWN_SECTIONS

NEAR = 0.6  # of difflib's ratio, in the right section
FAR = 0.75  # the same, anywhere
HARDLY_OTHERWISE = 0.85


def nearest(dotted: str, known: Collection[str]) -> str | None:
    """The dotted name that was probably meant."""
    section, _, name = dotted.rpartition(".")
    siblings = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == section}
    near = get_close_matches(name, siblings, 1, FAR)
    if near:
        return siblings[near[0]]
    namesakes = [each for each in known if each != dotted and each.rpartition(".")[2] == name]
    if namesakes:
        ours = [each for each in namesakes if not each.startswith(OWN_SECTIONS)] or namesakes
        return max(sorted(ours), key=lambda each: (_shared(each, dotted), _alike(each, dotted)))
    near = get_close_matches(name, siblings, 1, NEAR)
    if near:
        return siblings[near[0]]
    anywhere = {each.rpartition(".")[2]: each for each in sorted(known, reverse=True)}
    near = get_close_matches(name, anywhere, 1, FAR)
    return anywhere[near[0]] if near else None


def near_miss(name: str, known: Collection[str]) -> str | None:
    """The one of `known` that `name` can hardly be meant otherwise than as, if it is not that itself."""
    plain = _plain(name)
    best = max(known, key=lambda each: _alike(_plain(each), plain), default=None)
    return best if best is not None and _alike(_plain(best), plain) >= HARDLY_OTHERWISE and best != name else None


def _plain(name: str) -> str:
    """`logFreq`, `log-freq` and `log_frequency` are one name."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", name).lower()
    return re.sub(r"freq$", "frequency", words)


def _shared(one: str, other: str) -> int:
    """How many sections two dotted names begin with together."""
    count = 0
    for left, right in zip(one.split("."), other.split("."), strict=False):
        if left != right:
            break
        count += 1
    return count


def _alike(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
