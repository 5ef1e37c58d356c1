# SPDX-License-Identifier: Apache-2.0
"""Directories, and processes, full of files made to be captured wrongly: from disk to the mount.

Whatever is in a file, it is captured, has no build ID, or is said to be unreadable. What is
captured is served byte for byte, under the build ID that these bytes have, the store is sound, and
none of it takes memory in proportion to what the files claim.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import random
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.formats.elf.identify import HEAD_SIZE, ElfFile
from buildidfs.formats.elf.other_ids import code_hash, describe, htlhash
from buildidfs.store import Store
from buildidfs.view import blank
from tests.fuzz import decoders, elf_mutation
from tests.support.clients.tools import Argument, run, tool
from tests.support.elf import mapper
from tests.support.elf.elfwriter import DWARF, TEXT, altlink, debuglink, elf_file, gdb_scripts
from tests.support.filesystems.filereader import FileReader
from tests.support.harness.children import running
from tests.support.harness.mounts import COMMAND

if TYPE_CHECKING:
    from buildidfs.model import Absence
    from tests.support.elf.programs import Program
    from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse]

# Of the whole process: what it always has, and tables of section headers of a few files at once.
MEMORY = 256 << 20
ROOT = Path(__file__).resolve().parents[2]

# A process has had the memory of what it was before it ran a program: here as little as can be.
_MEASURE = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    file.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)
"""


def damaged(program: Program, count: int, seed: int) -> Iterator[bytes]:
    """Files of a compiler and others, of which headers were changed, and worse."""
    chosen = random.Random(seed)
    real = [
        path.read_bytes()
        for binary in program.binaries
        for path in (binary.shipped, binary.debug, binary.compiled)
    ]
    good = [*real, *elf_mutation.seeds()]
    yield from good
    ids = [bytes.fromhex(binary.build_id) for binary in program.binaries]
    for _ in range(count):
        # each with a build ID of its own, of which one would be served
        data, own = chosen.choice(good), chosen.randbytes(20)
        for build_id in (*ids, elf_mutation.BUILD_ID):
            data = data.replace(build_id, own)
        yield elf_mutation.mutated(data, chosen)
    yield from decoders.TARGETS["elf"].worst()
    yield b"\x7fELF"
    yield b"\x7fELF\x02\x01\x01" + bytes(57)
    yield gzip.compress(real[0])
    # tables, names and notes in the holes of a file that is none but for its headers
    header = bytearray(elf_file([TEXT], build_id=b"\x77" * 20))
    struct.pack_into("<Q", header, 40, 1 << 20)
    struct.pack_into("<HHH", header, 58, 64, 0, 1)
    yield (
        bytes(header).ljust(1 << 20, b"\0")
        + struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, (16 << 20) // 64, 0, 0, 0, 0)
        + struct.pack("<IIQQQQIIQQ", 1, 7, 2, 0, 64, 1 << 20, 0, 0, 4, 0)
    )


def write(directory: Path, contents: Sequence[bytes]) -> None:
    """Files of these contents, the last of which goes on with a hole."""
    directory.mkdir(parents=True)
    for number, data in enumerate(contents):
        (directory / f"f{number:04}").write_bytes(data)
    os.truncate(directory / f"f{len(contents) - 1:04}", 40 << 20)


def measured(buildidfs: BuildIdFs, *arguments: Argument) -> dict[str, object]:
    """What a command with --json printed; it may find some files unreadable, but not use memory."""
    argv = [*COMMAND, "--store", buildidfs.store, *arguments, "--json"]
    with tempfile.NamedTemporaryFile("r") as peak:
        scan = run([sys.executable, "-c", _MEASURE, peak.name, *argv], cwd=ROOT)
        assert scan.rc in (0, 3)
        assert 0 < int(peak.read()) << 10 < MEMORY
    summary: dict[str, object] = json.loads(scan.out)
    return summary


def assert_sound(buildidfs: BuildIdFs, sources: dict[str, bytes]) -> dict[str, str]:
    """The store is; and every artifact in the mount is one of ``sources``, whole, with its own ID.

    Only a program whose ID another one has with its code elsewhere is also there by its hash. The
    debuginfo below a hash has the same ID as the program, or the same code. Returns the build IDs
    by digest.
    """
    served: dict[str, str] = {}
    lent = []
    # Each file is there under two names, in two mounts.
    described_once = functools.cache(_described)
    with Store.open(buildidfs.store, read_only=True) as store:
        assert list(store.check(digests=True)) == []
    for options in (["--gdb-scripts=keep"], []):
        with buildidfs.mounted(*options) as mount:
            for build_id in os.listdir(mount):
                if not build_id.isalnum() or build_id in ("buildid", "debug", "perf", "usr"):
                    continue
                program = None
                for name in ("elf", "debug"):
                    path = mount / build_id / name
                    if not path.exists():
                        continue
                    data = path.read_bytes()
                    source = sources[_source(data, sources, described_once, zeroed=not options)]
                    described = described_once(source)
                    assert isinstance(described, ElfFile)
                    if build_id in (described.build_id.hex(), _hashed(source)):
                        served[hashlib.sha256(source).hexdigest()] = build_id
                    else:
                        lent.append((build_id, name, program, source))
                    program = source
    for build_id, name, program, source in lent:
        assert name == "debug"
        assert program is not None
        assert _hashed(program) == build_id
        if _own_id(program) != _own_id(source):
            assert _code(program) == _code(source) != b""
    return served


def _own_id(data: bytes) -> bytes:
    described = _described(data)
    assert isinstance(described, ElfFile)
    return bytes(described.build_id)


def _hashed(data: bytes) -> str:
    return htlhash(FileReader(data), len(data)).hex()


def _code(data: bytes) -> bytes:
    return code_hash(data[:HEAD_SIZE], FileReader(data), len(data))


def _described(data: bytes) -> ElfFile | Absence:
    return describe(FileReader(data), len(data))


def _source(
    data: bytes,
    sources: dict[str, bytes],
    described: Callable[[bytes], ElfFile | Absence],
    *,
    zeroed: bool,
) -> str:
    """The digest of the source that was served so."""
    digest = hashlib.sha256(data).hexdigest()
    if digest in sources or not zeroed:
        assert digest in sources, "nobody had these bytes"
        return digest
    for original, source in sources.items():
        if len(source) == len(data) and _blanked(source, described(source)) == data:
            return original
    raise AssertionError("nobody had these bytes, scripts zeroed or not")


def _blanked(source: bytes, described: ElfFile | Absence) -> bytes:
    scripts = described.scripts if isinstance(described, ElfFile) else ()
    data = bytearray(source)
    blank(data, 0, scripts)
    return bytes(data)


def by_digest(*directories: Path) -> dict[str, bytes]:
    """The contents of all files of some directories."""
    found = {}
    for directory in directories:
        for path in directory.iterdir():
            if path.is_file():
                data = path.read_bytes()
                found[hashlib.sha256(data).hexdigest()] = data
    return found


def test_directory_of_damaged_files(buildidfs: BuildIdFs, program: Program) -> None:
    files = buildidfs.store.parent / "files"
    write(files, list(damaged(program, 250, 1)))
    summary = measured(buildidfs, "scan", "tree", files)
    served = assert_sound(buildidfs, by_digest(files))
    assert summary["files"] == len(list(files.iterdir()))
    assert len(served) > 100, "most of them have lost nothing that matters"
    for binary in program.binaries:
        # of its variants the one that tells most
        assert hashlib.sha256(binary.compiled.read_bytes()).hexdigest() in served
    again = measured(buildidfs, "scan", "tree", files)
    assert (again["captured"], again["copied_bytes"]) == (0, 0)


def test_process_with_damaged_files_and_what_they_lead_to(
    buildidfs: BuildIdFs, program: Program
) -> None:
    """In a root of its own, with debug files of any content where their names say."""
    root = buildidfs.store.parent / "root"
    files, beside, by_id = root / "files", root / "files/.debug", root / "usr/lib/debug/.build-id"
    contents = list(damaged(program, 100, 2))
    names = (b"a.debug", b"../a.debug", b"fifo", b"link", b"b.debug", b"\xff", b"x" * 255, b".")
    ids = [bytes([number]) * 20 for number in range(1, len(names) + 1)]  # all zeros would be none
    contents[:0] = [
        elf_file(
            [TEXT, debuglink(name, 7), altlink(b"../" * 9 + name, b"\x55" * 20)], build_id=each
        )
        for each, name in zip(ids, names, strict=True)
    ]
    write(files, contents)
    debug = [elf_file([DWARF, gdb_scripts("x")], build_id=each) for each in ids]
    debug += list(damaged(program, 10, 3))[:10]
    write(beside, debug)
    for name, data in ((b"a.debug", debug[0]), (b"b.debug", b"\x7fELF"), (b"\xff", debug[5])):
        (beside / os.fsdecode(name)).write_bytes(data)
    os.mkfifo(beside / "fifo")
    (beside / "link").symlink_to("link")
    for number, each in enumerate(ids):
        place = by_id / each.hex()[:2] / f"{each.hex()[2:]}.debug"
        place.parent.mkdir(parents=True)
        place.write_bytes(debug[number + number % 2])
    mapper.build(root / "mapper")
    with running([tool("chroot"), root, "/mapper", "/files"]) as process:
        measured(buildidfs, "scan", "proc", "--pid", str(process.pid))
    sources = by_digest(root, files, beside, *by_id.iterdir())
    with Store.open(buildidfs.store, read_only=True) as store:
        origins = {
            record.origin.path
            for ordinal, _ in store.index.build_ids_from()
            for record in store.index.origins(ordinal)
        }
    served = assert_sound(buildidfs, sources)
    assert len(origins) > 50
    for number, each in enumerate(ids):
        digest = hashlib.sha256(debug[number + number % 2]).hexdigest()
        # of those with an odd number the file under their build ID has another
        assert (served.get(digest) == each.hex()) == (number % 2 == 0)
