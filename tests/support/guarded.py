# SPDX-License-Identifier: Apache-2.0
"""A process that execs wait for, with a guard, in all the ways it can misbehave.

Run as ``python -m tests.support.guarded MODE LIMIT DIRECTORY``. Everybody who runs a program of the
filesystem at DIRECTORY, which must be nobody's but the test's, is asked about. It prints
``guard PID`` and ``child PID``, and at the end ``code N`` with what the guard returned. After ten
seconds everything is killed, so that nobody waits for ever whatever is wrong with the guard.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from buildidfs.capture.guard import Heartbeat, release, run_guarded
from buildidfs.formats.fanotifyevents import EVENT_SIZE, decode
from buildidfs.linux import fanotify
from tests.support.clients import tool
from tests.support.waiting import lines

_SECONDS = 10


class Guarded(NamedTuple):
    """What `guarded` runs: the process of the test's own, the guard and its child."""

    process: subprocess.Popen[bytes]
    guard: int
    child: int

    def code(self) -> int:
        """What the guard returned, once it has; `EOFError` if it was killed instead."""
        assert self.process.stdout is not None
        [line] = lines(self.process.stdout, lambda got: len(got) == 1)
        return int(line.removeprefix("code "))


@contextlib.contextmanager
def guarded(mode: str, directory: Path, limit: float = 0.2) -> Iterator[Guarded]:
    """Run it until the block ends."""
    argv = [sys.executable, "-m", "tests.support.guarded", mode, str(limit), str(directory)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        try:
            guard, child = lines(process.stdout, lambda got: len(got) == 2)
            yield Guarded(process, int(guard.split()[1]), int(child.split()[1]))
        finally:
            process.terminate()


def start_program(directory: Path) -> subprocess.Popen[bytes]:
    """Have another process run ``cat`` there; it ends with 0 once it was allowed to."""
    # Popen itself would wait for the exec.
    return subprocess.Popen([tool("sh"), "-c", '"$0/cat" /dev/null', directory])


def main() -> int:
    """Guard a child that behaves as told."""
    mode, limit, directory = sys.argv[1], float(sys.argv[2]), os.fsencode(sys.argv[3])
    group = fanotify.init(fanotify.CLASS_CONTENT)
    guard = os.fork()
    if guard == 0:
        print("guard", os.getpid(), flush=True)
        os._exit(
            run_guarded(lambda heartbeat: _child(mode, heartbeat, group, directory), limit, group)
        )
    os.close(group)
    pidfd = os.pidfd_open(guard)

    def kill(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill)
    if not select.select([pidfd], [], [], _SECONDS)[0]:
        kill()
    code = os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
    if code >= 0:
        with contextlib.suppress(BrokenPipeError):  # a test that does not want to know
            os.write(1, b"code %d\n" % code)
    return 0


def _child(mode: str, heartbeat: Heartbeat, group: int, directory: bytes) -> int:
    fanotify.mark(group, fanotify.MARK_FILESYSTEM, fanotify.OPEN_EXEC_PERM, directory)
    print("child", os.getpid(), flush=True)
    if mode == "return":
        return 7
    if mode == "raise":
        raise RuntimeError("a fault")
    while True:
        select.select([group], [], [])
        heartbeat.begin()
        for event in decode(fanotify.read(group, EVENT_SIZE)):
            if mode == "spin":
                while True:
                    pass
            if mode == "hold":
                signal.pause()
            if mode == "release":
                release(group, os.getpid())
            else:
                fanotify.respond(group, event.fd, allow=True)
            heartbeat.beat()
            os.close(event.fd)
        heartbeat.end()


if __name__ == "__main__":
    sys.exit(main())
