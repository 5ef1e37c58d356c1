# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.ownership: files that others may change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from buildidfs.linux import ownership
from tests.support.children import needs_root

pytestmark = needs_root("gives files to other users")

USER = 4242


@pytest.mark.parametrize(
    ("uid", "gid", "mode", "clause", "command"),
    [
        (0, 0, 0o644, "", ""),
        (0, 0, 0o664, "", ""),
        (0, USER, 0o644, "", ""),
        (USER, USER, 0o600, f"belongs to user {USER}", "chown 0"),
        (0, USER, 0o664, f"may be changed by group {USER}", "chmod g-w"),
        (0, 0, 0o646, "may be changed by all users", "chmod go-w"),
    ],
)
def test_others_who_may_change_a_file_are_named(
    tmp_path: Path, uid: int, gid: int, mode: int, clause: str, command: str
) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    file.chmod(mode)
    os.chown(file, uid, gid)
    assert ownership.weakness(file.stat()) == (clause, command)
    if not clause:
        assert ownership.read_own(file, 10) == b"x"
        return
    with pytest.raises(PermissionError, match=f"{clause}: {command} {file}"):
        ownership.read_own(file, 10)


def test_user_of_sudo_is_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    os.chown(file, USER, USER)
    file.chmod(0o664)
    monkeypatch.setenv("SUDO_UID", str(USER))
    assert ownership.weakness(file.stat()) == ("", "")
    monkeypatch.setenv("SUDO_UID", str(USER + 1))
    assert ownership.weakness(file.stat()) != ("", "")


def test_no_more_is_read_than_requested(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"xyz")
    assert ownership.read_own(file, 2) == b"xy"
