# SPDX-License-Identifier: Apache-2.0
"""Control groups of test runs that were killed are removed; those of running ones stay."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.clients.commands import ROOT
from tests.support.containers.imitating import new_group, sweep_groups, unified_hierarchy

_KILLED = """
import os
from tests.support.containers.imitating import new_group, unified_hierarchy
print(new_group(new_group(unified_hierarchy())), flush=True)
os.kill(os.getpid(), 9)
"""

pytestmark = pytest.mark.root


def test_groups_of_a_killed_run_are_swept() -> None:
    argv = [sys.executable, "-c", _KILLED]
    left = subprocess.run(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout.strip()
    assert os.path.isdir(left)
    own = new_group(unified_hierarchy())
    sweep_groups()
    assert not os.path.exists(os.path.dirname(left))
    own.rmdir()
