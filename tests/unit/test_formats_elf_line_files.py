# SPDX-License-Identifier: Apache-2.0
"""buildidfs.formats.elf.line_files: the files that line tables name, of gcc and made to order."""

from __future__ import annotations

import hashlib
import os
import re
import struct
from pathlib import Path

import pytest

from buildidfs.formats.elf.line_files import LineFile, SourceNames
from tests.fuzz.served import lined, table
from tests.support.clients.tools import run, tool
from tests.support.filesystems.filereader import FileReader


def found(data: bytes) -> list[LineFile]:
    return list(SourceNames(FileReader(data), len(data)).files())


@pytest.mark.parametrize("version", [2, 3, 4, 5])
@pytest.mark.parametrize("compress", ["none", "zlib"])
def test_files_of_gcc(tmp_path: Path, version: int, compress: str) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include/part.h").write_text("static inline int part(void) { return 1; }\n")
    (tmp_path / "main.c").write_text('#include "part.h"\nint main(void) { return part(); }\n')
    program = tmp_path / "prog"
    options = ["-g", f"-gdwarf-{version}", f"-gz={compress}", f"-I{tmp_path}/include"]
    run([tool("gcc"), *options, "-o", program, tmp_path / "main.c"], check=True)
    paths = {each.path for each in found(program.read_bytes())}
    assert paths >= {f"{tmp_path}/{name}".encode() for name in ("main.c", "include/part.h")}


def test_md5_of_version_5() -> None:
    digest = hashlib.md5(b"text", usedforsecurity=False).digest()
    directories = bytes([1, 1, 0x1F, 2]) + struct.pack("<II", 0, 9)
    files = bytes([3, 1, 0x08, 2, 0x0B, 5, 0x1E, 2]) + b"a.c\0\0" + digest + b"b.h\0\1" + digest
    data = lined(table(directories + files), b"/src\0a.c\0inc\0")
    assert found(data) == [LineFile(b"/src/a.c", digest), LineFile(b"/src/inc/b.h", digest)]


def test_a_name_in_an_unknown_directory_stays_relative() -> None:
    body = b"/inc\0rel\0\0a.c\0\0\0\0b.h\0\1\0\0c.h\0\2\0\0/d.h\0\0\0\0\0"
    paths = [each.path for each in found(lined(table(body, 4)))]
    assert paths == [b"a.c", b"/inc/b.h", b"rel/c.h", b"/d.h"]


def sources_in_gdb(program: Path) -> set[bytes]:
    """The paths that gdb finds, which joins the directory of the compilation."""
    out = run([tool("gdb"), "-nx", "-batch", program, "-ex", "info sources"], check=True).out
    return {os.path.normpath(path).encode() for path in re.findall(r"/[^,\s]+", out)}


@pytest.mark.parametrize("version", [2, 4, 5])
@pytest.mark.parametrize("form", ["plain", "zlib", "zlib-gnu", "dwz", "dwz-multifile"])
def test_relative_names_are_in_the_directory_of_the_compilation(
    tmp_path: Path, version: int, form: str
) -> None:
    sources = tmp_path / "project/src"
    (sources / "include").mkdir(parents=True)
    (sources / "include/part.h").write_text("static inline int part(int n) { return n + 1; }\n")
    (sources / "main.c").write_text(
        '#include "include/part.h"\nint other(int);\nint main(int n) { return other(part(n)); }\n'
    )
    (sources / "other.c").write_text("int other(int n) { return n * 3; }\n")
    programs = [tmp_path / "one", tmp_path / "two"]
    for program in programs:
        # Two units, with directories of their own.
        for directory, source in ((sources.parent, "src/main.c"), (sources, "./other.c")):
            output = tmp_path / f"{Path(source).stem}.o"
            run([tool("gcc"), "-c", "-g", f"-gdwarf-{version}", "-O1", source, "-o", output],
                cwd=directory, check=True)  # fmt: skip
        objects = [tmp_path / "main.o", tmp_path / "other.o"]
        run([tool("gcc"), "-o", program, *objects], check=True)
    truth = {os.fsencode(sources / name) for name in ("main.c", "other.c", "include/part.h")}
    assert sources_in_gdb(programs[0]) >= truth
    other: Path | None = None
    if form.startswith("zlib"):
        run([tool("objcopy"), f"--compress-debug-sections={form}", programs[0]], check=True)
    elif form == "dwz":
        run([tool("dwz"), programs[0]], check=True)
    elif form == "dwz-multifile":
        other = tmp_path / "common"
        run([tool("dwz"), "-m", other, *programs], check=True)
    data = programs[0].read_bytes()
    common = b"" if other is None else other.read_bytes()
    sources_of = SourceNames(FileReader(data), len(data), lambda: (FileReader(common), len(common)))
    assert {os.path.normpath(each.path) for each in sources_of.files()} >= truth
    assert set(sources_of.directories()) == {os.fsencode(sources.parent), os.fsencode(sources)}
    assert not sources_of.is_partial


def test_damaged_table_does_not_hide_the_next_one() -> None:
    good = table(b"\0/a.c\0\0\0\0\0", 4)
    bad = table(b"\xff" * 40, 5)
    assert found(lined(bad + good)) == [LineFile(b"/a.c")]
    assert found(lined(good[:-9])) == []
    damaged = lined(bad + good)
    names = SourceNames(FileReader(damaged), len(damaged))
    assert list(names.files()) == [LineFile(b"/a.c")]
    assert names.is_partial
    assert found(b"no ELF file") == []
