# SPDX-License-Identifier: Apache-2.0
"""What was acknowledged survives kill -9 at any moment, and a power cut.

``python -m benchmarks.run crashes`` does the same some hundred times.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support.filesystems.powercuts import PowerCuts
from tests.support.harness.crashing import OPERATIONS, Crashes, Operation

pytestmark = [pytest.mark.root, pytest.mark.slow]

_SEED = 20_260


@pytest.fixture(scope="module")
def crashes(scratch: Path) -> Crashes:
    # The test that takes turns is not beside the others, so a process may come here twice.
    return Crashes(Path(tempfile.mkdtemp(prefix="crashes-", dir=scratch)), _SEED)


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(each, marks=pytest.mark.watch if each.name == "watch" else (), id=each.name)
        for each in OPERATIONS
    ],
)
def test_killed(crashes: Crashes, operation: Operation) -> None:
    wanted = crashes.killed + 2
    for _ in range(10):  # some moments come too late
        assert crashes.crash(operation) == []
        if crashes.killed == wanted:
            return
    pytest.fail("it was always over before it could be killed")


def test_power_cut(directory: Path) -> None:
    with PowerCuts(directory, _SEED) as disk:
        problems = [line for _ in range(2) for line in disk.scan(60, 4)]
        assert problems == []
        assert disk.cuts >= 4
        assert len(disk.ledger.told) == 120
