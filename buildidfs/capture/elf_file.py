# SPDX-License-Identifier: Apache-2.0
"""Helpers of scanners and ingest: read open ELF files, and make files for copies."""

from __future__ import annotations

import os
from typing import Final

from buildidfs.formats.elf import identify as elf_identify
from buildidfs.formats.elf import other_ids
from buildidfs.linux import file_ops
from buildidfs.linux.file_ops import closing_on_error
from buildidfs.model import Absence, BuildId, is_shared

_COPIES: Final = "/var/tmp"


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
    try:
        return os.open(_COPIES, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return memory_file(b"buildidfs-copy", b"")
