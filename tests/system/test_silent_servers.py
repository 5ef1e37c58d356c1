# SPDX-License-Identifier: Apache-2.0
"""FUSE servers that answer for the first page of a file and then fall silent hold up nobody."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

from tests.support.elf import echo
from tests.support.elf.programs import build_id_of
from tests.support.filesystems import halffs
from tests.support.harness.children import running
from tests.support.harness.mounts import COMMAND, BuildIdFs, is_mountpoint
from tests.support.harness.waiting import until
from tests.support.harness.watching import watching

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.slow]


@pytest.fixture
def silent(directory: Path) -> Iterator[tuple[Path, list[int]]]:
    """A program on a filesystem that fell silent, and a process that has it mapped."""
    program, target = directory / "program", directory / "mnt"
    echo.build(program)
    with halffs.served(target, program) as server, running([target / "app"]) as process:
        server.fall_silent()
        yield target / "app", [process.pid]


def test_scan_names_it_and_ends(directory: Path, silent: tuple[Path, list[int]]) -> None:
    path, pids = silent
    other = directory / "other"
    echo.build(other)
    with running([other]) as process:
        options = [word for pid in (*pids, process.pid) for word in ("--pid", str(pid))]
        with (directory / "said").open("wb") as output:
            ran = subprocess.Popen(
                [*COMMAND, "--store", directory / "store", "scan", "proc", *options],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        # Should it hang nobody can kill it before the server has gone.
        until(lambda: ran.poll() is not None, "its end", 60)
    said = (directory / "said").read_text()
    assert ran.returncode == 3, said
    assert os.fspath(path) in said
    assert "does not answer" in said
    store = BuildIdFs(directory)
    assert build_id_of(other) in store("list").out


_NAMING: Final = {
    "add": (["add", "{path}", "{other}", "{path}"], 3),
    "link": (["add", "{link}/{name}", "{other}"], 3),
    "import": (["import", "{path}"], 2),
    "config": (["--config", "{path}", "add", "{other}"], 2),
}
"""Words that name the program of a silent filesystem, and the exit code of the command."""


class _Naming(NamedTuple):
    """A command that names a file: its process, its store beside ``said``, and another file."""

    process: subprocess.Popen[bytes]
    said: Path
    other: Path


@pytest.fixture(scope="module")
def naming(scratch: Path) -> Iterator[dict[str, _Naming]]:
    """All commands of `_NAMING`, running: each waits for its answer as long as the others."""
    directory = scratch / "naming"
    directory.mkdir()
    program, target = directory / "program", directory / "mnt"
    link = directory / "by-link"
    echo.build(program)
    link.symlink_to(target)
    path = target / "app"
    # A command that hangs ends only after the server has.
    with contextlib.ExitStack() as stack, halffs.served(target, program) as server:
        server.fall_silent()
        found = {}
        for how, (words, _) in _NAMING.items():
            place = directory / how
            place.mkdir()
            echo.build(place / "other")
            names = {"path": path, "other": place / "other", "link": link, "name": path.name}
            output = stack.enter_context((place / "said").open("wb"))
            ran = subprocess.Popen(
                [*COMMAND, "--store", place / "store", *(word.format(**names) for word in words)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
            stack.callback(ran.wait, 30)
            stack.callback(ran.kill)
            found[how] = _Naming(ran, place / "said", place / "other")
        yield found


@pytest.mark.parametrize("how", _NAMING)
def test_a_file_that_the_operator_names_is_given_up(naming: dict[str, _Naming], how: str) -> None:
    ran, file, other = naming[how]
    words, status = _NAMING[how]
    until(lambda: ran.poll() is not None, "its end", 60)
    said = file.read_text()
    assert ran.returncode == status, said
    assert "/app" in said
    assert "does not answer" in said
    if words[0] == "add":
        assert build_id_of(other) in BuildIdFs(file.parent)("list").out


def test_a_mount_point_whose_server_is_stopped_is_busy(directory: Path) -> None:
    store, point = BuildIdFs(directory), directory / "point"
    program = directory / "program"
    echo.build(program)
    store("add", program)
    point.mkdir()
    words = [*COMMAND, "--store", directory / "store", "mount", "--foreground", point]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL) as server:
        try:
            until(lambda: server.poll() is not None or is_mountpoint(point), "a mount")
            assert os.listdir(point)
            server.send_signal(signal.SIGSTOP)
            with ThreadPoolExecutor(2) as pool:
                answers = [
                    pool.submit(store, "mount", *options, point, check=False)
                    for options in ([], ["--foreground"])
                ]
            for done in (each.result() for each in answers):
                assert done.rc == 40, done
                assert "the store mounted there does not answer" in done.err
                assert f"buildidfs unmount {point}" in done.err
            store("unmount", point)
            assert not is_mountpoint(point)
        finally:
            server.send_signal(signal.SIGCONT)
            if is_mountpoint(point):
                store("unmount", point)


@pytest.mark.watch
@pytest.mark.host
def test_watch_ends_when_it_is_told_to(directory: Path) -> None:
    program, target = directory / "program", directory / "mnt"
    echo.build(program)
    with halffs.served(target, program) as server:
        with (
            watching(directory / "store", "--pin-seconds", "60") as watcher,
            running([target / "app"]),
        ):
            server.fall_silent()
            other = directory / "other"
            echo.build(other)
            with running([other]):
                until(lambda: watcher.facts.get("waiting", 0) or watcher.facts["losses"], "a catch")
            # Within the minute that `stop` allows, and without SIGKILL.
            watcher.stop()
        assert build_id_of(other) in BuildIdFs(directory)("list").out
