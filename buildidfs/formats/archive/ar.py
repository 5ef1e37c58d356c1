# SPDX-License-Identifier: Apache-2.0
"""The outer form of a Debian package: an ar archive of three members (deb(5))."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from buildidfs.formats.archive.common import Damaged, Source

MAGIC: Final = b"!<arch>\n"

_HEADER: Final = 60
_SIZE: Final = slice(48, 58)
_END: Final = b"`\n"
_MEMBERS_MAX: Final = 64  # a package has three, and perhaps some that no program knows yet


class ArMember(NamedTuple):
    """A member; ``size`` bytes of it follow in the source."""

    name: bytes
    size: int


def members(source: Source) -> Iterator[ArMember]:
    """The members of an archive that begins where ``source`` is; raises `Damaged`.

    The source is at the content of the member just given. Long names are not understood, for deb(5)
    has none.
    """
    if source.take(len(MAGIC)) != MAGIC:
        raise Damaged("not an ar archive")
    for _ in range(_MEMBERS_MAX):
        header = source.take(_HEADER)
        if not header:
            return
        if len(header) < _HEADER or header[58:] != _END:
            raise Damaged(f"no header at {source.position - len(header)}")
        digits = header[_SIZE].rstrip(b" ")
        if not digits.isdigit():
            raise Damaged(f"no size at {source.position - len(header)}")
        member = ArMember(header[:16].rstrip(b" ").removesuffix(b"/"), int(digits))
        end = source.position + member.size
        yield member
        source.skip(end - source.position)
        source.take(member.size & 1)  # the padding of the last one may be left out
    raise Damaged(f"more than {_MEMBERS_MAX} members")
