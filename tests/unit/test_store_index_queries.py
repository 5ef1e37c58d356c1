# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.index.queries: lookups and listings."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from buildidfs.errors import (
    AmbiguousBuildId,
    ArtifactMissing,
    IntegrityError,
    InvalidBuildId,
    StoreError,
)
from buildidfs.model import BuildId, Kind
from buildidfs.store import Store, location_rows, schema
from buildidfs.store.index import environment
from tests.support.harness.captures import capture, commit, identity, sighting


def _add(store: Store, *build_ids: bytes) -> None:
    commit(store, *(capture(store, b"same bytes", build_id) for build_id in build_ids))


def _numbered(count: int) -> list[BuildId]:
    return [BuildId(number.to_bytes(3, "big")) for number in range(count)]


def test_what_is_not_there(store: Store) -> None:
    assert store.index.ordinal(b"\x01\x02") is None
    assert store.index.ordinal(b"") is None
    assert store.index.ordinal(b"x" * 600) is None
    assert store.index.build_id(1) is None
    assert store.index.kinds(1) == 0
    assert store.index.artifact(1, Kind.EXECUTABLE) is None
    assert store.index.variants(1, Kind.EXECUTABLE) == []
    assert store.index.origins(1) == []
    assert store.index.primary_path(1) is None
    assert list(store.index.build_ids_from()) == []
    assert list(store.index.build_ids_with_prefix(b"")) == []


@pytest.mark.parametrize("size", [2, 8, 16, 20, 32, 64, 120])
def test_build_ids_of_any_length(store: Store, size: int) -> None:
    build_id = BuildId(b"\xff" * size)
    _add(store, build_id)
    assert store.index.ordinal(build_id) == 1
    assert store.index.build_id(1) == build_id
    assert isinstance(store.index.build_id(1), BuildId)


def test_listing_resumes_behind_any_ordinal(store: Store) -> None:
    ids = _numbered(300)  # more than are read in one transaction
    _add(store, *ids)
    everything = list(enumerate(ids, 1))
    assert list(store.index.build_ids_from()) == everything
    for after in (1, 63, 64, 65, 192, 299, 300, 10**9):
        assert list(store.index.build_ids_from(after)) == everything[after:]


def test_listing_goes_on_while_the_store_grows(store: Store) -> None:
    ids = _numbered(200)
    _add(store, *ids[:100])
    listing = store.index.build_ids_from()
    first = list(itertools.islice(listing, 10))
    _add(store, *ids[100:])
    assert [build_id for _, build_id in [*first, *listing]] == ids


def test_listing_by_prefix(store: Store) -> None:
    ids = [BuildId.from_hex(text) for text in ("0100", "abcd", "abcd01", "abce", "acff", "ffff")]
    _add(store, *reversed(ids))

    def listed(prefix: bytes, after: BuildId | None = None) -> list[str]:
        return [str(build_id) for build_id, _ in store.index.build_ids_with_prefix(prefix, after)]

    assert listed(b"") == [str(build_id) for build_id in ids]
    assert listed(b"\xab") == ["abcd", "abcd01", "abce"]
    assert listed(b"\xab", ids[1]) == ["abcd01", "abce"]
    assert listed(b"\xab", ids[0]) == ["abcd", "abcd01", "abce"]
    assert listed(b"\xab", ids[-1]) == []
    assert listed(b"\xff\xff\xff") == []
    for build_id, ordinal in store.index.build_ids_with_prefix(b""):
        assert store.index.ordinal(build_id) == ordinal


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("01", "0100"),
        ("0", "0100"),
        ("0100", "0100"),
        ("abcd", "abcd"),
        ("ABCD", "abcd"),
        ("abcd0", "abcd01"),
        ("abc", None),
        ("abce", "abceff"),
        ("abceffff", ""),
        ("a", None),
        ("f", ""),
        ("fffff", ""),
    ],
)
def test_matching_a_prefix(store: Store, text: str, found: str | None) -> None:
    """None: ambiguous; empty: nothing."""
    _add(store, *(bytes.fromhex(each) for each in ("0100", "abcd", "abcd01", "abceff", "acff")))
    if found:
        assert str(store.index.match(text)) == found
        assert isinstance(store.index.match(text), BuildId)
    else:
        with pytest.raises(AmbiguousBuildId if found is None else ArtifactMissing, match=text):
            store.index.match(text)


def test_an_ambiguous_prefix_names_a_few(store: Store) -> None:
    _add(store, *(bytes([0xAB, number]) for number in range(9)))
    with pytest.raises(AmbiguousBuildId, match=r"^ab is ambiguous: ab00, ab01, ab02, \.\.\.$"):
        store.index.match("ab")
    with pytest.raises(AmbiguousBuildId, match=r"^ab is ambiguous: ab00, ab01$"):
        _ambiguous_pair(store).index.match("ab")


def _ambiguous_pair(store: Store) -> Store:
    other = Store.create(store.path + b"-other")
    _add(other, b"\xab\x00", b"\xab\x01")
    return other


@pytest.mark.parametrize("text", ["", "xyz", "ab cd", "0x12", "ab\n", "\u0663", "\udcff"])
def test_what_is_no_prefix(store: Store, text: str) -> None:
    with pytest.raises(InvalidBuildId) as caught:
        store.index.match(text)
    assert "\n" not in str(caught.value)


def test_rows_that_do_not_decode_are_integrity_errors(store: Store) -> None:
    commit(store, capture(store, b"x"))
    digest = store.index.artifact(1, Kind.EXECUTABLE).digest  # type: ignore[union-attr]
    env = environment.acquire(store.path, read_only=False)
    key = schema.U64.pack(1)
    origin = location_rows.origin_key(1, digest, sighting().origin)
    seen = schema.seen_key(identity())
    for table, row in (("artifacts", key + b"\x01"), ("origins", origin), ("seen", seen)):
        value = b"\xff" * (4 if table == "seen" else 17)
        env.write(lambda txn, t=table, r=row, v=value: txn.put(r, v, db=env.tables[t]))
    env.write(lambda txn: txn.put(digest, b"short", db=env.tables["digests"]))
    reads = (
        lambda: store.index.artifact(1, Kind.EXECUTABLE),
        lambda: store.index.artifact_variant(1, Kind.EXECUTABLE, 1),
        lambda: store.index.variants(1, Kind.EXECUTABLE),
        lambda: store.index.origins(1),
        lambda: store.held(digest),
        lambda: store.index.recall(identity()),
    )
    for read in reads:
        with pytest.raises(IntegrityError, match="a row of the index is damaged"):
            read()
    assert any("cannot be read" in line for line in store.check())
    environment.release(env)


def test_a_tag_of_the_memo_from_the_future_is_not_understood(store: Store) -> None:
    env = environment.acquire(store.path, read_only=False)
    row = schema.SEEN.pack(0, 200)
    env.write(lambda txn: txn.put(schema.seen_key(identity()), row, db=env.tables["seen"]))
    assert store.index.recall(identity()) is None
    environment.release(env)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    store.close()
    store.close()
    for use in (
        lambda: store.index.ordinal(b"\x01\x02"),
        lambda: list(store.index.build_ids_from()),
    ):
        with pytest.raises(StoreError, match="closed"):
            use()
    for use in (store.stats, store.listen, lambda: store.commit([])):
        with pytest.raises(StoreError, match="is closed"):
            use()
