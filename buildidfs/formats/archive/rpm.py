# SPDX-License-Identifier: Apache-2.0
"""What stands before the archive in an rpm package: its name, and the list of its files.

Sources: rpm's docs/manual/format.md, lib/header.c and lib/rpmfi.c; the numbers are those of its
include/rpm/rpmtag.h.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, overload

from buildidfs.formats.archive.common import (
    NAME_MAX_BYTES,
    Damaged,
    Member,
    Source,
    Type,
    bounded_time,
    exactly,
)
from buildidfs.formats.archive.cpio import is_symbolic_link, type_of

MAGIC: Final = b"\xed\xab\xee\xdb"

_LEAD_SIZE: Final = 96
_HEADER_MAGIC: Final = b"\x8e\xad\xe8\x01"
_INTRO: Final = struct.Struct(">4s4xII")
_ENTRY: Final = struct.Struct(">IIII")
# What rpm itself takes (lib/header.c: hdrchkTags, hdrchkData), the data to a quarter.
_ENTRIES_MAX: Final = 0xFFFF
_DATA_MAX: Final = 64 << 20
_FILES_MAX: Final = 1 << 18

_INT16, _INT32, _INT64, _STRING, _STRING_ARRAY, _I18N_STRING = 3, 4, 5, 6, 8, 9
_NUMBERS: Final = {_INT16: "H", _INT32: "I", _INT64: "Q"}

_NAME, _VERSION, _RELEASE, _EPOCH, _ARCH = 1000, 1001, 1002, 1003, 1022
_FILE_SIZES, _FILE_MODES, _FILE_TIMES, _FILE_DEVICES, _FILE_INODES = 1028, 1030, 1034, 1095, 1096
_LONG_FILE_SIZES, _DIR_INDEXES, _BASE_NAMES, _DIR_NAMES = 5008, 1116, 1117, 1118


class Header:
    """The header of a package, of which only what is asked for is decoded."""

    def __init__(self, index: bytes, data: bytes) -> None:
        self._data = data
        self._entries = {
            tag: (kind, offset, count) for tag, kind, offset, count in _ENTRY.iter_unpack(index)
        }

    @property
    def name(self) -> tuple[bytes, bytes, bytes]:
        """Name; version with epoch and release, ``1:2.3-4``; architecture. Any may be empty."""
        epoch = self._numbers(_EPOCH, 1)
        version = self._text(_VERSION)
        if release := self._text(_RELEASE):
            version += b"-" + release
        if epoch:
            version = b"%d:%s" % (epoch[0], version)
        return self._text(_NAME), version, self._text(_ARCH)

    def files(self) -> FileList:
        """The files by their number, as `cpio.members` wants them; raises `Damaged`."""
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
        """So many numbers; none if there are not exactly as many."""
        kind, offset, claimed = self._entries.get(tag, (0, 0, 0))
        letter = _NUMBERS.get(kind)
        if letter is None or claimed != count:
            return ()
        form = struct.Struct(f">{count}{letter}")
        if offset + form.size > len(self._data):
            return ()
        return form.unpack_from(self._data, offset)


class FileList(Sequence[Member]):
    """The files of a package by their number, each made when it is asked for.

    In archives of the short form the bytes of a file with several names are with the last of them;
    the others have none.
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
        # What a symbolic link leads to is its content here.
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
            mtime_ns=bounded_time(self._times[number]),
            link=shared,
        )


def header(source: Source) -> Header:
    """The header of the package that ``source`` is at the beginning of; raises `Damaged`.

    The source is then at the beginning of the archive, which may be compressed.
    """
    if exactly(source, _LEAD_SIZE, "the lead")[:4] != MAGIC:
        raise Damaged("not an rpm package")
    _, data_size = _intro(source)  # signatures, which nobody checks here
    source.skip(data_size + -data_size % 8)
    index_size, data_size = _intro(source, skip_index=False)
    index = exactly(source, index_size, "the header")
    return Header(index, exactly(source, data_size, "the header"))


def _intro(source: Source, *, skip_index: bool = True) -> tuple[int, int]:
    """The sizes of the two parts of a header."""
    magic, entries, data_size = _INTRO.unpack(exactly(source, _INTRO.size, "a header"))
    if magic != _HEADER_MAGIC or entries > _ENTRIES_MAX or data_size > _DATA_MAX:
        raise Damaged(f"no header at {source.position - _INTRO.size}")
    index_size = entries * _ENTRY.size
    if skip_index:
        source.skip(index_size)
    return index_size, data_size
