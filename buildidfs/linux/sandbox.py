# SPDX-License-Identifier: Apache-2.0
"""Start programs that read the files of strangers, with as few rights as possible.

`linux.confinement` is the helper that gives up its rights and becomes the program.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.linux import child, confinement

if TYPE_CHECKING:
    from buildidfs.linux.child import Child

_SECONDS: Final = 60.0
"""Seconds that the helper may take to become the program."""

_REPORT_BYTES: Final = 1 << 16


class SandboxLimits(NamedTuple):
    """The limits of a program: ``memory`` bytes of its own, ``addresses`` bytes including mapped
    files, ``seconds`` of processor time.
    """

    memory: int
    addresses: int
    seconds: int


class NotStarted(OSError):
    """A program could not be started; ``str()`` says what failed, and why."""

    def __init__(self, number: int, step: str) -> None:
        super().__init__(number, os.strerror(number))
        self._step = step

    def __str__(self) -> str:
        return f"cannot {self._step}: {self.strerror}"


class NotConfined(NotStarted):
    """A program was not started, because it would have kept rights that it must not have."""


class Started(NamedTuple):
    """A running program; ``notes`` name the rights that `start` could not remove.

    A program of another user cannot be killed without CAP_KILL. Such a program ends when its input
    is closed, when its time is used up, or with the thread that started it.
    """

    process: Child
    notes: tuple[str, ...]


def changes_user() -> bool:
    """Return True if a program that `start` runs may become another user."""
    return os.geteuid() == 0


def start(
    argv: Sequence[str],
    limits: SandboxLimits,
    *,
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    reads: Sequence[str] = (),
) -> Started:
    """Start a program in ``/``, with pipes as its input and output and no other descriptors than
    ``pass_fds``.

    The program has no capability and can get none, stays within ``limits``, and ends with the
    thread that started it. A program of root becomes a user with an unused ID, without groups. It
    makes only the system calls of `linux.confinement`, and has no network, because of this filter
    or a namespace of its own. ``notes`` say which of these the kernel refused; if no other user ID
    is available (no CAP_SETUID, a user namespace with root alone), the program keeps that of its
    caller. As far as the kernel can forbid it, the program may not start or inspect processes, send
    them signals, or create, change and remove files. With ``reads`` it may read only these files,
    files below these directories, and files in memory.

    Raises `NotStarted`, `NotConfined`.
    """
    with contextlib.ExitStack() as stack:
        with _step("make a pipe"):
            reading, writing = os.pipe()
        report = stack.enter_context(open(reading, "rb", buffering=0))
        with open(writing, "wb", buffering=0), _step(f"start {sys.executable}"):
            words = [writing, os.getpid(), *limits, len(env), len(reads)]
            helper = child.python(
                confinement.__name__,
                *map(str, words),
                *(word for pair in env.items() for word in pair),
                *reads,
                *argv,
            )
            process = child.start(
                [sys.executable, "-I", "-S", *helper],
                stdin=child.PIPE,
                stdout=child.PIPE,
                cwd="/",
                pass_fds=[*pass_fds, writing],
            )
        stack.callback(process.end, 1)
        notes = _read_report(process, report.fileno())
        stack.pop_all()
        report.close()
    return Started(process, notes)


def _read_report(process: Child, report: int) -> tuple[str, ...]:
    """Return the notes of the helper, once it has become the program. Raises `NotStarted`."""
    deadline = time.monotonic() + _SECONDS
    poll = select.poll()
    poll.register(report, select.POLLIN)
    output = b""
    while True:
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise NotStarted(errno.ETIMEDOUT, "confine a program")
        data = os.read(report, _REPORT_BYTES)
        if not data:
            break
        output += data
    lines = [line.partition(" ") for line in output.decode("utf-8", "replace").splitlines()]
    last, _, text = lines[-1] if lines else ("", "", "")
    number, _, step = text.partition(" ")
    if last == confinement.CONFINE:
        raise NotConfined(int(number), step)
    if last == confinement.RUN:
        raise NotStarted(int(number), step)
    if last != confinement.READY:
        status = process.wait()
        raise NotStarted(errno.ECHILD, f"confine a program (its helper ended with {status})")
    return tuple(text for kind, _, text in lines if kind == confinement.NOTE)


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotStarted(error.errno or errno.EIO, what) from error
