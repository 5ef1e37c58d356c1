# SPDX-License-Identifier: Apache-2.0
"""Match the mappings of a profile with the sightings of a store, by path, inode and time.

Times in perf.data are those of a clock that starts with the machine; the store has Unix time. A
profile recorded with ``perf record -k mono`` has the offset between the two. The machine that made
a profile can read its clock until the next boot. Otherwise the offset is estimated from the mtime
of the profile, and then from the journal: a watch sees each file a moment after it was first
mapped, so the same difference between the two clocks occurs again and again.
"""

from __future__ import annotations

import os
import re
import time
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture.origin import builder
from buildidfs.catalog.remedies import AMBIGUOUS, NO_BUILD_ID, OTHER_FILE, OTHER_HOST
from buildidfs.formats.perf import headers
from buildidfs.formats.perf.headers import CPUMODE, KERNEL
from buildidfs.linux import inodes, machine, perf_event
from buildidfs.model import BuildId, FileIdentity, Trust, is_shared
from buildidfs.store.index.locations import NAMES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from buildidfs.formats.perf.address_spaces import File
    from buildidfs.profile.perf_data import Profile
    from buildidfs.store import OriginRecord, Store


_SECOND: Final = 1_000_000_000
# A watch sees a mapping a few milliseconds later, or longer on a busy host.
_SOON_NS: Final = _SECOND // 5
_LATE_NS: Final = 2 * _SECOND
# After this time a path alone does not identify a file.
_STALE_NS: Final = 24 * 3600 * _SECOND
KALLSYMS: Final = b"[kernel.kallsyms]"
_MOST_NAMESAKES: Final = 3
_MOST_MODULES: Final = 64
_MOST_LOOKED_AT: Final = 1 << 16
_RELEASE_OF: Final = re.compile(rb"(?:/usr)?/lib/modules/([^/]+)/.*\.ko(?:\.xz|\.zst|\.gz)?\Z")
_MODULE_SUFFIXES: Final = (b".ko", b".ko.xz", b".ko.zst", b".ko.gz")
_DELETED: Final = b" (deleted)"
SHARP_NS: Final = 2 * _SECOND
"""If the error of a time is larger, the time does not distinguish successive containers."""
_EXACT_NS: Final = _SECOND // 20
# A mapped file is usually seen one or two milliseconds later.
_ALIKE_NS: Final = _SECOND // 100
# perf reads build IDs between the last sample and the end of the file.
_WRITING_NS: Final = 60 * _SECOND
_MARGIN_NS: Final = 2 * _SECOND
# Clocks with a different start on each machine and after each boot.
_OF_A_BOOT: Final = (time.CLOCK_MONOTONIC, time.CLOCK_MONOTONIC_RAW, time.CLOCK_BOOTTIME)
_FEWEST: Final = 3
_TIMES_OTHERS: Final = 1.5


class SightedId(msgspec.Struct, frozen=True):
    """A build ID that was seen at a path; fields as those of `Origin` and `JournalRecord`, and
    ``container`` as `containers.reported_at` returns it.
    """

    build_id: BuildId
    container: str
    mnt: int
    mnt_ns_id: int
    host: str
    first_ns: int
    last_ns: int
    identity: FileIdentity | None = None
    shared: BuildId | None = None


class Match(msgspec.Struct, frozen=True):
    """The result for a mapping: its build ID, or the reason ``why`` there is none, and the
    ``candidates`` left. With both, the store may have another file with that build ID.

    ``is_other`` is True if the known files at the path are certainly other files; ``is_sure`` if
    more than the path matches.
    """

    build_id: BuildId | None
    candidates: tuple[SightedId, ...] = ()
    why: str = ""
    is_other: bool = False
    is_sure: bool = False

    @property
    def container(self) -> str | None:
        """Return the label that all candidates share, empty for the host; None if their labels
        differ.
        """
        labels = {each.container for each in self.candidates}
        return labels.pop() if len(labels) == 1 else None


class Matcher:
    """Identifies the files of one profile.

    ``files`` are its files, each with the time it was first mapped (0: before the recording, or
    unknown). ``clock`` is None if times of the profile cannot be converted. ``host`` is the name of
    the machine that recorded it, empty if unknown. ``start`` is the time (of the profile) at which
    the recording began; earlier events have a time of 0. ``release`` is the release of its kernel,
    empty if unknown. ``assigned`` are build IDs that a user
    gives to paths; they override the store.
    """

    def __init__(
        self,
        store: Store,
        files: Mapping[File, int],
        *,
        clock: ClockOffset | None = None,
        host: str = "",
        start: int = 0,
        release: bytes = b"",
        assigned: Mapping[bytes, BuildId] | None = None,
    ) -> None:
        self._store = store
        self._release = release
        self._assigned = assigned or {}
        self._host = host
        self._start = start
        self.clock = clock
        self._firsts = files
        self._repeated = _repeated(files)
        self._believed: dict[bytes, bool] = {}
        self._known: dict[bytes, tuple[SightedId, ...]] = {}

    def candidates(self, path: bytes) -> tuple[SightedId, ...]:
        """Return the captures and journal rows of a path, of any time."""
        path = plain(path)
        found = self._known.get(path)
        if found is None:
            found = self._known[path] = tuple(self._look_up(path))
        return found

    def believes(self, file: File) -> bool:
        """Return True if the build ID of a file in the profile identifies the file."""
        return (
            bool(file.build_id)
            and not (_is_module(file) and file.build_id in self._repeated)
            and self.tells(file.build_id)
        )

    def tells(self, build_id: bytes) -> bool:
        """Return True if a build ID tells programs apart: unrelated programs are not known to share
        it.
        """
        known = self._believed.get(build_id)
        if known is None:
            ordinal = self._store.index.ordinal(build_id)
            known = not is_shared(build_id) and not (
                ordinal is not None and self._store.aliases.is_ambiguous(ordinal)
            )
            self._believed[build_id] = known
        return known

    def forget(self) -> None:
        """Drop the candidates of earlier answers, after the store got new captures."""
        self._known.clear()
        self._believed.clear()

    def alike(self, file: File) -> list[SightedId]:
        """Return the candidates that may be this file by device and inode, of any time."""
        pool = self.candidates(file.path)
        return [each for each in pool if each.identity and _is_same(each.identity, file)]

    def answer(self, file: File, time: int, mnt: int = 0, mounts: Collection[int] = ()) -> Match:
        """Identify a file that was mapped at ``time`` of the profile (0: before it began).

        ``mnt`` is the inode number of the mount namespace of the process, 0 if unknown; with
        ``mounts`` it was one of those (`SightedId.mnt_ns_id`).
        """
        pool = self.candidates(file.path)
        if self.believes(file):
            return self._named(file, pool, time, mnt, mounts)
        if file.build_id:
            pool = tuple(each for each in pool if each.shared == file.build_id) or pool
        if (given := self._assigned.get(plain(file.path))) is not None:
            its = tuple(each for each in pool if each.build_id == given)
            return Match(given, its, is_sure=True)
        if not pool:
            return Match(None, why=NO_BUILD_ID)
        pool = self._on_its_host(pool)
        if not pool:
            return Match(None, why=OTHER_HOST)
        if mnt:
            pool = tuple(each for each in pool if not each.mnt or each.mnt == mnt)
        same = [each for each in pool if each.identity and _is_same(each.identity, file)]
        if same:
            same = [each for each in same if self._may_be(each, file)] or same
            if any(each.mnt_ns_id in mounts for each in same):
                same = [each for each in same if each.mnt_ns_id in mounts]
            equal = [each for each in same if _has_dev(each.identity, file)]
            left = self._at(equal or same, time, one_at_a_time=bool(equal))
        elif file.path.startswith(b"["):
            left = list(pool)
        elif not file.inode:
            # A record with a build ID, or of an old kernel, has no device and inode.
            there = pool if file.build_id or _is_module(file) else self._there(pool, time)
            left = self._at(there, time, one_at_a_time=not file.build_id and _is_one_place(there))
        else:
            left = [each for each in pool if each.identity is None and self._is_near(each, time)]
        if mounts and any(each.mnt_ns_id in mounts for each in left):
            left = [each for each in left if each.mnt_ns_id in mounts]
        if not left:
            is_other = bool(file.inode) and any(each.identity for each in pool)
            return Match(None, why=OTHER_FILE if pool else NO_BUILD_ID, is_other=is_other)
        ids = {each.build_id for each in left}
        if len(ids) > 1:
            return Match(None, tuple(left), AMBIGUOUS)
        return Match(ids.pop(), tuple(left), is_sure=bool(same))

    def _on_its_host(self, pool: tuple[SightedId, ...]) -> tuple[SightedId, ...]:
        """Return the candidates in ``pool`` that were seen on the machine that made the profile.

        Device and inode distinguish files of one machine only. perf in a container records the host
        name of the container; then the clock has to identify the machine.
        """
        for host in (self._host, ""):
            own = tuple(each for each in pool if each.host == host)
            if own:
                return own
        if not self._host or (self.clock is not None and self.clock.is_seen):
            return pool
        if self.clock is None or not self.clock.is_local:
            return ()
        names = {machine.host_name(), os.uname().nodename}
        return tuple(each for each in pool if each.host in names)

    def _named(
        self, file: File, pool: Sequence[SightedId], time: int, mnt: int, mounts: Collection[int]
    ) -> Match:
        """Return the answer for a mapping with a build ID, with the container it was in."""
        build_id = BuildId(file.build_id)
        left = [each for each in pool if each.build_id == build_id]
        for fits in (
            lambda each: not self._host or each.host == self._host,
            lambda each: not mnt or each.mnt == mnt,
            lambda each: not mounts or each.mnt_ns_id in mounts,
        ):
            left = [each for each in left if fits(each)] or left
        return Match(build_id, tuple(self._at(left, time, one_at_a_time=False)), is_sure=True)

    def unix_time(self, time: int) -> int | None:
        """Return a time of the profile (0: before it began) as Unix time in ns; None if unknown."""
        if self.clock is None:
            return None
        return (time or self._start) + self.clock.offset_ns

    def _at(self, pool: Sequence[SightedId], time: int, *, one_at_a_time: bool) -> list[SightedId]:
        """Return the candidates in ``pool`` that may have been at the path at that time.

        A file that was first seen at that time was captured because of this mapping. If there is no
        such file, and the files existed one after another (``one_at_a_time``: they had the same
        device and inode), the mapped file is the one that was first seen most recently.
        """
        moment = self.unix_time(time)
        if moment is None or self.clock is None:
            return list(pool)
        error = self.clock.error_ns
        begun = sorted(
            (each for each in pool if -error <= each.first_ns - moment <= error + _LATE_NS),
            key=_first_seen,
        )
        before = [each for each in pool if each.first_ns < moment - error]
        if one_at_a_time:
            begun = [each for each in begun if each.first_ns <= begun[0].first_ns + error]
            last = max((each.first_ns for each in before), default=0)
            ids = {each.build_id for each in before if each.first_ns >= last - error}
            before = [each for each in before if each.build_id in ids]
        is_prompt = begun and begun[0].first_ns <= moment + error + _SOON_NS
        if is_prompt and time and error <= SHARP_NS:
            return [each for each in begun if each.first_ns <= begun[0].first_ns + error]
        if before and not time and one_at_a_time:
            return before  # the file existed when the recording began
        return begun + before or list(pool)

    def _may_be(self, each: SightedId, file: File) -> bool:
        """Return True if the sighting may be of this file, by the time of its first mapping.

        The profile has each mapping of the file during the recording. So a sighting between the
        start of the recording and the first mapping is of another file with the same numbers.
        """
        first = self._firsts.get(file, 0)
        if not first or self.clock is None or self.clock.error_ns > SHARP_NS:
            return True
        error, offset = self.clock.error_ns, self.clock.offset_ns
        return not self._start + offset + error < each.first_ns < first + offset - error

    def _there(self, pool: Sequence[SightedId], time: int) -> list[SightedId]:
        """Return the candidates that may have been at the path at that time, by path and time only.

        They were seen by then or had not changed since, and were seen not long before.
        """
        moment = self.unix_time(time)
        if moment is None or self.clock is None:
            return list(pool)
        by = moment + self.clock.error_ns + _LATE_NS
        return [
            each
            for each in pool
            if each.last_ns >= moment - _STALE_NS
            and (each.first_ns <= by or (each.identity and each.identity.ctime_ns <= moment))
        ]

    def _is_near(self, each: SightedId, time: int) -> bool:
        moment = self.unix_time(time)
        if moment is None or self.clock is None:
            return True
        error = self.clock.error_ns
        return each.first_ns <= moment + error + _LATE_NS and each.last_ns >= moment - _STALE_NS

    def _look_up(self, path: bytes) -> Iterable[SightedId]:
        seen = set()
        if path.startswith(b"[") and path != KALLSYMS:
            yield from _modules(self._store, path, self._release)
        elif _RELEASE_OF.match(path):
            yield from _modules(self._store, path, self._release)
            return
        for each in _origins(self._store, path):
            seen.add((each.build_id, each.mnt_ns_id, each.container))
            yield each
        for row in self._store.journal.at(None, path):
            if not self.tells(row.build_id):
                continue
            label = builder.reported(row)
            if (row.build_id, row.mnt_ns_id, label) not in seen:
                yield SightedId(
                    row.build_id,
                    label,
                    row.namespaces.mnt,
                    row.mnt_ns_id,
                    row.host,
                    row.first_seen_ns,
                    row.last_seen_ns,
                )


def namesakes(store: Store, path: bytes) -> list[tuple[BuildId, bytes]]:
    """Return a few files in the store with the same file name as ``path``, at other paths.

    Each build ID comes with the path where it was last seen under that name.
    """
    name = os.path.basename(plain(path))
    number = store.paths.child(NAMES, name) if name else None
    if number is None:
        return []
    found: list[tuple[BuildId, bytes]] = []
    ordinals = islice(store.file_names.ids(number), _MOST_LOOKED_AT)
    for _, ordinal in store.index.most_believed(ordinals, _MOST_NAMESAKES):
        build_id = store.index.build_id(ordinal)
        paths = (record.origin.path for record in store.index.origins(ordinal))
        at = next((each for each in paths if os.path.basename(each) == name), None)
        if build_id is not None and at is not None:
            found.append((build_id, at))
    return found


def _first_seen(each: SightedId) -> int:
    return each.first_ns


def plain(path: bytes) -> bytes:
    """Return a path without the kernel's mark of a deleted file, or perf's suffix of the kernel."""
    if path.startswith(KALLSYMS):
        return KALLSYMS
    return path.removesuffix(_DELETED)


def _origins(store: Store, path: bytes) -> Iterable[SightedId]:
    """Return the captures at a path as candidates."""
    number = store.paths.number(filter(None, path.split(b"/")))
    if number is None:
        return
    for ordinal in store.paths.ids(number):
        for record in store.index.origins(ordinal):
            if record.origin.path == path:
                yield from _candidate(store, ordinal, record)


def _candidate(store: Store, ordinal: int, record: OriginRecord) -> Iterable[SightedId]:
    """Return a place as a candidate; if unrelated programs have the build ID, under the
    adopted ID.
    """
    build_id, shared = store.index.build_id(ordinal), None
    if store.aliases.is_ambiguous(ordinal):
        shared, build_id = build_id, store.aliases.adopted_id(record.digest)
    if build_id is None:
        return
    origin = record.origin
    yield SightedId(
        build_id,
        builder.reported(origin),
        origin.namespaces.mnt,
        origin.mnt_ns_id,
        origin.host,
        record.first_seen_ns,
        record.last_seen_ns,
        origin.identity,
        shared,
    )


def _modules(store: Store, name: bytes, release: bytes) -> list[SightedId]:
    """Return the captures of a kernel module that a profile names: in brackets, or by its path.

    A path contains the release of the kernel; ``release`` is that of the profile, if known. Files
    of containers and users do not count: anybody can call a file as a module of the kernel.
    """
    by_path = _RELEASE_OF.match(name)
    if by_path is not None:
        release = by_path[1]
        spelled = {os.path.basename(name)}
    else:
        stem = name.strip(b"[]")
        stems = {stem, stem.replace(b"_", b"-")}
        spelled = {each + suffix for each in stems for suffix in _MODULE_SUFFIXES}
    found = [
        (record.origin.path, candidate)
        for each in spelled
        for ordinal, record in _modules_called(store, each)
        for candidate in _candidate(store, ordinal, record)
    ]
    if by_path is not None:
        return [each for path, each in found if _under_lib(path) == _under_lib(name)]
    parts = ((_RELEASE_OF.match(path), each) for path, each in found)
    own = [each for part, each in parts if part is not None and part[1] == release]
    return own or [each for _, each in found]


def _modules_called(store: Store, file_name: bytes) -> Iterator[tuple[int, OriginRecord]]:
    """Yield the believed files of a name: the ordinal and place of each."""
    number = store.paths.child(NAMES, file_name)
    if number is None:
        return
    ordinals = islice(store.file_names.ids(number), _MOST_LOOKED_AT)
    for worth, ordinal in store.index.most_believed(ordinals, _MOST_MODULES):
        if worth < Trust.PACKAGE:
            break
        for record in store.index.origins(ordinal):
            if os.path.basename(record.origin.path) == file_name:
                yield ordinal, record


def _under_lib(path: bytes) -> bytes:
    """Return the path of a module without the directory that is a link on some distributions."""
    return path.removeprefix(b"/usr")


def _is_one_place(pool: Sequence[SightedId]) -> bool:
    """Return True if all candidates were in one mount namespace, where a path has one file at a
    time.
    """
    return len({(each.host, each.mnt_ns_id) for each in pool}) == 1


def _is_module(file: File) -> bool:
    """Return True for a kernel module."""
    return file.cpumode & CPUMODE == KERNEL and not file.path.startswith(KALLSYMS)


def _repeated(files: Iterable[File]) -> frozenset[bytes]:
    """Return the build IDs that several kernel modules of a profile have.

    From the version that made --buildid-mmap the default until Linux 7.0, perf gave each module the
    build ID of the first one.
    """
    paths: dict[bytes, set[bytes]] = {}
    for file in files:
        if file.build_id and _is_module(file):
            paths.setdefault(file.build_id, set()).add(file.path)
    return frozenset(build_id for build_id, of in paths.items() if len(of) > 1)


def _is_same(identity: FileIdentity, file: File) -> bool:
    """Return True if a file may be the one that is mapped.

    Overlays and btrfs show one device number in mappings and another one in stat(2). Both numbers
    have the major number 0, and the inode is the same.
    """
    if identity.ino != file.inode:
        return False
    return not (os.major(identity.dev) and file.dev[0]) or _has_dev(identity, file)


def _has_dev(identity: FileIdentity | None, file: File) -> bool:
    # A profile may claim a device number that os.makedev refuses.
    return identity is not None and inodes.major_minor(identity.dev) == file.dev


class ClockOffset(msgspec.Struct, frozen=True):
    """The offset from times of a profile to Unix time, ``offset_ns``, known up to ``error_ns``.

    ``how`` describes the source of the offset. ``is_local``: this machine made the profile since
    its start. ``is_seen``: the store saw files there when they were mapped.
    """

    offset_ns: int
    error_ns: int
    how: str
    is_local: bool = False
    is_seen: bool = False


def recorded(profile: Profile) -> ClockOffset | None:
    """Return the clock that the profile itself records, if any."""
    clock = headers.clock(profile.feature(headers.CLOCK_DATA), profile.header.order)
    if clock is None:
        return None
    offset = clock.wall_ns - clock.event_ns
    is_local = clock.clockid in _OF_A_BOOT and _is_of_this_boot(clock.clockid, offset)
    return ClockOffset(
        offset,
        _EXACT_NS,
        "the times of the samples are exact: the profile says how its clock relates to the date",
        is_local,
    )


def _is_of_this_boot(clockid: int, offset: int) -> bool:
    here = time.time_ns() - time.clock_gettime_ns(clockid)
    return abs(here - offset) <= _MARGIN_NS


def of_this_boot(mtime_ns: int, last: int, now_ns: int) -> ClockOffset | None:
    """Return the clock of this machine if it fits a profile that was written at ``mtime_ns``.

    It fits if ``last``, the last time in the profile, is a little earlier. The clock of perf is
    never set and drifts by less than 100 us in a second.
    """
    try:
        offset, error = perf_event.perf_offset()
    except OSError:
        return None
    if not -_MARGIN_NS <= mtime_ns - (last + offset) <= _WRITING_NS:
        return None
    error += _EXACT_NS // 10 + max(now_ns - mtime_ns, 0) // 10_000
    return ClockOffset(
        offset,
        error,
        "the times of the samples are exact: by the clock of this machine",
        is_local=True,
    )


def by_file_time(mtime_ns: int, last: int) -> ClockOffset:
    """Return a clock that assumes that the file was written at ``last``, the last time in it.

    A copy with a new mtime makes the profile seem later than it is.
    """
    error = _WRITING_NS // 2
    how = (
        "the times of the samples are those of the last write to the file: right to a minute,"
        " wrong for a copy"
    )
    return ClockOffset(mtime_ns - last - error, error + _MARGIN_NS, how)


def aligned(clock: ClockOffset, differences: Iterable[tuple[int, int]]) -> ClockOffset | None:
    """Return the clock with which most files were seen just after they were mapped.

    ``differences`` has pairs: the number of a file, and the Unix time it was first seen minus the
    time in the profile of its first mapping. Some pairs belong to other runs of the program.
    Returns None if fewer than three files agree, or if nearly as many agree on another offset: a
    program that runs again and again would match its previous run.
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
    how = (
        f"the times of the samples are exact: {most} files were first seen when they were first"
        " mapped"
    )
    return ClockOffset(best, _EXACT_NS, how, is_seen=True)


def find(profile: Profile, last: int, differences: Iterable[tuple[int, int]]) -> ClockOffset:
    """Return the best clock for a profile whose last time is ``last`` (not 0)."""
    clock = (
        recorded(profile)
        or of_this_boot(profile.mtime_ns, last, time.time_ns())
        or by_file_time(profile.mtime_ns, last)
    )
    if clock.error_ns > _EXACT_NS:
        clock = aligned(clock, differences) or clock
    return clock
