# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.index.locations: the tree of original paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.errors import IntegrityError
from buildidfs.model import Kind, Trust
from buildidfs.store import schema
from buildidfs.store.index import environment
from buildidfs.store.index.locations import APART_MNT, components, spelled
from buildidfs.store.location_rows import offset_of
from buildidfs.store.write import containers
from tests.support.harness.browsed import (
    by_name,
    container,
    container_names,
    files_of,
    ordinal_of,
    see,
    seen_in,
)
from tests.support.harness.captures import NOW, SECOND, capture, commit, sighting

if TYPE_CHECKING:
    from buildidfs.store import Store
    from buildidfs.store.index.environment import Environment


def _walk(store: Store, path: bytes) -> int | None:
    number: int | None = 0
    for name in path.split(b"/")[1:]:
        assert number is not None
        number = store.paths.child(number, name)
        if number is None:
            return None
    return number


def test_paths_are_found_by_walking(store: Store) -> None:
    path = b"/usr/lib/x86_64/libc.so.6"
    commit(store, capture(store, b"libc", at=sighting(path)))
    number = _walk(store, path)
    assert number is not None
    assert number == store.index.primary_path(1)
    assert store.paths.spelled(number) == path
    assert list(store.paths.ids(number)) == [1]
    assert store.paths.has(number, 1)
    assert not store.paths.has(number, 2)
    parent = _walk(store, b"/usr/lib/x86_64")
    assert parent is not None
    assert store.paths.parent(number) == (parent, b"libc.so.6")
    assert list(store.paths.ids(parent)) == []
    assert store.paths.parent(0) is None
    assert store.paths.spelled(0) == b"/"


def test_names_that_are_not_there(store: Store) -> None:
    commit(store, capture(store, b"x", at=sighting(b"/usr/bin/x")))
    for name in (b"us", b"usr2", b"", b"x" * 255, b"x" * 256, b"x" * 5000, b"usr\0"):
        assert store.paths.child(0, name) is None
    assert list(store.paths.children(999)) == []
    assert list(store.paths.ids(999)) == []
    assert store.paths.parent(999) is None


def test_children_resume_behind_a_name(store: Store) -> None:
    names = [*sorted(b"%d" % number for number in range(150)), b"\xff\xfe", b"\xff" * 255]
    commit(
        store,
        *(
            capture(store, b"same", number.to_bytes(2, "big"), at=sighting(b"/opt/" + name))
            for number, name in enumerate(names)
        ),
    )
    parent = store.paths.child(0, b"opt")
    assert parent is not None
    listed = list(store.paths.children(parent))
    assert [name for name, _ in listed] == names
    assert all(store.paths.child(parent, name) == number for name, number in listed)
    for index in (0, 70, len(names) - 1):
        assert list(store.paths.children(parent, names[index])) == listed[index + 1 :]
    assert [name for name, _ in store.paths.children(0)] == [b"opt"]


def test_ids_at_a_path_resume_behind_an_ordinal(store: Store) -> None:
    new = [capture(store, b"%d" % i, i.to_bytes(2, "big"), at=sighting(b"/x")) for i in range(100)]
    commit(store, *new)
    number = store.index.primary_path(1)
    assert number is not None
    assert list(store.paths.ids(number)) == list(range(1, 101))
    assert list(store.paths.ids(number, 90)) == list(range(91, 101))


def test_the_first_path_is_the_primary_one(store: Store) -> None:
    for path in (b"/z", b"/a"):
        commit(store, capture(store, b"x", at=sighting(path)))
    number = store.index.primary_path(1)
    assert number is not None
    assert store.paths.spelled(number) == b"/z"


@pytest.mark.parametrize(
    "path",
    [b"", b"/", b"/a/../b", b"/./x", b"..", b"/a\0b", b"/" + b"n" * 256, b"/x" * 5000],
)
def test_paths_that_no_tree_can_hold(store: Store, path: bytes) -> None:
    assert components(path) is None
    commit(store, capture(store, b"x", at=sighting(path)))
    assert store.index.primary_path(1) is None
    assert store.stats().paths == 0
    (record,) = store.index.origins(1)
    assert record.origin.path == path, "the origin keeps it"


def test_any_other_bytes_are_names(store: Store) -> None:
    path = b"/w\xff\n /...//" + b"n" * 255
    assert components(path) == [b"w\xff\n ", b"...", b"n" * 255]
    commit(store, capture(store, b"x", at=sighting(path)))
    number = store.index.primary_path(1)
    assert number is not None
    assert store.paths.spelled(number) == path.replace(b"//", b"/")


def test_a_loop_in_a_damaged_table_ends(store: Store) -> None:
    env = environment.acquire(store.path, read_only=False)
    row = schema.U32.pack(7)
    env.write(lambda txn: txn.put(row, row + b"x", db=env.tables["paths"]))
    for number in (7, 8):
        with pytest.raises(IntegrityError, match=f"path {number} .* does not lead to the root"):
            store.paths.spelled(number)
    environment.release(env)


@pytest.mark.parametrize("unusable", [b"/.build-id/ab/cdef", b"/" + b"long/" * 800 + b"x"])
def test_a_path_nobody_can_follow_does_not_become_the_primary_one(
    store: Store, unusable: bytes
) -> None:
    commit(store, capture(store, b"libc", at=sighting(unusable)))
    assert store.index.primary_path(1) is None
    commit(store, capture(store, b"libc", at=sighting(b"/usr/lib/libc.so.6")))
    assert store.index.primary_path(1) == _walk(store, b"/usr/lib/libc.so.6")


def test_a_damaged_key_is_an_error(store: Store) -> None:
    commit(store, capture(store, b"x", at=sighting(b"/usr/bin/x")))
    number = store.index.primary_path(1)
    assert number is not None
    env = environment.acquire(store.path, read_only=False)
    key = schema.PATH_ORDINAL.pack(number, 1) + b"x"
    env.write(lambda txn: txn.put(key, b"", db=env.tables["pathids"]))
    with pytest.raises(IntegrityError, match="damaged"):
        list(store.paths.ids(number))
    environment.release(env)


DIGESTS = tuple(f"sha256:{digit * 64}" for digit in "abc")
BOTH = (Kind.EXECUTABLE, Kind.DEBUGINFO)


@pytest.fixture
def env(store: Store) -> Iterator[Environment]:
    found = environment.acquire(store.path, read_only=False)
    yield found
    environment.release(found)


# --- names of containers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("docker:0123456789ab", b"docker:0123456789ab"),
        ("image:docker.io/library/x:1", b"image:docker.io%2Flibrary%2Fx:1"),
        ("..", b"%2E."),
        (".", b"%2E"),
        (".hidden", b"%2Ehidden"),
        ("a.b", b"a.b"),
        ("100%", b"100%25"),
        ("mnt:5~7", b"mnt:5%7E7"),
        ("\x00\n\x1b[2J\x7f", b"%00%0A%1B[2J%7F"),
        ("c\x9bd", b"c%C2%9Bd"),
        ("é\N{SNOWMAN}", "é\N{SNOWMAN}".encode()),
        ("\udcff\udc80x", b"\xff\x80x"),
    ],
)
def test_labels_are_spelled_so_that_nobody_is_misled(store: Store, label: str, name: bytes) -> None:
    assert spelled(label) == name
    see(store, b"x", seen_in(label))
    assert container_names(store) == [name]
    assert container(store, name).label == label


@given(
    st.text(max_size=400).map(lambda text: text.replace("\ud800", ""))
    | st.text("a/%.", max_size=300)
)
def test_every_label_is_a_directory_entry(label: str) -> None:
    if any(0xD800 <= ord(each) < 0xDC80 or 0xDCFF < ord(each) < 0xE000 for each in label):
        return  # no bytes decode to it
    name = spelled(label)
    assert len(name) <= 255 - 22, "there is room for what tells two apart"
    assert name not in (b".", b"..")
    assert not any(byte < 32 or byte in b"/\x7f" for byte in name)


def test_long_labels_that_begin_alike(store: Store) -> None:
    long = "x" * 300
    see(store, b"1", seen_in(long + "1"))
    see(store, b"2", seen_in(long + "2"))
    see(store, b"3", seen_in("/" * 120))
    assert len(set(container_names(store))) == 3
    assert all(len(name) <= 231 for name in container_names(store))
    assert {container(store, name).label for name in container_names(store)} == {
        long + "1", long + "2", "/" * 120,
    }  # fmt: skip


def test_a_container_number_by_no_name(store: Store) -> None:
    see(store, b"x", seen_in("box"))
    for name in (b"", b"bo", b"boxx", b"x" * 256, b"x" * 5000, b"box\0"):
        assert store.containers.number(name) is None
    assert store.containers.get(77) is None
    assert list(store.containers.every(77)) == []
    assert list(store.containers.children(77, 0)) == []


# --- which container it is -----------------------------------------------------------------------


def test_a_number_of_a_namespace_that_is_used_again(store: Store) -> None:
    see(store, b"1", seen_in("mnt:4026532177", mnt_ns_id=70))
    see(store, b"2", seen_in("mnt:4026532177", mnt_ns_id=71))
    see(store, b"3", seen_in("mnt:4026532177", b"/bin/b", mnt_ns_id=71))
    see(store, b"4", seen_in("mnt:4026532177", b"/bin/a", mnt_ns_id=70))
    assert container_names(store) == [b"mnt:4026532177", b"mnt:4026532177~71"]
    assert files_of(store, b"mnt:4026532177") == {b"/usr/bin/app": b"id:1", b"/bin/a": b"id:4"}
    assert files_of(store, b"mnt:4026532177~71") == {b"/usr/bin/app": b"id:2", b"/bin/b": b"id:3"}


def test_a_namespace_of_which_less_was_known_at_first(store: Store) -> None:
    see(store, b"1", seen_in("mnt:5"))
    see(store, b"2", seen_in("mnt:5", b"/2", mnt_ns_id=70))
    see(store, b"3", seen_in("mnt:5", b"/3", mnt_ns_id=71))
    see(store, b"4", seen_in("mnt:5", b"/4"))
    assert set(files_of(store, b"mnt:5")) == {b"/usr/bin/app", b"/2", b"/4"}
    assert set(files_of(store, b"mnt:5~71")) == {b"/3"}


def test_an_id_means_one_container_whatever_its_namespace(store: Store) -> None:
    see(store, b"1", seen_in("docker:0123456789ab", mnt_ns_id=70))
    see(store, b"2", seen_in("docker:0123456789ab", b"/2", mnt_ns_id=71))
    assert container_names(store) == [b"docker:0123456789ab"]


ID = b"0123456789abcdef" * 4


def test_who_imitates_a_label_has_a_tree_of_their_own(store: Store) -> None:
    """Any user may have control groups with any name below their own, and tells gdb nothing."""
    label = "docker:0123456789ab"
    mine = b"/user.slice/user-1000.slice/user@1000.service/docker-" + ID + b".scope"
    for number, group in enumerate(
        [b"/system.slice/docker-" + ID + b".scope", mine,
         b"/system.slice/docker-" + ID + b".scope/inner/x", mine + b"/x"],
    ):  # fmt: skip
        see(store, b"%d" % number, seen_in(label, b"/%d" % number, cgroup=group, mnt_ns_id=number))
    first, second = container_names(store)
    assert first == b"docker:0123456789ab"
    assert second.startswith(b"docker:0123456789ab~")
    assert [set(files_of(store, name)) for name in (first, second)] == [
        {b"/0", b"/2"},
        {b"/1", b"/3"},
    ]


def test_a_label_without_an_id_is_somebodys(store: Store) -> None:
    for number, group in enumerate([b"/lxc/web", b"/user.slice/user-7.slice/lxc/web", b"/lxc/web"]):
        see(store, b"%d" % number, seen_in("lxc:web", b"/%d" % number, cgroup=group))
    found = [set(files_of(store, name)) for name in container_names(store)]
    assert found == [{b"/0", b"/2"}, {b"/1"}]


def test_a_bundle_adds_nothing_to_a_container(store: Store) -> None:
    """It says what it likes, of every container that it has heard of."""
    group = b"/system.slice/docker-" + ID + b".scope"
    for label, image in (("docker:0123456789ab", ""), ("mnt:5", ""), ("image:x", DIGESTS[0])):
        known = {"cgroup": group, "mnt_ns_id": 70, "host": image and f"{image}/l"}
        see(store, b"1", seen_in(label, b"/1", **known))
        see(store, b"2", seen_in(label, b"/2", scanner="bundle", **known))
        other, own = container_names(store)[-1], label.encode()
        assert other.startswith(own + b"~")
        assert (set(files_of(store, own)), set(files_of(store, other))) == ({b"/1"}, {b"/2"})


def test_a_tag_that_was_moved(store: Store) -> None:
    for number, digest in enumerate((*DIGESTS[:2], *DIGESTS)):
        at = seen_in("image:x:1", b"/%d" % number, host=f"{digest}/layer", trust=Trust.PACKAGE)
        see(store, b"%d" % number, at)
    first, *others = container_names(store)
    assert first == b"image:x:1"
    assert others == [b"image:x:1~" + digit * 12 for digit in (b"b", b"c")]
    assert [set(files_of(store, name)) for name in (first, *others)] == [
        {b"/0", b"/2"}, {b"/1", b"/3"}, {b"/4"},
    ]  # fmt: skip
    assert [container(store, name).called.image for name in (first, *others)] == list(DIGESTS)


def test_one_that_still_has_its_own_name_when_the_first_is_gone(store: Store) -> None:
    first = see(store, b"1", seen_in("mnt:5", mnt_ns_id=70))
    see(store, b"2", seen_in("mnt:5", b"/2", mnt_ns_id=71))
    store.remove([first])
    assert container_names(store) == [b"mnt:5~71"]
    see(store, b"3", seen_in("mnt:5", b"/3", mnt_ns_id=71))
    assert container_names(store) == [b"mnt:5~71"], "it is one container"
    see(store, b"4", seen_in("mnt:5", b"/4", mnt_ns_id=72))
    assert container_names(store) == [b"mnt:5~71", b"mnt:5"]


def test_what_is_told_of_containers(store: Store) -> None:
    full = "0123456789abcdef" * 4
    cgroup = f"/docker/{full}".encode()
    see(store, b"1", seen_in("docker:0123456789ab", cgroup=cgroup, host="h", at=9))
    see(store, b"2", seen_in("docker:0123456789ab", b"/2", at=3))
    see(store, b"3", seen_in("docker:0123456789ab", b"/3", at=800))
    found = container(store, b"docker:0123456789ab")
    assert (found.label, found.id, found.called.image, found.host) == (
        "docker:0123456789ab",
        full,
        "",
        "h",
    )
    assert (found.first_seen_ns, found.last_seen_ns) == (NOW + 3 * SECOND, NOW + 800 * SECOND)
    see(store, b"4", seen_in("lxc:web"))
    assert container(store, b"lxc:web").id == "web"
    for number, label in enumerate(("image:x:1", "package:zlib1g")):
        see(store, b"i%d" % number, seen_in(label))
        assert container(store, label.encode()).id == "", "it is none"


def test_what_is_in_no_container_is_in_none(store: Store) -> None:
    see(store, b"1", sighting(b"/usr/bin/app"))
    see(store, b"2", seen_in("box", b"[vdso]"), Kind.VDSO)
    see(store, b"3", seen_in("box", b"/boot/x"), Kind.KALLSYMS)
    see(store, b"4", seen_in("box", b"memfd:x"))
    see(store, b"5", seen_in("box", b"/a/../b"))
    see(store, b"6", seen_in("box", b"/" + b"n" * 256))
    assert container_names(store) == []


# --- contents ------------------------------------------------------------------------------------


def test_files_are_where_the_container_saw_them(store: Store) -> None:
    paths = [b"/usr/bin/app", b"/usr/lib/\xff\n", b"/" + b"n" * 255, b"/a/b/c/d", b"/usr/bin/b"]
    for number, path in enumerate(paths):
        see(store, b"%d" % number, seen_in("box", path))
    see(store, b"9", seen_in("other", b"/usr/bin/app"))
    assert files_of(store, b"box") == {path: b"id:%d" % n for n, path in enumerate(paths)}
    assert files_of(store, b"other") == {b"/usr/bin/app": b"id:9"}
    assert ordinal_of(store, b"id:9") in by_name(store)[b"app"]


def test_who_was_seen_last_is_at_a_path(store: Store) -> None:
    see(store, b"1", seen_in("box", at=1000))
    see(store, b"2", seen_in("box", at=2000))
    assert files_of(store, b"box") == {b"/usr/bin/app": b"id:2"}
    see(store, b"3", seen_in("box", at=1500))
    assert files_of(store, b"box") == {b"/usr/bin/app": b"id:2"}, "it was seen before that"
    see(store, b"1", seen_in("box", at=3000))
    assert files_of(store, b"box") == {b"/usr/bin/app": b"id:1"}


def test_who_is_seen_again_was_seen_last(store: Store) -> None:
    """Two processes may write what they saw in another order."""
    see(store, b"1", seen_in("box", at=0))
    see(store, b"1", seen_in("box", at=5000))
    see(store, b"2", seen_in("box", at=2500))
    assert files_of(store, b"box") == {b"/usr/bin/app": b"id:1"}


def test_variants_of_a_build_id_in_two_containers(store: Store) -> None:
    for label, content in (("one", b"1"), ("two", b"2")):
        see(store, content, seen_in(label), build_id=b"\x01\x01")
    variants = set()
    for name in (b"one", b"two"):
        number = container(store, name).number
        usr = store.containers.child(number, 0, b"usr")
        assert usr is not None
        binaries = store.containers.child(number, usr.directory, b"bin")
        assert binaries is not None
        entry = store.containers.child(number, binaries.directory, b"app")
        assert entry is not None
        variants.add(entry.variant)
    assert variants == {0, 1}


def test_a_file_becomes_a_directory(store: Store) -> None:
    see(store, b"1", seen_in("box", b"/a"))
    see(store, b"2", seen_in("box", b"/a/b", at=1))
    assert files_of(store, b"box") == {b"/a/b": b"id:2"}


def test_a_directory_becomes_a_file_when_it_is_empty(store: Store) -> None:
    below = see(store, b"1", seen_in("box", b"/a/b"))
    see(store, b"2", seen_in("box", b"/a", at=1))
    assert files_of(store, b"box") == {b"/a/b": b"id:1"}
    see(store, b"3", seen_in("box", b"/c"))
    store.remove([below])
    see(store, b"2", seen_in("box", b"/a", at=100))
    assert files_of(store, b"box") == {b"/a": b"id:2", b"/c": b"id:3"}


def test_listings_resume_behind_any_offset(store: Store) -> None:
    names = [b"%d" % number for number in range(150)]
    commit(
        store,
        *(capture(store, b"x", b"\x01" + name, at=seen_in("box", b"/d/" + name)) for name in names),
    )
    directory = store.containers.child(1, 0, b"d")
    assert directory is not None
    whole = list(store.containers.children(1, directory.directory))
    assert sorted(entry.name for entry in whole) == sorted(names)
    assert [entry.offset for entry in whole] == sorted(offset_of(name) for name in names)
    for index in (0, 63, 64, 148, 149):
        after = list(store.containers.children(1, directory.directory, whole[index].offset))
        assert after == whole[index + 1 :]
    assert list(store.containers.children(1, directory.directory, 2**63 - 1)) == []


# --- bounds --------------------------------------------------------------------------------------


def _limit(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(containers, name, value)


def test_a_container_has_no_more_than_so_many_rows(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limit(monkeypatch, MAX_ENTRIES=5)
    for number in range(8):
        see(store, b"%d" % number, seen_in("box", b"/d/%d" % number))
    see(store, b"9", seen_in("box", b"/e/f/g"))
    assert set(files_of(store, b"box")) == {b"/d/%d" % number for number in range(4)}
    assert ordinal_of(store, b"id:9") in by_name(store)[b"g"], "it is found elsewhere"
    see(store, b"new", seen_in("box", b"/d/0", at=5))
    assert files_of(store, b"box")[b"/d/0"] == b"id:new", "what has a row can change"


def test_the_container_goes_that_was_last_seen_longest_ago(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limit(monkeypatch, MAX_CONTAINERS=3)
    for number, at in enumerate((50_000, 10_000, 20_000, 30_000)):
        see(store, b"%d" % number, seen_in(f"box{number}", at=at))
    assert container_names(store) == [b"box0", b"box2", b"box3"]
    assert store.containers.number(b"box1") is None
    see(store, b"2", seen_in("box2", at=40_000))
    see(store, b"4", seen_in("box4", at=60_000))
    assert container_names(store) == [b"box0", b"box2", b"box4"]
    assert files_of(store, b"box2") == {b"/usr/bin/app": b"id:2"}


@pytest.mark.parametrize("limit", [{"MAX_CONTAINERS": 6}, {"MAX_CONTENTS": 30}], ids=str)
def test_user_with_many_containers_keeps_the_trees_of_others(
    store: Store, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]
) -> None:
    _limit(monkeypatch, **limit)
    for name in ("alice", "bob"):
        group = b"/docker/" + name[:1].encode() * 64
        see(store, name.encode(), seen_in(name, at=10, apart=APART_MNT, cgroup=group))
    for number in range(20):
        at = seen_in(f"evil{number}", at=1000 * number, apart=APART_MNT, owner=1001)
        see(store, b"evil%d" % number, at)
    names = container_names(store)
    assert {b"alice", b"bob", b"evil19"} <= set(names)
    assert len(names) < 20
    assert files_of(store, b"alice") == {b"/usr/bin/app": b"id:alice"}


def test_a_transaction_with_many_containers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many go as come, or there would be no bound."""
    _limit(monkeypatch, MAX_CONTAINERS=10, _EVICTED_AT_ONCE=1)
    for turn in range(6):
        commit(store, *(
            capture(store, b"x", b"\x01\x01", at=seen_in(f"box{turn}-{number}", at=turn * 1000))
            for number in range(20)
        ))  # fmt: skip
        assert len(container_names(store)) <= 20 + 10
    see(store, b"y", seen_in("last", at=99_000))
    assert len(container_names(store)) <= 20
    for number in range(12):
        see(store, b"y", seen_in(f"last{number}", at=99_000 + number))
    assert len(container_names(store)) == 10
    assert b"last11" in container_names(store)


def test_rows_go_over_several_transactions(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _limit(monkeypatch, MAX_CONTENTS=60, _EVICTED_AT_ONCE=7)
    commit(store, *(
        capture(store, b"x", b"\x01%02d" % n, at=seen_in("old", b"/a%d/b/%d" % (n % 3, n)))
        for n in range(50)
    ))  # fmt: skip
    rows = 50 + 2 * 3 + 1
    assert store.checker().env.entries()["contents"] == rows - 1
    seen = []
    for number in range(12):
        see(store, b"n%d" % number, seen_in(f"new{number}", b"/x", at=1000 + number))
        if b"old" not in container_names(store):
            break
        seen.append(len(files_of(store, b"old")))
        for path in files_of(store, b"old"):
            assert path.startswith(b"/a"), "what is left still has its place"
    assert len(seen) > 3, "not all at once"
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) == len(seen) or seen[0] == seen[1] == 50


def test_one_that_is_seen_again_while_it_goes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def see_all(at: int) -> None:
        commit(store, *(
            capture(store, b"x", b"\x01%02d" % n, at=seen_in("old", b"/a%d/%d" % (n % 3, n), at=at))
            for n in range(30)
        ))  # fmt: skip

    see_all(0)
    see(store, b"b", seen_in("other", b"/b", at=500))
    _limit(monkeypatch, MAX_CONTENTS=34, _EVICTED_AT_ONCE=4)
    see(store, b"c", seen_in("new", b"/c", at=1000))
    left = len(files_of(store, b"old"))
    assert 0 < left < 30
    see_all(2000)
    assert len(files_of(store, b"old")) == 30
    assert list(store.check()) == []


def test_seeing_again_what_went_brings_it_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limit(monkeypatch, MAX_CONTAINERS=1)
    for at in (0, 2000, 4000):
        for label in ("one", "two"):
            see(store, b"x", seen_in(label, at=at + (label == "two") * 1000))
            assert label.encode() in container_names(store)
    assert container_names(store) == [b"two"]
