# SPDX-License-Identifier: Apache-2.0
"""The debug files of fifty installed packages, out of a mirror of debug packages for them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.aptmirror import SUITE, debug_package, mirror
from tests.support.clients import run, tool
from tests.support.mounts import BuildIdFs
from tests.support.programs import build_id_of
from tests.support.upstreams import plain_files, upstream

pytestmark = [pytest.mark.root, pytest.mark.slow]

PACKAGES = 50
_FILES = 2
"""Files of a package at most."""


def installed_programs() -> Iterator[tuple[str, list[Path]]]:
    """Packages of this machine, each with some of its programs and libraries."""
    for listed in sorted(Path("/var/lib/dpkg/info").glob("*.list")):
        found = []
        for name in listed.read_text().splitlines():
            if name.startswith(("/usr/bin/", "/usr/lib/x86_64-linux-gnu/")) and is_elf(Path(name)):
                found.append(Path(name))
            if len(found) == _FILES:
                break
        if found:
            yield listed.stem.partition(":")[0], found


def is_elf(path: Path) -> bool:
    status = path.lstat() if os.path.lexists(path) else None
    if status is None or not stat.S_ISREG(status.st_mode) or not status.st_size:
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def debug_file(program: Path, out: Path) -> bytes | None:
    """What a debug package has of a program: here it lacks the DWARF that only its build had.

    None for the few programs whose debug file objcopy then cannot read.
    """
    target = out / "debug"
    words = [tool("objcopy"), "--only-keep-debug", program, target]
    run(words, check=True)
    section = out / "section"
    section.write_bytes(b"\1" * 11)
    done = run([tool("objcopy"), "--add-section", f".debug_info={section}", target])
    return target.read_bytes() if done.rc == 0 else None


def test_all_debug_files_of_fifty_packages_come(directory: Path) -> None:
    debs, expected = [], {}
    for name, programs in installed_programs():
        files = {}
        for program in programs:
            try:
                build_id = build_id_of(program)
            except LookupError:
                continue
            if build_id not in expected and (made := debug_file(program, directory)) is not None:
                files[build_id] = made
        if files:
            expected |= files
            debs.append(debug_package(directory, f"{name}-dbgsym", files))
        if len(debs) == PACKAGES:
            break
    assert len(debs) == PACKAGES
    mirror(directory / "mirror", debs)
    buildidfs = BuildIdFs(directory)
    buildidfs("scan", "tree", "/usr/bin/true")
    with upstream(plain_files(directory / "mirror")) as server:
        config = directory / "apt.toml"
        line = f"apt:{server.url} {SUITE} main arch=amd64"
        config.write_text(f"[upstream]\nurls = {json.dumps([line])}\n")
        words = ["fetch", "--kind", "debuginfo", "--json", *expected]
        done = json.loads(buildidfs("--config", config, *words).out)
        assert done["fetched"] == len(expected)
        downloads = [count for path, count in server.requests.items() if path.endswith(".deb")]
        assert len(downloads) == PACKAGES, "a package for several files is downloaded once"
        assert set(downloads) == {1}
    for build_id, content in expected.items():
        out = directory / "got"
        buildidfs("get", "--kind", "debuginfo", build_id, "-o", out)
        assert out.read_bytes() == content
        assert build_id_of(out) == build_id
    assert buildidfs("check").rc == 0
