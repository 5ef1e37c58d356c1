# SPDX-License-Identifier: Apache-2.0
"""Libraries with their debug information in one of its many forms, made by the usual tools."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import NamedTuple

from tests.support.clients.tools import Argument, nm, run, tool

_SOURCE = """\
struct part { int number; char *name; };
volatile unsigned long sink;
const char token[] = "TOKEN";
__attribute__((noinline)) static unsigned long hidden(struct part *part)
{
    for (long i = 0; i < 3000000; i++)
        sink += i ^ part->number;
    return sink;
}
__attribute__((noinline)) unsigned long exported(struct part *part)
{
    for (long i = 0; i < 3000000; i++)
        sink += i * part->number;
    return hidden(part) + 1;
}
"""
_MAIN = """\
struct part { int number; char *name; } own;
unsigned long exported(struct part *part);
int main(void)
{
    for (int i = 0; i < 20; i++)
        own.number += exported(&own);
    return 0;
}
"""


def library(directory: Path, *options: str, name: str = "libparts.so") -> Path:
    """Compile a library with a function ``exported`` that calls another one, ``hidden``.

    Each has a build ID of its own. ``options`` are the compiler's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    source = directory / "parts.c"
    source.write_text(_SOURCE.replace("TOKEN", uuid.uuid4().hex))
    built = directory / name
    argv: list[Argument] = [tool("gcc"), "-g", "-O1", *options, "-shared", "-fPIC"]
    run(
        [*argv, "-o", name, "parts.c", "-Wl,--build-id", f"-Wl,-soname,{name}"],
        cwd=directory, check=True)  # fmt: skip
    return built


def program(directory: Path, library: Path) -> Path:
    """Compile a program that calls ``exported`` of a library beside it, and runs a second or so."""
    source = directory / "main.c"
    source.write_text(_MAIN)
    built = directory / "parts"
    run([tool("gcc"), "-O1", "-o", built, source, library, "-Wl,-rpath,$ORIGIN"], check=True)
    return built


class Mini(NamedTuple):
    """``shipped`` has no symbols but those in ``.gnu_debugdata``; ``plain`` is what is in there."""

    shipped: Path
    plain: Path


def with_mini_debuginfo(full: Path, directory: Path) -> Mini:
    """Strip a library, and put its other symbols into it, as rpm's find-debuginfo does."""
    directory.mkdir(parents=True, exist_ok=True)
    debug, plain, keep = (directory / name for name in ("debug", "plain", "keep"))
    run([tool("objcopy"), "--only-keep-debug", full, debug], check=True)
    dynamic = {name for name, _ in _symbols(full, "-D")}
    wanted = {name for name, kind in _symbols(full) if kind in "TtD"} - dynamic
    keep.write_text("".join(f"{name}\n" for name in sorted(wanted)))
    options: list[Argument] = [
        "-S",
        "--remove-section",
        ".gdb_index",
        "--remove-section",
        ".comment",
    ]
    run([tool("objcopy"), *options, f"--keep-symbols={keep}", debug, plain], check=True)
    run([tool("xz"), "--keep", "--force", plain], check=True)
    shipped = directory / full.name
    section = f"--add-section=.gnu_debugdata={plain}.xz"
    run([tool("objcopy"), "--strip-all", section, full, shipped], check=True)
    return Mini(shipped, plain)


def _symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """Names and types of the symbols that are defined."""
    lines = nm("--format=posix", "--defined-only", *options, path).splitlines()
    return [(line.split()[0], line.split()[1]) for line in lines]


def packed(binary: Path) -> Path:
    """Put the .dwo files of a binary into a .dwp file beside it, and delete them.

    The binary is one of DWARF 4: no dwp of Debian 12 reads what its gcc writes of DWARF 5.
    """
    package = binary.with_name(f"{binary.name}.dwp")
    run([tool("dwp"), "-e", binary, "-o", package], cwd=binary.parent, check=True)
    for path in binary.parent.glob("*.dwo"):
        path.unlink()
    return package
