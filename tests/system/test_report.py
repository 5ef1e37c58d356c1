# SPDX-License-Identifier: Apache-2.0
"""``buildidfs report``: the overview as text and as one file, without a server."""

from __future__ import annotations

import json
import os
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from buildidfs.config import Settings
from buildidfs.serve.page import overview as page
from buildidfs.store import Store
from tests.support.clients.commands import ROOT
from tests.support.clients.terminals import on_terminal
from tests.support.clients.tools import run
from tests.support.elf.elfwriter import elf_file
from tests.support.harness.captures import capture, commit, sighting
from tests.support.harness.mounts import COMMAND, BuildIdFs
from tests.support.servers import pagestore


@pytest.fixture
def reporting(tmp_path: Path) -> BuildIdFs:
    buildidfs = BuildIdFs(tmp_path)
    pagestore.make(buildidfs.store, many=6)
    with Store.open(buildidfs.store) as store:
        pagestore.remember(store)
    return buildidfs


class _Links(HTMLParser):
    """Collects what a page refers to, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_says_what_is_missing_and_what_to_do(reporting: BuildIdFs) -> None:
    out = reporting("report").out
    assert out.splitlines()[0].startswith("12 build IDs in 13 files: ")
    assert "shop/cart-7d9f/cart" in out
    assert "stripped: only dynamic symbols" in out
    assert "run     buildidfs scan tree /usr/lib/debug" in out
    assert "watch not running" in out


def test_json_is_what_the_page_shows(reporting: BuildIdFs) -> None:
    taken = json.loads(reporting("report", "--json").out)
    assert taken["store"]["build_ids"] == 12
    assert taken["health"]["mode"] == "not running"
    assert reporting("report", "--json", "--html", "x", check=False).rc == 2


def test_page_names_what_is_missing_then_containers_with_names_first(reporting: BuildIdFs) -> None:
    with Store.open(reporting.store, read_only=True) as store:
        taken = page.take(store, Settings(), None)
    named = next(each for each in taken.containers if each.name.startswith("shop/"))
    label = "mnt:4026532999"
    bare = msgspec.structs.replace(named, name=label, label=label, unnamed=True)
    taken.containers[:0] = [bare] * 3
    text = page.as_html(taken).decode()
    row = f'<tr><th scope="row">{named.name}'
    places = [text.index(each) for each in ('id="missing"', 'id="coverage"', row, "<details>")]
    assert places == sorted(places)
    assert "3 mount namespaces without the name of a container" in text
    assert text.count(label) == 3
    assert text.index(label) > places[-1]


def test_text_is_folded_on_a_terminal(reporting: BuildIdFs) -> None:
    words = [*COMMAND, "--store", reporting.store, "report"]
    lines = [line.partition("\x1b[K")[2] or line for line in on_terminal(*words).lines]
    assert max(map(len, lines)) <= 80
    assert "            capture the package itself, or fetch it from a debuginfod server" in lines
    assert "capture down: watch not running, buildidfs up starts it" in lines


def test_namespaces_without_a_container_are_counted(buildidfs: BuildIdFs) -> None:
    with Store.create(buildidfs.store) as store:
        for number, label in enumerate(("docker:0123456789ab", "mnt:4026532177")):
            seen = sighting(b"/app/server", container=label, mnt_ns_id=number, reach=7)
            commit(store, capture(store, elf_file(build_id=b"\1" * 20), b"\1" * 20, at=seen))
    out = buildidfs("report").out
    assert "docker:0123456789ab" in out
    assert "%  mnt:" not in out
    assert "and 1 namespace without a container, see buildidfs containers --all" in out


def test_page_is_one_file_that_needs_no_other(reporting: BuildIdFs, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    assert reporting("report", "--html", target).out == ""
    text = target.read_text()
    page = _Links()
    page.feed(text)
    assert [link for link in page.links if not link.startswith("#")] == []
    assert "<script" not in text
    assert "default-src 'none'; style-src 'sha256-" in text
    assert "/app/server" in page.text
    assert "shop/cart-7d9f/cart" in page.text
    assert text.count('class="plot"') == 3


def test_report_names_nothing_private(reporting: BuildIdFs, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    reporting("report", "--html", target)
    for text in (reporting("report").out, target.read_text()):
        assert "/app/server" in text
        assert "secret" not in text
        assert "hidden" not in text.replace("aria-hidden", "").replace("overflow: hidden", "")


def test_names_of_strangers_obey_no_terminal(reporting: BuildIdFs) -> None:
    out = reporting("report").out
    assert "\\x1b[31m" in out
    assert all(each.isprintable() or each == "\n" for each in out)


def test_file_that_cannot_be_written_is_named(reporting: BuildIdFs, tmp_path: Path) -> None:
    done = reporting("report", "--html", tmp_path / "missing/report.html", check=False)
    assert done.rc == 2
    assert "missing/report.html: No such file" in done.err


def test_empty_store_has_a_report(tmp_path: Path) -> None:
    buildidfs = BuildIdFs(tmp_path)
    with Store.create(buildidfs.store):
        pass
    out = buildidfs("report").out
    assert out.startswith("0 build IDs in 0 files")
    assert "100" not in out.partition("\n")[2]
    buildidfs("report", "--html", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Nothing is captured" in page
    assert "100 %" not in page.partition("</style>")[2]


def test_without_jinja_text_works_and_html_says_what_to_install(
    reporting: BuildIdFs, tmp_path: Path
) -> None:
    (tmp_path / "jinja2.py").write_text("raise ModuleNotFoundError('none', name='jinja2')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = [sys.executable, "-m", "buildidfs", "--store", str(reporting.store), "report"]
    assert "12 build IDs" in run(words, env=environment, check=True).out
    done = run([*words, "--html", str(tmp_path / "x.html")], env=environment)
    assert done.rc == 2
    assert "package jinja2 is missing: install buildidfs[serve]" in done.err
