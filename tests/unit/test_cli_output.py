# SPDX-License-Identifier: Apache-2.0
"""Values as people and programs get them: a terminal must not obey what a container wrote."""

from __future__ import annotations

import base64
import json
import os
import re
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs import wording
from buildidfs.cli import output
from buildidfs.model import BuildId, Kind
from tests.support.clients.commands import ROOT


@given(st.binary(max_size=200))
def test_printable_text_holds_nothing_that_a_terminal_obeys(raw: bytes) -> None:
    assert output.printable(raw).isprintable()


def test_printable_keeps_what_can_be_read() -> None:
    assert output.printable("/usr/lib/größe.so".encode()) == "/usr/lib/größe.so"
    assert output.printable(b"/a\x1b[2J\n\xff") == "/a\\x1b[2J\\n\\xff"


@given(st.binary(max_size=200))
def test_a_path_survives_json(raw: bytes) -> None:
    fields = output.path_fields(raw)
    if "path_b64" in fields:
        assert base64.b64decode(fields["path_b64"]) == raw
    else:
        assert fields["path"].encode() == raw


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert wording.size(count) == text


def test_counts_have_the_right_number() -> None:
    assert wording.counted(0, "file") == "0 files"
    assert wording.counted(1, "build ID") == "1 build ID"
    assert wording.counted(2, "binary", "binaries") == "2 binaries"
    assert wording.counted(2, "process") == "2 processes"


def test_commands_count_with_the_right_number() -> None:
    """A number before a plural goes through `counted`, or one of them comes as "1 files"."""
    nouns = "blob|file|build ID|pin|process(?=es)|binari(?=es)|fault|draft|frame|row|day|package"
    found = {
        f"{path.name}: {each[0]}"
        for path in (ROOT / "buildidfs/cli").glob("*.py")
        for each in re.finditer(rf"\{{[^{{}}]*\}} (?:[a-z]+ )?(?:{nouns})e?s\b", path.read_text())
    }
    assert found == set()


@pytest.mark.parametrize(
    ("patterns", "path", "fits"),
    [
        (("*.so",), b"/usr/lib/libc.so", True),
        (("*.so",), b"/usr/lib/libc.so.6", False),
        (("/opt/*", "/srv/*"), b"/srv/a/b", True),
        (("caf?",), b"caf\xe9", True),
        ((b"caf[\xe0-\xef]",), b"caf\xe9", True),
        (("\udce9[!a-c]",), b"\xe9d", True),
    ],
)
def test_patterns_of_paths(patterns: tuple[str | bytes, ...], path: bytes, fits: bool) -> None:
    assert bool(wording.glob(*patterns).match(path)) == fits


@given(st.binary(max_size=40).map(lambda raw: b"[\xc3\xa9-\x80]" + raw))
def test_any_bytes_are_a_pattern(raw: bytes) -> None:
    assert wording.glob(os.fsdecode(raw)) == wording.glob(raw)


class _Inner(msgspec.Struct):
    name: bytes
    kind: Kind
    seen_ns: int


class _Outer(msgspec.Struct, rename={"hidden": "_hidden"}):
    build_id: BuildId
    rows: tuple[_Inner, ...]
    counts: dict[str, int]
    hidden: int = 7
    unset: int | msgspec.UnsetType = msgspec.UNSET


def test_json_of_a_struct_has_the_forms_of_the_manual(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    inner = _Inner(b"/caf\xe9", Kind.EXECUTABLE, 1_500_000_000)
    output.json_line(_Outer(BuildId(b"\xab\xcd"), (inner,), {"x": 1}))
    sys.stdout.flush()
    assert json.loads(capsysbinary.readouterr().out) == {
        "build_id": "abcd",
        "rows": [{"name": "/caf\ufffd", "name_b64": "L2NhZuk=", "kind": "executable", "seen": 1.5}],
        "counts": {"x": 1},
    }
