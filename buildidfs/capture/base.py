# SPDX-License-Identifier: Apache-2.0
"""The interface of scanners: ingest need not know which one is at work.

A scanner is an iterable of `Found`. It opens files itself (only it knows how: map_files, a
directory descriptor, process memory) and hands over the descriptor; from then on the place the
file came from may vanish. What was captured before is recognised through `Memo` without being
opened.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

import msgspec

from buildidfs.model import Absence, BuildId, FileIdentity, Kind, Origin, Sighting

if TYPE_CHECKING:
    from collections.abc import Callable


class Known(msgspec.Struct, frozen=True):
    """The result of an earlier look at exactly this file.

    ``build_id`` is None when it had none, and ``absence`` then says why.
    """

    build_id: BuildId | None = None
    absence: Absence | None = None


class Memo(Protocol):
    """The memory of earlier captures; `store.Store` provides it."""

    def recall(self, identity: FileIdentity) -> Known | None:
        """Return the earlier result for an unchanged file; None if it has to be read."""

    def knows_place(self, origin: Origin) -> bool:
        """Return True if the reach of a file at that place is known.

        `recall` knows the file, which has a build ID.
        """


class PinnedFile(msgspec.Struct):
    """A sighting plus an open, readable descriptor: the container may exit now.

    Use as a context manager, or call `close`. ``kind`` overrides what the bytes say (the vDSO
    and kallsyms); ``build_id`` is for bytes that do not carry one. ``is_copy`` says that no
    other process can write to what the descriptor reads.
    """

    sighting: Sighting
    fd: int
    kind: Kind | None = None
    build_id: BuildId | None = None
    is_copy: bool = False

    def close(self) -> None:
        """Let go of the file; safe to call twice."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __enter__(self) -> PinnedFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def reached(sighting: Sighting, reach: int) -> Sighting:
    """Return the sighting with `Origin.reach`, which takes time to find."""
    origin = msgspec.structs.replace(sighting.origin, reach=reach)
    return Sighting(origin, sighting.seen_ns)


class SeenAgain(msgspec.Struct, frozen=True):
    """A file that the memo knows: nothing to read, only the time of the sighting is new."""

    sighting: Sighting
    known: Known


def seen_again(
    memo: Memo, sighting: Sighting, known: Known, ask: Callable[[Sighting], Sighting]
) -> SeenAgain:
    """A file that the memo knows; ``ask`` adds its reach, which is found out once for a place."""
    if known.build_id is not None and not memo.knows_place(sighting.origin):
        sighting = ask(sighting)
    return SeenAgain(sighting, known)


class Unreadable(msgspec.Struct, frozen=True):
    """Something that could not be captured, and why, in words for a person.

    ``errno`` groups the reasons (0: not an operating system error); ``path`` names the file or
    process, raw bytes. ``build_id`` is what the kernel says of a mapped file, where it was asked.
    """

    path: bytes
    reason: str
    errno: int = 0
    build_id: BuildId | None = None


Found = PinnedFile | SeenAgain | Unreadable


class Progress(Protocol):
    """Hears now and then how far a command is.

    ``done`` is the number of items, ``what`` the path or the step at hand, ``size`` the bytes that
    were copied or read, and ``share`` the part of the whole, 0 to 1, if that is known.
    """

    def __call__(
        self, done: int, what: str, *, size: int = 0, share: float | None = None
    ) -> None: ...
