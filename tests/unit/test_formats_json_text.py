# SPDX-License-Identifier: Apache-2.0
"""JSON on a terminal: every value arrives, and no character of it is obeyed."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.formats import json_text


@given(st.text(max_size=100))
def test_every_value_arrives_and_all_is_printable(value: str) -> None:
    text = json_text.escaped(msgspec.json.encode({"path": value})).decode()
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
    assert json_text.escaped(msgspec.json.encode(value)).decode() == f'"{shown}"'


def test_lines_stay_lines() -> None:
    text = '{\n "a": "\x9b"\n}\n'.encode()
    assert json_text.escaped(text) == b'{\n "a": "\\u009b"\n}\n'
