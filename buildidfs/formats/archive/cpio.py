# SPDX-License-Identifier: Apache-2.0
"""The cpio archives in rpm packages: "newc", and the short form for files of 4 GB and more.

Sources: cpio(5) of libarchive, "New ASCII Format"; rpm's lib/cpio.c and lib/rpmfi.c. In the short
form a header is only the number of a file in the header of the package, which has the rest.
"""

from __future__ import annotations

import struct
from binascii import unhexlify
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from buildidfs.formats.archive.common import (
    NAME_MAX_BYTES,
    Damaged,
    Member,
    Source,
    Type,
    bounded_id,
    bounded_time,
    exactly,
)

_MAGIC_SIZE: Final = 6
_MAGICS: Final = frozenset((b"070701", b"070702"))
_SHORT: Final = b"07070X"
_FIELDS: Final = 13
_TRAILER: Final = b"TRAILER!!!"

_FORMAT_MASK: Final = 0o170000
_TYPES: Final = {0o100000: Type.FILE, 0o040000: Type.DIRECTORY}


def members(source: Source, listed: Callable[[], Sequence[Member]] = tuple) -> Iterator[Member]:
    """The members of an archive that begins where ``source`` is; raises `Damaged`.

    The source is at the content of the member just given. ``listed`` is asked for the files as
    the header of the package has them, if the archive is of the short form. Of a file with several
    names all but the last come with no bytes, and `Member.link` says that they are the same.
    """
    start = source.position
    files: Sequence[Member] | None = None
    while True:
        magic = exactly(source, _MAGIC_SIZE, "a header")
        if magic in _MAGICS:
            member = _member(source, start)
        elif magic == _SHORT:
            (number,) = _numbers(exactly(source, 8, "a header"))
            files = listed() if files is None else files
            if number >= len(files):
                raise Damaged(f"file {number} of {len(files)}")
            member = files[number]
            _align(source, start)
        else:
            raise Damaged(f"no header at {source.position - _MAGIC_SIZE}")
        if member.name == _TRAILER:
            return
        end = source.position + member.stored
        yield member
        source.skip(end - source.position)
        _align(source, start)


def _align(source: Source, start: int) -> None:
    source.skip((start - source.position) % 4)


def _numbers(text: bytes) -> tuple[int, ...]:
    try:
        return struct.unpack(f">{len(text) // 8}I", unhexlify(text))
    except ValueError:
        raise Damaged("a header that is not made of numbers") from None


def _member(source: Source, start: int) -> Member:
    fields = _numbers(exactly(source, 8 * _FIELDS, "a header"))
    inode, mode, uid, gid, links, mtime, size, major, minor, _, _, name_size, _ = fields
    if not 0 < name_size <= NAME_MAX_BYTES:
        raise Damaged(f"a name of {name_size} bytes")
    name = exactly(source, name_size, "a name").partition(b"\0")[0]
    _align(source, start)
    type_ = type_of(mode)
    shared = (major << 32 | minor, inode) if links > 1 and type_ is Type.FILE else None
    return Member(
        name,
        type_,
        size,
        size,
        mode & 0o7777,
        bounded_id(uid),
        bounded_id(gid),
        bounded_time(mtime),
        link=shared,
    )


def type_of(mode: int) -> Type:
    """What a member is whose st_mode is this."""
    return _TYPES.get(mode & _FORMAT_MASK, Type.OTHER)


def is_symbolic_link(mode: int) -> bool:
    """Whether it is one whose st_mode is this."""
    return mode & _FORMAT_MASK == 0o120000
