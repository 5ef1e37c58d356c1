# SPDX-License-Identifier: Apache-2.0
"""A truncated copy of a file is never served beside the whole file, whichever was seen first."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from buildidfs.capture.scan.tree import TreeScanner
from buildidfs.formats.elf.identify import ElfFile, describe
from buildidfs.ingest import Ingest, StoreMemo
from buildidfs.model import Artifact, BuildId, Kind
from buildidfs.store import Store, schema
from buildidfs.store.index import environment
from tests.support.clients.tools import run, tool
from tests.support.elf.elfwriter import SYMTAB, TEXT, elf_file
from tests.support.filesystems.filereader import FileReader
from tests.support.harness.damages import with_new_index

if TYPE_CHECKING:
    from buildidfs.store.index.environment import Environment, Txn
    from tests.support.elf.programs import Program
    from tests.support.harness.mounts import BuildIdFs

PLACES = 6
PHNUM_AT = 56
SAMPLES = ("executable", "library", "unstripped", "objcopy", "eu-strip")


TRAILER = b"~Module signature appended~\n"


def _whole(program: Program, directory: Path, name: str) -> Path:
    """A real file of that sort."""
    full, made = program.exe.compiled, directory / name
    if name == "executable":
        return program.exe.shipped
    if name == "library":
        return program.lib.shipped
    if name == "unstripped":
        return full
    if name == "objcopy":
        run([tool("objcopy"), "--only-keep-debug", full, made], check=True)
    else:
        run([tool("eu-strip"), full, "-f", made, "-o", directory / "stripped"], check=True)
    return made


def _copies(data: bytes) -> Iterator[bytes]:
    """Copies that debuggers refuse, most of which have the build ID."""
    chosen = random.Random(len(data))
    yield data[: len(data) // 2]
    yield data[: -len(data) // 4]
    yield data[:-1]
    yield data[:-2500]
    for _ in range(PLACES):
        yield data[: chosen.randrange(1, len(data))]
    yield data[:PHNUM_AT] + b"\xff\xff" + data[PHNUM_AT + 2 :]
    yield data[: len(data) // 2] + bytes(len(data) - len(data) // 2)  # allocated, not written


def _scan(store: Store, *paths: Path) -> None:
    Ingest(store).run(TreeScanner(StoreMemo(store), [os.fsencode(path) for path in paths]))


def _described(data: bytes) -> ElfFile:
    file = describe(FileReader(data), len(data))
    assert isinstance(file, ElfFile)
    return file


@pytest.mark.parametrize("first", ["truncated", "whole"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_the_whole_file_is_served(
    program: Program, directory: Path, sample: str, first: str
) -> None:
    whole = _whole(program, directory, sample)
    data = whole.read_bytes()
    described = _described(data)
    captured = 0
    for number, copy in enumerate(_copies(data)):
        truncated = directory / f"{number}.truncated"
        truncated.write_bytes(copy)
        order = [truncated, whole] if first == "truncated" else [whole, truncated]
        with Store.create(directory / f"{number}.store") as store:
            for path in order:
                _scan(store, path)
            ordinal = store.index.ordinal(described.build_id)
            assert ordinal is not None
            kept = sum(len(store.index.variants(ordinal, kind)) for kind in Kind)
            captured += kept > len(described.kinds)
            for kind in described.kinds:
                served = store.index.artifact(ordinal, kind)
                assert served is not None
                assert served.digest == hashlib.sha256(data).digest(), (number, kind)
    assert captured > 2


@pytest.mark.parametrize("first", ["truncated", "whole"])
def test_what_stands_behind_an_elf_file_belongs_to_it(directory: Path, first: str) -> None:
    """No header tells of the signature of a kernel module."""
    build_id = b"\x12" * 20
    data = elf_file([TEXT, SYMTAB], build_id=build_id) + bytes(500) + TRAILER
    whole, copy = directory / "whole", directory / "copy"
    whole.write_bytes(data)
    copy.write_bytes(data[:-9])
    with Store.create(directory / "store") as store:
        for path in (copy, whole) if first == "truncated" else (whole, copy):
            _scan(store, path)
        served = store.index.artifact(1, Kind.EXECUTABLE)
        assert served is not None
        assert served.size == len(data)
        why = store.why(1, store.index.variants(1, Kind.EXECUTABLE))
        assert why == ["has more bytes", "has fewer bytes"]


def test_show_says_what_is_truncated(
    buildidfs: BuildIdFs, program: Program, directory: Path
) -> None:
    data = program.exe.shipped.read_bytes()
    (directory / "copy").write_bytes(data[:-2500])
    for path in (directory / "copy", program.exe.shipped):
        buildidfs("scan", "tree", path)
    text = buildidfs("show", program.exe.build_id).out
    assert ", not served because it is truncated" in text
    wanted = f"would end at byte {len(data)}, and the file does at {len(data) - 2500}"
    assert f"truncated: its section headers {wanted}" in text
    shown = json.loads(buildidfs("show", "--json", program.exe.build_id).out)["variants"]
    assert [(each["served"], bool(each["truncated"])) for each in shown] == [
        (True, False), (False, True),
    ]  # fmt: skip


def test_check_finds_a_truncated_file_that_the_index_calls_whole(
    program: Program, directory: Path
) -> None:
    data = program.exe.shipped.read_bytes()
    (directory / "copy").write_bytes(data[:-2500])
    with Store.create(directory / "store") as store:
        _scan(store, directory / "copy", program.exe.shipped)
        ordinal = store.index.ordinal(BuildId.from_hex(program.exe.build_id))
        assert ordinal is not None
        whole, copy = store.index.variants(ordinal, Kind.EXECUTABLE)
        assert (whole.truncated, copy.truncated) == (False, True)
        env = environment.acquire(store.path, read_only=False)
        _serve_as_whole(env, copy, whole)
        environment.release(env)
        served = store.index.artifact(ordinal, Kind.EXECUTABLE)
        assert served is not None
        assert (served.digest, served.truncated) == (copy.digest, False)
        checker = store.checker()
        (fault,) = checker.files(whole=True)
        assert "is not whole, as the index says" in fault.text
        with with_new_index(store) as again:
            ordinal = again.index.ordinal(BuildId.from_hex(program.exe.build_id))
            assert ordinal is not None
            served = again.index.artifact(ordinal, Kind.EXECUTABLE)
            assert served is not None
            assert (served.digest, served.truncated) == (whole.digest, False)
            assert list(again.check(digests=True)) == []


def _serve_as_whole(env: Environment, served: Artifact, other: Artifact) -> None:
    """Write the rows of two variants of an executable as if the first were whole, and better."""

    def work(txn: Txn) -> None:
        key = schema.ORDINAL_KIND.pack(served.ordinal, served.kind)
        for each in (served, other):
            txn.delete(key + schema.U16.pack(each.variant), db=env.tables["variants"])
        row = schema.pack_artifact(msgspec.structs.replace(served, truncated=False))
        txn.put(key, row, db=env.tables["artifacts"])
        of_other = key + schema.U16.pack(other.variant)
        txn.put(of_other, schema.pack_artifact(other), db=env.tables["variants"])

    env.write(work)
