# SPDX-License-Identifier: Apache-2.0
"""A container that maps new files as fast as it can costs nobody else a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.flooding import beside, flooding
from tests.support.shortlife import ShortLife
from tests.support.waiting import until
from tests.support.watching import watching

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.root, pytest.mark.host, pytest.mark.watch, pytest.mark.slow]

_PROGRAMS = 40
_MEMORY = 150 << 20


@pytest.mark.parametrize(("rate", "workers"), [(1000, 1), (0, 2)], ids=["1000", "full-speed"])
def test_host_and_second_container_lose_nothing(directory: Path, rate: int, workers: int) -> None:
    with (
        ShortLife(directory / "items") as items,
        # What the flood has waiting would take longer than that to copy.
        watching(
            directory / "store", "--no-scan", "--pin-seconds", "4", is_measured=True
        ) as watcher,
    ):
        with flooding(directory / "flood", rate, workers) as flood:
            until(lambda: watcher.facts.get("dropped", 0) > 100, "a flood that is noticed", 60)
            host, container = beside(items, _PROGRAMS)
            assert watcher.captured(host).complete, "of the host"
            assert watcher.captured(container).complete, "of the second container"
            assert watcher.memory().pss < _MEMORY
            facts = watcher.facts
        assert facts["records_lost"] == 0, "then everything would have to be looked at"
        (lost,) = [loss for loss in facts["losses"] if "share" in loss["reason"]]
        assert lost["container"] == f"mnt:{flood.mnt}"
        assert lost["count"] > 100
        warnings = [line for line in watcher.log.splitlines() if "maps new files faster" in line]
        assert len(warnings) == 1, warnings
        assert f"mnt:{flood.mnt} " in warnings[0]
