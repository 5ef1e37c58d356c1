# SPDX-License-Identifier: Apache-2.0
"""Strict watching: whoever runs a program waits until it is pinned, so that none gets away.

An exec is held up until the process that watches has answered. That is the moment in which a
mount namespace is seen for the first time, and what is mounted in it is marked before anything
in it runs. Every dynamic program opens the ELF interpreter *as a program*, on a filesystem that is
marked already; its libraries are opened after that was answered, and so on marked filesystems.

Everything here is called by one thread that never waits; see `guard` for what happens should it
hang nevertheless.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import stat
import time
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture.guard import Heartbeat
from buildidfs.capture.marks import Marks
from buildidfs.capture.overload import Overload
from buildidfs.capture.stash import Stash
from buildidfs.formats import fanotifyevents
from buildidfs.linux import fanotify, namespaces, procfs, statmount, statx
from buildidfs.model import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from buildidfs.capture.closer import Closer
    from buildidfs.formats.fanotifyevents import FanotifyEvent
    from buildidfs.model import FileIdentity

_ELF_MAGIC: Final = b"\x7fELF"
_INTERPRETER: Final = re.compile(rb"ld[^/]*\.so[^/]*")

# Few execs at a time: the last of them waits until the first is looked at.
_EXECS: Final = 16
_OPENS: Final = 64
_MOST_NAMESPACES: Final = 4096
# An event whose file gets no descriptor is denied by the kernel: some are kept free.
_SPARE_FILES: Final = 128
_PAUSE_S: Final = 30.0
# A process that is gone, may not be looked at, or says what makes no sense.
_STRANGE: Final = (OSError, ValueError)


class StrictCounts(msgspec.Struct):
    """What happened so far. ``lost`` counts full queues, ``overloads`` how often opens had to be
    left alone for a while, ``failed`` events whose file could not be opened.
    """

    execs: int = 0
    opens: int = 0
    stashed: int = 0
    ignored: int = 0
    lost: int = 0
    overloads: int = 0
    failed: int = 0


class Strict:
    """Holds up execs, and keeps what is run and opened for whoever needs it.

    ``group`` is that of `marks.open_exec_group`, closed by `close`. ``known`` says of a file that
    it is captured already. ``own`` are the processes of this program, whose execs and opens mean
    nothing. ``store_dev`` is the st_dev of the store. Nothing waits before `start` is called, and
    then every exec until `exec_ready` is: call it last. ``only_at`` limits it, for the host, to the
    filesystems mounted at these places.
    """

    def __init__(
        self,
        group: int,
        known: Callable[[FileIdentity], bool],
        closer: Closer,
        *,
        heartbeat: Heartbeat | None = None,
        own: Collection[int] = (),
        store_dev: int | None = None,
        only_at: Collection[bytes] | None = None,
        overload: Overload | None = None,
    ) -> None:
        self._known = known
        self._closer = closer
        self._heartbeat = heartbeat or Heartbeat()
        self._own = frozenset((*own, os.getpid()))
        self._marks = Marks(group, store_dev, only_at)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._last_fd = limit - _SPARE_FILES
        self._stash = Stash(closer, most=min(1024, limit // 4))
        # The host's never ends, so its number means no other.
        self._host = {namespaces.initial().mnt, namespaces.of_pid(os.getpid()).mnt}
        self._namespaces: dict[int, bytes] = {}
        self._overload = overload or Overload()
        self._resume_at: float | None = None
        self._done: list[int] = []
        self.counts = StrictCounts()

    def start(self) -> None:
        """Hold up execs from now on. Raises `CapabilityError` where that is refused."""
        self._marks.start()

    def close(self) -> None:
        """Hold up nobody any more, and let go of everything."""
        self._marks.close()
        self._stash.clear()

    @property
    def degraded(self) -> list[str]:
        """What the kernel refuses, a line each for a person; it may grow."""
        return self._marks.degraded

    def filenos(self) -> dict[int, Callable[[], int]]:
        """What to poll for input, and what to call then; the most urgent first."""
        ready = {
            self._marks.execs: self.exec_ready,
            self._marks.opens: self.opens_ready,
        }
        return {fd: call for fd, call in ready.items() if fd >= 0}

    # --- execs -----------------------------------------------------------------------------

    def exec_ready(self) -> int:
        """Answer the execs that wait, a few at a time; how many there were."""
        self._heartbeat.begin()
        events = self._read(self._marks.execs, _EXECS * fanotifyevents.EVENT_SIZE)
        waiting = [event for event in events if event.fd >= 0]
        self.counts.execs += len(waiting)
        answered = 0
        try:
            for event in waiting:
                with contextlib.suppress(*_STRANGE):
                    self._before_exec(event.pid)
                answered += 1
                self._allow(event.fd)
        finally:
            # Even after a fault of ours nobody keeps waiting.
            for event in waiting[answered:]:
                self._allow(event.fd)
            self._heartbeat.end()
        for event in waiting:
            self._keep(event, self._ignore_exec)
        self._close_done()
        return len(events)

    def _allow(self, event_fd: int) -> None:
        with contextlib.suppress(OSError):  # whoever waited was killed
            fanotify.respond(self._marks.execs, event_fd, allow=True)
        self._heartbeat.beat()

    def _before_exec(self, pid: int) -> None:
        """All that has to be done while the process waits."""
        if pid <= 0 or pid in self._own:
            return
        if os.stat(b"/proc/%d/ns/mnt" % pid).st_ino in self._host:
            return
        self._visit(pid)

    def namespace_seen(self, pid: int) -> None:
        """A process has entered a mount namespace (PERF_RECORD_NAMESPACES)."""
        with contextlib.suppress(*_STRANGE):
            if os.stat(b"/proc/%d/ns/mnt" % pid).st_ino not in self._host:
                self._visit(pid)

    def _visit(self, pid: int) -> None:
        """Have everything marked in the namespace of the process. Raises OSError."""
        if self._marks.follow_host():
            self._namespaces.clear()
        pid_fd = procfs.open_pid(pid)
        try:
            number = namespaces.mnt_ns_id(pid_fd)
            mounts = _mounts(number)
            if mounts and self._namespaces.pop(number, b"") == mounts:
                self._namespaces[number] = mounts
                return
            self._marks.mark_private(pid_fd)
        finally:
            os.close(pid_fd)
        if mounts:
            self._namespaces[number] = mounts
        if len(self._namespaces) > _MOST_NAMESPACES:
            # The one not visited for longest: to mark it again costs little.
            del self._namespaces[next(iter(self._namespaces))]

    # --- opens -----------------------------------------------------------------------------

    def opens_ready(self) -> int:
        """Keep the ELF files that processes in containers have opened; how many events."""
        events = self._read(self._marks.opens, _OPENS * fanotifyevents.EVENT_SIZE)
        self.counts.opens += len(events)
        for event in events:
            if event.fd < 0:
                continue
            if event.pid not in self._own and not _may_be_elf(event.fd):
                self._ignore_open(event.fd)
                self._done.append(event.fd)
            else:
                self._keep(event, self._ignore_open)
        self._close_done()
        if self._overload.add(len(events), time.monotonic()) and self._resume_at is None:
            self._pause_opens()
        return len(events)

    def _pause_opens(self) -> None:
        self._marks.pause_opens()
        self._resume_at = time.monotonic() + _PAUSE_S
        if not self.counts.overloads:
            self.degraded.append(
                "strict: containers open files faster than can be looked at; for a while only"
                " what they run is held up"
            )
        self.counts.overloads += 1

    # --- what is kept ----------------------------------------------------------------------

    def _keep(self, event: FanotifyEvent, ignore: Callable[[int], None]) -> None:
        """Stash the file of an event, or let go of it."""
        fd = event.fd
        if event.pid <= 0 or event.pid in self._own:
            self._done.append(fd)
            return
        try:
            if self._known(statx.identity(fd)):
                ignore(fd)
                self._done.append(fd)
            elif fd >= self._last_fd:
                self._done.append(fd)
            else:
                self._stash.put(event.pid, fd)
                self.counts.stashed += 1
        except OSError:
            self._done.append(fd)

    def _ignore_exec(self, fd: int) -> None:
        # An ELF interpreter never is: that it is opened is how we learn of new namespaces,
        # whatever program it is for.
        if not _is_interpreter(fd):
            self._marks.ignore_exec(fd)
            self.counts.ignored += 1

    def _ignore_open(self, fd: int) -> None:
        self._marks.ignore_open(fd)
        self.counts.ignored += 1

    def take(self, pid: int, inode: int, path: bytes) -> int | None:
        """The file that a process has mapped, if it is kept; the caller closes it.

        ``inode`` is what the memory map shows, 0 if that is not known.
        """
        fd = self._stash.take(pid, inode, path)
        if fd is None and self.opens_ready():
            fd = self._stash.take(pid, inode, path)  # it was told of, and nobody had listened
        return fd

    def drop(self, pid: int) -> None:
        """Nothing of this process is needed any more."""
        self._stash.drop(pid)

    def tick(self) -> None:
        """To be called about once a second: lets go of what is old, follows the host's mounts."""
        self._stash.expire()
        if self._marks.follow_host():
            self._namespaces.clear()
        if self._resume_at is not None and time.monotonic() >= self._resume_at:
            self._resume_at = None
            self._marks.resume_opens()
            self._namespaces.clear()

    def _read(self, group: int, size: int) -> list[FanotifyEvent]:
        if group < 0:
            return []
        try:
            events = fanotifyevents.decode(fanotify.read(group, size))
        except OSError:
            # The file of the first event could not be opened; it is not in the queue any more.
            self.counts.failed += 1
            return []
        if any(event.mask & fanotify.Q_OVERFLOW for event in events):
            self.counts.lost += 1
            self._namespaces.clear()
            return [event for event in events if not event.mask & fanotify.Q_OVERFLOW]
        return events

    def _close_done(self) -> None:
        done, self._done = self._done, []
        self._closer.close(done)


def _mounts(number: int) -> bytes:
    """What stands for all that is mounted in a mount namespace; empty where that cannot be told.

    Not the text in /proc: what is mounted in the place of something else looks the same there.
    """
    try:
        return fingerprint(statmount.mounts_of(number)) if number else b""
    except OSError:
        return b""


def _may_be_elf(fd: int) -> bool:
    """Whether a file begins like ELF; it counts as one if only the disk could tell."""
    head = bytearray(len(_ELF_MAGIC))
    try:
        os.preadv(fd, [head], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError:
        # Not every filesystem can say so; those of memory do not have to.
        try:
            return stat.S_ISREG(os.fstat(fd).st_mode) and os.pread(fd, 4, 0) == _ELF_MAGIC
        except OSError:
            return False
    return head == _ELF_MAGIC


def _is_interpreter(fd: int) -> bool:
    """Whether it is what the kernel starts dynamic programs with: ld-linux-x86-64.so.2, ..."""
    try:
        name = os.path.basename(os.readlink(fanotify.path_of(fd)))
    except OSError:
        return False
    return _INTERPRETER.match(name) is not None
