# SPDX-License-Identifier: Apache-2.0
"""Processes whose memory map is locked for a long time, perhaps for ever, and on purpose.

Looking up a mapped file, or reading the memory of a process, waits for the lock of its memory map.
A user can hold that lock for ever: mmap(2) of a file with FOPEN_DIRECT_IO on a FUSE filesystem
waits for a page that is being read, and the server of the user does not answer the read. Only
SIGKILL to the waiting thread's process ends the wait. See docs/kernel-facts.md.

`SilentProcesses` remembers the processes that a thread waits for at present, so the wait itself
shows that the process still does not answer. `ProcessGate` asks questions about processes in a
thread that can be given up; the catcher has its own threads, see `capture.live.grabber`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from buildidfs.capture.origin import builder
from buildidfs.capture.unresponsive.filesystems import Attempt, about_own
from buildidfs.formats.container import cgroup
from buildidfs.linux import procfs, threads
from buildidfs.linux.file_ops import closing_fd
from buildidfs.names import printable
from buildidfs.shares import of_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ANSWER_S: Final = 0.2
"""Seconds that a process may take for an answer."""

STUCK_S: Final = 1.0
"""Seconds after which a waiting thread is reported."""

MOST_OF_AN_OWNER: Final = 3
"""The number of silent processes of one owner for each of which a thread waits `ANSWER_S`."""

MOST: Final = 64
"""The number of threads that may wait for silent processes."""

REMEDY: Final = "end them, or the server of the filesystem that they wait for"
"""The remedy for processes that do not answer."""

_BUSY_S: Final = 5.0
_CHECK_S: Final = 0.02
"""Seconds after which a thread that the kernel holds is looked at a second time."""
_SHORT_S: Final = ANSWER_S / 10
_MOST_SHORT: Final = 16
_NAMED: Final = 12
_MOST_UNASKED: Final = 512

SLOW_S: Final = 0.02
"""Seconds after which an answer counts as slow."""

MOST_DEBT_S: Final = 1.0
"""Seconds of slow answers after which no process of their owner is asked."""

_PAYS: Final = 0.1  # the part of the time by which debts shrink
_MOST_DEBTORS: Final = 256
_REASON: Final = "it does not answer: its memory map is locked"

_T = TypeVar("_T")


class SilentProcess(msgspec.Struct, frozen=True, array_like=True):
    """A process that does not answer; ``start`` is its start time in clock ticks, ``comm`` its
    name, ``since`` the monotonic time since which a thread waits for it.
    """

    pid: int
    start: int
    comm: bytes
    since: float


def owner_of(pid_fd: int) -> str:
    """Return `Share.owner` of a process, empty for root of the host. Waits for no process.

    Raises OSError.
    """
    path = cgroup.path(procfs.cgroup(pid_fd))
    user_namespace = os.stat(b"ns/user", dir_fd=pid_fd).st_ino
    maker = builder.owner(pid_fd, user_namespace, path)
    if not maker and (outer := cgroup.outermost(path)):
        return outer.decode("utf-8", "surrogateescape")
    return of_user(maker or procfs.uids(pid_fd)[0]).owner


class NoAnswer(TimeoutError):
    """A process does not answer."""

    def __init__(self, reason: str = _REASON) -> None:
        super().__init__(errno.ETIMEDOUT, reason)


class SilentProcesses:
    """The processes that threads wait for now. Thread-safe.

    A table, not a memory: an entry ends with the wait of its thread. So no entry has to expire, and
    none can displace another. The processes that are not asked because of these are for reports
    only. An owner whose processes answer slowly, again and again, has a debt.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: dict[object, tuple[SilentProcess, str]] = {}
        self._unasked: set[int] = set()
        self._debts: dict[str, tuple[float, float]] = {}  # seconds, and the time of that debt

    @property
    def is_calm(self) -> bool:
        """Return True if every process may be asked."""
        return not self._waits and not self._debts

    def charge(self, pid_fd: int, seconds: float) -> None:
        """Add a slow answer to the debt of the owner of a process, unless that is root of the host.
        Does not raise.
        """
        owner = ""
        with contextlib.suppress(OSError):  # it is gone
            owner = owner_of(pid_fd)
        if not owner:
            return
        now = time.monotonic()
        with self._lock:
            self._pay(now)
            if owner in self._debts or len(self._debts) < _MOST_DEBTORS:
                self._debts[owner] = self._debts.get(owner, (0.0, now))[0] + seconds, now

    def _pay(self, now: float) -> None:
        """Let all debts shrink with time."""
        left = {
            owner: (debt - (now - since) * _PAYS, now)
            for owner, (debt, since) in self._debts.items()
        }
        self._debts = {owner: row for owner, row in left.items() if row[0] > 0}

    def _is_in_debt(self, owner: str) -> bool:
        with self._lock:
            self._pay(time.monotonic())
            return self._debts.get(owner, (0.0, 0.0))[0] > MOST_DEBT_S

    def __len__(self) -> int:
        return len(self._waits)

    def add(self, wait: object, pid: int, since: float) -> None:
        """Remember that a thread waits for a process since a time; ``wait`` is a key."""
        start, comm, owner = 0, b"", ""
        with contextlib.suppress(OSError), closing_fd(procfs.open_pid(pid)) as pid_fd:
            start, comm = procfs.start_ticks(pid_fd), procfs.comm(pid_fd)
            owner = owner_of(pid_fd)
        with self._lock:
            self._waits[wait] = SilentProcess(pid, start, comm, since), owner

    def remove(self, wait: object) -> None:
        """Forget a wait that has ended."""
        with self._lock:
            self._waits.pop(wait, None)

    def others(self, pid_fd: int, pid: int) -> int:
        """Return the number of silent processes of the owner of a process; more than any limit if
        the owner has too many slow ones.

        Raises NoAnswer if the process itself is silent, OSError if it is gone.
        """
        with self._lock:
            waits = list(self._waits.values())
        if any(each.pid == pid for each, _ in waits):
            start = procfs.start_ticks(pid_fd)
            if any(each.pid == pid and each.start in (start, 0) for each, _ in waits):
                raise NoAnswer
        owner = owner_of(pid_fd)
        if not owner:
            return 0
        silent = sum(its_owner == owner for _, its_owner in waits)
        return MOST if self._is_in_debt(owner) else silent

    def add_unasked(self, pid: int) -> None:
        """Remember that a process is not asked, because others of its owner are silent."""
        with self._lock:
            if len(self._unasked) < _MOST_UNASKED:
                self._unasked.add(pid)

    def unasked(self) -> tuple[int, ...]:
        """Return the living processes that were not asked while others were silent."""
        with self._lock:
            silent = {each.pid for each, _ in self._waits.values()}
            every = set(self._unasked)
        others = set[int]() if self.is_calm else every - silent
        alive = {pid for pid in others if os.path.exists(b"/proc/%d" % pid)}
        with self._lock:
            self._unasked -= every - alive
        return tuple(sorted(alive))

    def rows(self, seconds: float = 0.0) -> tuple[SilentProcess, ...]:
        """Return the processes that a thread has waited for that long, each once."""
        before = time.monotonic() - seconds
        with self._lock:
            waits = list(self._waits.values())
        return tuple({(e.pid, e.start): e for e, _ in waits if e.since <= before}.values())


def described(silent: Iterable[SilentProcess], unasked: Iterable[int] = ()) -> str:
    """Return a clause that names silent processes, and counts the ``unasked`` ones of the same
    owners; empty if none is silent.
    """
    every = sorted({(each.pid, printable(each.comm)) for each in silent})
    if not every:
        return ""
    named = ", ".join(f"{pid} ({comm})" for pid, comm in every[:_NAMED])
    others = len(set(unasked) - {pid for pid, _ in every})
    rest = len(every) - _NAMED
    more = f" and {rest} more" if rest > 0 else ""
    more += f"; {others} more of the same owner not asked" if others else ""
    noun = "process does" if len(every) == 1 else "processes do"
    return f"{len(every)} {noun} not answer, and their files may be missed: {named}{more}"


class ProcessGate:
    """Asks questions that may wait for the lock of a process, each for at most ``seconds``.

    A thread that gets no answer is given up. The next processes of the same owner get less time,
    and none once many do not answer. While `MOST` threads wait, no other process of such an owner
    is asked. Thread-safe.
    """

    def __init__(self, seconds: float = ANSWER_S) -> None:
        self.silent = SilentProcesses()
        self._seconds = seconds
        self._idle: list[_Worker] = []
        weakref.finalize(self, _end, self._idle)

    def ask(
        self,
        pid_fd: int,
        pid: int,
        question: Callable[[int], _T],
        discard: Callable[[_T], None] = lambda answer: None,
    ) -> _T:
        """Return ``question(fd)``, where ``fd`` is a descriptor of the process for the thread that
        asks; raise its exception. ``discard`` gets an answer that comes too late.

        Raises NoAnswer if the process does not answer.
        """
        seconds = self._seconds if self.silent.is_calm else self._patience(pid_fd, pid)
        attempt: Attempt[_T] = Attempt(
            about_own(pid_fd, question), discard, lambda: self.silent.remove(attempt)
        )
        since = time.monotonic()
        try:
            worker = self._idle.pop()  # another thread may take the last one
        except IndexError:
            worker = _Worker()
        worker.todo.put(attempt.run)
        first = min(seconds, SLOW_S)
        is_slow = not attempt.finished(first) and threads.is_held(worker.thread)
        was_held = False
        while not attempt.finished(_CHECK_S if was_held else seconds - first):
            # On a busy host the thread may only lack a CPU, or a page of memory for a moment, which
            # is not the fault of the process.
            is_held = threads.is_held(worker.thread)
            if (is_held and was_held) or time.monotonic() - since > _BUSY_S:
                break
            was_held = is_held
        else:
            self._idle.append(worker)
            if is_slow:
                self.silent.charge(pid_fd, time.monotonic() - since)
            return attempt.result()
        self.silent.charge(pid_fd, time.monotonic() - since)
        worker.todo.put(None)  # the thread ends when its wait does
        self.silent.add(attempt, pid, since)
        if attempt.abandon():
            raise NoAnswer
        self.silent.remove(attempt)
        return attempt.result()

    def _patience(self, pid_fd: int, pid: int) -> float:
        """Return the time for an answer while processes are silent. Raises OSError."""
        others = self.silent.others(pid_fd, pid)
        if others >= _MOST_SHORT or (others and len(self.silent) >= MOST):
            self.silent.add_unasked(pid)
            raise NoAnswer("not examined: too many processes of its owner do not answer, or slowly")
        return self._seconds if others < MOST_OF_AN_OWNER else min(_SHORT_S, self._seconds)


class _Worker:
    """A thread, by its native ID, and the queue of its work; None ends it."""

    def __init__(self) -> None:
        self.todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._work, daemon=True, name="buildidfs-look")
        thread.start()
        self.thread = thread.native_id or 0

    def _work(self) -> None:
        while (work := self.todo.get()) is not None:
            work()
            del work  # it refers to the gate, which ends this thread when it is collected


def _end(idle: list[_Worker]) -> None:
    for worker in idle:
        worker.todo.put(None)
