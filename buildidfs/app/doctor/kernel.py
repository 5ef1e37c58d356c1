# SPDX-License-Identifier: Apache-2.0
"""What the kernel offers for capturing, found out by using it."""

from __future__ import annotations

import errno
import os
import tempfile

from buildidfs.app.doctor import privileges
from buildidfs.app.doctor.values import Answer, Probe, degraded, failed, ok
from buildidfs.formats import procmaps
from buildidfs.linux import (
    credentials,
    file_ops,
    namespaces,
    openat2,
    perf_event,
    procfs,
    procmap_query,
    statx,
)

AREA = "kernel"

_NOT_THERE = (errno.ENOTTY, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV, errno.EXDEV)
_SHOWN = 5  # processes named by number


def probes() -> list[Probe]:
    """The checks of kernel interfaces."""
    return [
        Probe(AREA, "processes", _processes),
        Probe(AREA, "memory maps", _memory_maps),
        Probe(AREA, "mapped files", _mapped_files),
        Probe(AREA, "openat2", _openat2),
        Probe(AREA, "mount IDs", _mount_ids),
        Probe(AREA, "mount namespace IDs", _mount_namespace_ids),
        Probe(AREA, "leases", _leases),
        Probe(AREA, "kernel symbols", _kernel_symbols),
        Probe(AREA, "perf events", _perf_events),
        Probe(AREA, "perf build IDs", _perf_build_ids),
    ]


# --- processes and their files -------------------------------------------------------------


def _processes() -> Answer:
    refused, seen = [], 0
    for pid in procfs.pids():
        try:
            pid_fd = procfs.open_pid(pid)
        except OSError:
            continue  # it ended
        try:
            os.close(procfs.open_maps(pid_fd))
            seen += 1
        except PermissionError:
            refused.append(pid)
        except OSError:
            continue
        finally:
            os.close(pid_fd)
    if not refused:
        return ok(f"all {seen} may be looked at")
    names = ", ".join(map(str, refused[:_SHOWN])) + (", ..." if refused[_SHOWN:] else "")
    found = f"{len(refused)} of {seen + len(refused)} may not be looked at: {names}"
    lacking = credentials.missing_for_scan()
    if lacking:
        return failed(found, credentials.how_to_get(*lacking))
    return degraded(
        found, "see what forbids it to root: a security module (dmesg, ausearch), or a sandbox"
    )


def _memory_maps() -> Answer:
    pid_fd = procfs.open_pid(os.getpid())
    try:
        maps_fd = procfs.open_maps(pid_fd)
        try:
            count = sum(1 for _ in procmap_query.executable_file_mappings(maps_fd))
        finally:
            os.close(maps_fd)
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return degraded(
            "PROCMAP_QUERY is missing: maps are read as text, which takes three times as long",
            "Linux 6.11 or later has it",
        )
    finally:
        os.close(pid_fd)
    if not count:
        return degraded("PROCMAP_QUERY answers, but wrongly", "report it with the kernel's version")
    return ok("PROCMAP_QUERY answers")


def _mapped_files() -> Answer:
    pid_fd = procfs.open_pid(os.getpid())
    try:
        for mapping in procmaps.parse(procfs.maps(pid_fd)):
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
    finally:
        os.close(pid_fd)
    return failed(
        "/proc/PID/map_files is missing: deleted, replaced and hidden files cannot be captured",
        "run a kernel that has it: Linux 4.3 or later",
    )


def _openat2() -> Answer:
    if openat2.have_openat2():
        return ok("the kernel keeps paths within a container's root")
    return degraded(
        "missing, or forbidden by a seccomp filter: paths in containers are walked step by step",
        "Linux 5.6 or later has it; a newer container runtime allows it",
    )


def _mount_ids() -> Answer:
    fd = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        unique = statx.unique_mount_id(fd)
    finally:
        os.close(fd)
    if unique is None:
        return degraded(
            "none that are unique: unchanged files on tmpfs, overlayfs and loop devices are read"
            " again by every scan",
            "Linux 6.8 or later has them",
        )
    return ok("unique until the next boot")


def _mount_namespace_ids() -> Answer:
    pid_fd = procfs.open_pid(os.getpid())
    try:
        if namespaces.mnt_ns_id(pid_fd):
            return ok("unique until the next boot")
    finally:
        os.close(pid_fd)
    return degraded(
        "none that are unique: containers that follow each other may be taken for one",
        "Linux 6.11 or later has them",
    )


def _leases() -> Answer:
    """Of a file of our own: that of others takes CAP_LEASE, and their filesystem to know."""
    with tempfile.TemporaryFile() as file:
        fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            seen = file_ops.has_writer(fd)
        finally:
            os.close(fd)
    if seen:
        return ok("a file that is being written is told from one that is not")
    return degraded(
        "refused: whether a file is being written is guessed from its times",
        "sysctl fs.leases-enable=1, if it is 0",
    )


def _kernel_symbols() -> Answer:
    with open("/proc/kallsyms", "rb") as file:
        first = [line.split(b" ", 1)[0] for line in file.readlines(1 << 14)]
    if any(address.strip(b"0") for address in first):
        return ok("/proc/kallsyms has their addresses")
    return degraded(
        "/proc/kallsyms hides their addresses: the kernel's symbols are not captured",
        "sysctl kernel.kptr_restrict=1, if it is 2"
        if "CAP_SYSLOG" in credentials.effective_capabilities()
        else credentials.how_to_get("CAP_SYSLOG"),
    )


# --- events --------------------------------------------------------------------------------


def _perf_events() -> Answer:
    events = perf_event.MMAP | perf_event.TASK | perf_event.NAMESPACES
    cpus, refused = perf_event.online_cpus(), dict[int, OSError]()
    for cpu in sorted(cpus):
        try:
            perf_event.Ring(cpu, events, pages=1, watermark=1).close()
        except OSError as error:
            if error.errno != errno.ENODEV:  # switched off meanwhile
                refused[cpu] = error
    level = f"perf_event_paranoid is {privileges.paranoid()}"
    if not refused:
        return ok(f"on {len(cpus)} CPUs; {level}")
    why = next(iter(refused.values()))
    found = f"refused on {len(refused)} of {len(cpus)} CPUs: {why.strerror}; {level}: no watch"
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


def _perf_build_ids() -> Answer:
    try:
        leak = perf_event.build_ids_leak()
    except OSError as error:
        return ok(f"build IDs are read from files instead: {error.strerror}")
    if leak is None:
        return ok("build IDs are read from files instead: nothing here has one to try with")
    if leak:
        return ok(
            "build IDs are read from files instead: this kernel would mix them into other perf"
            " sessions"
        )
    return ok("this kernel keeps them to who asks")
