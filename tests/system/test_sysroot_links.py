# SPDX-License-Identifier: Apache-2.0
"""Names that lead through symbolic links of a container, in its tree after it is gone."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.tools import run, tool
from tests.support.harness.catches import Program, started
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until
from tests.support.harness.watching import watching

pytestmark = [pytest.mark.root, pytest.mark.fuse]

_PROGRAM = "/opt/app/current/probe"
_RELEASE = """
mkdir -p /opt/app/releases/7/lib
cp {0}/probe /opt/app/releases/7
cp {0}/libprobe.so /opt/app/releases/7/lib/libprobe.so.1.2.3
ln -s libprobe.so.1.2.3 /opt/app/releases/7/lib/libprobe.so.1
ln -s releases/7 /opt/app/current
"""
_ALTERNATIVES = """
mkdir -p /opt/app/current/lib /opt/app/fast /opt/app/alternatives
cp {0}/probe /opt/app/current
cp {0}/libprobe.so /opt/app/fast/libfast.so
ln -s /opt/app/fast/libfast.so /opt/app/alternatives/libprobe
ln -s /opt/app/alternatives/libprobe /opt/app/current/lib/libprobe.so.1
"""
_START = """
mount -t tmpfs none /opt
{}
exec /opt/app/current/probe /opt/app/current/lib/libprobe.so.1 here wait
"""


@contextlib.contextmanager
def container(program: Program, layout: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program in a mount namespace with files and links."""
    script = _START.format(layout.format(program.exe.parent))
    with started([tool("unshare"), "-m", tool("sh"), "-ec", script]) as child:
        yield child


def names_in(pid: int) -> dict[str, bytes]:
    """The names that gdb inside the container has for the files of a process, and their bytes."""
    gdb = ["gdb", "-nx", "-q", "-batch", "-iex", "set debuginfod enabled off", "-p", str(pid)]
    inside = [tool("nsenter"), "-m", "-t", str(pid)]
    out = run([*inside, *gdb, "-ex", "info sharedlibrary"], check=True).out
    names = re.findall(r"^0x.* (/\S+)$", out, re.MULTILINE)
    assert "/opt/app/current/lib/libprobe.so.1" in names
    return {
        name: subprocess.check_output([*inside, tool("cat"), name]) for name in (*names, _PROGRAM)
    }


def assert_all_are_there(buildidfs: BuildIdFs, names: dict[str, bytes]) -> None:
    with buildidfs.mounted() as mount:
        (root,) = mount.glob("containers/mnt:*/root")
        for name, content in names.items():
            assert Path(f"{root}{name}").read_bytes() == content, name


@pytest.mark.parametrize("layout", [_RELEASE, _ALTERNATIVES], ids=["release", "alternatives"])
def test_the_names_of_the_loader_lead_to_scanned_files(directory: Path, layout: str) -> None:
    program = Program(directory)
    buildidfs = BuildIdFs(directory, directory / "store")
    with container(program, layout) as child:
        names = names_in(child.pid)
        buildidfs("scan", "proc", "--pid", str(child.pid))
    assert_all_are_there(buildidfs, names)


@pytest.mark.host
def test_the_names_of_the_loader_lead_to_files_of_a_watch(directory: Path) -> None:
    """The second container has files that the store knows, at new places."""
    program = Program(directory)
    with watching(directory / "store", "--no-scan") as watch:
        buildidfs = BuildIdFs(directory, watch.store)
        with buildidfs.mounted() as mount:
            for number, layout in enumerate((_ALTERNATIVES, _RELEASE), 1):
                with container(program, layout) as child:
                    names = names_in(child.pid)
                    until(functools.partial(are_seen, mount, list(names), number), "the names")


def are_seen(mount: Path, names: list[str], containers: int) -> bool:
    """True if so many containers have files at these names."""
    roots = list(mount.glob("containers/mnt:*/root"))
    return all(
        sum(Path(f"{root}{each}").exists() for root in roots) == containers for each in names
    )
