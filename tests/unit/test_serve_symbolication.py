# SPDX-License-Identifier: Apache-2.0
"""Requests of the symbol server, with an engine whose answers a test decides on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from buildidfs.config import Settings
from buildidfs.errors import UsageError
from buildidfs.formats.symbolizer_output import Frame, Symbol
from buildidfs.model import BuildId, Trust
from buildidfs.serve import symbolication
from buildidfs.serve.backend import Backend
from buildidfs.serve.counters import SharedMisses
from buildidfs.serve.debuginfod import Debuginfod
from buildidfs.serve.messages import BadRequest, Request, Response
from buildidfs.serve.symbolication import Symbolication
from buildidfs.store import Store
from tests.support.harness.captures import capture

if TYPE_CHECKING:
    from buildidfs.formats.elf.code_file import Instruction, Machine

LONG, SHORT = bytes(range(1, 21)), b"\x01\x02\x03\x04\x05\x06\x07\x08"


class _Answer:
    def __init__(self, *frames: Frame) -> None:
        self.frames = frames
        self.why = "" if frames else "no symbol"


class _Engine:
    """Names each address after itself."""

    def __init__(self, store: Store) -> None:
        self.asked: list[tuple[BuildId, int]] = []
        self.closed = 0
        self.long = 1

    def refresh(self) -> None:
        pass

    def base(self, build_id: BuildId) -> int | None:
        return 0x1000

    def at_address(self, build_id: BuildId, address: int) -> _Answer:
        self.asked.append((build_id, address))
        return _Answer(Frame(f"f{address:x}" * self.long, "/a.c", 7, 0, address - 1))

    def symbol(self, build_id: BuildId, address: int) -> Symbol | None:
        return Symbol(address, 16)

    def disassemble(
        self, machine: Machine, address: int, code: bytes, size: int
    ) -> list[Instruction]:
        return []

    def close(self) -> None:
        self.closed += 1


def opened(tmp_path: Path) -> Backend:
    return Backend(tmp_path / "store", Settings(), SharedMisses(1), 0)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Backend]:
    with Store.create(tmp_path / "store") as store:
        store.commit([capture(store, b"long", LONG), capture(store, b"short", SHORT)])
    backend = opened(tmp_path)
    yield backend
    backend.close()


def made(
    backend: Backend, patch: pytest.MonkeyPatch, limit_s: float = 30.0
) -> tuple[Symbolication, _Engine]:
    engine = _Engine(backend.store)
    patch.setattr(symbolication, "PublicSymbolizer", lambda store: engine)
    service = Symbolication(backend, Debuginfod(backend))
    service.limit_s = limit_s
    return service, engine


def debug_id(build_id: bytes, *, little_endian: bool = True) -> str:
    guid = build_id[:16].ljust(16, b"\0")
    if little_endian:
        guid = guid[3::-1] + guid[5:3:-1] + guid[7:5:-1] + guid[8:]
    return f"{guid.hex()}0"


def ask(service: Symbolication, body: object, path: bytes = symbolication.SYMBOLICATE) -> Response:
    data = json.dumps(body).encode()
    request = Request(b"POST", path, {}, body=data, client="test", path=path)
    answer = service.answer(request)
    return answer if isinstance(answer, Response) else answer()


def job(build_id: str, *offsets: int) -> dict[str, object]:
    return {"memoryMap": [["m", build_id]], "stacks": [[[0, offset] for offset in offsets]]}


def result(response: Response) -> Any:
    assert isinstance(response.content, bytes)
    assert response.status == 200, response
    return json.loads(response.content)["results"][0]


@pytest.mark.parametrize("little_endian", [True, False])
@pytest.mark.parametrize("build_id", [LONG, SHORT], ids=["20 bytes", "8 bytes"])
def test_module_is_found_by_its_debug_id(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, build_id: bytes, little_endian: bool
) -> None:
    service, engine = made(backend, monkeypatch)
    text = debug_id(build_id, little_endian=little_endian)
    told = result(ask(service, job(text, 0x10)))
    assert told["found_modules"] == {f"m/{text}": True}
    assert engine.asked == [(build_id, 0x1010)]
    frame = told["stacks"][0][0]
    assert (frame["function"], frame["function_offset"]) == ("f1010", "0x1")
    assert frame["function_size"] == "0x10"


@pytest.mark.parametrize(("trust", "is_found"), [(Trust.CONTAINER, True), (Trust.HOST, False)])
def test_of_two_files_with_one_debug_id_the_more_trusted_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trust: Trust, is_found: bool
) -> None:
    with Store.create(tmp_path / "store") as store:
        other = capture(store, b"other", LONG[:16] + b"evil", trust=trust)
        store.commit([capture(store, b"long", LONG, trust=Trust.HOST), other])
    with contextlib.closing(opened(tmp_path)) as backend:
        service, engine = made(backend, monkeypatch)
        found = result(ask(service, job(debug_id(LONG), 0x10)))["found_modules"]
    assert list(found.values()) == [is_found]
    assert {each for each, _ in engine.asked} == ({LONG} if is_found else set())


def test_each_address_is_asked_for_once(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    service, engine = made(backend, monkeypatch)
    told = result(ask(service, job(debug_id(LONG), *[1, 2] * 1000)))
    assert len(engine.asked) == 2
    assert len(told["stacks"][0]) == 2000
    assert told["stacks"][0][1999]["frame"] == 1999


def test_request_beyond_its_time_is_to_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    service, _ = made(backend, monkeypatch, -1.0)
    reply = ask(service, job(debug_id(LONG), 1))
    assert reply.status == 503
    assert b"Retry-After" in reply.headers
    assert isinstance(reply.content, bytes)
    assert list(json.loads(reply.content)) == ["error"]


def test_answer_has_a_longest_size(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    service, engine = made(backend, monkeypatch)
    engine.long = 600
    with pytest.raises(BadRequest, match="ask for fewer frames"):
        ask(service, job(debug_id(LONG), *range(60_000)))


def test_symbolizer_ends_when_nobody_has_asked_for_long(
    monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    service, engine = made(backend, monkeypatch)
    assert not service.is_idle(1e18)
    ask(service, job(debug_id(LONG), 1))
    assert not service.is_idle(0)
    assert service.is_idle(1e18)
    service.close()
    service.close()
    assert engine.closed == 1
    ask(service, job(debug_id(LONG), 2))
    service.stop()
    assert ask(service, job(debug_id(LONG), 3)).status == 503


def test_without_a_symbolizer_the_answer_is_no_absence(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine_of(store: Store) -> _Engine:
        raise UsageError("neither llvm-symbolizer nor eu-addr2line is installed")

    monkeypatch.setattr(symbolication, "PublicSymbolizer", engine_of)
    service = Symbolication(backend, Debuginfod(backend))
    assert ask(service, job(debug_id(LONG), 1)).status == 503
