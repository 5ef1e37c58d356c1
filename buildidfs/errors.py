# SPDX-License-Identifier: Apache-2.0
"""All errors that a caller may see, with their exit codes.

    BuildIdFsError                  1   a fault of the program itself
    ├── UsageError                  2   the request makes no sense as given
    │   ├── InvalidBuildId          2   not a build ID: not hex, too short, too long
    │   └── AmbiguousBuildId        2   a prefix that several build IDs share
    ├── IncompleteError             3   finished, but some inputs could not be read
    ├── StoreError                 10   the store cannot do what was asked
    │   ├── StoreMissing           11   no store at that place
    │   ├── StoreLocked            12   another process holds it in a way that excludes this one
    │   ├── StoreVersionError      13   written by a newer (or unknown) format
    │   ├── StoreFull              14   the filesystem or the quota is full
    │   │   └── Recapturable       14   no room for a recapturable file
    │   └── StoreDamaged           10   its index cannot be used any more
    ├── IntegrityError             20   bytes or rows are not what they were when written
    ├── ArtifactMissing            30   nothing is known, or kept, under that build ID
    ├── MountError                 40   mounting, serving or unmounting failed
    ├── RemoteError                50   the object storage of the fleet, or a server, cannot be used
    │   ├── RemoteUnavailable      50   it does not answer now; a later attempt may succeed
    │   ├── RemoteDenied           50   it refuses all requests: keys, rights, or a missing bucket
    │   ├── RemoteDamaged          50   its filter, or another object of ours in it, is damaged
    │   └── RemoteRefused          50   it refuses one file
    ├── UpstreamError              50   no server could be asked for what the store lacks
    └── CapabilityError            60   a privilege is missing; the message says which

``status`` also exits with 4 (`DEGRADED`) and 5 (`LOSING`), which are not errors.

A process ended by signal N exits with 128+N; `Interrupted` is outside of the tree. Codes are part
of the interface, because scripts rely on them: a class may be added, but a number never gets
another meaning. The mapping to exit codes happens once, in ``cli/main``; to errno once, in
``mount/operations``.

If a file is not ELF or has no build ID, that is an answer (`model.Absence`), not an error.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

DEGRADED: Final = 4
"""An exit code of ``status``: the programs run, but may miss some captures."""
LOSING: Final = 5
"""An exit code of ``status``: the programs run, and have just lost files."""


class Interrupted(KeyboardInterrupt):
    """The user has ended a command that leaves a partial result; ``str()`` describes this result.

    ``kept`` is the number of files that were captured.
    """

    def __init__(self, left: str, kept: int = 0) -> None:
        super().__init__(left)
        self.kept = kept


class BuildIdFsError(Exception):
    """Base of all errors raised on purpose; ``str()`` is one line meant for the user."""

    exit_code: ClassVar[int] = 1


class UsageError(BuildIdFsError):
    """The request makes no sense as given."""

    exit_code = 2


_SYSTEM_PACKAGES: Final = {
    "mount": "apt install fuse3 libfuse3-dev python3-dev gcc pkg-config, then pip builds it"
}
"""Packages of Debian that an extra needs besides those of Python."""


@contextlib.contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Raise `UsageError` if a Python package of an extra cannot be imported in the block."""
    try:
        yield
    except ImportError as error:
        reason = f"the Python package {error.name} is missing"
        if not isinstance(error, ModuleNotFoundError):  # a shared library is missing
            reason = str(error)
        more = f" ({_SYSTEM_PACKAGES[extra]})" if extra in _SYSTEM_PACKAGES else ""
        raise UsageError(f"{reason}: install buildidfs[{extra}]{more}") from error


class InvalidBuildId(UsageError):
    """The text or bytes given are not a build ID."""


class AmbiguousBuildId(UsageError):
    """The prefix given is shared by several build IDs."""


class IncompleteError(BuildIdFsError):
    """The work is done, but some of its inputs could not be read."""

    exit_code = 3


class StoreError(BuildIdFsError):
    """The store cannot do what was asked."""

    exit_code = 10


class StoreMissing(StoreError):
    """There is no store at the given place."""

    exit_code = 11


class StoreLocked(StoreError):
    """Another process uses the store in a way that excludes this one."""

    exit_code = 12


class StoreVersionError(StoreError):
    """The store was written in a format that this version does not read."""

    exit_code = 13


class StoreFull(StoreError):
    """No room left on the store's filesystem, or in the quota that covers it."""

    exit_code = 14


class Recapturable(StoreFull):
    """The store has no room for a recapturable file."""


class StoreDamaged(StoreError):
    """The index of the store cannot be used; a new one can be made from the blobs."""


class IntegrityError(BuildIdFsError):
    """Bytes or rows are not what they were when they were written."""

    exit_code = 20


class ArtifactMissing(BuildIdFsError):
    """Nothing is known, or kept, under the given build ID."""

    exit_code = 30


class MountError(BuildIdFsError):
    """Mounting, serving a mount, or unmounting failed."""

    exit_code = 40


class RemoteError(BuildIdFsError):
    """The object storage of the fleet, or a server that is pushed to, cannot be used."""

    exit_code = 50


class RemoteUnavailable(RemoteError):
    """The storage or server does not answer now; a later attempt may succeed."""


class RemoteDenied(RemoteError):
    """The storage or server refuses requests until an operator changes something."""


class RemoteRefused(RemoteError):
    """The server refuses one file, and says why."""


class RemoteDamaged(RemoteError):
    """An object that this program has written to the bucket is not as it was written."""


class UpstreamError(BuildIdFsError):
    """No server could be asked for what the store lacks."""

    exit_code = 50


class CapabilityError(BuildIdFsError):
    """A privilege is missing; the message names it and the way to get it."""

    exit_code = 60
