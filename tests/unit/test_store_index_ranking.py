# SPDX-License-Identifier: Apache-2.0
"""Which of several variants is served, and why: the order in which they come does not matter."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buildidfs.cli.main import main
from buildidfs.model import Artifact, BuildId, Digest, Kind, Quality, Standing, Trust
from buildidfs.store import Store, is_withheld, schema
from buildidfs.store.index import environment
from buildidfs.store.values import NewSeen
from tests.support.harness.captures import NOW, SECOND, capture, sighting
from tests.support.harness.damages import with_new_index

if TYPE_CHECKING:
    from buildidfs.store.index.environment import Txn

ID = b"\xab\xcd\xef\x01"
BOTH = (Kind.EXECUTABLE, Kind.DEBUGINFO)
ORDERS = list(itertools.permutations(range(3)))


class Variant(msgspec.Struct, frozen=True):
    """What a capture is ranked by, and its bytes."""

    content: bytes
    trust: Trust = Trust.HOST
    quality: Quality = Quality.NONE
    segments: int = 0
    kinds: tuple[Kind, ...] = (Kind.DEBUGINFO,)
    seen: int = 0
    standing: Standing = Standing.GIVEN
    truncated: bool = False


def _commit(store: Store, variants: list[Variant]) -> None:
    """One after the other, in that order."""
    for each in variants:
        at = sighting(
            b"/" + each.content.hex().encode(),
            seen_ns=NOW + each.seen * SECOND,
            standing=each.standing,
        )
        new = capture(
            store, each.content, ID, at=at, kinds=each.kinds, quality=each.quality,
            trust=each.trust,
        )  # fmt: skip
        changes = {"segments": each.segments, "truncated": each.truncated}
        store.commit([msgspec.structs.replace(new, **changes)])


def _served(variants: list[Variant], kind: Kind = Kind.DEBUGINFO) -> tuple[list[bytes], list[str]]:
    """The bytes of all variants in their order, and the reasons."""
    directory = Path(tempfile.mkdtemp())
    try:
        with Store.create(directory / "store") as store:
            _commit(store, variants)
            assert list(store.check()) == []
            kept = store.index.variants(1, kind)
            contents = {Digest(sha256(each.content).digest()): each.content for each in variants}
            found = [contents[each.digest] for each in kept]
            best = store.index.artifact(1, kind)
            assert best is None or best == kept[0]
            assert (best is None) == all(map(_is_withheld(store), kept))
            return found, store.why(1, kept)
    finally:
        shutil.rmtree(directory)


def _is_withheld(store: Store) -> Callable[[Artifact], bool]:
    executable = store.index.artifact(1, Kind.EXECUTABLE)
    return lambda artifact: is_withheld(artifact, executable)


@pytest.mark.parametrize("order", ORDERS)
def test_trust_comes_first(order: tuple[int, ...]) -> None:
    variants = [
        Variant(b"host", Trust.HOST, Quality.NONE, seen=9),
        Variant(b"package", Trust.PACKAGE, Quality.SYMTAB, seen=5),
        Variant(b"container", Trust.CONTAINER, Quality.DEBUGINFO),
    ]
    found, why = _served([variants[number] for number in order])
    assert found == [b"host", b"package", b"container"]
    assert why == [
        "is believed most: host", "is believed less: package", "is believed less: container",
    ]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", BOTH)
def test_file_of_root_elsewhere_does_not_hide_a_given_one(
    order: tuple[int, ...], kind: Kind
) -> None:
    """Root of a container can write it into a directory of the host."""
    variants = [
        Variant(b"given", Trust.PACKAGE, Quality.SYMTAB, kinds=(kind,), seen=9),
        Variant(
            b"elsewhere", Trust.HOST, Quality.DEBUGINFO, kinds=(kind,),
            standing=Standing.ELSEWHERE,
        ),
        Variant(
            b"fetched", Trust.PACKAGE, Quality.DEBUGINFO, kinds=(kind,),
            standing=Standing.UPSTREAM,
        ),
    ]  # fmt: skip
    found, why = _served([variants[number] for number in order], kind)
    others = [b"elsewhere", b"fetched"]
    assert found == [b"given", *(others if kind is Kind.EXECUTABLE else reversed(others))]
    assert why[0] == "comes from the best place: given"


@pytest.mark.parametrize("order", ORDERS)
def test_more_is_better_among_equals(order: tuple[int, ...]) -> None:
    variants = [
        Variant(b"stripped", quality=Quality.DYNSYM, kinds=BOTH),
        Variant(b"symbols", quality=Quality.SYMTAB, kinds=BOTH, seen=3),
        Variant(b"all", quality=Quality.DEBUGINFO, kinds=BOTH, seen=7),
    ]
    for kind in BOTH:
        found, why = _served([variants[number] for number in order], kind)
        assert found == [b"all", b"symbols", b"stripped"]
        assert why == [
            "tells most: debuginfo", "tells less: symtab", "tells less: dynsym",
        ]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_debuginfo_of_another_program_comes_last(order: tuple[int, ...]) -> None:
    """It says more, and that the program is loaded elsewhere."""
    variants = [
        Variant(b"program", kinds=(Kind.EXECUTABLE,), segments=7),
        Variant(b"contradicts", quality=Quality.DEBUGINFO, segments=8),
        Variant(b"fits", quality=Quality.SYMTAB, segments=7, seen=5),
    ]
    found, why = _served([variants[number] for number in order])
    assert found == [b"fits", b"contradicts"]
    assert why == [
        "is loaded where the executable is, and others are not",
        "is not loaded where the executable is",
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_truncated_comes_last(order: tuple[int, ...]) -> None:
    """However far it is believed: debuggers refuse it."""
    variants = [
        Variant(b"half", Trust.HOST, Quality.DEBUGINFO, kinds=BOTH, truncated=True),
        Variant(b"first half", Trust.CONTAINER, Quality.DEBUGINFO, kinds=BOTH, truncated=True),
        Variant(b"whole", Trust.CONTAINER, Quality.SYMTAB, kinds=BOTH, seen=9),
    ]
    for kind in BOTH:
        found, why = _served([variants[number] for number in order], kind)
        assert found == [b"whole", b"half", b"first half"]
        assert why == ["is whole", "is truncated", "is truncated"]


@pytest.mark.parametrize("order", ORDERS)
def test_a_truncated_executable_has_no_say(order: tuple[int, ...]) -> None:
    """It neither contradicts debuginfo nor withholds it."""
    variants = [
        Variant(b"half", Trust.HOST, kinds=(Kind.EXECUTABLE,), segments=7, truncated=True),
        Variant(b"all", Trust.CONTAINER, Quality.DEBUGINFO, segments=8),
        Variant(b"symbols", Trust.CONTAINER, Quality.SYMTAB, segments=7),
    ]
    found, why = _served([variants[number] for number in order])
    assert found == [b"all", b"symbols"]
    assert why == ["tells most: debuginfo", "tells less: symtab"]


WITHHELD = [
    (Trust.CONTAINER, Standing.GIVEN, "container"),
    (Trust.UNKNOWN, Standing.GIVEN, "unknown"),
    (Trust.PACKAGE, Standing.IMAGE, "image"),
    (Trust.HOST, Standing.ELSEWHERE, "elsewhere"),
    (Trust.HOST, Standing.INSTALLED, "installed"),
]


@pytest.mark.parametrize("first", ["executable", "debuginfo"])
@pytest.mark.parametrize(("trust", "standing", "less"), WITHHELD)
def test_debuginfo_that_is_believed_less_is_not_served(
    trust: Trust, standing: Standing, less: str, first: str
) -> None:
    executable = Variant(b"program", kinds=(Kind.EXECUTABLE,), standing=Standing.SYSTEM)
    debuginfo = Variant(b"names", trust, Quality.DEBUGINFO, standing=standing)
    order = [executable, debuginfo] if first == "executable" else [debuginfo, executable]
    found, why = _served(order)
    assert found == [b"names"]
    assert why == [f"is believed less than the executable: {less}"]


@pytest.mark.parametrize("trust", [Trust.PACKAGE, Trust.HOST])
@pytest.mark.parametrize("standing", Standing)
def test_what_the_operator_hands_over_names_every_executable(
    trust: Trust, standing: Standing
) -> None:
    executable = Variant(b"program", kinds=(Kind.EXECUTABLE,), standing=standing)
    debuginfo = Variant(b"names", trust, Quality.DEBUGINFO)
    assert _served([executable, debuginfo]) == ([b"names"], [""])


@pytest.mark.parametrize("standing", Standing)
def test_a_server_that_the_operator_named_names_every_executable(standing: Standing) -> None:
    executable = Variant(b"program", kinds=(Kind.EXECUTABLE,), standing=standing)
    debuginfo = Variant(b"names", Trust.PACKAGE, Quality.DEBUGINFO, standing=Standing.UPSTREAM)
    assert _served([executable, debuginfo]) == ([b"names"], [""])


@pytest.mark.parametrize("order", ORDERS)
def test_files_of_a_server_rank_between_those_of_images_and_packages(
    order: tuple[int, ...],
) -> None:
    variants = [
        Variant(b"image", Trust.PACKAGE, Quality.DEBUGINFO, standing=Standing.IMAGE),
        Variant(b"server", Trust.PACKAGE, Quality.DEBUGINFO, standing=Standing.UPSTREAM),
        Variant(b"package", Trust.PACKAGE, Quality.SYMTAB),
    ]
    found, _ = _served([variants[number] for number in order])
    assert found == [b"package", b"server", b"image"]


@pytest.mark.parametrize(("trust", "standing", "less"), WITHHELD)
def test_what_is_believed_as_much_names_it(trust: Trust, standing: Standing, less: str) -> None:
    executable = Variant(b"program", trust, kinds=(Kind.EXECUTABLE,), standing=standing)
    debuginfo = Variant(b"names", trust, Quality.DEBUGINFO, standing=standing)
    assert _served([executable, debuginfo]) == ([b"names"], [""])


@pytest.mark.parametrize("order", ORDERS)
def test_withheld_debuginfo_leaves_the_place_to_other(order: tuple[int, ...]) -> None:
    variants = [
        Variant(b"program", kinds=(Kind.EXECUTABLE,)),
        Variant(b"container", Trust.CONTAINER, Quality.DEBUGINFO),
        Variant(b"package", Trust.PACKAGE, Quality.SYMTAB, seen=5),
    ]
    found, why = _served([variants[number] for number in order])
    assert found == [b"package", b"container"]
    assert why == ["is believed most: package", "is believed less: container"]


def test_withheld_debuginfo_is_served_when_the_executable_is_gone(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store") as store:
        program = Variant(b"program", kinds=(Kind.EXECUTABLE,))
        _commit(store, [Variant(b"names", Trust.CONTAINER), program])
        assert store.index.artifact(1, Kind.DEBUGINFO) is None
        assert store.index.kinds(1) == 1 << Kind.EXECUTABLE
        executable = store.index.artifact(1, Kind.EXECUTABLE)
        assert executable is not None
        store.remove([executable.digest], forget=True)
        assert list(store.check()) == []
        assert store.index.artifact(1, Kind.DEBUGINFO) is not None
        assert store.index.kinds(1) == 1 << Kind.DEBUGINFO


GONE = "is believed less than the executable, which is not here, or than what refers to it"


def _evict(store: Store, kind: Kind = Kind.EXECUTABLE) -> None:
    """Remove what is served, as is done to make room."""
    artifact = store.index.artifact(1, kind)
    assert artifact is not None
    store.remove([artifact.digest])
    assert list(store.check()) == []


def _note(store: Store, trust: Trust = Trust.HOST, build_id: bytes = ID) -> None:
    """Have an executable of the host noted, for which there is no room."""
    at = sighting(b"/usr/bin/program", trust=trust, standing=Standing.SYSTEM)
    store.note_seen([NewSeen(at, BuildId(build_id), omitted=True)])


def _assert_withheld(store: Store, build_id: bytes = ID) -> None:
    """Its debuginfo is a variant under no default name, and is not lost sight of."""
    ordinal = store.index.ordinal(build_id)
    assert ordinal is not None
    assert store.index.artifact(ordinal, Kind.DEBUGINFO) is None
    (kept,) = store.index.variants(ordinal, Kind.DEBUGINFO)
    assert store.why(ordinal, [kept]) == [f"{GONE}: {kept.trust.name.lower()}"]
    assert store.index.kinds(ordinal) == schema.WITHHELD
    assert (ordinal, build_id) in list(store.index.build_ids_from())
    assert list(store.check()) == []


@pytest.mark.parametrize("first", ["before", "after"])
@pytest.mark.parametrize("how", ["evicted", "omitted"])
def test_an_executable_that_is_not_here_withholds_debuginfo(
    tmp_path: Path, how: str, first: str
) -> None:
    names = Variant(b"names", Trust.CONTAINER, Quality.DEBUGINFO)
    program = Variant(b"program", kinds=(Kind.EXECUTABLE,), standing=Standing.SYSTEM)
    with Store.create(tmp_path / "store") as store:
        if first == "before":
            _commit(store, [names])
        if how == "evicted":
            _commit(store, [program])
            _evict(store)
        else:
            _note(store)
        if first == "after":
            _commit(store, [names])
        _assert_withheld(store)
        _commit(store, [Variant(b"other", Trust.CONTAINER, kinds=(Kind.EXECUTABLE,))])
        ordinal = store.index.ordinal(ID)
        assert ordinal is not None
        assert store.index.artifact(ordinal, Kind.DEBUGINFO) is None, (
            "the container brings a program"
        )
        _commit(store, [Variant(b"symbols", Trust.PACKAGE, Quality.DEBUGINFO)])
        best = store.index.artifact(ordinal, Kind.DEBUGINFO)
        assert best is not None
        assert best.trust is Trust.PACKAGE
        assert list(store.check()) == []


def test_an_executable_of_a_container_that_is_evicted_withholds_nothing(tmp_path: Path) -> None:
    program = Variant(b"program", Trust.CONTAINER, kinds=(Kind.EXECUTABLE,))
    with Store.create(tmp_path / "store") as store:
        _commit(store, [program])
        _note(store, Trust.CONTAINER)
        _evict(store)
        _commit(store, [Variant(b"names", Trust.UNKNOWN)])
        ordinal = store.index.ordinal(ID)
        assert ordinal is not None
        assert store.index.artifact(ordinal, Kind.DEBUGINFO) is not None


def test_an_executable_that_comes_again_stands_for_itself(tmp_path: Path) -> None:
    program = Variant(b"program", kinds=(Kind.EXECUTABLE,), standing=Standing.SYSTEM)
    with Store.create(tmp_path / "store") as store:
        _commit(store, [Variant(b"names", Trust.CONTAINER), program])
        _evict(store)
        assert store.index.floor(ID) > 0
        _commit(store, [program])
        assert store.index.floor(ID) == 0
        assert store.index.artifact(1, Kind.DEBUGINFO) is None
        executable = store.index.artifact(1, Kind.EXECUTABLE)
        assert executable is not None
        store.remove([executable.digest], forget=True)
        assert store.index.artifact(1, Kind.DEBUGINFO) is not None


def test_a_build_id_goes_with_its_withheld_debuginfo(tmp_path: Path) -> None:
    program = Variant(b"program", kinds=(Kind.EXECUTABLE,), standing=Standing.SYSTEM)
    with Store.create(tmp_path / "store") as store:
        _commit(store, [Variant(b"names", Trust.CONTAINER), program])
        _evict(store)
        (kept,) = store.index.variants(1, Kind.DEBUGINFO)
        store.remove([kept.digest])
        assert store.index.ordinal(ID) is None
        assert list(store.index.build_ids_from()) == []
        assert store.index.floor(ID) > 0, "more may come from the container"
        assert list(store.check()) == []
        _commit(store, [Variant(b"names", Trust.CONTAINER)])
        _assert_withheld(store)
        store.remove([kept.digest], forget=True)
        assert store.index.floor(ID) == 0


def test_only_so_many_floors_are_kept_and_the_lowest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MAX_FLOORS", 8)
    with Store.create(tmp_path / "store") as store:
        for number in range(4):
            _note(store, build_id=bytes((number, 1)))
        for number in range(100):
            at = sighting(b"/srv/program", trust=Trust.HOST, standing=Standing.ELSEWHERE)
            store.note_seen([NewSeen(at, BuildId(bytes((number, 2))), omitted=True)])
        assert all(store.index.floor(bytes((number, 1))) for number in range(4))
        assert sum(1 for number in range(100) if store.index.floor(bytes((number, 2)))) <= 4


def test_a_floor_that_is_damaged_is_found_and_mended(tmp_path: Path) -> None:
    key = schema.floor_key(ID)
    with Store.create(tmp_path / "store") as store:
        _commit(store, [Variant(b"names", Trust.CONTAINER)])
        _note(store)
    env = environment.acquire(bytes(tmp_path / "store"), read_only=False)
    try:
        env.write(lambda txn: txn.put(key, b"\3\4....", db=env.tables["meta"]))
    finally:
        environment.release(env)
    with Store.open(tmp_path / "store") as store:
        assert any(f"row {key.hex()} of meta cannot be read" in each for each in store.check())
        with with_new_index(store) as again:
            assert list(again.check()) == []
            assert again.index.artifact(1, Kind.DEBUGINFO) is not None


@pytest.mark.parametrize("first", ["names", "dwz"])
def test_a_dwz_file_is_believed_as_the_debuginfo_that_refers_to_it(
    tmp_path: Path, first: str
) -> None:
    dwz = b"\xdd\x02\x03"
    with Store.create(tmp_path / "store") as store:

        def names() -> None:
            new = capture(store, b"names", ID, kinds=(Kind.DEBUGINFO,), trust=Trust.HOST)
            refers = (b"/usr/lib/debug/.dwz/foo", BuildId(dwz))
            store.commit([msgspec.structs.replace(new, supplement=refers)])

        def common(content: bytes, trust: Trust) -> None:
            at = sighting(b"/usr/lib/debug/.dwz/foo", standing=Standing.GIVEN)
            new = capture(store, content, dwz, at=at, kinds=(Kind.DEBUGINFO,), trust=trust)
            store.commit([new])

        if first == "names":
            names()
        common(b"evil", Trust.CONTAINER)
        if first == "dwz":
            names()
        _assert_withheld(store, dwz)
        common(b"common", Trust.PACKAGE)
        ordinal = store.index.ordinal(dwz)
        assert ordinal is not None
        best = store.index.artifact(ordinal, Kind.DEBUGINFO)
        assert best is not None
        assert best.trust is Trust.PACKAGE


def test_withheld_debuginfo_is_served_when_its_bytes_are_seen_at_a_better_place(
    tmp_path: Path,
) -> None:
    with Store.create(tmp_path / "store") as store:
        program = Variant(b"program", kinds=(Kind.EXECUTABLE,))
        names = Variant(b"names", Trust.CONTAINER)
        _commit(store, [program, names])
        assert store.index.artifact(1, Kind.DEBUGINFO) is None
        _commit(store, [msgspec.structs.replace(names, trust=Trust.HOST, seen=1)])
        assert list(store.check()) == []
        assert store.index.artifact(1, Kind.DEBUGINFO) is not None


def test_check_withholds_served_debuginfo_that_is_believed_less(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store") as store:
        program = Variant(b"program", kinds=(Kind.EXECUTABLE,))
        _commit(store, [program, Variant(b"names", Trust.CONTAINER)])
        (names,) = store.index.variants(1, Kind.DEBUGINFO)
        env = environment.acquire(store.path, read_only=False)
        key = schema.ORDINAL_KIND.pack(1, Kind.DEBUGINFO)

        def serve(txn: Txn) -> None:
            txn.delete(key + bytes(2), db=env.tables["variants"])
            txn.put(key, schema.pack_artifact(names), db=env.tables["artifacts"])

        env.write(serve)
        environment.release(env)
        text = "debuginfo 1/2/0 is believed less than its executable, and is served"
        assert text in list(store.check())
        with with_new_index(store) as again:
            assert list(again.check()) == []
            assert again.index.artifact(1, Kind.DEBUGINFO) is None


@pytest.mark.parametrize("order", ORDERS)
def test_a_place_of_the_systems_comes_before_quality(order: tuple[int, ...]) -> None:
    """The root of a container without a user namespace writes files of root's elsewhere."""
    variants = [
        Variant(b"volume", quality=Quality.DEBUGINFO, kinds=BOTH, standing=Standing.ELSEWHERE),
        Variant(b"opt", quality=Quality.SYMTAB, kinds=BOTH, standing=Standing.INSTALLED, seen=3),
        Variant(b"usr", kinds=(Kind.EXECUTABLE,), standing=Standing.SYSTEM, seen=5),
    ]
    chosen = [variants[number] for number in order]
    found, why = _served(chosen, Kind.EXECUTABLE)
    assert found == [b"usr", b"opt", b"volume"]
    assert why == [
        "comes from the best place: system",
        "comes from a lesser place: installed",
        "comes from a lesser place: elsewhere",
    ]
    assert _served(chosen)[1] == [
        "is believed less than the executable: installed",
        "is believed less than the executable: elsewhere",
    ]


@pytest.mark.parametrize("standing", [Standing.ELSEWHERE, Standing.INSTALLED, Standing.SYSTEM])
def test_of_the_hosts_executables_the_first_stays(standing: Standing) -> None:
    variants = [
        Variant(b"later", quality=Quality.DEBUGINFO, kinds=BOTH, standing=standing, seen=3),
        Variant(b"first", quality=Quality.DYNSYM, kinds=(Kind.EXECUTABLE,), standing=standing),
    ]
    found = [b"first", b"later"], ["was seen first", "was seen later"]
    assert _served(variants, Kind.EXECUTABLE) == found
    assert _served(list(reversed(variants)), Kind.EXECUTABLE) == found


def test_the_first_of_equals() -> None:
    for variants in (
        [Variant(b"a", seen=2), Variant(b"b")],
        [Variant(b"b"), Variant(b"a", seen=2)],
    ):
        assert _served(variants) == ([b"b", b"a"], ["was seen first", "was seen later"])
    assert _served([Variant(b"b"), Variant(b"a")]) == ([b"b", b"a"], ["came first", "came later"])
    assert _served([Variant(b"a")]) == ([b"a"], [""])


_VARIANTS = st.lists(
    st.builds(
        Variant,
        content=st.binary(min_size=1, max_size=3),
        trust=st.sampled_from(Trust),
        standing=st.sampled_from(Standing),
        truncated=st.booleans(),
        quality=st.sampled_from(Quality),
        segments=st.integers(0, 2),
        kinds=st.sampled_from([(Kind.EXECUTABLE,), (Kind.DEBUGINFO,), BOTH]),
        seen=st.integers(0, 50),
    ),
    min_size=2,
    max_size=6,
    unique_by=(lambda variant: variant.content, lambda variant: variant.seen),
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(_VARIANTS, st.randoms())
def test_the_order_of_arrival_does_not_matter(variants: list[Variant], chosen: object) -> None:
    """All have been seen at different times, by which even equals are told apart."""
    shuffled = list(variants)
    chosen.shuffle(shuffled)  # type: ignore[attr-defined]
    for kind in BOTH:
        expected, why = _served(variants, kind)
        assert _served(shuffled, kind) == (expected, why)
        assert len(why) == len(expected)
        withheld = [text for text in why if text.startswith("is believed less than the executable")]
        assert not withheld or (kind is Kind.DEBUGINFO and withheld == why)
        assert all(why) == (len(why) > 1 or not why or bool(withheld))


def test_seeing_the_same_bytes_again_does_not_matter(tmp_path: Path) -> None:
    variants = [Variant(b"one"), Variant(b"two", seen=1), Variant(b"one", seen=2)]
    with Store.create(tmp_path / "store") as store:
        _commit(store, variants)
        assert len(store.index.variants(1, Kind.DEBUGINFO)) == 2


@pytest.fixture
def conflicting(tmp_path: Path) -> Path:
    with Store.create(tmp_path / "store") as store:
        _commit(
            store,
            [
                Variant(b"ours", Trust.HOST, kinds=BOTH),
                Variant(b"theirs", Trust.CONTAINER, kinds=(Kind.EXECUTABLE,), seen=1),
                *[Variant(b"more %d" % n, Trust.CONTAINER, seen=5 + n) for n in range(5)],
            ],
        )
        store.commit([capture(store, b"peaceful", b"\x01\x02")])
    return tmp_path / "store"


def test_listing(conflicting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--store", str(conflicting), "list", "--conflicts"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.count("abcdef01") == 2
    assert "0102" not in text.split()
    assert text.count("  served: is believed most: host\n") == 2
    assert text.count("  not served: is believed less: container\n") == 6
    assert "/" + b"theirs".hex() in text

    assert main([*arguments, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["build_id"], each["kind"], len(each["variants"])) for each in found] == [
        ("abcdef01", "executable", 2), ("abcdef01", "debuginfo", 6),
    ]  # fmt: skip
    first, second = found[0]["variants"]
    assert (first["served"], first["why"]) == (True, "is believed most: host")
    assert (second["served"], second["why"]) == (False, "is believed less: container")
    assert second["path"] == "/" + b"theirs".hex()

    assert main([*arguments, "--kind", "debuginfo", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main([*arguments, "--path", "/nowhere"]) == 0
    assert capsys.readouterr().out == ""


def test_showing(conflicting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--store", str(conflicting), "show", "abcdef01"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.count(", served because it is believed most: host\n") == 2
    assert text.count(", not served because it is believed less: container\n") == 6
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {each["why"] for each in shown["variants"]} == {
        "is believed most: host", "is believed less: container",
    }  # fmt: skip
    assert main(["--store", str(conflicting), "show", "--json", "0102"]) == 0
    (only,) = json.loads(capsys.readouterr().out)["variants"]
    assert only["why"] == ""
