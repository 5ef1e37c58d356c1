# SPDX-License-Identifier: Apache-2.0
"""Profiles that claim what cannot be: every command says what is wrong, and none fails itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.clients.tools import run, tool
from tests.support.elf.perfwriter import PerfWriter
from tests.support.harness.mounts import BuildIdFs

_COMMANDS = (
    ("coverage",),
    ("coverage", "--json"),
    ("repair", "-o", "OUT"),
    ("scan", "perf-data"),
    ("bundle", "-o", "OUT"),
    ("pin",),
)
_WRITER = PerfWriter()


def _records(program: Path) -> bytes:
    """A program that the store knows, as if it were on a device of no such number."""
    return _WRITER.mmap2(
        1, 0x1000, 0x1000, os.fsencode(program), time=2,
        dev=((1 << 32) - 1, 1 << 31), inode=program.stat().st_ino,
    ) + _WRITER.sample(1, 0x1010, 4)  # fmt: skip


def _moved(program: Path, offset: int, size: int) -> bytes:
    """A profile that says that its records are elsewhere."""
    good = _WRITER.file(_records(program))
    return good[:40] + _WRITER.pack("QQ", offset, size) + good[56:]


PROFILES: dict[str, Callable[[Path], bytes]] = {
    "devices of 32 bits": lambda program: _WRITER.file(_records(program)),
    "records in the header": lambda program: _moved(program, 16, 80),
    "records beyond the end": lambda program: _moved(program, 1 << 60, 0),
    "records of all sizes": lambda program: _moved(program, 104, (1 << 64) - 1),
    "feature without a number": lambda program: (
        _WRITER.pipe(_records(program), {}) + _WRITER.record(80, b"")
    ),
    "name that fills a record": lambda program: _WRITER.file(
        _records(program), {2: _WRITER.record(67, b"\xff" * 24 + b"\1" * 4 + b"x" * 65490)}
    ),
}


@pytest.fixture(scope="module")
def known(scratch: Path) -> tuple[BuildIdFs, Path]:
    """A store, and a program that it has."""
    directory = scratch / "hostile-profiles"
    directory.mkdir()
    program = directory / "program"
    (directory / "program.c").write_text("int main(void) { return 0; }\n")
    run([tool("gcc"), "-o", program, directory / "program.c"], check=True)
    buildidfs = BuildIdFs(directory)
    buildidfs("add", program)
    return buildidfs, program


@pytest.mark.parametrize("name", PROFILES)
def test_what_a_profile_claims(known: tuple[BuildIdFs, Path], directory: Path, name: str) -> None:
    buildidfs, program = known
    profile = directory / "perf.data"
    profile.write_bytes(PROFILES[name](program))
    for command in _COMMANDS:
        at = 2 if command[0] == "scan" else 1
        words = [directory / "out" if word == "OUT" else word for word in command]
        done = buildidfs(*words[:at], profile, *words[at:], check=False)
        assert done.rc in (0, 2, 3, 30), str(done)
        assert "internal error" not in done.err
