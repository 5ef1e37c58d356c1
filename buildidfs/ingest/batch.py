# SPDX-License-Identifier: Apache-2.0
"""What goes into the index together, for one scan as for one that never ends."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from msgspec.structs import replace

from buildidfs.model import Sighting
from buildidfs.store import NewAbsence, NewCapture, NewSeen, Staged

# Enough to be worth a transaction: an fsync or two for each file, one for all rows.
BATCH_FILES: Final = 128
BATCH_BYTES: Final = 256 << 20
# Rows without bytes cost next to nothing each.
BATCH_ROWS: Final = 4096

Job = TypeVar("Job")


class WithMini(NewCapture, frozen=True, kw_only=True):
    """A capture of an executable, and one of the debuginfo that was in it (`minidebug`)."""

    mini: NewCapture


class Batch(Generic[Job]):
    """Captures to be committed, and the job that each came from."""

    __slots__ = ("absent", "captures", "most", "seen", "size")

    def __init__(self, most: int | None = None) -> None:
        """``most`` bytes are staged for it at a time, if that is less than usual."""
        self.most = most
        self.captures: list[tuple[NewCapture, Job]] = []
        self.absent: list[NewAbsence] = []
        self.seen: list[NewSeen] = []
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self.captures or self.absent or self.seen)

    def add(self, capture: NewCapture, job: Job) -> None:
        """Take in one capture; ``size`` counts the bytes that were staged for it."""
        self.captures.append((capture, job))
        for each in _parts(capture):
            if isinstance(each.content, Staged):
                self.size += each.content.size

    def contents(self) -> list[NewCapture]:
        """What to commit: the captures in their order, and then what came out of some of them."""
        captures = [capture for capture, _ in self.captures]
        return captures + [each.mini for each in captures if isinstance(each, WithMini)]

    def is_full(self) -> bool:
        """Whether enough has come together to be worth a transaction."""
        return (
            len(self.captures) >= BATCH_FILES
            or self.size >= min(BATCH_BYTES, self.most or BATCH_BYTES)
            or len(self.absent) + len(self.seen) >= BATCH_ROWS
        )

    def split(self, limit: int) -> Batch[Job]:
        """Take out the first captures, ``limit`` at most, and everything that is absent."""
        first: Batch[Job] = Batch()
        taken, self.captures = self.captures[:limit], self.captures[limit:]
        for capture, job in taken:
            first.add(capture, job)
        first.absent, self.absent = self.absent, []
        first.seen, self.seen = self.seen, []
        self.size -= first.size
        return first


def at_another_place(capture: NewCapture, sighting: Sighting) -> NewCapture:
    """The capture of the same file seen elsewhere, whose bytes the store has by now."""
    content = capture.content
    origin = replace(sighting.origin, identity=capture.sighting.origin.identity)
    fields = {name: getattr(capture, name) for name in NewCapture.__struct_fields__}
    fields["sighting"] = Sighting(origin, sighting.seen_ns)
    fields["content"] = content.digest if isinstance(content, Staged) else content
    return NewCapture(**fields)


def discard(capture: NewCapture) -> None:
    """Let go of what was staged for a capture that is not committed."""
    for each in _parts(capture):
        if isinstance(each.content, Staged):
            each.content.close()


def _parts(capture: NewCapture) -> tuple[NewCapture, ...]:
    return (capture, capture.mini) if isinstance(capture, WithMini) else (capture,)
