# SPDX-License-Identifier: Apache-2.0
"""Programs whose code runs from other memory than their file: huge pages, packers, emulators."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.clients.tools import Argument, run, tool
from tests.support.harness.waiting import lines

_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
enum { CODE, ALL };
static void move(char *begin, size_t size, int flags)
{
    int rights = (flags & PF_R ? PROT_READ : 0) | (flags & PF_W ? PROT_WRITE : 0)
        | (flags & PF_X ? PROT_EXEC : 0);
    char *copy = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(copy, begin, size);
    mprotect(copy, size, rights);
    mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, begin);
}
static int each(struct dl_phdr_info *info, size_t size, void *what)
{
    (void)size;
    for (int k = 0; k < info->dlpi_phnum; k++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[k];
        if (p->p_type != PT_LOAD || (*(int *)what == CODE && !(p->p_flags & PF_X)))
            continue;
        ElfW(Addr) at = info->dlpi_addr + p->p_vaddr;
        char *begin = (char *)(at & ~4095UL);
        char *end = (char *)((at + p->p_memsz + 4095) & ~4095UL);
        move(begin, end - begin, p->p_flags);
    }
    return 1; /* the program alone */
}
int main(int argc, char **argv)
{
    char byte, *guest = argv[2];
    int what = ALL;
    if (argc > 1 && strcmp(argv[1], "code") == 0)
        dl_iterate_phdr(each, (what = CODE, &what));
    else if (argc > 1 && strcmp(argv[1], "all") == 0)
        dl_iterate_phdr(each, &what);
    else if (argc > 2) {
        mmap(0, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mmap(0, 4096, PROT_READ, MAP_PRIVATE, open(guest, O_RDONLY), 0);
    }
    puts("ready");
    fflush(stdout);
    return read(0, &byte, 1) != 1;
}
"""


def build(path: Path) -> Path:
    """Compile a program that moves its code ("code"), all of itself ("all"), or maps the beginning
    of a file as an emulator does ("guest FILE").
    """
    source = path.with_name(f"{path.name}.c")
    source.write_text(_SOURCE)
    build_id = f"-Wl,--build-id=0x{os.urandom(20).hex()}"
    run([tool("gcc"), "-g", "-O1", build_id, "-o", path, source], check=True)
    return path


@contextlib.contextmanager
def running(*argv: Argument, fd: int = -1) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program until the block ends, which begins when the program is ready; ``fd`` is left
    open.
    """
    pipe, fds = subprocess.PIPE, () if fd < 0 else (fd,)
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, pass_fds=fds) as child:
        try:
            assert child.stdout is not None
            assert lines(child.stdout, lambda got: len(got) == 1) == ["ready"]
            yield child
        finally:
            child.kill()
