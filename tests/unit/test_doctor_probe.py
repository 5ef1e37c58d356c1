# SPDX-License-Identifier: Apache-2.0
"""buildidfs.doctor.probe: probes that raise, die or never answer harm nobody."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from buildidfs.doctor import probe
from buildidfs.doctor.probe import Probe, ProbeFinding, ProbeOutcome, degraded, failed, ok
from tests.support.harness.scans import open_descriptors


def _probe(ask: Callable[[], ProbeOutcome], name: str = "it", place: str = "") -> Probe:
    return Probe("area", name, ask, place)


def _for_ever() -> ProbeOutcome:
    os.read(os.pipe()[0], 1)
    return ok("never")


def _killed() -> ProbeOutcome:
    faulthandler.disable()  # of pytest
    os.kill(os.getpid(), signal.SIGBUS)
    return ok("never")


def _raises(error: BaseException) -> Callable[[], ProbeOutcome]:
    def ask() -> ProbeOutcome:
        raise error

    return ask


def test_answers_come_in_order_with_the_names_of_what_was_asked() -> None:
    probes = [
        Probe("a", "one", lambda: ok("well")),
        Probe("a", "two", lambda: degraded("so so", "rest")),
        Probe("b", "three", lambda: failed("broken", "mend it")),
    ]
    assert list(probe.ask(probes)) == [
        ProbeFinding("a", "one", "ok", "well"),
        ProbeFinding("a", "two", "degraded", "so so", "rest"),
        ProbeFinding("b", "three", "failed", "broken", "mend it"),
    ]


def _children() -> set[int]:
    """Our own, ended or not: other tests may have some."""
    found = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal():
                stat = Path(f"/proc/{name}/stat").read_text(errors="replace")
                if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                    found.add(int(name))
    return found


def test_nothing_is_left_open_or_running() -> None:
    before, others = open_descriptors(), _children()
    assert (
        len(list(probe.ask([_probe(lambda: ok("")), _probe(_killed), _probe(_for_ever)], 0.2))) == 3
    )
    for finding in probe.ask([_probe(lambda: ok("")), _probe(_for_ever)], 0.2):
        assert finding.state == "ok"
        break  # and the generator is closed
    assert open_descriptors() <= before
    assert _children() <= others


def test_each_is_asked_in_another_process() -> None:
    directory = os.getcwd()

    def ask() -> ProbeOutcome:
        os.chdir("/")
        return ok(str(os.getpid()))

    (found,) = probe.ask([_probe(ask)])
    assert found.found != str(os.getpid())
    assert os.getcwd() == directory


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.EACCES, "Permission denied"), "cannot be told: Permission denied"),
        (OSError(errno.EIO, "Input/output error", "/x"), "cannot be told: Input/output error (/x)"),
        (ValueError("odd"), "cannot be told: ValueError: odd"),
        (AssertionError(), "cannot be told: AssertionError: "),
    ],
)
def test_what_cannot_be_told_is_degraded(error: Exception, text: str) -> None:
    first, second = probe.ask([_probe(_raises(error)), _probe(lambda: ok("next"))])
    assert (first.state, first.found) == ("degraded", text)
    assert first.remedy
    assert second.found == "next"


@pytest.mark.parametrize("ask", [_killed, _raises(SystemExit(3)), _raises(KeyboardInterrupt())])
def test_one_that_dies_has_failed_and_the_next_is_asked(ask: Callable[[], ProbeOutcome]) -> None:
    before, dead, after = probe.ask(
        [_probe(lambda: ok("before")), _probe(ask, "dead"), _probe(lambda: ok("after"))]
    )
    assert (before.found, after.found) == ("before", "after")
    assert (dead.name, dead.state) == ("dead", "failed")
    assert ("SIGBUS" if ask is _killed else "exit status") in dead.found
    assert dead.remedy


def test_silence_is_waited_for_once_at_each_place() -> None:
    probes = [
        _probe(_for_ever, "first", "disk"),
        _probe(_for_ever, "left out", "disk"),
        _probe(_for_ever, "second", "server"),
        _probe(_for_ever, "third"),
        _probe(_for_ever, "fourth"),
        _probe(lambda: ok("still asked"), "last"),
    ]
    found = list(probe.ask(probes, 0.2))
    assert [each.name for each in found] == ["first", "second", "third", "fourth", "last"]
    assert [each.state for each in found] == ["degraded"] * 4 + ["ok"]
    assert "no answer within 0.2 s" in found[0].found


def test_texts_are_one_printable_line_each() -> None:
    text = "a\nb\x1b[31m\udcff" + "x" * 100_000
    (found,) = probe.ask([_probe(lambda: failed(text, text))])
    assert found.found == found.remedy
    assert found.found.startswith("a\\nb\\x1b[31m\\udcff")
    assert found.found.isprintable()
    assert len(found.found) < 2000


def test_many_long_answers_pass(tmp_path: Path) -> None:
    """More than a pipe holds at once."""
    probes = [_probe(lambda: ok("y" * 900), str(number)) for number in range(200)]
    found = list(probe.ask(probes))
    assert [each.name for each in found] == [str(number) for number in range(200)]
    assert {each.found for each in found} == {"y" * 900}
