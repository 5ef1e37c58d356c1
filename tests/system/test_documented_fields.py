# SPDX-License-Identifier: Apache-2.0
"""Every field that a program may find in JSON output is explained in buildidfs(1)."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest

from buildidfs.model import BuildId
from buildidfs.store import NewSeen, Store
from tests.support.captures import sighting
from tests.support.clients import run, tool
from tests.support.commands import ROOT
from tests.support.elfwriter import elf_file
from tests.support.waiting import until
from tests.support.watching import watching

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.mounts import BuildIdFs

# Keys that are data: reasons, kinds, namespaces.
_COUNTS = {"absent", "artifacts", "host_without_build_id", "namespaces"}


@pytest.fixture(scope="module")
def output_section() -> dict[str, str]:
    """What the section OUTPUT says of each command."""
    argv = [tool("groff"), "-mandoc", "-Tascii", "-rLL=2000n", "-P-cbou", ROOT / "man/buildidfs.1"]
    page = run(argv, check=True).out
    text = page.partition("\nOUTPUT\n")[2].partition("\nPRIVILEGES\n")[0]
    names = ("scan tree --dry-run", "scan", "watch", "list", "show", "journal", "stats")
    start = rf"^ {{5}}(?=(?:{'|'.join(names)})\b)"
    general, *items = re.split(start, text, flags=re.MULTILINE)
    said = [" ".join(each.split()) for each in items]
    return {
        next(name for name in names if each.startswith(f"{name} ")): f"{general} {each}"
        for each in said
    }


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


def test_fields_are_in_the_page(
    output_section: dict[str, str], buildidfs: BuildIdFs, tmp_path: Path
) -> None:
    build_id = bytes.fromhex("f1e1d5" * 6)
    (tmp_path / "some.so").write_bytes(elf_file(build_id=build_id))
    (tmp_path / "other.so").write_bytes(elf_file(build_id=None))
    with open(os.fsencode(tmp_path) + b"/caf\xe9.so", "wb") as file:
        file.write(elf_file(build_id=build_id[::-1]))
    commands = {
        "scan tree --dry-run": ["scan", "tree", "--dry-run", tmp_path],
        "scan": ["scan", "tree", tmp_path, tmp_path / "missing"],
        "watch": [],
        "list": ["list"],
        "show": ["show", build_id[::-1].hex()],
        "journal": ["journal"],
        "stats": ["stats"],
    }
    assert set(output_section) == set(commands)
    with Store.create(buildidfs.store) as store:
        store.journal([NewSeen(sighting(b"/caf\xe9"), BuildId(build_id))])
    for name, words in commands.items():
        if name == "watch":
            objects = watched(buildidfs)
        else:
            done = buildidfs(*words, "--json", check=False)
            assert done.rc in (0, 3), done
            objects = [json.loads(line) for line in done.out.splitlines()]
        found = {key for each in objects for key in keys(each)}
        assert len(found) >= 2
        unknown = [key for key in found if not re.search(rf"\b{key}\b", output_section[name])]
        assert unknown == [], name
