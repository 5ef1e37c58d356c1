# SPDX-License-Identifier: Apache-2.0
"""The process that catches files in the moment they are mapped.

A process may be gone a fraction of a millisecond after it has mapped its last file, and with it
the mount namespace and the filesystem. So this one does nothing but to look at each mapping and,
if it does not know the file, to open it and hand the descriptor on: one thread that runs before
all others, no store, no waiting for whoever receives. What it opens stays readable whatever
becomes of the container.

It is a program of its own, started by `watcher.Watcher`, that talks over a socket (`messages`).
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from buildidfs.capture import files, messages, tasks
from buildidfs.capture.elsewhere import Elsewhere
from buildidfs.capture.messages import Caught, Counts, Failed, Lost, Missed, Options, Ready
from buildidfs.capture.rings import Rings
from buildidfs.capture.slow import SlowMounts
from buildidfs.formats.perfrecords import Entered, Exited, Forked, Mapped
from buildidfs.linux import openat2, parents, scheduling, statx, syscalls
from buildidfs.model import BuildId, FileIdentity, fingerprint

if TYPE_CHECKING:
    from buildidfs.capture.tasks import Home
    from buildidfs.formats.perfrecords import Record

_TICK_S: Final = 1.0
_REMEMBERED: Final = 1 << 14
_OPEN_FILES: Final = 1024
_WAITING: Final = 8192
_KEY: Final = struct.Struct("=QQQQqqIII")
_DELETED: Final = b" (deleted)"
_GONE: Final = frozenset((errno.ENOENT, errno.ESRCH))


class Catcher:
    """Catches files until the other end of ``sock`` is closed."""

    def __init__(self, sock: socket.socket, options: Options) -> None:
        self._socket = sock
        self._options = options
        self._epoll = select.epoll()
        self._tasks = tasks.Tasks()
        self._slow = SlowMounts()
        self._elsewhere = Elsewhere()
        # Two generations: what was met since the last change, and before.
        self._met: dict[bytes, None] = {}
        self._met_before: dict[bytes, None] = {}
        self._outgoing: deque[tuple[bytes, int]] = deque()
        self._held = 0
        self._is_blocked = False
        self._records = self._caught = self._missed = self._unpinned = self._lost = 0
        self._said = Counts()

    def run(self) -> None:
        """Work until nobody listens any more. Raises OSError where events are refused."""
        self._rings = Rings(self._epoll, prompt=self._options.strict)
        self._socket.setblocking(False)
        self._epoll.register(self._socket.fileno(), select.EPOLLIN)
        degraded = [text for text in (scheduling.hurry(),) if text]
        self._say(Ready(tuple(degraded)))
        # Nothing below makes cycles; a collection would take longer than a process may live.
        gc.collect()
        gc.freeze()
        gc.disable()
        due = time.monotonic() + _TICK_S
        try:
            while self._turn(max(0.0, due - time.monotonic())):
                if time.monotonic() >= due:
                    self._tick()
                    due = time.monotonic() + _TICK_S
        finally:
            self._rings.close()

    def _turn(self, timeout: float) -> bool:
        """Wait for something, and deal with all there is; False at the end."""
        own = self._socket.fileno()
        for fd, _ in self._epoll.poll(timeout):
            if fd == own and not self._listen():
                return False
        # As long as nobody takes what we have, the rings are the only place for more.
        if len(self._outgoing) < _WAITING:
            records = self._rings.drain()
            self._records += len(records)
            for record in records:
                self._take(record)
        self._flush()
        return True

    def _tick(self) -> None:
        if self._rings.follow_cpus():
            self._say(Lost(0, "CPUs were turned on or off"))
        counts = Counts(self._records, self._caught, self._missed, self._unpinned, self._lost)
        if counts != self._said:
            self._said = counts
            self._say(counts)

    def _take(self, record: Record) -> None:
        if isinstance(record, Mapped):
            self._mapped(record)
        elif isinstance(record, Forked):
            self._tasks.forked(record.pid, record.parent)
        elif isinstance(record, Exited):
            self._tasks.exited(record.pid)
        elif isinstance(record, Entered):
            self._tasks.entered(record.pid, record.namespaces)
        else:
            self._lost += record.count
            self._say(Lost(record.count, "events came faster than they could be read"))

    # --- one mapping -----------------------------------------------------------------------

    def _mapped(self, record: Mapped) -> None:
        path = record.path
        if path[:1] != b"/" or path[:2] == b"//":
            return  # [vdso], anonymous memory
        link = b"/proc/%d/map_files/%x-%x" % (record.pid, record.start, record.end)
        home = self._tasks.home(record.pid)
        try:
            identity = statx.identity_at(syscalls.AT_FDCWD, link, ask=False)
            if not stat.S_ISREG(identity.mode):
                return
            key = _key(home.mnt_ns_id, identity, path)
            if self._is_met(key):
                return
            fd = os.open(link, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            self._vanished(record, home, error)
            return
        self._catch(record, home, key, fd)

    def _catch(self, record: Mapped, home: Home, key: bytes, path_fd: int) -> None:
        """Hold the file behind an O_PATH descriptor, if it is the one that was mapped."""
        fd = path_fd
        try:
            identity = statx.identity(path_fd)
            if identity.ino != record.inode and not self._is_same_name(record):
                return  # something else is mapped there by now, which is another record
            slow = self._slow.is_slow(identity, home.mnt_ns_id)
            if not slow:
                fd = openat2.reopen_regular(path_fd)
            self._send_file(record, home, key, identity, fd, slow)
        except OSError as error:
            self._miss(record, error)
        finally:
            if fd != path_fd:
                os.close(path_fd)

    def _vanished(self, record: Mapped, home: Home, error: OSError) -> None:
        """It is not mapped any more, or may not be looked at that way."""
        fd = self._elsewhere.find(record, home) if error.errno in _GONE else -1
        if fd < 0:
            self._miss(record, error)
            return
        try:
            identity = statx.identity(fd)
        except OSError as failed:
            os.close(fd)
            self._miss(record, failed)
            return
        key = _key(home.mnt_ns_id, identity, record.path)
        if self._is_met(key):
            os.close(fd)
            return
        self._send_file(record, home, key, identity, fd, slow=False)

    def _is_same_name(self, record: Mapped) -> bool:
        """Whether the name is that of the record: filesystems made of others number differently."""
        link = b"/proc/%d/map_files/%x-%x" % (record.pid, record.start, record.end)
        return os.path.basename(os.readlink(link)) == os.path.basename(record.path)

    def _is_met(self, key: bytes) -> bool:
        if key in self._met:
            return True
        if key in self._met_before:
            self._meet(key)
            return True
        return False

    def _meet(self, key: bytes) -> None:
        if len(self._met) >= _REMEMBERED:
            self._met_before = self._met
            self._met = {}
        self._met[key] = None

    def _send_file(
        self,
        record: Mapped,
        home: Home,
        key: bytes,
        identity: FileIdentity,
        fd: int,
        slow: bool,
    ) -> None:
        """Hand a file on; when too many are waiting, only what it is. Takes the descriptor."""
        build_id = None
        if self._held >= _OPEN_FILES and not slow:
            found = files.identify(fd)
            os.close(fd)
            fd = -1
            self._unpinned += 1
            if not isinstance(found, BuildId):
                return
            build_id = found
        else:
            self._meet(key)
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
        self._say(message, fd)

    def _miss(self, record: Mapped, error: OSError) -> None:
        self._missed += 1
        reason = error.strerror or str(error)
        self._say(Missed(record.pid, record.path, reason, error.errno or 0))

    # --- the other end ---------------------------------------------------------------------

    def _say(self, message: messages.Message, fd: int = -1) -> None:
        """Queue a message, and with it a descriptor, which is closed when it is sent."""
        self._outgoing.append((messages.encode(message), fd))
        if fd >= 0:
            self._held += 1
        if len(self._outgoing) > _OPEN_FILES:
            self._flush()

    def _flush(self) -> None:
        while self._outgoing:
            data, fd = self._outgoing[0]
            try:
                messages.send(self._socket, data, fd)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno not in (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM):
                    raise SystemExit(0) from error  # nobody listens any more
                break
            self._outgoing.popleft()
            if fd >= 0:
                self._held -= 1
                os.close(fd)
        if bool(self._outgoing) != self._is_blocked:
            self._is_blocked = not self._is_blocked
            more = select.EPOLLOUT if self._is_blocked else 0
            self._epoll.modify(self._socket.fileno(), select.EPOLLIN | more)

    def _listen(self) -> bool:
        """Read what the other end says; False when it has gone."""
        while True:
            try:
                received = messages.receive(self._socket)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if received is None:
                return False
            message, _ = received
            if isinstance(message, messages.Forget):
                for key in message.keys:
                    self._met.pop(key, None)
                    self._met_before.pop(key, None)


def _key(mnt_ns_id: int, identity: FileIdentity, path: bytes) -> bytes:
    """What stands for a file at a path in a mount namespace."""
    return fingerprint(
        _KEY.pack(
            mnt_ns_id,
            identity.dev,
            identity.ino,
            identity.size,
            identity.mtime_ns,
            identity.ctime_ns,
            identity.mode,
            identity.uid,
            identity.gid,
        )
        + (identity.scope or b"")
        + path
    )


def main(argv: list[str]) -> int:
    """Run a catcher on the socket and with the options named by ``argv``."""
    import msgspec

    sock = socket.socket(fileno=int(argv[0]))
    options = msgspec.json.decode(argv[1], type=Options)
    scheduling.name_thread(b"buildidfs-catch")
    # Meant for who started us, at a terminal or by systemd; we end when nobody listens any more.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        parents.end_with(int(argv[2]), signal.SIGKILL)
        Catcher(sock, options).run()
    except OSError as error:
        reason = error.strerror or str(error)
        privilege = error.errno in (errno.EACCES, errno.EPERM)
        sock.setblocking(True)
        messages.send(sock, messages.encode(Failed(reason, privilege)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
