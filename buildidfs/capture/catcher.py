# SPDX-License-Identifier: Apache-2.0
"""Catches files in the moment they are mapped.

A process may be gone a fraction of a millisecond after it has mapped its last file, and with it
the mount namespace and the filesystem. So this one does nothing but to look at each mapping and,
if it does not know the file, to open it and hand the descriptor on: one thread that runs before
all others, no store, no waiting for whoever receives. What it opens stays readable whatever
becomes of the container.

It is a process of its own (`catching`), and talks over a socket (`messages`).
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import select
import socket
import stat
import threading
import time
from typing import TYPE_CHECKING, Final

from buildidfs.capture import elsewhere, files, messages, tasks
from buildidfs.capture.closer import Closer
from buildidfs.capture.elsewhere import Elsewhere
from buildidfs.capture.messages import Caught, Counts, Degraded, Lost, Missed, Ready
from buildidfs.capture.met import Met, file_key, place_key
from buildidfs.capture.outbox import Outbox
from buildidfs.capture.rings import Rings
from buildidfs.capture.slow import SlowMounts
from buildidfs.formats.perfrecords import Entered, Exited, Forked, Mapped
from buildidfs.linux import openat2, scheduling, statx, syscalls
from buildidfs.model import BuildId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from buildidfs.capture.strict import Strict
    from buildidfs.capture.tasks import Home
    from buildidfs.formats.perfrecords import Record
    from buildidfs.model import FileIdentity

_log = logging.getLogger(__name__)

_TICK_S: Final = 1.0
_OPEN_FILES: Final = 1024
_WAITING: Final = 8192
_DELETED: Final = b" (deleted)"
_GONE: Final = frozenset((errno.ENOENT, errno.ESRCH))


# A mapping, where its process lives, and an O_PATH descriptor of the file, or why there is none.
_Grip = tuple[Mapped, "Home", int, OSError | None]


class Catcher:
    """Catches files until the other end of ``sock`` is closed; ``strict`` if execs are to wait."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        met: Met | None = None,
        strict: Strict | None = None,
    ) -> None:
        self._socket = sock
        self._strict = strict
        self._epoll = select.epoll()
        self._tasks = tasks.Tasks()
        self._slow = SlowMounts()
        self._elsewhere = Elsewhere()
        self._met = Met() if met is None else met
        self._outbox = Outbox(sock, self._epoll)
        self._calls: dict[int, Callable[[], int]] = {}
        self._degraded: tuple[str, ...] = ()
        self._lookouts: set[select.epoll] = set()
        # The last to close a file may have to unmount its filesystem.
        self._closer = Closer(urgent=True)
        self._done: list[int] = []
        self._lock = threading.Lock()
        self._ended = False
        self._records = self._caught = self._missed = self._unpinned = self._lost = 0
        self._said = Counts()

    def run(self) -> None:
        """Work until nobody listens any more. Raises OSError where events are refused."""
        strict = self._strict
        self._rings = Rings(prompt=strict is not None)
        self._socket.setblocking(False)
        self._epoll.register(self._socket.fileno(), select.EPOLLIN)
        hurry = scheduling.hurry()
        if strict is not None:
            self._calls = strict.filenos()
            for fd in self._calls:
                self._epoll.register(fd, select.EPOLLIN)
            strict.start()
        with self._lock:  # nobody speaks before us
            self._look_out()
            self._degraded = tuple(text for text in (hurry, *self._strict_degraded()) if text)
            self._outbox.put(Ready(self._degraded))
            self._outbox.flush()
        # Nothing below makes cycles; a collection would take longer than a process may live.
        gc.collect()
        gc.freeze()
        gc.disable()
        due = time.monotonic() + _TICK_S
        try:
            while self._turn(max(0.0, due - time.monotonic())):
                if time.monotonic() >= due:
                    with self._lock:
                        self._tick()
                    due = time.monotonic() + _TICK_S
        except BrokenPipeError:
            return
        finally:
            with self._lock:
                self._ended = True
                self._rings.close()
                if strict is not None:
                    strict.close()

    # --- threads ---------------------------------------------------------------------------

    def _look_out(self) -> None:
        """See to it that each CPU has a thread that waits for what happens there."""
        for cpu, poller in self._rings.pollers.items():
            if poller not in self._lookouts:
                self._lookouts.add(poller)
                there = threading.Event()
                arguments = (cpu, poller, there)
                threading.Thread(target=self._watch_cpu, args=arguments, daemon=True).start()
                there.wait()

    def _watch_cpu(self, cpu: int, poller: select.epoll, there: threading.Event) -> None:
        """Deal with all there is whenever something happens on one CPU.

        On that CPU: the process that has mapped a file goes on when it was looked at. A thread
        that runs anywhere may have to wait for a CPU which is in the middle of something else that
        the kernel does not interrupt, for milliseconds, while the process ends on another one.
        """
        scheduling.hurry()
        scheduling.stay_on(cpu)
        there.set()
        while True:
            try:
                poller.poll(_TICK_S)
            except ValueError:  # the CPU was turned off
                self._lookouts.discard(poller)
                return
            try:
                with self._lock:
                    if self._ended:
                        return
                    self._work()
            except BrokenPipeError:
                return  # the other thread sees that, too
            except BaseException:
                # The top of this thread, without which a CPU is not watched: start all over.
                _log.exception("a fault of the catcher")
                os._exit(1)

    def _turn(self, timeout: float) -> bool:
        """Wait for something, and deal with all there is; False at the end."""
        ready = [fd for fd, _ in self._epoll.poll(timeout)]
        with self._lock:
            # Whoever execs waits for us: first of all, and in the order of urgency.
            for fd, call in self._calls.items():
                if fd in ready:
                    call()
            if self._socket.fileno() in ready and not self._listen():
                return False
            self._work()
        return True

    def _work(self) -> None:
        """Deal with all records there are; with the lock held."""
        # As long as nobody takes what we have, the rings are the only place for more.
        if len(self._outbox) < _WAITING:
            records = self._rings.drain()
            self._records += len(records)
            grips: list[_Grip] = []
            ended: list[int] = []
            for record in records:
                self._take(record, grips, ended)
            # All that can vanish is held by now. What it is, and where, can be found out later.
            for grip in grips:
                self._settle(grip)
            if self._strict is not None:
                for pid in ended:
                    self._strict.drop(pid)
        self._outbox.flush()
        self._closer.close(self._done)
        self._done.clear()

    def _tick(self) -> None:
        if self._rings.follow_cpus():
            self._look_out()
            self._outbox.put(Lost(0, "CPUs were turned on or off"))
        if self._strict is not None:
            self._strict.tick()
            self._tell_degraded()
        counts = Counts(self._records, self._caught, self._missed, self._unpinned, self._lost)
        if counts != self._said:
            self._said = counts
            self._outbox.put(counts)

    def _take(self, record: Record, grips: list[_Grip], ended: list[int]) -> None:
        if isinstance(record, Mapped):
            self._grab(record, grips)
        elif isinstance(record, Forked):
            self._tasks.forked(record.pid, record.parent)
        elif isinstance(record, Exited):
            self._tasks.exited(record.pid)
            ended.append(record.pid)
        elif isinstance(record, Entered):
            home = self._tasks.entered(record.pid, record.namespaces)
            if home is not None and self._strict is not None:
                self._strict.namespace_seen(record.pid)
        else:
            self._lost += record.count
            self._tasks.forget()
            self._outbox.put(Lost(record.count, "events came faster than they could be read"))

    # --- one mapping -----------------------------------------------------------------------

    def _grab(self, record: Mapped, grips: list[_Grip]) -> None:
        """Get hold of what was mapped, unless it is known. Nothing here takes long."""
        path = record.path
        if path[:1] != b"/" or path[:2] == b"//":
            return  # [vdso], anonymous memory
        home = self._tasks.last_home(record.pid)
        try:
            try:
                fd = self._open(record, home, record.end)
            except FileNotFoundError:
                end = elsewhere.end_now(record)
                if end in (0, record.end):
                    raise
                fd = self._open(record, home, end)
        except OSError as error:
            grips.append((record, home, -1, error))
        else:
            if fd >= 0:
                grips.append((record, home, fd, None))

    def _open(self, record: Mapped, home: Home, end: int) -> int:
        """An O_PATH descriptor of what is mapped from ``record.start`` to ``end``.

        -1 if it is known, or not what the record is about. Raises OSError.
        """
        link = b"/proc/%d/map_files/%x-%x" % (record.pid, record.start, end)
        identity = statx.identity_at(syscalls.AT_FDCWD, link, ask=False)
        if not stat.S_ISREG(identity.mode):
            return -1
        if (
            home.is_known
            and place_key(home.mnt_ns_id, file_key(identity), record.path) in self._met
        ):
            return -1
        fd = os.open(link, os.O_PATH | os.O_CLOEXEC)
        # Filesystems made of others may show one inode number here and another there. If it is
        # something else that is mapped there by now, there is another record about that.
        if statx.identity(fd, ask=False).ino == record.inode or _is_same_name(link, record):
            return fd
        self._done.append(fd)
        return -1

    def _settle(self, grip: _Grip) -> None:
        """Find out what a mapped file is and where, and hand it on."""
        record, home, fd, error = grip
        if not home.is_known:
            home = self._tasks.look(record.pid, home)
        if error is not None:
            fd = self._vanished(record, home, error)
            if fd < 0:
                self._miss(record, error)
                return
        try:
            identity = statx.identity(fd, ask=False)
        except OSError as failed:
            os.close(fd)
            self._miss(record, failed)
            return
        self._hold(record, home, identity, fd)

    def _hold(self, record: Mapped, home: Home, identity: FileIdentity, path_fd: int) -> None:
        """Hand on the file that was mapped. Takes the descriptor, which is O_PATH."""
        file = file_key(identity)
        key = place_key(home.mnt_ns_id, file, record.path)
        if key in self._met:
            self._done.append(path_fd)
            return
        slow = self._slow.is_slow(path_fd, identity, home.mnt_ns_id)
        fd = path_fd
        if not slow:
            try:
                fd = openat2.reopen_regular(path_fd)
            except OSError as error:
                self._miss(record, error)
                return
            finally:
                os.close(path_fd)
        build_id = None
        if self._outbox.held >= _OPEN_FILES:
            # Too many files wait: what it is is all that is kept of this one.
            self._unpinned += 1
            build_id = _build_id(fd, slow)
            fd = -1
            if build_id is None:
                return
        else:
            self._met.add(key, file)
        self._caught += 1
        message = Caught(
            key,
            record.pid,
            time.time_ns(),
            record.path.removesuffix(_DELETED),
            identity,
            tasks.place(record.pid, home),
            slow,
            build_id,
        )
        self._outbox.put(message, fd)

    def _vanished(self, record: Mapped, home: Home, error: OSError) -> int:
        """A descriptor of what is not mapped any more, or may not be looked at that way, or -1."""
        if self._strict is not None:
            kept = self._strict.take(record.pid, record.inode, record.path)
            if kept is not None:
                return kept
        return self._elsewhere.find(record, home) if error.errno in _GONE else -1

    def _miss(self, record: Mapped, error: OSError) -> None:
        self._missed += 1
        reason = error.strerror or str(error)
        self._outbox.put(Missed(record.pid, record.path, reason, error.errno or 0))

    # --- the other end ---------------------------------------------------------------------

    def _listen(self) -> bool:
        """Read what the other end says; False when it has gone."""
        while True:
            try:
                received = messages.receive(self._socket)
            except BlockingIOError:
                return True
            except (OSError, ValueError):
                return False
            if received is None:
                return False
            message, _ = received
            if isinstance(message, messages.Forget):
                self._met.forget(message.keys)

    def _strict_degraded(self) -> Sequence[str]:
        return self._strict.degraded if self._strict is not None else ()

    def _tell_degraded(self) -> None:
        """Say what has become less than it could be since the start."""
        for text in self._strict_degraded():
            if text not in self._degraded:
                self._degraded = (*self._degraded, text)
                self._outbox.put(Degraded(text))


def _build_id(fd: int, slow: bool) -> BuildId | None:
    """What a file is that cannot be held, if it may be read. Takes the descriptor."""
    try:
        found = None if slow else files.identify(fd)
    except OSError:
        found = None
    finally:
        os.close(fd)
    return found if isinstance(found, BuildId) else None


def _is_same_name(link: bytes, record: Mapped) -> bool:
    try:
        return os.path.basename(os.readlink(link)) == os.path.basename(record.path)
    except OSError:
        return False
