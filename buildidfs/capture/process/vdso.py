# SPDX-License-Identifier: Apache-2.0
"""The vDSO: an ELF file that exists only in memory, and that perf wants under a name of its own.

The kernel maps it into every process, the same pages for all processes of one word size, so it is
read once from our own memory, and from the first process met of another size.
"""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING, Final

from buildidfs.capture.base import Memo, PinnedFile, SeenAgain
from buildidfs.capture.elf_file import memory_file
from buildidfs.formats import procmaps
from buildidfs.formats.elf import identify
from buildidfs.linux import procfs, procmap_query
from buildidfs.model import (
    EVERYBODY,
    PUBLIC_ACCESS,
    Access,
    BuildId,
    FileIdentity,
    Kind,
    NamespaceSet,
    Origin,
    Sighting,
    Trust,
    fingerprint,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.model import Mapping

PATH: Final = b"[vdso]"
_MAX_BYTES: Final = 1 << 20
_FOUR_GIB: Final = 1 << 32


class VdsoFinder:
    """Finds each vDSO once in a scan. ``host`` names the machine, ``initial`` its namespaces."""

    def __init__(self, memo: Memo, host: str, initial: NamespaceSet) -> None:
        self._memo = memo
        self._host = host
        self._initial = initial
        self._seen: set[BuildId] = set()

    def own(self) -> PinnedFile | SeenAgain | None:
        """That of this process. Raises OSError."""
        pid_fd = procfs.open_pid(os.getpid())
        try:
            return self.of(pid_fd, Trust.HOST)
        finally:
            os.close(pid_fd)

    def of(self, pid_fd: int, trust: Trust) -> PinnedFile | SeenAgain | None:
        """That of a process, or None if it has none or it was found before. Raises OSError.

        A process can write to its copy: believe it no more than the process (``trust``).
        """
        place = _locate(pid_fd)
        if place is None:
            return None
        start, end = place
        data = procfs.read_memory(pid_fd, start, min(end - start, _MAX_BYTES))
        build_id = identify.identify(
            data[: identify.HEAD_SIZE], lambda offset, size: data[offset : offset + size], len(data)
        )
        if not isinstance(build_id, BuildId) or build_id in self._seen:
            return None
        self._seen.add(build_id)
        return found(
            self._memo, data, build_id,
            namespaces=self._initial, host=self._host, trust=trust, scanner="proc",
        )  # fmt: skip


def found(
    memo: Memo,
    data: bytes,
    build_id: BuildId,
    *,
    namespaces: NamespaceSet,
    host: str,
    trust: Trust,
    scanner: str,
    access: Access = PUBLIC_ACCESS,
) -> PinnedFile | SeenAgain:
    """The sighting of a vDSO with these bytes, in a file for ``access``. Raises OSError."""
    # There is no file to ask for its identity, so the bytes themselves are it.
    scope = b"vdso:" + fingerprint(data)
    identity = FileIdentity(0, 0, len(data), 0, 0, stat.S_IFREG | 0o555, 0, 0, scope)
    # Who has no process of that word size may run one.
    identity, reach = access.within(identity, EVERYBODY)
    origin = Origin(
        PATH,
        identity,
        namespaces,
        host=host,
        trust=trust,
        scanner=scanner,
        reach=reach,
    )
    sighting = Sighting(origin, time.time_ns())
    known = memo.recall(identity)
    if known is not None and known.build_id == build_id:
        return SeenAgain(sighting, known)
    return PinnedFile(sighting, memory_file(PATH, data), Kind.VDSO)


def may_differ(mappings: Iterable[Mapping]) -> bool:
    """Whether a process may have another vDSO than ours: all it runs is below 4 GiB."""
    ends = [mapping.end for mapping in mappings]
    return bool(ends) and max(ends) <= _FOUR_GIB


def _locate(pid_fd: int) -> tuple[int, int] | None:
    maps_fd = procfs.open_maps(pid_fd)
    try:
        return procmap_query.vdso(maps_fd)
    except OSError:
        pass
    finally:
        os.close(maps_fd)
    for mapping in procmaps.parse(procfs.maps(pid_fd)):
        if mapping.path == PATH:
            return mapping.start, mapping.end
    return None
