# SPDX-License-Identifier: Apache-2.0
"""The tables of files and lines in ``.gopclntab``, as a line number program of DWARF.

Both are sequences of differences: Go has pairs of (difference of the value, bytes of code that have
it), DWARF has opcodes that go on by some bytes of code and some lines. The bytes between two values
are a key, for which a dictionary has the opcodes: a program of a million lines has a few thousand
of them. So most of the work is done by `re` and `bytes.join`.

Source: pcvalue in runtime/symtab.go and funcpctab in cmd/internal/obj/pcln.go of Go 1.19;
DWARF 4, 6.2.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from itertools import accumulate
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from buildidfs.formats.elf.gopclntab import Function, GoTable

VERSION: Final = 4
"""The version of DWARF; all consumers know it."""

# Two numbers: seven bits in each byte, the lowest first, the last one below 0x80.
_PAIRS: Final = re.compile(rb"[\x80-\xff]{0,4}[\0-\x7f][\x80-\xff]{0,4}[\0-\x7f]")
_NUMBER: Final = re.compile(rb"[\x80-\xff]{0,4}[\0-\x7f]")
_MOST: Final = 5
_PAIR: Final = 2
_MASK: Final = 0xFFFFFFFF
# A difference of 0 ends a table. Of code it means nothing, and none is written.
_STRAY_ZEROS: Final = 8
# All tables that are read have so many times the bytes of the whole: Go lets functions share them.
_SHARED: Final = 4
# More keys than this are none of a compiler's.
_KEYS_MAX: Final = 1 << 17
_FILES_MAX: Final = 1 << 18

_LINE_BASE: Final = -4
_LINE_RANGE: Final = 10
_OPCODE_BASE: Final = 13
_OPERANDS: Final = bytes((0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1))
_COPY: Final = b"\x01"
_ADVANCE_PC: Final = b"\x02"
_ADVANCE_LINE: Final = b"\x03"
_SET_FILE: Final = b"\x04"
_END: Final = b"\0\x01\x01"
_UNKNOWN: Final = b"<unknown>"


class _Values(NamedTuple):
    """A table: ``first`` has the first difference, ``pairs`` those of code and value by turns."""

    first: bytes
    pairs: list[bytes]


class Lines:
    """Collects the lines of functions, see `add`; ``files`` are those that they are in.

    ``address`` is the form of an address in the debug file.
    """

    def __init__(self, table: GoTable, address: Struct) -> None:
        self._table = table
        self._order = address.format[0]
        self._address = address
        self._head = b"\0" + bytes((1 + address.size,)) + b"\x02"  # DW_LNE_set_address
        self._left = _SHARED * len(table.data)
        self._out = bytearray()
        self._opcodes = _Opcodes()
        self._code = self._opcodes.code
        self._value = _Value()
        self._set_file: dict[int, bytes] = {}
        self._numbers: dict[int, int] = {}
        self.files: list[bytes] = []

    def add(self, function: Function) -> int:
        """Add the lines of a function, and return its size in bytes.

        That is up to the next function where its tables do not say, or are damaged; such a
        function has no lines.
        """
        files = self._values(function.files)
        if files is None:
            return function.room
        code = list(accumulate(map(self._code.__getitem__, files.pairs)))
        size = code[-1] * self._table.quantum
        if size > function.room:
            return function.room
        lines = self._values(function.lines)
        if lines is not None and size:
            self._write(function, files, code, lines)
        return size

    def _values(self, at: int) -> _Values | None:
        """The table at an offset; None where there is none, or it has no end."""
        table = self._table
        if not at or at >= table.limit:
            return None
        start = stop = (
            at + 1 if table.data[at] < 0x80 else at + _end(table.data[at : at + _MOST] + b"\0")
        )
        end = min(table.limit, start + self._left)
        for _ in range(_STRAY_ZEROS):
            stop = table.data.find(b"\0", stop, end) + 1
            if not stop:
                break
            size = stop - start
            # Most functions are in one file, so that its table has one pair.
            is_one = size == _PAIR or (size == 1 + _PAIR and table.data[start] > 0x7F)
            pairs = [table.data[start:stop]] if is_one else _PAIRS.findall(table.data, start, stop)
            self._left -= size
            if pairs and not pairs[-1][-1]:
                return _Values(table.data[at:start], pairs)
        else:
            return None
        self._left -= max(0, end - start)
        return None

    def _write(self, function: Function, files: _Values, code: list[int], lines: _Values) -> None:
        opcodes = list(map(self._opcodes.__getitem__, lines.pairs))
        if len(files.pairs) > 1:
            self._put_files(function, files, code, lines.pairs, opcodes)
        unit = function.unit
        self._out += b"".join(
            (
                self._head,
                self._address.pack(function.entry),
                self._file(unit + _signed(files.first) - 1, unit),
                _line(_signed(lines.first) - 2),  # from -1, and DWARF's lines begin at 1
                _COPY,
                *opcodes,
                _END,
            )
        )

    def _put_files(
        self,
        function: Function,
        files: _Values,
        code: list[int],
        pairs: list[bytes],
        opcodes: list[bytes],
    ) -> None:
        """Put the changes of the file between the opcodes of the rows.

        ``code`` says how far into the function each file goes. A file mostly changes with the line;
        where the next one goes on with the same line a row is added.
        """
        starts = list(accumulate(map(self._code.__getitem__, pairs)))
        end, last = starts[-1], len(starts) - 1
        index = function.unit + _signed(files.first) - 1
        set_file = self._set_file.get
        row, split, added = 0, -1, b""
        before = 0
        for at, change in zip(code, map(self._value.__getitem__, files.pairs[:-1]), strict=False):
            if at >= end:
                break
            index += change
            row = bisect_left(starts, at, row)
            file = set_file(index) or self._file(index, function.unit)
            if row == split and at == starts[row]:
                opcodes[row] = added + file + opcodes[row][len(added) :]
            elif at == starts[row]:
                opcodes[row] = file + opcodes[row]
            else:
                if row != split:
                    split, added, before = row, b"", starts[row - 1] if row else 0
                added += file + _advance(at - before) + _COPY
                before, left = at, starts[row] - at
                step = _step(self._value[pairs[row]])
                opcodes[row] = added + (_row(left, *step) if row < last else _advance(left))

    def _file(self, index: int, unit: int) -> bytes:
        """The opcodes that set the file of an index in `GoTable.units`, not before ``unit``."""
        found = self._set_file.get(index)
        if found is not None and index >= unit:
            return found
        units = self._table.units
        offset = units[index] if unit <= index < len(units) else -1
        number = self._numbers.get(offset)
        if number is None:
            if len(self.files) >= _FILES_MAX:
                return _SET_FILE + b"\x01"
            self.files.append((self._table.file(offset) if offset >= 0 else b"") or _UNKNOWN)
            number = self._numbers[offset] = len(self.files)
        found = _SET_FILE + _uleb(number)
        if index >= unit:
            self._set_file[index] = found
        return found

    def contents(self) -> bytearray:
        """The section ``.debug_line``; nothing can be added after that."""
        names = b"".join(name + b"\0\0\0\0" for name in self.files)
        fields = bytes((self._table.quantum, 1, 1, _LINE_BASE & 0xFF, _LINE_RANGE, _OPCODE_BASE))
        header = fields + _OPERANDS + b"\0" + names + b"\0"
        size = Struct(self._order + "I").pack
        after = Struct(self._order + "H").pack(VERSION) + size(len(header))
        out = self._out
        out[:0] = size(len(after) + len(header) + len(out)) + after + header
        return out


class _Opcodes(dict[bytes, bytes]):
    """The opcodes for the end of one line and the begin of the next, by the bytes in between."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = _Steps()
        self.code = _Code()

    def __missing__(self, pair: bytes) -> bytes:
        code = pair[0]
        if code < 0x80:
            value = pair[1:]
        else:
            end = _end(pair)
            code, value = _unsigned(pair[:end]), pair[end:]
        before, opcode = self._steps[value]
        special = opcode + _LINE_RANGE * code
        if value == b"\0":
            found = _advance(code)
        elif special <= 0xFF:  # `_row`, written out: this is done for every tenth line
            found = before + _BYTES[special]
        else:
            found = before + _advance(code) + _BYTES[opcode]
        if len(self) < _KEYS_MAX:
            self[pair] = found
            self.code[pair] = code
        return found


class _Steps(dict[bytes, tuple[bytes, int]]):
    """The result of `_step` for the bytes of a difference of lines."""

    def __missing__(self, value: bytes) -> tuple[bytes, int]:
        found = _step(_signed(value))
        if len(self) < _KEYS_MAX:
            self[value] = found
        return found


class _Code(dict[bytes, int]):
    """The difference of the code in a pair, remembered by pair."""

    def __missing__(self, pair: bytes) -> int:
        found = pair[0] if pair[0] < 0x80 else _unsigned(pair[: _end(pair)])
        if len(self) < _KEYS_MAX:
            self[pair] = found
        return found


class _Value(dict[bytes, int]):
    """The difference of the value in a pair, remembered by pair."""

    def __missing__(self, pair: bytes) -> int:
        found = _signed(pair[_end(pair) :])
        if len(self) < _KEYS_MAX:
            self[pair] = found
        return found


def _end(pair: bytes) -> int:
    """Return the offset at which the first number of a pair ends."""
    return next(at for at, byte in enumerate(pair, 1) if byte < 0x80)


def _step(lines: int) -> tuple[bytes, int]:
    """Return the opcodes before a row with a number of lines more, and the opcode of the row."""
    if _LINE_BASE <= lines < _LINE_BASE + _LINE_RANGE:
        return b"", _OPCODE_BASE + lines - _LINE_BASE
    return _line(lines), _OPCODE_BASE - _LINE_BASE


def _row(code: int, before: bytes, opcode: int) -> bytes:
    """The opcodes of a row that is so far on in the code, and as `_step` says."""
    special = opcode + _LINE_RANGE * code
    if special <= 0xFF:
        return before + _BYTES[special]
    return before + _advance(code) + _BYTES[opcode]


_BYTES: Final = tuple(bytes((number,)) for number in range(256))


def _advance(code: int) -> bytes:
    return _ADVANCE_PC + _uleb(code) if code else b""


def _line(lines: int) -> bytes:
    return _ADVANCE_LINE + _sleb(lines) if lines else b""


def _unsigned(number: bytes) -> int:
    if len(number) == 2:
        return number[0] & 0x7F | number[1] << 7
    value = 0
    for at, byte in enumerate(number):
        value |= (byte & 0x7F) << 7 * at
    return value & _MASK


def _signed(number: bytes) -> int:
    value = _unsigned(number)
    return ~(value >> 1) if value & 1 else value >> 1


def _uleb(value: int) -> bytes:
    if value <= 0x7F:
        return _BYTES[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _sleb(value: int) -> bytes:
    if -0x2000 <= value < 0x2000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F))
    out = bytearray()
    while not -0x40 <= value < 0x40:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value & 0x7F)
    return bytes(out)
