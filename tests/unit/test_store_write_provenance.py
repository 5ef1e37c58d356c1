# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.write.provenance: what is kept beside a blob says what the index says of it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.model import ByteRange, ContainerNames, Digest, Kind, Quality, Trust
from buildidfs.store import NewCapture, Store, location_rows, schema
from buildidfs.store.blobs import files
from buildidfs.store.index import environment
from buildidfs.store.write import provenance
from tests.support.harness.captures import NOW, SECOND, capture, commit, sighting

_BOTH = (Kind.EXECUTABLE, Kind.DEBUGINFO)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def _beside(store: Store, digest: Digest) -> tuple[provenance.Claim, ...]:
    return provenance.unpack(store.blobs.files.origin(digest))


def _of_rows(store: Store, digest: Digest) -> tuple[provenance.Claim, ...]:
    env = environment.acquire(store.path, read_only=False)
    try:
        with env.read() as txn:
            row = schema.DigestRow.unpack(txn.get(digest, db=env.tables["digests"]) or b"")
            return provenance.unpack(provenance.of_rows(env, txn, digest, row))
    finally:
        environment.release(env)


def _captured(store: Store, *captures: NewCapture) -> Digest:
    commit(store, *captures)
    content = captures[0].content
    return content if isinstance(content, Digest) else content.digest


def test_a_capture(store: Store) -> None:
    with store:
        at = sighting(b"/usr/\xff", trust=Trust.HOST, mode=0o100750, uid=7, gid=8, reach=7)
        new = capture(store, b"bytes", b"\x01\x02\x03", at=at, kinds=_BOTH, quality=Quality.SYMTAB)
        new = msgspec.structs.replace(new, scripts=(ByteRange(1, 2),), segments=2**64 - 1)
        digest = _captured(store, new)
        (claim,) = _beside(store, digest)
        assert (claim.build_id, claim.kinds, claim.quality) == (b"\x01\x02\x03", 0b110, 2)
        assert (claim.scripts, claim.segments) == (((1, 2),), 2**64 - 1)
        assert (claim.trust, claim.mode, claim.uid, claim.gid) == (3, 0o550, 7, 8)
        assert (claim.mtime_ns, claim.first_seen_ns) == (at.origin.identity.mtime_ns, NOW)
        of, kinds, origin, first, last = location_rows.unpack_origin(claim.origin)
        assert (of, kinds, origin, first, last) == (digest, 0b110, at.origin, NOW, NOW)
        assert _of_rows(store, digest) == (claim,)


def test_the_same_bytes_under_another_build_id(store: Store) -> None:
    with store:
        digest = _captured(store, capture(store, b"bytes", b"\x01\x01"))
        commit(store, capture(store, digest, b"\x02\x02", at=sighting(b"/other")))
        commit(store, capture(store, b"bytes", b"\x03\x03", at=sighting(b"/third")))
        claims = _beside(store, digest)
        assert {claim.build_id for claim in claims} == {b"\x01\x01", b"\x02\x02", b"\x03\x03"}
        assert claims == _of_rows(store, digest)
        assert list(store.check(digests=True)) == []


def test_two_at_once(store: Store) -> None:
    with store:
        commit(store, capture(store, b"bytes", b"\x01\x01"), capture(store, b"bytes", b"\x02\x02"))
        (digest,) = store.blobs.names()
        assert _beside(store, digest) == _of_rows(store, digest)
        assert len(_beside(store, digest)) == 2


def test_a_better_place(store: Store) -> None:
    """The bytes are believed more now, which is to survive, and so is the place."""
    with store:
        first = sighting(b"/a", trust=Trust.CONTAINER, mode=0o100700)
        digest = _captured(store, capture(store, b"bytes", at=first))
        better = sighting(b"/b", trust=Trust.HOST, seen_ns=NOW + SECOND)
        commit(store, capture(store, digest, at=better))
        (claim,) = _beside(store, digest)
        assert (claim.trust, claim.mode, claim.first_seen_ns) == (Trust.HOST, 0o555, NOW)
        assert location_rows.unpack_origin(claim.origin)[2].path == b"/b"
        assert store.blobs.is_untouched(digest)


def test_nothing_is_written_when_it_is_seen_again(store: Store) -> None:
    with store:
        digest = _captured(store, capture(store, b"bytes"))
        before = store.blobs.files.file(digest)
        for later in (1, 4000):
            commit(store, capture(store, digest, at=sighting(seen_ns=NOW + later * SECOND)))
        assert store.blobs.files.file(digest) == before


def test_a_blob_that_was_left_by_a_crash_gets_it(store: Store) -> None:
    with store:
        fd = os.memfd_create("left")
        os.write(fd, b"bytes")
        with store.stage(fd) as staged:
            store.blobs.files.seal([staged], store.blobs.standing)
        os.close(fd)
        (digest,) = store.blobs.names()
        assert _beside(store, digest) == ()
        commit(store, capture(store, b"bytes"))
        assert _beside(store, digest) == _of_rows(store, digest) != ()


def test_the_believed_survive_when_there_are_too_many() -> None:
    claims = [
        provenance.Claim(
            number.to_bytes(2, "big"),
            2,
            0,
            (),
            0,
            number % 4,
            0o444,
            0,
            0,
            0,
            number,
            b"",
            False,
            0,
        )
        for number in range(40)
    ]
    kept = provenance.unpack(provenance.pack(claims))
    assert len(kept) == 16
    assert [claim.trust for claim in kept] == [3] * 10 + [2] * 6
    big = [msgspec.structs.replace(claim, origin=bytes(30_000)) for claim in claims]
    data = provenance.pack(big)
    assert 30_000 < len(data) <= files.MAX_ORIGIN_BYTES
    assert provenance.unpack(data) == (big[3], big[7])


@given(st.binary())
def test_what_is_damaged_says_nothing(data: bytes) -> None:
    assert isinstance(provenance.unpack(data), tuple)
    assert isinstance(provenance.places_in(data), tuple)


def test_places_go_before_claims_when_there_is_too_much() -> None:
    claim = provenance.Claim(b"\1\1", 2, 0, (), 0, 3, 0o444, 0, 0, 0, 1, bytes(30_000), False, 0)
    names = (b"web", b"", b"", b"shop:1")
    places = [provenance.OtherOrigin(b"\1\1", bytes(20_000), names) for _ in range(3)]
    data = provenance.pack([claim], (), places)
    assert len(data) <= files.MAX_ORIGIN_BYTES
    assert provenance.unpack(data) == (claim,)
    assert provenance.places_in(data) == (places[0],)
    assert provenance.names_of(places[0]) == ContainerNames("web", image="shop:1")


def test_data_of_an_earlier_version_has_neither_names_nor_places() -> None:
    claim = provenance.Claim(b"\1\1", 2, 0, (), 0, 3, 0o444, 0, 0, 0, 1, b"", False, 0)
    fields = msgspec.structs.astuple(claim)[:-1]
    data = msgspec.msgpack.encode([1, [fields], []])
    assert provenance.unpack(data) == (claim,)
    assert provenance.places_in(data) == ()
    assert provenance.names_of(claim) == ContainerNames()


def test_places_are_the_containers_seen_last(store: Store) -> None:
    """A shell is the first file of any number of containers."""
    with store:
        store.name_containers(lambda origin: ContainerNames(origin.container[-2:]))
        for number in range(12):
            group = f"/libpod-{number:064}.scope".encode()
            label = f"podman:{number:012}"
            at = sighting(seen_ns=NOW + number * SECOND, container=label, cgroup=group)
            commit(store, capture(store, b"shell", at=at))
        (digest,) = store.blobs.names()
        places = provenance.places_in(store.blobs.files.origin(digest))
        names = [provenance.names_of(each).name for each in places]
        assert names == [f"{number:02}" for number in range(11, 3, -1)]
        (claim,) = _beside(store, digest)
        assert provenance.names_of(claim).name == "00"


def test_a_later_version_says_nothing() -> None:
    data = msgspec.msgpack.encode([2, []])
    assert provenance.unpack(data) == ()
