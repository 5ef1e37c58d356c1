# SPDX-License-Identifier: Apache-2.0
"""Mode bits that an access control list grants to all users of a class."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from buildidfs.formats.posix_acl import certain_bits
from tests.support.harness.callers import (
    ACL_GROUP,
    ACL_MASK,
    ACL_OTHER,
    ACL_OWNER,
    ACL_OWNING_GROUP,
    ACL_USER,
    acl,
)

VERSION = struct.pack("<I", 2)


@pytest.mark.parametrize(
    ("named", "mask", "expected"),
    [
        pytest.param([], None, 0o754, id="no user is named"),
        pytest.param([], 0o4, 0o744, id="the mask bounds the group"),
        pytest.param([(ACL_USER, 7, 1000)], 0o7, 0o754, id="more for one user is not shown"),
        pytest.param([(ACL_USER, 0, 1000)], 0o7, 0o700, id="less for a user, who may be in both"),
        pytest.param([(ACL_GROUP, 0, 1000)], 0o7, 0o750, id="a member has the rights of both"),
        pytest.param([(ACL_GROUP, 1, 1), (ACL_GROUP, 4, 2)], 0o7, 0o750, id="two groups"),
        pytest.param([(ACL_USER, 6, 1)], 0o3, 0o700, id="the mask bounds the named"),
        pytest.param([(ACL_USER, 7, 1)], 0o0, 0o700, id="nothing through the mask"),
    ],
)
def test_bits(named: list[tuple[int, int, int]], mask: int | None, expected: int) -> None:
    entries = [(ACL_OWNER, 7, 0), (ACL_OWNING_GROUP, 5, 0), (ACL_OTHER, 4, 0), *named]
    if mask is not None:
        entries.append((ACL_MASK, mask, 0))
    assert oct(certain_bits(acl(entries))) == oct(expected)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\x02\0\0",
        struct.pack("<I", 1),
        VERSION + b"\0" * 7,
        VERSION + struct.pack("<HHI", 0x40, 7, 0),
        VERSION + struct.pack("<HHI", 1, 7, 0) * 9000,
    ],
)
def test_other_bytes_are_no_list(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"access control|unknown kind"):
        certain_bits(value)


@given(st.binary(max_size=100))
@example(VERSION)
def test_any_bytes(value: bytes) -> None:
    for candidate in (value, VERSION + value):
        try:
            assert 0 <= certain_bits(candidate) <= 0o777
        except ValueError:
            continue


@given(
    st.lists(
        st.tuples(st.sampled_from([ACL_USER, ACL_GROUP, ACL_MASK]), st.integers(0, 7)), max_size=6
    )
)
def test_named_users_never_add_rights(named: list[tuple[int, int]]) -> None:
    entries = [(ACL_OWNER, 7, 0), (ACL_OWNING_GROUP, 5, 0), (ACL_OTHER, 5, 0)]
    entries += [(kind, rights, 1) for kind, rights in named]
    assert certain_bits(acl(entries)) & ~0o755 == 0
