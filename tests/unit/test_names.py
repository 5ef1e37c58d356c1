# SPDX-License-Identifier: Apache-2.0
"""Every spelling there is, and nothing that merely looks like one."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs import names
from buildidfs.model import BuildId, Kind

build_ids = st.binary(min_size=BuildId.MIN_BYTES, max_size=BuildId.MAX_BYTES).map(BuildId)


@given(build_ids)
def test_a_build_id_has_one_name(build_id: BuildId) -> None:
    name = names.spell(build_id)

    assert name == str(build_id).encode()
    assert names.parse(name) == build_id
    assert isinstance(names.parse(name), BuildId)
    assert len(name) + len(names.DEBUG_SUFFIX) <= names.MAX_NAME


@given(build_ids, st.booleans())
def test_split_names_come_back(build_id: BuildId, debug: bool) -> None:
    directory, entry = names.split(build_id)
    first = names.bucket(directory)

    assert first == build_id[0]
    suffix = names.DEBUG_SUFFIX if debug else b""
    assert names.parse_split(build_id[0], entry + suffix) == (build_id, debug)


@pytest.mark.parametrize(
    "name",
    [b"", b"ab", b"abc", b"abcde", b"ABCD", b"abCD", b"ab cd", b"xyzw", b"ab" * 121, b"\xff" * 4,
     b"abcd.debug", b"elf"],
)  # fmt: skip
def test_other_names_are_not_build_ids(name: bytes) -> None:
    assert names.parse(name) is None


@pytest.mark.parametrize("name", [b"", b"a", b"abc", b"AB", b"zz", b"\xff\xff", b".."])
def test_other_names_are_not_buckets(name: bytes) -> None:
    assert names.bucket(name) is None


@pytest.mark.parametrize(
    "name", [b"", b"c", b"CD", b".debug", b"cd.debug.debug", b"cd.DEBUG", b"cd.1", b"cd.debug.1"]
)
def test_other_names_are_not_split_build_ids(name: bytes) -> None:
    assert names.parse_split(0xAB, name) is None


def test_every_kind_is_spelled() -> None:
    assert set(names.KIND_OF.values()) == set(Kind)
    assert all(names.KIND_OF[name] is kind for name, kind in names.PERF_KIND_OF.items())


@given(st.text(max_size=100))
def test_every_value_arrives_and_all_is_printable(value: str) -> None:
    text = names.json_escaped(msgspec.json.encode({"path": value})).decode()
    assert text.isprintable()
    assert json.loads(text) == {"path": value}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("\x9b31m", "\\u009b31m"),
        ("\x7f", "\\u007f"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u2066a\u2069", "\\u2066a\\u2069"),
        ("\U000e0001", "\\udb40\\udc01"),
        ("größe \u4e2d", "größe \u4e2d"),
    ],
)
def test_escaped_characters(value: str, shown: str) -> None:
    assert names.json_escaped(msgspec.json.encode(value)).decode() == f'"{shown}"'


def test_lines_stay_lines() -> None:
    text = '{\n "a": "\x9b"\n}\n'.encode()
    assert names.json_escaped(text) == b'{\n "a": "\\u009b"\n}\n'


def test_prefixed_id_is_refused_above_the_longest_build_id() -> None:
    for prefixed, prefix in (
        (names.package_id, names.DWP_SUFFIX),
        (names.sources_id, names.SOURCES_PREFIX),
    ):
        longest = BuildId(b"i" * (BuildId.MAX_BYTES - len(prefix)))
        assert prefixed(longest) == prefix + longest
        assert prefixed(BuildId(longest + b"i")) is None


def test_hexadecimal_digits_of_any_case() -> None:
    assert names.is_hex("09afAF")
    assert not any(map(names.is_hex, ("", "0x1", "ab\n", "\u0661")))
