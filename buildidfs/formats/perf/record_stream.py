# SPDX-License-Identifier: Apache-2.0
"""The records of a perf.data file, one after another, complete and decompressed.

Only a few chunks are in memory, whatever the file claims. Compressed records (``perf record -z``)
contain pieces of one zstd stream; the records in this stream are returned in their place. Hardware
trace data follows a record instead of being in it, and is never read. Source:
tools/perf/util/session.c, tools/perf/builtin-record.c.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from buildidfs.errors import UsageError
from buildidfs.formats.budget import STEP_BYTES, Budget, Spent
from buildidfs.model import ByteRange

if TYPE_CHECKING:
    from buildidfs.formats.perf.headers import ReadAt

HEADER_SIZE: Final = 8

_SAMPLE: Final = 9
TRACING_DATA: Final = 66
FINISHED_ROUND: Final = 68
AUXTRACE: Final = 71
_COMPRESSED: Final = 81
_COMPRESSED2: Final = 83

_CHUNK: Final = 1 << 18
_MAX_RECORD: Final = 1 << 16

# A block of zstd takes 4 bytes and may stand for 128 KiB of the same byte: this input expands to 32
# MiB at most. The window is that of the highest level of zstd.
_SLICE: Final = 1 << 10
_MAX_WINDOW: Final = 1 << 27

# The most bytes that perf (since Linux 6.16) puts into one record.
_PIECE: Final = 65519

# The records of a compressed profile may take as many steps as those of a plain one of this size.
_STEPS_LEAST: Final = 1 << 19
_STEPS_PER_BYTE: Final = 2
_CHARGED: Final = 4096  # steps that are charged at once
_STEPS_OF_SAMPLE: Final = 4
_STEPS_OF_EVENT: Final = 24  # of any other that is yielded; one that is not takes a single step

_WANT_ZSTD: Final = (
    "is compressed: install python3-zstandard, or buildidfs[zstd] with pip, to read it"
)


class Raw(NamedTuple):
    """One record: ``size`` bytes of ``data`` from ``at`` on, including its header.

    ``position`` is its place in the file; for a compressed record, that of the compressed one.
    ``payload`` is the extent of the bytes of the file that follow it and belong to it.
    """

    kind: int
    misc: int
    data: bytes
    at: int
    size: int
    position: int
    payload: ByteRange | None = None


# This takes half the time of a constructor with arguments, and runs millions of times.
_raw: Final = partial(tuple.__new__, Raw)


class _Decompressor(Protocol):
    def decompress(self, data: bytes) -> bytes: ...


class RecordStream:
    """The records in the range ``data`` of a file; iterate once.

    ``is_pipe`` is True if the file was written to a pipe. With ``kinds`` only records of these
    kinds are yielded, and those with a payload. After the end, ``truncated`` is the reason if the
    end is damaged, or empty. Iterating raises `UsageError` if zstd is needed and not installed.
    """

    def __init__(
        self,
        read_at: ReadAt,
        data: ByteRange,
        order: str,
        *,
        is_pipe: bool,
        kinds: frozenset[int] | None = None,
    ) -> None:
        self._read_at = read_at
        self._start = data.offset  # place of the buffer in the file
        self._end = data.offset + data.size
        self._buffer = b""
        self._form = Struct(f"{order}IHH")
        self._word = Struct(f"{order}Q")
        self._int = Struct(f"{order}I")
        self._special = _SPECIAL | {TRACING_DATA} if is_pipe else _SPECIAL
        self._kinds = kinds
        self._decompressor: _Decompressor | None = None
        self._unpacked = b""  # read, but not yet a whole record
        self._pieces = 0  # bytes of records that were written as one
        self._budget = Budget(_STEPS_LEAST + _STEPS_PER_BYTE * data.size)
        self.truncated = ""

    def __iter__(self) -> Iterator[Raw]:
        unpack, special, kinds = self._form.unpack_from, self._special, self._kinds
        while self._fill():
            buffer, start = self._buffer, self._start
            at, last = 0, len(buffer) - HEADER_SIZE
            while at <= last:
                kind, misc, size = unpack(buffer, at)
                if kind in special or size < HEADER_SIZE or at + size > last + HEADER_SIZE:
                    break
                if kinds is None or kind in kinds:
                    yield _raw((kind, misc, buffer, at, size, start + at, None))
                at += size
            if at:
                self._skip(at)
                continue
            yield from self._first()
            if self.truncated:
                return
        if (self._buffer or self._unpacked) and not self.truncated:
            self._stop("the last record is not all there")

    def _fill(self) -> bool:
        """Fill the buffer with the bytes of the largest record; return False at the end."""
        if len(self._buffer) < _MAX_RECORD:
            position = self._start + len(self._buffer)
            more = min(_CHUNK, self._end - position)
            if more > 0:
                self._buffer += self._read_at(position, more)
        return len(self._buffer) >= HEADER_SIZE

    def _skip(self, size: int) -> None:
        if size <= len(self._buffer):
            self._buffer = self._buffer[size:]
        else:
            self._buffer = b""
        self._start += size

    def _stop(self, why: str) -> None:
        self.truncated = f"{why} (at byte {self._start})"

    def _first(self) -> Iterator[Raw]:
        """Decode the compressed or traced record at the beginning of the buffer."""
        buffer, position = self._buffer, self._start
        kind, misc, size = self._form.unpack_from(buffer)
        if kind == _COMPRESSED2:
            yield from self._compressed2(size)
        elif size < HEADER_SIZE:
            self._stop("a record without a size")
        elif size > len(buffer):
            self._stop("the last record is not all there")
        elif kind == _COMPRESSED:
            self._skip(size)
            yield from self._unpack(buffer[HEADER_SIZE:size])
        else:
            payload = self._payload(kind, size)
            self._skip(size + payload.size)
            yield Raw(kind, misc, buffer, 0, size, position, payload)
            if self._start > self._end:
                self._stop("trace data that is not all there")

    def _payload(self, kind: int, size: int) -> ByteRange:
        """Return the place of the bytes that follow a record and belong to it, by the size that the
        record claims.
        """
        length = 0
        if kind == AUXTRACE and size >= HEADER_SIZE + 8:
            (length,) = self._word.unpack_from(self._buffer, HEADER_SIZE)
        elif kind == TRACING_DATA and size >= HEADER_SIZE + 4:
            (length,) = self._int.unpack_from(self._buffer, HEADER_SIZE)
            length += -length % 8
        return ByteRange(self._start + size, length)

    # --- compressed records ----------------------------------------------------------------

    def _compressed2(self, size: int) -> Iterator[Raw]:
        """Decode a record of the later kind: its size is a multiple of 8, and the size of its data
        is separate.

        perf lets the size overflow 16 bits, and then adds no padding; if it writes several such
        records at once, the first one has the size of all of them.
        """
        head = HEADER_SIZE + 8
        if len(self._buffer) < head:
            self._stop("the last record is not all there")
            return
        (length,) = self._word.unpack_from(self._buffer, HEADER_SIZE)
        step = size
        if self._pieces:
            length = size - head
            self._pieces -= size
        elif head + length + -length % 8 > size:
            if length > _PIECE:
                self._pieces, length = length - _PIECE, _PIECE
            step = head + length
        if length < 0 or self._pieces < 0 or step > len(self._buffer):
            self._stop("a compressed record that is not all there")
            return
        data = self._buffer[head : head + length]
        self._skip(step)
        yield from self._unpack(data)

    def _unpack(self, data: bytes) -> Iterator[Raw]:
        """Yield the records that become complete with the next piece of the compressed stream."""
        unpack, position, kinds = self._form.unpack_from, self._start, self._kinds
        for begin in range(0, len(data), _SLICE):
            plain = self._unpacked + self._decompress(data[begin : begin + _SLICE])
            if self.truncated:
                return
            at, last = 0, len(plain) - HEADER_SIZE
            steps = len(plain) // STEP_BYTES
            while at <= last:
                kind, misc, size = unpack(plain, at)
                if size < HEADER_SIZE:
                    self._stop("a compressed record without a size")
                    return
                if at + size > last + HEADER_SIZE:
                    break
                if kinds is None or kind in kinds:
                    steps += _STEPS_OF_SAMPLE if kind == _SAMPLE else _STEPS_OF_EVENT
                    yield _raw((kind, misc, plain, at, size, position, None))
                else:
                    steps += 1
                if steps >= _CHARGED:
                    if not self._charge(steps):
                        return
                    steps = 0
                at += size
            if not self._charge(steps):
                return
            self._unpacked = plain[at:]

    def _charge(self, steps: int) -> bool:
        """Take steps from the budget; return False if the stream ends because too few are left."""
        try:
            self._budget.charge(steps)
        except Spent:
            self._stop("compressed records that are more than those of a profile of its size")
            return False
        return True

    def _decompress(self, data: bytes) -> bytes:
        try:
            import zstandard
        except ImportError:
            raise UsageError(_WANT_ZSTD) from None
        try:
            if self._decompressor is None:
                opener = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
                self._decompressor = opener.decompressobj(read_across_frames=True)
            assert self._decompressor is not None
            return self._decompressor.decompress(data)
        except zstandard.ZstdError as error:
            self._stop(f"compressed records that are damaged: {error}")
            return b""


_SPECIAL: Final = frozenset((AUXTRACE, _COMPRESSED, _COMPRESSED2))
