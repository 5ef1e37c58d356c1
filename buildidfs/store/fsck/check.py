# SPDX-License-Identifier: Apache-2.0
"""Check that the index agrees with itself and with the blobs, and the blobs with their digests.

A store in use changes all the time. So `Checker` reads rows in many short transactions, each of
which sees a row and its related rows at one moment; it reads a row with an apparent fault once
more. Only counting takes one transaction for all rows; while it lasts, LMDB cannot reuse pages. A
blob without a row is not a fault: a killed process leaves such blobs, and the next capture of the
same bytes takes them over.

`Scrubber` reads blobs one after another, verifies their bytes and identifies them. It checks the
file of each blob with stat(2), and reads the file if it is no longer the file that was written, or
if all blobs are to be read. If the bytes are right, the row gets the file and the time of the read.
If they are wrong, the blob is struck: inode and change time in the row become 0, no reader gets the
blob, and the next capture of the same bytes replaces it. If the filesystem supports fs-verity, it
is enabled on blobs that were read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.errors import IntegrityError
from buildidfs.formats.elf import other_ids
from buildidfs.linux import file_ops
from buildidfs.linux.file_ops import closing_on_error
from buildidfs.model import Absence, AdoptedId, BuildId, Digest, Kind, Quality
from buildidfs.store import coordination, schema
from buildidfs.store.blobs.files import BlobFile
from buildidfs.store.blobs.verify import Blob
from buildidfs.store.fsck.rules import RULES, Rows, StoreFault, fault_of, wrong_counts
from buildidfs.store.index.queries import DAMAGE, batches, digest_row, rows_from
from buildidfs.store.write import provenance

if TYPE_CHECKING:
    from buildidfs.formats.elf.identify import ElfFile
    from buildidfs.model import Artifact
    from buildidfs.store.blobs.files import Blobs
    from buildidfs.store.blobs.verify import VerifiedBlobs
    from buildidfs.store.index.environment import Environment, Txn


CHECK_MARK: Final = b"check"
SCRUB_MARK: Final = b"scrub"
"""Rows of *meta* with the position of `check --verify-data`, and of the monthly scrub."""

_NOTES_AT_ONCE: Final = 256
_NOTE_SECONDS: Final = 5.0
#: Stands for the build ID in a file without a usable one, which is indexed under another ID.
GIVEN: Final = BuildId(bytes(BuildId.MAX_BYTES))

_ELF_KINDS: Final = 1 << Kind.EXECUTABLE | 1 << Kind.DEBUGINFO


class _Seen(msgspec.Struct):
    """The result of reading a blob, not yet recorded: ``file`` and ``form`` if the bytes are right.

    ``row`` is the file that the row of the blob had before.
    """

    row: BlobFile
    file: BlobFile | None
    form: int = schema.FORM_PLAIN


class Scrubber:
    """Reads blobs, and records the results unless the store is open for reading only.

    ``pace`` is called with the number of bytes of each piece read, and may sleep. ``mark`` names
    the row of *meta* in which `all` records its position.
    """

    def __init__(
        self,
        env: Environment,
        blobs: Blobs,
        verified: VerifiedBlobs,
        pace: Callable[[int], None] = lambda size: None,
        mark: bytes = b"",
    ) -> None:
        self._env = env
        self._blobs = blobs
        self._verified = verified
        self._pace = pace
        self._mark = mark
        self._place = b""
        self._seen: dict[Digest, _Seen] = {}
        self._saved_at = time.monotonic()
        self._verity = not env.read_only

    def all(
        self, *, whole: Callable[[schema.DigestRow], bool], from_start: bool = False
    ) -> Iterator[StoreFault]:
        """Yield the faults of blobs; with ``whole``, read all bytes of the blobs.

        Continues where the last call was interrupted.
        """
        if not from_start and self._mark:
            self._place = self._env.get(self._env.tables["meta"], self._mark) or b""
        try:
            for digest, value in digest_rows(self._env, self._place):
                file = self._blobs.file(digest)
                untouched = file is not None and schema.is_file(value, *file)
                if not untouched or whole(schema.DigestRow.unpack(value)):
                    yield from self.look(digest)
                self._place = digest
            self._place = b""
        finally:
            self.note()

    def look(self, digest: Digest) -> list[StoreFault]:
        """Read one blob, and return its faults."""
        row = digest_row(self._env, digest)
        if row is None:
            return []
        try:
            opened = self._opened(digest, row)
        except IntegrityError as error:
            if digest_row(self._env, digest) is None:  # it was removed meanwhile
                return []
            self._remember(digest, _Seen(_file_in(row), None))
            return [StoreFault(str(error), digest)]
        try:
            return self._right(digest, row, opened)
        finally:
            opened.close()

    def _opened(self, digest: Digest, row: schema.DigestRow) -> Blob:
        """Read a blob, and return it open if its bytes are right. Raises `IntegrityError` if they
        are not.
        """
        try:
            fd = self._blobs.open(digest)
        except IntegrityError:
            raise IntegrityError(f"blob {digest} is missing") from None
        with closing_on_error(fd):
            # The bytes must come from the disk, not from the page cache, which does not need these
            # pages later.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            form = self._verified.form_of(digest, fd, self._pace)
            if form is None:
                size = os.fstat(fd).st_size
                if row.form != schema.FORM_ZSTD and size != row.size:
                    text = f"blob {digest} has {size} bytes instead of {row.size}"
                    raise IntegrityError(text)
                raise IntegrityError(f"blob {digest} has other bytes")
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            status = os.fstat(fd)
        return Blob(fd, form, status)

    def _right(self, digest: Digest, row: schema.DigestRow, opened: Blob) -> list[StoreFault]:
        if self._verity:
            try:
                self._verity = file_ops.enable_verity(opened.fd)
            except OSError:  # a process may have it open for writing, or it belongs to another user
                self._verity = self._verity and os.geteuid() == 0
        status = os.fstat(opened.fd)
        file = BlobFile(status.st_size, status.st_ino, status.st_ctime_ns)
        seen = _Seen(_file_in(row), file, opened.form)
        if row.form == schema.FORM_DENSE and opened.form == schema.FORM_PLAIN:
            seen.form = schema.FORM_DENSE
        described = describe(opened)
        self._remember(digest, seen)
        if described is None:
            return []
        with self._env.read() as txn:
            moment = Rows(self._env, txn)
            now = moment.digest_row(digest)
            return [] if now is None else list(_differences(moment, digest, now, described))

    def _remember(self, digest: Digest, seen: _Seen) -> None:
        self._seen[digest] = seen
        late = time.monotonic() - self._saved_at > _NOTE_SECONDS
        if len(self._seen) >= _NOTES_AT_ONCE or late or seen.file is None:
            self.note()

    def note(self) -> None:
        """Record the results."""
        seen, self._seen = self._seen, {}
        self._saved_at = time.monotonic()
        if self._env.read_only or not (seen or self._mark):
            return

        def work(txn: Txn) -> tuple[int, list[int]]:
            results = _Results(self._env, txn, self._blobs)
            for digest, each in seen.items():
                results.record(digest, each)
            meta = self._env.tables["meta"]
            if self._mark and self._place:
                txn.put(self._mark, self._place, db=meta)
            elif self._mark:
                txn.delete(self._mark, db=meta)
            return results.finish()

        announced, changed = self._env.write(work)
        if changed:
            coordination.announce(self._env.root, announced, changed)


def digest_rows(env: Environment, after: bytes = b"") -> Iterator[tuple[Digest, bytes]]:
    """Yield the rows of *digests* beyond a key, in order; those that do not decode are skipped."""
    start = after + b"\0" if after else b""
    for key, value in rows_from(env, env.tables["digests"], start=start):
        if schema.is_digest_row(key, value):
            yield Digest(key), value


def _file_in(row: schema.DigestRow) -> BlobFile:
    return BlobFile(row.stored, row.inode, row.ctime_ns)


def describe(opened: Blob) -> ElfFile | None:
    """Describe the ELF file in a blob; None if the blob is not an ELF file (kallsyms is none).

    Its build ID is `GIVEN` if the file has none, or one that files share by mistake.
    """
    found = other_ids.describe(opened.read_at, opened.size, GIVEN)
    if isinstance(found, Absence):
        return None
    if isinstance(found.build_id, AdoptedId):
        return msgspec.structs.replace(found, build_id=GIVEN)
    return found


def _quality(artifact: Artifact, described: ElfFile) -> Quality:
    """Return the quality of an artifact from the description of its bytes.

    Symbols of ``.gnu_debugdata`` look like those of any file, but rank lower.
    """
    is_unpacked = artifact.kind is Kind.DEBUGINFO and artifact.quality is Quality.DYNSYM
    if is_unpacked and described.quality is Quality.SYMTAB:
        return Quality.DYNSYM
    return described.quality


def _differences(
    moment: Rows, digest: Digest, row: schema.DigestRow, described: ElfFile
) -> Iterator[StoreFault]:
    kinds = schema.mask_of(described.kinds)
    for ordinal, kind, number in row.refs:
        artifact, named = moment.variant(ordinal, kind, number), moment.named(ordinal)
        if artifact is None or named is None:
            continue  # the fault of another rule
        build_id = named.build_id
        if described.build_id not in (build_id, GIVEN) and not moment.is_marked("adopted", ordinal):
            text = f"is of build ID {described.build_id}, and the index says {build_id}"
        elif 1 << kind & _ELF_KINDS & ~kinds:
            text = f"is not {Kind(kind).name.lower()}, as the index says of {build_id}"
        elif (_quality(artifact, described), described.scripts) != (
            artifact.quality,
            artifact.scripts,
        ):
            text = f"has other sections than the index says of {build_id}"
        elif artifact.truncated != bool(described.truncated):
            state = "whole" if described.truncated else "truncated"
            text = f"is not {state}, as the index says of {build_id}"
        elif artifact.segments != described.segments:
            text = f"is loaded at other addresses than the index says of {build_id}"
        else:
            continue
        yield StoreFault(f"blob {digest} {text}", digest, build_id)


class _Results:
    """Records what was found in blobs, within one write transaction; call `finish` last."""

    def __init__(self, env: Environment, txn: Txn, blobs: Blobs) -> None:
        self._env = env
        self._txn = txn
        self._blobs = blobs
        self._rows = Rows(env, txn)
        self._changed: set[int] = set()

    def record(self, digest: Digest, seen: _Seen) -> None:
        """Record the result for one blob, unless another process has recorded its own."""
        row = self._rows.digest_row(digest)
        if row is None or _file_in(row) != seen.row:
            return
        if seen.file is None:
            if not (row.inode or row.ctime_ns):
                return  # it is struck already
            row.inode = row.ctime_ns = 0
            self._changed.update(ref[0] for ref in row.refs)
        elif self._blobs.file(digest) == seen.file:
            file = self._keep_origin(digest, row, seen.file)
            more = row.refer_to(file, self._blobs.disk_bytes(digest))
            self._rows.counters.stored_bytes += more
            row.form, row.verified = seen.form, int(time.time())
        self._rows.put_digest_row(digest, row)

    def _keep_origin(self, digest: Digest, row: schema.DigestRow, file: BlobFile) -> BlobFile:
        """Write the data beside a blob again, because a copy of the store may have lost it.

        Returns the file of the blob after that.
        """
        try:
            data = provenance.of_rows(self._env, self._txn, digest, row)
        except DAMAGE:
            return file  # rows that do not decode are faults of their own
        if data == self._blobs.origin(digest):
            return file
        self._blobs.keep_origin(digest, data)
        return self._blobs.file(digest) or file

    def finish(self) -> tuple[int, list[int]]:
        """Write the counters; return the number of announced commits, and the changed ordinals."""
        counters = self._rows.counters
        counters.announced += bool(self._changed)
        self._rows.put_counters()
        return counters.announced, sorted(self._changed)


class Checker:
    """Looks for faults in one store. It writes only to the rows of blobs that it has read (see
    `Scrubber`), and writes nothing if the store is open for reading only.
    """

    def __init__(self, env: Environment, blobs: Blobs, verified: VerifiedBlobs) -> None:
        self.env = env
        self.blobs = blobs
        self.verified = verified

    def rows(self, progress: Callable[[int], None] = lambda count: None) -> Iterator[StoreFault]:
        """Yield the faults of rows and of their counts; ``progress`` is called with the number of
        further rows checked.
        """
        for name in RULES:
            table = self.env.tables.get(name)
            if table is None:
                continue  # a store of an earlier version that is open for reading
            check = partial(self._suspicious, name)
            for rows, suspicious in batches(self.env, table, b"", b"", check):
                progress(len(rows))
                found = (self._recheck(name, key) for key in suspicious)
                yield from (fault for fault in found if fault is not None)
        with self.env.read() as txn:
            counts = list(wrong_counts(Rows(self.env, txn)))
        yield from map(StoreFault, counts)

    def count_rows(self) -> int:
        """Return the number of rows to check."""
        entries = self.env.entries()
        return sum(entries[table] for table in RULES if table in entries)

    def _suspicious(self, table: str, txn: Txn, rows: list[tuple[bytes, bytes]]) -> list[bytes]:
        """Return the keys of rows with an apparent fault."""
        moment = Rows(self.env, txn)
        return [key for key, value in rows if fault_of(RULES[table], table, moment, key, value)]

    def _recheck(self, table: str, key: bytes) -> StoreFault | None:
        """Check one row again, and return its fault."""
        with self.env.read() as txn:
            moment = Rows(self.env, txn)
            value = moment.get(table, key)
            return None if value is None else fault_of(RULES[table], table, moment, key, value)

    def files(
        self,
        *,
        whole: bool,
        from_start: bool = True,
        progress: Callable[[int], None] = lambda size: None,
    ) -> Iterator[StoreFault]:
        """Yield the faults of blobs; with ``whole`` read all blobs, else only those whose files
        were touched.

        Continues where the last call was interrupted, unless ``from_start``. ``progress`` is called
        with the number of bytes read.
        """
        mark = CHECK_MARK if whole else b""
        scrubber = Scrubber(self.env, self.blobs, self.verified, progress, mark)
        return scrubber.all(whole=lambda row: whole, from_start=from_start)

    def scrub(
        self, pace: Callable[[int], None], is_due: Callable[[schema.DigestRow], bool]
    ) -> Iterator[StoreFault]:
        """Read the blobs that are due or were changed, and yield their faults. Continues where an
        earlier call stopped. ``pace`` is called with the number of bytes read, and may wait.
        """
        scrubber = Scrubber(self.env, self.blobs, self.verified, pace, SCRUB_MARK)
        return scrubber.all(whole=is_due)

    def damaged(self) -> list[Digest]:
        """Return the blobs that are known to be damaged or gone."""
        return [digest for digest, value in digest_rows(self.env) if schema.is_struck(value)]

    def is_struck(self, digest: Digest) -> bool:
        """Return True if a blob is known to be damaged or gone."""
        value = self.env.get(self.env.tables["digests"], digest)
        return value is not None and schema.is_struck(value)

    def ordinals_of(self, digest: Digest) -> set[int]:
        """Return the ordinals of the build IDs that have a blob."""
        row = digest_row(self.env, digest)
        return set() if row is None else {ref[0] for ref in row.refs}

    def unreferenced(self) -> int:
        """Return the number of blobs that no row refers to."""
        table = self.env.tables["digests"]
        return sum(1 for digest in self.blobs.names() if self.env.get(table, digest) is None)
