# SPDX-License-Identifier: Apache-2.0
"""IDs of ELF files other than the GNU build ID, against implementations that share no code."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.base import reader
from buildidfs.formats.elf import identify, other_ids
from buildidfs.model import Absence, AdoptedId, AliasType, BuildId
from tests.support.clients.tools import go_version
from tests.support.elf.elfwriter import (
    ET_CORE,
    ET_DYN,
    ET_REL,
    PT_NOTE,
    SHT_NOTE,
    Section,
    debuglink,
    elf_file,
    note,
)
from tests.support.filesystems.filereader import FileReader

_ENOUGH = 2000
_BAZEL = BuildId.from_hex("498919aff001d8366249403a2544fba2d833084f")
_GO_ID = b"abcDEF/123/xyz/_-4"


def _adopted(data: bytes) -> BuildId | Absence:
    read_at = FileReader(data)
    head = data[: identify.HEAD_SIZE]
    answer = identify.identify(head, read_at, len(data))
    return other_ids.adopted_id(answer, head, read_at, len(data))


def _independent_htlhash(path: Path) -> bytes:
    """The definition of libpf/fileid.go, by another way of reading."""
    with path.open("rb") as file:
        first = file.read(4096)
        size = file.seek(0, os.SEEK_END)
        file.seek(-min(4096, size), os.SEEK_END)
        text = first + file.read() + struct.pack(">Q", size)
    return hashlib.sha256(text).digest()[:16]


def _real_elf_files() -> Iterator[Path]:
    for root in ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/libexec", "/opt"):
        for directory, _, files in os.walk(root):
            for name in files:
                path = Path(directory, name)
                if path.is_symlink() or not path.is_file():
                    continue
                with path.open("rb") as file:
                    if file.read(4) == b"\x7fELF":
                        yield path


def test_htlhash_of_real_files_is_that_of_an_independent_implementation() -> None:
    files = list(itertools.islice(_real_elf_files(), _ENOUGH))
    assert len(files) > 300
    for path in files:
        with path.open("rb") as file:
            mine = other_ids.htlhash(reader(file.fileno()), os.fstat(file.fileno()).st_size)
        assert mine == _independent_htlhash(path), path


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 8191, 8192, 8193, 100_000])
def test_htlhash_of_any_size(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    data = path.read_bytes()
    assert other_ids.htlhash(FileReader(data), size) == _independent_htlhash(path)


def test_htlhash_of_a_kernel_is_fnv_of_its_digits() -> None:
    # Known values of FNV-1a, 128 bits (draft-eastlake-fnv): of "" and, by hand, of two digits.
    assert other_ids.kernel_htlhash(b"").hex() == "6c62272e07bb014262b821756295c58d"
    value = 0x6C62272E07BB014262B821756295C58D
    for byte in b"ab":
        value = ((value ^ byte) * 0x0000000001000000000000000000013B) % 2**128
    assert int.from_bytes(other_ids.kernel_htlhash(b"\xab"), "big") == value


def test_go_derives_the_shared_id_of_bazel() -> None:
    digest = hashlib.sha256(b"redacted").digest()[:20]  # cmd/link/internal/ld/elf.go
    assert bytes([digest[0] ^ 0xFF]) + digest[1:] == _BAZEL


@pytest.mark.parametrize("etype", [ET_DYN, ET_REL, ET_CORE])
def test_only_programs_and_libraries_get_an_adopted_id(etype: int) -> None:
    data = elf_file(etype=etype)
    answer = _adopted(data)
    if etype == ET_DYN:
        assert isinstance(answer, AdoptedId)
        assert answer == other_ids.htlhash(FileReader(data), len(data))
    else:
        assert answer is Absence.NO_BUILD_ID


def test_a_file_without_section_headers_gets_an_adopted_id() -> None:
    assert isinstance(_adopted(elf_file(section_headers=False)), AdoptedId)


def test_a_program_whose_sections_are_cut_off_gets_an_adopted_id() -> None:
    data = elf_file()
    (shoff,) = struct.unpack_from("<Q", data, 40)
    cut = data[:shoff]
    assert identify.identify(cut, FileReader(cut), len(cut)) is Absence.TRUNCATED
    assert isinstance(_adopted(cut), AdoptedId)
    assert _adopted(data[:128]) is Absence.TRUNCATED


def test_a_file_with_a_build_id_keeps_it() -> None:
    answer = _adopted(elf_file(build_id=b"\x01" * 20))
    assert answer == b"\x01" * 20
    assert not isinstance(answer, AdoptedId)


@pytest.mark.parametrize("shared", [bytes(_BAZEL), bytes(20), bytes(8), b"\x07"])
def test_an_id_that_files_share_or_that_is_none_gives_way_to_an_adopted_one(shared: bytes) -> None:
    data = elf_file(build_id=shared)
    assert _adopted(data) == other_ids.htlhash(FileReader(data), len(data))


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("little_endian", [True, False])
@pytest.mark.parametrize("in_segment", [True, False])
def test_go_build_id_is_found(bits: int, little_endian: bool, in_segment: bool) -> None:
    area = note(b"Go\0\0", 4, _GO_ID, little_endian=little_endian)
    section = Section(
        b".note.go.buildid", area, SHT_NOTE, segment=PT_NOTE if in_segment else 0, align=4
    )
    data = elf_file([section], bits=bits, little_endian=little_endian)  # type: ignore[arg-type]
    assert other_ids.go_build_id(data[:4096], FileReader(data), len(data)) == _GO_ID


def _compiled(tmp_path: Path, *options: str) -> Path:
    source = tmp_path / "main.c"
    source.write_text("int twice(int n) { return 2 * n; }\nint main(void) { return twice(0); }\n")
    program = tmp_path / "program"
    subprocess.run(["gcc", "-g", *options, "-o", program, source], check=True)
    return program


def _code(path: Path) -> bytes:
    data = path.read_bytes()
    return other_ids.code_hash(data[:4096], FileReader(data), len(data))


@pytest.mark.parametrize("options", [(), ("-Wl,-z,noseparate-code",), ("-static",)])
def test_code_hash_survives_strip_and_differs_for_other_code(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    program = _compiled(tmp_path, "-Wl,--build-id=none", *options)
    whole = _code(program)
    assert len(whole) == 32
    stripped = tmp_path / "stripped"
    subprocess.run(["strip", "-o", stripped, program], check=True)
    assert stripped.stat().st_size < program.stat().st_size
    assert _code(stripped) == whole
    other = _compiled(tmp_path, "-O2", "-Wl,--build-id=none", *options)
    assert _code(other) != whole


def test_code_hash_reads_no_more_than_the_file_has() -> None:
    data = bytearray(elf_file())
    assert len(other_ids.code_hash(bytes(data), FileReader(bytes(data)), len(data))) == 32
    struct.pack_into("<Q", data, 64 + 32, 1 << 60)
    read_at = FileReader(bytes(data))
    assert other_ids.code_hash(bytes(data), read_at, len(data)) == b""
    assert read_at.bytes_read <= 2 * len(data)


def test_aliases_of_a_file_are_typed() -> None:
    data = elf_file([debuglink(b"prog.debug", 0x01020304)], build_id=b"\1" * 20)
    read_at = FileReader(data)
    described = identify.describe(read_at, len(data))
    assert isinstance(described, identify.ElfFile)
    found = dict(other_ids.aliases(described, read_at, len(data), crc=True))
    assert found[AliasType.LINK] == b"\1\2\3\4prog.debug"
    assert len(found[AliasType.CRC32]) == 4
    assert found[AliasType.HTL] == other_ids.htlhash(read_at, len(data))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab" * 16, [(AliasType.HTL, b"\xab" * 16)]),
        ("HTL:" + "AB" * 16, [(AliasType.HTL, b"\xab" * 16)]),
        ("ab" * 32, [(None, b"\xab" * 32), (AliasType.CODE, b"\xab" * 32)]),
        ("sha256:" + "ab" * 32, [(None, b"\xab" * 32)]),
        ("crc32:01020304", [(AliasType.CRC32, b"\1\2\3\4")]),
        (_GO_ID.decode(), [(AliasType.GO, _GO_ID)]),
        (_GO_ID.hex(), [(AliasType.GO, _GO_ID)]),
        ("gohex:" + _GO_ID.hex(), [(AliasType.GO, _GO_ID)]),
        ("abc", []),
        ("", []),
        ("htl:zz", []),
    ],
)
def test_text_is_read_as_an_alias(
    text: str, expected: list[tuple[AliasType | None, bytes]]
) -> None:
    assert other_ids.parse_alias(text) == expected


def test_go_build_id_of_a_real_program_is_that_of_go_tool(tmp_path: Path) -> None:
    assert shutil.which("go"), "golang-go is not installed"
    source = tmp_path / "main.go"
    source.write_text("package main\nfunc main() { println(1) }\n")
    environment = {**os.environ, "HOME": str(tmp_path), "GOFLAGS": "-mod=mod"}
    program = tmp_path / "program"
    subprocess.run(["go", "build", "-o", program, source], check=True, env=environment)
    said = subprocess.run(
        ["go", "tool", "buildid", program], check=True, capture_output=True, env=environment
    ).stdout.strip()
    data = program.read_bytes()
    assert other_ids.go_build_id(data[:4096], FileReader(data), len(data)) == said
    assert isinstance(_adopted(data), AdoptedId) == (go_version() < (1, 24))
