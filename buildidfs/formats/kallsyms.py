# SPDX-License-Identifier: Apache-2.0
"""The text of /proc/kallsyms: the symbols of a kernel and of its modules.

Each line has an address, a letter for the type as in nm(1), a name, and for a symbol of a module
its name in brackets. Several symbols may have one address; the choice among them is that of perf
(tools/perf/util/symbol.c, choose_best_symbol).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Final, NamedTuple

_LINE: Final = re.compile(
    rb"^([0-9a-f]{8,16}) ([tTwWdDbB]) ([^\s]+)(?:\t\[([^\]\n]+)\])?$", re.MULTILINE
)


class KernelSymbol(NamedTuple):
    """A symbol with the address at which it begins."""

    address: int
    name: bytes


class Kallsyms:
    """The symbols in a text, by their addresses."""

    def __init__(self, text: bytes) -> None:
        self._marks: dict[bytes, int] = {}
        best: dict[bytes, dict[int, tuple[tuple[object, ...], bytes]]] = {}
        for found in _LINE.finditer(text):
            address, kind, name, module = found.groups()
            if not (where := int(address, 16)) or name.startswith(b"$"):
                continue  # hidden by kptr_restrict, or a mark of the assembler
            if module is None:
                self._marks[name] = where
            symbols = best.setdefault(module or b"", {})
            rank = _rank(kind, name), name
            if where not in symbols or rank > symbols[where]:
                symbols[where] = rank
        self._names = {
            module: {where: name for where, (_, name) in symbols.items()}
            for module, symbols in best.items()
        }
        self._addresses = {module: sorted(symbols) for module, symbols in best.items()}

    def address_of(self, name: bytes) -> int | None:
        """Return the address of a symbol of the kernel itself."""
        return self._marks.get(name)

    def first_of(self, module: bytes) -> int | None:
        """Return the lowest address of a module."""
        addresses = self._addresses.get(module)
        return addresses[0] if addresses else None

    def find(self, address: int, module: bytes = b"") -> KernelSymbol | None:
        """Return the symbol that contains an address of the kernel, or of a module."""
        addresses = self._addresses.get(module, [])
        place = bisect_right(addresses, address) - 1
        if place < 0:
            return None
        start = addresses[place]
        return KernelSymbol(start, self._names[module][start])


def _rank(kind: bytes, name: bytes) -> tuple[object, ...]:
    """Return the sort key of symbols at one address: perf shows the greatest."""
    underscores = len(name) - len(name.lstrip(b"_"))
    return kind not in b"wW", kind.isupper(), -underscores, len(name)
