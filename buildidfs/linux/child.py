# SPDX-License-Identifier: Apache-2.0
"""Child processes: start, signal, wait, and abandon.

The kernel may keep even a killed process, for example one that waits for a filesystem whose server
does not answer. Such a child is abandoned. An abandoned child that has ended is reaped when another
one is abandoned.

Importing this is cheap: `subprocess` is imported when the first program is started.

Source: pidfd_open(2), waitpid(2), PR_SET_PDEATHSIG(2const).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from buildidfs.linux import syscalls

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping, Sequence
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
