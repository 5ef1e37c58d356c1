# SPDX-License-Identifier: Apache-2.0
"""The interface of scanners, so that ingest need not know which one runs, and their helpers.

A scanner is an iterable of `Found`. A scanner opens files itself, because the way depends on the
scanner (map_files, a directory descriptor, process memory), and passes on the descriptor; from then
on the path of the file may vanish. Files that were captured before are recognised through `Memo`
without being opened. Scanners and ingest read open ELF files, and make files for copies, with the
functions here.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from buildidfs.formats.elf import identify as elf_identify
from buildidfs.formats.elf import other_ids
from buildidfs.linux import file_ops
from buildidfs.linux.file_ops import close_fds, closing_on_error
from buildidfs.model import Absence, BuildId, FileIdentity, Kind, Origin, Sighting, is_shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.formats.elf.identify import DebugLink


_DAY_NS: Final = 86_400 * 1_000_000_000


class Known(msgspec.Struct, frozen=True):
    """The remembered result for a file that was read before.

    ``build_id`` is None if the file has none; ``absence`` is then the reason.
    """

    build_id: BuildId | None = None
    absence: Absence | None = None


class Memo(Protocol):
    """The memory of earlier captures; `store.Store` provides it."""

    def recall(self, identity: FileIdentity) -> Known | None:
        """Return the earlier result for an unchanged file; None if it has to be read."""

    def knows_place(self, origin: Origin) -> bool:
        """Return True if the reach of a file at that place is known.

        The caller got the build ID of the file from `recall` before.
        """

    def debug_link(self, build_id: BuildId) -> DebugLink | None:
        """Return the section .gnu_debuglink of the file with a build ID from `recall`."""


def month(spread: int) -> int:
    """Return the number of the current period of 30 days; ``spread`` shifts the day on which
    periods begin.

    A known archive is not read again, so its files would look unused, and removed files would not
    be captured again. Therefore each archive is read again in each period.
    """
    return (time.time_ns() + spread % 30 * _DAY_NS) // (30 * _DAY_NS)


class PinnedFile(msgspec.Struct):
    """A sighting with an open, readable descriptor, which stays valid after the container exits.

    Use it as a context manager, or call `close`. ``kind`` overrides the kind found in the bytes
    (for the vDSO and kallsyms); ``build_id`` is for bytes without a build ID. ``is_copy`` is True
    if no other process can write to the file behind the descriptor.
    """

    sighting: Sighting
    fd: int
    kind: Kind | None = None
    build_id: BuildId | None = None
    is_copy: bool = False

    def close(self) -> None:
        """Close the file; safe to call twice."""
        fd, self.fd = self.fd, -1
        close_fds(fd)

    def __enter__(self) -> PinnedFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def reached(sighting: Sighting, reach: int) -> Sighting:
    """Return the sighting with ``reach`` in its origin; finding the reach takes time, so it
    is done only when needed.
    """
    origin = msgspec.structs.replace(sighting.origin, reach=reach)
    return Sighting(origin, sighting.seen_ns)


class Resighting(msgspec.Struct, frozen=True):
    """A file that the memo knows: it need not be read, only the time of the sighting is new."""

    sighting: Sighting
    known: Known


def resighted(
    memo: Memo, sighting: Sighting, known: Known, ask: Callable[[Sighting], Sighting]
) -> Resighting:
    """Return the record of a file that the memo knows.

    If the place is new, ``ask`` is called for the reach.
    """
    if known.build_id is not None and not memo.knows_place(sighting.origin):
        sighting = ask(sighting)
    return Resighting(sighting, known)


class Unreadable(msgspec.Struct, frozen=True):
    """A file or process that could not be captured, and the reason as a text.

    ``errno`` groups the reasons (0: not an operating system error); ``path`` names the file or
    process, raw bytes. ``build_id`` is the one that the kernel reports for a mapped file, if the
    kernel was asked.
    """

    path: bytes
    reason: str
    errno: int = 0
    build_id: BuildId | None = None

    @classmethod
    def of(cls, path: bytes, error: Exception) -> Unreadable:
        """Return the record of an error that a file or process at ``path`` has caused."""
        if isinstance(error, OSError):
            return cls(path, error.strerror or str(error), error.errno or 0)
        return cls(path, str(error))


Found = PinnedFile | Resighting | Unreadable


class Progress(Protocol):
    """Receives the progress of a command from time to time.

    ``done`` is the number of items, ``what`` the current path or step, ``size`` the number of bytes
    copied or read, and ``share`` the part of the whole, 0 to 1, if known.
    """

    def __call__(
        self, done: int, what: str, *, size: int = 0, share: float | None = None
    ) -> None: ...


_COPIES: Final = b"/var/tmp"


def reader(fd: int) -> elf_identify.ReadAt:
    """Return a function with which decoders read an open file; the file offset stays."""

    def read_at(offset: int, size: int) -> bytes:
        return os.pread(fd, size, offset)

    return read_at


def identify(fd: int, size: int | None = None) -> BuildId | Absence:
    """Return the ID that an open file is kept under, or the reason why it has none. Raises OSError.

    Usually this reads one page. The adopted ID of a program without a build ID also needs the end
    of the file; see `formats.elf.other_ids.adopted_id`.
    """
    return adopted(own_id(fd, size), fd)


def own_id(fd: int, size: int | None = None) -> BuildId | Absence:
    """Return the build ID in an open file, or the reason why it has none. Raises OSError."""
    return elf_identify.identify(os.pread(fd, elf_identify.HEAD_SIZE, 0), reader(fd), size)


def adopted(answer: BuildId | Absence, fd: int) -> BuildId | Absence:
    """Return the ID that an open file is kept under, given its `own_id`. Raises OSError."""
    if isinstance(answer, BuildId) and not is_shared(answer):
        return answer
    if answer in (Absence.NOT_ELF, Absence.EMPTY):
        return answer
    head, size = os.pread(fd, elf_identify.HEAD_SIZE, 0), os.fstat(fd).st_size
    return other_ids.adopted_id(answer, head, reader(fd), size)


def describe(fd: int, build_id: BuildId | None = None) -> elf_identify.ElfFile | Absence:
    """Describe an open file as debuggers see it, or say why it cannot be kept. Raises OSError.

    ``build_id`` is for an ELF file without one; if it is None, such a file gets an adopted ID.
    """
    return other_ids.describe(reader(fd), os.fstat(fd).st_size, build_id)


def memory_file(name: bytes, data: bytes | bytearray) -> int:
    """Make a file in memory with ``data``, and return its descriptor. Raises OSError."""
    with closing_on_error(os.memfd_create(os.fsdecode(name), os.MFD_CLOEXEC)) as fd:
        file_ops.write_fully(fd, data)
    return fd


def scratch_file() -> int:
    """Make an empty file without a name, on a disk if possible. Raises OSError."""
    with contextlib.suppress(OSError):
        fd = file_ops.open_unnamed(_COPIES)
        if fd is not None:
            return fd
    return memory_file(b"buildidfs-copy", b"")
