# SPDX-License-Identifier: Apache-2.0
"""Compressed blobs: written front to back, and read from any offset.

The format is the seekable format of zstd (`formats.archive.seekable_zstd`), in frames of
`FRAME_BYTES` with a checksum each. So a reader decodes one frame for a page in the middle, and
notices damaged bytes. Writing and reading need the package zstandard (the extra ``zstd``).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from buildidfs.errors import IntegrityError, StoreError
from buildidfs.formats.archive import seekable_zstd
from buildidfs.linux.file_ops import Fd, on_error, read_fully, write_fully

if TYPE_CHECKING:
    import hashlib

FRAME_BYTES: Final = 256 << 10

_LEVEL: Final = 9
_FAST_LEVEL: Final = 3
# More than a frame takes if its content cannot be compressed.
_FRAME_MOST: Final = FRAME_BYTES + (8 << 10)
_FRAMES_KEPT: Final = 4

_of_thread = threading.local()
"""Has one ``decompressor`` for each thread. If two threads shared one, both would report damage."""


def compress(source: int, target: int, hasher: hashlib._Hash) -> None:
    """Write the content of ``source`` to ``target``, and feed it to ``hasher``.

    Raises OSError, and `StoreError` without the package.
    """
    writer = FrameWriter(target, _LEVEL)
    offset = 0
    while chunk := read_fully(source, FRAME_BYTES, offset):
        hasher.update(chunk)
        writer.write(chunk)
        offset += len(chunk)
    writer.finish()


class FrameWriter:
    """Writes content to a file or pipe, one frame after another; `finish` writes the table.

    Raises OSError, and `StoreError` if the package zstandard is missing.
    """

    def __init__(self, fd: int, level: int = _FAST_LEVEL, *, resume: bool = False) -> None:
        """With ``resume``, keep the frames of the present file up to the first that differs from
        the written bytes.
        """
        self._fd = fd
        self._compressor = _zstandard().ZstdCompressor(level=level, write_checksum=True)
        self._entries: list[tuple[int, int]] = []
        self._pending = bytearray()
        self._resuming = resume
        self._end = 0
        self.kept = 0
        """The number of bytes kept from the earlier file."""

    def write(self, data: bytes | memoryview) -> None:
        """Write content."""
        self._pending += data
        while len(self._pending) >= FRAME_BYTES:
            self._frame(bytes(self._pending[:FRAME_BYTES]))
            del self._pending[:FRAME_BYTES]

    def finish(self) -> None:
        """Write the last frame and the table."""
        if self._pending:
            self._frame(bytes(self._pending))
            self._pending.clear()
        self._cut()
        write_fully(self._fd, seekable_zstd.pack(self._entries))

    def _frame(self, content: bytes) -> None:
        size = self._there(content) if self._resuming else 0
        if size:
            self.kept += size
        else:
            self._cut()
            frame = self._compressor.compress(content)
            write_fully(self._fd, frame)
            size = len(frame)
        self._end += size
        self._entries.append((size, len(content)))

    def _there(self, content: bytes) -> int:
        """Return the size of the next frame in the present file if the frame has that content; else
        0.
        """
        data = read_fully(self._fd, _FRAME_MOST, self._end)
        decoder = _zstandard().ZstdDecompressor().decompressobj()
        try:
            found = decoder.decompress(data)
        except _zstandard().ZstdError:
            return 0
        return len(data) - len(decoder.unused_data) if decoder.eof and found == content else 0

    def _cut(self) -> None:
        """Truncate the file after the frames that were kept, and continue writing there."""
        if self._resuming:
            self._resuming = False
            os.ftruncate(self._fd, self._end)
            os.lseek(self._fd, self._end, os.SEEK_SET)


class CompressedBlob(Fd):
    """The content of a compressed file, read from any offset. May be used from several threads.

    Raises `IntegrityError` if the file is not compressed, `StoreError` if the package is missing.
    """

    def __init__(self, fd: int) -> None:
        """Take over ``fd``."""
        super().__init__(fd)
        self._lock = threading.Lock()
        self._frames: OrderedDict[int, bytes] = OrderedDict()
        with on_error(self.close):
            _zstandard()
            end = os.fstat(fd).st_size
            footer = read_fully(
                fd, seekable_zstd.FOOTER_SIZE, max(end - seekable_zstd.FOOTER_SIZE, 0)
            )
            length = seekable_zstd.table_size(footer)
            if length > end:
                raise IntegrityError("the table of a compressed blob's frames is cut off")
            self._table = seekable_zstd.unpack(read_fully(fd, length, end - length), end)

    @property
    def size(self) -> int:
        """The number of bytes of content."""
        return self._table.size

    def pread(self, size: int, offset: int) -> bytes:
        """Return up to ``size`` bytes from ``offset``; fewer only at the end.

        Raises OSError, `IntegrityError`.
        """
        end = min(offset + size, self.size)
        parts = []
        while offset < end:
            number = self._table.at(offset)
            frame = self._table.frame(number)
            part = self._frame(number)[offset - frame.start : end - frame.start]
            parts.append(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _frame(self, number: int) -> bytes:
        with self._lock:
            data = self._frames.get(number)
            if data is not None:
                self._frames.move_to_end(number)
                return data
        frame = self._table.frame(number)
        if frame.length > FRAME_BYTES:
            raise IntegrityError("a frame of a compressed blob is larger than any that was written")
        try:
            raw = read_fully(self.fd, frame.size, frame.offset)
            data = bytes(_decompressor().decompress(raw, max_output_size=frame.length))
        except _zstandard().ZstdError as error:
            raise IntegrityError(f"a frame of a compressed blob is damaged: {error}") from error
        if len(data) != frame.length:
            raise IntegrityError("a frame of a compressed blob has not the length it should have")
        with self._lock:
            self._frames[number] = data
            while len(self._frames) > _FRAMES_KEPT:
                self._frames.popitem(last=False)
        return data


def _decompressor() -> Any:
    """Return the decompressor of this thread; to make a new one takes as long as to decode a small
    frame.
    """
    try:
        return _of_thread.decompressor
    except AttributeError:
        _of_thread.decompressor = _zstandard().ZstdDecompressor()
        return _of_thread.decompressor


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise StoreError(
            "blobs of this store are compressed, and the Python package zstandard is missing: "
            "install buildidfs[zstd]"
        ) from error
    return zstandard
