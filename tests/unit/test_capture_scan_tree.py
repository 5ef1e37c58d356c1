# SPDX-License-Identifier: Apache-2.0
"""Directories are walked without opening, following or repeating what is not a file in them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from buildidfs.capture import walk
from buildidfs.capture.base import Known, Unreadable
from buildidfs.capture.origin import builder
from buildidfs.capture.scan.tree import TreeScanner, identify_tree
from buildidfs.formats.elf.other_ids import htlhash
from buildidfs.linux import machine
from buildidfs.model import EVERYBODY, OWNER, Absence, BuildId, NamespaceSet, Trust
from tests.support.elf.elfwriter import ET_REL, elf_file
from tests.support.filesystems.filereader import FileReader
from tests.support.harness.children import needs_root, private_cat
from tests.support.harness.scans import (
    Memory,
    open_descriptors,
    own_namespaces,
    remember,
    scan,
    without_privileges,
)

ID = bytes.fromhex("0123456789abcdef0123456789abcdef01234567")
ELF = elf_file(build_id=ID)


def identified(path: Path) -> dict[bytes, BuildId | Absence | Unreadable]:
    return dict(identify_tree([os.fsencode(path)]))


def test_every_file_is_identified(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/a.so").write_bytes(ELF)
    (tmp_path / "none").write_bytes(elf_file())
    (tmp_path / "object").write_bytes(elf_file(etype=ET_REL))
    (tmp_path / "script").write_bytes(b"#!/bin/sh\n")
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"\x7fELF\x02")
    base = os.fsencode(tmp_path)
    assert identified(tmp_path) == {
        base + b"/lib/a.so": BuildId(ID),
        base + b"/none": BuildId(htlhash(FileReader(elf_file()), len(elf_file()))),
        base + b"/object": Absence.NO_BUILD_ID,
        base + b"/script": Absence.NOT_ELF,
        base + b"/empty": Absence.EMPTY,
        base + b"/short": Absence.TRUNCATED,
    }


def test_names_are_bytes(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\n\x1b[31m"
    with open(path, "wb") as file:
        file.write(ELF)
    assert identified(tmp_path) == {path: BuildId(ID)}
    assert scan(TreeScanner(Memory(), [os.fsencode(tmp_path)])).paths() == [path]


def test_single_file_and_link_to_it(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(ELF)
    link.symlink_to(file)
    assert identified(file) == {os.fsencode(file): BuildId(ID)}
    assert identified(link) == {os.fsencode(link): BuildId(ID)}
    # What is recorded is where the file really is.
    assert scan(TreeScanner(Memory(), [os.fsencode(link)])).paths() == [os.fsencode(file)]


def test_path_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(ELF)
    monkeypatch.chdir(tmp_path)
    assert identified(Path()) == {b"./a": BuildId(ID)}
    assert scan(TreeScanner(Memory(), [b"."])).paths() == [os.fsencode(tmp_path / "a")]


def test_links_below_are_not_followed(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "file").write_bytes(ELF)
    (inside / "file").symlink_to(outside / "file")
    (inside / "directory").symlink_to(outside)
    (inside / "loop").symlink_to(inside)
    (inside / "real").write_bytes(ELF)
    assert list(identified(inside)) == [os.fsencode(inside / "real")]


def test_fifos_sockets_and_devices_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening it would block
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(tmp_path / "socket"))
        assert identified(tmp_path) == {}
        for name in ("fifo", "socket"):
            (answer,) = identified(tmp_path / name).values()
            assert isinstance(answer, Unreadable)
            assert "neither a regular file nor a directory" in answer.reason
    (answer,) = identified(Path("/dev/null")).values()
    assert isinstance(answer, Unreadable)


def test_missing_path_is_unreadable(tmp_path: Path) -> None:
    missing = os.fsencode(tmp_path / "missing")
    (answer,) = identified(tmp_path / "missing").values()
    assert isinstance(answer, Unreadable)
    assert answer.reason == "No such file or directory"
    result = scan(TreeScanner(Memory(), [missing]))
    assert [item.path for item in result.unreadable] == [missing]


def test_interfaces_of_the_kernel_are_not_files() -> None:
    (answer,) = identified(Path("/proc")).values()
    assert isinstance(answer, Unreadable)
    assert "proc filesystem" in answer.reason


def test_absurd_depth_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "MAX_DEPTH", 5)
    deepest = tmp_path.joinpath(*["d"] * 9)
    deepest.mkdir(parents=True)
    for depth in range(10):
        tmp_path.joinpath(*["d"] * depth, "file").write_bytes(ELF)
    before = open_descriptors()
    answers = identified(tmp_path)
    assert open_descriptors() <= before
    found = [path for path, answer in answers.items() if isinstance(answer, BuildId)]
    refused = [answer for answer in answers.values() if isinstance(answer, Unreadable)]
    assert len(found) == 5
    assert len(refused) == 1
    assert "more than 5 directories deep" in refused[0].reason


def test_sorted_and_each_once(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(ELF)
    assert list(identified(tmp_path)) == [
        os.fsencode(tmp_path / name / "file") for name in ("a", "b", "c")
    ]


def test_unreadable_parts_do_not_stop_it(scratch: Path) -> None:
    base = scratch / "unreadable"
    (base / "closed").mkdir(parents=True)
    (base / "closed/file").write_bytes(ELF)
    (base / "open").write_bytes(ELF)
    (base / "secret").write_bytes(ELF)
    base.chmod(0o755)
    (base / "secret").chmod(0)
    (base / "closed").chmod(0)
    try:
        with without_privileges():
            result = scan(TreeScanner(Memory(), [os.fsencode(base)]))
            answers = identified(base)
    finally:
        (base / "closed").chmod(0o700)
    refused = {os.fsencode(base / "closed"), os.fsencode(base / "secret")}
    assert result.paths() == [os.fsencode(base / "open")]
    assert {item.path for item in result.unreadable} == refused
    assert {path for path, answer in answers.items() if isinstance(answer, Unreadable)} == refused


def test_files_with_a_build_id_are_pinned(tmp_path: Path) -> None:
    (tmp_path / "elf").write_bytes(ELF)
    (tmp_path / "text").write_bytes(b"text")
    before = open_descriptors()
    result = scan(TreeScanner(Memory(), [os.fsencode(tmp_path)]))
    assert open_descriptors() <= before
    assert result.data(tmp_path / "elf") == ELF
    (absent,) = result.again
    assert absent.known == Known(absence=Absence.NOT_ELF)
    origin = result.pinned[0].pinned.sighting.origin
    assert (origin.host, origin.scanner) == (machine.host_name(), "tree")
    assert origin.identity.size == len(ELF)
    assert origin.namespaces.mnt != 0


def test_known_file_is_not_pinned_again(tmp_path: Path) -> None:
    (tmp_path / "elf").write_bytes(ELF)
    memory = Memory()
    remember(memory, scan(TreeScanner(memory, [os.fsencode(tmp_path)])), ID)
    result = scan(TreeScanner(memory, [os.fsencode(tmp_path)]))
    assert result.pinned == []
    assert [item.known.build_id for item in result.again] == [ID]


def test_memo_is_not_believed_against_the_file(tmp_path: Path) -> None:
    (tmp_path / "elf").write_bytes(ELF)
    memory = Memory()
    remember(memory, scan(TreeScanner(memory, [os.fsencode(tmp_path)])), b"\xde\xad")
    result = scan(TreeScanner(memory, [os.fsencode(tmp_path)]))
    assert len(result.pinned) == 1


def test_stopping_early_closes_everything(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(ELF)
    before = open_descriptors()
    found = iter(TreeScanner(Memory(), [os.fsencode(tmp_path)]))
    first = next(found)
    assert not isinstance(first, Unreadable)
    getattr(first, "close")()  # noqa: B009 - a pinned file
    found.close()  # type: ignore[attr-defined]  # a generator
    assert open_descriptors() <= before


@needs_root("gives a file to root and to another user")
def test_only_files_of_root_are_the_hosts(tmp_path: Path) -> None:
    if os.statvfs(tmp_path).f_flag & os.ST_NOSUID:
        pytest.skip("temporary files are on a filesystem mounted nosuid")
    for name, uid, mode in (("root", 0, 0o755), ("user", 1000, 0o755), ("loose", 0, 0o777)):
        (tmp_path / name).write_bytes(ELF)
        (tmp_path / name).chmod(mode)
        os.chown(tmp_path / name, uid, uid)
    result = scan(TreeScanner(Memory(), [os.fsencode(tmp_path)], initial=own_namespaces()))
    trust = {
        os.path.basename(seen.path): seen.pinned.sighting.origin.trust for seen in result.pinned
    }
    assert trust == {b"root": Trust.HOST, b"user": Trust.UNKNOWN, b"loose": Trust.UNKNOWN}


def test_note_outside_of_segments_is_found(tmp_path: Path) -> None:
    (tmp_path / "go").write_bytes(elf_file(build_id=ID, build_id_in="section"))
    assert list(identified(tmp_path).values()) == [BuildId(ID)]


def test_namespaces_of_a_container_are_an_option(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(elf_file(build_id=ID))
    initial = NamespaceSet(mnt=1, net=own_namespaces().net)
    labels = []
    for names in (["mnt"], ["mnt", "net"]):
        scanner = TreeScanner(
            Memory(), [os.fsencode(tmp_path)], initial=initial, container_namespaces=names
        )
        labels.append(scan(scanner).pinned[0].pinned.sighting.origin.container)
    assert labels[0]
    assert not labels[1]


def test_which_namespaces_are_not_the_hosts_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(elf_file(build_id=ID))
    own = own_namespaces()
    initial = NamespaceSet(mnt=1, uts=own.uts, pid=2)
    result = scan(TreeScanner(Memory(), [os.fsencode(tmp_path)], initial=initial))
    origin = result.pinned[0].pinned.sighting.origin
    assert builder.apart_names(origin.apart) == ["pid", "mnt"]
    assert builder.label_by(origin.cgroup, own, origin.apart, ["mnt"]) == origin.container


@needs_root("others cannot enter their own directories so far down")
def test_reach_of_a_new_file(directory: Path) -> None:
    public, home = directory / "public", directory / "home"
    for place in (public, home):
        place.mkdir()
        (place / "a.so").write_bytes(ELF)
    home.chmod(0o700)
    memory = Memory()
    result = scan(TreeScanner(memory, [os.fsencode(directory)]))
    found = {seen.path: seen.pinned.sighting.origin.reach for seen in result.pinned}
    assert found == {
        os.fsencode(public / "a.so"): EVERYBODY,
        os.fsencode(home / "a.so"): OWNER,
    }
    remember(memory, result)
    again = scan(TreeScanner(memory, [os.fsencode(directory)])).again
    assert [item.sighting.origin.reach for item in again] == [0, 0], "it was not asked for"


@needs_root("looks into another mount namespace")
def test_reach_of_a_file_of_another_mount_namespace(directory: Path) -> None:
    with private_cat(directory) as child:
        path = f"/proc/{child.pid}/root{directory}/cat"
        (seen,) = scan(TreeScanner(Memory(), [os.fsencode(path)])).pinned
        assert seen.pinned.sighting.origin.reach == OWNER, "not by that path of ours"
