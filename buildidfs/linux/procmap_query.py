# SPDX-License-Identifier: Apache-2.0
"""PROCMAP_QUERY: the memory map of a process without its text (commit ed5d583a88a9, Linux 6.11).

The kernel skips what was not asked for (data, anonymous memory) and gives names as they are, with
nothing escaped. Measured three to four times as fast as reading and parsing the text.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import struct
from collections.abc import Iterator

from buildidfs.linux import syscalls
from buildidfs.model import Mapping

# struct procmap_query of linux/fs.h: size, query_flags, query_addr, vma_start, vma_end, vma_flags,
# vma_page_size, vma_offset, inode; dev_major, dev_minor, vma_name_size, build_id_size;
# vma_name_addr, build_id_addr.
_QUERY = struct.Struct("=9Q 4I 2Q")
_ANSWER = struct.Struct("=24x QQ 16x QQ III 4x 16x")
_ADDRESS = struct.Struct("=Q")
_ADDRESS_AT = 16
_SIZE = struct.Struct("=I")
_NAME_SIZE_AT = 80
_NAME_ADDRESS_AT = 88
_BUILD_ID_SIZE_AT = 84

_REQUEST = syscalls.ioc_read_write(ord("f"), 17, _QUERY.size)

_EXECUTABLE = 0x04
_COVERING_OR_NEXT = 0x10
_FILE_BACKED = 0x20

_NAME_MAX = 4096
_BUILD_ID_MAX = 20  # BUILD_ID_SIZE_MAX of linux/buildid.h
_ADDRESS_LIMIT = 1 << 64
_DELETED = b" (deleted)"


def executable_mappings(maps_fd: int, *, only_files: bool) -> Iterator[Mapping]:
    """The executable mappings by ascending address; ``only_files`` those with a file behind them.

    Anonymous memory has an inode number of 0.

    ``maps_fd`` is what `procfs.open_maps` gives. A name longer than 4095 bytes is not to be had:
    such a mapping has an empty path. What the process maps meanwhile may or may not be seen.

    Raises OSError: ENOTTY where the kernel lacks the query, ESRCH when the process is gone.
    """
    flags = _EXECUTABLE | _FILE_BACKED if only_files else _EXECUTABLE
    for start, end, offset, inode, major, minor, name in _query(maps_fd, flags):
        deleted = name.endswith(_DELETED)
        if deleted:
            name = name[: -len(_DELETED)]
        yield Mapping(start, end, True, offset, (major, minor), inode, name, deleted)


def executable_file_mappings(maps_fd: int) -> Iterator[Mapping]:
    """`executable_mappings` of files."""
    return executable_mappings(maps_fd, only_files=True)


def vdso(maps_fd: int) -> tuple[int, int] | None:
    """Where the process's vDSO begins and ends, or None if it has none.

    Raises OSError as `executable_file_mappings` does.
    """
    for start, end, _offset, _inode, _major, _minor, name in _query(maps_fd, _EXECUTABLE):
        if name == b"[vdso]":
            return start, end
    return None


def executable_at(maps_fd: int, address: int) -> tuple[int, int] | None:
    """Where the executable mapping of a file begins and ends that ``address`` is in, if it is.

    Raises OSError as `executable_file_mappings` does.
    """
    for start, end, *_ in _query(maps_fd, _EXECUTABLE | _FILE_BACKED, address):
        return (start, end) if start <= address else None
    return None


def build_id(maps_fd: int, address: int) -> bytes | None:
    """The build ID of the file that is mapped at ``address``, as the kernel reads it.

    None if nothing is mapped there, or no file with a build ID of 1 to 20 bytes in a note that a
    program header leads to. The kernel may have to ask the filesystem for the page.

    Raises OSError as `executable_file_mappings` does.
    """
    buffer = ctypes.create_string_buffer(_BUILD_ID_MAX)
    query = bytearray(_QUERY.size)
    _QUERY.pack_into(
        query, 0,
        _QUERY.size, 0, address, 0, 0, 0, 0, 0, 0,
        0, 0, 0, _BUILD_ID_MAX,
        0, ctypes.addressof(buffer),
    )  # fmt: skip
    try:
        fcntl.ioctl(maps_fd, _REQUEST, query)
    except FileNotFoundError:
        return None
    (size,) = _SIZE.unpack_from(query, _BUILD_ID_SIZE_AT)
    return buffer.raw[:size] or None


_Answer = tuple[int, int, int, int, int, int, bytes]


def _query(maps_fd: int, flags: int, address: int = 0) -> Iterator[_Answer]:
    """Ask for one mapping after the other; the buffers are reused from call to call."""
    name_buffer = ctypes.create_string_buffer(_NAME_MAX)
    name_view = memoryview(name_buffer).cast("B")
    query = bytearray(_QUERY.size)
    _QUERY.pack_into(
        query, 0,
        _QUERY.size, flags | _COVERING_OR_NEXT, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0,
        ctypes.addressof(name_buffer), 0,
    )  # fmt: skip
    ioctl = fcntl.ioctl
    while address < _ADDRESS_LIMIT:
        _ADDRESS.pack_into(query, _ADDRESS_AT, address)
        _SIZE.pack_into(query, _NAME_SIZE_AT, _NAME_MAX)
        try:
            try:
                ioctl(maps_fd, _REQUEST, query)
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                _without_name(maps_fd, query)
        except FileNotFoundError:
            return  # nothing at or above this address
        start, end, offset, inode, major, minor, length = _ANSWER.unpack_from(query)
        name = bytes(name_view[: length - 1]) if length else b""
        yield start, end, offset, inode, major, minor, name
        address = end


def _without_name(maps_fd: int, query: bytearray) -> None:
    """Ask the same again, except for the name: a size of 0 is valid without a buffer only."""
    (name_address,) = _ADDRESS.unpack_from(query, _NAME_ADDRESS_AT)
    _SIZE.pack_into(query, _NAME_SIZE_AT, 0)
    _ADDRESS.pack_into(query, _NAME_ADDRESS_AT, 0)
    fcntl.ioctl(maps_fd, _REQUEST, query)
    _ADDRESS.pack_into(query, _NAME_ADDRESS_AT, name_address)
