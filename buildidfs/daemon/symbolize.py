# SPDX-License-Identifier: Apache-2.0
"""Names for addresses in files that the store has: function, file and line, inlined ones too."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture import files
from buildidfs.daemon import symbolizers
from buildidfs.daemon.symbolizers import Failed
from buildidfs.errors import StoreError
from buildidfs.formats import elfloads
from buildidfs.formats.elf import ElfFile
from buildidfs.formats.elfloads import Segment
from buildidfs.formats.symbolized import Frame
from buildidfs.linux import copy
from buildidfs.model import Artifact, BuildId, Kind

if TYPE_CHECKING:
    from buildidfs.daemon.symbolizers import Program, Slots
    from buildidfs.store import Store

NEVER_CAPTURED: Final = "never captured"
NO_ELF_FILE: Final = "captured, but not as an ELF file"
NOT_LOADED: Final = "no such address in the file"
NOT_MAPPED: Final = "no such offset in what is loaded of the file"
NO_EXECUTABLE: Final = (
    "only its debuginfo was captured, which does not tell where offsets are loaded"
)
NO_NAME: Final = "no symbol"

_MOST_KNOWN: Final = 1 << 16
_MOST_FILES: Final = 1 << 12
_TRIES: Final = 2


class Answer(msgspec.Struct, frozen=True):
    """What is at an address: frames, the innermost first. If there are none, ``why`` says why."""

    frames: tuple[Frame, ...] = ()
    why: str = ""


class _File(msgspec.Struct):
    """The file to ask about for a build ID, and what it takes to read its addresses.

    ``slot`` is its copy among those that the program may open, -1 for none yet. What dwz moved out
    of it is in ``supplement``.
    """

    artifact: Artifact | None
    supplement: tuple[BuildId, Artifact] | None = None
    loads: list[Segment] = []
    has_offsets: bool = False
    slot: int = -1
    failures: int = 0
    why: str = ""


class Symbolizer:
    """Asks a program about the files in ``store``; a context manager.

    ``program`` is one of `symbolizers.NAMES`, by default the first that is installed. Raises
    `UsageError` if there is none.
    """

    def __init__(self, store: Store, program: str | None = None) -> None:
        self._store = store
        self.name, self._path = symbolizers.find(program)
        self._program: Program | None = None
        self._slots: Slots | None = None
        self._bytes = 0
        self._files: dict[BuildId, _File] = {}
        self._known: dict[tuple[BuildId, int], Answer] = {}

    def __enter__(self) -> Symbolizer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the program; safe to call twice."""
        self._stop()
        if self._slots is not None:
            self._slots.close()
            self._slots = None

    def at_address(self, build_id: BuildId, address: int, *, called: bool = False) -> Answer:
        """What is at an address of the ELF file, as its program headers and symbols count.

        ``called`` says that it is a return address: what is meant is the call before it. Raises
        `UsageError` where there is no room for a copy of the file, `CapabilityError`,
        `IntegrityError`.
        """
        address -= called
        key = (build_id, address)
        answer = self._known.get(key)
        if answer is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            answer = self._known[key] = self._look(self._file(build_id), address)
        return answer

    def at_offset(self, build_id: BuildId, offset: int, *, called: bool = False) -> Answer:
        """The same for an offset in the file, as perf counts."""
        address = self.address_of(build_id, offset)
        if address is not None:
            return self.at_address(build_id, address, called=called)
        file = self._file(build_id)
        return Answer((), file.why or (NOT_MAPPED if file.has_offsets else NO_EXECUTABLE))

    def address_of(self, build_id: BuildId, offset: int) -> int | None:
        """Where a byte of the file is loaded; None if it is not, or nobody knows."""
        file = self._file(build_id)
        return elfloads.address_of(file.loads, offset) if file.has_offsets else None

    # --- files -----------------------------------------------------------------------------

    def _file(self, build_id: BuildId) -> _File:
        file = self._files.get(build_id)
        if file is None:
            if len(self._files) >= _MOST_FILES:
                self._files.clear()
                self._renew()
            file = self._files[build_id] = self._choose(build_id)
        return file

    def _choose(self, build_id: BuildId) -> _File:
        """The file with the best symbols; its addresses are those of the executable."""
        store = self._store
        ordinal = store.ordinal(build_id)
        if ordinal is None or not store.kinds(ordinal):
            return _File(None, why=NEVER_CAPTURED)
        executable = store.artifact(ordinal, Kind.EXECUTABLE) or store.artifact(ordinal, Kind.VDSO)
        debuginfo = store.artifact(ordinal, Kind.DEBUGINFO)
        if executable is None or (
            debuginfo is not None and debuginfo.quality >= executable.quality
        ):
            chosen = debuginfo
        else:
            chosen = executable
        loaded = executable or debuginfo
        if chosen is None or loaded is None:
            return _File(None, why=NO_ELF_FILE)
        return _File(chosen, self._supplement(chosen), self._loads(loaded), executable is not None)

    def _supplement(self, artifact: Artifact) -> tuple[BuildId, Artifact] | None:
        fd = self._store.open_blob(artifact.digest)
        try:
            described = files.describe(fd)
        except OSError as error:
            raise StoreError(f"blob {artifact.digest}: {error.strerror}") from error
        finally:
            os.close(fd)
        if not isinstance(described, ElfFile) or described.altlink is None:
            return None
        build_id = described.altlink.build_id
        ordinal = self._store.ordinal(build_id)
        found = None if ordinal is None else self._store.artifact(ordinal, Kind.DEBUGINFO)
        return None if found is None else (build_id, found)

    def _loads(self, artifact: Artifact) -> list[Segment]:
        fd = self._store.open_blob(artifact.digest)
        try:
            return elfloads.loaded(
                lambda offset, size: os.pread(fd, size, offset), os.fstat(fd).st_size
            )
        except OSError as error:
            raise StoreError(f"blob {artifact.digest}: {error.strerror}") from error
        finally:
            os.close(fd)

    def _slot(self, file: _File, artifact: Artifact) -> int:
        """Where the program finds a copy of the file."""
        if file.slot >= 0:
            return file.slot
        wanted = [artifact] if file.supplement is None else [artifact, file.supplement[1]]
        size = sum(each.size for each in wanted)
        slots = self._slots
        if slots is None or slots.left < len(wanted) or self._bytes + size > slots.most_bytes:
            slots = self._renew()
        file.slot, *others = [
            slots.fill(each.size, functools.partial(self._copy, each)) for each in wanted
        ]
        for slot in others:
            assert file.supplement is not None
            slots.name(slot, file.supplement[0])
        self._bytes += size
        return file.slot

    def _copy(self, artifact: Artifact, target: int) -> None:
        source = self._store.open_blob(artifact.digest)
        try:
            copy.content(source, target)
        finally:
            os.close(source)

    def _renew(self) -> Slots:
        """Begin again with empty slots, and a program that has looked at nothing."""
        self.close()
        for file in self._files.values():
            file.slot = -1
        self._bytes = 0
        self._slots = symbolizers.Slots()
        return self._slots

    # --- the program -----------------------------------------------------------------------

    def _look(self, file: _File, address: int) -> Answer:
        artifact = file.artifact
        if artifact is None or file.why:
            return Answer((), file.why)
        if file.loads and not elfloads.is_loaded(file.loads, address):
            return Answer((), NOT_LOADED)
        slot = self._slot(file, artifact)
        while True:
            try:
                frames = self._started().ask(slot, address)
                break
            except Failed as error:
                self._stop()
                file.failures += 1
                if file.failures >= _TRIES:
                    file.why = f"{self.name} failed: {error}"
                    return Answer((), file.why)
        return Answer(tuple(frames), "" if frames else NO_NAME)

    def _started(self) -> Program:
        if self._program is None:
            assert self._slots is not None
            self._program = symbolizers.start(self.name, self._path, self._slots)
        return self._program

    def _stop(self) -> None:
        if self._program is not None:
            self._program.close()
            self._program = None
