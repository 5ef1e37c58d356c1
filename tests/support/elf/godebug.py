# SPDX-License-Identifier: Apache-2.0
"""Debug files made of programs of Go, for tests that want the bytes."""

from __future__ import annotations

import io
import tempfile

from buildidfs.formats.elf.minidebug import DynamicSymbols
from buildidfs.formats.go import debug_file
from tests.support.filesystems.filereader import FileReader

BUILD_ID = b"\x0b" * 20
SOURCE = b"\x5a" * 32


def made(data: bytes, dynamic: DynamicSymbols | None = None) -> bytes | None:
    """The debug file of a program, if it has a sound table of functions."""
    out, scratch = io.BytesIO(), io.BytesIO()
    reader, dynamic = FileReader(data), dynamic or DynamicSymbols()
    if debug_file.write_debug_file(
        reader, len(data), BUILD_ID, SOURCE, out, scratch=scratch, dynamic=dynamic
    ):
        return out.getvalue()
    assert not out.getvalue()
    return None


def make_on_disk(data: bytes) -> None:
    """Make it as the store does: what is large lies in files."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as scratch:
        reader = FileReader(data)
        debug_file.write_debug_file(reader, len(data), BUILD_ID, SOURCE, out, scratch=scratch)
