# SPDX-License-Identifier: Apache-2.0
"""Packages: the formats of Debian and rpm, and the name that a package gives itself.

A Debian package is an ar archive of three members (deb(5)). An rpm package is a header, which has
the list of its files, and a cpio archive. Packages of Alpine and Arch are tar archives.

Sources: deb(5), deb-control(5); rpm's docs/manual/format.md, lib/header.c, lib/rpmfi.c and
lib/cpio.c, and the numbers of its include/rpm/rpmtag.h; cpio(5) of libarchive, "New ASCII Format";
the Alpine wiki, "Apk spec"; makepkg of pacman, write_pkginfo.
"""

from __future__ import annotations

import re
import struct
from binascii import unhexlify
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, overload

from buildidfs.formats.archive.common import (
    NAME_MAX_BYTES,
    ByteStream,
    Damaged,
    Member,
    Type,
    bounded_id,
    exactly,
    work_of,
)
from buildidfs.model import bounded_ns

RPM_MAGIC: Final = b"\xed\xab\xee\xdb"

_LEAD_SIZE: Final = 96
_HEADER_MAGIC: Final = b"\x8e\xad\xe8\x01"
_INTRO: Final = struct.Struct(">4s4xII")
_ENTRY: Final = struct.Struct(">IIII")
_COUNTS: Final = struct.Struct(">II")
# The limits of rpm itself (lib/header.c: hdrchkTags, hdrchkData); the data to a quarter.
_ENTRIES_MAX: Final = 0xFFFF
_DATA_MAX: Final = 64 << 20
_FILES_MAX: Final = 1 << 18

_INT16, _INT32, _INT64, _STRING, _STRING_ARRAY, _I18N_STRING = 3, 4, 5, 6, 8, 9
_FORMATS: Final = {_INT16: "H", _INT32: "I", _INT64: "Q"}

_NAME, _VERSION, _RELEASE, _EPOCH, _ARCH = 1000, 1001, 1002, 1003, 1022
_FILE_SIZES, _FILE_MODES, _FILE_TIMES, _FILE_DEVICES, _FILE_INODES = 1028, 1030, 1034, 1095, 1096
_LONG_FILE_SIZES, _DIR_INDEXES, _BASE_NAMES, _DIR_NAMES = 5008, 1116, 1117, 1118
_FILE_SIGNATURES: Final = 274  # for the header of signatures
_SIGNATURE_MAX: Final = 1024  # a signature with an RSA key of 4096 bits has 521 bytes


class RpmHeader:
    """The header of a package. Entries are decoded on access.

    ``signed`` is the header of its signatures.
    """

    def __init__(self, index: bytes, data: bytes, signed: RpmHeader | None = None) -> None:
        self._signed = signed
        self._data = data
        self._entries = {
            tag: (kind, offset, count) for tag, kind, offset, count in _ENTRY.iter_unpack(index)
        }

    @property
    def name(self) -> tuple[bytes, bytes, bytes]:
        """Return name; version with epoch and release, ``1:2.3-4``; architecture. Any
        may be empty.
        """
        epoch = self._numbers(_EPOCH, 1)
        version = self._text(_VERSION)
        if release := self._text(_RELEASE):
            version += b"-" + release
        if epoch:
            version = b"%d:%s" % (epoch[0], version)
        return self._text(_NAME), version, self._text(_ARCH)

    @classmethod
    def of_database(cls, blob: bytes) -> RpmHeader:
        """Return the header of an installed package from a record of rpm's database."""
        if len(blob) < _COUNTS.size:
            return cls(b"", b"")
        entries, size = _COUNTS.unpack_from(blob)
        end = _COUNTS.size + _ENTRY.size * min(entries, _ENTRIES_MAX)
        index = blob[_COUNTS.size : end]
        return cls(index[: len(index) // _ENTRY.size * _ENTRY.size], blob[end : end + size])

    def path(self, number: int) -> bytes:
        """Return the path of a file by its number; empty if there is none."""
        names, directories = self._texts(_BASE_NAMES), self._texts(_DIR_NAMES)
        of = self._numbers(_DIR_INDEXES, len(names))
        if not 0 <= number < len(of) or of[number] >= len(directories):
            return b""
        return directories[of[number]] + names[number]

    def signatures(self) -> dict[bytes, bytes]:
        """Return the IMA signatures of files by path, in the form of ``security.ima``.

        Paths that exceed `_DATA_MAX` bytes together are left out.
        """
        texts = [] if self._signed is None else self._signed._texts(_FILE_SIGNATURES)
        names, directories = self._texts(_BASE_NAMES), self._texts(_DIR_NAMES)
        of = self._numbers(_DIR_INDEXES, len(names))
        found: dict[bytes, bytes] = {}
        room = _DATA_MAX
        for text, name, number in zip(texts, names, of, strict=False):
            if not 0 < len(text) <= 2 * _SIGNATURE_MAX or number >= len(directories):
                continue
            length = len(directories[number]) + len(name)
            room -= length
            if length <= NAME_MAX_BYTES and room >= 0:
                with suppress(ValueError):
                    found[directories[number] + name] = unhexlify(text)
        return found

    def files(self) -> FileList:
        """Return the files by number, for `cpio_members`; raises `Damaged`."""
        names = self._texts(_BASE_NAMES)
        directories = self._texts(_DIR_NAMES)
        count = len(names)
        of = self._numbers(_DIR_INDEXES, count)
        sizes = self._numbers(_LONG_FILE_SIZES, count) or self._numbers(_FILE_SIZES, count)
        modes = self._numbers(_FILE_MODES, count)
        if not len(of) == len(sizes) == len(modes) == count or max(of, default=-1) >= len(
            directories
        ):
            raise Damaged("a list of files that does not fit together")
        times = self._numbers(_FILE_TIMES, count) or (0,) * count
        devices = self._numbers(_FILE_DEVICES, count) or (0,) * count
        inodes = self._numbers(_FILE_INODES, count) or tuple(range(count))
        return FileList(names, directories, of, sizes, modes, times, devices, inodes)

    def _text(self, tag: int) -> bytes:
        kind, offset, _ = self._entries.get(tag, (0, 0, 0))
        if kind not in (_STRING, _I18N_STRING) or offset >= len(self._data):
            return b""
        end = self._data.find(b"\0", offset)
        return self._data[offset:end] if end >= 0 else b""

    def _texts(self, tag: int) -> list[bytes]:
        kind, offset, count = self._entries.get(tag, (0, 0, 0))
        if kind != _STRING_ARRAY or count > _FILES_MAX or offset >= len(self._data):
            return []
        found = []
        for _ in range(count):
            end = self._data.find(b"\0", offset)
            if end < 0:
                return []
            found.append(self._data[offset:end])
            offset = end + 1
        return found

    def _numbers(self, tag: int, count: int) -> tuple[int, ...]:
        """Return the numbers of a tag; an empty tuple unless there are exactly ``count``."""
        kind, offset, claimed = self._entries.get(tag, (0, 0, 0))
        letter = _FORMATS.get(kind)
        if letter is None or claimed != count:
            return ()
        form = struct.Struct(f">{count}{letter}")
        if offset + form.size > len(self._data):
            return ()
        return form.unpack_from(self._data, offset)


class FileList(Sequence[Member]):
    """The files of a package by number, each made on access.

    If a file has several names, its bytes follow the last name in archives of the short form; the
    other names have none.
    """

    def __init__(
        self,
        names: list[bytes],
        directories: list[bytes],
        of: Sequence[int],
        sizes: Sequence[int],
        modes: Sequence[int],
        times: Sequence[int],
        devices: Sequence[int],
        inodes: Sequence[int],
    ) -> None:
        self._names = names
        self._directories = directories
        self._of = of
        self._sizes = sizes
        self._modes = modes
        self._times = times
        self._links = list(zip(devices, inodes, strict=True))
        self._last: dict[tuple[int, int], int] = {}
        self._several: set[tuple[int, int]] = set()
        for number, key in enumerate(self._links):
            if type_of(modes[number]) is Type.FILE:
                if key in self._last:
                    self._several.add(key)
                self._last[key] = number

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, number: int) -> Member: ...
    @overload
    def __getitem__(self, number: slice) -> list[Member]: ...
    def __getitem__(self, number: int | slice) -> Member | list[Member]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        directory, name = self._directories[self._of[number]], self._names[number]
        if len(directory) + len(name) > NAME_MAX_BYTES:
            raise Damaged(f"a name of {len(directory) + len(name)} bytes")
        mode, key = self._modes[number], self._links[number]
        type_ = type_of(mode)
        shared = key if type_ is Type.FILE and key in self._several else None
        # The content of such a member is the target of a symbolic link.
        holds = type_ is Type.FILE or is_symbolic_link(mode)
        if shared is not None and self._last[key] != number:
            holds = False
        size = self._sizes[number] if holds else 0
        return Member(
            directory + name,
            type_,
            size,
            size,
            mode & 0o7777,
            mtime_ns=bounded_ns(self._times[number] * 1_000_000_000),
            link=shared,
        )


def rpm_header(source: ByteStream) -> RpmHeader:
    """Return the header of the package at whose beginning ``source`` is; raises `Damaged`.

    The source is then at the beginning of the archive, which may be compressed.
    """
    if exactly(source, _LEAD_SIZE, "the lead")[:4] != RPM_MAGIC:
        raise Damaged("not an rpm package")
    index_size, data_size = _intro(source)
    index = exactly(source, index_size, "the signatures")
    signed = RpmHeader(index, exactly(source, data_size, "the signatures"))  # not checked here
    source.skip(-data_size % 8)
    index_size, data_size = _intro(source)
    index = exactly(source, index_size, "the header")
    return RpmHeader(index, exactly(source, data_size, "the header"), signed)


def _intro(source: ByteStream) -> tuple[int, int]:
    """Return the sizes of the two parts of a header."""
    magic, entries, data_size = _INTRO.unpack(exactly(source, _INTRO.size, "a header"))
    if magic != _HEADER_MAGIC or entries > _ENTRIES_MAX or data_size > _DATA_MAX:
        raise Damaged(f"no header at {source.position - _INTRO.size}")
    return entries * _ENTRY.size, data_size


# --- cpio ----------------------------------------------------------------------------------------

_CPIO_MAGIC_SIZE: Final = 6
_CPIO_MAGICS: Final = frozenset((b"070701", b"070702"))
_CPIO_SHORT: Final = b"07070X"
_CPIO_FIELDS: Final = 13
_CPIO_TRAILER: Final = b"TRAILER!!!"

_FORMAT_MASK: Final = 0o170000
_TYPES: Final = {0o100000: Type.FILE, 0o040000: Type.DIRECTORY}


def cpio_members(
    source: ByteStream, listed: Callable[[], Sequence[Member]] = tuple
) -> Iterator[Member]:
    """Yield the members of a cpio archive ("newc") that begins at ``source``; raises `Damaged`.

    In rpm's short form, for files of 4 GB and more, a member header is only the number of a file in
    the header of the package. ``listed`` returns these files; it is called only if the archive has
    the short form. After each member, the source is at its content. If a file has several names,
    all but the last come without bytes, and have the same `Member.link`.
    """
    start = source.position
    files: Sequence[Member] | None = None
    while True:
        magic = exactly(source, _CPIO_MAGIC_SIZE, "a header")
        if magic in _CPIO_MAGICS:
            member = _member(source, start)
        elif magic == _CPIO_SHORT:
            (number,) = _numbers(exactly(source, 8, "a header"))
            files = listed() if files is None else files
            if number >= len(files):
                raise Damaged(f"file {number} of {len(files)}")
            member = files[number]
            _align(source, start)
        else:
            raise Damaged(f"no header at {source.position - _CPIO_MAGIC_SIZE}")
        source.budget.charge(work_of(member.name))
        if member.name == _CPIO_TRAILER:
            return
        end = source.position + member.stored
        yield member
        source.skip(end - source.position)
        _align(source, start)


def _align(source: ByteStream, start: int) -> None:
    source.skip((start - source.position) % 4)


def _numbers(text: bytes) -> tuple[int, ...]:
    try:
        return struct.unpack(f">{len(text) // 8}I", unhexlify(text))
    except ValueError:
        raise Damaged("a header that is not made of numbers") from None


def _member(source: ByteStream, start: int) -> Member:
    fields = _numbers(exactly(source, 8 * _CPIO_FIELDS, "a header"))
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
        bounded_ns(mtime * 1_000_000_000),
        link=shared,
    )


def type_of(mode: int) -> Type:
    """Return the type of a member with that st_mode."""
    return _TYPES.get(mode & _FORMAT_MASK, Type.OTHER)


def is_symbolic_link(mode: int) -> bool:
    """Return True if a member with that st_mode is a symbolic link."""
    return mode & _FORMAT_MASK == 0o120000


# --- ar ------------------------------------------------------------------------------------------

AR_MAGIC: Final = b"!<arch>\n"

_AR_HEADER: Final = 60
_AR_SIZE: Final = slice(48, 58)
_AR_END: Final = b"`\n"
_AR_MEMBERS_MAX: Final = 64  # a package has three, and perhaps some that no program knows yet


class ArMember(NamedTuple):
    """A member; ``size`` bytes of it follow in the source."""

    name: bytes
    size: int


def ar_members(source: ByteStream) -> Iterator[ArMember]:
    """Yield the members of an archive that begins at ``source``; raises `Damaged`.

    After each member, the source is at its content. Long names are not supported, because deb(5)
    has none.
    """
    if source.take(len(AR_MAGIC)) != AR_MAGIC:
        raise Damaged("not an ar archive")
    for _ in range(_AR_MEMBERS_MAX):
        header = source.take(_AR_HEADER)
        if not header:
            return
        if len(header) < _AR_HEADER or header[58:] != _AR_END:
            raise Damaged(f"no header at {source.position - len(header)}")
        digits = header[_AR_SIZE].rstrip(b" ")
        if not digits.isdigit():
            raise Damaged(f"no size at {source.position - len(header)}")
        member = ArMember(header[:16].rstrip(b" ").removesuffix(b"/"), int(digits))
        end = source.position + member.size
        yield member
        source.skip(end - source.position)
        source.take(member.size & 1)  # the padding of the last member may be missing
    raise Damaged(f"more than {_AR_MEMBERS_MAX} members")


# --- names ---------------------------------------------------------------------------------------

PKGINFO: Final = b".PKGINFO"
METADATA: Final = frozenset(
    (PKGINFO, b".BUILDINFO", b".MTREE", b".INSTALL", b".CHANGELOG")
)  # fmt: skip
"""Files with which only packages of Alpine and Arch begin."""
SIGNATURE: Final = b".SIGN."
"""The prefix of the names of signatures, which are the first members of Alpine's packages."""

METADATA_MAX: Final = 1 << 20
"""The most bytes of a file in `METADATA` that are read."""

_PART_MAX: Final = 128
_UNPRINTABLE: Final = re.compile(r"[^\w.:+~@-]", re.ASCII)


class PackageName(NamedTuple):
    """The name that a package gives itself; any part may be empty."""

    name: bytes
    version: bytes = b""
    architecture: bytes = b""

    @property
    def text(self) -> str:
        """Return NAME-VERSION.ARCHITECTURE in printable characters; empty without a name."""
        text = _shown(self.name)
        if text and self.version:
            text += f"-{_shown(self.version)}"
        if text and self.architecture:
            text += f".{_shown(self.architecture)}"
        return text


def _shown(part: bytes) -> str:
    return _UNPRINTABLE.sub("?", part[:_PART_MAX].decode("utf-8", "replace"))


def is_metadata(name: bytes) -> bool:
    """Return True if a member of that name makes an archive a package of Alpine or Arch."""
    name = name.removeprefix(b"./")
    return name in METADATA or name.startswith(SIGNATURE)


def debian(control: bytes) -> PackageName:
    """Return the name in a control file. Continued lines are skipped."""
    fields = _fields(control, b":")
    return PackageName(
        fields.get(b"package", b""), fields.get(b"version", b""), fields.get(b"architecture", b"")
    )


def pkginfo(text: bytes) -> PackageName:
    """Return the name in a .PKGINFO file."""
    fields = _fields(text, b"=")
    return PackageName(
        fields.get(b"pkgname", b""), fields.get(b"pkgver", b""), fields.get(b"arch", b"")
    )


def _fields(text: bytes, separator: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for line in text.splitlines():
        if line[:1] in (b" ", b"\t", b"#", b""):
            continue
        key, given, value = line.partition(separator)
        if given:
            found.setdefault(key.strip().lower(), value.strip())
    return found
