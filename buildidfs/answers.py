# SPDX-License-Identifier: Apache-2.0
"""The answers of the page as values. Their JSON is the API; their schema is its description.

Times are seconds of Unix time, sizes bytes, shares 0 to 1. In texts from strangers, bytes that are
not UTF-8 are replaced; each form escapes these texts in its own way.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from buildidfs import errors
from buildidfs.formats.package_databases import Package
from buildidfs.located import InContainer, Located, base64_of, raw, utf8
from buildidfs.reports import Limits, WatchFacts, watch_facts

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from buildidfs.store.values import Evicted as EvictedBlob
    from buildidfs.store.values import Evictions, Tally

NOT_RUNNING: Final = "not running"
"""The mode if no watch runs."""


class Verdict(enum.Enum):
    """The health of the processes of a store, the best first."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """The processes work, but with restrictions: some of the starting programs may be missed."""
    LOSING = "losing"
    """Files were lost in the last ten minutes, or no events are followed just now."""
    DOWN = "down"
    """No process runs, or a process that should run does not run or does not answer."""

    @property
    def rank(self) -> int:
        """Return 0 for the best verdict, and a larger number for each worse one."""
        return list(Verdict).index(self)


class EvictedFile(Located, frozen=True):
    """A blob that was removed to make room at a ``time`` (Unix time in seconds).

    ``copy_at`` is a place that had the same bytes at that time; it is empty if the bytes are lost.
    ``damaged`` is True if they are lost because the blob was damaged.
    """

    build_id: str
    stored_bytes: int
    time: int
    copy_at: str
    damaged: bool = False


class Removed(msgspec.Struct, frozen=True):
    """Counts of the blobs that were removed to make room, and the ``named`` ones of them."""

    recapturable: int
    recapturable_bytes: int
    lost: int
    lost_bytes: int
    named: list[EvictedFile]

    @classmethod
    def of(cls, counts: Tally | Evictions, named: Iterable[EvictedBlob]) -> Self:
        """Return the counts of a store or a process."""
        return cls(
            counts.recapturable,
            counts.recapturable_bytes,
            counts.losses,
            counts.lost_bytes,
            [
                EvictedFile(
                    path=utf8(each.path),
                    path_b64=base64_of(each.path),
                    build_id=each.build_id.hex(),
                    stored_bytes=each.size,
                    time=each.when,
                    copy_at=each.copy_at,
                    damaged=each.damaged,
                )
                for each in named
            ],
        )


class Process(msgspec.Struct, frozen=True):
    """A long-running process of a store, or one that should run. Times are Unix time.

    ``state`` is ``starting``, ``running``, ``waiting`` or ``ended`` according to its supervisor,
    ``stopped`` if a signal has stopped the process, ``not answering`` if it does not do its work.
    A process has ``restarts``, ``reason`` (of its last failure), ``status`` and ``due`` if it has a
    supervisor, and ``version`` and ``facts`` if it runs.
    """

    role: str
    state: str
    pid: int | None
    since: float
    version: str | UnsetType = UNSET
    restarts: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    status: str | UnsetType = UNSET
    due: float | UnsetType | None = UNSET
    mountpoint: str | UnsetType = UNSET
    mountpoint_b64: str | UnsetType = UNSET
    facts: dict[str, Any] | UnsetType = UNSET

    @property
    def has_supervisor(self) -> bool:
        """Return True if `buildidfs up` runs it."""
        return self.restarts is not UNSET

    @property
    def own_facts(self) -> dict[str, Any]:
        """Return the report of the process; empty if there is none."""
        return {} if self.facts is UNSET else self.facts

    @property
    def watched(self) -> WatchFacts | None:
        """Return the report of a watch; None if there is none, or none that this version knows."""
        return watch_facts(self.own_facts) if self.role == "watch" else None

    @property
    def raw_mountpoint(self) -> bytes:
        """Return the path of a mount; empty for other processes."""
        return b"" if self.mountpoint is UNSET else raw(self.mountpoint, self.mountpoint_b64)


_EXIT_CODES: Final = {
    Verdict.HEALTHY: 0,
    Verdict.DEGRADED: errors.DEGRADED,
    Verdict.LOSING: errors.LOSING,
    Verdict.DOWN: errors.IncompleteError.exit_code,
}


class Fault(msgspec.Struct, frozen=True):
    """A fault of the processes of a store and its remedy; both are clauses for a person."""

    verdict: Verdict
    reason: str
    remedy: str


class ChangedSettings(msgspec.Struct, frozen=True):
    """A section of the settings that has changed since a process of this ``role`` has read it; the
    change takes effect ``after`` a command.
    """

    section: str
    role: str
    after: str


class Status(Limits, frozen=True, kw_only=True):
    """A store and its processes, each supervisor before those that it runs.

    ``evicted`` and ``omitted`` count the blobs and files that found no room since the store was
    made. The limits are those in effect; ``configured`` are those of the settings, None if they are
    the same. ``findings`` has the faults, the worst first.
    """

    store: str
    build_ids: int
    blob_bytes: int
    stored_bytes: int
    jit_bytes: int
    index_bytes: int
    free_bytes: int
    pins: int
    evicted: Removed
    omitted: int
    configured: Limits | None
    verdict: Verdict
    well: bool
    findings: list[Fault]
    processes: list[Process]
    changed: tuple[ChangedSettings, ...] = ()

    @property
    def disk_bytes(self) -> int:
        """Return the bytes that blobs, index and names of generated code take on disk."""
        return self.stored_bytes + self.index_bytes + self.jit_bytes

    @property
    def exit_code(self) -> int:
        """Return the exit status for the verdict."""
        return _EXIT_CODES[self.verdict]

    @property
    def watch(self) -> Process | None:
        """Return the watch, if one runs or should run."""
        return next((each for each in self.processes if each.role == "watch"), None)


class Stats(Limits, frozen=True, kw_only=True):
    """The size of a store, the limits in effect, and the coverage of this host.

    ``host_*`` are counts of `running.IdsInUse`; ``coverage`` is the share of the build IDs in use
    that the store has.
    """

    store: str
    build_ids: int
    artifacts: dict[str, int]
    adopted: int
    ambiguous: int
    blobs: int
    blob_bytes: int
    stored_bytes: int
    index_bytes: int
    origins: int
    free_bytes: int
    pins: int
    jit_maps: int
    jit_bytes: int
    host_processes: int
    host_unseen: int
    host_silent: str
    host_build_ids: int
    host_build_ids_held: int
    coverage: float


class IdShares(msgspec.Struct):
    """The number of build IDs, and the shares of them with an executable, symbols, and
    debuginfo.
    """

    build_ids: int = 0
    executable: float = 1.0
    symbols: float = 1.0
    debuginfo: float = 1.0

    @classmethod
    def of(cls, whole: int, executable: int, symbols: int, debuginfo: int) -> Self:
        """Return the shares for counts of ``whole`` build IDs."""
        parts = (round(part / (whole or 1), 6) for part in (executable, symbols, debuginfo))
        return cls(whole, *parts) if whole else cls()


class Trend(msgspec.Struct):
    """The share of build IDs with symbols at one time."""

    time: float
    symbols: float


class Container(msgspec.Struct):
    """A container, image or package that files were captured of.

    ``mount_name`` is its directory in ``containers/`` of a mount, and its name in URLs. A limit has
    removed all bytes of ``removed`` build IDs, the last at ``last_removed``; ``coverage`` includes
    them, except in its count.
    ``unnamed`` is True for a mount namespace of which no name is known.
    """

    name: str
    label: str
    mount_name: str
    image: str
    first_seen: float
    last_seen: float
    bytes: int
    removed: int
    coverage: IdShares
    trend: list[Trend] = []
    unnamed: bool = False
    last_removed: float | None = None


class Image(msgspec.Struct):
    """The containers of an image, taken together."""

    image: str
    coverage: IdShares
    trend: list[Trend] = []


class Finding(msgspec.Struct, frozen=True):
    """One reason why names are missing, and its remedy, as clauses for a person.

    ``reason`` is the stable name of the reason, ``command`` the first step of the remedy, None if
    there is none. ``package`` is the package whose debug package ``command`` installs. If apt
    does not know debug packages, ``unknown`` names them, and ``command`` does not install them.
    """

    reason: str
    why: str
    remedy: str
    command: str | None = None
    package: Package | None = None
    unknown: str | None = None


class Explained(InContainer, frozen=True, kw_only=True):
    """A file and the findings on it, the most important first.

    ``weight`` and ``share`` (0 to 1) are those of a `coverage.BinaryCoverage` among all rows; they
    are None if the query was for a build ID.
    """

    build_id: str | None
    weight: int | None
    share: float | None
    findings: list[Finding]


class CoverageRow(InContainer, frozen=True, kw_only=True):
    """One binary in one container, with the fields of `coverage.BinaryCoverage`."""

    build_id: str | None
    weight: int
    executable: bool
    symbols: str
    debuginfo: bool
    why: str


class CoverageShares(msgspec.Struct, frozen=True):
    """Shares of the weight, 0 to 1. ``recorded`` is the part of ``symbols`` that perf can name with
    the build IDs in the profile.
    """

    executable: float
    dynamic_symbols: float
    symbols: float
    debuginfo: float
    recorded: float


class CoverageAnswer(msgspec.Struct, frozen=True):
    """The coverage of a profile, a core file or the running processes; see `coverage.Coverage`."""

    unit: str
    weight: int
    coverage: CoverageShares
    notes: list[str]
    incomplete: str
    rows: list[CoverageRow]


class Reason(msgspec.Struct):
    """The number of build IDs for which files are missing for one reason."""

    count: int
    finding: Finding


class Lacking(msgspec.Struct):
    """A build ID with missing files. ``containers`` of the counted ones have it."""

    build_id: str
    path: str
    container: str
    containers: int
    last_seen: float
    reason: str


class Asked(msgspec.Struct):
    """A build ID that clients of this server requested and did not get: how often, and
    when last.
    """

    build_id: str
    wanted: list[str]
    asked: int
    first: float
    last: float
    reason: str


class Missing(msgspec.Struct):
    """The missing files: by reason, by the most important build IDs, and by the requests of
    clients.
    """

    reasons: list[Reason] = []
    build_ids: list[Lacking] = []
    asked: list[Asked] = []


class Holdings(msgspec.Struct):
    """The contents of the store, the room that it takes, and the free room."""

    build_ids: int
    executables: int
    debuginfo: int
    blobs: int
    bytes: int
    stored_bytes: int
    index_bytes: int
    free_bytes: int
    pins: int
    limit_bytes: int | None = None
    keep_free_bytes: int = 0


class Point(msgspec.Struct):
    """The store at one time. Shares are parts of the build IDs; None if they were not counted.

    ``captured`` and ``lost`` count files since the point before; ``lag`` is the longest time that a
    file had waited to be copied.
    """

    time: float
    build_ids: int
    stored_bytes: int
    free_bytes: int
    executable: float | None = None
    symbols: float | None = None
    debuginfo: float | None = None
    captured: int = 0
    lost: int = 0
    lag: float = 0.0


class Going(msgspec.Struct):
    """A blob that would be removed next if room were needed."""

    build_id: str
    path: str
    bytes: int
    last_used: float


class Loss(msgspec.Struct):
    """Files that were seen and not captured since the watch began, and in the last ten minutes."""

    reason: str
    remedy: str
    count: int
    recent: int


class Health(msgspec.Struct):
    """The verdict and the faults of ``buildidfs status`` without names of containers and files, and
    the counts of the watch.

    ``mode`` is that of the watch, or its state if it does not work, or `NOT_RUNNING`.
    """

    verdict: Verdict
    findings: list[Fault]
    mode: str
    since: float | None = None
    captured: int = 0
    lost: int = 0
    waiting: int = 0
    lag: float = 0.0
    events_lost: int = 0
    losses: list[Loss] = []
    degraded: list[str] = []
    store_error: str = ""


class Overview(msgspec.Struct):
    """The contents of the first page. ``counted`` is the time of the coverage, None if it is not
    counted yet.

    ``left_out`` containers and ``namespaces_left_out`` namespaces without a container were not
    counted.
    """

    version: str
    time: float
    counted: float | None
    store: Holdings
    coverage: IdShares
    host: IdShares
    containers: list[Container]
    images: list[Image]
    left_out: int
    namespaces_left_out: int
    missing: Missing
    history: list[Point]
    going: list[Going]
    health: Health


class Variant(msgspec.Struct):
    """One file with the build ID, with the fields of ``buildidfs show --json``."""

    kind: str
    sha256: str
    size: int
    quality: str
    made_of: str
    trust: str
    standing: str
    first_seen: float
    last_used: float
    served: bool
    why: str
    truncated: str
    gdb_scripts: bool
    adopted: bool
    aliases: dict[str, str]


class PrivateVariant(Variant, kw_only=True):
    """A variant with the owner and mode of its file."""

    mode: str
    uid: int
    gid: int


class Sighted(InContainer, frozen=True, kw_only=True):
    """A place of a file, as it was seen. ``apart`` names the namespaces that differed from those of
    the host.
    """

    cgroup: str
    cgroup_id: int
    mnt_ns_id: int
    namespaces: dict[str, int]
    apart: list[str]
    host: str
    scanner: str
    first_seen: float
    last_seen: float


class OriginPlace(Sighted, frozen=True, kw_only=True):
    """A place of bytes that the store has."""

    kinds: list[str]
    sha256: str
    device: int
    inode: int


class SplitFiles(msgspec.Struct, frozen=True):
    """Debug information in separate ``files``; ``package`` is the ID of the kept .dwp file."""

    units: int
    files: list[str]
    package: str | None


class PinOf(msgspec.Struct, frozen=True):
    """A pin: its name, which may be empty, and when it was made (Unix time)."""

    name: str
    pinned: float
    name_b64: str | UnsetType = UNSET

    @property
    def raw_name(self) -> bytes:
        """Return the name as bytes."""
        return raw(self.name, self.name_b64)


class Facts(msgspec.Struct):
    """All facts about a build ID. ``removed`` is the time at which a limit removed bytes of it.

    ``journal`` has its places if the store has none of its bytes.
    """

    build_id: str
    variants: list[PrivateVariant]
    origins: list[OriginPlace]
    journal: list[Sighted]
    missing: list[str]
    removed: int | None
    split_dwarf: SplitFiles | None
    pins: list[PinOf]


class Place(msgspec.Struct):
    """A place where every user could read the file."""

    path: str
    container: str
    container_name: str
    image: str
    host: str
    kinds: list[str]
    first_seen: float
    last_seen: float


class Section(msgspec.Struct):
    """A section of the file, with its size there."""

    name: str
    size: int


class Function(msgspec.Struct):
    """A function in the symbol table."""

    name: str
    address: int
    size: int


class Line(msgspec.Struct):
    """A command line to copy, and its purpose."""

    purpose: str
    text: str


class Download(msgspec.Struct):
    """A file that the server has under a URL."""

    what: str
    url: str
    bytes: int


class BuildIdPage(msgspec.Struct):
    """The public facts about a build ID.

    ``sections`` are those of the served executable, else of the debuginfo, ``functions`` the
    largest of the debuginfo, else of the executable; ``functions_total`` counts all of them.
    """

    build_id: str
    name: str
    first_seen: float | None
    last_seen: float | None
    coverage: str
    findings: list[Finding]
    missing: list[str]
    conflicts: list[str]
    variants: list[Variant]
    places: list[Place]
    places_total: int
    sections: list[Section]
    functions: list[Function]
    functions_total: int
    downloads: list[Download]
    lines: list[Line]


class NotServed(msgspec.Struct):
    """The answer for a build ID without public facts."""

    build_id: str
    findings: list[Finding]


class Hit(msgspec.Struct):
    """A result of a search: a build ID at a path, or a container."""

    kind: str
    build_id: str
    path: str
    container: str
    last_seen: float
    why: str = ""


class Found(msgspec.Struct):
    """The results of a search. ``complete`` is False if the search was ended early."""

    query: str
    hits: list[Hit]
    complete: bool
    searched: list[str]


class Contents(msgspec.Struct):
    """A container and its public files; the files with the most missing come first."""

    container: Container
    files: list[Lacking]
    files_total: int


class Difference(msgspec.Struct):
    """A difference between two variants; ``name`` is that of a field, a section or a function."""

    what: str
    name: str
    left: str
    right: str


class Compared(msgspec.Struct):
    """Two variants of a build ID, and their differences."""

    build_id: str
    left: Variant
    right: Variant
    same_sections: int
    differences: list[Difference]
    differences_total: int


class DroppedFile(msgspec.Struct):
    """A file that an upload names; ``weight`` has the unit of `Dropped`."""

    path: str
    build_id: str
    weight: int
    quality: str
    why: str
    remedy: str


class Dropped(msgspec.Struct):
    """The share of an upload that public files can name, and the files that the upload names.

    Files without symbols come first, then those with the largest ``weight``.
    ``weight`` counts samples, mappings or files, as ``unit`` says. ``incomplete`` is the reason if
    part of the upload could not be read.
    """

    unit: str
    weight: int
    executable: float
    symbols: float
    debuginfo: float
    incomplete: str
    files: list[DroppedFile]
    files_total: int


class Problem(msgspec.Struct):
    """The answer to a request that failed."""

    error: str
