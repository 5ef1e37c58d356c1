# SPDX-License-Identifier: Apache-2.0
"""The program without its start: a process that has imported all of it, and forks for a command.

To start Python and import the program is most of what a short command costs, and the tests run
thousands. Each command is still a process of its own, with its session, outputs and exit code; its
command line in /proc is that of the server, ``python -m tests.support.warm FD``.
"""

from __future__ import annotations

import contextlib
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
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

_LASTING = frozenset({"up", "mount", "watch"})
"""Commands that go on in the background, where they are looked for by their command line."""

# What Python itself looks at when it starts.
_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_")


class Done(NamedTuple):
    """How a command ended; the exit code is negative after a signal, and None after a timeout."""

    code: int | None
    out: bytes
    err: bytes


class Warm:
    """A server that is started with the first command, and ends with this process at the latest."""

    def __init__(self, root: Path) -> None:
        """``root`` is the working directory of the commands, where the program is imported."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            argv = [sys.executable, "-m", "tests.support.warm", str(its.fileno())]
            self._server = subprocess.Popen(
                argv, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, cwd=root
            )
        self._socket = ours
        self._environment = _at_start(os.environ)

    def suits(self, words: Sequence[str], environ: Mapping[str, str] = os.environ) -> bool:
        """Return False if a command or the environment is one for a Python that starts anew."""
        return _at_start(environ) == self._environment and not _LASTING.intersection(words)

    def run(
        self, words: Sequence[str], timeout: float, environ: Mapping[str, str] = os.environ
    ) -> Done:
        """Run one command to its end, without a terminal or input."""
        request = json.dumps({"words": list(words), "environ": dict(environ)}).encode()
        with contextlib.ExitStack() as stack:
            message = os.fdopen(os.memfd_create("request"), "r+b", buffering=0)
            stack.enter_context(message).write(request)
            reply, its_reply = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(reply)
            with its_reply:
                out, its_out = os.pipe()
                err, its_err = os.pipe()
                for fd in (out, err):
                    stack.callback(os.close, fd)
                handed = [message.fileno(), its_out, its_err, its_reply.fileno()]
                socket.send_fds(self._socket, [b"x"], handed)
                os.close(its_out)
                os.close(its_err)
            pid = int(reply.recv(64))
            deadline = time.monotonic() + timeout
            texts, ended = _read((out, err), deadline)
            if ended and _readable(reply, deadline):
                code: int | None = int(reply.recv(64))
            else:
                code = None
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        return Done(code, *texts)

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        self._server.wait(30)


def _at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in environ if name.startswith(_AT_START)}


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


def _readable(reply: socket.socket, deadline: float) -> bool:
    return bool(select.select([reply], [], [], max(0, deadline - time.monotonic()))[0])


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
    return words


if __name__ == "__main__":
    _import_all()
    found = _serve(socket.socket(fileno=int(sys.argv[1])))
    if found is not None:
        from buildidfs.cli.main import run

        sys.argv[1:] = found
        run()
