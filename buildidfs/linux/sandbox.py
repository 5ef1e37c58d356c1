# SPDX-License-Identifier: Apache-2.0
"""Running a program that reads what strangers have made: with nothing that it does not need.

`linux.confined` is the helper that gives up the rest and becomes the program.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from buildidfs.linux import confined

_START: Final = """
import sys
sys.path.insert(0, sys.argv[1])
from buildidfs.linux import confined
confined.main(sys.argv[2:])
"""
_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

_SECONDS: Final = 60.0
"""How long the helper may take to become the program."""

_REPORT_BYTES: Final = 1 << 16


class Limits(NamedTuple):
    """What a program may use: ``memory`` bytes of its own, ``addresses`` bytes with files mapped,
    ``seconds`` of processor time.
    """

    memory: int
    addresses: int
    seconds: int


class NotStarted(OSError):
    """A program could not be started; ``str()`` tells what failed, and why."""

    def __init__(self, number: int, step: str) -> None:
        super().__init__(number, os.strerror(number))
        self._step = step

    def __str__(self) -> str:
        return f"cannot {self._step}: {self.strerror}"


class NotConfined(NotStarted):
    """A program was not started, because it would have kept what it must not have."""


class Started(NamedTuple):
    """A program that runs, and what it was left with although `start` would take it."""

    process: subprocess.Popen[bytes]
    notes: tuple[str, ...]


def changes_user() -> bool:
    """Whether a program that is started here may become another user."""
    return os.geteuid() == 0


def start(
    argv: Sequence[str], limits: Limits, *, env: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> Started:
    """Start a program in ``/``, with pipes as its input and output and nothing else but
    ``pass_fds``.

    It has no capability, can get none, stays within ``limits`` and ends with the thread that
    started it. Root's becomes a user that nobody else is, in no group. It has no network, by a
    namespace of its own or by a filter of system calls. ``notes`` tell which of these two could not
    be had: where no user ID may be taken (no CAP_SETUID, a user namespace with root alone), the
    program keeps that of its caller. As far as the kernel can forbid it, it may not start
    processes, look into others, send them signals, or create, change and remove files.

    Raises `NotStarted`, `NotConfined`.
    """
    with contextlib.ExitStack() as stack:
        with _step("make a pipe"):
            reading, writing = os.pipe()
        report = stack.enter_context(open(reading, "rb", buffering=0))
        with open(writing, "wb", buffering=0), _step(f"start {sys.executable}"):
            words = [writing, os.getpid(), *limits, len(env)]
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-c", _START, _PACKAGE),
                    *map(str, words),
                    *(word for pair in env.items() for word in pair),
                    *argv,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                bufsize=0,
                pass_fds=[*pass_fds, writing],
            )
        stack.callback(end, process)
        notes = _read_report(process, report.fileno())
        stack.pop_all()
        report.close()
    return Started(process, notes)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and forget it; safe to call twice.

    Another user cannot be killed without CAP_KILL. Such a program ends when it finds its input
    closed, has used up its time, or with the thread that started it.
    """
    with contextlib.suppress(PermissionError):
        process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)


def _read_report(process: subprocess.Popen[bytes], report: int) -> tuple[str, ...]:
    """What the helper tells until it has become the program. Raises `NotStarted`."""
    deadline = time.monotonic() + _SECONDS
    poll = select.poll()
    poll.register(report, select.POLLIN)
    said = b""
    while True:
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise NotStarted(errno.ETIMEDOUT, "confine a program")
        data = os.read(report, _REPORT_BYTES)
        if not data:
            break
        said += data
    lines = [line.partition(" ") for line in said.decode("utf-8", "replace").splitlines()]
    last, _, text = lines[-1] if lines else ("", "", "")
    number, _, step = text.partition(" ")
    if last == confined.CONFINE:
        raise NotConfined(int(number), step)
    if last == confined.RUN:
        raise NotStarted(int(number), step)
    if last != confined.READY:
        status = process.wait()
        raise NotStarted(errno.ECHILD, f"confine a program (its helper ended with {status})")
    return tuple(text for kind, _, text in lines if kind == confined.NOTE)


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotStarted(error.errno or errno.EIO, what) from error
