# SPDX-License-Identifier: Apache-2.0
"""The files that the kernel's program reports, and those that it need not report any more.

The program reports a touch of a file in a state that it does not know (`first_touch`). `Touches`
lets it know a state when the catcher has recognised the file by the record of a mapping, and found
the same change time. From then on a record of the file needs no look into the process, unless the
program reports another state of the file.

A record and a touch may be read in either order, by different threads. So the latest record of each
file is kept: if a touch shows that its file has changed since, the record is looked at after all.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from buildidfs import log

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.capture.live.first_touch import FirstTouch, Touch
    from buildidfs.capture.live.process_table import Home
    from buildidfs.formats.perf.records import Mapped

_log = logging.getLogger(__name__)
_TRACES: Final = log.is_debug()  # see `grabber`

_REMEMBERED: Final = 1 << 14
_MOST_STATES: Final = 8  # of one file that is recognised

_File = tuple[tuple[int, int], int]
_Place = tuple[tuple[int, int], int, int]


class _Recognised:
    """A file in a mount namespace: its change time in ns, its `place_key`, and the keys of states
    that the program knows.
    """

    __slots__ = ("ctime_ns", "keys", "place")

    def __init__(self, ctime_ns: int, place: bytes) -> None:
        self.ctime_ns = ctime_ns
        self.place = place
        self.keys: set[bytes] = set()


class Touches:
    """The touched and the recognised files, in bounded memory. Thread-safe.

    Homes must be known, else their files are not recognised.
    """

    def __init__(self, program: FirstTouch, most: int = _REMEMBERED) -> None:
        self._program = program
        self._most = most
        self._lock = threading.Lock()
        self._waiting: dict[_Place, list[Touch]] = {}
        self._recognised: dict[_Place, _Recognised] = {}
        self._places: dict[bytes, _Place] = {}
        self._young: dict[_File, tuple[Mapped, Home, bool]] = {}
        self._old: dict[_File, tuple[Mapped, Home, bool]] = {}

    def add(self, touch: Touch) -> None:
        """Take a touch, before the records of mappings are read."""
        if _TRACES:
            _log.debug("the kernel's program reports inode %d of %d:%d", touch.inode, *touch.dev)
        with self._lock:
            place = touch.dev, touch.inode, touch.mnt_ns_id
            self._waiting.setdefault(place, []).append(touch)

    def skips(self, record: Mapped, home: Home) -> bool:
        """Return True if the file of a record is recognised, and no change of it is reported."""
        place = record.dev, record.inode, home.mnt_ns_id
        skips = place in self._recognised and place not in self._waiting
        if len(self._young) >= self._most:
            self._old, self._young = self._young, {}
        self._young[record.dev, record.inode] = record, home, skips
        if _TRACES and skips:
            _log.debug("%s: known to the kernel's program, pid %d", record.path, record.pid)
        return skips

    def recognise(self, record: Mapped, home: Home, ctime_ns: int, place_key: bytes) -> None:
        """Let the program know a file that the catcher has recognised by a record."""
        place = record.dev, record.inode, home.mnt_ns_id
        with self._lock:
            known = self._recognised.get(place)
            if known is None or known.ctime_ns != ctime_ns or known.place != place_key:
                if known is not None:
                    self._forget(place)
                elif len(self._recognised) >= self._most:
                    self._forget(next(iter(self._recognised)))
                known = self._recognised[place] = _Recognised(ctime_ns, place_key)
                self._places[place_key] = place
            self._know(known, self._waiting.pop(place, ()))

    def settle(self, touches: Iterable[Touch]) -> Iterator[tuple[Mapped, Home]]:
        """Yield the records that must be looked at after all, once all records were handled."""
        for touch in touches:
            place = touch.dev, touch.inode, touch.mnt_ns_id
            with self._lock:
                if self._waiting.pop(place, None) is None:
                    continue
                known = self._recognised.get(place)
                if known is not None and self._know(known, (touch,)):
                    continue
                latest = self._young.get(place[:2]) or self._old.get(place[:2])
                if latest is None and known is None:
                    self._program.know_data(touch)
            if latest is not None and latest[2]:
                yield latest[0], latest[1]

    def _know(self, known: _Recognised, touches: Iterable[Touch]) -> bool:
        """Let the program know the touches of a recognised state; False for another state."""
        same = [touch for touch in touches if touch.ctime_ns == known.ctime_ns]
        for touch in same:
            if len(known.keys) < _MOST_STATES:
                known.keys.add(touch.key)
                if _TRACES:
                    _log.debug("the kernel's program knows inode %d from now on", touch.inode)
                self._program.know(touch.key)
        return bool(same)

    def forget(self, place_keys: Iterable[bytes]) -> None:
        """Let the program report these files again."""
        with self._lock:
            for place_key in place_keys:
                place = self._places.get(place_key)
                if place is not None:
                    self._forget(place)

    def _forget(self, place: _Place) -> None:
        known = self._recognised.pop(place)
        self._places.pop(known.place, None)
        for key in known.keys:
            self._program.forget(key)
