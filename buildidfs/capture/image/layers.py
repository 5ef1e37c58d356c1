# SPDX-License-Identifier: Apache-2.0
"""The layers of images: archives with a digest to verify, and directories of an overlay."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import time
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

from buildidfs.capture import base, walk
from buildidfs.capture.archive.elf_members import Closed, Members
from buildidfs.capture.archive.plain_files import PlainFile, PlainFiles, is_readable
from buildidfs.capture.archive.stream import PlainStream, Region, unpacked
from buildidfs.capture.base import Known, PinnedFile, Resighting, Unreadable
from buildidfs.capture.origin.builder import access_of, own_root
from buildidfs.capture.origin.path_access import SCAN_KEEP_S, Reach
from buildidfs.errors import IntegrityError
from buildidfs.formats.archive import tar
from buildidfs.formats.archive.common import Damaged, Type, installed
from buildidfs.formats.budget import STEP_BYTES
from buildidfs.formats.container import oci
from buildidfs.formats.elf.header import MAGIC
from buildidfs.linux import file_ops, inodes
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import EVERYBODY, Absence, Sighting, Trust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from buildidfs.capture.archive.elf_members import MemberSpool, Viewers
    from buildidfs.capture.archive.plain_files import IsWanted
    from buildidfs.capture.archive.stream import ArchiveLimits
    from buildidfs.capture.base import Found, Memo
    from buildidfs.formats.budget import Budget
    from buildidfs.formats.container.oci import LayerNames
    from buildidfs.model import Access, FileIdentity

    _ReachOf = Callable[[walk.WalkedFile, FileIdentity], int]

# The kernel's names, and those of mounts in a user namespace (overlayfs.rst, "User xattr").
_OVERLAY: Final = (b"trusted.overlay.", b"user.overlay.")
_NO_ATTRIBUTE: Final = frozenset((errno.ENODATA, errno.EOPNOTSUPP, errno.EPERM))

_Item = TypeVar("_Item")


class Context:
    """The parameters for reading any layer."""

    def __init__(self, memo: Memo, spool: MemberSpool, limits: ArchiveLimits) -> None:
        self.memo = memo
        self.spool = spool
        self.limits = limits


class Layer(Protocol):
    """One layer. While two layers are open, equal values of ``key`` mean that they are the same
    layer.

    ``name`` is for messages.
    """

    key: bytes
    name: str

    def verify(self, limits: ArchiveLimits) -> None:
        """Read the whole layer and verify its digest; a directory only has to exist.

        Raises `IntegrityError` if the digest differs, OSError, `Damaged`.
        """

    def access(self) -> Access:
        """Return the users who may read the layer; raises OSError."""

    def found(self, names: LayerNames, viewers: Viewers, context: Context) -> Iterator[Found]:
        """Yield the ELF files that a viewer sees; ``names`` is called with every path.

        Raises OSError, `Damaged`, `IntegrityError`, `elf_members.Ended`.
        """

    def plain_files(
        self, names: LayerNames, is_wanted: IsWanted, context: Context
    ) -> Iterator[PlainFile | Unreadable]:
        """Yield the files, hidden or not; ``names`` is called with every path.

        Raises OSError, `Damaged`, `IntegrityError`.
        """


class TarLayer:
    """An archive with the digest ``digest``: that of its decompressed content if ``plain``, else
    that of the archive itself.
    """

    def __init__(
        self, archive: Files, path: bytes, digest: str, *, size: int | None = None, plain: bool
    ) -> None:
        self.key = b"%d:%s:%d" % (id(archive), digest.encode(), -1 if size is None else size)
        self.name = digest
        self._files = archive
        self._path = path
        self._size = size
        self._plain = plain
        self._verified: FileIdentity | None = None

    def verify(self, limits: ArchiveLimits) -> None:
        with self._files.open(self._path) as region:
            self._verified = inodes.identity(region.fd)
            if self._size is not None and region.size != self._size:
                raise IntegrityError(
                    f"layer {self.name} has {region.size} bytes and not {self._size}"
                )
            hasher = oci.hasher(self.name)
            for piece in self._content(region, limits):
                hasher.update(piece)
        if hasher.hexdigest() != self.name.partition(":")[2]:
            raise IntegrityError(f"layer {self.name} does not have that digest")

    def access(self) -> Access:
        return self._files.access(self._path)

    def _content(self, region: Region, limits: ArchiveLimits) -> Iterator[bytes | memoryview]:
        if self._plain:
            return unpacked(region, limits.unpacked_bytes).all()
        return region.chunks()

    def found(self, names: LayerNames, viewers: Viewers, context: Context) -> Iterator[Found]:
        """See `Layer`; `verify` must have been called before."""
        name = self.name.encode()
        with self._files.open(self._path) as region:
            members = Members(
                b"layer:" + name, name, viewers, names.note,
                memo=context.memo, spool=context.spool, limits=context.limits,
                access=self.access(),
            )  # fmt: skip
            stream = unpacked(region, context.limits.unpacked_bytes)
            yield from members.scan(tar.members(stream), stream)
            if members.missed:
                blob = unpacked(region, context.limits.unpacked_bytes)
                yield from members.scan(tar.members(blob), blob, members.missed)
            self._require_unchanged(region)

    def plain_files(
        self, names: LayerNames, is_wanted: IsWanted, context: Context
    ) -> Iterator[PlainFile | Unreadable]:
        """See `Layer`; `verify` must have been called before."""
        with self._files.open(self._path) as region:
            files = PlainFiles(is_wanted, context.limits, self.access(), names.note)
            stream = unpacked(region, context.limits.unpacked_bytes)
            yield from files.read(tar.members(stream), stream)
            if files.missed:
                blob = unpacked(region, context.limits.unpacked_bytes)
                yield from files.later(tar.members(blob), blob)
            self._require_unchanged(region)

    def _require_unchanged(self, region: Region) -> None:
        """Raise `IntegrityError` if the archive is not the one that was verified."""
        if inodes.identity(region.fd) != self._verified:
            raise IntegrityError(f"layer {self.name} was changed while it was read")


class DirectoryLayer:
    """A directory that is or was part of an overlay: ``path`` below the root ``root_fd``.

    Its bytes cannot be checked. See ``overlayfs.rst`` of the kernel.
    """

    def __init__(self, root_fd: int, path: bytes, name: str) -> None:
        self.key = b"%d:%s" % (root_fd, path)
        self.name = name
        self._root_fd = root_fd
        self._path = path

    def verify(self, limits: ArchiveLimits) -> None:
        """Check that the directory exists; its bytes cannot be verified. Raises OSError."""
        os.close(self._open())

    def access(self) -> Access:
        with closing_fd(self._open()) as fd:
            return access_of(fd)

    def _open(self) -> int:
        return inodes.open_in_root(self._root_fd, self._path, os.O_PATH | os.O_DIRECTORY)

    def found(self, names: LayerNames, viewers: Viewers, context: Context) -> Iterator[Found]:
        def look(file: walk.WalkedFile, reach: _ReachOf) -> Iterator[Found]:
            return self._elf(file, viewers, context, reach)

        return self._walk(names, look)

    def plain_files(
        self, names: LayerNames, is_wanted: IsWanted, context: Context
    ) -> Iterator[PlainFile | Unreadable]:
        def look(file: walk.WalkedFile, reach: _ReachOf) -> Iterator[PlainFile | Unreadable]:
            size = os.fstat(file.fd).st_size
            if not is_wanted(file.path, size):
                yield PlainFile(file.path, size)
                return
            identity = inodes.identity(file.fd)
            is_public = is_readable(identity.mode) and reach(file, identity) == EVERYBODY
            data = file_ops.read_fully(file.fd, size, 0) if is_public else None
            yield PlainFile(file.path, size, data, not is_public)

        return self._walk(names, look)

    def _walk(
        self,
        names: LayerNames,
        look: Callable[[walk.WalkedFile, _ReachOf], Iterator[_Item | Unreadable]],
    ) -> Iterator[_Item | Unreadable]:
        """Yield the items of each file in this layer; ``names`` is called with every path."""
        observer = _Observer(names)
        finder = Reach(keep_s=SCAN_KEEP_S)

        def reach(file: walk.WalkedFile, identity: FileIdentity) -> int:
            inside = observer.closed.reach(file.path, identity.uid)
            # the directory lies on the host, so users of the host may reach it there
            with own_root() as root:
                return inside & finder.of(file.fd, identity, root)

        with closing_fd(self._open()) as start_fd:
            for file in walk.files(start_fd, b"/", walk.Mounts(), observer):
                if isinstance(file, Unreadable):
                    names.note(file.path, directory=False)
                    yield self._unreadable(file)
                    continue
                with closing_fd(file.fd):
                    try:
                        if _is_here(file, names):
                            yield from look(file, reach)
                    except OSError as error:
                        yield self._unreadable(Unreadable.of(file.path, error))
        for path in observer.renamed:
            reason = "a directory that was renamed: what is below it was not looked at"
            yield self._unreadable(Unreadable(path, reason))

    def _elf(
        self, file: walk.WalkedFile, viewers: Viewers, context: Context, reach: _ReachOf
    ) -> Iterator[Found]:
        whose = viewers(file.path)
        if not whose or os.pread(file.fd, len(MAGIC), 0) != MAGIC:
            return
        identity = inodes.identity(file.fd)
        now, reached = time.time_ns(), reach(file, identity)
        sightings = [Sighting(each.origin(file.path, identity, reached), now) for each in whose]
        known = context.memo.recall(identity)
        if known is None:
            answer = base.identify(file.fd)
            known = Known(absence=answer) if isinstance(answer, Absence) else Known(answer)
            if known.build_id is not None:
                # Without a scope the memo would not recognise the file in the next scan.
                count = 1 if identity.scope is not None else len(sightings)
                for sighting in sightings[:count]:
                    yield PinnedFile(sighting, os.dup(file.fd))
                del sightings[:count]
        for sighting in sightings:
            yield Resighting(sighting, known)

    def _unreadable(self, item: Unreadable) -> Unreadable:
        return Unreadable(self._path + b"!" + item.path, item.reason, item.errno)


def _is_here(file: walk.WalkedFile, names: LayerNames) -> bool:
    """Return True if the bytes of a file are in this layer, not below it; call ``names`` with its
    path.
    """
    head = os.pread(file.fd, len(MAGIC), 0)
    if not head and _attribute(file.fd, b"whiteout") is not None:
        names.remove(file.path)
        return False
    if not any(head) and _attribute(file.fd, b"metacopy") is not None:
        return False  # its bytes are in the layer below, which yields it
    return names.note(file.path, directory=False)


class _Observer:
    """Observes the files that are not regular: `walk.DirectoryObserver`."""

    def __init__(self, names: LayerNames) -> None:
        self._names = names
        self.closed = Closed()
        self.renamed: list[bytes] = []

    def directory(self, path: bytes, fd: int) -> None:
        """Record the permissions and the overlay attributes of a directory."""
        path = installed(path)
        status = os.fstat(fd)
        self.closed.note(path, status.st_mode & 0o7777, status.st_uid)
        if _attribute(fd, b"opaque") == b"y":
            self._names.clear(path)
        if _attribute(fd, b"redirect") is not None:
            self._names.clear(path)
            self.renamed.append(path)

    def entry(self, path: bytes, entry: os.DirEntry[str]) -> None:
        """Record directories, links and whiteouts."""
        if entry.is_dir(follow_symlinks=False):
            self._names.note(path, directory=True)
        elif not entry.is_file(follow_symlinks=False):
            # A device is a whiteout if its number is 0/0; any other one hides the file below, too.
            self._names.remove(path)


def _attribute(fd: int, name: bytes) -> bytes | None:
    """Return an overlay attribute of an open file or directory; None if there is none."""
    for prefix in _OVERLAY:
        try:
            return os.getxattr(fd, prefix + name)
        except OSError as error:
            if error.errno not in _NO_ATTRIBUTE:
                raise
    return None


class LayeredImage(msgspec.Struct, frozen=True):
    """An image, or a container with its writable layer; ``layers`` begins with the uppermost.

    A user may refer to the image by one of ``names`` or ``digests``; the first digest is that of
    the image itself. ``label`` and ``trust`` are for `model.Origin`. ``error`` is the reason if it
    has no layers.
    """

    label: str
    digests: tuple[str, ...]
    names: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()
    trust: Trust = Trust.PACKAGE
    error: IntegrityError | Damaged | OSError | None = None


def label(names: Sequence[str], digest: str) -> str:
    """Return the label of an image: the first of its names, or its digest."""
    return f"image:{oci.shown_name(names[0]) if names else oci.short(digest)}"


_LINKS_MAX: Final = 8
_MEMBERS_MAX: Final = 1 << 20


class Files(Protocol):
    """Files by their path, below one directory or in one archive. An image chooses the path, so no
    path may lead out of there.
    """

    def open(self, path: bytes) -> AbstractContextManager[Region]:
        """Return the bytes of a file; raises OSError, FileNotFoundError if there is none."""

    def access(self, path: bytes) -> Access:
        """Return the users who may read a file; raises OSError."""


class DirectoryFiles:
    """Files below a directory; the caller closes its descriptor."""

    def __init__(self, root_fd: int) -> None:
        self.root_fd = root_fd

    @contextlib.contextmanager
    def open(self, path: bytes) -> Iterator[Region]:
        """See `Files`. No link leads out of the directory."""
        with closing_fd(inodes.open_regular_in_root(self.root_fd, path)) as fd:
            yield Region(fd, 0, os.fstat(fd).st_size)

    def access(self, path: bytes) -> Access:
        with self.open(path) as region:
            return access_of(region.fd)


class ArchiveFiles:
    """Files in an uncompressed tar archive; the caller closes its descriptor.

    ``access`` is that of the archive. Raises OSError, `Damaged`.
    """

    def __init__(self, whole: Region, access: Access) -> None:
        self._access = access
        self._places: dict[bytes, Region] = {}
        self._links: dict[bytes, bytes] = {}
        stream = PlainStream(whole)
        for number, member in enumerate(tar.members(stream)):
            if number == _MEMBERS_MAX:
                raise Damaged(f"more than {_MEMBERS_MAX} members")
            name = installed(member.name)
            if member.type is Type.FILE and member.extents is None:
                at = whole.offset + stream.position
                self._places[name] = Region(whole.fd, at, member.stored)
            elif member.type is Type.HARD_LINK:
                self._links[name] = installed(member.target)
            elif member.target:
                beside = posixpath.join(posixpath.dirname(name), member.target)
                self._links[name] = installed(beside)

    @contextlib.contextmanager
    def open(self, path: bytes) -> Iterator[Region]:
        name = installed(path)
        for _ in range(_LINKS_MAX):
            if name not in self._links:
                break
            name = self._links[name]
        region = self._places.get(name)
        if region is None:
            raise FileNotFoundError(2, "no such file in the archive", path)
        yield region

    def access(self, path: bytes) -> Access:
        return self._access


def has(files: Files, path: bytes) -> bool:
    """Return True if the file exists; raises OSError for errors other than its absence."""
    try:
        with files.open(path):
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def content(
    files: Files, path: bytes, limit: int = oci.DOCUMENT_MAX, budget: Budget | None = None
) -> bytes:
    """Return all of a document. Raises OSError, `Damaged` if it is too large, and the error of a
    budget, to which its size is charged.
    """
    with files.open(path) as region:
        if budget is not None:
            budget.charge(1 + region.size // STEP_BYTES)
        if region.size > limit:
            raise Damaged(f"{os.fsdecode(path)} has {region.size} bytes, which is too much")
        return b"".join(region.chunks())
