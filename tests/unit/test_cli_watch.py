# SPDX-License-Identifier: Apache-2.0
"""buildidfs.cli.watch: what is said of a watch, to people and to programs."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from buildidfs.capture.live.protocol import Counts
from buildidfs.cli import watch as watch_output
from buildidfs.cli.main import ReaderGone
from buildidfs.cli.watch import Presenter, one_line
from buildidfs.ingest.committer import WatchCounters
from buildidfs.model import BuildId
from buildidfs.watch.state import Event, WatchState, as_facts
from tests.support.harness.captures import NOW, sighting

ROOT = Path(__file__).resolve().parents[2]
QUIET = as_facts(WatchState("following", (), Counts(), WatchCounters(), 0, 0, 1, 0, True))
BUSY = as_facts(
    WatchState(
        "interrupted",
        ("half blind",),
        Counts(records=1001, caught=1002, missed=1003, unpinned=1004, lost=1005),
        WatchCounters(
            captured=1006,
            held=1007,
            copied_bytes=5 << 20,
            new_ids=1008,
            absent=1009,
            unreadable=1010,
            let_go=1011,
            retried=1012,
            journaled=1013,
            unjournaled=1014,
            store_error="the disk is full",
        ),
        1015,
        3 << 20,
        1016,
        1017,
        False,
    )
)


Capture = pytest.CaptureFixture[bytes]


def objects(capture: Capture) -> list[dict[str, Any]]:
    """What was printed, as JSON."""
    return [json.loads(line) for line in capture.readouterr().out.splitlines()]


def test_one_line_says_what_is_well() -> None:
    assert one_line(QUIET) == (
        "following, 0 captured (0 B, 0 new build IDs), 0 already held, 0 waiting (0 B)"
    )


def test_one_line_says_what_is_amiss() -> None:
    assert one_line(BUSY) == (
        "interrupted, 1006 captured (5.0 MiB, 1008 new build IDs), 1007 already held, "
        "1015 waiting (3.0 MiB), 1011 let go uncopied, 1004 not opened, 1003 missed, "
        "1010 unreadable, 1005 events lost, 1017 restarts, the disk is full"
    )


def test_facts_are_all_there_is() -> None:
    facts = msgspec.to_builtins(BUSY)
    numbers = [value for value in facts.values() if isinstance(value, int) and value > 1000]
    assert {x for x in numbers if x < 2000} == set(range(1001, 1018))
    assert facts["copied_bytes"] == 5 << 20
    assert facts["waiting_bytes"] == 3 << 20
    assert facts["mode"] == "interrupted"
    assert facts["degraded"] == ["half blind"]
    assert facts["store_error"] == "the disk is full"
    assert facts["idle"] is False
    assert QUIET.idle is True


def test_facts_are_those_of_the_manual() -> None:
    page = (ROOT / "man/buildidfs-json.5").read_text()
    section = page.partition("\n.Sh FIELDS\n")[2].partition("\n.Sh ")[0]
    item = section.partition("\n.It Cm watch\n")[2].partition("\n.It ")[0]
    of_counts = item.partition("\n.Ql counts ,\n")[2]
    named = set(re.findall(r"^\.Li (\w+)", of_counts, re.MULTILINE))
    assert set(msgspec.to_builtins(QUIET)) == named


def test_events_for_programs(capsysbinary: Capture) -> None:
    presenter = Presenter(json_=True, quiet=False)
    at = sighting(b"/lib\xff.so", container="docker:abc", mnt_ns_id=77)
    presenter.event(Event("captured", at, BuildId(b"\xab\xcd\xef")))
    presenter.event(Event("not captured", at, None, "no \x1b time"))
    first, second = objects(capsysbinary)
    assert first == {
        "event": "captured", "time": NOW / 1e9, "build_id": "abcdef", "path": "/lib\ufffd.so",
        "path_b64": "L2xpYv8uc28=", "container": "docker:abc", "mnt_ns_id": 77,
    }  # fmt: skip
    assert second["event"] == "not captured"
    assert second["reason"] == "no \x1b time"
    assert "build_id" not in second


def test_people_get_no_events(capsysbinary: Capture) -> None:
    Presenter(json_=False, quiet=False).event(Event("captured", sighting(), BuildId(b"\xab\xcd")))
    assert capsysbinary.readouterr().out == b""


def test_counts_once_a_minute_and_at_the_end(capsysbinary: Capture) -> None:
    presenter = Presenter(json_=True, quiet=False)
    start = time.monotonic()
    for second in range(150):
        presenter.turn(msgspec.structs.replace(QUIET, scans=second), start + second)
    presenter.end(BUSY)
    first, second, last = objects(capsysbinary)
    assert [each["event"] for each in (first, second, last)] == ["counts", "counts", "stopped"]
    assert 60 <= first["scans"] <= 61
    assert 60 <= second["scans"] - first["scans"] <= 61
    facts = msgspec.to_builtins(BUSY)
    assert {key: last[key] for key in facts} == facts
    assert abs(last["time"] - time.time()) < 60


def test_lines_for_people(capsysbinary: Capture) -> None:
    presenter = Presenter(json_=False, quiet=False)
    presenter.turn(QUIET, time.monotonic())
    assert capsysbinary.readouterr().out == b""
    presenter.turn(QUIET, time.monotonic() + 61)
    presenter.end(BUSY)
    assert capsysbinary.readouterr().out.decode() == f"{one_line(QUIET)}\n{one_line(BUSY)}\n"


def test_terminal_shows_one_line_that_changes(
    capsysbinary: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(watch_output.terminal, "width", lambda stream: 1000)
    presenter = Presenter(json_=False, quiet=False)
    start = time.monotonic()
    for tenth in range(25):
        presenter.turn(QUIET, start + tenth / 10)
    presenter.end(BUSY)
    monkeypatch.undo()
    live = f"\r\x1b[K{one_line(QUIET)}"
    assert capsysbinary.readouterr().out.decode() == f"{live * 3}\n{one_line(BUSY)}\n"


def test_line_is_cut_to_the_width_of_the_terminal(
    capsysbinary: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(watch_output.terminal, "width", lambda stream: 60)
    presenter = Presenter(json_=False, quiet=False)
    presenter.turn(BUSY, time.monotonic())
    line = capsysbinary.readouterr().out.decode().removeprefix("\r\x1b[K")
    assert len(line) == 59, "a longer one leaves its first part on the screen"
    assert line.endswith(one_line(BUSY)[-20:])


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_is_quiet(
    capsysbinary: Capture, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    presenter = Presenter(json_=False, quiet=True)
    presenter.turn(QUIET, time.monotonic() + 61)
    presenter.end(BUSY)
    assert capsysbinary.readouterr().out == b""


def test_output_that_cannot_be_written_is_no_matter_of_who_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(values: object) -> None:
        calls.append(values)
        raise ReaderGone

    calls: list[object] = []
    monkeypatch.setattr(watch_output, "json_line", refuse)
    presenter = Presenter(json_=True, quiet=False)
    presenter.turn(QUIET, time.monotonic())
    for _ in range(3):
        presenter.event(Event("captured", sighting(), BuildId(b"\xab\xcd")))
    assert len(calls) == 1
    with pytest.raises(ReaderGone):
        presenter.turn(QUIET, time.monotonic())
