# SPDX-License-Identifier: Apache-2.0
"""When it was that something in a profile happened.

Times in perf.data are those of a clock that begins with the machine; the store has Unix time. With
``perf record -k mono`` a profile says itself how the two go together. On the machine that made it,
until that is started again, the clock can be read. Else they are related by when the file was
written, and then by the journal: what a profile says was mapped for the first time is seen in that
moment by who watches, so the same difference comes again and again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.formats.perf import headers
from buildidfs.linux import clock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.capture.scan.perf_data import Profile

_SECOND: Final = 1_000_000_000

SHARP_NS: Final = 2 * _SECOND
"""Times that are known less exactly do not tell one container from the next."""

_EXACT_NS: Final = _SECOND // 20
# From when a file is mapped until it is seen it takes a millisecond or two, if nothing gets in
# the way.
_ALIKE_NS: Final = _SECOND // 100
# What perf does between the last sample and the end of the file: it reads build IDs.
_WRITING_NS: Final = 60 * _SECOND
_MARGIN_NS: Final = 2 * _SECOND
# Clocks that no two machines, nor two starts of one, have in common.
_OF_A_BOOT: Final = (time.CLOCK_MONOTONIC, time.CLOCK_MONOTONIC_RAW, time.CLOCK_BOOTTIME)
_FEWEST: Final = 3
_TIMES_OTHERS: Final = 1.5


class Clock(msgspec.Struct, frozen=True):
    """How times of a profile become Unix time: ``offset_ns`` is added, give or take ``error_ns``.

    ``how`` says in words where that comes from. ``is_local`` says that this machine made the
    profile, since it was started; ``is_seen`` that the store knows the machine that made it: it saw
    files there when they were mapped.
    """

    offset_ns: int
    error_ns: int
    how: str
    is_local: bool = False
    is_seen: bool = False


def recorded(profile: Profile) -> Clock | None:
    """What the profile says itself."""
    said = headers.clock(profile.feature(headers.CLOCK_DATA), profile.header.order)
    if said is None:
        return None
    offset = said.wall_ns - said.event_ns
    is_local = said.clockid in _OF_A_BOOT and _is_of_this_boot(said.clockid, offset)
    return Clock(offset, _EXACT_NS, "times as the profile says", is_local)


def _is_of_this_boot(clockid: int, offset: int) -> bool:
    here = time.time_ns() - time.clock_gettime_ns(clockid)
    return abs(here - offset) <= _MARGIN_NS


def of_this_boot(mtime_ns: int, last: int, now_ns: int) -> Clock | None:
    """The clock of this machine, if that was the one in a file written at ``mtime_ns``.

    Then its last time, ``last``, was a little before it was written. Nobody sets that clock, so it
    goes wrong as clocks do: by less than 100 us in a second.
    """
    try:
        offset, error = clock.perf_offset()
    except OSError:
        return None
    if not -_MARGIN_NS <= mtime_ns - (last + offset) <= _WRITING_NS:
        return None
    error += _EXACT_NS // 10 + max(now_ns - mtime_ns, 0) // 10_000
    return Clock(offset, error, "times by the clock of this machine", is_local=True)


def by_file_time(mtime_ns: int, last: int) -> Clock:
    """From when the file was written and the time ``last`` in it.

    A copy that was given the time of copying seems to be later than it is.
    """
    error = _WRITING_NS // 2
    how = "times by when the file was last written: right to a minute, wrong for a copy"
    return Clock(mtime_ns - last - error, error + _MARGIN_NS, how)


def aligned(clock: Clock, differences: Iterable[tuple[int, int]]) -> Clock | None:
    """A better one, if there is.

    ``differences`` has the number of a file, and the Unix time it was first seen minus the time in
    the profile that it was first mapped; some of them are of other occasions. None if less than
    three files are alike, or if nearly as many are in another way: who runs the same again and
    again could be taken for the one before.
    """
    near = sorted(
        (difference, file)
        for file, difference in differences
        if abs(difference - clock.offset_ns) <= clock.error_ns
    )
    windows = []
    end = 0
    for begin, (difference, _) in enumerate(near):
        while end < len(near) and near[end][0] <= difference + _ALIKE_NS:
            end += 1
        windows.append((len({file for _, file in near[begin:end]}), begin, end))
    if not windows:
        return None
    most, begin, end = max(windows, key=lambda window: window[0])
    best = near[begin + (end - begin) // 2][0]
    others = [
        count for count, first, _ in windows if abs(near[first][0] - best) > _ALIKE_NS + _EXACT_NS
    ]
    if most < _FEWEST or most < _TIMES_OTHERS * max(others, default=0):
        return None
    how = f"times by {most} files that were first seen when they were first mapped"
    return Clock(best, _EXACT_NS, how, is_seen=True)


def find(profile: Profile, last: int, differences: Iterable[tuple[int, int]]) -> Clock:
    """The best there is; ``last`` is the last time in the profile, and not 0."""
    clock = (
        recorded(profile)
        or of_this_boot(profile.mtime_ns, last, time.time_ns())
        or by_file_time(profile.mtime_ns, last)
    )
    if clock.error_ns > _EXACT_NS:
        clock = aligned(clock, differences) or clock
    return clock
