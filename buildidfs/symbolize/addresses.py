# SPDX-License-Identifier: Apache-2.0
"""Names for addresses in files of the store: function, file and line, including inlined
functions.

`PublicSymbolizer` is the engine behind the symbol server; it also disassembles.
"""

from __future__ import annotations

import functools
import logging
import time
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from buildidfs.capture import base
from buildidfs.capture.archive import stream
from buildidfs.catalog.coverage import CoverageLookup
from buildidfs.errors import BuildIdFsError, StoreError, UsageError
from buildidfs.formats.elf import code_file
from buildidfs.formats.elf import header as elf_header
from buildidfs.formats.elf.header import ET_DYN, ET_EXEC, SHF_EXECINSTR, Segment
from buildidfs.formats.elf.identify import ElfFile
from buildidfs.formats.elf.sections import Sections
from buildidfs.formats.elf.units import AT_LOW_PC, AT_STMT_LIST, FORM_ADDRESS, Units
from buildidfs.formats.symbolizer_output import Frame
from buildidfs.linux import file_ops
from buildidfs.model import Artifact, BuildId, ByteRange, Kind, Quality
from buildidfs.store import chosen, is_withheld, naming_belief
from buildidfs.store.permissions import PUBLIC, may_open
from buildidfs.store.placement import ADDRESSES_DIFFER, OFFSETS_DIFFER, Placement
from buildidfs.symbolize import programs
from buildidfs.symbolize.programs import Slots, SymbolizerFailed, SymbolizerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from buildidfs.formats.elf.code_file import Instruction, Machine
    from buildidfs.formats.elf.header import ReadAt
    from buildidfs.formats.symbolizer_output import Symbol
    from buildidfs.store import Store
    from buildidfs.store.permissions import Viewer
    from buildidfs.symbolize.programs import RunningSymbolizer

NO_ELF_FILE: Final = "captured, but not as an ELF file"
NOT_BELIEVED: Final = "its debuginfo is believed too little, see buildidfs show"
SHARED: Final = (
    "unrelated programs have this build ID: their adopted IDs tell them apart (buildidfs show)"
)
NOT_LOADED: Final = "no such address in the file"
NOT_MAPPED: Final = "no such offset in what is loaded of the file"
NO_EXECUTABLE: Final = (
    "only its debuginfo was captured, which does not tell where offsets are loaded"
)
NO_NAME: Final = "no symbol"
PACKED: Final = "debug information was left out"

T = TypeVar("T")

_MOST_KNOWN: Final = 1 << 16
_MOST_FILES: Final = 1 << 12
_TRIES: Final = 2
_DISASSEMBLE_S: Final = 20.0
_PROBED: Final = 8
_PROBED_UNITS: Final = 1024
_PROBE_WORK: Final = 1 << 16
_HEADER_BYTES: Final = 64

log = logging.getLogger(__name__)


class NamedFrames(msgspec.Struct, frozen=True):
    """The names at an address: frames, the innermost first. ``why`` is the reason why there are
    none, or why some may be missing.
    """

    frames: tuple[Frame, ...] = ()
    why: str = ""


class _Copy(msgspec.Struct):
    """A file to query, with its dwz file.

    ``slot`` is its copy among those that the program may open, -1 for none yet. ``failed`` is the
    reason if the program cannot read it, ``lacks`` names parts that were left out of the copy.
    """

    artifact: Artifact
    supplement: tuple[BuildId, Artifact] | None = None
    slot: int = -1
    failures: int = 0
    failed: str = ""
    lacks: str = ""


class _File(msgspec.Struct):
    """The files to query for a build ID, the most informative first, and the data to convert
    addresses.

    ``code`` are its sections with instructions. ``chosen`` are the artifacts that the store had.
    """

    copies: list[_Copy]
    loads: list[Segment] = []
    code: list[ByteRange] = []
    has_offsets: bool = False
    why: str = ""
    chosen: tuple[Artifact | None, ...] = ()


def _rank(artifact: Artifact) -> tuple[bool, int]:
    """Return the rank of a file for a symbolizer, which refuses a truncated one."""
    return not artifact.truncated, artifact.quality


class Symbolizer:
    """Queries a program about the files in ``store``; a context manager.

    If files with one build ID have their code at other offsets, an address has names only if all of
    them name the same functions there; ``placement`` finds the adopted ID of the right file.

    ``program`` is one of `programs.NAMES`, by default the first that is installed. With a
    ``viewer``, files that this viewer may not read count as missing. Raises `UsageError` if no
    program is installed.
    """

    def __init__(
        self, store: Store, program: str | None = None, viewer: Viewer | None = None
    ) -> None:
        self._store = store
        self._viewer = viewer
        self._holdings = CoverageLookup(store, viewer)
        self.placement = Placement(store)
        self.name, self._path = programs.find(program)
        self._program: RunningSymbolizer | None = None
        self._slots: Slots | None = None
        self._bytes = 0
        self._files: dict[BuildId, _File] = {}
        self._fresh: set[BuildId] | None = None
        self._known: dict[tuple[BuildId, int], NamedFrames] = {}

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

    def refresh(self) -> None:
        """Look up the files in the store again; keep the results of files that it still has.

        Without this call, queries keep using the file that the store had at the first query for its
        build ID.
        """
        self._fresh = set()
        self.placement.forget()

    def base(self, build_id: BuildId) -> int | None:
        """Return the address at which the first segment of the file is loaded.

        Returns None if no file of the build ID is known that the viewer may read, or if its files
        are loaded at different addresses.
        """
        if differing := self._differing(build_id):
            bases = {self.base(each) for each in differing}
            return bases.pop() if len(bases) == 1 else None
        file = self._file(build_id)
        if not file.copies:
            return None
        return file.loads[0].address if file.loads else 0

    def symbol(self, build_id: BuildId, address: int) -> Symbol | None:
        """Return the symbol that contains an address; None if none is known.

        Raises the errors of `at_address`.
        """
        for each in self._file(build_id).copies:
            found = self._ask(each, lambda program, slot: program.symbol(slot, address))
            if found is not None:
                return found
        return None

    def at_address(self, build_id: BuildId, address: int, *, called: bool = False) -> NamedFrames:
        """Return the names at an address of the ELF file, as its program headers and symbols count.

        ``called`` is True for a return address: the result is for the call before it. Raises
        `UsageError` if there is no room for a copy of the file, `CapabilityError`,
        `IntegrityError`.
        """
        if differing := self._differing(build_id):
            return _agreed([self.at_address(each, address, called=called) for each in differing])
        if self.placement.is_moved(build_id, address - called):
            return NamedFrames((), ADDRESSES_DIFFER)
        return self._at(build_id, address - called)

    def _at(self, build_id: BuildId, address: int) -> NamedFrames:
        key = (build_id, address)
        answer = self._known.get(key)
        if answer is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            answer = self._known[key] = self._look(self._file(build_id), address)
        return answer

    def at_offset(self, build_id: BuildId, offset: int, *, called: bool = False) -> NamedFrames:
        """Return the names at an offset in the file, which is how perf counts; see `at_address`."""
        if differing := self._differing(build_id):
            return _agreed([self.at_offset(each, offset, called=called) for each in differing])
        address = self.address_of(build_id, offset)
        if address is not None:
            return self._at(build_id, address - called)
        file = self._file(build_id)
        return NamedFrames((), file.why or (NOT_MAPPED if file.has_offsets else NO_EXECUTABLE))

    def address_of(self, build_id: BuildId, offset: int) -> int | None:
        """Return the address of a byte of the file; None if the byte is not loaded, or the file
        unknown.
        """
        file = self._file(build_id)
        return elf_header.address_of(file.loads, offset) if file.has_offsets else None

    def _differing(self, build_id: BuildId) -> list[BuildId]:
        """Return the IDs of the executables of a build ID, if it does not identify one of them."""
        found = self.placement.differing(build_id)
        seen = [each for each in found if may_open(each.artifact, self._viewer)]
        ids = [each.build_id for each in seen if each.build_id not in (None, build_id)]
        return [each for each in ids if each is not None] if len(ids) > 1 else []

    # --- files -----------------------------------------------------------------------------

    def _file(self, build_id: BuildId) -> _File:
        file = self._files.get(build_id)
        if file is not None and (self._fresh is None or build_id in self._fresh):
            return file
        chosen = self._artifacts(build_id)
        if file is None or file.chosen != chosen:
            if file is not None:
                self._known = {key: each for key, each in self._known.items() if key[0] != build_id}
            if len(self._files) >= _MOST_FILES:
                self._files.clear()
                self._renew()
            file = self._files[build_id] = self._choose(build_id, chosen)
            file.chosen = chosen
        if self._fresh is not None:
            self._fresh.add(build_id)
        return file

    def _artifacts(self, build_id: BuildId) -> tuple[Artifact | None, Artifact | None]:
        """Return executable (or vDSO) and debuginfo, each if the viewer may read it."""
        ordinal = self._store.index.ordinal(build_id)
        if ordinal is None:
            return None, None
        kinds = (Kind.EXECUTABLE, Kind.VDSO)
        found = (self._store.index.artifact(ordinal, kind) for kind in kinds)
        best = chosen(((each, None) for each in found if each is not None), 1)
        executable = self._if_readable(best[0][0]) if best else None
        return executable, self._if_readable(self._store.index.artifact(ordinal, Kind.DEBUGINFO))

    def _if_readable(self, artifact: Artifact | None) -> Artifact | None:
        return artifact if may_open(artifact, self._viewer) else None

    def _choose(self, build_id: BuildId, chosen: tuple[Artifact | None, Artifact | None]) -> _File:
        """Return the files with symbols, the best first; addresses are those of the executable."""
        executable, debuginfo = chosen
        found = [each for each in (debuginfo, executable) if each is not None]
        if not found:
            return _File([], why=self._why_none(build_id))
        found.sort(key=lambda each: (each.truncated, -naming_belief(each), -each.quality))
        copies = [_Copy(each, self._supplement(each)) for each in found]
        if len({each.digest for each in found}) == 1:
            del copies[1:]
        loads, code = self._mapped(executable or found[0])
        return _File(copies, loads, code, executable is not None)

    def _why_none(self, build_id: BuildId) -> str:
        store = self._store
        ordinal = store.index.ordinal(build_id)
        if ordinal is None or not store.index.kinds(ordinal) or self._viewer is not None:
            return self._holdings.why_absent(build_id)
        if store.aliases.is_ambiguous(ordinal):
            return SHARED
        withheld = bool(store.index.variants(ordinal, Kind.DEBUGINFO))
        return NOT_BELIEVED if withheld else NO_ELF_FILE

    def _supplement(self, artifact: Artifact) -> tuple[BuildId, Artifact] | None:
        try:
            with self._store.open_blob(artifact.digest) as blob:
                described = base.describe(blob.fileno())
        except OSError as error:
            raise StoreError(f"blob {artifact.digest}: {error.strerror}") from error
        if not isinstance(described, ElfFile) or described.altlink is None:
            return None
        build_id = described.altlink.build_id
        ordinal = self._store.index.ordinal(build_id)
        artifact_of = self._store.index.artifact
        found = None if ordinal is None else artifact_of(ordinal, Kind.DEBUGINFO)
        if found is None or is_withheld(found, artifact) or not may_open(found, self._viewer):
            return None
        return build_id, found

    def _mapped(self, artifact: Artifact) -> tuple[list[Segment], list[ByteRange]]:
        """Return the loaded segments, and the addresses of sections with instructions."""
        try:
            with self._store.open_blob(artifact.digest) as blob:
                sections = Sections(blob.read_at, blob.size)
                return elf_header.loaded(blob.read_at, blob.size), [
                    ByteRange(each.address, each.size)
                    for each in sections.headers
                    if each.flags & SHF_EXECINSTR
                ]
        except OSError as error:
            raise StoreError(f"blob {artifact.digest}: {error.strerror}") from error

    def _slot(self, wanted: _Copy) -> int:
        """Return the number of the slot with a copy of the file; make the copy if there is none."""
        if wanted.slot >= 0:
            return wanted.slot
        artifacts = [wanted.artifact]
        if wanted.supplement is not None:
            artifacts.append(wanted.supplement[1])
        size = sum(each.size for each in artifacts)
        slots = self._slots
        if slots is None or slots.left < len(artifacts) or self._bytes + size > slots.most_bytes:
            slots = self._renew()
        lacks: list[str] = []
        wanted.slot, *others = [
            slots.fill(each.size, functools.partial(self._copy, each, slots, lacks))
            for each in artifacts
        ]
        wanted.lacks = lacks[0] if lacks else ""
        for slot in others:
            assert wanted.supplement is not None
            slots.name(slot, wanted.supplement[0])
        self._bytes += size
        return wanted.slot

    def _copy(self, artifact: Artifact, slots: Slots, lacks: list[str], target: int) -> None:
        try:
            with self._store.open_blob(artifact.digest) as blob:
                file_ops.copy(blob.fileno(), target)
            stream.unpack_sections(target, slots.most_bytes)
        except stream.CannotDecompress as error:
            lacks.append(f"{PACKED} ({error})")

    def _renew(self) -> Slots:
        """End the program; return empty slots for a new one."""
        self.close()
        for file in self._files.values():
            for each in file.copies:
                each.slot = -1
        self._bytes = 0
        self._slots = programs.Slots()
        return self._slots

    # --- the program -----------------------------------------------------------------------

    def _look(self, file: _File, address: int) -> NamedFrames:
        if file.why:
            return NamedFrames((), file.why)
        if file.loads and not elf_header.is_loaded(file.loads, address):
            return NamedFrames((), NOT_LOADED)
        frames: list[Frame] = []
        why: list[str] = []
        believed = naming_belief(file.copies[0].artifact)
        for each in file.copies:
            if (
                frames
                and frames[-1].function
                and (frames[-1].line or naming_belief(each.artifact) < believed)
            ):
                break
            answer = self._ask(each, lambda program, slot: program.ask(slot, address))
            frames = _merged(frames, _without_stray(answer or [], file.code, address))
            why += filter(None, (each.failed, each.lacks))
        return NamedFrames(tuple(frames), why[0] if why else "" if frames else NO_NAME)

    def _ask(self, asked: _Copy, question: Callable[[RunningSymbolizer, int], T]) -> T | None:
        """Return the answer of the program about one file; if it fails, record the reason and
        return None.
        """
        while not asked.failed:
            slot = self._slot(asked)
            try:
                return question(self._started(), slot)
            except SymbolizerFailed as error:
                self._stop()
                asked.failures += 1
                if asked.failures >= _TRIES:
                    asked.failed = f"{self.name} failed: {error}"
        return None

    def _started(self) -> RunningSymbolizer:
        if self._program is None:
            assert self._slots is not None
            self._program = programs.start(self.name, self._path, self._slots)
        return self._program

    def _stop(self) -> None:
        if self._program is not None:
            self._program.close()
            self._program = None


def _without_stray(frames: list[Frame], code: Sequence[ByteRange], address: int) -> list[Frame]:
    """Remove the name of a frame if the named symbol is in another section than the address.

    A symbolizer extends a symbol without a size, such as ``_init``, to the next symbol: over the
    whole procedure linkage table (PLT), which has no symbols.
    """
    last = frames[-1] if frames else None
    if last is None or last.start is None or last.file:
        return frames
    begin = last.start
    where = next((each for each in code if begin - each.offset in range(each.size)), None)
    if where is None or address - where.offset in range(where.size):
        return frames
    return frames[:-1]


def _agreed(answers: list[NamedFrames]) -> NamedFrames:
    """Return the answer that all of several files give; they may name different functions."""
    functions = {tuple(frame.function for frame in each.frames) for each in answers}
    return answers[0] if len(functions) == 1 else NamedFrames((), OFFSETS_DIFFER)


def _merged(first: list[Frame], second: list[Frame]) -> list[Frame]:
    """Return the frames that have lines. If their outermost function has no name, take it from the
    other file.

    A debug file may lack symbols that only the executable has: the dynamic ones.
    """
    best, other = first, second
    if not best or (not any(each.line for each in best) and any(each.line for each in other)):
        best, other = other, best
    if best and other and not best[-1].function:
        last, named = best[-1], other[-1]
        return [
            *best[:-1],
            msgspec.structs.replace(last, function=named.function, start=named.start),
        ]
    return best


def unreadable_for(store: Store, build_id: BuildId) -> str | None:
    """Return the name of the symbolizer of this host if it cannot read the DWARF of a file; else
    None.

    A store knows that a file has DWARF. The symbolizer may still not read its form: a kind of
    compression, a version, or the name of a section. So it is asked for some addresses whose units
    have line tables, and has to find one line.
    """
    ordinal = store.index.ordinal(build_id) or 0
    artifact = store.index.artifact(ordinal, Kind.DEBUGINFO)
    if artifact is None or artifact.quality < Quality.DEBUGINFO:
        return None
    try:
        with store.open_blob(artifact.digest) as blob:
            addresses = list(islice(_addresses(blob.read_at, blob.size), _PROBED))
        if not addresses:
            return None
        with Symbolizer(store) as symbolizer:
            answers = [symbolizer.at_address(build_id, each) for each in addresses]
            is_read = any(frame.line for each in answers for frame in each.frames)
            is_tried = any(each.why != NOT_LOADED for each in answers)
            return symbolizer.name if is_tried and not is_read else None
    except (BuildIdFsError, OSError) as error:
        log.info("the symbolizer cannot be tried: %s", error)
        return None


def _addresses(read_at: ReadAt, size: int) -> Iterator[int]:
    """Yield addresses at which code of units with line tables begins, in a linked file."""
    parsed = elf_header.parse_header(read_at(0, _HEADER_BYTES))
    if parsed is None or parsed[1][0] not in (ET_EXEC, ET_DYN):
        return
    units = Units(Sections(read_at, size), read_at, size, _PROBE_WORK)
    for entry in units.entries(_PROBED_UNITS, lambda version, kind: True):
        form, address = entry.numbers.get(AT_LOW_PC, (0, 0))
        if form == FORM_ADDRESS and address and entry.number(AT_STMT_LIST) is not None:
            yield address


class PublicSymbolizer(Symbolizer):
    """A symbolizer for callers without an account: it uses only files that all users may read.

    Raises `UsageError` if no program is installed.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store, viewer=PUBLIC)
        self._disassembler: str | None = None

    def disassemble(
        self, machine: Machine, address: int, code: bytes, size: int
    ) -> list[Instruction]:
        """Return the instructions that begin in the first ``size`` bytes of ``code``, at
        ``address``.

        Raises `UsageError` if llvm-objdump is missing or fails, and `CapabilityError`.
        """
        path = self._disassembler = self._disassembler or programs.find_disassembler()
        if path is None:
            raise UsageError("llvm-objdump is not installed; apt-get install llvm")
        data = code_file.code_file(machine, address, code)
        with Slots(1) as slots:
            slots.fill(len(data), functools.partial(file_ops.write_fully, data=data))
            try:
                lines = _output(path, slots, machine)
                return code_file.instructions(lines, address, size)
            except SymbolizerFailed as error:
                raise UsageError(f"llvm-objdump failed: {error}") from error


def _output(path: str, slots: Slots, machine: Machine) -> Iterator[bytes]:
    """Yield the lines that llvm-objdump prints about the only file. Raises `SymbolizerFailed`."""
    argv = [path, "--disassemble-all", "--no-show-raw-insn", "--disassemble-zeroes"]
    argv += ["--print-imm-hex", "--section=.text"]
    if machine.number in (code_file.EM_386, code_file.EM_X86_64):
        argv.append("--x86-asm-syntax=intel")
    elif machine.number == code_file.EM_ARM:
        # It is unknown which functions use the older instruction set; few do.
        argv.append("--triple=thumbv7-linux-gnueabihf")
    process = SymbolizerProcess([*argv, slots.path(0).decode()], slots)
    try:
        yield from process.lines(time.monotonic() + _DISASSEMBLE_S)
    finally:
        process.close()
