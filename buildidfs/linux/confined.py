# SPDX-License-Identifier: Apache-2.0
"""The helper that gives up what it has and becomes a program, for `linux.sandbox`.

It is a new Python, which has mapped nothing of its caller's, so that limits of memory hold for what
it becomes. It imports little, and only from the standard library, so that it starts in
milliseconds, and it needs no /proc.

Source: credentials(7), capabilities(7), setrlimit(2), network_namespaces(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from buildidfs.linux import landlock, pdeathsig, seccomp, syscalls

# What the helper reports, a line each: ``NOTE text``, ``READY`` before it becomes the program, and
# ``CONFINE number step`` or ``RUN number step`` for an error.
NOTE: Final = "note"
READY: Final = "ready"
CONFINE: Final = "confine"
RUN: Final = "run"

_NOBODY: Final = 65534
# Numbers that no distribution, container manager or systemd gives to anybody (systemd's "Users,
# Groups, UIDs and GIDs"), and those of its dynamic users, for a user namespace without the former.
_UNUSED: Final = range(0x70000000, 0x7FFF0000)
_DYNAMIC: Final = range(61184, 65520)

_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_PR_SET_NO_NEW_PRIVS: Final = 38

# struct __user_cap_header_struct of linux/capability.h; two __user_cap_data_struct follow.
_CAPABILITY_HEADER: Final = struct.pack("=Ii", 0x20080522, 0)
_NO_CAPABILITIES: Final = bytes(24)

_FORBIDDEN: Final = (
    "socket", "io_uring_setup", "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd",
    "add_key", "request_key", "keyctl",
)  # fmt: skip


def main(words: Sequence[str]) -> None:
    """Become the program of a command line that `confinement.start` made; never comes back.

    The words are: descriptor to report to, process that starts it, three limits, number of
    variables, names and values of these, and the argv of the program.
    """
    report, parent, memory, addresses, seconds, count = map(int, words[:6])
    pairs = words[6 : 6 + 2 * count]
    argv = list(words[6 + 2 * count :])
    os.set_inheritable(report, False)
    step, kind = ["start"], CONFINE
    try:
        _settle_streams()
        for note in _confine(parent, (memory, addresses, seconds), step):
            _tell(report, NOTE, note)
        _tell(report, READY, "")
        kind, step[0] = RUN, f"run {argv[0]}"
        os.execve(argv[0], argv, dict(zip(pairs[::2], pairs[1::2], strict=True)))
    except OSError as error:
        _tell(report, kind, f"{error.errno or errno.EIO} {step[0]}")
    finally:
        os._exit(1)


def _tell(report: int, kind: str, text: str) -> None:
    os.write(report, f"{kind} {text}\n".encode("utf-8", "backslashreplace"))


def _confine(parent: int, limits: tuple[int, int, int], step: list[str]) -> Iterator[str]:
    """Give up all there is, and yield what could not be; ``step`` is what is at hand.

    Raises OSError where the program would keep a capability, a limit or its parent's life.
    """
    step[0] = "limit its memory and time"
    _limit(*limits)
    as_root = os.geteuid() == 0
    without_network = _succeeds(_unshare, _CLONE_NEWNET)
    step[0] = "keep it from getting privileges"
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if as_root:
        yield from _become_another()
    _succeeds(landlock.forbid_changes)
    without_network |= _succeeds(seccomp.forbid, _FORBIDDEN)
    if not without_network and not _succeeds(_unshare, _CLONE_NEWUSER | _CLONE_NEWNET):
        yield "can reach the network: the kernel allows neither a namespace nor a filter"
    step[0] = "take its capabilities from it"
    _drop_capabilities()
    step[0] = "have it end with its caller"
    pdeathsig.end_with(parent, signal.SIGKILL)  # at last: a change of user would undo it


def _limit(memory: int, addresses: int, seconds: int) -> None:
    for kind, value in (
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_AS, addresses),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))


def _become_another() -> Iterator[str]:
    """Be a user that nobody else is, in no group but one that nobody else is in."""
    groups = _failure(os.setgroups, [])
    gid = _failure(_take, "/proc/self/gid_map", lambda number: os.setresgid(*[number] * 3))
    uid = _failure(_take, "/proc/self/uid_map", lambda number: os.setresuid(*[number] * 3))
    if uid is not None:
        why = "needs CAP_SETUID" if uid == errno.EPERM else "this user namespace has no other"
        yield f"runs with user ID {os.geteuid()} still, though without capabilities: {why}"
    elif gid is not None or (groups is not None and os.getgroups()):
        why = "needs CAP_SETGID" if errno.EPERM in (gid, groups) else "there are no others here"
        yield f"runs with the groups of its caller still: {why}"


def _take(numbers_map: str, change: Callable[[int], None]) -> None:
    """Take an ID of one's own, if there is one, else one that is not root's. Raises OSError."""
    error = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    for number in (_any(_UNUSED), _any(_DYNAMIC), _NOBODY, *_mapped(numbers_map)):
        try:
            change(number)
        except OSError as refused:
            error = refused
        else:
            return
    raise error


def _any(numbers: range) -> int:
    return numbers[int.from_bytes(os.urandom(8), "little") % len(numbers)]


def _mapped(path: str) -> list[int]:
    """The last ID of each range that this user namespace has, without root's."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
        return [first + count - 1 for first, _, count in reversed(ranges) if first + count > 1]
    return []


def _drop_capabilities() -> None:
    """Have none, to use, to get or to hand on. Raises OSError."""
    held = bytearray(len(_NO_CAPABILITIES))
    libc = syscalls.libc
    if libc.capget(_CAPABILITY_HEADER, (ctypes.c_char * len(held)).from_buffer(held)):
        raise syscalls.last_error()
    if any(held) and libc.capset(_CAPABILITY_HEADER, _NO_CAPABILITIES):
        raise syscalls.last_error()


def _settle_streams() -> None:
    """Have nobody read what the program complains of, and end it when nobody reads the rest."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:  # there is no /dev here
        with contextlib.suppress(OSError):
            os.close(2)
        return
    if null == 2:  # it was closed
        os.set_inheritable(null, True)
    else:
        os.dup2(null, 2)


def _failure(attempt: Callable[..., object], *arguments: object) -> int | None:
    """The error number that an attempt ends with, if it does."""
    try:
        attempt(*arguments)
    except OSError as error:
        return error.errno or errno.EIO
    return None


def _succeeds(attempt: Callable[..., object], *arguments: object) -> bool:
    return _failure(attempt, *arguments) is None


def _unshare(flags: int) -> None:
    if syscalls.libc.unshare(flags):
        raise syscalls.last_error()


def _prctl(option: int, value: int) -> None:
    if syscalls.libc.prctl(option, value, 0, 0, 0):
        raise syscalls.last_error()
