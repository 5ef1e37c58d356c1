# SPDX-License-Identifier: Apache-2.0
"""``<id>/*.dwp``: the package of a binary's split DWARF, by the names debuggers look for.

They take the name of the file that has the skeleton units, with ``.dwp`` behind it; gdb takes that
of the binary, in the directory of the debug file. So it is there by all names that the binary was
seen under, of which only those of files in the same directory are listed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from buildidfs import names
from buildidfs.model import BuildId, Kind
from buildidfs.store import is_withheld
from buildidfs.view import nodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.store import OriginRecord, Store

ENTRIES: Final = tuple(name + names.DWP_SUFFIX for name in (b"elf", b"debug"))
"""The names that are listed."""

_SPELLINGS: Final = frozenset(
    name + names.DWP_SUFFIX
    for name, kind in names.KIND_OF.items()
    if kind in (Kind.EXECUTABLE, Kind.DEBUGINFO)
)


class Packages:
    """Finds the packages of build IDs."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def lookup(self, ordinal: int, name: bytes) -> int | None:
        """The ordinal whose debuginfo is the package of that name of a build ID."""
        package = self._package(ordinal)
        if package is None:
            return None
        if name in _SPELLINGS or name in _of_paths(self._store.origins(ordinal)):
            return package
        return None

    def is_public(self, ordinal: int, name: bytes) -> bool:
        """Whether everybody may know of that name: if it comes from a path, of a public one."""
        if name in _SPELLINGS:
            return True
        records = self._store.origins(ordinal)
        return name in _of_paths(each for each in records if each.origin.is_public)

    def spellings(
        self, ordinal: int, origins: Iterable[OriginRecord]
    ) -> Iterator[tuple[int, bytes, bool]]:
        """(directory, name, whether it may have led elsewhere) for a build ID seen at these places.

        Those of its package, or if it is a package itself, those in its owner's directory.
        """
        build_id = self._store.build_id(ordinal)
        owner = None if build_id is None else names.package_owner(build_id)
        if owner is not None:
            found = self._store.ordinal(owner)
            if found is None:
                return
            ordinal, origins = found, self._store.origins(found)
        elif self._package(ordinal) is None:
            return
        directory = nodes.of_id(ordinal)
        for name in (*_SPELLINGS, *_of_paths(origins)):
            yield directory, name, True

    def _package(self, ordinal: int) -> int | None:
        build_id = self._store.build_id(ordinal)
        kept_under = None if build_id is None else names.package_id(BuildId(build_id))
        found = None if kept_under is None else self._store.ordinal(kept_under)
        package = None if found is None else self._store.artifact(found, Kind.DEBUGINFO)
        if package is None:
            return None
        executable = self._store.artifact(ordinal, Kind.EXECUTABLE)
        return None if is_withheld(package, executable) else found


def _of_paths(origins: Iterable[OriginRecord]) -> dict[bytes, None]:
    """The names that go with those a binary was seen under."""
    return dict.fromkeys(
        record.origin.path.rpartition(b"/")[2] + names.DWP_SUFFIX for record in origins
    )
