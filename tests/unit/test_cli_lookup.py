# SPDX-License-Identifier: Apache-2.0
"""buildidfs.cli.lookup: an answer about a build ID that was seen at many places is bounded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from buildidfs.cli.main import main
from buildidfs.store import Store
from tests.support.harness.captures import NOW, SECOND, capture, sighting

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def common(tmp_path: Path) -> Path:
    """A store with a build ID that has 14 variants, each seen at 2 places."""
    with Store.create(tmp_path / "store") as store:
        for number in range(28):
            at = sighting(b"/opt/%d/app" % number, seen_ns=NOW + number * SECOND)
            store.commit([capture(store, b"variant %d" % (number % 14), at=at)])
    return tmp_path / "store"


def shown(store: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["--store", str(store), "show", "abcdef01", *words]) == 0
    return capsys.readouterr().out


def test_variants_and_places_are_bounded(common: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(common, capsys)
    assert text.count("\nexecutable ") == 10
    assert "           and 4 more variants, see --all\n" in text
    assert text.count("\n  /opt/") == 20
    assert "  /opt/27/app\n" in text
    assert "  and 8 more places, see --all\n" in text


def test_all_and_json_are_not_bounded(common: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(common, capsys, "--all")
    assert (text.count("\nexecutable "), text.count("\n  /opt/")) == (14, 28)
    assert "see --all" not in text
    found = json.loads(shown(common, capsys, "--json"))
    assert (len(found["variants"]), len(found["origins"])) == (14, 28)


def test_name_of_a_host_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.create(tmp_path / "store") as store:
        at = sighting(host="north\x1b[2J\n\u202e")
        store.commit([capture(store, b"of another host", at=at)])
    text = shown(tmp_path / "store", capsys)
    assert "on north" in text
    assert not {"\x1b", "\u202e"} & set(text)
