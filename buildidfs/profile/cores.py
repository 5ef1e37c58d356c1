# SPDX-License-Identifier: Apache-2.0
"""Core files and the store: capture the files that they name, and measure the coverage."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture.base import Unreadable
from buildidfs.capture.origin import builder
from buildidfs.capture.scan import core as scan_core
from buildidfs.capture.scan.by_build_id import SoughtFiles, WantedScanner
from buildidfs.capture.scan.core import CoreFile, is_core
from buildidfs.catalog import history
from buildidfs.catalog.coverage import CAPTURED, HELD, MISSING, Coverage, CoverageLookup
from buildidfs.catalog.remedies import AMBIGUOUS
from buildidfs.errors import UsageError
from buildidfs.formats.elf.core import VDSO
from buildidfs.ingest import Ingest, ScanSummary, StoreMemo
from buildidfs.linux.file_ops import read_fully
from buildidfs.model import BuildId, Kind
from buildidfs.store.index.locations import NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from buildidfs.capture.base import Found, Progress
    from buildidfs.catalog.history import SightedPath
    from buildidfs.config import Settings
    from buildidfs.formats.elf.core import Module
    from buildidfs.store import Store

__all__ = ["CoreFile", "coverage", "identified", "is_core", "scan_cores"]

_GONE: Final = (
    "no process maps it, and it is not at its path on this host"
    " or in a mount namespace that still has processes"
)
_NOT_READ: Final = "found, but it could not be read"
# The mtime of a core is that of its last write.
_LATE_NS: Final = 2_000_000_000
_STALE_NS: Final = 24 * 3600 * 1_000_000_000
_MOST_VARIANTS: Final = 8
_MOST_NAMESAKES: Final = 64
_COMM_MAX: Final = 15
_NO_VDSO: Final = "not all of it is in the core"


class CoreBinary(msgspec.Struct, rename={"pages": "_pages"}):
    """A mapped binary: ``state`` is `HELD`, `CAPTURED` (by this scan) or `MISSING`.

    ``why`` is the reason why it is missing. ``main`` is True for the program itself, ``deleted``
    for a file whose name was gone. ``path`` is that of the process, empty if the core has none.
    ``pages`` are parts of a file without a build ID, each with its offset in the file.
    """

    path: bytes
    build_id: BuildId | None
    main: bool
    deleted: bool
    state: str = MISSING
    why: str = ""
    pages: tuple[tuple[int, bytes], ...] = ()


class CoreDump(msgspec.Struct):
    """The process of a core file, and the state of its binaries.

    ``pid``, ``name``, ``arguments`` and ``signal`` are those of `formats.elf.core.Core`. The core
    does not name its container, so ``containers`` has the labels of all containers in which the
    program was seen, the last one first (an empty label: the host). ``cut_off`` has the reason if
    the file is not whole.
    """

    path: bytes
    pid: int
    name: bytes
    arguments: bytes
    signal: int
    containers: list[str]
    cut_off: str
    binaries: list[CoreBinary]


class CoreScan(msgspec.Struct):
    """The result of a scan of core files."""

    summary: ScanSummary
    dumps: list[CoreDump]


def coverage(store: Store, path: bytes) -> Coverage:
    """Return the coverage of a core file. Raises `UsageError` for any other file."""
    dump = _read(store, path)
    holdings = CoverageLookup(store)
    label = dump.containers[0] if len(dump.containers) == 1 else ""
    rows = [holdings.row(label, each.path, each.build_id, 1, each.why) for each in dump.binaries]
    notes = []
    if len(dump.containers) > 1:
        names = ", ".join(name or "the host" for name in dump.containers)
        notes.append(f"the program was seen in several places: {names}")
    return Coverage(rows, "binaries", notes, f"the core is {dump.cut_off}" if dump.cut_off else "")


def scan_cores(
    store: Store, settings: Settings, paths: Sequence[bytes], *, progress: Progress | None = None
) -> CoreScan:
    """Capture the files that core files name, as far as they still exist.

    These are the vDSO in the core, files that processes have mapped, and files with these build IDs
    at their paths, here and in the mount namespaces of all processes. A file that is not a core
    file, or not whole, is unreadable in the summary. Raises `StoreFull`, `StoreError`.
    """
    dumps = []
    unreadable = []
    for path in paths:
        try:
            dumps.append(_read(store, path))
        except UsageError as error:
            reason = str(error).removeprefix(path.decode("utf-8", "backslashreplace"))
            unreadable.append(Unreadable(path, reason.lstrip(": ")))
    unreadable += [Unreadable(dump.path, dump.cut_off) for dump in dumps if dump.cut_off]
    scan = _Scan(store, settings, dumps)
    summary = scan.run(progress)
    summary.unreadable += unreadable
    return CoreScan(summary, dumps)


def _read(store: Store, path: bytes) -> CoreDump:
    """Read a core file; look up in the store where its program was seen."""
    with CoreFile(path) as file:
        core = file.core
        found: dict[tuple[bytes, BuildId | None], CoreBinary] = {}
        for module, why in identified(store, file):
            binary = CoreBinary(module.path, module.build_id, module.main, module.deleted, why=why)
            if module.build_id is None:
                binary.pages = file.pages(module)
            known = found.setdefault((module.path, module.build_id), binary)
            known.main |= module.main
        main = next((each for each in found.values() if each.main), None)
        return CoreDump(
            path, core.pid, core.name, core.arguments, core.signal, _containers(store, main),
            file.cut_off, list(found.values()),
        )  # fmt: skip


def identified(store: Store, file: CoreFile) -> list[tuple[Module, str]]:
    """Return the modules of a core, each with the reason why its build ID is not known.

    A module without a build ID in the core is the file at its path that has the bytes in the core.
    If the core has none of its bytes, or the store none of the file, path and time have to suffice.
    If the core lists no files, the program is the file of its name that has these bytes.
    """
    return [
        (module, "") if module.build_id is not None else _by_path(store, file, module)
        for module in file.core.modules
    ]


def _by_path(store: Store, file: CoreFile, module: Module) -> tuple[Module, str]:
    pages = file.pages(module)
    if not module.path.startswith(b"/"):
        names = _called(store, file.core.name) if module.main else []
        same = [build_id for build_id in names if _is_like(store, build_id, pages)]
        build_id = same[0] if len(same) == 1 else None
        if build_id is None:
            return module, str(module.unknown)
        return msgspec.structs.replace(module, build_id=build_id, unknown=None), ""
    by_bytes: list[SightedPath] = []
    by_time: list[SightedPath] = []
    for place in history.at_path(store, module.path):
        is_like = _is_like(store, place.build_id, pages)
        if is_like:
            by_bytes.append(place)
        elif is_like is None and _was_there(place, file.mtime_ns):
            by_time.append(place)
    left = by_bytes or by_time
    if len({place.build_id for place in left}) > 1:
        before = [place for place in left if place.first_seen_ns <= file.mtime_ns + _LATE_NS]
        if len({(place.host, place.container) for place in left}) > 1 or not before:
            return module, AMBIGUOUS
        left = [max(before, key=lambda place: place.first_seen_ns)]  # one replaced the other
    if not left:
        return module, str(module.unknown)
    return msgspec.structs.replace(module, build_id=left[0].build_id, unknown=None), ""


def _called(store: Store, name: bytes) -> list[BuildId]:
    """Return the build IDs of files with that name; processes show 15 bytes of it."""
    number = store.paths.child(NAMES, name) if 0 < len(name) < _COMM_MAX else None
    ordinals = () if number is None else islice(store.file_names.ids(number), _MOST_NAMESAKES)
    found = (store.index.build_id(ordinal) for ordinal in ordinals)
    return [build_id for build_id in found if build_id is not None]


def _was_there(place: SightedPath, moment_ns: int) -> bool:
    """Return True if a file was seen at a place by a time, and not long before it."""
    return (
        place.first_seen_ns <= moment_ns + _LATE_NS and place.last_seen_ns >= moment_ns - _STALE_NS
    )


def _is_like(store: Store, build_id: BuildId, pages: tuple[tuple[int, bytes], ...]) -> bool | None:
    """Return True if the store has an executable with these pages; None if nothing can be
    compared.
    """
    ordinal = store.index.ordinal(build_id)
    if ordinal is None or not pages:
        return None
    found = list(islice(store.index.variants_after(ordinal, Kind.EXECUTABLE), _MOST_VARIANTS))
    for artifact in found:
        with store.open_blob(artifact.digest) as blob:
            if all(blob.read_at(offset, len(data)) == data for offset, data in pages):
                return True
    return False if found else None


def _containers(store: Store, main: CoreBinary | None) -> list[str]:
    """Return the places where a program was seen under a path, the last one first."""
    if main is None or main.build_id is None:
        return []
    places = history.at_path(store, main.path)
    labels = [
        builder.shown(place.container, place.cgroup)
        for place in places
        if place.build_id == main.build_id
    ]
    return list(dict.fromkeys(labels))


def _has_pages(fd: int, pages: tuple[tuple[int, bytes], ...]) -> bool:
    try:
        return all(read_fully(fd, len(data), offset) == data for offset, data in pages)
    except OSError:
        return False


class _Scan:
    """The search for the binaries of dumps that the store lacks."""

    def __init__(self, store: Store, settings: Settings, dumps: list[CoreDump]) -> None:
        self._store = store
        self._namespaces = settings.container.namespaces
        self._dumps = dumps
        holdings = CoverageLookup(store)
        self._missing: list[tuple[BuildId, CoreBinary]] = []
        self._nameless: list[CoreBinary] = []
        self._held: set[BuildId] = set()
        for dump in dumps:
            for binary in dump.binaries:
                if binary.build_id is None:
                    if binary.path.startswith(b"/") and binary.pages:
                        self._nameless.append(binary)
                    continue
                if holdings.has(binary.build_id):
                    binary.state = HELD
                    self._held.add(binary.build_id)
                else:
                    self._missing.append((binary.build_id, binary))

    def run(self, progress: Progress | None) -> ScanSummary:
        """Look for the missing files and capture them; files that the store holds count
        as found.
        """
        before = ScanSummary(files=len(self._held), held=len(self._held))
        if not self._missing and not self._nameless:
            return before
        memo = StoreMemo(self._store)
        wanted = self._wanted()
        scanner = WantedScanner(memo, wanted, self._namespaces, scanner="core", only=True)

        def found() -> Iterator[Found]:
            for dump in self._dumps:
                yield from self._vdso(memo, dump, wanted.build_ids)
            yield from scanner

        summary = Ingest(self._store).run(found(), progress)
        holdings = CoverageLookup(self._store)
        for build_id, binary in self._missing:
            if holdings.has(build_id):
                binary.state = CAPTURED
            elif binary.path == VDSO:
                binary.why = _NO_VDSO
            else:
                binary.why = _NOT_READ if build_id in scanner.found else _GONE
        for binary in self._nameless:
            for place in history.at_path(self._store, binary.path):
                if _is_like(self._store, place.build_id, binary.pages):
                    binary.build_id, binary.state, binary.why = place.build_id, CAPTURED, ""
        summary.files += before.files
        summary.held += before.held
        return summary

    def _wanted(self) -> SoughtFiles:
        """Return the build IDs to search for, and the paths to try."""
        wanted = SoughtFiles({build_id for build_id, _ in self._missing}, set(), {}, set())
        for _, binary in self._missing:
            if binary.path.startswith(b"/"):
                wanted.paths.add(binary.path)
        for binary in self._nameless:
            wanted.like[binary.path] = partial(_has_pages, pages=binary.pages)
        for number in scan_core.living_mount_namespaces():
            wanted.elsewhere[number] = wanted.paths
        return wanted

    def _vdso(self, memo: StoreMemo, dump: CoreDump, wanted: set[BuildId]) -> Iterator[Found]:
        """Yield the vDSO in a core if it is missing."""
        if not any(each.path == VDSO and each.build_id in wanted for each in dump.binaries):
            return
        try:
            with CoreFile(dump.path) as file:
                item = file.vdso(memo, wanted)
        except UsageError as error:
            item = Unreadable(dump.path, str(error))
        except OSError as error:
            item = Unreadable.of(dump.path, error)
        if item is not None:
            yield item
