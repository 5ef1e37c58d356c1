# SPDX-License-Identifier: Apache-2.0
"""Programs to be captured, built anew for each test run.

What ships is stripped and its debug file split off, as distributions do; what was compiled stays
aside, so that a test can compare bytes and ask for the truth (addresses, line numbers). A token
compiled into each file makes its build ID one that no store, cache or debuginfod server of this
machine has seen before: a client that finds it found it in the store under test.

The sources live under a directory that does not exist on the host (``SOURCE_DIR``), like those
of any program built elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import secrets
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.support.clients.tools import Argument, nm, run, tool
from tests.support.harness.waiting import lines

SOURCE_DIR = "/build/hot-1.0"

_HEADER = """\
#define STRING(name) STRING_OF(name)
#define STRING_OF(name) #name
struct colour { unsigned char red, green, blue, alpha; };
struct point { double x, y, z; struct colour colour; };
struct shape { const char *name; unsigned long count; struct point points[4]; };
struct list { struct list *next, *previous; struct shape *shape; };
union value { long number; double real; const char *text; struct shape *shape; };
struct TOKEN { unsigned long parts[2]; struct TOKEN *next; union value value; };
struct work {
    unsigned long seed;
    unsigned int rounds;
    union value value;
    struct TOKEN unique;
    struct list list;
    struct shape shape;
};
unsigned long lib_hot(struct work *work);
void lib_stuck(struct work *work, void (*wait)(struct work *));
void lib_leak(struct work *work);
"""

_EXE = """\
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "work.h"
volatile unsigned long sink;
const char exe_token[] = STRING(TOKEN);
static __attribute__((noinline)) unsigned long exe_static_hot(struct work *work)
{
    unsigned long sum = work->seed; /* @exe_entry */
    for (unsigned long i = 0; i < 20000; i++)
        sum += (i ^ sink) * 7; /* @exe_hot */
    return sum;
}
static __attribute__((noinline)) void exe_static_stuck(struct work *work)
{
    for (;;) {
        pause(); /* @exe_stuck */
        sink += work->seed;
    }
}
static __attribute__((noinline)) int ask_clock(struct work *work)
{
    struct timespec now;
    for (int i = 0; i < 2000; i++)
        clock_gettime(CLOCK_MONOTONIC, &now);
    work->seed += now.tv_nsec;
    return 0;
}
int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    struct work work = { .seed = exe_token[0], .rounds = 3 };
    if (write(1, "up\\n", 3) != 3)
        return 1;
    if (strcmp(mode, "stuck") == 0)
        lib_stuck(&work, exe_static_stuck); /* @main_stuck */
    if (strcmp(mode, "leak") == 0) {
        lib_leak(&work); /* @main_leak */
        return 0;
    }
    while (strcmp(mode, "clock") == 0)
        ask_clock(&work);
    while (strcmp(mode, "spin") == 0) {
        sink += exe_static_hot(&work);
        sink += lib_hot(&work); /* @main_spin */
    }
    return 0;
}
"""

_LIB = """\
#include <stdlib.h>
#include <unistd.h>
#include "work.h"
volatile unsigned long lib_sink;
const char lib_token[] = STRING(TOKEN);
static __attribute__((noinline)) unsigned long lib_static_hot(struct work *work)
{
    unsigned long sum = work->seed + lib_token[0];
    for (unsigned long i = 0; i < 20000; i++)
        sum += (i ^ lib_sink) * 5; /* @lib_hot */
    return sum;
}
static __attribute__((noinline)) void lib_static_stuck(struct work *work,
                                                       void (*wait)(struct work *))
{
    wait(work); /* @lib_stuck */
    lib_sink++;
}
static __attribute__((noinline)) void lib_static_leak(struct work *work)
{
    volatile char *lost = malloc(work->rounds); /* @lib_leak */
    lost[work->rounds] = 1; /* @lib_overrun */
}
unsigned long lib_hot(struct work *work)
{
    return lib_static_hot(work) + 1;
}
void lib_stuck(struct work *work, void (*wait)(struct work *))
{
    lib_static_stuck(work, wait);
    lib_sink++;
}
void lib_leak(struct work *work)
{
    lib_static_leak(work);
    lib_sink++;
}
"""


def sha256(path: Path) -> str:
    """The digest of a file's bytes, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def line_of(marker: str) -> int:
    """The line number that carries ``/* @marker */`` in either source file."""
    for source in (_EXE, _LIB):
        for number, line in enumerate(source.splitlines(), 1):
            if f"/* @{marker} */" in line:
                return number
    raise LookupError(marker)


def build_id_of(path: Path) -> str:
    """The build ID of an ELF file as hex, by readelf: not by the code under test."""
    notes = run([tool("readelf"), "-n", path]).out
    found = re.search(r"Build ID: ([0-9a-f]+)", notes)
    if found is None:
        raise LookupError(f"{path} has no build ID: {notes}")
    return found[1]


@dataclasses.dataclass(frozen=True)
class Binary:
    """One ELF file: as compiled, as shipped (stripped, with a debug link), and its debug file."""

    compiled: Path
    shipped: Path
    debug: Path
    build_id: str

    def address(self, symbol: str) -> int:
        """The link-time address of a symbol, from the file as compiled."""
        for line in nm(self.compiled).splitlines():
            fields = line.split()
            if len(fields) == 3 and fields[2] == symbol:
                return int(fields[0], 16)
        raise LookupError(symbol)


@dataclasses.dataclass(frozen=True)
class Supplement:
    """The file that dwz moved common debug information to."""

    path: Path
    name: str
    build_id: str


@dataclasses.dataclass(frozen=True)
class Program:
    """``hot`` and ``libhot.so``: ``hot spin|stuck|clock|leak`` prints "up", then does as told.

    spin burns CPU in exe_static_hot and lib_static_hot; stuck sleeps in exe_static_stuck, called
    back by lib_static_stuck; clock calls into the vDSO; leak loses memory in lib_static_leak and
    ends.
    """

    exe: Binary
    lib: Binary
    supplement: Supplement | None

    @property
    def binaries(self) -> tuple[Binary, Binary]:
        """Both ELF files."""
        return self.exe, self.lib

    def install(self, root: Path, *, debug: str = "beside") -> None:
        """Copy the shipped files to ``root``/app, and the debug files where ``debug`` says.

        "beside": in .debug directories next to each file, found by debug link. "system": under
        ``root``/usr/lib/debug, found by build ID. "none": nowhere.
        """
        for binary, directory in ((self.exe, "bin"), (self.lib, "lib")):
            home = root / "app" / directory
            home.mkdir(parents=True, exist_ok=True)
            shutil.copy2(binary.shipped, home)
            if debug == "beside":
                (home / ".debug").mkdir()
                shutil.copy2(binary.debug, home / ".debug")
            elif debug == "system":
                first, rest = binary.build_id[:2], binary.build_id[2:]
                place = root / "usr/lib/debug/.build-id" / first
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy2(binary.debug, place / f"{rest}.debug")
        if self.supplement is not None and debug != "none":
            home = {"beside": root / "app/.dwz", "system": root / "usr/lib/debug/.dwz"}[debug]
            home.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.supplement.path, home / self.supplement.name)


@contextlib.contextmanager
def running(*argv: Argument) -> Iterator[int]:
    """Run a command that becomes ``hot`` in a mode that does not end by itself, until it is up.

    Yields the process ID, which is that of ``hot`` if nothing in between forks.
    """
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            lines(process.stdout, lambda got: got == ["up"])
            yield process.pid
        finally:
            process.kill()


def gdb_script(code: str) -> str:
    """C source for `build` that makes gdb run Python ``code`` when it loads the file."""
    lines_of_code = ["gdb.inlined-script", *code.splitlines()]
    text = "".join(f'    ".ascii \\"{line}\\\\n\\"\\n"\n' for line in lines_of_code)
    section = '.pushsection \\".debug_gdb_scripts\\", \\"MS\\",@progbits,1'
    return f'__asm__("{section}\\n" ".byte 4\\n"\n{text}    ".byte 0\\n" ".popsection\\n");\n'


def build(
    directory: Path, *, dwz: str | None = None, extra: str = "", id_bytes: int | None = None
) -> Program:
    """Compile, split and strip the program in ``directory``.

    ``dwz`` names where `Program.install` will put the debug files ("beside" or "system"): their
    common parts then move to a supplementary file, to which both link. ``extra`` is C source for
    either file. Build IDs are those of the linker, or random ones of ``id_bytes`` bytes.
    """
    token = uuid.uuid4().hex
    source = directory / "source"
    for part in (source, directory / "compiled", directory / "shipped", directory / "debug"):
        part.mkdir(parents=True, exist_ok=True)
    for name, text in (("work.h", _HEADER), ("hot.c", _EXE + extra), ("libhot.c", _LIB + extra)):
        (source / name).write_text(text)
    options: list[str | Path] = ["-g", "-O1", "-fno-omit-frame-pointer", "-Wall", "-Werror"]
    options += [f"-DTOKEN=t{token}", f"-ffile-prefix-map={source}={SOURCE_DIR}"]
    exe, lib = directory / "compiled/hot", directory / "compiled/libhot.so"
    shared: list[Argument] = ["-shared", "-fPIC", "-Wl,-soname,libhot.so", _id_option(id_bytes)]
    run([tool("gcc"), *options, *shared, "-o", lib, source / "libhot.c"], check=True)
    linked: list[Argument] = [lib, "-Wl,-rpath,$ORIGIN/../lib", _id_option(id_bytes)]
    run([tool("gcc"), *options, "-o", exe, source / "hot.c", *linked], check=True)
    debug_files = [_split(path, directory / "debug") for path in (exe, lib)]
    supplement = None
    if dwz is not None:
        supplement = _deduplicate(debug_files, directory, dwz, f"hot-{token}.debug")
    return Program(
        _ship(exe, debug_files[0], directory / "shipped"),
        _ship(lib, debug_files[1], directory / "shipped"),
        supplement,
    )


def _id_option(id_bytes: int | None) -> str:
    chosen = "" if id_bytes is None else f"=0x{secrets.token_hex(id_bytes)}"
    return f"-Wl,--build-id{chosen}"


def _split(path: Path, directory: Path) -> Path:
    debug = directory / f"{path.name}.debug"
    run([tool("objcopy"), "--only-keep-debug", path, debug], check=True)
    debug.chmod(0o644)
    return debug


def _ship(compiled: Path, debug: Path, directory: Path) -> Binary:
    shipped = directory / compiled.name
    link = f"--add-gnu-debuglink={debug}"
    run([tool("objcopy"), "--strip-all", link, compiled, shipped], check=True)
    return Binary(compiled, shipped, debug, build_id_of(shipped))


def _deduplicate(debug_files: list[Path], directory: Path, where: str, name: str) -> Supplement:
    home = {"beside": "../../.dwz", "system": "/usr/lib/debug/.dwz"}[where]
    common = directory / name
    run([tool("dwz"), "-m", common, "-M", f"{home}/{name}", *debug_files], check=True)
    return Supplement(common, name, build_id_of(common))
