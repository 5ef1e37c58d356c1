# SPDX-License-Identifier: Apache-2.0
"""buildidfs.watch.status: the verdict on what runs, its reasons, and what to do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from buildidfs.answers import Fault, Status, Verdict
from buildidfs.config import RetentionSettings
from buildidfs.linux import machine
from buildidfs.store import Store
from buildidfs.store.run_files import LossLog, LostFiles, Presence, lost_text
from buildidfs.watch import status
from buildidfs.watch.state import STOPPED
from buildidfs.watch.status import MOUNT, UP, WATCH, PartState

WELL: dict[str, Any] = {"mode": "following", "degraded": [], "losses": [], "events_lost": 0}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    Store.create(tmp_path / "store").close()
    return tmp_path / "store"


def _status(root: Path, **facts: object) -> Status:
    with Presence(root, WATCH, **{**WELL, "reported_at": time.monotonic(), **facts}):
        return status.take(root, RetentionSettings())


def _finding(root: Path, **facts: object) -> Fault:
    (finding,) = _status(root, **facts).findings
    return finding


def test_watch_that_follows_is_healthy(root: Path) -> None:
    found = _status(root)
    assert (found.verdict, found.findings) == (Verdict.HEALTHY, [])


def test_losses_of_long_ago_are_over(root: Path) -> None:
    row = {"reason": "gone", "container": "", "count": 24656, "recent": 0}
    assert _status(root, missed=69644, losses=[row]).verdict is Verdict.HEALTHY


def test_recent_losses_name_container_and_reason(root: Path) -> None:
    rows = [
        {"reason": "not copied within 30 s", "container": "docker:a", "count": 90, "recent": 7},
        {"reason": "No such process", "container": "", "count": 2, "recent": 2},
        {"reason": "Permission denied", "container": "", "count": 1000, "recent": 0},
    ]
    finding = _finding(root, losses=rows)
    assert finding.verdict is Verdict.LOSING
    assert finding.reason == (
        "9 files lost in the last 10 minutes:"
        " 7 in docker:a (not copied within 30 s); 2 on the host (No such process)"
    )
    assert "pin-seconds" in finding.remedy
    assert finding.remedy.endswith("buildidfs journal --lost --since 10m names 0 of them")
    row = LostFiles(time.time_ns(), lost_text(b"/gone"), "No such process")
    old = LostFiles(1, lost_text(b"/before"), "No such process")
    assert LossLog(bytes(root)).append([old, *[row] * 9])
    assert _finding(root, losses=rows).remedy.endswith("--since 10m names them")


@pytest.mark.parametrize(
    ("facts", "verdict", "reason", "remedy"),
    [
        ({"events_lost": 5}, Verdict.LOSING, "5 events of the kernel lost", "less load"),
        ({"store_error": "disk full"}, Verdict.LOSING, "disk full", "max-size"),
        ({"mode": "interrupted"}, Verdict.LOSING, "has ended", "started again by itself"),
        (
            {"mode": "interrupted", "degraded": [f"{STOPPED}: kill -CONT 7 lets it go on"]},
            Verdict.LOSING,
            f"nothing is followed just now: {STOPPED}",
            "kill -CONT 7",
        ),
        ({"degraded": ["half blind: no"]}, Verdict.DEGRADED, "half blind: no", "doctor"),
        (
            {"mode": "starting", "reported_at": None},
            Verdict.DEGRADED,
            "being started",
            "look again",
        ),
    ],
)
def test_what_a_watch_says_is_judged(
    root: Path, facts: dict[str, object], verdict: Verdict, reason: str, remedy: str
) -> None:
    finding = _finding(root, **facts)
    assert finding.verdict is verdict
    assert reason in finding.reason
    assert remedy in finding.remedy


def test_blind_spot_comes_with_its_own_remedy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "view", lambda: "own")
    spot = machine.blind_spot()
    assert spot is not None
    finding = _finding(root, mode="confined", degraded=[f"{spot.unseen}: {spot.remedy}"])
    assert finding == Fault(Verdict.DEGRADED, spot.unseen, spot.remedy)


def test_watch_that_tells_nothing_any_more_does_not_answer(root: Path) -> None:
    found = _status(root, reported_at=time.monotonic() - 60)
    assert found.processes[0].state == "not answering"
    assert found.verdict is Verdict.DOWN
    assert "does not answer" in found.findings[0].reason


def test_the_worst_comes_first(root: Path) -> None:
    parts = [PartState(MOUNT, "waiting", reason="busy"), PartState("other", "starting")]
    with Presence(root, UP, children=parts):
        found = _status(root, degraded=["half blind"], store_error="disk full")
    verdicts = [finding.verdict for finding in found.findings]
    assert verdicts == [Verdict.DOWN, Verdict.LOSING, Verdict.DEGRADED, Verdict.DEGRADED]
    assert found.verdict is Verdict.DOWN
