# SPDX-License-Identifier: Apache-2.0
"""The privileges of this process: capabilities by name, and the permanent change to another user.

Source: credentials(7), user_namespaces(7), capabilities(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterator

from buildidfs.linux import machine, syscalls

# In the order of linux/capability.h: the index is the number.
_NAMES = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL",
    "CAP_SETGID", "CAP_SETUID", "CAP_SETPCAP", "CAP_LINUX_IMMUTABLE", "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_IPC_LOCK", "CAP_IPC_OWNER",
    "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE", "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_NICE", "CAP_SYS_RESOURCE", "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG", "CAP_MKNOD", "CAP_LEASE", "CAP_AUDIT_WRITE", "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP", "CAP_MAC_OVERRIDE", "CAP_MAC_ADMIN", "CAP_SYSLOG", "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND", "CAP_AUDIT_READ", "CAP_PERFMON", "CAP_BPF", "CAP_CHECKPOINT_RESTORE",
)  # fmt: skip

# By measurement the least with which an unprivileged process can open the mapped files of others:
# to inspect the process, to read the file, to use map_files (CAP_SYS_ADMIN also allows that).
_FOR_SCAN = ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_CHECKPOINT_RESTORE")
_NO_ID = 0xFFFFFFFF


def capability_names(mask: int) -> frozenset[str]:
    """Return the names of the bits that a mask of /proc/PID/status has set.

    A capability newer than this list is named by its number, as capsh(1) does: "41".
    """
    return frozenset(
        _NAMES[bit] if bit < len(_NAMES) else str(bit)
        for bit in range(mask.bit_length())
        if mask >> bit & 1
    )


def effective_capabilities() -> frozenset[str]:
    """Return the capabilities that this process may use now, such as "CAP_SYS_PTRACE".

    If this process is in a user namespace of its own, the capabilities apply only to objects of
    that namespace. Raises OSError.
    """
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"CapEff:"):
                return capability_names(int(line.split()[1], 16))
    return frozenset()


def missing_for_scan() -> list[str]:
    """Return the capabilities that this process lacks to capture from processes of other users.

    Raises OSError.
    """
    have = effective_capabilities()
    missing = [name for name in _FOR_SCAN if name not in have]
    if "CAP_SYS_ADMIN" in have and "CAP_CHECKPOINT_RESTORE" in missing:
        missing.remove("CAP_CHECKPOINT_RESTORE")
    if "CAP_DAC_OVERRIDE" in have and "CAP_DAC_READ_SEARCH" in missing:
        missing.remove("CAP_DAC_READ_SEARCH")
    return missing


def how_to_get(*wanted: str) -> str:
    """Return a clause on how this process can get missing capabilities."""
    if os.geteuid() != 0:
        capabilities = ", ".join(wanted)
        return f"run as root, or give it {capabilities} (AmbientCapabilities= of the unit, setpriv)"
    options = " ".join(f"--cap-add={name.removeprefix('CAP_')}" for name in wanted)
    return (
        f"let root have {', '.join(wanted)}: {options} for a container,"
        " CapabilityBoundingSet= of the unit"
    )


def remedy_for_hidden_addresses() -> str:
    """Return a clause on how this process can read the addresses in /proc/kallsyms.

    With kernel.kptr_restrict=2 no process can, whatever its capabilities are. Raises OSError.
    """
    if "CAP_SYSLOG" in effective_capabilities():
        return "sysctl kernel.kptr_restrict=1, if it is 2"
    return how_to_get("CAP_SYSLOG")


def remedy(*any_of: str) -> str:
    """Return a clause on how to grant one of these capabilities, after the kernel refused a call.

    Raises OSError.
    """
    if effective_capabilities().isdisjoint(any_of):
        return how_to_get(any_of[0])
    if not machine.is_first_user():
        return "the capabilities of this user namespace do not count for it: run it on the host"
    return (
        "a seccomp filter or security module refuses it: run it on the host, or give the container"
        " --security-opt seccomp=unconfined"
    )


# --- becoming another user ---

# Architectures other than these have the number of asm-generic/unistd.h.
_SYS_SETGROUPS = {"x86_64": 116, "i686": 206, "ppc64le": 81, "s390x": 206}
_SYS_SETGROUPS_GENERIC = 159


@contextlib.contextmanager
def opening_as(uid: int, gid: int) -> Iterator[None]:
    """Let this thread resolve and open paths with the rights of a user, who is not root.

    The thread keeps no supplementary group, and no capability for files (setfsuid(2) takes these
    away, see capabilities(7)). Other threads keep theirs, but one that is started meanwhile
    inherits these rights. Nothing changes for a process that is not root's: it can have the rights
    of its own user only.

    Raises OSError: EPERM without CAP_SETUID and CAP_SETGID, and for another user than our own
    without root's rights.
    """
    if os.geteuid() != 0:
        if uid != os.geteuid():
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        yield
        return
    groups, own_gid = os.getgroups(), os.getegid()
    dumpable = syscalls.libc.prctl(syscalls.PR_GET_DUMPABLE, 0, 0, 0, 0)
    _set_groups([])
    try:
        _set_fs_id(syscalls.libc.setfsgid, gid)
        _set_fs_id(syscalls.libc.setfsuid, uid)
        yield
    finally:
        # Only root may change the groups: its ID comes first.
        _set_fs_id(syscalls.libc.setfsuid, 0)
        _set_fs_id(syscalls.libc.setfsgid, own_gid)
        _set_groups(groups)
        if dumpable == 1:  # a change of the ID takes this from the whole process
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)


def _set_fs_id(call: Callable[[int], int], number: int) -> None:
    """Call setfsuid(2) or setfsgid(2), which reports no error. Raises OSError."""
    call(number)
    if call(-1) & _NO_ID != number:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def _set_groups(groups: list[int]) -> None:
    """Set the supplementary groups of this thread; the C library would set those of all threads.

    Raises OSError.
    """
    number = _SYS_SETGROUPS.get(os.uname().machine, _SYS_SETGROUPS_GENERIC)
    given = (ctypes.c_uint32 * len(groups))(*groups)
    syscalls.syscall(number, len(groups), ctypes.addressof(given))
