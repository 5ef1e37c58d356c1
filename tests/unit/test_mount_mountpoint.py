# SPDX-License-Identifier: Apache-2.0
"""buildidfs.mount.mountpoint: what -o takes."""

from __future__ import annotations

import os

import pytest

from buildidfs.errors import UsageError
from buildidfs.mount.mountpoint import READ_AHEAD_KIB, parse


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    options = parse("store", b"mnt/")

    assert options.store == os.path.abspath(b"store")
    assert options.mountpoint == os.path.abspath(b"mnt")
    assert not options.allow_other
    assert (options.loop, options.gdb_scripts) == ("fast", "zero")
    assert options.read_ahead_kib == READ_AHEAD_KIB
    assert options.for_fuse() == {
        "fsname=buildidfs", "subtype=buildidfs", "ro", "nosuid", "nodev", "noexec",
    }  # fmt: skip
    assert not options.list_all


def test_root_lets_others_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert parse("s", "m").for_fuse() >= {"allow_other", "default_permissions"}
    assert "allow_other" not in parse("s", "m", ["noallow_other"]).for_fuse()


@pytest.mark.parametrize("option", ["default_permissions", "ro", "nosuid", "nodev", "noexec"])
def test_other_users_are_always_checked(option: str) -> None:
    options = parse("s", "m", ["allow_other", option])
    assert options == parse("s", "m", ["allow_other"])
    assert option in options.for_fuse()


def test_names_for_everybody() -> None:
    assert not parse("s", "m").list_all
    assert parse("s", "m", ["list_all"]).list_all
    assert parse("s", "m", list_all=True).list_all
    assert parse("s", "m", ["list_all"]).for_fuse() == parse("s", "m").for_fuse()


def test_the_later_option_counts() -> None:
    options = parse("s", "m", ["noallow_other", "loop=fast", "allow_other", "loop=plain", "ro"])
    assert options.allow_other
    assert options.loop == "plain"
    assert parse("s", "m", ["gdb_scripts=keep"], "zero").gdb_scripts == "keep"
    assert parse("s", "m", [], "keep").gdb_scripts == "keep"
    assert parse("s", "m", ["read_ahead_kb=128"]).read_ahead_kib == 128


@pytest.mark.parametrize(
    "option", ["rw", "loop", "loop=", "loop=slow", "gdb_scripts=no", "read_ahead_kb=-1",
               "read_ahead_kb=many", "read_ahead_kb=" + "9" * 5000, "max_read=4096", "",
               "allow_other=1", "loop=\udce3", "list_all=1"],
)  # fmt: skip
def test_wrong_option_is_named(option: str) -> None:
    with pytest.raises(UsageError, match="mount option"):
        parse("s", "m", [option])
