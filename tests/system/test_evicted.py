# SPDX-License-Identifier: Apache-2.0
"""Commands state the removal of bytes that a limit took, not that nothing was captured."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import pytest

from buildidfs.model import NO_NAMES, BuildId, ContainerNames, Kind, Quality
from buildidfs.store import Store
from tests.support.elf.elfwriter import elf_file
from tests.support.elf.perfwriter import PerfWriter
from tests.support.harness.captures import capture, commit, sighting

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.support.harness.mounts import BuildIdFs

WEB, DB, LARGE, SMALL = (f"docker:{digit * 12}" for digit in "abcd")
PROGRAMS = [BuildId(bytes([number]) * 20) for number in range(1, 11)]
DEBUGGED = BuildId(b"\x20" * 20)
AT = r"removed to make room at 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}"
FALSE = ("never captured", "no file with DWARF", "install the debug package", "100.0%", "has seen")


@pytest.fixture
def evicted(buildidfs: BuildIdFs) -> BuildIdFs:
    """A store that has lost ten programs of two containers, and the debug file of another one."""
    with Store.create(buildidfs.store) as store:
        for path, label, content, kind, quality in (
            (b"/app/served.debug", LARGE, os.urandom(12 << 20), Kind.DEBUGINFO, Quality.DEBUGINFO),
            (b"/app/served", SMALL, b"its program", Kind.EXECUTABLE, Quality.SYMTAB),
        ):
            at = sighting(path, container=label)
            kinds = (kind,)
            commit(store, capture(store, content, DEBUGGED, kinds=kinds, at=at, quality=quality))
        for number, build_id in enumerate(PROGRAMS):
            at = sighting(b"/app/%d" % number, container=(WEB, DB)[number % 2])
            content = elf_file(build_id=bytes(build_id)) + os.urandom(1 << 20)
            commit(store, capture(store, content, build_id, at=at, quality=Quality.SYMTAB))
    buildidfs("prune", "--max-size", "1M")
    with Store.open(buildidfs.store) as store:
        assert not any(store.index.ordinal(build_id) for build_id in PROGRAMS)
        ordinal = store.index.ordinal(DEBUGGED)
        assert ordinal is not None
        assert store.index.artifact(ordinal, Kind.DEBUGINFO) is None
    return buildidfs


def profile_of(directory: Path, build_ids: Sequence[BuildId] = (*PROGRAMS, DEBUGGED)) -> Path:
    write = PerfWriter()
    records = b""
    for number, build_id in enumerate(build_ids):
        base = 0x10000 * (number + 1)
        records += write.mmap2(1, base, 0x1000, b"/app/%d" % number, build_id=bytes(build_id))
        records += write.sample(1, base + 16, 9)
    file = directory / "perf.data"
    file.write_bytes(write.file(records))
    return file


@pytest.mark.parametrize("command", ["why", "show", "where"])
@pytest.mark.parametrize("build_id", [PROGRAMS[0], DEBUGGED], ids=["all", "debuginfo"])
def test_command_states_the_removal(evicted: BuildIdFs, command: str, build_id: BuildId) -> None:
    out = evicted(command, str(build_id)).out
    if command == "where":
        assert ("removed" in out) == (build_id != DEBUGGED)
    else:
        assert re.search(AT, out), out
    assert not [text for text in FALSE if text in out]
    if command == "why":
        assert re.search(rf"^run     buildidfs .*fetch {build_id}$", out, re.MULTILINE)
        assert "max-size" in out


def test_profile_states_the_removal(evicted: BuildIdFs, tmp_path: Path) -> None:
    file = profile_of(tmp_path)
    for command in ("why", "coverage"):
        out = evicted(command, file).out
        assert re.search(AT, out) or "removed to make room" in out, out
        assert not [text for text in FALSE if text in out], out
    rows = json.loads(evicted("coverage", "--json", file).out)["rows"]
    assert all(re.fullmatch(AT, row["why"]) for row in rows if row["path"] != "/app/10")


def test_containers_count_what_was_removed(evicted: BuildIdFs) -> None:
    done = evicted("containers", LARGE, check=False)
    assert (done.rc, json.loads(evicted("containers", "--json", LARGE).out)["removed"]) == (0, 1)
    assert re.search(rf"all files of container {LARGE} were {AT}", done.err)
    with Store.open(evicted.store) as store:
        at = sighting(b"/app/new", container=WEB)
        commit(store, capture(store, b"new", b"\x77" * 20, at=at, quality=Quality.SYMTAB))
    (row,) = [json.loads(line) for line in evicted("containers", "--json", WEB).out.splitlines()]
    assert (row["build_ids"], row["removed"]) == (1, 5)
    assert row["coverage"]["symbols"] == round(1 / 6, 6)
    assert "5 build IDs of them removed to make room" in evicted("containers", WEB).err


def test_report_counts_what_was_removed(evicted: BuildIdFs) -> None:
    report = evicted("report").out
    assert "11 build IDs: removed to make room" in report
    assert "buildidfs fetch ID" in report
    said = evicted("containers").err
    assert len(re.findall(rf"all files of container docker:\w+ were {AT}", said)) == 3


def test_removed_file_is_not_lost_and_the_journal_says_so(evicted: BuildIdFs) -> None:
    assert evicted("journal").out.count("removed") == len(PROGRAMS)
    lost = evicted("journal", "--lost")
    assert lost.out == ""
    assert "no watch on this store has lost a file" in lost.err
    assert "a limit removed were captured, so they are not lost: buildidfs journal" in lost.err


def test_removed_place_has_the_time_of_its_removal(evicted: BuildIdFs) -> None:
    (row,) = [
        json.loads(line) for line in evicted("where", "--json", str(PROGRAMS[0])).out.splitlines()
    ]
    assert (row["held"], row["path"], row["container"]) == (False, "/app/0", WEB)
    assert row["removed"] > 1_700_000_000
    shown = json.loads(evicted("show", "--json", str(PROGRAMS[0])).out)
    assert shown["removed"] == row["removed"]
    listed = evicted("journal", "--path", "/app/0").out.rstrip("\n").split("\t")
    assert listed[3:5] == ["removed", "/app/0"]


def test_file_that_is_captured_once_more_is_not_called_removed(
    evicted: BuildIdFs, tmp_path: Path
) -> None:
    file = tmp_path / "program"
    file.write_bytes(elf_file(build_id=bytes(PROGRAMS[0])))
    evicted("add", file)
    for command in ("why", "show", "where"):
        assert not re.search(AT, evicted(command, str(PROGRAMS[0])).out)
    assert "\theld\t" in evicted("where", str(PROGRAMS[0])).out


NAMES = {WEB: ContainerNames(name="web-1", image="shop/web:1"), DB: ContainerNames(name="db-1")}


def test_container_without_a_file_left_keeps_its_name(buildidfs: BuildIdFs, tmp_path: Path) -> None:
    """Its engine has forgotten it, so the store is the only one that knows the name."""
    with Store.create(buildidfs.store) as store:
        store.name_containers(lambda origin: NAMES.get(origin.container, NO_NAMES))
        for number, build_id in enumerate(PROGRAMS):
            label = (WEB, DB)[number % 2]
            group = b"/docker/" + label[-1:].encode() * 64
            at = sighting(b"/app/%d" % number, container=label, cgroup=group, apart=0x22)
            content = elf_file(build_id=bytes(build_id)) + os.urandom(1 << 20)
            commit(store, capture(store, content, build_id, at=at, quality=Quality.SYMTAB))
    buildidfs("prune", "--max-size", "500K")
    with Store.open(buildidfs.store) as store:
        assert list(store.check()) == []
    prefix, file = str(PROGRAMS[0])[:4], profile_of(tmp_path, PROGRAMS)
    for words in (
        ["containers", "web-1"], ["why", prefix], ["show", prefix], ["where", prefix],
        ["which", "/app/0", "--container", "web-1"], ["journal", "--container", "web-1"],
        ["coverage", file, "--container", "web-1"], ["why", file, "--container", "web-1"],
    ):  # fmt: skip
        done = buildidfs(*words)
        assert "web-1" in done.out, words
        assert re.search(f"{AT}|removed", done.out + done.err), words
        said = re.sub(r"100\.0%(  5 samples:)?  ?removed to make room", "", done.out + done.err)
        assert not [text for text in FALSE if text in said], words
    for words in (["list", "--container", "web-1"], ["pin", "--container", "db-1"]):
        done = buildidfs(*words, check=False)
        assert done.rc == 30
        assert re.search(rf"all files of container (web|db)-1 \(docker:\w+\) were {AT}", done.err)
    (row,) = map(json.loads, buildidfs("containers", "--json", "web-1").out.splitlines())
    assert (row["build_ids"], row["removed"], row["coverage"]["symbols"]) == (0, 5, 0.0)
    assert row["last_removed"] > 1_700_000_000
    report = buildidfs("report").out
    assert "web-1 (5 build IDs removed)" in report
    assert "image shop/web" not in report
    page = tmp_path / "page.html"
    buildidfs("report", "--html", page)
    assert re.search(r"web-1.*5 build IDs removed, the last", page.read_text(), re.DOTALL)
    for words in (["get", prefix, "-o", tmp_path / "out"], ["bundle", file, "-o", tmp_path / "b"]):
        done = buildidfs(*words, check=False)
        assert "removed to make room" in done.err
        assert "never captured" not in done.err
    asked = buildidfs("symbolize", f"{PROGRAMS[0]}+0x10", check=False)
    assert re.search(rf"{PROGRAMS[0]}: {AT}", asked.err)
    with buildidfs.mounted() as mount:
        assert not (mount / "containers" / "web-1").exists()
        assert os.listdir(mount / "containers") == []
        with Store.open(buildidfs.store) as store:
            at = sighting(b"/app/new", container=WEB, cgroup=b"/docker/" + b"a" * 64)
            commit(store, capture(store, b"new", b"\x77" * 20, at=at, quality=Quality.SYMTAB))
        assert (mount / "containers" / "web-1" / "root/app/new").read_bytes() == b"new"
