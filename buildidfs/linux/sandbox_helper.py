# SPDX-License-Identifier: Apache-2.0
"""The helper of `linux.sandbox`: it gives up its rights and becomes a program.

It is a new Python process without mappings of its caller, so that limits of memory hold for the
program. It needs no /proc. The start of the helper delays each program that reads debug
information. Most of that time is for imports, so this module avoids `typing`, `contextlib`,
`signal` and `linux.child`, which would triple it.

Source: credentials(7), capabilities(7), setrlimit(2), network_namespaces(7), landlock(7).
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import stat
import struct

from buildidfs.linux import call_filter, syscalls

TYPE_CHECKING = False  # see above: that of `typing` costs the import of it
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Reports of the helper, one per line: ``NOTE text``, ``READY`` before it becomes the program, and
# ``CONFINE number step`` or ``RUN number step`` for an error.
NOTE = "note"
READY = "ready"
CONFINE = "confine"
RUN = "run"

# signal(7): numbers of all machines, and of all but MIPS and PA-RISC.
_SIGKILL, _SIGPIPE, _SIGXFSZ = 9, 13, 25

_NOBODY = 65534
# IDs that no distribution, container manager or systemd assigns (systemd's "Users, Groups, UIDs and
# GIDs"), and the IDs of its dynamic users, for a user namespace that lacks the former.
_UNUSED = range(0x70000000, 0x7FFF0000)
_DYNAMIC = range(61184, 65520)

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

# landlock(7).
# The same on every architecture.
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_VERSION = 1

_PATH_BENEATH = 1
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_REFER = 1 << 13  # of the second version
_TRUNCATE = 1 << 14  # third
_TCP = 0b11  # fourth: bind and connect
_SCOPES = 0b11  # sixth: abstract Unix sockets, signals


def main(words: Sequence[str]) -> None:
    """Become the program of a command line that `sandbox.start` made; never returns.

    The arguments are: descriptor for reports, process that starts the helper, three limits, number
    of variables, number of readable paths, names and values of the variables, these paths, and the
    argv of the program.
    """
    report, parent, memory, addresses, seconds, count, paths = map(int, words[:7])
    pairs = words[7 : 7 + 2 * count]
    reads = words[7 + 2 * count : 7 + 2 * count + paths]
    argv = list(words[7 + 2 * count + paths :])
    os.set_inheritable(report, False)
    step, kind = ["start"], CONFINE
    try:
        _settle_streams()
        for note in confine(parent, (memory, addresses, seconds), reads, step):
            _report(report, NOTE, note)
        _report(report, READY, "")
        kind, step[0] = RUN, f"run {argv[0]}"
        os.execve(argv[0], argv, dict(zip(pairs[::2], pairs[1::2], strict=True)))
    except OSError as error:
        _report(report, kind, f"{error.errno or errno.EIO} {step[0]}")
    finally:
        os._exit(1)


def _report(report: int, kind: str, text: str) -> None:
    os.write(report, f"{kind} {text}\n".encode("utf-8", "backslashreplace"))


def confine(
    parent: int, limits: tuple[int, int, int], reads: Sequence[str], step: list[str]
) -> Iterator[str]:
    """Give up all rights; yield a note for each right that could not be removed. ``step``, a list
    of one item, gets the name of each step before it begins.

    Raises OSError if the program would keep a capability, run without a limit, or outlive its
    caller.
    """
    step[0] = "limit its memory and time"
    _limit(*limits)
    # another user may not find the directory
    readable = [fd for path in reads if (fd := _opened(path)) >= 0]
    as_root = os.geteuid() == 0
    without_network = _succeeds(syscalls.unshare, _CLONE_NEWNET)
    step[0] = "keep it from getting privileges"
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if as_root:
        yield from _become_another()
    _succeeds(_forbid_files, readable if reads else None)
    has_filter = call_filter.is_available()
    if not has_filter:
        yield "can make every system call: the kernel has no filter for them"
        if not without_network and not _succeeds(syscalls.unshare, _CLONE_NEWUSER | _CLONE_NEWNET):
            yield "can reach the network: the kernel allows no namespace either"
    step[0] = "take its capabilities from it"
    syscalls.drop_capabilities()
    step[0] = "have it end with its caller"
    syscalls.end_with(parent, _SIGKILL)  # after a change of user, which would undo it
    if has_filter:
        step[0] = "filter its system calls"  # as the last step, because it refuses those before
        call_filter.install()


def _opened(path: str) -> int:
    """Open a file or directory with O_PATH; return -1 if it does not exist."""
    try:
        return os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return -1


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
    """Become a user with an unused ID, in one group with an unused ID.

    No other process of the host then has the right to trace the program, to signal it, or to read
    its open files.
    """
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
    """Change to an unused ID if there is one, else to an ID other than root's. Raises OSError."""
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
    """Return the last ID of each range of this user namespace, without root's."""
    try:
        with open(path, "rb") as file:
            ranges = [[int(word) for word in line.split()] for line in file]
    except OSError:
        return []
    return [first + count - 1 for first, _, count in reversed(ranges) if first + count > 1]


def _settle_streams() -> None:
    """Discard the error output of the program; make a write to a closed output pipe end the
    program.
    """
    for number in (_SIGPIPE, _SIGXFSZ):
        syscalls.libc.signal(number, None)  # SIG_DFL
    try:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:  # there is no /dev here
        _succeeds(os.close, 2)
        return
    if null == 2:  # the descriptor was closed
        os.set_inheritable(null, True)
    else:
        os.dup2(null, 2)


def _failure(attempt: Callable[..., object], *arguments: object) -> int | None:
    """Return the error number of an attempt; None if it succeeds."""
    try:
        attempt(*arguments)
    except OSError as error:
        return error.errno or errno.EIO
    return None


def _succeeds(attempt: Callable[..., object], *arguments: object) -> bool:
    return _failure(attempt, *arguments) is None


# --- Landlock ---


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 if it has none, or none is switched on."""
    try:
        return syscalls.syscall(_CREATE_RULESET, 0, 0, _VERSION)
    except OSError:
        return 0


def _forbid_files(readable: Sequence[int] | None) -> None:
    """Take from this process the right to open any file for writing, to create, rename or remove.

    It may read only at or below the descriptors ``readable``; None allows all. Its children lose
    these rights, too. On a newer kernel they also lose TCP, abstract Unix sockets and signals to
    other processes. Needs no_new_privs. Raises OSError: ENOSYS or EOPNOTSUPP if the kernel has no
    Landlock.
    """
    version = syscalls.syscall(_CREATE_RULESET, 0, 0, _VERSION)
    files = _WRITE_FILE | _REMOVE_AND_MAKE
    files |= _REFER if version >= 2 else 0
    files |= _TRUNCATE if version >= 3 else 0
    files |= 0 if readable is None else _READ_FILE | _READ_DIR
    text = struct.pack(
        "=QQQ", files, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0
    )  # struct landlock_ruleset_attr; an older kernel accepts zeros at the end
    attributes = ctypes.create_string_buffer(text, len(text))
    fd = syscalls.syscall(_CREATE_RULESET, ctypes.addressof(attributes), len(text), 0)
    try:
        for each in readable or ():
            rights = _READ_FILE
            rights |= _READ_DIR if stat.S_ISDIR(os.fstat(each).st_mode) else 0
            # struct landlock_path_beneath_attr
            rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, each), 12)
            syscalls.syscall(_ADD_RULE, fd, _PATH_BENEATH, ctypes.addressof(rule), 0)
        syscalls.syscall(_RESTRICT_SELF, fd, 0)
    finally:
        os.close(fd)
