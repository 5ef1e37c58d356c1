# SPDX-License-Identifier: Apache-2.0
"""Capture the running kernel with its loaded modules, and installed kernels.

No file has the bytes of the running kernel, so perf uses the text of /proc/kallsyms, under the
build ID in /sys/kernel/notes. The files of the kernel and of its modules are often compressed, and
an upgrade may have replaced them. Their build IDs show if they belong to the running kernel.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.capture import base, walk
from buildidfs.capture.archive import stream
from buildidfs.capture.archive.elf_members import MemberSpool
from buildidfs.capture.base import Found, Known, Memo, PinnedFile, Resighting, Unreadable
from buildidfs.capture.debug_files import DEBUG_ROOT, path_by_id
from buildidfs.capture.origin.builder import Here, Surroundings, is_foreign
from buildidfs.errors import InvalidBuildId
from buildidfs.formats import kernel_image
from buildidfs.formats.archive import common
from buildidfs.formats.archive.common import Packing
from buildidfs.formats.elf import identify
from buildidfs.formats.elf.header import gnu_build_id
from buildidfs.formats.elf.identify import ElfFile
from buildidfs.linux import credentials, inodes, machine, namespaces
from buildidfs.linux.file_ops import closing_fd, closing_on_error, on_error
from buildidfs.model import (
    EVERYBODY,
    Absence,
    BuildId,
    ByteRange,
    FileIdentity,
    Kind,
    NamespaceSet,
    Sighting,
    Trust,
    fingerprint,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

KALLSYMS_PATH: Final = b"[kernel.kallsyms]"

_NOTES: Final = b"/sys/kernel/notes"
_NOTE: Final = b".note.gnu.build-id"
_NOT_LOADED: Final = "is not the module that is loaded: the build IDs differ"
_NOT_RUNNING: Final = "is not the kernel that runs: the build IDs differ"
_HEAD: Final = 1 << 16


class KernelScanner:
    """One pass over the running kernel and its loaded modules; see `capture.base`.

    The symbols get mode 0400, because addresses of the kernel help an attacker. ``all_files`` also
    captures the files of the kernel itself, and debug files. ``root`` is the directory with /proc,
    /sys, /boot, /usr/lib/debug and /lib/modules, and ``release`` the kernel's name there; both are
    for tests. ``spool_directory`` is as for `InstalledKernels`, the others as for
    `capture.process.scanner.ProcScanner`.
    """

    def __init__(
        self,
        memo: Memo,
        *,
        all_files: bool = False,
        root: bytes = b"",
        release: str | None = None,
        spool_directory: bytes | None = None,
        container_namespaces: Collection[str] = ("mnt",),
    ) -> None:
        self._memo = memo
        self._all_files = all_files
        self._root = root
        self._release = os.fsencode(release or os.uname().release)
        self._spool_directory = spool_directory
        self._initial = namespaces.initial()
        self._container_namespaces = container_namespaces

    def __iter__(self) -> Iterator[Found]:
        try:
            build_id = running_build_id(self._root)
        except (InvalidBuildId, OSError) as error:
            yield Unreadable.of(self._root + _NOTES, error)
        else:
            yield self._symbols(build_id)
            if self._all_files:
                yield from self._images(build_id)
        loaded = loaded_modules(self._root + b"/sys/module")
        if loaded:
            yield from self._modules(loaded)

    # --- symbols ---------------------------------------------------------------------------

    def _symbols(self, build_id: BuildId) -> Found:
        path = self._root + b"/proc/kallsyms"
        try:
            origin = Surroundings(self._initial or namespaces.initial()).origin(
                KALLSYMS_PATH,
                self._symbols_identity(build_id),
                host=machine.host_name(),
                trust=Trust.HOST,
                scanner="kernel",
                reach=EVERYBODY,  # all users reach /proc, and the mode of the file decides
            )
            sighting = Sighting(origin, time.time_ns())
            known = self._memo.recall(origin.identity)
            if known is not None and known.build_id == build_id:
                return Resighting(sighting, known)
            return PinnedFile(sighting, _open_if_shown(path), Kind.KALLSYMS, build_id)
        except OSError as error:
            return Unreadable.of(path, error)

    def _symbols_identity(self, build_id: BuildId) -> FileIdentity:
        """Return an identity that stays the same during one boot while no module is loaded or
        removed.
        """
        state = build_id + inodes.boot_id()
        try:
            with open(self._root + b"/proc/modules", "rb") as file:
                for line in file:
                    fields = line.split()
                    state += b"%s %s\n" % (fields[0], fields[-1])
        except FileNotFoundError:
            pass  # a kernel that cannot load modules
        scope = b"kallsyms:" + fingerprint(state)
        return FileIdentity(0, 0, 0, 0, 0, stat.S_IFREG | 0o400, 0, 0, scope)

    # --- files -----------------------------------------------------------------------------

    def _images(self, build_id: BuildId) -> Iterator[Found]:
        try:
            kernel_files = self._kernel_files()
        except OSError as error:
            yield Unreadable.of(b"/boot", error)
            return
        for path in unified_images(self._root, self._release):
            found = self._found(kernel_files, path, build_id, _NOT_RUNNING)
            if found is not None and not isinstance(found, Unreadable):
                yield found
        for path in images(self._release):
            if (found := self._found(kernel_files, path, build_id, _NOT_RUNNING)) is not None:
                yield found

    def _modules(self, loaded: dict[bytes, BuildId]) -> Iterator[Found]:
        directory = self._modules_directory()
        try:
            paths = module_paths(self._root + directory + b"/modules.dep")
            kernel_files = self._kernel_files()
        except OSError as error:
            reason = f"{error.strerror}: {len(loaded)} loaded modules not captured"
            yield Unreadable(directory, reason, error.errno or 0)
            return
        for name, build_id in loaded.items():
            relative = paths.get(name)
            if relative is None:
                yield Unreadable(name, "loaded, but modules.dep knows no file of it")
                continue
            path = os.path.join(directory, relative)
            found = self._found(kernel_files, path, build_id, _NOT_LOADED)
            yield _missing(path) if found is None else found
            if self._all_files:
                yield from self._debug_file(kernel_files, path, build_id)

    def _modules_directory(self) -> bytes:
        """Return the directory with the modules of the release, the usual one if there is none."""
        usual = os.path.join(MODULES, self._release)
        of_system = (os.path.join(_SYSTEMS[0], each) for each in _MODULE_DIRECTORIES)
        for directory in (usual, *(os.path.join(each, self._release) for each in of_system)):
            if os.path.isdir(self._root + directory):
                return directory
        return usual

    def _debug_file(
        self, kernel_files: KernelFiles, path: bytes, build_id: BuildId
    ) -> Iterator[Found]:
        """Yield the first existing file with the build ID; skip files of other builds."""
        for candidate in debug_files(path, build_id):
            found = self._found(kernel_files, candidate, build_id, _NOT_LOADED)
            if isinstance(found, Unreadable) and found.reason == _NOT_LOADED:
                continue
            if found is not None:
                yield found
                return

    def _kernel_files(self) -> KernelFiles:
        """Return the tools for kernel files. Raises OSError."""
        here = Here("kernel", self._initial, self._container_namespaces)
        return KernelFiles(self._memo, here, MemberSpool(self._spool_directory))

    def _found(
        self, kernel_files: KernelFiles, path: bytes, build_id: BuildId, otherwise: str
    ) -> Found | None:
        """Return the file at a path if it has the build ID; None if there is no file."""
        try:
            with closing_fd(os.open(self._root + path, os.O_PATH | os.O_CLOEXEC)) as path_fd:
                fd = inodes.reopen_regular(path_fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            return Unreadable.of(path, error)
        return kernel_files.found(path, fd, build_id, otherwise)


def _missing(path: bytes) -> Unreadable:
    return Unreadable(path, os.strerror(errno.ENOENT), errno.ENOENT)


def running_build_id(root: bytes = b"") -> BuildId:
    """Return the build ID of the running kernel. Raises OSError, `InvalidBuildId` if it
    has none.
    """
    with open(root + _NOTES, "rb") as file:
        raw = gnu_build_id(file.read(), sys.byteorder == "little")
    if raw is None:
        raise InvalidBuildId("tells no build ID")
    return BuildId(raw)


def _open_if_shown(path: bytes) -> int:
    """Open kallsyms if it shows addresses; without permission it shows zeros."""
    with closing_on_error(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        text = os.pread(fd, _HEAD, 0)
        if not any(line.split(b" ", 1)[0].strip(b"0") for line in text.splitlines()):
            remedy = credentials.remedy_for_hidden_addresses()
            raise PermissionError(errno.EPERM, f"shows no addresses; {remedy}")
    return fd


def loaded_modules(directory: bytes) -> dict[bytes, BuildId]:
    """Return the build IDs of the loaded modules that have one, by the kernel's name of
    the module.
    """
    loaded = {}
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return {}
    for name in names:
        try:
            with open(os.path.join(directory, name, b"notes", _NOTE), "rb") as file:
                raw = gnu_build_id(file.read(), sys.byteorder == "little")
            if raw is not None:
                loaded[name] = BuildId(raw)
        except (OSError, InvalidBuildId):
            continue  # the module is built in, or has no build ID
    return loaded


def module_paths(dep_file: bytes) -> dict[bytes, bytes]:
    """Return paths of module files, relative to modules.dep, by the kernel's name of the module.

    Raises OSError. Source: modules.dep(5).
    """
    paths = {}
    with open(inodes.open_regular(dep_file), "rb") as file:
        for line in file:
            path = line.partition(b":")[0]
            name, suffix, _ = os.path.basename(path).partition(b".ko")
            if suffix:
                paths[name.replace(b"-", b"_")] = path
    return paths


MODULES: Final = b"/lib/modules"
PACKED: Final = (b".gz", b".xz", b".zst")
"""The suffixes of compressed modules, after ``.ko``."""


# --- installed kernels ---------------------------------------------------------------------------

_PLACES: Final = (
    b"/boot",
    MODULES,
    b"/usr/lib/modules",
    DEBUG_ROOT + b"/boot",
    DEBUG_ROOT + MODULES,
    DEBUG_ROOT + b"/usr/lib/modules",
    b"/efi/EFI",
)
# NixOS and Guix keep kernels in their stores; links lead to the present ones, and on NixOS to those
# of all generations. The kernel of NixOS is a file, that of Guix a directory.
_SYSTEMS: Final = (b"/run/booted-system", b"/run/current-system")
_PROFILES: Final = b"/nix/var/nix/profiles"
_GENERATION: Final = re.compile(rb"system(?:-[0-9]+-link)?")
_KERNELS: Final = (b"kernel", b"kernel/bzImage")
_MODULE_DIRECTORIES: Final = (b"kernel-modules/lib/modules", b"kernel/lib/modules")
_UNIFIED: Final = (b"/efi/EFI/Linux", b"/boot/efi/EFI/Linux", b"/boot/EFI/Linux")
"""The directories with unified kernel images (UAPI Boot Loader Specification)."""
_BUILT: Final = b"build/vmlinux"  # for a kernel that was built on this machine

# A linked file grows five- to tenfold when it is unpacked; small ones may grow more.
_RATIO: Final = 30
_MODULE_BYTES: Final = 8 << 20, 256 << 20
_VMLINUX_BYTES: Final = 64 << 20, 1 << 30
_SIZE_APPENDED: Final = 4
_UNREADABLE: Final = {b"\x89LZO": "lzo"}

_CUT_SHORT: Final = frozenset((Absence.EMPTY, Absence.TRUNCATED))
_NOT_THERE: Final = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP))


class InstalledKernels:
    """One pass over all kernels and modules installed below ``root``; see `capture.base`.

    Modules are compressed one by one, and the vmlinux of an x86 kernel is inside its vmlinuz, which
    may be inside a unified kernel image. The unpacked file has the build ID, and debuggers need it.
    The memo remembers it under the identity of the compressed file, which is not unpacked again
    unless it changes.

    The scanner takes all files below /boot, /efi/EFI, /lib/modules and /usr/lib/modules, files with
    the same paths below /usr/lib/debug, and the kernels and modules of NixOS and Guix. It follows
    symbolic links only on the way to these directories and kernels, and never out of ``root``. Data
    that is too large for memory goes to ``spool_directory``; the other arguments are as for
    `capture.scan.tree.TreeScanner`.
    """

    def __init__(
        self,
        memo: Memo,
        root: bytes = b"/",
        *,
        spool_directory: bytes | None = None,
        initial: NamespaceSet | None = None,
        container_namespaces: Collection[str] = ("mnt",),
    ) -> None:
        self._root = root
        here = Here("kernel", initial, container_namespaces)
        self._files = KernelFiles(memo, here, MemberSpool(spool_directory))
        self._entered: set[tuple[int, int]] = set()

    def __iter__(self) -> Iterator[Found]:
        try:
            root_fd = os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            yield Unreadable.of(self._root, error)
            return
        with closing_fd(root_fd):
            yield from self._below(root_fd)

    def _below(self, root_fd: int) -> Iterator[Found]:
        known = walk.Mounts()
        prefix = os.readlink(b"/proc/self/fd/%d" % root_fd).rstrip(b"/")
        self._entered.clear()
        systems = [*_SYSTEMS, *_generations(root_fd)]
        of_systems = [os.path.join(each, name) for each in systems for name in _MODULE_DIRECTORIES]
        for place in (*_PLACES, *of_systems):
            try:
                start_fd = inodes.open_in_root(root_fd, place, os.O_PATH | os.O_DIRECTORY)
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    yield Unreadable.of(prefix + place, error)
                continue
            with closing_fd(start_fd):
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
        for system in systems:
            for name in _KERNELS:
                yield from self._named(root_fd, prefix, os.path.join(system, name))
        if not self._entered:
            yield Unreadable(self._root, "has neither /boot nor /lib/modules")

    def _named(self, root_fd: int, prefix: bytes, path: bytes) -> Iterator[Found]:
        """Yield the kernel at a path, if there is one that was not scanned yet."""
        try:
            fd = inodes.open_regular_in_root(root_fd, path)
        except OSError as error:
            if error.errno not in (*_NOT_THERE, errno.EINVAL):
                yield Unreadable.of(prefix + path, error)
            return
        if self._is_new(fd):
            yield self._files.found(prefix + path, fd, foreign=is_foreign(fd))
        else:
            os.close(fd)

    def _is_new(self, fd: int) -> bool:
        """Return True if a directory or file was not scanned yet; /lib may be a link."""
        status = os.fstat(fd)
        identity = status.st_dev, status.st_ino
        if identity in self._entered:
            return False
        self._entered.add(identity)
        return True

    def _built(
        self, root_fd: int, directory_fd: int, prefix: bytes, place: bytes
    ) -> Iterator[Found]:
        """Yield kernels in the build directories to which links in the module directories lead."""
        try:
            listed_fd = os.open(b"/proc/self/fd/%d" % directory_fd, os.O_RDONLY | os.O_DIRECTORY)
            with closing_fd(listed_fd):
                releases = sorted(map(os.fsencode, os.listdir(listed_fd)))
        except OSError as error:
            yield Unreadable.of(prefix + place, error)
            return
        for release in releases:
            yield from self._named(root_fd, prefix, os.path.join(place, release, _BUILT))


def _generations(root_fd: int) -> list[bytes]:
    """Return the paths of all generations of NixOS. Does not raise."""
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with closing_fd(inodes.open_in_root(root_fd, _PROFILES, flags)) as fd:
            names = sorted(map(os.fsencode, os.listdir(fd)))
    except OSError:
        return []
    return [os.path.join(_PROFILES, name) for name in names if _GENERATION.fullmatch(name)]


def unified_images(root: bytes, release: bytes) -> list[bytes]:
    """Return the paths of unified kernel images below ``root``, without it. Does not raise."""
    found = []
    for directory in (*_UNIFIED, os.path.join(MODULES, release)):
        with contextlib.suppress(OSError):
            names = sorted(map(os.fsencode, os.listdir(root + directory)))
            found += [os.path.join(directory, each) for each in names if each.endswith(b".efi")]
    return found


def images(release: bytes) -> list[bytes]:
    """Return the paths at which the kernel of a release may be: the boot image, and files with
    symbols.

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
        *(os.path.join(_SYSTEMS[0], name) for name in _KERNELS),
    ]


def debug_files(path: bytes, build_id: BuildId) -> list[bytes]:
    """Return the paths at which the debug file of the module at a path may be."""
    plain, suffix = os.path.splitext(path)
    inside = DEBUG_ROOT + (plain if suffix in PACKED else path)
    return [path_by_id(build_id), inside + b".debug", inside]


class _Packed(NamedTuple):
    """The compressed part of a file, and a limit for the bytes that it decompresses to."""

    packing: Packing
    where: ByteRange
    limit: int


class KernelFiles:
    """The work of `InstalledKernels` and `KernelScanner` on each file."""

    def __init__(self, memo: Memo, here: Here, spool: MemberSpool) -> None:
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
        """Identify an open file, and close it; ``foreign`` is as for `Here.sighting`.

        If it has another build ID than ``wanted``, the result is `Unreadable` with the reason
        ``otherwise``.
        """
        with closing_fd(fd):
            try:
                answer, found = self._judged(path, fd, foreign)
            except (OSError, stream.CannotDecompress) as error:
                return Unreadable.of(path, error)
        if wanted in (None, answer) or not isinstance(answer, BuildId):
            return found
        if isinstance(found, PinnedFile):
            found.close()
        return Unreadable(path, otherwise)

    def _judged(
        self, path: bytes, fd: int, foreign: bool
    ) -> tuple[BuildId | Absence | None, Found]:
        """Return the build ID of a file, if it has one, and its record. Raises OSError,
        `CannotDecompress`.
        """
        sighting = self._here.sighting(path, fd, foreign=foreign)
        known = self._memo.recall(sighting.origin.identity)
        if known is not None:
            return known.build_id, self._here.resighted(self._memo, sighting, known, fd)
        head = os.pread(fd, identify.HEAD_SIZE, 0)
        answer = base.adopted(identify.identify(head, base.reader(fd)), fd)
        packed = _packed(path, fd, head) if answer is Absence.NOT_ELF else None
        if packed is None:
            if isinstance(answer, Absence):
                return answer, Resighting(sighting, Known(absence=answer))
            return answer, PinnedFile(self._here.reached(sighting, fd), os.dup(fd))
        pieces = _limited(fd, packed)
        pinned = self._spool.pin(self._here.reached(sighting, fd), packed.limit, pieces)
        with on_error(pinned.close):
            inside = base.describe(pinned.fd)
            # Not every decoder reports that its input ends too early.
            if inside in _CUT_SHORT or (isinstance(inside, ElfFile) and inside.truncated):
                raise stream.CannotDecompress("damaged: ends too early")
        if isinstance(inside, ElfFile):
            return inside.build_id, pinned
        pinned.close()
        return inside, Resighting(sighting, Known(absence=inside))


def _packed(path: bytes, fd: int, head: bytes) -> _Packed | None:
    """Find the content of a compressed module or a vmlinuz; None for any other file.

    Raises OSError, and `CannotDecompress` for an unsupported format.
    """
    size = os.fstat(fd).st_size
    if path.endswith(PACKED) and os.path.splitext(path)[0].endswith((b".ko", b".ko.debug")):
        packing = _packing(head)
        if packing is None:
            raise stream.CannotDecompress("damaged: is not what its name says")
        return _Packed(packing, ByteRange(0, size), _limit(size, *_MODULE_BYTES))
    where = _payload(fd, head, size)
    if where is None:
        return None
    packing = _packing(os.pread(fd, common.PACKING_HEAD, where.offset))
    if packing is None:
        raise stream.CannotDecompress("holds a kernel that is compressed in an unknown way")
    if packing is not Packing.GZIP:
        # If the format of a payload does not contain the uncompressed size, the size follows the
        # payload (scripts/Makefile.lib, size_append).
        where = ByteRange(where.offset, max(where.size - _SIZE_APPENDED, 0))
    return _Packed(packing, where, _limit(where.size, *_VMLINUX_BYTES))


def _payload(fd: int, head: bytes, size: int) -> ByteRange | None:
    """Return the extent of the compressed kernel in a vmlinuz, or in a unified kernel image that
    contains one; None for other files. Raises OSError.
    """
    where = kernel_image.payload(head, size)
    image = None
    if where is None:
        image = kernel_image.section(base.reader(fd), size, kernel_image.KERNEL)
    if image is None:
        return where
    inside = kernel_image.payload(os.pread(fd, kernel_image.HEAD_SIZE, image.offset), image.size)
    return None if inside is None else ByteRange(image.offset + inside.offset, inside.size)


def _limit(size: int, small: int, most: int) -> int:
    return min(most, max(small, _RATIO * size))


def _packing(head: bytes) -> Packing | None:
    for magic, name in _UNREADABLE.items():
        if head.startswith(magic):
            raise stream.CannotDecompress(f"compressed with {name}, which is not read here")
    return common.packing(head[: common.PACKING_HEAD])


def _limited(fd: int, packed: _Packed) -> Iterator[bytes]:
    """Yield the content in pieces. Raises OSError, `CannotDecompress`."""
    size = 0
    packed_bytes = stream.chunks(fd, packed.where.offset, packed.where.size)
    for piece in stream.plain(packed_bytes, packed.packing):
        size += len(piece)
        if size > packed.limit:
            raise stream.CannotDecompress(f"more than {packed.limit} bytes when decompressed")
        yield piece
