# SPDX-License-Identifier: Apache-2.0
"""Bundles as files: written front to back, read from anywhere (`formats.bundle_archive`)."""

from __future__ import annotations

import contextlib
import os
import stat
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, Final

from buildidfs.errors import IntegrityError, UsageError
from buildidfs.formats import bundle_archive
from buildidfs.model import Digest
from buildidfs.store.blobs import hashing
from buildidfs.store.blobs.files import read_fully, write_fully
from buildidfs.store.blobs.verify import Blob
from buildidfs.store.blobs.zstd import CompressedBlob, FrameWriter
from buildidfs.store.errors import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from buildidfs.store.store import Store

_CHUNK: Final = 1 << 20


def write(
    store: Store,
    manifest: bundle_archive.Manifest,
    inputs: Sequence[int],
    fd: int,
    *,
    sources: int = -1,
    resume: bool = False,
    progress: Callable[[int], None] = lambda size: None,
) -> int:
    """Write a bundle to a file or pipe; returns how many bytes of an earlier attempt were kept.

    ``inputs`` and ``sources`` are descriptors of the files whose sizes the manifest tells.
    ``progress`` hears of bytes of content. Every blob is verified on its way. Raises OSError of the
    output, `IntegrityError`, `StoreError`.
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
    writer.write(bundle_archive.end())
    writer.finish()
    return writer.kept


def _copy(
    writer: FrameWriter,
    member: bundle_archive.Member,
    pread: Callable[[int, int], bytes],
    progress: Callable[[int], None],
) -> Digest:
    writer.write(bundle_archive.header(member.name, member.size))
    hasher = hashing.sha256()
    offset = 0
    while offset < member.size:
        chunk = pread(min(_CHUNK, member.size - offset), offset)
        if not chunk:
            raise IntegrityError(f"{show(member.name)} has become shorter while it was bundled")
        hasher.update(chunk)
        writer.write(chunk)
        progress(len(chunk))
        offset += len(chunk)
    writer.write(bytes(bundle_archive.padded(member.size) - member.size))
    return Digest(hasher.digest())


class Part(Blob):
    """A blob within a bundle."""

    __slots__ = ("_bundle", "_digest", "_member")

    def __init__(self, bundle: BundleFile, digest: Digest, member: bundle_archive.Member) -> None:
        self.fd = -1
        self.is_plain = False
        self.size = member.size
        self._bundle = bundle
        self._copy = None
        self._digest = digest
        self._member = member

    def pread(self, size: int, offset: int, /) -> bytes:
        """Up to ``size`` bytes from ``offset``. Raises OSError, `IntegrityError`."""
        return self._bundle.pread(self._member, size, offset)

    def _copy_to(self, file: BinaryIO) -> None:
        self._bundle.copy(self._digest, file.fileno())

    def close(self) -> None:
        """Let go of a copy; the bundle stays open."""
        if self._copy is not None:
            self._copy.close()
            self._copy = None


class BundleFile:
    """An open bundle; a context manager. ``manifest`` is what it says, `verify` what is true."""

    def __init__(self, path: str | bytes | os.PathLike[str]) -> None:
        """Raises `UsageError` where there is no such file, `IntegrityError` for no bundle."""
        self._shown = shown = show(os.fsencode(path))
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"cannot read {shown}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise UsageError(f"cannot read {shown}: a bundle is a regular file")
        try:
            self._content = CompressedBlob(fd)
        except IntegrityError as error:
            raise IntegrityError(f"{shown} is not a bundle, or was cut off: {error}") from error
        try:
            size = bundle_archive.manifest_size(self._content.pread(bundle_archive.BLOCK, 0))
            text = self._content.pread(size, bundle_archive.BLOCK)
            if len(text) != size:
                raise IntegrityError("its manifest was cut off")
            self.manifest = bundle_archive.decode(text)
            self._blobs, inputs, self._sources = bundle_archive.members(self.manifest, size)
            last = [*self._blobs.values(), *inputs, *filter(None, [self._sources])][-1:]
            if any(each.offset + each.size > self._content.size for each in last):
                raise IntegrityError("it was cut off")
        except IntegrityError as error:
            self.close()
            raise IntegrityError(f"{shown}: {error}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> BundleFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The descriptor of the file."""
        return self._content.fileno()

    def close(self) -> None:
        """Let go of the file; safe to call twice."""
        self._content.close()

    def size(self, digest: Digest) -> int | None:
        """Size of a blob in bytes; None if there is none."""
        member = self._blobs.get(digest)
        return None if member is None else member.size

    def open(self, digest: Digest) -> Part:
        """A blob; raises `IntegrityError` if there is none."""
        member = self._blobs.get(digest)
        if member is None:
            raise IntegrityError(f"the bundle has no blob {digest}")
        return Part(self, digest, member)

    def pread(self, member: bundle_archive.Member, size: int, offset: int) -> bytes:
        """Up to ``size`` bytes of a member from ``offset``. Raises OSError, `IntegrityError`."""
        size = max(0, min(size, member.size - offset))
        return self._content.pread(size, member.offset + offset)

    def copy(self, digest: Digest, fd: int) -> None:
        """Write a blob to a file, and raise `IntegrityError` if it has other bytes."""
        with self._named():
            part = self.open(digest)
            hasher = hashing.sha256()
            for chunk in part.chunks():
                hasher.update(chunk)
                write_fully(fd, chunk)
            if hasher.digest() != digest:
                raise IntegrityError(f"blob {digest} of the bundle has other bytes")

    def verify(self, digest: Digest) -> bool:
        """Whether a blob has the bytes of its digest; reads all of it."""
        with contextlib.suppress(IntegrityError):
            return self.open(digest).computed() == digest
        return False

    def check_sources(self) -> None:
        """Read the list of source files, if there is one. Raises `IntegrityError`."""
        said = self.manifest.sources
        if said is None or self._sources is None:
            return
        with self._named():
            digest = Digest(bytes.fromhex(said.sha256))
            if Part(self, digest, self._sources).computed() != digest:
                raise IntegrityError("the source list of the bundle has other bytes")

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Say of which file it is that something is wrong with it."""
        try:
            yield
        except IntegrityError as error:
            raise IntegrityError(f"{self._shown}: {error}") from error
