# SPDX-License-Identifier: Apache-2.0
"""Every field that a program may find in JSON output is explained in buildidfs-json(5)."""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest

from buildidfs.model import BuildId
from buildidfs.store import NewSeen, Store
from tests.support.clients.commands import ROOT
from tests.support.clients.manuals import formatted, indent
from tests.support.elf.corewriter import Mapped, core_file
from tests.support.elf.elfwriter import elf_file
from tests.support.elf.jit import jit_process
from tests.support.elf.perfwriter import PerfWriter
from tests.support.elf.programs import build_id_of
from tests.support.harness.captures import capture, commit, sighting
from tests.support.harness.children import cat_program, copied_cat
from tests.support.harness.waiting import until
from tests.support.harness.watching import watching

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.elf.programs import Program
    from tests.support.harness.mounts import BuildIdFs

# Keys that are data: reasons, kinds, namespaces.
_COUNTS = {"absent", "artifacts", "namespaces"}


@pytest.fixture(scope="module")
def output_section() -> dict[str, str]:
    """What the page of the fields says of each command."""
    page = formatted(ROOT / "man/buildidfs-json.5").out
    text = page.partition("\nDESCRIPTION\n")[2].partition("\nSEE ALSO\n")[0]
    names = (
        "pin --list", "prune", "gc", "status", "config",
        "scan perf-data", "scan image", "coverage", "repair",
        "scan tree --dry-run",
        "scan tree --sources", "scan package", "scan core", "scan", "watch", "list", "show",
        "containers", "why",
        "check", "journal", "jit", "which", "where --live", "where", "symbolize", "stats",
    )  # fmt: skip
    start = rf"^{indent(page)}(?=(?:{'|'.join(names)})\b)"
    general, *items = re.split(start, text, flags=re.MULTILINE)
    said = [" ".join(each.split()) for each in items]
    sections = {
        next(name for name in names if each.startswith(f"{name} ")): f"{general} {each}"
        for each in said
    }
    sections["scan package"] += sections["scan"]  # "Besides, ..."
    sections["scan image"] += sections["scan"]
    sections["scan perf-data"] += sections["scan"]
    sections["scan core"] += sections["scan"]
    sections["scan tree --sources"] += sections["scan"]
    sections["where"] += sections["which"]
    return sections


def keys(value: object) -> Iterator[str]:
    """The names of all fields of an object, however deep."""
    if isinstance(value, list):
        for each in value:
            yield from keys(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            if key not in _COUNTS:
                yield from keys(each)


def watched(buildidfs: BuildIdFs) -> list[dict[str, Any]]:
    """What a watch prints that has captured something, and been stopped."""
    with watching(buildidfs.store, "--json") as watcher:
        until(lambda: [x for x in watcher.events if x["event"] == "captured"], "a capture", 60)
    names = {each["event"] for each in watcher.events}
    assert {"captured", "stopped"} <= names <= {"captured", "not captured", "stopped", "counts"}
    return watcher.events


def _profile() -> bytes:
    """A profile with one name for two build IDs, and a file without one."""
    write = PerfWriter()
    records = b"".join(
        write.mmap2(1, 0x10000 * number, 0x1000, b"/app", build_id=bytes([number]) * 20)
        + write.sample(1, 0x10000 * number, 9)
        for number in (1, 2)
    )
    records += write.mmap2(1, 0x30000, 0x1000, b"/other") + write.sample(1, 0x30000, 9)
    return write.file(records)


def test_fields_are_in_the_page(
    output_section: dict[str, str], buildidfs: BuildIdFs, tmp_path: Path, program: Program
) -> None:
    build_id = bytes.fromhex("f1e1d5" * 6)
    (tmp_path / "some.so").write_bytes(elf_file(build_id=build_id))
    (tmp_path / "other.so").write_bytes(elf_file(build_id=None))
    with open(os.fsencode(tmp_path) + b"/caf\xe9.so", "wb") as file:
        file.write(elf_file(build_id=build_id[::-1]))
    profile = tmp_path / "perf.data"
    profile.write_bytes(_profile())
    core = tmp_path / "core"
    core.write_bytes(core_file([Mapped(0x10000, elf_file(build_id=build_id)[:4096], b"/app")]))
    buildidfs("scan", "tree", program.exe.compiled)
    address = f"{program.exe.build_id}+{program.exe.address('main'):#x}"
    commands = {
        "pin --list": ["pin", "--list"],
        "prune": ["prune", "--dry-run", "-v"],
        "gc": ["gc"],
        "status": ["status"],
        "scan core": ["scan", "core", core, tmp_path / "missing"],
        "which": ["which", program.exe.compiled],
        "where": ["where", program.exe.build_id],
        "where --live": ["where", "--live", build_id_of(cat_program())],
        "symbolize": ["symbolize", address],
        "scan perf-data": ["scan", "perf-data", profile, tmp_path / "missing"],
        "coverage": ["coverage", profile],
        "why": ["why", profile],
        "repair": ["repair", profile, "-o", tmp_path / "repaired.data"],
        "scan tree --dry-run": ["scan", "tree", "--dry-run", tmp_path],
        "scan tree --sources": ["scan", "tree", "--sources", tmp_path],
        "scan package": ["scan", "package", tmp_path, tmp_path / "missing"],
        "scan image": ["scan", "image", tmp_path],
        "scan": ["scan", "tree", tmp_path, tmp_path / "missing"],
        "watch": [],
        "list": ["list"],
        "config": ["config"],
        "containers": ["containers"],
        "show": ["show", build_id[::-1].hex()],
        "journal": ["journal"],
        "jit": ["jit"],
        "stats": ["stats"],
        "check": ["check"],
    }
    assert set(output_section) == set(commands)
    with Store.create(buildidfs.store) as store:
        store.pin([BuildId(build_id[::-1])], b"caf\xe9")
        store.note_seen([NewSeen(sighting(b"/caf\xe9"), BuildId(build_id))])
        commit(store, capture(store, b"bytes", at=sighting(b"/app", container="docker:0123")))
        store.jit_maps.write(jit_process(7), 0, b"1000 10 f\n")
    for name, words in commands.items():
        context = copied_cat(tmp_path / "cat") if "--live" in words else contextlib.nullcontext()
        if name == "watch":
            objects = watched(buildidfs)
        else:
            if name == "check":  # which has little to say of a store that is sound
                next(iter(buildidfs.store.glob("blobs/*/*"))).unlink()
            with context:
                done = buildidfs(*words, "--json", check=False)
            assert done.rc in (0, 3, 20), done
            objects = [json.loads(line) for line in done.out.splitlines()]
        found = {key for each in objects for key in keys(each)}
        assert len(found) >= 2
        unknown = [key for key in found if not re.search(rf"\b{key}\b", output_section[name])]
        assert unknown == [], name
