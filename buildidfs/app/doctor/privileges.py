# SPDX-License-Identifier: Apache-2.0
"""What this process may do: its capabilities, and the namespaces it sees the system from."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from buildidfs.app.doctor.values import Answer, Probe, degraded, failed, ok
from buildidfs.linux import credentials, machine, namespaces

if TYPE_CHECKING:
    from buildidfs.config import Settings

AREA = "privileges"

_Verdict = Callable[[str, str], Answer]


class _Need(NamedTuple):
    """Any of ``any_of`` will do ``what``; without it, ``lost``."""

    name: str
    any_of: tuple[str, ...]
    what: str
    lost: str


_NEEDED = (
    _Need(
        "CAP_SYS_PTRACE",
        ("CAP_SYS_PTRACE",),
        "looks at processes of others",
        "only one's own processes are captured from",
    ),
    _Need(
        "CAP_DAC_READ_SEARCH",
        ("CAP_DAC_READ_SEARCH", "CAP_DAC_OVERRIDE"),
        "reads files whatever their mode",
        "files that this user may not read are not captured",
    ),
    _Need(
        "CAP_CHECKPOINT_RESTORE",
        ("CAP_CHECKPOINT_RESTORE", "CAP_SYS_ADMIN"),
        "opens mapped files that are deleted or replaced",
        "mapped files are looked for by name: those deleted, replaced or hidden are not captured",
    ),
)
_FOR_PERF = _Need(
    "CAP_PERFMON",
    ("CAP_PERFMON", "CAP_SYS_ADMIN"),
    "hears of every file that is mapped",
    "watch cannot run: what lives shorter than the time between two scans is not captured",
)
_USEFUL = (
    _Need(
        "CAP_SYS_NICE",
        ("CAP_SYS_NICE",),
        "lets watch run before everything else",
        "on a busy machine watch may come too late for short-lived processes",
    ),
    _Need(
        "CAP_LEASE",
        ("CAP_LEASE",),
        "tells files that are being written",
        "whether a file of others is being written is guessed from its times",
    ),
    _Need(
        "CAP_IPC_LOCK",
        ("CAP_IPC_LOCK",),
        "locks memory for events, as much as watch wants",
        "how many events can wait for watch depends on limits",
    ),
    _Need(
        "CAP_SYSLOG",
        ("CAP_SYSLOG",),
        "reads the addresses of the kernel's symbols",
        "the kernel's symbols are not captured",
    ),
    _Need(
        "CAP_SYS_ADMIN",
        ("CAP_SYS_ADMIN",),
        "mounts the store",
        "mounting needs fusermount3",
    ),
)
_FOR_OWNERS = tuple(
    _Need(
        name,
        (name,),
        "reads FUSE filesystems as the users who mounted them (capture.fuse-as-owner)",
        "files on FUSE filesystems of other users are not captured, in spite of"
        " capture.fuse-as-owner",
    )
    for name in ("CAP_SETUID", "CAP_SETGID")
)


def probes(settings: Settings) -> list[Probe]:
    """The checks of capabilities and namespaces."""
    wanted: list[tuple[_Need, _Verdict]] = [(need, failed) for need in (*_NEEDED, _FOR_PERF)]
    wanted += [(need, degraded) for need in _USEFUL]
    if settings.capture.fuse_as_owner:
        wanted += [(need, failed) for need in _FOR_OWNERS]
    return [
        *(
            Probe(AREA, need.name, functools.partial(_capability, need, lacking))
            for need, lacking in wanted
        ),
        Probe(AREA, "user namespace", _user_namespace),
        Probe(AREA, "PID namespace", _pid_namespace),
        Probe(AREA, "mount namespace", _mount_namespace),
    ]


def _capability(need: _Need, lacking: _Verdict) -> Answer:
    held = credentials.effective_capabilities().intersection(need.any_of)
    if held:
        with_ = "" if need.name in held else f" (with {min(held)})"
        return ok(f"{need.what}{with_}")
    if need is _FOR_PERF and paranoid() < 0:
        return ok("not needed: perf_event_paranoid is -1")
    return lacking(f"missing: {need.lost}", credentials.how_to_get(need.name))


def paranoid() -> int:
    """kernel.perf_event_paranoid; an unreadable value is taken as the most restrictive one."""
    try:
        with open("/proc/sys/kernel/perf_event_paranoid", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 2


def _user_namespace() -> Answer:
    if machine.is_first_user():
        return ok("the first one: capabilities count everywhere")
    return failed(
        "not the first one: capabilities count for what was made in it only, and root is a user",
        "run it on the host, not in a rootless container",
    )


def _pid_namespace() -> Answer:
    spot = machine.blind_spot()
    if spot is None:
        return ok("the first one: all processes are seen")
    return failed(spot.unseen, spot.remedy)


def _mount_namespace() -> Answer:
    own, first = namespaces.of_pid(os.getpid()).mnt, namespaces.initial().mnt
    if own == first:
        return ok("that of the first process")
    return degraded(
        "not that of the first process: what is mounted here may not be seen there, and the host's"
        " own files count as those of a container",
        "run it on the host",
    )
