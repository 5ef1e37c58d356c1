# SPDX-License-Identifier: Apache-2.0
"""Names of files that are swapped all the time, by a process that does nothing else.

It swaps a hundred times as often as a thread of the test would, which shares its interpreter with
what is tested and runs only while that lets it.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.clients.tools import run, tool
from tests.support.harness.waiting import lines

_SOURCE = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(int argc, char **argv)
{
    struct pollfd end = { .fd = 0, .events = POLLIN };
    unsigned long rounds = 0;
    for (; poll(&end, 1, 0) == 0; rounds++) {
        for (int at = 1; at + 1 < argc; at += 2) {
            if (syscall(SYS_renameat2, AT_FDCWD, argv[at], AT_FDCWD, argv[at + 1], 2)) {
                perror(argv[at]);
                return 1;
            }
        }
        if (rounds == 0) {
            puts("up");
            fflush(stdout);
        }
    }
    printf("%lu\\n", rounds);
    return 0;
}
"""


class Swapper:
    """The program, compiled in a directory."""

    def __init__(self, directory: Path) -> None:
        self._program, source = directory / "swapper", directory / "swapper.c"
        source.write_text(_SOURCE)
        run([tool("gcc"), "-O1", "-Wall", "-Werror", "-o", self._program, source], check=True)

    @contextlib.contextmanager
    def swapping(self, pairs: Sequence[tuple[Path, Path]]) -> Iterator[list[int]]:
        """Swap the names of each pair, in order, again and again until the block ends.

        Yields a list that gets the number of rounds at the end.
        """
        rounds: list[int] = []
        argv = [self._program, *(name for pair in pairs for name in pair)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                assert lines(process.stdout, lambda got: bool(got)) == ["up"]
                yield rounds
                process.stdin.close()
                rounds.append(int(process.stdout.read()))
                assert process.wait(30) == 0
            finally:
                process.kill()
