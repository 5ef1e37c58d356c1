# SPDX-License-Identifier: Apache-2.0
"""Stage one file and identify the copy. Runs in several threads at once.

The source is read first only to save work: a file without a build ID is not copied, and one whose
bytes the store may hold already is hashed and not copied. Only facts from the staged bytes are
recorded.

Did the file change meanwhile, and can it change without a trace? Only this module decides. A blob
must have bytes that the file had at one moment, and a file that the store remembers must not change
unnoticed. Four checks do that; attacks have shown that none of them can be left out.

1. **Identity before and after the copy** (`take`). It differs if a write began meanwhile; then the
   copy may be half old and half new, with either build ID, and is dropped. The clock of a
   filesystem ticks 100 times per second or more: a second write within the tick of the first leaves
   no trace in the times. So a file is staged only after the tick of its last change (`premature`).
2. **A read lease** shows a writer. The times show when a write began, not when it ended, and they
   do not show stores through a mapping into a page that is dirty already. A file with a writer is
   tried later, until it has not changed for a second. If the writer is still there, the file is
   captured, but read twice (`equals`), and it is not remembered (`is_fixed`), because its bytes may
   change while its identity stays the same. Each later scan reads it, until the writer is gone.
3. **Inode, change time and size when a blob is opened** (`store/blobs/verify`): if they are not
   those of its row, the whole blob is read. While a blob is open, its mtime shows writes
   (`Blob.was_written`).
4. **The monthly scrub** (`store/fsck/check`) reads everything: a disk changes bytes without times.

The store also remembers no file that changed less than two seconds before it was read
(`store/write/transaction`), because the times of a network filesystem come from another clock.
"""

from __future__ import annotations

import errno
import os
import time
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture import base
from buildidfs.capture.base import PinnedFile, Unreadable
from buildidfs.errors import BuildIdFsError, Recapturable
from buildidfs.formats.elf import other_ids
from buildidfs.ingest import derived
from buildidfs.ingest.committer import WithMini, discard
from buildidfs.linux import file_ops, inodes
from buildidfs.linux.file_ops import on_error
from buildidfs.model import (
    OWNER,
    Absence,
    AdoptedId,
    Alias,
    AliasType,
    BuildId,
    Digest,
    FileIdentity,
    Kind,
    Origin,
    Quality,
    Sighting,
    Trust,
)
from buildidfs.store import (
    NewAbsence,
    NewCapture,
    NewSeen,
    Staged,
    Store,
    belief,
    belief_in,
)

if TYPE_CHECKING:
    from buildidfs.formats.elf.identify import ElfFile
    from buildidfs.store import Held


Outcome = NewCapture | NewAbsence | NewSeen | Unreadable
"""The result for a file; `NewSeen` if it is recapturable and there is no room for it."""

# If a build ID has more variants than this, the file is not compared with them, which would take
# ever longer: it is copied, and the store finds duplicates.
_MANY_VARIANTS: Final = 64
# A file of holes costs its maker nothing, and the store an hour for a few TiB. A compressing
# filesystem allocates at least a sixty-fourth for real bytes.
_HOLES_BYTES: Final = 8 << 30
_HOLES_RATIO: Final = 64


def capture(store: Store, pinned: PinnedFile) -> Outcome:
    """Stage the bytes of a file, identify the copy, and close the file. Raises `StoreError`."""
    with pinned:
        return take(store, pinned)


def take(store: Store, pinned: PinnedFile) -> Outcome:
    """Do as `capture`, but keep the file open for another attempt: the outcome is `Unreadable` with
    ETXTBSY if it is too early, or the file changed meanwhile. Raises `StoreError`.
    """
    path = pinned.sighting.origin.path
    reason = WRITTEN_TO
    try:
        # Before any read: hashing the holes of a sparse file of some TiB takes an hour.
        if _is_hollow(pinned.fd):
            return Unreadable(path, "a huge file that is nearly all holes", errno.EFBIG)
        wait, early = premature(pinned)
        if not wait:
            # Taken before the first read and compared after the last one: a write in between
            # changes the change time, unless both fall into one tick of the clock, which
            # `premature` excludes.
            before = inodes.identity(pinned.fd)
            identity = _identity(pinned, before)
            # Asked before and after the copy: a writer may have come and gone meanwhile.
            was_fixed = is_fixed(pinned, identity)
            outcome = _attempt(store, pinned, identity)
            if outcome is not None and inodes.identity(pinned.fd) == before:
                return _lasting(outcome, was_fixed and is_fixed(pinned, identity))
            # The copy may be half old and half new, under the build ID of either half.
            if isinstance(outcome, NewCapture):
                discard(outcome)
        reason = early or reason
    except OSError as error:
        return Unreadable.of(path, error)
    return Unreadable(path, reason, errno.ETXTBSY)


def _lasting(outcome: Outcome, is_fixed: bool) -> Outcome:
    """Return the outcome; it is remembered only if the file ``is_fixed``."""
    if is_fixed or not isinstance(outcome, NewCapture | NewAbsence):
        return outcome
    return msgspec.structs.replace(outcome, remember=False)


def _is_hollow(fd: int) -> bool:
    """Return True if the size of a file is far more than its allocated bytes, as if it were mostly
    holes. Raises OSError.
    """
    status = os.fstat(fd)
    return status.st_size > max(_HOLES_BYTES, status.st_blocks * 512 * _HOLES_RATIO)


def _identity(pinned: PinnedFile, now: FileIdentity) -> FileIdentity:
    """Return the present identity of the file, ``now``; for a copy, the identity that the scanner
    found.
    """
    # A member of an archive has the identity of a number in its archive, and its descriptor that of
    # a temporary file.
    seen = pinned.sighting.origin.identity
    return now if (now.dev, now.ino) == (seen.dev, seen.ino) else seen


def _attempt(store: Store, pinned: PinnedFile, identity: FileIdentity) -> Outcome | None:
    """Try once to take a file; return None if its bytes change. Raises `StoreError`, OSError."""
    # Checked before the first read: a writer that begins later changes the times. A writer that has
    # begun may be in the middle of a long write(2), or store through a page that is dirty already;
    # the times show neither.
    writer = has_writer(pinned, identity)
    sighting = sighting_of(pinned.sighting, identity)
    hint: BuildId | Absence | None = pinned.build_id
    if pinned.kind is None and pinned.build_id is None:
        hint = base.identify(pinned.fd)
        if isinstance(hint, Absence):
            return NewAbsence(identity, sighting.seen_ns, hint)
        # The digest is of bytes that were read from the source. If they change afterwards, `take`
        # drops this result, as it drops a copy.
        if (held := _held(store, pinned.fd, hint, identity.size)) is not None:
            aliases = _missing_aliases(store, pinned.fd, held, sighting.origin)
            return held.capture(sighting, aliases)
    # A recapturable file for which there is no room gets a row in the journal, which needs a build
    # ID. So without a hint there is no origin, and the file is copied.
    try:
        staged = store.stage(pinned.fd, origin=sighting.origin if hint is not None else None)
    except Recapturable:
        assert isinstance(hint, BuildId)
        return NewSeen(sighting, hint, omitted=True)
    with on_error(staged.close):
        outcome: Outcome | None = None
        # A second read with the same result shows that no write fell between the two.
        if not writer or equals(store, pinned.fd, staged.digest):
            outcome = _described(store, staged, pinned, sighting)
    if not isinstance(outcome, NewCapture):
        staged.close()
    return outcome


def sighting_of(sighting: Sighting, identity: FileIdentity) -> Sighting:
    """Return the sighting with the present identity of the file."""
    origin = sighting.origin
    if identity == origin.identity:
        return sighting
    recorded, trust, reach = origin.identity, origin.trust, origin.reach
    # Trust and reach were found for an owner and a mode that the file does not have any more:
    # chmod(2) or chown(2) came between the sighting and the copy. The new mode says nothing of the
    # path.
    if (recorded.uid, recorded.mode) != (identity.uid, identity.mode):
        trust = Trust.UNKNOWN
    if (recorded.uid, recorded.gid, recorded.mode) != (identity.uid, identity.gid, identity.mode):
        reach &= OWNER if recorded.uid == identity.uid else 0
    origin = msgspec.structs.replace(origin, identity=identity, trust=trust, reach=reach)
    return Sighting(origin, sighting.seen_ns)


def _held(store: Store, fd: int, build_id: BuildId, size: int) -> Held | None:
    """Return the row of a file's bytes, if the store has them. Raises OSError."""
    # The file is hashed only if the store may have its bytes: there is a variant with its build ID
    # and size, and the search for one is short.
    ordinal = store.index.ordinal(build_id)
    if ordinal is None or not any(
        variant.size == size
        for kind in Kind
        if store.index.artifact_variant(ordinal, kind, _MANY_VARIANTS) is None
        for variant in store.index.variants(ordinal, kind)
    ):
        return None
    held = store.held(store.digest_of(fd))
    return held if held is not None and held.build_id == build_id else None


def _missing_aliases(store: Store, fd: int, held: Held, origin: Origin) -> tuple[Alias, ...]:
    """Return the aliases of a file that the store holds, if an earlier version of buildidfs
    captured it without aliases. Raises OSError.
    """
    if store.aliases.of(held.digest):
        return ()
    described = base.describe(fd)
    if isinstance(described, Absence):
        return ()
    return _aliases(store, fd, held.size, described, held.digest, origin)


def _described(store: Store, staged: Staged, pinned: PinnedFile, sighting: Sighting) -> Outcome:
    """Return the capture for staged bytes. Raises OSError, `StoreError`."""
    if pinned.kind is Kind.KALLSYMS and pinned.build_id is not None:
        alias = Alias(AliasType.HTL, other_ids.kernel_htlhash(pinned.build_id))
        kinds = (Kind.KALLSYMS,)
        return NewCapture(
            sighting, staged, pinned.build_id, kinds, Quality.SYMTAB, aliases=(alias,)
        )
    # Only this process can write the copy. The source may be another file by now.
    described = base.describe(staged.fd, pinned.build_id)
    if isinstance(described, Absence):
        return NewAbsence(sighting.origin.identity, sighting.seen_ns, described)
    capture = NewCapture(
        sighting,
        staged,
        described.build_id,
        described.kinds if pinned.kind is None else (pinned.kind,),
        described.quality,
        described.scripts,
        described.segments,
        supplement=described.supplement,
        truncated=bool(described.truncated),
        aliases=_aliases(store, staged.fd, staged.size, described, staged.digest, sighting.origin),
        codes=_codes(store, described, staged.digest, sighting.origin),
        shared=described.shared,
        derive=pinned.kind is None and described.is_stripped_go,
    )
    has_mini = pinned.kind is None and described.mini is not None
    mini = derived.unpacked(store, staged, described, sighting) if has_mini else None
    return capture if mini is None else WithMini(**msgspec.structs.asdict(capture), mini=mini)


# --- aliases -------------------------------------------------------------------------------------

# The code hash is one more SHA-256 over much of a file. Only files have one that can be of use to
# it: those without a build ID, which may have an unstripped twin, and those whose build ID is that
# of another file as well, which may be unrelated.

# With three the build ID is known to be shared.
_OTHERS: Final = 3


def _aliases(
    store: Store, fd: int, size: int, described: ElfFile, own: Digest, origin: Origin
) -> tuple[Alias, ...]:
    """The aliases of an open file with the digest ``own``. Raises OSError."""
    is_nameless = isinstance(described.build_id, AdoptedId)
    is_debug = described.kinds == (Kind.DEBUGINFO,)
    has_others = not is_debug and any(_others(store, described, own, origin))
    code = is_nameless or has_others
    return other_ids.aliases(described, base.reader(fd), size, code=code, crc=is_debug)


def _codes(
    store: Store, described: ElfFile, own: Digest, origin: Origin
) -> tuple[tuple[Digest, Alias], ...]:
    """The code hashes of other executables with the same build ID, as far as they are missing."""
    if isinstance(described.build_id, AdoptedId) or Kind.EXECUTABLE not in described.kinds:
        return ()
    found = []
    for digest in _others(store, described, own, origin):
        if any(alias.type is AliasType.CODE for alias in store.aliases.of(digest)):
            continue
        try:
            with store.blobs.open(digest) as blob:
                head = blob.read_at(0, other_ids.HTL_PART)
                code = other_ids.code_hash(head, blob.read_at, blob.size)
        except (OSError, BuildIdFsError):
            continue  # damaged, or removed meanwhile
        if code:
            found.append((digest, Alias(AliasType.CODE, code)))
    return tuple(found)


def _others(store: Store, described: ElfFile, own: Digest, origin: Origin) -> list[Digest]:
    """Return a few other executables with the build ID of a file: those of the highest belief, if
    the file is one of these.
    """
    ordinal = store.index.ordinal(described.build_id)
    best = None if ordinal is None else store.index.artifact(ordinal, Kind.EXECUTABLE)
    if ordinal is None:
        return []
    variants = store.index.variants_after(ordinal, Kind.EXECUTABLE)
    if best is not None and belief(best) == belief_in(origin.trust, origin.standing):
        variants = (each for each in variants if belief(each) == belief(best))
    return [each.digest for each in islice(variants, _OTHERS + 1) if each.digest != own][:_OTHERS]


WRITTEN_TO: Final = "a process keeps writing to it"
"""The reason with ETXTBSY for a file that may be captured later."""

_NEW: Final = "it changed a moment ago"


class StabilityLimits(msgspec.Struct, frozen=True):
    """Times in seconds.

    ``tick`` is longer than a tick of any filesystem's clock. ``pause`` lets a writer continue
    between two reads. A file that is open for writing counts as at rest if its last change was
    ``rest`` ago, because a write may wait for the disk. If the kernel does not report writers,
    writes that began ``writing`` ago count as done. A scan retries a file for up to ``patience``.
    """

    tick: float = 0.02
    pause: float = 0.05
    rest: float = 1.0
    writing: float = 60.0
    patience: float = 1.5


limits = StabilityLimits()


def premature(pinned: PinnedFile) -> tuple[float, str]:
    """Return the seconds until staging of a file may begin, and the reason for the delay if that
    may last. Zero means now. Raises OSError.
    """
    if is_own_copy(pinned):
        return 0.0, ""
    age = _age(os.fstat(pinned.fd).st_ctime_ns)
    if 0 <= age < limits.rest and file_ops.has_writer(pinned.fd):
        return limits.pause, WRITTEN_TO
    return (max(limits.tick - age, 0.0) if age >= 0 else 0.0), ""


def has_writer(pinned: PinnedFile, identity: FileIdentity) -> bool:
    """Return True if a process may be writing to the file."""
    if is_own_copy(pinned):
        return False
    known = file_ops.has_writer(pinned.fd)
    return _age(identity.ctime_ns) < limits.writing if known is None else known


def equals(store: Store, fd: int, digest: Digest) -> bool:
    """Return True if a file that may have a writer still has the bytes with ``digest``. Raises
    OSError.
    """
    time.sleep(limits.pause)
    return store.digest_of(fd) == digest


def is_fixed(pinned: PinnedFile, identity: FileIdentity) -> bool:
    """Return True if the file cannot change without a change of its identity.

    If the kernel does not report writers, a file counts as fixed a minute after its last change: by
    then a disk filesystem has written the dirty pages back, and the next store through a mapping
    changes the times.
    """
    if is_own_copy(pinned):
        return True
    known = file_ops.has_no_writer(pinned.fd)
    return _age(identity.ctime_ns) >= limits.writing if known is None else known


def is_own_copy(pinned: PinnedFile) -> bool:
    """Return True if the descriptor is of a copy that the scanner made."""
    return pinned.kind in (Kind.VDSO, Kind.KALLSYMS) or pinned.is_copy


def _age(changed_ns: int) -> float:
    return (time.time_ns() - changed_ns) / 1e9
