# SPDX-License-Identifier: Apache-2.0
"""Archives in memory, for decoders that take their bytes in order."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator

from buildidfs.formats.archive.common import Damaged, Member, budget_of


class Bytes:
    """A `formats.archive.common.ByteStream` of these bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.budget = budget_of(len(data))
        self.position = 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        assert size >= 0
        taken = self._data[self.position : self.position + size]
        self.position += len(taken)
        return taken

    def skip(self, size: int) -> None:
        """Pass over bytes."""
        assert size >= 0
        if self.position + size > len(self._data):
            raise Damaged("ends in the middle of a member")
        self.position += size


def contents(members: Iterable[Member], source: Bytes) -> Iterator[tuple[Member, bytes]]:
    """Members with what is stored of them."""
    for member in members:
        yield member, source.take(member.stored)


def tar(
    members: Iterable[tuple[str | tarfile.TarInfo, bytes]],
    *,
    format_: int = tarfile.GNU_FORMAT,
    end: bool = True,
) -> bytes:
    """A tar archive of files with these names; without an ``end``, more can be appended."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format_) as archive:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            if info.isreg():
                info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        length = archive.offset
    return buffer.getvalue() if end else buffer.getvalue()[:length]


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, target: str = "", **fields: int
) -> tarfile.TarInfo:
    """A member that is not just a file: a link, a directory, one with another mode."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def ar_member(name: bytes, data: bytes, size: bytes | None = None) -> bytes:
    """A member of an ar archive, which claims to have another ``size`` if one is given."""
    claimed = b"%d" % len(data) if size is None else size
    header = b"%-16s%-12s%-6s%-6s%-8s%-10s`\n" % (name, b"0", b"0", b"0", b"100644", claimed)
    return header + data + b"\n" * (len(data) & 1)


def deb(data: bytes, control: bytes = b"Package: app\nVersion: 1-2\nArchitecture: all\n") -> bytes:
    """A Debian package with this tar archive, compressed or not."""
    return b"!<arch>\n" + b"".join(
        (
            ar_member(b"debian-binary", b"2.0\n"),
            ar_member(b"control.tar", tar([("./control", control)])),
            ar_member(b"data.tar", data),
        )
    )
