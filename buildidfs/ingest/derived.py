# SPDX-License-Identifier: Apache-2.0
"""Debug files made from executables, for readers that cannot make them.

There are two kinds. The symbols in ``.gnu_debugdata`` of an executable are unpacked when it is
staged, which takes milliseconds. The names of a stripped Go program are made from its
``.gopclntab`` after its commit, by `work` in a process of its own, which takes about a second for
each ten megabytes of the table.

Such a file is kept as debuginfo of the executable's build ID, with its place, and marked as made
(`Artifact.made_of`). It is trusted no more than a package that the operator has given, and its
`Quality` ranks below that of DWARF, so that real debuginfo replaces it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture import base
from buildidfs.capture.archive import stream
from buildidfs.errors import IntegrityError, Recapturable
from buildidfs.formats.archive.common import Damaged, Packing
from buildidfs.formats.elf import minidebug, other_ids
from buildidfs.formats.elf.identify import ElfFile
from buildidfs.formats.elf.minidebug import DynamicSymbols
from buildidfs.linux.file_ops import closing_fd, on_error
from buildidfs.model import Absence, Kind, Quality, Sighting, Standing, Trust
from buildidfs.store import NewCapture, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.model import BuildId, Digest
    from buildidfs.store import OriginRecord, Staged

_LOCK: Final = b"run/derive.lock"


def _staged(
    store: Store, fd: int, described: ElfFile, sighting: Sighting, quality: Quality
) -> NewCapture | None:
    """Stage an open debug file that was made from an executable; ``sighting`` is that of the
    executable.

    Returns None if it does not belong to that executable, or if the store has no room for it while
    the executable still exists. Raises OSError, `StoreError`.
    """
    try:
        staged = store.stage(fd, origin=sighting.origin)
    except Recapturable:
        return None
    with on_error(staged.close):
        return _capture(staged, described, sighting, quality)


def _capture(
    staged: Staged, described: ElfFile, sighting: Sighting, quality: Quality
) -> NewCapture | None:
    found = base.describe(staged.fd, described.build_id)
    if not isinstance(found, ElfFile) or not _belongs(found, described):
        staged.close()
        return None
    origin = sighting.origin
    seen = origin.identity
    # Without a scope, so that a scan which meets this file again reads the executable.
    seen = msgspec.structs.replace(seen, scope=None, mode=seen.mode & ~_EXECUTE)
    origin = msgspec.structs.replace(
        origin,
        identity=seen,
        trust=min(origin.trust, Trust.PACKAGE),
        standing=min(origin.standing, Standing.GIVEN),
    )
    return NewCapture(
        Sighting(origin, sighting.seen_ns),
        staged,
        described.build_id,
        (Kind.DEBUGINFO,),
        quality,
        found.scripts,
        found.segments,
        aliases=other_ids.aliases(found, base.reader(staged.fd), staged.size, crc=True),
    )


def _belongs(found: ElfFile, described: ElfFile) -> bool:
    """Return True for a debug file of the executable from which it was made."""
    return (
        found.kinds == (Kind.DEBUGINFO,)
        and not found.truncated
        and found.segments in (0, described.segments)
        and found.build_id == described.build_id
        and (found.machine, found.bits, found.little_endian)
        == (described.machine, described.bits, described.little_endian)
    )


# --- .gnu_debugdata ------------------------------------------------------------------------------

PACKED_MAX_BYTES: Final = 16 << 20
UNPACKED_MAX_BYTES: Final = 64 << 20
"""The largest unpacked size: libxul's, among the largest, has half of this."""

# Sections of zeros are packed to next to nothing; tables of symbols to a fifth or a tenth.
_SMALL: Final = 1 << 20
_RATIO: Final = 50
_EXECUTE: Final = 0o111

# Each takes a few times its size in memory.
_one_at_a_time: Final = threading.Lock()


def unpacked(
    store: Store, staged: Staged, described: ElfFile, sighting: Sighting
) -> NewCapture | None:
    """Stage the symbols in ``.gnu_debugdata`` of a staged executable, as debuginfo of last resort.

    gdb, elfutils and lldb read them from the executable. valgrind, bcc and perf (before commit
    b10f74308e13, Linux 6.16) do not, and most programs of Fedora and its relatives have no other
    symbols. They rank below every debuginfo with the same trust, and get no more trust than a
    package, so that a debuginfo package replaces them. Returns None if the executable has other
    symbols, if these are damaged, too large or of another file, or if there is no room for them and
    the executable still exists. Raises OSError, `StoreError`.
    """
    if described.mini is None or described.truncated or Kind.DEBUGINFO in described.kinds:
        return None
    with _one_at_a_time:
        data = _completed(staged.fd, described)
        if data is None:
            return None
        with closing_fd(base.memory_file(b"debug", data)) as fd:
            return _staged(store, fd, described, sighting, Quality.DYNSYM)


def _completed(fd: int, described: ElfFile) -> bytes | bytearray | None:
    """Return the debug file with all symbols of the executable; None if it is invalid. Raises
    OSError.
    """
    where = described.mini
    if where is None or where.size > PACKED_MAX_BYTES:
        return None
    packed = os.pread(fd, where.size, where.offset)
    limit = min(UNPACKED_MAX_BYTES, max(_SMALL, _RATIO * len(packed)))
    data = _unpacked(packed, limit)
    if data is None:
        return None
    dynamic = minidebug.dynamic_symbols(base.reader(fd), os.fstat(fd).st_size)
    return None if dynamic is None else minidebug.completed(data, dynamic)


def _unpacked(packed: bytes, limit: int) -> bytes | None:
    """Unpack xz data; None if it is damaged, empty, or more than ``limit`` bytes."""
    pieces = stream.plain(iter((packed,)), Packing.XZ)
    try:
        return b"".join(stream.LimitedStream(pieces, limit, len(packed)).all()) or None
    except (stream.CannotDecompress, Damaged):
        return None


# --- names of Go ---------------------------------------------------------------------------------


def work(store: Store) -> None:
    """Make the debug files that the store requests (`Store.derivations`), until there are none.

    One process at a time makes files; others wait for its end. Raises OSError, `StoreError`.
    """
    with _alone(store.path):
        while wanted := store.derivations():
            for digest, build_id in wanted:
                # A damaged blob has no names; the check of the store reports it. If a table needs
                # more memory than this process may have, the next attempt would fail, too.
                with contextlib.suppress(IntegrityError, MemoryError):
                    _make(store, digest, build_id)
                store.derived(digest)


def is_at_work(store: Store) -> bool:
    """Return True if a process makes the requested files at present. Raises OSError."""
    with open(_lock_file(store.path), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _make(store: Store, digest: Digest, build_id: BuildId) -> None:
    """Make the debug file of one executable, unless there is one that is as good.

    Raises `IntegrityError`, OSError, `StoreError`.
    """
    from buildidfs.formats.go import debug_file  # large, and no scan needs it

    ordinal = store.index.ordinal(build_id)
    if ordinal is None:
        return
    kept = store.index.variants(ordinal, Kind.EXECUTABLE)
    executable = next((each for each in kept if each.digest == digest), None)
    served = store.index.artifact(ordinal, Kind.DEBUGINFO)
    if executable is None:
        return
    if served is not None and served.quality >= Quality.GOPCLNTAB and not served.truncated:
        return
    record = _place(store, ordinal, digest)
    if record is None:
        return
    with (
        store.blobs.open(digest) as blob,
        open(base.scratch_file(), "w+b") as debug,
        open(base.scratch_file(), "w+b") as scratch,
    ):
        described = other_ids.describe(blob.read_at, blob.size, build_id)
        if isinstance(described, Absence) or described.build_id != build_id:
            return
        dynamic = minidebug.dynamic_symbols(blob.read_at, blob.size) or DynamicSymbols()
        if not debug_file.write_debug_file(
            blob.read_at, blob.size, build_id, digest, debug, scratch=scratch, dynamic=dynamic
        ):
            return
        debug.flush()
        origin = msgspec.structs.replace(
            record.origin, trust=executable.trust, standing=executable.standing
        )
        sighting = Sighting(origin, record.last_seen_ns)
        capture = _staged(store, debug.fileno(), described, sighting, Quality.GOPCLNTAB)
    if capture is not None:
        store.commit([capture])


def _place(store: Store, ordinal: int, digest: Digest) -> OriginRecord | None:
    """Return the best place of an executable: public if possible, and of the highest trust."""
    records = [each for each in store.index.origins(ordinal) if each.digest == digest]
    return max(records, key=lambda each: (each.origin.is_public, each.origin.trust), default=None)


def _lock_file(path: bytes) -> bytes:
    name = os.path.join(path, _LOCK)
    os.makedirs(os.path.dirname(name), 0o700, exist_ok=True)
    return name


@contextlib.contextmanager
def _alone(path: bytes) -> Iterator[None]:
    """Hold a lock, so that no other process does the same work; the kernel releases it when the
    process ends.
    """
    with open(_lock_file(path), "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
