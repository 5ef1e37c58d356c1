# SPDX-License-Identifier: Apache-2.0
"""buildidfs.cli.profile: the table, its totals, and an answer about nothing."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from buildidfs.catalog.containers import Names
from buildidfs.catalog.coverage import BinaryCoverage, Coverage
from buildidfs.catalog.remedies import NOT_CAPTURED
from buildidfs.cli import profile as command
from buildidfs.cli.table import TableOptions
from buildidfs.model import BuildId, Quality

if TYPE_CHECKING:
    import pytest

TABLE = TableOptions()
JSON = TableOptions(is_json=True)


def show(found: Coverage, layout: TableOptions = TABLE, fail_under: float | None = None) -> int:
    return command.show(found, Names(), layout, fail_under=fail_under)


def test_nothing_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = Coverage([], "samples")
    assert show(nothing, fail_under=1) == 30
    said = capsys.readouterr()
    assert said.out == "0 samples\n"
    assert said.err == "buildidfs: there are no samples, but --fail-under needs symbols for some\n"
    assert show(nothing, JSON) == 0
    assert show(nothing, fail_under=0) == 0


ROWS = [
    BinaryCoverage("docker:ab", b"/bin/app", BuildId(b"\xab" * 20), 60, why=NOT_CAPTURED),
    BinaryCoverage("", b"/bin/sh", BuildId(b"\xcd" * 20), 30, True, Quality.SYMTAB),
    BinaryCoverage("", b"/memfd:x", None, 10, why="generated code"),
]


def test_pipe_gets_rows_with_tabs_and_totals_without(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(Coverage(ROWS, "samples")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t") for line in lines if "\t" in line] == [
        ["0.6", "missing", "ab" * 20, "docker:ab", "/bin/app", "never captured"],
        ["0.1", "missing", "-", "-", "/memfd:x", "generated code"],
        ["0.3", "symbols", "cd" * 20, "-", "/bin/sh", "-"],
    ]
    assert lines[3:] == [
        " 60.0%  never captured",
        " 10.0%  generated code",
        "100 samples: executable 30.00%, symbols 30.00% (with dynamic ones 30.00%),"
        " debuginfo 0.00%",
    ]


def test_functions_of_a_go_program_are_symbols(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [BinaryCoverage("", b"/bin/go", BuildId(b"\xef" * 20), 1, True, Quality.GOPCLNTAB)]
    show(Coverage(rows, "samples"))
    assert capsys.readouterr().out.split("\t")[1] == "symbols"


def test_json_has_shares_from_0_to_1(capsys: pytest.CaptureFixture[str]) -> None:
    show(Coverage(ROWS, "samples"), JSON)
    shares = json.loads(capsys.readouterr().out)["coverage"]
    assert shares == {
        "executable": 0.3, "dynamic_symbols": 0.3, "symbols": 0.3, "debuginfo": 0.0,
        "recorded": 0.3,
    }  # fmt: skip
    assert show(Coverage(ROWS, "samples"), JSON, fail_under=31) == 30
    assert "symbols for 30.00% of the samples, wanted 31%" in capsys.readouterr().err


def test_terminal_gets_colours_and_a_bounded_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    many = [BinaryCoverage("", b"/bin/%d" % n, None, 1, why="generated code") for n in range(50)]
    show(Coverage(ROWS + many, "samples"))
    text = capsys.readouterr().out
    assert "  \x1b[31mmissing\x1b[0m  " in text
    assert "and 13 more, see --limit\n" in text
    assert len([line for line in text.splitlines() if "/bin/" in line]) == 39
    show(Coverage(ROWS, "samples"))
    assert "  \x1b[32msymbols\x1b[0m  " in capsys.readouterr().out
