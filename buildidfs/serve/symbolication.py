# SPDX-License-Identifier: Apache-2.0
"""The symbol server of the Firefox Profiler: names, sources and instructions, as JSON.

    POST /symbolicate/v5   functions, files and lines of stacks
    POST /source/v1        a source file that a named address leads to
    POST /asm/v1           the instructions of a function

Source: Mozilla's symbolication API (docs/symbolication.rst of mozilla-services/eliot), API.md of
samply. Modules are named by the debug ID of Breakpad, addresses count from the first segment. As in
samply, `/source/v1` and `/asm/v1` report errors with status 200 and ``{"error": ...}``, because the
profiler shows the text of no other status.

One thread answers, because a symbolizer answers one question at a time. Answers come only from
files that all users may read.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from buildidfs.errors import CapabilityError, InvalidBuildId, UsageError
from buildidfs.formats.elf import code_file, header, other_ids
from buildidfs.model import BuildId
from buildidfs.serve.content import Content
from buildidfs.serve.messages import SYMBOLS, BadRequest, Response, Waiting, lines
from buildidfs.store import placement
from buildidfs.store.placement import OFFSETS_DIFFER
from buildidfs.symbolize.addresses import PublicSymbolizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from buildidfs.formats.elf.code_file import Instruction, Machine
    from buildidfs.formats.symbolizer_output import Frame, Symbol
    from buildidfs.serve.backend import Backend
    from buildidfs.serve.debuginfod import Debuginfod
    from buildidfs.serve.messages import Answer, Request
    from buildidfs.store import Store
    from buildidfs.view import FileContent

T = TypeVar("T")

log = logging.getLogger(__name__)

SYMBOLICATE: Final = b"/symbolicate/v5"
SOURCE: Final = b"/source/v1"
ASM: Final = b"/asm/v1"
PATHS: Final = {SYMBOLICATE: "symbolicate", SOURCE: "source/v1", ASM: "asm"}
"""The paths, and the types of their requests in metrics."""

_MOST_JOBS: Final = 256
_MOST_MODULES: Final = 20_000
_MOST_FRAMES: Final = 200_000
_MOST_REPLY: Final = 32 << 20
_MOST_CODE: Final = 64 << 10
_MOST_TARGETS: Final = 256
_MOST_TEXT: Final = 4096
_IDLE_S: Final = 120.0
"""Seconds after which an unused symbolizer is ended, because its copies take room."""

_HEX: Final = re.compile(r"0x([0-9A-Fa-f]{1,16})")
_JSON: Final = lines((b"Content-Type", b"application/json"), (b"Cache-Control", b"no-store"))
_ALLOW: Final = lines((b"Allow", b"POST, OPTIONS"))
_RETRY: Final = lines((b"Retry-After", b"5"))
_UNKNOWN_MODULE: Final = "<unknown>"

NOT_HERE: Final = "this server has no file with the debug ID that all users may read"


class _Job(msgspec.Struct, rename="camel"):
    memory_map: list[tuple[str, str]]
    stacks: list[list[tuple[int, int]]]


class _Symbolicate(msgspec.Struct, rename="camel"):
    jobs: list[_Job] | None = None
    memory_map: list[tuple[str, str]] | None = None
    stacks: list[list[tuple[int, int]]] | None = None


class _Source(msgspec.Struct, rename="camel"):
    debug_id: str
    module_offset: str
    file: str


class _Asm(msgspec.Struct, rename="camel"):
    start_address: str
    size: str
    code_id: str | None = None
    debug_id: str | None = None
    continue_until_function_end: bool = False


class _NotAnswered(Exception):
    """Raised if there is no answer; the message is for the user."""


class _TooLate(Exception):
    """Raised if the time of the request is over."""


def failure(status: int, message: str, headers: bytes = b"", kind: str = "") -> Response:
    """Return an answer with a failure, as JSON."""
    if status == 503:
        headers += _RETRY
    return Response(status, msgspec.json.encode({"error": message}), _JSON + headers, kind)


class Symbolication:
    """Answers the requests of the symbol server; call `answer` in the thread of the loop."""

    limit_s: float = 30.0
    """The seconds that a request may take."""

    def __init__(self, backend: Backend, debuginfod: Debuginfod) -> None:
        self._backend = backend
        self._debuginfod = debuginfod
        self._engine: PublicSymbolizer | None = None
        self._last_use = 0.0
        self._stopped = False

    def answer(self, request: Request) -> Answer:
        """Return the answer to a request for one of `PATHS`, which one thread computes."""
        kind = PATHS[request.path]
        if request.method != b"POST":
            return failure(405, "only POST and OPTIONS", _ALLOW, kind)
        if request.header(b"content-encoding").lower() not in (b"", b"identity"):
            return failure(415, "the body must not be compressed", kind=kind)
        return Waiting(lambda: self._answer(request, kind), SYMBOLS, kind)

    def _answer(self, request: Request, kind: str) -> Response:
        deadline = time.monotonic() + self.limit_s
        try:
            if self._stopped:
                raise _TooLate
            body = self._work(request)(request.body, deadline)
        except _NotAnswered as error:
            body = msgspec.json.encode({"error": str(error)})
        except _TooLate:
            # The engine remembers the answers so far, so the next attempt gets further.
            return failure(503, "the time of the request is used up; try again", kind=kind)
        except (CapabilityError, UsageError) as error:
            log.warning("%s: %s", kind, error)
            return failure(503, "the server cannot run its symbolizer now", kind=kind)
        finally:
            self._last_use = time.monotonic()
        return Response(200, body, _JSON, kind)

    def _work(self, request: Request) -> Callable[[bytes, float], bytes]:
        return {SYMBOLICATE: self._symbolicate, SOURCE: self._source, ASM: self._asm}[request.path]

    def _started(self) -> PublicSymbolizer:
        """Return the engine, which has looked up again which files the store has. Raises
        `UsageError`.
        """
        if self._engine is None:
            self._engine = PublicSymbolizer(self._backend.store)
        self._engine.refresh()
        return self._engine

    def is_idle(self, now: float) -> bool:
        """Return True if a symbolizer runs that `close` should end, because it was unused
        for long.
        """
        return self._engine is not None and now - self._last_use > _IDLE_S

    def stop(self) -> None:
        """Start no more requests."""
        self._stopped = True

    def close(self) -> None:
        """End the symbolizer; must be called in the thread that answers; safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    # --- names -----------------------------------------------------------------------------

    def _symbolicate(self, body: bytes, deadline: float) -> bytes:
        jobs = jobs_in(body)
        run = _Run(self._backend.store, self._started(), deadline)
        parts = [b",".join(run.job(job)) for job in jobs]
        self._backend.check()  # else the client would remember an absence
        return b'{"results":[%s]}' % b",".join(parts)

    # --- sources ---------------------------------------------------------------------------

    def _source(self, body: bytes, deadline: float) -> bytes:
        wanted, offset = source_request(body)
        build_id = self._build_id(wanted.debug_id, None)
        engine = self._started()
        base = engine.base(build_id)
        if base is None:
            raise _NotAnswered(NOT_HERE)
        frames = engine.at_address(build_id, base + offset).frames
        if not any(frame.file == wanted.file for frame in frames):
            raise _NotAnswered("no function at that address is in that file")
        file = self._debuginfod.open_source(build_id, wanted.file.encode("utf-8", "replace"))
        if file is None:
            raise _NotAnswered(
                "the source file was not captured; see buildidfs scan tree --sources"
            )
        text = _read(file, 0, None).decode("utf-8", "replace")
        return msgspec.json.encode(
            {
                "symbolsLastModified": None,
                "sourceLastModified": None,
                "file": wanted.file,
                "source": text,
            }
        )

    # --- instructions ----------------------------------------------------------------------

    def _asm(self, body: bytes, deadline: float) -> bytes:
        wanted, start, size = asm_request(body)
        build_id = self._build_id(wanted.debug_id, wanted.code_id)
        engine = self._started()
        base = engine.base(build_id)
        if base is None:
            raise _NotAnswered(NOT_HERE)
        file = self._debuginfod.open_executable(build_id)
        if file is None:
            raise _NotAnswered("this server has no executable with the ID that all users may read")
        try:
            machine, loads = _machine_and_loads(file)
            address = base + start
            if machine.number in (code_file.EM_ARM, code_file.EM_AARCH64):
                unit = 2 if machine.number == code_file.EM_ARM else 4
                address -= address % unit
            if wanted.continue_until_function_end:
                symbol = engine.symbol(build_id, address)
                end = address if symbol is None else symbol.start + symbol.size
                size = max(size, end - address)
            size = min(size, _MOST_CODE)
            code = _code(file, loads, address, size + code_file.MOST_INSTRUCTION)
        finally:
            file.close()
        found = engine.disassemble(machine, address, code, min(size, len(code)))
        encoded = self._named_targets(engine, build_id, base, found, deadline)
        return msgspec.json.encode(
            {
                "startAddress": hex(address - base),
                "size": hex(min(size, len(code))),
                "arch": machine.architecture,
                "syntax": [machine.syntax],
                "instructions": [[at - address, text] for at, text in encoded],
            }
        )

    def _named_targets(
        self,
        engine: PublicSymbolizer,
        build_id: BuildId,
        base: int,
        found: list[Instruction],
        deadline: float,
    ) -> Iterator[tuple[int, str]]:
        """Yield the address and text of each instruction, with the function to which it jumps."""
        names: dict[int, str] = {}
        for address, text, target in found:
            if target and target not in names and len(names) < _MOST_TARGETS:
                _check(deadline)
                names[target] = _place(engine.at_address(build_id, target).frames, target)
            name = names.get(target, "") if target else ""
            yield address, f"{text} <{name}>" if name else text

    def _build_id(self, debug_id: str | None, code_id: str | None) -> BuildId:
        """Return the build ID in a request. Raises `_NotAnswered`.

        A code ID with more bytes than a debug ID is a whole build ID; others may be of a file for
        another system.
        """
        aliases = self._backend.store.aliases
        found = None
        if code_id:
            with contextlib.suppress(InvalidBuildId):
                found = BuildId.from_hex(code_id.lower())
        is_whole = found is not None and len(found) > other_ids.BEGINNING_BYTES
        is_known = found is not None and self._backend.store.index.ordinal(found) is not None
        if not is_whole and not is_known:
            found = aliases.beginning_with(other_ids.beginnings(debug_id or ""))
        if found is None:
            self._backend.check()
            raise _NotAnswered(NOT_HERE)
        return found


class _Run:
    """One request for names. Raises `_TooLate`, `BadRequest`, and errors of the engine."""

    def __init__(self, store: Store, engine: PublicSymbolizer, deadline: float) -> None:
        self._store = store
        self._engine = engine
        self._deadline = deadline
        self._bytes = 0
        self._modules: dict[str, tuple[BuildId, int] | None] = {}
        self._symbols: dict[tuple[BuildId, int], Symbol | None] = {}
        self._encoded: dict[tuple[BuildId, int], bytes] = {}
        self._why: dict[str, dict[str, None]] = {}

    def job(self, job: _Job) -> Iterator[bytes]:
        """Yield the result of a job, as one piece of JSON."""
        names = [msgspec.json.encode(name) for name, _ in job.memory_map]
        stacks = []
        used: set[int] = set()
        self._why = {}
        for stack in job.stacks:
            frames = []
            for number, (index, offset) in enumerate(stack):
                if index >= 0:
                    used.add(index)
                frames.append(self._frame(job, names, number, index, offset))
            stacks.append(b"[%s]" % b",".join(frames))
        found = {
            "/".join(module): self._module(module[1]) is not None if index in used else None
            for index, module in enumerate(job.memory_map)
        }
        errors = {
            "/".join(module): [
                {"name": "NoNames", "message": why} for why in self._why.get(module[1], ())
            ]
            for module in job.memory_map
            if self._why.get(module[1])
        }
        rest = {"found_modules": found, **({"module_errors": errors} if errors else {})}
        yield b'{"stacks":[%s]' % b",".join(stacks)
        yield msgspec.json.encode(rest)[1:]

    def _frame(
        self, job: _Job, names: Sequence[bytes], number: int, index: int, offset: int
    ) -> bytes:
        known = b""
        name = msgspec.json.encode(_UNKNOWN_MODULE)
        if index >= 0:
            name = names[index]
            debug_id = job.memory_map[index][1]
            module = self._module(debug_id)
            if module is not None and offset >= 0:
                known = self._names(debug_id, *module, offset)
        frame = b'{"frame":%d,"module":%s,"module_offset":"%s"%s}' % (
            number, name, hex(offset).encode(), known,
        )  # fmt: skip
        self._bytes += len(frame)
        if self._bytes > _MOST_REPLY:
            raise BadRequest("the answer would be too long: ask for fewer frames")
        return frame

    def _module(self, debug_id: str) -> tuple[BuildId, int] | None:
        """Return build ID and base address of a module; None if there is no public one."""
        if debug_id not in self._modules:
            _check(self._deadline)
            build_id = self._store.aliases.beginning_with(other_ids.beginnings(debug_id))
            base = None if build_id is None else self._engine.base(build_id)
            if build_id is None or base is None:
                ordinal = self._store.index.ordinal(build_id or b"") or 0
                why = OFFSETS_DIFFER if placement.differs(self._store, ordinal) else NOT_HERE
                self._modules[debug_id] = None
                self._why.setdefault(debug_id, {})[why] = None
            else:
                self._modules[debug_id] = build_id, base
        return self._modules[debug_id]

    def _names(self, debug_id: str, build_id: BuildId, base: int, offset: int) -> bytes:
        """Return the rest of the object of a frame, with the names at its address."""
        key = build_id, offset
        encoded = self._encoded.get(key)
        if encoded is None:
            _check(self._deadline)
            named = self._engine.at_address(build_id, base + offset)
            if named.why:
                self._why.setdefault(debug_id, {})[named.why] = None
            fields = self._fields(build_id, base + offset, named.frames)
            encoded = b"," + msgspec.json.encode(fields)[1:-1] if fields else b""
            self._encoded[key] = encoded
        return encoded

    def _fields(
        self, build_id: BuildId, address: int, frames: tuple[Frame, ...]
    ) -> dict[str, object]:
        if not frames:
            return {}
        fields = _place_fields(frames[-1])
        start = frames[-1].start
        if start is not None and start <= address:
            fields["function_offset"] = hex(address - start)
            symbol = self._symbol(build_id, start)
            if symbol is not None and symbol.start == start and address < start + symbol.size:
                fields["function_size"] = hex(symbol.size)
        if len(frames) > 1:
            fields["inlines"] = [_place_fields(frame) for frame in frames[:-1]]
        return fields

    def _symbol(self, build_id: BuildId, start: int) -> Symbol | None:
        key = build_id, start
        if key not in self._symbols:
            self._symbols[key] = self._engine.symbol(build_id, start)
        return self._symbols[key]


def _place_fields(frame: Frame) -> dict[str, object]:
    fields: dict[str, object] = {}
    if frame.function:
        fields["function"] = frame.function[:_MOST_TEXT]
    if frame.file:
        fields["file"] = frame.file[:_MOST_TEXT]
    if frame.line:
        fields["line"] = frame.line
    return fields


def _place(frames: tuple[Frame, ...], address: int) -> str:
    """Return the name of a function with the offset from its beginning."""
    if not frames or not frames[-1].function:
        return ""
    function, start = frames[-1].function[:_MOST_TEXT], frames[-1].start
    if start is None or address < start:
        return function
    return function if address == start else f"{function}+{address - start:#x}"


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise _TooLate


def _decoded(body: bytes, kind: type[T]) -> T:
    """Return the request in a body. Raises `BadRequest`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:  # msgspec raises ValueErrors
        raise BadRequest(f"not a request: {str(error)[:200]}") from None


def source_request(body: bytes) -> tuple[_Source, int]:
    """Return a request for a source file, and its offset. Raises `BadRequest`."""
    wanted = _decoded(body, _Source)
    return wanted, _number(wanted.module_offset, "moduleOffset")


def asm_request(body: bytes) -> tuple[_Asm, int, int]:
    """Return a request for instructions, the offset of the first one, and bytes. Raises
    `BadRequest`.
    """
    wanted = _decoded(body, _Asm)
    return wanted, _number(wanted.start_address, "startAddress"), _number(wanted.size, "size")


def jobs_in(body: bytes) -> list[_Job]:
    """Return the jobs of a request for names, within limits. Raises `BadRequest`."""
    request = _decoded(body, _Symbolicate)
    jobs = request.jobs
    if jobs is None:
        if request.memory_map is None or request.stacks is None:
            raise BadRequest("the request has neither jobs nor memoryMap and stacks")
        jobs = [_Job(request.memory_map, request.stacks)]
    modules = sum(len(job.memory_map) for job in jobs)
    frames = sum(len(stack) for job in jobs for stack in job.stacks)
    for count, most, what in (
        (len(jobs), _MOST_JOBS, "jobs"),
        (modules, _MOST_MODULES, "modules"),
        (frames, _MOST_FRAMES, "frames"),
    ):
        if count > most:
            raise BadRequest(f"the request has more than {most} {what}")
    for job in jobs:
        for stack in job.stacks:
            for index, offset in stack:
                if not -1 <= index < len(job.memory_map):
                    raise BadRequest(f"a frame is in module {index}, which memoryMap lacks")
                if not -1 <= offset < 1 << 64:
                    raise BadRequest(f"no such offset: {offset}")
    return jobs


def _number(text: str, name: str) -> int:
    match = _HEX.fullmatch(text)
    if match is None:
        raise BadRequest(f"{name} is no hexadecimal number that begins with 0x")
    return int(match[1], 16)


def _read(file: FileContent, offset: int, size: int | None) -> bytes:
    """Read bytes of an open file, and close it; scripts of files that are not the host's read as
    zeros.
    """
    assert file.blob is not None
    content = Content(file, offset, file.blob.size - offset if size is None else size)
    try:
        return content.read()
    finally:
        content.close()


def _machine_and_loads(file: FileContent) -> tuple[Machine, list[header.Segment]]:
    assert file.blob is not None
    blob = file.blob
    machine = code_file.machine_of(blob.read_at(0, 64))
    if machine is None:
        raise _NotAnswered("the executable is no ELF file")
    return machine, header.loaded(blob.read_at, blob.size)


def _code(file: FileContent, loads: Sequence[header.Segment], address: int, size: int) -> bytes:
    """Return up to ``size`` bytes that are loaded at an address. Raises `_NotAnswered`."""
    assert file.blob is not None
    for load in loads:
        behind = address - load.address
        if load.flags & header.PF_X and 0 <= behind < load.size:
            offset = load.offset + behind
            length = min(size, load.size - behind, file.blob.size - offset)
            if length > 0:
                return Content(file, offset, length).read()
    raise _NotAnswered("no code of the file is at that address")
