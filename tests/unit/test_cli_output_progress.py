# SPDX-License-Identifier: Apache-2.0
"""buildidfs.cli.output: one line that fits, is honest, and obeys no name."""

from __future__ import annotations

import os
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.cli import output, terminal
from tests.support.clients.terminals import on_terminal


class Clock:
    """A clock that stands still."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def text(
    done: int = 1204, what: str = "/usr/lib/libexample.so.6", size: int = 0,
    share: float | None = None, *, elapsed: float = 4.0, columns: int = 100, noun: str = "file",
) -> str:  # fmt: skip
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", clock)
        line = output.ProgressLine("Capturing", noun)
        clock.now += elapsed
        return line.text(done, what, size, share, columns)


def test_line_has_all_that_is_known() -> None:
    assert text(size=3 << 20, share=0.25) == (
        "Capturing   25%  1204 files  3.0 MiB  301/s  0:12 left  /usr/lib/libexample.so.6"
    )


def test_line_leaves_out_what_is_not_known() -> None:
    assert text() == "Capturing  1204 files  301/s  /usr/lib/libexample.so.6"
    assert text(1, "", elapsed=0) == "Capturing  1 file"
    assert text(0, "Reading blobs", 5, 0.5, noun="") == (
        "Capturing   50%  5 B  0:04 left  Reading blobs"
    )


def test_time_left_is_not_told_before_it_means_something() -> None:
    assert "left" not in text(share=0.5, elapsed=1.9)
    assert "left" not in text(share=0.009)
    assert "1:39:00 left" in text(share=0.01, elapsed=60)
    assert "100%" in text(share=1.5)


@given(
    st.text(st.characters(categories=["L", "N", "P", "S", "C"])), st.integers(20, 200),
    st.integers(0, 1 << 50),
)  # fmt: skip
def test_line_fits_and_is_printable(what: str, columns: int, size: int) -> None:
    said = text(
        what=what.encode("utf-8", "replace").decode(), columns=columns, size=size, share=0.1
    )
    assert terminal.cells(said) <= columns
    assert said.isprintable()


_PROGRAM = """
from buildidfs.cli.output import progress
with progress("Capturing") as show:
    show(1, "/x\\x1b]0;title\\x07\\x9b5m\\n[bold]\\udcff-\\u00e9")
print("done")
"""


@pytest.mark.parametrize(("locale", "name"), [("C.UTF-8", "-é"), ("C", "-\\xe9")])
def test_terminal_gets_names_that_it_does_not_obey(locale: str, name: str) -> None:
    shown = on_terminal(sys.executable, "-c", _PROGRAM, columns=120, env={"LC_ALL": locale})
    line = f"\rCapturing  1 file  /x\\x1b]0;title\\x07\\x9b5m\\n[bold]\\xff{name}\x1b[K"
    assert shown.raw.decode().startswith(line)
    # The line is gone before anything else is said.
    assert shown.raw.endswith(b"\r\x1b[Kdone\r\n")
    assert shown.rc == 0


def test_no_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with output.progress("Capturing") as show:
        assert show is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    with output.progress("Capturing") as show:
        assert show is None


def test_line_is_drawn_ten_times_a_second_at_most(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    line = output.ProgressLine("Reading", "record")
    for number in range(1000):
        line(number, "")
        clock.now += 0.001
    assert capsys.readouterr().err.count("\r") == pytest.approx(10, abs=1)
    line.clear()
    line.clear()
    assert capsys.readouterr().err == "\r\x1b[K"
    line(1, "")
    assert os.fsencode(capsys.readouterr().err).startswith(b"\rReading  1 record")
