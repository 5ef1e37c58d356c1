# SPDX-License-Identifier: Apache-2.0
"""benchmarks.fleet: the claims of docs/fleet.md hold, and a claim that does not is told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks import fleet

if TYPE_CHECKING:
    import pytest


def test_claims_of_the_document_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert fleet.main(["--json", "--scale", "20000"]) == 0
    rows = json.loads(capsys.readouterr().out)["claims"]
    assert len(rows) > 10


def test_claim_that_does_not_hold_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert fleet.main(["--scale", "20000", "--refresh-s", "1"]) == 1
    assert "MISSED" in capsys.readouterr().out
