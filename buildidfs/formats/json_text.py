# SPDX-License-Identifier: Apache-2.0
"""JSON that a terminal may be shown: names in it come from strangers.

JSON has control characters below U+0020 escaped, but not DEL, those of C1 (U+009B begins what a
terminal obeys, as ESC [ does), or those that turn text around (U+202E).
"""

from __future__ import annotations

from typing import Final

_DEL: Final = 0x7F


def escaped(data: bytes) -> bytes:
    """Return the same JSON text with each unprintable character written as ``\\uNNNN``.

    Newlines stay. ``data`` has other unprintable characters within strings only.
    """
    if data.isascii() and _DEL not in data:
        return data
    text = data.decode()
    return "".join(
        character if character.isprintable() or character == "\n" else _escape(character)
        for character in text
    ).encode()


def _escape(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
