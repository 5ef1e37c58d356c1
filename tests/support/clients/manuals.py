# SPDX-License-Identifier: Apache-2.0
"""Manual pages as a reader sees them, by groff."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.clients.tools import Result, run, tool


def formatted(path: Path) -> Result:
    """A manual page as plain text on wide lines; warnings are on standard error."""
    return run([tool("groff"), "-ww", "-mandoc", "-Tascii", "-rLL=2000n", "-P-cbou", path])


def indent(text: str) -> str:
    """The blanks before the text of a section; groff 1.22 makes five of them, 1.23 seven."""
    found = re.search(r"^NAME\n( +)", text, re.MULTILINE)
    assert found is not None, text[:1000]
    return found[1]
