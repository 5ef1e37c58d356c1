# SPDX-License-Identifier: Apache-2.0
"""tests/support/README.md is the index of the shared code of tests."""

from __future__ import annotations

import re

from tests.support.clients.commands import ROOT

SUPPORT = ROOT / "tests/support"


def test_index_lists_each_module_in_its_folder() -> None:
    listed: dict[str, list[str]] = {}
    for line in (SUPPORT / "README.md").read_text().splitlines():
        if heading := re.match(r"## (\w+): ", line):
            modules = listed[heading[1]] = []
        elif entry := re.match(r"- `(\w+\.py)`: ", line):
            modules.append(entry[1])
    folders = {path.parent for path in SUPPORT.rglob("*.py")}
    assert listed == {
        folder.name: sorted(path.name for path in folder.glob("*.py")) for folder in folders
    }
