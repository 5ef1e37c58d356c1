# SPDX-License-Identifier: Apache-2.0
"""The share of a profile, a core file or the running processes that the store can name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeGuard

import msgspec

from buildidfs.catalog import remedies
from buildidfs.catalog.remedies import (
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
    from buildidfs.store.location_rows import Removal
    from buildidfs.view import Viewer


HELD: Final = "held"
CAPTURED: Final = "captured"
MISSING: Final = "missing"
"""The states of a binary that a scan looked for; `CAPTURED` means captured by this scan."""

_KALLSYMS: Final = b"[kernel.kallsyms]"


class BinaryCoverage(msgspec.Struct, frozen=True):
    """One binary in one container, and the files that the store has for it.

    ``container`` is its label, empty for the host or if it is not known; ``path`` is the path as
    its users saw it, or a name in brackets. ``weight`` is the number of samples, mappings or
    frames. ``executable`` and ``debuginfo`` are True if the store has these files; ``symbols`` is
    the better symbol table of the two (`Quality.DEBUGINFO` for DWARF). ``why`` is the reason for
    missing names; it is empty if only DWARF is missing, or nothing.
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
    """Rows in any order, and the unit of their weight ("samples").

    ``notes`` has one line each on how the result was found; ``incomplete`` is the reason if part of
    the input could not be read, or empty. ``recorded`` are the build IDs that a profile itself has;
    it is None for other inputs.
    """

    rows: list[BinaryCoverage]
    unit: str
    notes: list[str] = msgspec.field(default_factory=list)
    incomplete: str = ""
    recorded: frozenset[BuildId] | None = None

    @property
    def weight(self) -> int:
        """Return the total weight of all rows."""
        return sum(row.weight for row in self.rows)

    def executable(self) -> float:
        """Return the share of the weight, 0 to 1, whose executable can be read."""
        return self._share(row for row in self.rows if row.executable)

    def dynamic_symbols(self) -> float:
        """Return the share of the weight, 0 to 1, that has at least dynamic symbols."""
        return self._share(row for row in self.rows if row.symbols >= Quality.DYNSYM)

    def symbols(self) -> float:
        """Return the share of the weight, 0 to 1, that has a full table of symbols, or DWARF."""
        return self._share(row for row in self.rows if row.symbols >= Quality.SYMTAB)

    def unrepaired(self) -> float | None:
        """Return the share of `symbols` that perf can name with the build IDs in the profile; None
        if it can name all of them.
        """
        if self.recorded is None:
            return None
        known = [row for row in self.rows if row.symbols >= Quality.SYMTAB]
        if all(row.build_id in self.recorded for row in known):
            return None
        return self._share(row for row in known if row.build_id in self.recorded)

    def gain_of_repair(self) -> tuple[float, float] | None:
        """Return the shares that perf can name before and after a repair; None if they are equal in
        tenths of a per cent.
        """
        before, after = self.unrepaired(), self.symbols()
        if before is None or f"{before:.1%}" == f"{after:.1%}":
            return None
        return before, after

    def debuginfo(self) -> float:
        """Return the share of the weight, 0 to 1, with DWARF."""
        return self._share(row for row in self.rows if row.debuginfo)

    def _share(self, rows: Iterable[BinaryCoverage]) -> float:
        """Return the share of the weight; 1 if the weight is 0, because then no name is missing."""
        whole = self.weight
        return sum(row.weight for row in rows) / whole if whole else 1.0

    def worst_first(self) -> list[BinaryCoverage]:
        """Return the rows: first those with missing files, the heaviest first."""
        return sorted(
            self.rows,
            key=lambda row: (
                row.symbols >= Quality.SYMTAB, -row.weight, row.container, row.path,
                row.build_id or b"",
            ),
        )  # fmt: skip


class CoverageLookup:
    """Looks up the files that a store holds for build IDs, each once.

    With a ``viewer``, files that this viewer may not read count as missing.
    """

    def __init__(self, store: Store, viewer: Viewer | None = None) -> None:
        self._store = store
        self._viewer = viewer
        self._known: dict[BuildId, tuple[bool, Quality, bool, str]] = {}
        self._removals: dict[BuildId, Removal] | None = None

    def row(
        self, container: str, path: bytes, build_id: BuildId | None, weight: int, why: str = ""
    ) -> BinaryCoverage:
        """Return the row of a binary; ``why`` is the reason if it has no build ID, or if the file
        with this build ID may be another one.
        """
        if build_id is None or why:
            return BinaryCoverage(container, path, build_id, weight, why=why or NO_BUILD_ID)
        known = self._known.get(build_id)
        if known is None:
            known = self._known[build_id] = self._look(build_id)
        executable, symbols, debuginfo, missing = known
        if path == _KALLSYMS and missing is NOT_CAPTURED:
            missing = NO_KALLSYMS
        return BinaryCoverage(
            container, path, build_id, weight, executable, symbols, debuginfo, missing
        )

    def has(self, build_id: BuildId) -> bool:
        """Return True if the store has the executable of a build ID."""
        return self.row("", b"", build_id, 0).executable

    def _look(self, build_id: BuildId) -> tuple[bool, Quality, bool, str]:
        ordinal = self._store.index.ordinal(build_id)
        if ordinal is None:
            return False, Quality.NONE, False, self.why_absent(build_id)
        return self.of(ordinal)

    def why_absent(self, build_id: BuildId | None) -> str:
        """Return the reason why the store has no bytes of a build ID. A viewer does not learn of
        files that it may not read.
        """
        return self.removed(build_id) or (NOT_CAPTURED if self._viewer is None else NOT_SERVED)

    def removals(self) -> dict[BuildId, Removal]:
        """Return the last removal by a limit of each build ID; it may have been captured since."""
        if self._removals is None:
            self._removals = self._store.journal.removals()
        return self._removals

    def removed(self, build_id: BuildId | None, *kinds: Kind) -> str | None:
        """Return the reason if a limit has removed bytes of a build ID, of any or of certain kinds;
        else None.

        The journal is not read for a viewer, because it does not record who may read a file.
        """
        if self._viewer is not None or build_id is None:
            return None
        found = self.removals().get(build_id)
        if found is None or (kinds and not any(found.kinds & 1 << kind for kind in kinds)):
            return None
        return remedies.removed(found)

    def of(self, ordinal: int) -> tuple[bool, Quality, bool, str]:
        """Return ``executable``, ``symbols``, ``debuginfo`` and ``why`` of a `BinaryCoverage` for
        an ordinal.

        The result is not cached.
        """
        store = self._store
        found = {kind: store.index.artifact(ordinal, kind) for kind in Kind}
        held = {kind: each for kind, each in found.items() if self._is_there(each)}
        if not held and self._viewer is None and store.aliases.is_ambiguous(ordinal):
            return False, Quality.NONE, False, SHARED
        if not held:
            return False, Quality.NONE, False, self.why_absent(store.index.build_id(ordinal))
        if Kind.KALLSYMS in held:
            return True, Quality.SYMTAB, False, ""
        symbols = max(artifact.quality for artifact in held.values())
        if Kind.VDSO in held:
            symbols = max(symbols, Quality.SYMTAB)  # the store has its dynamic symbols only
        executable = Kind.EXECUTABLE in held or Kind.VDSO in held
        debuginfo = symbols >= Quality.DEBUGINFO
        if executable and symbols >= Quality.SYMTAB:
            return executable, symbols, debuginfo, ""
        lacking = Kind.DEBUGINFO if executable else Kind.EXECUTABLE
        why = self.removed(store.index.build_id(ordinal), lacking)
        if not why and not executable:
            why = NO_EXECUTABLE
        elif not why:
            why = STRIPPED if symbols is Quality.DYNSYM else NO_SYMBOLS
        return executable, symbols, debuginfo, why

    def _is_there(self, artifact: Artifact | None) -> TypeGuard[Artifact]:
        if artifact is None or self._viewer is None:
            return artifact is not None
        return self._viewer.may_read(artifact.mode, artifact.uid, artifact.gid)
