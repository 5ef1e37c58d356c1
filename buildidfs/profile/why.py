# SPDX-License-Identifier: Apache-2.0
"""The reason why a file, or a frame of a profile, has no name, and the remedy."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.answers import Explained, Finding
from buildidfs.capture.origin.builder import reported
from buildidfs.capture.process.package_databases import PackageDatabases
from buildidfs.catalog import remedies, requested_id
from buildidfs.catalog.containers import Names
from buildidfs.catalog.coverage import BinaryCoverage, CoverageLookup
from buildidfs.formats.package_databases import UNKNOWN, Package
from buildidfs.linux import machine
from buildidfs.located import path_fields
from buildidfs.model import BuildId, Kind, Quality
from buildidfs.names import printable
from buildidfs.profile import cores, inputs, reading
from buildidfs.profile.perf_data import Profile
from buildidfs.profile.selection import Selection
from buildidfs.store import run_files
from buildidfs.store.permissions import may_see
from buildidfs.symbolize import addresses

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from buildidfs.capture.base import Progress
    from buildidfs.store import JournalRecord, Store
    from buildidfs.store.run_files import LostFiles
    from buildidfs.view import Viewer

_MOST_PATHS: Final = 8
_APT_S: Final = 10.0
_DEBUG_FILES: Final = "/usr/lib/debug/.build-id"
_READ_PROFILE: Final = "perf --buildid-dir /buildid/perf report -i {file}"
_READ_FILES: Final = "ls /buildid/{id}"
_LACKING: Final = (remedies.STRIPPED, remedies.NO_SYMBOLS, remedies.NO_DEBUGINFO)


class UnnamedFiles(msgspec.Struct, frozen=True):
    """The files of a profile or core file that lack names, the heaviest first.

    ``unit`` is the unit of their weight, and ``weight`` that of all files. ``incomplete`` is the
    reason if part of the file could not be read. ``gain`` is `Coverage.gain_of_repair`.
    """

    files: list[Explained]
    unit: str
    weight: int
    incomplete: str = ""
    gain: tuple[float, float] | None = None


class Explainer:
    """Finds reasons and remedies from the content of one store.

    Without permission to read the files at a place, a ``viewer`` does not learn of that place. For
    a viewer the journal is not read, because it does not record who may read a file, nor is this
    machine examined.
    """

    def __init__(self, store: Store, viewer: Viewer | None = None) -> None:
        self._store = store
        self._viewer = viewer
        self._names = Names(store)
        self._holdings = CoverageLookup(store, viewer)
        self._packages = PackageDatabases()
        self._available: frozenset[str] | None = None
        self._lost: dict[str, LostFiles] | None = None
        self._scan = "perf-data"
        self._named: Collection[BuildId] | None = None  # from the present profile

    def build_id(self, build_id: BuildId) -> Explained:
        """Explain which files of a build ID are missing, and why."""
        origins = self._store.index.origins(self._store.index.ordinal(build_id) or 0)
        rows = [] if self._viewer is not None else self._store.journal.of(build_id)
        places = [
            (each.origin.path, reported(each.origin))
            for each in sorted(origins, key=lambda each: Kind.DEBUGINFO in each.kinds)
            if may_see(self._viewer, each.origin)
        ]
        places += [(each.path, reported(each)) for each in rows]
        path, container = places[0] if places else (b"", "")
        row = self._holdings.row(container, path, build_id, 1)
        return self._explained(row, "", None)

    def not_served(self, build_id: BuildId) -> list[Finding]:
        """Return the findings on a build ID without facts for the viewer."""
        return [self._finding(remedies.NOT_SERVED, BinaryCoverage("", b"", build_id, 1), "")]

    def file(
        self,
        path: bytes,
        frame: str | None,
        *,
        container: str | None = None,
        comm: str | None = None,
        progress: Progress | None = None,
    ) -> UnnamedFiles:
        """Explain the files of a profile or core file that have no symbols, or those of a frame;
        with ``container``, only those of this container, with ``comm``, only samples of threads
        with this name.

        ``frame`` is one of `selection.Selection`. Raises `UsageError`, and `ArtifactMissing` if the
        frame has no sample.
        """
        self._named = None
        self._scan = "core" if cores.is_core(path) else "perf-data"
        selection = Selection.of(frame, comm)
        found = inputs.coverage_of_file(
            self._store, path, selection=selection, container=container, progress=progress
        )
        rows = inputs.at_frame(found.worst_first(), path, selection)
        if frame is None:
            rows = [row for row in rows if row.symbols < Quality.SYMTAB]
        whole = found.weight or 1
        files = [self._explained(row, os.fsdecode(path), row.weight / whole) for row in rows]
        gain = found.gain_of_repair()
        return UnnamedFiles(files, found.unit, found.weight, found.incomplete, gain)

    def _explained(self, row: BinaryCoverage, file: str, share: float | None) -> Explained:
        return Explained(
            **path_fields(row.path),
            **self._names.fields(row.container),
            build_id=None if row.build_id is None else row.build_id.hex(),
            weight=None if share is None else row.weight,
            share=None if share is None else round(share, 6),
            findings=self._findings(row, file),
        )

    # --- reasons -----------------------------------------------------------------------------

    def _findings(self, row: BinaryCoverage, file: str) -> list[Finding]:
        if row.build_id is None:
            return [self._finding(row.why, row, file)]
        if row.why == remedies.NOT_SERVED:
            return [self._finding(row.why, row, file)]
        if row.why == remedies.NOT_CAPTURED or (not row.executable and self._is_removed(row)):
            return self._missed(row, file)
        if row.why:
            return [*self._withheld(row, file), self._finding(row.why, row, file)]
        if not row.debuginfo and row.symbols is Quality.SYMTAB and row.path[:1] != b"[":
            why = self._holdings.removed(row.build_id, Kind.DEBUGINFO) or remedies.NO_DEBUGINFO
            return [*self._withheld(row, file), self._finding(why, row, file)]
        is_named = not file or self._scan != "perf-data" or row.build_id in self._named_in(file)
        if not is_named:
            return [self._finding(remedies.UNREPAIRED, row, file)]
        # For a viewer no program is started.
        name = None
        if self._viewer is None:
            name = addresses.unreadable_for(self._store, row.build_id)
        why = remedies.UNREAD if name else remedies.COMPLETE
        return [self._finding(why, row, file, f"{why} ({name})" if name else "")]

    def _named_in(self, file: str) -> Collection[BuildId]:
        """Return the build IDs that a profile itself names."""
        if self._named is None:
            with Profile(os.fsencode(file)) as profile:
                self._named = reading.build_ids_of(profile)
        return self._named

    def _withheld(self, row: BinaryCoverage, file: str) -> list[Finding]:
        """Return the finding on withheld debuginfo."""
        ordinal = None if row.build_id is None else self._store.index.ordinal(row.build_id)
        if ordinal is None or self._store.index.artifact(ordinal, Kind.DEBUGINFO) is not None:
            return []
        if not self._store.index.variants(ordinal, Kind.DEBUGINFO):
            return []
        return [self._finding(remedies.WITHHELD, row, file)]

    def _missed(self, row: BinaryCoverage, file: str) -> list[Finding]:
        """Return the findings on a build ID without bytes in the store."""
        assert row.build_id is not None
        records = self._store.journal.of(row.build_id)
        found: list[Finding] = []
        here = self._still_here(row.build_id, row.path, records)
        if here is not None:
            reason = f"{row.why}, and {remedies.AT_ITS_PATH}" if self._is_removed(row) else ""
            found.append(self._finding(remedies.STILL_HERE, row, file, reason, path=here))
        lost = self._losses().get(row.build_id.hex())
        if self._is_removed(row):
            found.append(self._finding(row.why, row, file))
        elif lost is not None:
            where = self._names.short(lost.container) or "the host"
            found.append(
                Finding(
                    "lost",
                    f"a watch saw it at {printable(lost.raw_path)} in {where} {_ago(lost.time_ns)},"
                    f" and lost it: {lost.reason}",
                    remedies.of_loss(lost.reason),
                    "buildidfs journal --lost",
                )
            )
        elif any(each.omitted for each in records):
            found.append(self._finding(remedies.NO_ROOM, row, file))
        elif records:
            last = max(records, key=lambda each: each.last_seen_ns)
            where = self._names.short(reported(last)) or "the host"
            seen = f"{printable(last.path)} in {where}, {_ago(last.last_seen_ns)}"
            seen = f"{remedies.NOT_KEPT} ({seen})"
            found.append(self._finding(remedies.NOT_KEPT, row, file, seen))
        elif not found:
            why = remedies.NOT_CAPTURED if file else remedies.NEVER_SEEN
            found.append(self._finding(why, row, file))
        return found

    def _is_removed(self, row: BinaryCoverage) -> bool:
        return remedies.without_time(row.why) != row.why

    def _finding(
        self, why: str, row: BinaryCoverage, file: str, reason: str = "", *, path: bytes = b""
    ) -> Finding:
        """Make a finding; ``reason`` is the reason with the details of this file."""
        remedy = remedies.of_reason(why)
        paths = self._paths_here(row) if why in _LACKING else []
        package = self._package(paths)
        if paths and package == UNKNOWN:
            remedy = remedies.of_own_build(remedy)
        text, command, unknown = remedy.text, remedy.command, ""
        if why == remedies.STILL_HERE and file:
            command = remedies.of_reason(remedies.NOT_CAPTURED).command  # the same for all of them
        if package.name and not self._has_debug_file(row.build_id):
            command, lacking = self.install([package])
            unknown = " ".join(lacking)
            release = _release()
            command = command or remedies.fetch_command(release)
            text += remedies.debug_archive(package.manager, release)
        elif package.name:
            text, package = remedies.INSTALLED, UNKNOWN
        if why == remedies.COMPLETE and (mountpoint := self._mountpoint()):
            text = text.replace("/buildid", mountpoint)
            command = _READ_PROFILE if file else _READ_FILES
            command = command.replace("/buildid", _word(os.fsencode(mountpoint)))
        command = command.format(
            file=_word(os.fsencode(file)),
            scan=self._scan,
            path=_word(path or row.path),
            id=row.build_id or "ID",
            wanted=f"--for {_word(os.fsencode(file))}" if file else row.build_id or "ID",
        )
        known = None if package == UNKNOWN else package
        return Finding(remedy.code, reason or why, text, command or None, known, unknown or None)

    def install(self, packages: Sequence[Package]) -> tuple[str, list[str]]:
        """Return the command that installs the debug packages of packages of one manager, and the
        names of those that the manager does not know.
        """
        manager = packages[0].manager
        if manager == "dpkg" and self._available is None:
            self._available = _known_to_apt()
        available = self._available if manager == "dpkg" else None
        names = list(dict.fromkeys(each.name for each in packages))
        return remedies.install_debug_packages(manager, names, available)

    def _has_debug_file(self, build_id: BuildId | None) -> bool:
        """Return True if the debug package of a file is installed on this host."""
        if build_id is None:
            return False
        digits = build_id.hex()
        return os.path.exists(f"{_DEBUG_FILES}/{digits[:2]}/{digits[2:]}.debug")

    def _mountpoint(self) -> str:
        """Return where the store is mounted now; empty if it is not."""
        return printable(run_files.mount_point(self._store.path))

    def _paths_here(self, row: BinaryCoverage) -> list[bytes]:
        """Return the paths of a file of this host, outside of containers; none for a viewer."""
        if self._viewer is not None:
            return []
        origins = self._store.index.origins(self._store.index.ordinal(row.build_id or b"") or 0)
        paths = {
            each.origin.path: None
            for each in origins
            if not each.origin.container
            and each.origin.host == machine.host_name()
            and each.origin.path.startswith(b"/")
        }
        return list(paths)[:_MOST_PATHS]

    def _package(self, paths: list[bytes]) -> Package:
        """Return the package that a file of this host belongs to, by its paths."""
        for path in paths:
            package = self._packages.owner_here(path)
            if package != UNKNOWN:
                return package
        return UNKNOWN

    def _losses(self) -> dict[str, LostFiles]:
        """Return the last loss of each build ID."""
        if self._lost is None:
            self._lost = {each.build_id: each for each in self._store.lost_since() if each.build_id}
        return self._lost

    def _still_here(
        self, build_id: BuildId, path: bytes, records: list[JournalRecord]
    ) -> bytes | None:
        """Return a path on this host that has a file with a build ID now; None if none is known."""
        host = machine.host_name()
        seen = [each.path for each in records if not each.container and each.host == host]
        for each in list(dict.fromkeys((path, *seen)))[:_MOST_PATHS]:
            if each.startswith(b"/") and requested_id.id_at(each) == build_id:
                return each
        return None


def _known_to_apt() -> frozenset[str] | None:
    """Return the names of all packages that apt can install; None if there is no apt."""
    try:
        done = subprocess.run(["apt-cache", "pkgnames"], capture_output=True, timeout=_APT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return frozenset(done.stdout.decode("utf-8", "replace").split()) if done.stdout else None


def _release() -> dict[str, str]:
    """Return os-release(5) of this host; empty if there is none."""
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def _word(path: bytes) -> str:
    """Return a path as a word of a command line that a person can copy."""
    import shlex

    return shlex.quote(printable(path)) if path else "PATH"


def _ago(nanoseconds: int) -> str:
    at = time.localtime(nanoseconds // 1_000_000_000)
    return f"on {time.strftime('%Y-%m-%d at %H:%M:%S', at)}"
