# SPDX-License-Identifier: Apache-2.0
"""The program without its start: a process that has imported all of it, and forks for a command.

To start Python and import the program is most of what a short command costs, and the tests run
thousands. Each command is still a process of its own, with its session, outputs, exit code and
command line in /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

_FORKING = frozenset({"up", "mount", "watch"})
"""Commands that `Warm.run` does not run: their processes go on when they have ended."""

_ROOM = "-" * 4096
"""Place for the words of a command, see `_show`."""

# What Python itself looks at when it starts.
_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_")


class Done(NamedTuple):
    """How a command ended; the exit code is negative after a signal, and None after a timeout."""

    code: int | None
    out: bytes
    err: bytes


class Started:
    """A process that a server has forked, with the methods of `subprocess.Popen`.

    Several threads may wait for it.
    """

    def __init__(self, pid: int, reply: socket.socket) -> None:
        """``reply`` gets the exit code."""
        self.pid = pid
        self.returncode: int | None = None
        self._reply = reply
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises `subprocess.TimeoutExpired`."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal if the process runs."""
        # The server has not waited for the process, so nothing else has its number.
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        # Another thread may have read it, and closed the socket, since it was looked at.
        with contextlib.suppress(ValueError):
            if self.returncode is None and select.select([self._reply], [], [], timeout)[0]:
                with self._lock:
                    if self.returncode is None:
                        self.returncode = int(self._reply.recv(64))
                        self._reply.close()
        return self.returncode


class Warm:
    """A server that is started with the first command, and ends with this process at the latest."""

    def __init__(self, root: Path) -> None:
        """``root`` is the working directory of the commands, where the program is imported."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            argv = [sys.executable, "-m", "tests.support.harness.warm", str(its.fileno()), _ROOM]
            self._server = subprocess.Popen(
                argv, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, cwd=root
            )
        self._socket = ours
        self._environment = _at_start(os.environ)
        self._network = _network()

    def suits(self, words: Sequence[str], environ: Mapping[str, str] = os.environ) -> bool:
        """Return False if `run` cannot run a command, or `can_start` refuses the environment."""
        return self.can_start(environ) and not _FORKING.intersection(words)

    def can_start(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Return False if a Python that starts anew would have another environment or network."""
        return _at_start(environ) == self._environment and _network() == self._network

    def start(
        self, words: Sequence[str], out: int, err: int, environ: Mapping[str, str] = os.environ
    ) -> Started:
        """Start a command without a terminal or input; it writes to the descriptors."""
        request = json.dumps({"words": list(words), "environ": dict(environ)}).encode()
        reply, its_reply = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with os.fdopen(os.memfd_create("request"), "r+b", buffering=0) as message, its_reply:
            message.write(request)
            handed = [message.fileno(), out, err, its_reply.fileno()]
            socket.send_fds(self._socket, [b"x"], handed)
        return Started(int(reply.recv(64)), reply)

    def run(
        self, words: Sequence[str], timeout: float, environ: Mapping[str, str] = os.environ
    ) -> Done:
        """Run one command to its end, without a terminal or input."""
        with contextlib.ExitStack() as stack:
            out, its_out = os.pipe()
            err, its_err = os.pipe()
            for fd in (out, err):
                stack.callback(os.close, fd)
            try:
                process = self.start(words, its_out, its_err, environ)
            finally:
                os.close(its_out)
                os.close(its_err)
            deadline = time.monotonic() + timeout
            texts, ended = _read((out, err), deadline)
            try:
                code: int | None = process.wait(max(0, deadline - time.monotonic()) * ended)
            except subprocess.TimeoutExpired:
                code = None
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return Done(code, *texts)

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        self._server.wait(30)


def _at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in environ if name.startswith(_AT_START)}


def _network() -> int:
    """The network namespace of this thread."""
    return os.stat("/proc/thread-self/ns/net").st_ino


def _read(fds: Sequence[int], deadline: float) -> tuple[list[bytes], bool]:
    """What comes from pipes, and whether all of them ended in time."""
    texts = dict.fromkeys(fds, b"")
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    left = len(texts)
    while left and (remaining := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(remaining * 1000):
            part = os.read(fd, 1 << 16)
            texts[fd] += part
            if not part:
                poll.unregister(fd)
                left -= 1
    return list(texts.values()), not left


# --- the server ----------------------------------------------------------------------------------


class _Command(NamedTuple):
    pid: int
    reply: socket.socket


def _import_all() -> None:
    package = importlib.import_module("buildidfs")
    for module in pkgutil.walk_packages(package.__path__, "buildidfs."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    gc.freeze()  # so that no collection copies their pages


def _serve(requests: socket.socket) -> Sequence[str] | None:
    """Fork for each request. Returns the words of a command in its process, None at the end."""
    running: dict[int, _Command] = {}
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != requests.fileno():
                poll.unregister(fd)
                command = running.pop(fd)
                os.close(fd)
                _, status = os.waitpid(command.pid, 0)
                with command.reply, contextlib.suppress(BrokenPipeError):
                    command.reply.send(b"%d" % os.waitstatus_to_exitcode(status))
                continue
            data, fds, _, _ = socket.recv_fds(requests, 1, 4)
            if not data:
                return None
            message, out, err, reply = fds
            pid = os.fork()
            if not pid:
                for pidfd, other in running.items():
                    os.close(pidfd)
                    other.reply.close()
                requests.close()
                os.close(reply)
                return _become(message, out, err)
            for each in (message, out, err):
                os.close(each)
            command = _Command(pid, socket.socket(fileno=reply))
            command.reply.send(b"%d" % pid)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = command
            poll.register(pidfd, select.POLLIN)


def _become(message: int, out: int, err: int) -> Sequence[str]:
    """Be the process of a command: its session, outputs and environment."""
    os.setsid()
    with open(message, "rb") as file:
        file.seek(0)
        request = json.loads(file.read())
    for source, target in ((out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(request["environ"])
    words: list[str] = request["words"]
    _show([sys.executable, "-m", "buildidfs", *words])
    return words


def _show(argv: Sequence[str]) -> None:
    """Write these words over those of the server, so that /proc/self/cmdline has them.

    Source: arg_start and arg_end in /proc/PID/stat, proc(5).
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    first, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in argv)
    if len(text) <= end - first:
        ctypes.memmove(first, text.ljust(end - first, b"\0"), end - first)


if __name__ == "__main__":
    _import_all()
    found = _serve(socket.socket(fileno=int(sys.argv[1])))
    if found is not None:
        from buildidfs.cli.main import run

        sys.argv[1:] = found
        run()
