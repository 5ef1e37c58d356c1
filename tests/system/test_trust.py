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

from tests.support.clients import tools
from tests.support.clients.tools import run, tool, unmount
from tests.support.containers.vanished import Vanished, vanished
from tests.support.elf import programs
from tests.support.harness.mounts import BuildIdFs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.elf.programs import Program

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


def _debug_core(hostile: Vanished, debug: Path, marker: Path) -> tools.Result:
    """Open the core file; the safe path has nothing to do with the mount, it only has to be set."""
    marker.unlink(missing_ok=True)
    settings = ["add-auto-load-safe-path /nowhere"]
    return tools.gdb("bt", debug=debug, settings=settings, arguments=["-c", hostile.core])


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
    tools.gdb("quit", settings=[trust], arguments=[hostile_program.exe.compiled])
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


def test_a_sysroot_is_not_trusted(hostile: Vanished, kept: Path, marker: Path) -> None:
    marker.unlink(missing_ok=True)
    root = kept / _spelled(hostile, "containers/{name}/root")
    # The safe path has nothing to do with the mount, but is set: what is trusted then is fixed.
    settings = [f"set sysroot {root}", "add-auto-load-safe-path /nowhere"]
    result = tools.gdb(
        "bt",
        debug=kept / "debug",
        settings=settings,
        arguments=[f"{root}{hostile.app}/bin/hot", hostile.core],
    )
    assert "lib_static_stuck" in result.out, str(result)
    assert "auto-loading has been declined" in result.text, str(result)
    assert not marker.exists(), str(result)


# Everything in the mount that gdb may be pointed at: its debug file directory while it looks at a
# core file, or the name of a file. {exe} and {lib} are build IDs, {x} and {l} split ones; {app} is
# where they were, {name} in which container, {exe_digest} and {debug_digest} are of what is in
# variants.
_DIRECTORIES = (".", "debug", "usr/lib/debug")
_FILES = (
    "{exe}/elf",
    "{exe}/executable",
    "{lib}/debug",
    "{lib}/debuginfo",
    "buildid/{exe}/executable",
    "{exe}/variants/{exe_digest}",
    "{lib}/variants/{debug_digest}",
    ".build-id/{x}",
    "debug/.build-id/{l}.debug",
    "usr/lib/debug/.build-id/{x}",
    "perf{app}/bin/hot/{exe}/elf",
    "perf/.build-id/{l}/debug",
    "by-path{app}/bin/hot/{exe}/elf",
    "by-name/libhot.so/{lib}/debug",
    "containers/{name}/root{app}/bin/hot",
    "containers/{name}/root{app}/lib/.debug/libhot.so.debug",
)
_TRUST_ALL = "set auto-load safe-path /"


@pytest.fixture(scope="module")
def kept(hostile: Vanished, scratch: Path) -> Iterator[Path]:
    """The same store, mounted for those who want the scripts."""
    directory = scratch / "kept"
    directory.mkdir()
    with BuildIdFs(directory, hostile.buildidfs.store).mounted("--gdb-scripts=keep") as mount:
        yield mount


def _spelled(hostile: Vanished, name: str) -> str:
    exe, lib = hostile.program.binaries
    (container,) = (hostile.mount / "containers").iterdir()
    return name.format(
        name=container.name,
        exe=exe.build_id,
        lib=lib.build_id,
        x=f"{exe.build_id[:2]}/{exe.build_id[2:]}",
        l=f"{lib.build_id[:2]}/{lib.build_id[2:]}",
        app=hostile.app,
        exe_digest=programs.sha256(exe.shipped),
        debug_digest=programs.sha256(lib.debug),
    )


def _runs_it(hostile: Vanished, mount: Path, marker: Path, where: str) -> bool:
    """Whether a gdb that trusts everything runs what is in a file it is pointed at."""
    marker.unlink(missing_ok=True)
    if where in _DIRECTORIES:
        result = tools.gdb(
            "bt", debug=mount / where, settings=[_TRUST_ALL], arguments=["-c", hostile.core]
        )
        assert "exe_static_stuck" in result.out, str(result)
    else:
        path = mount / _spelled(hostile, where)
        result = tools.gdb(f"file {path}", "info functions static_hot", settings=[_TRUST_ALL])
        assert "static_hot" in result.out, str(result)
    return marker.exists()


@pytest.mark.parametrize("where", [*_DIRECTORIES, *_FILES])
def test_wherever_gdb_is_pointed(hostile: Vanished, kept: Path, marker: Path, where: str) -> None:
    assert not _runs_it(hostile, hostile.mount, marker, where)
    # Or else the other would pass for nothing: gdb does look there.
    assert _runs_it(hostile, kept, marker, where)


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
    result = tools.debuginfod_find(hostile.url, "debuginfo", hostile.program.lib.build_id)
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
        unmount(trusted)
    with buildidfs.mounted() as mount:
        served = mount / hostile_program.exe.build_id / "elf"
        run([tool("cmp"), served, hostile_program.exe.compiled], check=True)
