# SPDX-License-Identifier: Apache-2.0
"""Files that this host can give back: it still has the same file, or the package file with it."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.linux import machine, namespaces, statx
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import Trust, archive_scope
from buildidfs.store.index.locations import IN_USE, Journal
from buildidfs.store.index.place_shares import APART_MNT

if TYPE_CHECKING:
    from buildidfs.model import FileIdentity, Origin
    from buildidfs.store.index.environment import Environment
    from buildidfs.store.values import OriginRecord

#: The number of a blob's latest places at which statx(2) looks for its file.
MOST_PLACES: Final = 16

#: Permission bits by which users other than the owner can change a file.
_OTHERS_WRITE: Final = 0o022

#: A file in use that was made within this time may be gone in a moment.
_FRESH_NS: Final = 3600 * 1_000_000_000

#: A blob of a file in use that was made within this time does not count as recapturable: builds run
#: programs and delete them, and the blob of such a program would make room while its file is there.
_NEW_NS: Final = 120 * 1_000_000_000


def recapturable_at(places: list[OriginRecord]) -> str | None:
    """Return the place at which the host still has bytes that were seen at these places.

    The result is None if no such place is known, or if a file was just made at all of them.
    """
    believed = [each.origin for each in places if each.origin.trust >= Trust.PACKAGE]
    lasting = (origin for origin in believed[:MOST_PLACES] if not _is_recent(origin, _NEW_NS))
    return next(filter(None, map(recapturable, lasting)), None)


def recapturable(origin: Origin) -> str | None:
    """Return the place at which the host has the file of an origin; None if it may be gone.

    statx(2) is called for trusted places only, and no file is opened.
    """
    seen = origin.identity
    # Symbols unpacked from an executable have its identity, except for these fields.
    is_part = seen.scope is None and origin.trust is Trust.PACKAGE
    if origin.archive:
        now = _identity(origin.archive)
        if now is not None and (is_part or archive_scope(now) == seen.scope):
            return "a package has it"
    elif origin.host == machine.host_name() and (
        origin.trust is Trust.HOST or (is_part and not origin.container)
    ):
        now = _identity(origin.path)
        if now is not None and is_part:
            now = msgspec.structs.replace(now, scope=None, mode=now.mode & ~0o111)
        return "this host has it" if now == seen else None
    return None


def recapturable_place(env: Environment, origin: Origin) -> str | None:
    """Return the place at which the host has the file of an origin; None if it may be gone."""
    return recapturable(origin) or _in_another_namespace(env, origin)


def is_spare(env: Environment, origin: Origin) -> bool:
    """Return True if the host has the file of an origin, and did not just make it."""
    return not _is_recent(origin, _NEW_NS) and bool(recapturable_place(env, origin))


def is_fresh(origin: Origin) -> bool:
    """Return True for a file that was seen in use within an hour after it was made."""
    return _is_recent(origin, _FRESH_NS)


def _is_recent(origin: Origin, most_ns: int) -> bool:
    is_young = time.time_ns() - origin.identity.ctime_ns < most_ns
    return is_young and origin.scanner in IN_USE and not origin.archive


def _in_another_namespace(env: Environment, origin: Origin) -> str | None:
    """Return the place at which the host has a file that was seen in another mount namespace.

    The result is None if the journal has no row for the file. Services with a mount namespace of
    their own, and containers that were given directories of the host, run the host's files. A
    sighting in such a namespace is not believed. The path must have been seen in the host's own
    mount namespace and omitted for lack of room, and statx(2) must find the same inode there.
    """
    seen = origin.identity
    if not origin.apart & APART_MNT or origin.host != machine.host_name():
        return None
    if seen.uid or seen.mode & _OTHERS_WRITE:
        return None
    for row in Journal(env).at(_host_mnt_ns_id(), origin.path, statx.boot_id()):
        is_hosts = row.host == origin.host and not row.apart & APART_MNT
        # The scope names the mount, and each namespace has mounts of its own.
        if (
            row.omitted is not None
            and is_hosts
            and _without_scope(row.omitted) == _without_scope(seen)
        ):
            return "this host has it" if _identity(row.path) == row.omitted else None
    return None


def _without_scope(identity: FileIdentity) -> FileIdentity:
    return msgspec.structs.replace(identity, scope=None)


@functools.cache
def _host_mnt_ns_id() -> int:
    """Return `Origin.mnt_ns_id` of the host's mount namespace; 0 if unknown."""
    try:
        fd, number = namespaces.open_initial_root()
    except OSError:
        return 0
    os.close(fd)
    return number


def _identity(path: bytes) -> FileIdentity | None:
    """Return the identity of the file at a path of the host, if it is unambiguous."""
    with contextlib.suppress(OSError, ValueError):
        # Network filesystems are not asked: one that does not answer must not delay captures.
        with closing_fd(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            now = statx.identity_at(fd, path, follow=False, ask=False)
        if now.scope is not None:
            return now
    return None
