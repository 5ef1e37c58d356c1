# SPDX-License-Identifier: Apache-2.0
"""``symbolize``: names for addresses of a program whose container is gone, and of hostile files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from buildidfs.errors import UsageError
from buildidfs.model import BuildId
from buildidfs.store import Store
from buildidfs.symbolize import addresses, programs
from buildidfs.symbolize.addresses import Symbolizer
from tests.support.clients import tools
from tests.support.clients.commands import ROOT, calling
from tests.support.clients.tools import nm, perf_record, perf_tool, run, tool
from tests.support.containers.ephemeral import container
from tests.support.elf.elfwriter import DWARF, SYMTAB, TEXT, elf_file
from tests.support.elf.programs import SOURCE_DIR, Binary, build_id_of, line_of
from tests.support.harness.mounts import COMMAND, BuildIdFs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.containers.vanished import Vanished
    from tests.support.elf.programs import Program

pytestmark = pytest.mark.client

_BAZEL = "498919aff001d8366249403a2544fba2d833084f"

PROGRAMS = ("llvm-symbolizer", "eu-addr2line")


@pytest.fixture(scope="module")
def store(scratch: Path, program: Program, dwz_program: Program) -> BuildIdFs:
    """A store with two programs and their debug files, one of them treated by dwz."""
    directory = scratch / "symbolize"
    directory.mkdir()
    made = BuildIdFs(directory)
    for each in (program, dwz_program):
        each.install(directory / each.exe.build_id)
    made("scan", "tree", directory)
    return made


def requests(binary: Binary, *symbols: str) -> list[str]:
    return [f"{binary.build_id}+{binary.address(symbol):#x}" for symbol in symbols]


@pytest.mark.parametrize("asked", PROGRAMS)
def test_functions_and_lines(store: BuildIdFs, program: Program, asked: str) -> None:
    words = requests(program.exe, "exe_static_hot") + requests(program.lib, "lib_static_stuck")
    result = store("symbolize", "--with", asked, *words)
    first, second = result.out.splitlines()
    line = line_of("exe_entry")
    assert re.fullmatch(
        rf"{re.escape(words[0])} exe_static_hot {SOURCE_DIR}/hot.c:{line}:\d+", first
    )
    assert second.startswith(f"{words[1]} lib_static_stuck {SOURCE_DIR}/libhot.c:")
    assert result.err == ""


@pytest.mark.parametrize("asked", PROGRAMS)
def test_inlined_functions(tmp_path: Path, asked: str) -> None:
    source = tmp_path / "inlined.c"
    source.write_text(
        "static inline __attribute__((always_inline)) int inner(int x)\n"
        "{ return x * x; }\n"
        "__attribute__((noinline)) int outer(int x) { return inner(x) + 1; }\n"
        "int main(int argc, char **argv) { return argv ? outer(argc) : 1; }\n"
    )
    binary = tmp_path / "inlined"
    run([tool("gcc"), "-g", "-O1", "-o", binary, source], check=True)
    made = BuildIdFs(tmp_path)
    made("scan", "tree", binary)
    symbols = nm(binary)
    address = re.search(r"(\w+) T outer\n", symbols)
    assert address is not None
    listed = json.loads(made("list", "--json").out.splitlines()[0])
    request = f"{listed['build_id'][:12]}+0x{address[1]}"
    answer = json.loads(made("symbolize", "--json", "--with", asked, request).out)
    assert answer["request"] == request
    assert answer["build_id"] == listed["build_id"]
    frames = answer["frames"]
    assert [(frame["function"], frame["line"], frame["inlined"]) for frame in frames] == [
        ("inner", 2, True), ("outer", 3, False),
    ]  # fmt: skip
    assert {frame["file"] for frame in answer["frames"]} == {str(source)}
    assert "(inlined)\n" in made("symbolize", "--with", asked, request).out


@pytest.mark.parametrize("asked", PROGRAMS)
def test_symbol_without_a_size_names_nothing_of_another_section(tmp_path: Path, asked: str) -> None:
    """The PLT has no symbols, and lies between ``_init``, which has no size, and the code."""
    source = tmp_path / "plt.c"
    source.write_text(
        "#include <stdio.h>\n"
        'int main(void) { return puts("x"); }\n'
        '__asm__(".text\\n.globl sizeless\\nsizeless: nop\\n nop\\n ret\\n");\n'
    )
    binary = tmp_path / "plt"
    run([tool("gcc"), "-g", "-Wl,--build-id,-z,lazy", "-o", binary, source], check=True)
    sections = run([tool("readelf"), "-SW", binary], check=True).out
    plt = re.search(r" \.plt +PROGBITS +(\w+) ", sections)
    symbols = nm(binary)
    sizeless = re.search(r"(\w+) T sizeless\n", symbols)
    assert plt is not None
    assert sizeless is not None
    assert re.search(r" [Tt] _init\n", symbols)
    made = BuildIdFs(tmp_path)
    made("scan", "tree", binary)
    build_id = build_id_of(binary)
    words = [f"{build_id}+{int(plt[1], 16) + 16:#x}", f"{build_id}+{int(sizeless[1], 16) + 1:#x}"]
    answer = made("symbolize", "--with", asked, *words, check=False)
    named = [line.split()[1] for line in answer.out.splitlines()]
    assert named == ["??", "sizeless"], answer


@pytest.mark.parametrize("asked", PROGRAMS)
@pytest.mark.parametrize("has_debug_file", [False, True])
def test_programs_that_share_a_build_id_are_told_apart(
    tmp_path: Path, asked: str, has_debug_file: bool
) -> None:
    """Both have the build ID of all Go programs that Bazel builds, and code at one address."""
    made = BuildIdFs(tmp_path)
    root = tmp_path / "root"
    root.mkdir()
    addresses = set()
    for name in ("first", "second"):
        _build_shared(root / name, name, has_debug_file=has_debug_file)
        named = root / (f"{name}.debug" if has_debug_file else name)
        symbols = nm(named)
        found = re.search(rf"(\w+) T {name}_code\n", symbols)
        assert found is not None
        addresses.add(f"+0x{found[1]}")
    assert "share build ID" in made("scan", "tree", root).err
    (address,) = addresses
    shared = made("symbolize", "--with", asked, f"{_BAZEL}{address}", check=False)
    assert shared.rc == 30
    assert shared.out == f"{_BAZEL}{address} ?? ??:0\n"
    assert "adopted IDs tell them apart" in shared.err
    for name in ("first", "second"):
        digest = hashlib.sha256((root / name).read_bytes()).hexdigest()
        listed = made("list", "--json", "--path", root / name).out.splitlines()
        ids = {json.loads(line)["build_id"] for line in listed} - {_BAZEL}
        assert len(ids) == 1
        for each in (digest, *ids):
            answer = made("symbolize", "--with", asked, f"{each}{address}")
            assert answer.out.split()[1] == f"{name}_code"


def _build_shared(path: Path, name: str, *, has_debug_file: bool) -> None:
    """Build a program with the build ID, perhaps with its names in a debug file beside it."""
    source = path.with_suffix(".c")
    source.write_text(
        f"__attribute__((noinline)) int {name}_code(int x) {{ return x * {len(name)}; }}\n"
        f"int main(int argc, char **argv) {{ return argv ? {name}_code(argc) : 1; }}\n"
    )
    build_id = f"-Wl,--build-id=0x{_BAZEL}"
    run([tool("gcc"), "-g", "-O1", build_id, "-o", path, source], check=True)
    if has_debug_file:
        debug = f"{path}.debug"
        run([tool("objcopy"), "--only-keep-debug", path, debug], check=True)
        run([tool("objcopy"), "--strip-all", f"--add-gnu-debuglink={debug}", path], check=True)


@pytest.mark.parametrize("asked", PROGRAMS)
def test_debug_files_that_dwz_has_made_smaller(
    store: BuildIdFs, dwz_program: Program, asked: str
) -> None:
    (word,) = requests(dwz_program.exe, "exe_static_hot")
    answer = store("symbolize", "--with", asked, word).out
    assert answer.startswith(f"{word} exe_static_hot {SOURCE_DIR}/hot.c:{line_of('exe_entry')}")


@pytest.mark.parametrize("asked", [*PROGRAMS, tools.RECENT_LLVM_SYMBOLIZER[0]])
@pytest.mark.parametrize(("form", "mark"), [("zstd", "ZSTD"), ("zlib-gnu", ".zdebug_line")])
def test_compressed_debug_information_is_read_by_each_symbolizer(
    tmp_path: Path, program: Program, asked: str, form: str, mark: str
) -> None:
    """LLVM before 16 and many builds of elfutils cannot read zstd, LLVM from 16 on no zdebug."""
    packed = tmp_path / "tree/packed"
    packed.parent.mkdir()
    compiled = program.exe.compiled
    run([tool("objcopy"), f"--compress-debug-sections={form}", compiled, packed], check=True)
    assert mark in run([tool("readelf"), "-tW", packed], check=True).out
    made = BuildIdFs(tmp_path)
    made("scan", "tree", packed)
    (word,) = requests(program.exe, "exe_static_hot")
    answer = made("symbolize", "--with", asked, word)
    assert answer.out.startswith(f"{word} exe_static_hot {SOURCE_DIR}/hot.c:{line_of('exe_entry')}")
    assert answer.err == ""
    sources = json.loads(
        made("bundle", program.exe.build_id, "-o", tmp_path / "bundle", "--json").out
    )["sources"]
    assert sources["files"] > 0
    assert sources["absent"] == []


def test_debug_information_that_the_symbolizer_cannot_read_is_missing(
    tmp_path: Path, program: Program
) -> None:
    broken = tmp_path / "broken"
    table = tmp_path / "table"
    compiled = program.exe.compiled
    run([tool("objcopy"), f"--dump-section=.debug_line={table}", compiled, "/dev/null"], check=True)
    data = bytearray(table.read_bytes())
    data[4:6] = b"\x63\x00"  # a version of the future
    table.write_bytes(data[: 4 + int.from_bytes(data[:4], "little")])
    run([tool("objcopy"), f"--update-section=.debug_line={table}", compiled, broken], check=True)
    for path, reason in ((broken, "unread"), (compiled, "complete")):
        made = BuildIdFs(tmp_path, tmp_path / reason)
        made("add", path)
        (finding,) = json.loads(made("why", "--json", program.exe.build_id).out)["findings"]
        assert finding["reason"] == reason


def test_damaged_zstd_is_told(tmp_path: Path, program: Program) -> None:
    """The function has a name still, and why it has no line is no secret."""
    packed = tmp_path / "packed"
    run(
        [tool("objcopy"), "--compress-debug-sections=zstd", program.exe.compiled, packed],
        check=True,
    )
    data = bytearray(packed.read_bytes())
    for at in [each.start() for each in re.finditer(rb"\x28\xb5\x2f\xfd", data)]:
        data[at : at + 4] = b"none"
    packed.write_bytes(data)
    made = BuildIdFs(tmp_path)
    made("scan", "tree", packed)
    (word,) = requests(program.exe, "exe_static_hot")
    answer = made("symbolize", word)
    assert re.fullmatch(rf"{re.escape(word)} exe_static_hot (\?\?|hot\.c):0\n", answer.out)
    assert f"{addresses.PACKED} (damaged: " in answer.err


@pytest.fixture(scope="module")
def halves(scratch: Path) -> tuple[BuildIdFs, Path]:
    """A library whose debug file has no symbols, so that those for linking are nowhere else."""
    place = scratch / "halves"
    place.mkdir()
    (place / "c.c").write_text("int in_c(int x) { return x + 1; }\n")
    (place / "s.s").write_text(
        ".globl in_assembly\n.type in_assembly,@function\nin_assembly: ret\n"
        ".size in_assembly,.-in_assembly\n.globl first\n.type first,@function\nfirst: ret\n"
        ".size first,.-first\n.symver first,versioned@@FIRST_1.0\n.section .note.GNU-stack\n"
    )
    names = "in_c; in_assembly; versioned"
    (place / "map").write_text(f"FIRST_1.0 {{ global: {names}; local: *; }};\n")
    run([tool("gcc"), "-c", "-o", place / "s.o", place / "s.s"], check=True)
    whole, library, debug = (place / name for name in ("whole.so", "half.so", "half.debug"))
    run(
        [tool("gcc"), "-g", "-shared", "-fPIC", f"-Wl,--version-script={place}/map", "-o", whole,
         place / "c.c", place / "s.o"],
        check=True,
    )  # fmt: skip
    run([tool("strip"), "-o", library, whole], check=True)
    run([tool("objcopy"), "--only-keep-debug", whole, debug], check=True)
    run([tool("strip"), "--strip-all", "--keep-section=.debug_*", debug], check=True)
    assert "in_assembly" not in nm(debug)
    made = BuildIdFs(place)
    made("add", library, debug)
    return made, whole


@pytest.mark.parametrize("asked", PROGRAMS)
def test_executable_and_debug_file_together(halves: tuple[BuildIdFs, Path], asked: str) -> None:
    made, whole = halves
    build_id = build_id_of(whole)
    symbols = nm(whole)
    words = {
        name: f"{build_id}+0x{line.split()[0]}"
        for name in ("in_c", "in_assembly")
        for line in symbols.splitlines()
        if re.search(rf" T {name}\b", line)
    }
    answers = made("symbolize", "--with", asked, *words.values())
    first, second = answers.out.splitlines()
    assert first.startswith(f"{words['in_c']} in_c {whole.parent}/c.c:1")
    assert second == f"{words['in_assembly']} in_assembly ??:0"
    assert answers.err == ""


@pytest.mark.parametrize("asked", PROGRAMS)
def test_versions_of_symbols_are_dropped(
    halves: tuple[BuildIdFs, Path], tmp_path: Path, asked: str
) -> None:
    _, whole = halves
    stripped = tmp_path / "whole.so"
    run([tool("strip"), "-g", "-o", stripped, whole], check=True)
    symbols = nm(stripped)
    (line,) = (each for each in symbols.splitlines() if "versioned" in each)
    assert line.endswith(" versioned@@FIRST_1.0")
    made = BuildIdFs(tmp_path)
    made("add", stripped)
    word = f"{build_id_of(whole)}+0x{line.split()[0]}"
    assert made("symbolize", "--with", asked, word).out == f"{word} versioned ??:0\n"


def test_offsets_in_the_file(store: BuildIdFs, program: Program) -> None:
    address = program.exe.address("exe_static_hot")
    headers = run([tool("readelf"), "-lW", program.exe.shipped], check=True).out
    loads = [
        line.split()[1:3] for line in headers.splitlines() if " R E " in line and "LOAD" in line
    ]
    ((offset, start),) = [[int(word, 16) for word in pair] for pair in loads]
    word = f"{program.exe.build_id}+{address - start + offset:#x}"
    assert " exe_static_hot " in store("symbolize", "--file-offset", word).out


def test_streams(store: BuildIdFs, program: Program) -> None:
    """Each answer comes before the next question, as of any other coprocess."""
    argv = [*COMMAND, "--store", str(store.store), "symbolize", "--json"]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for symbol in ("exe_static_hot", "ask_clock", "main"):
            (word,) = requests(program.exe, symbol)
            child.stdin.write(f"{word}\n\n")
            child.stdin.flush()
            answer = json.loads(child.stdout.readline())
            assert [frame["function"] for frame in answer["frames"]] == [symbol]
        child.stdin.close()
        assert child.stdout.read() == ""
        assert child.wait(60) == 0


def test_what_has_no_name(store: BuildIdFs, program: Program) -> None:
    build_id = program.exe.build_id
    done = store("symbolize", f"{build_id}+0xffffff", f"{build_id}+0xfffffff", check=False)
    assert done.rc == 30
    assert done.out == f"{build_id}+0xffffff ?? ??:0\n{build_id}+0xfffffff ?? ??:0\n"
    assert done.err == f"buildidfs: {build_id}: {addresses.NOT_LOADED} (2 addresses)\n"
    both = store("symbolize", f"{build_id}+0xffffff", *requests(program.exe, "main"), check=False)
    assert (both.rc, both.err) == (0, f"buildidfs: {build_id}: {addresses.NOT_LOADED}\n")


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["8e9f"], 2, "not ID+0xADDR: '8e9f'"),
        (["8e9f+12"], 2, "not ID+0xADDR"),
        (["\x1b[31m+0x1"], 2, "no build ID or the start of one: '\\x1b[31m'"),
        (["8e9f8e9f+0x1"], 30, "nothing is known of build ID 8e9f8e9f"),
        (["--perf-script", "--json"], 2, "--perf-script filters text"),
        (["--with", "sh", "8e9f+0x1"], 2, "neither llvm-symbolizer[-VERSION] nor eu-addr2line"),
        (
            ["--with", "llvm-symbolizer-999", "8e9f+0x1"],
            2,
            "-999 is not installed; apt-get install llvm-999",
        ),
        (["--lines", "8e9f+0x1"], 2, "belong to --perf-script"),
        (["--perf-script", "--buildid-list", "/nonexistent"], 2, "/nonexistent: No such file"),
        (["--perf-script", "--buildid-list", "/etc/passwd"], 2, "no output of perf buildid-list"),
    ],
)
def test_wrong_usage(store: BuildIdFs, words: list[str], code: int, complaint: str) -> None:
    done = store("symbolize", *words, check=False)
    assert (done.rc, done.out, done.err.count("\n")) == (code, "", 1)
    assert complaint in done.err


def test_input_that_perf_script_has_not_printed(store: BuildIdFs) -> None:
    for given, code, complaint in (
        ("PERFILE2 and more", 2, "standard input is a perf.data file"),
        ("", 0, "standard input is empty"),
    ):
        argv = [tool("sh"), "-c", 'printf %s "$0" | "$@"', given, *COMMAND, "--store", store.store,
                "symbolize", "--perf-script"]  # fmt: skip
        done = run(argv, cwd=ROOT)
        assert (done.rc, done.out, done.err.count("\n")) == (code, "", 1)
        assert complaint in done.err


def test_no_program(store: BuildIdFs, tmp_path: Path) -> None:
    done = store("symbolize", "8e9f+0x1", check=False, env={"PATH": str(tmp_path)})
    assert (done.rc, done.err) == (
        2,
        "buildidfs: neither llvm-symbolizer nor eu-addr2line is installed;"
        " apt-get install llvm (or elfutils)\n",
    )


# --- the program that is asked -------------------------------------------------------------------


@pytest.fixture(params=PROGRAMS)
def symbolizer(request: pytest.FixtureRequest, store: BuildIdFs) -> Iterator[Symbolizer]:
    with (
        Store.open(store.store, read_only=True) as opened,
        Symbolizer(opened, request.param) as made,
    ):
        yield made


def child_of(symbolizer: Symbolizer) -> int:
    """The process that is asked."""
    path = os.path.basename(symbolizer._path)
    for pid in Path("/proc/self/task").glob("*/children"):
        for child in pid.read_text().split():
            if Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0].endswith(path.encode()):
                return int(child)
    raise LookupError(path)


def name_at(symbolizer: Symbolizer, binary: Binary, symbol: str) -> list[str]:
    build_id = BuildId.from_hex(binary.build_id)
    answer = symbolizer.at_address(build_id, binary.address(symbol))
    return [frame.function for frame in answer.frames]


@pytest.mark.root
def test_it_runs_as_a_user_of_its_own(symbolizer: Symbolizer, program: Program) -> None:
    assert name_at(symbolizer, program.exe, "main") == ["main"]
    child = child_of(symbolizer)
    status = Path(f"/proc/{child}/status").read_text()
    uids = re.search(r"^Uid:((?:\t\d+){4})$", status, re.MULTILINE)
    assert uids is not None
    assert min(map(int, uids[1].split())) >= 1 << 30
    assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
    assert Path(f"/proc/{child}/environ").read_bytes().split(b"\0")[:-1] == [
        b"PATH=/bin:/usr/bin", b"LC_ALL=C.UTF-8",
    ]  # fmt: skip
    assert os.readlink(f"/proc/{child}/ns/net") != os.readlink("/proc/self/ns/net")
    opened = {os.readlink(f"/proc/{child}/fd/{fd}") for fd in os.listdir(f"/proc/{child}/fd")}
    assert not any("/blobs/" in path or "/index/" in path for path in opened)


def test_it_is_started_again(symbolizer: Symbolizer, program: Program) -> None:
    assert name_at(symbolizer, program.exe, "main") == ["main"]
    first = child_of(symbolizer)
    os.kill(first, signal.SIGKILL)
    assert name_at(symbolizer, program.exe, "ask_clock") == ["ask_clock"]
    assert child_of(symbolizer) != first


def test_it_does_not_answer(
    symbolizer: Symbolizer, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name_at(symbolizer, program.exe, "main") == ["main"]
    start = programs.start

    def patiently(*arguments: Any) -> programs.RunningSymbolizer:
        monkeypatch.setattr(programs, "ANSWER_S", 60.0)
        return start(*arguments)

    monkeypatch.setattr(programs, "ANSWER_S", 0.3)
    monkeypatch.setattr(programs, "start", patiently)
    os.kill(child_of(symbolizer), signal.SIGSTOP)
    assert name_at(symbolizer, program.exe, "ask_clock") == ["ask_clock"]


def test_more_files_than_it_can_be_given(
    symbolizer: Symbolizer, program: Program, dwz_program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs.Slots.__init__, "__defaults__", (2,))
    binaries = [*program.binaries, *dwz_program.binaries] * 2
    for binary in binaries:
        symbol = "main" if binary.compiled.name == "hot" else "lib_hot"
        symbolizer._known.clear()
        assert name_at(symbolizer, binary, symbol) == [symbol]


def test_no_directory_for_its_files(
    symbolizer: Symbolizer, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept in memory, as long as they are small."""
    monkeypatch.setattr(programs.tempfile, "tempdir", "/nonexistent")
    assert name_at(symbolizer, program.exe, "main") == ["main"]
    symbolizer.close()
    symbolizer._known.clear()
    symbolizer._files.clear()
    monkeypatch.setattr(programs, "_MOST_BYTES_OF_MEMORY", 1000)
    with pytest.raises(UsageError, match="set TMPDIR to a directory with room"):
        name_at(symbolizer, program.exe, "main")


@pytest.mark.root
def test_no_room_for_its_files(
    symbolizer: Symbolizer, program: Program, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    small = directory / "small"
    small.mkdir()
    run([tool("mount"), "-t", "tmpfs", "-o", "size=4k", "small", small], check=True)
    try:
        monkeypatch.setattr(programs.tempfile, "tempdir", os.fspath(small))
        with pytest.raises(UsageError, match="set TMPDIR to a directory with room"):
            name_at(symbolizer, program.exe, "main")
        symbolizer.close()
    finally:
        run([tool("umount"), "-l", small])


def test_program_that_fails_always(store: BuildIdFs, program: Program, directory: Path) -> None:
    words = requests(program.exe, "main")
    calling(directory / "llvm-symbolizer", ["/bin/false"])
    done = store("symbolize", *words, check=False, env={"PATH": os.fspath(directory)})
    assert done.rc == 30
    assert done.err.startswith(f"buildidfs: {program.exe.build_id}: llvm-symbolizer failed: ended")


@pytest.mark.parametrize("asked", PROGRAMS)
def test_hostile_files(tmp_path: Path, asked: str) -> None:
    """Whatever they make of the program, there is an answer, and the next file has its own."""
    good = tmp_path / "tree/good"
    good.parent.mkdir()
    (tmp_path / "good.c").write_text("int main(void) { return 0; }\n")
    run([tool("gcc"), "-g", "-o", good, tmp_path / "good.c"], check=True)
    data = good.read_bytes()
    build_id = bytes.fromhex(
        tools.run([tool("readelf"), "-n", good]).out.split("Build ID: ")[1][:40]
    )
    for number in range(6):
        changed = bytearray(data.replace(build_id, bytes([number]) * 20))
        at = changed.index(b".debug_line") if number % 2 else len(changed) // 2
        changed[at : at + 64 * number] = os.urandom(64 * number)
        (tmp_path / f"tree/bad{number}").write_bytes(changed)
    (tmp_path / "tree/empty").write_bytes(elf_file([TEXT, DWARF, SYMTAB], build_id=b"\xee" * 20))
    made = BuildIdFs(tmp_path)
    made("scan", "tree", tmp_path / "tree")
    words = []
    for line in made("list", "--json", "--kind", "executable").out.splitlines():
        words += [f"{json.loads(line)['build_id']}+{address:#x}" for address in (0x1119, 0x400100)]
    answers = made("symbolize", "--json", "--with", asked, *words, check=False)
    assert len(answers.out.splitlines()) == len(words)
    main = nm(good)
    address = next(line.split()[0] for line in main.splitlines() if line.endswith(" T main"))
    last = made("symbolize", "--with", asked, *words, f"{build_id.hex()}+0x{address}", check=False)
    assert f"{build_id.hex()}+0x{address} main " in last.out


# --- perf script ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiled(scratch: Path, program: Program) -> tuple[BuildIdFs, Path]:
    """A store, and a profile with call chains of a container that is gone."""
    directory = scratch / "profiled"
    directory.mkdir()
    made = BuildIdFs(directory)
    with container("tmpfs", program, directory / "container") as running:
        made.scan(running.spin)
        target = ["-g", "-p", str(running.spin)]
        recorded = perf_record(directory / "perf.data", running.spinning(), *target)
        assert recorded.rc == 0, recorded
    return made, directory / "perf.data"


def script(made: BuildIdFs, data: Path, *options: str, words: list[str] | None = None) -> Any:
    """``perf script | buildidfs symbolize --perf-script``"""
    before = run(
        [perf_tool(), "--buildid-dir", "/nonexistent", "script", "-i", data, *options], check=True
    ).out
    return before, filtered(made, before, *(words or []))


def filtered(made: BuildIdFs, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What symbolize --perf-script makes of a text."""
    done = subprocess.run(
        [*COMMAND, "--store", made.store, "symbolize", "--perf-script", *words],
        input=text, capture_output=True, text=True, check=False, timeout=120,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done
    return done


EVENTS = ("--show-mmap-events", "--show-task-events")


@pytest.mark.root
def test_perf_script_of_a_container_that_is_gone(profiled: tuple[BuildIdFs, Path]) -> None:
    before, done = script(*profiled, *EVENTS)
    assert "lib_static_hot" not in before
    assert re.search(r"\t +[0-9a-f]+ \[unknown\] \(\S+/app/lib/libhot.so\)\n", before)
    # A function that calls none has no frame of its own, so whoever called it is left out.
    chain = (
        r"\t +[0-9a-f]+ lib_static_hot\+0x[0-9a-f]+ \(\S+/app/lib/libhot.so\)\n"
        r"\t +[0-9a-f]+ main\+0x[0-9a-f]+ \(\S+/app/bin/hot\)\n"
    )
    assert re.search(chain, done.stdout)
    assert "exe_static_hot+0x" in done.stdout
    # The rest is as it was.
    kept = [line for line in before.splitlines() if "[unknown]" not in line]
    assert [line for line in done.stdout.splitlines() if line in set(kept)] == kept


@pytest.mark.root
def test_perf_script_with_lines(profiled: tuple[BuildIdFs, Path]) -> None:
    _, done = script(*profiled, *EVENTS, words=["--lines"])
    # Of a caller it is the line of the call, not of what comes after it.
    assert re.search(rf"\) *\n  libhot.c:{line_of('lib_hot')}\n", done.stdout)
    assert re.search(rf"main\+\S+ \(\S+/hot\)\n  hot.c:{line_of('main_spin')}\n", done.stdout)


@pytest.mark.root
def test_perf_script_fields(profiled: tuple[BuildIdFs, Path]) -> None:
    fields = ["-F", "comm,pid,tid,time,event,ip,sym,dso"]
    _, done = script(*profiled, *EVENTS, *fields)
    assert "lib_static_hot+0x" in done.stdout
    # Samples without their chains are on one line, with addresses of the process.
    _, flat = script(*profiled, *EVENTS, "-G", "-F", "comm,tid,time,event,ip,sym,dso")
    assert re.search(r": +[0-9a-f]{12} exe_static_hot\+\S+ \(", flat.stdout)


@pytest.mark.root
def test_perf_script_without_events(profiled: tuple[BuildIdFs, Path], tmp_path: Path) -> None:
    made, data = profiled
    before, done = script(made, data)
    assert done.stdout == before
    assert "--show-mmap-events" in done.stderr
    listed = run([perf_tool(), "buildid-list", "-i", data], check=True).out
    (tmp_path / "ids").write_text(listed)
    words = ["--buildid-list", str(tmp_path / "ids")]
    _, done = script(made, data, words=words)
    if "libhot.so: " in done.stderr:  # perf of Linux 6.4 and newer prints no offsets by default
        assert "lib_static_hot+0x" not in done.stdout
        assert re.search(r"libhot\.so: .*perf script .* or -F \+dsoff$", done.stderr, re.M), done
        _, done = script(made, data, "-F", "+dsoff", words=words)
    assert "lib_static_hot+0x" in done.stdout


@pytest.mark.root
def test_perf_script_is_not_asked_for_what_it_has_given(profiled: tuple[BuildIdFs, Path]) -> None:
    made, data = profiled
    before, _ = script(made, data, *EVENTS)
    without_ids = re.sub(r" <[0-9a-f]{40}>\]", " 08:01 12 0]", before)
    assert without_ids != before
    no_maps = re.sub(r"(?m)^.*PERF_RECORD_MMAP2 (?!-1).*libhot.*\n", "", before)
    flat = script(made, data, *EVENTS, "-G")[0]
    lost = re.sub(r"(?m)^.*PERF_RECORD_MMAP2 (?!-1).*libhot.*\n", "", flat)
    no_tasks = re.sub(r"(?m)^.*PERF_RECORD_(FORK|COMM|EXIT).*\n", "", lost)
    for text, told in (
        (without_ids, "no build ID in the profile: run perf script on what buildidfs repair"),
        (no_maps, "no build ID in the profile: run perf script on what buildidfs repair"),
        (lost, "no event tells of a mapping at that address"),
        (no_tasks, "give perf script --show-task-events, too"),
    ):
        done = filtered(made, text)
        assert re.search(rf"libhot.so: \d+ frames? without a name: .*{told}", done.stderr), done
        assert "--show-mmap-events" not in done.stderr


@pytest.mark.root
def test_perf_script_of_what_was_not_captured(
    profiled: tuple[BuildIdFs, Path], tmp_path: Path
) -> None:
    other = BuildIdFs(tmp_path)
    Store.create(other.store).close()
    before, done = script(other, profiled[1], *EVENTS)
    assert done.stdout == before
    assert re.search(r"libhot.so: \d+ frames without a name: never captured\n", done.stderr)


@pytest.mark.root
@pytest.mark.fuse
def test_vdso(gone: Vanished) -> None:
    listed = gone.buildidfs("list", "--json", "--kind", "vdso").out.splitlines()
    build_id = json.loads(listed[0])["build_id"]
    symbols = nm("-D", gone.mount / build_id / "vdso")
    address = next(line.split()[0] for line in symbols.splitlines() if "clock_gettime" in line)
    answer = gone.buildidfs("symbolize", f"{build_id}+0x{address}").out
    assert "clock_gettime" in answer


@pytest.mark.root
def test_perf_script_of_another_kernel(directory: Path) -> None:
    """On a machine without these symbols; the names are those of perf on this one."""
    data, made = directory / "kernel.data", BuildIdFs(directory)
    words = [tool("dd"), "if=/dev/zero", "of=/dev/null", "bs=1M", "count=3000"]
    assert perf_record(data, words, "-g", "-N").rc == 0
    made("scan", "kernel", check=False)  # modules may be loaded whose files are gone
    frame = re.compile(r"^\t\s*([0-9a-f]+) (\S+?)(?:\+0x[0-9a-f]+)? \(\[kernel.kallsyms\]\)$", re.M)
    native, _ = script(made, data, *EVENTS)
    text, done = script(made, data, *EVENTS, "--kallsyms=/dev/null")
    assert {name for _, name in frame.findall(text)} == {"[unknown]"}
    right, found = frame.findall(native), frame.findall(done.stdout)
    assert len(found) == len(right) > 20
    # Several symbols of one address are equally good.
    same = sum(each == other for each, other in zip(found, right, strict=True))
    assert same >= 0.97 * len(right)
    assert "[unknown]" not in {name for _, name in found}
    assert "kernel" not in done.stderr
