# SPDX-License-Identifier: Apache-2.0
"""Pin files that are mapped on one CPU while the process that mapped them lives.

One system call shows the mapping, another one pins its file. The identity and the home of the file
take ten more, which `catcher.Settler` makes; it also looks up files that are no longer mapped
(`process_table.HeldNamespaces`).

No lock is held during a system call that may wait for the end of a process or for an unmount, so
that the other CPUs go on.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import stat
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from buildidfs import log
from buildidfs.capture.live import process_table
from buildidfs.capture.live.admission import FairShare, HostFiles, RecentFiles, file_key, place_key
from buildidfs.capture.live.first_touch import decode_touch
from buildidfs.capture.live.process_table import HOLD_S, HeldNamespaces, Home, found_here
from buildidfs.capture.live.protocol import Counts, Generated, Lost
from buildidfs.capture.origin.path_access import NOBODY, FileUsers, known_user, user_of_process
from buildidfs.capture.process.silent_processes import (
    MOST_OF_AN_OWNER,
    SLOW_S,
    NoAnswer,
    SilentProcesses,
)
from buildidfs.formats.perf.records import (
    Entered,
    ExecutableMemory,
    Exited,
    Forked,
    GroupMade,
    LostRecords,
    Mapped,
    Output,
)
from buildidfs.linux import inodes, namespaces, procfs, syscalls
from buildidfs.linux.file_ops import closing_fd
from buildidfs.linux.threads import Closer, is_held
from buildidfs.shares import HOST, of_user

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.capture.live.event_rings import Rings
    from buildidfs.capture.live.first_touch import Touch, Touches
    from buildidfs.capture.live.protocol import Outbox
    from buildidfs.formats.perf.records import Record
    from buildidfs.linux.threads import Alarm


_NO_QUERY: Final = frozenset((errno.ENOTTY, errno.EINVAL))


def end_now(pid_fd: int, record: Mapped) -> int:
    """Return the present end of the mapping that begins at ``record.start``; 0 if it is gone.

    In files without separate pages for code and data (all that were linked before 2018), the first
    mapping spans the whole file, and the data is mapped over its end at once.
    """
    try:
        with closing_fd(procfs.open_maps(pid_fd)) as maps_fd:
            found = procfs.executable_at(maps_fd, record.start)
        return found[1] if found is not None and found[0] == record.start else 0
    except OSError as error:
        return _end_in_listing(pid_fd, record) if error.errno in _NO_QUERY else 0


def _end_in_listing(pid_fd: int, record: Mapped) -> int:
    """Do as `end_now`, on kernels before Linux 6.11."""
    begin = b"%x-" % record.start
    try:
        names = os.listdir(_directory(pid_fd) + b"/map_files")
    except OSError:
        return 0
    return next((int(name[len(begin) :], 16) for name in names if name.startswith(begin)), 0)


def _directory(pid_fd: int) -> bytes:
    return b"/proc/self/fd/%d" % pid_fd


_log = logging.getLogger(__name__)
# A constant, because even the test of a logger takes too long for each mapping. `log.adopt` has
# run before this module is imported.
_TRACES: Final = log.is_debug()


_DROPPED: Final = "dropped, because the share of its container or user is used up"


def _trace(record: Mapped, text: str) -> None:
    _log.debug("%s: %s, pid %d", record.path, text, record.pid)


# A mapping, the home of its process, and an O_PATH descriptor of the file. Instead of the
# descriptor, there may be the error, with a descriptor of the mount namespace if it is held, else
# -1.
Grip = tuple[Mapped, Home, int, OSError | None]


_WAITING: Final = 8192
_NAMESPACES: Final = 512
_SPARE_FILES: Final = 256
# Delay between the last mapping and the first look for new mount namespaces; each further delay is
# twice as long.
_FIRST_PAUSE_S: Final = 0.004
# The looks are more frequent while a container starts, which takes a runtime some milliseconds.
_STARTING_PAUSE_S: Final = 0.001
_STARTING_S: Final = 0.05
# A thread that has looked often enough waits for events, and looks now and then whether its CPU was
# turned off.
_IDLE_S: Final = 60.0
_RECEIVER_S: Final = 1.0  # between two looks whether the receiver has taken files
# If the kernel's program wakes for unknown files, one thread reads the mappings of known files so
# often while there are some. Without any, each pause is twice as long, up to the second one.
_BUSY_S: Final = 0.01
_QUIET_S: Final = 1.0
# A process that keeps generating code is reported again after this time, because it may run another
# program by then.
_GENERATED_INTERVAL_NS: Final = 10_000_000_000
_MOST_GENERATED: Final = 1 << 14
# Names of memory that is mapped as a file: memfds, and shared anonymous memory.
_MEMORY: Final = (b"/memfd:", b"/dev/zero")


NO_CPU: Final = -1


class CatcherState:
    """The state that the threads of the catcher share.

    ``lock`` guards all of it except ``outbox``, ``closer``, ``host``, ``grips`` (the pinned files,
    and None at the end), ``files``, ``shares``, ``users``, ``held``, lookups in ``recent``
    and ``sent``, and methods that say so. Each mapping waits for it, so no thread holds it for
    long. ``host`` is the mount namespace of the host. ``recent`` has the files that were sent, by
    place, and ``sent`` has them without their place. At most ``most_waiting`` files wait until they
    are sent.
    """

    def __init__(
        self,
        rings: Rings,
        outbox: Outbox,
        recent: RecentFiles,
        touches: Touches | None = None,
        alarm: Alarm | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self.rings = rings
        self.outbox = outbox
        self.recent = recent
        self.sent = RecentFiles()
        self.touches = touches
        self.alarm = alarm
        self.host = namespaces.initial().mnt
        # At most half of the descriptors wait to be sent; the rest is for lookups and rings.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most_waiting = max(min(_WAITING, (limit - _SPARE_FILES) // 2), 1)
        self.grips: SimpleQueue[Grip | None] = SimpleQueue()
        self.closer = Closer(urgent=True)
        self.held = HeldNamespaces(self.closer.close, most=min(_NAMESPACES, limit // 8))
        self.files = HostFiles()
        self.shares = FairShare()
        self.users = FileUsers()
        self.tasks = process_table.Tasks()
        self.silent = SilentProcesses()
        self.counts = Counts()
        self.ended = False
        self._followed = 0.0
        self._reports: deque[tuple[int, Home]] = deque()
        self._generated: dict[int, int] = {}

    def waiting(self) -> int:
        """Return the number of pinned files that are not yet sent; takes no lock."""
        return len(self.outbox) + self.grips.qsize()

    def catch_up(self) -> None:
        """Call `follow`, unless another thread has just called it; takes the lock."""
        # Every grabber that becomes idle calls this; without the check, all of them would wait for
        # the lock to read the same empty rings.
        if time.monotonic() - self._followed >= _STARTING_PAUSE_S / 2:
            with self.lock:
                self.follow()
            self.send_reports()

    def follow(self) -> None:
        """Apply the changes of processes since the last call."""
        self._followed = time.monotonic()
        for record in self.rings.changes():
            self.apply(record)

    def apply(self, record: Record) -> None:
        """Apply one record that is not about a mapping."""
        if isinstance(record, Forked):
            self.tasks.forked(record.pid, record.parent, record.time)
        elif isinstance(record, Exited):
            self.tasks.exited(record.pid, record.time, time.monotonic_ns())
            self._generated.pop(record.pid, None)
        elif isinstance(record, Entered):
            self.tasks.entered(record.pid, record.namespaces, record.time)
        elif isinstance(record, ExecutableMemory):
            home = self.tasks.home_at(record.pid, record.time)
            self.report_generated(record.pid, record.time, home)
        elif isinstance(record, LostRecords):
            self.counts.lost += record.count
            # A lost record may have been a setns(2) or unshare(2), so no home is certain any more.
            self.tasks.forget()
            self.outbox.put(Lost(record.count, "events came faster than they could be read"))
        else:
            assert isinstance(record, Mapped | GroupMade | Output)

    def report_generated(self, pid: int, time: int, home: Home) -> None:
        """Report soon that a process generates code, once in a while because JIT compilers change
        their memory all the time.
        """
        reported_ns = self._generated.get(pid)
        if reported_ns is not None and time - reported_ns < _GENERATED_INTERVAL_NS:
            return
        # The exit of a process removes its entry, unless the record of the exit was lost. To report
        # some processes twice costs less than to search for the dead ones.
        if len(self._generated) >= _MOST_GENERATED:
            self._generated.clear()
        self._generated[pid] = time
        self._reports.append((pid, home))

    def send_reports(self) -> None:
        """Send the reports of generated code; takes no lock, because sending takes a while.

        A report counts as one of the new files of its container or user, so a user who starts such
        processes without end uses up that share.
        """
        if not self._reports:
            return
        self.shares.refill(time.monotonic())
        while self._reports:
            try:
                pid, home = self._reports.popleft()
                share = home.share
                if home.mnt in (0, self.host):
                    share = of_user(user_of_process(pid))
            except (IndexError, OSError):  # another thread has sent it, or the process is gone
                continue
            if share == HOST or self.shares.admit(share):
                self.outbox.put(Generated(pid, share))
        self.outbox.flush()

    def look_around(self, close: Callable[[int], None]) -> None:
        """Look up homes of processes in /proc, and hold new mount namespaces. Takes no lock."""
        tasks = self.tasks
        if not tasks.has_strangers and not tasks.has_newcomers:
            return
        with self.lock:
            strangers, newcomers = tasks.strangers(), tasks.newcomers()
        # Newcomers first: their mount namespace ends with their last process, while the home of a
        # stranger can be read later.
        for pid, home in newcomers:
            self.hold(home, pid)
        for pid, home in strangers:
            process_table.look(pid, home, close)

    def hold(self, home: Home, pid: int) -> None:
        """Hold the mount namespace of a home for a moment longer, unless it is the host's.

        If held namespaces cannot be closed, no further one is held, because it would keep the files
        of a container for ever.
        """
        if home.mnt not in (0, self.host) and not self.closer.is_stuck():
            self.held.hold(home, pid)


class Lookout:
    """Pins the mappings of ``cpu``; belongs to one thread. ``state`` is shared by all threads.

    ``thread`` is its native ID. ``pause`` is the time in seconds after which to call `work` if no
    file is mapped before. A process that enters a new mount namespace wakes no thread. So the
    thread looks for such processes a few times after each mapping, with growing delays, and more
    often after a control group was made. The lookout of `NO_CPU` reads the mappings of known files
    on all CPUs, which wake no thread if the kernel's program is there.
    """

    def __init__(self, state: CatcherState, cpu: int) -> None:
        self._state = state
        self.cpu = cpu
        self._polls = cpu == NO_CPU
        self.pause = _BUSY_S if self._polls else _IDLE_S
        self._started = -_STARTING_S
        self._done: list[int] = []
        self._found: deque[tuple[Mapped, Home]] = deque()
        self._touched: list[Touch] = []
        self._call: tuple[float, int] | None = None
        self._is_woken = False
        self.thread = 0
        self.is_replaced = False

    @property
    def is_asking(self) -> bool:
        """True while the thread works on one process."""
        return self._call is not None

    def stuck(self, seconds: float) -> tuple[float, int] | None:
        """Return since when the thread works on one process, and its pid, if that takes longer than
        ``seconds``, and the kernel holds the thread; else None. Called in another thread.
        """
        # Read once: the grabber's thread sets it to None, or to its next process, at any moment.
        call = self._call
        if call is None or time.monotonic() - call[0] <= seconds or not is_held(self.thread):
            return None
        return call

    def replacement(self) -> Lookout:
        """Return a lookout for another thread, which takes over the waiting mappings.

        Called in another thread, while the thread of this lookout is stuck.
        """
        # Set first: the thread may return from its call at this moment, and must not take a mapping
        # from the deque that is exchanged below.
        self.is_replaced = True
        other = Lookout(self._state, self.cpu)
        other._started, other.pause = self._started, 0.0
        other._found, self._found = self._found, other._found
        other._touched, self._touched = self._touched, other._touched
        return other

    def finish(self) -> None:
        """Close the descriptors of a lookout that was replaced."""
        self._state.closer.close(self._done)

    def work(self) -> None:
        """Pin all files that were mapped since the last call, and hold new mount namespaces."""
        state = self._state
        # While the receiver takes nothing, further mappings stay in the ring.
        if state.waiting() >= state.most_waiting:
            self.pause = _RECEIVER_S
            return
        # This order matters: `rings.mappings` returns mappings before `follow` reads the changes
        # that caused them. A process waits until the record of its change is written, so the cause
        # of each mapping that was read is in a ring by then.
        records = state.rings.mappings(self.cpu)
        idle_s = _QUIET_S if self._polls else _IDLE_S
        if records or self._found or state.rings.is_pressed(self.cpu):
            self._pin(records)
            if self.is_replaced:
                return
            self.pause = _FIRST_PAUSE_S
            if state.touches is not None and not self._is_woken:
                self.pause = _BUSY_S if self._polls else _IDLE_S
        elif self.pause < idle_s:
            self.pause = self.pause * 2 if self.pause <= HOLD_S else idle_s
            state.catch_up()
        else:
            return
        if time.monotonic() - self._started < _STARTING_S:
            self.pause = _STARTING_PAUSE_S
        state.look_around(self._done.append)
        state.held.expire()
        if len(state.held):
            self.pause = min(self.pause, HOLD_S / 2)
        if self._done:
            state.closer.close(self._done)
            self._done.clear()

    def _pin(self, records: list[Record]) -> None:
        state, found = self._state, self._found
        self._is_woken = bool(found)
        with state.lock:
            state.follow()
            state.counts.records += len(records)
            for record in records:
                if isinstance(record, Mapped):
                    home = state.tasks.home_at(record.pid, record.time)
                    if not self._skips(record, home):
                        found.append((record, home))
                    # Some JIT compilers (that of .NET) map their code from a memfd: a mapping with
                    # a path, of which no record of anonymous code is made.
                    if record.path.startswith(_MEMORY):
                        state.report_generated(record.pid, record.time, home)
                # A runtime makes the control group before it starts the container's first process.
                elif isinstance(record, GroupMade):
                    self._is_woken = True
                    self._started = time.monotonic()
                elif isinstance(record, Output):
                    self._is_woken = True
                    self._touch(record)
                else:
                    state.apply(record)
        state.send_reports()
        if state.shares.is_pressed:
            state.shares.refill(time.monotonic())
        self._grab_all()
        if self._touched and not self.is_replaced and state.touches is not None:
            touched, self._touched = self._touched, []
            found.extend(state.touches.settle(touched))
            self._grab_all()

    def _grab_all(self) -> None:
        """Pin the files of all waiting mappings."""
        now, state = time.monotonic, self._state
        while True:
            try:
                record, home = self._found.popleft()
            except IndexError:  # another thread may take over the deque, so there is no test first
                break
            begin = now()
            self._call = begin, record.pid
            if state.alarm is not None:
                state.alarm.set()
            self._grab(record, home)
            if now() - begin > SLOW_S:
                self._charge(record.pid, now() - begin)
            # After the file: its mapping ends with this process, the mount namespace only with the
            # last process in it.
            state.hold(home, record.pid)
            if self.is_replaced:  # the call was answered late
                return
        self._call = None

    def _touch(self, record: Output) -> None:
        """Take a touch that the kernel's program reports."""
        touches = self._state.touches
        touch = decode_touch(record.data)
        if touch.is_limited or touches is None:
            self._started = time.monotonic()
        else:
            touches.add(touch)
            self._touched.append(touch)

    def _skips(self, record: Mapped, home: Home) -> bool:
        """Return True if the kernel's program would have reported an unknown file."""
        touches = self._state.touches
        return touches is not None and touches.skips(record, home)

    def _grab(self, record: Mapped, home: Home) -> None:
        """Pin a mapped file, unless it is known."""
        state = self._state
        if state.touches is not None and not home.is_known:
            # Its process may be gone by now, but others of the home may be there.
            home = process_table.look(record.pid, home, self._done.append)
            if state.touches.skips(record, home):
                return
        if not state.silent.is_calm and self._shuns(record):
            if _TRACES:
                _trace(record, "looked up by path only, because its process does not answer")
            if self._admits(record, home, known_user(record.pid)):
                state.grips.put((record, home, state.held.borrow(home), NoAnswer()))
            return
        if home.mnt == state.host:
            found = state.files.find(record) if home.is_known else None
            if found is not None:
                self._recognise(record, home, *found)
                if _TRACES:
                    _trace(record, "known")
                return
        elif state.shares.is_pressed:
            # events were lost, so its container must be looked up in case it floods
            if not home.mnt:
                home = process_table.look(record.pid, home, self._done.append)
            if home.mnt not in (0, state.host) and state.shares.is_exhausted(home.share):
                home = self._known(record, home)
                if home.mnt != state.host and state.shares.is_exhausted(home.share):
                    if _TRACES:
                        _trace(record, _DROPPED)
                    state.shares.drop(home.share, home, record.path)
                    return
        try:
            # First by the thread, because the first thread of its process may be gone; then by the
            # process, because the thread may be gone.
            try:
                task = b"/proc/%d" % (record.tid or record.pid)
                fd = self._open(record, home, task, record.end)
            except FileNotFoundError:
                fd = self._open_later(record, home)
        except OSError as error:
            if _TRACES:
                _trace(record, f"not pinned ({error.strerror}), given to the identifier")
            # A share was charged before for a process that is gone.
            if error.errno in procfs.GONE or self._admits(record, home, known_user(record.pid)):
                state.grips.put((record, home, state.held.borrow(home), error))
        else:
            if fd >= 0:
                if _TRACES:
                    _trace(record, "pinned, given to the identifier")
                state.grips.put((record, home, fd, None))

    def _charge(self, pid: int, seconds: float) -> None:
        """Charge the owner of a process for a slow answer; the process may be gone."""
        with contextlib.suppress(OSError), closing_fd(procfs.open_pid(pid)) as pid_fd:
            self._state.silent.charge(pid_fd, seconds)

    def _shuns(self, record: Mapped) -> bool:
        """Return True if the process must not be waited for: it is silent, or many of its owner
        are. Its files are then looked up by path only.
        """
        try:
            with closing_fd(procfs.open_pid(record.pid)) as pid_fd:
                silent = self._state.silent
                if silent.others(pid_fd, record.pid) < MOST_OF_AN_OWNER:
                    return False
                silent.add_unasked(record.pid)
                return True
        except NoAnswer:
            return True
        except OSError:
            return False  # it is gone

    def _open(self, record: Mapped, home: Home, task: bytes, end: int) -> int:
        """Return an O_PATH descriptor of the file that a task maps from ``record.start`` to
        ``end``; ``task`` is the path of its directory in /proc.

        Returns -1 if the file is known, is another than the record names, or exceeds its share.
        Raises OSError.
        """
        is_hosts = home.mnt == self._state.host
        # statx(2) and open(2) each look the link up, and each lookup takes mmap_lock for reading.
        # So both may wait for a process in execve(2), or for ever (docs/kernel-facts.md). A stat
        # before the open costs one lookup more for a new file, and saves one descriptor, and its
        # close, for each of the many known ones.
        link = task + b"/" + procfs.map_file_name(record.start, end)
        identity = inodes.identity_at(syscalls.AT_FDCWD, link)
        if not stat.S_ISREG(identity.mode):
            if _TRACES:
                _trace(record, "dropped, because it is no regular file")
            return -1
        file = file_key(identity)
        if home.is_known:
            key = place_key(home.mnt_ns_id, file, record.path)
            if key in self._state.recent:
                self._recognise(record, home, identity.ctime_ns, key)
                if _TRACES:
                    _trace(record, "known")
                if is_hosts:
                    self._state.files.add(record, identity, key)
                return -1
        is_copy = file in self._state.sent
        if not is_hosts and not self._admits(record, home, is_copy=is_copy):
            return -1
        # O_PATH asks no filesystem: an open for reading would call open() of a FUSE server, which
        # may not answer. `inodes.reopen_regular` opens it for reading later.
        fd = os.open(link, os.O_PATH | os.O_CLOEXEC)
        # Between statx(2) and open(2) the process may have mapped another file at the same address,
        # so the pinned file is compared with the record. Stacked filesystems may show one inode
        # number here and another there: then the name has to suffice.
        try:
            is_it = inodes.identity(fd, ask=False).ino == record.inode
            user = self._state.users.of(fd, identity, record.pid) if is_hosts else 0
        except BaseException:  # a closer closes it, because that may take long
            self._done.append(fd)
            raise
        if is_hosts and not self._admits(record, home, user):
            self._done.append(fd)
            return -1
        if is_it or _is_same_name(link, record):
            return fd
        self._done.append(fd)
        raise ProcessLookupError(errno.ESRCH, "the process runs another program by now")

    def _open_later(self, record: Mapped, home: Home) -> int:
        """Do as `_open`, for a mapping that the first thread of its process does not have any more.

        On the host, the file itself shows whose it is; it is looked up from our own root.
        """
        state = self._state
        if home.mnt not in (0, state.host):
            is_admitted = self._admits(record, home)  # the lookups in other places take longest
        else:
            # The lookup by path races with a rename, so `found_here` compares the inode.
            fd, user = found_here(record, state.host), NOBODY
            try:
                if fd >= 0:
                    identity = inodes.identity(fd, ask=False)
                    if place_key(home.mnt_ns_id, file_key(identity), record.path) in state.recent:
                        if _TRACES:
                            _trace(record, "known")
                        return -1
                    user = state.users.of(fd, identity, record.pid)
                is_admitted = self._admits(record, home, user)
                if is_admitted and fd >= 0 and home.mnt:
                    found, fd = fd, -1
                    return found
            finally:
                if fd >= 0:
                    self._done.append(fd)
        if not is_admitted:
            return -1
        with closing_fd(procfs.open_pid(record.pid)) as pid_fd:
            # The record has the end at the time of mmap(2). The loader may have mapped over a part.
            end = end_now(pid_fd, record)
            if not end:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return self._open(record, home, _directory(pid_fd), end)

    def _recognise(self, record: Mapped, home: Home, ctime_ns: int, place: bytes) -> None:
        if self._state.touches is not None:
            self._state.touches.recognise(record, home, ctime_ns, place)

    def _admits(
        self, record: Mapped, home: Home, user: int | None = None, *, is_copy: bool = False
    ) -> bool:
        """Return True if the share of a new file is not used up.

        On the host, and at an unknown place if it is given, the share is that of ``user``. Root has
        no limit there.
        """
        shares, share = self._state.shares, home.share
        if user is not None and home.mnt in (0, self._state.host):
            share = of_user(user)
        elif not home.mnt:
            return True
        if share == HOST or shares.admit(share, is_copy=is_copy):
            return True
        if not home.is_known and home.mnt != self._state.host:
            home = self._known(record, home)
            if home.mnt == self._state.host or shares.admit(home.share, is_copy=is_copy):
                return True
            share = home.share
        if _TRACES:
            _trace(record, _DROPPED)
        shares.drop(share, home, record.path)
        return False

    def _known(self, record: Mapped, home: Home) -> Home:
        """Return a home with the share of its container, which is that of many others before."""
        if home.is_known:
            return home
        return process_table.look(record.pid, home, self._done.append)


def _is_same_name(link: bytes, record: Mapped) -> bool:
    try:
        return os.path.basename(os.readlink(link)) == os.path.basename(record.path)
    except OSError:
        return False
