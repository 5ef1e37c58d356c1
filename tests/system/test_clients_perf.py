# SPDX-License-Identifier: Apache-2.0
"""perf with the mount as its build-ID cache, beyond what every container scenario asks of it."""

from __future__ import annotations

import re
import shutil
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.clients.tools import run, tool
from tests.support.elf import programs
from tests.support.servers.elsewhere import kernel_report

if TYPE_CHECKING:
    from tests.support.containers.vanished import Vanished
    from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]


def _assert_hot_functions(result: tools.Result) -> None:
    assert result.rc == 0, str(result)
    assert re.search(r"hot +hot +\[\.\] exe_static_hot", result.out), str(result)
    assert re.search(r"hot +libhot\.so +\[\.\] lib_static_hot", result.out), str(result)


def test_without_the_mount_there_are_no_names(gone: Vanished) -> None:
    result = tools.perf_report(gone.core.parent / "no-mount-here", gone.profile)
    assert result.rc == 0, str(result)
    assert "static_hot" not in result.out, str(result)


def test_symfs_at_the_mount(gone: Vanished) -> None:
    options = ["--symfs", gone.mount, "--stdio", "--no-children", "-i", gone.profile]
    _assert_hot_functions(run([tools.perf_tool(), "report", *options]))


def test_annotate_disassembles(gone: Vanished) -> None:
    tool("objdump")
    result = tools.perf(
        gone.mount, "annotate", "--stdio", "-i", gone.profile, "-s", "exe_static_hot"
    )
    instructions = re.findall(r"^ +\d+\.\d+ +: +[0-9a-f]+:", result.out, re.MULTILINE)
    assert len(instructions) >= 5, str(result)


def test_source_lines(gone: Vanished) -> None:
    result = tools.perf_report(gone.mount, gone.profile, "-s", "srcline")
    for file in ("hot.c", "libhot.c"):
        assert re.search(rf"\d%  {file}:\d+", result.out), str(result)


def test_call_chains_unwound_by_dwarf_reach_main(gone: Vanished) -> None:
    result = tools.perf(gone.mount, "script", "-i", gone.unwound, "-F", "ip,sym")
    chains = [re.findall(r"[0-9a-f]+ (\w+)", chain) for chain in result.out.split("\n\n")]
    for leaf in ("exe_static_hot", "lib_static_hot"):
        assert any(chain[:1] == [leaf] and "main" in chain for chain in chains), str(result)


def test_vdso(buildidfs: BuildIdFs, stripped: Path) -> None:
    # With --buildid-mmap perf gives the vDSO no build ID. The cache it fills here without it is
    # not the one that is read below.
    data = buildidfs.store.parent / "perf.data"
    cache = ["--buildid-dir", buildidfs.store.parent / "cache"]
    with programs.running(stripped, "clock") as pid:
        buildidfs.scan(pid)
        event = ["-e", "cpu-clock", "-F", "997", "-p", str(pid), "--", tool("sleep"), "0.3"]
        record = [*cache, "record", "--no-buildid-mmap", "-o", data]
        run([tools.perf_tool(), *record, *event], check=True)
    named = r"\[vdso\] +\[\.\] __vdso_clock_gettime"
    without = tools.perf_report(buildidfs.store.parent / "no-mount-here", data)
    assert not re.search(named, without.out), str(without)
    with buildidfs.mounted() as mount:
        result = tools.perf_report(mount, data)
    assert re.search(named, result.out), str(result)


def test_kernel_symbols_of_another_host(buildidfs: BuildIdFs) -> None:
    if not re.search(r"^0*[1-9a-f]", Path("/proc/kallsyms").read_text(), re.MULTILINE):
        pytest.skip("the addresses in /proc/kallsyms are hidden (kptr_restrict)")
    directory = buildidfs.store.parent
    data = directory / "perf.data"
    copy = [tool("dd"), "if=/dev/zero", "of=/dev/null", "bs=64k", "count=20000"]
    assert tools.perf_record(data, copy).rc == 0
    buildidfs("scan", "kernel", check=False)
    named = r"dd +\[kernel\.kallsyms\] +\[k\] [a-z_]\w*"
    without = kernel_report(directory / "no-mount-here", data)
    assert not re.search(named, without.out), str(without)
    with buildidfs.mounted() as mount:
        result = kernel_report(mount, data)
    assert re.search(named, result.out), str(result)


def test_archive_holds_real_files(gone: Vanished) -> None:
    result = tools.perf(gone.mount, "archive", gone.profile)
    assert result.rc == 0, str(result)
    with tarfile.open(f"{gone.profile}.tar.bz2") as archive:
        members = {member.name: member for member in archive}
    for path, binary in (("bin/hot", gone.program.exe), ("lib/libhot.so", gone.program.lib)):
        directory = f"{gone.app}/{path}/{binary.build_id}".lstrip("/")
        for name, original in (("elf", binary.shipped), ("debug", binary.debug)):
            member = members[f"{directory}/{name}"]
            assert member.isfile()
            assert member.size == original.stat().st_size
        link = members[f".build-id/{binary.build_id[:2]}/{binary.build_id[2:]}"]
        assert link.linkname == f"../../{directory}"


def test_another_binary_at_the_same_path_of_the_host(gone: Vanished) -> None:
    top = Path(gone.app).parents[1]
    assert not top.exists()
    try:
        for part, impostor in (("bin/hot", "true"), ("lib/libhot.so", "false")):
            place = Path(gone.app) / part
            place.parent.mkdir(parents=True)
            shutil.copy2(tool(impostor), place)
        result = tools.perf_report(gone.mount, gone.profile)
        stack = tools.eu_stack(gone.core, gone.debug)
    finally:
        shutil.rmtree(top)
    _assert_hot_functions(result)
    assert "exe_static_stuck" in stack.out, str(stack)


def test_recording_into_the_mount_is_harmless(gone: Vanished) -> None:
    # Without build IDs in the mmap records perf fills its cache when it ends.
    data = gone.core.parent / "perf.plain"
    options = ["-o", data, "-e", "cpu-clock", "--", tool("true")]
    result = tools.perf(gone.mount, "record", *options)
    assert result.rc == 0, str(result)
    assert run([tools.perf_tool(), "buildid-list", "-i", data]).rc == 0


def test_debug_file_without_executable_does_not_crash_it(
    buildidfs: BuildIdFs, gone: Vanished
) -> None:
    alone = buildidfs.store.parent / "alone"
    alone.mkdir()
    for binary in gone.program.binaries:
        shutil.copy2(binary.debug, alone)
    buildidfs("scan", "tree", alone)
    with buildidfs.mounted() as mount:
        assert (mount / gone.program.exe.build_id / "debug").exists()
        result = tools.perf_report(mount, gone.profile)
    assert result.rc == 0, str(result)
