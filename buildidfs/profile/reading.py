# SPDX-License-Identifier: Apache-2.0
"""Read a profile: its mappings, the build ID of each, and the samples that fell into them.

A profile may have hundreds of millions of samples, most of them in pages with earlier samples. So
the answer for a page of a process is kept until the mappings of the process change.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs.catalog.coverage import Coverage, CoverageLookup
from buildidfs.catalog.remedies import (
    AMBIGUOUS,
    ANONYMOUS,
    EMULATED,
    GUEST,
    MAY_BE_HERE,
    MEMFD,
    MOVED,
    NO_BUILD_ID,
    NO_KERNEL,
    NO_MAPPING,
    NOT_CAPTURED,
    NOTHING_RECORDED,
    OTHER_CONTEXT,
    OTHER_HOST,
    OTHER_MACHINE,
)
from buildidfs.errors import ArtifactMissing
from buildidfs.formats.perf import headers, records
from buildidfs.formats.perf.address_spaces import File, Spaces
from buildidfs.formats.perf.attributes import (
    CONTEXT_GUESTS,
    CONTEXT_KERNEL,
    CONTEXT_USER,
    CONTEXT_USER_DEFERRED,
    MAX_CONTEXT,
)
from buildidfs.formats.perf.headers import CPUMODE, GUEST_KERNEL, GUEST_USER, KERNEL, USER
from buildidfs.formats.perf.records import KERNEL_PID, Events, Executed, Forked, LostRecords, Mapped
from buildidfs.model import BuildId
from buildidfs.names import printable
from buildidfs.profile import match
from buildidfs.profile.match import KALLSYMS, Match, Matcher
from buildidfs.profile.perf_data import Profile
from buildidfs.profile.selection import Selection, ThreadNames, most_frequent
from buildidfs.store.placement import Extent, Placement

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from buildidfs.capture.base import Progress
    from buildidfs.formats.perf.headers import BuildIdEntry
    from buildidfs.formats.perf.record_stream import Raw
    from buildidfs.formats.perf.records import Entered
    from buildidfs.store import Store

_ANONYMOUS_NAMES: Final = (
    b"//anon", b"/dev/zero", b"/anon_hugepage", b"/SYSV", b"[heap]", b"[stack",
    b"[anon", b"anon_inode:", b"[uprobes]",
)  # fmt: skip
_EMULATOR: Final = re.compile(rb"qemu-(?!system)[a-z0-9_]+(?:-static)?$|box(?:64|86)$|FEX|blink$")
_LIBRARY: Final = re.compile(rb"\.so(?:\.|$)")
_MEMFD_NAME: Final = b"/memfd:"
_SAMPLES: Final = frozenset((records.SAMPLE,))
_CHAINS: Final = frozenset((records.SAMPLE, records.CALLCHAIN_DEFERRED))
_TELLING: Final = records.TELLING | {records.HEADER_BUILD_ID}
_THREADS: Final = frozenset((records.COMM, records.FORK))
_NAMING: Final = frozenset((records.MMAP2, records.HEADER_BUILD_ID))
_EACH: Final = 16  # the time of one sample in so many is read, which suffices for the time span
_EVERY: Final = 1 << 16  # records between two reports of progress
UNMAPPED: Final = -1
IN_KERNEL: Final = -2
IN_GUEST: Final = -3
IN_OTHER: Final = -4
_PAGE_BITS: Final = 12
_MOST_PAGES: Final = 1 << 18
_MOST_DEFERRED: Final = 1 << 15  # call chains, and samples, that wait for the other part
_OTHER_MODE: Final = 0
_GUEST_MODES: Final = frozenset((GUEST_KERNEL, GUEST_USER))
_MODES: Final = {
    CONTEXT_KERNEL: KERNEL,
    CONTEXT_USER: USER,
    **dict.fromkeys(CONTEXT_GUESTS, GUEST_USER),
}


class Reading:
    """A profile: its address spaces, and the build IDs of its files as far as the store knows them.

    ``assigned`` gives build IDs to paths, see `match.Matcher`. ``contested`` are the paths in
    answers so far whose build ID does not identify the mapped file. ``lost`` counts records that
    the kernel dropped, ``samples`` those that `hits` has read. ``selection`` restricts `hits` to
    some samples; ``threads`` has the names of threads if it needs them, and ``unselected``
    counts the samples of threads with other names. The constructor raises `UsageError`.
    """

    def __init__(
        self,
        profile: Profile,
        store: Store,
        progress: Progress | None = None,
        assigned: Mapping[bytes, BuildId] | None = None,
        selection: Selection | None = None,
    ) -> None:
        self.profile = profile
        self._selection = selection or Selection()
        self.threads = ThreadNames()
        self.unselected: Counter[bytes] = Counter()
        self._assigned = assigned or {}
        self.host = profile.text(headers.HOSTNAME).decode("utf-8", "surrogateescape")
        self.spaces = Spaces()
        self.lost = 0
        self.samples = 0
        self.named: dict[bytes, BuildIdEntry] = {}
        self._progress = progress
        self._has_time = profile.layouts.have_time
        self._first: list[int] = []  # the time at which each file was first mapped, 0 if unknown
        self._span = headers.times(profile.feature(headers.SAMPLE_TIME), profile.header.order)
        self._events = Events(profile.layouts, profile.header.order)
        self._answers: dict[tuple[int, int, int], Match] = {}
        self._mounts: dict[tuple[int, int], frozenset[int]] = {}
        self._placement = Placement(store)
        self.contested: set[bytes] = set()
        self._placed: dict[tuple[object, ...], tuple[BuildId, str]] = {}
        self._anonymous: dict[tuple[int, int], str] = {}
        for named in profile.build_ids():
            self._name(named)
        self._take_in()
        self.matcher = self._matcher(store)

    # --- the first pass --------------------------------------------------------------------

    def _take_in(self) -> None:
        start, last = self._span or (0, 0)
        kinds = _TELLING if self._span is not None else _TELLING | _SAMPLES
        for number, raw in self._records("mappings", kinds):
            if self._selection.comm is not None and raw.kind in _THREADS:
                thread = self._events.thread(raw)
                if thread is not None:
                    moment = thread.time if self._has_time else number
                    self.threads.add(thread, moment)
            event = self._events.read(raw)
            if event is None:
                if raw.kind == records.HEADER_BUILD_ID:
                    self._name(self.profile.named(raw))
                elif raw.kind == records.SAMPLE and not (start and number % _EACH):
                    head = self.profile.layouts.head(raw.data, raw.at, raw.size)
                    if head is not None and head[3]:
                        start = min(start or head[3], head[3])
                        last = max(last, head[3])
                continue
            if isinstance(event, LostRecords):
                self.lost += event.count
                continue
            time = self.time_of(event, number)
            last = max(last, time)
            file = self.spaces.add(event, time)
            if file >= 0:
                if file == len(self._first):
                    self._first.append(0)
                if time:
                    self._first[file] = min(self._first[file] or time, time)
        self._start, self._last = start, last

    def time_of(self, event: Mapped | Forked | Executed | Entered, number: int) -> int:
        """Return the time of the record with that number; 0 before the first sample."""
        return (event.time or 0) if self._has_time else number

    def notes(self) -> list[str]:
        """Return remarks for the reader on how the answers were found."""
        notes = [self.matcher.clock.how] if self.matcher.clock is not None else []
        if self.lost:
            records = "1 record was" if self.lost == 1 else f"{self.lost} records were"
            notes.append(f"{records} lost when the profile was made")
        if self.spaces.left_out:
            notes.append(f"{self.spaces.left_out} mappings of processes with too many left out")
        return notes

    def remedies(self, reasons: Collection[str]) -> list[str]:
        """Return remedies for files that lack a build ID for these ``reasons``, a sentence each."""
        found = [NOTHING_RECORDED] if NO_BUILD_ID in reasons else []
        if OTHER_HOST in reasons:
            host = self.host.encode("utf-8", "surrogateescape")
            found.append(OTHER_MACHINE.format(host=printable(host)))
        if NOT_CAPTURED in reasons:
            found.append(MAY_BE_HERE)
        return found

    def _records(self, what: str, kinds: frozenset[int]) -> Iterator[tuple[int, Raw]]:
        """Yield the records of ``kinds``, or all records if their numbers stand for times."""
        wanted = kinds if self._has_time else None
        for number, raw in enumerate(self.profile.records(wanted), 1):
            if self._progress is not None and not number % _EVERY:
                self._progress(number, what)
            yield number, raw

    def _name(self, named: BuildIdEntry | None) -> None:
        if named is not None and named.misc & CPUMODE in (KERNEL, USER):
            self.named.setdefault(named.name, named)

    def _matcher(self, store: Store) -> Matcher:
        profile, files = self.profile, self.spaces.files
        firsts = dict(zip(files, self._first, strict=True))
        matcher = Matcher(
            store,
            firsts,
            host=self.host,
            start=self._start,
            release=profile.text(headers.OSRELEASE),
            assigned=self._assigned,
        )
        if self._has_time and self._last:
            differences = (
                (number, candidate.first_ns - first)
                for number, first in enumerate(self._first)
                if first
                for candidate in matcher.alike(files[number])
            )
            matcher.clock = match.find(profile, self._last, differences)
        return matcher

    def forget(self) -> None:
        """Drop earlier answers, after the store got new captures."""
        self.matcher.forget()
        self._placement.forget()
        self._placed.clear()
        self._answers.clear()
        self._mounts.clear()

    # --- files -----------------------------------------------------------------------------

    def answer(self, hit: SampleSite) -> Match:
        """Identify the file of a hit (whose ``file`` is not negative).

        If files with its build ID have their code at other offsets, the result has the adopted ID
        of the one that was mapped.
        """
        answer = self._identify(hit)
        build_id, file = answer.build_id, self.spaces.files[hit.file]
        if build_id is None or file.cpumode & CPUMODE == KERNEL or file.path.startswith(b"["):
            return answer
        key = build_id, *self.spaces.extents(hit.pid, hit.image, hit.file, hit.time)
        placed = self._placed.get(key)
        if placed is None:
            extents = [Extent(*each) for each in key[1:]]
            placed = self._placed[key] = self._placement.choose(build_id, extents)
        build_id, why = placed
        if why:
            self.contested.add(match.plain(file.path))
            if (given := self._assigned.get(match.plain(file.path))) is not None:
                build_id, why = given, ""
        if (build_id, why) == (answer.build_id, answer.why):
            return answer
        return msgspec.structs.replace(answer, build_id=build_id, why=why)

    def _identify(self, hit: SampleSite) -> Match:
        file = self.spaces.files[hit.file]
        mnt = self.spaces.mount_namespace(hit.pid, hit.time)
        answer = self._alone(hit.file, hit.time, mnt)
        if len(answer.candidates) > 1 and (answer.build_id is None or answer.container is None):
            # All files of a process are in one mount namespace, so other files may identify it.
            mounts = self._mounts_of(hit.pid, hit.image)
            if mounts:
                answer = self.matcher.answer(file, hit.time, mnt, mounts)
        if answer.is_sure or answer.is_other:
            return answer
        named = self.named.get(KALLSYMS if file.path.startswith(KALLSYMS) else file.path)
        if named is None or not self.matcher.tells(named.build_id):
            return answer
        build_id = BuildId(named.build_id)
        left = tuple(each for each in answer.candidates if each.build_id == build_id)
        if answer.candidates and not left:
            # The table of build IDs has paths only, and several files had this path.
            return Match(None, answer.candidates, AMBIGUOUS)
        return Match(build_id, left)

    def _alone(self, number: int, time: int, mnt: int) -> Match:
        key = number, time, mnt
        answer = self._answers.get(key)
        if answer is None:
            answer = self.matcher.answer(self.spaces.files[number], time, mnt)
            self._answers[key] = answer
        return answer

    def _why_anonymous(self, pid: int, image: int) -> str:
        """Return the reason why a process runs code from memory without a file, according to the
        files that it maps.
        """
        key = pid, image
        why = self._anonymous.get(key)
        if why is None:
            files = [self.spaces.files[number] for number, _ in self.spaces.mapped(pid, image)]
            names = [
                os.path.basename(file.path)
                for file in files
                if file.path.startswith(b"/") and not is_anonymous(file)
            ]
            why = ANONYMOUS
            if any(_EMULATOR.match(name) for name in names):
                why = EMULATED
            elif names and all(_LIBRARY.search(name) for name in names):
                why = MOVED  # a JIT compiler is a mapped program, or a library of one
            self._anonymous[key] = why
        return why

    def _mounts_of(self, pid: int, image: int) -> frozenset[int]:
        """Return the mount namespaces that a process may have been in, according to its files.

        The result is empty if the files do not show it, or contradict each other.
        """
        key = pid, image
        known = self._mounts.get(key)
        if known is not None:
            return known
        mounts: frozenset[int] | None = None
        for file, time in self.spaces.mapped(pid, image):
            answer = self._alone(file, time, self.spaces.mount_namespace(pid, time))
            its = frozenset(each.mnt_ns_id for each in answer.candidates) - {0}
            if answer.is_sure and its:
                mounts = its if mounts is None else mounts & its
        found = self._mounts[key] = mounts or frozenset()
        return found

    # --- the second pass -------------------------------------------------------------------

    def hits(self, *, chains: bool = False) -> Counter[SampleSite]:
        """Count the selected samples at each place; with ``chains``, or if the selection has an
        address, a sample also counts at each place in its call chain.
        """
        chains = chains or self._selection.has_address
        return self._count(Hits(self.spaces, self._selection), chains=chains)

    def _count(self, hits: Hits, *, chains: bool) -> Counter[SampleSite]:
        layouts = self.profile.layouts
        comm = None if self._selection.comm is None else os.fsencode(self._selection.comm)
        self.samples = 0
        self.unselected.clear()
        for number, raw in self._records("samples", _CHAINS if chains else _SAMPLES):
            kind, misc, data, at, size, _, _ = raw
            if kind == records.CALLCHAIN_DEFERRED and chains:
                if (deferred := layouts.deferred(data, at, size)) is not None:
                    hits.add_deferred(*deferred)
                continue
            head = layouts.head(data, at, size) if kind == records.SAMPLE else None
            if head is None:
                continue
            ip, pid, tid, moment = head
            time = (moment or 0) if self._has_time else number
            if comm is not None and (name := self.threads.at(tid, time)) != comm:
                self.unselected[name] += 1
                continue
            self.samples += 1
            if chains:
                chain = layouts.chain(data, at, size)
                hits.add_chain(pid, time, ip, misc & CPUMODE, chain)
            else:
                hits.add(pid, time, ip, misc & CPUMODE)
        return hits.result()

    def _kernel(self, build_id: bytes) -> Match:
        """Return the kernel that the profile names, or else the only one seen on its host."""
        named = self.named.get(KALLSYMS)
        if not build_id and named is not None:
            build_id = named.build_id
        if build_id:
            return Match(BuildId(build_id))
        answer = self.matcher.answer(File(KALLSYMS, (0, 0), 0, 0, b"", KERNEL), 0)
        return answer if answer.build_id is not None else Match(None, why=NO_KERNEL)

    def everything(self) -> Counter[SampleSite]:
        """Return all mappings of all processes as hits without samples."""
        hits: Counter[SampleSite] = Counter()
        for pid, image, file, time in self.spaces.everything():
            hits[SampleSite(file, time, pid, image)] = 0
        return hits

    def describe(self, hit: SampleSite) -> tuple[bytes, Match]:
        """Return the path or name to show for a hit, and the answer for the file that was hit."""
        if hit.file == UNMAPPED:
            return b"[unknown]", Match(None, why=NO_MAPPING)
        if hit.file == IN_GUEST:
            return b"[guest]", Match(None, why=GUEST)
        if hit.file == IN_OTHER:
            return b"[unknown]", Match(None, why=OTHER_CONTEXT)
        if hit.file == IN_KERNEL:
            return KALLSYMS, self._kernel(b"")
        file = self.spaces.files[hit.file]
        if file.path.startswith(KALLSYMS):
            return KALLSYMS, self._kernel(file.build_id)
        answer = self.answer(hit)
        if answer.build_id is None and is_anonymous(file):
            return file.path, Match(None, why=self._why_anonymous(hit.pid, hit.image))
        if answer.why in (NO_BUILD_ID, OTHER_HOST) and file.path.startswith(_MEMFD_NAME):
            return file.path, Match(None, why=MEMFD)
        return file.path, answer


def is_anonymous(file: File) -> bool:
    """Return True for a mapping without a file, or of a file without a path for a capture."""
    return file.path.startswith(_ANONYMOUS_NAMES)


def coverage(
    store: Store,
    path: bytes,
    *,
    selection: Selection | None = None,
    progress: Progress | None = None,
) -> Coverage:
    """Return the share of samples whose binary the store has, by container.

    With a ``selection``, only its samples count, those at an address if it is in their call chain.
    Raises `UsageError` if the file is no profile, and `ArtifactMissing` if it has no thread of the
    selected name.
    """
    selection = selection or Selection()
    holdings = CoverageLookup(store)
    rows: Counter[tuple[str, bytes, BuildId | None, str]] = Counter()
    with Profile(path) as profile:
        reading = Reading(profile, store, progress, selection=selection)
        for hit, count in reading.hits().items():
            name, answer = reading.describe(hit)
            if selection.has_address and not selection.is_at(name):
                continue
            rows[answer.container or "", name, answer.build_id, answer.why] += count
        if selection.comm is not None and not reading.samples:
            names = most_frequent(reading.unselected)
            raise ArtifactMissing(
                f"no sample of {_shown(path)} is of a thread named {selection.comm}"
                + (f"; samples are of {names}" if names else "")
            )
        found = Coverage(
            [holdings.row(*key[:3], count, key[3]) for key, count in rows.items()],
            "samples",
            recorded=frozenset(build_ids_of(profile)),
        )
        found.notes = reading.notes()
        found.notes += reading.remedies(
            {
                row.why
                for row in found.rows
                if row.why != NO_BUILD_ID
                or row.path.startswith(b"/")  # perf records none of [vdso]
            }
        )
        if profile.truncated:
            found.incomplete = f"{_shown(path)} is not whole: {profile.truncated}"
    return found


def build_ids_of(profile: Profile) -> dict[BuildId, bytes]:
    """Return the build IDs in a profile, each with a path or name from the profile."""
    found: dict[BuildId, bytes] = {}

    def add(build_id: bytes, name: bytes) -> None:
        if len(build_id) >= BuildId.MIN_BYTES:
            found.setdefault(BuildId(build_id), name)

    events = Events(profile.layouts, profile.header.order)
    for named in profile.build_ids():
        add(named.build_id, named.name)
    for raw in profile.records(_NAMING):
        if raw.kind == records.MMAP2:
            event = events.mapped(raw)
            if isinstance(event, Mapped):
                add(event.build_id, event.path)
        elif (each := profile.named(raw)) is not None:
            add(each.build_id, each.name)
    return found


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


class NamedFile(msgspec.Struct, frozen=True):
    """A build ID under a path or name."""

    build_id: BuildId
    path: bytes


class NamelessFile(msgspec.Struct, frozen=True, rename={"share": "_share", "called": "_called"}):
    """A file without a build ID that samples fell into, or were called from.

    ``container`` is its label, empty for the host or if it is not known. ``samples`` is the number
    of samples, ``share`` their part of all samples in per cent; both are None in a core file.
    ``why`` is the reason why the file has no build ID; ``called`` is the name of the
    container, or its label; ``namesakes`` are files of that name that the store knows,
    see `match.namesakes`.
    """

    container: str
    path: bytes
    samples: int | None
    why: str
    share: float | None = None
    called: str = ""
    namesakes: tuple[NamedFile, ...] = ()


class SampleSite(NamedTuple):
    """A place of samples: the number of the file (negative: no file), the time it was mapped, and
    the process and image (`Spaces.image`).
    """

    file: int
    time: int
    pid: int
    image: int


class _Counted(NamedTuple):
    """A sample, and the places at which it was counted, by the id() of their counts."""

    pid: int
    time: int
    places: set[int]


class Hits:
    """Counts samples by their `SampleSite` in ``spaces``. ``mode`` is the CPUMODE of the
    sample's record. With ``only``, no other addresses count.

    A call chain may end with the number of its user part, which is in a record of its own, before
    or after the samples that refer to it.
    """

    def __init__(self, spaces: Spaces, only: Selection | None = None) -> None:
        self._spaces = spaces
        self._only = only if only is not None and only.has_address else None
        self._deferred: dict[int, tuple[int, ...]] = {}
        self._waiting: dict[int, list[_Counted]] = {}
        self._waiters = 0
        self._counts: dict[SampleSite, list[int]] = {}
        # Begin and end of the validity of an entry, and the count in a list of one.
        self._pages: dict[tuple[int, int], tuple[int, int, list[int]]] = {}

    def add(self, pid: int, time: int, address: int, mode: int) -> None:
        """Count a sample."""
        self._count_of(pid, time, address, mode)[0] += 1

    def add_chain(self, pid: int, time: int, address: int, mode: int, chain: Iterable[int]) -> None:
        """Count a sample, and each place in its call chain once."""
        counted = _Counted(pid, time, set())
        self._count_at(counted, address, mode)
        number = self._follow(counted, chain, mode)
        if number is None:
            return
        if (user_part := self._deferred.get(number)) is not None:
            self._follow(counted, user_part, USER)
        else:
            self._waiting.setdefault(number, []).append(counted)
            self._waiters += 1
            while self._waiters > _MOST_DEFERRED:
                self._waiters -= len(self._waiting.pop(next(iter(self._waiting))))

    def add_deferred(self, number: int, chain: tuple[int, ...]) -> None:
        """Count the user part of the call chains that ended with a number."""
        for counted in self._waiting.pop(number, ()):
            self._waiters -= 1
            self._follow(counted, chain, USER)
        self._deferred[number] = chain
        if len(self._deferred) > _MOST_DEFERRED:
            del self._deferred[next(iter(self._deferred))]

    def _follow(self, counted: _Counted, chain: Iterable[int], mode: int) -> int | None:
        """Count the places of a chain; return the number of its user part if that is deferred."""
        addresses = iter(chain)
        for each in addresses:
            if each == CONTEXT_USER_DEFERRED:
                return next(addresses, None)
            if each >= MAX_CONTEXT:
                mode = _MODES.get(each, _OTHER_MODE)
            else:
                self._count_at(counted, each, mode)
        return None

    def _count_at(self, counted: _Counted, address: int, mode: int) -> None:
        """Count a sample at an address, unless it has counted at that place before."""
        if self._only is not None and not self._is_selected(counted, address, mode):
            return
        count = self._count_of(counted.pid, counted.time, address, mode)
        if id(count) not in counted.places:
            counted.places.add(id(count))
            count[0] += 1

    def _is_selected(self, counted: _Counted, address: int, mode: int) -> bool:
        """Return True if an address, or its offset in the file, is selected."""
        only = self._only
        if only is None or address == only.address:
            return True
        if not only.may_be(address) or mode != USER:
            return False
        found = self._spaces.find(counted.pid, counted.time, address)
        return found is not None and found.offset == only.offset

    def result(self) -> Counter[SampleSite]:
        """Return the number of samples of each place."""
        return Counter({hit: count for hit, (count,) in self._counts.items()})

    def _count_of(self, pid: int, time: int, address: int, mode: int) -> list[int]:
        if mode == KERNEL:
            pid = KERNEL_PID
        elif mode != USER:
            return self._new(SampleSite(IN_GUEST if mode in _GUEST_MODES else IN_OTHER, 0, 0, 0))
        known = self._pages.get((pid, address >> _PAGE_BITS))
        if known is not None and known[0] <= time < known[1]:
            return known[2]
        return self._look_up(pid, time, address)

    def _look_up(self, pid: int, time: int, address: int) -> list[int]:
        found, span = self._spaces.span(pid, time, address)
        if found is not None and pid != KERNEL_PID:
            hit = SampleSite(found.file, found.time, pid, span.image)
        elif found is not None:
            hit = SampleSite(found.file, 0, KERNEL_PID, 0)
        elif pid != KERNEL_PID:
            hit = SampleSite(UNMAPPED, 0, pid, 0)
        else:
            hit = SampleSite(IN_KERNEL, 0, KERNEL_PID, 0)
        count = self._new(hit)
        if span.whole:
            if len(self._pages) >= _MOST_PAGES:
                self._pages.clear()
            self._pages[pid, address >> _PAGE_BITS] = (span.begin, span.end, count)
        return count

    def _new(self, hit: SampleSite) -> list[int]:
        count = self._counts.get(hit)
        if count is None:
            count = self._counts[hit] = [0]
        return count
