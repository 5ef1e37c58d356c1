# SPDX-License-Identifier: Apache-2.0
"""docs/limits.md has the values of the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("limits", ROOT / "scripts/limits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_has_the_constants_of_the_code() -> None:
    assert (ROOT / "docs/limits.md").read_text() == script().text(), "run scripts/limits.py"


def test_changed_constant_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = script()
    before = limits.text()
    monkeypatch.setattr("buildidfs.capture.process.silent_processes.ANSWER_S", 0.25)
    assert "| time for an answer of a process | 0.25 s |" in limits.text()
    assert limits.text() != before


@pytest.mark.parametrize(
    ("value", "form", "shown"),
    [
        (1 << 30, "b", "1 GiB"),
        (96 << 10, "b", "96 KiB"),
        (2048, "n", "2,048"),
        (0.2, "s", "0.2 s"),
        (3600, "s", "3,600 s"),
    ],
)
def test_value_is_shown_with_its_unit(value: float, form: str, shown: str) -> None:
    assert script().shown(value, form) == shown
