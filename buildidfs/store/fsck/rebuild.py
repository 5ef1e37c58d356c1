# SPDX-License-Identifier: Apache-2.0
"""Make a new index from the blobs: the one remedy for all faults of an index.

The data beside each blob (`provenance`) and its bytes become rows again; they decide which build
IDs, trust and readers a blob has. The old index (`OldIndex`) adds the rows that no blob has, as far
as they still decode: pins, journal, history, further places, and the order of uses. A wrong bit may
change a place, but gives no user more rights: the place gets at most the trust and the readers that
the blob has already.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import lmdb
import msgspec

from buildidfs.errors import BuildIdFsError, IntegrityError, StoreDamaged, StoreError
from buildidfs.formats.elf import other_ids
from buildidfs.formats.elf.header import ET_DYN, ET_EXEC
from buildidfs.linux.file_ops import sync_directory
from buildidfs.model import (
    EVERYBODY,
    NO_NAMES,
    OWNER,
    QUALITIES,
    Alias,
    AliasType,
    BuildId,
    ByteRange,
    Digest,
    FileIdentity,
    Kind,
    Origin,
    Quality,
    Sighting,
    Standing,
    Trust,
)
from buildidfs.store import location_rows, schema
from buildidfs.store.blobs.files import Blobs, Staged
from buildidfs.store.blobs.verify import Blob, VerifiedBlobs
from buildidfs.store.errors import translated
from buildidfs.store.fsck.check import CHECK_MARK, GIVEN, SCRUB_MARK, describe, digest_rows
from buildidfs.store.fsck.rules import Rows, read_journal, read_meta, read_pin
from buildidfs.store.index import environment
from buildidfs.store.index.aliases import AliasWriter
from buildidfs.store.index.environment import Environment
from buildidfs.store.index.locations import label_of
from buildidfs.store.index.queries import DAMAGE
from buildidfs.store.values import NewCapture, claimed, timed
from buildidfs.store.write import provenance
from buildidfs.store.write.containers import NOTHING_CALLED, row_of
from buildidfs.store.write.transaction import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from buildidfs.formats.elf.identify import ElfFile
    from buildidfs.model import ContainerNames
    from buildidfs.store.fsck.check import Checker
    from buildidfs.store.index.environment import Txn


_BATCH: Final = 64
_OWN_ROWS: Final = frozenset((schema.COUNTERS_KEY, schema.FORMAT_KEY, CHECK_MARK, SCRUB_MARK))
"""Rows of *meta* that are right for one index only."""

T = TypeVar("T")

_Row = tuple[bytes, bytes]


class _Place(NamedTuple):
    """A place of a blob under a build ID, with its times and the names of its container."""

    digest: Digest
    build_id: BuildId
    origin: Origin
    first_ns: int
    last_ns: int
    names: ContainerNames


class OldIndex:
    """An index that can be read, although its rows may have faults; ``env`` None is an empty
    one.
    """

    def __init__(self, env: Environment | None) -> None:
        self._env = env

    def used(self, digest: Digest) -> int | None:
        """Return the time of the last use of a blob (Unix time, s); None if it is unknown."""
        if self._env is None:
            return None
        with self._env.read() as txn:
            row = Rows(self._env, txn).digest_row(digest)
        return None if row is None else row.used

    def keep(self, new: Environment, blobs: Blobs) -> None:
        """Write the rows that still decode into a new index that has all blobs."""
        decoders: dict[str, Callable[[bytes, bytes], object]] = {
            "pins": read_pin, "history": schema.unpack_history, "meta": _kept_meta,
        }  # fmt: skip
        for table, decode in decoders.items():
            for rows in _batches(self._rows(table, decode)):
                new.write(partial(_put, new, table, rows))
        for rows in _batches(self._rows("journal", read_journal)):
            new.write(partial(_put_journal, new, rows))
        for places in _batches(self._places()):
            new.write(partial(_see, new, blobs, places))

    def _rows(self, table: str, decode: Callable[[bytes, bytes], object]) -> Iterator[_Row]:
        """Yield the rows of a table that ``decode`` takes."""
        if self._env is None:
            return
        try:
            with self._env.read() as txn:
                for key, value in Rows(self._env, txn).having(table):
                    try:
                        decode(key, value)
                    except (*DAMAGE, BuildIdFsError):
                        continue
                    yield key, value
        except (lmdb.Error, BuildIdFsError):
            return  # the rest of the table cannot be read

    def _places(self) -> Iterator[_Place]:
        for key, value in self._rows("origins", location_rows.place_of):
            place = self._place(key, value)
            if place is not None:
                yield place

    def _place(self, key: bytes, value: bytes) -> _Place | None:
        assert self._env is not None
        if location_rows.place_of(key, value) is None:
            return None
        digest, _, origin, first, last = location_rows.unpack_origin(value)
        with self._env.read() as txn:
            named = Rows(self._env, txn).named(int.from_bytes(key[:8], "big"))
        names = self._names(origin) if label_of(origin) else NO_NAMES
        return None if named is None else _Place(digest, named.build_id, origin, first, last, names)

    def _names(self, origin: Origin) -> ContainerNames:
        """Return the names of the container of a place, as far as its row can be read."""
        assert self._env is not None
        try:
            with self._env.read() as txn:
                row = row_of(self._env, txn, origin)
            return NO_NAMES if row is None else row.names
        except (*DAMAGE, BuildIdFsError):
            return NO_NAMES


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    each = iter(items)
    while batch := list(islice(each, _BATCH)):
        yield batch


def _kept_meta(key: bytes, value: bytes) -> None:
    if key in _OWN_ROWS or key.startswith(schema.DERIVATION_PREFIX):
        raise ValueError("of the old index only")
    read_meta(key, value)


def _put(new: Environment, table: str, rows: list[_Row], txn: Txn) -> None:
    for key, value in rows:
        txn.put(key, value, db=new.tables[table])


def _put_journal(new: Environment, rows: list[_Row], txn: Txn) -> None:
    for key, value in rows:
        txn.put(key, value, db=new.tables["journal"])
        txn.put(value[8:16] + key, b"", db=new.tables["recent"])


def _see(new: Environment, blobs: Blobs, places: list[_Place], txn: Txn) -> None:
    """Record places of blobs that the new index has under the same build IDs."""
    called = {(each.origin.cgroup, each.origin.container): each.names for each in places}
    called = {key: names for key, names in called.items() if names != NO_NAMES}
    recorder, rows = Recorder(new, txn, blobs, called=called), Rows(new, txn)
    for each in places:
        row, number = rows.digest_row(each.digest), rows.get("ids", each.build_id)
        if row is None or number is None:
            continue
        ordinal = int.from_bytes(number, "big")
        refs = (rows.variant(*ref) for ref in row.refs if ref[0] == ordinal)
        kept = [artifact for artifact in refs if artifact is not None]
        if not kept:
            continue
        origin = msgspec.structs.replace(
            each.origin,
            trust=min(each.origin.trust, kept[0].trust),
            reach=each.origin.reach & (EVERYBODY if kept[0].mode & 0o444 == 0o444 else OWNER),
        )
        kinds = tuple(artifact.kind for artifact in kept)
        for when in dict.fromkeys((each.first_ns, each.last_ns)):
            sighting = claimed(Sighting(origin, when), time.time_ns())
            recorder.capture(
                NewCapture(sighting, each.digest, each.build_id, kinds, remember=False)
            )
    recorder.finish()


def name_blobs(checker: Checker) -> int:
    """Add aliases to blobs that an earlier version captured without aliases; return the number of
    these blobs.
    """
    env, named = checker.env, 0
    missing = (
        digest
        for digest, _ in digest_rows(env)
        if env.get(env.tables["identities"], digest) is None
    )
    while batch := list(islice(missing, _BATCH)):
        found: dict[Digest, tuple[Alias, ...]] = {}
        for digest in batch:
            with (
                contextlib.suppress(IntegrityError, OSError),
                checker.verified.open(digest) as blob,
            ):
                found[digest] = aliases_of(blob, describe(blob))
        named += sum(map(bool, found.values()))
        env.write(partial(_put_aliases, env, found))
    return named


def _put_aliases(env: Environment, found: dict[Digest, tuple[Alias, ...]], txn: Txn) -> None:
    writer = AliasWriter(env, txn)
    for digest, aliases in found.items():
        if aliases and txn.get(digest, db=env.tables["digests"]) is not None:
            writer.put(digest, aliases)
            writer.file(digest)


_NEW: Final = b"index.new"
_PROGRAMS: Final = frozenset((ET_EXEC, ET_DYN))
_UNKNOWN_FILE: Final = FileIdentity(0, 0, 0, 0, 0, 0o400, 0, 0)


class Rebuilt(msgspec.Struct):
    """The result of `rebuild`.

    It has the number of blobs in the new index, the blobs of unknown origin, and the damaged blobs,
    which are in quarantine.
    """

    blobs: int = 0
    unknown: list[Digest] = []
    damaged: list[Digest] = []


class Adopted(NamedTuple):
    """A capture made from the data beside a blob, with the other arguments of `Recorder.adopt`.

    ``places`` are further sightings. ``called`` has the names of the containers of all sightings,
    as for `ContainerWriter`.
    """

    capture: NewCapture
    shown: dict[str, Any]
    form: int
    places: tuple[Sighting, ...]
    called: Mapping[tuple[bytes, str], ContainerNames]

    @property
    def others(self) -> list[NewCapture]:
        """Return one more capture of the same bytes for each of the further sightings."""
        return [msgspec.structs.replace(self.capture, sighting=each) for each in self.places]


def rebuild(
    path: str | bytes | os.PathLike[str], progress: Callable[[int], None] = lambda count: None
) -> Rebuilt:
    """Make a new index for a closed store of any format; ``progress`` gets the blobs done.

    It keeps the rows of the old index that no blob has, see `OldIndex`.

    Raises `StoreLocked` if a process has the store open, `StoreFull`, `StoreMissing`, `StoreError`.
    """
    root = os.path.abspath(os.fsencode(path))
    is_kept = environment.read_format(root) == schema.FORMAT_VERSION and is_readable(root)
    with translated(root):
        os.makedirs(os.path.join(root, b"index"), 0o700, exist_ok=True)
        os.makedirs(os.path.join(root, _NEW), 0o700, exist_ok=True)
    with environment.exclusive(root):
        blobs = Blobs(root, writable=False)
        try:
            with contextlib.closing(_begin(root)) as env, _old(root if is_kept else None) as old:
                result = _fill(env, blobs, old, progress)
        finally:
            blobs.close()
        _take_over(root)
    environment.write_format(root)
    return result


def _begin(root: bytes) -> Environment:
    """Return the new index, or the unfinished one of an earlier attempt."""
    try:
        env = Environment(root, read_only=False, create=True, directory=_NEW)
    except StoreDamaged:
        _to_quarantine(root, os.path.join(root, _NEW, b"data.mdb"))
        env = Environment(root, read_only=False, create=True, directory=_NEW)
    env.write(lambda txn: environment.begin(env, txn))
    return env


def is_readable(root: bytes) -> bool:
    """Return True if each row of the index of a store can be read, right or wrong."""
    directory = os.path.join(root, b"index")
    return os.path.exists(directory) and environment.is_readable(directory)


@contextlib.contextmanager
def _old(root: bytes | None) -> Iterator[OldIndex]:
    """Yield the index of a store; an empty one for None, or if it cannot be opened."""
    env = None
    with contextlib.suppress(StoreError):
        if root is not None:
            env = Environment(root, read_only=True, create=False, lock=False)
    try:
        yield OldIndex(env)
    finally:
        if env is not None:
            env.close()


def _fill(
    env: Environment, blobs: Blobs, old: OldIndex, progress: Callable[[int], None]
) -> Rebuilt:
    result = Rebuilt()
    for digest, adopted in _adopt_blobs(env, blobs, old, progress):
        if not adopted:
            blobs.set_aside(digest)
            (result.damaged if adopted is None else result.unknown).append(digest)
    old.keep(env, blobs)
    result.blobs = env.entries()["digests"]
    return result


def _adopt_blobs(
    env: Environment, blobs: Blobs, old: OldIndex, progress: Callable[[int], None]
) -> Iterator[tuple[Digest, list[Adopted] | None]]:
    """Record every blob that has no row, from the data kept beside the blob.

    Yields each blob with that data: an empty list if there is none, None if the blob is damaged.
    """
    verified = VerifiedBlobs(env, blobs)
    table = env.tables["digests"]
    missing = (digest for digest in blobs.names() if env.get(table, digest) is None)
    while batch := list(islice(missing, _BATCH)):
        found: list[tuple[Digest, list[Adopted] | None]] = []
        for digest in batch:
            try:
                found.append((digest, _captures(blobs, verified, digest)))
            except IntegrityError:
                found.append((digest, None))
        adopted = [each for _, captures in found for each in captures or ()]
        env.write(partial(_record, env, blobs, adopted, old))
        progress(len(batch))
        yield from found


def _captures(blobs: Blobs, verified: VerifiedBlobs, digest: Digest) -> list[Adopted]:
    """Return the captures of a blob from the data kept beside it; raises `IntegrityError` if the
    blob is damaged.
    """
    with verified.open(digest) as opened:  # reads all of it, because the new index has no row yet
        # Nothing is staged: the bytes have their name already.
        content = Staged(-1, None)
        content.digest, content.size = digest, opened.size
        return captures_of(blobs, digest, opened, content)


def captures_of(blobs: Blobs, digest: Digest, opened: Blob, content: Staged) -> list[Adopted]:
    """Return the captures of an open blob, with ``content`` as their bytes; the list may
    be empty.
    """
    described = describe(opened)
    own = described.build_id if described is not None and described.build_id != GIVEN else None
    data = blobs.origin(digest)
    aliases = aliases_of(opened, described, provenance.aliases_in(data))
    htl = BuildId(dict(aliases)[AliasType.HTL]) if aliases else None
    found = []
    places = provenance.places_in(data)
    for claim in provenance.unpack(data):
        if own is None or claim.build_id in (own, htl):
            with contextlib.suppress(*DAMAGE):
                found.append(_claimed(claim, places, described, content, opened.form, aliases))
    build_id = own or (htl if described is not None and described.etype in _PROGRAMS else None)
    if not found and described is not None and build_id is not None:
        sighting = Sighting(Origin(b"", _UNKNOWN_FILE, scanner="repair"), time.time_ns())
        new = _capture(sighting, content, build_id, described.kinds, described, aliases)
        found.append(Adopted(new, {}, opened.form, (), NOTHING_CALLED))
    # A program without a build ID comes first: files with its adopted ID were made of it.
    return sorted(found, key=lambda each: each.capture.build_id != htl)


def aliases_of(
    opened: Blob, described: ElfFile | None, kept: tuple[Alias, ...] = ()
) -> tuple[Alias, ...]:
    """Return the aliases of an open blob.

    A code hash or CRC-32 in ``kept`` is used as it is; any other requires reading the blob.
    """
    if described is None:
        return ()
    known = tuple(each for each in kept if each.type in (AliasType.CODE, AliasType.CRC32))
    types = {each.type for each in known}
    is_nameless = described.build_id == GIVEN
    found = other_ids.aliases(
        described,
        opened.read_at,
        opened.size,
        code=is_nameless and AliasType.CODE not in types,
        crc=described.kinds == (Kind.DEBUGINFO,) and AliasType.CRC32 not in types,
        text=is_nameless and described.etype in _PROGRAMS,
    )
    return (*found, *known)


def _claimed(
    claim: provenance.Claim,
    places: tuple[provenance.OtherOrigin, ...],
    described: ElfFile | None,
    content: Staged,
    form: int,
    aliases: tuple[Alias, ...],
) -> Adopted:
    kinds = schema.KINDS_OF_MASK[claim.kinds]
    if described is not None:
        elf = (Kind.EXECUTABLE, Kind.DEBUGINFO)
        kinds = tuple(kind for kind in kinds if kind not in elf or kind in described.kinds)
    if not kinds:
        raise ValueError("no kind that it could be")
    if claim.origin:
        _, _, origin, first, last = location_rows.unpack_origin(claim.origin)
    else:
        origin = Origin(b"", _UNKNOWN_FILE, scanner="repair")
        first = last = claim.first_seen_ns
    shown = {
        "trust": Trust(claim.trust),
        "standing": Standing.of_stored(claim.standing),
        "mode": claim.mode & 0o555,
        "uid": claim.uid,
        "gid": claim.gid,
        "mtime_ns": claim.mtime_ns,
        "first_seen_ns": claim.first_seen_ns,
    }
    sighting, build_id = Sighting(origin, first), BuildId(claim.build_id)
    capture = _capture(sighting, content, build_id, kinds, described, aliases)
    if described is None:
        capture = msgspec.structs.replace(
            capture,
            quality=QUALITIES[claim.quality],
            scripts=tuple(ByteRange(*extent) for extent in claim.scripts),
            segments=claim.segments,
            truncated=claim.truncated,
        )
    elif kinds == (Kind.DEBUGINFO,) and QUALITIES[claim.quality] is Quality.DYNSYM:
        capture = msgspec.structs.replace(capture, quality=Quality.DYNSYM)  # of .gnu_debugdata
    called = {(origin.cgroup, origin.container): provenance.names_of(claim)}
    others = [Sighting(origin, last)] if last > first else []
    for place in places:
        if place.build_id == claim.build_id:
            _, _, there, since, until = location_rows.unpack_origin(place.origin)
            called[there.cgroup, there.container] = provenance.names_of(place)
            others += [Sighting(there, since), Sighting(there, until)]
    return Adopted(capture, shown, form, tuple(others), called)


def _capture(
    sighting: Sighting,
    content: Staged,
    build_id: BuildId,
    kinds: tuple[Kind, ...],
    described: ElfFile | None,
    aliases: tuple[Alias, ...],
) -> NewCapture:
    new = NewCapture(sighting, content, build_id, kinds, aliases=aliases)
    if described is None:
        return new
    return msgspec.structs.replace(
        new,
        quality=described.quality,
        scripts=described.scripts,
        segments=described.segments,
        supplement=described.supplement,
        truncated=bool(described.truncated),
        shared=described.shared,
        derive=described.is_stripped_go and Kind.EXECUTABLE in kinds,
    )


def _record(
    env: Environment, blobs: Blobs, adopted: list[Adopted], old: OldIndex, txn: Txn
) -> None:
    recorder = Recorder(env, txn, blobs, called=_called(adopted))
    now_ns = time.time_ns()
    for each in adopted:
        assert isinstance(each.capture.content, Staged)
        now, used = now_ns // 10**9, old.used(each.capture.content.digest)
        used = now if used is None else min(used, now)
        recorder.adopt(timed(each.capture, now_ns), each.shown, each.form, used)
        for other in each.others:
            recorder.capture(timed(other, now_ns))
    recorder.finish()


def _called(adopted: list[Adopted]) -> dict[tuple[bytes, str], ContainerNames]:
    """Return the names of the containers of captures, as for `ContainerWriter`."""
    found: dict[tuple[bytes, str], ContainerNames] = {}
    for each in adopted:
        found |= {key: names for key, names in each.called.items() if names != NO_NAMES}
    return found


def _take_over(root: bytes) -> None:
    """Replace the old index by the new one. The lock file stays, because a process may
    wait for it.
    """
    old, new = os.path.join(root, b"index"), os.path.join(root, _NEW)
    with contextlib.suppress(FileNotFoundError):
        _to_quarantine(root, os.path.join(old, b"data.mdb"))
    with translated(root):
        os.rename(os.path.join(new, b"data.mdb"), os.path.join(old, b"data.mdb"))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(new, b"lock.mdb"))
        os.rmdir(new)
        for name in (old, root):
            sync_directory(name)


def _to_quarantine(root: bytes, path: bytes) -> None:
    """Move a file to quarantine. Raises FileNotFoundError."""
    directory = os.path.join(root, b"quarantine")
    os.makedirs(directory, 0o700, exist_ok=True)
    os.rename(path, os.path.join(directory, b"index.%d" % time.time_ns()))
