# SPDX-License-Identifier: Apache-2.0
"""Capture: connect scanners, ingest and store, with one function for each kind of scan."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from buildidfs import wording
from buildidfs.capture.base import Unreadable
from buildidfs.errors import IntegrityError, Interrupted, UsageError
from buildidfs.ingest import Ingest, ScanSummary, StoreMemo, interrupted
from buildidfs.model import Absence, BuildId, Origin, Standing, Trust
from buildidfs.store import NewAbsence

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from buildidfs.capture.base import Found, Progress
    from buildidfs.capture.image.scanner import ImageScanner
    from buildidfs.capture.process.scanner import ProcScanner
    from buildidfs.config import Settings, TrustRule
    from buildidfs.model import ContainerNames, FileIdentity
    from buildidfs.store import Store


# An archive is remembered as read as soon as its files are safe, not only at the end of a scan.
_PORTION: Final = 20_000


def scan_processes(
    store: Store,
    settings: Settings,
    *,
    pids: Sequence[int] | None = None,
    containers: Sequence[str] | None = None,
    containers_only: bool = False,
    progress: Progress | None = None,
) -> ScanSummary:
    """Capture the files that running processes have mapped, and the running kernel's symbols.

    ``containers`` are labels, or the beginnings of container IDs. The kernel's symbols are captured
    only if all processes are scanned. Raises `UsageError` for a container that does not exist,
    `StoreFull`.
    """
    found = ProcessFiles(
        store, settings, pids=pids, containers=containers, containers_only=containers_only
    )
    summary = Ingest(store).run(found, progress, lambda: found.share)
    if found.generated:
        _keep_names(store, settings, found.generated)
    return summary


def _keep_names(store: Store, settings: Settings, pids: Sequence[int]) -> None:
    """Keep the names of generated code that processes have written so far."""
    from buildidfs.capture.process.jit_files import JitFinder
    from buildidfs.capture.unresponsive.file_helper import FileHelper
    from buildidfs.capture.unresponsive.filesystems import SlowMounts

    with FileHelper() as helper:
        finder = JitFinder(settings.container.namespaces, SlowMounts(), helper)
        finder.keep(store.jit_maps, pids)


class ProcessFiles:
    """The files that `scan_processes` captures, for callers that want only some of them.

    ``share`` is the part of the processes that were scanned so far, 0 to 1, or None. ``generated``
    are the processes that may run generated code.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        *,
        pids: Sequence[int] | None = None,
        containers: Sequence[str] | None = None,
        containers_only: bool = False,
    ) -> None:
        self._memo = StoreMemo(store)
        self._settings = settings
        self._pids = pids
        self._containers = containers
        self._containers_only = containers_only
        self._scanner: ProcScanner | None = None
        self.generated: list[int] = []

    @property
    def share(self) -> float | None:
        return None if self._scanner is None else self._scanner.share

    def __iter__(self) -> Iterator[Found]:
        from buildidfs.capture.process.process import out_of_sight
        from buildidfs.capture.process.scanner import ProcScanner
        from buildidfs.capture.scan.kernel import KernelScanner

        namespaces = self._settings.container.namespaces
        if self._pids is None:
            yield from out_of_sight()
        self._scanner = ProcScanner(
            self._memo,
            pids=self._pids,
            containers=self._containers,
            containers_only=self._containers_only,
            container_namespaces=namespaces,
            generated=self.generated.append,
            debug_directories=_debug_directories(self._settings),
        )
        yield from self._scanner
        if self._pids is None and self._containers is None and not self._containers_only:
            yield from KernelScanner(self._memo, container_namespaces=namespaces)


def _debug_directories(settings: Settings) -> list[bytes]:
    return list(map(os.fsencode, settings.container.debug_directories))


def scan_tree(
    store: Store, settings: Settings, paths: Sequence[bytes], *, progress: Progress | None = None
) -> ScanSummary:
    """Capture the ELF files below ``paths``; raises `StoreFull`."""
    from buildidfs.capture.scan.tree import TreeScanner

    scanner = TreeScanner(
        StoreMemo(store), paths, container_namespaces=settings.container.namespaces
    )
    return Ingest(store).run(scanner, progress)


def believe(store: Store, settings: Settings) -> None:
    """From now on, apply the operator's rules of trust to all captures of a store."""
    if settings.trust.rules:
        store.believe(trust_of(settings.trust.rules))


def name_containers(store: Store) -> None:
    """Let a store look up the names of containers in the state files of this host's engines."""

    def names_of(origin: Origin) -> ContainerNames:
        from buildidfs.capture.origin import (
            container_names,  # imported when the first container is seen
        )

        return container_names.names_of(origin)

    store.name_containers(names_of)


class PackageScan(msgspec.Struct, frozen=True):
    """The result of a scan; ``unchanged`` of the ``packages`` had been read before and were
    skipped.
    """

    summary: ScanSummary
    packages: int
    unchanged: int


def scan_packages(
    store: Store, paths: Sequence[bytes], *, reread: bool = False, progress: Progress | None = None
) -> PackageScan:
    """Capture the ELF files in packages, and in packages below directories; raises `StoreFull`.

    A package that was read within a month and has not changed is skipped, unless ``reread``.
    """
    from buildidfs.capture.archive.packages import PackageScanner

    scanner = PackageScanner(
        StoreMemo(store),
        paths,
        spool_directory=store.path,
        reread=reread,
        measured=progress is not None,
    )
    summary = _ingest_archives(store, scanner, progress)
    return PackageScan(summary, scanner.packages, scanner.unchanged)


class ImageScan(msgspec.Struct, frozen=True):
    """The result of a scan; ``unchanged`` of the ``images`` had been read before and were skipped.

    ``corrupt`` has one error for each image that does not match its digests; nothing of it was
    taken.
    """

    summary: ScanSummary
    images: int
    unchanged: int
    corrupt: tuple[IntegrityError, ...]


def scan_images(
    store: Store,
    paths: Sequence[bytes],
    references: Sequence[str] = (),
    roots: Sequence[bytes] = (),
    *,
    platform: str | None = None,
    reread: bool = False,
    progress: Progress | None = None,
) -> ImageScan:
    """Capture the ELF files in images: in all those at ``paths``, and in those at ``roots`` that
    ``references`` select by names, digests, or the beginnings of digests.

    ``platform`` is a platform such as ``linux/arm64``, or ``all``; the default is that of this
    machine. An image that was read within a month is skipped, unless ``reread``. Raises
    `StoreFull`, and `UsageError` for an invalid platform or a reference without an image.
    """
    scanner = image_scanner(store, paths, references, roots, platform=platform, reread=reread)
    summary = _ingest_archives(store, scanner, progress)
    return ImageScan(summary, scanner.images, scanner.unchanged, tuple(scanner.corrupt))


_ROOTS: Final = ("/var/lib/docker", "/var/lib/containers/storage", "/var/lib/containerd")
_ROOTS_OF_A_USER: Final = ("docker", "containers/storage")  # below $XDG_DATA_HOME


def images_meant(
    words: Iterable[str], roots: Iterable[str] = ()
) -> tuple[list[bytes], list[str], list[bytes]]:
    """Return the paths, the references and the roots for `scan_images` that a user means.

    A word that is no file is a reference. Without ``roots`` these are the existing directories in
    which the engines of this user keep images.
    """
    paths: list[bytes] = []
    references: list[str] = []
    for word in words:
        if os.path.lexists(word):
            paths.append(os.fsencode(word))
        else:
            references.append(word)
    places = list(roots)
    if not places:
        places = list(_ROOTS)
        if os.geteuid() != 0:
            base = os.path.expanduser(os.environ.get("XDG_DATA_HOME") or "~/.local/share")
            places = [os.path.join(base, place) for place in _ROOTS_OF_A_USER]
        places = [place for place in places if os.path.isdir(place)]
    return paths, references, [os.fsencode(place) for place in places]


def image_scanner(
    store: Store,
    paths: Sequence[bytes],
    references: Sequence[str] = (),
    roots: Sequence[bytes] = (),
    *,
    platform: str | None = None,
    reread: bool = True,
) -> ImageScanner:
    """Return a scanner of the images that `scan_images` captures; raises `UsageError`."""
    from buildidfs.capture.image.scanner import ImageScanner
    from buildidfs.formats.container import oci

    wanted = None
    if platform is None:
        wanted = oci.platform_of(os.uname().machine)
    elif platform != "all" and (wanted := oci.parsed_platform(platform)) is None:
        raise UsageError(f"not a platform: {platform!r}; try linux/arm64, or all")
    return ImageScanner(
        StoreMemo(store), paths, references, roots,
        platform=wanted, spool_directory=store.path, reread=reread,
    )  # fmt: skip


class _Scanner(Protocol):
    """A scanner of archives. ``whole`` has the archives that were read to their end, as far as
    their items have been yielded; they need not be read again.
    """

    whole: list[FileIdentity]

    @property
    def share(self) -> float | None: ...

    def __iter__(self) -> Generator[Found, None, None]: ...


def _ingest_archives(store: Store, scanner: _Scanner, progress: Progress | None) -> ScanSummary:
    """Ingest all archives, a portion at a time, and remember those that were read to the end."""
    total = ScanSummary()
    found = iter(scanner)
    try:
        while True:
            portion = _Portion(found)
            show = None if progress is None else _Continued(progress, total)
            try:
                part = Ingest(store).run(portion.items(), show, lambda: scanner.share)
            except Interrupted as error:
                raise interrupted(total.captured + error.kept) from error
            whole, scanner.whole = scanner.whole, []
            # If a file could not be stored, its archive is not remembered.
            if len(part.unreadable) == portion.unreadable and not part.omitted:
                now = time.time_ns()
                store.remember([NewAbsence(mark, now, Absence.NOT_ELF) for mark in whole])
            total.add(part)
            if portion.is_last:
                return total
    finally:
        found.close()


class _Continued(NamedTuple):
    """Adds the progress of a portion to that of the portions before."""

    progress: Progress
    before: ScanSummary

    def __call__(self, done: int, what: str, *, size: int = 0, share: float | None = None) -> None:
        size += self.before.copied_bytes
        self.progress(self.before.files + done, what, size=size, share=share)


class _Portion:
    """The next items; ``is_last`` is True if no others follow."""

    def __init__(self, found: Generator[Found, None, None]) -> None:
        self._found = found
        self.unreadable = 0
        self.is_last = False

    def items(self) -> Generator[Found, None, None]:
        """Yield the items of one portion."""
        for _ in range(_PORTION):
            item = next(self._found, None)
            if item is None:
                self.is_last = True
                return
            self.unreadable += isinstance(item, Unreadable)
            yield item


def scan_kernel(
    store: Store,
    settings: Settings,
    *,
    everything: bool = False,
    root: bytes | None = None,
    progress: Progress | None = None,
) -> ScanSummary:
    """Capture the running kernel: its symbols, files and loaded modules, with debug files.

    ``everything`` adds all installed kernels and modules. With a ``root`` only the kernels and
    modules installed below that directory are captured. Raises `StoreFull`.
    """
    from buildidfs.capture.scan.kernel import InstalledKernels, KernelScanner

    memo = StoreMemo(store)
    namespaces = settings.container.namespaces

    def found() -> Iterator[Found]:
        if root is None:
            yield from KernelScanner(
                memo, all_files=True, spool_directory=store.path, container_namespaces=namespaces
            )
        if everything or root is not None:
            yield from InstalledKernels(
                memo, root or b"/", spool_directory=store.path, container_namespaces=namespaces
            )

    return Ingest(store).run(found(), progress)


def add(
    store: Store,
    settings: Settings,
    paths: Sequence[bytes],
    *,
    build_id: BuildId | None = None,
    kallsyms: bool = False,
    progress: Progress | None = None,
) -> ScanSummary:
    """Capture single files and their debug files (`capture.scan.tree`).

    Raises `StoreFull`.
    """
    from buildidfs.capture.scan.tree import GivenFiles

    scanner = GivenFiles(
        StoreMemo(store),
        paths,
        build_id=build_id,
        kallsyms=kallsyms,
        spool_directory=store.path,
        container_namespaces=settings.container.namespaces,
        debug_directories=_debug_directories(settings),
    )
    return Ingest(store).run(scanner, progress)


def trust_of(rules: Sequence[TrustRule]) -> Callable[[Origin], tuple[Trust, Standing]]:
    """Return a function that returns the trust in a file, by the first rule that fits its place.

    The rules are ``[trust]`` of buildidfs.toml(5). A rule is the operator's word and gives
    `Standing.GIVEN` at least. Without a rule the trust that the scanner found stays.
    """
    compiled = [
        (_glob_matcher(rule.path), _glob_matcher(rule.container), Trust[rule.level.upper()])
        for rule in rules
    ]

    def believed(origin: Origin) -> tuple[Trust, Standing]:
        for path, container, level in compiled:
            if path(origin.path) and container(os.fsencode(origin.container)):
                return level, max(origin.standing, Standing.GIVEN)
        return origin.trust, origin.standing

    return believed


def _glob_matcher(glob: str | None) -> Callable[[bytes], object]:
    """Return a function that is true for bytes that a glob fits; for None it is always true."""
    if glob is None:
        return lambda text: True
    # Bytes, because the paths of containers may not be valid text.
    return wording.glob(glob).match
