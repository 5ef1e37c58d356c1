# SPDX-License-Identifier: Apache-2.0
"""`buildidfs setup`: real clients find captured files with the lines that it writes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.store import Store
from tests.support.clients import tools
from tests.support.clients.tools import run, tool
from tests.support.elf.programs import line_of
from tests.support.harness import quiet

if TYPE_CHECKING:
    from tests.support.clients.tools import Argument
    from tests.support.containers.vanished import Vanished

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]


@pytest.fixture
def home(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = directory / "home"
    home.mkdir()
    for name in ("XDG_CONFIG_HOME", "DEBUGINFOD_URLS", "PERF_CONFIG", "SHELL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
    return home


def test_printing_writes_nothing(gone: Vanished, home: Path) -> None:
    for client in ("gdb", "lldb", "perf", "debuginfod", "coredump"):
        assert gone.buildidfs("setup", client).out.startswith("# for /")
    assert str(gone.mount) in gone.buildidfs("setup", "gdb").out
    assert not list(home.iterdir())


def test_plain_gdb_names_the_frames_of_a_gone_container(gone: Vanished, home: Path) -> None:
    bare = run([tool("gdb"), "-batch", "-ex", "bt", "-c", gone.core])
    assert "exe_static_stuck" not in bare.out
    gone.buildidfs("setup", "gdb", "--write")
    named = run([tool("gdb"), "-batch", "-ex", "bt", "-c", gone.core])
    assert re.search(rf"exe_static_stuck .*hot\.c:{line_of('exe_stuck')}", named.out), str(named)
    assert re.search(rf"lib_static_stuck .*libhot\.c:{line_of('lib_stuck')}", named.out), str(named)
    gone.buildidfs("setup", "gdb", "--undo")
    assert not (home / ".gdbinit").exists()


def test_plain_perf_report_names_functions(gone: Vanished, home: Path) -> None:
    report = [tools.perf_tool(), "report", "--stdio", "-i", gone.profile]
    assert "static_hot" not in run(report).out
    gone.buildidfs("setup", "perf", "--write")
    named = run(report)
    for name in ("exe_static_hot", "lib_static_hot"):
        assert name in named.out, str(named)
    words: list[Argument] = [tools.perf_tool(), "record", "-o", home / "new.data", "true"]
    with quiet.recording_turn(words):
        recorded = run(words)
    assert recorded.rc == 0, str(recorded)
    assert "ailed" not in recorded.err, str(recorded)


def test_plain_lldb_finds_debug_files(gone: Vanished, home: Path) -> None:
    gone.buildidfs("setup", "lldb", "--write")
    words = ["-b", "-o", f"target create {gone.lib}/elf", "-o", "image lookup -v -n lib_static_hot"]
    lldb = next(each for each in ("lldb", "lldb-19") if subprocess.call(["which", each]) == 0)
    result = run([lldb, *words])
    assert re.search(r"LineEntry: .*libhot\.c:\d+", result.out), str(result)


def test_login_shell_tells_debuginfod_clients(gone: Vanished, home: Path) -> None:
    (home / ".profile").write_text("A=1")
    gone.buildidfs("setup", "debuginfod", "--write")
    find = f"debuginfod-find executable {gone.program.exe.build_id}"
    for shell in ("sh", "bash"):
        found = run([tool(shell), "-l", "-c", f"{find} && . ~/.profile && echo $DEBUGINFOD_URLS"])
        assert found.out.splitlines()[1:] == [f"file://{gone.mount}"], str(found)
    gone.buildidfs("setup", "debuginfod", "--undo")
    assert (home / ".profile").read_text() == "A=1"


def test_pins_of_core_files_live_as_long_as_the_files(gone: Vanished, directory: Path) -> None:
    cores, program = directory / "cores", gone.program.exe.build_id
    cores.mkdir()
    core = cores / "core.hot.0.zst"
    run([tool("zstd"), "-q", gone.core, "-o", core], check=True)
    (cores / "junk.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(99))

    def pinned() -> set[bytes]:
        with Store.open(gone.buildidfs.store) as store:
            return {each.name for each in store.pins.every() if str(each.build_id) == program}

    first = gone.buildidfs("pin", "--cores", cores, check=False)
    assert (first.rc, first.out) == (3, f"pinned for {core}\n")
    assert "junk.zst" in first.err
    assert os.fsencode(core) in pinned()
    assert gone.buildidfs("pin", "--cores", cores, check=False).out == ""
    core.unlink()
    assert gone.buildidfs("pin", "--cores", cores, check=False).out == f"unpinned, gone: {core}\n"
    assert os.fsencode(core) not in pinned()


def test_compressed_core_is_read_as_a_core(gone: Vanished, directory: Path) -> None:
    core = directory / "core.zst"
    run([tool("zstd"), "-q", gone.core, "-o", core], check=True)
    packed = gone.buildidfs("coverage", core)
    assert "/bin/hot" in packed.out
    assert packed.out == gone.buildidfs("coverage", gone.core).out.replace(
        str(gone.core), str(core)
    )
