# SPDX-License-Identifier: Apache-2.0
"""Progress on a real terminal, and the end of a command by Ctrl-C there."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from tests.support.clients.commands import COMMAND
from tests.support.clients.terminals import on_terminal, terminal
from tests.support.containers import packages
from tests.support.elf.elfwriter import elf_file

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.harness.mounts import BuildIdFs

_FILES, _FEW = 900, 40


def filled(root: Path, count: int) -> Path:
    """So many files, each with a build ID of its own."""
    for number in range(count):
        build_id = number.to_bytes(20, "big")
        (root / f"lib{number:04}.so").write_bytes(elf_file(build_id=build_id))
    return root


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files whose scan takes long enough to be drawn several times, and to be interrupted."""
    return filled(tmp_path_factory.mktemp("tree"), _FILES)


@pytest.fixture(scope="module")
def small_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files for commands that draw nothing."""
    return filled(tmp_path_factory.mktemp("small-tree"), _FEW)


def shares(raw: bytes) -> list[int]:
    return [int(each) for each in re.findall(rb"(\d+)%", raw)]


def test_ctrl_c_says_how_many_files_are_kept(buildidfs: BuildIdFs, tree: Path) -> None:
    words = (*COMMAND, "--store", buildidfs.store, "scan", "tree", tree)
    with terminal(*words) as running:
        running.read_until(b"Capturing  ")
        running.read_until(b" files  ")
        running.type(b"\x03")
        shown = running.end()
    assert shown.rc == 130
    found = re.search(r"buildidfs: interrupted: (\d+) files? kept; run it again", shown.lines[-1])
    assert found, shown
    kept = int(found[1])
    assert 0 < kept < _FILES
    assert len(buildidfs("list").out.splitlines()) == kept
    again = buildidfs("scan", "tree", tree).out
    assert again.startswith(f"{_FILES - kept} captured (")
    assert f", {kept} already held" in again


def test_progress_of_trees_has_no_share(buildidfs: BuildIdFs, tree: Path, tmp_path: Path) -> None:
    """The number of files below a directory is unknown before the walk has seen them."""
    top = tmp_path / "top"
    for number, file in enumerate(sorted(tree.iterdir())):
        directory = top / f"{number % 3}/{number % 5}"
        directory.mkdir(parents=True, exist_ok=True)
        os.link(file, directory / file.name)
    words = (*COMMAND, "--store", buildidfs.store, "scan", "tree", top, top / "1")
    shown = on_terminal(*words, columns=100)
    assert shown.rc == 0
    assert re.search(rb"Capturing +\d+ file", shown.raw), shown.raw
    assert shares(shown.raw) == []
    assert b" left" not in shown.raw


def test_progress_of_packages_has_a_share(buildidfs: BuildIdFs, tree: Path, tmp_path: Path) -> None:
    package = packages.deb(tree, tmp_path)
    for number in range(2):
        os.link(package, tmp_path / f"{number}.deb")
    words = (*COMMAND, "--store", buildidfs.store, "scan", "package", tmp_path)
    shown = on_terminal(*words, columns=100)
    assert shown.rc == 0
    found = shares(shown.raw)
    assert found
    assert found == sorted(found)
    assert found[0] < 100


def test_check_has_shares_of_both_steps(buildidfs: BuildIdFs, tree: Path) -> None:
    buildidfs("scan", "tree", tree)
    words = (*COMMAND, "--store", buildidfs.store, "check", "--verify-data")
    shown = on_terminal(*words, columns=100, env={"LC_ALL": "C"})
    assert shown.rc == 0
    assert shown.raw.isascii()
    rows, _, blobs = shown.raw.partition(b"Reading blobs")
    assert shares(rows)
    assert shares(blobs)
    last = shown.raw.rpartition(b"\r\x1b[K")[2].decode()
    assert last.startswith(f"{_FILES} blobs, ")


def test_no_progress_if_a_log_is_wanted_or_nothing(buildidfs: BuildIdFs, small_tree: Path) -> None:
    for option in ("-v", "-q"):
        words = (*COMMAND, "--store", buildidfs.store, option, "scan", "tree", small_tree)
        assert b"\x1b[K" not in on_terminal(*words).raw
