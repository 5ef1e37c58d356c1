# SPDX-License-Identifier: Apache-2.0
"""Processes with a number of one's choice, as happens by chance when numbers are used again."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.linux import syscalls
from tests.support.harness.waiting import lines

_SYS_CLONE3 = 435

# struct clone_args of linux/sched.h up to cgroup: flags, pidfd, child_tid, parent_tid, exit_signal,
# stack, stack_size, tls, set_tid, set_tid_size, cgroup
_CLONE_ARGS = struct.Struct("=11Q")


@contextlib.contextmanager
def running_as(pid: int, program: Path) -> Iterator[None]:
    """Run ``program``, which answers what it is asked, as process ``pid``; killed at the end.

    The number must be free. Skips the test where the kernel does not give out numbers on demand
    (before Linux 5.5, or without CAP_CHECKPOINT_RESTORE), or somebody else got it first.
    """
    ours, its = socket.socketpair()
    with ours:
        with its:
            _start(pid, program, its.fileno())
        try:
            ours.sendall(b"there?\n")
            with open(os.dup(ours.fileno()), "rb", buffering=0) as answers:
                assert lines(answers, lambda got: len(got) == 1) == ["there?"]
            yield
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _start(pid: int, program: Path, standard: int) -> None:
    wanted = ctypes.c_int(pid)
    arguments = ctypes.create_string_buffer(
        _CLONE_ARGS.pack(0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(wanted), 1, 0)
    )
    argv = [str(program)]
    try:
        answer = syscalls.syscall(_SYS_CLONE3, ctypes.addressof(arguments), _CLONE_ARGS.size)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.EPERM, errno.ENOSYS, errno.EINVAL):
            pytest.skip(f"no process {pid} to be had: {error.strerror}")
        raise
    if answer == 0:
        try:
            os.dup2(standard, 0)
            os.dup2(standard, 1)
            os.execv(program, argv)
        finally:
            os._exit(127)
    assert answer == pid
