# SPDX-License-Identifier: Apache-2.0
"""Whether this machine, this user and this store are fit for capturing, and what to do if not.

Everything is found out by trying, never by comparing versions: kernels are patched, and containers
and security modules take away what a version promises. Nothing is changed by looking.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from buildidfs.app.doctor import clock, fuse, isolated_probe, kernel, limits, privileges, store
from buildidfs.app.doctor.values import Finding, State

if TYPE_CHECKING:
    from buildidfs.config import Settings

__all__ = ["PRIVILEGES", "Finding", "State", "examine"]

PRIVILEGES = privileges.AREA
"""The area of findings about what this process may do: others may follow from them."""


def examine(
    store_path: str | bytes | os.PathLike[str],
    settings: Settings,
    *,
    seconds: float = isolated_probe.PATIENCE,
) -> Iterator[Finding]:
    """Look at everything; the findings come one by one, those of an area together.

    What is given no answer within ``seconds``, one check at a time, is a finding as well. Looking
    happens in child processes, which must be made while this one has a single thread.
    """
    root = os.path.abspath(os.fsencode(store_path))
    yield from isolated_probe.ask(
        [
            *privileges.probes(settings),
            *kernel.probes(),
            *limits.probes(),
            *fuse.probes(),
            *clock.probes(),
            *store.probes(root),
        ],
        seconds,
    )
