# SPDX-License-Identifier: Apache-2.0
"""``which`` and ``where``: from a path to build IDs, from a build ID to places and processes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from buildidfs.capture.base import Unreadable
from buildidfs.capture.process.mapped_by import Mapper, Mappers
from buildidfs.capture.process.process import Ways
from buildidfs.model import BuildId, Kind
from buildidfs.store import NewSeen, Store
from tests.support.clients.tools import run, tool
from tests.support.elf.programs import build_id_of
from tests.support.harness.captures import NOW, SECOND, capture, sighting
from tests.support.harness.children import cat_program, copied_cat, private_cat
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.scans import without_privileges

OLD, NEW, LOST = (BuildId(bytes([number]) * 20) for number in (0x01, 0x0E, 0x10))
DOCKER = {"cgroup": b"/docker/" + b"01" * 32, "container": "docker:010101010101", "apart": 0x22}
LIB = b"/usr/lib/libc.so.6"


@pytest.fixture
def buildidfs(directory: Path) -> BuildIdFs:
    """The program on a store in which a path had three build IDs, of one of which no bytes."""
    program = BuildIdFs(directory)
    with Store.create(program.store) as store:
        store.commit(
            [
                capture(store, b"old", OLD, at=sighting(LIB)),
                capture(store, b"new", NEW, at=sighting(LIB, seen_ns=NOW + 60 * SECOND)),
                capture(store, b"new", NEW, at=sighting(LIB, seen_ns=NOW + 9 * SECOND, **DOCKER)),
                capture(store, b"old", OLD, at=sighting(b"/opt/caf\xe9\n.so")),
            ]
        )
        store.note_seen(
            [
                NewSeen(sighting(LIB, seen_ns=NOW + 90 * SECOND), LOST),
                NewSeen(sighting(LIB, seen_ns=NOW - 90 * SECOND, mnt_ns_id=5), OLD),
                NewSeen(sighting(b"/opt/other", seen_ns=NOW, **DOCKER), LOST),
            ]
        )
    return program


def rows(program: BuildIdFs, *words: str | bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in program(*words, "--json").out.splitlines()]


def names(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(row["build_id"], row["container"]) for row in found]


def test_which_build_ids_a_path_had(buildidfs: BuildIdFs) -> None:
    found = rows(buildidfs, "which", LIB)
    assert names(found) == [
        (str(LOST), ""), (str(NEW), ""), (str(NEW), DOCKER["container"]), (str(OLD), ""),
    ]  # fmt: skip
    assert [row["held"] for row in found] == [False, True, True, True]
    # One line for a place, whoever told of it: the journal saw it earlier than its bytes were had.
    assert found[3]["first_seen"] == (NOW - 90 * SECOND) / 1e9
    assert found[3]["last_seen"] == NOW / 1e9
    assert names(rows(buildidfs, "which", LIB, "--container", "0101")) == [names(found)[2]]
    text = [line.split("\t") for line in buildidfs("which", LIB).out.splitlines()]
    assert [[words[0], words[1], words[5]] for words in text] == [
        [str(LOST), "missing", "-"], [str(NEW), "held", "-"],
        [str(NEW), "held", DOCKER["container"]], [str(OLD), "held", "-"],
    ]  # fmt: skip


def test_which_finds_a_separate_debug_file(buildidfs: BuildIdFs) -> None:
    path = b"/usr/lib/debug/libc.so.6.debug"
    with Store.open(buildidfs.store) as store:
        seen = capture(store, b"symbols", NEW, kinds=(Kind.DEBUGINFO,), at=sighting(path))
        store.commit([seen])
    for words in ([path], ["--glob", "/usr/lib/debug/*"]):
        assert names(rows(buildidfs, "which", *words)) == [(str(NEW), "")]


def test_which_follows_the_names_that_ldd_prints(directory: Path) -> None:
    """/lib is a link into /usr here, and the name of many a library is one to its version."""
    asked = {
        line.split()[2]
        for program in ("/bin/ls", "/usr/bin/gdb")
        for line in run([tool("ldd"), program], check=True).out.splitlines()
        if "=> /" in line
    }
    assert any(os.path.islink(path) for path in asked)
    assert any(os.path.realpath(path) != path for path in asked)
    program = BuildIdFs(directory, directory / "libraries")
    program("scan", "tree", *map(os.path.realpath, sorted(asked)))
    for path in asked:
        (row,) = rows(program, "which", path)
        assert (row["build_id"], row["path"]) == (build_id_of(Path(path)), os.path.realpath(path))
        assert os.path.realpath(path) in program("which", path).out


def test_which_knows_both_names_where_usr_is_merged(buildidfs: BuildIdFs) -> None:
    """Of containers that are gone, too: nothing is asked of this host's files."""
    assert names(rows(buildidfs, "which", "/lib/libc.so.6")) == names(rows(buildidfs, "which", LIB))
    with Store.open(buildidfs.store) as store:
        store.note_seen([NewSeen(sighting(b"/lib/old.so", seen_ns=NOW, **DOCKER), LOST)])
    for path in ("/lib/old.so", "/usr/lib/old.so"):
        (row,) = rows(buildidfs, "which", path, "--container", "0101")
        assert row["path"] == "/lib/old.so"
    assert buildidfs("which", "/usr/opt/other", check=False).rc == 30


def test_which_by_pattern(buildidfs: BuildIdFs) -> None:
    found = rows(buildidfs, "which", "--glob", "/opt/*")
    assert [(row["build_id"], row["path"]) for row in found] == [
        (str(OLD), "/opt/caf�\n.so"), (str(LOST), "/opt/other"),
    ]  # fmt: skip
    assert base64.b64decode(found[0]["path_b64"]) == b"/opt/caf\xe9\n.so"
    assert len(rows(buildidfs, "which", "--glob", "*/libc.so*")) == 4
    assert "/opt/caf\\xe9\\n.so" in buildidfs("which", "--glob", "*.so").out
    # Not a pattern without the option, whatever it looks like.
    assert buildidfs("which", "/opt/*", check=False).rc == 30


@pytest.mark.parametrize("words", [["/usr/lib"], ["libc.so.6"], [LIB, "--container", "x:1"], [""]])
def test_which_of_nothing(buildidfs: BuildIdFs, words: list[str]) -> None:
    done = buildidfs("which", *words, check=False)
    assert (done.rc, done.out, done.err.count("\n")) == (30, "", 1)
    assert "nothing was ever seen at" in done.err


def test_where_a_build_id_was(buildidfs: BuildIdFs) -> None:
    found = rows(buildidfs, "where", "0e")
    assert [(row["path"], row["container"]) for row in found] == [
        (LIB.decode(), ""), (LIB.decode(), DOCKER["container"]),
    ]  # fmt: skip
    lines = [line.split("\t") for line in buildidfs("where", str(OLD)).out.splitlines()]
    assert sorted((words[0], words[-1]) for words in lines) == [
        (str(OLD), "/opt/caf\\xe9\\n.so"), (str(OLD), LIB.decode()),
    ]  # fmt: skip


def test_where_one_was_that_was_not_captured(buildidfs: BuildIdFs) -> None:
    found = rows(buildidfs, "where", str(LOST))
    assert [(row["path"], row["held"]) for row in found] == [
        (LIB.decode(), False), ("/opt/other", False),
    ]  # fmt: skip
    assert buildidfs("where", str(LOST)).out.startswith(f"{LOST}\tmissing\t")
    assert buildidfs("where", str(LOST)[:10]).out == buildidfs("where", str(LOST)).out
    for text, code in (("77", 30), ("0", 2), ("xyz", 2)):
        done = buildidfs("where", text, check=False)
        assert (done.rc, done.err.count("\n")) == (code, 1), done


def test_text_for_each_row(buildidfs: BuildIdFs) -> None:
    listed = buildidfs("list", "--format", "{build_id} at {path}", "--path", LIB.decode()).out
    assert listed.splitlines() == [f"{OLD} at {LIB.decode()}", f"{NEW} at {LIB.decode()}"]
    assert buildidfs("list", "--format", "{nothing}", check=False).rc == 2
    assert buildidfs("list", "--format", "{path}", "--json", check=False).rc == 2


# --- who runs it ---------------------------------------------------------------------------------

PREFIX = os.urandom(4)


def own_cat(path: Path) -> Path:
    """A cat that nobody else has: with a build ID of its own, which begins with `PREFIX`."""
    data = cat_program().read_bytes()
    build_id = bytes.fromhex(build_id_of(cat_program()))
    assert data.count(build_id) == 1
    path.write_bytes(data.replace(build_id, PREFIX + os.urandom(len(build_id) - len(PREFIX))))
    path.chmod(0o755)
    return path


def live(program: BuildIdFs, build_id: str) -> list[dict[str, Any]]:
    done = program("where", "--live", build_id, "--json", check=False)
    assert done.rc in (0, 3), done
    return [json.loads(line) for line in done.out.splitlines()]


@pytest.mark.root
def test_who_runs_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = BuildIdFs(directory)
    cat = own_cat(directory / "cat")
    build_id = build_id_of(cat)
    monkeypatch.setattr("tests.support.harness.children.cat_program", lambda: cat)
    (directory / "there").mkdir()
    with (
        copied_cat(directory / "here") as here,
        copied_cat(directory / "gone") as gone,
        private_cat(directory / "there") as there,
    ):
        (directory / "gone").unlink()
        found = {row["pid"]: row for row in live(program, build_id[:30])}
        text = program("where", "--live", build_id, check=False).out
        label = f"mnt:{os.stat(f'/proc/{there.pid}/ns/mnt').st_ino}"
    assert set(found) == {here.pid, gone.pid, there.pid}
    assert found[here.pid]["path"] == str(directory / "here")
    assert found[here.pid]["comm"] == "here"
    assert [found[pid]["deleted"] for pid in (here.pid, gone.pid)] == [False, True]
    assert found[gone.pid]["path"] == str(directory / "gone")
    assert found[there.pid]["container"] == label
    rows = sorted(line.split("\t") for line in text.splitlines())
    assert rows == sorted(
        [build_id, str(row["pid"]), row["comm"], "deleted" if row["deleted"] else "present",
         "-", row["container"] or "-", row["path"]]
        for row in found.values()
    )  # fmt: skip
    assert not program.store.exists()
    # They have ended.
    assert live(program, build_id) == []
    done = program("where", "--live", build_id, check=False)
    assert done.out == ""
    assert f"buildidfs: no process has {build_id} mapped\n" in done.err


@pytest.mark.root
@pytest.mark.parametrize(
    "ways", [{"query": False}, {"map_files": False}, {"query": False, "map_files": False}]
)
def test_who_runs_it_on_other_kernels(
    directory: Path, monkeypatch: pytest.MonkeyPatch, ways: dict[str, bool]
) -> None:
    cat = own_cat(directory / "cat")
    wanted = build_id_of(cat)
    monkeypatch.setattr("tests.support.harness.children.cat_program", lambda: cat)
    with copied_cat(directory / "copy") as child:
        found = list(Mappers(lambda build_id, _: build_id.hex() == wanted, ways=Ways(**ways)))
    assert [each.pid for each in found if isinstance(each, Mapper)] == [child.pid]


def test_prefix_that_several_have_who_run(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        for name in ("one", "two"):
            cat = own_cat(directory / name)
            monkeypatch.setattr("tests.support.harness.children.cat_program", lambda cat=cat: cat)
            stack.enter_context(copied_cat(directory / f"copy-{name}"))
        program = BuildIdFs(directory)
        done = program("where", "--live", PREFIX.hex(), check=False)
        assert (done.rc, done.out) == (2, "")
        assert f"{PREFIX.hex()} is ambiguous: " in done.err
        assert len(live(program, build_id_of(directory / "one"))) == 1
    assert program("where", "--live", "xyz", check=False).rc == 2


@pytest.mark.root
def test_who_may_not_be_looked_at() -> None:
    with without_privileges():
        found = list(Mappers(lambda build_id, _: True))
    refused = [each for each in found if isinstance(each, Unreadable)]
    assert refused
    assert "run as root" in refused[0].reason
