# SPDX-License-Identifier: Apache-2.0
"""The values that all other modules use. Frozen, typed, no I/O.

Terms have their usual meaning: a *build ID* names the output of the linker, a *digest* names bytes,
and one build ID may have several *variants* (stripped, unstripped, re-signed, hostile). An *origin*
is the place at which bytes were seen; a *sighting* is the claim that a file was at an origin; a
*pinned file* (capture/base.py) is a sighting plus an open descriptor.
"""

from __future__ import annotations

import enum
from typing import ClassVar, Final, NamedTuple

import msgspec

from buildidfs.errors import InvalidBuildId

try:
    # hashlib has the same, but imports OpenSSL: a tenth of the time of a short command.
    from _blake2 import blake2b as _blake2b
except ImportError:
    from hashlib import blake2b as _blake2b


def fingerprint(data: bytes, size: int = 16) -> bytes:
    """Return the BLAKE2b hash of ``data`` in ``size`` bytes. Keys on disk contain it."""
    return _blake2b(data, digest_size=size).digest()


_LAST_NS: Final = (1 << 63) - 1


def bounded_ns(ns: int) -> int:
    """Return a time in nanoseconds, limited to 64 bits.

    Users of tmpfs and FUSE, archives and hostile filesystem images choose times 292 years or more
    from 1970, for which rows and keys have no room.
    """
    return max(-_LAST_NS - 1, min(ns, _LAST_NS))


class BuildId(bytes):
    """The bytes of an NT_GNU_BUILD_ID note: 2 to 120 bytes; most linkers write 20.

    Raises `InvalidBuildId` for any other length. 120 is the most for which ``<hex>.debug`` still
    fits a directory entry (NAME_MAX 255). ``str()`` returns lower-case hex, the spelling in all
    input and output of the program.
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
    """The ID of a program that has no build ID of its own: its htlhash (`formats.elf.other_ids`).

    It equals a `BuildId` with the same bytes; the type only marks its source.
    """

    __slots__ = ()


_SHARED_IDS: Final = frozenset(
    # Go 1.24 derives this from the Go build ID "redacted", which Bazel gives to all programs.
    (bytes.fromhex("498919aff001d8366249403a2544fba2d833084f"),)
)


def is_shared(build_id: bytes) -> bool:
    """Return True if a build ID is known to be shared by unrelated programs."""
    return build_id in _SHARED_IDS or not build_id.strip(b"\0")


class AliasType(enum.IntEnum):
    """The kind of an alias. Values are part of the on-disk format."""

    HTL = 1
    GO = 2
    CODE = 3
    CRC32 = 4
    LINK = 5
    """CRC-32 and name of the debug file to which the file refers. It is not a name of the file
    itself.
    """
    BEGINNING = 6
    """The first 16 bytes of the build ID, as in debug IDs of Breakpad. Other build IDs may begin
    with them, too.
    """
    OFFSETS = 7
    """A hash of the offsets in the file at which its code is. It is not a name, and many files have
    it; files with the same build ID and other offsets were rewritten after the link.
    """
    TEXT = 8
    """Breakpad's hash of the code of a file without a build ID, of which it makes the debug ID. It
    is easy to forge.
    """


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
    """The kind of file that an artifact is for its readers.

    The values are part of the on-disk format. ``VDSO`` and ``KALLSYMS`` exist because perf looks
    them up under names of their own; every other file is an executable or debuginfo.
    """

    EXECUTABLE = 1
    DEBUGINFO = 2
    VDSO = 3
    KALLSYMS = 4


class Quality(enum.IntEnum):
    """The amount of debug information in a file; more is better. On disk as `stored`.

    ``GOPCLNTAB`` is a debug file made from the table of a Go program: functions, files and lines,
    but no types.
    """

    NONE = 0
    DYNSYM = 1
    SYMTAB = 2
    GOPCLNTAB = 3
    DEBUGINFO = 4

    @property
    def stored(self) -> int:
        """Return the number on disk and in bundles."""
        return QUALITIES.index(self)


QUALITIES: Final = (
    Quality.NONE,
    Quality.DYNSYM,
    Quality.SYMTAB,
    Quality.DEBUGINFO,
    Quality.GOPCLNTAB,
)
"""The qualities by their number on disk, in the order in which they were added."""


class Trust(enum.IntEnum):
    """The trust in the place at which a file was seen; more is better. On disk.

    ``HOST`` means the host's own mount namespace, and a file that only root can have written.
    """

    UNKNOWN = 0
    CONTAINER = 1
    PACKAGE = 2
    HOST = 3


class Standing(enum.IntEnum):
    """The rank of a place among those with the same `Trust`; more is better. On disk as `stored`.

    It distinguishes files of root by their directories, because in a container without a user
    namespace, the container's root user can write files of root into every volume. ``SYSTEM`` is a
    directory of package managers (/usr, /lib, ...), ``INSTALLED`` one for other installed software
    (/usr/local, /opt). ``GIVEN`` is for input of the operator: a package, a directory, a rule.
    ``ELSEWHERE`` is any other place. ``IMAGE`` is a container image, which has the trust of a
    package, but was not made for this host. ``UPSTREAM`` is a server that the operator named. It
    has the trust of a package, too, but any host on the way could take the place of the server.
    """

    IMAGE = 0
    ELSEWHERE = 1
    INSTALLED = 2
    UPSTREAM = 3
    GIVEN = 4
    SYSTEM = 5

    @property
    def stored(self) -> int:
        """Return the number on disk."""
        return STANDINGS.index(self)

    @classmethod
    def of_stored(cls, number: int) -> Standing:
        """Return the standing with that number on disk. Raises ValueError if there is none."""
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
"""The standings by their number on disk, in the order in which they were added."""


class Absence(enum.StrEnum):
    """The reason why a file has no build ID: it is counted and reported, but not an error."""

    EMPTY = "empty file"
    NOT_ELF = "not an ELF file"
    TRUNCATED = "truncated ELF file"
    MALFORMED = "malformed ELF file"
    NO_BUILD_ID = "ELF file without a build ID"
    BAD_BUILD_ID = "ELF file whose build ID has an impossible length"


class NamespaceSet(msgspec.Struct, frozen=True, array_like=True):
    """Inode numbers of the seven namespaces of a process, in the order of PERF_RECORD_NAMESPACES.

    0 means unknown. The kernel reuses the numbers as soon as a namespace is gone, so they
    distinguish containers only at one moment (`Origin.mnt_ns_id` is never reused).
    """

    net: int = 0
    uts: int = 0
    ipc: int = 0
    pid: int = 0
    user: int = 0
    mnt: int = 0
    cgroup: int = 0


class FileIdentity(msgspec.Struct, frozen=True):
    """The result of stat(2) and statx(2) for an open file, by which the file is recognised later.

    ``scope`` makes (dev, ino) unambiguous. Device numbers of tmpfs, overlayfs and loop devices are
    reused at once, and filesystem images with fixed times look alike; for these ``scope`` is the
    kernel's unique mount ID together with the boot ID. For other files on block devices it is
    empty, because ``dev`` is enough. ``None`` means that nothing unambiguous is available (before
    Linux 6.8), so the file has to be read. Times are in nanoseconds, ``mode`` is st_mode with the
    type bits.
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
    """The permission bits of a file, as far as its path lets users reach it, and its owner and
    group.
    """

    mode: int = 0o444
    uid: int = 0
    gid: int = 0

    def within(self, identity: FileIdentity, reach: int) -> tuple[FileIdentity, int]:
        """Restrict the identity and the reach of a member to users who may read this archive.

        If not all users may read the archive, a member that all could read gets the owner, group
        and mode of the archive. Any other member keeps its owner if that user may read the archive;
        if not, only root may read the member.
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

    ``path`` is the path as its users saw it, in their root, raw bytes; if there is no path, it is
    the name that perf uses (``[vdso]``, ``[kernel.kallsyms]``). ``container`` is a label for
    people, derived from namespaces and cgroup, empty on the host; never a key. ``scanner`` is the
    name of the scanner (proc, tree, kernel). ``apart`` has bit 1<<i set if the i-th of
    `NamespaceSet` differed from the host's at that time, as far as both were known; with
    ``cgroup``, another definition of a container can be applied later. ``cgroup_id`` is the number
    of the control group in the unified hierarchy, 0 if unknown; unlike the path, it is not reused
    until the next boot. ``reach`` has a bit for each class of users: the owner of the file (4), its
    group (2) and all others (1). A bit is set if all users of the class could reach the file along
    this path, see `capture.origin.path_access`. ``reach`` is 0 if only root could, or if it was not
    determined because the store knows that place of the file. ``archive`` is the path on the host
    of the package file that the file is in, if only root may write to it. ``signature`` is the IMA
    signature that a package has for the bytes, which is not verified here. ``standing`` is not
    stored with the place: it raises the standing of the bytes, as ``trust`` does. ``owner`` is the
    user who made the container or namespaces, 0 for root and if unknown; in the host's mount
    namespace it is the user for whom the file counts (`path_access.FileUsers`).
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
    owner: int = 0

    @property
    def is_public(self) -> bool:
        """Return True if all users could read the file there, and so may know of the place."""
        return self.reach == EVERYBODY and self.identity.mode & 0o444 == 0o444

    @property
    def shown_mode(self) -> int:
        """Return the permission bits that an artifact seen at this origin is shown with.

        These are the bits of the original that the reach allows, without write and set-ID bits.
        """
        mode = self.identity.mode & 0o555
        for who, bits in ((OWNER, 0o700), (GROUP, 0o070), (OTHERS, 0o007)):
            if not self.reach & who:
                mode &= ~bits
        return mode


class ContainerNames(msgspec.Struct, frozen=True):
    """The names of a container, as recorded by its engine.

    ``name`` is the name of the container; ``pod`` and ``namespace`` are those of its pod in
    Kubernetes. ``image`` has the name and the ID of its image, one line for each known one. Each is
    empty if unknown, and has printable characters only.
    """

    name: str = ""
    pod: str = ""
    namespace: str = ""
    image: str = ""

    @property
    def shown(self) -> str:
        """Return the known parts of ``NAMESPACE/POD/NAME``; empty if no name is known."""
        return "/".join(part for part in (self.namespace, self.pod, self.name) if part)

    def fits(self, text: str) -> bool:
        """Return True if ``text`` may stand for the container: it is its name, its pod, or both.

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

    ``origin`` is that file; ``pid`` is the process ID here, ``ns_pid`` the process ID in the
    process's own namespace. ``start_ticks`` is the start time of the process in clock ticks since
    the boot, ``boot_id`` the ID of this boot (hexadecimal), and ``start_ns`` the start time as Unix
    time. ``machine`` is the e_machine of its code, ``owner`` the user who made its container, on
    the host the user of the process.
    """

    pid: int
    ns_pid: int
    start_ticks: int
    start_ns: int
    boot_id: str
    comm: str
    machine: int
    origin: Origin
    owner: int = 0

    MOST_BYTES: ClassVar[int] = 32 << 20
    """The most bytes of names that are kept for a process."""

    @property
    def name(self) -> bytes:
        """Return the name for mappings of its generated code in a profile."""
        return b"[jit:%d]" % self.pid


class ByteRange(msgspec.Struct, frozen=True, array_like=True):
    """``size`` bytes from ``offset`` of a file."""

    offset: int
    size: int


class Artifact(msgspec.Struct, frozen=True):
    """The file served for (build ID, kind): one immutable blob and the attributes it is shown with.

    ``variant`` counts the variants of this (build ID, kind) in order of arrival and is never
    reused, so (ordinal, kind, variant) names bytes for ever. ``scripts`` are the extents of
    ``.debug_gdb_scripts`` sections. Every front door shows them as zeros, unless ``trust`` is HOST
    and ``standing`` is SYSTEM or GIVEN.
    ``mode`` holds permission bits only. ``segments`` is a hash of the loaded segments in the
    program headers of an ELF file, 0 if there are none: an executable and its debuginfo share it.
    ``truncated`` is True if debuggers refuse the file, see `ElfFile`. ``adopted`` is True if the
    build ID is not in the file, but is the htlhash of its bytes.
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
        """Return the section of the executable from which a debug file was made; empty if the file
        was not made but captured.

        A captured debug file has at least a symbol table.
        """
        return _MADE_OF.get(self.quality, "") if self.kind is Kind.DEBUGINFO else ""


_MADE_OF: Final = {Quality.DYNSYM: ".gnu_debugdata", Quality.GOPCLNTAB: ".gopclntab"}


class Mapping(msgspec.Struct, frozen=True):
    """One mapping of a process's address space, from PROCMAP_QUERY or /proc/PID/maps.

    Addresses and offset in bytes. ``dev`` is (major, minor) as the memory map shows it, which on
    overlayfs and btrfs is not the st_dev of stat(2): never compare the two. ``path`` is empty for
    anonymous memory; ``deleted`` is True if the kernel marked the name as unlinked.
    """

    start: int
    end: int
    executable: bool
    offset: int
    dev: tuple[int, int]
    inode: int
    path: bytes
    deleted: bool = False
