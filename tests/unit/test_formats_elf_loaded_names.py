# SPDX-License-Identifier: Apache-2.0
"""Lists of a dynamic linker: that of this process, and lists that a process made up."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

import pytest

from buildidfs.formats.elf import loaded_names
from buildidfs.linux import procfs
from buildidfs.linux.file_ops import closing_fd


class Memory:
    """Memory of a process with made-up lists; 32 or 64 bits."""

    def __init__(self, bits: int = 64) -> None:
        self.word = "<Q" if bits == 64 else "<I"
        self.size = bits // 8
        self.bits = bits
        self.data = bytearray(0x8000)
        wide = bits == 64
        header = "<IIQQQQQQ" if wide else "<IIIIIIII"
        phdr = (6, 0, 0, 0x40, 0, 0, 0, 0) if wide else (6, 0, 0x40, 0, 0, 0, 0, 0)
        dynamic = (2, 0, 0, 0x400, 0, 0, 0, 0) if wide else (2, 0, 0x400, 0, 0, 0, 0, 0)
        base = 0x1000
        self.put(base + 0x40, struct.pack(header, *phdr) + struct.pack(header, *dynamic))
        self.put(base + 0x400, self.words(1, 5, 21, 0x2000, 0, 0))
        self.put(0x2000, self.words(1, 0x3000))
        self.put(0x2800, b"/bin/app\0")
        entries = (3, base + 0x40, 4, 56 if wide else 32, 5, 2, 31, 0x2800, 0, 0)
        self.auxiliary = self.words(*entries)

    def words(self, *values: int) -> bytes:
        return b"".join(struct.pack(self.word, value) for value in values)

    def put(self, at: int, data: bytes) -> None:
        self.data[at : at + len(data)] = data

    def maps(self, *names: bytes, end: int = 0) -> None:
        """Write a list with these names; ``end`` is where the last one leads."""
        for number, name in enumerate(names):
            at = 0x3000 + 0x100 * number
            following = at + 0x100 if number + 1 < len(names) else end
            self.put(at, self.words(0, at + 0x40, 0, following))
            self.put(at + 0x40, name + b"\0")

    def read(self, address: int, size: int) -> bytes:
        if not 0 < address < len(self.data):
            raise OSError
        return bytes(self.data[address : address + size])

    def names(self) -> list[bytes]:
        return loaded_names.names(self.auxiliary, self.read)


@pytest.mark.parametrize("bits", [64, 32])
def test_names_of_made_up_lists(bits: int) -> None:
    memory = Memory(bits)
    memory.maps(b"", b"linux-vdso.so.1", b"/lib/a.so", b"./b.so", b"/lib/a.so", b"/lib/c.so")
    assert memory.names() == [b"/bin/app", b"/lib/a.so", b"/lib/c.so"]


def test_a_list_without_end_is_read_once() -> None:
    memory = Memory()
    memory.maps(b"/lib/a.so", b"/lib/b.so", end=0x3000)
    assert memory.names() == [b"/bin/app", b"/lib/a.so", b"/lib/b.so"]


@pytest.mark.parametrize("end", [1, 0x7FF8, 1 << 63])
def test_a_list_that_leads_nowhere_has_the_names_before(end: int) -> None:
    memory = Memory()
    memory.maps(b"/lib/a.so", end=end)
    assert memory.names() == [b"/bin/app", b"/lib/a.so"]


def test_a_name_without_end_does_not_count() -> None:
    memory = Memory()
    memory.put(0x7000, b"/" * 0x1000)
    memory.auxiliary = memory.auxiliary.replace(memory.words(0x2800), memory.words(0x7000))
    memory.maps(b"/lib/a.so")
    assert memory.names() == [b"/lib/a.so"]


def test_other_vectors_have_no_names() -> None:
    for auxiliary in (b"", bytes(7), bytes(64), os.urandom(128)):
        assert loaded_names.names(auxiliary, Memory().read) == []


def test_our_own_names_are_those_of_the_linker() -> None:
    """Compared with dl_iterate_phdr(3)."""
    found: list[bytes] = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

    def each(info: int, _size: int, _data: int) -> int:
        found.append(ctypes.string_at(ctypes.c_void_p.from_address(info + 8).value or 0))
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(kind(each), None)
    with (
        closing_fd(procfs.open_pid(os.getpid())) as pid_fd,
        closing_fd(procfs.open_memory(pid_fd)) as memory,
    ):
        names = loaded_names.names(
            procfs.auxiliary(pid_fd), lambda at, size: procfs.memory_at(memory, at, size)
        )
    assert set(names) >= {name for name in found if name.startswith(b"/")}
    assert all(Path(os.fsdecode(name)).exists() for name in names)
