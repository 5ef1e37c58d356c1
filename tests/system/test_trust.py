# SPDX-License-Identifier: Apache-2.0
"""A file from a container must not run as whoever debugs it.

gdb executes Python from ``.debug_gdb_scripts`` of any file whose real path is inside a directory
it trusts, and adding any safe path makes it trust its debug file directory. Two defences, each
tested alone: what gdb is told to use holds only links that lead out of it, and the section reads
as zeros wherever the file did not come from the host itself.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import clients, programs
from tests.support.clients import run, tool
from tests.support.mounts import BuildIdFs
from tests.support.vanished import Vanished, vanished

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.programs import Program

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]


@pytest.fixture(scope="module")
def marker(scratch: Path) -> Path:
    """The file that the hostile script creates when it runs."""
    return scratch / "executed"


@pytest.fixture(scope="module")
def hostile_program(scratch: Path, marker: Path) -> Program:
    """A program whose executable and debug files all carry a script for gdb."""
    script = programs.gdb_script(f"open('{marker}', 'w').close()")
    program = programs.build(scratch / "hostile-program", extra=script)
    # Stripping removes the section; a hostile image would leave it in.
    exe = dataclasses.replace(program.exe, shipped=program.exe.compiled)
    return dataclasses.replace(program, exe=exe)


@pytest.fixture(scope="module")
def hostile(scratch: Path, hostile_program: Program) -> Iterator[Vanished]:
    """A container that ran ``hostile_program`` and is gone."""
    with vanished("tmpfs", hostile_program, scratch / "hostile") as result:
        yield result


def _debug_core(hostile: Vanished, debug: Path, marker: Path) -> clients.Result:
    """Open the core file; the safe path has nothing to do with the mount, it only has to be set."""
    marker.unlink(missing_ok=True)
    settings = ["add-auto-load-safe-path /nowhere"]
    return clients.gdb("bt", debug=debug, settings=settings, arguments=["-c", hostile.core])


def _section(path: Path) -> slice:
    """The extent of the section in a file."""
    headers = run([tool("readelf"), "-SW", path], check=True).out
    found = re.search(r"\.debug_gdb_scripts +\w+ +[0-9a-f]+ ([0-9a-f]+) ([0-9a-f]+)", headers)
    assert found is not None, headers
    offset, size = int(found[1], 16), int(found[2], 16)
    return slice(offset, offset + size)


def test_gdb_does_run_scripts_of_a_trusted_directory(
    hostile_program: Program, marker: Path
) -> None:
    """The danger is real here: otherwise the tests below would pass for nothing."""
    marker.unlink(missing_ok=True)
    trust = f"add-auto-load-safe-path {hostile_program.exe.compiled.parent}"
    clients.gdb("quit", settings=[trust], arguments=[hostile_program.exe.compiled])
    assert marker.exists()


@pytest.mark.parametrize("name", ["debug", "."])
def test_script_is_not_executed(hostile: Vanished, marker: Path, name: str) -> None:
    result = _debug_core(hostile, hostile.mount / name, marker)
    assert "exe_static_stuck" in result.out, str(result)
    assert not marker.exists(), str(result)


def test_links_alone_protect_who_uses_the_right_directory(
    hostile: Vanished, marker: Path, buildidfs: BuildIdFs
) -> None:
    kept = BuildIdFs(buildidfs.store.parent, hostile.buildidfs.store)
    with kept.mounted("--gdb-scripts=keep") as mount:
        result = _debug_core(hostile, mount / "debug", marker)
        assert "exe_static_stuck" in result.out, str(result)
        assert not marker.exists(), str(result)
        # and the option does what it says, so that the above is the links' doing
        _debug_core(hostile, mount, marker)
        assert marker.exists()


def test_only_the_section_reads_as_zeros(hostile: Vanished) -> None:
    exe, lib = hostile.program.binaries
    for served, original in (
        (hostile.exe / "elf", exe.shipped),
        (hostile.lib / "debug", lib.debug),
    ):
        expected = bytearray(original.read_bytes())
        section = _section(original)
        expected[section] = bytes(section.stop - section.start)
        assert served.read_bytes() == bytes(expected)


def test_debuginfod_clients_get_zeros_too(hostile: Vanished) -> None:
    original = hostile.program.lib.debug
    result = clients.debuginfod_find(hostile.url, "debuginfo", hostile.program.lib.build_id)
    assert result.rc == 0, str(result)
    got = Path(result.out.strip()).read_bytes()
    assert not any(got[_section(original)])
    assert len(got) == original.stat().st_size


@pytest.mark.host
def test_files_of_the_host_are_served_as_they_are(
    buildidfs: BuildIdFs, hostile_program: Program
) -> None:
    # /tmp may be mounted nosuid, and then says nothing of who put a file there
    trusted = buildidfs.store.parent / "trusted"
    trusted.mkdir()
    run([tool("mount"), "-t", "tmpfs", "none", trusted], check=True)
    try:
        shutil.copy2(hostile_program.exe.compiled, trusted)
        buildidfs("scan", "tree", trusted)
    finally:
        run([tool("umount"), trusted], check=True)
    with buildidfs.mounted() as mount:
        served = mount / hostile_program.exe.build_id / "elf"
        run([tool("cmp"), served, hostile_program.exe.compiled], check=True)
