# SPDX-License-Identifier: Apache-2.0
"""The files that were seen and lost: where, for whom, and why, one row each, in order of time.

They come when the store has most to do or cannot be written, and by the thousand. So they are not
in the index: `LossLog` appends them to a file, which costs one write(2) for many and waits for no
other writer, and begins a new one when that is full. Two files are kept.

    run/lost        one JSON object a line, a `Lost` each; the latest
    run/lost.old    those before

A line that is no such object, because a write was cut short, is passed over.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

_DIRECTORY: Final = b"run"
_NAME: Final = b"lost"
_OLD: Final = b"lost.old"
_MOST_BYTES: Final = 8 << 20


class Lost(msgspec.Struct, frozen=True, omit_defaults=True):
    """``count`` files at one path that were seen by ``time_ns`` (Unix), and not captured.

    ``path`` is base64, since it may hold any bytes; `raw_path` has those. It is empty where more
    files of a container were lost than are named. ``build_id`` is hexadecimal, empty if it is not
    known; ``container`` and ``mnt_ns_id`` mean the same as in `Origin`.
    """

    time_ns: int
    path: str
    reason: str
    container: str = ""
    mnt_ns_id: int = 0
    host: str = ""
    build_id: str = ""
    count: int = 1

    @property
    def raw_path(self) -> bytes:
        """The path itself."""
        with contextlib.suppress(ValueError):
            return base64.b64decode(self.path)
        return b""


def text_of(path: bytes) -> str:
    """A path as `Lost` has it."""
    return base64.b64encode(path).decode()


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Lost).decode


class LossLog:
    """Appends rows for the store in the directory ``root``. For one thread; never raises."""

    def __init__(self, root: bytes, most_bytes: int = _MOST_BYTES) -> None:
        self._directory = os.path.join(root, _DIRECTORY)
        self._most_bytes = most_bytes

    def append(self, rows: Iterable[Lost]) -> bool:
        """Write all rows at once; False if that is not possible, or not all were written."""
        data = b"".join(_encode(row) + b"\n" for row in rows)
        if not data:
            return True
        path = os.path.join(self._directory, _NAME)
        try:
            os.makedirs(self._directory, 0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(path, flags, 0o600)
            try:
                written = os.write(fd, data)
                is_full = os.fstat(fd).st_size >= self._most_bytes
            finally:
                os.close(fd)
            if is_full:
                os.rename(path, os.path.join(self._directory, _OLD))
        except OSError:
            return False
        return written == len(data)


def since(root: bytes, time_ns: int = 0) -> Iterator[Lost]:
    """The rows from a time (Unix, ns) on, in the order in which they were written."""
    for name in (_OLD, _NAME):
        try:
            file = open(os.path.join(root, _DIRECTORY, name), "rb")  # noqa: SIM115
        except OSError:
            continue
        with file:
            for line in file:
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    row = _decode(line)
                    if row.time_ns >= time_ns:
                        yield row
