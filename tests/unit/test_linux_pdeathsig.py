# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.pdeathsig: a child ends when its parent is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import lines

ROOT = Path(__file__).resolve().parents[2]

_PARENT = """
import os, signal, sys, time
from buildidfs.linux import pdeathsig as parents
me, wait = os.getpid(), os.pipe()
child = os.fork()
if child == 0:
    os.close(wait[1])
    if sys.argv[1] == "late":
        os.read(wait[0], 1)
    parents.end_with(me, signal.SIGTERM)
    os.execvp("sleep", ["sleep", "1000"])
print(child, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_child_ends_with_its_parent(when: str) -> None:
    argv = [sys.executable, "-c", _PARENT, when]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(lines(parent.stdout, lambda got: len(got) == 1)[0]))
        try:
            assert select.select([child], [], [], 0)[0] == []
            parent.kill()
            assert select.select([child], [], [], 20)[0] == [child]
        finally:
            if not select.select([child], [], [], 0)[0]:
                signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)
