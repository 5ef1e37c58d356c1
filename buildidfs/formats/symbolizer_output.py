# SPDX-License-Identifier: Apache-2.0
"""Output of symbolizers: llvm-symbolizer(1) as JSON, eu-addr2line(1) as text.

Names in the output come from the queried file, which may be hostile.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_FRAMES: Final = 256
"""The most frames at an address; further inlined functions are left out."""

_DIGITS: Final = 20  # of a number that fits 64 bits
_INLINED: Final = b" inlined at "
_VERSION: Final = re.compile(r"@@?(?!plt$)[A-Za-z_][\w.-]*$")
_UNKNOWN: Final = ("??", "")


class Frame(msgspec.Struct, frozen=True, rename={"start": "_start"}):
    """A function at an address, demangled. Unknown names and files are empty, unknown lines 0.

    ``start`` is the address at which the function begins. If functions were inlined, there are
    several frames, the innermost first; all but the last are ``inlined``.
    """

    function: str
    file: str = ""
    line: int = 0
    column: int = 0
    start: int | None = None
    inlined: bool = False


class Symbol(NamedTuple):
    """An entry of a symbol table: ``size`` bytes from the address ``start``."""

    start: int
    size: int


class _Symbol(msgspec.Struct, rename="pascal"):
    function_name: str = ""
    file_name: str = ""
    line: int = 0
    column: int = 0
    start_address: str = ""


class _LlvmOutput(msgspec.Struct, rename="pascal"):
    symbol: list[_Symbol] = []


class _Data(msgspec.Struct, rename="pascal"):
    start: str
    size: str


class _LlvmData(msgspec.Struct, rename="pascal"):
    data: _Data | None = None


_decode_data = msgspec.json.Decoder(_LlvmData).decode
_decode = msgspec.json.Decoder(_LlvmOutput).decode


def of_llvm(line: bytes) -> list[Frame]:
    """Return the frames in one line of llvm-symbolizer's JSON; none if the line is an error or has
    no answer.
    """
    try:
        symbols = _decode(line.decode("utf-8", "replace")).symbol[:MOST_FRAMES]
        return _known(
            Frame(
                _function(symbol.function_name),
                _name(symbol.file_name),
                symbol.line,
                symbol.column,
                int(symbol.start_address, 16) if symbol.start_address else None,
                index < len(symbols) - 1,
            )
            for index, symbol in enumerate(symbols)
        )
    except (ValueError, RecursionError):  # msgspec raises ValueErrors
        return []


def symbol_of_llvm(line: bytes) -> Symbol | None:
    """Return the symbol in llvm-symbolizer's answer to ``DATA``; None for an error, or
    no answer.
    """
    try:
        data = _decode_data(line.decode("utf-8", "replace")).data
        found = None if data is None else Symbol(int(data.start, 16), int(data.size, 16))
    except (ValueError, RecursionError):
        return None
    return found if found is not None and found.size else None


def of_elfutils(lines: Sequence[bytes]) -> list[Frame]:
    """Return the frames in the answer of ``eu-addr2line -f -i`` for one address."""
    pairs = list(zip(lines[::2], lines[1::2], strict=False))[:MOST_FRAMES]
    frames = []
    for index, (function, place) in enumerate(pairs):
        name = function.split(_INLINED)[0].decode("utf-8", "replace")
        file, line, column = _place(place)
        frames.append(
            Frame(_function(name), file, line, column, None, inlined=index < len(pairs) - 1)
        )
    return _known(frames)


def _place(text: bytes) -> tuple[str, int, int]:
    """Parse ``file:line`` or ``file:line:column``."""
    file, _, last = text.decode("utf-8", "replace").rpartition(":")
    rest, _, before = file.rpartition(":")
    numbers = [
        int(part) if part.isascii() and part.isdecimal() and len(part) < _DIGITS else None
        for part in (before, last)
    ]
    if rest and numbers[0] is not None:
        return _name(rest), numbers[0], numbers[1] or 0
    return _name(file), numbers[1] or 0, 0


def _name(text: str) -> str:
    return "" if text in _UNKNOWN else text


def _function(text: str) -> str:
    """Return a name without the symbol version at its end (``memcpy@@GLIBC_2.14``)."""
    return _name(_VERSION.sub("", text))


def _known(frames: Iterable[Frame]) -> list[Frame]:
    found = list(frames)
    return found if any(frame.function or frame.file for frame in found) else []
