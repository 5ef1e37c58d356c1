# SPDX-License-Identifier: Apache-2.0
"""Scans of what is packed: packages, and images of containers."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from buildidfs.capture.base import Unreadable
from buildidfs.errors import IntegrityError, UsageError
from buildidfs.ingest import Ingest, StoreMemo, Summary
from buildidfs.model import Absence
from buildidfs.store import NewAbsence

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from buildidfs.capture.base import Found
    from buildidfs.model import FileIdentity
    from buildidfs.store import Store

    Progress = Callable[[int, str], None]

# That an archive was read is known from when its files are safe: not only at the end of a scan.
_PORTION: Final = 20_000


class PackageScan(msgspec.Struct, frozen=True):
    """What a scan came to; ``unchanged`` of the ``packages`` had been read before."""

    summary: Summary
    packages: int
    unchanged: int


def scan_packages(
    store: Store, paths: Sequence[bytes], *, again: bool = False, progress: Progress | None = None
) -> PackageScan:
    """Capture the ELF files in packages, and in those below directories; raises `StoreFull`.

    A package that was read within a month and has not changed is not read, unless ``again``.
    """
    from buildidfs.capture.archive.packages import PackageScanner

    scanner = PackageScanner(StoreMemo(store), paths, spool_directory=store.path, again=again)
    summary = _ingest(store, scanner, progress)
    return PackageScan(summary, scanner.packages, scanner.unchanged)


class ImageScan(msgspec.Struct, frozen=True):
    """What a scan came to; ``unchanged`` of the ``images`` had been read before.

    ``corrupt`` has one error for each that does not have its digests, of which nothing was taken.
    """

    summary: Summary
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
    again: bool = False,
    progress: Progress | None = None,
) -> ImageScan:
    """Capture the ELF files in images: all those at ``paths``, and at ``roots`` those meant by
    ``references``: names, digests, or the beginnings of digests.

    ``platform`` is one such as ``linux/arm64``, or ``all``; by default that of this machine. An
    image that was read within a month is not read, unless ``again``. Raises `StoreFull`, and
    `UsageError` for a platform that is none and a reference that means nothing.
    """
    from buildidfs.capture.image.scanner import ImageScanner
    from buildidfs.formats.container import oci

    wanted = None
    if platform is None:
        wanted = oci.platform_of(os.uname().machine)
    elif platform != "all" and (wanted := oci.parsed_platform(platform)) is None:
        raise UsageError(f"not a platform: {platform!r}; try linux/arm64, or all")
    scanner = ImageScanner(
        StoreMemo(store), paths, references, roots,
        platform=wanted, spool_directory=store.path, again=again,
    )  # fmt: skip
    summary = _ingest(store, scanner, progress)
    return ImageScan(summary, scanner.images, scanner.unchanged, tuple(scanner.corrupt))


class _Scanner(Protocol):
    """A scanner of archives: ``whole`` stands for those that need not be read again.

    It is complete for what was yielded before.
    """

    whole: list[FileIdentity]

    def __iter__(self) -> Generator[Found, None, None]: ...


def _ingest(store: Store, scanner: _Scanner, progress: Progress | None) -> Summary:
    """Take everything in, a portion at a time, and remember what was read whole."""
    total = Summary()
    found = iter(scanner)
    try:
        while True:
            portion = _Portion(found)
            done = total.files

            def show(count: int, what: str, done: int = done) -> None:
                assert progress is not None
                progress(done + count, what)

            part = Ingest(store).run(portion.items(), None if progress is None else show)
            whole, scanner.whole = scanner.whole, []
            # If one could not be stored, nobody knows of which archive it was.
            if len(part.unreadable) == portion.unreadable and not part.noted:
                now = time.time_ns()
                store.remember([NewAbsence(mark, now, Absence.NOT_ELF) for mark in whole])
            _add(total, part)
            if portion.is_last:
                return total
    finally:
        found.close()


class _Portion:
    """The next items; ``is_last`` says that there are no others."""

    def __init__(self, found: Generator[Found, None, None]) -> None:
        self._found = found
        self.unreadable = 0
        self.is_last = False

    def items(self) -> Generator[Found, None, None]:
        """The items, and not more than there are in a portion."""
        for _ in range(_PORTION):
            item = next(self._found, None)
            if item is None:
                self.is_last = True
                return
            self.unreadable += isinstance(item, Unreadable)
            yield item


def _add(total: Summary, part: Summary) -> None:
    total.files += part.files
    total.captured += part.captured
    total.held += part.held
    total.copied_bytes += part.copied_bytes
    total.new_ids += part.new_ids
    total.absent.update(part.absent)
    total.unreadable += part.unreadable
    total.noted += part.noted
    total.noted_bytes += part.noted_bytes
    total.removed.merge(part.removed)
