# SPDX-License-Identifier: Apache-2.0
"""``where --live`` of a program that an upgrade has replaced: the version that runs.

The right version is the one that dpkg had installed when the program started.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.clients.tools import run, tool
from tests.support.elf.programs import build_id_of
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.root

_NAME = "waiter"
_CODE = """
#include <unistd.h>
__attribute__((section(".note.package"), aligned(4), used)) static const struct {
    unsigned name_size, size, type; char name[4], text[NOTE_SIZE];
} note = {4, NOTE_SIZE, 0xcafe1a7e, "FDO", NOTE};
int main(void) { write(1, VERSION "\\n", sizeof VERSION); pause(); return 0; }
"""
_NOTE = '{"type":"deb","os":"debian","name":"waiter","version":"9:7-noted"}'


def _program(directory: Path, version: str, *, note: str = "") -> Path:
    out, text = directory / f"waiter-{version}.exe", note.replace('"', '\\"')
    size = (len(note) + 4) // 4 * 4
    code = _CODE if note else _CODE[: _CODE.index("__attr")] + _CODE[_CODE.index("int main") :]
    macros = [f'-DVERSION="{version}"', f'-DNOTE="{text}"', f"-DNOTE_SIZE={size}"]
    source = out.with_suffix(".c")
    source.write_text(code)
    run([tool("gcc"), "-static", "-Wl,--build-id=sha1", *macros, "-o", out, source], check=True)
    return out


class _Root:
    """A directory with a system whose package manager is dpkg."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.path = directory, directory / "root"
        (self.path / "var/lib/dpkg/info").mkdir(parents=True)
        (self.path / "var/lib/dpkg/updates").mkdir()
        (self.path / "var/lib/dpkg/status").touch()
        (self.path / "var/log").mkdir()

    def install(self, version: str, program: Path) -> None:
        """Install or upgrade the package of a program, with dpkg."""
        tree = self._directory / f"tree-{version}"
        (tree / "DEBIAN").mkdir(parents=True)
        (tree / "DEBIAN/control").write_text(
            f"Package: {_NAME}\nVersion: {version}\nArchitecture: amd64\n"
            "Maintainer: a <a@b>\nDescription: waits\n"
        )
        (tree / "usr/bin").mkdir(parents=True)
        (tree / f"usr/bin/{_NAME}").write_bytes(program.read_bytes())
        (tree / f"usr/bin/{_NAME}").chmod(0o755)
        package = self._directory / f"{version}.deb"
        run([tool("dpkg-deb"), "--build", tree, package], check=True)
        log = self.path / "var/log/dpkg.log"
        if log.exists():  # which has whole seconds
            last = int(log.stat().st_mtime)
            until(lambda: int(time.time()) > last, "the next second")
        run([tool("dpkg"), f"--root={self.path}", f"--log={log}", "--force-architecture",
             "--force-not-root", "-i", package], check=True)  # fmt: skip

    @contextlib.contextmanager
    def runs(self) -> Iterator[int]:
        """Run the program in this root."""
        command = [tool("chroot"), self.path, f"/usr/bin/{_NAME}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            try:
                assert child.stdout is not None
                assert child.stdout.readline()
                yield child.pid
            finally:
                child.kill()


def _live(program: BuildIdFs) -> dict[int, dict[str, Any]]:
    done = program("where", "--live", "--path", f"*/{_NAME}", "--json", check=False)
    rows = map(json.loads, done.out.splitlines())
    return {row["pid"]: row for row in rows}


def _text(program: BuildIdFs, pid: int) -> str:
    done = program("where", "--live", "--path", f"*/{_NAME}", check=False)
    rows = (line.split("\t") for line in done.out.splitlines())
    return next(row[4] for row in rows if row[1] == str(pid))


@pytest.mark.parametrize("zone", ["UTC", "America/St_Johns"])
def test_version_that_runs(directory: Path, monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    monkeypatch.setenv("TZ", zone)  # the log has local times
    root, buildidfs = _Root(directory), BuildIdFs(directory)
    programs = {version: _program(directory, version) for version in ("1.0-1", "2.0-1")}
    root.install("1.0-1", programs["1.0-1"])
    with root.runs() as first:
        assert _text(buildidfs, first) == f"{_NAME} 1.0-1"
        root.install("2.0-1", programs["2.0-1"])
        with root.runs() as second:
            # built anew without a change, as most upgrades of a release are
            root.install("2.0-2", programs["2.0-1"])
            found = _live(buildidfs)
            old, new = found[first], found[second]
            assert (old["package_version"], new["package_version"]) == ("1.0-1", "2.0-1")
            assert old["build_id"] == build_id_of(programs["1.0-1"])
            assert {row["now"]["package_version"] for row in (old, new)} == {"2.0-2"}
            assert old["now"]["build_id"] == new["build_id"] == new["now"]["build_id"]
            assert _text(buildidfs, first) == f"{_NAME} 1.0-1 (now {_NAME} 2.0-2)"
            assert _text(buildidfs, second) == (
                f"{_NAME} 2.0-1 (same build ID as {_NAME} 2.0-2 now)"
            )
            os.truncate(root.path / "var/log/dpkg.log", 0)
            assert _text(buildidfs, first) == f"unknown version (now {_NAME} 2.0-2)"
            assert _text(buildidfs, second) == f"same build ID as {_NAME} 2.0-2 now"


def test_version_in_the_note_of_a_program(directory: Path) -> None:
    root, buildidfs = _Root(directory), BuildIdFs(directory)
    root.install("9:7-noted", _program(directory, "old", note=_NOTE))
    assert "waiter" in run([tool("readelf"), "-n", root.path / f"usr/bin/{_NAME}"]).out
    with root.runs() as pid:
        root.install("9:8", _program(directory, "new"))
        os.truncate(root.path / "var/log/dpkg.log", 0)
        assert _text(buildidfs, pid) == f"{_NAME} 9:7-noted (now {_NAME} 9:8)"
