# SPDX-License-Identifier: Apache-2.0
"""Kernel modules as they come: plain, or compressed by xz, gzip or zstd.

What comes out is written to memory, so a limit says how much that may be.
"""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, Final

from buildidfs.capture.files import memory_file, write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_BYTES: Final = 512 << 20

_CHUNK: Final = 1 << 20


class CannotDecompress(Exception):
    """Damaged, too large, or of a kind that nothing here can read; the text says which."""


def decompressed(fd: int, name: bytes, limit: int = MAX_BYTES) -> int | None:
    """The decompressed content of an open file, as a file in memory; None if it is plain.

    The kind goes by the end of ``name``. Raises `CannotDecompress`, OSError.
    """
    chunks = _FORMATS.get(os.path.splitext(name)[1])
    if chunks is None:
        return None
    memory_fd = memory_file(b"module", b"")
    size = 0
    try:
        with open(os.dup(fd), "rb") as source:
            source.seek(0)
            for chunk in chunks(source):
                size += len(chunk)
                if size > limit:
                    raise CannotDecompress(f"more than {limit} bytes when decompressed")
                write_all(memory_fd, chunk)
    except BaseException:
        os.close(memory_fd)
        raise
    return memory_fd


def _xz(source: IO[bytes]) -> Iterator[bytes]:
    import lzma

    try:
        with lzma.open(source) as plain:
            while chunk := plain.read(_CHUNK):
                yield chunk
    except (lzma.LZMAError, EOFError) as error:
        raise CannotDecompress(f"damaged: {error}") from error


def _gzip(source: IO[bytes]) -> Iterator[bytes]:
    import gzip
    import zlib

    try:
        with gzip.open(source) as plain:
            while chunk := plain.read(_CHUNK):
                yield chunk
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise CannotDecompress(f"damaged: {error}") from error


def _zstd(source: IO[bytes]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise CannotDecompress(
            "compressed with zstd: install python3-zstandard, or buildidfs[zstd] with pip"
        ) from error
    try:
        with zstandard.ZstdDecompressor().stream_reader(source) as plain:
            while chunk := plain.read(_CHUNK):
                yield chunk
    except zstandard.ZstdError as error:
        raise CannotDecompress(f"damaged: {error}") from error


_FORMATS: Final[dict[bytes, Callable[[IO[bytes]], Iterator[bytes]]]] = {
    b".xz": _xz,
    b".gz": _gzip,
    b".zst": _zstd,
}
