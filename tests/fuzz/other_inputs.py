# SPDX-License-Identifier: Apache-2.0
"""Compressed files, names of debug files, settings, names: what else strangers and users give."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import lzma
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import zstandard

from buildidfs import config, names
from buildidfs.capture.archive import stream
from buildidfs.capture.base import Unreadable, memory_file
from buildidfs.capture.debug_files import Companions
from buildidfs.errors import BuildIdFsError, InvalidBuildId, UsageError
from buildidfs.formats import package_databases
from buildidfs.formats.budget import Budget, Spent
from buildidfs.formats.elf.header import SHF_COMPRESSED
from buildidfs.formats.elf.identify import AltLink, DebugLink, ElfFile
from buildidfs.formats.rpm_database import RpmDatabase
from buildidfs.model import BuildId, Kind, Quality
from buildidfs.mount import mountpoint
from tests.fuzz import elf_mutation
from tests.fuzz.own_formats import store
from tests.fuzz.target import MEGABYTE, Target, filled, refusal, scratch
from tests.support.elf.elfwriter import TEXT, Section, elf_file
from tests.support.harness.scans import Memory

# --- compressed files ----------------------------------------------------------------------------

_PLAIN: Final = elf_file([TEXT], build_id=elf_mutation.BUILD_ID) * 3
_LIMIT: Final = 48 << 20
_SUFFIXES: Final = (b".xz", b".gz", b".zst")


def _check_compressed(data: bytes) -> None:
    for suffix in _SUFFIXES:
        _decompress(data, suffix)


def _decompress(data: bytes, suffix: bytes) -> None:
    def attempt() -> None:
        plain_fd = stream.decompressed(fd, b"module.ko" + suffix, _LIMIT)
        assert plain_fd is not None
        os.close(plain_fd)

    fd = memory_file(b"compressed", data)
    try:
        error = refusal(attempt, stream.CannotDecompress)
    finally:
        os.close(fd)
    assert error is None or str(error).isprintable()


def _seed_compressed() -> Iterator[bytes]:
    yield lzma.compress(_PLAIN)
    yield lzma.compress(_PLAIN, check=lzma.CHECK_CRC32, preset=0) * 2
    yield gzip.compress(_PLAIN, mtime=0)
    yield zstandard.compress(_PLAIN)


def _huge_compressed() -> Iterator[bytes]:
    """Bombs, and what begins anew again and again."""
    blank = io.BytesIO()
    with lzma.open(blank, "wb", preset=0) as file:
        for _ in range(64):
            file.write(bytes(MEGABYTE))
    yield blank.getvalue()
    yield filled(lzma.compress(b""))
    yield lzma.compress(b"") + bytes(MEGABYTE - 64)
    yield lzma.compress(os.urandom(MEGABYTE - 80_000)) + blank.getvalue()[:79_000]
    # a dictionary of 4 GiB, in the older form that has no checksum of its header
    yield b"\x5d" + b"\xff" * 12 + bytes(1024)
    blank = io.BytesIO()
    with gzip.open(blank, "wb") as file:
        for _ in range(64):
            file.write(bytes(MEGABYTE))
    yield blank.getvalue()[:MEGABYTE]
    yield filled(gzip.compress(b"", mtime=0))
    yield gzip.compress(b"", mtime=0) + bytes(MEGABYTE - 64)
    yield b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * (MEGABYTE - 64)
    yield b"\x1f\x8b\x08\x18" + bytes(6) + b"\0" + b"n" * (MEGABYTE - 64)
    compressor = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=27)
    )
    blank = io.BytesIO()
    with compressor.stream_writer(blank, closefd=False) as writer:
        for _ in range(64):
            writer.write(bytes(MEGABYTE))
    yield blank.getvalue()
    yield filled(zstandard.compress(b""))
    yield b"\x28\xb5\x2f\xfd\x80\x58" + b"\xff" * 4 + bytes(64)


# --- names of debug files ------------------------------------------------------------------------


@functools.cache
def _root() -> tuple[int, frozenset[bytes]]:
    """A root with a debug file and ways out of it; and what of it may be found."""
    root = scratch() / "root"
    for directory in ("bin/.debug", "usr/lib/debug/.dwz", "usr/lib/debug/bin"):
        (root / directory).mkdir(parents=True)
    inside = elf_file([TEXT], build_id=elf_mutation.BUILD_ID)
    (root / "bin/app.debug").write_bytes(inside)
    (root / "usr/lib/debug/.dwz/common").write_bytes(inside)
    # the same outside, to which nothing may lead
    (scratch() / "app.debug").write_bytes(inside)
    (scratch() / "common").write_bytes(inside)
    (root / "bin/up").symlink_to("../../..")
    (root / "bin/out").symlink_to(scratch())
    (root / "bin/magic").symlink_to("/proc/self/root")
    os.mkfifo(root / "bin/fifo")
    allowed = {
        (root / "bin/app.debug").stat().st_ino,
        (root / "usr/lib/debug/.dwz/common").stat().st_ino,
    }
    return os.open(root, os.O_PATH | os.O_DIRECTORY), frozenset(
        str(ino).encode() for ino in allowed
    )


def _check_links(name: bytes) -> None:
    """Whatever a binary says its debug file is called, only files of its own root are found."""
    name = name.replace(b"\0", b"") or b"x"  # the decoder ends it at the first NUL
    root_fd, allowed = _root()
    binary = ElfFile(
        BuildId(elf_mutation.BUILD_ID), (Kind.EXECUTABLE,), Quality.NONE, DebugLink(name, 1),
        AltLink(name, BuildId(elf_mutation.BUILD_ID)), (), 62, 64, True, 3, False, 0,
    )  # fmt: skip
    for path in (b"/bin/app", b"bin/app", b"/bin/" + name):
        for found in Companions(root_fd, Memory()).of(path, binary):
            if isinstance(found, Unreadable):
                assert found.reason
                continue
            with found:
                assert b"%d" % found.identity.ino in allowed


def _seed_links() -> Iterator[bytes]:
    for name in ("app.debug", "../app.debug", "up/app.debug", "/usr/lib/debug/.dwz/common", "magic",
                 "../usr/lib/debug/.dwz/common", "x/.dwz/common", "/proc/self/root/etc/passwd",
                 "out/common", "fifo", "/.dwz/../../../common", ".", "..", "/"):  # fmt: skip
        yield name.encode()


def _huge_links() -> Iterator[bytes]:
    for unit in (b"a", b"/", b"../", b"./", b"a/", b"a/../", b"/.dwz/", b"\xff", b"up/"):
        yield filled(unit, _LINK_BYTES)


_LINK_BYTES: Final = 4096 + 128
"""The decoder takes no longer section for a link."""

# --- settings and names --------------------------------------------------------------------------


def _check_config(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    for attempt in (lambda: config.parse(text, "x.toml"), lambda: config.size(text)):
        error = refusal(attempt, UsageError)
        assert error is None or str(error)


def _seed_config() -> Iterator[bytes]:
    yield (Path(__file__).resolve().parents[2] / "examples/buildidfs.toml").read_bytes()
    yield b'[watch]\npin-seconds = 0.5\npin-bytes = "1.5 GB"\nexclude = ["/a/*"]\n'
    yield b"512MiB"
    yield b"[mount]\noptions = ['allow_other']\ngdb-scripts = 'keep'"


def _huge_config() -> Iterator[bytes]:
    """Not huge: its author is trusted, and dotted keys take the square of their number."""
    yield b"a=" + filled(b"[", 4000)
    yield b"a=" + filled(b"{a=", 4000)
    yield filled(b"[[a]]\n", 4000)
    yield filled(b"a.", 4000) + b"a=1"
    yield b"[watch]\npin-bytes=" + filled(b"9", 5000)
    yield b"[watch]\npin-bytes='" + filled(b"9", 5000) + b"'"
    yield filled(b"9", 4000) + b"." + filled(b"9", 4000) + b"TiB"
    yield filled(b" ", 8000) + b"x"


def _check_names(data: bytes) -> None:
    build_id = names.parse(data)
    assert build_id is None or names.spell(build_id) == data
    assert names.bucket(data) in (None, *range(256))
    for first in (0, 255, data[0] if data else 1):
        parsed = names.parse_split(first, data)
        if parsed is not None:
            directory, rest = names.split(parsed[0])
            assert (directory, rest + names.DEBUG_SUFFIX * parsed[1]) == (b"%02x" % first, data)
    text = data.decode("utf-8", "surrogateescape")
    with contextlib.suppress(InvalidBuildId):
        assert BuildId.from_hex(text).hex() == text.lower()
    with contextlib.suppress(BuildIdFsError):
        store().index.match(text)
    with contextlib.suppress(BuildIdFsError):
        mountpoint.parse(b"/store", b"/mount", text.split(","))


def _seed_names() -> Iterator[bytes]:
    yield from (b"ab", b"abcd", b"ABCD", b"abcdef.debug", b"e" * 240, b"f" * 242, b"abc")
    yield from (b"allow_other,loop=plain", b"noallow_other")


def _huge_names() -> Iterator[bytes]:
    for unit in (b"a", b"ab.debug", b"\xff", b",", b"loop=", b"0"):
        yield filled(unit, 65536)


# --- debug information that is compressed --------------------------------------------------------


def _check_sections(data: bytes) -> None:
    fd = memory_file(b"sections", data)
    try:
        error = refusal(lambda: stream.unpack_sections(fd, 1 << 30), stream.CannotDecompress)
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    assert error is None or str(error).isprintable()
    assert len(data) <= size <= 33 * len(data) + _LIMIT


def _packed(plain: bytes, *, size: int | None = None) -> bytes:
    """Sections that zstd has compressed, unpacked."""
    head = struct.pack("<I4xQQ", 2, len(plain) if size is None else size, 1)
    return head + zstandard.compress(plain)


def _sections(content: bytes, count: int = 1) -> bytes:
    """A file with so many sections that have the same content, in the same place."""
    first = Section(b".debug_info", content, flags=SHF_COMPRESSED)
    file = elf_file([TEXT, first], build_id=elf_mutation.BUILD_ID)
    other = Section(
        b".debug_str", flags=SHF_COMPRESSED, size=len(content), offset=file.index(content)
    )
    return elf_file([TEXT, first, *[other] * (count - 1)], build_id=elf_mutation.BUILD_ID)


def _seed_sections() -> Iterator[bytes]:
    yield _sections(_packed(b"DWARF" * 100))
    yield _sections(_packed(b"DWARF" * 100, size=9))
    yield _sections(_packed(bytes(1 << 20)))


def _huge_sections() -> Iterator[bytes]:
    yield _sections(_packed(bytes(40 << 20)))
    yield _sections(_packed(b"", size=(1 << 64) - 1))
    yield _sections(_packed(os.urandom(MEGABYTE - 80_000)))
    yield _sections(_packed(bytes(1 << 20)), 5000)


# --- names in JSON -------------------------------------------------------------------------------


def _check_json(data: bytes) -> None:
    value = data.decode("utf-8", "replace")
    text = names.json_escaped(msgspec.json.encode(value))
    assert text.decode().isprintable()
    assert msgspec.json.decode(text) == value


def _seed_json() -> Iterator[bytes]:
    yield "/a\x9b31m\u202e\U000e0001\x7fb".encode()


def _huge_json() -> Iterator[bytes]:
    yield filled("\x9b".encode())
    yield filled("\U000e0001".encode())
    yield filled("\u4e2d".encode())


# --- notes of package managers -------------------------------------------------------------------

_PACKAGED: Final = (b"/usr/bin/true", b"/bin/true")


def _check_package_databases(text: bytes) -> None:
    lists = package_databases.dpkg_lists([(b"coreutils", text)])
    sums = package_databases.dpkg_lists([(b"coreutils", package_databases.md5sums_as_list(text))])
    for each in (lists, sums):
        name = package_databases.dpkg_owner(each, _PACKAGED)
        assert b"\n" not in name
        assert len(name) <= len(text) + len(b"coreutils")
    for package in (
        package_databases.dpkg_version(text, b"coreutils"),
        package_databases.dpkg_version(text, b"coreutils:amd64"),
        package_databases.apk_owner(text, _PACKAGED),
        package_databases.from_note(text),
    ):
        _check_package(package)
    before = package_databases.dpkg_version_before(text, 0.0, "coreutils", 0.0, 0.0)
    _check_package(package_databases.Package("coreutils", before))
    with contextlib.suppress(sqlite3.Error, Spent), opened(text) as connection:
        database = RpmDatabase(connection, Budget(1 << 20))
        _check_package(database.owner(_PACKAGED))


@contextlib.contextmanager
def opened(raw: bytes) -> Iterator[sqlite3.Connection]:
    """A database in memory."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(raw or b"\0")
        yield connection
    finally:
        connection.close()


def _check_package(package: package_databases.Package) -> None:
    for part in (package.name, package.version):
        assert not part or part.isprintable()
        assert len(part) <= 128


def rpm_database(*more: str) -> bytes:
    """A database as rpm has it, with one package of one file; ``more`` statements change it."""
    strings = b"coreutils\x009.4\x001\0true\0/usr/bin/\0\0\0\0\0"
    entries = [(1000, 6, 0, 1), (1001, 6, 10, 1), (1002, 6, 14, 1), (1117, 8, 16, 1),
               (1118, 8, 21, 1), (1116, 4, 32, 1)]  # fmt: skip
    header = struct.pack(">II", len(entries), 36) + b"".join(
        struct.pack(">IIII", *entry) for entry in entries
    )
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA page_size=512")
    connection.execute("CREATE TABLE 'Packages' (hnum INTEGER PRIMARY KEY, blob BLOB NOT NULL)")
    connection.execute("CREATE TABLE 'Basenames' (key 'TEXT', hnum INTEGER, idx INTEGER)")
    connection.execute("CREATE INDEX 'Basenames_key_idx' ON 'Basenames'(key ASC)")
    blob = header + strings.ljust(32, b"\0") + struct.pack(">I", 0)
    connection.execute("INSERT INTO Packages VALUES (1, ?)", (blob,))
    connection.execute("INSERT INTO Basenames VALUES ('true', 1, 0)")
    for statement in more:
        connection.execute(statement)
    connection.commit()
    raw = connection.serialize()
    connection.close()
    return raw


# What makes one row cost much: names of one file in many rows, a view that does not end, and rows
# without an index.
_COUNTED: Final = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT {})"
COSTLY: Final = (
    (f"INSERT INTO Basenames {_COUNTED.format(20_000)} SELECT 'true', 1, 1 FROM n",),
    (
        "DROP TABLE Basenames",
        f"CREATE VIEW Basenames(key, hnum, idx) AS {_COUNTED.format(1 << 40)}"
        " SELECT 'x', x, x FROM n",
    ),
    (
        "DROP INDEX Basenames_key_idx",
        f"INSERT INTO Basenames {_COUNTED.format(50_000)} SELECT 'other', 1, 1 FROM n",
    ),
    (f"INSERT INTO Packages {_COUNTED.format(2)} SELECT x + 1, zeroblob(400000) FROM n",
     "UPDATE Basenames SET hnum = 2"),
)  # fmt: skip


def _seed_package_databases() -> Iterator[bytes]:
    yield b"/.\n/usr/bin\n/usr/bin/true\n"
    yield b"0123456789abcdef  usr/bin/true\n"
    yield (
        b"Package: bash\nArchitecture: amd64\nVersion: 5.2-1\n\n"
        b"Package: coreutils\nArchitecture: arm64\nVersion: 9.4-2\n\n"
        b"Package: coreutils\nArchitecture: amd64\nVersion: 9.4-3\n"
    )
    yield rpm_database()
    yield b"C:Q1\nP:bash\nV:5\nF:bin\nR:bash\n\nC:Q1\nP:coreutils\nV:9.4-r1\nF:bin\nR:true\n"


def _huge_package_databases() -> Iterator[bytes]:
    for unit in (
        *(b"\nR:true", b"\nR:true\n", b"\nF:bin", b"\nF:bin\n", b"\nF:bin\nR:false"),
        *(b"\nF:lib\nR:true", b"\n\nF:bin\nR:tru", b"P:a\n", b"\0", b"\n", b"/usr/bin/tru\n"),
        *(b"\n\nPackage: coreutils\n", b"\n\nPackage: coreutils\nArchitecture: i386\n", b"  \n"),
    ):
        yield filled(unit)
        yield filled(unit, MEGABYTE - 64) + b"\nF:bin\nR:true\n\nPackage: coreutils\nVersion: 1\n"
    for statements in COSTLY:
        yield rpm_database(*statements)


TARGETS: Final = {
    "packagedatabases": Target(
        _check_package_databases,
        _seed_package_databases,
        _huge_package_databases,
        ("package_databases", "rpm_database"),
    ),
    "json": Target(_check_json, _seed_json, _huge_json, ()),
    "zstdsections": Target(_check_sections, _seed_sections, _huge_sections, ("elf.sections",)),
    "compressed": Target(_check_compressed, _seed_compressed, _huge_compressed),
    "links": Target(_check_links, _seed_links, _huge_links, most=_LINK_BYTES),
    "config": Target(_check_config, _seed_config, _huge_config, most=1 << 13),
    "names": Target(_check_names, _seed_names, _huge_names, most=1 << 16),
}
