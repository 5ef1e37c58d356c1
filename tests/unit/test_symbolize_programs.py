# SPDX-License-Identifier: Apache-2.0
"""Which of several symbolizers that are installed is asked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from buildidfs.errors import UsageError
from buildidfs.symbolize import programs
from tests.support.clients.commands import script


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory of PATH."""
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    return tmp_path


def of_version(path: Path, version: str) -> str:
    """A program that tells its version as those of LLVM do."""
    return os.fspath(script(path, f"echo 'Debian LLVM version {version}'"))


def test_the_newest(installed: Path) -> None:
    of_version(installed / "llvm-symbolizer", "14.0.6")
    of_version(installed / "llvm-symbolizer-9", "9.0.1")
    of_version(installed / "llvm-symbolizer-15", "15.0.7")
    newest = of_version(installed / "llvm-symbolizer-19", "19.1.7")
    assert programs.find() == ("llvm-symbolizer", newest)
    newest = of_version(installed / "llvm-symbolizer", "21.1.0")
    assert programs.find() == ("llvm-symbolizer", newest)
    assert programs.find("llvm-symbolizer") == ("llvm-symbolizer", newest)


def test_a_version_in_the_place_where_it_is_installed(installed: Path) -> None:
    """No program is run for it."""
    real = script(installed / "lib/llvm-20/bin/llvm-symbolizer", "exit 9")
    (installed / "llvm-symbolizer").symlink_to(real)
    of_version(installed / "llvm-symbolizer-19", "19.1.7")
    assert programs.find()[1] == os.fspath(installed / "llvm-symbolizer")


def test_one_that_does_not_tell_its_version(installed: Path) -> None:
    silent = os.fspath(script(installed / "llvm-symbolizer", "exit 1"))
    assert programs.find() == ("llvm-symbolizer", silent)
    known = of_version(installed / "llvm-symbolizer-14", "14.0.6")
    assert programs.find() == ("llvm-symbolizer", known)


def test_one_that_is_too_old(installed: Path) -> None:
    of_version(installed / "llvm-symbolizer", "11.0.1")
    of_version(installed / "llvm-symbolizer-12", "12.0.1")
    other = os.fspath(script(installed / "eu-addr2line"))
    assert programs.find() == ("eu-addr2line", other)


def test_the_version_that_is_asked_for(installed: Path) -> None:
    of_version(installed / "llvm-symbolizer-19", "19.1.7")
    older = of_version(installed / "llvm-symbolizer-14", "14.0.6")
    assert programs.find("llvm-symbolizer-14") == ("llvm-symbolizer", older)
    with pytest.raises(UsageError, match="llvm-symbolizer-17 is not installed"):
        programs.find("llvm-symbolizer-17")
    with pytest.raises(UsageError, match="eu-addr2line is not installed"):
        programs.find("eu-addr2line")


@pytest.mark.parametrize("path", [".", "", ":", "bin:."])
def test_no_program_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """It may be one that a stranger has put there, and is elsewhere for a program in /."""
    of_version(tmp_path / "llvm-symbolizer", "19.1.7")
    of_version(tmp_path / "bin/llvm-symbolizer", "19.1.7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", path)
    with pytest.raises(UsageError, match="neither llvm-symbolizer nor eu-addr2line"):
        programs.find()
    monkeypatch.setenv("PATH", f"{path}:{tmp_path}")
    assert programs.find()[1] == os.fspath(tmp_path / "llvm-symbolizer")
