# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.ownership: files that others may change."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from buildidfs.linux import ownership
from tests.support.harness.children import needs_root

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


def test_file_that_others_may_replace_is_named_with_the_directory(tmp_path: Path) -> None:
    above = tmp_path / "above"
    (above / "inner").mkdir(parents=True)
    file, link = above / "inner/file", tmp_path / "link"
    file.write_text("x")
    link.symlink_to(file)
    assert (ownership.weak_place(file), ownership.weak_place(link)) == (None, None)
    above.chmod(0o777)
    for path in (file, link, above / "inner"):
        assert ownership.weak_place(path) == (
            f"is in {above}, which may be changed by all users: chmod go-w {above}"
        )
        if path.is_file():
            with pytest.raises(PermissionError, match=f"it is in {above}, which"):
                ownership.read_own(path, 10)
    above.chmod(0o1777)  # as /tmp
    assert ownership.weak_place(file) is None
    os.chown(above, USER, 0)
    assert ownership.weak_place(file).startswith(f"is in {above}, which belongs to user {USER}")


@pytest.mark.parametrize(
    ("entry", "name"), [((0x02, 6, USER), f"user {USER}"), ((0x08, 2, USER), f"group {USER}")]
)
def test_writers_in_an_access_control_list_are_named(
    tmp_path: Path, entry: tuple[int, int, int], name: str
) -> None:
    def acl(*named: tuple[int, int, int], mask: int = 7) -> bytes:
        entries = [(0x01, 6, 0xFFFFFFFF), *named, (0x04, 4, 0xFFFFFFFF), (0x10, mask, 0xFFFFFFFF)]
        entries.append((0x20, 4, 0xFFFFFFFF))
        return struct.pack("<I", 2) + b"".join(
            struct.pack("<HHI", *each) for each in sorted(entries)
        )

    file = tmp_path / "file"
    file.write_text("x")
    os.setxattr(file, "system.posix_acl_access", acl(entry))
    assert name in ownership.weak_place(file)
    with pytest.raises(PermissionError, match=f"{name} in its access control list: setfacl -b"):
        ownership.read_own(file, 10)
    os.setxattr(file, "system.posix_acl_access", acl(entry, mask=5))
    assert ownership.weak_place(file) is None
    os.setxattr(file, "system.posix_acl_access", acl((entry[0], 6, 0)))
    assert ownership.weak_place(file) is None
