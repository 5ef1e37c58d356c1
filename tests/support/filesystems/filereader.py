# SPDX-License-Identifier: Apache-2.0
"""A file in memory for what reads by offset, and the count of what was read."""

from __future__ import annotations


class FileReader:
    """``reader(offset, size)`` behaves as pread(2) on a file with these bytes.

    With a ``size`` the file is sparse after them, up to there. ``bytes_read`` counts what was
    given out, ``calls`` how often; both are what a test of bounds looks at.
    """

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self._data = data
        self._size = len(data) if size is None else size
        self.bytes_read = 0
        self.calls = 0

    def __call__(self, offset: int, size: int) -> bytes:
        if not 0 <= offset < 1 << 63 or not 0 <= size < 1 << 31:
            raise OverflowError(f"pread(2) takes no such arguments: {size} bytes at {offset}")
        self.calls += 1
        data = self._data[offset : offset + size]
        data += bytes(max(0, min(size, self._size - offset) - len(data)))
        self.bytes_read += len(data)
        return data
