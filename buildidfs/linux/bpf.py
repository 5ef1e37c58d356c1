# SPDX-License-Identifier: Apache-2.0
"""Programs and maps of bpf(2), the instructions of programs, and the kernel's types (BTF).

All calls need CAP_BPF and CAP_PERFMON, or CAP_SYS_ADMIN, and raise OSError. Source: bpf(2),
include/uapi/linux/bpf.h, Documentation/bpf/standardization/instruction-set.rst, and
Documentation/bpf/btf.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from typing import Final

from buildidfs.linux import syscalls

_NUMBERS: Final = {
    "x86_64": 321, "aarch64": 280, "riscv64": 280, "loongarch64": 280, "ppc64le": 361,
    "s390x": 351,
}  # fmt: skip

_MAP_CREATE: Final = 0
_MAP_UPDATE: Final = 2
_MAP_DELETE: Final = 3
_PROG_LOAD: Final = 5
_RAW_TRACEPOINT_OPEN: Final = 17
_PROG_TRACING: Final = 26
_TRACE_RAW_TP: Final = 23  # of enum bpf_attach_type
_ATTR_SIZE: Final = 128
_LOG_BYTES: Final = 1 << 16

PERF_EVENT_ARRAY: Final = 4
"""A map of rings of perf events, by CPU."""
CGROUP_ARRAY: Final = 8
"""A map of control groups of version 2."""
LRU_HASH: Final = 9
"""A map that forgets what was not used for long when it is full."""

# Of linux/bpf.h, enum bpf_func_id.
MAP_LOOKUP: Final = 1
MAP_UPDATE: Final = 2
KTIME_GET_NS: Final = 5
GET_CURRENT_PID_TGID: Final = 14
GET_CURRENT_UID_GID: Final = 15
PERF_EVENT_OUTPUT: Final = 25
CURRENT_TASK_UNDER_CGROUP: Final = 37
GET_CURRENT_TASK_BTF: Final = 158

_INSTRUCTION: Final = struct.Struct("=BBhi")
FP: Final = 10
"""The register with the end of the program's stack."""

# Opcodes. In their names: X is a register, K a constant, DW 8 bytes, W 4 bytes.
_MOV_X: Final = 0xBF
_MOV_K: Final = 0xB7
_ADD_K: Final = 0x07
_LDX_DW: Final = 0x79
_LDX_W: Final = 0x61
_STX_DW: Final = 0x7B
_STX_W: Final = 0x63
_ST_DW: Final = 0x7A
_ST_W: Final = 0x62
_RSH_K: Final = 0x77
_AND_K: Final = 0x57
_CALL: Final = 0x85
_EXIT: Final = 0x95
_LD_IMM64: Final = 0x18
_PSEUDO_MAP_FD: Final = 1
_JA: Final = 0x05
JEQ_K: Final = 0x15
"""Jump if a register is equal to a constant."""
JNE_K: Final = 0x55
"""Jump if a register differs from a constant."""
JLT_X: Final = 0xAD
"""Jump if a register is less than another one, without sign."""


class Assembler:
    """Collects the instructions of a program; registers are numbers.

    Arguments of functions are in registers 1 to 5, the result in 0; 6 to 9 survive calls. Jumps
    lead to a label at a later place.
    """

    def __init__(self) -> None:
        self._code: list[bytes] = []
        self._jumps: list[tuple[int, str]] = []
        self._labels: dict[str, int] = {}

    def _add(self, opcode: int, target: int = 0, source: int = 0, off: int = 0, k: int = 0) -> None:
        self._code.append(_INSTRUCTION.pack(opcode, target | source << 4, off, k))

    def move(self, target: int, source: int) -> None:
        """Copy a register."""
        self._add(_MOV_X, target, source)

    def set(self, target: int, value: int) -> None:
        """Set a register to a constant of 31 bits."""
        self._add(_MOV_K, target, k=value)

    def add(self, target: int, value: int) -> None:
        """Add a constant of 31 bits."""
        self._add(_ADD_K, target, k=value)

    def mask(self, target: int, value: int) -> None:
        """Keep the bits of a register that are set in a constant of 31 bits."""
        self._add(_AND_K, target, k=value)

    def high_half(self, target: int) -> None:
        """Keep the upper 32 bits of a register, as its lower ones."""
        self._add(_RSH_K, target, k=32)

    def load(self, target: int, base: int, offset: int, size: int = 8) -> None:
        """Load 4 or 8 bytes of the stack, the context, a map's value, or a structure of the kernel
        to which another load or a call has led.
        """
        self._add(_LDX_DW if size == 8 else _LDX_W, target, base, offset)

    def store(self, base: int, offset: int, source: int, size: int = 8) -> None:
        """Store 4 or 8 bytes of a register."""
        self._add(_STX_DW if size == 8 else _STX_W, base, source, offset)

    def store_constant(self, base: int, offset: int, value: int, size: int = 8) -> None:
        """Store a constant of 31 bits in 4 or 8 bytes."""
        self._add(_ST_DW if size == 8 else _ST_W, base, 0, offset, value)

    def load_map(self, target: int, map_fd: int) -> None:
        """Set a register to a map."""
        self._add(_LD_IMM64, target, _PSEUDO_MAP_FD, 0, map_fd)
        self._add(0)

    def call(self, function: int) -> None:
        """Call a function of the kernel."""
        self._add(_CALL, k=function)

    def go(self, label: str) -> None:
        """Jump to a label."""
        self.jump(_JA, 0, 0, label)

    def jump(self, opcode: int, left: int, right: int, label: str) -> None:
        """Jump to a label; ``right`` is a constant or a register, as the opcode says."""
        self._jumps.append((len(self._code), label))
        if opcode == JLT_X:
            self._add(opcode, left, right)
        else:
            self._add(opcode, left, k=right)

    def label(self, name: str) -> None:
        """Make the next instruction the target of jumps."""
        self._labels[name] = len(self._code)

    def exit(self) -> None:
        """Return 0."""
        self.set(0, 0)
        self._add(_EXIT)

    def code(self) -> bytes:
        """Return the program."""
        code = list(self._code)
        for at, label in self._jumps:
            opcode, registers, _, value = _INSTRUCTION.unpack(code[at])
            distance = self._labels[label] - at - 1
            code[at] = _INSTRUCTION.pack(opcode, registers, distance, value)
        return b"".join(code)


def create_map(kind: int, key: int, value: int, entries: int) -> int:
    """Return the descriptor of a new map; ``key`` and ``value`` are their sizes in bytes."""
    return _bpf(_MAP_CREATE, struct.pack("=IIIII", kind, key, value, entries, 0))


class Slot:
    """Memory for the key and value of one map, for calls of one thread at a time."""

    def __init__(self, map_fd: int, key: int, value: int) -> None:
        self._key = bytearray(key)
        self._value = bytearray(value)
        # These pin the arrays: a bytearray keeps its address while it is exported.
        self._held = [
            (ctypes.c_char * len(each)).from_buffer(each) for each in (self._key, self._value)
        ]
        addresses = [ctypes.addressof(each) for each in self._held]
        self._entry = struct.pack("=IIQQQ", map_fd, 0, *addresses, 0)
        self._only_key = struct.pack("=IIQ", map_fd, 0, addresses[0])

    def put(self, key: bytes, value: bytes) -> None:
        """Add or replace an entry."""
        self._key[:] = key
        self._value[:] = value
        _bpf(_MAP_UPDATE, self._entry)

    def remove(self, key: bytes) -> None:
        """Remove an entry, if there is one."""
        self._key[:] = key
        with contextlib.suppress(FileNotFoundError):
            _bpf(_MAP_DELETE, self._only_key)


def set_descriptor(map_fd: int, index: int, fd: int) -> None:
    """Put what a descriptor stands for into an array: a ring for a CPU, or a control group."""
    Slot(map_fd, 4, 4).put(struct.pack("=I", index), struct.pack("=I", fd))


def load(code: bytes, tracepoint: int, license_name: bytes, name: bytes) -> int:
    """Return the descriptor of a program for a tracepoint, see `Btf.tracepoint`.

    The error of a program that the kernel refuses has the end of the verifier's log.
    """
    text = ctypes.create_string_buffer(code, len(code))
    terms = ctypes.create_string_buffer(license_name)
    log = ctypes.create_string_buffer(_LOG_BYTES)
    attr = struct.pack(
        "=IIQQIIQII16sII36xI",
        _PROG_TRACING,
        len(code) // _INSTRUCTION.size,
        ctypes.addressof(text),
        ctypes.addressof(terms),
        1,  # the level of the log
        len(log),
        ctypes.addressof(log),
        0,
        0,
        name,
        0,
        _TRACE_RAW_TP,
        tracepoint,
    )
    try:
        return _bpf(_PROG_LOAD, attr)
    except OSError as error:
        lines = log.value.decode(errors="replace").strip().splitlines()
        reason = next((line for line in reversed(lines) if not line.startswith("processed")), "")
        raise OSError(error.errno, f"{error.strerror}: {reason}" if reason else None) from error


def attach(program_fd: int) -> int:
    """Run a program at each event of its tracepoint, until the returned descriptor is closed."""
    return _bpf(_RAW_TRACEPOINT_OPEN, struct.pack("=QI", 0, program_fd))


def _bpf(command: int, attr: bytes) -> int:
    number = _NUMBERS.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"no bpf(2) known for {os.uname().machine}")
    buffer = ctypes.create_string_buffer(attr, max(len(attr), _ATTR_SIZE))
    return syscalls.syscall(number, command, ctypes.addressof(buffer), len(buffer))


# --- types of the kernel --------------------------------------------------------------------------

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
    """The types of the running kernel, with the places of fields in its structures.

    Raises OSError if it has none, ValueError for another format.
    """

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
