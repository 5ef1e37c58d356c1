# SPDX-License-Identifier: Apache-2.0
"""A container runs, is scanned, and is gone with its filesystem: every client still reads it.

The kinds of filesystem that a container may sit on differ in how the kernel names a mapped file and
who else can open it. So names, bytes, gdb and perf are tested for each kind, other clients for one.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.clients.tools import tool
from tests.support.containers.ephemeral import KINDS, container
from tests.support.containers.vanished import Vanished, vanished
from tests.support.elf.programs import SOURCE_DIR, build_id_of, line_of, sha256

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.elf.programs import Program
    from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]


@pytest.fixture(scope="module", params=KINDS)
def ended(request: pytest.FixtureRequest, scratch: Path, program: Program) -> Iterator[Vanished]:
    """A container of each kind that ran ``program`` and is gone."""
    if request.param == "tmpfs":
        yield request.getfixturevalue("gone")
        return
    with vanished(request.param, program, scratch / f"container-{request.param}") as result:
        yield result


def _at(marker: str, file: str = "hot.c") -> str:
    return f"{SOURCE_DIR}/{file}:{line_of(marker)}"


def test_bytes_are_those_of_the_container(ended: Vanished) -> None:
    for binary in ended.program.binaries:
        directory = ended.mount / binary.build_id
        for name, original in (
            ("elf", binary.shipped),
            ("executable", binary.shipped),
            ("debug", binary.debug),
            ("debuginfo", binary.debug),
        ):
            tools.run([tools.tool("cmp"), directory / name, original], check=True)
        got = ended.buildidfs("get", binary.build_id, "-o", ended.core.parent / "got")
        assert got.rc == 0
        assert sha256(ended.core.parent / "got") == sha256(binary.shipped)


def test_path_says_where_it_was_seen(ended: Vanished) -> None:
    assert (ended.exe / "path").read_text().splitlines() == [f"{ended.app}/bin/hot"]
    assert (ended.lib / "path").read_text().splitlines() == [f"{ended.app}/lib/libhot.so"]


def test_container_is_remembered_by_its_label(ended: Vanished) -> None:
    exe = ended.program.exe.build_id
    origins = json.loads(ended.buildidfs("show", "--json", exe).out)["origins"]
    (label,) = {origin["container"] for origin in origins}
    assert label == ended.label or (not ended.label and label.startswith("mnt:"))
    listed = ended.buildidfs("list", "--json", "--container", label).out.splitlines()
    assert exe in {json.loads(line)["build_id"] for line in listed}
    unknown = ended.buildidfs("list", "--json", "--container", "nobody:0", check=False)
    assert (unknown.rc, unknown.out) == (30, "")


def test_gdb_resolves_lines_of_a_live_process(ended: Vanished) -> None:
    assert SOURCE_DIR not in ended.unaided.out, "gdb found debug files without the mount"
    for place in (
        f"exe_static_stuck .* at {_at('exe_stuck')}",
        f"lib_static_stuck .* at {_at('lib_stuck', 'libhot.c')}",
        f"main .* at {_at('main_stuck')}",
    ):
        assert re.search(place, ended.live.out), str(ended.live)


def test_gdb_resolves_lines_of_a_core_file(ended: Vanished) -> None:
    result = tools.gdb("bt", debug=ended.debug, arguments=["-c", ended.core])
    # behind one frame of libc, or three in newer ones
    assert re.search(rf"#[13] .* exe_static_stuck .* at {_at('exe_stuck')}", result.out), str(
        result
    )
    assert "newer than core file" not in result.text, str(result)


def test_gdb_resolves_the_libraries_of_a_core_file_by_debuginfod(gone: Vanished) -> None:
    result = tools.gdb(
        "bt",
        settings=["set debuginfod enabled on"],
        arguments=["-c", gone.core],
        env={"DEBUGINFOD_URLS": gone.url},
    )
    for place in (
        f"exe_static_stuck .* at {_at('exe_stuck')}",
        f"lib_static_stuck .* at {_at('lib_stuck', 'libhot.c')}",
        f"main .* at {_at('main_stuck')}",
    ):
        assert re.search(place, result.out), str(result)


def test_perf_names_the_hot_functions(ended: Vanished) -> None:
    result = tools.perf_report(ended.mount, ended.profile)
    assert re.search(r"hot +hot +\[\.\] exe_static_hot", result.out), str(result)
    assert re.search(r"hot +libhot\.so +\[\.\] lib_static_hot", result.out), str(result)


def test_elfutils_resolves_lines(gone: Vanished) -> None:
    address = gone.program.exe.address("exe_static_hot")
    result = tools.eu_addr2line(gone.exe / "elf", gone.debug, address)
    assert result.out.splitlines()[0] == "exe_static_hot", str(result)
    assert result.out.splitlines()[1].startswith(f"{_at('exe_entry')}:"), str(result)
    stack = tools.eu_stack(gone.core, gone.debug)
    for place in (_at("exe_stuck"), _at("lib_stuck", "libhot.c"), _at("main_stuck")):
        assert f"{place}:" in stack.out, str(stack)


def test_lldb_resolves_lines_of_a_core_file(gone: Vanished) -> None:
    result = tools.lldb(
        f"settings set target.debug-file-search-paths {gone.debug}",
        f"target create {gone.exe}/elf --core {gone.core}",
        "bt",
    )
    assert re.search(rf"exe_static_stuck.* at hot\.c:{line_of('exe_stuck')}", result.out), str(
        result
    )


def test_readelf_reads_it(gone: Vanished) -> None:
    for binary in gone.program.binaries:
        assert build_id_of(gone.mount / binary.build_id / "elf") == binary.build_id
    symbols = tools.run([tools.tool("readelf"), "-sW", gone.exe / "debug"])
    assert " exe_static_hot" in symbols.out, symbols


def test_debuginfod_find_gets_it(gone: Vanished) -> None:
    for binary in gone.program.binaries:
        for kind, original in (("executable", binary.shipped), ("debuginfo", binary.debug)):
            result = tools.debuginfod_find(gone.url, kind, binary.build_id)
            assert result.rc == 0, str(result)
            assert sha256(Path(result.out.strip())) == sha256(original)


def test_a_running_container_is_chosen_by_its_label(
    buildidfs: BuildIdFs, program: Program, scratch: Path
) -> None:
    with container("crun", program, scratch / "chosen") as running:
        none = buildidfs("scan", "proc", "--container", "nobody:0", check=False)
        assert none.rc == 2, str(none)
        # 3: a process that is closed even to root might be another one of it
        some = buildidfs("scan", "proc", "--container", running.label[:-4], check=False)
        assert some.rc in (0, 3), str(some)
    listed = buildidfs("list", "--json").out.splitlines()
    found = {json.loads(line)["build_id"] for line in listed}
    assert {binary.build_id for binary in program.binaries} <= found
    # the shell that started both, which sits in the container's own root
    busybox = build_id_of(Path(tool("busybox")))
    assert found >= {busybox}
    assert build_id_of(Path(sys.executable).resolve()) not in found
