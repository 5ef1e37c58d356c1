# SPDX-License-Identifier: Apache-2.0
"""What is to be pinned: build IDs as people write them, and those that a file speaks of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from buildidfs.errors import ArtifactMissing, InvalidBuildId, UsageError
from buildidfs.model import BuildId
from buildidfs.store.failures import show

if TYPE_CHECKING:
    from buildidfs.store import Store

_LEAST_DIGITS: Final = 16


def build_id(store: Store, text: str) -> BuildId:
    """A build ID that the store knows by its beginning, or one in full that it may get to know.

    Raises `InvalidBuildId`, `AmbiguousBuildId`.
    """
    try:
        return store.match(text)
    except ArtifactMissing:
        if len(text) < _LEAST_DIGITS:
            raise InvalidBuildId(
                f"nothing is known of build ID {text}: what is not here yet has to be given in full"
            ) from None
        return BuildId.from_hex(text.lower())


def build_ids_of(path: bytes) -> list[BuildId]:
    """The build IDs that a profile of perf(1) or a core file names, in order; of a binary its own.

    Raises `UsageError` for what is none of these, names none, or cannot be read.
    """
    from buildidfs.daemon import naming

    found = naming.build_ids_named(path)
    if not found:
        raise UsageError(f"{show(path)} {naming.NAMES_NOTHING}")
    return sorted(found)
