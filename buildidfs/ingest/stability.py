# SPDX-License-Identifier: Apache-2.0
"""Did a file change, and can it change without a trace? The only place that decides.

A blob must have bytes that the file had at one moment, and a file that the store remembers must not
change unnoticed. Four checks do that; attacks have shown that none of them can be left out.

1. **Identity before and after the copy** (`staging.take`). It differs if a write began meanwhile;
   then the copy may be half old and half new, with either build ID, and is dropped. The clock of a
   filesystem ticks 100 times per second or more: a second write within the tick of the first leaves
   no trace in the times. So a file is staged only after the tick of its last change (`premature`).
2. **A read lease** shows a writer. The times show when a write began, not when it ended, and they
   do not show stores through a mapping into a page that is dirty already. A file with a writer is
   tried later, until it has not changed for a second. If the writer is still there, the file is
   captured, but read twice (`equals`), and it is not remembered (`is_fixed`), because its bytes may
   change while its identity stays the same. Each later scan reads it, until the writer is gone.
3. **Inode, change time and size when a blob is opened** (`store/blobs/verify`): if they are not
   those of its row, the whole blob is read. While a blob is open, its mtime shows writes
   (`Blob.was_written`).
4. **The monthly scrub** (`store/fsck/scrub`) reads everything: a disk changes bytes without times.

The store also remembers no file that changed less than two seconds before it was read
(`store/write/transaction`), because the times of a network filesystem come from another clock.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.linux import file_ops
from buildidfs.model import Kind

if TYPE_CHECKING:
    from buildidfs.capture.base import PinnedFile
    from buildidfs.model import Digest, FileIdentity
    from buildidfs.store import Store

WRITTEN_TO: Final = "a process keeps writing to it"
"""The reason with ETXTBSY for a file that may be captured later."""

_NEW: Final = "it changed a moment ago"


class StabilityLimits(msgspec.Struct, frozen=True):
    """Times in seconds.

    ``tick`` is longer than a tick of any filesystem's clock. ``pause`` lets a writer continue
    between two reads. A file that is open for writing counts as at rest ``rest`` after its last
    change, because a write takes as long as the disk makes it wait. If the kernel does not report
    writers, writes that began ``writing`` ago count as done. A scan tries a file again for
    ``patience``.
    """

    tick: float = 0.02
    pause: float = 0.05
    rest: float = 1.0
    writing: float = 60.0
    patience: float = 1.5


limits = StabilityLimits()


def premature(pinned: PinnedFile) -> tuple[float, str]:
    """Return the seconds until staging of a file may begin, and the reason for the delay if that
    may last. Zero means now. Raises OSError.
    """
    if is_own_copy(pinned):
        return 0.0, ""
    age = _age(os.fstat(pinned.fd).st_ctime_ns)
    if 0 <= age < limits.rest and file_ops.has_writer(pinned.fd):
        return limits.pause, WRITTEN_TO
    return (max(limits.tick - age, 0.0) if age >= 0 else 0.0), ""


def has_writer(pinned: PinnedFile, identity: FileIdentity) -> bool:
    """Return True if a process may be writing to the file."""
    if is_own_copy(pinned):
        return False
    known = file_ops.has_writer(pinned.fd)
    return _age(identity.ctime_ns) < limits.writing if known is None else known


def equals(store: Store, fd: int, digest: Digest) -> bool:
    """Return True if a file that may have a writer still has the bytes with ``digest``. Raises
    OSError.
    """
    time.sleep(limits.pause)
    return store.digest_of(fd) == digest


def is_fixed(pinned: PinnedFile, identity: FileIdentity) -> bool:
    """Return True if the file cannot change without a change of its identity.

    If the kernel does not report writers, a file counts as fixed a minute after its last change: by
    then a disk filesystem has written the dirty pages back, and the next store through a mapping
    changes the times.
    """
    if is_own_copy(pinned):
        return True
    known = file_ops.has_no_writer(pinned.fd)
    return _age(identity.ctime_ns) >= limits.writing if known is None else known


def is_own_copy(pinned: PinnedFile) -> bool:
    """Return True if the descriptor is of a copy that the scanner made."""
    return pinned.kind in (Kind.VDSO, Kind.KALLSYMS) or pinned.is_copy


def _age(changed_ns: int) -> float:
    return (time.time_ns() - changed_ns) / 1e9
