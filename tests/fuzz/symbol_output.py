# SPDX-License-Identifier: Apache-2.0
"""The decoders behind ``symbolize``, the symbols of a kernel, and the notes of core files."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Final

from buildidfs.formats import symbolizer_output
from buildidfs.formats.elf import core
from buildidfs.formats.kallsyms import Kallsyms
from buildidfs.formats.perf import script_output
from tests.fuzz import elf_mutation
from tests.fuzz.target import MEGABYTE, Target, filled
from tests.support.elf.corewriter import PAGE, Mapped, core_file, file_table
from tests.support.elf.elfwriter import elf_file, note
from tests.support.filesystems.filereader import FileReader

# --- the notes of a core file --------------------------------------------------------------------

_MAPPING: Final = Mapped(
    0x10000, elf_file([], build_id=elf_mutation.BUILD_ID)[:PAGE].ljust(PAGE, b"\0"), b"/app/hot"
)


def _check_notes(data: bytes) -> None:
    whole = core_file([_MAPPING], file_note=False, extra_notes=data)
    found = core.parse(FileReader(whole), len(whole))
    assert found is not None
    assert (found.pid, found.name) == (4711, b"hot")
    assert found.threads <= 1 + len(data) // 12
    for module in found.modules:
        assert module.build_id in (elf_mutation.BUILD_ID, None)


def _seed_notes() -> Iterator[bytes]:
    yield note(b"CORE\0", 0x46494C45, file_table([_MAPPING]))
    yield note(b"LINUX\0", 0x202, bytes(832)) + note(b"CORE\0", 6, struct.pack("<4Q", 3, 9, 0, 0))


def _huge_notes() -> Iterator[bytes]:
    yield filled(note(b"CORE\0", 1, b""))
    yield filled(note(b"", 1, b""))
    many = [_MAPPING._replace(start=PAGE * n, path=b"/") for n in range(1, 40_000)]
    yield note(b"CORE\0", 0x46494C45, file_table(many))
    yield note(b"CORE\0", 0x46494C45, struct.pack("<2Q", 1 << 63, PAGE) + bytes(MEGABYTE - 64))


# --- the text of perf script ---------------------------------------------------------------------

_EVENT: Final = b"hot 7 1.0: PERF_RECORD_MMAP2 7/7: [0x%x(0x1000) @ 0x1000 <%s>]: r-xp /app/hot\n"
_SAMPLE: Final = b"hot 7/7 2.0: cpu-clock:\n\t 1040 [unknown] (/app/hot)\n\t 10 f+0x1 ([kernel])\n"


def _check_perfscript(data: bytes) -> None:
    script = script_output.Script()
    for line in data.split(b"\n"):
        frame = script.line(line)
        if frame is not None:
            place = script.locate(frame)
            assert place is None or place.offset >= 0
    script_output.parse_build_ids(data)


def _seed_perfscript() -> Iterator[bytes]:
    build_id = elf_mutation.BUILD_ID.hex().encode()
    fork = b"hot 7 1.1: PERF_RECORD_FORK(8:8):(7:7)\nhot 8 1.2: PERF_RECORD_COMM exec: x:8/8\n"
    yield _EVENT % (0x1000, build_id) + fork + _SAMPLE
    yield b"hot 7 1.3: x:   55000040 [unknown] (/app/hot+0x12)\n"
    yield b"hot 7 1.4: PERF_RECORD_EXIT(7:7):(1:1)"


def _huge_perfscript() -> Iterator[bytes]:
    build_id = elf_mutation.BUILD_ID.hex().encode()
    yield filled(_SAMPLE)
    yield b"".join(_EVENT % (PAGE * n, build_id) for n in range(7000))
    yield (_EVENT % (PAGE, build_id) + b"hot 7 1.1: PERF_RECORD_FORK(8:8):(7:7)\n") * 5000
    mapped = b"".join(_EVENT % (PAGE * n, build_id) for n in range(3500))
    yield mapped + b"".join(b"hot 7 1.1: PERF_RECORD_FORK(%d:8):(7:7)\n" % n for n in range(9000))
    yield mapped + b"".join(b"\t%x [unknown] (/usr/bin/x)\n" % (PAGE * n) for n in range(17_000))
    for part in (b" (", b"\t1 ", b" 1 [unknown] (", b"1.1: ", b": PERF_RECORD_COMM: :", b"+0x1"):
        yield b"\t1 " + filled(part, MEGABYTE - 8) + b")"
        yield b"x " + filled(part, MEGABYTE - 8) + b")"


# --- the answers of symbolizers ------------------------------------------------------------------


def _check_symbolized(data: bytes) -> None:
    for frames in (
        symbolizer_output.of_llvm(data),
        symbolizer_output.of_elfutils(data.split(b"\n")),
    ):
        assert len(frames) <= symbolizer_output.MOST_FRAMES
        for frame in frames:
            assert frame.line >= 0


def _seed_symbolized() -> Iterator[bytes]:
    yield b'{"Address":"0x1","Symbol":[{"FunctionName":"f","FileName":"a.c","Line":2,"Column":3}]}'
    yield b"inner inlined at /a.c:3:5 in outer\n/a.c:2:7\nouter\n??:0"


def _huge_symbolized() -> Iterator[bytes]:
    one = b'{"FunctionName":"f","StartAddress":"0x1"},'
    yield b'{"Symbol":[' + filled(one, MEGABYTE - 64)[:-1] + b"]}"
    yield b'{"Symbol":' + b"[" * (MEGABYTE - 64)
    yield filled(b"f inlined at x:1:2 in ", MEGABYTE)
    yield filled(b"f\n??:1\n")


# --- /proc/kallsyms ------------------------------------------------------------------------------

_MODULE: Final = re.compile(rb"\t\[([^]\n]+)\]\n")


def _check_kallsyms(data: bytes) -> None:
    symbols = Kallsyms(data)
    modules = {b"", *_MODULE.findall(data)}
    for line in data.split(b"\n")[:100]:
        address = symbols.address_of(line[-20:])
        assert address is None or address > 0
    for module in modules:
        first = symbols.first_of(module)
        if first is None:
            assert symbols.find(1 << 64, module) is None
            continue
        assert first > 0
        assert symbols.find(first - 1, module) is None
        for address in (first, first + 1, 1 << 64):
            found = symbols.find(address, module)
            assert found is not None
            assert first <= found.address <= address
            assert found.name in data


def _seed_kallsyms() -> Iterator[bytes]:
    yield b"ffffffff81000000 T _text\nffffffff81000000 T startup_64\nffffffff82000000 T _etext\n"
    yield b"ffffffffc0000000 t init\t[ext4]\nffffffffc0000000 W __init\t[ext4]\n0000 t $x\n"
    yield b"0000000000000000 T _text\n0000000000000000 t a\t[bpf]\nc0000000 D data\n"


def _huge_kallsyms() -> Iterator[bytes]:
    yield b"".join(b"%016x t a\n" % number for number in range(1, MEGABYTE // 21))
    yield b"".join(b"%08x t a\t[%x]\n" % (number, number) for number in range(1, MEGABYTE // 21))
    yield b"".join(b"00000001 t %x\n" % number for number in range(MEGABYTE // 18))
    yield b"00000001 t " + b"_" * (MEGABYTE - 64)
    yield filled(b"00000001 t x\t[")
    yield b"00000001 t x\t[" + b"a" * (MEGABYTE - 64)
    yield b"f" * MEGABYTE


TARGETS: Final = {
    "kallsyms": Target(
        _check_kallsyms, _seed_kallsyms, _huge_kallsyms, ("kallsyms",), cost=Kallsyms
    ),
    "corenotes": Target(_check_notes, _seed_notes, _huge_notes, ("elf.core",)),
    "perfscript": Target(
        _check_perfscript, _seed_perfscript, _huge_perfscript, ("perf.script_output",)
    ),
    "symbolized": Target(
        _check_symbolized, _seed_symbolized, _huge_symbolized, ("symbolizer_output",)
    ),
}
