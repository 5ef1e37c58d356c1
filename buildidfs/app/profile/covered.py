# SPDX-License-Identifier: Apache-2.0
"""What coverage can be asked of: files by what they begin with, and what runs now."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from buildidfs.app import cores
from buildidfs.app.profile import reading
from buildidfs.app.profile.coverage import Coverage, Holdings

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.config import Settings
    from buildidfs.model import BuildId
    from buildidfs.store import Store

    Progress = Callable[[int, str], None]

_REPORTED: Final = 64  # files between two reports of progress
_NAMELESS: Final = "the file has no build ID"


def of_file(store: Store, path: bytes, *, progress: Progress | None = None) -> Coverage:
    """The coverage of a profile or a core file. Raises `UsageError` for a file that is neither."""
    if cores.is_core(path):
        return cores.coverage(store, path)
    return reading.coverage(store, path, progress=progress)


def of_processes(store: Store, settings: Settings, *, progress: Progress | None = None) -> Coverage:
    """The coverage of all files that running processes have mapped executable, each of each."""
    from buildidfs.capture.base import Unreadable
    from buildidfs.capture.process.mapped_by import Mapper, Mappers

    rows: Counter[tuple[str, bytes, BuildId | None, str]] = Counter()
    refused: Counter[str] = Counter()
    found = Mappers(
        lambda build_id, mapping: True,
        nameless=True,
        container_namespaces=settings.container.namespaces,
    )
    for number, each in enumerate(found):
        if isinstance(each, Unreadable):
            refused[each.reason] += 1
            continue
        if isinstance(each, Mapper):
            rows[each.container, each.path, each.build_id, ""] += 1
        else:
            rows[each.container, each.path, None, _NAMELESS] += 1
        if progress is not None and not number % _REPORTED:
            progress(number, each.path.decode("utf-8", "surrogateescape"))
    holdings = Holdings(store)
    coverage = Coverage(
        [holdings.row(*key[:3], count, key[3]) for key, count in rows.items()], "mapped files"
    )
    if refused:
        reasons = ", ".join(f"{count}: {why}" for why, count in refused.most_common())
        coverage.incomplete = f"some processes could not be looked at ({reasons})"
    return coverage
