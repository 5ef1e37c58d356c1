# SPDX-License-Identifier: Apache-2.0
"""Show how much of a profile, a core file or the running processes the store can name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeGuard

import msgspec

from buildidfs.app.remedies import (
    NO_BUILD_ID,
    NO_EXECUTABLE,
    NO_KALLSYMS,
    NO_SYMBOLS,
    NOT_CAPTURED,
    NOT_SERVED,
    SHARED,
    STRIPPED,
)
from buildidfs.model import BuildId, Kind, Quality

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.model import Artifact
    from buildidfs.store import Store
    from buildidfs.view import Viewer


_KALLSYMS: Final = b"[kernel.kallsyms]"


class Row(msgspec.Struct, frozen=True):
    """One binary in one container, and what the store has of it.

    ``container`` is its label, empty for the host and if it is not known; ``path`` as its users saw
    it, or a name in brackets. ``weight`` is what it counts for: samples, mappings, frames.
    ``executable`` and ``debuginfo`` say whether the store has them; ``symbols`` is the best table
    of symbols in either (`Quality.DEBUGINFO` where there is DWARF). ``why`` says in words what is
    missing, and is empty where nothing is but perhaps DWARF.
    """

    container: str
    path: bytes
    build_id: BuildId | None
    weight: int
    executable: bool = False
    symbols: Quality = Quality.NONE
    debuginfo: bool = False
    why: str = ""


class Coverage(msgspec.Struct):
    """Rows, whatever their order, and what their weight counts ("samples").

    ``notes`` is what a reader should know of how this was found out, one line each; ``incomplete``
    in words what could not be read of the input, or empty.
    """

    rows: list[Row]
    unit: str
    notes: list[str] = msgspec.field(default_factory=list)
    incomplete: str = ""

    @property
    def weight(self) -> int:
        """The weight of all rows."""
        return sum(row.weight for row in self.rows)

    def executable(self) -> float:
        """Return the share of the weight, 0 to 1, whose executable can be read."""
        return self._share(row for row in self.rows if row.executable)

    def dynamic_symbols(self) -> float:
        """Return the share of the weight, 0 to 1, with dynamic symbols at least."""
        return self._share(row for row in self.rows if row.symbols >= Quality.DYNSYM)

    def symbols(self) -> float:
        """Return the share of the weight, 0 to 1, with a full table of symbols, or DWARF."""
        return self._share(row for row in self.rows if row.symbols >= Quality.SYMTAB)

    def debuginfo(self) -> float:
        """Return the share of the weight, 0 to 1, with DWARF."""
        return self._share(row for row in self.rows if row.debuginfo)

    def _share(self, rows: Iterable[Row]) -> float:
        """Return 1 for no weight at all: nothing is missing."""
        whole = self.weight
        return sum(row.weight for row in rows) / whole if whole else 1.0

    def worst_first(self) -> list[Row]:
        """Return the rows: missing files first, the heaviest of them first."""
        return sorted(
            self.rows,
            key=lambda row: (
                row.symbols >= Quality.SYMTAB, -row.weight, row.container, row.path,
                row.build_id or b"",
            ),
        )  # fmt: skip


class Holdings:
    """Looks up the files that a store holds for build IDs, each once.

    For a ``viewer`` it finds only what they may read, and nothing else looks held.
    """

    def __init__(self, store: Store, viewer: Viewer | None = None) -> None:
        self._store = store
        self._viewer = viewer
        self._known: dict[BuildId, tuple[bool, Quality, bool, str]] = {}

    def row(
        self, container: str, path: bytes, build_id: BuildId | None, weight: int, why: str = ""
    ) -> Row:
        """The row of a binary; ``why`` says why there is no build ID, if there is none."""
        if build_id is None:
            return Row(container, path, None, weight, why=why or NO_BUILD_ID)
        known = self._known.get(build_id)
        if known is None:
            known = self._known[build_id] = self._look(build_id)
        executable, symbols, debuginfo, missing = known
        if path == _KALLSYMS and missing is NOT_CAPTURED:
            missing = NO_KALLSYMS
        return Row(container, path, build_id, weight, executable, symbols, debuginfo, missing)

    def _look(self, build_id: BuildId) -> tuple[bool, Quality, bool, str]:
        ordinal = self._store.index.ordinal(build_id)
        if ordinal is None:
            return False, Quality.NONE, False, self._absent
        return self.of(ordinal)

    @property
    def _absent(self) -> str:
        return NOT_CAPTURED if self._viewer is None else NOT_SERVED

    def of(self, ordinal: int) -> tuple[bool, Quality, bool, str]:
        """``executable``, ``symbols``, ``debuginfo`` and ``why`` of a `Row`, by the number of a
        build ID. Nothing is remembered.
        """
        store = self._store
        found = {kind: store.index.artifact(ordinal, kind) for kind in Kind}
        held = {kind: each for kind, each in found.items() if self._is_there(each)}
        if not held and self._viewer is None and store.aliases.is_ambiguous(ordinal):
            return False, Quality.NONE, False, SHARED
        if not held:
            return False, Quality.NONE, False, self._absent
        if Kind.KALLSYMS in held:
            return True, Quality.SYMTAB, False, ""
        symbols = max(artifact.quality for artifact in held.values())
        if Kind.VDSO in held:
            symbols = max(symbols, Quality.SYMTAB)  # its dynamic symbols are all that it has
        executable = Kind.EXECUTABLE in held or Kind.VDSO in held
        debuginfo = symbols >= Quality.DEBUGINFO
        if not executable:
            return executable, symbols, debuginfo, NO_EXECUTABLE
        if symbols >= Quality.SYMTAB:
            return executable, symbols, debuginfo, ""
        why = STRIPPED if symbols is Quality.DYNSYM else NO_SYMBOLS
        return executable, symbols, debuginfo, why

    def _is_there(self, artifact: Artifact | None) -> TypeGuard[Artifact]:
        if artifact is None or self._viewer is None:
            return artifact is not None
        return self._viewer.may_read(artifact.mode, artifact.uid, artifact.gid)
