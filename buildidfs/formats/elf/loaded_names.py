# SPDX-License-Identifier: Apache-2.0
"""The names under which a dynamic linker has loaded the files of a process.

The kernel knows the real path of a mapped file. A debugger asks for the name that the dynamic
linker used, which may lead there through symbolic links of a container. The linker keeps a list of
these names for debuggers: the auxiliary vector leads to the program headers, PT_DYNAMIC to
DT_DEBUG, and this to struct r_debug and the list of struct link_map, see <link.h>, <elf.h> and
getauxval(3). glibc, musl and others have the same layout.

The process wrote everything here: each address is a claim, and all numbers are bounded.
"""

from __future__ import annotations

import sys
from struct import Struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    ReadMemory = Callable[[int, int], bytes]

_AT_PHDR: Final = 3
_AT_PHENT: Final = 4
_AT_PHNUM: Final = 5
_AT_EXECFN: Final = 31
_PT_DYNAMIC: Final = 2
_PT_PHDR: Final = 6
_DT_NULL: Final = 0
_DT_DEBUG: Final = 21

_MOST_HEADERS: Final = 64
_MOST_DYNAMIC: Final = 512
_MOST_FILES: Final = 4096
_PATH_MAX: Final = 4096
_PAGE: Final = 4096


class _Layout:
    """The sizes of one word size: ``pair`` is an entry of a vector or of the dynamic section."""

    def __init__(self, word: str, phent: int, vaddr_at: int) -> None:
        order = "<" if sys.byteorder == "little" else ">"
        self.word = Struct(order + word)
        self.pair = Struct(order + word * 2)
        self.kind = Struct(order + "I")
        self.map = Struct(order + word * 4)  # l_addr, l_name, l_ld, l_next
        self.phent = phent
        self.vaddr_at = vaddr_at


_LAYOUTS: Final = (_Layout("Q", 56, 16), _Layout("I", 32, 8))


def names(auxiliary: bytes, read: ReadMemory) -> list[bytes]:
    """Return the absolute names of the loaded files and of the program, without repetitions.

    ``auxiliary`` is the auxiliary vector of a living process, as in /proc/PID/auxv, ``read(address,
    size)`` reads its memory, and may return fewer bytes or raise OSError. If the list cannot be
    read to its end, the names before are returned.
    """
    for layout in _LAYOUTS:
        size = len(auxiliary) - len(auxiliary) % layout.pair.size
        vector = dict(layout.pair.iter_unpack(auxiliary[:size]))
        if vector.get(_AT_PHENT) == layout.phent:
            return _Names(layout, vector, read).found()
    return []


class _Names:
    """Reads the names of one process."""

    def __init__(self, layout: _Layout, vector: dict[int, int], read: ReadMemory) -> None:
        self._layout = layout
        self._vector = vector
        self._read = read

    def found(self) -> list[bytes]:
        found: dict[bytes, None] = {}
        try:
            self._add(found, self._vector.get(_AT_EXECFN, 0))
            at = self._first()
            for _ in range(_MOST_FILES):
                row = self._exactly(at, self._layout.map.size)
                _, name_at, _, at = self._layout.map.unpack(row)
                self._add(found, name_at)
                if not at:
                    break
        except OSError:
            pass  # the list changed, or is damaged
        return list(found)

    def _add(self, found: dict[bytes, None], address: int) -> None:
        name = self._text(address)
        if name.startswith(b"/"):
            found[name] = None

    def _first(self) -> int:
        """Return the address of the first link_map. Raises OSError."""
        layout = self._layout
        table = self._vector.get(_AT_PHDR, 0)
        count = min(self._vector.get(_AT_PHNUM, 0), _MOST_HEADERS)
        headers = self._exactly(table, count * layout.phent)
        dynamic, base = 0, 0
        for at in range(0, len(headers), layout.phent):
            (kind,) = layout.kind.unpack_from(headers, at)
            (address,) = layout.word.unpack_from(headers, at + layout.vaddr_at)
            if kind == _PT_PHDR:
                base = table - address
            elif kind == _PT_DYNAMIC:
                dynamic = address
        if not dynamic:
            raise OSError("a static program")
        rows = self._read(base + dynamic, _MOST_DYNAMIC * layout.pair.size)
        for key, value in layout.pair.iter_unpack(rows[: len(rows) - len(rows) % layout.pair.size]):
            if key == _DT_DEBUG and value:
                # r_version is an int, and the pointer r_map follows it.
                row = self._exactly(value + layout.word.size, layout.word.size)
                return int(layout.word.unpack(row)[0])
            if key == _DT_NULL:
                break
        raise OSError("without a list of files")

    def _exactly(self, address: int, size: int) -> bytes:
        data = self._read(address, size) if address else b""
        if len(data) < size or not size:
            raise OSError("the memory ends")
        return data

    def _text(self, address: int) -> bytes:
        """Return a string; empty if it is too long, or not there. Raises OSError."""
        text = b""
        while address and len(text) < _PATH_MAX:
            part = self._read(address, _PAGE - address % _PAGE)
            text += part
            if b"\0" in part or not part:
                break
            address += len(part)
        name, end, _ = text.partition(b"\0")
        return name if end else b""
