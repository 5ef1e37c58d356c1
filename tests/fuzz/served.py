# SPDX-License-Identifier: Apache-2.0
"""What a server reads: line tables, archives of sources, and requests."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator
from typing import Final

from buildidfs.formats import source_archive
from buildidfs.formats.elf import code_file, line_files, other_ids
from buildidfs.formats.elf.header import SHF_COMPRESSED
from buildidfs.serve import messages, symbolication
from buildidfs.serve.page import upload
from tests.fuzz.target import MEGABYTE, Target, filled, refusal
from tests.support.elf.elfwriter import Section, elf_file
from tests.support.filesystems.filereader import FileReader

# --- line tables ---------------------------------------------------------------------------------


def _check_line_files(data: bytes) -> None:
    names = line_files.SourceNames(FileReader(data), len(data))
    found = list(names.files())
    assert len(set(found)) == len(found)
    for each in found:
        # A path is relative if damage hides the directory of the compilation.
        assert 0 < len(each.path) <= 4096
        assert b"\0" not in each.path
        assert len(each.md5) in (0, 16) or each.md5
    directories = list(names.directories())
    assert len(set(directories)) == len(directories)


def table(body: bytes, version: int = 5) -> bytes:
    """A line table with the lists of directories and files in ``body``."""
    addresses = bytes([8, 0]) if version == 5 else b""
    fixed = bytes([1, 1, 1, 0xFB, 14]) if version >= 4 else bytes([1, 1, 0xFB, 14])
    header = fixed + bytes([13]) + bytes(12) + body
    rest = struct.pack("<H", version) + addresses + struct.pack("<I", len(header)) + header
    return struct.pack("<I", len(rest)) + rest


def lined(lines: bytes, strings: bytes = b"/src\0a.c\0") -> bytes:
    """An ELF file with line tables."""
    return elf_file([Section(b".debug_line", lines), Section(b".debug_line_str", strings)])


def _packed_lines(lines: bytes) -> bytes:
    """The same with compressed line tables."""
    packed = struct.pack("<IIQQ", 1, 0, len(lines), 1) + zlib.compress(lines)
    return elf_file([Section(b".debug_line", packed, flags=SHF_COMPRESSED)])


def _seed_line_files() -> Iterator[bytes]:
    directories = bytes([1, 1, 0x1F, 1]) + struct.pack("<I", 0)
    files = bytes([3, 1, 0x1F, 2, 0x0B, 5, 0x1E, 1]) + struct.pack("<IB", 5, 0) + bytes(16)
    yield lined(table(directories + files) * 2)
    yield lined(table(b"/src\0inc\0\0a.c\0\1\0\0/b.c\0\0\0\0\0", 4))
    yield lined(table(b"\0\0", 2))


def _huge_line_files() -> Iterator[bytes]:
    """As many entries, directories and long names as fit."""
    size = MEGABYTE - 65536
    small = bytes([1, 1, 0x0B]) + b"\xff\xff\xff\x01" + bytes(size)
    yield lined(table(small))
    yield lined(table(bytes([0]) + b"\xff\xff\xff\x01" + bytes([0])))
    yield lined(table(filled(b"a\0", size // 2) + b"\0" + filled(b"b\0\1\0\0", size // 2), 4))
    yield lined(filled(table(b"\0\0", 4), size))
    path = b"/" + b"x" * 4000 + b"\0"
    many = bytes([1, 1, 0x1F]) + b"\xff\xff\x01" + bytes(4 * 32767)
    yield lined(filled(table(many), size - 8192), path)
    for kind in (bytes([1, 1, 0x1F, 2, 1]), bytes([1, 2, 0x0B, 2, 1])):
        yield lined(filled(table(bytes([1, 1, 0x1F, 1]) + bytes(4) + kind), size), path)
    # a name of a directory that is joined to the names of all files and directories
    longest = b"/" + b"d" * (510 << 10) + b"\0"
    count = bytes([0xA0, 0x8D, 0x06])  # 100,000
    files = bytes([1, 1, 0x08]) + count + b"f\0" * 100_000
    yield lined(table(bytes([1, 1, 0x08, 1]) + longest + files), b"")
    yield lined(table(bytes([1, 1, 0x08]) + count + longest + b"f\0" * 99_999), b"")
    for units in (1, 40):
        text = table(bytes([1, 1, 0x08, 1]) + longest + files) * units
        yield _packed_lines(text)
        yield _packed_lines(filled(table(b"a\0\0" + b"b\0\1\0\0" * 1000 + b"\0", 4), 60 << 20))


# --- archives of sources -------------------------------------------------------------------------


def _check_archive(data: bytes) -> None:
    found = source_archive.unpack(FileReader(data), len(data))
    for extent in (found or {}).values():
        assert 0 <= extent.offset <= extent.offset + extent.size <= len(data)
    path = source_archive.normal(data)
    assert path.startswith(b"/")
    assert source_archive.normal(path) == path
    assert not {b"..", b"."} & set(path.split(b"/"))


def _seed_archive() -> Iterator[bytes]:
    yield source_archive.pack([(b"/a.c", 2), (b"/b.c", 3)]) + b"aabbb"
    yield b"/a/../b//./c/.."


def _huge_archive() -> Iterator[bytes]:
    head = struct.Struct("<16sQ")
    body = b"\xdd" + struct.pack(">I", 100_000) + b"\x93\xc4\x02/x\x00\x00" * 100_000
    yield head.pack(b"buildid sources\n", len(body)) + body
    deep = b"\x91" * (MEGABYTE - 64)
    yield head.pack(b"buildid sources\n", len(deep)) + deep
    yield filled(b"a/../", MEGABYTE)
    yield filled(b"a/", MEGABYTE)


# --- requests ------------------------------------------------------------------------------------


def _check_request(data: bytes) -> None:
    """Whatever a client sends is refused as such, or has a meaning within bounds."""
    refusal(lambda: messages.parse_target(data), messages.BadRequest)
    refusal(lambda: messages.parse_query(data), messages.BadRequest)
    part = messages.parse_range(data, 1000)
    assert part is None or 0 <= part[0] <= part[0] + part[1] <= 1000
    messages.accepts_zstd(data)
    messages.matches(data, b'"x"')
    messages.number(data)
    shown = messages.header_text(data)
    assert not set(shown) & {0, 10, 13, 27}


def _seed_request() -> Iterator[bytes]:
    yield b"/buildid/00ff/source/a%20b?key=glob&value=%2Fx"
    yield b"http://host/buildid"
    yield b"bytes=5-9"
    yield b"gzip;q=0.5, zstd;q=1.0, *;q=0"
    yield b'W/"x", "y"'


def _huge_request() -> Iterator[bytes]:
    size = messages.MAX_TARGET * 4
    for unit in (b"%41", b"%", b"a=%20&", b"gzip;q=0.5,", b'"x",', b"bytes=1-2,", b"1", b"\x1b"):
        yield filled(unit, size)


# --- uploads -------------------------------------------------------------------------------------

_FORM: Final = b"multipart/form-data; boundary=x"


def _check_upload(data: bytes) -> None:
    """The file of a form is no longer than its body, and a part of it unless it is encoded."""
    for body, kind in ((data, _FORM), (b"--x\r\n\r\n--x--", data)):
        with contextlib.suppress(messages.BadRequest):
            content = upload.file_in(body, kind)
            assert content in body or b"transfer-encoding" in body.lower()
            assert len(content) <= len(body)


def _seed_upload() -> Iterator[bytes]:
    yield b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nbytes\r\n--x--\r\n'
    yield b'multipart/form-data; charset=utf-8; boundary="----x"'


def _huge_upload() -> Iterator[bytes]:
    for unit in (b"--x\r\n", b"\r\n--x", b'name="', b"boundary=", b"multipart/form-data;"):
        yield filled(unit)
    yield b"multipart/form-data;" + filled(b"boundary=", MEGABYTE - 100)
    yield b'--x\r\n name="' + filled(b"a", MEGABYTE - 100)
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    yield part + filled(b"\r\n--", MEGABYTE - 200) + b"\r\n--x--\r\n"


# --- the symbol server ---------------------------------------------------------------------------


def _check_symbolication(data: bytes) -> None:
    """A body is refused, or is a request within bounds."""
    body = data[: messages.MAX_BODY]
    refusal(lambda: symbolication.source_request(body), messages.BadRequest)
    refusal(lambda: symbolication.asm_request(body), messages.BadRequest)
    with contextlib.suppress(messages.BadRequest):
        for job in symbolication.jobs_in(body):
            for frames in job.stacks:
                assert all(-1 <= index < len(job.memory_map) for index, _ in frames)
            for _, debug_id in job.memory_map:
                assert {len(each) for each in other_ids.beginnings(debug_id)} <= {16}


def _seed_symbolication() -> Iterator[bytes]:
    job = b'{"memoryMap":[["a","%s0"]],"stacks":[[[0,4096],[-1,1]]]}' % (b"AB" * 16)
    yield b'{"jobs":[%s,%s],"version":5}' % (job, job)
    yield job
    yield b'{"debugId":"0","moduleOffset":"0x10","file":"/a.c"}'
    yield b'{"codeId":"00","startAddress":"0x10","size":"0x4","continueUntilFunctionEnd":true}'


def _huge_symbolication() -> Iterator[bytes]:
    for unit in (b"[", b'{"jobs":', b'{"x":[', b"9"):
        yield filled(unit)
    for unit in (b"[0,1],", b"[],"):
        inside = filled(unit, MEGABYTE - 100)
        yield b'{"memoryMap":[["a","0"]],"stacks":[[%s[0,1]]]}' % inside
        yield b'{"memoryMap":[["a","0"]],"stacks":[%s[]]}' % inside
    yield b'{"memoryMap":[%s["a","0"]],"stacks":[]}' % filled(b'["a","0"],', MEGABYTE - 100)


def _check_code(data: bytes) -> None:
    """Code is wrapped whole, and no line of a disassembler is more than it asked for."""
    machine = code_file.machine_of(data)
    if machine is not None:
        made = code_file.code_file(machine, 4096, data)
        assert data in made
        assert code_file.machine_of(made) == machine
        assert machine.architecture
        assert machine.syntax
    found = code_file.instructions(data.split(b"\n"), 0x1000, 64)
    assert len(found) <= 64
    for each in found:
        assert 0x1000 <= each.address < 0x1040
        assert each.text


def _seed_code() -> Iterator[bytes]:
    yield elf_file([Section(b".text", b"\xc3")])
    yield b"    1000:      \tcall\t0x1129 <.text+0x1>\n 1005: ret\n        ...\n"


def _huge_code() -> Iterator[bytes]:
    for unit in (b"1000: jmp 0x1 <", b"1000: call 0x1\n", b" 1000: j 0x1 <.text>\n", b"1000: b 0x"):
        yield filled(unit)
    yield b"1000: j" + filled(b" 0x1", MEGABYTE - 8)
    yield b"1000: " + filled(b" <", MEGABYTE - 8)


TARGETS: Final = {
    "symbolication": Target(
        _check_symbolication, _seed_symbolication, _huge_symbolication, seconds=2.0
    ),
    "code_file": Target(_check_code, _seed_code, _huge_code, ("elf.code_file",), seconds=2.0),
    "line_files": Target(
        _check_line_files, _seed_line_files, _huge_line_files, ("elf.line_files",)
    ),
    "source_archive": Target(_check_archive, _seed_archive, _huge_archive, ("source_archive",)),
    "upload": Target(_check_upload, _seed_upload, _huge_upload),
    "http_request": Target(
        _check_request, _seed_request, _huge_request, most=4 * messages.MAX_TARGET
    ),
}
