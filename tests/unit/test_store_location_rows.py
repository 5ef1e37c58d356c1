# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.location_rows: rows that tell of places are those of the documented format."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.model import Digest, FileIdentity, NamespaceSet, Origin, Trust
from buildidfs.store import location_rows
from tests.support.harness.captures import identity, sighting

u7, u32, u63 = (st.integers(0, 2**bits - 1) for bits in (7, 32, 63))
i64 = st.integers(-(2**63), 2**63 - 1)
digests = st.binary(min_size=32, max_size=32).map(Digest)

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
    apart=u7,
    cgroup_id=u63,
    reach=st.integers(0, 7),
)


@given(digests, st.integers(0, 31), origins, u63, u63)
def test_origins_survive(digest: Digest, kinds: int, origin: Origin, first: int, last: int) -> None:
    row = location_rows.pack_origin(digest, kinds, origin, first, last)
    assert location_rows.unpack_origin(row) == (digest, kinds, origin, first, last)


def test_origin_row_is_the_documented_one() -> None:
    """Times, then a msgpack array of 24, of 23 before; a reader of the future may find more."""
    origin = sighting(
        b"/a\xff",
        container="c",
        host="h",
        scanner="proc",
        mnt_ns_id=4,
        apart=0x21,
        cgroup_id=7,
        reach=4,
        archive=b"/b",
    ).origin
    row = location_rows.pack_origin(Digest(bytes(32)), 2, origin, 1, 2)
    assert row[:16].hex() == "00000000000000010000000000000002"
    assert (row[16:19], row[-10:]) == (b"\xdc\x00\x19", b"\x21\x07\x04\xc4\x02/b\xc4\x00\x00")
    unsigned = row[:16] + b"\xdc\x00\x17" + row[19:-3]
    unowned = row[:16] + b"\xdc\x00\x18" + row[19:-1]
    longer = row[:16] + b"\xdc\x00\x1a" + row[19:] + b"\x01"
    for other in (unsigned, unowned, longer):
        assert location_rows.unpack_origin(other) == location_rows.unpack_origin(row)
    signed = msgspec.structs.replace(origin, signature=b"\x03\x02")
    row = location_rows.pack_origin(Digest(bytes(32)), 2, signed, 1, 2)
    assert location_rows.unpack_origin(row)[2].signature == b"\x03\x02"


def test_an_origin_row_that_lacks_a_field_is_refused() -> None:
    row = location_rows.pack_origin(Digest(bytes(32)), 2, sighting(b"/a").origin, 1, 2)
    with pytest.raises(msgspec.ValidationError):
        location_rows.unpack_origin(row[:16] + bytes((0xDC, 0, 22)) + row[19:-4])


def test_place_is_what_tells_origins_apart() -> None:
    digest = Digest(bytes(32))

    def key(digest: Digest = digest, **changes: object) -> bytes:
        return location_rows.origin_key(1, digest, sighting(**changes).origin)  # type: ignore[arg-type]

    assert len(key()) == 24
    assert key() == key(seen_ns=5, cgroup=b"/x", trust=Trust.HOST, mtime_ns=1, apart=3)
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


def test_times_that_no_clock_shows_are_clamped() -> None:
    """An inode of a hostile filesystem image may claim any time."""
    origin = Origin(b"/x", identity(mtime_ns=2**80, ctime_ns=-(2**80)))
    _, _, read, _, _ = location_rows.unpack_origin(
        location_rows.pack_origin(Digest(bytes(32)), 2, origin, 0, 0)
    )
    assert (read.identity.mtime_ns, read.identity.ctime_ns) == (2**63 - 1, -(2**63))
