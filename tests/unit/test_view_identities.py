# SPDX-License-Identifier: Apache-2.0
"""Names in the tree of files without a build ID, and with one that unrelated programs share."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.base import PinnedFile
from buildidfs.formats.elf.identify import identify
from buildidfs.ingest import Ingest
from buildidfs.linux import inodes
from buildidfs.model import AliasType, BuildId, Kind, Origin, Sighting
from buildidfs.store import Store
from buildidfs.view import NeedsReading, View
from tests.support.filesystems.filereader import FileReader
from tests.unit.test_ingest_aliases import _BAZEL, captured, digest, htl, program


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as opened:
        yield opened


def find(view: View, path: str) -> int:
    """The node at a path, links followed as the kernel does; 0 if there is none."""
    node, walked = View.ROOT, [View.ROOT]
    parts = [part.encode() for part in path.split("/") if part]
    while parts:
        name = parts.pop(0)
        if name == b"..":
            walked.pop()
            continue
        try:
            node = view.child(walked[-1], name)
        except NeedsReading:
            node = view.lookup_slowly(walked[-1], name)
        if not node:
            return 0
        if view.attributes(node).mode & 0o170000 == 0o120000:
            parts = view.readlink(node).split(b"/") + parts
            node = walked[-1]
        else:
            walked.append(node)
    return walked[-1]


def read(view: View, path: str) -> bytes:
    node = find(view, path)
    assert node, path
    content = view.open(node)
    try:
        if content.blob is None:
            return content.text
        data = content.blob.pread(1 << 20, 0)
        assert len(data) == view.attributes(node).size == content.blob.size
        return data
    finally:
        content.close()


def listed(view: View, path: str) -> set[str]:
    return {name.decode() for name, _, _ in view.children(find(view, path))}


def test_every_alias_leads_to_the_directory(store: Store, tmp_path: Path) -> None:
    data = program(b"nameless")
    captured(store, tmp_path, data)
    view = View(store)
    (code,) = (a.value for a in store.aliases.of(digest(data)) if a.type is AliasType.CODE)
    for alias in (digest(data).hex(), code.hex()):
        assert view.readlink(view.child(View.ROOT, alias.encode())) == str(htl(data)).encode()
        assert read(view, f"{alias}/elf") == data
        served = view.served(alias.encode(), Kind.EXECUTABLE, wait=False)
        assert served is not None
        assert served[0].digest == digest(data)
        assert alias not in listed(view, "/")
    assert read(view, f"{htl(data)}/elf") == data
    assert not view.child(View.ROOT, b"ab" * 16)


def test_program_with_a_build_id_is_found_by_its_htlhash(store: Store, tmp_path: Path) -> None:
    data = program(b"named", build_id=b"\x42" * 20)
    captured(store, tmp_path, data)
    assert read(View(store), f"{htl(data)}/elf") == data


def test_perf_alone_gets_a_note(store: Store, tmp_path: Path) -> None:
    data = program(b"nameless")
    captured(store, tmp_path, data, "app")
    view, name = View(store), str(htl(data))
    for place in (f"perf{tmp_path}/app/{name}/elf", f"perf/.build-id/{name[:2]}/{name[2:]}/elf"):
        stamped = read(view, place)
        assert identify(stamped[:4096], FileReader(stamped), len(stamped)) == htl(data)
        assert stamped[64 : len(data)] == data[64:]
    assert read(view, f"{name}/elf") == data
    assert read(view, f"debug/.build-id/{name[:2]}/{name[2:]}") == data


def test_perf_gets_a_note_where_the_path_is_not_for_all(store: Store, tmp_path: Path) -> None:
    data = program(b"nameless")
    tmp_path.chmod(0o700)
    path = tmp_path / "app"
    path.write_bytes(data)
    with path.open("rb") as file:
        origin = Origin(bytes(path), inodes.identity(file.fileno()), reach=0)
        pinned = PinnedFile(Sighting(origin, time.time_ns()), os.dup(file.fileno()))
        assert Ingest(store).run([pinned]).captured == 1
    view, name = View(store), str(htl(data))
    stamped = read(view, f"perf/.build-id/{name[:2]}/{name[2:]}/elf")
    assert identify(stamped[:4096], FileReader(stamped), len(stamped)) == htl(data)
    bucket = find(view, f"perf/.build-id/{name[:2]}")
    link = view.child(bucket, name[2:].encode())
    assert view.readlink(link) == f"../../{name}".encode(), "which tells of no path"
    assert name not in listed(view, "perf")


def test_shared_build_id_serves_nothing_but_says_why(store: Store, tmp_path: Path) -> None:
    programs = {f"app{number}": program(b"%d" % number, build_id=_BAZEL) for number in range(2)}
    for name, data in programs.items():
        captured(store, tmp_path, data, name)
    view, shared = View(store), str(_BAZEL)
    assert listed(view, shared) == {"variants", "path", "README"}
    assert b"Unrelated programs" in read(view, f"{shared}/README")
    for absent in ("elf", "executable", "debug", "debuginfo"):
        assert not find(view, f"{shared}/{absent}")
    assert not find(view, f"debug/.build-id/{shared[:2]}/{shared[2:]}")
    assert not find(view, f"debug/.build-id/{shared[:2]}/{shared[2:]}.debug")
    assert not find(view, f"perf/.build-id/{shared[:2]}/{shared[2:]}")
    for name, data in programs.items():
        assert read(view, f"{shared}/variants/{digest(data)}") == data
        assert read(view, f"{htl(data)}/elf") == data
        assert read(view, f"perf{tmp_path}/{name}/{shared}/elf") == data, "the path decides"


def test_made_up_nodes_are_stale(store: Store, tmp_path: Path) -> None:
    captured(store, tmp_path, program(b"nameless"))
    view = View(store)
    for detail in (0, 1 << 21, (1 << 22) - 1, 5 << 16):
        with pytest.raises(OSError, match="Stale file handle") as raised:
            view.attributes(1 << 60 | 1 << 28 | 26 << 22 | detail)
        assert raised.value.errno == errno.ESTALE


def test_adopted_id_is_spelled_as_any_other() -> None:
    data = program(b"x")
    assert BuildId.from_hex(str(htl(data))) == htl(data)
