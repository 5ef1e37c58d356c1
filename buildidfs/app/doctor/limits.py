# SPDX-License-Identifier: Apache-2.0
"""What the system allows one process: open files, locked memory, real-time scheduling."""

from __future__ import annotations

import os
import resource

from buildidfs.app.doctor.values import Answer, Probe, degraded, failed, ok
from buildidfs.linux import credentials, perf_event

AREA = "limits"

#: A file that waits to be copied is one descriptor; this many wait when an image is unpacked.
_FILES_WANTED = 4096
_FILES_NEEDED = 512

#: What `watch` has between the kernel and itself for each CPU.
_RING_KIB = 4096


def probes() -> list[Probe]:
    """The checks of limits."""
    return [
        Probe(AREA, "open files", _open_files),
        Probe(AREA, "locked memory", _locked_memory),
        Probe(AREA, "real-time scheduling", _real_time),
    ]


def read_number(path: str) -> int:
    """The number that a file of /proc/sys holds. Raises OSError, ValueError."""
    with open(path, encoding="ascii") as file:
        return int(file.read())


def _open_files() -> Answer:
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= _FILES_WANTED:
        shown = "any number of" if most == resource.RLIM_INFINITY else str(most)
        return ok(f"a process may have {shown} files open ({soft} until it asks for more)")
    found = f"a process may have {most} files open at most: what waits to be copied is kept open"
    remedy = (
        f"raise the hard limit to {_FILES_WANTED} or more: LimitNOFILE= of the unit, ulimit -Hn"
    )
    return failed(found, remedy) if most < _FILES_NEEDED else degraded(found, remedy)


def _locked_memory() -> Answer:
    """Rings of perf count against perf_event_mlock_kb for each CPU, then against RLIMIT_MEMLOCK.

    Source: perf_mmap() of kernel/events/core.c.
    """
    if "CAP_IPC_LOCK" in credentials.effective_capabilities():
        return ok("CAP_IPC_LOCK: rings of perf may have any size")
    if read_number("/proc/sys/kernel/perf_event_paranoid") < 0:
        return ok("perf_event_paranoid is -1: rings of perf may have any size")
    cpus = len(perf_event.online_cpus())
    free = read_number("/proc/sys/kernel/perf_event_mlock_kb") * cpus
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


def _real_time() -> Answer:
    """Tried on this process, which is a child that ends soon."""
    period = 0
    try:
        period = read_number("/proc/sys/kernel/sched_rt_runtime_us")
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
