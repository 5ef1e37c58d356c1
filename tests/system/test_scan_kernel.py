# SPDX-License-Identifier: Apache-2.0
"""Kernels and modules, captured from where they are installed, name what a profile has of them."""

from __future__ import annotations

import json
import lzma
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.clients.tools import run, tool
from tests.support.elf import kernels, perfwriter
from tests.support.elf.programs import build_id_of
from tests.support.servers.elsewhere import kernel_report

if TYPE_CHECKING:
    from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]

RELEASE = "6.1.0-1-test"
MODULE = f"/lib/modules/{RELEASE}/kernel/sound/snd-dummy.ko.xz"
_EVERY_PROCESS = 0xFFFFFFFF
_TEXT_BYTES = 32 << 20


@pytest.fixture(scope="module")
def profile(scratch: Path) -> Path:
    """A real profile of this kernel, copying zeros."""
    data = scratch / "kernel.perf.data"
    copy = [tool("dd"), "if=/dev/zero", "of=/dev/null", "bs=64k", "count=20000"]
    assert tools.perf_record(data, copy).rc == 0
    return data


@pytest.fixture(scope="module")
def running() -> str:
    """The build ID of this kernel, by perf."""
    return run([tools.perf_tool(), "buildid-list", "--kernel"], check=True).out.strip()


@pytest.fixture(scope="module")
def vmlinux(scratch: Path, running: str) -> Path:
    """What stands for the file that this kernel was linked to."""
    return kernels.vmlinux(scratch / "vmlinux", running, _TEXT_BYTES)


def named(result: tools.Result) -> set[str]:
    """The functions of the kernel that a report has."""
    return set(re.findall(r"dd +\[kernel\.kallsyms\] +\[k\] ([a-z_]\w*)", result.out))


def test_running_kernel(buildidfs: BuildIdFs, profile: Path) -> None:
    if not re.search(r"^0*[1-9a-f]", Path("/proc/kallsyms").read_text(), re.MULTILINE):
        pytest.skip("the addresses in /proc/kallsyms are hidden (kptr_restrict)")
    buildidfs("scan", "kernel", check=False)  # modules may be loaded whose files are gone
    with buildidfs.mounted() as mount:
        assert named(kernel_report(mount, profile)) & {"read_zero", "do_syscall_64"}


def test_symbols_of_the_kernel_where_its_file_has_none(
    buildidfs: BuildIdFs, profile: Path, vmlinux: Path, running: str, directory: Path
) -> None:
    """What is in a vmlinuz has no symbols; perf finds it first, and must go on to the others."""
    if not re.search(r"^0*[1-9a-f]", Path("/proc/kallsyms").read_text(), re.MULTILINE):
        pytest.skip("the addresses in /proc/kallsyms are hidden (kptr_restrict)")
    stripped = directory / "stripped"
    run([tool("strip"), "-o", stripped, vmlinux], check=True)
    root = directory / "root"
    image = kernels.bzimage_file(kernels.packed_vmlinux(stripped.read_bytes(), "zstd"))
    install(root, f"boot/vmlinuz-{RELEASE}", image)
    buildidfs("scan", "kernel", "--root", root)
    buildidfs("scan", "kernel", check=False)
    with buildidfs.mounted() as mount:
        assert (mount / running / "elf").read_bytes() == stripped.read_bytes()
        assert named(kernel_report(mount, profile)) & {"read_zero", "do_syscall_64"}


def test_symbols_of_the_file_of_a_kernel(
    buildidfs: BuildIdFs, profile: Path, vmlinux: Path, directory: Path
) -> None:
    root = directory / "root"
    install(root, f"usr/lib/debug/boot/vmlinux-{RELEASE}", vmlinux.read_bytes())
    buildidfs("scan", "kernel", "--root", root)
    assert named(kernel_report(directory / "no-mount-here", profile)) == set()
    with buildidfs.mounted() as mount:
        assert named(kernel_report(mount, profile)) == {"whole_kernel"}


def test_functions_of_a_module(buildidfs: BuildIdFs, directory: Path) -> None:
    module = kernels.module(directory / "module")
    build_id = build_id_of(module)
    install(directory / "root", MODULE, lzma.compress(module.read_bytes(), check=lzma.CHECK_CRC32))
    done = buildidfs("scan", "kernel", "--root", directory / "root", "--json")
    assert json.loads(done.out)["captured"] == 1
    data = directory / "perf.data"
    data.write_bytes(profile_of_module(build_id))
    options = ["report", "--stdio", "--no-children", "-i", data]
    assert "dummy_hot" not in run([tools.perf_tool(), *options]).out
    with buildidfs.mounted() as mount:
        assert (mount / build_id / "elf").read_bytes() == module.read_bytes()
        report = tools.perf_report(mount, data)
        assert re.search(r"dummy +\[snd_dummy\] +\[k\] dummy_hot", report.out), str(report)
        # the same file, as a debugger finds it
        symbols = tools.gdb("info address dummy_hot", arguments=[mount / build_id / "elf"])
        assert "dummy_hot" in symbols.out, str(symbols)


def profile_of_module(build_id: str) -> bytes:
    """What perf records of a kernel on another machine that is in the module all the time."""
    writer, kernel = perfwriter.PerfWriter(), perfwriter.KERNEL
    start = 0xFFFFFFFFC0000000
    records = [
        writer.mmap(
            _EVERY_PROCESS, kernels.KERNEL_START, 1 << 24, b"[kernel.kallsyms]_text", misc=kernel
        ),
        writer.mmap(_EVERY_PROCESS, start, 0x4000, MODULE.encode(), misc=kernel),
        writer.comm(77, b"dummy"),
        *(writer.sample(77, start + 4, 100 + number, misc=kernel) for number in range(20)),
    ]
    ids = writer.build_id(b"[kernel.kallsyms]", b"\x11" * 20, misc=kernel)
    ids += writer.build_id(MODULE.encode(), bytes.fromhex(build_id), misc=kernel)
    return writer.file(b"".join(records), {2: ids})


def install(root: Path, path: str, data: bytes) -> None:
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)


def test_everything_that_is_installed(buildidfs: BuildIdFs, directory: Path) -> None:
    """``--all`` is ``--root /`` beside the running kernel; twice it is nothing new."""
    root = directory / "root"
    module = kernels.module(directory / "module")
    install(root, MODULE, lzma.compress(module.read_bytes()))
    install(root, f"lib/modules/{RELEASE}/kernel/other.ko", module.read_bytes())
    install(root, "boot/vmlinuz-lzo", kernels.bzimage_file(b"\x89LZO\0\r\n\x1a\n" + bytes(50)))
    done = buildidfs("scan", "kernel", "--root", root, "--json", check=False)
    summary = json.loads(done.out)
    assert (done.rc, summary["files"], summary["captured"], summary["held"]) == (3, 3, 1, 1)
    (unreadable,) = summary["unreadable"]
    assert "lzo" in unreadable["reason"]
    shutil.rmtree(root / "boot")
    again = json.loads(buildidfs("scan", "kernel", "--root", root, "--json").out)
    assert (again["captured"], again["held"]) == (0, 2)
    listed = buildidfs("list", "--json").out.splitlines()
    installed = {f"{root}{MODULE}", f"{root}/lib/modules/{RELEASE}/kernel/other.ko"}
    assert {json.loads(line)["path"] for line in listed} <= installed
    assert buildidfs("scan", "kernel", "--all", check=False).rc in (0, 3)


def test_a_root_without_kernels(buildidfs: BuildIdFs, directory: Path) -> None:
    done = buildidfs("scan", "kernel", "--root", directory, check=False)
    assert done.rc == 3
    assert "has neither /boot nor /lib/modules" in done.err
