# SPDX-License-Identifier: Apache-2.0
"""Kernels and modules to order, so that none has to be installed where the tests run."""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

import zstandard

from tests.support.clients.tools import run, tool

KERNEL_START: Final = 0xFFFFFFFF81000000
"""Where x86-64 kernels are linked to."""

_SETUP_BYTES: Final = 0x250

_MODULE: Final = """\
volatile int sink;
const char token[] = "TOKEN";
__attribute__((noinline)) static int dummy_hot(int rounds)
{
    for (int i = 0; i < rounds; i++)
        sink += i ^ token[0];
    return sink;
}
int init_module(void)
{
    return dummy_hot(3) + 1;
}
char module_info[64] __attribute__((section(".modinfo"))) = "name=snd_dummy";
char this_module[64] __attribute__((section(".gnu.linkonce.this_module"))) = "snd_dummy";
"""
_VMLINUX: Final = """\
        .text
        .globl _text, _stext, whole_kernel
        .type whole_kernel, @function
_text:
_stext:
        .skip 64
whole_kernel:
        .skip {size} - 64
        .size whole_kernel, . - whole_kernel
"""

PACKERS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "xz": lambda data: lzma.compress(data, check=lzma.CHECK_CRC32),
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "bzip2": bz2.compress,
    "zstd": zstandard.compress,
    "lz4": lambda data: _with_lz4(data),
}
"""What the kernel's Makefile compresses a vmlinux with, as far as it can be read here."""


def _with_lz4(data: bytes) -> bytes:
    """What lz4(1) makes of it with the options that the kernel's Makefile gives: -l -9."""
    argv = [tool("lz4"), "-l", "-9", "-c", "-"]
    return subprocess.run(argv, input=data, stdout=subprocess.PIPE, check=True).stdout


def packed_vmlinux(vmlinux: bytes, packer: str) -> bytes:
    """The payload that scripts/Makefile.lib makes: all but gzip have the size behind it."""
    data = PACKERS[packer](vmlinux)
    return data if packer == "gzip" else data + struct.pack("<I", len(vmlinux))


def bzimage_file(payload: bytes, *, sectors: int = 27, offset: int = 16) -> bytes:
    """A bzImage around a payload; Documentation/arch/x86/boot.rst."""
    setup = bytearray(max(_SETUP_BYTES, (1 + sectors) * 512))
    setup[0:2] = b"MZ"
    setup[0x1F1] = sectors
    setup[0x1FE:0x200] = b"\x55\xaa"
    setup[0x202:0x208] = b"HdrS" + struct.pack("<H", 0x020F)
    setup[0x248:0x250] = struct.pack("<II", offset, len(payload))
    return bytes(setup) + bytes(offset) + payload + b"the rest of the kernel"


def module(directory: Path, name: str = "snd-dummy") -> Path:
    """A module, stripped of debug information, whose code begins with a function ``dummy_hot``."""
    directory.mkdir(parents=True, exist_ok=True)
    source = directory / "module.c"
    source.write_text(_MODULE.replace("TOKEN", uuid.uuid4().hex))
    made, built = directory / "module.o", directory / f"{name}.ko"
    run([tool("gcc"), "-O1", "-c", "-fno-pic", "-mcmodel=kernel", source, "-o", made], check=True)
    run([tool("ld"), "-r", "--build-id=sha1", made, "-o", built], check=True)
    return built


def vmlinux(directory: Path, build_id: str, size: int) -> Path:
    """A kernel of so many bytes of code, which are all one function ``whole_kernel``."""
    directory.mkdir(parents=True, exist_ok=True)
    source, built = directory / "vmlinux.S", directory / "vmlinux"
    source.write_text(_VMLINUX.format(size=size))
    linked = [f"-Wl,--build-id=0x{build_id}", f"-Wl,-Ttext={KERNEL_START:#x}", "-Wl,-e,_text"]
    run([tool("gcc"), "-nostdlib", "-static", "-no-pie", source, "-o", built, *linked], check=True)
    return built


def unified_file(kernel: bytes, name: bytes = b".linux") -> bytes:
    """A PE file with these sections, of which the sizes in the file are rounded up."""
    sections = ((b".osrel", b"ID=test\n"), (name, kernel), (b".initrd", b"initrd"))
    table, contents, at = b"", b"", 0x400
    for each, data in sections:
        padded = data + bytes(-len(data) % 512)
        table += struct.pack("<8sIIII16x", each, len(data), 0x1000, len(padded), at)
        contents += padded
        at += len(padded)
    coff = b"PE\0\0" + struct.pack("<HHIIIHH", 0x8664, len(sections), 0, 0, 0, 0xF0, 0x22)
    head = b"MZ" + bytes(0x3A) + struct.pack("<I", 0x80) + bytes(0x40)
    return (head + coff + bytes(0xF0) + table).ljust(0x400, b"\0") + contents
