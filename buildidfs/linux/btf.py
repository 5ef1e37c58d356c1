# SPDX-License-Identifier: Apache-2.0
"""The places of fields in the running kernel's structures, from its BTF.

Source: Documentation/bpf/btf.rst.
"""

from __future__ import annotations

import errno
import struct
from typing import Final

_KERNEL: Final = "/sys/kernel/btf/vmlinux"
_HEADER: Final = struct.Struct("=HBBIIIII")
_TYPE: Final = struct.Struct("=III")  # name, info, size or type
_MEMBER: Final = struct.Struct("=III")  # name, type, offset in bits
_MAGIC: Final = 0xEB9F
_STRUCT: Final = 4
_UNION: Final = 5
_COMPOUND: Final = (_STRUCT, _UNION)
_TYPEDEF: Final = 8
_SAME_AS: Final = (_TYPEDEF, 9, 10)  # the others: volatile, const
_KIND_FLAG: Final = 1 << 31
_OFFSET_BITS: Final = (1 << 24) - 1

# Bytes after each type by kind: for each of its vlen members, or once.
_EACH: Final = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}
_ONCE: Final = {1: 4, 3: 12, 14: 4, 17: 4}


class Btf:
    """The types of a kernel. Raises OSError if it has none, ValueError for another format."""

    def __init__(self) -> None:
        with open(_KERNEL, "rb") as file:
            data = file.read()
        try:
            self._read(data)
        except (struct.error, IndexError) as error:
            raise ValueError(f"{_KERNEL} is not BTF: {error}") from error

    def _read(self, data: bytes) -> None:
        magic, _, _, header, types, types_size, names, names_size = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError("the types of the kernel are not in BTF")
        self._names = data[header + names : header + names + names_size]
        self._data = data[header + types : header + types + types_size]
        self._at = [0]  # of each type; type 0 is void
        position, size, unpack = 0, len(self._data), _TYPE.unpack_from
        add, each, once = self._at.append, _EACH, _ONCE
        while position < size:
            add(position)
            info = unpack(self._data, position)[1]
            kind = info >> 24 & 31
            position += _TYPE.size + each.get(kind, 0) * (info & 0xFFFF) + once.get(kind, 0)

    def offset(self, name: str, *path: str) -> int:
        """Return the offset in bytes of a field of a structure; ``path`` leads through structures.

        Fields of members without a name belong to their structure. Raises LookupError.
        """
        number, total = self._number(name, _STRUCT), 0
        for field in path:
            found = self._field(number, field.encode()) if number else None
            if found is None:
                raise LookupError(f"struct {name} has no {'.'.join(path)}")
            offset, number = found
            total += offset
        return total

    def tracepoint(self, name: str) -> int:
        """Return the number by which bpf(2) knows a tracepoint. Raises FileNotFoundError."""
        number = self._number(f"btf_trace_{name}", _TYPEDEF)
        if not number:
            raise FileNotFoundError(errno.ENOENT, "no such tracepoint", name)
        return number

    def _number(self, name: str, kind: int) -> int:
        """Return the number of a type; 0 if there is none."""
        start = self._names.find(b"\0%b\0" % name.encode()) + 1
        for number, at in enumerate(self._at if start else ()):
            found, info, _ = _TYPE.unpack_from(self._data, at)
            if found == start and info >> 24 & 31 == kind and number:
                return number
        return 0

    def _field(self, number: int, name: bytes) -> tuple[int, int] | None:
        """Return the offset and the type of a field, also of a member without a name."""
        _, info, other = _TYPE.unpack_from(self._data, self._at[number])
        if info >> 24 & 31 in _SAME_AS:
            return self._field(other, name)
        if info >> 24 & 31 not in _COMPOUND:
            return None
        first = self._at[number] + _TYPE.size
        for at in range(first, first + (info & 0xFFFF) * _MEMBER.size, _MEMBER.size):
            member, kind, bits = _MEMBER.unpack_from(self._data, at)
            offset = (bits & _OFFSET_BITS if info & _KIND_FLAG else bits) // 8
            if not member:
                inner = self._field(kind, name)
                if inner is not None:
                    return offset + inner[0], inner[1]
            elif self._names.startswith(name + b"\0", member):
                return offset, kind
        return None
