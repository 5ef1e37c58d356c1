# SPDX-License-Identifier: Apache-2.0
"""List the artifacts of a store, choose some, and report the missing files of a build ID."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs import answers, located, names, wording
from buildidfs.catalog import containers, remedies
from buildidfs.catalog.containers import reported_at
from buildidfs.errors import ArtifactMissing, IntegrityError
from buildidfs.model import Absence, AliasType, Artifact, BuildId, Digest, Kind, Quality, Trust
from buildidfs.names import is_hex, printable
from buildidfs.store import placement
from buildidfs.store.index.locations import is_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.formats.elf.identify import ElfFile
    from buildidfs.model import Alias
    from buildidfs.store import CapturedContainer, OriginRecord, Store
    from buildidfs.store.location_rows import ContainerEntry, Removal

_FILES_SHOWN: Final = 10


class Chosen(msgspec.Struct, frozen=True):
    """A blob to be removed: one of its artifacts, and the path where it was last seen.

    ``pinned`` is True if a pin keeps the build ID.
    """

    build_id: BuildId
    kind: Kind
    sha256: Digest
    size: int
    pinned: bool
    path: bytes


def choose(store: Store, wanted: Iterable[str]) -> list[Chosen]:
    """Return the blobs selected by build IDs, by the beginnings of build IDs, or by patterns of
    paths.

    A build ID selects all its blobs. A pattern, in which ``*`` matches any text, selects the blobs
    that were seen at a path which it matches as a whole; "./" and "../" begin a path relative to
    the working directory. Each blob is returned once. Raises `ArtifactMissing` for a text that
    selects nothing, `AmbiguousBuildId`.
    """
    chosen: dict[Digest, Chosen] = {}
    for text in wanted:
        found = _by_id(store, text) if is_hex(text) else _by_path(store, text)
        for each in found:
            chosen.setdefault(each.sha256, each)
    return list(chosen.values())


def _by_id(store: Store, text: str) -> Iterator[Chosen]:
    from buildidfs.catalog import requested_id

    build_id = requested_id.build_id(store, text)
    yield from _blobs(store, store.index.ordinal(build_id) or 0, build_id)
    package = names.package_id(build_id)
    if package is not None and (ordinal := store.index.ordinal(package)) is not None:
        yield from _blobs(store, ordinal, package)


def _by_path(store: Store, glob: str) -> Iterator[Chosen]:
    if glob.startswith(("./", "../")):
        here = re.sub(r"([*?[])", r"[\1]", os.getcwd())
        glob = os.path.normpath(os.path.join(here, glob))
    pattern = wording.glob(glob)
    found = False
    for ordinal, build_id in store.index.build_ids_from():
        for each in _blobs(store, ordinal, build_id, pattern):
            found = True
            yield each
    if not found:
        raise ArtifactMissing(
            f"nothing was seen at {glob!r}; a pattern has to match the whole path"
        )


def _blobs(
    store: Store, ordinal: int, build_id: BuildId, pattern: re.Pattern[bytes] | None = None
) -> Iterator[Chosen]:
    """Yield the blobs of a build ID, or only those seen at a path that the pattern matches."""
    is_pinned = bool(store.pins.of(names.kept_for(build_id)))
    paths: dict[Digest, bytes] = {}
    for record in store.index.origins(ordinal):
        if pattern is None or pattern.match(record.origin.path):
            paths.setdefault(record.digest, record.origin.path)
    for kind in Kind:
        for artifact in store.index.variants(ordinal, kind):
            if pattern is None or artifact.digest in paths:
                digest = artifact.digest
                path = paths.get(digest, b"")
                yield Chosen(build_id, kind, digest, artifact.size, is_pinned, path)


def split_dwarf(store: Store, build_id: BuildId) -> answers.SplitFiles | None:
    """Return the split DWARF of a build ID; None if it has none, or its blob is damaged."""
    from buildidfs.formats.elf import units

    ordinal = store.index.ordinal(build_id) or 0
    for kind in (Kind.DEBUGINFO, Kind.EXECUTABLE):
        artifact = store.index.artifact(ordinal, kind)
        if artifact is None:
            continue
        try:
            with store.blobs.open(artifact.digest) as blob:
                found = list(units.skeletons(blob.read_at, blob.size))
        except IntegrityError:  # `missing` says that
            return None
        if found:
            paths = (os.path.join(each.directory, each.name) for each in found[:_FILES_SHOWN])
            package = names.package_id(build_id)
            if package is not None and store.index.ordinal(package) is None:
                package = None
            return answers.SplitFiles(
                len(found), list(map(printable, paths)), None if package is None else package.hex()
            )
    return None


class ArtifactQuery(NamedTuple):
    """A query for artifacts: a pattern of paths, a container, a kind, and the earliest time at
    which they were last seen (Unix time in nanoseconds, 0 for no limit).
    """

    glob: str | None = None
    container: str | None = None
    kind: str | None = None
    since_ns: int = 0

    def __str__(self) -> str:
        given = [("--path", self.glob), ("--container", self.container), ("--kind", self.kind)]
        if self.since_ns:
            given.append(("--since", wording.moment(self.since_ns / 1e9)))
        return " ".join(f"{option} {value}" for option, value in given if value is not None)


def origin_filter(store: Store, asked: ArtifactQuery) -> Callable[[OriginRecord], bool] | None:
    """Return the test that an origin has to pass, or None if every origin does."""
    if asked.glob is None and asked.container is None and not asked.since_ns:
        return None
    pattern = wording.glob(asked.glob or "*")
    is_meant = None if asked.container is None else containers.meant(store, asked.container)

    def wanted(record: OriginRecord) -> bool:
        if record.last_seen_ns < asked.since_ns:
            return False
        if is_meant is not None and not is_meant(reported_at(record.origin)):
            return False
        return pattern.match(record.origin.path) is not None

    return wanted


class ListedArtifact(located.InContainer, frozen=True, kw_only=True):
    """An artifact, and the place where it was last seen; a row of ``list``."""

    build_id: BuildId
    kind: Kind
    sha256: Digest
    size: int
    adopted: bool
    last_seen: float


def artifacts(store: Store, asked: ArtifactQuery) -> Iterator[ListedArtifact]:
    """Yield each artifact with its newest place that fits, those of a build ID together.

    The files of a container are those of its tree, as in `containers.contents`: a build ID has
    places in a limited number of containers. Raises `ArtifactMissing` for an unknown container.
    """
    kinds = list(Kind) if asked.kind is None else [Kind[asked.kind.upper()]]
    found = _of_all if asked.container is None else _of_containers
    called = containers.Names(store)
    for build_id, artifact, place in found(store, asked, kinds):
        yield ListedArtifact(
            build_id=build_id,
            kind=artifact.kind,
            sha256=artifact.digest,
            size=artifact.size,
            adopted=artifact.adopted,
            **called.fields(place.container, place.cgroup),
            last_seen=place.last_seen_ns / 1e9,
            **located.path_fields(place.path),
        )


def _of_all(
    store: Store, asked: ArtifactQuery, kinds: list[Kind]
) -> Iterator[tuple[BuildId, Artifact, ArtifactPlace]]:
    wanted = origin_filter(store, asked)
    for ordinal, build_id in store.index.build_ids_from(0):
        records = store.index.origins(ordinal)
        for each in kinds:
            artifact = store.index.artifact(ordinal, each)
            if artifact is None:
                continue
            for record in records:
                if each in record.kinds and (wanted is None or wanted(record)):
                    yield build_id, artifact, ArtifactPlace.of(record)
                    break


class ArtifactPlace(NamedTuple):
    """A place of a file: its path in a container (a label) and control group, and the time at which
    it was last seen (Unix time, ns).
    """

    path: bytes
    container: str
    cgroup: bytes
    last_seen_ns: int

    @classmethod
    def of(cls, record: OriginRecord) -> ArtifactPlace:
        """Return the place of an origin."""
        origin = record.origin
        return cls(origin.path, reported_at(origin), origin.cgroup, record.last_seen_ns)


def _of_containers(
    store: Store, asked: ArtifactQuery, kinds: list[Kind]
) -> Iterator[tuple[BuildId, Artifact, ArtifactPlace]]:
    """Yield the artifacts of the containers that a user means, in the order of their arrival."""
    assert asked.container is not None
    pattern = wording.glob(asked.glob or "*")
    found: dict[tuple[int, Kind], ArtifactPlace] = {}
    for container in containers.find(store, asked.container):
        for entry, path in containers.files(store, container.number):
            if not pattern.match(path):
                continue
            place = _place_in(store, container, entry, path)
            if place.last_seen_ns < asked.since_ns:
                continue
            for kind in _kinds_of(store, entry):
                key = entry.ordinal, kind
                known = found.get(key)
                if kind in kinds and (known is None or known.last_seen_ns < place.last_seen_ns):
                    found[key] = place
    for (ordinal, kind), place in sorted(found.items(), key=lambda item: item[0]):
        build_id, artifact = store.index.build_id(ordinal), store.index.artifact(ordinal, kind)
        if build_id is not None and artifact is not None and names.kept_for(build_id) == build_id:
            yield build_id, artifact, place


def _place_in(
    store: Store, container: CapturedContainer, entry: ContainerEntry, path: bytes
) -> ArtifactPlace:
    """Return the place of a file of a container; its time is that of the container if the build ID
    has too many places.
    """
    for record in store.index.origins(entry.ordinal):
        if is_of(container, record.origin) and record.origin.path == path:
            return ArtifactPlace.of(record)
    return ArtifactPlace(path, containers.reported(container), b"", container.last_seen_ns)


def _kinds_of(store: Store, entry: ContainerEntry) -> set[Kind]:
    """Return the kinds of artifacts that a file of a container is."""
    file = store.index.artifact_variant(entry.ordinal, entry.kind, entry.variant)
    if file is None:
        return set()
    return {Kind(kind) for kind, _ in store.index.variants_with(file.digest, entry.ordinal)}


class ConflictVariant(located.InContainer, frozen=True, kw_only=True):
    """A variant of an artifact that has several, the reason why it is served or not, and the place
    where it was last seen. The path is empty if no place is known.
    """

    sha256: Digest
    size: int
    quality: Quality
    trust: Trust
    first_seen: float
    served: bool
    why: str


class Conflict(msgspec.Struct, frozen=True):
    """An artifact with several variants, the best first."""

    build_id: BuildId
    kind: Kind
    variants: list[ConflictVariant]


def conflicts(
    store: Store, kind: str | None, wanted: Callable[[OriginRecord], bool] | None
) -> Iterator[Conflict]:
    """Yield the conflicts of which at least one variant was seen at a place that passes
    the filter.
    """
    called = containers.Names(store)
    for ordinal, number in store.index.conflicts():
        build_id = store.index.build_id(ordinal)
        if build_id is None or (kind is not None and Kind[kind.upper()] != number):
            continue
        records = store.index.origins(ordinal)
        if wanted is not None and not any(map(wanted, records)):
            continue
        last: dict[bytes, ArtifactPlace] = {}
        for record in records:
            last.setdefault(record.digest, ArtifactPlace.of(record))
        kept = store.index.variants(ordinal, number)
        served = store.index.artifact(ordinal, number)
        variants = []
        for each, why in zip(kept, reasons_of(store, ordinal, kept), strict=True):
            place = last.get(each.digest, ArtifactPlace(b"", "", b"", 0))
            variants.append(
                ConflictVariant(
                    sha256=each.digest,
                    size=each.size,
                    quality=each.quality,
                    trust=each.trust,
                    first_seen=each.first_seen_ns / 1e9,
                    served=served is not None and each.variant == served.variant,
                    why=why,
                    **called.fields(place.container, place.cgroup),
                    **located.path_fields(place.path),
                )
            )
        yield Conflict(build_id, Kind(number), variants)


def reasons_of(store: Store, ordinal: int, kept: list[Artifact]) -> list[str]:
    """Return for each variant of an artifact, best first, the reason why it is served or not.

    An executable whose code is at other offsets than that of others has its adopted ID there.
    """
    reasons = store.why(ordinal, kept)
    groups = placement.differing(store, ordinal) if kept and kept[0].kind is Kind.EXECUTABLE else []
    if len(groups) < 2:
        return reasons
    ids = (store.aliases.adopted_id(each.digest) for each in kept)
    return [
        f"{why}; code at other offsets: profiles need its ID {adopted}"
        for adopted, why in zip(ids, reasons, strict=True)
    ]


def why_no_conflicts(store: Store, asked: ArtifactQuery) -> str:
    """Return the reason why the list of build IDs with several variants is empty."""
    if asked == ArtifactQuery() or next(iter(store.index.conflicts()), None) is None:
        return "no build ID in this store has several variants"
    return f"no build ID with several variants fits {asked}"


def why_no_artifacts(store: Store, asked: ArtifactQuery) -> str:
    """Return the reason why the list of artifacts is empty."""
    if not store.stats().blobs:
        return "nothing is captured in this store yet: buildidfs scan proc, or buildidfs up"
    why = f"nothing in this store fits {asked}"
    if asked.container is not None:
        return f"{why}; {containers.last_ones(store)}"
    if asked.glob is not None:
        return f"{why}; a pattern has to match the whole path ('*/libc.so.6')"
    return why


_NO_NAMES: Final = frozenset(
    (AliasType.LINK, AliasType.BEGINNING, AliasType.OFFSETS, AliasType.TEXT)
)
"""The aliases that name no file by themselves."""


def alias_texts(aliases: Iterable[Alias]) -> dict[str, str]:
    """Return the aliases of a file by their types, as the commands take them."""
    found = {}
    for kind, value in aliases:
        if kind is AliasType.GO:
            found["go"] = value.decode("ascii", "replace")
        elif kind not in _NO_NAMES:
            found[kind.name.lower()] = value.hex()
    return found


def missing(store: Store, build_id: BuildId, split: answers.SplitFiles | None) -> list[str]:
    """Return descriptions of the files that a debugger will miss. Raises `StoreError`."""
    found = []
    if names.package_owner(build_id) is None:
        removed = store.journal.removals().get(build_id)
        found = _missing(store, store.index.ordinal(build_id) or 0, removed)
    if split is not None and split.package is None:
        units = wording.counted(split.units, "unit")
        found.append(
            f"split DWARF: the .dwp file of {units}, the first of which was written to"
            f" {split.files[0]}; put them into one with dwp(1), and add that"
        )
    return found


def variants(
    store: Store, build_id: BuildId, kept: dict[Kind, list[Artifact]]
) -> list[answers.PrivateVariant]:
    """Return the files ``kept`` of a build ID, those of a kind together, best first."""
    found = []
    ordinal = store.index.ordinal(build_id) or 0
    for kind, files in kept.items():
        served = store.index.artifact(ordinal, kind)
        for artifact, why in zip(files, reasons_of(store, ordinal, files), strict=True):
            found.append(
                answers.PrivateVariant(
                    kind=kind.name.lower(),
                    sha256=artifact.digest.hex(),
                    size=artifact.size,
                    quality=artifact.quality.name.lower(),
                    made_of=artifact.made_of,
                    trust=artifact.trust.name.lower(),
                    standing=artifact.standing.name.lower(),
                    first_seen=artifact.first_seen_ns / 1e9,
                    last_used=float(store.index.last_use(artifact.digest)),
                    served=served is not None and artifact.variant == served.variant,
                    why=why,
                    truncated=_truncated(store, artifact) if artifact.truncated else "",
                    gdb_scripts=bool(artifact.scripts),
                    adopted=artifact.adopted,
                    aliases=alias_texts(store.aliases.of(artifact.digest)),
                    mode=f"{artifact.mode:04o}",
                    uid=artifact.uid,
                    gid=artifact.gid,
                )
            )
    return found


def facts(store: Store, build_id: BuildId, namespaces: tuple[str, ...] | None) -> answers.Facts:
    """Return all facts about a build ID; ``namespaces`` are those that define a container.

    Raises `StoreError`, `IntegrityError`.
    """
    from buildidfs.catalog import history  # its imports take a third of the time of `list`

    ordinal = store.index.ordinal(build_id) or 0
    kept = {kind: files for kind in Kind if (files := store.index.variants(ordinal, kind))}
    origins = store.index.origins(ordinal)
    called = containers.Names(store)
    removed = store.journal.removals().get(build_id)
    split = split_dwarf(store, build_id)
    return answers.Facts(
        build_id=build_id.hex(),
        variants=variants(store, build_id, kept),
        origins=[
            answers.OriginPlace(
                **history.sighted_fields(each.origin, each, namespaces, called),
                kinds=[kind.name.lower() for kind in each.kinds],
                sha256=each.digest.hex(),
                device=each.origin.identity.dev,
                inode=each.origin.identity.ino,
            )
            for each in origins
        ],
        journal=[
            answers.Sighted(**history.sighted_fields(each, each, namespaces, called))
            for each in (() if origins else store.journal.of(build_id))
        ],
        missing=missing(store, build_id, split),
        removed=None if removed is None else removed.time,
        split_dwarf=split,
        pins=[
            answers.PinOf(**located.path_fields(pin.name, "name"), pinned=pin.created_ns / 1e9)
            for pin in store.pins.of(build_id)
        ],
    )


def _truncated(store: Store, artifact: Artifact) -> str:
    """Return the reason why debuggers refuse a file."""
    from buildidfs.formats.elf.identify import ElfFile

    try:
        file = _described(store, artifact)
    except IntegrityError as error:
        return str(error)
    return file.truncated if isinstance(file, ElfFile) else "truncated"


def _described(store: Store, artifact: Artifact) -> ElfFile | Absence:
    """Describe the bytes of an artifact as ELF. Raises `IntegrityError`."""
    from buildidfs.capture import base

    with store.blobs.open(artifact.digest) as blob:
        return base.describe(blob.fileno())


def _missing(store: Store, ordinal: int, removed: Removal | None) -> list[str]:
    """Return descriptions of the files that a debugger will miss."""
    if store.aliases.is_ambiguous(ordinal):
        return ["a build ID of its own: unrelated programs have this one, and none is served"]
    executable = store.index.artifact(ordinal, Kind.EXECUTABLE)
    debuginfo = store.index.artifact(ordinal, Kind.DEBUGINFO)
    withheld = debuginfo is None and bool(store.index.variants(ordinal, Kind.DEBUGINFO))
    gone = 0 if removed is None else removed.kinds
    why = "" if removed is None else remedies.removed(removed)
    if gone and not any(store.index.artifact(ordinal, kind) for kind in Kind):
        return [f"all files: {why}"]
    if executable is None and debuginfo is None and not withheld:
        return []  # the vDSO and kallsyms need no other files
    found = []
    if executable is None:
        is_gone = gone & 1 << Kind.EXECUTABLE
        found.append(f"executable: {why if is_gone else 'only its debuginfo was seen'}")
    if withheld:
        found.append("debuginfo: all that was seen is believed less than the executable")
    elif debuginfo is None or debuginfo.quality < Quality.DEBUGINFO:
        is_gone = gone & 1 << Kind.DEBUGINFO
        found.append(f"debuginfo: {why if is_gone else 'no file with DWARF was seen'}")
    for artifact in (executable, debuginfo):
        if artifact is None:
            continue
        try:
            file = _described(store, artifact)
        except IntegrityError as error:
            found.append(str(error))
            continue
        if isinstance(file, Absence):
            continue
        link = file.debuglink
        if artifact is executable and debuginfo is None and link is not None:
            found[-1] += f"; .gnu_debuglink names {printable(link.name)}"
        # Strip leaves the reference in executables, but no debugger follows it there.
        has_dwarf = file.quality >= Quality.DEBUGINFO
        if has_dwarf and file.altlink and store.index.ordinal(file.altlink.build_id) is None:
            found.append(f"dwz file {file.altlink.build_id}, {printable(file.altlink.name)}")
    return list(dict.fromkeys(found))
