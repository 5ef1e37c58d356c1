# SPDX-License-Identifier: Apache-2.0
"""The decoders of archives, and what none of their members may claim: cpio, tar."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from buildidfs.formats.archive import common, packages, tar
from tests.fuzz.target import MEGABYTE, Target, filled, refusal


class Bytes:
    """An `archives.Source` of bytes in memory, which goes forward and nowhere else."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        assert size >= 0
        found = self._data[self.position : self.position + size]
        self.position += len(found)
        return found

    def skip(self, size: int) -> None:
        """Pass over some."""
        assert size >= 0, "back to where it was"
        if self.position + size > len(self._data):
            raise common.Damaged("ends too early")
        self.position += size


def _walk(members: Iterable[common.Member], data: bytes) -> None:
    """Claims of members are never negative, and there are no more members than room."""
    for count, member in enumerate(members):
        assert count <= len(data) // 8
        assert member.size >= 0
        assert member.stored >= 0
        assert max(len(member.name), len(member.target)) <= common.NAME_MAX_BYTES
        assert member.mode & ~0o7777 == 0
        assert 0 <= member.uid < 1 << 32
        assert 0 <= member.gid < 1 << 32
        assert -(1 << 63) < member.mtime_ns < 1 << 63
        inside = common.installed(member.name)
        assert inside.startswith(b"/")
        assert not {b"..", b".", b""} & {*inside[1:].split(b"/")} or inside == b"/"
        for offset, length in member.extents or ():
            assert 0 <= offset <= offset + length <= member.size


def _check(
    decode: Callable[[Bytes], Iterable[common.Member]],
) -> Callable[[bytes], None]:
    def check(data: bytes) -> None:
        error = refusal(lambda: _walk(decode(Bytes(data)), data), common.Damaged)
        assert error is None or str(error)

    return check


# --- cpio, tar -----------------------------------------------------------------------------------


def _cpio_member(name: bytes, content: bytes, **changes: bytes) -> bytes:
    fields = {
        "ino": b"00000001", "mode": b"000081a4", "uid": b"00000000", "gid": b"00000000",
        "links": b"00000001", "mtime": b"00000007", "size": b"%08x" % len(content),
        "major": b"00000008", "minor": b"00000001", "rmajor": b"00000000", "rminor": b"00000000",
        "name": b"%08x" % (len(name) + 1), "check": b"00000000",
    }  # fmt: skip
    head = b"070701" + b"".join({**fields, **changes}.values()) + name + b"\0"
    head += bytes(-len(head) % 4)
    return head + content + bytes(-len(content) % 4)


_CPIO_END: Final = _cpio_member(b"TRAILER!!!", b"")


def _seed_cpio() -> Iterator[bytes]:
    linked = _cpio_member(b"./usr/bin/y", b"", links=b"00000002")
    yield _cpio_member(b"./usr/bin/x", b"content") + linked + _CPIO_END
    yield b"07070X00000000" + bytes(2) + b"content\0" + b"07070X00000001" + bytes(2) + _CPIO_END
    for size in (b"-0000010", b" +000010", b"ffffffff", b"0x000010", b"000_0010"):
        yield _cpio_member(b"x", bytes(16), size=size) + _CPIO_END
    yield b"07070X-0000001" + bytes(2) + _CPIO_END


def _huge_cpio() -> Iterator[bytes]:
    yield filled(_cpio_member(b"x", b""))
    yield filled(_cpio_member(b"x" * 4000, b""))
    yield filled(b"07070X00000000" + bytes(2))


_LISTED: Final = [
    common.Member(b"/usr/bin/x", common.Type.FILE, 7, 7),
    common.Member(b"/usr/bin/y", common.Type.DIRECTORY),
]


def _tar(form: int, members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=form) as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue().rstrip(b"\0") + bytes(1024)


def _summed(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def _seed_tar() -> Iterator[bytes]:
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        member = tarfile.TarInfo("./usr/bin/x")
        yield _tar(form, [(member, b"content")])
        if form != tarfile.USTAR_FORMAT:
            yield _tar(form, [(tarfile.TarInfo("d/" * 200 + "x"), b"content")])
    sparse = tarfile.TarInfo("sparse")
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0",
                          "GNU.sparse.name": "x", "GNU.sparse.realsize": "5000"}  # fmt: skip
    yield _tar(tarfile.PAX_FORMAT, [(sparse, b"1\n4096\n7\n".ljust(512, b"\0") + b"content")])
    mapped = tarfile.TarInfo("mapped")
    mapped.pax_headers = {"GNU.sparse.map": "0,3,9,4", "GNU.sparse.size": "20"}
    yield _tar(tarfile.PAX_FORMAT, [(mapped, b"content")])
    old = bytearray(tarfile.TarInfo("old").tobuf(tarfile.GNU_FORMAT))
    old[124:136], old[156:157] = b"00000000007\0", b"S"
    old[386:410], old[483:495] = b"00000000000\x0000000000007\0", b"00000010000\0"
    yield _summed(old) + b"content".ljust(512, b"\0") + bytes(1024)


def _check_tar(data: bytes) -> None:
    """As it is, and with the checksums right that damage has made wrong."""
    check = _check(lambda source: tar.members(source, concatenated=True))
    check(data)
    whole = b"".join(
        _summed(bytearray(block)) if block[257:262] == b"ustar" and len(block) == 512 else block
        for block in (data[at : at + 512] for at in range(0, len(data), 512))
    )
    if whole != data:
        check(whole)


def _huge_tar() -> Iterator[bytes]:
    header = bytearray(tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT))
    yield filled(bytes(header))
    yield bytes(MEGABYTE)
    for kind in (b"x", b"L", b"K", b"g"):
        header[156:157] = kind
        yield filled(_summed(header))
        header[124:136] = b"%011o\0" % (MEGABYTE - 1024)
        for body in (b"6 a=b\n", b"9", b" ", b"24 GNU.sparse.offset=11\n", b"a\0"):
            yield _summed(header) + filled(body, MEGABYTE - 1024) + bytes(512)
        header[124:136] = b"00000000000\0"
    header[156:157], header[482:483] = b"S", b"\1"
    blocks = (b"00000000000\x0000000000000\0" * 21 + b"\1").ljust(512, b"\0")
    yield _summed(header) + filled(blocks, MEGABYTE - 512)
    wide = tarfile.TarInfo("x")
    wide.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": "99999999"}
    for lines in (b"0\n" * 400_000, b"400000\n" + b"0\n" * 400_000, b"9" * 800_000):
        yield _tar(tarfile.PAX_FORMAT, [(wide, lines)])
    many = tarfile.TarInfo("x")
    many.pax_headers = {"GNU.sparse.map": "0,0," * 240_000, "GNU.sparse.size": "9"}
    yield _tar(tarfile.PAX_FORMAT, [(many, b"")])


TARGETS: Final = {
    "cpio": Target(
        _check(lambda source: packages.cpio_members(source, lambda: _LISTED)),
        _seed_cpio,
        _huge_cpio,
        ("archive.packages",),
    ),
    "tar": Target(
        _check_tar,
        _seed_tar,
        _huge_tar,
        ("archive.tar", "archive.common"),
        cost=_check(lambda source: tar.members(source, concatenated=True)),
    ),
}
