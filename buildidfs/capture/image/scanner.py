# SPDX-License-Identifier: Apache-2.0
"""Capture the ELF files in images of containers, as containers of these images see them.

Layers are read from the uppermost down: the scanner then knows which names of a lower layer are
hidden before it reads that layer. A layer that several images have is read once for all of them,
after the layers above it in each image. No layer of an image is decoded before all its layers match
their digests.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, TypeVar

from buildidfs.capture import walk
from buildidfs.capture.archive.elf_members import ArchiveOrigin, MemberSpool
from buildidfs.capture.archive.stream import (
    DEFAULT_LIMITS,
    ArchiveLimits,
    Region,
    unpacked,
)
from buildidfs.capture.base import Unreadable, month
from buildidfs.capture.image.layers import ArchiveFiles, Context, DirectoryFiles, has
from buildidfs.capture.image.layouts import (
    CONTENT,
    DOCKER,
    DOCKERS_CONTENT,
    INDEX,
    LAYOUT,
    SAVED,
    STORED,
    ContentStore,
    Docker,
    OciLayout,
    SavedImages,
    Storage,
)
from buildidfs.capture.origin.builder import access_of
from buildidfs.errors import IntegrityError, UsageError
from buildidfs.formats.archive import tar
from buildidfs.formats.archive.common import Damaged
from buildidfs.formats.container import oci
from buildidfs.formats.container.oci import NAMES_MAX_BYTES, LayerNames
from buildidfs.linux import inodes
from buildidfs.model import FileIdentity, Standing, Trust, fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from buildidfs.capture.archive.elf_members import Viewers
    from buildidfs.capture.archive.plain_files import PlainFile
    from buildidfs.capture.base import Found, Memo
    from buildidfs.capture.image.layers import Files, Layer, LayeredImage
    from buildidfs.formats.container.oci import Platform

# The names in all layers are kept in memory for at most this number of images at a time.
_TOGETHER: Final = 16
_BLOBS: Final = b"/blobs/sha256"
# Under more names an image is not captured: it is read again for each `_TOGETHER` of them.
_NAMES_MAX: Final = 32

_Item = TypeVar("_Item")
_Look: TypeAlias = "Callable[[Layer, LayerNames, Viewers], Iterator[_Item | Unreadable]]"
"""Yields the items of a layer; the `Viewers` return the images that see a file of the layer."""


class ImageScanner:
    """One pass over images: all those at ``paths``, and those at ``roots`` that ``references``
    select; see `capture.base`.

    A path leads to a layout, an archive or the storage of an engine. If an image exists for several
    platforms, only that for ``platform`` is read, or all of them if it is None. An image that the
    memo knows (see `whole`) is skipped, unless ``reread``. Members that are too large for memory go
    to ``spool_directory``. Iterating raises `UsageError` for a reference that selects nothing.
    """

    def __init__(
        self,
        memo: Memo,
        paths: Iterable[bytes],
        references: Iterable[str] = (),
        roots: Iterable[bytes] = (),
        *,
        platform: Platform | None = None,
        spool_directory: bytes | None = None,
        limits: ArchiveLimits = DEFAULT_LIMITS,
        reread: bool = False,
    ) -> None:
        self._paths = list(paths)
        self._references = list(references)
        self._roots = list(roots)
        self._platform = platform
        self._spool = MemberSpool(spool_directory)
        self._context = Context(memo, self._spool, limits)
        self._reread = reread
        self._layers: dict[bytes, Layer] = {}
        self._verified: dict[bytes, Exception | None] = {}
        self.images = 0
        """Number of images found, and of containers with a writable layer."""
        self.unchanged = 0
        """Number of images that were read before."""
        self.whole: list[FileIdentity] = []
        """The images that were read to their end. The caller must add them to the memo, as files
        without a build ID, once all items yielded before are committed.
        """
        self._to_read: set[bytes] = set()
        self._read_keys: set[bytes] = set()
        self.corrupt: list[IntegrityError] = []
        """One error for each image in which a file does not match its digest; nothing else of these
        images was captured.
        """

    def __iter__(self) -> Generator[Found, None, None]:
        return self._scan(lambda layer, names, viewers: layer.found(names, viewers, self._context))

    def plain_files(
        self, is_wanted: Callable[[ArchiveOrigin, bytes, int], bool]
    ) -> Iterator[tuple[Sequence[ArchiveOrigin], PlainFile] | Unreadable]:
        """Yield the visible files in the images, with their viewers.

        ``is_wanted`` is called with a viewer, path and size, and returns True if the bytes of the
        file are wanted. Raises `UsageError`.
        """

        def look(
            layer: Layer, names: LayerNames, viewers: Viewers
        ) -> Iterator[tuple[Sequence[ArchiveOrigin], PlainFile] | Unreadable]:
            def is_wanted_here(path: bytes, size: int) -> bool:
                return any(is_wanted(each, path, size) for each in viewers(path))

            for file in layer.plain_files(names, is_wanted_here, self._context):
                if isinstance(file, Unreadable):
                    yield file
                elif whose := viewers(file.path):
                    yield whose, file

        return self._scan(look)

    def _scan(self, look: _Look[_Item]) -> Generator[_Item | Unreadable, None, None]:
        """Yield the items of all layers."""
        with ExitStack() as open_files:
            chosen: list[_Stack] = []
            for stack in self._chosen(open_files):
                if isinstance(stack, Unreadable):
                    yield stack
                elif self._is_new(stack):
                    chosen.append(stack)
            # Images with the same lowest layers are read together.
            chosen.sort(key=lambda stack: [layer.key for layer in reversed(stack.layers)])
            self._to_read = {layer.key for stack in chosen for layer in stack.layers}
            for start in range(0, len(chosen), _TOGETHER):
                yield from self._read(chosen[start : start + _TOGETHER], look)

    @property
    def share(self) -> float | None:
        """Return the part of the layers that was verified and read, 0 to 1; None if unknown."""
        if not self._to_read:
            return None
        return (len(self._verified) + len(self._read_keys)) / (2 * len(self._to_read))

    # --- which images ----------------------------------------------------------------------

    def _chosen(self, open_files: ExitStack) -> Iterator[_Stack | Unreadable]:
        """Yield the images to be read. Raises `UsageError`."""
        wanted: dict[tuple[str, str], _Stack] = {}
        named: Counter[str] = Counter()
        for stack in self._asked_for(open_files):
            if isinstance(stack, Unreadable):
                yield stack
            elif stack.image.error is not None:
                self.images += 1
                yield from self._failed(stack, stack.image.error)
            else:
                digest = stack.image.digests[0]
                if wanted.setdefault((stack.image.label, digest), stack) is stack:
                    named[digest] += 1
                    if named[digest] > _NAMES_MAX:
                        del wanted[stack.image.label, digest]
                    if named[digest] == _NAMES_MAX + 1:
                        yield from self._failed(stack, Damaged(f"more than {_NAMES_MAX} names"))
        self.images += len(wanted)
        yield from wanted.values()

    def _asked_for(self, open_files: ExitStack) -> list[_Stack | Unreadable]:
        """Return all images at the paths, and those selected by a reference."""
        found = list(self._at(self._paths, open_files))
        if self._references:
            there = list(self._at(self._roots, open_files))
            found += [item for item in there if isinstance(item, Unreadable)]
            stacks = [item for item in there if isinstance(item, _Stack)]
            for reference in self._references:
                meant = [stack for stack in stacks if stack.is_meant(reference)]
                if not meant:
                    where = ", ".join(map(os.fsdecode, self._roots)) or "any known place"
                    raise UsageError(f"no image {reference!r}, and no container, in {where}")
                found += meant
        return found

    def _at(self, paths: Sequence[bytes], open_files: ExitStack) -> Iterator[_Stack | Unreadable]:
        for path in paths:
            try:
                for image in images_at(
                    path, self._platform, self._spool, self._context.limits, open_files
                ):
                    yield _Stack(image, path, self._layers)
            except (OSError, Damaged) as error:
                yield Unreadable.of(path, error)

    def _is_new(self, stack: _Stack) -> bool:
        stack.mark = _mark(stack.image)
        if self._reread or stack.mark is None:
            return True
        known = self._context.memo.recall(stack.mark) is not None
        self.unchanged += known
        return not known

    # --- reading ---------------------------------------------------------------------------

    def _read(self, chosen: Sequence[_Stack], look: _Look[_Item]) -> Iterator[_Item | Unreadable]:
        """Yield the items in some images."""
        pending = []
        for stack in chosen:
            error = next(filter(None, map(self._verify, stack.layers)), None)
            if error is not None:
                yield from self._failed(stack, error)
            else:
                pending.append(stack)
        while pending := [stack for stack in pending if not self._is_done(stack)]:
            layer, group = _next(pending)
            yield from self._read_layer(layer, group, pending, look)
            for stack in group:
                stack.layers.pop(0)

    def _verify(self, layer: Layer) -> Exception | None:
        """Return the error of a layer that cannot be verified; None if it is verified."""
        if layer.key not in self._verified:
            try:
                layer.verify(self._context.limits)
            except (IntegrityError, Damaged, OSError) as error:
                self._verified[layer.key] = error
            else:
                self._verified[layer.key] = None
        return self._verified[layer.key]

    def _is_done(self, stack: _Stack) -> bool:
        if stack.failed:
            return True
        if not stack.layers and stack.complete and stack.mark is not None:
            self.whole.append(stack.mark)
        return not stack.layers

    def _read_layer(
        self,
        layer: Layer,
        group: Sequence[_Stack],
        pending: Sequence[_Stack],
        look: _Look[_Item],
    ) -> Iterator[_Item | Unreadable]:
        """Yield the items of one layer, which is the next one of each image in ``group``."""
        whose = [(stack, stack.whose(layer)) for stack in group]

        def viewers(path: bytes) -> list[ArchiveOrigin]:
            # an image has many names, but the same layers under each of them
            if oci.is_too_deep(path):
                return []
            hidden: dict[tuple[int, ...], bool] = {}
            parents = oci.parents_of(path)
            seeing = []
            for stack, each in whose:
                above = stack.numbers
                if above not in hidden:
                    hidden[above] = stack.hides(path, parents)
                if not hidden[above]:
                    seeing.append(each)
            return seeing

        remembered = {id(names): names.size for stack in pending for names in stack.above}
        names = LayerNames(NAMES_MAX_BYTES - sum(remembered.values()))
        try:
            for item in look(layer, names, viewers):
                if isinstance(item, Unreadable):
                    for stack in group:
                        stack.complete = False
                yield item
        except (IntegrityError, Damaged, OSError) as error:
            for stack in group:
                stack.failed = True  # it is unknown what this layer hides of those below
                yield from self._failed(stack, error)
        self._read_keys.add(layer.key)
        for stack in group:
            stack.put_above(names)

    def _failed(self, stack: _Stack, error: Exception) -> Iterator[Unreadable]:
        """Report the error of an image."""
        if isinstance(error, IntegrityError):
            where = os.fsdecode(stack.where)
            self.corrupt.append(IntegrityError(f"{stack.image.label} in {where}: {error}"))
        else:
            name = os.fsencode(stack.image.label)
            number = (error.errno or 0) if isinstance(error, OSError) else 0
            yield Unreadable(b"%s (%s)" % (stack.where, name), _reason(error), number)


class _Stack:
    """An image that is being read: the remaining layers, and the names that those above hide.

    Images share the objects of their layers, so that a layer is verified only once.
    """

    def __init__(self, image: LayeredImage, where: bytes, known: dict[bytes, Layer]) -> None:
        self.image = image
        self.where = where
        # If an image has a layer twice, the lower one is completely hidden.
        keys = dict.fromkeys(layer.key for layer in image.layers)
        for layer in image.layers:
            known.setdefault(layer.key, layer)
        self.layers = [known[key] for key in keys]
        self.above: list[LayerNames] = []
        self.numbers: tuple[int, ...] = ()
        """Equal numbers of two stacks mean that the same layers were read of them."""
        self.complete = True
        self.failed = False
        self.mark: FileIdentity | None = None

    def is_meant(self, reference: str) -> bool:
        """Return True if a reference of a user fits this image."""
        return oci.is_meant(reference, self.image.names, self.image.digests)

    def put_above(self, names: LayerNames) -> None:
        """Add the names of a layer that was read."""
        if names.size:
            self.above.append(names)
            self.numbers = (*self.numbers, id(names))

    def hides(self, path: bytes, parents: frozenset[bytes]) -> bool:
        """Return True if a file with that path, below ``parents``, in the next layer is hidden."""
        return any(names.hides_any(path, parents) for names in self.above)

    def whose(self, layer: Layer) -> ArchiveOrigin:
        """Return the fields that all sightings in that layer have in common."""
        image = self.image
        host = f"{image.digests[0]}/{layer.name}"
        return ArchiveOrigin(image.label, host, image.trust, "image", standing=Standing.IMAGE)


def _reason(error: Exception) -> str:
    """Return the error as a text for the user."""
    if not isinstance(error, OSError):
        return str(error)
    text = error.strerror or str(error)
    if error.filename is None:
        return text
    return f"{text}: {oci.shown_name(os.fsdecode(error.filename))}"  # the image chose this path


def _next(pending: Sequence[_Stack]) -> tuple[Layer, list[_Stack]]:
    """Return the layer to read next, and the images for which it is next.

    The layer is one that no other image has further down, so that it is read only once. If images
    have the same layers in different orders, it may be any layer.
    """
    groups: dict[bytes, list[_Stack]] = {}
    for stack in pending:
        groups.setdefault(stack.layers[0].key, []).append(stack)
    below = {layer.key for stack in pending for layer in stack.layers[1:]}
    group = groups[next((key for key in groups if key not in below), next(iter(groups)))]
    return group[0].layers[0], group


def _mark(image: LayeredImage) -> FileIdentity | None:
    """Return the identity under which the memo knows for a month that this image was read.

    It includes the users who could read the image then. Returns None if the image may change.
    """
    if image.trust is not Trust.PACKAGE:
        return None
    try:
        accesses = [layer.access() for layer in image.layers]
    except OSError:
        return None
    who = " ".join(f"{access.mode:o},{access.uid},{access.gid}" for access in accesses)
    name = fingerprint(f"{image.label}\0{image.digests[0]}\0{who}".encode())
    scope = b"image:" + name + b"%d" % month(name[0])
    return FileIdentity(0, 0, 0, 0, 0, stat.S_IFREG, 0, 0, scope)


class _ImageSource(Protocol):
    def images(self) -> Iterator[LayeredImage]: ...


def images_at(
    path: bytes,
    platform: Platform | None,
    spool: MemberSpool,
    limits: ArchiveLimits,
    open_files: ExitStack,
) -> Iterator[LayeredImage]:
    """Yield the images at a path: for one platform if there is a choice, for all if it is None.

    ``open_files`` closes the opened files, which are read until the end of an image. An archive
    that is compressed as a whole is decompressed to a file without a name. Raises OSError,
    `Damaged`.
    """
    path_fd = walk.open_start(path)
    open_files.callback(os.close, path_fd)
    status = os.fstat(path_fd)
    if fstype := walk.Mounts().refused(status.st_dev, path_fd):
        raise Damaged(f"on a {fstype.decode()} filesystem, which has no images")
    sources: list[_ImageSource]
    if stat.S_ISDIR(status.st_mode):
        sources = _in_directory(DirectoryFiles(path_fd), platform)
    else:
        fd = inodes.reopen_regular(path_fd)
        open_files.callback(os.close, fd)
        access = access_of(fd)
        whole = Region(fd, 0, os.fstat(fd).st_size)
        if whole.packing() is not None:
            fd = spool.file(limits.unpacked_bytes, unpacked(whole, limits.unpacked_bytes).all())
            open_files.callback(os.close, fd)
            whole = Region(fd, 0, os.fstat(fd).st_size)
        if not tar.is_tar(os.pread(fd, tar.BLOCK, 0)):
            raise Damaged("neither a tar archive nor a directory of images")
        sources = _of_files(ArchiveFiles(whole, access), platform)
    if not sources:
        raise Damaged("holds no images of a kind that is understood")
    for source in sources:
        yield from source.images()


def _of_files(files: Files, platform: Platform | None) -> list[_ImageSource]:
    """Return a layout, or the archive of ``docker save``; archives of later versions are both."""
    if has(files, LAYOUT) and has(files, INDEX):
        return [OciLayout(files, platform)]
    return [SavedImages(files)] if has(files, SAVED) else []


def _in_directory(files: DirectoryFiles, platform: Platform | None) -> list[_ImageSource]:
    sources = _of_files(files, platform)
    if sources:
        return sources
    sources += (
        ContentStore(files, prefix, platform)
        for prefix in (CONTENT, DOCKERS_CONTENT, b"")
        if _is_directory(files, prefix + _BLOBS)
    )
    if _is_directory(files, DOCKER):
        sources.append(Docker(files))
    if has(files, STORED):
        sources.append(Storage(files))
    return sources


def _is_directory(files: DirectoryFiles, path: bytes) -> bool:
    try:
        os.close(inodes.open_in_root(files.root_fd, path, os.O_PATH | os.O_DIRECTORY))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
