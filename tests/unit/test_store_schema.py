# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.schema: the bytes on disk are those of the documented format."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from buildidfs.model import (
    Absence,
    Artifact,
    BuildId,
    ByteRange,
    Digest,
    FileIdentity,
    Kind,
    Quality,
    Standing,
    Trust,
)
from buildidfs.store import schema
from buildidfs.store.index.queries import DAMAGE
from tests.support.harness.captures import identity

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
    truncated=st.booleans(),
    standing=st.sampled_from(Standing),
)


@given(artifacts)
def test_artifacts_survive(artifact: Artifact) -> None:
    row = schema.pack_artifact(artifact)
    assert schema.unpack_artifact(artifact.ordinal, artifact.kind, row) == artifact


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
        segments=0x0A0B0C0D0E0F1011,
        truncated=True,
        standing=Standing.SYSTEM,
    )
    row = schema.pack_artifact(artifact)
    assert row[:-4].hex(" ", -4) == (
        "01020001 02030405 06070809 0a0b0c0d 0e0f1011 12131415 16171819 1a1b1c1d 1e1f0000 00000000"
        " 0003ffff ffffffff ffff016d 11223344 00000005 03030000 00000000 00090a0b 0c0d0e0f 10110000"
        " 00000000 00010000 00000000 00020104"
    )
    assert row[-4:] == zlib.crc32(row[:-4], 7 << 2 | 2).to_bytes(4, "big")


def test_an_artifact_row_without_its_check_is_refused() -> None:
    new = Artifact(7, Kind.EXECUTABLE, 1, Digest(bytes(32)), 3, 4, 5, 6, 7, Quality.NONE,
                   Trust.HOST, 8, (ByteRange(1, 2),))  # fmt: skip
    with pytest.raises(DAMAGE):
        schema.unpack_artifact(7, 1, schema.pack_artifact(new)[:-6])


@given(artifacts, st.data())
def test_an_artifact_row_with_a_wrong_bit_is_refused(
    artifact: Artifact, data: st.DataObject
) -> None:
    row = bytearray(schema.pack_artifact(artifact))
    bit = data.draw(st.integers(0, 8 * len(row) - 1))
    row[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DAMAGE):
        schema.unpack_artifact(artifact.ordinal, artifact.kind, bytes(row))


@given(artifacts, st.integers(0, schema.MAX_NUMBER), st.integers(0, schema.MAX_NUMBER))
def test_an_artifact_row_of_another_build_id_is_refused(
    artifact: Artifact, ordinal: int, other: int
) -> None:
    assume(ordinal != other)
    row = schema.pack_artifact(msgspec.structs.replace(artifact, ordinal=ordinal))
    with pytest.raises(ValueError, match="build ID"):
        schema.unpack_artifact(other, artifact.kind, row)
    with pytest.raises(ValueError, match="build ID"):
        schema.unpack_artifact(ordinal, artifact.kind % 4 + 1, row)


def test_other_fixed_rows_are_the_documented_ones() -> None:
    row = schema.OrdinalRow(BuildId(b"\xaa\xbb"), 0b110, 5, 6, 7, [1, 2, 3, 4])
    assert row.pack().hex() == "0600000005000600070001000200030004aabb"
    assert schema.OrdinalRow.unpack(row.pack()) == row
    digest = schema.DigestRow(9, [(1, 2, 3)], 8, 7, -1, 1, 6, 1, 5, 1024)
    assert digest.pack().hex() == (
        "000000000000000900000000000000080000000000000007ffffffffffffffff0100000006010000000500000000"
        "0000000102000300000002"
    )
    assert schema.DigestRow.unpack(digest.pack()) == digest
    counters = schema.StoreCounters(1, 2, 3, 4, 5, 6, [7, 8, 9, 10], 11)
    assert counters.pack().hex() == "".join(f"{number:016x}" for number in range(1, 12))
    assert schema.StoreCounters.unpack(counters.pack()) == counters


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


def test_every_absence_has_a_number_of_its_own() -> None:
    assert set(schema.ABSENCE_TAGS) == set(Absence)
    assert set(schema.ABSENCES) == {1, 2, 4, 7, 8, 9}, "3, 5 and 6 had another meaning"


def test_kinds_of_every_mask() -> None:
    assert schema.KINDS_OF_MASK[0b00110] == (Kind.EXECUTABLE, Kind.DEBUGINFO)
    assert all(
        schema.mask_of(kinds) == mask & ~1 for mask, kinds in enumerate(schema.KINDS_OF_MASK)
    )
