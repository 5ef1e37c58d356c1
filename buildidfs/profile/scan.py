# SPDX-License-Identifier: Apache-2.0
"""Capture the binaries that profiles name, as far as they still exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture.base import Unreadable
from buildidfs.capture.process.scanner import ProcScanner
from buildidfs.capture.scan.by_build_id import SoughtFiles, WantedScanner
from buildidfs.capture.scan.kernel import KernelScanner
from buildidfs.catalog.coverage import CAPTURED, HELD, MISSING, CoverageLookup
from buildidfs.errors import UsageError
from buildidfs.formats.perf.headers import CPUMODE, KERNEL
from buildidfs.ingest import Ingest, ScanSummary, StoreMemo
from buildidfs.model import BuildId
from buildidfs.profile.match import plain
from buildidfs.profile.perf_data import Profile
from buildidfs.profile.reading import IN_KERNEL, Reading, is_anonymous

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from buildidfs.capture.base import Found, Progress
    from buildidfs.config import Settings
    from buildidfs.formats.perf.address_spaces import File
    from buildidfs.profile.reading import SampleSite
    from buildidfs.store import Store

VDSO: Final = b"[vdso]"

_GONE: Final = "no process maps it, it is not at its path on this host, and its container is gone"
_NOT_HERE: Final = "no process maps it, and it is not at its path on this host"
_OTHER_KERNEL: Final = "not the kernel that runs, nor a module it has loaded"
_NOT_READ: Final = "found, but it could not be read"


class ProfileBinary(msgspec.Struct):
    """A binary of a profile in one container (its label; empty: the host).

    ``samples`` counts those in the binary or called from it. ``state`` is `HELD`, `CAPTURED` (by
    this scan) or `MISSING`; ``why`` is the reason why it is missing.
    """

    path: bytes
    container: str
    build_id: BuildId | None
    samples: int
    state: str = MISSING
    why: str = ""


class ProfileScan(msgspec.Struct):
    """The result of a scan of profiles: the summary, and each binary, the missing first."""

    summary: ScanSummary
    binaries: list[ProfileBinary]


def scan_perf_data(
    store: Store,
    settings: Settings,
    paths: Sequence[bytes],
    *,
    everything: bool = False,
    progress: Progress | None = None,
) -> ProfileScan:
    """Capture the binaries with samples in profiles, or ``everything`` mapped in them.

    A profile that cannot be read to its end is unreadable in the summary. Raises `StoreFull`,
    `StoreError`.
    """
    whole = ProfileScan(ScanSummary(), [])
    for path in paths:
        try:
            with Profile(path) as profile:
                scan = _Scan(store, settings, profile, everything, progress)
                scan.run(whole)
                if profile.truncated:
                    raise UsageError(f"is not whole: {profile.truncated}")
        except UsageError as error:
            reason = str(error).removeprefix(path.decode("utf-8", "backslashreplace")).lstrip(": ")
            whole.summary.unreadable.append(Unreadable(path, reason))
    whole.binaries.sort(key=lambda each: (each.state != MISSING, -each.samples, each.path))
    return whole


class _Scan:
    """The scan of one profile."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        profile: Profile,
        everything: bool,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._namespaces = settings.container.namespaces
        self._progress = progress
        self._reading = Reading(profile, store, progress)
        self._hits = self._reading.hits(chains=True)
        if everything:
            self._hits.update(self._reading.everything())

    def run(self, whole: ProfileScan) -> None:
        """Search for the missing binaries, and add all binaries to ``whole``."""
        before = CoverageLookup(self._store)
        held, missing = set(), []
        for hit, binary in self._binaries():
            if binary.build_id is not None and not binary.why and before.has(binary.build_id):
                held.add(binary.build_id)
            else:
                missing.append((hit, binary))
        whole.summary.files += len(held)
        whole.summary.held += len(held)
        wanted, kernel = self._wanted(missing)
        memo = StoreMemo(self._store)
        scanner = WantedScanner(memo, wanted, self._namespaces)

        def found() -> Iterator[Found]:
            yield from scanner
            if kernel:
                yield from KernelScanner(memo, container_namespaces=self._namespaces)
            if VDSO in wanted.paths:
                yield from ProcScanner(memo, pids=[], container_namespaces=self._namespaces)

        if missing:
            whole.summary.add(Ingest(self._store).run(found(), self._progress))
            self._reading.forget()
        after = CoverageLookup(self._store)
        for hit, binary in self._binaries():
            build_id = binary.build_id
            if build_id is not None and not binary.why and after.has(build_id):
                binary.state = HELD if build_id in held else CAPTURED
            elif build_id is not None and not binary.why:
                binary.why = self._why(hit, binary, scanner)
            whole.binaries.append(binary)

    def _binaries(self) -> list[tuple[SampleSite, ProfileBinary]]:
        """Return the binaries with samples, each with one of the hits."""
        found: dict[tuple[str, bytes, BuildId | None, str], tuple[SampleSite, ProfileBinary]] = {}
        for hit, samples in self._hits.items():
            path, answer = self._reading.describe(hit)
            if not samples and answer.build_id is None and not path.startswith(b"/"):
                continue  # memory without a file
            container = answer.container or ""
            key = container, path, answer.build_id, answer.why
            known = found.get(key)
            if known is None:
                binary = ProfileBinary(path, container, answer.build_id, samples, why=answer.why)
                found[key] = hit, binary
            else:
                known[1].samples += samples
        return list(found.values())

    def _wanted(self, missing: list[tuple[SampleSite, ProfileBinary]]) -> tuple[SoughtFiles, bool]:
        """Return the files to search for, and True if some belong to the kernel."""
        wanted = SoughtFiles(set(), set(), {}, set())
        kernel = False
        for hit, binary in missing:
            file = self._reading.spaces.files[hit.file] if hit.file >= 0 else None
            kernel |= _is_kernel(hit, file)
            if binary.build_id is None:
                if file is not None and file.inode and not is_anonymous(file):
                    wanted.files.add((file.path, file.dev, file.inode))
                continue
            wanted.build_ids.add(binary.build_id)
            path = plain(binary.path)
            wanted.paths.add(path)
            for each in self._reading.matcher.candidates(path):
                if each.build_id == binary.build_id and each.mnt_ns_id:
                    wanted.elsewhere.setdefault(each.mnt_ns_id, set()).add(path)
        return wanted, kernel

    def _why(self, hit: SampleSite, binary: ProfileBinary, scanner: WantedScanner) -> str:
        file = self._reading.spaces.files[hit.file] if hit.file >= 0 else None
        if _is_kernel(hit, file):
            return _OTHER_KERNEL
        if binary.build_id in scanner.found:
            return _NOT_READ
        return _GONE if binary.container else _NOT_HERE


def _is_kernel(hit: SampleSite, file: File | None) -> bool:
    if file is None:
        return hit.file == IN_KERNEL
    return file.cpumode & CPUMODE == KERNEL
