# SPDX-License-Identifier: Apache-2.0
"""The samples of a profile that a user means: at a frame, of a process name, in a container.

perf prints an address as the process sees it (``perf script``), or as the offset in the file
(``perf report`` without a symbol, ``perf script -F +dsoff``: ``/usr/lib/libc.so.6+0x26d90``). Both
are accepted. The name of a process is the one that its thread had at the time of the sample.
"""

from __future__ import annotations

import bisect
import os
import re
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.formats.perf.records import ThreadForked, ThreadNamed
from buildidfs.names import printable
from buildidfs.wording import glob

if TYPE_CHECKING:
    from collections import Counter

_ADDRESS: Final = re.compile(r"(?:0x)?([0-9a-fA-F]{1,16})")
_IN_FILE: Final = re.compile(r"\(?(/?.*?)\+0x([0-9a-fA-F]{1,16})\)?")
_PAGE: Final = 0xFFF
_GENERATIONS: Final = 64
_MOST_CHANGES: Final = 1 << 20
_MOST_SHOWN: Final = 5


class Selection(NamedTuple):
    """A selection of samples. ``text`` is the frame as the user gave it.

    A sample is at the frame if one of its addresses is ``address``, or is at ``offset`` of a file;
    ``path`` is a path, the last part of one, or a pattern. What is None is not asked for.
    """

    text: str | None = None
    path: str | None = None
    address: int | None = None
    offset: int | None = None
    comm: str | None = None

    @classmethod
    def of(cls, frame: str | None, comm: str | None = None) -> Selection:
        """Return the selection that a user means by a frame, as perf prints it, and a name."""
        if frame is None:
            return cls(comm=comm)
        if found := _ADDRESS.fullmatch(frame):
            address = int(found[1], 16)
            return cls(frame, None, address, address, comm)
        if (found := _IN_FILE.fullmatch(frame)) and found[1]:
            return cls(frame, found[1], None, int(found[2], 16), comm)
        return cls(frame, frame, comm=comm)

    @property
    def has_address(self) -> bool:
        """Return True if only some samples of a file are selected."""
        return self.address is not None or self.offset is not None

    def may_be(self, address: int) -> bool:
        """Return True if a sample at an address may be selected. Pages are mapped as a whole."""
        if address == self.address:
            return True
        return self.offset is not None and (address ^ self.offset) & _PAGE == 0

    def is_at(self, path: bytes) -> bool:
        """Return True if samples of a file are selected."""
        if self.path is None:
            return True
        wanted = os.fsencode(self.path)
        if path == wanted or path.rpartition(b"/")[2] == wanted:
            return True
        return glob(self.path).match(path) is not None


class ThreadNames:
    """The names of threads over time; a new thread has the name of its parent."""

    def __init__(self) -> None:
        self._changes: dict[int, list[tuple[int, bytes | int]]] = {}
        self._left = _MOST_CHANGES
        self._is_sorted = True

    def add(self, event: ThreadNamed | ThreadForked, time: int) -> None:
        """Take in a record that was written at a time."""
        if self._left <= 0:
            return
        self._left -= 1
        self._is_sorted = False
        value = event.name if isinstance(event, ThreadNamed) else event.parent
        self._changes.setdefault(event.tid, []).append((time, value))

    def at(self, tid: int, time: int) -> bytes:
        """Return the name of a thread at a time; empty if it is unknown."""
        self._sort()
        for _ in range(_GENERATIONS):
            changes = self._changes.get(tid, ())
            at = bisect.bisect_right(changes, time, key=lambda each: each[0])
            if not at:
                return b""
            time, found = changes[at - 1]
            if isinstance(found, bytes):
                return found
            tid = found
        return b""

    def _sort(self) -> None:
        if not self._is_sorted:
            for each in self._changes.values():
                each.sort(key=lambda change: change[0])
            self._is_sorted = True


def most_frequent(names: Counter[bytes]) -> str:
    """Return a few names for a message, that of most samples first; empty if there is none."""
    known = (each for each, _ in names.most_common() if each)
    return ", ".join(printable(each) for each in islice(known, _MOST_SHOWN))
