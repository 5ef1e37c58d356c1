# SPDX-License-Identifier: Apache-2.0
"""What runs on a store, and how it does: what ``buildidfs status`` shows."""

from __future__ import annotations

import os

import msgspec

from buildidfs.daemon import up
from buildidfs.daemon.child import Part
from buildidfs.store import Store, StoreStats, presence
from buildidfs.store.presence import Present


class Running(msgspec.Struct, frozen=True):
    """One long-running process, or one that should be there.

    ``part`` is how its supervisor sees it, None if it has none; ``present`` is what it says itself,
    None if it does not say anything.
    """

    role: str
    part: Part | None
    present: Present | None

    @property
    def is_well(self) -> bool:
        """Whether it does what it is for."""
        return self.part is None or self.part.state == "running"


class Status(msgspec.Struct, frozen=True):
    """A store and its processes, the supervisor first, then those that it runs."""

    store: StoreStats
    processes: list[Running]

    @property
    def is_well(self) -> bool:
        """Whether something runs, and nothing is missing that should."""
        return bool(self.processes) and all(each.is_well for each in self.processes)


def take(store_path: str | bytes | os.PathLike[str]) -> Status:
    """Look now; takes some milliseconds. Raises `StoreMissing`, `StoreVersionError`."""
    with Store.open(store_path, read_only=True) as store:
        stats = store.stats()
    alive = presence.present(store_path)
    found = []
    for supervisor in [each for each in alive if each.role == up.ROLE]:
        found.append(Running(up.ROLE, None, supervisor))
        for part in up.parts(supervisor):
            own = next((x for x in alive if x.pid == part.pid and x.role == part.name), None)
            found.append(Running(part.name, part, own))
    shown = [each.present for each in found]
    found += [Running(each.role, None, each) for each in alive if each not in shown]
    return Status(stats, found)
