# SPDX-License-Identifier: Apache-2.0
"""The catcher: a process that pins files at the moment they are mapped.

A process may end a fraction of a millisecond after it has mapped its last file, and its mount
namespace and filesystem with it. So the catcher examines each mapping, pins unknown files and sends
their descriptors. It runs at the highest priority, uses no store, and does not wait for the
receiver. A pinned file stays readable after the container ends.

Each CPU has threads of its own that pin files (`grabber`). With the kernel's program
(`first_touch`) they are bound to their CPU: the process that touches an unknown file then goes on
when its file is pinned, and no other CPU must wake up. Without it they may run on any CPU, because
each mapping wakes a thread, which would delay all processes. One more thread, with a lower
priority, identifies the files and sends them (`Settler`).

The catcher is a separate process that runs this module; `client.Watcher` starts it. Its arguments
are the descriptor of a socket (`protocol`), the process that started it, and the directory of the
only control group to follow, or nothing. The catcher ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import log
from buildidfs.capture import base
from buildidfs.capture.live import first_touch, process_table, protocol
from buildidfs.capture.live.admission import RecentFiles, file_key, place_key
from buildidfs.capture.live.event_rings import Rings
from buildidfs.capture.live.grabber import NO_CPU, CatcherState, Lookout
from buildidfs.capture.live.process_table import Finder
from buildidfs.capture.live.protocol import (
    MOST_DESCRIPTORS,
    CatcherFailed,
    Caught,
    Counts,
    Flooded,
    Lost,
    Missed,
    Outbox,
    Refused,
    Silent,
)
from buildidfs.capture.origin.path_access import NOBODY
from buildidfs.capture.process.silent_processes import MOST, STUCK_S
from buildidfs.capture.unresponsive.filesystems import SlowMounts
from buildidfs.errors import CapabilityError
from buildidfs.linux import child, credentials, inodes, procfs, syscalls, threads
from buildidfs.linux.threads import Alarm
from buildidfs.model import BuildId
from buildidfs.shares import of_user

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from buildidfs.capture.live.grabber import Grip
    from buildidfs.capture.live.process_table import Home
    from buildidfs.formats.perf.records import Mapped
    from buildidfs.model import FileIdentity

_log = logging.getLogger(__name__)
_NOT_SENT: Final = "%s: too many files wait, and it has no build ID: not sent, pid %d"
_REMEMBERED: Final = 1024
_AT_ONCE: Final = 1024
_MOST_HELD: Final = 256
_MOST_VANISHED: Final = 8192
_DELETED: Final = b" (deleted)"
# Errors of a process that is gone, or does not answer.
_GONE: Final = procfs.GONE | {errno.ETIMEDOUT}


class Settler:
    """Identifies and sends files, in one thread that is less urgent than those that pin them."""

    def __init__(self, state: CatcherState) -> None:
        self._state = state
        self._slow = SlowMounts()
        # Files that are no longer mapped: those with the mount namespace in which they were seen,
        # and those that can be looked up through any process of their namespace, at any time.
        self._held: deque[Grip] = deque()
        self._vanished: deque[Grip] = deque()
        self._done: list[int] = []
        self._missed: set[tuple[int, int, bytes]] = set()
        self._since = 0.0

    @property
    def busy_s(self) -> float:
        """The time in seconds for which the thread works on one file; 0 while it waits for one."""
        since = self._since
        return time.monotonic() - since if since else 0.0

    def run(self) -> None:
        """Work until the end. Raises BrokenPipeError if the other end is closed."""
        self._finder = Finder(self._state.host)
        try:
            self._work()
        finally:
            self._finder.close()

    def _work(self) -> None:
        state = self._state
        while not state.ended:
            grip = self._next()
            if grip is None:
                return
            if grip[3] is not None and not state.grips.empty() and self._postpone(grip):
                continue
            self._since = time.monotonic()
            self._settle(*grip)
            self._since = 0.0
            if state.grips.empty() or len(state.outbox) > _AT_ONCE:
                self._flush()

    def _next(self) -> Grip | None:
        """Take the first file, but vanished files last, because the search for them
        takes longer.
        """
        if self._state.grips.empty():
            for postponed in (self._held, self._vanished):
                if postponed:
                    return postponed.popleft()
        return self._state.grips.get()

    def _postpone(self, grip: Grip) -> bool:
        """Queue a vanished file for later; return False if too many would wait."""
        queue, most = (self._vanished, _MOST_VANISHED) if grip[2] < 0 else (self._held, _MOST_HELD)
        if len(queue) >= most:
            return False
        queue.append(grip)
        return True

    def _flush(self) -> None:
        self._state.outbox.flush()
        if self._done:
            self._state.closer.close(self._done)
            self._done.clear()

    def _settle(self, record: Mapped, home: Home, fd: int, error: OSError | None) -> None:
        """Find identity and place of a mapped file, and send it."""
        if not home.is_known:
            home = process_table.look(record.pid, home, self._done.append)
        if error is not None:
            fd = self._find(record, home, fd, error)
            if fd < 0:
                self._miss(record, home, error)
                return
        try:
            identity = inodes.identity(fd, ask=False)
        except OSError as failed:
            self._done.append(fd)
            self._miss(record, home, failed)
            return
        key = place_key(home.mnt_ns_id, file_key(identity), record.path)
        if key in self._state.recent:
            _log.debug("%s: known, pid %d", record.path, record.pid)
            self._done.append(fd)
        else:
            self._send(record, home, identity, fd, key)

    def _find(self, record: Mapped, home: Home, namespace_fd: int, error: OSError) -> int:
        """Return a descriptor of a file that is no longer mapped, or -1.

        Takes over ``namespace_fd``, the mount namespace of the process or -1.
        """
        try:
            if error.errno not in _GONE:
                return -1
            is_silent = error.errno == errno.ETIMEDOUT
            return self._finder.find(record, home, namespace_fd, is_silent=is_silent)
        finally:
            self._done.append(namespace_fd)

    def _send(
        self,
        record: Mapped,
        home: Home,
        identity: FileIdentity,
        fd: int,
        key: bytes,
    ) -> None:
        """Send a file, or only its build ID if too many files wait. Takes over the descriptor."""
        state = self._state
        build_id = None
        user, share = 0, home.share
        if home.mnt == state.host:
            user = self._user(fd, identity, record.pid)
            share = of_user(user)
        is_pinned = state.outbox.hold(share)
        if not is_pinned:
            build_id = self._build_id(fd, identity, home)
            self._done.append(fd)
            fd = -1
        message = Caught(
            key,
            record.pid,
            time.time_ns(),
            record.path.removesuffix(_DELETED),
            identity,
            process_table.place(record.pid, home, state.host, user),
            build_id,
        )
        with state.lock:
            if is_pinned:
                state.sent.add(file_key(identity))
                # An unknown mount namespace cannot be recognised later.
                if home.is_known:
                    state.recent.add(key)
            else:
                state.counts.unpinned += 1
                if build_id is None:
                    _log.debug(_NOT_SENT, record.path, record.pid)
                    return
            state.counts.caught += 1
        what = "sent" if is_pinned else "too many files wait, so only its build ID is sent"
        _log.debug("%s: %s, pid %d", record.path, what, record.pid)
        state.outbox.put(message, fd, share)

    def _user(self, fd: int, identity: FileIdentity, pid: int) -> int:
        try:
            return self._state.users.of(fd, identity, pid)
        except OSError:
            return NOBODY

    def _build_id(self, fd: int, identity: FileIdentity, home: Home) -> BuildId | None:
        """Return the build ID of a file that cannot stay open; None if reading the file
        could hang.
        """
        user = home.namespaces.user if home.namespaces is not None else 0
        if self._slow.is_slow(fd, identity, home.mnt_ns_id, user):
            return None
        try:
            readable = inodes.reopen_regular(fd)
        except OSError:
            return None
        try:
            found = base.identify(readable)
        except OSError:
            return None
        finally:
            self._done.append(readable)
        return found if isinstance(found, BuildId) else None

    def _miss(self, record: Mapped, home: Home, error: OSError) -> None:
        """Report a missed file only once for each process, because the process may map it again and
        again.
        """
        what = (record.pid, record.inode, record.path)
        if what in self._missed:
            return
        if len(self._missed) >= _REMEMBERED:
            self._missed.clear()
        self._missed.add(what)
        reason = error.strerror or str(error)
        _log.debug("%s: missed, pid %d: %s", record.path, record.pid, reason)
        message = Missed(
            record.pid, record.path, reason, error.errno or 0, process_table.known_place(home)
        )
        with self._state.lock:
            self._state.counts.missed += 1
        self._state.outbox.put(message)


_TICK_S: Final = 1.0
_IDLE_TICK_S: Final = 2.0  # if nothing was counted since the last tick
# The end of a process forgets two earlier ones; this is for a host on which few processes end.
_FORGOTTEN_AT_ONCE: Final = 64
# Threads for each CPU, because one may have to wait for a process in the middle of an exec.
_LOOKOUTS: Final = 2
# A thread that works on one process for so long is replaced. The guard looks that often while a
# thread works.
_REPLACE_S: Final = 0.05
_GUARD_S: Final = 0.02
_LOG_S: Final = 1.0  # for the last lines of the log
_URGENT: Final = 2  # above the identifier thread, which has 1


class Catcher:
    """Catches files until the other end of ``sock`` is closed.

    Raises OSError if the kernel refuses events.
    """

    def __init__(self, sock: socket.socket, cgroup_fd: int = -1) -> None:
        self._socket = sock
        self._epoll = select.epoll()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._outbox = Outbox(sock, self._epoll, max(min(MOST_DESCRIPTORS, limit // 4), 1))
        program, self._refusal = first_touch.start(cgroup_fd)
        self._rings = Rings(program, cgroup_fd=cgroup_fd)
        touches = None if program is None else first_touch.Touches(program)
        self._alarm = Alarm(_GUARD_S)
        self._state = CatcherState(self._rings, self._outbox, RecentFiles(), touches, self._alarm)
        self._pollers: set[select.epoll] = set()
        self._lookouts: dict[Lookout, select.epoll] = {}
        self._settler = Settler(self._state)
        self._reported = Counts()
        self._silent = Silent((), 0)

    def begin(self) -> None:
        """Start the threads, and report that from now on no mapping is missed."""
        state = self._state
        self._socket.setblocking(False)
        self._epoll.register(self._socket.fileno(), select.EPOLLIN)
        hurry = threads.hurry(_URGENT)
        with state.lock:  # before any other thread sends
            self._look_out()
            if state.touches is not None:
                self._begin(Lookout(state, NO_CPU), select.epoll()).wait()
            threading.Thread(target=self._settle, daemon=True).start()
            threading.Thread(target=self._guard, daemon=True).start()
            child.report_ready(self._socket, hurry or "")
            if self._refusal:
                self._outbox.put(Refused(self._refusal))

    def run(self) -> None:
        """Work until the other end is closed."""
        state = self._state
        # The code below makes no reference cycles; a collection would take longer than a process
        # may live.
        gc.collect()
        gc.freeze()
        gc.disable()
        due = time.monotonic() + _TICK_S
        try:
            while self._turn(max(0.0, due - time.monotonic())):
                if time.monotonic() >= due:
                    is_idle = not self._tick()
                    due = time.monotonic() + (_IDLE_TICK_S if is_idle else _TICK_S)
        except BrokenPipeError:
            return
        finally:
            with state.lock:
                state.ended = True
                state.grips.put(None)

    def _turn(self, timeout: float) -> bool:
        """Wait for an event and handle all events; return False at the end."""
        ready = [fd for fd, _ in self._epoll.poll(timeout)]
        if self._socket.fileno() in ready and not self._listen():
            return False
        self._outbox.flush()
        return True

    def _tick(self) -> bool:
        """Clean up, and report changes; return True if records were counted since the last call."""
        state = self._state
        with state.lock:
            state.follow()
            state.tasks.tidy(time.monotonic_ns(), _FORGOTTEN_AT_ONCE)
        state.held.expire()
        state.closer.relieve()
        if self._rings.cpus_changed():
            with self._state.lock:
                if self._rings.follow_cpus():
                    self._state.tasks.forget()  # a process may have entered other namespaces unseen
                    self._look_out()
                    self._outbox.put(Lost(0, "CPUs were turned on or off"))
        with state.lock:
            self._report_dropped()
            self._report_silent()
            has_changed = state.counts != self._reported
            if has_changed:
                self._reported = msgspec.structs.replace(state.counts)
                self._outbox.put(self._reported)
        self._outbox.flush()
        return has_changed

    # --- threads ---------------------------------------------------------------------------

    def _look_out(self) -> None:
        """Start threads for each CPU that is turned on."""
        for cpu, poller in self._rings.pollers.items():
            if poller not in self._pollers:
                self._pollers.add(poller)
                for _ in range(_LOOKOUTS):
                    self._begin(Lookout(self._state, cpu), poller).wait()

    def _begin(self, lookout: Lookout, poller: select.epoll) -> threading.Event:
        """Start a thread for a lookout; return an event that is set once it runs."""
        self._lookouts[lookout] = poller
        there = threading.Event()
        arguments = (lookout, poller, there)
        threading.Thread(target=self._watch_cpu, args=arguments, daemon=True).start()
        return there

    def _watch_cpu(self, lookout: Lookout, poller: select.epoll, there: threading.Event) -> None:
        """Handle the events of one CPU until the CPU is turned off, or the thread is replaced."""
        threads.hurry(_URGENT)
        if self._state.touches is not None:
            threads.stay_on(lookout.cpu)
        lookout.thread = threading.get_native_id()
        there.set()
        while not lookout.is_replaced:
            try:
                poller.poll(lookout.pause)
            except (ValueError, OSError):  # the CPU was turned off
                self._pollers.discard(poller)
                del self._lookouts[lookout]
                return
            if self._state.ended or not self._survives(lookout.work):
                return
        lookout.finish()
        self._state.silent.remove(lookout)

    def _guard(self) -> None:
        """Replace each lookout whose thread waits for a process, until the end."""
        threads.hurry(_URGENT)
        while not self._state.ended:
            self._alarm.wait()
            for lookout, poller in list(self._lookouts.items()):
                self._survives(functools.partial(self._replace_stuck, lookout, poller))
            if any(lookout.is_asking for lookout in list(self._lookouts)):
                self._alarm.set()

    def _replace_stuck(self, lookout: Lookout, poller: select.epoll) -> None:
        call = lookout.stuck(_REPLACE_S)
        if call is None:
            return
        silent = self._state.silent
        since, pid = call
        silent.add(lookout, pid, since)
        if lookout.stuck(0.0) != call:
            silent.remove(lookout)
            return
        del self._lookouts[lookout]
        self._begin(lookout.replacement(), poller)
        if len(silent) >= MOST:
            # Only the end of this process ends the waits of its threads.
            self._outbox.put(CatcherFailed("too many processes do not answer"))
            self._outbox.flush()
            os._exit(1)

    def _settle(self) -> None:
        threads.hurry()
        self._survives(self._settler.run)

    def _survives(self, work: Callable[[], None]) -> bool:
        """Run one turn of a thread; return False if the thread must end."""
        try:
            work()
        except BrokenPipeError:
            return False  # the main thread sees that, too
        except BaseException:
            # If one of the threads were missing, files would be missed: so the catcher ends, to be
            # restarted.
            _log.exception("a fault of the catcher")
            log.finish(_LOG_S)
            os._exit(1)
        return True

    # --- the other end ---------------------------------------------------------------------

    def _listen(self) -> bool:
        """Read messages of the owner; False when it has closed the socket."""
        while True:
            try:
                received = protocol.receive(self._socket)
            except BlockingIOError:
                return True
            except (OSError, ValueError):
                return False
            if received is None:
                return False
            message, _ = received
            if isinstance(message, protocol.Forget):
                with self._state.lock:
                    self._state.recent.forget(message.keys)
                    self._state.files.forget(message.keys)
                if self._state.touches is not None:
                    self._state.touches.forget(message.keys)

    def _report_silent(self) -> None:
        """Report the processes and files that threads have waited for, if they have changed."""
        silent = self._state.silent
        rows = silent.rows(STUCK_S)
        busy_s = self._settler.busy_s
        if busy_s <= STUCK_S:
            busy_s = 0.0
        message = Silent(rows[: protocol.MOST_NAMED], len(rows), busy_s, silent.unasked())
        if message != self._silent:
            self._silent = message
            self._outbox.put(message)

    def _report_dropped(self) -> None:
        """Report the shares whose mappings were dropped, with their counts."""
        state = self._state
        for dropped in state.shares.take_dropped():
            state.counts.dropped += dropped.count
            place = process_table.known_place(dropped.home)
            self._outbox.put(Flooded(place, dropped.count, tuple(dropped.paths)))


# If two threads have work, the waiting one runs after this time.
_SWITCH_INTERVAL_S = 0.00002
_STACK_BYTES = 256 << 10
# More than it has open at any time, see `CatcherState`.
_DESCRIPTORS = 1 << 14


def main(argv: Sequence[str]) -> None:
    """Catch until the other end of the socket is closed."""
    sock = socket.socket(fileno=int(argv[0]))
    owner = int(argv[1])
    threads.name_thread(b"buildidfs-catch")
    # These signals are for the starting process; when it ends, the catcher ends, too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    threading.stack_size(_STACK_BYTES)
    threads.allow_many_descriptors()
    threads.reserve_descriptors(_DESCRIPTORS)
    log.write_in_background()
    try:
        syscalls.end_with(owner, signal.SIGKILL)
        cgroup_fd = os.open(argv[2], os.O_RDONLY | os.O_DIRECTORY) if argv[2] else -1
        catcher = Catcher(sock, cgroup_fd)
        catcher.begin()
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.EACCES, errno.EPERM):
            reason += f"; {credentials.remedy('CAP_PERFMON', 'CAP_SYS_ADMIN')}"
        child.report_failure(sock, error.errno or errno.EIO, reason)
    except CapabilityError as error:
        child.report_failure(sock, errno.EPERM, str(error))
    else:
        _run(catcher, sock)
    finally:
        log.finish(_LOG_S)


def _run(catcher: Catcher, sock: socket.socket) -> None:
    try:
        catcher.run()
    except OSError as error:
        with contextlib.suppress(OSError):  # the other end is closed
            sock.setblocking(True)
            protocol.send(sock, protocol.encode(CatcherFailed(error.strerror or str(error))))
