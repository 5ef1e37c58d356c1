# SPDX-License-Identifier: Apache-2.0
"""The files that are measured with: small ELF files, and a program with 100 MB to debug it.

Everything is made from fixed seeds: two runs measure the same bytes under the same names.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.bench import Bench, require, run

if TYPE_CHECKING:
    from pathlib import Path

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_PHDR = struct.Struct("<IIQQQQQQ")
_NOTE = struct.Struct("<III4s")
_MIB = 1 << 20


def build_ids(count: int, seed: int = 1) -> list[str]:
    """``count`` build IDs of 20 bytes, as hex."""
    source = random.Random(seed)
    return [source.randbytes(20).hex() for _ in range(count)]


def elf_head(build_id: str, size: int) -> bytes:
    """The first bytes of an executable of ``size`` bytes that carries this build ID."""
    raw = bytes.fromhex(build_id)
    note_at = _EHDR.size + 2 * _PHDR.size
    note = _NOTE.pack(4, len(raw), 3, b"GNU\0") + raw
    header = _EHDR.pack(
        b"\x7fELF\x02\x01\x01" + bytes(9), 3, 62, 1, 0, _EHDR.size, 0, 0,
        _EHDR.size, _PHDR.size, 2, 64, 0, 0,
    )  # fmt: skip
    load = _PHDR.pack(1, 5, 0, 0, 0, size, size, 4096)
    notes = _PHDR.pack(4, 4, note_at, note_at, note_at, len(note), len(note), 4)
    return header + load + notes + note


def write_elf(path: Path, build_id: str, size: int) -> None:
    """An executable of ``size`` bytes, none of them a hole, different for each build ID."""
    head = elf_head(build_id, size)
    filling = random.Random(build_id).randbytes(min(size, _MIB))
    with path.open("wb") as file:
        file.write(head + filling[len(head) :])
        for _ in range(size // _MIB - 1):
            file.write(filling)
        file.truncate(size)


def native_tree(bench: Bench, name: str, ids: list[str], size: int) -> Path:
    """A directory with ``<id>/elf`` for each build ID, each of ``size`` bytes; made once a run."""
    root = bench.workdir / name
    if not root.exists():
        bench.say(f"writing {len(ids)} files of {size} bytes")
        for build_id in ids:
            directory = root / build_id
            directory.mkdir(parents=True)
            write_elf(directory / "elf", build_id, size)
    return root


@dataclass(frozen=True)
class Program:
    """A stripped program, its separate debug file, and the names of functions in it."""

    directory: Path
    functions: int

    @property
    def stripped(self) -> Path:
        """The stripped program."""
        return self.directory / "program"

    @property
    def debug(self) -> Path:
        """Its debug file."""
        return self.directory / "program.debug"

    def function(self, number: int) -> str:
        """The name of one function."""
        return _function(number // _PER_UNIT, number % _PER_UNIT)


_PER_UNIT = 5000
# C++ names are this long, and they are most of a large debug file.
_LONG = "_as_long_as_names_become_where_templates_and_namespaces_are_mangled_into_one_identifier"
_FUNCTION = """\
struct {name}_state {{ struct {name}_state *next; {members} }};
unsigned long {name}(struct {name}_state *state, unsigned long count)
{{
\tunsigned long total_{index} = {index};
\tfor (unsigned long step_{index} = 0; step_{index} < count; step_{index}++) {{
\t\tstruct {name}_state *cursor_{index} = state;
\t\ttotal_{index} += cursor_{index}->{member} ^ step_{index};
\t\tstate = cursor_{index}->next;
\t}}
\treturn total_{index};
}}
"""


def _function(unit: int, index: int) -> str:
    return f"unit{unit}_function{index}{_LONG}"


def _unit(unit: int) -> str:
    parts = []
    for index in range(_PER_UNIT):
        names = [f"unit{unit}_member{number}_of_{index}{_LONG}" for number in range(12)]
        members = " ".join(f"unsigned long {name};" for name in names)
        parts.append(
            _FUNCTION.format(
                name=_function(unit, index), members=members, member=names[1], index=index
            )
        )
    return "".join(parts)


def _main(units: int) -> str:
    called = [_function(unit, 7) for unit in range(units)]
    declarations = "".join(f"unsigned long {name}(void *, unsigned long);\n" for name in called)
    calls = "".join(f"\t\ttotal += {name}(ring, 20000);\n" for name in called)
    return (
        f"{declarations}"
        "int main(int argc, char **argv)\n{\n"
        "\tvoid *ring[16] = { ring };\n\tunsigned long total = 0;\n"
        f"\tfor (int round = 0; round < 6000; round++) {{\n{calls}\t}}\n"
        "\treturn total == 1;\n}\n"
    )


def debug_program(bench: Bench) -> Program:
    """A program whose debug file has 100 MB (10 MB in a quick run), compiled once and kept.

    The compilation takes about half a minute and half a gigabyte of memory per CPU.
    """
    units = bench.size(10, 1)
    recipe = hashlib.sha256((_unit(1) + _main(units)).encode()).hexdigest()[:16]
    directory = bench.cache / f"program-{units}-{recipe}"
    program = Program(directory, units * _PER_UNIT)
    if program.debug.exists():
        return program
    require("gcc", "gcc")
    require("objcopy", "binutils")
    bench.say(f"compiling {units * _PER_UNIT} functions, once")
    for outdated in bench.cache.glob(f"program-{units}-*"):
        shutil.rmtree(outdated)
    directory.mkdir(parents=True)
    sources = {f"unit{unit}.c": _unit(unit) for unit in range(units)} | {"main.c": _main(units)}
    with bench.scratch("compile") as place:
        for name, text in sources.items():
            (place / name).write_text(text)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(lambda name: run(["gcc", "-g", "-c", name], cwd=place), sources))
        run(["gcc", "-Wl,--build-id=sha1", "-o", "whole", *place.glob("*.o")], cwd=place)
        run(["strip", "--strip-all", "-o", program.stripped, place / "whole"])
        kept = directory / "program.part"
        run(["objcopy", "--only-keep-debug", place / "whole", kept])
    kept.rename(program.debug)
    return program
