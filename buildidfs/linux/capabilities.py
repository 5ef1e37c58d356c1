# SPDX-License-Identifier: Apache-2.0
"""Which privileges this process has, by name. Source: capabilities(7)."""

from __future__ import annotations

import os

from buildidfs.linux import machine

# In the order of linux/capability.h: the place is the number.
_NAMES = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
    "CAP_AUDIT_READ",
    "CAP_PERFMON",
    "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
)

# Measured as the least that lets a process that is not root open the mapped files of others:
# to look at the process, to read the file, to use map_files (where CAP_SYS_ADMIN does as well).
_FOR_SCAN = ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_CHECKPOINT_RESTORE")


def names(mask: int) -> frozenset[str]:
    """The names of the bits set in a mask as /proc/PID/status shows them.

    A capability newer than this list is named by its number, as capsh does: "41".
    """
    return frozenset(
        _NAMES[bit] if bit < len(_NAMES) else str(bit)
        for bit in range(mask.bit_length())
        if mask >> bit & 1
    )


def effective() -> frozenset[str]:
    """The capabilities that this process may use now, such as "CAP_SYS_PTRACE".

    In a user namespace of our own they count only for what belongs to it. Raises OSError.
    """
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"CapEff:"):
                return names(int(line.split()[1], 16))
    return frozenset()


def missing_for_scan(held: frozenset[str] | None = None) -> list[str]:
    """What lacks for capturing from processes of other users; empty if nothing does.

    ``held`` is what we have, by default what `effective` says. Raises OSError.
    """
    have = effective() if held is None else held
    missing = [name for name in _FOR_SCAN if name not in have]
    if "CAP_SYS_ADMIN" in have and "CAP_CHECKPOINT_RESTORE" in missing:
        missing.remove("CAP_CHECKPOINT_RESTORE")
    if "CAP_DAC_OVERRIDE" in have and "CAP_DAC_READ_SEARCH" in missing:
        missing.remove("CAP_DAC_READ_SEARCH")
    return missing


def how_to_get(*wanted: str) -> str:
    """The way to capabilities that this process lacks, in words.

    A user becomes root, or is given them; root lacks them only if they were taken away.
    """
    if os.geteuid() != 0:
        said = ", ".join(wanted)
        return f"run as root, or give it {said} (AmbientCapabilities= of the unit, setpriv)"
    options = " ".join(f"--cap-add={name.removeprefix('CAP_')}" for name in wanted)
    return (
        f"let root have {', '.join(wanted)}: {options} for a container,"
        " CapabilityBoundingSet= of the unit"
    )


def remedy(*any_of: str) -> str:
    """The way out for a process that was refused something that any of these capabilities allows.

    Raises OSError.
    """
    if effective().isdisjoint(any_of):
        return how_to_get(any_of[0])
    if not machine.is_first_user():
        return "the capabilities of this user namespace do not count for it: run it on the host"
    return (
        "a seccomp filter or security module refuses it: run it on the host, or give the container"
        " --security-opt seccomp=unconfined"
    )
