# SPDX-License-Identifier: Apache-2.0
"""Names for the generated code in a profile, from the kept maps of its processes.

perf itself looks for the map of such a process in the ``/tmp`` of the machine it runs on, which
never has the map of a container's process. So an ELF file is made from the map of each process, and
the anonymous mappings of the process become mappings of that file.
"""

from __future__ import annotations

import logging
import stat
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture.base import PinnedFile, memory_file
from buildidfs.capture.origin import builder
from buildidfs.errors import BuildIdFsError
from buildidfs.formats.elf.writer import symbol_file
from buildidfs.formats.perf import jit
from buildidfs.formats.perf.headers import CPUMODE, USER
from buildidfs.ingest import Ingest
from buildidfs.linux import inodes, machine, procfs
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import BuildId, FileIdentity, Sighting, fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.formats.perf.address_spaces import File
    from buildidfs.profile.reading import Reading, SampleSite
    from buildidfs.store import Store
    from buildidfs.store.jit_maps import JitMap

_NAMES: Final = (b"//anon", b"/anon_hugepage", b"/dev/zero", b"/SYSV", b"[anon", b"/memfd:")
# A watch records once a minute that a process lives.
_LIFE_RECORD_NS: Final = 90_000_000_000
# The start time of a process is known to 10 ms only.
_EXACT_NS: Final = 100_000_000

_log = logging.getLogger(__name__)


class GeneratedCode(msgspec.Struct, frozen=True):
    """The generated code of one process: ``name`` stands for it, with this build ID.

    ``container`` is its label, ``comm`` the name of the process, ``functions`` the number of named
    functions.
    """

    pid: int
    comm: str
    container: str
    name: bytes
    build_id: BuildId
    functions: int


def is_generated(file: File) -> bool:
    """Return True for memory of a process in which a JIT compiler may have put code."""
    return file.cpumode & CPUMODE == USER and not file.build_id and file.path.startswith(_NAMES)


class JitNames:
    """Finds names for all processes of a profile; `make` adds their files to the store.

    ``found`` are the processes whose code got names. ``failed`` has the reasons why others got
    none.
    """

    def __init__(self, store: Store, reading: Reading) -> None:
        self._store = store
        self._reading = reading
        self._chosen: dict[tuple[int, int], JitMap] = {}
        self._made: dict[bytes, GeneratedCode] = {}
        self.failed = ""
        known: dict[int, list[JitMap]] = {}
        for hit in reading.everything():
            if not is_generated(reading.spaces.files[hit.file]):
                continue
            maps = known.get(hit.pid)
            if maps is None:
                maps = known[hit.pid] = store.jit_maps.of(hit.pid)
            if maps and (hit.pid, hit.image) not in self._chosen:
                chosen = next((each for each in maps if self._fits(each, hit)), None)
                if chosen is not None:
                    self._chosen[hit.pid, hit.image] = chosen

    @property
    def found(self) -> list[GeneratedCode]:
        """Return the processes whose generated code has names, in no order."""
        return list(self._made.values())

    def make(self) -> None:
        """Add a file for each process to the store. Does not raise: see ``failed``."""
        if not self._chosen:
            return
        try:
            summary = Ingest(self._store).run(self._files())
        except BuildIdFsError as error:
            self.failed, self._made = str(error), {}
            return
        if summary.unreadable:
            self.failed = summary.unreadable[0].reason
        held = self._store.index.ordinal
        self._made = {
            path: made for path, made in self._made.items() if held(made.build_id) is not None
        }

    def at(self, hit: SampleSite) -> GeneratedCode | None:
        """Return the file that names the code at a hit; None if the hit is not in named generated
        code.
        """
        chosen = self._chosen.get((hit.pid, hit.image))
        made = None if chosen is None else self._made.get(chosen.path)
        if made is None or not is_generated(file := self._reading.spaces.files[hit.file]):
            return None
        # A program may run from a memfd, too, but such a file is captured like others.
        is_file = file.inode and self._reading.answer(hit).build_id is not None
        return None if is_file else made

    def _files(self) -> Iterator[PinnedFile]:
        for chosen in {each.path: each for each in self._chosen.values()}.values():
            process = chosen.process
            try:
                symbols = jit.symbols(chosen.text())
            except OSError as error:
                _log.info("the map of process %d cannot be read: %s", process.pid, error)
                continue
            if not symbols:
                continue
            # Two processes with equal code have a file each, because their containers differ.
            source = b"%d %d %b" % (process.pid, process.start_ticks, process.boot_id.encode())
            build_id, data = symbol_file(symbols, process.machine, source)
            self._made[chosen.path] = GeneratedCode(
                process.pid,
                process.comm,
                builder.shown(process.origin.container, process.origin.cgroup, process.owner),
                process.name,
                build_id,
                len(symbols),
            )
            yield _pinned(chosen, data)

    def _fits(self, each: JitMap, hit: SampleSite) -> bool:
        """Return True if a map is that of the process of a hit: same host, namespace and time."""
        reading, process = self._reading, each.process
        clock = reading.matcher.clock
        host = process.origin.host
        if reading.host not in ("", host) and not (
            clock is not None and clock.is_local and host == machine.host_name()
        ):
            return False
        mnt = reading.spaces.mount_namespace(hit.pid, hit.time)
        if mnt and mnt != process.origin.namespaces.mnt:
            return False
        moment = reading.matcher.unix_time(hit.time)
        if clock is None or moment is None:
            return True
        error = clock.error_ns + _EXACT_NS
        if moment < process.start_ns - error:
            return False
        return moment <= each.last_ns + _LIFE_RECORD_NS + error or _still_runs(each)


def _still_runs(each: JitMap) -> bool:
    process = each.process
    if process.origin.host != machine.host_name() or process.boot_id != inodes.boot_id().hex():
        return False
    try:
        pid_fd = procfs.open_pid(process.pid)
    except OSError:
        return False
    with closing_fd(pid_fd):
        try:
            return procfs.start_ticks(pid_fd) == process.start_ticks
        except OSError:
            return False


def _pinned(chosen: JitMap, data: bytes) -> PinnedFile:
    """Return the file for a process: seen at the place of its map, readable by the owner of the
    map.
    """
    process = chosen.process
    origin = process.origin
    scope = b"jit:" + fingerprint(data)
    mode = stat.S_IFREG | 0o400
    identity = FileIdentity(
        0, 0, len(data), 0, 0, mode, origin.identity.uid, origin.identity.gid, scope
    )
    origin = msgspec.structs.replace(origin, path=process.name, identity=identity)
    sighting = Sighting(origin, chosen.last_ns)
    return PinnedFile(sighting, memory_file(process.name, data), is_copy=True)
