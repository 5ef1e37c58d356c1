# SPDX-License-Identifier: Apache-2.0
"""The common part of all archives: bytes that come in order, and members with names.

A decoder takes its bytes from a `ByteStream` in order, and stops at the content of each member. The
caller then takes content from the source, as far as it needs it, and the decoder skips the rest. So
a member is never in memory as a whole, and no memory is allocated by a claimed size.
"""

from __future__ import annotations

import enum
from typing import Final, Protocol

import msgspec

from buildidfs.formats.budget import Budget

NAME_MAX_BYTES: Final = 4096
"""PATH_MAX: no installed file has a longer name."""

MEMBER_STEPS: Final = 24
"""The cost of a member of an archive, see `work_of`."""

_STEPS_LEAST: Final = 1 << 19
_NAME_STEP_BYTES: Final = 16  # names are kept, so that their memory counts

_ID_MAX: Final = 2**32 - 1


class Damaged(Exception):
    """An archive is damaged; ``str()`` is the reason for the user."""


def budget_of(size: int) -> Budget:
    """Return the budget of an archive that has ``size`` bytes, before it is decompressed.

    No archive that is not compressed can exceed it. Its error is `Damaged`.
    """
    reason = "its members take more time than those of an archive of its size"
    return Budget(_STEPS_LEAST + size, lambda: Damaged(reason))


def work_of(name: bytes) -> int:
    """Return the steps that a member with that name costs."""
    return MEMBER_STEPS + len(name) // _NAME_STEP_BYTES


class ByteStream(Protocol):
    """A source of bytes in order.

    Decoders charge members and headers to ``budget``, so that an archive of few bytes cannot have
    as many of them as its decompressed size allows.
    """

    budget: Budget

    @property
    def position(self) -> int:
        """The number of bytes taken or skipped so far."""

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes; fewer only at the end."""

    def skip(self, size: int) -> None:
        """Skip ``size`` bytes; raises `Damaged` if there are fewer."""


class Type(enum.Enum):
    """The type of a member. Symbolic links, devices and other types without bytes are OTHER."""

    FILE = enum.auto()
    HARD_LINK = enum.auto()
    DIRECTORY = enum.auto()
    OTHER = enum.auto()


class Member(msgspec.Struct, frozen=True, gc=False):
    """One member, as the archive describes it: every field is a claim.

    ``name`` is raw, see `installed`. ``size`` is that of the file; ``stored`` bytes of it follow in
    the source. Fewer bytes are stored if the file has holes: ``extents``, (offset, size) in the
    file, are its parts that are not holes. ``target`` is the target of a symbolic or hard link.
    ``link`` is the same for all names of a file in formats that have no other way to link them
    (cpio), and None in others. ``mode`` has permission bits only.
    """

    name: bytes
    type: Type
    size: int = 0
    stored: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    target: bytes = b""
    extents: tuple[tuple[int, int], ...] | None = None
    link: tuple[int, int] | None = None


class Packing(enum.Enum):
    """The compression of a file."""

    GZIP = enum.auto()
    XZ = enum.auto()
    LZMA = enum.auto()
    ZSTD = enum.auto()
    BZIP2 = enum.auto()
    LZ4 = enum.auto()
    """The legacy format, which kernels use: blocks in a row ("lz4 -l")."""


PACKING_HEAD: Final = 6
"""The number of bytes that `packing` needs."""

_MAGICS: Final = (
    (b"\x1f\x8b\x08", Packing.GZIP),
    (b"\xfd7zXZ\0", Packing.XZ),
    (b"\x28\xb5\x2f\xfd", Packing.ZSTD),
    (b"BZh", Packing.BZIP2),
    (b"\x5d\0\0", Packing.LZMA),
    (b"\x02\x21\x4c\x18", Packing.LZ4),
)


def packing(head: bytes) -> Packing | None:
    """Return the compression of a file that begins with ``head``; None if it is not compressed.

    A zstd file may begin with a skippable frame (0x184D2A50 to 0x184D2A5F, RFC 8878).
    """
    for magic, kind in _MAGICS:
        if head.startswith(magic):
            return kind
    if head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:
        return Packing.ZSTD
    return None


def installed(name: bytes) -> bytes:
    """Return the path at which a member is installed: from the root, without ``.``, ``..`` or
    ``//``.

    ``..`` does not lead out of the root. The name is cut at a NUL, which no path can contain. The
    root itself is ``/``.
    """
    parts: list[bytes] = []
    for part in name.partition(b"\0")[0].split(b"/"):
        if part == b"..":
            del parts[-1:]
        elif part not in (b"", b"."):
            parts.append(part)
    return b"/" + b"/".join(parts)


def bounded_id(number: int) -> int:
    """Return a user or group ID; 65534 if the number is invalid."""
    return number if 0 <= number <= _ID_MAX else 65534


def exactly(source: ByteStream, size: int, what: str) -> bytes:
    """Take exactly ``size`` bytes; raises `Damaged` with the name ``what`` if there are fewer."""
    data = source.take(size)
    if len(data) < size:
        raise Damaged(f"ends in the middle of {what}")
    return data
