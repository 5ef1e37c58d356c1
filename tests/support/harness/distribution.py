# SPDX-License-Identifier: Apache-2.0
"""How the tests are spread over workers: a module is one piece of work, the longest come first.

Tests that watch the whole host, or must not run beside one that does, would wait for each other.
They are one piece, whatever their modules are; the suite takes at least as long as they do, so they
are the first of all. Modules with a container that is gone are one piece, because it takes long to
make. Only workers know markers and fixtures of tests: they tell the scheduler, in a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

PLACE: Final = "buildidfs_pieces"
"""The name in a worker's input of the file with the pieces of tests and modules."""

_TURNS: Final = "tests that take turns"
_GONE: Final = "modules with a container that is gone"
_GONE_FIXTURES: Final = frozenset({"gone", "dwz_gone"})

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
        self._pieces: dict[str, str] = {}

    def schedule(self) -> None:
        """Begin, or go on with another worker; all have collected."""
        self._pieces = json.loads(self._place.read_text())
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return self._pieces.get(nodeid) or self._pieces.get(module) or module


def prepare(items: list[pytest.Item], place: Path) -> None:
    """Sort tests and write down the pieces of several modules: they come first, then slow tests.

    Within each part, tests/system comes before tests/unit, whose short modules fill the end. The
    module that disturbs others is the last of tests/system, when the turns are over.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    gone = {item.path for item in items if _GONE_FIXTURES.intersection(_fixtures(item))}

    def order(item: pytest.Item) -> tuple[bool, ...]:
        is_late = item.path.stem == _DISTURBING
        is_slow = item.path in slow and not is_late
        is_long, is_unit = item.path.stem in _LONGEST, "unit" in item.path.parts
        is_long = is_long or item.path in gone
        return not _takes_turns(item), not is_long, not is_slow, is_unit, is_late

    items.sort(key=order)
    part = place.with_name(f"{place.name}.{os.getpid()}")
    pieces = {item.nodeid.partition("::")[0]: _GONE for item in items if item.path in gone}
    pieces |= {item.nodeid: _TURNS for item in items if _takes_turns(item)}
    part.write_text(json.dumps(pieces))
    part.replace(place)


def rewrite_assertions(directories: Iterable[Path]) -> None:
    """Let pytest keep the modules below these directories as it runs them, if it has kept none.

    One process for each directory collects its tests.
    """
    missing = [each for each in directories if not any(each.glob("__pycache__/test_*-pytest-*"))]
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-n", "0"]
    every = [
        subprocess.Popen([*argv, each], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for each in missing
    ]
    for process in every:
        process.wait()  # the workers report what cannot be collected


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


def _takes_turns(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("watch", "unwatched"))


def workers() -> int:
    """Two more than there are processors: many tests wait for others' answers, or for the end of a
    time limit.
    """
    return len(os.sched_getaffinity(0)) + 2
