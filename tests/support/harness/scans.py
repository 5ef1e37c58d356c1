# SPDX-License-Identifier: Apache-2.0
"""What scanners are given and give, without a store around them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator

import msgspec

from buildidfs.capture.base import Found, Known, PinnedFile, Resighting, Unreadable
from buildidfs.formats.elf import identify
from buildidfs.linux import namespaces
from buildidfs.model import Absence, BuildId, FileIdentity, NamespaceSet, Origin
from tests.support.filesystems.filereader import FileReader


class Memory(dict[FileIdentity, Known]):
    """A memo in memory; ``asked`` are the files that a scanner asked for, in order."""

    def __init__(self, known: dict[FileIdentity, Known] | None = None) -> None:
        super().__init__(known or {})
        self.asked: list[FileIdentity] = []

    def recall(self, identity: FileIdentity) -> Known | None:
        """What is in the dictionary."""
        self.asked.append(identity)
        return self.get(identity)

    def knows_place(self, origin: Origin) -> bool:
        """So that nobody asks for it."""
        return True

    def debug_link(self, build_id: BuildId) -> None:
        """It remembers no names of debug files."""


class Seen(msgspec.Struct):
    """A pinned file that was read to its end and closed."""

    pinned: PinnedFile
    data: bytes

    @property
    def path(self) -> bytes:
        """Where it was, as its users saw it."""
        return self.pinned.sighting.origin.path


class Scan(msgspec.Struct):
    """Everything one pass yielded, sorted by kind."""

    pinned: list[Seen]
    again: list[Resighting]
    unreadable: list[Unreadable]

    def data(self, path: str | bytes | os.PathLike[str]) -> bytes:
        """The bytes of the only file pinned at ``path``."""
        (only,) = [seen for seen in self.pinned if seen.path == os.fsencode(path)]
        return only.data

    def paths(self) -> list[bytes]:
        """The paths of all pinned files, in order."""
        return [seen.path for seen in self.pinned]


def scan(found: Iterable[Found]) -> Scan:
    """Run a scanner to its end, reading and closing what it pins."""
    result = Scan([], [], [])
    for item in found:
        if isinstance(item, PinnedFile):
            with item:
                result.pinned.append(Seen(item, _content(item.fd)))
        elif isinstance(item, Resighting):
            result.again.append(item)
        else:
            result.unreadable.append(item)
    return result


def _content(fd: int) -> bytes:
    chunks = []
    offset = 0
    while chunk := os.pread(fd, 1 << 20, offset):  # the file offset may be anywhere
        chunks.append(chunk)
        offset += len(chunk)
    return b"".join(chunks)


def remember(memory: Memory, result: Scan, build_id: bytes | None = None) -> None:
    """Let a memo know what a scan pinned: what the bytes say, or one build ID for all of it."""
    for seen in result.pinned:
        known = seen.pinned.build_id if build_id is None else BuildId(build_id)
        answer = known or identify.identify(seen.data[: identify.HEAD_SIZE], FileReader(seen.data))
        memory[seen.pinned.sighting.origin.identity] = (
            Known(absence=answer) if isinstance(answer, Absence) else Known(answer)
        )


def own_namespaces() -> NamespaceSet:
    """Ours, for a scanner to take for the host's (``initial``): tests may run in a container."""
    return namespaces.of_pid(os.getpid())


def open_descriptors() -> int:
    """How many descriptors this process has open, to be compared with a later count."""
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Fail if the block leaves a thread or a descriptor.

    What an earlier module of this process has left may end meanwhile.
    """
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    yield
    assert not set(threading.enumerate()) - threads
    assert open_descriptors() <= descriptors


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Root reads everything, so be another user in this block."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(1000)
    try:
        yield
    finally:
        os.seteuid(0)
