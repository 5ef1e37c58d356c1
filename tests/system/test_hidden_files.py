# SPDX-License-Identifier: Apache-2.0
"""Files that are mapped but not to be found under their name, or not the ones found there."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.clients.tools import run, tool
from tests.support.containers.ephemeral import root_filesystem
from tests.support.elf import programs
from tests.support.elf.programs import build_id_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.elf.programs import Binary, Program
    from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse]

# without /proc the loader cannot tell where the executable is
_CHROOTED = ("/bin/sh", "-c", "LD_LIBRARY_PATH=/app/lib exec /app/bin/hot stuck")


@pytest.fixture(scope="session")
def other_program(scratch: Path) -> Program:
    """The same program with other build IDs, as from another image."""
    return programs.build(scratch / "other-program")


@pytest.fixture
def home(buildidfs: BuildIdFs, program: Program) -> Path:
    """The program, installed where a test may do as it likes."""
    directory = buildidfs.store.parent / "home"
    program.install(directory, debug="none")
    return directory


def _assert_served(mount: Path, *binaries: Binary) -> None:
    for binary in binaries:
        run([tool("cmp"), mount / binary.build_id / "elf", binary.shipped], check=True)


def _assert_nothing_under_a_wrong_id(mount: Path) -> None:
    names = [name for name in os.listdir(mount) if len(name) == 40]
    assert names
    for name in names:
        if (mount / name / "elf").exists():
            assert build_id_of(mount / name / "elf") == name


def test_deleted(buildidfs: BuildIdFs, program: Program, home: Path) -> None:
    with programs.running(home / "app/bin/hot", "stuck") as pid:
        shutil.rmtree(home)
        buildidfs.scan(pid)
    with buildidfs.mounted() as mount:
        _assert_served(mount, *program.binaries)
        path = (mount / program.exe.build_id / "path").read_text()
        assert path == f"{home}/app/bin/hot\n"


def test_replaced_by_another_file(
    buildidfs: BuildIdFs, program: Program, other_program: Program, home: Path
) -> None:
    with programs.running(home / "app/bin/hot", "stuck") as pid:
        for binary, place in ((other_program.exe, "bin/hot"), (other_program.lib, "lib/libhot.so")):
            shutil.copy2(binary.shipped, home / "replacement")
            (home / "replacement").rename(home / "app" / place)
        buildidfs.scan(pid)
    with buildidfs.mounted() as mount:
        _assert_served(mount, *program.binaries)
        assert not (mount / other_program.exe.build_id).exists()


def test_overwritten_in_place_before_the_scan(
    buildidfs: BuildIdFs, program: Program, other_program: Program, home: Path
) -> None:
    # An executable that runs cannot be written to; a library can.
    assert other_program.lib.shipped.stat().st_size == program.lib.shipped.stat().st_size
    with programs.running(home / "app/bin/hot", "stuck") as pid:
        with (home / "app/lib/libhot.so").open("r+b") as file:
            file.write(other_program.lib.shipped.read_bytes())
        buildidfs.scan(pid)
    with buildidfs.mounted() as mount:
        _assert_served(mount, program.exe, other_program.lib)
        assert not (mount / program.lib.build_id).exists()
        _assert_nothing_under_a_wrong_id(mount)


def test_overwritten_in_place_after_the_scan(
    buildidfs: BuildIdFs, program: Program, other_program: Program, home: Path
) -> None:
    with programs.running(home / "app/bin/hot", "stuck") as pid:
        buildidfs.scan(pid)
        with (home / "app/lib/libhot.so").open("r+b") as file:
            file.write(other_program.lib.shipped.read_bytes())
        # the file is the one that was known, but for its contents
        buildidfs.scan(pid)
    with buildidfs.mounted() as mount:
        _assert_served(mount, *program.binaries, other_program.lib)
        _assert_nothing_under_a_wrong_id(mount)


def test_executable_in_memory(buildidfs: BuildIdFs, program: Program, home: Path) -> None:
    start = (
        "import os, sys\n"
        "fd = os.memfd_create('nowhere')\n"
        "os.write(fd, open(sys.argv[1], 'rb').read())\n"
        "os.execve(fd, ['hot', 'stuck'], {'LD_LIBRARY_PATH': sys.argv[2]})\n"
    )
    argv = [sys.executable, "-c", start, home / "app/bin/hot", home / "app/lib"]
    with programs.running(*argv) as pid:
        shutil.rmtree(home)
        buildidfs.scan(pid)
    with buildidfs.mounted() as mount:
        _assert_served(mount, *program.binaries)


def test_chroot(buildidfs: BuildIdFs, program: Program) -> None:
    root = buildidfs.store.parent / "root"
    root_filesystem(program, root)
    with programs.running(tool("chroot"), root, *_CHROOTED) as pid:
        buildidfs.scan(pid)
    with buildidfs.mounted() as mount:
        _assert_served(mount, *program.binaries)
        debug = mount / program.exe.build_id / "debug"
        run([tool("cmp"), debug, program.exe.debug], check=True)
        assert (mount / program.exe.build_id / "path").read_text() == "/app/bin/hot\n"


def test_user_namespace(buildidfs: BuildIdFs, program: Program, home: Path) -> None:
    place = buildidfs.store.parent / "inside"
    place.mkdir()
    script = (
        'mount -t tmpfs none "$1" && cp -r "$2/app" "$1" && cd "$1" && exec "$1/app/bin/hot" stuck'
    )
    nobody = [tool("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups"]
    inside = [tool("unshare"), "-U", "-r", "-m"]
    if run([*nobody, *inside, tool("true")]).rc != 0:
        pytest.skip("this machine does not let users make user namespaces")
    with programs.running(*nobody, *inside, "sh", "-c", script, "sh", place, home) as pid:
        assert not (place / "app").exists()
        buildidfs.scan(pid)
    with buildidfs.mounted() as mount:
        _assert_served(mount, *program.binaries)


def test_two_images_with_the_same_path(
    buildidfs: BuildIdFs, program: Program, other_program: Program
) -> None:
    roots = [buildidfs.store.parent / name for name in ("one", "two")]
    for root, image in zip(roots, (program, other_program), strict=True):
        root_filesystem(image, root)
        with programs.running(tool("chroot"), root, *_CHROOTED) as pid:
            buildidfs.scan(pid)
        shutil.rmtree(root)
    with buildidfs.mounted() as mount:
        _assert_served(mount, *program.binaries, *other_program.binaries)
        ids = {binary.build_id for binary in (program.exe, other_program.exe)}
        assert set(os.listdir(mount / "perf/app/bin/hot")) == ids


def test_one_image_in_several_places(buildidfs: BuildIdFs, program: Program) -> None:
    places = [buildidfs.store.parent / f"place{number}" for number in range(3)]
    for place in places:
        program.install(place)
        with programs.running(place / "app/bin/hot", "stuck") as pid:
            buildidfs.scan(pid)
    shown = json.loads(buildidfs("show", "--json", program.exe.build_id).out)
    digests = {variant["sha256"] for variant in shown["variants"]}
    kinds = [variant["kind"] for variant in shown["variants"]]
    assert sorted(kinds) == ["debuginfo", "executable"], shown
    assert len(digests) == 2
    seen = {origin["path"] for origin in shown["origins"] if "executable" in origin["kinds"]}
    assert seen == {f"{place}/app/bin/hot" for place in places}
    with buildidfs.mounted() as mount:
        newest_first = (mount / program.exe.build_id / "path").read_text().splitlines()
        assert newest_first == [f"{place}/app/bin/hot" for place in reversed(places)]
