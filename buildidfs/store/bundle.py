# SPDX-License-Identifier: Apache-2.0
"""Bundles: archives (`formats.bundle_archive`) that can be read as a store.

`write_bundle` writes a bundle front to back, `BundleFile` reads it at any offset. `BundleStore` is
a store whose index is made from the manifest, in a temporary directory. The directory is removed
when the store is closed; if the process was killed, the next process that opens a bundle removes
it. The statements of the manifest about a blob (digest, build ID, gdb scripts) are believed only
after all of the blob was read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from buildidfs.errors import IntegrityError, StoreError, UsageError
from buildidfs.formats import bundle_archive
from buildidfs.formats.container import oci
from buildidfs.formats.elf import other_ids
from buildidfs.linux import inodes
from buildidfs.linux.file_ops import Fd, closing_fd, on_error, read_fully, write_fully
from buildidfs.model import (
    EVERYBODY,
    NO_NAMES,
    OWNER,
    QUALITIES,
    Absence,
    BuildId,
    ByteRange,
    ContainerNames,
    Digest,
    FileIdentity,
    Kind,
    Origin,
    Sighting,
    Trust,
)
from buildidfs.names import printable
from buildidfs.store.blobs import files
from buildidfs.store.blobs.files import BlobFile, Blobs, BlobState, Staged
from buildidfs.store.blobs.verify import Blob, VerifiedBlobs
from buildidfs.store.blobs.zstd import CompressedBlob, FrameWriter
from buildidfs.store.index import environment
from buildidfs.store.store import Store
from buildidfs.store.values import NewCapture

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from buildidfs.model import Access
    from buildidfs.store.index.environment import Environment

_CHUNK: Final = 1 << 20


def write_bundle(
    store: Store,
    manifest: bundle_archive.Manifest,
    inputs: Sequence[int],
    fd: int,
    *,
    sources: int = -1,
    resume: bool = False,
    progress: Callable[[int], None] = lambda size: None,
) -> int:
    """Write a bundle to a file or pipe; return the number of bytes kept from an earlier attempt.

    ``inputs`` and ``sources`` are descriptors of files whose sizes are in the manifest.
    ``progress`` is called with the size of each chunk of content that was written. Each blob is
    verified while it is copied. Raises OSError of the output, `IntegrityError`, `StoreError`.
    """
    writer = FrameWriter(fd, resume=resume)
    text = bundle_archive.encode(manifest)
    blobs, files, listed = bundle_archive.members(manifest, len(text))
    writer.write(bundle_archive.header(bundle_archive.MANIFEST, len(text)))
    writer.write(text.ljust(bundle_archive.padded(len(text)), b"\0"))
    for digest, member in blobs.items():
        with store.open_blob(digest) as blob:
            if _copy(writer, member, blob.pread, progress) != digest:
                raise IntegrityError(f"blob {digest} has other bytes: run buildidfs check --repair")
    for member, source in zip(files, inputs, strict=True):
        _copy(writer, member, partial(read_fully, source), progress)
    if listed is not None:
        _copy(writer, listed, partial(read_fully, sources), progress)
    writer.write(bundle_archive.links(manifest) + bundle_archive.end())
    writer.finish()
    return writer.kept


def _copy(
    writer: FrameWriter,
    member: bundle_archive.BundleMember,
    pread: Callable[[int, int], bytes],
    progress: Callable[[int], None],
) -> Digest:
    writer.write(bundle_archive.header(member.name, member.size))
    hasher = files.sha256()
    offset = 0
    while offset < member.size:
        chunk = pread(min(_CHUNK, member.size - offset), offset)
        if not chunk:
            raise IntegrityError(
                f"{printable(member.name)} has become shorter while it was bundled"
            )
        hasher.update(chunk)
        writer.write(chunk)
        progress(len(chunk))
        offset += len(chunk)
    writer.write(bytes(bundle_archive.padded(member.size) - member.size))
    return Digest(hasher.digest())


class BundledBlob(Blob):
    """A blob within a bundle."""

    __slots__ = ("_bundle", "_digest", "_member")

    def __init__(
        self, bundle: BundleFile, digest: Digest, member: bundle_archive.BundleMember
    ) -> None:
        self.fd = -1
        self.is_plain = False
        self.size = member.size
        self._bundle = bundle
        self._copy = None
        self._digest = digest
        self._member = member

    def pread(self, size: int, offset: int, /) -> bytes:
        """Return up to ``size`` bytes from ``offset``. Raises OSError, `IntegrityError`."""
        return self._bundle.pread(self._member, size, offset)

    def _copy_to(self, file: BinaryIO) -> None:
        self._bundle.copy(self._digest, file.fileno())

    def close(self) -> None:
        """Close a temporary copy; the bundle stays open."""
        if self._copy is not None:
            self._copy.close()
            self._copy = None


class BundleFile:
    """An open bundle; a context manager. ``manifest`` is a claim until `verify` has checked it."""

    def __init__(self, path: str | bytes | os.PathLike[str]) -> None:
        """Raises `UsageError` if there is no such file, `IntegrityError` if it is not a bundle."""
        self._shown = shown = printable(os.fsencode(path))
        try:
            fd = inodes.open_regular(path)
        except OSError as error:
            raise UsageError(f"cannot read {shown}: {error.strerror}") from error
        try:
            self._content = CompressedBlob(fd)
        except IntegrityError as error:
            raise IntegrityError(f"{shown} is not a bundle, or was cut off: {error}") from error
        with on_error(self.close):
            try:
                packed = os.fstat(fd).st_size
                bundle_archive.check_content(self._content.size, packed)
                head = self._content.pread(bundle_archive.BLOCK, 0)
                size = bundle_archive.manifest_size(head, packed)
                text = self._content.pread(size, bundle_archive.BLOCK)
                if len(text) != size:
                    raise IntegrityError("its manifest was cut off")
                self.manifest = bundle_archive.decode(text)
                self._blobs, inputs, self._sources = bundle_archive.members(self.manifest, size)
                last = [*self._blobs.values(), *inputs, *filter(None, [self._sources])][-1:]
                if any(each.offset + each.size > self._content.size for each in last):
                    raise IntegrityError("it was cut off")
            except IntegrityError as error:
                raise IntegrityError(f"{shown}: {error}") from error

    def __enter__(self) -> BundleFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self._content.fileno()

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._content.close()

    def size(self, digest: Digest) -> int | None:
        """Return the size of a blob in bytes; None if there is none."""
        member = self._blobs.get(digest)
        return None if member is None else member.size

    def open(self, digest: Digest) -> BundledBlob:
        """Return a blob; raises `IntegrityError` if there is none."""
        member = self._blobs.get(digest)
        if member is None:
            raise IntegrityError(f"the bundle has no blob {digest}")
        return BundledBlob(self, digest, member)

    def pread(self, member: bundle_archive.BundleMember, size: int, offset: int) -> bytes:
        """Return up to ``size`` bytes of a member from ``offset``. Raises OSError,
        `IntegrityError`.
        """
        size = max(0, min(size, member.size - offset))
        return self._content.pread(size, member.offset + offset)

    def copy(self, digest: Digest, fd: int) -> None:
        """Write a blob to a file. Raises `IntegrityError` if it has other bytes."""
        with self._named():
            part = self.open(digest)
            hasher = files.sha256()
            for chunk in part.chunks():
                hasher.update(chunk)
                write_fully(fd, chunk)
            if hasher.digest() != digest:
                raise IntegrityError(f"blob {digest} of the bundle has other bytes")

    def verify(self, digest: Digest) -> bool:
        """Return True if a blob has the bytes of its digest. Reads all of the blob."""
        with contextlib.suppress(IntegrityError):
            return self.open(digest).computed() == digest
        return False

    def check_sources(self) -> None:
        """Read the list of source files, if there is one. Raises `IntegrityError`."""
        source_file = self.manifest.sources
        if source_file is None or self._sources is None:
            return
        with self._named():
            digest = Digest(bytes.fromhex(source_file.sha256))
            if BundledBlob(self, digest, self._sources).computed() != digest:
                raise IntegrityError("the source list of the bundle has other bytes")

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Add the name of the bundle to errors about its content."""
        try:
            yield
        except IntegrityError as error:
            raise IntegrityError(f"{self._shown}: {error}") from error


_PREFIX: Final = "buildidfs-bundle-"
_PLACES: Final = ("/dev/shm", None)
_BATCH: Final = 256


def captures(
    manifest: bundle_archive.Manifest,
    trust: Trust,
    access: Access,
    content: Callable[[Digest, int], Staged | Digest],
) -> Iterator[NewCapture]:
    """Yield the captures in a manifest; ``content`` returns the bytes of each.

    Only users who may read the bundle (``access``) may read the files in it. No place gets more
    trust than ``trust``, even if the host that made the bundle gave it more.
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
                QUALITIES[first.quality],
                tuple(ByteRange(*extent) for extent in first.scripts),
                int(first.segments, 16),
                truncated=first.truncated,
            )


def sightings(item: bundle_archive.Item, trust: Trust, access: Access) -> list[Sighting]:
    """Return the places where the bytes of an item were seen, earliest first; ``access`` is to the
    bundle.

    User IDs are those of the other host. So on this host only root may read the bytes, unless all
    users could read them there.
    """
    public = item.mode & 0o444 == 0o444
    identity = FileIdentity(0, 0, item.size, item.mtime_ns, item.mtime_ns, 0o100555, 0, 0)
    places = item.places
    if not places or (public and not any(place.public for place in places)):
        places = (*places, bundle_archive.BundlePlace(f"/{item.sha256}", 0, 0, public=public))
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


def names_of_containers(manifest: bundle_archive.Manifest) -> Callable[[Origin], ContainerNames]:
    """Return a function that returns the names in a bundle for the container of an origin."""
    known = {
        each.label: ContainerNames(
            oci.shown_name(each.name),
            oci.shown_name(each.pod),
            oci.shown_name(each.namespace),
            "\n".join(map(oci.shown_name, each.image.split("\n", 1))),
        )
        for each in manifest.containers
    }
    return lambda origin: known.get(origin.container, NO_NAMES)


class BundleStore(Store):
    """A store that is a bundle; see `open_bundle`. It accepts no captures."""

    def __init__(self, path: bytes, file: BundleFile, access: Access, cleaned: Fd) -> None:
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

        self.name_containers(names_of_containers(file.manifest))
        batch: list[NewCapture] = []
        for new in captures(file.manifest, Trust.CONTAINER, access, content):
            batch.append(new)
            if len(batch) == _BATCH:
                self.commit(batch)
                batch.clear()
        self.commit(batch)
        self.read_only = True

    def close(self) -> None:
        """Close the bundle and remove its index; safe to call twice."""
        if self._env is not None:
            super().close()
            self._file.close()
            shutil.rmtree(self.path, ignore_errors=True)
            self._cleaned.close()


class _BundleBlobs(VerifiedBlobs):
    """Opens the blobs of a bundle."""

    def __init__(self, environment: Environment, files: Blobs, bundle: BundleFile) -> None:
        super().__init__(environment, files)
        self._bundle = bundle
        self._right: dict[Digest, bool] = {}

    def open(self, digest: Digest) -> BundledBlob:
        """Open a blob; the first time, read all of its bytes to verify them. Raises
        `IntegrityError`.
        """
        right = self._right.get(digest)
        if right is None:
            right = self._bundle.verify(digest) and self._is_described(digest)
            self._right[digest] = right
        if not right:
            raise IntegrityError(f"blob {digest} of the bundle is not what its manifest says")
        return self._bundle.open(digest)

    def open_now(self, digest: Digest) -> BundledBlob | None:
        """Open a blob; return None if it was not opened before."""
        return self.open(digest) if digest in self._right else None

    def _is_described(self, digest: Digest) -> bool:
        part = self._bundle.open(digest)
        wanted = digest.hex()
        items = [item for item in self._bundle.manifest.items if item.sha256 == wanted]
        return all(_fits(item, part) for item in items)


def _fits(item: bundle_archive.Item, part: BundledBlob) -> bool:
    """Return True if a file matches its item, above all in the scripts that gdb would run.

    An artifact that is not served as an ELF file may be any file. An ELF file without a build ID
    gets the build ID of the item.
    """
    build_id = BuildId.from_hex(item.build_id)
    found = other_ids.describe(part.read_at, part.size, build_id)
    if isinstance(found, Absence):
        return item.kind_of is Kind.KALLSYMS
    scripts = tuple((extent.offset, extent.size) for extent in found.scripts)
    return build_id in (found.build_id, found.shared) and scripts == item.scripts


class _BundleFiles(Blobs):
    """Stands in for the directory of blobs in a store whose blobs are elsewhere."""

    def __init__(self, root: bytes, file: BundleFile) -> None:
        super().__init__(root, writable=True)
        self._file = file

    def open(self, digest: Digest) -> int:
        """Raise `StoreError`: the blob has no file of its own."""
        raise StoreError(f"blob {digest} is in a bundle")

    def size(self, digest: Digest) -> int | None:
        """Return the size of the content."""
        return self._file.size(digest)

    def file(self, digest: Digest) -> BlobFile | None:
        """Return an invented file of a blob, so that rows can refer to the blob."""
        size = self._file.size(digest)
        return None if size is None else BlobFile(size, 0, 0)

    def keep_origin(self, digest: Digest, data: bytes) -> None:
        """Do nothing: the manifest has the origin."""

    def seal(
        self,
        batch: Iterable[Staged],
        standing: Callable[[Staged], BlobState],
        origin: Callable[[Digest], bytes] = lambda digest: b"",
    ) -> set[Digest]:
        """Do nothing: all bytes are in the bundle."""
        return set()


def open_bundle(file: BundleFile, access: Access) -> BundleStore:
    """Open a bundle as a store for the users with ``access`` to the bundle.

    The store takes over ``file`` and closes it. Raises `StoreError`, `IntegrityError`.
    """
    try:
        _sweep()
        place = next(place for place in _PLACES if place is None or os.access(place, os.W_OK))
        directory = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
        # The directory is locked while in use: a process that finds it unlocked may remove it.
        cleaned = Fd(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        fcntl.flock(cleaned, fcntl.LOCK_EX)
        path = os.fsencode(directory)
        environment.make(path)
        return BundleStore(path, file, access, cleaned)
    except OSError as error:
        raise StoreError(f"no place for the index of a bundle: {error.strerror}") from error


def _sweep() -> None:
    """Remove the directories that killed processes have left."""
    for place in _PLACES:
        for path in Path(place or tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            with contextlib.suppress(OSError), closing_fd(os.open(path, flags)) as fd:
                if os.fstat(fd).st_uid == os.geteuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
