# SPDX-License-Identifier: Apache-2.0
"""A catcher at work, what it sends, and programs that know where they are."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from buildidfs.capture.live.protocol import Caught, Message
from buildidfs.watch.catcher_client import Watcher
from tests.support.clients.tools import Argument, run, tool
from tests.support.harness.waiting import lines, until
from tests.support.harness.watching import followed

# Says which mount namespace it is in, by the number that is never reused, and by that which is;
# then does what its arguments say, one after the other.
_PROGRAM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
static void here(void)
{
    unsigned long long id = 0;
    struct stat status = { 0 };
    int fd = open("/proc/thread-self/ns/mnt", O_RDONLY | O_CLOEXEC);
    fstat(fd, &status);
    ioctl(fd, 0x8008b705, &id);
    close(fd);
    printf("%llu %llu\n", id, (unsigned long long)status.st_ino);
    fflush(stdout);
}
static int step(const char *word)
{
    char byte;
    if (strcmp(word, "wait") == 0)
        return read(0, &byte, 1) != 1;
    if (strcmp(word, "unshare") == 0)
        return unshare(CLONE_NEWNS) != 0;
    if (strncmp(word, "map=", 4) == 0)
        return mmap(0, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, atoi(word + 4), 0) == MAP_FAILED;
    if (strncmp(word, "name=", 5) == 0)
        return pthread_setname_np(pthread_self(), word + 5);
    if (strcmp(word, "here") == 0)
        here();
    else if (dlopen(word, RTLD_NOW) == NULL)
        return 1;
    return 0;
}
static int steps(char **words)
{
    for (; *words; words++)
        if (step(*words))
            return 1;
    return 0;
}
static void *thread(void *words)
{
    pthread_join(*(pthread_t *)((char **)words)[-1], NULL);
    _exit(steps(words));
}
int main(int argc, char **argv)
{
    pthread_t other, self = pthread_self();
    if (argc > 1 && strcmp(argv[1], "leaderless") == 0) {
        argv[1] = (char *)&self;
        pthread_create(&other, NULL, thread, argv + 2);
        pthread_exit(NULL);
    }
    if (argc == 1)
        here();
    return steps(argv + 1);
}
"""


class Program:
    """``probe`` and ``libprobe.so``, compiled in a directory; each has a build ID.

    ``probe`` takes words: ``here`` prints "ID INODE" of its mount namespace (so does no word at
    all), ``wait`` waits for a byte, ``unshare`` makes a mount namespace, ``map=N`` maps what is
    open as N, ``name=N`` names the thread, ``leaderless`` in front has a thread do the rest after
    the first one is gone, and anything else is a library to load.
    """

    def __init__(self, directory: Path) -> None:
        self.exe, self.lib = directory / "probe", directory / "libprobe.so"
        source, library = directory / "probe.c", directory / "libprobe.c"
        source.write_text(_PROGRAM)
        library.write_text("int probe(void) { return 1; }\n")
        build_id = "-Wl,--build-id=0x"
        run([tool("gcc"), "-O1", "-pthread", f"{build_id}{os.urandom(20).hex()}", "-o", self.exe,
             source, "-ldl"], check=True)  # fmt: skip
        run([tool("gcc"), "-shared", "-fPIC", f"{build_id}{os.urandom(20).hex()}", "-o", self.lib,
             library], check=True)  # fmt: skip

    def place(self, path: Path) -> Path:
        """A copy of ``probe`` at ``path``."""
        path.write_bytes(self.exe.read_bytes())
        path.chmod(0o755)
        return path


@contextlib.contextmanager
def started(argv: Sequence[Argument]) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``probe`` until the block ends, which begins when it has printed a line."""
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            lines(child.stdout, lambda got: len(got) == 1)
            yield child
        finally:
            child.kill()


class Held:
    """A file that was caught, and its descriptor as long as the catches live, or -1."""

    def __init__(self, caught: Caught, fd: int) -> None:
        self.caught = caught
        self.fd = fd

    @property
    def data(self) -> bytes:
        """All bytes of it."""
        return Path(f"/proc/self/fd/{self.fd}").read_bytes()


class Catches:
    """What a catcher sends, from the moment it is ready; a context manager.

    ``gate`` is set; a test that clears it has nothing received until it is set again.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.ended: list[str] = []
        self._lock = threading.Lock()
        self._held: list[Held] = []
        self._others: list[Message] = []
        with contextlib.ExitStack() as stack:
            group = stack.enter_context(followed())
            cgroup = "" if group is None else os.fspath(group)
            self.watcher = Watcher(self._receive, self.ended.append, cgroup)
            self.ready = self.watcher.start()
            self._followed = stack.pop_all()

    def __enter__(self) -> Catches:
        return self

    def __exit__(self, *exception: object) -> None:
        self.gate.set()
        self.watcher.close()
        self._followed.close()
        self.drop()

    def drop(self) -> None:
        """Close and forget everything so far."""
        with self._lock:
            for held in self._held:
                if held.fd >= 0:
                    os.close(held.fd)
            self._held.clear()
            self._others.clear()

    def of(self, path: str | bytes | os.PathLike[str]) -> list[Held]:
        """What was caught with that path."""
        wanted = os.fsencode(path)
        with self._lock:
            return [held for held in self._held if held.caught.path == wanted]

    def below(self, path: Path) -> list[Held]:
        """What was caught with paths below one."""
        begin = os.fsencode(path) + b"/"
        with self._lock:
            return [held for held in self._held if held.caught.path.startswith(begin)]

    def others(self, kind: type[Message]) -> list[Message]:
        """Messages of another kind."""
        with self._lock:
            return [message for message in self._others if isinstance(message, kind)]

    def wait(self, path: str | bytes | os.PathLike[str], count: int = 1) -> list[Held]:
        """What was caught with that path, once it is so many."""
        until(lambda: len(self.of(path)) >= count, f"{count} of {path!r}, has {len(self.of(path))}")
        return self.of(path)

    def one(self, path: str | bytes | os.PathLike[str]) -> Held:
        """The one thing that was caught with that path."""
        (held,) = self.wait(path)
        return held

    def settle(self, marker: Path) -> None:
        """Wait until all is here that was mapped before: ``marker`` is a copy of a program to run,
        which is mapped last.
        """
        copy = marker.with_name(f"{marker.name}-{os.urandom(4).hex()}")
        os.link(marker, copy)
        try:
            run([copy], check=True)
            self.wait(copy)
        finally:
            copy.unlink()

    def _receive(self, message: Message, fd: int) -> None:
        self.gate.wait()
        with self._lock:
            if isinstance(message, Caught):
                self._held.append(Held(message, fd))
            else:
                self._others.append(message)


@contextlib.contextmanager
def stepping(argv: list[Argument], fds: Collection[int] = ()) -> Iterator[Callable[[], str]]:
    """A probe that waits: each call lets it go on, and returns the next line it prints."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, bufsize=0, pass_fds=fds)
    with process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def go_on() -> str:
            stdin.write(b"\n")
            (line,) = lines(stdout, lambda got: len(got) == 1)
            return line

        try:
            yield go_on
        finally:
            process.kill()
