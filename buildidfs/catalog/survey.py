# SPDX-License-Identifier: Apache-2.0
"""Count the build IDs of a store that can be named: of all, of the host, of containers and images.

A survey reads a few rows for each build ID and each file of the containers seen last, which takes
seconds for 100,000 build IDs. So a process that shows surveys keeps the last one (`Surveyor`), and
counts again when a new one is due. The shares of a container come from `containers.contents`, the
reasons from `coverage.CoverageLookup`, so the page, the history and the commands agree.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import names
from buildidfs.answers import Going, IdShares, Lacking
from buildidfs.capture.origin.builder import reported
from buildidfs.catalog import containers, remedies
from buildidfs.catalog.coverage import CoverageLookup
from buildidfs.errors import BuildIdFsError
from buildidfs.linux.threads import Background
from buildidfs.located import text
from buildidfs.model import BuildId, Digest, Kind, Quality, Trust
from buildidfs.store.permissions import PUBLIC, is_public, may_see
from buildidfs.store.retention.eviction import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.catalog.coverage import BinaryCoverage
    from buildidfs.store import CapturedContainer, ContainerEntry, Store

log = logging.getLogger(__name__)

MOST_CONTAINERS: Final = 64
"""The number of containers that are counted: those seen last. Namespaces without a container take
only the places that containers leave."""

MOST_LACKING: Final = 200
MOST_GOING: Final = 8
_MOST_LOOKED_AT: Final = 200
_DAY_S: Final = 86_400
_MOST_FILES: Final = 200_000
STEP: Final = 256
"""The number of build IDs or files between two calls of ``go_on``."""

EVERY_S: Final = 60.0
_EFFORT: Final = 50.0
_WORK_S: Final = 0.005

_SEVERITY: Final = {remedies.NO_DEBUGINFO: 0, remedies.WITHHELD: 1}


class Counted(msgspec.Struct):
    """The number of build IDs, and of those with an executable, a table of symbols, and DWARF."""

    build_ids: int = 0
    executable: int = 0
    symbols: int = 0
    debuginfo: int = 0

    def add(self, executable: bool, symbols: Quality, debuginfo: bool) -> None:
        """Count one build ID."""
        self.build_ids += 1
        self.executable += executable
        self.symbols += symbols >= Quality.SYMTAB
        self.debuginfo += debuginfo

    @property
    def shares(self) -> IdShares:
        """Return the counts as shares."""
        return IdShares.of(self.build_ids, self.executable, self.symbols, self.debuginfo)


class Survey(msgspec.Struct):
    """The counts of one moment, which is Unix time in seconds; ``took_s`` is the duration of the
    count.

    ``containers`` are the public containers, the one seen last first. ``left_out`` and
    ``namespaces_left_out`` are the numbers of public containers, and of public namespaces without a
    container, that were not counted; ``images`` has the sums for containers with the same image.
    ``reasons`` counts build IDs by the reason for missing files, and ``lacking`` has the most
    important of them. ``going`` are the blobs that were unused for longest and may be removed.
    """

    time: float
    took_s: float = 0.0
    all: Counted = msgspec.field(default_factory=Counted)
    host: Counted = msgspec.field(default_factory=Counted)
    containers: list[containers.ContainerFiles] = msgspec.field(default_factory=list)
    left_out: int = 0
    namespaces_left_out: int = 0
    images: dict[str, Counted] = msgspec.field(default_factory=dict)
    reasons: Counter[str] = msgspec.field(default_factory=Counter)
    lacking: list[Lacking] = msgspec.field(default_factory=list)
    going: list[Going] = msgspec.field(default_factory=list)


def _nothing() -> None:
    """Do nothing: the default of ``go_on``."""


def take(store: Store, go_on: Callable[[], None] = _nothing) -> Survey:
    """Count now. ``go_on`` is called often; it may wait, or raise to end the count."""
    began = time.monotonic()
    survey = Survey(time.time())
    holdings = CoverageLookup(store)
    spread: Counter[int] = Counter()
    _count_containers(store, survey, holdings, spread, go_on)
    _count_all(store, survey, holdings, spread, go_on)
    survey.going += _going(store, go_on)
    survey.took_s = time.monotonic() - began
    return survey


def why_lacking(executable: bool, symbols: Quality, debuginfo: bool, why: str) -> str:
    """Return ``why``, the reason of `CoverageLookup.of`, or the reason that only DWARF is missing;
    empty if nothing is missing.
    """
    if why or debuginfo or not executable or symbols is not Quality.SYMTAB:
        return why
    return remedies.NO_DEBUGINFO


def severity(why: str) -> int:
    """Return the rank of a reason: the more is missing, the higher; -1 if nothing is missing."""
    return _SEVERITY.get(why, 2) if why else -1


def _count_containers(
    store: Store,
    survey: Survey,
    holdings: CoverageLookup,
    spread: Counter[int],
    go_on: Callable[[], None],
) -> None:
    """Count the public containers seen last; ``spread`` gets the number of containers
    by ordinal.
    """
    removals = containers.Removals(store)
    every = [
        each
        for each in store.containers.every()
        if each.public and not (each.is_empty and removals.last(each) is None)
    ]
    last = heapq.nlargest(
        MOST_CONTAINERS,
        every,
        key=lambda each: (not containers.is_bare(each), each.last_seen_ns),
    )
    last.sort(key=lambda each: each.last_seen_ns, reverse=True)
    files = 0
    images: dict[str, dict[int, BinaryCoverage]] = {}
    for container in last:
        if files > _MOST_FILES:
            break
        seen: dict[int, BinaryCoverage] = {}

        def each(
            entry: ContainerEntry,
            path: bytes,
            row: BinaryCoverage,
            seen: dict[int, BinaryCoverage] = seen,
        ) -> None:
            nonlocal files
            seen[entry.ordinal] = row
            files += 1
            if not files % STEP:
                go_on()

        survey.containers.append(containers.contents(store, container, holdings, removals, each))
        spread.update(seen.keys())
        image = image_of(container)
        if image and seen:
            images.setdefault(image, {}).update(seen)
    bare = sum(map(containers.is_bare, every))
    bare_counted = sum(containers.is_bare(each.container) for each in survey.containers)
    survey.namespaces_left_out = bare - bare_counted
    survey.left_out = len(every) - len(survey.containers) - survey.namespaces_left_out
    for image, rows in images.items():
        counted = survey.images[image] = Counted()
        for row in rows.values():
            counted.add(row.executable, row.symbols, row.debuginfo)


def image_of(container: CapturedContainer) -> str:
    """Return the name of the image of a container; empty if unknown. The engine of another user
    than root may give any name to an image.
    """
    image = container.called.image.partition("\n")[0]
    return image and image + containers.suffix(container)


def _count_all(
    store: Store,
    survey: Survey,
    holdings: CoverageLookup,
    spread: Counter[int],
    go_on: Callable[[], None],
) -> None:
    """Count every build ID, and keep those with the most missing."""
    index = store.index
    worst: list[tuple[int, int, int, BuildId, str]] = []
    for number, (ordinal, build_id) in enumerate(index.build_ids_from()):
        if not number % STEP:
            go_on()
        if names.kept_for(build_id) != build_id:
            continue  # split DWARF or sources of another build ID
        executable, symbols, debuginfo, reason = holdings.of(ordinal)
        survey.all.add(executable, symbols, debuginfo)
        artifact = index.artifact(ordinal, Kind.EXECUTABLE)
        if artifact is not None and artifact.trust is Trust.HOST:
            survey.host.add(executable, symbols, debuginfo)
        why = why_lacking(executable, symbols, debuginfo, reason)
        if why == remedies.NO_DEBUGINFO:
            why = holdings.removed(build_id, Kind.DEBUGINFO) or why
        if not why:
            continue
        survey.reasons[remedies.without_time(why)] += 1
        if not is_public(artifact):
            continue
        entry = (severity(why), spread[ordinal], ordinal, build_id, why)
        if len(worst) < MOST_LACKING:
            heapq.heappush(worst, entry)
        elif entry > worst[0]:
            heapq.heapreplace(worst, entry)
    for build_id, removed in holdings.removals().items():
        if index.ordinal(build_id) is None:
            survey.reasons[remedies.without_time(remedies.removed(removed))] += 1
    called = containers.Names(store)
    for _, count, ordinal, build_id, why in sorted(worst, reverse=True):
        places = (each for each in index.origins(ordinal) if may_see(PUBLIC, each.origin))
        last = next(places, None)
        if last is not None:
            origin = last.origin
            survey.lacking.append(
                Lacking(
                    build_id.hex(),
                    text(origin.path),
                    text(called.short(reported(origin))),
                    count,
                    last.last_seen_ns / 1e9,
                    remedies.of_reason(why).code,
                )
            )


def _going(store: Store, go_on: Callable[[], None]) -> Iterator[Going]:
    """Yield the public blobs that were unused for longest and are not pinned."""
    found = 0
    everything = Policy(max_age=-_DAY_S)  # also blobs in use just now
    for choice in islice(store.plan(everything, lambda digest: None), _MOST_LOOKED_AT):
        go_on()
        candidate = choice.candidate
        for build_id in candidate.build_ids:
            place = _public_place(store, build_id, candidate.digest)
            if place is not None:
                kept_for = names.kept_for(build_id).hex()
                yield Going(kept_for, text(place), candidate.size, float(candidate.used))
                found += 1
                break
        if found >= MOST_GOING:
            return


def _public_place(store: Store, build_id: BuildId, digest: Digest) -> bytes | None:
    """Return the last path at which every user could read a blob; None if the blob is private."""
    ordinal = store.index.ordinal(build_id) or 0
    for kind, variant in store.index.variants_with(digest, ordinal):
        artifact = store.index.artifact_variant(ordinal, kind, variant)
        if not is_public(artifact):
            return None
    for record in store.index.origins(ordinal):
        if record.digest == digest and may_see(PUBLIC, record.origin):
            return record.origin.path
    return None


class _Ended(Exception):
    """The block of a `Surveyor` is over."""


class Surveyor(Background):
    """Keeps a recent survey within a ``with`` block.

    A thread counts, with at most half of the time of one processor. Between two counts it pauses
    for a minute, or for 50 times the duration of the last count if that is longer.
    """

    def __init__(self, store: Store, every_s: float = EVERY_S, *, first_s: float = 0.0) -> None:
        """``first_s`` is the time in seconds before the first count."""
        super().__init__("buildidfs-survey")
        self._store = store
        self._every_s = every_s
        self._first_s = first_s
        self.latest: Survey | None = None
        """The last survey; None before the first."""

    def _run(self) -> None:
        pause = self._first_s
        while not self._ending.wait(pause):
            pause = self._every_s
            try:
                self.latest = take(self._store, self._pace())
            except _Ended:
                return
            except (BuildIdFsError, OSError) as error:
                log.info("the build IDs of the store cannot be counted: %s", error)
            else:
                pause = max(self._every_s, self.latest.took_s * _EFFORT)

    def _pace(self) -> Callable[[], None]:
        """Return a function that sleeps as long as the caller has worked.

        It raises `_Ended` at the end of the block.
        """
        worked = time.monotonic()

        def go_on() -> None:
            nonlocal worked
            took = time.monotonic() - worked
            if took >= _WORK_S:
                if self._ending.wait(min(took, 0.1)):
                    raise _Ended
                worked = time.monotonic()

        return go_on
