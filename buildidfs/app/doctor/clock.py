# SPDX-License-Identifier: Apache-2.0
"""The time, under which everything captured is recorded."""

from __future__ import annotations

import os
import time

from buildidfs.app.doctor.values import Answer, Probe, degraded, ok
from buildidfs.linux import clock

AREA = "clock"

#: The year of this program: no clock that is right shows an earlier one.
_RELEASED = 2026

#: Made by the kernel while it starts, on every machine.
_MADE_AT_BOOT = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty")

_TOLERANCE = 60  # seconds: NTP puts a clock right by a few, once


def probes() -> list[Probe]:
    """The checks of the clock of this machine."""
    return [
        Probe(AREA, "time", _time),
        Probe(AREA, "steps", _steps),
        Probe(AREA, "synchronisation", _synchronised),
    ]


def _time() -> Answer:
    now = time.time()
    shown = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    if time.gmtime(now).tm_year < _RELEASED:
        return degraded(
            f"it is {shown}, which was before this program was made",
            "set the clock (timedatectl set-ntp true): captures are recorded under its time",
        )
    return ok(f"it is {shown}")


def _steps() -> Answer:
    """Whether the clock was put back since the kernel started.

    The boot time that /proc/stat shows moves with the clock, and tells nothing. A file that the
    kernel made while it started can only be from the future if the clock was put back.
    """
    now = time.time()
    made = []
    for path in _MADE_AT_BOOT:
        try:
            made.append(os.stat(path).st_ctime)
        except OSError:
            continue
    ahead = max(made, default=now) - now
    if ahead > _TOLERANCE:
        return degraded(
            f"the clock was put back by {ahead:.0f} s or more since the system started",
            "see what sets the clock (journalctl -u systemd-timesyncd, chronyc tracking); what was"
            " captured before counts as newer than what is captured now",
        )
    return ok("not put back since the system started")


def _synchronised() -> Answer:
    if clock.is_synchronised():
        return ok("the kernel is told that the time is right")
    return degraded(
        "nothing tells the kernel that the time is right",
        "run an NTP client (timedatectl set-ntp true), or captures of several hosts cannot be put"
        " in order; not needed where the host of a virtual machine sets its clock",
    )
