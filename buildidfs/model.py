# SPDX-License-Identifier: Apache-2.0
"""The values everything else speaks of. Frozen, typed, no I/O.

Words are used as the field uses them: a *build ID* names what the linker produced, a *digest*
names bytes, and one build ID may have several *variants* (stripped, unstripped, re-signed,
hostile). An *origin* says where bytes were seen; a *sighting* is the claim that a file was there;
a *pinned file* (capture/base.py) is a sighting plus an open descriptor.
"""

from __future__ import annotations

import enum
from typing import ClassVar, Final, NamedTuple

import msgspec

from buildidfs.errors import InvalidBuildId

try:
    # hashlib exports the same, but loads OpenSSL: a tenth of the time of a short command.
    from _blake2 import blake2b as _blake2b
except ImportError:
    from hashlib import blake2b as _blake2b


def fingerprint(data: bytes, size: int = 16) -> bytes:
    """Return the BLAKE2b hash of ``data`` in ``size`` bytes. On disk, as part of keys."""
    return _blake2b(data, digest_size=size).digest()


class BuildId(bytes):
    """The bytes of an NT_GNU_BUILD_ID note: 2 to 120 of them, 20 for most linkers.

    Raises `InvalidBuildId` for any other length. 120 is the most for which
    ``<hex>.debug`` still fits a directory entry (NAME_MAX 255). ``str()`` gives lower-case hex,
    the spelling used at every border of the program.
    """

    __slots__ = ()

    MIN_BYTES = 2
    MAX_BYTES = 120

    def __new__(cls, raw: bytes) -> BuildId:
        if not cls.MIN_BYTES <= len(raw) <= cls.MAX_BYTES:
            raise InvalidBuildId(
                f"a build ID has {cls.MIN_BYTES} to {cls.MAX_BYTES} bytes, not {len(raw)}"
            )
        return super().__new__(cls, raw)

    @classmethod
    def from_hex(cls, text: str) -> BuildId:
        """Parse hex digits of either case; raises `InvalidBuildId`."""
        try:
            raw = bytes.fromhex(text)
        except ValueError:
            raw = b""
        if not raw or len(raw) * 2 != len(text):
            raise InvalidBuildId(f"not a build ID (an even number of hex digits): {text!r}")
        return cls(raw)

    def __str__(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"BuildId({self.hex()})"


class AdoptedId(BuildId):
    """The ID of a program that has no build ID of its own: its htlhash (`formats.elf.identity`).

    Equal to a `BuildId` with the same bytes; the type only tells where it comes from.
    """

    __slots__ = ()


_SHARED_IDS: Final = frozenset(
    # Go 1.24 makes this of the Go build ID "redacted", which Bazel gives to all programs.
    (bytes.fromhex("498919aff001d8366249403a2544fba2d833084f"),)
)


def is_shared(build_id: bytes) -> bool:
    """Return True for a build ID that is known to be that of unrelated programs."""
    return build_id in _SHARED_IDS or not build_id.strip(b"\0")


class AliasType(enum.IntEnum):
    """The kind of an alias. On disk."""

    HTL = 1
    GO = 2
    CODE = 3
    CRC32 = 4
    LINK = 5
    """CRC-32 and name of the debug file that the file asks for; not a name of the file."""


class Alias(NamedTuple):
    """Another name of the bytes of a file."""

    type: AliasType
    value: bytes


class Digest(bytes):
    """The SHA-256 of a blob: 32 bytes, shown as hex."""

    __slots__ = ()

    def __new__(cls, raw: bytes) -> Digest:
        if len(raw) != 32:
            raise ValueError(f"a SHA-256 digest has 32 bytes, not {len(raw)}")
        return super().__new__(cls, raw)

    def __str__(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"Digest({self.hex()})"


class Kind(enum.IntEnum):
    """The kind of file that an artifact is to its readers.

    The values are part of the on-disk format. ``VDSO`` and ``KALLSYMS`` exist because perf looks
    for them under names of their own; everything else is one of the first two.
    """

    EXECUTABLE = 1
    DEBUGINFO = 2
    VDSO = 3
    KALLSYMS = 4


class Quality(enum.IntEnum):
    """The amount of debug information in a file; more is better. On disk as `stored`.

    ``GOPCLNTAB`` is a debug file that was made of the table of a Go program: functions, files and
    lines, but no types.
    """

    NONE = 0
    DYNSYM = 1
    SYMTAB = 2
    GOPCLNTAB = 3
    DEBUGINFO = 4

    @property
    def stored(self) -> int:
        """The number on disk and in bundles."""
        return QUALITIES.index(self)


QUALITIES: Final = (
    Quality.NONE,
    Quality.DYNSYM,
    Quality.SYMTAB,
    Quality.DEBUGINFO,
    Quality.GOPCLNTAB,
)
"""The qualities by their number on disk, which is the order in which they were added."""


class Trust(enum.IntEnum):
    """The trust in the place at which a file was seen; more is better. On disk.

    ``HOST`` is the host's own mount namespace and a file that only root can have written.
    """

    UNKNOWN = 0
    CONTAINER = 1
    PACKAGE = 2
    HOST = 3


class Standing(enum.IntEnum):
    """The rank of a place among those with the same `Trust`; more is better. On disk as `stored`.

    It tells files of root's apart by where they lie, since the root of a container without a user
    namespace writes files of root's into every volume that it has: ``SYSTEM`` is a directory that
    package managers keep (/usr, /lib, ...), ``INSTALLED`` one for what is installed besides
    (/usr/local, /opt). ``GIVEN`` is what the operator handed over: a package, a directory, a rule.
    ``ELSEWHERE`` is any other place that a file was only seen at. ``IMAGE`` is a container image,
    which counts as a package, but was not made for this host. So does ``UPSTREAM``, a server that
    the operator named, and that may be any host on the way to it.
    """

    IMAGE = 0
    ELSEWHERE = 1
    INSTALLED = 2
    UPSTREAM = 3
    GIVEN = 4
    SYSTEM = 5

    @property
    def stored(self) -> int:
        """The number on disk."""
        return STANDINGS.index(self)

    @classmethod
    def of_stored(cls, number: int) -> Standing:
        """The standing with that number on disk. Raises ValueError if there is none."""
        if not 0 <= number < len(STANDINGS):
            raise ValueError(f"no standing has the number {number}")
        return STANDINGS[number]


STANDINGS: Final = (
    Standing.IMAGE,
    Standing.ELSEWHERE,
    Standing.INSTALLED,
    Standing.GIVEN,
    Standing.SYSTEM,
    Standing.UPSTREAM,
)
"""The standings by their number on disk, which is the order in which they were added."""


class Absence(enum.StrEnum):
    """The reason why a file has no build ID: counted and reported, but not an error."""

    EMPTY = "empty file"
    NOT_ELF = "not an ELF file"
    TRUNCATED = "truncated ELF file"
    MALFORMED = "malformed ELF file"
    NO_BUILD_ID = "ELF file without a build ID"
    BAD_BUILD_ID = "ELF file whose build ID has an impossible length"


class NamespaceSet(msgspec.Struct, frozen=True, array_like=True):
    """Inode numbers of the seven namespaces of a process, in the order of PERF_RECORD_NAMESPACES.

    0 is "not known". The numbers are reused by the kernel as soon as a namespace is gone: they
    tell containers apart only at one moment (`Origin.mnt_ns_id` is never reused).
    """

    net: int = 0
    uts: int = 0
    ipc: int = 0
    pid: int = 0
    user: int = 0
    mnt: int = 0
    cgroup: int = 0


class FileIdentity(msgspec.Struct, frozen=True):
    """The result of stat(2) and statx(2) for an open file, by which it is recognised later.

    ``scope`` makes (dev, ino) unambiguous. Device numbers of tmpfs, overlayfs and loop devices
    are handed out again at once, and filesystem images with fixed times look alike, so there it
    is the kernel's unique mount ID together with the boot ID; for other files on block devices it
    is empty and ``dev`` decides. ``None`` says that nothing unambiguous is to be had (before
    Linux 6.8), and the file has to be read.
    Times are in nanoseconds, ``mode`` is st_mode with the type bits.
    """

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    uid: int
    gid: int
    scope: bytes | None = None


def archive_scope(identity: FileIdentity) -> bytes | None:
    """Return the `FileIdentity.scope` of members of an archive; None if the archive may change."""
    if identity.scope is None:
        return None
    numbers = (identity.dev, identity.ino, identity.size, identity.mtime_ns, identity.ctime_ns)
    text = b"/".join(b"%d" % number for number in numbers)
    return b"package:" + fingerprint(text + b"/" + identity.scope)


OWNER: Final = 4
GROUP: Final = 2
OTHERS: Final = 1
EVERYBODY: Final = OWNER | GROUP | OTHERS
"""The bits of `Origin.reach`. On disk."""


class Access(msgspec.Struct, frozen=True):
    """The permission bits of a file, as far as it can be reached with them, and its owners."""

    mode: int = 0o444
    uid: int = 0
    gid: int = 0

    def within(self, identity: FileIdentity, reach: int) -> tuple[FileIdentity, int]:
        """Return the identity and reach of a member of this archive, from those that the archive
        has.

        If not all users may read the archive, a member that all could read is for those who may
        read the archive. A member of one user stays that user's if the archive is that user's as
        well.
        """
        if self.mode & 0o444 == 0o444:
            return identity, reach
        if identity.mode & 0o444 != 0o444 or reach != EVERYBODY:
            theirs = identity.uid == self.uid and self.mode & 0o400
            return identity, reach & OWNER if theirs else 0
        bits = self.mode & 0o444
        mode = identity.mode & ~0o777 | bits | identity.mode & bits >> 2
        mine = msgspec.structs.replace(identity, mode=mode, uid=self.uid, gid=self.gid)
        return mine, EVERYBODY


PUBLIC_ACCESS: Final = Access()


class Origin(msgspec.Struct, frozen=True):
    """The place at which a file was seen.

    ``path`` is the path as its users saw it, in their root, raw bytes; for what has no path it is
    the name perf uses (``[vdso]``, ``[kernel.kallsyms]``). ``container`` is a label for people,
    derived from namespaces and cgroup, empty on the host; never a key. ``scanner`` names what
    saw it (proc, tree, kernel). ``apart`` has bit 1<<i set when the i-th of `NamespaceSet` was
    another one than the host's at that time, as far as both were known: with ``cgroup`` all that
    is needed to ask later what another definition of a container says. ``cgroup_id`` is the number
    of the control group in the unified hierarchy, 0 where it is not known: unlike the path it is
    not used again until the next boot. ``reach`` says for the owner of the file (4), its group (2)
    and all others (1) whether all of them could get at it along this path, see
    `capture.origin.path_access`; 0 if only root could, or if reach was not determined, because the
    store knows that place of the file. ``archive`` is the path on the host of the package file that
    the file is in, if only root may write to it. ``signature`` is the IMA signature that a package
    has for the bytes, which is not verified here. ``standing`` is not kept with the place: it
    raises that of the bytes, as ``trust`` does.
    """

    path: bytes
    identity: FileIdentity
    namespaces: NamespaceSet = NamespaceSet()
    mnt_ns_id: int = 0
    cgroup: bytes = b""
    container: str = ""
    host: str = ""
    trust: Trust = Trust.UNKNOWN
    scanner: str = ""
    apart: int = 0
    cgroup_id: int = 0
    reach: int = EVERYBODY
    archive: bytes = b""
    signature: bytes = b""
    standing: Standing = Standing.GIVEN

    @property
    def is_public(self) -> bool:
        """True if all users could read the file there, and so may know of the place."""
        return self.reach == EVERYBODY and self.identity.mode & 0o444 == 0o444

    @property
    def shown_mode(self) -> int:
        """Permission bits of an artifact that was seen there: each those of the original, as far as
        it could be reached, without writing and without set-ID.
        """
        mode = self.identity.mode & 0o555
        for who, bits in ((OWNER, 0o700), (GROUP, 0o070), (OTHERS, 0o007)):
            if not self.reach & who:
                mode &= ~bits
        return mode


class ContainerNames(msgspec.Struct, frozen=True):
    """The names that people have for a container, as its engine has noted them down.

    ``name`` is that of the container, ``pod`` and ``namespace`` those of its pod in Kubernetes.
    ``image`` has the name and the ID of its image, a line for each that is known. Each is empty
    if it is not known, and fit to be shown on a terminal.
    """

    name: str = ""
    pod: str = ""
    namespace: str = ""
    image: str = ""

    @property
    def shown(self) -> str:
        """``NAMESPACE/POD/NAME``, as far as they are known; empty if no name is."""
        return "/".join(part for part in (self.namespace, self.pod, self.name) if part)

    def fits(self, text: str) -> bool:
        """Return True if a user may mean the container by ``text``: its name, its pod, or both.

        A pod may have its namespace before it.
        """
        parts = text.split("/")
        own = (self.namespace, self.pod, self.name)
        return all(parts) and parts in (
            [self.name], [self.pod], list(own[:2]), list(own[1:]), list(own),
        )  # fmt: skip


NO_NAMES: Final = ContainerNames()


class Sighting(msgspec.Struct, frozen=True):
    """The claim that a file with these bytes was at ``origin`` at ``seen_ns`` (Unix time, ns)."""

    origin: Origin
    seen_ns: int


class JitProcess(msgspec.Struct, frozen=True):
    """A process with generated code, and the file in which it writes the names of that code.

    ``origin`` is where that file is; ``pid`` is the number of the process here, ``ns_pid`` the
    number that it has itself. ``start_ticks`` is when it began, in clock ticks since the boot with
    that ID (hexadecimal), and ``start_ns`` the same as Unix time. ``machine`` is the e_machine of
    its code.
    """

    pid: int
    ns_pid: int
    start_ticks: int
    start_ns: int
    boot_id: str
    comm: str
    machine: int
    origin: Origin

    MOST_BYTES: ClassVar[int] = 32 << 20
    """The bytes of names that are kept of a process."""

    @property
    def name(self) -> bytes:
        """The name that mappings of its generated code get in a profile."""
        return b"[jit:%d]" % self.pid


class ByteRange(msgspec.Struct, frozen=True, array_like=True):
    """``size`` bytes from ``offset`` of a file."""

    offset: int
    size: int


class Artifact(msgspec.Struct, frozen=True):
    """The file served for (build ID, kind): one immutable blob and the attributes it is shown with.

    ``variant`` counts the variants of this (build ID, kind) in order of arrival and is never
    reused, so (ordinal, kind, variant) names bytes for ever. ``scripts`` are the extents of
    ``.debug_gdb_scripts`` sections; unless ``trust`` is HOST every front door shows them as zeros.
    ``mode`` holds permission bits only. ``segments`` stands for what the program headers of an ELF
    file say is loaded where, 0 where there is none: an executable and its debuginfo share it.
    ``truncated`` says that debuggers refuse the file, see `ElfFile`. ``adopted`` says that the
    build ID is not in the file: it is the htlhash of its bytes.
    """

    ordinal: int
    kind: Kind
    variant: int
    digest: Digest
    size: int
    mtime_ns: int
    mode: int
    uid: int
    gid: int
    quality: Quality
    trust: Trust
    first_seen_ns: int
    scripts: tuple[ByteRange, ...] = ()
    segments: int = 0
    truncated: bool = False
    standing: Standing = Standing.GIVEN
    adopted: bool = False

    @property
    def made_of(self) -> str:
        """The section of the executable that a debug file was made of; empty if it was not made.

        Debug files that were captured have a symbol table at least.
        """
        return _MADE_OF.get(self.quality, "") if self.kind is Kind.DEBUGINFO else ""


_MADE_OF: Final = {Quality.DYNSYM: ".gnu_debugdata", Quality.GOPCLNTAB: ".gopclntab"}


class Mapping(msgspec.Struct, frozen=True):
    """One mapping of a process's address space, as PROCMAP_QUERY or /proc/PID/maps tells it.

    Addresses and offset in bytes. ``dev`` is (major, minor) as the memory map shows it, which on
    overlayfs and btrfs is not the st_dev of stat(2): never compare the two. ``path`` is empty for
    anonymous memory; ``deleted`` says that the kernel marked the name as unlinked.
    """

    start: int
    end: int
    executable: bool
    offset: int
    dev: tuple[int, int]
    inode: int
    path: bytes
    deleted: bool = False
