# SPDX-License-Identifier: Apache-2.0
"""Capture kernels and modules from the places where they are installed, unpacked.

Modules are compressed one by one, and the vmlinux of an x86 kernel is inside its vmlinuz: what has
the build ID, and what debuggers want, is what comes out. It is known by the file it came from,
which is not unpacked again as long as it does not change.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.capture import elf_file, walk
from buildidfs.capture.archive import decompress
from buildidfs.capture.archive.spool import Spool
from buildidfs.capture.base import Found, Known, Memo, PinnedFile, SeenAgain, Unreadable
from buildidfs.capture.debug_files import DEBUG_ROOT, path_by_id
from buildidfs.capture.origin.host_path import Here, is_foreign
from buildidfs.formats import bzimage
from buildidfs.formats.archive import common
from buildidfs.formats.archive.common import Packing
from buildidfs.formats.elf import identify
from buildidfs.formats.elf.identify import ElfFile
from buildidfs.linux import openat2
from buildidfs.model import Absence, BuildId, ByteRange

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from buildidfs.model import NamespaceSet

MODULES: Final = b"/lib/modules"
PACKED: Final = (b".gz", b".xz", b".zst")
"""What the names of compressed modules end in, after ``.ko``."""

_PLACES: Final = (
    b"/boot",
    MODULES,
    b"/usr/lib/modules",
    DEBUG_ROOT + b"/boot",
    DEBUG_ROOT + MODULES,
    DEBUG_ROOT + b"/usr/lib/modules",
)
_BUILT: Final = b"build/vmlinux"  # for a kernel that was built on this machine

# What a linker makes comes out five times as large, or ten; small ones may be larger than that.
_RATIO: Final = 30
_MODULE_BYTES: Final = 8 << 20, 256 << 20
_VMLINUX_BYTES: Final = 64 << 20, 1 << 30
_SIZE_APPENDED: Final = 4
_UNREADABLE: Final = {b"\x89LZO": "lzo"}

_CUT_SHORT: Final = frozenset((Absence.EMPTY, Absence.TRUNCATED))
_NOT_THERE: Final = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP))


class InstalledKernels:
    """One pass over all kernels and modules that are installed below ``root``; see `capture.base`.

    Everything below /boot, /lib/modules and /usr/lib/modules, and what has the same path below
    /usr/lib/debug. Symbolic links are followed on the way there only, and do not lead out of
    ``root``. ``spool_directory`` is where something is put that is too large for memory; the others
    are as for `capture.scan.tree.TreeScanner`.
    """

    def __init__(
        self,
        memo: Memo,
        root: bytes = b"/",
        *,
        spool_directory: bytes | None = None,
        host: str | None = None,
        initial: NamespaceSet | None = None,
        container_namespaces: Collection[str] = ("mnt",),
    ) -> None:
        self._root = root
        here = Here("kernel", host, initial, container_namespaces)
        self._files = KernelFiles(memo, here, Spool(spool_directory))
        self._entered: set[tuple[int, int]] = set()

    def __iter__(self) -> Iterator[Found]:
        try:
            root_fd = os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            yield walk.unreadable(self._root, error)
            return
        try:
            yield from self._below(root_fd)
        finally:
            os.close(root_fd)

    def _below(self, root_fd: int) -> Iterator[Found]:
        known = walk.Mounts()
        prefix = os.readlink(b"/proc/self/fd/%d" % root_fd).rstrip(b"/")
        self._entered.clear()
        for place in _PLACES:
            try:
                start_fd = openat2.open_in_root(root_fd, place, os.O_PATH | os.O_DIRECTORY)
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    yield walk.unreadable(prefix + place, error)
                continue
            try:
                if not self._is_new(start_fd):
                    continue
                foreign = is_foreign(start_fd)
                for file in walk.files(start_fd, prefix + place, known):
                    if isinstance(file, Unreadable):
                        yield file
                    else:
                        yield self._files.found(file.path, file.fd, foreign=foreign)
                if place.startswith((MODULES, b"/usr/lib/modules")):
                    yield from self._built(root_fd, start_fd, prefix, place)
            finally:
                os.close(start_fd)
        if not self._entered:
            yield Unreadable(self._root, "has neither /boot nor /lib/modules")

    def _is_new(self, fd: int) -> bool:
        """Whether a directory was not entered yet: /lib may be a link to /usr/lib."""
        status = os.fstat(fd)
        identity = status.st_dev, status.st_ino
        if identity in self._entered:
            return False
        self._entered.add(identity)
        return True

    def _built(
        self, root_fd: int, directory_fd: int, prefix: bytes, place: bytes
    ) -> Iterator[Found]:
        """Kernels in the directories where they were built, to which a link leads."""
        try:
            listed_fd = os.open(b"/proc/self/fd/%d" % directory_fd, os.O_RDONLY | os.O_DIRECTORY)
            try:
                releases = sorted(map(os.fsencode, os.listdir(listed_fd)))
            finally:
                os.close(listed_fd)
        except OSError as error:
            yield walk.unreadable(prefix + place, error)
            return
        for release in releases:
            path = os.path.join(place, release, _BUILT)
            try:
                fd = openat2.open_regular_in_root(root_fd, path)
            except OSError as error:
                if error.errno not in (*_NOT_THERE, errno.EINVAL):
                    yield walk.unreadable(prefix + path, error)
                continue
            yield self._files.found(prefix + path, fd, foreign=is_foreign(fd))


def images(release: bytes) -> list[bytes]:
    """Where the kernel of a release may be: as it boots, and with its symbols.

    Sources: perf (util/symbol.c: vmlinux_paths__add), elfutils (libdwfl/linux-kernel-modules.c).
    """
    modules = os.path.join(MODULES, release)
    return [
        b"/boot/vmlinuz-" + release,
        modules + b"/vmlinuz",
        b"/boot/vmlinux-" + release,
        modules + b"/vmlinux",
        os.path.join(modules, _BUILT),
        DEBUG_ROOT + modules + b"/vmlinux",
        DEBUG_ROOT + modules + b"/vmlinux.debug",
        DEBUG_ROOT + b"/boot/vmlinux-" + release,
        DEBUG_ROOT + b"/boot/vmlinux-%s.debug" % release,
    ]


def debug_files(path: bytes, build_id: BuildId) -> list[bytes]:
    """Where the debug file of the module at a path may be."""
    plain, suffix = os.path.splitext(path)
    inside = DEBUG_ROOT + (plain if suffix in PACKED else path)
    return [path_by_id(build_id), inside + b".debug", inside]


class _Packed(NamedTuple):
    """What is compressed in a file, and how many bytes may come out of it."""

    packing: Packing
    where: ByteRange
    limit: int


class KernelFiles:
    """What `InstalledKernels` and `capture.scan.kernel` do with each file."""

    def __init__(self, memo: Memo, here: Here, spool: Spool) -> None:
        self._memo = memo
        self._here = here
        self._spool = spool

    def found(
        self,
        path: bytes,
        fd: int,
        wanted: BuildId | None = None,
        otherwise: str = "",
        *,
        foreign: bool = False,
    ) -> Found:
        """Judge an open file, and close it; ``foreign`` is as for `Here.sighting`.

        If it has another build ID than the one ``wanted`` it is not readable, for the reason given
        by ``otherwise``.
        """
        try:
            answer, found = self._judged(path, fd, foreign)
        except (OSError, decompress.CannotDecompress) as error:
            number = error.errno if isinstance(error, OSError) else None
            reason = getattr(error, "strerror", None) or str(error)
            return Unreadable(path, reason, number or 0)
        finally:
            os.close(fd)
        if wanted in (None, answer) or not isinstance(answer, BuildId):
            return found
        if isinstance(found, PinnedFile):
            found.close()
        return Unreadable(path, otherwise)

    def _judged(
        self, path: bytes, fd: int, foreign: bool
    ) -> tuple[BuildId | Absence | None, Found]:
        """The build ID, if it has one. Raises OSError, `CannotDecompress`."""
        sighting = self._here.sighting(path, fd, foreign=foreign)
        known = self._memo.recall(sighting.origin.identity)
        if known is not None:
            return known.build_id, self._here.seen_again(self._memo, sighting, known, fd)
        head = os.pread(fd, identify.HEAD_SIZE, 0)
        answer = identify.identify(head, elf_file.reader(fd))
        packed = _packed(path, fd, head) if answer is Absence.NOT_ELF else None
        if packed is None:
            if isinstance(answer, Absence):
                return answer, SeenAgain(sighting, Known(absence=answer))
            return answer, PinnedFile(self._here.reached(sighting, fd), os.dup(fd))
        pieces = _limited(fd, packed)
        pinned = self._spool.pin(self._here.reached(sighting, fd), packed.limit, pieces)
        try:
            inside = elf_file.describe(pinned.fd)
            # Not every decoder tells that its input ends too early.
            if inside in _CUT_SHORT or (isinstance(inside, ElfFile) and inside.truncated):
                raise decompress.CannotDecompress("damaged: ends too early")
        except BaseException:
            pinned.close()
            raise
        if isinstance(inside, ElfFile):
            return inside.build_id, pinned
        pinned.close()
        return inside, SeenAgain(sighting, Known(absence=inside))


def _packed(path: bytes, fd: int, head: bytes) -> _Packed | None:
    """What is in a module that is compressed, or in a vmlinuz; None if it is neither.

    Raises OSError, `CannotDecompress` if nothing here can read it.
    """
    size = os.fstat(fd).st_size
    if path.endswith(PACKED) and os.path.splitext(path)[0].endswith((b".ko", b".ko.debug")):
        packing = _packing(head)
        if packing is None:
            raise decompress.CannotDecompress("damaged: is not what its name says")
        return _Packed(packing, ByteRange(0, size), _limit(size, *_MODULE_BYTES))
    where = bzimage.payload(head, size)
    if where is None:
        return None
    packing = _packing(os.pread(fd, common.PACKING_HEAD, where.offset))
    if packing is None:
        raise decompress.CannotDecompress("holds a kernel that is compressed in an unknown way")
    if packing is not Packing.GZIP:
        # What does not say itself how much comes out of it is followed by a number that does
        # (scripts/Makefile.lib, size_append).
        where = ByteRange(where.offset, max(where.size - _SIZE_APPENDED, 0))
    return _Packed(packing, where, _limit(where.size, *_VMLINUX_BYTES))


def _limit(size: int, small: int, most: int) -> int:
    return min(most, max(small, _RATIO * size))


def _packing(head: bytes) -> Packing | None:
    for magic, name in _UNREADABLE.items():
        if head.startswith(magic):
            raise decompress.CannotDecompress(f"compressed with {name}, which is not read here")
    return common.packing(head[: common.PACKING_HEAD])


def _limited(fd: int, packed: _Packed) -> Iterator[bytes]:
    """What comes out. Raises OSError, `CannotDecompress`."""
    size = 0
    packed_bytes = decompress.chunks(fd, packed.where.offset, packed.where.size)
    for piece in decompress.plain(packed_bytes, packed.packing):
        size += len(piece)
        if size > packed.limit:
            raise decompress.CannotDecompress(f"more than {packed.limit} bytes when decompressed")
        yield piece
