# SPDX-License-Identifier: Apache-2.0
"""Debug information in its various forms, from files that are gone, for clients of the mount."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.clients.tools import nm, run, tool
from tests.support.elf import debugforms
from tests.support.elf.programs import build_id_of

if TYPE_CHECKING:
    from tests.support.elf.programs import Program
    from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]


def address(path: Path, symbol: str) -> int:
    """The link-time address of a symbol."""
    for line in nm(path).splitlines():
        if line.split()[-1] == symbol:
            return int(line.split()[0], 16)
    raise LookupError(symbol)


def variants(buildidfs: BuildIdFs, build_id: str) -> list[tuple[str, str]]:
    """Kind and quality of what is kept, the best of each kind first."""
    shown = json.loads(buildidfs("show", "--json", build_id).out)
    return [(each["kind"], each["quality"]) for each in shown["variants"]]


# --- what dwz moved out --------------------------------------------------------------------------


def test_a_dwz_file_has_the_name_by_which_debuginfo_refers_to_it(
    buildidfs: BuildIdFs, directory: Path
) -> None:
    """It comes from elsewhere and later. No debugger here knows DWARF 5's, but readelf does."""
    place, later = directory / "place", directory / "later"
    for each in (directory, place, later):
        each.mkdir(exist_ok=True)
        each.chmod(0o755)
    programs = []
    for name in ("one", "two"):
        source = directory / f"{name}.c"
        source.write_text(
            "struct shared { int a; struct shared *next; char text[40]; double d[3]; };\n"
            f"int {name}(struct shared *p) {{ return p->next->a; }}\n"
            "int main(void) { return 0; }\n"
        )
        programs.append(place / name)
        run([tool("gcc"), "-gdwarf-5", "-Wl,--build-id", "-o", programs[-1], source], check=True)
    common = later / "renamed"
    name = "x86_64-linux-gnu/package.sup"
    link = f"/usr/lib/debug/.dwz/{name}"
    run([tool("dwz"), "--dwarf-5", "-m", common, "-M", link, *programs], check=True)
    buildidfs("scan", "tree", place)
    with buildidfs.mounted() as mount:
        served = mount / "debug/.dwz" / name
        assert not served.exists()
        buildidfs("scan", "tree", later)
        assert served.read_bytes() == common.read_bytes()
        assert [path.name for path in served.parent.iterdir()] == ["package.sup"]
        script = """
            mkdir -p /usr/lib/debug && mount -t tmpfs none /usr/lib/debug
            ln -s "$1/debug/.dwz" /usr/lib/debug/.dwz && exec readelf -wi "$2"
            """
        argv = [tool("unshare"), "-m", "sh", "-ec", script, "sh"]
        shown = run([*argv, mount, programs[0]], check=True)
        assert f"Found supplementary debug file: {link}" in shown.out + shown.err, shown
    bundle = directory / "all.tar.zst"
    said = json.loads(buildidfs("bundle", programs[0], "-o", bundle, "--json").out)
    assert said["absent"] == []
    assert said["build_ids"] == 2


# --- mini debuginfo ------------------------------------------------------------------------------


def test_mini_debuginfo(buildidfs: BuildIdFs, directory: Path) -> None:
    """Functions that only .gnu_debugdata names, and those that only .dynsym does."""
    full = debugforms.library(directory / "build")
    copy = debugforms.with_mini_debuginfo(full, directory / "copy").shipped
    app, data = directory / "app", directory / "perf.data"
    app.mkdir()
    program = debugforms.program(app, Path(shutil.copy2(copy, app)))
    assert tools.perf_record(data, [program]).rc == 0
    buildidfs("scan", "tree", app)
    shutil.rmtree(app)
    assert variants(buildidfs, build_id_of(copy)) == [
        ("executable", "dynsym"),
        ("debuginfo", "dynsym"),
    ]
    with buildidfs.mounted() as mount:
        report = tools.perf_report(mount, data)
        for function in ("hidden", "exported"):
            assert re.search(rf"libparts\.so +\[\.\] {function}\b", report.out), str(report)
            at = address(full, function) + 4
            line = tools.eu_addr2line(copy, mount / "debug", at)
            assert line.out.startswith(f"{function}\n"), str(line)
            symbol = tools.gdb(f"info symbol {at}", debug=mount / "debug", arguments=[copy])
            assert f"{function} + 4 in section .text" in symbol.out, str(symbol)
        lint = run([tool("eu-elflint"), "--gnu-ld", "-d", mount / build_id_of(copy) / "debug"])
        assert lint.rc == 0, str(lint)


def test_real_debuginfo_comes_before_it(buildidfs: BuildIdFs, directory: Path) -> None:
    full = debugforms.library(directory / "build")
    shipped = debugforms.with_mini_debuginfo(full, directory / "app").shipped
    buildidfs("add", shipped)
    with buildidfs.mounted() as mount:
        debug = mount / build_id_of(full) / "debug"
        first = debug.read_bytes()
        buildidfs("add", full)
        assert first != debug.read_bytes() == full.read_bytes()


# --- compressed sections -------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["zlib", "zlib-gnu", "zstd"])
def test_compressed_sections(buildidfs: BuildIdFs, directory: Path, form: str) -> None:
    full = debugforms.library(directory)
    done = run([tool("objcopy"), f"--compress-debug-sections={form}", full])
    if form == "zstd" and "not built with zstd" in done.text:
        pytest.skip("this objcopy knows no zstd")
    assert done.rc == 0, str(done)
    compressed = full.read_bytes()
    debug = directory / "lib.debug"
    run([tool("objcopy"), "--only-keep-debug", full, debug], check=True)
    sections = run([tool("readelf"), "-SW", debug]).out
    assert re.search(
        r"\.zdebug_info" if form == "zlib-gnu" else r"\.debug_info +PROGBITS.* C ", sections
    )
    for path in (full, debug):
        buildidfs("add", path)
    build_id, at = build_id_of(full), address(full, "hidden") + 4
    assert set(variants(buildidfs, build_id)) == {
        ("executable", "debuginfo"),
        ("debuginfo", "debuginfo"),
    }
    stripped = directory / "stripped.so"
    run([tool("objcopy"), "--strip-all", full, stripped], check=True)
    full.unlink()
    with buildidfs.mounted() as mount:
        assert (mount / build_id / "elf").read_bytes() == compressed
        source = tools.gdb(f"info line *{at}", debug=mount / "debug", arguments=[stripped])
        if form == "zstd" and "zstd" in source.text:
            pytest.skip("this gdb knows no zstd")
        assert re.search(r'Line \d+ of "parts\.c"', source.out), str(source)


# --- what dwz moved out --------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["scan", "tree"], ["add"]])
def test_dwz_file(
    buildidfs: BuildIdFs, directory: Path, dwz_program: Program, command: list[str]
) -> None:
    dwz_program.install(directory)
    supplement = dwz_program.supplement
    assert supplement is not None
    binary = directory / "app/bin/hot"
    buildidfs(*command, directory / "app" if command != ["add"] else binary)
    shutil.rmtree(directory / "app")
    with buildidfs.mounted() as mount:
        found = mount / "debug/.dwz" / supplement.name
        assert found.read_bytes() == supplement.path.read_bytes()
        types = tools.gdb(
            "ptype struct work", debug=mount / "debug", arguments=[dwz_program.exe.shipped]
        )
        assert "struct shape shape;" in types.out, str(types)


# --- split DWARF ---------------------------------------------------------------------------------


def test_split_dwarf(buildidfs: BuildIdFs, directory: Path) -> None:
    """What gdb and lldb know of a stripped library when its package has been captured, too."""
    full = debugforms.library(directory / "app", "-gdwarf-4", "-gsplit-dwarf")
    package = debugforms.packed(full)
    data = package.read_bytes()
    build_id, at = build_id_of(full), address(full, "hidden")
    stripped, hidden = directory / full.name, directory / "hidden.dwp"
    run([tool("objcopy"), "--strip-all", full, stripped], check=True)
    package.rename(hidden)
    buildidfs("add", full)
    with buildidfs.mounted() as mount:
        places = [mount / build_id / f"{name}.dwp" for name in ("elf", "debug", full.name)]
        assert [place.exists() for place in places] == [False] * 3
        hidden.rename(package)
        buildidfs("add", package)
        shutil.rmtree(directory / "app")
        assert [place.read_bytes() for place in places] == [data] * 3
        assert not (mount / build_id / "other.dwp").exists()
        assert {"elf.dwp", "debug.dwp"} <= {path.name for path in (mount / build_id).iterdir()}
        for binary in (stripped, mount / build_id / "elf"):
            types = tools.gdb("ptype struct part", debug=mount / "debug", arguments=[binary])
            assert "char *name;" in types.out, str(types)
            found = tools.lldb(
                f"settings set target.debug-file-search-paths {mount}/debug",
                f"target create {binary}",
                f"image lookup -v -a {at:#x}",
                "type lookup part",
            )
            assert "char *name;" in found.out, str(found)
        assert "1 unit of split DWARF" in buildidfs("show", build_id).out
        buildidfs("remove", build_id)
        assert not (mount / build_id).exists()
    assert buildidfs("list").out == ""


def test_split_dwarf_that_is_not_packed(buildidfs: BuildIdFs, directory: Path) -> None:
    full = debugforms.library(directory, "-gsplit-dwarf")
    buildidfs("scan", "tree", directory)
    shown = json.loads(buildidfs("show", "--json", build_id_of(full)).out)
    (written,) = directory.glob("*.dwo")
    assert shown["split_dwarf"] == {"units": 1, "files": [str(written)], "package": None}
    assert any(written.name in text for text in shown["missing"])
