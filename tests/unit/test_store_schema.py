# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.schema: the bytes on disk are those of the documented format."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.model import (
    Absence,
    Artifact,
    BuildId,
    ByteRange,
    Digest,
    FileIdentity,
    Kind,
    NamespaceSet,
    Origin,
    Quality,
    Trust,
)
from buildidfs.store import schema
from tests.support.captures import identity, sighting

u16, u32, u63 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 63))
i64 = st.integers(-(2**63), 2**63 - 1)
digests = st.binary(min_size=32, max_size=32).map(Digest)

artifacts = st.builds(
    Artifact,
    ordinal=u63,
    kind=st.sampled_from(Kind),
    variant=u16,
    digest=digests,
    size=u63,
    mtime_ns=i64,
    mode=st.integers(0, 0o777),
    uid=u32,
    gid=u32,
    quality=st.sampled_from(Quality),
    trust=st.sampled_from(Trust),
    first_seen_ns=u63,
    scripts=st.lists(st.builds(ByteRange, u63, u63), max_size=3).map(tuple),
)
identities = st.builds(
    FileIdentity, u63, u63, u63, i64, i64, u32, u32, u32, st.none() | st.binary(max_size=30)
)
# Labels may come from names that are no UTF-8.
labels = st.binary(max_size=12).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
origins = st.builds(
    Origin,
    path=st.binary(max_size=60),
    identity=identities,
    namespaces=st.builds(NamespaceSet, *[u32] * 7),
    mnt_ns_id=u63,
    cgroup=st.binary(max_size=20),
    container=labels,
    host=labels,
    trust=st.sampled_from(Trust),
    scanner=labels,
)


@given(artifacts)
def test_artifacts_survive(artifact: Artifact) -> None:
    row = schema.pack_artifact(artifact)
    assert schema.unpack_artifact(artifact.ordinal, artifact.kind, row) == artifact


@given(digests, st.integers(0, 31), origins, u63, u63)
def test_origins_survive(digest: Digest, kinds: int, origin: Origin, first: int, last: int) -> None:
    row = schema.pack_origin(digest, kinds, origin, first, last)
    assert schema.unpack_origin(row) == (digest, kinds, origin, first, last)


def test_artifact_row_is_the_documented_one() -> None:
    artifact = Artifact(
        ordinal=7,
        kind=Kind.DEBUGINFO,
        variant=0x0102,
        digest=Digest(bytes(range(32))),
        size=3,
        mtime_ns=-1,
        mode=0o555,
        uid=0x11223344,
        gid=5,
        quality=Quality.DEBUGINFO,
        trust=Trust.HOST,
        first_seen_ns=9,
        scripts=(ByteRange(1, 2),),
    )
    assert schema.pack_artifact(artifact).hex(" ", -4) == (
        "01020001 02030405 06070809 0a0b0c0d 0e0f1011 12131415 16171819 1a1b1c1d 1e1f0000 00000000"
        " 0003ffff ffffffff ffff016d 11223344 00000005 03030000 00000000 00090000 00000000 00010000"
        " 00000000 0002"
    )


def test_other_fixed_rows_are_the_documented_ones() -> None:
    row = schema.OrdinalRow(BuildId(b"\xaa\xbb"), 0b110, 5, 6, 7, [1, 2, 3, 4])
    assert row.pack().hex() == "0600000005000600070001000200030004aabb"
    assert schema.OrdinalRow.unpack(row.pack()) == row
    digest = schema.DigestRow(9, [(1, 2, 3)])
    assert digest.pack().hex() == "00000000000000090000000000000001020003"
    assert schema.DigestRow.unpack(digest.pack()) == digest
    counters = schema.Counters(1, 2, 3, 4, 5, [6, 7, 8, 9])
    assert counters.pack().hex() == "".join(f"{number:016x}" for number in range(1, 10))
    assert schema.Counters.unpack(counters.pack()) == counters


def test_origin_row_is_the_documented_one() -> None:
    """Times, then a msgpack array of 19; a reader of the future may find more in it."""
    origin = sighting(b"/a\xff", container="c", host="h", scanner="proc", mnt_ns_id=4).origin
    row = schema.pack_origin(Digest(bytes(32)), 2, origin, 1, 2)
    assert row[:16].hex() == "00000000000000010000000000000002"
    assert row[16:19] == b"\xdc\x00\x13"
    longer = row[:16] + b"\xdc\x00\x14" + row[19:] + b"\x01"
    assert schema.unpack_origin(longer) == schema.unpack_origin(row)


def test_place_is_what_tells_origins_apart() -> None:
    digest = Digest(bytes(32))

    def key(digest: Digest = digest, **changes: object) -> bytes:
        return schema.origin_key(1, digest, sighting(**changes).origin)  # type: ignore[arg-type]

    assert len(key()) == 24
    assert key() == key(seen_ns=5, cgroup=b"/x", trust=Trust.HOST, mtime_ns=1)
    different = [
        key(),
        key(path=b"/other"),
        key(host="h"),
        key(container="h"),
        key(mnt_ns_id=1),
        key(dev=1),
        key(ino=1),
        key(Digest(hashlib.sha256().digest())),
    ]
    assert len(set(different)) == len(different)


@pytest.mark.parametrize("field", FileIdentity.__struct_fields__)
def test_every_field_of_an_identity_counts(field: str) -> None:
    other = b"other" if field == "scope" else 77
    assert schema.seen_key(identity()) != schema.seen_key(identity(**{field: other}))


def test_identity_without_scope_has_no_key() -> None:
    assert schema.seen_key(identity(scope=None)) is None


def test_times_that_no_clock_shows_are_clamped() -> None:
    """An inode of a hostile filesystem image may claim any time."""
    wild = identity(mtime_ns=2**80, ctime_ns=-(2**80))
    assert schema.seen_key(wild) is not None
    origin = Origin(b"/x", wild)
    _, _, read, _, _ = schema.unpack_origin(schema.pack_origin(Digest(bytes(32)), 2, origin, 0, 0))
    assert (read.identity.mtime_ns, read.identity.ctime_ns) == (2**63 - 1, -(2**63))


def test_every_absence_has_a_number_of_its_own() -> None:
    assert set(schema.ABSENCE_TAGS) == set(Absence)
    assert set(schema.ABSENCES) == set(range(1, len(Absence) + 1))


def test_kinds_of_every_mask() -> None:
    assert schema.KINDS_OF_MASK[0b00110] == (Kind.EXECUTABLE, Kind.DEBUGINFO)
    assert all(
        schema.mask_of(kinds) == mask & ~1 for mask, kinds in enumerate(schema.KINDS_OF_MASK)
    )
