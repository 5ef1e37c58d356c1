# SPDX-License-Identifier: Apache-2.0
"""Programs that a tool has rewritten after the link: the build ID stays, offsets may change.

The program spends its time in ``really_hot``, which has a hundred other functions on either side.
"""

from __future__ import annotations

import secrets
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tests.support.clients.tools import run, tool

HOT: Final = "really_hot"

_SOURCE: Final = """
#include <stdlib.h>
volatile unsigned long sink;
#define F(n) __attribute__((noinline,noclone)) void n##_filler(void) \\
    { for (int i = 0; i < 3; i++) { sink += i * __LINE__; sink ^= sink << 3; sink += 11; } }
#define G(n) F(n##0) F(n##1) F(n##2) F(n##3) F(n##4) F(n##5) F(n##6) F(n##7) F(n##8) F(n##9)
#define H(n) G(n##0) G(n##1) G(n##2) G(n##3) G(n##4) G(n##5) G(n##6) G(n##7) G(n##8) G(n##9)
H(a)
__attribute__((noinline)) void really_hot(unsigned long n)
{ for (unsigned long i = 0; i < n; i++) sink += i; }
H(b)
int main(int count, char **words)
{ really_hot(count > 1 ? strtoul(words[1], 0, 10) : 1000000000UL); return 0; }
"""
_PT_LOAD: Final = 1
_LONG: Final = "/a/path/" + "that/is/so/long/that/it/fits/nowhere/" * 4

Rewrite = Callable[[Path, Path], None]
"""Writes the second file from the first."""


def build(directory: Path, *options: str, build_id: str = "") -> Path:
    """The program, linked with these options, with a build ID of its own unless it is given."""
    source, made = directory / "hot.c", directory / f"linked-{secrets.token_hex(4)}"
    source.write_text(_SOURCE)
    wanted = f"-Wl,--build-id=0x{build_id or secrets.token_hex(20)}"
    run([tool("gcc"), "-O1", *options, wanted, source, "-o", made], check=True)
    return made


def patchelf(*options: str) -> Rewrite:
    def rewrite(old: Path, new: Path) -> None:
        run([tool("patchelf"), *options, "--output", new, old], check=True)

    return rewrite


def objcopy(*options: str) -> Rewrite:
    def rewrite(old: Path, new: Path) -> None:
        run([tool("objcopy"), *options, old, new], check=True)

    return rewrite


def with_section(old: Path, new: Path) -> None:
    """objcopy --add-section: behind all that is loaded."""
    content = new.with_suffix(".note")
    content.write_bytes(b"added" * 1000)
    objcopy("--add-section", f".added={content}")(old, new)


def moved_in_file(pages: int) -> Rewrite:
    """All but the ELF header and program headers lies so many pages further back in the file."""

    def rewrite(old: Path, new: Path) -> None:
        data, shift = bytearray(old.read_bytes()), pages * 4096
        phoff, shoff = struct.unpack_from("<QQ", data, 32)
        phnum, _, shnum = struct.unpack_from("<HHH", data, 56)
        for number in range(phnum):
            at = phoff + 56 * number
            kind, _, offset = struct.unpack_from("<IIQ", data, at)
            if kind == _PT_LOAD and offset == 0:  # keeps the headers, and so its place
                continue
            first = struct.unpack_from("<Q", data, at + 48)[0]
            assert kind != _PT_LOAD or first <= 4096, "pages of the file stay aligned"
            if not _in_first(data, phoff, phnum, offset):
                struct.pack_into("<Q", data, at + 8, offset + shift)
        for number in range(shnum):
            at = shoff + 64 * number
            (offset,) = struct.unpack_from("<Q", data, at + 24)
            if not _in_first(data, phoff, phnum, offset):
                struct.pack_into("<Q", data, at + 24, offset + shift)
        struct.pack_into("<Q", data, 40, shoff + shift)
        end = _end_of_first(data, phoff, phnum)
        new.write_bytes(bytes(data[:end]) + bytes(shift) + bytes(data[end:]))
        shutil.copymode(old, new)

    return rewrite


def _end_of_first(data: bytes | bytearray, phoff: int, phnum: int) -> int:
    for number in range(phnum):
        kind, _, offset = struct.unpack_from("<IIQ", data, phoff + 56 * number)
        if kind == _PT_LOAD and offset == 0:
            size: int = struct.unpack_from("<Q", data, phoff + 56 * number + 32)[0]
            return -(-size // 4096) * 4096
    raise AssertionError("the first segment has the headers")


def _in_first(data: bytes | bytearray, phoff: int, phnum: int, offset: int) -> bool:
    return offset < _end_of_first(data, phoff, phnum)


def pair(directory: Path, links: Sequence[str], rewrite: Rewrite) -> tuple[Path, Path]:
    """A program and what a tool has made of it."""
    old = build(directory, *links)
    new = directory / f"rewritten-{secrets.token_hex(4)}"
    rewrite(old, new)
    return old, new


LONGER: Final = ("--set-rpath", _LONG)
