# SPDX-License-Identifier: Apache-2.0
"""Frames for people. Names in them come from files of strangers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buildidfs.cli.output import printable

if TYPE_CHECKING:
    from buildidfs.formats.symbolizer_output import Frame


def function_of(frame: Frame) -> str:
    """The name of a function."""
    return printable(frame.function.encode("utf-8", "surrogateescape")) or "??"


def place_of(frame: Frame) -> str:
    """File, line and column, as far as they are known."""
    file = printable(frame.file.encode("utf-8", "surrogateescape")) or "??"
    return f"{file}:{frame.line}" + (f":{frame.column}" if frame.column else "")
