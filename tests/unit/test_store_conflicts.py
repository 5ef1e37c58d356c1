# SPDX-License-Identifier: Apache-2.0
"""Which of several variants is served, and why: the order in which they come does not matter."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buildidfs.cli.main import main
from buildidfs.model import Kind, Quality, Trust
from buildidfs.store import Store
from tests.support.captures import NOW, SECOND, capture, sighting

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


def _commit(store: Store, variants: list[Variant]) -> None:
    """One after the other, in that order."""
    for each in variants:
        at = sighting(b"/" + each.content.hex().encode(), seen_ns=NOW + each.seen * SECOND)
        new = capture(
            store, each.content, ID, at=at, kinds=each.kinds, quality=each.quality,
            trust=each.trust,
        )  # fmt: skip
        store.commit([msgspec.structs.replace(new, segments=each.segments)])


def _served(variants: list[Variant], kind: Kind = Kind.DEBUGINFO) -> tuple[list[bytes], list[str]]:
    """The bytes of all variants in their order, and the reasons."""
    directory = Path(tempfile.mkdtemp())
    try:
        with Store.create(directory / "store") as store:
            _commit(store, variants)
            assert list(store.check()) == []
            kept = store.variants(1, kind)
            contents = {store.digest_of(_memfd(each.content)): each.content for each in variants}
            found = [contents[each.digest] for each in kept]
            best = store.artifact(1, kind)
            assert best is None or best == kept[0]
            return found, store.why(1, kept)
    finally:
        shutil.rmtree(directory)


def _memfd(content: bytes) -> int:
    fd = os.memfd_create("content")
    os.write(fd, content)
    return fd


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
        assert all(why) == (len(why) > 1 or not why)


def test_seeing_the_same_bytes_again_does_not_matter(tmp_path: Path) -> None:
    variants = [Variant(b"one"), Variant(b"two", seen=1), Variant(b"one", seen=2)]
    with Store.create(tmp_path / "store") as store:
        _commit(store, variants)
        assert len(store.variants(1, Kind.DEBUGINFO)) == 2


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
