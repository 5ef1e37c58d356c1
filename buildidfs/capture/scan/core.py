# SPDX-License-Identifier: Apache-2.0
"""Open core files, and capture the vDSO from a core.

The vDSO is the only code that is complete in a core; all other code is in mapped files, of which a
core has a page or two. systemd-coredump(8) compresses cores; such a core is decompressed into a
file without a name.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

from buildidfs.capture.archive import stream
from buildidfs.capture.base import reader, scratch_file
from buildidfs.capture.origin.builder import access_of
from buildidfs.capture.process import scanner
from buildidfs.errors import UsageError
from buildidfs.formats.archive.common import Damaged
from buildidfs.formats.elf import core
from buildidfs.linux import inodes, machine, namespaces, procfs
from buildidfs.linux.file_ops import (
    Fd,
    closing_fd,
    closing_on_error,
    on_error,
    read_fully,
    write_fully_at,
)
from buildidfs.model import NamespaceSet, Trust

if TYPE_CHECKING:
    from buildidfs.capture.base import Found, Memo
    from buildidfs.formats.elf.core import Core, Module
    from buildidfs.model import BuildId

_HEAD: Final = 64
_CONTENT_MAX: Final = 16 << 30

# Frames of lz4, which systemd-coredump(8) makes where it has no zstd, are not read here.
_LZ4_FRAME: Final = b"\x04\x22\x4d\x18"


class CoreFile(Fd):
    """An open core file with its decoded notes; a context manager.

    ``mtime_ns`` is the time at which it was written, in nanoseconds of Unix time. ``cut_off`` is
    the reason if the file is not whole, or empty. ``fd`` has the decompressed content, and
    ``access`` is the access to the file. Raises `UsageError` if the file is not a core file, or
    cannot be opened.
    """

    def __init__(self, path: bytes) -> None:
        self.path = path
        super().__init__(_open(path))
        with on_error(self.close):
            try:
                self.mtime_ns = os.fstat(self.fd).st_mtime_ns
                self.access = access_of(self.fd)
                damage = self._decompress()
                status = os.fstat(self.fd)
                parsed = core.parse(reader(self.fd), status.st_size)
                if parsed is None:
                    raise UsageError(f"{_shown(path)}: {_what_else(os.pread(self.fd, _HEAD, 0))}")
            except OSError as error:
                raise UsageError(f"{_shown(path)}: {error.strerror or error}") from error
        self.core: Core = parsed
        self.cut_off = ""
        if parsed.claimed > status.st_size:
            self.cut_off = f"cut off after {status.st_size} of {parsed.claimed} bytes"
        if damage:
            self.cut_off = f"cut off after {status.st_size} bytes: {damage}"

    def _decompress(self) -> str | None:
        """Replace the file by its content if it is compressed; return the reason if the content is
        not whole.

        Bytes after the first piece are decompressed only for a core file. Raises `UsageError`,
        OSError.
        """
        region = stream.Region(self.fd, 0, os.fstat(self.fd).st_size)
        if region.packing() is None:
            return None
        with closing_on_error(scratch_file()) as copy:
            size, why = 0, ""
            try:
                for piece in stream.unpacked(region, _CONTENT_MAX).all():
                    if not size and not core.is_core(bytes(piece[:_HEAD])):
                        raise UsageError(f"{_shown(self.path)}: not an ELF core file, compressed")
                    if piece[0] or bytes(piece).strip(b"\0"):  # holes take no space
                        write_fully_at(copy, piece, size)
                    size += len(piece)
            except Damaged as error:
                why = str(error)
            if not size:
                raise UsageError(f"{_shown(self.path)}: {why or 'empty'}")
            os.ftruncate(copy, size)
        self.replace(copy)
        return why

    def pages(self, module: Module) -> tuple[tuple[int, bytes], ...]:
        """Return the bytes of a module's file that the core has, each with its offset in the file.

        Raises `UsageError`.
        """
        try:
            return tuple(
                (offset, read_fully(self.fd, place.size, place.offset))
                for offset, place in module.pages
            )
        except OSError as error:
            raise UsageError(f"{_shown(self.path)}: {error.strerror or error}") from error

    def vdso(self, memo: Memo, wanted: set[BuildId]) -> Found | None:
        """Return the vDSO in the core, if its build ID is one of ``wanted``.

        The process could have written to it, and so could each owner of the core. Raises OSError.
        """
        place = self.core.vdso
        for module in self.core.modules:
            if module.path == core.VDSO and module.build_id in wanted and place is not None:
                data = os.pread(self.fd, place.size, place.offset)
                if len(data) == place.size:
                    return scanner.captured_vdso(
                        memo, data, module.build_id,
                        namespaces=NamespaceSet(), host=machine.host_name(), trust=Trust.UNKNOWN,
                        scanner="core", access=self.access,
                    )  # fmt: skip
        return None


def is_core(path: bytes) -> bool:
    """Return True if the file is an ELF core file, or a compressed one; False if it is not, or
    cannot be read.
    """
    try:
        with closing_fd(_open(path)) as fd:
            region = stream.Region(fd, 0, os.fstat(fd).st_size)
            return core.is_core(stream.unpacked(region, _CONTENT_MAX).take(_HEAD))
    except (UsageError, OSError, Damaged):
        return False


def living_mount_namespaces() -> set[int]:
    """Return the mount namespaces of running processes, by `Origin.mnt_ns_id`.

    The result is empty before Linux 6.11, where they have no such number. Processes that may not be
    read are left out.
    """
    found = set()
    for pid in procfs.pids():
        with contextlib.suppress(OSError), closing_fd(procfs.open_pid(pid)) as fd:
            found.add(namespaces.mnt_ns_id(fd))
    return found - {0}


def _open(path: bytes) -> int:
    """Return a descriptor of a regular file. Raises `UsageError`."""
    try:
        return inodes.open_regular(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{_shown(path)}: {reason}") from error


def _what_else(head: bytes) -> str:
    if head.startswith(_LZ4_FRAME):
        return "not a core file, but compressed with lz4; decompress it first"
    return "not an ELF core file"


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")
