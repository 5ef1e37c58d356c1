# SPDX-License-Identifier: Apache-2.0
"""A program that has mapped, executable, every file of a directory: whatever is in them.

It is linked statically, so that it runs in an empty root, and then answers as
`tests.support.harness.children.running` wants it to.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.clients.tools import run, tool

_SOURCE = """
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
static int map_all(const char *name)
{
    struct dirent *entry;
    DIR *directory = opendir(name);
    if (!directory)
        return 1;
    while ((entry = readdir(directory))) {
        struct stat status;
        int fd = openat(dirfd(directory), entry->d_name, O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
        if (fd < 0)
            continue;
        if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size
            && mmap(0, status.st_size, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0) == MAP_FAILED)
            return 1;
        close(fd);
    }
    return closedir(directory);
}
int main(int argc, char **argv)
{
    char text[256];
    long size;
    for (int number = 1; number < argc; number++)
        if (map_all(argv[number]))
            return 1;
    while ((size = read(0, text, sizeof text)) > 0)
        if (write(1, text, size) != size)
            return 1;
    return 0;
}
"""


def build(path: Path) -> None:
    """Compile it to ``path``; its arguments are the directories."""
    source = path.with_suffix(".c")
    source.write_text(_SOURCE)
    run([tool("gcc"), "-static", "-O1", "-Wall", "-Werror", "-o", path, source], check=True)
    source.unlink()
