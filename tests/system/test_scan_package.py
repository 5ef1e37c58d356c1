# SPDX-License-Identifier: Apache-2.0
"""scan package, of packages made by the programs of distributions, down to gdb."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.ingest import scans
from buildidfs.store import Store
from tests.support.clients import tools
from tests.support.clients.tools import tool
from tests.support.containers import packages
from tests.support.containers.packages import PACKERS
from tests.support.elf import programs
from tests.support.elf.elfwriter import elf_file
from tests.support.elf.programs import sha256
from tests.support.filesystems.sources import deb, tar
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from tests.support.elf.programs import Program
    from tests.support.harness.mounts import BuildIdFs

Paths = dict[str, set[str]]


@pytest.fixture(scope="module")
def program(scratch: Path) -> Program:
    """A program whose debug files are where a debuginfo package puts them, shortened by dwz."""
    return programs.build(scratch / "packaged", dwz="system")


@pytest.fixture(scope="module")
def root(scratch: Path, program: Program) -> Path:
    """What is to be packed: the program, its debug files, another name, and what is no ELF file."""
    directory = scratch / "packaged-root"
    program.install(directory, debug="system")
    os.link(directory / "app/bin/hot", directory / "app/bin/hot-by-another-name")
    (directory / "app/bin/run").symlink_to("hot")
    (directory / "usr/share").mkdir()
    (directory / "usr/share/text").write_text("no ELF file\n" * 1000)
    return directory


@pytest.fixture(scope="module")
def expected(root: Path) -> Paths:
    """The paths of all ELF files to be packed, by the SHA-256 of their bytes."""
    found: Paths = {}
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.read_bytes()[:4] == b"\x7fELF":
            found.setdefault(sha256(path), set()).add(f"/{path.relative_to(root)}")
    assert len(found) == 5
    return found


@pytest.mark.parametrize("kind", PACKERS)
def test_all_that_is_in_it(
    program: Program, root: Path, expected: Paths, tmp_path: Path, kind: str
) -> None:
    package = tmp_path / "not-named-like-a-package"
    PACKERS[kind](root, tmp_path).rename(package)
    found: Paths = {}
    with Store.create(tmp_path / "store") as store:
        scan = scans.scan_packages(store, [os.fsencode(package)])
        assert (scan.packages, scan.summary.unreadable) == (1, [])
        assert (scan.summary.files, scan.summary.captured, scan.summary.held) == (6, 5, 1)
        for ordinal, _ in store.index.build_ids_from():
            for record in store.index.origins(ordinal):
                origin = record.origin
                assert re.fullmatch(r"package:hot-1:2\.0-3\.\w+", origin.container)
                assert (origin.host, origin.scanner) == (package.name, "package")
                found.setdefault(record.digest.hex(), set()).add(origin.path.decode())
        assert list(store.check(digests=True)) == []
        assert program.supplement is not None
        assert store.index.supplementary(program.supplement.name.encode()) is not None
    assert found == expected


def test_what_is_shown_of_it(
    program: Program, root: Path, buildidfs: BuildIdFs, tmp_path: Path
) -> None:
    package = packages.deb(root, tmp_path)
    done = buildidfs("scan", "package", package)
    assert re.fullmatch(
        r"1 package\n5 captured \([\d.]+ KiB, 3 new build IDs\), 1 already held\n", done.out
    ), done
    text = buildidfs("show", program.exe.build_id).out
    assert re.search(r"in package:hot-1:2\.0-3\.amd64 on hot\.deb,", text), text
    assert "trust package" in text, text
    for namespaces in ("mnt", "pid,uts"):
        # A package is not in any, whatever is taken for a container.
        assert (
            "in package:hot"
            in buildidfs("show", "--namespaces", namespaces, program.exe.build_id).out
        )
    for label in ("package:hot", "package:hot-1:2.0-3.amd64", "hot-1"):
        assert "/app/bin/hot" in buildidfs("list", "--container", label).out, label
    assert buildidfs("list", "--container", "package:other", check=False).rc == 30
    copied = tmp_path / "copy"
    buildidfs("get", program.exe.build_id, "-o", copied)
    assert sha256(copied) == sha256(program.exe.shipped)


def test_packages_below_a_directory_are_read_once(
    root: Path, buildidfs: BuildIdFs, tmp_path: Path
) -> None:
    pool = tmp_path / "pool"
    (pool / "h").mkdir(parents=True)
    last = packages.rpm(root, pool), packages.deb(root, pool / "h")
    shutil.copy(tool("true"), pool / "true")
    until(
        # What was written a moment ago may be written again without a trace in its times.
        lambda: all(time.time() - path.stat().st_ctime > 2 for path in last),
        "the packages to be old enough",
    )
    first = json.loads(buildidfs("scan", "package", "--json", pool).out)
    assert (first["packages"], first["unchanged"], first["unreadable"]) == (2, 0, [])
    assert (first["files"], first["captured"], first["held"]) == (12, 5, 7)
    second = json.loads(buildidfs("scan", "package", "--json", pool).out)
    assert (second["packages"], second["unchanged"], second["files"]) == (2, 2, 0)
    assert buildidfs("scan", "package", pool).out.startswith("2 packages, 2 of them unchanged\n")
    again = json.loads(buildidfs("scan", "package", "--again", "--json", pool).out)
    assert (again["unchanged"], again["files"], again["captured"], again["held"]) == (0, 12, 0, 12)


def test_what_cannot_be_read_is_named(buildidfs: BuildIdFs, tmp_path: Path) -> None:
    sound, damaged, text = tmp_path / "sound", tmp_path / "damaged", tmp_path / "text"
    build_id = bytes.fromhex("5eed" * 10)
    data = tar([("a", elf_file(build_id=build_id)), ("\x1b[31m", b"\x7fELF" * 100)])
    sound.write_bytes(deb(gzip.compress(data)))
    damaged.write_bytes(sound.read_bytes()[:-50])
    text.write_text("no package")
    done = buildidfs("scan", "package", sound, damaged, text, check=False)
    assert done.rc == 3, done
    assert build_id.hex() in buildidfs("list").out
    assert re.search(rf"not readable: damaged: ends too early\n +{damaged}\n", done.err), done
    assert re.search(rf"not readable: not a package\n +{text}\n", done.err), done
    assert "Traceback" not in done.err


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.client
def test_gdb_finds_what_a_debuginfo_package_has(
    program: Program, root: Path, buildidfs: BuildIdFs, tmp_path: Path
) -> None:
    """Of a program that was never seen here, with types that dwz moved to a third file."""
    debuginfo = tmp_path / "debuginfo"
    shutil.copytree(root / "usr/lib/debug", debuginfo / "usr/lib/debug")
    buildidfs("scan", "package", packages.rpm(debuginfo, tmp_path))
    with buildidfs.mounted() as mount:
        result = tools.gdb(
            "info line main", "ptype struct work",
            debug=mount / "debug", arguments=[program.exe.shipped],
        )  # fmt: skip
    assert re.search(r'Line \d+ of "/build/hot-1\.0/hot\.c" starts at address', result.out), result
    assert re.search(r"type = struct work \{\s+unsigned long seed;", result.out), result
    assert "gnu_debugaltlink" not in result.text, result
