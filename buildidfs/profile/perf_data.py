# SPDX-License-Identifier: Apache-2.0
"""perf.data files, opened: one file, or the directory that ``perf record --threads`` makes.

Such a directory has a file ``data``, which is an ordinary profile, and files ``data.0`` and so on,
which have records, but no headers.
"""

from __future__ import annotations

import os
import re
import stat
from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.errors import UsageError
from buildidfs.formats.perf import headers, records
from buildidfs.formats.perf.attributes import ATTR_MIN, Layouts, parse_attr
from buildidfs.formats.perf.record_stream import RecordStream
from buildidfs.linux import inodes
from buildidfs.linux.file_ops import close_fds, closing_fd, on_error, read_fully
from buildidfs.model import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.formats.perf.attributes import Attr
    from buildidfs.formats.perf.headers import BuildIdEntry, ReadAt
    from buildidfs.formats.perf.record_stream import Raw

_PART: Final = re.compile(rb"data\.\d{1,9}")
_MAIN: Final = b"data"
_MAX_ATTRS: Final = 1 << 14
_MAX_FEATURE: Final = 1 << 16


class ProfilePart(msgspec.Struct):
    """One of the files of a profile, and the place of the records in it."""

    path: bytes
    fd: int
    data: ByteRange

    def read_at(self, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``offset``, fewer only at the end; raises
        `UsageError`.
        """
        try:
            # Sizes are claims, for which pread(2) would allocate memory first.
            size = max(min(size, os.fstat(self.fd).st_size - offset), 0)
            return read_fully(self.fd, size, offset)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"{_shown(self.path)}: {reason}") from error


class Profile:
    """An open profile; a context manager.

    Raises `UsageError` if the file is not a profile, or cannot be opened. ``size`` is the total
    size of its files, ``mtime_ns`` the mtime of the file written last. After the first pass over
    `records`, ``truncated`` is the reason if a part is missing, or empty. A profile that was
    written to a pipe has records in place of a header; the data from them (``header.attrs``,
    `features`, `build_ids`) is available from the beginning.
    """

    def __init__(self, path: bytes) -> None:
        self.path = path
        self.parts: list[ProfilePart] = []
        self.size = 0
        self.mtime_ns = 0
        self._piped: dict[int, bytes] = {}
        with on_error(self.close):
            try:
                self._open()
                main = self.parts[0]
                self.header = headers.parse_header(main.read_at, os.fstat(main.fd).st_size)
                main.data = self.header.data
                if self.header.is_pipe:
                    self._read_beginning()
            except OSError as error:
                raise UsageError(f"{_shown(path)}: {error.strerror or error}") from error
            except UsageError as error:
                raise UsageError(f"{_shown(path)} {error}") from error
        self.truncated = self.header.truncated
        self.layouts = Layouts(self.header.attrs, self.header.order)

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; safe to call twice."""
        for part in self.parts:
            fd, part.fd = part.fd, -1
            close_fds(fd)

    @property
    def read_at(self) -> ReadAt:
        """Return a function that reads the file with the headers."""
        return self.parts[0].read_at

    def records(self, kinds: frozenset[int] | None = None) -> Iterator[Raw]:
        """Yield all records, or those of ``kinds``, one file after another. Raises `UsageError`."""
        for part in self.parts:
            yield from self.records_of(part, kinds)

    def records_of(self, part: ProfilePart, kinds: frozenset[int] | None = None) -> Iterator[Raw]:
        """Yield the records in one file. Raises `UsageError`."""
        header = self.header
        stream = RecordStream(
            part.read_at, part.data, header.order, is_pipe=header.is_pipe, kinds=kinds
        )
        try:
            yield from stream
        except UsageError as error:
            raise UsageError(f"{_shown(self.path)} {error}") from error
        if stream.truncated and not self.truncated:
            self.truncated = stream.truncated

    def feature(self, number: int) -> bytes:
        """Return the bytes of a feature (`headers.HOSTNAME`); empty if the profile lacks it."""
        if self.header.is_pipe:
            return self._piped.get(number, b"")
        return headers.feature(self.read_at, self.header, number)

    def text(self, number: int) -> bytes:
        """Return the text of a feature that is one string."""
        return headers.text(self.feature(number), self.header.order)

    def build_ids(self) -> Iterator[BuildIdEntry]:
        """Yield the table of build IDs behind the records; a pipe has records (`named`) instead."""
        return headers.build_id_table(self.read_at, self.header)

    def named(self, raw: Raw) -> BuildIdEntry | None:
        """Return the build ID of a file in a record; None for records of other kinds."""
        if raw.kind != records.HEADER_BUILD_ID:
            return None
        return headers.named(raw.data, raw.at, raw.size, raw.misc, self.header.order)

    def _open(self) -> None:
        with closing_fd(os.open(self.path, os.O_PATH | os.O_CLOEXEC)) as path_fd:
            if not stat.S_ISDIR(os.fstat(path_fd).st_mode):
                self._add(self.path, inodes.reopen_regular(path_fd))
                return
        with closing_fd(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            names = [os.fsencode(name) for name in os.listdir(fd)]
            if _MAIN not in names:
                raise UsageError("is a directory without a file 'data': not a perf.data file")
            for name in [_MAIN, *sorted(filter(_PART.fullmatch, names), key=_number)]:
                with closing_fd(inodes.pin_entry(fd, name)) as path_fd:  # follows no link
                    part = inodes.reopen_regular(path_fd)
                self._add(os.path.join(self.path, name), part)

    def _add(self, path: bytes, fd: int) -> None:
        found = os.fstat(fd)
        self.parts.append(ProfilePart(path, fd, ByteRange(0, found.st_size)))
        self.size += found.st_size
        self.mtime_ns = max(self.mtime_ns, found.st_mtime_ns)

    def _read_beginning(self) -> None:
        """Read events and features from the records with which a pipe begins."""
        order = self.header.order
        attrs: list[Attr] = []
        for raw in RecordStream(self.read_at, self.header.data, order, is_pipe=True):
            if raw.kind == records.HEADER_ATTR:
                attr = _piped_attr(raw, order)
                if attr is not None and len(attrs) < _MAX_ATTRS:
                    attrs.append(attr)
            elif raw.kind == records.HEADER_FEATURE and 16 <= raw.size <= _MAX_FEATURE:
                (number,) = Struct(f"{order}Q").unpack_from(raw.data, raw.at + 8)
                if number < headers.FEATURES:
                    self._piped[number] = raw.data[raw.at + 16 : raw.at + raw.size]
            elif raw.kind == records.SAMPLE:
                break
        self.header.attrs = attrs


def _piped_attr(raw: Raw, order: str) -> Attr | None:
    """Return the event in a record: its attributes, followed by its numbers."""
    data = raw.data[raw.at + 8 : raw.at + raw.size]
    if len(data) < ATTR_MIN:
        return None
    size = Struct(f"{order}I").unpack_from(data, 4)[0] or ATTR_MIN
    if size < ATTR_MIN:
        return None
    ids = Struct(f"{order}{max(len(data) - size, 0) // 8}Q").unpack_from(data, min(size, len(data)))
    return parse_attr(data[:size], order, ids)


def _number(name: bytes) -> int:
    return int(name.rpartition(b".")[2])


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")
