# SPDX-License-Identifier: Apache-2.0
"""buildidfs.cli.table: tables on a terminal, in a pipe, sorted, bounded and formatted."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import TYPE_CHECKING

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs import wording
from buildidfs.cli import table, terminal
from buildidfs.cli.main import main
from buildidfs.model import Kind
from buildidfs.store import Store
from tests.support.clients.commands import COMMAND
from tests.support.clients.terminals import on_terminal
from tests.support.harness.captures import capture, sighting

if TYPE_CHECKING:
    from pathlib import Path

LONG = b"/usr/lib/x86_64-linux-gnu/" + b"deep/" * 20 + b"libexample.so.6"
LAST = b"/opt/caf\xe9\t\x1b[31m.so"


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A store with three build IDs, the first of which has two kinds of files."""
    now = time.time_ns()
    with Store.create(tmp_path / "store") as store:
        both = (Kind.EXECUTABLE, Kind.DEBUGINFO)
        rows = [
            (b"one" * 1000, b"\x11" * 20, both, sighting(LONG, seen_ns=now - 180 * 10**9)),
            (b"two", b"\x22" * 20, both[:1], sighting(b"/bin/two", seen_ns=now - 7200 * 10**9)),
            (b"three", b"\x33" * 20, both[1:], sighting(LAST, seen_ns=now, container="docker:ab")),
        ]
        for content, build_id, kinds, at in rows:
            store.commit([capture(store, content, build_id, kinds=kinds, at=at)])
    return tmp_path / "store"


@pytest.fixture
def plain(filled: Path, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    assert main(["--store", str(filled), "list"]) == 0
    return [line.split("\t") for line in capsys.readouterr().out.splitlines()]


def listed(filled: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["--store", str(filled), "list", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_pipe_gets_one_line_of_whole_cells_for_each_build_id(plain: list[list[str]]) -> None:
    assert [row[:3] for row in plain] == [
        ["11" * 20, "exe+debug", "3000"], ["22" * 20, "exe", "3"], ["33" * 20, "debug", "5"],
    ]  # fmt: skip
    assert [row[4:] for row in plain] == [
        ["-", LONG.decode()], ["-", "/bin/two"], ["docker:ab", "/opt/caf\\xe9\\t\\x1b[31m.so"],
    ]  # fmt: skip
    for row in plain:
        time.strptime(row[3], "%Y-%m-%dT%H:%M:%S%z")


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_terminal_gets_a_header_and_lines_that_fit(filled: Path, columns: int, locale: str) -> None:
    shown = on_terminal(
        *COMMAND,
        "--store",
        filled,
        "list",
        columns=columns,
        env={"LC_ALL": locale, "NO_COLOR": "1"},
    )
    assert shown.rc == 0
    header, *rows = shown.lines
    assert header.split()[:3] == ["BUILD", "ID", "KINDS"]
    assert ("SIZE" in header) == (columns >= 100)
    assert [row[:12] for row in rows] == ["1" * 12, "2" * 12, "3" * 12]
    assert "3 min ago" in rows[0]
    assert "2 h ago" in rows[1]
    assert rows[1].endswith("/bin/two")
    assert rows[0].endswith("so.6")
    assert b"\x1b" not in shown.raw
    if columns >= 80:
        assert max(map(len, shown.lines)) <= columns
    assert ("\N{HORIZONTAL ELLIPSIS}" in rows[0]) == (locale != "C" and columns < 200)
    assert shown.raw.isascii() or locale != "C"


def test_narrow_terminal_leaves_out_what_is_empty_and_shows_what_it_is_sorted_by(
    filled: Path,
) -> None:
    def header(*words: str) -> list[str]:
        argv = (*COMMAND, "--store", filled, "list", *words)
        return on_terminal(*argv, columns=80, env={"NO_COLOR": "1"}).lines[0].split()

    assert header() == ["BUILD", "ID", "KINDS", "SEEN", "CONTAINER", "PATH"]
    assert header("--sort", "-size") == [
        "BUILD", "ID", "KINDS", "SIZE", "SEEN", "CONTAINER", "PATH",
    ]  # fmt: skip
    assert header("--path", "/bin/*") == ["BUILD", "ID", "KINDS", "SIZE", "SEEN", "PATH"]


def test_answer_is_cut_after_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = (
        table.Column[tuple[bytes, str]]("path", "PATH", table.PATH, value=lambda row: row[0]),
        table.Column[tuple[bytes, str]]("package", "P", table.ANSWER, value=lambda row: row[1]),
    )
    package = "libpython3.11-minimal 3.11.2-6+deb12u6"
    for width, whole in ((60, True), (50, True), (40, False)):
        monkeypatch.setattr(terminal, "width", lambda stream, width=width: width)
        row = table.TableOptions().lines(columns, [(LONG, package)])[1]
        assert len(row) <= width
        assert row.endswith(package) == whole


def test_header_is_bold_unless_no_color_is_set(filled: Path) -> None:
    argv = (*COMMAND, "--store", filled, "list")
    assert on_terminal(*argv).raw.startswith(b"\x1b[1mBUILD ID")
    assert b"\x1b" not in on_terminal(*argv, env={"NO_COLOR": "1"}).raw
    assert b"\x1b" not in on_terminal(*argv, env={"TERM": "dumb"}).raw


def test_no_trunc_shows_whole_cells_on_a_terminal(filled: Path) -> None:
    shown = on_terminal(*COMMAND, "--store", filled, "list", "--no-trunc", columns=80)
    assert "11" * 20 in shown.lines[1]
    assert LONG.decode() in shown.lines[1]


def test_sort_and_limit(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ids(*words: str) -> str:
        return "".join(line[0] for line in listed(filled, capsys, *words))

    assert ids() == "123"
    assert ids("--sort", "size") == "231"
    assert ids("--sort", "-size") == "132"
    assert ids("--sort", "-last_seen", "--limit", "1") == "3"
    assert ids("--sort", "path") == "231"
    rows = listed(filled, capsys, "--sort", "-size", "--limit", "1", "--json")
    assert [re.findall(r'"kind":"(\w+)"', row) for row in rows] == [["executable"], ["debuginfo"]]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--sort", "sise"), "no field 'sise'; there are build_id, kinds, size"),
        (("--sort", "-path.__class__"), "no field 'path.__class__'"),
    ],
)
def test_wrong_use_is_refused(
    filled: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], text: str
) -> None:
    assert main(["--store", str(filled), "list", *words]) == 2
    said = capsys.readouterr()
    assert (text in said.err, said.out) == (True, "")


def test_a_later_wide_row_does_not_break_the_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    columns = (
        table.Column[bytes]("name", "NAME", table.PATH, value=lambda row: row),
        table.Column[bytes]("count", "COUNT", table.COUNT, value=len),
    )
    rows = [b"x" * 10] * 500 + [b"y" * 100]
    assert table.TableOptions().print(columns, iter(rows)) == 501
    lines = [click.unstyle(line) for line in capsys.readouterr().out.splitlines()]
    assert {len(line) for line in lines} == {17}


@pytest.mark.parametrize(
    ("past", "text"),
    [
        (0, "0 s ago"), (59, "59 s ago"), (60, "1 min ago"), (3 * 60, "3 min ago"),
        (3600, "1 h ago"), (86_399, "23 h ago"), (86_400, "1 day ago"), (3 * 86_400, "3 days ago"),
        (7 * 86_400, "1 week ago"), (55 * 86_400, "7 weeks ago"), (-30, "0 s ago"),
    ],
)  # fmt: skip
def test_ages(monkeypatch: pytest.MonkeyPatch, past: int, text: str) -> None:
    now = 1_700_000_000
    monkeypatch.setattr(time, "time", lambda: float(now))
    assert wording.ago(now - past) == text


def test_old_and_future_times_are_dates(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_700_000_000
    monkeypatch.setattr(time, "time", lambda: float(now))
    for past in (56 * 86_400, -3600):
        day = time.strftime("%Y-%m-%d", time.localtime(now - past))
        assert wording.ago(now - past) == day


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Mn", "Zs"])), st.integers(1, 60))
def test_cut_text_fits(text: str, columns: int) -> None:
    short = terminal.cut(text, columns)
    assert terminal.cells(short) <= columns
    assert (short == text) == (terminal.cells(text) <= columns)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"LANG": "C"}, False),
        ({"LANG": "en_US.UTF-8"}, True),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "C"}, False),
        ({"LANG": "en_US.UTF-8", "LC_CTYPE": "C.UTF-8"}, True),
        ({"LC_CTYPE": "C.UTF-8"}, False),  # Python has set it
        ({"LC_CTYPE": "de_DE.utf8"}, True),
    ],
)
def test_locale_decides_on_characters(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: bool
) -> None:
    monkeypatch.setattr(os, "environ", environ)
    assert terminal.has_unicode() is expected


@pytest.mark.parametrize(
    "words",
    ["list", "containers", "jit", "config", "journal", "pin --list", "prune -n", "where /bin/two"],
)
def test_example_in_the_help_names_fields_of_the_command(
    filled: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--store", str(filled), *words.split()]
    assert main([*command[:3], "--help"]) == 0
    help_ = " ".join(capsys.readouterr().out.split())
    found = re.search(r"fields in braces: '([^']*)'", help_)
    assert found is not None, help_
    assert main([*command, "--format", found[1]]) == 0, capsys.readouterr().err
