# SPDX-License-Identifier: Apache-2.0
"""Options of a mount, on the command line (``-o``) and in buildidfs.toml(5)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import msgspec

from buildidfs.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

READ_AHEAD_KIB = 1024
"""The largest request of FUSE: a client that reads whole files gains most from it."""

_ALWAYS = ("ro", "nosuid", "nodev", "noexec")
_PERMISSIONS = "default_permissions"


class MountOptions(msgspec.Struct, frozen=True):
    """One mount. Paths are absolute; ``gdb_scripts`` is explained in buildidfs-mount(7).

    ``allow_other`` lets other users in (each only to what the mode of the original allows), and
    ``list_all`` lists for them what they may not read, too; ``loop`` chooses between
    `loop.FastLoop` and `loop.PlainLoop`; ``read_ahead_kib`` needs root. With ``bundle`` it is not a
    store but a bundle that ``store`` is the path of.
    """

    store: bytes
    mountpoint: bytes
    allow_other: bool
    list_all: bool = False
    loop: Literal["fast", "plain"] = "fast"
    gdb_scripts: Literal["zero", "keep"] = "zero"
    read_ahead_kib: int = READ_AHEAD_KIB
    bundle: bool = False

    def for_fuse(self) -> set[str]:
        """The options in libfuse's words."""
        options = {"fsname=buildidfs", "subtype=buildidfs", *_ALWAYS}
        # A user alone with a store could read its blobs as well.
        return options | {"allow_other", _PERMISSIONS} if self.allow_other else options


def parse(
    store: str | bytes | os.PathLike[str],
    mountpoint: str | bytes | os.PathLike[str],
    options: Iterable[str] = (),
    gdb_scripts: str = "zero",
    *,
    list_all: bool = False,
    bundle: bool = False,
) -> MountOptions:
    """Parse options of a command line; raises `UsageError` naming the wrong one.

    ``options`` are single ones, without commas; of two that contradict each other the later
    counts. Other users are let in by default when root mounts.
    """
    values: dict[str, object] = {
        "store": _absolute(store),
        "mountpoint": _absolute(mountpoint),
        "allow_other": os.geteuid() == 0,
        "gdb_scripts": gdb_scripts,
        "list_all": list_all,
        "bundle": bundle,
    }
    for option in options:
        name, equals, value = option.partition("=")
        if option in (*_ALWAYS, _PERMISSIONS):
            continue
        if option == "list_all":
            values["list_all"] = True
        elif option in ("allow_other", "noallow_other"):
            values["allow_other"] = option == "allow_other"
        elif equals and name in ("loop", "gdb_scripts"):
            values[name] = value
        elif equals and name == "read_ahead_kb" and value.isdecimal() and len(value) < 10:
            values["read_ahead_kib"] = int(value)
        else:
            raise UsageError(f"no such mount option: {option} (see buildidfs-mount(7))")
    try:
        return msgspec.convert(values, MountOptions)
    except (msgspec.ValidationError, UnicodeError) as error:  # of what is no text, too
        raise UsageError(f"mount options: {error}") from error


def _absolute(path: str | bytes | os.PathLike[str]) -> bytes:
    return os.path.abspath(os.fsencode(path))
