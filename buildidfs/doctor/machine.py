# SPDX-License-Identifier: Apache-2.0
"""Probes of this machine and process: privileges, kernel interfaces, limits."""

from __future__ import annotations

import errno
import functools
import os
import resource
import tempfile
from collections.abc import Callable
from typing import NamedTuple

from buildidfs.capture.live import first_touch
from buildidfs.capture.process.silent_processes import ProcessGate
from buildidfs.doctor.probe import Probe, ProbeOutcome, degraded, failed, ok
from buildidfs.formats import proc_text
from buildidfs.linux import (
    confinement,
    credentials,
    file_ops,
    inodes,
    machine,
    namespaces,
    perf_event,
    procfs,
)
from buildidfs.linux.file_ops import closing_fd
from buildidfs.names import printable
from buildidfs.wording import abridged

PRIVILEGES = "privileges"

_Verdict = Callable[[str, str], ProbeOutcome]
_KERNEL = "kernel"
_NOT_THERE = (errno.ENOTTY, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV, errno.EXDEV)
_SHOWN = 5  # processes named by number
_LIMITS = "limits"
#: Each file that waits to be copied takes a descriptor; this many wait when an image is unpacked.
_FILES_WANTED = 4096
_FILES_NEEDED = 512
#: The size of the ring between the kernel and `watch`, for each CPU.
_RING_KIB = 4096


class _Need(NamedTuple):
    """A need for one of the privileges ``any_of``: ``what`` needs it, and ``lost`` describes the
    loss without it.
    """

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
    "watch scans every 2 s instead of following: what lives shorter may be missed",
)
_USEFUL = (
    _Need(
        "CAP_SYS_NICE",
        ("CAP_SYS_NICE",),
        "lets watch run before everything else",
        "on a busy machine watch may come too late for short-lived processes",
    ),
    _Need(
        "CAP_SYS_CHROOT",
        ("CAP_SYS_CHROOT",),
        "looks into mount namespaces whose processes have ended",
        "watch may miss static programs that end at once",
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
    _Need("CAP_SYS_ADMIN", ("CAP_SYS_ADMIN",), "mounts the store", "mounting needs fusermount3"),
)


def privilege_probes() -> list[Probe]:
    """Return the probes of capabilities and namespaces."""
    wanted: list[tuple[_Need, _Verdict]] = [(need, failed) for need in (*_NEEDED, _FOR_PERF)]
    wanted += [(need, degraded) for need in _USEFUL]
    return [
        *(
            Probe(PRIVILEGES, need.name, functools.partial(_capability, need, lacking))
            for need, lacking in wanted
        ),
        Probe(PRIVILEGES, "user namespace", _user_namespace),
        Probe(PRIVILEGES, "PID namespace", _pid_namespace),
        Probe(PRIVILEGES, "mount namespace", _mount_namespace),
    ]


def _capability(need: _Need, lacking: _Verdict) -> ProbeOutcome:
    held = credentials.effective_capabilities().intersection(need.any_of)
    if held:
        with_ = "" if need.name in held else f" (with {min(held)})"
        return ok(f"{need.what}{with_}")
    if need is _FOR_PERF and paranoid() < 0:
        return ok("not needed: perf_event_paranoid is -1")
    return lacking(f"missing: {need.lost}", credentials.how_to_get(need.name))


def setting(name: str) -> int:
    """Return a setting of the kernel (/proc/sys/kernel). Raises OSError, ValueError."""
    with open(f"/proc/sys/kernel/{name}", encoding="ascii") as file:
        return int(file.read())


def paranoid() -> int:
    """Return kernel.perf_event_paranoid; an unreadable value counts as the most restrictive one."""
    try:
        return setting("perf_event_paranoid")
    except (OSError, ValueError):
        return 2


def _user_namespace() -> ProbeOutcome:
    if machine.is_first_user():
        return ok("the first one: capabilities count everywhere")
    return failed(
        "not the first one: capabilities count for what was made in it only, and root is a user",
        "run it on the host, not in a rootless container",
    )


def _pid_namespace() -> ProbeOutcome:
    spot = machine.blind_spot()
    if spot is None:
        return ok("the first one: all processes are seen")
    return failed(spot.unseen, spot.remedy)


def _mount_namespace() -> ProbeOutcome:
    own, first = namespaces.of_pid(os.getpid()).mnt, namespaces.initial().mnt
    if own == first:
        return ok("that of the first process")
    return degraded(
        "not that of the first process: what is mounted here may not be seen there, and the host's"
        " own files count as those of a container",
        "run it on the host",
    )


def kernel_probes() -> list[Probe]:
    """Return the probes of kernel interfaces."""
    return [
        Probe(_KERNEL, "processes", _processes),
        Probe(_KERNEL, "memory maps", _memory_maps),
        Probe(_KERNEL, "mapped files", _mapped_files),
        Probe(_KERNEL, "openat2", _openat2),
        Probe(_KERNEL, "mount IDs", _mount_ids),
        Probe(_KERNEL, "mount namespace IDs", _mount_namespace_ids),
        Probe(_KERNEL, "leases", _leases),
        Probe(_KERNEL, "kernel symbols", _kernel_symbols),
        Probe(_KERNEL, "Landlock", _landlock),
        Probe(_KERNEL, "perf events", _perf_events),
        Probe(_KERNEL, "first touches", _first_touches),
    ]


# --- processes and their files -------------------------------------------------------------


def _processes() -> ProbeOutcome:
    refused: list[str] = []
    seen, gate = 0, ProcessGate()
    for pid in procfs.pids():
        try:
            pid_fd = procfs.open_pid(pid)
        except OSError:
            continue  # the process ended
        with closing_fd(pid_fd):
            try:
                os.close(gate.ask(pid_fd, pid, procfs.open_maps, os.close))
                seen += 1
            except PermissionError as error:
                name = printable(procfs.comm(pid_fd))
                refused.append(f"{pid} ({name}: {error.strerror})")
            except OSError:
                continue
    if not refused:
        return ok(f"all {seen} may be looked at")
    which = abridged(refused, _SHOWN)
    found = f"{len(refused)} of {seen + len(refused)} may not be looked at: {which}"
    lacking = credentials.missing_for_scan()
    if lacking:
        return failed(found, credentials.how_to_get(*lacking))
    return degraded(
        found, "see what forbids it to root: a security module (dmesg, ausearch), or a sandbox"
    )


def _memory_maps() -> ProbeOutcome:
    with closing_fd(procfs.open_pid(os.getpid())) as pid_fd:
        try:
            with closing_fd(procfs.open_maps(pid_fd)) as maps_fd:
                count = sum(1 for _ in procfs.executable_file_mappings(maps_fd))
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
            return degraded(
                "PROCMAP_QUERY is missing: maps are read as text, which takes three times as long",
                "Linux 6.11 or later has it",
            )
    if not count:
        return degraded("PROCMAP_QUERY answers, but wrongly", "report it with the kernel's version")
    return ok("PROCMAP_QUERY answers")


def _mapped_files() -> ProbeOutcome:
    with closing_fd(procfs.open_pid(os.getpid())) as pid_fd:
        for mapping in proc_text.mappings_in(procfs.maps(pid_fd)):
            if not mapping.path.startswith(b"/"):
                continue
            try:
                os.close(procfs.open_map_file(pid_fd, mapping.start, mapping.end))
            except FileNotFoundError:
                continue  # unmapped meanwhile, or no map_files at all
            except PermissionError:
                return failed(
                    "/proc/PID/map_files is refused: deleted, replaced and hidden files cannot be"
                    " captured",
                    credentials.how_to_get("CAP_CHECKPOINT_RESTORE"),
                )
            return ok("/proc/PID/map_files opens the very file that is mapped")
    return failed(
        "/proc/PID/map_files is missing: deleted, replaced and hidden files cannot be captured",
        "run a kernel that has it: Linux 4.3 or later",
    )


def _openat2() -> ProbeOutcome:
    if inodes.have_openat2():
        return ok("the kernel keeps paths within a container's root")
    return degraded(
        "missing, or forbidden by a seccomp filter: paths in containers are walked step by step",
        "Linux 5.6 or later has it; a newer container runtime allows it",
    )


def _mount_ids() -> ProbeOutcome:
    with closing_fd(os.open("/", os.O_PATH | os.O_CLOEXEC)) as fd:
        unique = inodes.unique_mount_id(fd)
    if unique is None:
        return degraded(
            "none that are unique: unchanged files on tmpfs, overlayfs and loop devices are read"
            " again by every scan",
            "Linux 6.8 or later has them",
        )
    return ok("unique until the next boot")


def _mount_namespace_ids() -> ProbeOutcome:
    with closing_fd(procfs.open_pid(os.getpid())) as pid_fd:
        if namespaces.mnt_ns_id(pid_fd):
            return ok("unique until the next boot")
    return degraded(
        "none that are unique: containers that follow each other may be taken for one",
        "Linux 6.11 or later has them",
    )


def _leases() -> ProbeOutcome:
    """Try a lease on a file of our own. For other files, CAP_LEASE and support by their filesystem
    may be needed.
    """
    with tempfile.TemporaryFile() as file:
        fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
        with closing_fd(fd):
            seen = file_ops.has_writer(fd)
    if seen:
        return ok("a file that is being written is told from one that is not")
    return degraded(
        "refused: whether a file is being written is guessed from its times",
        "sysctl fs.leases-enable=1, if it is 0",
    )


def _kernel_symbols() -> ProbeOutcome:
    with open("/proc/kallsyms", "rb") as file:
        first = [line.split(b" ", 1)[0] for line in file.readlines(1 << 14)]
    if any(address.strip(b"0") for address in first):
        return ok("/proc/kallsyms has their addresses")
    return degraded(
        "/proc/kallsyms hides their addresses: the kernel's symbols are not captured",
        credentials.remedy_for_hidden_addresses(),
    )


def _landlock() -> ProbeOutcome:
    version = confinement.landlock_version()
    if version:
        return ok(f"version {version}: symbolizers read no files but those they are given")
    return degraded(
        "missing: symbolizers are confined less, and may read what all users may read",
        "Linux 5.13 or later has it; it may have to be named in lsm= of the kernel's command line",
    )


# --- events --------------------------------------------------------------------------------


def _perf_events() -> ProbeOutcome:
    events = perf_event.MMAP | perf_event.TASK | perf_event.NAMESPACES
    cpus, refused = perf_event.online_cpus(), dict[int, OSError]()
    for cpu in sorted(cpus):
        try:
            perf_event.Ring(cpu, events, pages=1, watermark=1).close()
        except OSError as error:
            if error.errno != errno.ENODEV:  # switched off meanwhile
                refused[cpu] = error
    level = f"perf_event_paranoid is {paranoid()}"
    if not refused:
        return ok(f"on {len(cpus)} CPUs; {level}")
    why = next(iter(refused.values()))
    found = f"refused on {len(refused)} of {len(cpus)} CPUs: {why.strerror}; {level}"
    if why.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return failed(found, "raise the limit of open files or of memory")
    if why.errno not in (errno.EACCES, errno.EPERM):
        return failed(found, "run a kernel with CONFIG_PERF_EVENTS, Linux 4.12 or later")
    if credentials.effective_capabilities().isdisjoint(("CAP_PERFMON", "CAP_SYS_ADMIN")):
        get = credentials.how_to_get("CAP_PERFMON")
        return failed(found, f"{get}; or sysctl kernel.perf_event_paranoid=-1")
    return failed(
        found,
        "see what forbids it to root: a seccomp filter (--security-opt seccomp=...), a security"
        " module, or a user namespace",
    )


def _first_touches() -> ProbeOutcome:
    program, reason = first_touch.start()
    if program is None:
        return degraded(
            f"each start of a known program costs the watch time: {reason}",
            "Linux 6.12 or later, with BTF and without lockdown, reports unknown files only",
        )
    program.close()
    return ok("a program in the kernel reports unknown files only")


def limit_probes() -> list[Probe]:
    """Return the probes of limits."""
    return [
        Probe(_LIMITS, "open files", _open_files),
        Probe(_LIMITS, "locked memory", _locked_memory),
        Probe(_LIMITS, "real-time scheduling", _real_time),
    ]


def _open_files() -> ProbeOutcome:
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= _FILES_WANTED:
        shown = "any number of" if most == resource.RLIM_INFINITY else str(most)
        return ok(f"a process may have {shown} files open ({soft} until it asks for more)")
    found = f"a process may have {most} files open at most: what waits to be copied is kept open"
    remedy = (
        f"raise the hard limit to {_FILES_WANTED} or more: LimitNOFILE= of the unit, ulimit -Hn"
    )
    return failed(found, remedy) if most < _FILES_NEEDED else degraded(found, remedy)


def _locked_memory() -> ProbeOutcome:
    """Check the limits of locked memory for the rings of perf.

    The rings count against perf_event_mlock_kb for each CPU, then against RLIMIT_MEMLOCK. Source:
    perf_mmap() of kernel/events/core.c.
    """
    if "CAP_IPC_LOCK" in credentials.effective_capabilities():
        return ok("CAP_IPC_LOCK: rings of perf may have any size")
    if paranoid() < 0:
        return ok("perf_event_paranoid is -1: rings of perf may have any size")
    cpus = len(perf_event.online_cpus())
    free = setting("perf_event_mlock_kb") * cpus
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    needed = _RING_KIB * cpus
    if limit == resource.RLIM_INFINITY or free + (limit >> 10) >= needed:
        return ok(f"{needed} KiB for the rings of perf may be locked")
    return degraded(
        f"{free + (limit >> 10)} KiB may be locked, of {needed} KiB for the rings of perf on"
        f" {cpus} CPUs: events are lost when much happens at once",
        f"raise kernel.perf_event_mlock_kb to {_RING_KIB + 4} or RLIMIT_MEMLOCK (LimitMEMLOCK=),"
        " or give it CAP_IPC_LOCK",
    )


def _real_time() -> ProbeOutcome:
    """Set a real-time priority on this process, which is a child that ends soon."""
    period = 0
    try:
        period = setting("sched_rt_runtime_us")
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except FileNotFoundError:
        pass
    except PermissionError:
        return degraded(
            "refused: on a busy machine watch may come too late for short-lived processes",
            "raise kernel.sched_rt_runtime_us, which is 0" if not period
            else "give its control group a share in cpu.rt_runtime_us"
            if "CAP_SYS_NICE" in credentials.effective_capabilities()
            else f"{credentials.how_to_get('CAP_SYS_NICE')}; or LimitRTPRIO=1 of the unit",
        )  # fmt: skip
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    if not period:
        return degraded(
            "kernel.sched_rt_runtime_us is 0: nothing runs in real time",
            "sysctl kernel.sched_rt_runtime_us=950000",
        )
    return ok("allowed")
