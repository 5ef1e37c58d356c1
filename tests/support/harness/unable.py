# SPDX-License-Identifier: Apache-2.0
"""Programs run so that the kernel refuses them the events of other processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.clients.tools import Argument, tool


def unable(*argv: Argument) -> list[Argument]:
    """The command ``argv`` without any capability; skips where even so events are to be had.

    What it starts can be looked at by others that are run like this.
    """
    if int(Path("/proc/sys/kernel/perf_event_paranoid").read_text()) < 1:
        pytest.skip("perf_event_paranoid lets everybody follow")
    if os.geteuid() != 0:
        return [*argv]
    # Not another user, who could not run this very Python if it is below /root.
    return [tool("setpriv"), "--bounding-set=-all", "--no-new-privs", *argv]
