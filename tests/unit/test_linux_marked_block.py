# SPDX-License-Identifier: Apache-2.0
"""Marked lines in files of other programs: written once, and removed without a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildidfs.errors import UsageError
from buildidfs.linux.marked_block import Block


def block(path: Path, text: str = "set answer 42\n", name: str = "ours") -> Block:
    return Block(str(path), name, "ours --undo", text)


@pytest.mark.parametrize("before", [None, "", "set a 1\n", "set a 1", "\n\n", "a\r\nb\r\n"])
def test_undo_gives_back_the_same_bytes(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "rc"
    if before is not None:
        path.write_bytes(before.encode())
    assert block(path).write()
    assert not block(path).write()
    assert block(path, "set answer 43\n").write()
    assert path.read_text().count("set answer") == 1
    assert "set answer 43\n" in path.read_text()
    assert block(path).remove()
    assert not block(path).remove()
    expected = None if before is None else before.encode()
    assert (path.read_bytes() if path.exists() else None) == expected
    assert [each.name for each in tmp_path.iterdir()] == ["rc"] * path.exists()


def test_lines_of_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "rc"
    block(path, name="other").write()
    block(path).write()
    path.write_text(path.read_text() + "set later 1\n")
    block(path).remove()
    assert path.read_text() == block(path, name="other").marked(" and this file") + "set later 1\n"


def test_symbolic_link_and_mode_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "rc"
    target.write_text("set a 1\n")
    target.chmod(0o600)
    link.symlink_to("target")
    block(link).write()
    assert link.is_symlink()
    assert "set answer" in target.read_text()
    assert target.stat().st_mode & 0o777 == 0o600


@pytest.mark.root
def test_file_that_others_may_change_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(UsageError, match="may be changed by all users"):
        block(home / "rc").write()
    assert not list(home.iterdir())
    (home / "rc").symlink_to("/etc/hostname")
    with pytest.raises(UsageError, match="may be changed by all users"):
        block(home / "rc").write()
