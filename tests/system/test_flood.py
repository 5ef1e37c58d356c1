# SPDX-License-Identifier: Apache-2.0
"""A container that maps new files as fast as it can costs nobody else a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.containers.flooding import CONTAINER, beside, flooding
from tests.support.containers.imitating import USER, container_and_imitation, entering
from tests.support.containers.shortlife import ShortLife
from tests.support.harness.waiting import until
from tests.support.harness.watching import watching

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.harness.watching import Watcher

pytestmark = [pytest.mark.root, pytest.mark.host, pytest.mark.slow]

_PROGRAMS = 10
_MEMORY = 150 << 20
# More than the share of a container in the two seconds at most that these files take.
_FIRST = 3000
_WARNING = "maps new files faster"
# What the flood has waiting would take longer than that to copy.
_PIN_S = 4
_PATIENCE_S = 30.0


@pytest.mark.parametrize(
    ("rate", "workers", "longer"), [(1500, 1, _PIN_S), (0, 2, 0)], ids=["1500", "full-speed"]
)
def test_host_and_second_container_lose_nothing(
    directory: Path, rate: int, workers: int, longer: float
) -> None:
    """The slower flood goes on for as long as files may wait, unless all are captured before.

    So a watch that takes the files of a flood first loses the others. The faster flood would take
    the processors from the watch; it ends with the programs.
    """
    with (
        ShortLife(directory / "items") as items,
        watching(
            directory / "store", "--no-scan", "--pin-seconds", str(_PIN_S), is_measured=True
        ) as watcher,
    ):
        with flooding(directory / "flood", rate, workers, _FIRST) as flood:
            host, container = beside(items, _PROGRAMS)
            watcher.captured(host, longer)
            watcher.captured(container, longer)
            assert watcher.memory().pss < _MEMORY
        # If others use the processors, the watch comes to them only now, behind files of the flood.
        assert watcher.captured(host, _PATIENCE_S).complete, "of the host"
        assert watcher.captured(container, _PATIENCE_S).complete, "of the second container"
        until(lambda: _dropped(watcher), "the loss of the flood")
        assert watcher.facts["records_lost"] == 0, "then everything would have to be looked at"
        lost = _dropped(watcher)
        assert lost["container"] == f"mnt:{flood.mnt}"
        assert lost["count"] > 100
        warnings = [line for line in watcher.log.splitlines() if _WARNING in line]
        assert len(warnings) == 1, warnings
        assert f"mnt:{flood.mnt} " in warnings[0]


@pytest.mark.watch
def test_imitation_of_a_container_takes_nothing_from_it(directory: Path) -> None:
    """A user has given a control group the ID of the container, and floods from it."""
    with (
        ShortLife(directory / "items") as items,
        watching(directory / "store", "--no-scan") as watcher,
        container_and_imitation() as (container, imitation),
    ):
        label = f"docker:{container.name.removeprefix('docker-')[:12]}"
        with flooding(directory / "flood", 1500, 1, _FIRST, entering(imitation)):
            victim = items.run("host", 25, 1, 0.05, (*entering(container), *CONTAINER))
        assert watcher.captured(victim, _PATIENCE_S).complete, "25 executables, 25 libraries"
        until(lambda: _dropped(watcher), "the loss of the flood")
        assert _dropped(watcher)["container"] == f"{label} (user {USER})"
        assert label not in {each["container"] for each in watcher.facts["losses"]}
        warnings = [line for line in watcher.log.splitlines() if _WARNING in line]
        assert len(warnings) == 1, warnings
        assert f"{label} (user {USER}) maps" in warnings[0]


def _dropped(watcher: Watcher) -> dict[str, Any]:
    """The loss of files that were more than a share; empty if there is none."""
    losses = watcher.facts["losses"]
    (lost,) = [loss for loss in losses if "share" in loss["reason"]] or [{}]
    return lost
