# SPDX-License-Identifier: Apache-2.0
"""What a store keeps: the settings as a policy."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

from buildidfs import config
from buildidfs.errors import BuildIdFsError
from buildidfs.model import Absence

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.config import RetentionSettings, Settings
    from buildidfs.model import BuildId, Digest
    from buildidfs.store import Store
    from buildidfs.store.retention.policy import Policy

# What is kept free where nothing is said: journald keeps that (or 15 %), and so do others.
_FREE_SHARE: Final = 0.05
_FREE_BYTES: Final = 4 << 30


def policy(settings: RetentionSettings, store_path: str | bytes | os.PathLike[str]) -> Policy:
    """The policy that settings mean for a store, whose filesystem is asked for its size.

    Without ``keep_free`` a twentieth of the filesystem is kept free, 4 GiB at most, as far as it is
    the store that would take it: what others take costs no captures. Raises `UsageError`.
    """
    from buildidfs.store.retention.policy import Policy

    usage = os.statvfs(store_path)
    total = usage.f_blocks * usage.f_frsize

    def size(value: int | str) -> int:
        limit = config.limit(value)
        return limit.bytes + int(limit.share * total)

    asked = settings.keep_free
    keep_free = min(int(total * _FREE_SHARE), _FREE_BYTES) if asked is None else size(asked)
    return Policy(
        max_size=None if settings.max_size is None else size(settings.max_size),
        keep_free=keep_free,
        yields=asked is not None,
        max_age=None if settings.max_age is None else config.seconds(settings.max_age),
        min_age=config.seconds(settings.min_age),
    )


def retain(store: Store, settings: Settings) -> None:
    """Let a store make room for what is captured, as the settings say."""
    kept = settings.retention
    # What nobody has asked for is not worth what it takes to find out that there is nothing to do.
    always = kept != config.RetentionSettings()
    store.retain(lambda: policy(kept, store.path), altlinks(store), always=always)


def altlinks(store: Store) -> Callable[[Digest], BuildId | None]:
    """What tells of the blob of a debug file the build ID of the dwz file it needs."""

    def altlink(digest: Digest) -> BuildId | None:
        from buildidfs.capture import elf_file

        with contextlib.suppress(BuildIdFsError, OSError):
            with store.blobs.open(digest) as blob:
                described = elf_file.describe(blob.fileno())
            if not isinstance(described, Absence) and described.altlink is not None:
                return described.altlink.build_id
        return None

    return altlink
