# SPDX-License-Identifier: Apache-2.0
"""A bundle says the same as the store it was made of, where there is nothing else."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.clients.tools import Argument, run, tool
from tests.support.elf import cores
from tests.support.elf.elfwriter import DWARF, TEXT, Section, elf_file
from tests.support.harness.bundles import rewrite
from tests.support.harness.mounts import COMMAND, BuildIdFs, is_mountpoint
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.containers.vanished import Vanished
    from tests.support.elf.programs import Program

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]

_ROOT = Path(__file__).resolve().parents[2]


def _words(command: list[Argument]) -> str:
    return shlex.join(map(str, command))


def _elsewhere(directory: Path, bundle: Path, command: list[Argument]) -> tools.Result:
    """What a command prints in a mount namespace in which a bundle is mounted, and no store is.

    ``MOUNT`` in the command stands for where.
    """
    point = directory / "mounted"
    point.mkdir()
    program: list[Argument] = [*COMMAND, "--store", directory / "nothing-here"]
    script = "\n".join(
        [
            "set -e",
            _words([*program, "mount", "--bundle", bundle, point]),
            _words(command).replace("MOUNT", str(point)),
            _words([*program, "unmount", point]),
        ]
    )
    return run([tool("unshare"), "-m", "sh", "-c", script], cwd=_ROOT)


def _numbers(text: str) -> str:
    """A report without what differs from one run of perf to the next."""
    return re.sub(r"^#.*$", "", text, flags=re.MULTILINE)


def test_perf_report_is_the_same(directory: Path, gone: Vanished) -> None:
    bundle = directory / "profile.tar.zst"
    gone.buildidfs("bundle", gone.profile, "-o", bundle, check=False)
    report: list[Argument] = ["report", "--stdio", "--no-children", "-i", gone.profile]
    here = run([tools.perf_tool(), "--buildid-dir", gone.mount / "perf", *report], check=True)
    assert re.search(r"hot +libhot\.so +\[\.\] lib_static_hot", here.out), str(here)
    there = _elsewhere(
        directory, bundle, [tools.perf_tool(), "--buildid-dir", "MOUNT/perf", *report]
    )
    assert there.rc == 0, str(there)
    assert _numbers(there.out) == _numbers(here.out)


@pytest.fixture(scope="module")
def core_bundle(scratch: Path, gone: Vanished) -> Path:
    """What the core file of the container needs."""
    bundle = scratch / "bundle-tools.tar.zst"
    gone.buildidfs("bundle", gone.core, "-o", bundle, check=False)
    return bundle


def test_gdb_gives_the_same_backtrace(directory: Path, gone: Vanished, core_bundle: Path) -> None:
    commands: list[Argument] = [
        "-nx", "-batch", "-ex", "set debuginfod enabled off",
        "-ex", "set debug-file-directory MOUNT/debug", "-ex", f"core-file {gone.core}",
        "-ex", "bt",
    ]  # fmt: skip
    here = run([tool("gdb"), *(str(word).replace("MOUNT", str(gone.mount)) for word in commands)])
    frames = re.findall(r"^#\d.*$", here.out, re.MULTILINE)
    assert any("hot.c:" in frame for frame in frames), str(here)
    there = _elsewhere(directory, core_bundle, [tool("gdb"), *commands])
    assert re.findall(r"^#\d.*$", there.out, re.MULTILINE) == frames, str(there)


def _backtrace(text: str) -> list[str]:
    """The frames that were printed last: gdb shows the first of them before it is asked."""
    frames = re.findall(r"^#\d.*$", text, re.MULTILINE)
    last = max(number for number, frame in enumerate(frames) if frame.startswith("#0 "))
    return frames[last:]


def test_a_bundle_of_a_host_has_a_sysroot_of_it(
    directory: Path, buildidfs: BuildIdFs, program: Program
) -> None:
    """For debuggers that find the libraries of a core by their paths alone.

    Where the tests run in a mount namespace of their own, that is a container instead of the host.
    """
    bundle, place = directory / "core.tar.zst", directory / "app"
    program.install(directory)
    with cores.stuck(place / "bin" / "hot", directory) as pid:
        core = cores.gcore(pid, directory)
        commands: list[Argument] = ["-nx", "-batch", "-ex", "set debuginfod enabled off"]
        here = run([tool("gdb"), *commands, "-p", str(pid), "-ex", "bt"])
        buildidfs.scan(pid)
    shown = json.loads(buildidfs("show", "--json", program.exe.build_id).out)
    (label,) = {origin["container"] for origin in shown["origins"]}
    buildidfs("bundle", core, "-o", bundle, check=False)
    shutil.rmtree(place)
    frames = _backtrace(here.out)
    assert any("hot.c:" in frame for frame in frames), str(here)
    container = label or f"host:{os.uname().nodename}"
    root = f"MOUNT/containers/{container}/root"
    aside: list[Argument] = ["-ex", f"set sysroot {root}", "-ex",
                             "set debug-file-directory MOUNT/debug"]  # fmt: skip
    there = _elsewhere(
        directory, bundle,
        [tool("gdb"), *commands, *aside, f"{root}{place}/bin/hot", core, "-ex", "bt",
         "-ex", "info sharedlibrary"],
    )  # fmt: skip
    assert _backtrace(there.out) == frames, str(there)
    assert f"/{container}/root{place}/bin/../lib/libhot.so" in there.out, str(there)


@contextlib.contextmanager
def _foreground(directory: Path, bundle: Path) -> Iterator[Path]:
    import subprocess

    point = directory / "point"
    point.mkdir()
    process = subprocess.Popen(
        [*COMMAND, "mount", "--foreground", "--bundle", str(bundle), str(point)], cwd=_ROOT
    )
    try:
        until(lambda: is_mountpoint(point), "a mount")
        yield point
    finally:
        process.kill()
        process.wait(30)
        run([tool("umount"), "-l", point])


def test_killed_ones_leave_nothing_for_long(directory: Path, core_bundle: Path) -> None:
    before = set(Path("/dev/shm").glob("buildidfs-bundle-*"))
    with _foreground(directory, core_bundle) as point:
        assert (point / "debug").is_dir()
        (left,) = set(Path("/dev/shm").glob("buildidfs-bundle-*")) - before
    assert left.exists()
    assert _elsewhere(directory, core_bundle, [tool("ls"), "MOUNT"]).rc == 0
    assert not left.exists()


def test_damaged_blobs_are_not_served(directory: Path, core_bundle: Path) -> None:
    bundle = directory / "core.tar.zst"
    data = bytearray(core_bundle.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    bundle.write_bytes(data)
    script = "cd MOUNT; for id in *[0-9a-f][0-9a-f]; do sha256sum $id/variants/* 2>/dev/null; done"
    listed = _elsewhere(directory, bundle, [tool("sh"), "-c", script])
    sums = re.findall(r"^([0-9a-f]{64})  \w+/variants/([0-9a-f]{64})$", listed.out, re.MULTILINE)
    assert sums, str(listed)
    assert all(is_ == should for is_, should in sums)


@pytest.mark.parametrize("build_id", [None, b"\x5c" * 20], ids=["no build ID", "build ID"])
def test_scripts_that_the_manifest_keeps_silent_about(
    directory: Path, buildidfs: BuildIdFs, build_id: bytes | None
) -> None:
    """gdb would run them: where they are is found in the bytes, also if those have no build ID."""
    script = b"\1evil.py\0" * 10
    program = directory / "program"
    sections = [TEXT, DWARF, Section(b".debug_gdb_scripts", script)]
    program.write_bytes(elf_file(sections, build_id=build_id))
    options = [] if build_id else ["--build-id", "5c" * 20]
    buildidfs("add", *options, program)
    bundle = directory / "one.tar.zst"
    buildidfs("bundle", "--no-sources", "5c" * 20, "-o", bundle)
    shown = program.read_bytes().replace(script, bytes(len(script)))
    with _foreground(directory, bundle) as point:
        assert (point / ("5c" * 20) / "elf").read_bytes() == shown
    (directory / "point").rmdir()

    (directory / "inside").mkdir()
    rewrite(
        bundle,
        directory / "inside",
        lambda text: re.sub(r'"scripts": \[.*?\]\s*\]', '"scripts": []', text, flags=re.DOTALL),
    )
    with _foreground(directory, bundle) as point:
        names = [path for path in (point / ("5c" * 20)).rglob("*") if path.is_file()]
        assert {path.name for path in names} >= {"elf", "debug"}
        for path in names:
            if path.name != "path":
                # What is not as the manifest says is damaged, and not served.
                with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
                    path.read_bytes()
