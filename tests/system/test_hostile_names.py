# SPDX-License-Identifier: Apache-2.0
"""Paths are chosen by whoever is in the container: no choice of his breaks the tree for others."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import stat
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.clients.tools import run, tool, unmount
from tests.support.containers.ephemeral import root_filesystem
from tests.support.elf import programs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.elf.programs import Program
    from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse]

_CHROOTED = ("/bin/sh", "-c", 'LD_LIBRARY_PATH=/app/lib exec "$0" stuck')

NAMES = {
    "newline": b"/a\nb/hot",
    "not UTF-8": b"/caf\xe9/\xff\xfehot",
    "backslash and blank": b"/a\\012 b/ho t",
    "longest component": b"/" + b"x" * 255,
    "deep": b"/y" * 900 + b"/hot",
    "perf's own directory": b"/.build-id/ab/cdef",
    "perf's name of the kernel": b"/[kernel.kallsyms]",
    "name of a file of the tree": b"/elf/path/hot",
    "a supplement": b"/usr/lib/debug/.dwz/hot",
}


@pytest.fixture(scope="module")
def root(scratch: Path, program: Program) -> Path:
    """A root filesystem to put programs with any name into."""
    directory = scratch / "hostile-names-root"
    root_filesystem(program, directory)
    return directory


def _scan_at(buildidfs: BuildIdFs, program: Program, root: Path, name: bytes) -> None:
    place = os.fsencode(root) + name
    os.makedirs(os.path.dirname(place), exist_ok=True)
    shutil.copy2(program.exe.shipped, os.fsdecode(place))
    with programs.running(tool("chroot"), root, *_CHROOTED, name) as pid:
        buildidfs.scan(pid)
    os.unlink(place)


def _walk(directory: bytes) -> Iterator[os.DirEntry[bytes]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)


def _assert_consistent(mount: Path) -> None:
    """Every name listed is there, is of the type it was listed with, and leads somewhere."""
    count = 0
    for entry in _walk(os.fsencode(mount)):
        count += 1
        found = os.lstat(entry.path)
        assert stat.S_ISLNK(found.st_mode) == entry.is_symlink(), entry.path
        assert stat.S_ISDIR(found.st_mode) == entry.is_dir(follow_symlinks=False), entry.path
        assert found.st_ino == entry.inode(), entry.path
        os.stat(entry.path)
    assert count > 20


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_any_path(buildidfs: BuildIdFs, program: Program, root: Path, name: bytes) -> None:
    _scan_at(buildidfs, program, root, name)
    exe = program.exe.build_id
    shown = json.loads(buildidfs("show", "--json", exe).out)
    paths = {
        base64.b64decode(origin["path_b64"]) if "path_b64" in origin else origin["path"].encode()
        for origin in shown["origins"]
        if "executable" in origin["kinds"]
    }
    assert paths == {name}
    with buildidfs.mounted() as mount:
        _assert_consistent(mount)
        for binary in program.binaries:
            served = mount / binary.build_id / "elf"
            run([tool("cmp"), served, binary.shipped], check=True)
        text = (mount / exe / "path").read_bytes()
        assert text == name.replace(b"\n", b"\\012") + b"\n"


def test_an_impostor_in_perfs_directory_does_not_hide_the_real_one(
    buildidfs: BuildIdFs, program: Program, root: Path, scratch: Path
) -> None:
    impostor = programs.build(scratch / "impostor")
    shutil.copy2(impostor.lib.shipped, root / "app/lib")
    real = program.exe.build_id
    name = f"/.build-id/{real[:2]}/{real[2:]}".encode()
    _scan_at(buildidfs, impostor, root, name)
    stripped = buildidfs.store.parent / "stripped"
    program.install(stripped)
    with programs.running(stripped / "app/bin/hot", "spin") as pid:
        buildidfs.scan(pid)
        data = buildidfs.store.parent / "perf.data"
        tools.perf_record(data, [tool("sleep"), "0.2"], "-p", str(pid))
    shutil.rmtree(stripped)
    with buildidfs.mounted() as mount:
        linked = mount / f"perf/.build-id/{real[:2]}/{real[2:]}/elf"
        run([tool("cmp"), linked, program.exe.shipped], check=True)
        result = tools.perf_report(mount, data)
    assert "exe_static_hot" in result.out, str(result)


def test_a_path_that_leads_nowhere_does_not_hide_the_others(
    buildidfs: BuildIdFs, program: Program, root: Path
) -> None:
    """Perf is led to the first path that has a place in the tree, to the build ID before that."""
    exe = program.exe.build_id
    _scan_at(buildidfs, program, root, b"/.build-id/ab/cdef")
    with buildidfs.mounted() as mount:
        link = mount / f"perf/.build-id/{exe[:2]}/{exe[2:]}"
        assert os.readlink(link) == f"../../{exe}"
        run([tool("cmp"), link / "elf", program.exe.shipped], check=True)
        _scan_at(buildidfs, program, root, b"/usr/bin/hot")
        run([tool("cmp"), link / "elf", program.exe.shipped], check=True)


@pytest.mark.host
def test_same_build_id_from_a_container_does_not_replace_the_hosts(
    buildidfs: BuildIdFs, program: Program
) -> None:
    """Whoever can write a file can write any build ID into it."""
    forged = buildidfs.store.parent / "forged"
    program.install(forged, debug="none")
    with (forged / "app/bin/hot").open("ab") as file:
        file.write(b"forged")
    script = 'mount -t tmpfs none "$1" && cp -a "$2/app" "$1" && exec "$1/app/bin/hot" stuck'
    inside = buildidfs.store.parent / "inside"
    inside.mkdir()
    argv = [tool("unshare"), "-m", "sh", "-c", script, "sh", inside, forged]
    with programs.running(*argv) as pid:
        buildidfs.scan(pid)
    with _trusted_directory(buildidfs.store.parent / "trusted") as trusted:
        shutil.copy2(program.exe.shipped, trusted)
        with buildidfs.mounted() as mount:
            served = mount / program.exe.build_id / "elf"
            assert served.read_bytes().endswith(b"forged")
            buildidfs("scan", "tree", trusted)
            run([tool("cmp"), served, program.exe.shipped], check=True)
    shown = json.loads(buildidfs("show", "--json", program.exe.build_id).out)
    trusts = [each["trust"] for each in shown["variants"] if each["kind"] == "executable"]
    assert trusts == ["host", "container"]


@contextlib.contextmanager
def _trusted_directory(path: Path) -> Iterator[Path]:
    # /tmp may be mounted nosuid, and then says nothing of who put a file there
    path.mkdir()
    run([tool("mount"), "-t", "tmpfs", "none", path], check=True)
    try:
        yield path
    finally:
        unmount(path)
