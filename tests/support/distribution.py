# SPDX-License-Identifier: Apache-2.0
"""How the tests are spread over workers: a module is one piece of work, the longest come first.

Tests that watch the whole host must not run beside each other, so they are one piece, whatever
their modules are; the suite takes at least as long as they do, so they are the first of all.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadGroupScheduling

if TYPE_CHECKING:
    from collections.abc import Iterable

WATCHING = "watching"
"""The name of the piece of work that watches the host."""


class ByModule(LoadGroupScheduling):
    """Tests without a group of their own stay with their module, in the order of collection."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        group: str = super()._split_scope(nodeid)
        return nodeid.partition("::")[0] if group == nodeid else group


def order(items: list[pytest.Item]) -> None:
    """Sort tests: those that watch, then modules with slow ones, then the rest; modules stay whole.

    Within each, tests/system comes before tests/unit, whose short modules fill the end.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (not item.get_closest_marker("watch"), item.path not in slow))


def group(items: Iterable[pytest.Item]) -> None:
    """Keep the tests that watch the host in one piece."""
    for item in items:
        if item.get_closest_marker("watch"):
            item.add_marker(pytest.mark.xdist_group(WATCHING))


def workers() -> int:
    """One more than there are processors: some tests wait more than they work."""
    return len(os.sched_getaffinity(0)) + 1
