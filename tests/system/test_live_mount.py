# SPDX-License-Identifier: Apache-2.0
"""A capture made while the store is mounted is there for the next client that asks."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from buildidfs.model import Digest
from buildidfs.store import Store
from tests.support.clients import tools
from tests.support.clients.commands import ROOT
from tests.support.clients.tools import run, tool
from tests.support.containers.ephemeral import container
from tests.support.elf import programs
from tests.support.elf.elfwriter import DYNSYM, SYMTAB, TEXT, elf_file
from tests.support.harness.mounts import COMMAND
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.elf.programs import Program
    from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]


def test_names_that_were_missing_a_moment_before(
    buildidfs: BuildIdFs, program: Program, scratch: Path
) -> None:
    buildidfs.scan(os.getpid())
    exe = program.exe.build_id
    link = f".build-id/{exe[:2]}/{exe[2:]}"
    with (
        buildidfs.mounted() as mount,
        container("tmpfs", program, scratch / "live") as running,
    ):
        places = [
            mount / exe / "elf",
            mount / exe / "debug",
            mount / exe / "path",
            mount / f"buildid/{exe}/executable",
            mount / f"debug/{link}",
            mount / f"debug/{link}.debug",
            mount / f"perf/{link}/elf",
            mount / f"perf{running.app}/bin/hot/{exe}/debug",
        ]
        for place in places:
            # asked for, so that the kernel has reason to remember the answer
            with pytest.raises(FileNotFoundError):
                place.stat()
        assert exe not in os.listdir(mount)
        buildidfs.scan(running.stuck)
        for place in places:
            assert place.stat().st_size > 0
        assert exe in os.listdir(mount)
        result = tools.debuginfod_find(f"file://{mount}", "debuginfo", exe)
        assert result.rc == 0, str(result)


def test_variants_that_were_missing_a_moment_before(buildidfs: BuildIdFs, directory: Path) -> None:
    """Also one that is not served, and one of another kind than the same bytes had before."""
    build_id = bytes.fromhex("5ca1ab1e00")
    first, second = directory / "first", directory / "second"
    first.write_bytes(elf_file([TEXT, DYNSYM, SYMTAB], build_id=build_id))
    second.write_bytes(elf_file([TEXT], build_id=build_id))
    digests = {programs.sha256(path) for path in (first, second)}
    buildidfs("scan", "tree", first)
    with buildidfs.mounted() as mount:
        place = mount / build_id.hex()
        variants = place / "variants"
        missing = variants / programs.sha256(second)
        with pytest.raises(FileNotFoundError):
            missing.stat()
        assert os.listdir(variants) == [programs.sha256(first)]
        buildidfs("scan", "tree", second)
        assert missing.read_bytes() == second.read_bytes()
        assert set(os.listdir(variants)) == digests
        same = (place / "elf", place / "debug", variants / programs.sha256(first))
        assert [path.read_bytes() for path in same] == [first.read_bytes()] * 3
        executable, _, listed = [path.stat().st_ino for path in same]
        assert listed == executable != missing.stat().st_ino
        os.utime(second, (5, 5))
        assert missing.stat().st_mtime != 5, "that of when it was captured"
        with Store.open(buildidfs.store) as store:
            store.remove([Digest(bytes.fromhex(missing.name))])
        with pytest.raises(FileNotFoundError):
            missing.stat()
        assert listed == (variants / programs.sha256(first)).stat().st_ino


def test_unmounting_while_a_container_still_has_a_copy_of_the_mount(
    buildidfs: BuildIdFs, stripped: Path, program: Program
) -> None:
    """A mount namespace that was made after the mount keeps its copy until it ends."""
    _capture(buildidfs, stripped)
    buildidfs("mount", buildidfs.mountpoint)
    elf = f"{buildidfs.mountpoint}/{program.exe.build_id}/elf"
    with programs.running(tool("unshare"), "-m", stripped, "stuck") as holder:
        done = buildidfs("-v", "unmount", buildidfs.mountpoint)
        assert "goes on in other mount namespaces" in done.err
        assert not os.path.exists(elf)
        inside = f"/proc/{holder}/root{elf}"
        run([tool("cmp"), inside, program.exe.shipped], check=True)
    server = re.escape(str(buildidfs.mountpoint)).encode()
    until(lambda: not _processes(server), "end of the mount process")


def test_signal_ends_a_mount_of_which_a_container_has_a_copy(
    buildidfs: BuildIdFs, stripped: Path, program: Program
) -> None:
    _capture(buildidfs, stripped)
    words = [*COMMAND, "--store", buildidfs.store, "mount", "--foreground", buildidfs.mountpoint]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE) as process:
        try:
            until(lambda: os.path.ismount(buildidfs.mountpoint), "a mount")
            elf = f"{buildidfs.mountpoint}/{program.exe.build_id}/elf"
            with programs.running(tool("unshare"), "-m", stripped, "stuck") as holder:
                inside = f"/proc/{holder}/root{elf}"
                run([tool("cmp"), inside, program.exe.shipped], check=True)
                process.terminate()
                assert process.wait(20) == 0
                assert run([tool("cat"), inside]).rc != 0
            assert not os.path.ismount(buildidfs.mountpoint)
        finally:
            process.kill()


def _capture(buildidfs: BuildIdFs, program: Path) -> None:
    """Capture a running program, and make the directory of the mount."""
    with programs.running(program, "stuck") as pid:
        buildidfs.scan(pid)
    buildidfs.mountpoint.mkdir()


def _processes(pattern: bytes) -> list[str]:
    """The processes whose command line holds ``pattern``."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if re.search(pattern, file.read()):
                    found.append(name)
        except OSError:
            continue  # gone, or closed even to root
    return found
