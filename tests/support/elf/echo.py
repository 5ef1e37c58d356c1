# SPDX-License-Identifier: Apache-2.0
"""A program of a few lines with a build ID of its own, that answers what it is asked.

It runs under `tests.support.harness.children.running` like ``cat`` does, and can be built so that
each test, or each container of a test, has another one.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from tests.support.clients.tools import Argument, run, tool
from tests.support.elf.programs import build_id_of

_SOURCE = """
#include <unistd.h>
const char token[] = TOKEN;
int main(void)
{
    char text[256];
    long size;
    while ((size = read(0, text, sizeof text)) > 0)
        if (write(1, text, size) != size)
            return 1;
    return 0;
}
"""


def build(path: Path, *flags: str, token: str | None = None) -> str:
    """Compile it to ``path``, statically, so that it runs in an empty root; gives its build ID."""
    source = path.with_suffix(".c")
    source.write_text(_SOURCE)
    define = f'-DTOKEN="{token or uuid.uuid4().hex}"'
    _compile("-static", define, *flags, "-o", path, source)
    source.unlink()
    return build_id_of(path)


def build_library(path: Path, *flags: str, size: int = 0) -> str:
    """Compile a shared library for LD_PRELOAD, with so many random bytes; gives its build ID."""
    source, data = path.with_suffix(".c"), path.with_suffix(".data")
    data.write_bytes(os.urandom(size))
    source.write_text(
        f'const char library_token[] = "{uuid.uuid4().hex}";\n'
        f'__asm__(".section .rodata\\n.incbin \\"{data}\\"\\n.text");\n'
    )
    _compile("-shared", "-fPIC", *flags, "-o", path, source)
    source.unlink()
    data.unlink()
    return build_id_of(path)


def _compile(*arguments: Argument) -> None:
    run([tool("gcc"), "-Wl,--build-id", *arguments], check=True)
