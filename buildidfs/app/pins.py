# SPDX-License-Identifier: Apache-2.0
"""Build IDs to be pinned, as people write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from buildidfs.errors import ArtifactMissing, InvalidBuildId
from buildidfs.model import BuildId

if TYPE_CHECKING:
    from buildidfs.store import Store

_LEAST_DIGITS: Final = 16


def build_id(store: Store, text: str) -> BuildId:
    """A build ID that the store knows by its beginning, or one in full that it may get to know.

    Raises `InvalidBuildId`, `AmbiguousBuildId`.
    """
    try:
        return store.index.match(text)
    except ArtifactMissing:
        if len(text) < _LEAST_DIGITS:
            raise InvalidBuildId(
                f"nothing is known of build ID {text}: what is not here yet has to be given in full"
            ) from None
        return BuildId.from_hex(text.lower())
