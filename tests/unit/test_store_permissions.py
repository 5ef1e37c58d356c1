# SPDX-License-Identifier: Apache-2.0
"""Listings leave out build IDs of which the viewer may read no file."""

from __future__ import annotations

import itertools
import os
import stat
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.errors import IntegrityError
from buildidfs.model import Kind, Trust
from buildidfs.store.permissions import openness
from buildidfs.view import PUBLIC, View, Viewer, nodes, tree
from tests.support.harness.captures import capture, commit, sighting

if TYPE_CHECKING:
    from buildidfs.store import Store

ALICE, BOB, STAFF = 1001, 1002, 2001
AS_ALICE = Viewer(ALICE, frozenset((ALICE,)))
AS_BOB = Viewer(BOB, frozenset((BOB,)))
AS_STAFF = Viewer(BOB, frozenset((BOB, STAFF)))
AS_ANYBODY = Viewer(BOB, None)

MODES = st.integers(0, 0o777)


@pytest.fixture
def view(store: Store) -> View:
    return View(store)


# --- one file ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "alice", "staff", "bob", "anybody", "public"),
    [
        (0o444, True, True, True, True, True),
        (0o400, True, False, False, False, False),
        (0o440, True, True, False, False, False),
        (0o404, True, False, True, False, False),
        (0o044, False, True, True, True, False),
        (0o040, False, True, False, False, False),
        (0o004, False, False, True, False, False),
        (0o333, False, False, False, False, False),
    ],
)
def test_the_first_class_decides(
    mode: int, alice: bool, staff: bool, bob: bool, anybody: bool, public: bool
) -> None:
    readers = (AS_ALICE, AS_STAFF, AS_BOB, AS_ANYBODY, PUBLIC)
    answers = tuple(reader.may_read(mode, ALICE, STAFF) for reader in readers)
    assert answers == (alice, staff, bob, anybody, public)


@given(MODES, st.sampled_from([ALICE, BOB]), st.sampled_from([ALICE, BOB, STAFF]))
def test_less_known_viewer_may_read_no_more(mode: int, uid: int, gid: int) -> None:
    for groups in ([BOB], [BOB, STAFF], [ALICE, BOB], []):
        known = Viewer(BOB, frozenset(groups)).may_read(mode, uid, gid)
        assert known or not AS_ANYBODY.may_read(mode, uid, gid)
        assert known or not PUBLIC.may_read(mode, uid, gid)


@given(MODES, MODES)
def test_openness_orders_modes(one: int, other: int) -> None:
    if one & other & 0o444 == other & 0o444:
        assert openness(one) >= openness(other)


# --- listings ------------------------------------------------------------------------------------


def _fill(store: Store) -> None:
    """Build IDs of everybody's, of staff's and of Alice's; dwz files of hers and everybody's."""
    at = {
        "public": sighting(b"/usr/bin/app", mode=0o100755),
        "staff": sighting(b"/srv/staff/tool", mode=0o100550, uid=ALICE, gid=STAFF),
        "alice": sighting(b"/home/alice/secret/game", mode=0o100700, uid=ALICE, gid=ALICE),
        "dwz": sighting(b"/home/alice/.dwz/alice/x.debug", mode=0o100600, uid=ALICE, gid=ALICE),
        "flat": sighting(b"/usr/lib/debug/.dwz/flat", mode=0o100644),
    }
    both = (Kind.EXECUTABLE, Kind.DEBUGINFO)
    commit(
        store,
        capture(store, b"1", b"\x10\x01", kinds=both, at=at["public"]),
        capture(store, b"2", b"\x10\x02", kinds=both, at=at["staff"]),
        capture(store, b"3", b"\x10\x03", kinds=both, at=at["alice"]),
        capture(store, b"4", b"\x10\x04", kinds=[Kind.DEBUGINFO], at=at["dwz"]),
        capture(store, b"5", b"\x10\x05", kinds=[Kind.DEBUGINFO], at=at["flat"]),
    )


def _walk(view: View, path: str) -> int:
    node = View.ROOT
    for name in filter(None, path.split("/")):
        node = view.child(node, os.fsencode(name))
        assert node, path
    return node


def _names(view: View, path: str, reader: Viewer | None) -> set[str]:
    entries = list(view.children(_walk(view, path), 0, reader))
    for name, node, _ in entries:
        assert view.child(_walk(view, path), name) == node
    return {name.decode() for name, _, _ in entries}


FIXED = {
    "buildid", "debug", "perf", ".build-id", ".dwz", ".debug", "usr", "README", "by-path",
    "by-name", "containers", "missing",
}  # fmt: skip


@pytest.mark.parametrize(
    ("reader", "seen"),
    [
        (None, "12345"),
        (AS_ALICE, "12345"),
        (AS_STAFF, "125"),
        (AS_BOB, "15"),
        (AS_ANYBODY, "15"),
        (PUBLIC, "15"),
    ],
)
def test_build_ids_are_listed_for_those_who_may_read_a_file(
    store: Store, view: View, reader: Viewer | None, seen: str
) -> None:
    _fill(store)
    ids = {f"100{number}" for number in seen}
    executables = {each[2:] for each in ids if each[3] in "123"}
    debuginfo = {f"{each[2:]}.debug" for each in ids}

    assert _names(view, "", reader) == FIXED | ids
    assert _names(view, "debug/.build-id/10", reader) == executables | debuginfo
    assert _names(view, "perf/.build-id/10", reader) == executables
    places = {"1001": "perf/usr/bin/app", "1002": "perf/srv/staff/tool",
              "1003": "perf/home/alice/secret/game"}  # fmt: skip
    for build_id, place in places.items():
        assert _names(view, place, reader) == ids & {build_id}


def test_directories_that_lead_to_nothing_are_not_listed(store: Store, view: View) -> None:
    _fill(store)
    every = {".build-id", "usr", "srv", "home"}
    assert _names(view, "perf", None) == _names(view, "perf", AS_ALICE) == every
    assert _names(view, "perf", AS_STAFF) == every - {"home"}
    assert _names(view, "perf", AS_BOB) == every - {"home", "srv"}
    assert _names(view, "perf/home/alice", AS_ALICE) == {"secret", ".dwz"}
    assert _names(view, "perf/home/alice", AS_BOB) == set()
    assert _names(view, "debug/.dwz", AS_ALICE) == {"alice", "flat"}
    assert _names(view, "debug/.dwz", AS_BOB) == {"flat"}
    assert _names(view, "debug/.dwz/alice", AS_BOB) == set()


def test_unlisted_names_can_be_looked_up(store: Store, view: View) -> None:
    _fill(store)
    directory = _walk(view, "1003")
    assert view.attributes(directory).mode == stat.S_IFDIR | 0o555
    assert _names(view, "1003", AS_BOB) == _names(view, "1003", None)
    assert _names(view, "perf/home/alice/secret/game/1003", AS_BOB) == {"elf", "debug"}
    shown = view.attributes(_walk(view, "1003/elf"))
    assert (shown.mode, shown.uid) == (stat.S_IFREG | 0o500, ALICE)


def test_a_listing_goes_on_behind_what_was_left_out(store: Store, view: View) -> None:
    for number in range(60):
        mode = 0o100755 if number % 3 else 0o100700
        at = sighting(b"/d%02d/.dwz/%02d" % (number, number), mode=mode, uid=ALICE)
        commit(store, capture(store, b"%d" % number, bytes((0x20, number)), at=at,
                              kinds=(Kind.EXECUTABLE, Kind.DEBUGINFO)))  # fmt: skip
    for path in ("", "debug/.build-id/20", "perf/.build-id/20", "perf", "debug/.dwz"):
        node = _walk(view, path)
        whole = list(view.children(node, 0, AS_BOB))
        assert len(whole) >= 40
        found: list[tuple[bytes, int, int]] = []
        offset = 0
        while page := list(itertools.islice(view.children(node, offset, AS_BOB), 7)):
            found += page
            offset = page[-1][2]
        assert found == whole, path


def test_one_file_of_many_is_enough(store: Store, view: View) -> None:
    """Whichever kind it is, and whether or not it is the one that is served."""
    private = sighting(b"/p", mode=0o100700, uid=ALICE, trust=Trust.HOST)
    public = sighting(b"/q", mode=0o100644, ino=2)
    commit(
        store,
        capture(store, b"1", b"\x01\x01", at=private),
        capture(store, b"2", b"\x01\x01", at=public, kinds=[Kind.DEBUGINFO]),
        capture(store, b"3", b"\x02\x02", at=private),
        capture(store, b"4", b"\x02\x02", at=public),
        capture(store, b"5", b"\x03\x03", at=private),
    )
    assert store.index.variants(2, Kind.EXECUTABLE)[0].uid == ALICE
    assert _names(view, "", AS_BOB) == FIXED | {"0101", "0202"}


@pytest.mark.parametrize(("most", "seen"), [(5, set()), (30, {"home"})])
def test_not_everything_is_looked_through(
    store: Store, view: View, monkeypatch: pytest.MonkeyPatch, most: int, seen: set[str]
) -> None:
    private = [sighting(b"/home/a/%d" % number, mode=0o100700) for number in range(5)]
    commit(
        store,
        *(capture(store, b"%d" % n, bytes((1, n)), at=at) for n, at in enumerate(private)),
        capture(store, b"x", b"\x02\x02", at=sighting(b"/home/b/x", mode=0o100700, uid=BOB)),
    )
    monkeypatch.setattr(tree, "_MOST_LOOKED_AT", most)
    assert _names(view, "perf", AS_BOB) == {".build-id"} | seen
    assert _names(view, "perf/home", AS_BOB) == {"b"}
    commit(store, capture(store, b"y", b"\x02\x03", at=sighting(b"/home/c/y")))
    assert _names(view, "perf", AS_BOB) == {".build-id", "home"}, "everybody may know of it"


def test_damage_is_not_shown_and_hides_nothing_else(
    store: Store, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(store)
    real = store.index.artifact

    def artifact(ordinal: int, kind: int) -> object:
        if ordinal == 1:
            raise IntegrityError("row")
        return real(ordinal, kind)

    monkeypatch.setattr(store.index, "artifact", artifact)
    assert _names(view, "", AS_BOB) == FIXED | {"1005"}


# --- path ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("captures", "expected"),
    [
        ([(0o755, ALICE, STAFF)], (0o444, ALICE, STAFF)),
        ([(0o700, ALICE, STAFF)], (0o400, ALICE, STAFF)),
        ([(0o700, ALICE, STAFF), (0o750, BOB, STAFF)], (0o440, BOB, STAFF)),
        ([(0o750, ALICE, STAFF), (0o704, BOB, STAFF)], (0o404, BOB, STAFF)),
        ([(0o704, ALICE, STAFF), (0o711, BOB, STAFF), (0o744, 0, 0)], (0o444, 0, 0)),
        ([(0o100, ALICE, STAFF)], (0, ALICE, STAFF)),
    ],
)
def test_path_is_for_those_who_may_read_a_file(
    store: Store,
    view: View,
    captures: list[tuple[int, int, int]],
    expected: tuple[int, int, int],
) -> None:
    for number, (mode, uid, gid) in enumerate(captures):
        at = sighting(b"/%d" % number, mode=0o100000 | mode, uid=uid, gid=gid, ino=number)
        commit(store, capture(store, b"%d" % number, b"\x01\x01", at=at))
    shown = view.attributes(_walk(view, "0101/path"))
    mode, uid, gid = expected
    assert (shown.mode, shown.uid, shown.gid) == (stat.S_IFREG | mode, uid, gid)
    assert shown.size == 3 * sum(mode & 0o444 == 0o444 for mode, _, _ in captures)
    for reader in (None, AS_ALICE, AS_BOB, AS_STAFF, PUBLIC):
        told = {
            b"/%d\n" % number
            for number, (mode, uid, gid) in enumerate(captures)
            if reader is None or reader.may_read(mode, uid, gid)
        }
        text = view.open(_walk(view, "0101/path"), reader).text
        assert set(text.splitlines(keepends=True)) == told
    assert shown.volatile


# --- variants ------------------------------------------------------------------------------------


def test_every_variant_of_every_kind(store: Store, view: View) -> None:
    both = (Kind.EXECUTABLE, Kind.DEBUGINFO)
    commit(
        store,
        capture(store, b"one", b"\x01\x01", at=sighting(mode=0o100711, uid=ALICE)),
        capture(store, b"two", b"\x01\x01", kinds=both, at=sighting(mtime_ns=77)),
        capture(store, b"three", b"\x01\x01", kinds=[Kind.DEBUGINFO], trust=Trust.HOST),
        capture(store, b"four", b"\x01\x01", kinds=[Kind.VDSO]),
        capture(store, b"elsewhere", b"\x01\x02"),
    )
    directory = _walk(view, "0101/variants")
    assert view.file_type(directory) == stat.S_IFDIR
    assert view.attributes(directory) == view.attributes(_walk(view, "0101"))
    found = {}
    for name, node, _ in view.children(directory):
        assert view.child(directory, name) == node
        assert view.file_type(node) == stat.S_IFREG
        content = view.open(node)
        found[os.pread(content.blob.fd, 100, 0)] = view.attributes(node), node, name.decode()
        content.close()
    assert set(found) == {b"one", b"two", b"three", b"four"}
    assert {name for _, _, name in found.values()} == {
        artifact.digest.hex() for kind in Kind for artifact in store.index.variants(1, kind)
    }
    assert (found[b"one"][0].mode, found[b"one"][0].uid) == (stat.S_IFREG | 0o511, ALICE)
    assert found[b"two"][0].mtime_ns == 77
    assert found[b"two"][1] == nodes.of_id(1, Kind.EXECUTABLE, 1), "listed as the first kind"
    assert found[b"three"][1] == _walk(view, "0101/debug")
    assert found[b"four"][1] == _walk(view, "0101/vdso")
    assert _names(view, "0101/variants", AS_BOB) == {
        found[which][2] for which in (b"two", b"three", b"four")
    }
    with pytest.raises(IsADirectoryError):
        view.open(directory)


@pytest.mark.parametrize(
    "name", ["", "x", "0" * 64, "0" * 63, "g" * 64, "elf", "path", "variants", "0" * 255]
)
def test_names_of_no_variant(store: Store, view: View, name: str) -> None:
    commit(store, capture(store, b"x", b"\x01\x01"), capture(store, b"y", b"\x01\x02"))
    directory = _walk(view, "0101/variants")
    assert view.child(directory, name.encode()) == 0
    (digest,) = _names(view, "0102/variants", None)
    assert view.child(directory, digest.encode()) == 0, "of another build ID"
    (own,) = _names(view, "0101/variants", None)
    assert view.child(directory, own.upper().encode()) == 0 or own.isdecimal()


def test_bytes_that_stand_for_several_build_ids(store: Store, view: View) -> None:
    for build_id in (b"\x01\x01", b"\x01\x02"):
        commit(store, capture(store, b"debug", build_id, kinds=[Kind.DEBUGINFO]))
    for path in ("0101", "0102"):
        (name,) = _names(view, f"{path}/variants", None)
        assert _walk(view, f"{path}/variants/{name}") == _walk(view, f"{path}/debug")


def test_variants_are_listed_in_pages(store: Store, view: View) -> None:
    """The served one has any number, and may become another in between."""
    commit(
        store,
        *(
            capture(store, b"%d" % n, b"\x01\x01", kinds=[kind], trust=Trust.CONTAINER)
            for kind in (Kind.EXECUTABLE, Kind.DEBUGINFO)
            for n in range(kind, 80 + kind)
        ),
    )
    commit(store, capture(store, b"40", b"\x01\x01", trust=Trust.HOST))
    directory = _walk(view, "0101/variants")
    whole = list(view.children(directory))
    assert len(whole) == 81
    for number, (_, _, offset) in enumerate(whole):
        assert list(view.children(directory, offset)) == whole[number + 1 :]
    first = list(itertools.islice(view.children(directory), 50))
    commit(store, capture(store, b"60", b"\x01\x01", trust=Trust.HOST))
    commit(store, capture(store, b"30", b"\x01\x01", trust=Trust.HOST))
    assert first + list(view.children(directory, first[-1][2])) == whole


def test_a_variant_that_is_captured_is_told_of(store: Store, view: View) -> None:
    """Also one that is not served: the kernel may believe that there is none."""
    commit(store, capture(store, b"best", b"\x01\x01", trust=Trust.HOST))
    directory = _walk(view, "0101/variants")
    before = _names(view, "0101/variants", None)
    assert commit(store, capture(store, b"other", b"\x01\x01")).changed == (1,)
    (name,) = _names(view, "0101/variants", None) - before
    spelled = {(node, name): again for node, name, again in view.spellings(1)}
    assert spelled[directory, name.encode()]
    assert spelled[_walk(view, "0101"), b"variants"] is False


def test_removed_files_are_in_no_listing(store: Store, view: View) -> None:
    commit(
        store,
        capture(store, b"1", b"\x10\x01", at=sighting(b"/usr/bin/a")),
        capture(store, b"2", b"\x10\x01", at=sighting(b"/usr/bin/a")),
        capture(store, b"3", b"\x10\x02", at=sighting(b"/usr/bin/b")),
    )
    variants = {artifact.digest for artifact in store.index.variants(1, Kind.EXECUTABLE)}
    directory = _walk(view, "1001/variants")
    store.remove([min(variants)])
    assert _names(view, "1001/variants", None) == {max(variants).hex()}
    store.remove([max(variants)])
    assert view.child(View.ROOT, b"1001") == 0
    assert view.child(nodes.of_id(1), b"variants") == 0
    assert list(view.children(directory)) == []
    for path in ("", "debug/.build-id/10", "perf/.build-id/10", "perf/usr/bin"):
        assert not {"1001", "01", "a"} & _names(view, path, None), path


def test_files_being_removed_are_in_no_listing(
    store: Store, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows stay until the kernel was told, and must not be shown meanwhile."""
    commit(store, capture(store, b"1", b"\x10\x01", at=sighting(b"/usr/bin/a")))
    monkeypatch.setattr(store.index, "kinds", lambda ordinal: 0)
    for directory, name in (
        (nodes.of_id(1), b"variants"),
        (nodes.DEBUG_BUCKET + 0x10, b"01"),
        (nodes.PERF_BUCKET + 0x10, b"01"),
        (_walk(view, "perf/usr/bin/a"), b"1001"),
    ):
        assert view.child(directory, name) == 0
        assert name not in {entry for entry, _, _ in view.children(directory)}
