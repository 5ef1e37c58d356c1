# SPDX-License-Identifier: Apache-2.0
"""What a mount can be told, on the command line (``-o``) and in buildidfs.toml(5)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import msgspec

from buildidfs.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

READ_AHEAD_KIB = 1024
"""The largest request FUSE makes; what a reader of whole files gains most from."""

_ALWAYS = ("ro", "nosuid", "nodev", "noexec", "default_permissions")


class MountOptions(msgspec.Struct, frozen=True):
    """One mount. Paths are absolute; ``gdb_scripts`` is explained in buildidfs-mount(7).

    ``allow_other`` lets other users in (each only to what the mode of the original allows);
    ``loop`` chooses between `loop.FastLoop` and `loop.PlainLoop`; ``read_ahead_kib`` needs root.
    """

    store: bytes
    mountpoint: bytes
    allow_other: bool
    loop: Literal["fast", "plain"] = "fast"
    gdb_scripts: Literal["zero", "keep"] = "zero"
    read_ahead_kib: int = READ_AHEAD_KIB

    def for_fuse(self) -> set[str]:
        """The options in libfuse's words."""
        options = {"fsname=buildidfs", "subtype=buildidfs", *_ALWAYS}
        return options | {"allow_other"} if self.allow_other else options


def parse(
    store: str | bytes | os.PathLike[str],
    mountpoint: str | bytes | os.PathLike[str],
    options: Iterable[str] = (),
    gdb_scripts: str = "zero",
) -> MountOptions:
    """Options as people write them; raises `UsageError` naming the one that makes no sense.

    ``options`` are single ones, without commas; of two that contradict each other the later
    counts. Other users are let in by default when root mounts.
    """
    values: dict[str, object] = {
        "store": _absolute(store),
        "mountpoint": _absolute(mountpoint),
        "allow_other": os.geteuid() == 0,
        "gdb_scripts": gdb_scripts,
    }
    for option in options:
        name, equals, value = option.partition("=")
        if option in _ALWAYS:
            continue
        if option in ("allow_other", "noallow_other"):
            values["allow_other"] = option == "allow_other"
        elif equals and name in ("loop", "gdb_scripts"):
            values[name] = value
        elif equals and name == "read_ahead_kb" and value.isdecimal():
            values["read_ahead_kib"] = int(value)
        else:
            raise UsageError(f"no such mount option: {option} (see buildidfs-mount(7))")
    try:
        return msgspec.convert(values, MountOptions)
    except msgspec.ValidationError as error:
        raise UsageError(f"mount options: {error}") from error


def _absolute(path: str | bytes | os.PathLike[str]) -> bytes:
    return os.path.abspath(os.fsencode(path))
