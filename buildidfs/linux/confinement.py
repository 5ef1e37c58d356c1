# SPDX-License-Identifier: Apache-2.0
"""The helper of `linux.sandbox`: it gives up its rights and becomes a program.

It is a new Python process without mappings of its caller, so that limits of memory hold for the
program. It needs no /proc. The start of the helper delays each program that reads debug
information. Most of that time is for imports, so this module avoids `typing`, `contextlib`,
`signal` and `linux.child`, which would triple it.

A filter refuses all system calls except those with which a program computes, reads files, starts
threads and ends, in the forms of all C libraries. Calls that make processes, namespaces or sockets,
change files, reach other processes, or load programs into the kernel are not allowed, nor is any
call that a later kernel adds.

Source: credentials(7), capabilities(7), setrlimit(2), network_namespaces(7), landlock(7),
seccomp(2), linux/filter.h, linux/audit.h, asm/unistd_64.h and asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import stat
import struct

from buildidfs.linux import syscalls

TYPE_CHECKING = False  # that of `typing` costs the import of it
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Audit architectures, and the column of their numbers in the tables below. On both of them the low
# half of an argument comes first, and the flags are the first argument of clone.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# Name: number on x86_64, and on aarch64 (-1: does not exist).
ALLOWED = {
    # files, which Landlock and the mode of open restrict
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "close": (3, 57),
    "pread64": (17, 67), "preadv": (295, 69), "preadv2": (327, 286), "lseek": (8, 62),
    "fstat": (5, 80), "newfstatat": (262, 79), "stat": (4, -1), "lstat": (6, -1),
    "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, -1),
    "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, -1),
    "readlinkat": (267, 78), "getdents": (78, -1), "getdents64": (217, 61), "getcwd": (79, 17),
    "umask": (95, 166), "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24),
    "close_range": (436, 436), "fadvise64": (221, 223), "poll": (7, -1), "ppoll": (271, 73),
    "select": (23, -1), "pselect6": (270, 72),
    # memory
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216),
    "madvise": (28, 233), "brk": (12, 214), "msync": (26, 227), "mincore": (27, 232),
    "mseal": (462, 462),
    # threads; see also clone
    "futex": (202, 98), "futex_waitv": (449, 449), "futex_wake": (454, 454),
    "futex_wait": (455, 455), "futex_requeue": (456, 456), "set_robust_list": (273, 99),
    "set_tid_address": (218, 96), "rseq": (334, 293), "arch_prctl": (158, -1),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "getcpu": (309, 168),
    # signals of its own
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133), "pause": (34, -1), "restart_syscall": (219, 128),
    "alarm": (37, -1), "setitimer": (38, 103), "getitimer": (36, 102),
    # what it is, and its end
    "execve": (59, 221), "exit": (60, 93), "exit_group": (231, 94), "getpid": (39, 172),
    "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148),
    "getresgid": (120, 150), "getgroups": (115, 158), "getrlimit": (97, 163),
    "setrlimit": (160, 164), "getrusage": (98, 165), "times": (100, 153), "uname": (63, 160),
    "sysinfo": (99, 179), "getrandom": (318, 278),
    # time
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101), "gettimeofday": (96, 169), "time": (201, -1),
}  # fmt: skip

# Calls that are allowed or refused by one of their arguments, and the number of this argument.
EXAMINED = {
    "open": (2, -1), "openat": (257, 56), "clone": (56, 220), "prctl": (157, 167),
    "fcntl": (72, 25), "prlimit64": (302, 261), "kill": (62, 129), "tkill": (200, 130),
    "tgkill": (234, 131), "ioctl": (16, 29),
}  # fmt: skip

# Flags of open: O_WRONLY, O_RDWR, O_CREAT and O_TRUNC. O_TMPFILE needs one of the first two.
_CHANGES = 0x3 | 0x40 | 0x200
# Flags of clone that C libraries give to make a thread (musl adds CLONE_DETACHED, 0x400000).
_CLONE_THREAD = 0x10000
_OF_THREADS = 0x7D0F00
_PR_SET_VMA = 0x53564D41  # names a mapping for people
_F_DUPFD, _F_GETFD, _F_SETFD, _F_GETFL, _F_SETFL, _F_DUPFD_CLOEXEC = 0, 1, 2, 3, 4, 1030

# The first number that means the same on every architecture. A C library makes do without calls of
# these numbers on an older kernel, so ENOSYS is the answer that it handles.
_NEW = 424
_X32 = 0x40000000

# Offsets in struct seccomp_data, and codes of linux/bpf_common.h.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_MODE_FILTER = 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


class _Step:
    """An instruction; ``holds`` and ``fails`` are the labels to jump to if its test holds or fails,
    empty for no jump.
    """

    def __init__(
        self, code: int, value: int, *, holds: str = "", fails: str = "", label: str = ""
    ) -> None:
        self.code = code
        self.value = value
        self.holds = holds
        self.fails = fails
        self.label = label


def is_available() -> bool:
    """Return True if `install` knows the machine, and the kernel has filters of system calls."""
    if os.uname().machine not in MACHINES:
        return False
    # Without a program, a kernel with filters refuses the address, one without them the mode.
    syscalls.libc.prctl(syscalls.PR_SET_SECCOMP, _MODE_FILTER, None, 0, 0)
    return ctypes.get_errno() == errno.EFAULT


def install() -> None:
    """Restrict this process, and any program that it becomes, to the calls of this module.

    A refused call fails: with ENOSYS if older kernels lack it, with ENOTTY if it is ioctl, with
    EACCES if it opens a file for writing, else with EPERM. A call of another architecture that the
    kernel supports ends the process. The process may start threads, but no process, and signal only
    itself. Needs no_new_privs. Raises OSError: ENOSYS on a machine with unknown numbers.
    """
    machine = MACHINES.get(os.uname().machine)
    if machine is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    code = _assembled([*_steps(*machine, os.getpid())])
    program = _Program(len(code) // 8, code)
    if syscalls.libc.prctl(syscalls.PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0):
        raise syscalls.last_error()


def _steps(architecture: int, column: int, process: int) -> Iterator[_Step]:
    yield _Step(_LOAD, _ARCHITECTURE)
    yield _Step(_EQUAL, architecture, fails="end")
    yield _Step(_LOAD, _NUMBER)
    yield _Step(_AT_LEAST, _X32, holds="end")
    for numbers in ALLOWED.values():
        if numbers[column] >= 0:
            yield _Step(_EQUAL, numbers[column], holds="allow")
    for name, numbers in EXAMINED.items():
        if numbers[column] >= 0:
            yield _Step(_EQUAL, numbers[column], holds=name)
    yield _Step(_AT_LEAST, _NEW, holds="unknown", fails="refuse")
    for name, numbers in EXAMINED.items():
        if numbers[column] >= 0:
            first, *rest = _examined(name, process)
            first.label = name
            yield first
            yield from rest
    yield _Step(_RETURN, _ALLOW, label="allow")
    yield _Step(_RETURN, _KILL, label="end")
    for label, number in (
        ("refuse", errno.EPERM),
        ("unknown", errno.ENOSYS),
        ("unwritable", errno.EACCES),
    ):
        yield _Step(_RETURN, _ERRNO | number, label=label)


def _examined(name: str, process: int) -> list[_Step]:
    """Return the steps that decide on a call by an argument."""
    match name:
        case "open" | "openat":
            flags = _argument(1 if name == "open" else 2)
            return [flags, _Step(_HAS_BITS, _CHANGES, holds="unwritable", fails="allow")]
        case "clone":
            return [
                _argument(0),
                _Step(_HAS_BITS, _CLONE_THREAD, fails="refuse"),
                _Step(_HAS_BITS, ~_OF_THREADS & 0xFFFFFFFF, holds="refuse", fails="allow"),
            ]
        case "ioctl":  # the program has no terminal
            return [_Step(_RETURN, _ERRNO | errno.ENOTTY)]
        case "prctl":
            return _one_of(0, syscalls.PR_SET_NAME, syscalls.PR_GET_NAME, _PR_SET_VMA)
        case "fcntl":
            return _one_of(1, _F_DUPFD, _F_GETFD, _F_SETFD, _F_GETFL, _F_SETFL, _F_DUPFD_CLOEXEC)
        case "prlimit64":
            return _one_of(0, 0, process)
        case _:  # the signals
            return _one_of(0, process)


def _argument(number: int) -> _Step:
    return _Step(_LOAD, _ARGUMENTS + 8 * number)


def _one_of(argument: int, *values: int) -> list[_Step]:
    """Return the steps that allow a call if the low half of an argument is one of the values."""
    *most, last = values
    return [
        _argument(argument),
        *(_Step(_EQUAL, value, holds="allow") for value in most),
        _Step(_EQUAL, last, holds="allow", fails="refuse"),
    ]


def _assembled(steps: Sequence[_Step]) -> bytes:
    """Return struct sock_filter for each step; a jump has the number of steps to skip."""
    places = {step.label: at for at, step in enumerate(steps) if step.label}
    return b"".join(
        struct.pack(
            "=HBBI",
            step.code,
            places[step.holds] - at - 1 if step.holds else 0,
            places[step.fails] - at - 1 if step.fails else 0,
            step.value,
        )
        for at, step in enumerate(steps)
    )


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
# GIDs"). A user namespace that lacks them may have those of systemd's dynamic users.
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
    has_filter = is_available()
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
        install()


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
