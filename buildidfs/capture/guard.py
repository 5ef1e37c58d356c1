# SPDX-License-Identifier: Apache-2.0
"""The parent of a process that others wait for: it ends a child that hangs.

Whoever holds a fanotify group with permission events decides when execs of the whole host go on.
If that process is stopped, spins or waits for something, every exec waits with it, for ever: the
kernel only logs (watchdog_timeout, commit b8cf8fda522d, Linux 6.18). When the process is gone and
no descriptor of the group is left, all go on at once. So a parent that does nothing else looks
every few milliseconds whether the child still answers, and kills it if not.

The child tells through a `Heartbeat` in shared memory. It hangs if an exec waits to be read from
the group, or the child is at work on one, and nothing has been answered for a while. Otherwise it
is idle, however long.

That of the child nothing is needed but two words of memory is deliberate: a stopped process, one
in an endless loop (Python or not) and one that waits in the kernel all look the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import mmap
import os
import select
import signal
import time
from typing import TYPE_CHECKING

from buildidfs.formats import fanotifyevents
from buildidfs.linux import fanotify, parents, syscalls

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_HUNG = 75
"""What `run_guarded` returns for a child that had to be killed (sysexits: try again)."""

_TICK_S = 0.05
_PRIORITY = 3  # above the child, which may take SCHED_RR 2
_PATIENCE_AFTER_KILL_S = 0.02
_HELD_UP_TICKS = 3
_HELD_UP_LIMITS = 5

_MCL_CURRENT = 1
_MCL_FUTURE = 2
_MCL_ONFAULT = 4  # commit b0f205c2a308, Linux 4.4

_log = logging.getLogger(__name__)

_mlockall = syscalls.libc.mlockall
_mlockall.argtypes = (ctypes.c_int,)
_mlockall.restype = ctypes.c_int


class Heartbeat:
    """Two words that a process shares with those it forks: is it at work, how much has it done."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._words = memoryview(self._memory).cast("Q")

    def begin(self) -> None:
        """The child may have an unanswered event from now on; to be said before reading any."""
        self._words[1] = 1

    def beat(self) -> None:
        """One event is answered."""
        self._words[0] += 1

    def end(self) -> None:
        """All that was read is answered."""
        self._words[1] = 0

    @property
    def count(self) -> int:
        """How many events were answered."""
        return self._words[0]

    @property
    def busy(self) -> bool:
        """Whether the child may have an unanswered event."""
        return bool(self._words[1])


def run_guarded(child: Callable[[Heartbeat], int], limit_s: float, group: int) -> int:
    """Fork, have the fork call ``child``, end it when it hangs, return its exit code.

    To be called in a process forked for this, with one thread and nothing else to do; from then
    on it ignores SIGINT and what stops processes at a terminal (where the shell could start
    nothing any more), while SIGTERM ends it and with it, whatever happens, the child.
    ``group`` is the fanotify group, made before. This closes it, as the caller's callers must:
    it lives as long as any copy is open. An exec waits for at most ``limit_s`` seconds, give or
    take what the machine needs to run anything at all.

    The result is what ``child`` returned, 128+N if signal N ended it, 1 for an exception,
    `EXIT_HUNG` if it hung. Raises OSError if there can be no fork.
    """
    heartbeat = Heartbeat()
    parent = os.getpid()
    for stopping in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(stopping, signal.SIG_IGN)
    pid = os.fork()
    if pid == 0:
        _run_child(child, heartbeat, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _be_urgent()
    watch = _Watch(pid, heartbeat, group, limit_s)
    try:
        return watch.run()
    finally:
        watch.close()


def _run_child(child: Callable[[Heartbeat], int], heartbeat: Heartbeat, parent: int) -> None:
    """In the fork: never returns, and never outlives the guard."""
    code = 1
    try:
        parents.end_with(parent, signal.SIGKILL)
        code = child(heartbeat)
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else 1
    except BaseException as error:
        # The top of this process: what is above belongs to the one it was forked from.
        _log.error("watching ended: %s: %s", type(error).__name__, error)
    finally:
        with contextlib.suppress(BaseException):
            logging.shutdown()
        os._exit(code)


def _be_urgent() -> None:
    """Run before the child does, and from memory: each of these is left out where refused."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    # ONFAULT: what is never touched takes no memory.
    _mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT)
    gc.disable()


class _Watch:
    def __init__(self, pid: int, heartbeat: Heartbeat, group: int, limit_s: float) -> None:
        self._pid = pid
        self._heartbeat = heartbeat
        self._group = group
        self._limit_s = limit_s
        self._tick_s = min(_TICK_S, limit_s / 4)
        # One tick may pass before the first look.
        self._allowed_s = limit_s - self._tick_s
        self._pidfd = os.pidfd_open(pid)
        self._execs = select.poll()
        self._execs.register(group, select.POLLIN)

    def close(self) -> None:
        os.close(self._pidfd)
        if self._group >= 0:
            os.close(self._group)

    def run(self) -> int:
        """Until the child is gone."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        count = looked = since = first = -1.0
        while not ended.poll(self._tick_s * 1000):
            now = time.monotonic()
            # If we could not run, neither could the child, and it gets its time from now on: a
            # few times, since a machine that is always late must not be a way to hang.
            held_up = now - looked > _HELD_UP_TICKS * self._tick_s
            looked = now
            if not self._heartbeat.busy and not self._execs.poll(0):
                count = -1
            elif count != self._heartbeat.count:
                count, since, first = self._heartbeat.count, now, now
            elif held_up and now - first < _HELD_UP_LIMITS * self._limit_s:
                since = now
            elif now - since >= self._allowed_s:
                return self._end(ended)
        return self._reap()

    def _reap(self) -> int:
        # First of all: nobody answers any more, and our copy is what the others wait for.
        os.close(self._group)
        self._group = -1
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _end(self, ended: select.poll) -> int:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if not ended.poll(_PATIENCE_AFTER_KILL_S * 1000):
            # It waits in the kernel for something that does not come, and so do all those it has
            # not answered. We can do that for it.
            release(self._group, self._pid)
        _log.warning(
            "an exec had waited %.2f s for an answer: the process that watches was ended",
            self._limit_s,
        )
        self._reap()
        return EXIT_HUNG


def release(group: int, holder: int) -> None:
    """Let everybody go on who waits for this group, and ask nobody any more.

    For a group that the process ``holder`` holds and cannot be made to let go of. Does as much as
    the kernel allows.
    """
    with contextlib.suppress(OSError):
        fanotify.flush(group, fanotify.MARK_FILESYSTEM)
    # What the holder has read is answered by the number of its descriptor, which need not be ours.
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{holder}/fd"):
            with contextlib.suppress(OSError):
                fanotify.respond(group, int(name), allow=True)
    # What nobody has read comes with a descriptor for us.
    with contextlib.suppress(OSError):
        while events := fanotifyevents.decode(fanotify.read(group, 16 * fanotifyevents.EVENT_SIZE)):
            for event in events:
                with contextlib.suppress(OSError):
                    fanotify.respond(group, event.fd, allow=True)
                    os.close(event.fd)
