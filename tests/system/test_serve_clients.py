# SPDX-License-Identifier: Apache-2.0
"""Real debuginfod clients against buildidfs serve, for a program that was deleted."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients import tools
from tests.support.clients.tools import Argument, Result, run, tool
from tests.support.elf import programs
from tests.support.elf.programs import SOURCE_DIR, Program, line_of, sha256
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until
from tests.support.servers.serving import Server, free_port, serving

pytestmark = [pytest.mark.root, pytest.mark.client]

PLACES = (
    ("exe_static_stuck", f"{SOURCE_DIR}/hot.c:{line_of('exe_stuck')}"),
    ("lib_static_stuck", f"{SOURCE_DIR}/libhot.c:{line_of('lib_stuck')}"),
    ("main", f"{SOURCE_DIR}/hot.c:{line_of('main_stuck')}"),
)
NO_RATE = "[serve]\nrate = 0\n"


@dataclasses.dataclass(frozen=True)
class Left:
    """What is left of a program that was deleted: a store, a core file and a profile."""

    program: Program
    store: Path
    core: Path
    profile: Path


@pytest.fixture(scope="module")
def gone(scratch: Path, program: Program) -> Left:
    home = scratch / "serve-clients"
    home.mkdir()
    program.install(home / "root")
    binary = home / "root/app/bin/hot"
    with programs.running(binary, "stuck") as pid:
        run([tool("gcore", "gdb"), "-o", home / "core", str(pid)], check=True)
        core = home / f"core.{pid}"
    with programs.running(binary, "spin") as pid:
        window = [tool("sleep"), "0.3"]
        tools.perf_record(home / "perf.data", window, "-p", str(pid))
    buildidfs = BuildIdFs(home)
    buildidfs("scan", "tree", home / "root")
    libc = re.search(r"(/\S*/libc\.so\.6)", run([tool("ldd"), "/bin/true"]).out)
    assert libc is not None
    buildidfs("scan", "tree", Path(libc[1]).resolve())
    shutil.rmtree(home / "root")
    return Left(program, buildidfs.store, core, home / "perf.data")


@pytest.fixture(scope="module")
def server(gone: Left) -> Iterator[Server]:
    with serving(gone.store, config=NO_RATE) as running:
        yield running


@pytest.fixture
def env(server: Server, tmp_path: Path) -> dict[str, str]:
    """The environment of a client that has remembered nothing yet."""
    return {"DEBUGINFOD_URLS": server.url, "DEBUGINFOD_CACHE_PATH": str(tmp_path / "cache")}


def find(env: dict[str, str], *words: str) -> Result:
    return run([tool("debuginfod-find"), *words], env=env)


def test_debuginfod_find_gets_all_bytes(gone: Left, env: dict[str, str]) -> None:
    for binary in gone.program.binaries:
        found = find(env, "executable", binary.build_id)
        assert sha256(Path(found.out.strip())) == sha256(binary.shipped), str(found)
        found = find(env, "debuginfo", binary.build_id)
        assert sha256(Path(found.out.strip())) == sha256(binary.debug), str(found)
    missing = find(env, "executable", "00" * 20)
    assert missing.rc != 0
    assert "No such file" in missing.text, str(missing)


@pytest.mark.parametrize("name", [".debug_line", ".text"])
def test_debuginfod_find_gets_a_section(gone: Left, env: dict[str, str], name: str) -> None:
    """The debug file has the bytes of the first, and the executable those of the second."""
    exe = gone.program.exe
    found = find(env, "section", exe.build_id, name)
    dumped = Path(env["DEBUGINFOD_CACHE_PATH"]).parent / "section"
    having = exe.shipped if name == ".text" else exe.debug
    run([tool("objcopy"), f"--dump-section={name}={dumped}", having, os.devnull], check=True)
    assert Path(found.out.strip()).read_bytes() == dumped.read_bytes(), str(found)
    assert find(env, "section", exe.build_id, ".nothing").rc != 0


def test_largest_file_that_a_client_takes(gone: Left, env: dict[str, str]) -> None:
    small = {**env, "DEBUGINFOD_MAXSIZE": "10"}
    refused = find(small, "debuginfo", gone.program.exe.build_id)
    assert refused.rc != 0
    assert "File too large" in refused.text, str(refused)
    assert find(env, "debuginfo", gone.program.exe.build_id).rc == 0, "no absence is remembered"


def test_gdb_has_the_whole_stack_of_a_core_file(gone: Left, env: dict[str, str]) -> None:
    result = tools.gdb(
        "bt", settings=["set debuginfod enabled on"], arguments=["-c", gone.core], env=env
    )
    for function, place in PLACES:
        assert re.search(rf"{function} .* at {place}", result.out), str(result)


def test_elfutils_have_stack_lines_and_sections(gone: Left, env: dict[str, str]) -> None:
    stack = run([tool("eu-stack"), f"--core={gone.core}", "-s"], env=env)
    for _, place in PLACES:
        assert f"{place}:" in stack.out, str(stack)
    address = gone.program.lib.address("lib_static_hot")
    argv = [tool("eu-addr2line"), "-e", gone.program.lib.shipped, "-f", f"0x{address:x}"]
    lines = run(argv, env=env)
    assert lines.out.startswith(f"lib_static_hot\n{SOURCE_DIR}/libhot.c:"), str(lines)


def test_llvm_symbolizer_names_a_function(gone: Left, env: dict[str, str]) -> None:
    exe = gone.program.exe
    address = f"0x{exe.address('exe_static_hot'):x}"
    found = tool(*tools.RECENT_LLVM_SYMBOLIZER)
    result = run([found, "--debuginfod", f"--build-id={exe.build_id}", address], env=env)
    assert f"exe_static_hot\n{SOURCE_DIR}/hot.c:" in result.out, str(result)


def test_valgrind_names_a_leak(stripped: Path, env: dict[str, str]) -> None:
    result = run([tool("valgrind"), "--leak-check=full", stripped, "leak"], env=env)
    assert f"lib_static_leak (libhot.c:{line_of('lib_overrun')})" in result.err, str(result)


def test_drgn_finds_the_debug_files(gone: Left, env: dict[str, str]) -> None:
    script = (
        "import drgn, sys\n"
        "prog = drgn.Program()\n"
        "prog.set_core_dump(sys.argv[1])\n"
        "try:\n"
        "    prog.load_default_debug_info()\n"
        "except drgn.MissingDebugInfoError:\n"
        "    pass  # of the vDSO, which has none\n"
        "for frame in next(iter(prog.threads())).stack_trace():\n"
        "    print(frame)\n"
    )
    argv: list[Argument] = [sys.executable, "-c", script, gone.core]
    result = run(argv, env=env)
    for function in ("exe_static_stuck", "lib_static_stuck"):
        assert function in result.out, str(result)


def test_perf_names_functions_from_files_of_the_server(
    gone: Left, env: dict[str, str], tmp_path: Path
) -> None:
    # perf 6.1 asks no debuginfod when it reports, but reads what was put into its cache
    cache = tmp_path / "perf"
    for binary in gone.program.binaries:
        path = Path(find(env, "debuginfo", binary.build_id).out.strip())
        executable = Path(find(env, "executable", binary.build_id).out.strip())
        home = cache / ".build-id" / binary.build_id[:2]
        (place := cache / "files" / binary.build_id).mkdir(parents=True)
        home.mkdir(parents=True, exist_ok=True)
        (place / "elf").write_bytes(executable.read_bytes())
        (place / "debug").write_bytes(path.read_bytes())
        (home / binary.build_id[2:]).symlink_to(place)
    argv = [tools.perf_tool(), "--buildid-dir", cache, "report", "--stdio", "--no-children"]
    result = run([*argv, "-i", gone.profile], env=env)
    assert "exe_static_hot" in result.out, str(result)
    assert "lib_static_hot" in result.out, str(result)


def test_lldb_finds_debuginfo_of_a_stripped_file(
    gone: Left, env: dict[str, str], tmp_path: Path
) -> None:
    argv: list[Argument] = [tool("timeout"), "-k", "5", "60", tool(*tools.LLDB), "-x", "-b"]
    commands = [
        f"settings append plugin.symbol-locator.debuginfod.server-urls {env['DEBUGINFOD_URLS']}",
        f"target create {gone.program.lib.shipped}",
        "image lookup -v -n lib_static_hot",
    ]
    for command in commands:
        argv += ["-o", command]
    result = run(argv, env={**env, "HOME": str(tmp_path)}, timeout=90)
    if "invalid" in result.err and "debuginfod" in result.err:
        version = run([tool(*tools.LLDB), "--version"]).out
        pytest.skip(f"this lldb has no debuginfod: {version}")
    assert re.search(r"LineEntry: .*libhot\.c:\d+", result.out), str(result)


def test_debuginfod_of_elfutils_relays_us(gone: Left, server: Server, tmp_path: Path) -> None:
    port = free_port()
    upstream = {
        **os.environ,
        "DEBUGINFOD_URLS": server.url,
        "DEBUGINFOD_CACHE_PATH": str(tmp_path / "relay"),
    }
    log = (tmp_path / "log").open("wb")
    argv = [tool("debuginfod"), "-d", ":memory:", "-p", str(port), "-F", "-t", "0"]
    (tmp_path / "empty").mkdir()
    with log, subprocess.Popen(
        [*argv, tmp_path / "empty"], env=upstream, stdout=log, stderr=log
    ) as relay:  # fmt: skip
        try:
            downstream = Server(relay, tmp_path / "log", f"127.0.0.1:{port}")

            def answers() -> bool:
                try:
                    return downstream.ask("/metrics").status == 200
                except (OSError, EOFError):
                    return False

            until(answers, "the debuginfod", 30)
            env = {
                "DEBUGINFOD_URLS": downstream.url,
                "DEBUGINFOD_CACHE_PATH": str(tmp_path / "client"),
            }
            exe = gone.program.exe
            found = find(env, "debuginfo", exe.build_id)
            assert sha256(Path(found.out.strip())) == sha256(exe.debug), str(found)
            section = find(env, "section", exe.build_id, ".debug_info")
            assert Path(section.out.strip()).stat().st_size > 0, str(section)
            assert find(env, "executable", "00" * 20).rc != 0
        finally:
            relay.terminate()


def test_live_process_that_gdb_attaches_to(stripped: Path, env: dict[str, str]) -> None:
    with programs.running(stripped, "spin") as pid:
        result = tools.gdb(
            "info functions exe_static_hot",
            settings=["set debuginfod enabled on"],
            arguments=["-p", str(pid)],
            env=env,
        )
    assert "exe_static_hot(struct work *)" in result.out, str(result)
