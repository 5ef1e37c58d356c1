# SPDX-License-Identifier: Apache-2.0
"""How the tests are spread over workers: a module is one piece of work, the longest come first.

Tests that watch the whole host, or must not run beside one that does, would wait for each other.
They are one piece, whatever their modules are; the suite takes at least as long as they do, so they
are the first of all. Only workers know the markers of tests: they tell the scheduler, in a file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    import pytest

PLACE: Final = "buildidfs_turns"
"""The name in a worker's input of the file with the IDs of those tests."""

_TURNS: Final = "tests that take turns"

# Modules that take half a minute or more: what is left at the end must be short.
_LONGEST: Final = frozenset({"test_watch"})

# While its filesystems are silent, all that looks at each process of the host waits for them.
_DISTURBING: Final = "test_silent_servers"


class ByModule(LoadScopeScheduling):
    """Tests stay with their module, in the order of collection."""

    def __init__(self, config: pytest.Config, log: object, place: Path) -> None:
        """``place`` is the file that a worker has written when it has collected."""
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._place = place
        self._turns: frozenset[str] = frozenset()

    def schedule(self) -> None:
        """Begin, or go on with another worker; all have collected."""
        self._turns = frozenset(json.loads(self._place.read_text()))
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return _TURNS if nodeid in self._turns else nodeid.partition("::")[0]


def prepare(items: list[pytest.Item], place: Path) -> None:
    """Sort tests and write down those that take turns: they come first, then the slow ones.

    Within each part, tests/system comes before tests/unit, whose short modules fill the end. The
    module that disturbs others is the last of tests/system, when the turns are over.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def order(item: pytest.Item) -> tuple[bool, ...]:
        is_late = item.path.stem == _DISTURBING
        is_slow = item.path in slow and not is_late
        is_long, is_unit = item.path.stem in _LONGEST, "unit" in item.path.parts
        return not _takes_turns(item), not is_long, not is_slow, is_unit, is_late

    items.sort(key=order)
    part = place.with_name(f"{place.name}.{os.getpid()}")
    part.write_text(json.dumps([item.nodeid for item in items if _takes_turns(item)]))
    part.replace(place)


def _takes_turns(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("watch", "unwatched"))


def workers() -> int:
    """Two more than there are processors: many tests wait for others' answers, or for the end of a
    time limit.
    """
    return len(os.sched_getaffinity(0)) + 2
