# SPDX-License-Identifier: Apache-2.0
"""Names of stripped Go programs, out of their .gopclntab, for clients of the mount."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from elftools.elf.elffile import ELFFile

from tests.support.clients import tools
from tests.support.clients.tools import run, tool
from tests.support.elf import godebug
from tests.support.elf.goprograms import HOT_LINE, GoTools, Symbol, large_source
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]

_MADE_S = 60.0


@pytest.fixture(scope="module")
def go(scratch: Path) -> GoTools:
    return GoTools(scratch / "go")


def made(buildidfs: BuildIdFs, build_id: str) -> dict[str, Any]:
    """The debug file that was made of a program, once it is there."""

    def found() -> dict[str, Any] | None:
        shown = json.loads(buildidfs("show", "--json", build_id).out)
        return next((each for each in shown["variants"] if each["kind"] == "debuginfo"), None)

    return until(found, f"a debug file of {build_id}", _MADE_S)  # type: ignore[return-value]


def functions_in(debug: bytes) -> set[Symbol]:
    table: Any = ELFFile(io.BytesIO(debug)).get_section_by_name(".symtab")
    return {
        Symbol(each["st_value"], each["st_size"], each.name)
        for each in table.iter_symbols()
        if each["st_info"]["type"] == "STT_FUNC"
    }


def places_in(debug: Path, addresses: list[int]) -> list[str]:
    argv = [tool("addr2line"), "-e", debug, *(f"0x{address:x}" for address in addresses)]
    out = run(argv, check=True, timeout=300).out.splitlines()
    return [re.sub(r" \(discriminator.*", "", line) for line in out]


def some_addresses(functions: set[Symbol], count: int) -> list[int]:
    random.seed(count)
    chosen = random.choices(sorted(functions), k=count)
    return [each.address + random.randrange(each.size) for each in chosen]


@pytest.fixture(scope="module")
def hot(go: GoTools, scratch: Path) -> tuple[Path, str]:
    """A stripped program that computes for a while, and its build ID."""
    program = scratch / "go/hot"
    return program, go.build(program, go.source())


def test_clients_name_functions_files_and_lines(
    buildidfs: BuildIdFs, directory: Path, hot: tuple[Path, str]
) -> None:
    program, build_id = hot
    buildidfs("add", program)
    found = made(buildidfs, build_id)
    assert (found["quality"], found["made_of"]) == ("gopclntab", ".gopclntab")
    assert "gopclntab, trust" in buildidfs("show", build_id).out
    assert "made of .gopclntab" in buildidfs("show", build_id).out
    with buildidfs.mounted() as mount:
        debug, files = mount / build_id / "debug", mount / "debug"
        (at,) = (
            each.address for each in functions_in(debug.read_bytes()) if each.name == "main.hotloop"
        )
        without = tools.eu_addr2line(program, mount / "nothing", at)
        assert not re.search(r"hotloop|hot\.go", without.out), str(without)
        # A function that needs no check of the stack begins with the code of its first line.
        line = f"(?:{HOT_LINE}|{HOT_LINE + 1})"
        place = rf"hot\.go:{line}\b"
        for result in (
            tools.eu_addr2line(program, files, at),
            run([tool("addr2line"), "-f", "-e", debug, f"0x{at:x}"]),
            tools.llvm_symbolizer(files, f"--obj={program}", f"0x{at:x}"),
            tools.lldb(
                f"settings set target.debug-file-search-paths {files}",
                f"target create {program}",
                f"image lookup -v -a 0x{at:x}",
            ),
        ):
            assert "main.hotloop" in result.out, str(result)
            assert re.search(place, result.out), str(result)
        shown = tools.gdb(
            f"info symbol {at}", f"info line *{at}", "info line main.hotloop",
            debug=files, arguments=[program],
        )  # fmt: skip
        # It takes such symbols for Ada's, in programs with debuginfo of the compiler as well.
        assert re.search(r"main(\.hotloop|\[hotloop\]) in section \.text", shown.out), str(shown)
        assert len(re.findall(rf'Line {line} of ".*/hot\.go"', shown.out)) == 2, str(shown)
        lint = run([tool("eu-elflint"), "--gnu-ld", "-d", debug])
        assert lint.rc == 0, str(lint)


def test_perf_names_samples_of_a_program_that_is_gone(
    buildidfs: BuildIdFs, directory: Path, hot: tuple[Path, str]
) -> None:
    program, build_id = hot
    copy, data = directory / "app", directory / "perf.data"
    copy.write_bytes(program.read_bytes())
    copy.chmod(0o755)
    buildidfs("add", copy)
    assert tools.perf_record(data, [tool("timeout"), "0.3", copy]).rc == 124
    copy.unlink()
    made(buildidfs, build_id)
    named = r"app +\[\.\] main\.(hotloop|mixed)\b"
    without = tools.perf_report(directory / "no-mount-here", data)
    assert not re.search(named, without.out), str(without)
    with buildidfs.mounted() as mount:
        report = tools.perf_report(mount, data)
        lines = tools.perf(mount, "annotate", "--stdio", "-l", "-i", data, "main.hotloop")
    assert re.search(named, report.out), str(report)
    assert lines.rc == 0, str(lines)


def test_perf_names_samples_of_a_program_without_a_build_id(
    buildidfs: BuildIdFs, directory: Path, go: GoTools
) -> None:
    """Its debug file has the ID that the store has adopted for it."""
    program, data, repaired = (directory / name for name in ("app", "perf.data", "repaired.data"))
    go.build(program, go.source(), identified=False)
    assert tools.perf_record(data, [tool("timeout"), "0.3", program]).rc == 124
    buildidfs("add", program)
    program.unlink()
    (row,) = (json.loads(line) for line in buildidfs("list", "--json").out.splitlines()[:1])
    assert made(buildidfs, row["build_id"])["made_of"] == ".gopclntab"
    buildidfs("repair", data, "-o", repaired)
    named = r"app +\[\.\] main\.(hotloop|mixed)\b"
    with buildidfs.mounted() as mount:
        without = tools.perf_report(mount, data)
        assert not re.search(named, without.out), str(without)
        report = tools.perf_report(mount, repaired)
    assert re.search(named, report.out), str(report)


@pytest.mark.host  # elsewhere the file is not trusted, and the scripts that it names are zeroed
def test_real_debuginfo_takes_its_place(buildidfs: BuildIdFs, directory: Path, go: GoTools) -> None:
    full, stripped = directory / "full", directory / "stripped"
    build_id = go.build(full, go.source(), strip=False)
    run([tool("strip"), "-o", stripped, full], check=True)
    buildidfs("add", stripped)
    made(buildidfs, build_id)
    with buildidfs.mounted() as mount:
        debug = mount / build_id / "debug"
        assert b".buildidfs.gopclntab" in debug.read_bytes()
        buildidfs("add", full)
        assert debug.read_bytes() == full.read_bytes()


def test_a_program_with_better_names_gets_none(
    buildidfs: BuildIdFs, directory: Path, go: GoTools, hot: tuple[Path, str]
) -> None:
    """The stripped twin comes later; the program after it shows that its turn has passed."""
    full, stripped = directory / "full", directory / "stripped"
    build_id = go.build(full, go.source(), strip=False)
    run([tool("strip"), "-o", stripped, full], check=True)
    for path in (full, stripped, hot[0]):
        buildidfs("add", path)
    made(buildidfs, hot[1])
    shown = json.loads(buildidfs("show", "--json", build_id).out)
    assert not any(each["made_of"] for each in shown["variants"])
    assert len(shown["variants"]) == 3


def test_check_and_rebuild_keep_it(buildidfs: BuildIdFs, hot: tuple[Path, str]) -> None:
    program, build_id = hot
    buildidfs("add", program)
    before = made(buildidfs, build_id)
    assert "nothing is wrong" in buildidfs("check", "--verify-data").err
    shutil.rmtree(buildidfs.store / "index")
    buildidfs("check", "--repair")
    after = made(buildidfs, build_id)
    assert (after["sha256"], after["quality"]) == (before["sha256"], "gopclntab")
    assert "nothing is wrong" in buildidfs("check", "--verify-data").err


# --- against the tools of Go ----------------------------------------------------------------------


def _spelled(symbol: Symbol) -> Symbol:
    """The symbol with its type arguments left out, as Go 1.18 to 1.20 do in the table."""
    return symbol._replace(name=re.sub(r"\[.*\]", "[...]", symbol.name))


def compared(
    go: GoTools, full: Path, stripped: Path, directory: Path, *, lines: int, least: int = 800
) -> None:
    """The functions of a stripped program are those of its twin, and so are files and lines."""
    data = stripped.read_bytes()
    debug = godebug.made(data)
    assert debug is not None
    wanted, found = go.functions(full), functions_in(debug)
    wanted, found = ({_spelled(each) for each in group} for group in (wanted, found))
    assert wanted - found == set()
    assert len(wanted) > least
    extra = {each.name for each in found - wanted}
    assert all(name.startswith("go:textfips") for name in extra), extra
    if not lines:
        return
    path = directory / "debug"
    path.write_bytes(debug)
    addresses = some_addresses(wanted, lines)
    assert places_in(path, addresses) == go.places(full, addresses)


@pytest.mark.slow
def test_a_program_of_the_size_of_go_itself(go: GoTools, directory: Path) -> None:
    """The go command of Go 1.19 has 10,784 functions, and would be compiled for ten seconds."""
    full, stripped = directory / "full", directory / "stripped"
    source = go.source(large_source(5000))
    go.build(full, source, strip=False, dwarf=False)
    run([tool("strip"), "-o", stripped, full], check=True)
    started = time.process_time()
    compared(go, full, stripped, directory, lines=1000, least=10_800)
    assert time.process_time() - started < 60  # quadratic work takes minutes


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["386", "s390x"])
def test_other_machines(go: GoTools, directory: Path, machine: str) -> None:
    """Both byte orders and word sizes; instructions in units of one and of two bytes."""
    source, env = go.source(), {"GOARCH": machine}
    full, stripped = directory / "full", directory / "stripped"
    go.build(full, source, strip=False, dwarf=False, env=env)
    go.build(stripped, source, env=env)
    compared(go, full, stripped, directory, lines=1000)


def test_a_program_at_no_fixed_address(go: GoTools, directory: Path) -> None:
    """The table is in .data.rel.ro, and its header has no address of the code before it runs.

    ``go tool addr2line`` of Go 1.19 says nothing of such a program.
    """
    source = go.source()
    full, stripped = directory / "full", directory / "stripped"
    go.build(full, source, "-buildmode=pie", strip=False, dwarf=False)
    go.build(stripped, source, "-buildmode=pie")
    compared(go, full, stripped, directory, lines=0)
