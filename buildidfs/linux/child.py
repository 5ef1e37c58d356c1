# SPDX-License-Identifier: Apache-2.0
"""Child processes: start, signal, wait, abandon, and start again.

The kernel may keep even a killed process, for example one that waits for a filesystem whose server
does not answer. Such a child is abandoned. An abandoned child that has ended is reaped when another
one is abandoned.

`Supervised` is a program of this package behind a socket, which is started again after it ends. The
program sends one packet when it is ready, or when it cannot work, in the words of sd_notify(3).
After that its packets are those of its protocol. `SupervisorLoop` is the main loop of a process
that keeps other processes running: one poll(2) waits for signals, for the descriptors of all
processes, and for the next start.

Importing this is cheap: `subprocess` is imported when the first program is started.

Source: pidfd_open(2), waitpid(2), PR_SET_PDEATHSIG(2const).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

from buildidfs.backoff import Attempts, Backoff
from buildidfs.linux import sdnotify, syscalls

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import IO


PIPE: Final = -1
"""For a stream of `start`: a pipe, whose other end is ``stdin`` or ``stdout`` of the `Child`."""

DEVNULL: Final = -3
"""For a stream of `start`: /dev/null."""

PACKAGE_PATH: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The directory that this package is imported from."""

_MAIN: Final = """
import sys
sys.path[:0] = sys.argv[1].split("\\n")
__import__(sys.argv[2], fromlist=("main",)).main(sys.argv[3:])
"""
# A program that gives up its rights gets `_MAIN`: it does not log.
_LOGGING_MAIN: Final = _MAIN.replace(
    "__import__",
    """\
import os
if "BUILDIDFS_LOG" in os.environ:
    __import__("buildidfs.log", fromlist=("adopt",)).adopt(sys.argv[2])
__import__""",
)
_PAUSE_S: Final = 0.01


class Child:
    """A child process; only this object waits for it. Thread-safe."""

    def __init__(self, pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.code: int | None = None
        """The exit status, or minus the number of the signal that ended the process; None while it
        lives.
        """
        self.stdin: IO[bytes] | None = process.stdin if process is not None else None
        self.stdout: IO[bytes] | None = process.stdout if process is not None else None
        self._process = process
        self._pidfd = -1
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the pidfd, which is readable once the process has ended. Raises OSError."""
        with self._lock:
            if self._pidfd < 0 and self.code is None:
                self._pidfd = os.pidfd_open(self.pid)
            return self._pidfd

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the process, or with ``group`` to its process group. Does nothing if the
        process is gone, or the kernel does not permit the signal.
        """
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if self.code is None:  # the process is not reaped, so no other process has its number
                (os.killpg if group else os.kill)(self.pid, number)

    def poll(self) -> int | None:
        """Reap the process if it has ended, and return its ``code``."""
        with self._lock:
            if self.code is None:
                self.code = self._reap()
                if self.code is not None and self._pidfd >= 0:
                    os.close(self._pidfd)
                    self._pidfd = -1
            return self.code

    def _reap(self) -> int | None:
        if self._process is not None:
            return self._process.poll()
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the end of the process and return its ``code``; None after ``seconds``."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while (code := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._pause(left)
        return code

    def _pause(self, seconds: float | None) -> None:
        poll = select.poll()
        try:
            poll.register(self.fileno(), select.POLLIN)
        except (OSError, ValueError):  # there is no pidfd, or another thread has reaped the process
            time.sleep(_PAUSE_S if seconds is None else min(_PAUSE_S, seconds))
        else:
            poll.poll(None if seconds is None else seconds * 1000)

    def end(self, seconds: float) -> bool:
        """Kill the process; return True if it ends within ``seconds``, else abandon it."""
        self.send(signal.SIGKILL)
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                stream.close()
        if self.wait(seconds) is not None:
            return True
        if self not in _left_behind:
            _left_behind.append(self)
        return False


_left_behind: list[Child] = []


def left_behind() -> int:
    """Reap the killed children that have ended; return the number of those that the kernel still
    keeps.
    """
    _left_behind[:] = [child for child in _left_behind if child.poll() is None]
    return len(_left_behind)


def start(
    argv: Sequence[str | bytes],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: int = DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
    new_session: bool = False,
    end_with_us: signal.Signals | None = None,
) -> Child:
    """Start a program. A stream is a descriptor, `PIPE`, `DEVNULL`, or None for ours.

    In a ``new_session`` the terminal's ^C does not reach the program. With ``end_with_us``, the
    program gets that signal when the starting thread ends. Raises OSError.
    """
    # most commands start no program, and the import takes as long as a few hundred files
    import subprocess

    left_behind()
    parent = os.getpid()
    try:
        process = subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            env=env,
            cwd=cwd,
            pass_fds=pass_fds,
            start_new_session=new_session,
            preexec_fn=(lambda: syscalls.end_with(parent, end_with_us)) if end_with_us else None,
        )
    except subprocess.SubprocessError as error:
        raise OSError(errno.ECHILD, str(error)) from error
    return Child(process.pid, process)


def fork(work: Callable[[], object]) -> Child:
    """Run ``work`` in a copy of this process; the copy ends afterwards. This process must have one
    thread.

    Raises OSError.
    """
    left_behind()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return Child(pid)


def python(module: str, *words: str, paths: Sequence[str] = ()) -> list[str]:
    """Return the arguments of a Python that runs ``main(words)`` of a module of this package.

    ``paths`` are further directories for imports.
    """
    return ["-c", _MAIN, "\n".join((PACKAGE_PATH, *paths)), module, *words]


def module_command(module: str, *words: str) -> list[str]:
    """Return the command that runs ``main(words)`` of a module with the imports of this process,
    and logs as this process does.
    """
    paths = list(filter(None, sys.path))
    _, _, *arguments = python(module, *words, paths=paths)
    return [sys.executable, "-I", "-c", _LOGGING_MAIN, *arguments]


def start_with_socket(
    module: str, *words: str, quiet: bool = False, buffer: int = 0
) -> tuple[Child, socket.socket]:
    """Start ``main`` of a module of this package as a program, with a socket of packets to it.

    The first argument of the program is the descriptor of its end of the socket. With ``quiet``,
    the program does not get our output streams, because an abandoned program would keep them open.
    ``buffer`` is the size of the socket's buffer, as far as the kernel allows it. Raises OSError.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its, contextlib.ExitStack() as on_error:
        on_error.enter_context(ours)
        for end in (ours, its) if buffer else ():
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        output = DEVNULL if quiet else None
        child = start(
            module_command(module, str(its.fileno()), *words),
            cwd="/",
            stdout=output,
            stderr=output,
            pass_fds=[its.fileno()],
        )
        on_error.pop_all()
    return child, ours


END_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that ask a supervisor to end."""


class KeptProcess(Protocol):
    """A process that a supervisor starts again after it has ended."""

    starts: Attempts

    @property
    def is_waiting(self) -> bool:
        """True if no process runs, and one is to be started when that is due."""

    def start(self) -> None:
        """Start the process. A failure is recorded in `starts`."""

    def descriptors(self) -> dict[int, Callable[[], None]]:
        """Return the descriptors to wait for, each with the function to call when it is
        readable.
        """


class SupervisorLoop:
    """Waits for signals and processes. Needs the main thread of a process without other threads.

    `signals` has the numbers of the ``handled`` signals that came. The caller clears it.
    """

    def __init__(
        self,
        processes: Sequence[KeptProcess],
        handled: Sequence[signal.Signals] = END_SIGNALS,
    ) -> None:
        self._processes = processes
        self._handled = handled
        self.signals: list[int] = []
        self._wake = self._woken = -1

    @property
    def descriptors(self) -> tuple[int, int]:
        """The descriptors that a forked child must close."""
        return self._wake, self._woken

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """Receive signals while the block runs."""
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = {}
        wakeup = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        try:
            for number in self._handled:
                before[number] = signal.signal(number, lambda *_: None)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            os.close(self._wake)
            os.close(self._woken)

    def start_due(self) -> None:
        """Start the processes whose time has come."""
        for each in self._processes:
            if each.is_waiting and each.starts.is_due:
                each.start()

    def wait(self, until: float | None = None) -> None:
        """Wait for an event, for the next start or until a time (time.monotonic()), and handle
        events.
        """
        due = [each.starts.due for each in self._processes if each.is_waiting]
        if until is not None:
            due.append(until)
        handlers = {self._wake: self._take_signals}
        for each in self._processes:
            handlers |= each.descriptors()
        poll = select.poll()
        for fd in handlers:
            poll.register(fd, select.POLLIN)
        timeout = max(0.0, (min(due) - time.monotonic()) * 1000 + 1) if due else None
        for fd, _ in poll.poll(timeout):
            handlers[fd]()

    def _take_signals(self) -> None:
        numbers = os.read(self._wake, 256)
        self.signals += [number for number in numbers if number in self._handled]


_log = logging.getLogger(__name__)

RESTARTS: Final = Backoff(0.25, 5.0)
"""The delays before a program is started again on demand."""

START_S: Final = 20.0
"""The time in seconds after which a program that is not ready is killed."""

_PACKET: Final = 4096
_KILL_S: Final = 1.0


class Supervised:
    """A program of this package, started with the first call of `start`. Not thread-safe.

    ``module`` has the ``main`` of the program, whose arguments are the descriptor of its end of the
    socket, and ``words``. The first packet to it is ``introduction``, unless that is empty. For
    ``quiet`` and ``buffer`` see `child.start_with_socket`.
    """

    def __init__(
        self,
        module: str,
        *words: str,
        introduction: bytes = b"",
        restarts: Backoff = RESTARTS,
        quiet: bool = False,
        buffer: int = 0,
    ) -> None:
        self._command = module, words
        self._introduction = introduction
        self._quiet = quiet
        self._buffer = buffer
        self.restarts = Attempts(restarts)
        """The starts. The caller records in it that the program works, or has ended by itself."""
        self.process: Child | None = None
        self.channel: socket.socket | None = None
        """The socket of the running program."""
        self.status = ""
        """The text with which the program reported that it is ready."""

    @property
    def pid(self) -> int:
        """The process ID of the program, 0 if none runs."""
        return 0 if self.process is None else self.process.pid

    def start(self) -> socket.socket:
        """Return the socket of the program. If none runs, start it, and wait until it is ready.

        Raises OSError: BlockingIOError if the next start is not due yet, TimeoutError, and the
        reason of a program that cannot work.
        """
        if self.channel is not None:
            return self.channel
        if not self.restarts.is_due:
            raise BlockingIOError(errno.EAGAIN, "it failed, and is not started again yet")
        module, words = self._command
        try:
            self.process, self.channel = start_with_socket(
                module, *words, quiet=self._quiet, buffer=self._buffer
            )
            self._await_ready(self.channel)
        except OSError as error:
            _log.debug("%s: not started: %s", module, error.strerror)
            self.kill(_KILL_S)
            self.restarts.failed()
            raise
        _log.debug("%s: started, pid %d", module, self.pid)
        return self.channel

    def _await_ready(self, channel: socket.socket) -> None:
        channel.settimeout(START_S)
        try:
            if self._introduction:
                channel.send(self._introduction)
            report = sdnotify.decoded(channel.recv(_PACKET))
        except TimeoutError:
            raise TimeoutError(errno.ETIMEDOUT, f"not ready within {START_S:g} s") from None
        except ConnectionError:
            report = {}
        channel.settimeout(None)
        self.status = report.get("STATUS", "")
        if report.get("READY") == "1":
            return
        if report.get("ERRNO", "").isdecimal():
            raise OSError(int(report["ERRNO"]), self.status)
        raise OSError(errno.ECHILD, "it ended before it was ready")

    def close(self, seconds: float) -> bool:
        """Close the socket, so that the program ends. Kill it if it has not ended after a time;
        return False then. Safe to call twice.
        """
        self._close_channel()
        has_ended = self.process is None or self.process.wait(seconds) is not None
        if has_ended:
            _log.debug("%s: ended", self._command[0])
            self.process = None
        else:
            self.kill(seconds)
        return has_ended

    def kill(self, seconds: float) -> Child | None:
        """Kill the program; return its process if it has not ended after a time."""
        self._close_channel()
        process, self.process = self.process, None
        if process is not None:
            _log.debug("%s: killed, pid %d", self._command[0], process.pid)
        return None if process is None or process.end(seconds) else process

    def _close_channel(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            with contextlib.suppress(OSError):
                # A thread may read another descriptor of it, which close() leaves open.
                channel.shutdown(socket.SHUT_RDWR)
            channel.close()


# --- in the program ------------------------------------------------------------------------------


def report_ready(channel: socket.socket, status: str = "") -> None:
    """Report on the socket of this program that it is ready. Raises OSError."""
    channel.send(sdnotify.encoded("READY=1", f"STATUS={status}"))


def report_failure(channel: socket.socket, number: int, reason: str) -> None:
    """Report on the socket of this program that it cannot work, with an error number."""
    with contextlib.suppress(OSError):  # the other end is closed
        channel.send(sdnotify.encoded(f"ERRNO={number}", f"STATUS={reason or os.strerror(number)}"))
