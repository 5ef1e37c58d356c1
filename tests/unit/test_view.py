# SPDX-License-Identifier: Apache-2.0
"""buildidfs.view: every name of the layout, over a real store and without a mount."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.errors import IntegrityError
from buildidfs.model import BuildId, ByteRange, Kind, Quality, Trust
from buildidfs.store import Store
from buildidfs.view import Keep, View, blank, nodes
from tests.support.harness.captures import NOW, SECOND, capture, commit, sighting

BOTH = (Kind.EXECUTABLE, Kind.DEBUGINFO)
ID = bytes.fromhex("abcdef0123")
HEX = b"abcdef0123"


@pytest.fixture
def view(store: Store) -> View:
    return View(store)


def _walk(view: View, path: str) -> int:
    """Resolve a path as the kernel would, links included; 0 if it leads nowhere."""
    trail = _resolve(view, [View.ROOT], os.fsencode(path))
    return trail[-1] if trail else 0


def _resolve(view: View, trail: list[int], path: bytes) -> list[int]:
    """The directories down to what ``path`` leads to from the last of ``trail``."""
    for name in path.split(b"/"):
        if name == b"..":
            trail = trail[:-1] or trail
        elif name not in (b"", b"."):
            found = view.child(trail[-1], name)
            if not found:
                return []
            if stat.S_ISLNK(view.attributes(found).mode):
                trail = _resolve(view, trail, view.readlink(found))
                if not trail:
                    return []
            else:
                trail = [*trail, found]
    return trail


def _list(view: View, path: str) -> list[str]:
    """Names of a directory; that each is what a lookup finds is checked in passing."""
    node = _walk(view, path)
    assert node, path
    names = []
    last = 0
    for name, child, offset in view.children(node):
        assert offset > last or name not in names, "offsets grow"
        last = offset
        assert view.child(node, name) == child, (path, name)
        names.append(name.decode())
    assert len(set(names)) == len(names)
    return names


def _bytes(view: View, path: str) -> bytes:
    content = view.open(_walk(view, path))
    try:
        if content.blob is None:
            return content.text
        data = bytearray(os.pread(content.blob.fd, 1 << 20, 0))
        blank(data, 0, content.zeros)
        return bytes(data)
    finally:
        content.close()


def _tree(view: View) -> Iterator[tuple[str, int]]:
    """Every path there is, and its node."""
    waiting = [("", View.ROOT)]
    while waiting:
        prefix, directory = waiting.pop()
        for name, child, _ in view.children(directory):
            path = prefix + os.fsdecode(name)
            yield path, child
            if stat.S_ISDIR(view.attributes(child).mode):
                waiting.append((path + "/", child))


# --- the layout ----------------------------------------------------------------------------------


def test_an_empty_store_has_the_names_that_are_always_there(view: View) -> None:
    aliases = ["buildid", "debug", "perf", ".build-id", ".dwz", ".debug", "usr"]
    assert _list(view, "") == [*aliases, "README", "by-path", "by-name", "containers", "missing"]
    for browsed in ("by-path", "by-name", "containers", "missing"):
        assert _list(view, browsed) == []
    assert _list(view, "debug") == [".build-id", ".dwz"]
    assert _list(view, "debug/.build-id") == []
    assert _list(view, "debug/.dwz") == []
    assert _list(view, "perf") == [".build-id"]
    assert _list(view, "perf/.build-id") == []
    assert _list(view, "usr") == ["lib"]
    assert _list(view, "usr/lib") == ["debug"]


def test_aliases_lead_to_the_same_place(store: Store, view: View) -> None:
    commit(store, capture(store, b"x", ID, kinds=BOTH))
    debug = _walk(view, "debug/.build-id/ab/cdef0123.debug")

    assert debug == _walk(view, HEX.decode() + "/debug") != 0
    for alias in (
        "buildid/abcdef0123/debuginfo",
        "buildid/buildid/abcdef0123/debuginfo",
        ".build-id/ab/cdef0123.debug",
        "usr/lib/debug/.build-id/ab/cdef0123.debug",
        ".debug/.build-id/ab/cdef0123/debug",
        "perf/.build-id/ab/cdef0123/debug",
        "perf/usr/bin/app/abcdef0123/debug",
    ):
        assert _walk(view, alias) == debug, alias
    assert _walk(view, ".dwz") == _walk(view, "debug/.dwz")


def test_every_spelling_of_an_unstripped_executable(store: Store, view: View) -> None:
    commit(store, capture(store, b"unstripped", ID, kinds=BOTH, quality=Quality.DEBUGINFO))

    names = ["elf", "executable", "debug", "debuginfo", "path", "variants"]
    assert _list(view, "abcdef0123") == names
    assert _walk(view, "abcdef0123/elf") == _walk(view, "abcdef0123/executable")
    assert _walk(view, "abcdef0123/debug") == _walk(view, "abcdef0123/debuginfo")
    assert _list(view, "debug/.build-id") == ["ab"]
    assert _list(view, "debug/.build-id/ab") == ["cdef0123", "cdef0123.debug"]
    assert _list(view, "perf") == [".build-id", "usr"]
    assert _list(view, "perf/usr/bin/app") == ["abcdef0123"]
    assert _list(view, "perf/usr/bin/app/abcdef0123") == ["elf", "debug"]
    assert _list(view, "perf/.build-id/ab") == ["cdef0123"]
    assert _bytes(view, "abcdef0123/elf") == b"unstripped"
    assert _bytes(view, "debug/.build-id/ab/cdef0123") == b"unstripped"


def test_links_are_those_that_clients_expect(store: Store, view: View) -> None:
    commit(store, capture(store, b"x", ID, kinds=BOTH))

    def target(path: str) -> bytes:
        directory, _, name = path.rpartition("/")
        node = view.child(_walk(view, directory), name.encode())
        assert view.attributes(node).size == len(view.readlink(node))
        return view.readlink(node)

    assert target("debug/.build-id/ab/cdef0123") == b"../../../abcdef0123/elf"
    assert target("debug/.build-id/ab/cdef0123.debug") == b"../../../abcdef0123/debug"
    assert target("perf/.build-id/ab/cdef0123") == b"../../usr/bin/app/abcdef0123"
    assert target("usr/lib/debug") == b"../../debug"


def test_names_without_content_are_absent(store: Store, view: View) -> None:
    debug_only, vdso, kernel = b"\x01\x01", b"\x02\x02", b"\x03\x03"
    commit(
        store,
        capture(store, b"d", debug_only, kinds=[Kind.DEBUGINFO], at=sighting(b"/lib/d.debug")),
        capture(store, b"v", vdso, kinds=[Kind.VDSO], at=sighting(b"[vdso]")),
        capture(store, b"k", kernel, kinds=[Kind.KALLSYMS], at=sighting(b"[kernel.kallsyms]")),
    )

    assert _list(view, "0101") == ["debug", "debuginfo", "path", "variants"]
    assert _list(view, "debug/.build-id/01") == ["01.debug"]
    assert not _walk(view, "perf/.build-id/01/01"), "perf crashes on debug without elf"
    assert not _walk(view, "perf/lib/d.debug/0101")
    assert _list(view, "0202") == ["vdso", "path", "variants"]
    assert _list(view, "debug/.build-id/02") == []
    assert _list(view, "perf/[vdso]/0202") == ["vdso"]
    assert _bytes(view, "perf/.build-id/02/02/vdso") == b"v"
    assert _list(view, "perf/[kernel.kallsyms]/0303") == ["kallsyms"]
    assert _list(view, "perf") == [".build-id", "[kernel.kallsyms]", "[vdso]", "lib"]
    assert _list(view, "perf/lib/d.debug") == []


def test_perf_shows_no_debug_without_elf(store: Store, view: View) -> None:
    commit(
        store,
        capture(store, b"v", ID, kinds=[Kind.VDSO, Kind.DEBUGINFO], at=sighting(b"[vdso]")),
    )

    assert _list(view, "perf/[vdso]/abcdef0123") == ["vdso"]
    assert _walk(view, "abcdef0123/debug")


@pytest.mark.parametrize(
    "path",
    ["abcdef0124", "ABCDEF0123", "abcdef01234", "elf", "x" * 255, "debug/x", "debug/.build-id/AB",
     "debug/.build-id/abc", "debug/.build-id/ab/CDEF0123", "debug/.build-id/ab/cdef0123.1",
     "debug/.build-id/cd/cdef0123", "perf/.build-id/ab/cdef0123.debug", "abcdef0123/source",
     "perf/usr/bin/app/abcdef0124", "perf/usr/bin/abcdef0123", "perf/etc", "usr/bin",
     "debug/.dwz/x", "abcdef0123/\udcff"],
)  # fmt: skip
def test_absent_names(store: Store, view: View, path: str) -> None:
    commit(store, capture(store, b"x", ID, kinds=BOTH))
    directory, _, name = path.rpartition("/")
    parent = _walk(view, directory)

    assert parent
    assert view.child(parent, name.encode(errors="surrogateescape")) == 0


@given(length=st.integers(BuildId.MIN_BYTES, BuildId.MAX_BYTES))
def test_build_ids_of_any_length(length: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    build_id = bytes(range(7, 7 + length))
    with Store.create(tmp_path_factory.mktemp("lengths") / "store") as store:
        commit(store, capture(store, b"x", build_id, kinds=BOTH))
        view = View(store)
        for path, node in _tree(view):
            if not stat.S_ISLNK(view.attributes(node).mode):
                assert _walk(view, path) == node
        assert _list(view, "perf/usr/bin/app") == [build_id.hex()]
        assert _walk(view, f"perf/.build-id/07/{build_id.hex()[2:]}/debug")


def test_every_link_leads_somewhere(store: Store, view: View) -> None:
    commit(
        store,
        capture(store, b"1", b"\xaa\x01", kinds=BOTH),
        capture(store, b"2", b"\xaa\x02", kinds=[Kind.DEBUGINFO], at=sighting(b"/l/.dwz/x/y")),
        capture(store, b"3", b"\xaa\x03", at=sighting(b"/a" * 2100)),
        capture(store, b"4", b"\xaa\x04", at=sighting(b"/" + b"n" * 256 + b"/x")),
        capture(store, b"5", b"\xaa\x05", at=sighting(b"/../x")),
    )
    links = [path for path, node in _tree(view) if stat.S_ISLNK(view.attributes(node).mode)]

    assert len(links) > 8
    for path in links:
        assert _walk(view, path), path


# --- attributes and bytes ------------------------------------------------------------------------


def test_attributes_are_those_of_the_original(store: Store, view: View) -> None:
    seen = sighting(mode=0o104751, uid=1000, gid=1001, mtime_ns=NOW - 77)
    commit(store, capture(store, b"12345", ID, at=seen))
    shown = view.attributes(_walk(view, "abcdef0123/elf"))

    assert shown.mode == stat.S_IFREG | 0o551, "neither writable nor set-user-ID"
    assert (shown.uid, shown.gid, shown.size, shown.mtime_ns) == (1000, 1001, 5, NOW - 77)
    assert not shown.volatile
    directory = view.attributes(_walk(view, "abcdef0123"))
    assert directory.mode == stat.S_IFDIR | 0o555
    assert directory.mtime_ns == os.stat(os.path.join(store.path, b"format")).st_mtime_ns


def test_path_says_where_it_was_seen_newest_first(store: Store, view: View) -> None:
    for number, path in enumerate([b"/old", b"/new\nline\x1b[2J\xc2\x9b", b"/bad\xff", b"/old"]):
        seen = sighting(path, seen_ns=NOW + number * SECOND, ino=number + 1)
        commit(store, capture(store, b"x", ID, at=seen))
    expected = b"/old\n/bad\xff\n/new\\012line\\033[2J\\302\\233\n"
    shown = view.attributes(_walk(view, "abcdef0123/path"))

    assert _bytes(view, "abcdef0123/path") == expected
    assert shown.size == len(expected)
    assert shown.mode == stat.S_IFREG | 0o444
    assert shown.volatile


def test_a_better_variant_is_another_node(store: Store, view: View) -> None:
    commit(store, capture(store, b"poor", ID, trust=Trust.CONTAINER))
    poor = _walk(view, "abcdef0123/elf")
    commit(store, capture(store, b"better", ID, trust=Trust.HOST))
    better = _walk(view, "abcdef0123/elf")

    assert poor != better
    assert _bytes(view, "abcdef0123/elf") == b"better"
    content = View(store).open(poor)
    assert os.read(content.blob.fd, 100) == b"poor", "a node means the same bytes for ever"
    content.close()
    assert view.attributes(poor).size == 4


def test_served_file_is_the_one_in_the_tree(store: Store, view: View) -> None:
    scripts = (ByteRange(0, 4),)
    new = capture(store, b"of a container", ID, trust=Trust.CONTAINER)
    commit(store, msgspec.structs.replace(new, scripts=scripts))
    node = _walk(view, "abcdef0123/elf")
    served = view.served(HEX, Kind.EXECUTABLE, wait=False)
    assert served is not None
    assert served == view.held_in(node)
    for content in (view.open_served(served, wait=True), view.open(node)):
        assert content is not None
        assert content.zeros == scripts
        content.close()
    assert view.served(HEX, Kind.KALLSYMS, wait=False) is None
    for unknown in (b"abcdef0124", b"by-path", b"zz" * 16, b"\xff" * 64, b"g" * 100, b""):
        assert view.served(unknown, Kind.EXECUTABLE, wait=False) is None
    store.remove([served[0].digest])
    with pytest.raises(OSError, match="Stale"):
        view.open_served(served, wait=True)


def test_node_numbers_survive_a_remount(store: Store, view: View) -> None:
    commit(store, capture(store, b"x", ID, kinds=BOTH), capture(store, b"y", b"\x01\x02"))
    assert list(_tree(view)) == list(_tree(View(store)))
    numbers = [node for _, node in _tree(view)]
    assert all(0 < number < 2**63 for number in numbers)


def test_removed_node_is_stale(store: Store, view: View) -> None:
    gone = nodes.of_id(77, Kind.EXECUTABLE, 0)
    for call in (view.open, view.attributes):
        with pytest.raises(OSError, match=r".") as caught:
            call(gone)
        assert caught.value.errno == errno.ESTALE
    with pytest.raises(OSError, match=r".") as caught:
        view.readlink(nodes.of_id(77, nodes.SLOT_PERF_LINK))
    assert caught.value.errno == errno.ESTALE
    with pytest.raises(OSError, match=r".") as caught:
        view.child(nodes.of_dwz(b"gone"), b"x")
    assert caught.value.errno == errno.ESTALE


def test_numbers_that_are_no_nodes(store: Store, view: View) -> None:
    """They were never listed, and a client that asks for them all the same gets no bytes."""
    commit(store, capture(store, b"x", ID))
    unknown_kind, no_variant = nodes.of_id(1, 9), nodes.of_id(1, Kind.EXECUTABLE, 1 << 20)
    for node in (unknown_kind, no_variant):
        for call in (view.open, view.attributes):
            with pytest.raises(OSError, match=r".") as caught:
                call(node)
            assert caught.value.errno == errno.ESTALE
    assert view.child(nodes.PERF_BUCKET + 256, HEX[2:]) == 0
    assert list(view.children(nodes.PERF_BUCKET + 256)) == []
    with pytest.raises(OSError, match=r".") as caught:
        view.child(1 << 63 | 1, b"x")
    assert caught.value.errno == errno.ESTALE


def test_offset_of_another_directory_lists_nothing_of_that(store: Store, view: View) -> None:
    commit(store, capture(store, b"x", ID, kinds=BOTH), capture(store, b"y", b"\x01\x02"))
    (_, _, offset), *_ = view.children(nodes.DEBUG_BUCKET + ID[0])
    assert list(view.children(nodes.DEBUG_BUCKET + 1, offset)) == []


def test_directories_cannot_be_opened_nor_files_read_as_links(store: Store, view: View) -> None:
    commit(store, capture(store, b"x", ID))
    for path in ("", "abcdef0123", "debug", "perf/usr"):
        with pytest.raises(IsADirectoryError):
            view.open(_walk(view, path))
    with pytest.raises(OSError, match=r".") as caught:
        view.readlink(_walk(view, "abcdef0123/elf"))
    assert caught.value.errno == errno.EINVAL


def test_a_lost_blob_is_said_to_be_lost(store: Store, view: View) -> None:
    commit(store, capture(store, b"x", ID))
    artifact = store.index.artifact(1, Kind.EXECUTABLE)
    assert artifact
    os.unlink(store.blobs.path(artifact.digest))
    with pytest.raises(IntegrityError):
        view.open(_walk(view, "abcdef0123/elf"))


# --- scripts -------------------------------------------------------------------------------------


def _with_scripts(store: Store, trust: Trust) -> None:
    new = capture(store, b"0123456789", ID, kinds=BOTH, trust=trust)
    commit(store, msgspec.structs.replace(new, scripts=(ByteRange(2, 3), ByteRange(8, 2))))


@pytest.mark.parametrize("trust", [Trust.UNKNOWN, Trust.CONTAINER, Trust.PACKAGE])
def test_scripts_that_are_not_the_hosts_read_as_zeros(
    store: Store, view: View, trust: Trust
) -> None:
    _with_scripts(store, trust)

    assert _bytes(view, "abcdef0123/elf") == b"01\0\0\x00567\0\0"
    assert _bytes(view, "debug/.build-id/ab/cdef0123.debug") == b"01\0\0\x00567\0\0"
    assert _bytes(View(store, zero_scripts=False), "abcdef0123/elf") == b"0123456789"


def test_scripts_of_the_host_are_kept(store: Store, view: View) -> None:
    _with_scripts(store, Trust.HOST)
    assert _bytes(view, "abcdef0123/elf") == b"0123456789"


def test_other_bytes_are_another_node(store: Store, view: View) -> None:
    """The bytes of a file may change when it is seen on the host; then its number does too."""
    _with_scripts(store, Trust.CONTAINER)
    zeroed = _walk(view, "abcdef0123/elf")
    _with_scripts(store, Trust.HOST)

    assert _walk(view, "abcdef0123/elf") != zeroed
    assert _bytes(view, "abcdef0123/elf") == b"0123456789"
    content = view.open(zeroed)
    content.close()
    assert content.zeros, "who has it open keeps seeing zeros"


@given(
    size=st.integers(0, 60),
    offset=st.integers(0, 60),
    zeros=st.lists(st.builds(ByteRange, st.integers(0, 70), st.integers(0, 2**63)), max_size=4),
)
def test_blank_at_any_offset(size: int, offset: int, zeros: list[ByteRange]) -> None:
    data = bytearray(b"\xff" * size)
    blank(memoryview(data), offset, tuple(zeros))

    covered = [any(z.offset <= offset + i < z.offset + z.size for z in zeros) for i in range(size)]
    assert data == bytes(0 if hidden else 0xFF for hidden in covered)


# --- listings ------------------------------------------------------------------------------------


def test_listings_resume_behind_any_offset(store: Store, view: View) -> None:
    ids = [bytes([0xAA, number, 255 - number]) for number in range(40)]
    commit(
        store,
        *(
            capture(
                store, b"%d" % n, build_id, kinds=BOTH, at=sighting(b"/d%02d/.dwz/%02d" % (n, n))
            )
            for n, build_id in enumerate(ids)
        ),
        *(capture(store, b"s%d" % n, build_id) for n, build_id in enumerate(ids)),
    )
    directories = ["", "debug/.build-id", "debug/.build-id/aa", "debug/.dwz", "perf",
                   "perf/usr/bin/app", "perf/.build-id/aa", ids[3].hex(),
                   f"perf/usr/bin/app/{ids[3].hex()}"]  # fmt: skip
    for path in directories:
        node = _walk(view, path)
        whole = list(view.children(node))
        assert len(_list(view, path)) == len(whole) > 0, path
        for number, (_, _, offset) in enumerate(whole):
            rest = list(view.children(node, offset))
            assert rest == whole[number + 1 :], (path, number)


def test_a_listing_goes_on_while_captures_arrive(store: Store, view: View) -> None:
    commit(store, *(capture(store, b"%d" % n, bytes([1, n])) for n in range(200)))
    entries = view.children(View.ROOT, 0)
    first = [next(entries)[0] for _ in range(100)]
    commit(store, capture(store, b"new", b"\x00\x00"))
    rest = [name for name, _, _ in entries]

    names = first + rest
    assert len(set(names)) == len(names)
    assert {bytes([1, n]).hex().encode() for n in range(200)} <= set(names)


def test_a_path_component_that_is_a_build_id(store: Store, view: View) -> None:
    """perf's own cache is such a tree: /root/.debug/<path>/<id>/elf."""
    commit(
        store,
        capture(store, b"x", ID, at=sighting(b"/.debug/bin/app/" + HEX + b"/elf")),
        capture(store, b"y", b"\x01\x01", at=sighting(b"/.debug/bin/app")),
    )
    assert _walk(view, f"perf/.debug/bin/app/{HEX.decode()}/elf/{HEX.decode()}/elf")
    commit(store, capture(store, b"x", ID, at=sighting(b"/.debug/bin/app")))
    assert _list(view, "perf/.debug/bin/app").count(HEX.decode()) == 1
    assert _bytes(view, f"perf/.debug/bin/app/{HEX.decode()}/elf") == b"x"


# --- dwz -----------------------------------------------------------------------------------------


def test_dwz_files_with_and_without_directories(store: Store, view: View) -> None:
    paths = [b"/usr/lib/debug/.dwz/flat", b"/usr/lib/debug/.dwz/x86/coreutils.debug",
             b"/usr/lib/debug/.dwz/x86-64/gdb.debug", b"/d/.dwz/x86"]  # fmt: skip
    commit(
        store,
        *(
            capture(store, path, bytes([7, n]), kinds=[Kind.DEBUGINFO], at=sighting(path))
            for n, path in enumerate(paths)
        ),
        # known under that name, but there is no debuginfo to lead to
        capture(store, b"exe", b"\x08\x08", at=sighting(b"/d/.dwz/exe")),
    )

    assert _list(view, "debug/.dwz") == ["flat", "x86", "x86-64"]
    assert _bytes(view, ".dwz/flat") == paths[0]
    assert _bytes(view, ".dwz/x86") == paths[3], "a file has the name before a directory"
    assert _bytes(view, ".dwz/x86-64/gdb.debug") == paths[2]
    assert view.readlink(view.child(_walk(view, ".dwz/x86-64"), b"gdb.debug")) == (
        b"../../../0702/debug"
    )
    # another view has to find the directory by its number
    assert View(store).child(_walk(view, ".dwz/x86-64"), b"gdb.debug")


def test_a_long_listing_of_dwz_files_goes_on_where_it_stopped(store: Store, view: View) -> None:
    rests = [b"%d" % n for n in range(60)] + [b"%d/x" % n for n in range(30, 90)]
    commit(
        store,
        *(
            capture(
                store, rest, bytes([7, n]), kinds=[Kind.DEBUGINFO], at=sighting(b"/.dwz/" + rest)
            )
            for n, rest in enumerate(rests)
        ),
    )
    directory = _walk(view, "debug/.dwz")
    whole = list(view.children(directory))
    assert sorted(name for name, _, _ in whole) == sorted({rest.split(b"/")[0] for rest in rests})

    # The kernel refuses the entry that no longer fits, and asks again behind the one before.
    for step, reader in ((1, view), (7, view), (7, View(store))):
        found: list[tuple[bytes, int, int]] = []
        while more := list(itertools.islice(view.children(directory, len(found)), step + 1)):
            found += more[:step]
        assert found == whole
        assert list(reader.children(directory, 50)) == whole[50:]


def test_dwz_names_that_are_no_names(store: Store, view: View) -> None:
    commit(
        store,
        *(
            capture(
                store, rest, bytes([7, n]), kinds=[Kind.DEBUGINFO], at=sighting(b"/.dwz/" + rest)
            )
            for n, rest in enumerate([b"../up", b"./x", b"a//b", b"n" * 256, b"ok"])
        ),
    )
    assert _list(view, "debug/.dwz") == ["a", "ok"]
    assert _list(view, "debug/.dwz/a") == []


# --- spellings -----------------------------------------------------------------------------------


def test_spellings_name_everything_that_a_commit_brings(store: Store, view: View) -> None:
    """Else the kernel would go on believing that a name is absent."""
    before = dict(_tree(view))
    commit(
        store,
        capture(store, b"x", ID, kinds=BOTH, at=sighting(b"/opt//app/./bin")),
        capture(store, b"x", ID, kinds=BOTH, at=sighting(b"/opt/app/bin")),
        capture(store, b"x", ID, kinds=BOTH, at=sighting(b"/lib/.dwz/arch/name")),
    )
    spelled = {(directory, name) for directory, name, _ in view.spellings(1)}
    parents = {"": View.ROOT, **dict(_tree(view))}
    new = set(parents) - set(before) - {""}

    assert len(new) > 15
    for path in new:
        directory, _, name = path.rpartition("/")
        # the 256 directories of .build-id are never absent; no other is reported
        untold = path.startswith(("by-", "debug/.dwz/"))
        if directory not in ("debug/.build-id", "perf/.build-id") and not untold:
            assert (parents[directory], name.encode()) in spelled, path


def test_spellings_know_what_may_change(store: Store, view: View) -> None:
    commit(store, capture(store, b"x", ID, kinds=BOTH))
    replaceable = {(d, n) for d, n, again in view.spellings(1) if again}
    places = {node: path for path, node in _tree(view)}

    for node, name in ((_walk(view, "abcdef0123"), b"elf"),
                       (_walk(view, "perf/usr/bin/app/abcdef0123"), b"debug")):  # fmt: skip
        assert (node, name) in replaceable, places[node]
    assert list(view.spellings(99)) == []


def test_lookup_reports_how_long_a_name_may_be_remembered(store: Store) -> None:
    commit(store, capture(store, b"x", ID, at=sighting(b"/opt/app"), kinds=(Kind.EXECUTABLE,)))
    plain = View(store)
    fetching = View(store, may_come=lambda build_id, kind: True)
    directory = _walk(plain, HEX.decode())
    private = sighting(b"/home/app", mode=0o700)
    commit(store, capture(store, b"y", b"\x12\x34", at=private, kinds=(Kind.EXECUTABLE,)))

    def keep(view: View, parent: int, name: bytes) -> tuple[bool, Keep]:
        node, keep = view.lookup(parent, name)
        return node != nodes.ABSENT, keep

    root = View.ROOT
    assert keep(plain, root, HEX) == (True, Keep.ANNOUNCED)
    assert keep(plain, directory, b"elf") == (True, Keep.ANNOUNCED)
    assert keep(plain, nodes.PERF, b"opt") == (True, Keep.ANNOUNCED)
    assert keep(plain, nodes.BY_NAME, b"app") == (True, Keep.BRIEFLY)
    assert keep(plain, _walk(plain, "perf"), b"home") == (True, Keep.PRIVATE)

    assert keep(plain, root, b"abce") == (False, Keep.ANNOUNCED)
    assert keep(plain, directory, b"debug") == (False, Keep.ANNOUNCED)
    assert keep(plain, root, b"0" * 32) == (False, Keep.NEVER), "a commit announces no alias"
    assert keep(plain, nodes.DWZ, b"x") == (False, Keep.NEVER)
    assert keep(plain, nodes.BY_NAME, b"x") == (False, Keep.NEVER)

    assert keep(fetching, directory, b"debug") == (True, Keep.NEVER), "it may be fetched"
    assert keep(fetching, directory, b"kallsyms") == (False, Keep.ANNOUNCED)
    other = nodes.DEBUG_BUCKET + 0xAB
    assert keep(fetching, other, b"00.debug") == (False, Keep.NEVER)
