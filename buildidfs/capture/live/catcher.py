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
priority, identifies the files (`identifier`).

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
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import log
from buildidfs.capture.live import first_touch, process_table, protocol
from buildidfs.capture.live.admission import RecentFiles
from buildidfs.capture.live.event_rings import Rings
from buildidfs.capture.live.grabber import CatcherState, Lookout
from buildidfs.capture.live.identifier import Settler
from buildidfs.capture.live.protocol import (
    MOST_DESCRIPTORS,
    CatcherFailed,
    Counts,
    Flooded,
    Lost,
    Outbox,
    Refused,
    Silent,
)
from buildidfs.capture.live.touches import Touches
from buildidfs.capture.process.gate import MOST, STUCK_S
from buildidfs.errors import CapabilityError
from buildidfs.linux import child, credentials, syscalls, threads
from buildidfs.linux.alarm import Alarm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_log = logging.getLogger(__name__)

_TICK_S: Final = 1.0
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
        touches = None if program is None else Touches(program)
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
                    self._tick()
                    due = time.monotonic() + _TICK_S
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

    def _tick(self) -> None:
        state = self._state
        with state.lock:
            state.follow()
            state.tasks.tidy(time.monotonic_ns(), _FORGOTTEN_AT_ONCE)
        state.held.expire()
        state.closer.relieve()
        if self._rings.cpus_changed():
            self._follow_cpus()
        with state.lock:
            self._report_dropped()
            self._report_silent()
            if state.counts != self._reported:
                self._reported = msgspec.structs.replace(state.counts)
                self._outbox.put(self._reported)
        self._outbox.flush()

    def _follow_cpus(self) -> None:
        with self._state.lock:
            if self._rings.follow_cpus():
                self._state.tasks.forget()  # a process may have entered other namespaces unseen
                self._look_out()
                self._outbox.put(Lost(0, "CPUs were turned on or off"))

    # --- threads ---------------------------------------------------------------------------

    def _look_out(self) -> None:
        """Start threads for each CPU that is turned on."""
        for cpu, poller in self._rings.pollers.items():
            if poller not in self._pollers:
                self._pollers.add(poller)
                for _ in range(_LOOKOUTS):
                    self._begin(Lookout(self._state, cpu), poller).wait()
        if not any(lookout.polls for lookout in self._lookouts):
            next(iter(self._lookouts)).polls = True

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
                poller.poll(None if lookout.pause == math.inf else lookout.pause)
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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
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
