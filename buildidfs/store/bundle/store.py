# SPDX-License-Identifier: Apache-2.0
"""A bundle as a store to be read: an index made from its manifest, and blobs where they are.

The index is in a directory of its own, which goes when the store is closed; those of processes that
were killed go when another is opened. Nothing that the manifest says of a blob is believed before
all of the blob was read: its digest, its build ID, and what of it gdb would run.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from buildidfs.errors import IntegrityError, StoreError
from buildidfs.formats import bundle_archive
from buildidfs.formats.elf import identify
from buildidfs.model import (
    EVERYBODY,
    OWNER,
    Absence,
    BuildId,
    ByteRange,
    Digest,
    FileIdentity,
    Kind,
    Origin,
    Quality,
    Sighting,
    Trust,
)
from buildidfs.store import layout
from buildidfs.store.blobs.files import BlobFile, Blobs, Staged, Standing
from buildidfs.store.blobs.verify import VerifiedBlobs
from buildidfs.store.index import environment
from buildidfs.store.records import NewCapture
from buildidfs.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.model import Access
    from buildidfs.store.bundle.archive import BundleFile, Part
    from buildidfs.store.index.environment import Environment

_PREFIX: Final = "buildidfs-bundle-"
_PLACES: Final = ("/dev/shm", None)
_BATCH: Final = 256


def captures(
    manifest: bundle_archive.Manifest,
    trust: Trust,
    access: Access,
    content: Callable[[Digest, int], Staged | Digest],
) -> Iterator[NewCapture]:
    """What the manifest says was captured; ``content`` gives the bytes of each.

    Only those who may read the bundle (``access``) may read what is in it. No place is believed
    more than ``trust``, whatever was made of it where the bundle comes from.
    """
    items = sorted(manifest.items, key=lambda item: (item.sha256, item.build_id))
    for (sha256, build_id), group in groupby(items, lambda item: (item.sha256, item.build_id)):
        same = list(group)
        first = same[0]
        digest = Digest(bytes.fromhex(sha256))
        held = content(digest, first.size)
        for sighting in sightings(first, trust, access):
            yield NewCapture(
                sighting,
                held,
                BuildId.from_hex(build_id),
                tuple(dict.fromkeys(item.kind_of for item in same)),
                Quality(first.quality),
                tuple(ByteRange(*extent) for extent in first.scripts),
                int(first.segments, 16),
                truncated=first.truncated,
            )


def sightings(item: bundle_archive.Item, trust: Trust, access: Access) -> list[Sighting]:
    """Where the bytes of an item were seen, the first of all first; ``access`` is to the bundle.

    Who may read them here is root, unless everybody could there: user IDs are those of that host.
    """
    public = item.mode & 0o444 == 0o444
    identity = FileIdentity(0, 0, item.size, item.mtime_ns, item.mtime_ns, 0o100555, 0, 0)
    places = item.places
    if not places or (public and not any(place.public for place in places)):
        places = (*places, bundle_archive.Place(f"/{item.sha256}", 0, 0, public=public))
    believed = Trust(min(item.trust, trust))
    found = []
    for place in sorted(places, key=lambda place: place.first_seen_ns):
        its, reach = access.within(identity, EVERYBODY if public and place.public else OWNER)
        origin = Origin(
            place.raw_path,
            its,
            container=place.container,
            host=place.host,
            trust=believed,
            scanner="bundle",
            reach=reach,
        )
        found.append(Sighting(origin, max(place.last_seen_ns, 0)))
    return found


class BundleStore(Store):
    """A store that is a bundle; see `open_bundle`. Nothing can be captured into it."""

    def __init__(self, path: bytes, file: BundleFile, access: Access, cleaned: int) -> None:
        env = environment.acquire(path, read_only=False)
        files = _BundleFiles(path, file)
        super().__init__(path, env, files, read_only=False)
        self.blobs = _BundleBlobs(env, files, file)
        self._file = file
        self._cleaned = cleaned
        staged: dict[Digest, Staged] = {}

        def content(digest: Digest, size: int) -> Staged:
            if digest not in staged:
                staged[digest] = Staged(-1, None)
                staged[digest].digest, staged[digest].size = digest, size
            return staged[digest]

        batch: list[NewCapture] = []
        for new in captures(file.manifest, Trust.CONTAINER, access, content):
            batch.append(new)
            if len(batch) == _BATCH:
                self.commit(batch)
                batch.clear()
        self.commit(batch)
        self.read_only = True

    def close(self) -> None:
        """Let go of the bundle, and remove its index; safe to call twice."""
        if self._env is not None:
            super().close()
            self._file.close()
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._cleaned)


class _BundleBlobs(VerifiedBlobs):
    """Opens the blobs of a bundle."""

    def __init__(self, environment: Environment, files: Blobs, bundle: BundleFile) -> None:
        super().__init__(environment, files)
        self._bundle = bundle
        self._right: dict[Digest, bool] = {}

    def open(self, digest: Digest) -> Part:
        """Open a blob; reads all of it the first time. Raises `IntegrityError`."""
        right = self._right.get(digest)
        if right is None:
            right = self._bundle.verify(digest) and self._is_described(digest)
            self._right[digest] = right
        if not right:
            raise IntegrityError(f"blob {digest} of the bundle is not what its manifest says")
        return self._bundle.open(digest)

    def open_now(self, digest: Digest) -> Part | None:
        """Open a blob; None if that would be the first time."""
        return self.open(digest) if digest in self._right else None

    def _is_described(self, digest: Digest) -> bool:
        part = self._bundle.open(digest)
        wanted = digest.hex()
        items = [item for item in self._bundle.manifest.items if item.sha256 == wanted]
        return all(_fits(item, part) for item in items)


def _fits(item: bundle_archive.Item, part: Part) -> bool:
    """Whether a file is what an item says, above all what gdb would run of it.

    What is not served as an ELF file need not be one, and one without a build ID has that of the
    item.
    """
    build_id = BuildId.from_hex(item.build_id)
    found = identify.describe(part.read_at, part.size)
    if found is Absence.NO_BUILD_ID:
        head = part.read_at(0, min(part.size, identify.HEAD_SIZE))
        found = identify.classify(build_id, head, part.read_at, part.size)
    if isinstance(found, Absence):
        return item.kind_of is Kind.KALLSYMS
    scripts = tuple((extent.offset, extent.size) for extent in found.scripts)
    return found.build_id == build_id and scripts == item.scripts


class _BundleFiles(Blobs):
    """The blobs directory of a store that has its blobs elsewhere."""

    def __init__(self, root: bytes, file: BundleFile) -> None:
        super().__init__(root, writable=True)
        self._file = file

    def open(self, digest: Digest) -> int:
        """There is none."""
        raise StoreError(f"blob {digest} is in a bundle")

    def size(self, digest: Digest) -> int | None:
        """Size of the content."""
        return self._file.size(digest)

    def file(self, digest: Digest) -> BlobFile | None:
        """As if it had one."""
        size = self._file.size(digest)
        return None if size is None else BlobFile(size, 0, 0)

    def keep_origin(self, digest: Digest, data: bytes) -> None:
        """The manifest has it."""

    def seal(
        self,
        batch: Iterable[Staged],
        standing: Callable[[Staged], Standing],
        origin: Callable[[Digest], bytes] = lambda digest: b"",
    ) -> set[Digest]:
        """Everything is where it is to be."""
        return set()


def open_bundle(file: BundleFile, access: Access) -> BundleStore:
    """A store with what is in a bundle, which it closes, for those with ``access`` to that.

    Raises `StoreError`, `IntegrityError`.
    """
    try:
        _sweep()
        place = next(place for place in _PLACES if place is None or os.access(place, os.W_OK))
        directory = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
        # Locked as long as it is used: who finds it without, may remove it.
        cleaned = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(cleaned, fcntl.LOCK_EX)
        path = os.fsencode(directory)
        layout.make(path, None)
        return BundleStore(path, file, access, cleaned)
    except OSError as error:
        raise StoreError(f"no place for the index of a bundle: {error.strerror}") from error


def _sweep() -> None:
    """Remove what processes that were killed have left."""
    for place in _PLACES:
        for path in Path(place or tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                if os.fstat(fd).st_uid == os.geteuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            except BlockingIOError:
                continue
            finally:
                os.close(fd)
