# SPDX-License-Identifier: Apache-2.0
"""Build IDs and digests are what they say, whatever is handed in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.errors import InvalidBuildId
from buildidfs.model import BuildId, Digest, bounded_ns


@given(st.binary(min_size=BuildId.MIN_BYTES, max_size=BuildId.MAX_BYTES))
def test_build_id_round_trips_through_hex_of_either_case(raw: bytes) -> None:
    build_id = BuildId(raw)
    assert BuildId.from_hex(str(build_id)) == raw
    assert BuildId.from_hex(str(build_id).upper()) == build_id
    assert len(f"{build_id}.debug") <= 255 or len(raw) > 120


@pytest.mark.parametrize("raw", [b"", b"x", b"x" * 121])
def test_impossible_lengths(raw: bytes) -> None:
    with pytest.raises(InvalidBuildId):
        BuildId(raw)


@pytest.mark.parametrize("text", ["", "a", "abc", "xyzw", "ab cd", " abcd", "0xabcd", "abcd\n"])
def test_not_hex(text: str) -> None:
    with pytest.raises(InvalidBuildId, match="hex digits"):
        BuildId.from_hex(text)


def test_digest_has_32_bytes() -> None:
    assert str(Digest(b"\x01" * 32)) == "01" * 32
    with pytest.raises(ValueError, match="32 bytes"):
        Digest(b"\x01" * 31)


def test_times_are_limited_to_64_bits() -> None:
    assert bounded_ns(5_000_000_007) == 5_000_000_007
    assert bounded_ns(2**70) == 2**63 - 1
    assert bounded_ns(-(2**70)) == -(2**63)
