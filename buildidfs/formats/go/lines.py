# SPDX-License-Identifier: Apache-2.0
"""The tables of files and lines in ``.gopclntab``, as a line number program of DWARF.

Both are sequences of differences: Go has pairs of (difference of the value, bytes of code with that
value), DWARF has opcodes that advance by some bytes of code and some lines. The bytes that encode
one pair are the key of a dictionary of opcodes, because a program of a million lines has only a few
thousand different pairs. So `re` and `bytes.join` do most of the work.

Source: pcvalue in runtime/symtab.go and funcpctab in cmd/internal/obj/pcln.go of Go 1.19; DWARF 4,
6.2.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from itertools import accumulate
from struct import Struct
from typing import TYPE_CHECKING, BinaryIO, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from buildidfs.formats.go.gopclntab import GoFunction, GoTable

_T = TypeVar("_T")

VERSION: Final = 4
"""The version of DWARF; all consumers know it."""

# Two numbers: seven bits in each byte, the lowest first, the last byte below 0x80.
_PAIRS: Final = re.compile(rb"[\x80-\xff]{0,4}[\0-\x7f][\x80-\xff]{0,4}[\0-\x7f]")
_MOST: Final = 5
_ONE_PAIR: Final = 3
_SHORT: Final = 2
_CONTINUED: Final = bytes(range(0x80, 0x100))
_MASK: Final = 0xFFFFFFFF
# A value difference of 0 ends a table. A code difference of 0 has no meaning, so no compiler writes
# it; a few are tolerated.
_STRAY_ZEROS: Final = 8
# A table of a compiler does not have more keys than this.
_KEYS_MAX: Final = 1 << 17
_FILES_MAX: Final = 1 << 18
_BUFFERED: Final = 1 << 20

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


class Lines:
    """Collects the lines of functions, see `add`; ``files`` are their source files.

    ``address`` is the form of an address in the debug file. The line number program is written to
    ``out``, because the program may be larger than Go's table.
    """

    def __init__(self, table: GoTable, address: Struct, out: BinaryIO) -> None:
        self._table = table
        self._order = address.format[0]
        self._address = address
        self._head = b"\0" + bytes((1 + address.size,)) + b"\x02"  # DW_LNE_set_address
        # Functions may share tables of values; in a hostile program any number may. In real Go
        # programs all functions together have a quarter of the bytes of the whole table.
        self._left = table.size
        self._names_left = table.size  # a name may begin at each byte of another one
        self._out = out
        self._buffer = bytearray()
        self._opcodes = _Opcodes()
        self._signed = _Remembered(_signed)
        self._first_line = _Remembered(_first_line)
        self._set_file: dict[int, bytes] = {}
        self.files: list[bytes] = []
        self.size = 0
        """The number of bytes in ``out``."""

    def add(self, function: GoFunction) -> int:
        """Add the lines of a function, and return its size in bytes.

        If its tables are missing or damaged, the function has no lines, and extends to the next
        function.
        """
        files = self._values(function.files)
        if files is None:
            return function.room
        first, body = files
        # Most functions are in a single file.
        pairs = _pairs(body)
        code = _ends(body, pairs)
        if not code or code[-1] * self._table.quantum > function.room:
            return function.room
        size = code[-1] * self._table.quantum
        lines = self._values(function.lines)
        if lines is not None and size:
            first_line, rows = lines
            row_pairs = _pairs(rows)
            opcodes = list(map(self._opcodes.__getitem__, row_pairs))
            index = function.unit + self._signed[first] - 1
            if len(code) > 1 and opcodes:
                changes = self._changes(body, pairs)
                ends = _ends(rows, row_pairs)
                self._put_files(function.unit, index, code, changes, ends, opcodes, row_pairs)
            self._write(function, index, self._first_line[first_line], opcodes)
        return size

    def _values(self, at: int) -> tuple[bytes, bytes] | None:
        """Return the table at an offset; None if there is none, or it has no end.

        The result is its first difference, and its pairs of code and difference up to a difference
        of 0.
        """
        data = self._table.values
        if not at or at >= len(data):
            return None
        start = stop = at + 1 if data[at] < 0x80 else at + _end(data[at : at + _MOST] + b"\0")
        end = min(len(data), start + self._left)
        for _ in range(_STRAY_ZEROS):
            stop = data.find(b"\0", stop, end) + 1
            if not stop:
                break
            body = data[start:stop]
            self._left -= len(body)
            if not len(body.translate(None, _CONTINUED)) % 2:  # numbers come in pairs
                return data[at:start], body
        else:
            return None
        self._left -= max(0, end - start)
        return None

    def _changes(self, body: bytes, pairs: list[bytes]) -> Iterable[int]:
        """Return the differences between the values of a table."""
        if body.isascii():
            return map(_SIGNED.__getitem__, body[1::2])
        signed = self._signed
        return [signed[pair[1:] if pair[0] < 0x80 else pair[_end(pair) :]] for pair in pairs]

    def _write(self, function: GoFunction, index: int, line: bytes, opcodes: list[bytes]) -> None:
        units = self._table.units
        offset = units[index] if function.unit <= index < len(units) else -1
        file = self._set_file.get(offset) or self._new_file(offset)
        address = self._address.pack(function.entry)
        self._buffer += b"".join((self._head, address, file, line, _COPY, *opcodes, _END))
        if len(self._buffer) > _BUFFERED:
            self._flush()

    def _flush(self) -> None:
        self.size += self._out.write(self._buffer)
        self._buffer.clear()

    def _put_files(
        self,
        unit: int,
        index: int,
        code: list[int],
        changes: Iterable[int],
        starts: list[int],
        opcodes: list[bytes],
        pairs: list[bytes],
    ) -> None:
        """Insert the changes of the file between the opcodes of the rows.

        ``code`` has the offset in the function at which each file ends, ``changes`` the difference
        to the next file, ``starts`` the offset at which each row ends. The file nearly always
        changes at the end of a row, together with the line. If the line stays the same, a row is
        added.
        """
        units, set_file = self._table.units, self._set_file.get
        end, last, most = starts[-1], len(starts) - 1, len(units)
        row, split, before = 0, -1, 0
        added: list[bytes] = []  # before the opcodes of the split row, joined once
        for at, change in zip(code[:-1], changes, strict=False):
            if at >= end:
                break
            index += change
            offset = units[index] if unit <= index < most else -1
            file = set_file(offset) or self._new_file(offset)
            row = bisect_left(starts, at, row)
            if at == starts[row] and row == split:
                added.append(file)
            elif at == starts[row]:
                opcodes[row] = file + opcodes[row]
            else:
                if row != split:
                    if added:
                        opcodes[split] = b"".join((*added, opcodes[split]))
                    split, added, before = row, [], starts[row - 1] if row else 0
                added += (file, _advance(at - before), _COPY)
                before, left = at, starts[row] - at
                step = _step(_signed(_value(pairs[row])))
                opcodes[row] = _row(left, *step) if row < last else _advance(left)
        if added:
            opcodes[split] = b"".join((*added, opcodes[split]))

    def _new_file(self, offset: int) -> bytes:
        """Return the opcodes that set the file at an offset of `GoTable.file`, -1 for none."""
        if len(self.files) >= _FILES_MAX:
            return _SET_FILE + b"\x01"
        name = (self._table.file(offset) if offset >= 0 else b"") or _UNKNOWN
        self._names_left -= len(name)
        self.files.append(name if self._names_left >= 0 else _UNKNOWN)
        found = self._set_file[offset] = _SET_FILE + _uleb(len(self.files))
        return found

    def header(self) -> bytes:
        """Return the start of the section ``.debug_line``, which the bytes in ``out`` follow.

        No function can be added after that.
        """
        self._flush()
        names = b"".join(name + b"\0\0\0\0" for name in self.files)
        fields = bytes((self._table.quantum, 1, 1, _LINE_BASE & 0xFF, _LINE_RANGE, _OPCODE_BASE))
        header = fields + _OPERANDS + b"\0" + names + b"\0"
        size = Struct(self._order + "I").pack
        after = Struct(self._order + "H").pack(VERSION) + size(len(header))
        return size(len(after) + len(header) + self.size) + after + header


class _Opcodes(dict[bytes, bytes]):
    """The opcodes for the end of one line and the beginning of the next, by the bytes in between.

    Only keys of two bytes are cached: half of the other keys occur once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps = _Remembered(lambda value: _step(_signed(value)))

    def __missing__(self, pair: bytes) -> bytes:
        code = pair[0]
        if code < 0x80:
            value = pair[1:]
        elif pair[1] < 0x80:
            code, value = code & 0x7F | pair[1] << 7, pair[2:]
        else:
            code, value = _code(pair), _value(pair)
        if value == b"\0":
            found = _advance(code)
        else:
            before, opcode = self._steps[value]
            special = opcode + _LINE_RANGE * code
            if special <= 0xFF:  # `_row`, inlined, because this runs for every fifth line
                found = before + _BYTES[special]
            else:
                found = before + _advance(code) + _BYTES[opcode]
        if len(pair) == _SHORT:
            self[pair] = found
        return found


class _Remembered(dict[bytes, _T]):
    """Caches a bounded number of the results of a function of some bytes."""

    def __init__(self, find: Callable[[bytes], _T]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, number: bytes) -> _T:
        found = self._find(number)
        if len(self) < _KEYS_MAX:
            self[number] = found
        return found


def _first_line(number: bytes) -> bytes:
    """Return the opcodes that set the first line of a function."""
    return _line(_signed(number) - 2)  # from -1, because DWARF's lines begin at 1


def _pairs(body: bytes) -> list[bytes]:
    """Return the pairs of a table; most tables have only one."""
    return [body] if len(body) <= _ONE_PAIR else _PAIRS.findall(body)


def _ends(body: bytes, pairs: list[bytes]) -> list[int]:
    """Return the offset in the function at which each value of a table ends, in instructions."""
    if body.isascii():  # each number has one byte
        return list(accumulate(body[::2]))
    return list(accumulate([pair[0] if pair[0] < 0x80 else _code(pair) for pair in pairs]))


def _code(pair: bytes) -> int:
    return _unsigned(pair[: _end(pair)])


def _value(pair: bytes) -> bytes:
    return pair[1:] if pair[0] < 0x80 else pair[_end(pair) :]


def _end(pair: bytes) -> int:
    """Return the offset at which the first number of a pair ends."""
    return (
        2
        if pair[0] > 0x7F > pair[1]
        else next(at for at, byte in enumerate(pair, 1) if byte < 0x80)
    )


def _step(lines: int) -> tuple[bytes, int]:
    """Return the opcodes that come before a row which advances by ``lines``, and the opcode of that
    row.
    """
    if _LINE_BASE <= lines < _LINE_BASE + _LINE_RANGE:
        return b"", _OPCODE_BASE + lines - _LINE_BASE
    return _line(lines), _OPCODE_BASE - _LINE_BASE


def _row(code: int, before: bytes, opcode: int) -> bytes:
    """Return the opcodes of a row that advances by ``code``, with the results of `_step`."""
    special = opcode + _LINE_RANGE * code
    if special <= 0xFF:
        return before + _BYTES[special]
    return before + _advance(code) + _BYTES[opcode]


_BYTES: Final = tuple(bytes((number,)) for number in range(256))
_SIGNED: Final = tuple(~(number >> 1) if number & 1 else number >> 1 for number in range(0x80))


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
    if value < 1 << 14:
        return bytes((value & 0x7F | 0x80, value >> 7))
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
