# SPDX-License-Identifier: Apache-2.0
"""Files into the store and out of it, one by one, from the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients.commands import ROOT
from tests.support.clients.tools import run
from tests.support.elf.elfwriter import DWARF, ET_REL, TEXT, elf_file
from tests.support.harness.mounts import COMMAND

if TYPE_CHECKING:
    from tests.support.harness.mounts import BuildIdFs

FIRST, SECOND = "a1" * 20, "a2" * 20


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two binaries, one of which has two variants, and an object file without a build ID."""
    for name, build_id, more in (
        ("app", FIRST, ()),
        ("app-g", FIRST, (DWARF,)),
        ("lib", SECOND, ()),
    ):
        (tmp_path / name).write_bytes(elf_file([TEXT, *more], build_id=bytes.fromhex(build_id)))
    (tmp_path / "raw").write_bytes(elf_file(etype=ET_REL))
    return tmp_path


def kept(buildidfs: BuildIdFs) -> set[tuple[str, str]]:
    """Build ID and file name of everything that is listed."""
    lines = [json.loads(line) for line in buildidfs("list", "--json").out.splitlines()]
    return {(line["build_id"], Path(line["path"]).name) for line in lines}


def test_add(buildidfs: BuildIdFs, files: Path) -> None:
    done = buildidfs("add", "--json", files / "app", files / "lib")
    summary = json.loads(done.out)
    assert (summary["files"], summary["captured"], summary["unreadable"]) == (2, 2, [])
    assert kept(buildidfs) == {(FIRST, "app"), (SECOND, "lib")}
    assert "2 already held" in buildidfs("add", files / "app", files / "lib").out


def test_what_cannot_be_added_is_named(buildidfs: BuildIdFs, files: Path) -> None:
    done = buildidfs("add", files / "app", files / "raw", files, check=False)
    assert done.rc == 3
    assert "ELF file without a build ID; --build-id gives it one" in done.err
    assert "a directory: use scan tree" in done.err
    assert kept(buildidfs) == {(FIRST, "app")}


def test_build_id_that_is_given(buildidfs: BuildIdFs, files: Path) -> None:
    (files / "program").write_bytes(elf_file())
    buildidfs("add", "--build-id", "ABCDEF01", files / "raw")
    buildidfs("add", "--build-id", "ABCDEF03", files / "program")  # in place of an adopted ID
    assert kept(buildidfs) == {("abcdef01", "raw"), ("abcdef03", "program")}
    symbols = files / "symbols"
    symbols.write_text("ffffffff81000000 T _stext\n")
    buildidfs("add", "--kallsyms", "--build-id", "abcdef02", symbols)
    assert kept(buildidfs) >= {("abcdef02", "[kernel.kallsyms]")}
    for words, reason in (
        (["--build-id", "xyz", files / "raw"], "not a build ID"),
        (["--build-id", "abcdef01", files / "raw", files / "app"], "for one file"),
        (["--kallsyms", symbols], "needs --build-id"),
    ):
        done = buildidfs("add", *words, check=False)
        assert (done.rc, reason in done.err) == (2, True), done


def test_remove_by_id(buildidfs: BuildIdFs, files: Path) -> None:
    buildidfs("scan", "tree", files)
    done = buildidfs("remove", "--dry-run", "a1")
    assert "2 to remove" in done.out
    assert len(kept(buildidfs)) == 2
    done = buildidfs("remove", "A1", "a1a1")
    assert "2 removed" in done.out
    assert kept(buildidfs) == {(SECOND, "lib")}
    assert buildidfs("show", FIRST, check=False).rc == 30


def test_remove_by_path(buildidfs: BuildIdFs, files: Path) -> None:
    buildidfs("scan", "tree", files)
    (line,) = buildidfs("remove", "--json", "*/app").out.splitlines()
    removed = json.loads(line)
    assert removed["path"] == str(files / "app")
    assert (removed["build_id"], removed["kind"]) == (FIRST, "executable")
    assert kept(buildidfs) == {(FIRST, "app-g"), (SECOND, "lib")}
    assert json.loads(buildidfs("show", "--json", FIRST).out)["variants"]
    page = (Path(__file__).parents[2] / "man/buildidfs-json.5").read_text()
    explained = page.partition(".It Cm remove\n")[2].partition(".It ")[0]
    assert [key for key in removed if f".Li {key}" not in explained] == []


def test_what_there_is_not_to_remove(buildidfs: BuildIdFs, files: Path) -> None:
    assert buildidfs("remove", FIRST, check=False).rc == 11
    buildidfs("scan", "tree", files)
    for words, code in ((["b1"], 30), (["*/other"], 30), (["a"], 2), (["a1", "*/other"], 30)):
        done = buildidfs("remove", *words, check=False)
        assert (done.rc, done.out) == (code, "")
    assert len(kept(buildidfs)) == 2


def test_what_is_pinned_stays(buildidfs: BuildIdFs, files: Path) -> None:
    buildidfs("scan", "tree", files)
    buildidfs("pin", SECOND)
    done = buildidfs("remove", FIRST, "*/lib", check=False)
    assert (done.rc, f"{SECOND} is pinned" in done.err) == (2, True)
    assert len(kept(buildidfs)) == 2
    assert "\tpinned\t" in buildidfs("remove", "--dry-run", "*/lib").out
    buildidfs("remove", "--force", FIRST, "*/lib")
    assert kept(buildidfs) == set()


def test_what_was_removed_is_captured_again(buildidfs: BuildIdFs, files: Path) -> None:
    buildidfs("add", files / "app")
    buildidfs("remove", FIRST)
    assert "1 captured" in buildidfs("add", files / "app").out


@pytest.mark.root
@pytest.mark.fuse
def test_mount_forgets_at_once(buildidfs: BuildIdFs, files: Path) -> None:
    buildidfs("add", files / "app", files / "lib")
    with buildidfs.mounted() as mount:
        with (mount / FIRST / "elf").open("rb") as file:
            buildidfs("remove", FIRST)
            assert not (mount / FIRST).exists()
            assert file.read() == (files / "app").read_bytes()
        assert (mount / SECOND / "elf").exists()


def test_added_file_is_removed_by_its_relative_path(buildidfs: BuildIdFs, files: Path) -> None:
    place = files / "build [1]*"
    place.mkdir()
    (files / "app").rename(place / "app")
    command = [*COMMAND, "--store", buildidfs.store]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run([*command, "add", "./app"], cwd=place, env=environment, check=True)
    buildidfs("add", files / "lib")
    done = run([*command, "remove", "../*/app"], cwd=place, env=environment)
    assert done.rc == 0, done
    assert kept(buildidfs) == {(SECOND, "lib")}
    run([*command, "remove", "./lib"], cwd=files, env=environment, check=True)
    assert kept(buildidfs) == set()
