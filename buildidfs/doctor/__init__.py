# SPDX-License-Identifier: Apache-2.0
"""Examine if this machine, this user and this store are fit for capturing.

`probe` has the values and runs each probe in a child process; `machine` and `storage` have the
probes. A probe tries the feature instead of comparing versions: kernels are patched, and containers
and security modules remove features of a version. No probe changes anything.

Outsiders use `examine`, `ProbeFinding` and `PRIVILEGES`. Nothing here captures or writes to a
store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from buildidfs.doctor import machine, probe, storage
from buildidfs.doctor.machine import PRIVILEGES
from buildidfs.doctor.probe import ProbeFinding, State

__all__ = ["PRIVILEGES", "ProbeFinding", "State", "examine"]


def examine(store_path: str | bytes | os.PathLike[str]) -> Iterator[ProbeFinding]:
    """Run all probes; yield their findings one by one, grouped by area.

    A probe without an answer within `probe.PATIENCE` seconds is a finding, too. The probes run in
    child processes, so the caller must have a single thread.
    """
    root = os.path.abspath(os.fsencode(store_path))
    yield from probe.ask(
        [
            *machine.privilege_probes(),
            *machine.kernel_probes(),
            *machine.limit_probes(),
            *storage.fuse_probes(),
            *storage.store_probes(root),
        ]
    )
