# SPDX-License-Identifier: Apache-2.0
"""buildidfs.cli.coverage: what is said where there is nothing to count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buildidfs.app.coverage import Coverage
from buildidfs.cli.coverage import show

if TYPE_CHECKING:
    import pytest


def test_nothing_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = Coverage([], "samples")
    assert show(nothing, json_=False, fail_under=1) == 30
    said = capsys.readouterr()
    assert said.out == "0 samples\n"
    assert said.err == "buildidfs: there are no samples, wanted symbols for some\n"
    assert show(nothing, json_=True, fail_under=None) == 0
    assert show(nothing, json_=False, fail_under=0) == 0
