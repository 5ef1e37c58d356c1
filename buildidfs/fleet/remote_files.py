# SPDX-License-Identifier: Apache-2.0
"""`RemoteFiles`: the files of buckets, looked up on demand.

Buckets are tiers: a file comes from the first bucket that has it, in the order of the
configuration. A look-up checks the filter of each tier, then reads the first bytes of the object,
and describes the file from its headers. So the claims of a host about a file do not matter, except
the digest, which is verified when all bytes have come, and the trust, for which the tier has a
maximum.

The bytes of an object have a name of their own in place of a digest, because the digest that its
host claims could be that of another file.

A bucket may have several executables of a build ID whose code is at different offsets in the file
(`store.placement`). The look-up finds all of them, and they are kept together: a store with only
one of them could not say that the build ID does not identify the file.

If a tier does not answer, it is not asked again until a background thread gets an answer. So
readers wait for such a tier only once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import random
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs.errors import RemoteDamaged, RemoteDenied, RemoteError, RemoteUnavailable
from buildidfs.fleet import objects
from buildidfs.fleet.bucket import INTERACTIVE, PATIENT, Bucket, Head
from buildidfs.fleet.filters import Filter
from buildidfs.fleet.objects import FIRST_ORDINAL, VARIANT
from buildidfs.fleet.ranges import BLOCK, RangeReader, RemoteBlob
from buildidfs.formats.elf import other_ids
from buildidfs.model import (
    Absence,
    Alias,
    AliasType,
    Artifact,
    BuildId,
    Digest,
    Kind,
    Standing,
    Trust,
)
from buildidfs.store.absent_files import AbsentFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from buildidfs.formats.elf.identify import ElfFile

_log = logging.getLogger(__name__)

_MOST_IDS: Final = 1 << 16
_ABSENT_S: Final = 30
_WRONG_S: Final = 3600
_FIRST_LOAD_S: Final = 2.0
_ASKED_SOON: Final = 256
_SOON_THREADS: Final = 8
_DOWN_S: Final = 5.0
_MOST_READERS: Final = 256
_MOST_KEPT: Final = 4 << 30
_MOST_TOGETHER: Final = 1 << 30  # the bytes of all variants of a build ID
_CHUNK: Final = 1 << 20
_MOST_BYTES: Final = 64 << 30
"""Larger objects are not read, because each of their blocks takes memory."""
_MOST_REQUESTS: Final = 64
_MOST_DESCRIBED: Final = 64 << 20
"""The maximum numbers of requests and of bytes for describing a file."""


class Tier:
    """A bucket to read from. ``trust`` is the maximum trust in its files.

    If it is ``private``, only root may read its files.
    """

    def __init__(self, url: str, trust: Trust, *, private: bool = False) -> None:
        """Makes no request yet. Raises `UsageError`."""
        self.bucket = Bucket(url, INTERACTIVE)
        self.trust = trust
        self.private = private
        self.filter = Filter(self.bucket.limited(PATIENT))
        self.is_down = False
        """True while the bucket is not asked, because it did not answer."""
        self._is_proven = False
        self._is_damaged = False

    @property
    def is_filtered(self) -> bool:
        """True if the tier has a filter, and the filter is loaded."""
        return self.filter.generation is not None

    def note_failure(self, error: RemoteError) -> None:
        """Stop asking the bucket, and log once that it failed."""
        if not self.is_down:
            _log.warning("%s", error)
        self.is_down = True

    def refresh(self) -> None:
        """Find out if the bucket answers, and load its newest filter. Raises no errors."""
        try:
            # A missing bucket looks like one without a filter.
            self._is_proven = self.bucket.identity() != ""
        except RemoteDamaged:
            self._is_proven = True  # an object exists
        except RemoteError as error:
            self.note_failure(error)
            return
        try:
            self.filter.refresh()
            self._is_damaged = False
        except RemoteDamaged as error:
            if not self._is_damaged:
                _log.error("%s; until then the bucket is asked for each file", error)
            self._is_damaged = True
            self.filter.drop()
        except RemoteError as error:
            self.note_failure(error)
            return
        if self.is_down:
            _log.warning("%s answers again", self.bucket.url)
        self.is_down = False

    def peek(self, key: str) -> tuple[Head, bytes] | None:
        """Return the facts about an object and its first block. Raises `RemoteError`."""
        try:
            return self.bucket.peek(key, BLOCK)
        except RemoteDenied:
            if self._is_proven:
                return None  # without the right to list, a request for an absent object is refused
            raise


class RemoteFile(NamedTuple):
    """A file in a bucket. Its artifact has an ordinal of `FIRST_ORDINAL` or more.

    ``said.digest`` is None for an object of another program, whose bytes have no known digest. The
    digest of the artifact is a name for the bytes of this object only.
    """

    tier: Tier
    build_id: BuildId
    artifact: Artifact
    key: str
    etag: str
    described: objects.Described
    aliases: tuple[Alias, ...] = ()

    @property
    def offsets(self) -> Alias | None:
        """Return the alias that tells where the code is in the file, if it is known."""
        return next((each for each in self.aliases if each.type is AliasType.OFFSETS), None)

    @property
    def adopted_id(self) -> BuildId | None:
        """Return the adopted ID of the file, if it is known."""
        found = (each.value for each in self.aliases if each.type is AliasType.HTL)
        return next(map(BuildId, found), None)


class _Open:
    """A reader, and the number of blobs that use it."""

    def __init__(self, reader: RangeReader) -> None:
        self.reader = reader
        self.users = 0


class RemoteFiles:
    """The known files of buckets. May be used from several threads."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        directory: bytes,
        keep: Callable[[RemoteFile, int], None] = lambda file, fd: None,
        refresh_s: float = 60.0,
    ) -> None:
        """``directory`` is the store, which takes the bytes that were read. ``keep`` is called with
        each complete and verified file, and a descriptor of its bytes that is valid during the
        call.
        """
        self._tiers = tiers
        self._directory = directory
        self._keep = keep
        self._refresh_s = refresh_s
        self._lock = threading.Lock()
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._ids: dict[int, BuildId] = {}
        self._next = FIRST_ORDINAL
        self._found: dict[bytes, dict[Kind, RemoteFile]] = {}
        self._absent = AbsentFiles(directory, ("bucket", *(tier.bucket.url for tier in tiers)))
        self._variants: dict[bytes, tuple[RemoteFile, ...]] = {}
        self._by_digest: dict[Digest, RemoteFile] = {}
        self._asking: set[tuple[bytes, Kind]] = set()
        self._answered = threading.Condition(self._lock)
        self._open: OrderedDict[Digest, _Open] = OrderedDict()
        self._ended = threading.Event()
        self._refreshing: threading.Thread | None = None
        self._loaded = threading.Event()
        self._soon = ThreadPoolExecutor(_SOON_THREADS, "remote")
        self._asked_soon = 0

    # --- known files, without a request ---------------------------------------------------------

    def ordinal(self, build_id: bytes) -> int | None:
        """Return the ordinal of a build ID of which a file was found."""
        return self._numbers.get(build_id) if build_id in self._found else None

    def number(self, build_id: BuildId) -> int:
        """Return the ordinal of a build ID; if it has none, it gets one."""
        with self._lock:
            return self._number(build_id)

    def _number(self, build_id: BuildId) -> int:
        if build_id not in self._numbers:
            if len(self._numbers) >= _MOST_IDS:
                self._forget_oldest()
            self._numbers[build_id] = self._next
            self._ids[self._next] = build_id
            self._next += 1
        return self._numbers[build_id]

    def build_id(self, ordinal: int) -> BuildId | None:
        """Return the build ID of an ordinal made here."""
        return self._ids.get(ordinal)

    def found(self, build_id: bytes) -> dict[Kind, RemoteFile]:
        """Return the files of a build ID that were found."""
        return self._found.get(build_id, {})

    def variants(self, build_id: bytes) -> tuple[RemoteFile, ...]:
        """Return the other executables of a build ID that were found, if their code is at other
        offsets than that of the first.
        """
        return self._variants.get(build_id, ())

    def aliases(self, digest: Digest) -> tuple[Alias, ...]:
        """Return the aliases of a found file that are known."""
        file = self._by_digest.get(digest)
        return () if file is None else file.aliases

    def is_known(self, build_id: bytes, kinds: Iterable[Kind]) -> bool:
        """Return True if it is known without a request which of these files exist.

        Raises `RemoteUnavailable` while a tier that could tell does not answer.
        """
        found = self.found(build_id)
        return all(kind in found or self._is_absent(build_id, kind) for kind in kinds)

    def is_likely(self, build_id: bytes, kinds: Iterable[Kind]) -> bool:
        """Return True if filters say that one of these files exists. Makes no request."""
        return any(
            kind not in self.found(build_id)
            and all(tier.is_filtered for tier in self._tiers)
            and any(tier.filter.may_have(build_id, kind) for tier in self._tiers)
            for kind in kinds
        )

    def _is_absent(self, build_id: bytes, kind: Kind) -> bool:
        asked = [tier for tier in self._tiers if tier.filter.may_have(build_id, kind)]
        if not asked:
            return True
        if self._absent.has(build_id, kind):
            return True
        if all(tier.is_down for tier in asked):
            raise RemoteUnavailable(f"{asked[0].bucket.url} does not answer")
        return False

    # --- look-ups --------------------------------------------------------------------------------

    def ask(self, build_id: bytes, kinds: Iterable[Kind]) -> None:
        """Find out which of these files exist. Waits for the buckets.

        Several threads that ask for the same file make one request. Raises `RemoteUnavailable` if
        no bucket is known to have one of the files, and a bucket does not answer.
        """
        self.start()
        self._loaded.wait(_FIRST_LOAD_S)
        for kind in kinds:
            key = (bytes(build_id), kind)
            with self._answered:
                while key in self._asking:
                    self._answered.wait()
                if kind in self.found(build_id) or self._is_absent(build_id, kind):
                    continue
                self._asking.add(key)
            try:
                self._ask_tiers(BuildId(build_id), kind)
            finally:
                with self._answered:
                    self._asking.discard(key)
                    self._answered.notify_all()

    def ask_soon(self, build_id: bytes, kinds: Iterable[Kind]) -> None:
        """Do the same as `ask` in a thread of its own, unless many threads wait already.

        Raises no errors, and does not wait.
        """
        if self._asked_soon >= _ASKED_SOON:
            return
        self._asked_soon += 1

        def work() -> None:
            self._asked_soon -= 1
            # the reader that needs the file gets the error
            with contextlib.suppress(RemoteError, OSError):
                self.ask(build_id, kinds)

        self._soon.submit(work)

    def _ask_tiers(self, build_id: BuildId, kind: Kind) -> None:
        failure: RemoteError | None = None
        for tier in self._tiers:
            if not tier.filter.may_have(build_id, kind):
                _log.debug("%s: not in the filter of %s", build_id, tier.bucket.url)
                continue
            try:
                if tier.is_down:
                    raise RemoteUnavailable(f"{tier.bucket.url} does not answer")
                file = self._look(tier, build_id, kind)
                others = () if file is None else self._others(file)
                if others:
                    file = self._look(tier, build_id, kind, is_described=True)
            except (RemoteUnavailable, RemoteDenied) as error:
                tier.note_failure(error)
                failure = error
                continue
            is_there = "not there" if file is None else "there"
            _log.debug("%s: requested from %s: %s", build_id, tier.bucket.url, is_there)
            if file is not None:
                self._remember(file, others)
                if others:
                    self._fetch_soon((file, *others))
                else:
                    self._check_whole(file)
                return
        if failure is not None:
            raise RemoteUnavailable(str(failure)) from failure
        self._absent.add(build_id, kind, _ABSENT_S)

    def _others(self, first: RemoteFile) -> tuple[RemoteFile, ...]:
        """Return the variants of an executable in the same bucket whose code is at other offsets.

        Raises `RemoteUnavailable`. Without the right to list the bucket, none are known.
        """
        kind, build_id, tier = first.artifact.kind, first.build_id, first.tier
        if kind is not Kind.EXECUTABLE:
            return ()
        prefix = objects.variants_prefix(build_id, kind)
        try:
            rows = list(itertools.islice(tier.bucket.list(prefix), objects.MOST_VARIANTS))
        except (RemoteDenied, RemoteDamaged) as error:
            _log.debug("%s: the variants of %s are unknown: %s", tier.bucket.url, build_id, error)
            return ()
        if not rows:
            return ()
        own = self._look(tier, build_id, kind, is_described=True)
        known = {None if own is None else own.offsets}
        found: list[RemoteFile] = []
        for row in rows:
            number = VARIANT - 1 - len(found)
            each = self._look(tier, build_id, kind, row.key, number, is_described=True)
            if each is not None and each.offsets not in known:
                known.add(each.offsets)
                found.append(each)
        return tuple(found)

    def _look(
        self,
        tier: Tier,
        build_id: BuildId,
        kind: Kind,
        key: str = "",
        variant: int = VARIANT,
        *,
        is_described: bool = False,
    ) -> RemoteFile | None:
        """Look in one bucket, and describe the file from its headers; None if the bucket has no
        such file. ``key`` is that of a variant. With ``is_described``, the file gets its aliases.
        """
        key = key or objects.blob_key(build_id, kind)
        got = tier.peek(key)
        if got is None:
            return None
        head, first = got
        if not 0 < head.size <= _MOST_BYTES:
            _log.error("%s/%s has %d bytes", tier.bucket.url, key, head.size)
            return None
        described = objects.described(head.metadata)
        digest = _name_of(tier, key, head)
        with self._lock:
            known = self._open.get(digest)
        reader = self._reader(tier, key, head, described, digest) if known is None else known.reader
        try:
            if known is None:
                reader.put_first(first)
            has, aliases = _described(reader, build_id, with_aliases=is_described)
        except OSError as error:
            if known is None:
                reader.close()
            if error.errno == errno.ESTALE:
                return None  # it was removed a moment ago, or replaced
            raise RemoteUnavailable(f"{tier.bucket.url}: {error.strerror}") from error
        if has is None or not _fits(has, build_id, kind):
            _log.error("%s/%s is not the file that its name says", tier.bucket.url, key)
            if known is None:
                reader.close()
            return None
        artifact = _artifact(tier, kind, digest, head, described, has)
        artifact = msgspec.structs.replace(artifact, variant=variant)
        if known is None:
            with self._lock:
                self._open[digest] = _Open(reader)
        return RemoteFile(tier, build_id, artifact, key, head.etag, described, aliases)

    def _remember(self, file: RemoteFile, others: tuple[RemoteFile, ...]) -> None:
        """Make a file known, and its variants, each also under its adopted ID."""
        with self._lock:
            build_id = file.build_id
            ordinal = self._number(build_id)
            file, *others_numbered = (_numbered(each, ordinal) for each in (file, *others))
            self._found.setdefault(build_id, {})[file.artifact.kind] = file
            for each in (file, *others_numbered):
                self._by_digest[each.artifact.digest] = each
            if not others:
                return
            self._variants[build_id] = tuple(others_numbered)
            for each in (file, *others_numbered):
                if (own := each.adopted_id) is not None:
                    first = msgspec.structs.replace(each.artifact, variant=VARIANT)
                    its = _numbered(each._replace(build_id=own, artifact=first), self._number(own))
                    self._found.setdefault(own, {})[its.artifact.kind] = its

    def _check_whole(self, file: RemoteFile) -> None:
        """Keep a file if all of its bytes came with its headers."""
        with self._lock:
            opened = self._open.get(file.artifact.digest)
        if opened is not None and opened.reader.is_complete:
            self._complete(file, opened.reader)

    def _fetch_soon(self, files: tuple[RemoteFile, ...]) -> None:
        """Fetch all bytes of files in a thread of its own, which keeps them at the end."""
        if sum(each.artifact.size for each in files) > _MOST_TOGETHER:
            return

        def work() -> None:
            for each in files:
                # the next reader of the file gets the error
                with contextlib.suppress(OSError), self.open(each.artifact.digest) as blob:
                    for offset in range(0, blob.size, _CHUNK):
                        blob.pread(_CHUNK, offset)
            self._keep_together(files)

        self._soon.submit(work)

    def _forget(self, file: RemoteFile, absent_s: int = 0) -> None:
        """Forget a file, so that it is looked up again; or treat it as absent for ``absent_s``
        seconds.
        """
        kind, digest = file.artifact.kind, file.artifact.digest
        with self._lock:
            its = self._found.get(file.build_id, {})
            if kind in its and its[kind].artifact.digest == digest:
                del its[kind]
            self._by_digest.pop(digest, None)
            self._forget_variants(file.build_id)
        self._absent.add(file.build_id, kind, absent_s)

    def _forget_oldest(self) -> None:
        build_id, ordinal = self._numbers.popitem(last=False)
        self._ids.pop(ordinal, None)
        for file in self._found.pop(build_id, {}).values():
            self._by_digest.pop(file.artifact.digest, None)
        self._forget_variants(build_id)

    def _forget_variants(self, build_id: bytes) -> None:
        for file in self._variants.pop(build_id, ()):
            self._by_digest.pop(file.artifact.digest, None)
            if (own := file.adopted_id) is not None:
                self._found.pop(own, None)

    # --- bytes -----------------------------------------------------------------------------------

    def has_digest(self, digest: Digest) -> bool:
        """Return True if a found file has this digest."""
        return digest in self._by_digest

    def open(self, digest: Digest) -> RemoteBlob:
        """Open a found file; makes no request. Raises OSError(ESTALE)."""
        with self._lock:
            file = self._by_digest.get(digest)
            if file is None:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            opened = self._open.get(digest)
            if opened is None:
                head = Head(file.artifact.size, {}, 0.0, file.etag)
                reader = self._reader(file.tier, file.key, head, file.described, digest)
                opened = self._open[digest] = _Open(reader)
            opened.users += 1
            self._open.move_to_end(digest)
            self._close_idle()
        return RemoteBlob(opened.reader, lambda: self._release(opened))

    def _release(self, opened: _Open) -> None:
        with self._lock:
            opened.users -= 1
            self._close_idle()

    def _close_idle(self) -> None:
        """Close the least recently used readers if there are too many."""
        kept = sum(each.reader.bytes_kept for each in self._open.values())
        for digest, each in list(self._open.items()):
            if len(self._open) <= _MOST_READERS and kept <= _MOST_KEPT:
                return
            if not each.users:
                kept -= each.reader.bytes_kept
                each.reader.close()
                del self._open[digest]

    def _reader(
        self, tier: Tier, key: str, head: Head, described: objects.Described, digest: Digest
    ) -> RangeReader:
        etag = head.etag

        def fetch(offset: int, size: int, fd: int) -> bytes:
            nonlocal etag
            if tier.is_down:
                raise OSError(errno.EIO, f"{tier.bucket.url} does not answer")
            try:
                with contextlib.suppress(FileNotFoundError):
                    return tier.bucket.get_range(key, offset, size, etag, fd)
                # A touch changes the tag of an object that was uploaded in parts.
                now = tier.bucket.head(key)
                if now is not None and _is_same(now, head.size, described):
                    etag = now.etag
                    with contextlib.suppress(FileNotFoundError):
                        return tier.bucket.get_range(key, offset, size, etag, fd)
            except RemoteError as error:
                tier.note_failure(error)
                raise OSError(errno.EIO, str(error)) from None
            file = self._by_digest.get(digest)
            if file is not None:
                self._forget(file)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        def done(reader: RangeReader) -> None:
            file = self._by_digest.get(digest)
            if file is not None:
                self._complete(file, reader)

        return RangeReader(head.size, fetch, done, self._directory)

    def _complete(self, file: RemoteFile, reader: RangeReader) -> None:
        """Verify a complete file, and pass it on to be kept. Variants are kept together."""
        if self._verify(file, reader) and not self._is_variant(file):
            self._keep(file, reader.fileno())

    def _is_variant(self, file: RemoteFile) -> bool:
        return file.artifact.kind is Kind.EXECUTABLE and bool(self.variants(file.build_id))

    def _verify(self, file: RemoteFile, reader: RangeReader) -> bool:
        """Return True if a complete file has the bytes that its host has claimed."""
        hasher = hashlib.sha256()
        for offset in range(0, reader.size, _CHUNK):
            hasher.update(reader.pread(_CHUNK, offset))
        if file.described.digest in (None, hasher.digest()):
            return True
        reader.failure = f"{file.tier.bucket.url}/{file.key} has other bytes than were pushed"
        _log.error("%s", reader.failure)
        self._forget(file, _WRONG_S)
        return False

    def _keep_together(self, files: Iterable[RemoteFile]) -> None:
        """Keep all executables of a build ID, or none if the bytes of one are missing."""
        with contextlib.ExitStack() as stack:
            whole: list[tuple[RemoteFile, RangeReader]] = []
            for file in files:
                with self._lock:
                    opened = self._open.get(file.artifact.digest)
                    if opened is None or not opened.reader.is_complete:
                        return
                    opened.users += 1
                stack.callback(self._release, opened)
                if not self._verify(file, opened.reader):
                    return
                whole.append((file, opened.reader))
            for file, reader in whole:
                self._keep(file, reader.fileno())

    # --- the filter ------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the filters, and load newer ones from time to time, in a thread."""
        with self._lock:
            if self._refreshing is not None:
                return
            self._refreshing = threading.Thread(
                target=self._refresh, name="buildidfs-filter", daemon=True
            )
        self._refreshing.start()

    def _refresh(self) -> None:
        due = 0.0
        while True:
            is_due = time.monotonic() >= due
            for tier in self._tiers:
                if is_due or tier.is_down:
                    tier.refresh()
            self._loaded.set()
            # Many hosts must not ask at the same moment.
            if is_due:
                due = time.monotonic() + self._refresh_s * random.uniform(0.8, 1.2)
            if self._ended.wait(min(_DOWN_S, self._refresh_s)):
                return

    def close(self) -> None:
        """End the thread, and close all files."""
        self._ended.set()
        self._soon.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for each in self._open.values():
                each.reader.close()
            self._open.clear()


def _name_of(tier: Tier, key: str, head: Head) -> Digest:
    """Return a name for the bytes of an object."""
    text = f"{tier.bucket.url}/{key} {head.size} {head.etag}"
    return Digest(hashlib.sha256(b"buildidfs: " + text.encode()).digest())


def _is_same(now: Head, size: int, described: objects.Described) -> bool:
    """Return True if an object still claims to have the same bytes."""
    digest = objects.described(now.metadata).digest
    return digest is not None and digest == described.digest and now.size == size


class _Costly(Exception):
    """Raised if describing a file takes too many requests."""


def _numbered(file: RemoteFile, ordinal: int) -> RemoteFile:
    """Return a copy of a file with ``ordinal`` as the number of its build ID."""
    return file._replace(artifact=msgspec.structs.replace(file.artifact, ordinal=ordinal))


def _described(
    reader: RangeReader, build_id: BuildId, *, with_aliases: bool
) -> tuple[ElfFile | Absence | None, tuple[Alias, ...]]:
    """Describe a file from its headers; None if that takes too much. Raises OSError.

    The aliases are those for which not all of the file has to be read.
    """
    before = reader.requests
    read = 0

    def read_at(offset: int, size: int) -> bytes:
        nonlocal read
        read += size
        if reader.requests - before > _MOST_REQUESTS or read > _MOST_DESCRIBED:
            raise _Costly
        return reader.read_at(offset, size)

    try:
        has = other_ids.describe(read_at, reader.size, build_id)
        if isinstance(has, Absence) or not with_aliases:
            return has, ()
        return has, other_ids.aliases(has, read_at, reader.size)
    except _Costly:
        return None, ()


def _fits(has: ElfFile | Absence, build_id: BuildId, kind: Kind) -> bool:
    """Return True if a file has the requested build ID, or is kallsyms, which has none."""
    if isinstance(has, Absence):
        return kind is Kind.KALLSYMS
    return build_id in (has.build_id, has.shared)


def _artifact(
    tier: Tier,
    kind: Kind,
    digest: Digest,
    head: Head,
    described: objects.Described,
    has: ElfFile | Absence,
) -> Artifact:
    known = None if isinstance(has, Absence) else has
    return Artifact(
        0,
        kind,
        VARIANT,
        digest,
        head.size,
        described.mtime_ns or int(head.modified * 1e9),
        0o400 if tier.private else (0o555 if described.executable else 0o444),
        0,
        0,
        described.quality if known is None else known.quality,
        min(described.trust, tier.trust) if described.digest is not None else tier.trust,
        described.first_seen_ns or int(head.modified * 1e9),
        () if known is None else known.scripts,
        0 if known is None else known.segments,
        False if known is None else bool(known.truncated),
        Standing.GIVEN,
    )
