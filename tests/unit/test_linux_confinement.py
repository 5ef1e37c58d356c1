# SPDX-License-Identifier: Apache-2.0
"""A confined program computes, reads and starts threads; all other system calls are refused."""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path

import pytest

from buildidfs.linux import child, confinement, sandbox
from tests.support.clients.tools import run, tool

LIMITS = sandbox.SandboxLimits(memory=1 << 30, addresses=8 << 30, seconds=20)

HEADERS = (
    ("/usr/include/*/asm/unistd_64.h", 0),
    ("/usr/include/asm-generic/unistd.h", 1),
)

# Each of these must answer something else than EPERM and ENOSYS if no filter is there.
REFUSED = {
    "unshare": "unshare(CLONE_NEWUSER)",
    "setns": "setns(-1, CLONE_NEWUSER)",
    "new user namespace": "syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0)",
    "thread in a new namespace": "syscall(SYS_clone, THREAD | CLONE_NEWUSER, 0, 0, 0, 0)",
    "fork": "syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0)",
    "clone3": "syscall(435, 0, 0)",
    "execveat": "syscall(SYS_execveat, -1, \"\", 0, 0, 0)",
    "userfaultfd": "syscall(SYS_userfaultfd, 1 << 30)",
    "bpf": "syscall(SYS_bpf, 0, 0, 0)",
    "perf_event_open": "syscall(SYS_perf_event_open, 0, 0, -1, -1, 0)",
    "io_uring_setup": "syscall(425, 0, 0)",
    "io_setup": "syscall(SYS_io_setup, 0, 0)",
    "ptrace": "ptrace(PTRACE_PEEKDATA, getppid(), 0, 0) ",
    "process_vm_readv": "process_vm_readv(1 << 30, 0, 0, 0, 0, 0)",
    "process_vm_writev": "process_vm_writev(1 << 30, 0, 0, 0, 0, 0)",
    "pidfd_open": "syscall(434, -1, 0)",
    "pidfd_getfd": "syscall(438, -1, 0, 0)",
    "keyctl": "syscall(SYS_keyctl, 11, 1 << 30, 0, 0)",
    "add_key": "syscall(SYS_add_key, 0, 0, 0, 0, 0)",
    "mount": "mount(\"\", \"/nonexistent\", \"\", 0, \"\")",
    "umount": "umount2(\"/nonexistent\", 0)",
    "fsopen": "syscall(430, 0, 0)",
    "open_tree": "syscall(428, -1, \"x\", 0)",
    "pivot_root": "syscall(SYS_pivot_root, \"/nonexistent\", \"/nonexistent\")",
    "chroot": "chroot(\"/nonexistent\")",
    "socket": "socket(AF_INET, SOCK_DGRAM, 0)",
    "Unix socket": "socket(AF_UNIX, SOCK_STREAM, 0)",
    "socketpair": "socketpair(AF_UNIX, SOCK_STREAM, 0, pair)",
    "netlink": "socket(AF_NETLINK, SOCK_RAW, 0)",
    "open_by_handle_at": "open_by_handle_at(-1, 0, 0)",
    "name_to_handle_at": "name_to_handle_at(-1, \"x\", 0, 0, 0)",
    "openat2": "syscall(437, -1, \"x\", 0, 0)",
    "memfd_create": "memfd_create(\"x\", 0)",
    "fanotify_init": "syscall(SYS_fanotify_init, -1, 0)",
    "inotify_init": "inotify_init1(0)",
    "kill": "kill(getppid(), 0)",
    "tgkill": "syscall(SYS_tgkill, getppid(), getppid(), 0)",
    "rt_sigqueueinfo": "syscall(SYS_rt_sigqueueinfo, getppid(), 0, 0)",
    "prlimit": "prlimit(getppid(), RLIMIT_CORE, 0, &limit)",
    "signal of a parent's end": "prctl(PR_SET_PDEATHSIG, 0)",
    "dumpable": "prctl(PR_SET_DUMPABLE, 1)",
    "owner of signals": "fcntl(0, F_SETOWN, getppid())",
    "lock": "fcntl(0, F_SETLK, 0)",
    "sched_setscheduler": "sched_setscheduler(0, SCHED_IDLE, &priority)",
    "setpriority": "setpriority(PRIO_PROCESS, 0, 10)",
    "setsid": "syscall(SYS_setpgid, 0, -1)",
    "setuid": "syscall(SYS_setresuid, -1, -1, -1)",
    "chmod": "fchmodat(-1, \"x\", 0, 0)",
    "rename": "renameat(-1, \"x\", -1, \"y\")",
    "unlink": "unlinkat(-1, \"x\", 0)",
    "truncate": "ftruncate(-1, 0)",
    "setxattr": "setxattr(\"/nonexistent\", \"user.x\", \"\", 0, 0)",
    "personality": "personality(0xffffffff)",
    "sysfs": "syscall(SYS_quotactl, -1, \"/nonexistent\", 0, 0)",
    "init_module": "syscall(SYS_finit_module, -1, 0, 0)",
    "kexec_load": "syscall(SYS_kexec_load, 0, 0, 0, -1)",
    "add_watch of the log": "syscall(SYS_syslog, 3, 0, 0)",
    "acct": "acct(\"/nonexistent\")",
    "landlock": "syscall(444, 0, 0, 1)",
    "filter of system calls": "syscall(SYS_seccomp, 2, 0, 0)",
    "message queue": "msgget(IPC_PRIVATE, 0)",
}  # fmt: skip

PRELUDE = """
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/msg.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>
#define THREAD (CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM)
int pair[2]; struct rlimit limit; struct sched_param priority;
static void *empty(void *x) { return x; }
static void report(const char *name, long result) {
    int number = errno;
    printf("%s\\t%d\\n", name, result < 0 ? number : 0);
    fflush(stdout);
}
"""


def compiled(source: str, place: Path) -> int:
    """A descriptor of a program."""
    (place / "x.c").write_text(PRELUDE + source)
    run([tool("gcc"), "-w", "-pthread", "-o", place / "x", place / "x.c"], check=True)
    (place / "x").chmod(0o555)
    return os.open(place / "x", os.O_RDONLY)


def confined(argv: list[str], fd: int, text: bytes = b"") -> tuple[int, bytes]:
    """Status and output of a confined program, which may open the descriptor."""
    process, notes = sandbox.start(
        argv, LIMITS, env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"}, pass_fds=[fd]
    )
    assert notes == ()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(text)
        process.stdin.close()
        said = process.stdout.read()
        code = process.wait(60)
    finally:
        process.end(1)
    assert code is not None
    return code, said


def free(argv: list[str], fd: int, text: bytes = b"") -> tuple[int, bytes]:
    """The same without a filter."""
    process = child.start(
        argv,
        env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
        stdin=child.PIPE,
        stdout=child.PIPE,
        stderr=child.DEVNULL,
        cwd="/",
        pass_fds=[fd],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(text)
    process.stdin.close()
    said = process.stdout.read()
    code = process.wait(60)
    assert code is not None
    assert process.end(1)
    return code, said


def errors(said: bytes) -> dict[str, int]:
    return {
        name: int(number)
        for name, number in (line.split("\t") for line in said.decode().split("\n") if line)
    }


@pytest.mark.root
def test_calls_that_reach_beyond_the_program_are_refused(tmp_path: Path) -> None:
    # Each call is made by a process of its own where that is possible, as its success may last.
    attempts = "".join(
        f"    if (!(child = fork()) || child < 0) {{ errno = 0; report(\"{name}\", {call});"
        " if (!child) _exit(0); } else waitpid(child, 0, 0);\n"
        for name, call in REFUSED.items()
    )  # fmt: skip
    fd = compiled(f"int main(void) {{ int child;\n{attempts} return 0; }}", tmp_path)
    argv = [f"/proc/self/fd/{fd}"]
    _, said = free(argv, fd)
    allowed = errors("\n".join(dict.fromkeys(said.decode().split("\n"))).encode())
    assert allowed.keys() == REFUSED.keys()
    open_to_root = {name for name, number in allowed.items() if number == 0}
    assert {"unshare", "fork", "new user namespace", "socket", "kill"} <= open_to_root
    refused = {name for name, number in allowed.items() if number in (errno.EPERM, errno.ENOSYS)}
    # a kernel may be built without these
    assert refused <= {"kexec_load", "init_module", "userfaultfd"}
    status, said = confined(argv, fd)
    os.close(fd)
    assert status == 0
    found = errors(said)
    assert found.keys() == REFUSED.keys()
    assert {name for name, n in found.items() if n not in (errno.EPERM, errno.ENOSYS)} == set()
    assert {name for name, number in found.items() if number == errno.ENOSYS} == {
        *("clone3", "io_uring_setup", "pidfd_open", "pidfd_getfd", "fsopen", "open_tree"),
        *("openat2", "landlock"),
    }  # fmt: skip


def test_threads_signals_and_limits_of_its_own_are_allowed(tmp_path: Path) -> None:
    fd = compiled(
        """
        int main(void) {
            pthread_t thread;
            report("thread", -pthread_create(&thread, 0, empty, 0));
            report("end of a thread", -pthread_join(thread, 0));
            report("name", pthread_setname_np(pthread_self(), "worker"));
            report("limit", getrlimit(RLIMIT_CORE, &limit));
            report("lower limit", setrlimit(RLIMIT_CORE, &limit));
            report("signal", kill(getpid(), 0));
            report("reading", open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
            report("writing", open("/dev/null", O_WRONLY));
            report("terminal", isatty(1) - 1);
            abort();
        }
        """,
        tmp_path,
    )
    status, said = confined([f"/proc/self/fd/{fd}"], fd)
    os.close(fd)
    assert status == -signal.SIGABRT
    found = errors(said)
    assert (found.pop("terminal"), found.pop("writing")) == (errno.ENOTTY, errno.EACCES)
    assert set(found.values()) == {0}
    assert len(found) == 7


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 and i386 are of x86-64")
@pytest.mark.parametrize(
    "call",
    [
        "syscall(SYS_getpid | 0x40000000)",
        "syscall(SYS_unshare | 0x40000000, CLONE_NEWUSER)",
        '({ long r; __asm__ volatile("int $0x80" : "=a"(r) : "a"(20) : "memory"); r; })',
    ],
)
def test_call_of_another_architecture_ends_the_program(tmp_path: Path, call: str) -> None:
    fd = compiled(f'int main(void) {{ report("x", {call}); return 0; }}', tmp_path)
    assert free([f"/proc/self/fd/{fd}"], fd)[0] == 0
    assert confined([f"/proc/self/fd/{fd}"], fd) == (-signal.SIGSYS, b"")
    os.close(fd)


def test_numbers_are_those_of_the_kernel_headers() -> None:
    """Of the machine's headers and of the generic ones, which aarch64 uses."""
    compared = 0
    for pattern, column in HEADERS:
        for path in Path("/").glob(pattern[1:]):
            text = path.read_text()
            numbers = {
                name: int(number)
                for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)
            }
            numbers.setdefault("newfstatat", numbers.get("fstatat", -1))
            for name, row in (confinement.ALLOWED | confinement.EXAMINED).items():
                if row[column] <= max(numbers.values()):
                    assert row[column] == numbers.get(name, -1), (name, path)
                    compared += 1
    assert compared > 80


NAMES = ("llvm-symbolizer", "eu-addr2line", "llvm-objdump")
PROGRAMS = [
    (name, str(path))
    for name in NAMES
    for path in sorted(Path("/usr/bin").glob(f"{name}*"))
    if re.fullmatch(rf"{name}(-\d+)?", path.name)
]


def test_real_programs_say_the_same_as_outside(tmp_path: Path) -> None:
    assert {name for name, _ in PROGRAMS} == {*NAMES}
    (tmp_path / "x.c").write_text(
        PRELUDE
        + "static inline int twice(int x) { return x * 2; }\n"
        + "int main(int c, char **v) { pthread_t t; pthread_create(&t, 0, empty, 0);"
        + ' report("x", twice(c)); return 0; }\n'
    )
    binary = tmp_path / "x"
    options = ["-w", "-g", "-gz", "-O1", "-pthread", "-o", binary]
    run([tool("gcc"), *options, tmp_path / "x.c"], check=True)
    binary.chmod(0o555)
    fd = os.open(binary, os.O_RDONLY)
    file = f"/proc/self/fd/{fd}"
    symbols = run([tool("nm"), binary], check=True).out.split("\n")
    (address,) = (f"0x{line.split()[0]}" for line in symbols if line.endswith(" T main"))
    asked = {
        "llvm-symbolizer": (
            ["--output-style=JSON"],
            f'"{file}" {address}\nDATA "{file}" {address}\n',
        ),
        "eu-addr2line": (
            [f"--executable={file}", "--functions", "--inlines", "--demangle", "--absolute"],
            f"{address}\n",
        ),
        "llvm-objdump": (["-d", "--no-show-raw-insn", file], ""),
    }  # fmt: skip
    for name, path in PROGRAMS:
        options, text = asked[name]
        outside = free([path, *options], fd, text.encode())
        assert outside[0] == 0, path
        assert b"main" in outside[1], path
        assert confined([path, *options], fd, text.encode()) == outside, path
    os.close(fd)
