# SPDX-License-Identifier: Apache-2.0
"""Output of llvm-symbolizer and eu-addr2line; tests/system runs the programs."""

from __future__ import annotations

import json

import pytest

from buildidfs.formats.symbolizer_output import (
    MOST_FRAMES,
    Frame,
    of_elfutils,
    of_llvm,
)

INNER = {"FunctionName": "a::B<int>::f(int)", "FileName": "/src/a b.c", "Line": 2, "Column": 7}
OUTER = {"FunctionName": "main", "FileName": "", "Line": 0, "Column": 0, "StartAddress": "0x1130"}


def test_llvm() -> None:
    line = json.dumps({"Address": "0x1139", "ModuleName": "/x", "Symbol": [INNER, OUTER]}).encode()
    assert of_llvm(line) == [
        Frame("a::B<int>::f(int)", "/src/a b.c", 2, 7, None, inlined=True),
        Frame("main", start=0x1130),
    ]


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b'{"Symbol": 1}', b'{"Symbol": [{"Line": "x"}]}',
        b'{"Symbol": [{"StartAddress": "zz"}]}', b'{"Error": {"Message": "No such file"}}',
        b'{"Symbol": []}', b'{"Symbol": [{"FunctionName": "", "FileName": "??"}]}',
    ],
)  # fmt: skip
def test_llvm_that_knows_nothing(line: bytes) -> None:
    assert of_llvm(line) == []


def test_llvm_with_names_that_are_no_text() -> None:
    assert of_llvm(b'{"Symbol": [{"FunctionName": "f\xff"}]}') == [Frame("f\ufffd")]
    many = json.dumps({"Symbol": [OUTER] * (MOST_FRAMES + 9)}).encode()
    assert len(of_llvm(many)) == MOST_FRAMES


def test_elfutils() -> None:
    lines = [
        b"inner inlined at /src/t.c:3:52 in outer", b"/src/t.c:2:73", b"outer(int)", b"/src/t.c:3",
    ]  # fmt: skip
    assert of_elfutils(lines) == [
        Frame("inner", "/src/t.c", 2, 73, inlined=True),
        Frame("outer(int)", "/src/t.c", 3),
    ]
    assert of_elfutils([b"main", b"??:0"]) == [Frame("main")]
    assert of_elfutils([b"??", b"??:0"]) == of_elfutils([b"main"]) == of_elfutils([]) == []
    assert of_elfutils([b"f\xff", b"no place"]) == [Frame("f\ufffd")]
