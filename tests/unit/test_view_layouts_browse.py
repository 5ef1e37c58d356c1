# SPDX-License-Identifier: Apache-2.0
"""The trees for people: by path, by name, by container, what is missing; and what files tell."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import itertools
import os
import random
import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from buildidfs.model import ByteRange, Digest, Kind, Quality, Trust
from buildidfs.shares import of_user
from buildidfs.store import Store, schema
from buildidfs.store.index import environment
from buildidfs.store.index.environment import load_counters
from buildidfs.store.write import containers
from buildidfs.store.write.locations import PathWriter
from buildidfs.view import PUBLIC, View, Viewer, nodes
from buildidfs.view.layouts import browse
from tests.support.harness.browsed import put_row, row_of, see, seen_in
from tests.support.harness.captures import NOW, SECOND, capture, commit, sighting

if TYPE_CHECKING:
    from buildidfs.model import Sighting
    from buildidfs.store import OriginRecord

ID = bytes.fromhex("abcdef0123")
HEX = b"abcdef0123"
BOTH = (Kind.EXECUTABLE, Kind.DEBUGINFO)
LONG = b"n" * 255
ALICE = 1001
AS_ALICE = Viewer(ALICE, frozenset((ALICE,)))
AS_BOB = Viewer(ALICE + 1, frozenset((ALICE + 1,)))


@pytest.fixture
def view(store: Store) -> View:
    return View(store)


def _resolve(view: View, path: bytes, trail: list[int] | None = None) -> list[int]:
    """The nodes down to what a path leads to as the kernel would find it, links included; empty if
    that is nothing.
    """
    trail = trail or [View.ROOT]
    for name in path.split(b"/"):
        if name == b"..":
            trail = trail[:-1] or trail
        elif name not in (b"", b"."):
            found = view.child(trail[-1], name)
            if not found:
                return []
            if stat.S_ISLNK(view.attributes(found).mode):
                assert view.file_type(found) == stat.S_IFLNK
                assert view.attributes(found).size == len(view.readlink(found))
                trail = _resolve(view, view.readlink(found), trail)
                if not trail:
                    return []
            else:
                trail = [*trail, found]
    return trail


def _node(view: View, path: bytes) -> int:
    trail = _resolve(view, path)
    return trail[-1] if trail else 0


def _names(view: View, path: bytes, reader: Viewer | None = None) -> set[bytes]:
    """Names in a directory; that each is what a lookup finds is looked at in passing."""
    node = _node(view, path)
    assert node, path
    found = list(view.children(node, 0, reader))
    for name, child, _ in found:
        assert view.child(node, name) == child, (path, name)
        view.attributes(child)
    assert len({name for name, _, _ in found}) == len(found)
    return {name for name, _, _ in found}


def _expect_resuming(view: View, node: int, reader: Viewer | None = None) -> int:
    """That a listing goes on behind any of its offsets; returns how much there is in it."""
    whole = list(view.children(node, 0, reader))
    offsets = [offset for _, _, offset in whole]
    assert len(set(offsets)) == len(offsets)
    assert all(0 < offset < 1 << 63 for offset in offsets)
    for index in {0, 1, 63, 64, len(whole) // 2, len(whole) - 1} & set(range(len(whole))):
        assert list(view.children(node, offsets[index], reader)) == whole[index + 1 :]
    paged, offset = [], 0
    while page := list(itertools.islice(view.children(node, offset, reader), 7)):
        paged += page
        offset = page[-1][2]
    assert paged == whole
    return len(whole)


def _text(view: View, path: bytes) -> bytes:
    node = _node(view, path)
    content = view.open(node)
    assert view.attributes(node).size == len(content.text)
    return content.text


def _errno(question: Callable[[], object]) -> int:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is what is looked at
        question()
    return caught.value.errno or 0


# --- README --------------------------------------------------------------------------------------


def test_readme(view: View) -> None:
    text = _text(view, b"README")
    assert text.startswith(b"This is buildidfs")
    assert all(len(line) <= 100 for line in text.splitlines())
    for name in (b"by-path", b"by-name", b"containers", b"missing"):
        assert name in text
        assert stat.S_ISDIR(view.attributes(_node(view, name)).mode)
    assert view.attributes(_node(view, b"README")).mode == stat.S_IFREG | 0o444
    assert view.child(nodes.README, b"x") == 0
    assert list(view.children(nodes.README)) == []
    assert _errno(lambda: view.readlink(nodes.README)) == errno.EINVAL
    assert _errno(lambda: view.open(nodes.BY_NAME)) == errno.EISDIR


# --- by-path and by-name -------------------------------------------------------------------------

PATHS = [
    b"/app", b"/usr/lib/x/libz.so.1.3", b"/" + b"d/" * 127 + b"deep", b"/" + LONG + b"/" + LONG,
    b"/\xff\xfe/\n\t\x1b", b"/odd name/%2e/..x",
]  # fmt: skip


def test_links_resolve_from_any_depth(store: Store, view: View) -> None:
    for number, path in enumerate(PATHS):
        see(store, b"%d" % number, sighting(path), build_id=b"\x01%02d" % number)
        directory = _node(view, (b"\x01%02d" % number).hex().encode())
        spelled = (b"\x01%02d" % number).hex().encode()
        assert directory
        assert _node(view, b"by-path" + path + b"/" + spelled) == directory
        assert _node(view, b"by-name/" + path.rpartition(b"/")[2] + b"/" + spelled) == directory
        assert _names(view, b"by-path" + path) == {spelled}
        assert _names(view, b"by-name/" + path.rpartition(b"/")[2]) == {spelled}
    assert _names(view, b"by-path") == {path.split(b"/")[1] for path in PATHS}
    assert _names(view, b"by-name") == {path.rpartition(b"/")[2] for path in PATHS}


def test_links_are_relative(store: Store, view: View) -> None:
    see(store, b"x", sighting(b"/usr/lib/libc.so.6"), build_id=ID)
    link = view.child(_node(view, b"by-path/usr/lib/libc.so.6"), HEX)
    assert view.readlink(link) == b"../../../../" + HEX
    link = view.child(_node(view, b"by-name/libc.so.6"), HEX)
    assert view.readlink(link) == b"../../" + HEX
    assert view.attributes(link).mode == stat.S_IFLNK | 0o777


def test_every_kind_has_a_path(store: Store, view: View) -> None:
    see(store, b"d", sighting(b"/d/x.debug"), Kind.DEBUGINFO, build_id=b"\x01\x01")
    see(store, b"v", sighting(b"[vdso]"), Kind.VDSO, build_id=b"\x01\x02")
    assert _names(view, b"by-path/d/x.debug") == {b"0101"}
    assert _names(view, b"by-name") == {b"x.debug", b"[vdso]"}
    assert _names(view, b"by-path/[vdso]") == {b"0102"}


def test_absent_names(store: Store, view: View) -> None:
    see(store, b"x", sighting(b"/usr/bin/app"), build_id=ID)
    see(store, b"y", sighting(b"/opt/tool"), build_id=b"\x01\x01")
    for path in (
        b"by-path/nope", b"by-path/usr/bin/app/0101", b"by-path/usr/bin/app/x",
        b"by-path/usr/abcdef0123", b"by-name/bin", b"by-name/app/0101", b"by-name/app/ABCDEF0123",
        b"by-name/app/app", b"by-name/" + b"x" * 256, b"by-path/" + b"x" * 300, b"containers/x",
        b"missing/0101", b"missing/x",
    ):  # fmt: skip
        assert _node(view, path) == 0, path


def test_an_id_has_the_name_where_a_path_has_it_too(store: Store, view: View) -> None:
    see(store, b"x", sighting(b"/usr/bin"), build_id=ID)
    see(store, b"y", sighting(b"/usr/bin/" + HEX + b"/z"), build_id=b"\x01\x01")
    assert _names(view, b"by-path/usr/bin") == {HEX}
    assert _node(view, b"by-path/usr/bin/" + HEX) == _node(view, HEX)


def test_listings_by_path_and_by_name_go_on(store: Store, view: View) -> None:
    new = [
        capture(store, b"x", b"\x01%03d" % n, at=sighting(b"/d/%d\xff" % n)) for n in range(100)
    ] + [capture(store, b"x", b"\x02%03d" % n, at=sighting(b"/d")) for n in range(100)]
    commit(store, *new)
    assert _expect_resuming(view, _node(view, b"by-path/d")) == 200
    assert _expect_resuming(view, _node(view, b"by-name")) == 101
    assert _expect_resuming(view, _node(view, b"by-name/d")) == 100
    assert _expect_resuming(view, _node(view, b"by-name/7\xff")) == 1


def test_removed_files_are_found_nowhere(store: Store, view: View) -> None:
    digest = see(store, b"x", seen_in("box", b"/usr/bin/app"), build_id=ID)
    see(store, b"y", seen_in("box", b"/opt/app"), build_id=b"\x01\x01")
    link = view.child(_node(view, b"by-name/app"), HEX)
    store.remove([digest])
    assert _names(view, b"by-name/app") == {b"0101"}
    assert _names(view, b"by-path") == {b"opt"}
    assert _names(view, b"containers/box/root") == {b"opt"}
    assert _errno(lambda: view.readlink(link)) == errno.ESTALE


def test_files_being_removed_are_not_listed(
    store: Store, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(store, b"x", seen_in("box", b"/usr/bin/app"), build_id=ID)
    monkeypatch.setattr(store.index, "kinds", lambda ordinal: 0)
    for path in (b"by-name/app", b"by-path/usr/bin/app"):
        assert list(view.children(_node(view, path))) == []
        assert view.child(_node(view, path), HEX) == 0


def test_a_circle_in_a_damaged_index_ends(store: Store, view: View) -> None:
    see(store, b"x", sighting(b"/a/b"), build_id=ID)
    number = nodes.number_of(_node(view, b"by-path/a/b"))
    env = environment.acquire(store.path, read_only=False)
    try:
        key = schema.U32.pack(number)
        put_row(env, "paths", key, key + b"b")
        assert row_of(env, "paths", key)[:4] == key
    finally:
        environment.release(env)
    link = view.child(nodes.of_browsing(nodes.FORM_PATH, within=number), HEX)
    assert _errno(lambda: view.readlink(link)) == errno.ESTALE
    assert [name for name, _, _ in view.children(nodes.of_browsing(nodes.FORM_PATH, 0, number))]


# --- containers ----------------------------------------------------------------------------------


def test_a_container(store: Store, view: View) -> None:
    at = seen_in(
        "docker:0123456789ab", cgroup=b"/docker/" + b"0123456789abcdef" * 4, mode=0o100750, uid=7
    )
    see(store, b"x", at, *BOTH, build_id=ID)
    see(store, b"y", seen_in("docker:0123456789ab", b"/lib/y", at=3601), build_id=b"\x01\x01")
    place = b"containers/docker:0123456789ab"
    assert _names(view, b"containers") == {b"docker:0123456789ab"}
    assert _names(view, place) == {b"root", b"id", b"first-seen", b"last-seen"}
    assert _text(view, place + b"/id") == b"0123456789abcdef" * 4 + b"\n"
    assert _text(view, place + b"/first-seen") == b"2023-11-14T22:13:20Z\n"
    assert _text(view, place + b"/last-seen") == b"2023-11-14T23:13:21Z\n"
    assert _node(view, place + b"/image") == 0
    assert _node(view, place + b"/root/usr/bin/app") == _node(view, HEX + b"/elf")
    shown = view.attributes(_node(view, place + b"/root/usr/bin/app"))
    assert (stat.S_IMODE(shown.mode), shown.uid) == (0o550, 7), "whose it was"
    directory = view.attributes(_node(view, place + b"/root/usr"))
    assert directory == view.attributes(_node(view, place)) == view.attributes(View.ROOT)
    text = view.attributes(_node(view, place + b"/id"))
    assert (text.mode, text.volatile) == (stat.S_IFREG | 0o444, True)


def test_an_image(store: Store, view: View) -> None:
    digest = "sha256:" + "a" * 64
    see(store, b"x", seen_in("image:docker.io/library/x:1", host=f"{digest}/layer"))
    place = b"containers/image:docker.io%2Flibrary%2Fx:1"
    assert _text(view, place + b"/image") == digest.encode() + b"\n"


def test_the_same_path_in_two_containers(store: Store, view: View) -> None:
    see(store, b"1", seen_in("one"), build_id=ID)
    see(store, b"2", seen_in("two"), build_id=ID)
    found = {}
    for name in (b"one", b"two"):
        content = view.open(_node(view, b"containers/" + name + b"/root/usr/bin/app"))
        found[name] = os.pread(content.blob.fd, 10, 0)
        content.close()
    assert found == {b"one": b"1", b"two": b"2"}, "each as it was there"


def test_listings_of_containers_go_on(store: Store, view: View) -> None:
    commit(store, *(
        capture(store, b"x", b"\x01%03d" % n, at=seen_in("box", path))
        for n in range(100)
        for path in (b"/d/%d\xff" % n, b"/%d" % n)
    ))  # fmt: skip
    commit(store, *(capture(store, b"x", ID, at=seen_in(f"c{n}", b"/x")) for n in range(100)))
    assert _expect_resuming(view, _node(view, b"containers/box/root")) == 101
    assert _expect_resuming(view, _node(view, b"containers/box/root/d")) == 100
    assert _expect_resuming(view, nodes.CONTAINERS) == 101
    assert _expect_resuming(view, _node(view, b"containers/box")) == 3
    see(store, b"y", seen_in("box", b"/" + LONG), build_id=b"\x02\x02")
    assert _node(view, b"containers/box/root/" + LONG) == _node(view, b"0202/elf")
    for form in range(8):  # offsets that were made up
        for offset in (1, 1 << 31, 1 << 32, (1 << 33) + 5, (1 << 63) - 1):
            node = nodes.of_browsing(form, 1)
            assert len(list(view.children(node, offset))) <= 102


def test_removed_nodes_are_stale(store: Store, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    see(store, b"x", seen_in("box", b"/usr/bin/app"), build_id=ID)
    place = b"containers/box"
    held = [_node(view, place + below) for below in (b"", b"/root", b"/root/usr", b"/first-seen")]
    alias = view.child(held[1], b"bin")
    assert view.readlink(alias) == b"usr/bin"
    monkeypatch.setattr(containers, "MAX_CONTAINERS", 1)
    see(store, b"y", seen_in("new", at=1000))
    assert _names(view, b"containers") == {b"new"}
    for node in (*held, alias):
        assert _errno(functools.partial(view.attributes, node)) == errno.ESTALE
    assert _errno(lambda: view.readlink(alias)) == errno.ESTALE
    assert _errno(lambda: view.open(held[3])) == errno.ESTALE
    assert view.child(held[1], b"usr") == view.child(held[2], b"bin") == 0
    assert list(view.children(held[1])) == []
    assert _node(view, HEX + b"/elf"), "the file itself is still there"


def _names_for(view: View, node: int) -> list[bytes]:
    return [name for name, _, _ in view.children(node, 0, PUBLIC)]


def test_numbers_that_were_made_up(store: Store, view: View) -> None:
    see(store, b"x", seen_in("box", b"/usr/bin/app"), build_id=ID)
    chosen = random.Random(1)
    questions: list[Callable[[int], object]] = [
        view.attributes, view.readlink, view.open, view.extended,
        lambda node: view.child(node, b"usr"),
        lambda node: list(itertools.islice(view.children(node, chosen.getrandbits(63)), 10)),
        functools.partial(_names_for, view),
    ]  # fmt: skip
    refusals = set()
    for _ in range(3000):
        node = nodes.of_browsing(chosen.randrange(8)) | chosen.getrandbits(chosen.randint(1, 56))
        for question in questions:
            try:
                question(node)
            except OSError as error:
                refusals.add(error.errno)
    assert refusals == {errno.ESTALE, errno.EINVAL, errno.EISDIR}


# --- what the dynamic loader asks for ------------------------------------------------------------


def _root(store: Store, *paths: bytes, label: str = "box") -> None:
    commit(store, *(
        capture(store, path, b"\x01" + path[-50:], at=seen_in(label, path)) for path in paths
    ))  # fmt: skip


def _seen(view: View, path: bytes) -> bytes:
    """The bytes of the file that a path below root leads to; empty if it is none."""
    node = _node(view, b"containers/box/root" + path)
    if not node or stat.S_ISDIR(view.attributes(node).mode):
        return b""
    content = view.open(node)
    try:
        return os.pread(content.blob.fd, 1000, 0)
    finally:
        content.close()


DEBIAN = b"/usr/lib/x86_64-linux-gnu/"


@pytest.mark.parametrize(
    ("files", "asked"),
    [
        (
            [DEBIAN + b"ld-linux-x86-64.so.2", DEBIAN + b"libc.so.6", DEBIAN + b"libz.so.1.3.1",
             b"/usr/bin/app", b"/usr/sbin/daemon"],
            {b"/lib64/ld-linux-x86-64.so.2": 0, b"/lib/x86_64-linux-gnu/libc.so.6": 1,
             b"/lib/x86_64-linux-gnu/libz.so.1": 2, DEBIAN + b"libz.so.1": 2, b"/bin/app": 3,
             b"/sbin/daemon": 4, b"/usr/lib64/libc.so.6": 1},
        ),
        (
            [DEBIAN + b"ld-2.31.so", DEBIAN + b"libc-2.31.so", DEBIAN + b"libpthread-2.31.so",
             DEBIAN + b"libnss_files-2.31.so"],
            {b"/lib64/ld-linux-x86-64.so.2": 0, b"/lib/x86_64-linux-gnu/libc.so.6": 1,
             DEBIAN + b"libpthread.so.0": 2, DEBIAN + b"libnss_files.so.2": 3},
        ),
        (
            [b"/lib/x86_64-linux-gnu/ld-2.28.so", b"/lib/x86_64-linux-gnu/libc-2.28.so",
             b"/usr/bin/app"],
            {b"/lib64/ld-linux-x86-64.so.2": 0, b"/usr/lib/x86_64-linux-gnu/libc.so.6": 1},
        ),
        (
            [b"/usr/lib64/ld-linux-x86-64.so.2", b"/usr/lib64/libc.so.6",
             b"/usr/lib64/libgcc_s-14-20240912.so.1", b"/usr/lib64/libbz2.so.1.0.8"],
            {b"/lib64/ld-linux-x86-64.so.2": 0, b"/lib64/libc.so.6": 1,
             b"/lib64/libgcc_s.so.1": 2, b"/lib64/libbz2.so.1": 3, b"/lib64/libbz2.so.1.0": 3},
        ),
        (
            [b"/lib64/ld-2.17.so", b"/lib64/libc-2.17.so", b"/lib64/libz.so.1.2.7",
             b"/usr/bin/app"],
            {b"/lib64/ld-linux-x86-64.so.2": 0, b"/lib64/libc.so.6": 1,
             b"/usr/lib64/libz.so.1": 2},
        ),
        (
            [b"/lib/ld-musl-x86_64.so.1", b"/usr/lib/libz.so.1.3.1", b"/bin/busybox"],
            {b"/lib/libc.musl-x86_64.so.1": 0, b"/lib/ld-musl-x86_64.so.1": 0,
             b"/usr/lib/libz.so.1": 1, b"/usr/bin/busybox": 2},
        ),
        (
            [b"/usr/lib/libc.so"],
            {b"/lib/ld-musl-aarch64.so.1": 0},
        ),
        (
            [b"/usr/lib/i386-linux-gnu/ld-2.31.so", DEBIAN + b"ld-2.31.so"],
            {b"/lib64/ld-linux-x86-64.so.2": 1},
        ),
        (
            [b"/opt/libstdc++.so.6.0.9", b"/opt/libstdc++.so.6.0.28"],
            {b"/opt/libstdc++.so.6": 1},
        ),
        (
            [b"/usr/lib/ld64.so.2", b"/usr/lib/libm.so.6"],
            {b"/lib64/ld64.so.2": 0, b"/lib/libm.so.6": 1},
        ),
    ],
    ids=["debian", "debian-11", "debian-10", "fedora", "centos-7", "alpine", "musl", "i386-too",
         "numbers", "ppc64"],
)  # fmt: skip
def test_names_that_the_loader_was_told(
    store: Store, view: View, files: list[bytes], asked: dict[bytes, int]
) -> None:
    _root(store, *files)
    for path in files:
        assert _seen(view, path) == path
    for path, number in asked.items():
        assert _seen(view, path) == files[number], path
    tops = {path.split(b"/")[1] for path in files}
    assert _names(view, b"containers/box/root") == tops, "what is not there is not listed"


def test_names_that_lead_nowhere(store: Store, view: View) -> None:
    _root(
        store, b"/usr/lib/libz.so.1.3.1", b"/usr/lib/libz.so.1x", b"/usr/lib/libfoo-1.2.so",
        b"/usr/lib/app-1.2", b"/opt/lib/x", b"/usr/lib/libdir.so.1.2/below",
    )  # fmt: skip
    for path in (
        b"/usr/lib/libz.so", b"/usr/lib/libz.so.2", b"/usr/lib/libz.so.1.2", b"/usr/lib/libz",
        b"/usr/lib/app", b"/usr/lib/foo.so.1", b"/usr/lib/libfoo64.so.1", b"/usr/lib/libfo.so.1",
        b"/usr/lib/libdir.so.1", b"/opt/lib64", b"/opt/bin", b"/lib64/x", b"/lib64", b"/bin",
        b"/sbin", b"/usr/bin", b"/usr/lib64", b"/etc", b"/usr/lib/ld-linux-x86-64.so.2",
        b"/usr/lib/" + b"lib" + b"-linux" * 40 + b".so.1",
    ):  # fmt: skip
        assert _seen(view, path) == b"", path
    assert _seen(view, b"/lib/libz.so.1") == b"/usr/lib/libz.so.1.3.1"
    assert _seen(view, b"/usr/lib/libfoo.so.1") == b"/usr/lib/libfoo-1.2.so"


def _data(view: View, path: bytes) -> bytes:
    """The bytes of a file, links followed; empty if there is none."""
    node = _node(view, path)
    if not node or view.file_type(node) != stat.S_IFREG:
        return b""
    with contextlib.closing(view.open(node)) as content:
        return os.pread(content.blob.fd, 100, 0)


@pytest.mark.parametrize(
    "had",
    [
        b"/app/hot", b"/lib/x.so", b"/usr/bin/x", b"/usr/lib/x.so", b"/usr/lib/debug/x",
        b"/usr/lib/debug/.build-id/ff/00.debug", b"/usr/lib/debug/.build-id/ab/00.debug",
    ],
)  # fmt: skip
def test_debug_files_are_below_any_container(store: Store, view: View, had: bytes) -> None:
    """Whatever the container had of that path: what it had itself comes first."""
    see(store, b"had", seen_in("box", had), build_id=b"\x01\x02")
    ids = [b"\xab" + os.urandom(19), b"\xcd" * 20]
    for number, build_id in enumerate(ids):
        kinds = [Kind.DEBUGINFO]
        commit(store, capture(store, b"debug%d" % number, build_id, kinds=kinds))
    root = b"containers/box/root"
    base = root + b"/usr/lib/debug/.build-id"
    for number, build_id in enumerate(ids):
        digits = build_id.hex().encode()
        assert _data(view, b"%s/%s/%s.debug" % (base, digits[:2], digits[2:])) == (
            b"debug%d" % number
        )
        assert _data(view, b"%s/%s/%s" % (base, digits[:2], digits[2:])) == b""
    assert _data(view, root + had) == b"had"
    nobody = Viewer(65534, frozenset([65534]))
    for name in (b"usr", b"usr/lib", b"usr/lib/debug", b"usr/lib/debug/.build-id"):
        parent, _, last = name.rpartition(b"/")
        at = _node(view, root + b"/" + parent)
        assert view.may_know(at, last, view.child(at, last), nobody)
    for name in (b"/ab/zz.debug", b"/ab/" + b"0" * 38 + b".debug", b"/zz", b"/xyz/x.debug"):
        assert _data(view, base + name) == b""
    assert _data(view, root + b"/opt/usr/lib/debug/.build-id/cd/" + b"cd" * 19) == b""
    assert _names(view, root) == {had.split(b"/")[1]}, "what is not there is not listed"


def test_debuginfo_beside_a_library_is_not_it(store: Store, view: View) -> None:
    for number in range(4):
        library = b"/opt/libz%d.so.1.3" % number
        commit(
            store,
            capture(store, b"d", b"\x01\x01", at=seen_in("box", library + b".debug"),
                    kinds=[Kind.DEBUGINFO]),
            capture(store, library, b"\x01\x01", at=seen_in("box", library)),
        )  # fmt: skip
        assert _seen(view, b"/opt/libz%d.so.1" % number) == library
        assert _seen(view, library + b".debug") == b"d"


def test_a_library_that_is_gone_is_not_chosen(store: Store, view: View) -> None:
    old, new = b"/opt/libz.so.1.2", b"/opt/libz.so.1.3"
    _root(store, old)
    digest = see(store, new, seen_in("box", new))
    assert _seen(view, b"/opt/libz.so.1") == new
    store.remove([digest])
    assert _seen(view, b"/opt/libz.so.1") == old


# --- missing -------------------------------------------------------------------------------------


def _ask(view: View, path: bytes, client: bytes = b"gdb") -> None:
    """Look up a path as a mount does, down to what is missing."""
    node = View.ROOT
    for name in path.split(b"/"):
        found = view.child(node, name)
        if not found:
            view.misses.note(node, name, client)
            return
        node = found
    raise AssertionError(f"{path!r} is there")


def _told(view: View, name: bytes) -> dict[bytes, bytes]:
    lines = _text(view, b"missing/" + name).splitlines()
    return dict(line.split(b": ", 1) for line in lines)


def test_missing_lists_names_asked_for(store: Store, view: View) -> None:
    for _ in range(3):
        _ask(view, b"debug/.build-id/ab/cdef0123.debug")
    _ask(view, HEX + b"/elf", b"lldb")
    _ask(view, HEX, b"lldb")
    _ask(view, b"perf/.build-id/01/0101", b"perf")
    _ask(view, b"debug/.build-id/ab/cdef0123", b"drgn")
    _ask(view, b"0202/debuginfo")
    assert _names(view, b"missing") == {HEX, b"010101", b"0202"}
    told = _told(view, HEX)
    assert told[b"build-id"] == HEX
    assert told[b"wanted"] == b"executable, debuginfo"
    assert told[b"asked"] == b"6"
    assert told[b"by"] == b"gdb (3), lldb (2), drgn (1)"
    assert told[b"first"] <= told[b"last"]
    assert _told(view, b"010101")[b"wanted"] == b"executable"
    assert _told(view, b"0202")[b"wanted"] == b"anything"
    node = _node(view, b"missing/" + HEX)
    shown = view.attributes(node)
    assert (shown.mode, shown.volatile) == (stat.S_IFREG | 0o400, True)
    assert view.attributes(nodes.MISSING).mode == stat.S_IFDIR | 0o500
    assert _expect_resuming(view, nodes.MISSING) == 3


def test_names_of_no_build_id_are_not_missing(store: Store, view: View) -> None:
    see(store, b"x", seen_in("box"), build_id=ID)
    for path in (
        b"nope", b"ABCDEF01", b"abc", b"debug/.build-id/ab/xyz", b"debug/.dwz/x", b"perf/usr/nope",
        b"by-path/x", b"by-name/" + HEX, b"containers/box/root/x", HEX + b"/kallsyms",
        HEX + b"/source", HEX + b"/variants/x", b"usr/lib/x", b"debug/.build-id/zz",
    ):  # fmt: skip
        _ask(view, path)
    assert _names(view, b"missing") == set()


def test_missing_drops_arrived_build_ids(store: Store, view: View) -> None:
    _ask(view, HEX)
    _ask(view, b"debug/.build-id/01/01.debug")
    node = _node(view, b"missing/" + HEX)
    see(store, b"x", sighting(), build_id=ID)
    assert _names(view, b"missing") == {b"0101"}
    assert _node(view, b"missing/" + HEX) == 0
    for question in (lambda: view.attributes(node), lambda: view.open(node)):
        assert _errno(question) == errno.ESTALE
    see(store, b"e", sighting(), build_id=b"\x01\x01")
    assert _names(view, b"missing") == {b"0101"}, "the executable was not what was wanted"
    see(store, b"d", sighting(), Kind.DEBUGINFO, build_id=b"\x01\x01")
    assert _names(view, b"missing") == set()


def test_an_artifact_that_is_missing_of_a_build_id_that_is_there(store: Store, view: View) -> None:
    see(store, b"x", sighting(), build_id=ID)
    _ask(view, HEX + b"/debuginfo")
    assert _told(view, HEX)[b"wanted"] == b"debuginfo"


@pytest.mark.parametrize("kind", [Kind.VDSO, Kind.KALLSYMS])
def test_perf_takes_other_kinds(store: Store, view: View, kind: Kind) -> None:
    _ask(view, b"perf/.build-id/ab/cdef0123", b"perf")
    assert _names(view, b"missing") == {HEX}
    see(store, b"x", sighting(b"[vdso]"), kind, build_id=ID)
    assert _names(view, b"missing") == set()


def test_clients_cannot_write_what_they_like(view: View) -> None:
    for name in (b"x\n by: root", b"\x1b[2J", b"\x00\x7f", "c\x9bd".encode(), "\xc9".encode()):
        _ask(view, HEX, name)
    lines = _text(view, b"missing/" + HEX).splitlines()
    assert len(lines) == 6
    assert lines[
        -1
    ].decode() == "by: ??? (1), ?[2J (1), c?d (1), x? by: root (1), \xc9 (1)".replace("???", "??")


def test_so_many_clients_are_told_apart(view: View) -> None:
    for number in range(40):
        _ask(view, HEX, b"client%02d" % number)
    told = _told(view, HEX)
    assert told[b"asked"] == b"40"
    assert told[b"by"].startswith(b"others (24), client00 (1)")


def test_no_more_than_so_many_are_kept(store: Store) -> None:
    misses = browse.Misses(store, most=10)
    for number in range(50):
        misses.note(View.ROOT, b"01%04d" % number, b"x")
        if number % 7 == 0:
            assert len(list(misses.children(0))) <= 10
    names = [name for name, _, _ in misses.children(0)]
    assert names == [b"01%04d" % number for number in range(40, 50)], "the latest"
    for number in range(100_000):
        misses.note(View.ROOT, b"02%06d" % number, b"x")
    assert len(misses._questions) <= 10
    assert len(list(misses.children(0))) == 10


def test_user_who_looks_up_many_names_keeps_those_of_others(store: Store) -> None:
    misses = browse.Misses(store, most=8)
    asked = {b"0aaa": 0, b"0bbb": 1002}
    for name, uid in asked.items():
        misses.note(View.ROOT, name, b"gdb", of_user(uid))
    for number in range(40):
        misses.note(View.ROOT, b"01%04d" % number, b"evil", of_user(1001))
        if number % 3 == 0:
            assert len(misses.every()) <= 8
    names = [name for name, _, _ in misses.children(0)]
    assert {*asked, b"010039"} <= set(names)


# --- extended attributes -------------------------------------------------------------------------


def _xattrs(view: View, path: bytes) -> dict[str, bytes]:
    node = _node(view, path)
    found = {}
    for name in view.extended(node):
        value = view.extended_value(node, name)
        assert value is not None, name
        found[name.decode()] = value
    return found


def test_extended_attributes(store: Store, view: View) -> None:
    at = seen_in("docker:0123456789ab", b"/opt/\xff/app")
    digest = see(store, b"x", at, Kind.EXECUTABLE, build_id=ID)
    expected = {
        "user.sha256": digest.hex().encode(),
        "user.buildid.id": HEX,
        "user.buildid.kind": b"executable",
        "user.buildid.variant": b"0",
        "user.buildid.trust": b"unknown",
        "user.buildid.quality": b"none",
        "user.buildid.first-seen": b"2023-11-14T22:13:20Z",
        "user.buildid.path": b"/opt/\xff/app",
        "user.buildid.container": b"docker:0123456789ab",
    }
    for path in (
        HEX + b"/elf", HEX + b"/variants/" + digest.hex().encode(),
        b"containers/docker:0123456789ab/root/opt/\xff/app", b"by-name/app/" + HEX + b"/executable",
    ):  # fmt: skip
        assert _xattrs(view, path) == expected, path
    see(store, b"x", sighting(b"/usr/bin/later", seen_ns=NOW + 99 * SECOND), build_id=ID)
    later = _xattrs(view, HEX + b"/elf")
    assert later.pop("user.buildid.path") == b"/usr/bin/later"
    assert "user.buildid.container" not in later, "the host"


def test_scripts_that_read_as_zeros_are_said_to(store: Store) -> None:
    scripted = capture(store, b"scripts", ID, kinds=[Kind.DEBUGINFO], quality=Quality.DEBUGINFO)
    commit(store, msgspec.structs.replace(scripted, scripts=(ByteRange(0, 3),)))
    path = HEX + b"/debug"
    told = _xattrs(View(store), path)
    assert told["user.buildid.scripts"] == b"zeroed"
    assert (told["user.buildid.kind"], told["user.buildid.quality"]) == (b"debuginfo",) * 2
    assert "user.buildid.scripts" not in _xattrs(View(store, zero_scripts=False), path)


def test_nodes_without_extended_attributes(store: Store, view: View) -> None:
    digest = see(store, b"x", seen_in("box"), build_id=ID)
    _ask(view, b"0202")
    links = [
        view.child(_node(view, b"by-name/app"), HEX),
        view.child(nodes.DEBUG_BUCKET + 0xAB, HEX[2:]),
    ]
    for node in (
        *links, View.ROOT, *(_node(view, path) for path in (
            b"README", b"by-path", HEX, HEX + b"/path", HEX + b"/variants", b"missing/0202",
            b"containers/box", b"containers/box/first-seen", b"containers/box/root/usr")),
    ):  # fmt: skip
        assert node
        assert view.extended(node) == []
        assert view.extended_value(node, b"user.sha256") is None
    elf = _node(view, HEX + b"/elf")
    for name in (b"user.", b"user.buildid.", b"user.buildid.x", b"security.selinux", b"", b"user"):
        assert view.extended_value(elf, name) is None
    store.remove([Digest(digest)])
    view.forget()
    assert _errno(lambda: view.extended(elf)) == errno.ESTALE
    assert _errno(lambda: view.extended_value(elf, b"user.sha256")) == errno.ESTALE


# --- who is listed what --------------------------------------------------------------------------


def _private(label: str, path: bytes) -> Sighting:
    return seen_in(label, path, mode=0o100700, uid=ALICE, gid=ALICE)


def test_readers_are_listed_what_they_may_read(store: Store, view: View) -> None:
    see(store, b"1", _private("alices", b"/home/alice/game"), build_id=b"\x01\x01")
    see(store, b"2", _private("shared", b"/home/alice/tool"), build_id=b"\x01\x02")
    see(store, b"3", seen_in("shared", b"/usr/bin/app"), build_id=b"\x01\x03")
    every = {
        b"containers": {b"alices", b"shared"},
        b"containers/shared/root": {b"home", b"usr"},
        b"containers/alices/root": {b"home"},
        b"containers/alices/root/home/alice": {b"game"},
        b"by-name": {b"game", b"tool", b"app"},
        b"by-path": {b"home", b"usr"},
        b"by-path/home/alice": {b"game", b"tool"},
        b"by-path/home/alice/game": {b"0101"},
        b"by-name/game": {b"0101"},
    }
    bobs = {
        b"containers": {b"shared"},
        b"containers/shared/root": {b"usr"},
        b"by-name": {b"app"},
        b"by-path": {b"usr"},
    }
    for path, names in every.items():
        assert _names(view, path) == _names(view, path, AS_ALICE) == names, path
        assert _names(view, path, AS_BOB) == bobs.get(path, set()), path
        assert _names(view, path, PUBLIC) == bobs.get(path, set()), path
    for path in every:
        for name in every[path]:
            node, child = _node(view, path), _node(view, path + b"/" + name)
            may_know = name in bobs.get(path, set())
            assert view.is_public(node, name, child) == may_know, (path, name)
            assert view.may_know(node, name, child, AS_BOB) == may_know
            assert view.may_know(node, name, child, AS_ALICE)
    assert b"missing" in _names(view, b"", AS_BOB), "its mode keeps them out"


def test_a_readers_listing_goes_on_behind_what_was_left_out(store: Store, view: View) -> None:
    commit(store, *(
        capture(store, b"x", b"\x01%02d" % n, at=at)
        for n in range(60)
        for at in [(_private if n % 3 else seen_in)(f"c{n}", b"/d/%d" % n)]
    ))  # fmt: skip
    # The same bytes, which everybody may read as soon as anybody may: of each its own.
    commit(store, *(
        capture(store, b"p%d" % n, b"\x02%02d" % n, at=at)
        for n in range(60)
        for at in [(_private if n % 3 else seen_in)(f"p{n}", b"/p/%d" % n)]
    ))  # fmt: skip
    for node in (
        nodes.CONTAINERS, nodes.BY_NAME, _node(view, b"by-path/p"), _node(view, b"by-path"),
    ):  # fmt: skip
        assert 0 < _expect_resuming(view, node, AS_BOB) <= _expect_resuming(view, node)
    assert len(_names(view, b"by-path/p", AS_BOB)) == 20


def test_not_everything_in_a_container_is_looked_through(
    store: Store, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(store, *(
        capture(store, b"p%d" % n, b"\x02%02d" % n, at=_private("box", b"/a%d/b" % n))
        for n in range(30)
    ))  # fmt: skip
    assert _names(view, b"containers", AS_ALICE) == {b"box"}
    assert _names(view, b"containers", AS_BOB) == set()
    monkeypatch.setattr("buildidfs.view.tree._MOST_LOOKED_AT", 8)
    asked = set()
    real = store.index.origins

    def origins(ordinal: int) -> list[OriginRecord]:
        asked.add(ordinal)
        return real(ordinal)

    monkeypatch.setattr(store.index, "origins", origins)
    assert _names(view, b"containers", AS_BOB) == set()
    assert 0 < len(asked) <= 8
    asked.clear()
    see(store, b"x", seen_in("box", b"/x/y"), build_id=ID)
    assert _names(view, b"containers", AS_BOB) == {b"box"}
    assert not asked, "it says itself that everybody may know of it"


def test_trust_is_shown(store: Store, view: View) -> None:
    see(store, b"x", sighting(trust=Trust.PACKAGE), build_id=ID)
    assert _xattrs(view, HEX + b"/elf")["user.buildid.trust"] == b"package"


# --- very many -----------------------------------------------------------------------------------


def _fill_paths(store: Store, count: int) -> None:
    """Three build IDs at so many paths, written as commits write them, in a container each."""
    env = environment.acquire(store.path, read_only=False)

    def work(txn: Any) -> None:
        counters = load_counters(env, txn)
        paths = PathWriter(env, txn, counters)
        files = containers.ContainerWriter(env, txn, counters)
        for ordinal in (1, 2, 3):
            key = schema.U64.pack(ordinal)
            named = schema.OrdinalRow.unpack(txn.get(key, db=env.tables["ordinals"]))
            for number in range(ordinal, count + 1, 3):
                path = b"/d/%d" % number
                paths.add(named, ordinal, path, schema.MAX_PATHS, primary=False, public=True)
                file = (ordinal, Kind.EXECUTABLE, 0)
                files.see(seen_in(f"c{number}", path), file, public=True)
            txn.put(key, named.pack(), db=env.tables["ordinals"])
        files.finish()
        txn.put(schema.COUNTERS_KEY, counters.pack(), db=env.tables["meta"])

    try:
        env.write(work)
    finally:
        environment.release(env)


def _peak(view: View, node: int, reader: Viewer | None) -> tuple[int, int]:
    """How many entries there are, and the most memory that listing them takes (bytes)."""
    gc.collect()  # also empties the free lists of tuples, which tracemalloc counts when they fill
    tracemalloc.start()
    try:
        count = sum(1 for _ in view.children(node, 0, reader))
        return count, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("reader", [None, AS_BOB], ids=["all", "reader"])
def test_memory_does_not_grow_with_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Viewer | None
) -> None:
    """Fewer entries would not fill what is read at a time."""
    monkeypatch.setattr(schema, "MAX_PATHS", 2**16 - 2)
    monkeypatch.setattr(containers, "MAX_CONTAINERS", 2**20)
    peaks: dict[str, list[int]] = {}
    for count in (6_000, 12_000):
        with Store.create(tmp_path / f"{count}") as store:
            for number in (1, 2, 3):
                see(store, b"x", sighting(b"/d/first"), build_id=ID[:number] + b"x")
            _fill_paths(store, count)
            view = View(store)
            for name in ("by-name", "by-path/d", "containers"):
                node = _node(view, name.encode())
                found, peak = _peak(view, node, reader)
                assert found == count + (name != "containers")
                peaks.setdefault(name, []).append(peak)
                last = max(
                    offset for _, _, offset in itertools.islice(view.children(node), count // 2)
                )
                rest = sum(1 for _ in view.children(node, last))
                assert 0 < rest <= found
    for name, (few, many) in peaks.items():
        assert many < 1.2 * few, name
