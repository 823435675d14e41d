"""The fault matrix of trackers reached through their own SDK: nothing missing, nothing twice, in every cell."""

from __future__ import annotations

import pytest

from support.four_trackers import FourTrackers
from support.matrix import FAULTS, TRACKERS, note, play
from support.seeds import seeded
from support.site import Site


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", TRACKERS)
def test_every_record_is_at_the_server_once(site: Site, name: str, fault: str) -> None:
    with FourTrackers(site, names=(name,)) as trackers:
        missing, doubled = play(trackers, name, fault, seeded(f"matrix {name} {fault}"))
    note(name, fault, missing, doubled)
    assert (missing, doubled) == (0, 0)
