# SPDX-License-Identifier: Apache-2.0
"""Threads of this process: their priority, CPU, name, timer and descriptors, and closing these.

A descriptor may be the last one that keeps a filesystem or a mount namespace alive. Closing it
unmounts the filesystem or destroys the namespace. This takes 0.4 to 4 ms by measurement, as long as
some programs live that the catcher has to catch. If the filesystem is FUSE, the kernel first asks
its server, which may never answer. So `Closer` closes descriptors in threads of its own.

Source: sched(7), prctl(2), timerfd_create(2); Python has a function for the last since 3.13.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import math
import os
import queue
import resource
import struct
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Self

from buildidfs.linux import credentials, syscalls
from buildidfs.linux.file_ops import Fd, closing_fd

if TYPE_CHECKING:
    from collections.abc import Iterable


# Batches that may wait for the delay.
_MOST_DELAYED: Final = 4096
# If closing a file or unmounting takes longer than this, it may take for ever.
_SLOW_CLOSE_S: Final = 2.0
_MOST_CLOSING: Final = 32


class Background(ABC):
    """A thread that works within a ``with`` block. Its work ends soon after `_ending` is set."""

    def __init__(self, name: str) -> None:
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()

    @abstractmethod
    def _run(self) -> None:
        """Work until `_ending` is set."""


class Closer:
    """Closes descriptors in the order given, ``delay`` seconds later. Make it after the last fork.

    The delay usually lets another process close its copy first; it is skipped if thousands of
    descriptors wait. ``urgent`` is for a process whose thread of events has a real-time priority: a
    thread that holds the interpreter lock, even for a moment, must then not wait for a CPU.

    Closing the last descriptor of a filesystem unmounts it, and an unmount may wait for a server
    for ever. So if a descriptor takes seconds, another thread continues, up to a number of threads;
    `is_stuck` is True if all of them wait.
    """

    def __init__(self, *, urgent: bool = False, delay: float = 0.0) -> None:
        self._urgent = urgent
        self._delay = delay
        self._finishing = threading.Event()
        self._queue: queue.SimpleQueue[tuple[float, tuple[int, ...]] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        # The time at which each thread began to close its present descriptor.
        self._busy: dict[int, float] = {}
        self.relieve()

    def close(self, fds: Iterable[int]) -> None:
        """Take over these descriptors; -1 is ignored. A call with many descriptors wakes the thread
        once.
        """
        batch = tuple(fd for fd in fds if fd >= 0)
        if batch:
            self._queue.put((time.monotonic() + self._delay, batch))
            if len(self._busy) == len(self._threads):
                self.relieve()

    def relieve(self) -> None:
        """Start a thread if all threads wait for filesystems. Each `close` also does so."""
        with self._starting:
            if len(self._threads) < _MOST_CLOSING and self._all_wait():
                # Python does not wait for this thread at exit.
                thread = threading.Thread(target=self._run, daemon=True, name="buildidfs-close")
                thread.start()
                self._threads.append(thread)

    def is_stuck(self) -> bool:
        """True if each thread has waited for a filesystem for seconds, and the limit of threads is
        reached.
        """
        return len(self._threads) == _MOST_CLOSING and self._all_wait()

    def finish(self, seconds: float = 1.0) -> bool:
        """Take no more descriptors, and close the others without the delay; return True if all are
        closed within that time.
        """
        self._finishing.set()
        until = time.monotonic() + seconds
        with self._starting:
            threads = self._threads.copy()
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in threads)

    def _all_wait(self) -> bool:
        began = list(self._busy.values())
        return len(began) == len(self._threads) and (
            max(began, default=-math.inf) < time.monotonic() - _SLOW_CLOSE_S
        )

    def _run(self) -> None:
        move_freely()  # a thread that is bound to a CPU may have started this one
        if self._urgent:
            hurry()
        me = threading.get_ident()
        while (item := self._queue.get()) is not None:
            due, batch = item
            if self._delay and self._queue.qsize() < _MOST_DELAYED:
                self._finishing.wait(max(due - time.monotonic(), 0.0))
            for fd in batch:
                self._busy[me] = time.monotonic()
                # A network filesystem may report a failed write on close, but nothing was written
                # here.
                with contextlib.suppress(OSError):
                    os.close(fd)
                del self._busy[me]


def allow_many_descriptors() -> None:
    """Raise the soft limit of open files to the hard limit, if the kernel allows it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The kernel refuses a limit above fs.nr_open, which may have been lowered since.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def collect_rarely() -> None:
    """Keep the garbage collector from scanning all imported modules between two requests.

    Answering makes no cycles, but cached objects (open files, absent names) count as growth, and a
    full collection takes longer than a hundred requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def reserve_descriptors(count: int) -> None:
    """Make room for that many descriptors if the limits allow it; each takes 8 bytes.

    Call this before the first thread starts.

    If the table of descriptors is full, a process with threads waits for an RCU grace period before
    it gets a larger one: 3 to 8 ms by measurement. All its threads that open a file wait meanwhile.
    Source: expand_files() in fs/file.c of the kernel.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with contextlib.suppress(OSError), closing_fd(os.open(b"/", os.O_PATH | os.O_CLOEXEC)) as fd:
        os.close(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, min(count, limit) - 1))


_NICE = -15

# Architectures other than x86 have the numbers of asm-generic/unistd.h.
_SYS_IOPRIO_SET = {"x86_64": 251, "i686": 289, "ppc64le": 273, "s390x": 282}
_SYS_IOPRIO_SET_GENERIC = 30
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_CLASS_IDLE = 3


def hurry(priority: int = 1) -> str | None:
    """Give this thread real-time priority; return what is missing as a clause, None for success.

    SCHED_RR needs CAP_SYS_NICE (or RLIMIT_RTPRIO); if it is refused, a low nice value is tried.
    Children do not inherit it.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
        return None
    except OSError as error:
        refused = f"no real-time scheduling ({error.strerror}{_lacks_nice()})"
    try:
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
    except OSError:
        return f"{refused}, and no better nice value either: what is short-lived may be missed"
    return (
        f"{refused}, runs at nice {_NICE} instead: on a busy host what is short-lived may be missed"
    )


def _lacks_nice() -> str:
    return "" if "CAP_SYS_NICE" in credentials.effective_capabilities() else "; needs CAP_SYS_NICE"


def stay_on(cpu: int) -> None:
    """Bind this thread to a CPU, if it may run there. Threads that it starts are bound, too."""
    if cpu in os.sched_getaffinity(0):
        with contextlib.suppress(OSError):  # the CPU was turned off just now
            os.sched_setaffinity(0, {cpu})


def move_freely() -> None:
    """Let this thread run on all CPUs on which the first thread of this process may run."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))


def stand_back(*, session: bool = False) -> None:
    """Let this thread run and read the disk only if no other wants to, as far as possible.

    With ``session``, this process leads a session of its own. Where the kernel gives each session
    the same part of the processors, only the priority of the session counts.

    Source: ioprio_set(2), for which the C library has no function; sched(7), "The autogroup
    feature".
    """
    if session:
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "wb") as file:
            file.write(b"19")
    number = _SYS_IOPRIO_SET.get(os.uname().machine, _SYS_IOPRIO_SET_GENERIC)
    with contextlib.suppress(OSError):
        syscalls.syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_IDLE << 13)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 19)  # for the thread, on Linux


def is_held(thread: int) -> bool:
    """Return True if a thread of this process, by its native ID, waits in the kernel for a lock, a
    page or a server. A thread that lacks a CPU or the lock of the interpreter does not wait.
    """
    task = b"/proc/self/task/%d/" % thread
    with contextlib.suppress(OSError):
        with open(task + b"stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split(maxsplit=1)[0]
        if state == b"S":  # a request to a FUSE server can be interrupted by a signal at first
            with open(task + b"wchan", "rb") as file:
                return not file.read().startswith((b"futex", b"0"))
        return state == b"D"
    return False


def name_thread(name: bytes) -> None:
    """Set the name that ps and top show for this thread: at most 15 bytes."""
    buffer = ctypes.create_string_buffer(name[:15])
    syscalls.prctl(syscalls.PR_SET_NAME, ctypes.addressof(buffer))


_NS: Final = 1_000_000_000


class Alarm(Fd):
    """A timer of ``seconds``; one thread waits for its end in `wait`.

    The first `set` since the last `wait` starts it. The constructor raises OSError.
    """

    __slots__ = ("_is_set", "_time")

    def __init__(self, seconds: float) -> None:
        fd = syscalls.libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if fd < 0:
            raise syscalls.last_error()
        super().__init__(fd)
        # struct itimerspec: no period; the time to the first expiration.
        whole, rest = divmod(round(seconds * _NS), _NS)
        self._time = ctypes.create_string_buffer(struct.pack("@4l", 0, 0, whole, rest))
        self._is_set = False

    def set(self) -> None:
        """Start the timer, unless it runs; costs two microseconds then, and next to nothing else.

        A thread that sets it after a change can rely on a `wait` that ends after the change.
        """
        if not self._is_set:
            self._is_set = True
            if syscalls.libc.timerfd_settime(self.fd, 0, self._time, None):
                raise syscalls.last_error()

    def wait(self) -> None:
        """Wait until the timer that a thread has set expires."""
        os.read(self.fd, 8)
        self._is_set = False
