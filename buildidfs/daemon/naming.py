# SPDX-License-Identifier: Apache-2.0
"""Files that name build IDs, of whatever kind: profiles, core files, binaries."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from buildidfs.errors import UsageError
from buildidfs.store.failures import show

if TYPE_CHECKING:
    from buildidfs.model import BuildId

_PERF: Final = (b"PERFILE2", b"2ELIFREP")
_ET_CORE: Final = 4

NAMES_NOTHING: Final = (
    "names no build ID: a profile of files that were followed gets them by buildidfs repair"
)
"""What is wrong with a file of which `build_ids_named` returns nothing, and what helps."""


def build_ids_named(path: bytes) -> set[BuildId]:
    """The build IDs that a profile of perf or a core file speaks of, or the one of a binary.

    Raises `UsageError` for what is none of these, or cannot be read.
    """
    try:
        if os.path.isdir(path):  # perf record --threads
            head = _PERF[0]
        else:
            with open(path, "rb") as file:
                head = file.read(18)
    except OSError as error:
        raise UsageError(f"cannot read {show(path)}: {error.strerror}") from error
    if head[:8] in _PERF:
        from buildidfs.daemon import profiles

        return profiles.build_ids_of(path)
    if head[:4] == b"\x7fELF":
        kind = int.from_bytes(head[16:18], "big" if head[5:6] == b"\2" else "little")
        if kind == _ET_CORE:
            from buildidfs.daemon import cores

            return cores.build_ids_of(path)
        return {_own(path)}
    raise UsageError(f"{show(path)} is neither a profile of perf, nor a core file, nor a binary")


def _own(path: bytes) -> BuildId:
    from buildidfs.capture import files
    from buildidfs.model import Absence

    with open(path, "rb") as file:
        found = files.identify(file.fileno())
    if isinstance(found, Absence):
        raise UsageError(f"{show(path)}: {found.value}")
    return found
