#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write docs/limits.md: scripts/limits.md.in with the values of the constants of the code.

In that text, ``{b EXPRESSION}`` stands for a number of bytes, ``{s EXPRESSION}`` for seconds, and
``{n EXPRESSION}`` for another number. In an expression, ``MODULE:NAME`` is a constant of the code.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/limits.md"
SOURCE = ROOT / "scripts/limits.md.in"

_UNITS = ("bytes", "KiB", "MiB", "GiB")


def shown(value: float, form: str) -> str:
    """Return a value as text, with the unit of its form."""
    if form == "b":
        size, unit = int(value), 0
        while unit + 1 < len(_UNITS) and size and size % 1024 == 0:
            size, unit = size // 1024, unit + 1
        return f"{size:,} {_UNITS[unit]}"
    number = f"{int(value):,}" if value == int(value) else f"{value:g}"
    return f"{number} s" if form == "s" else number


def value_of(expression: str) -> float:
    """Return the value of an expression. Raises AttributeError or ImportError for a constant that
    is gone.
    """
    names: dict[str, object] = {"int": int}

    def constant(match: re.Match[str]) -> str:
        module = importlib.import_module(f"buildidfs.{match[1]}")
        name = f"_{len(names)}"
        names[name] = getattr(module, match[2])
        return name

    text = re.sub(r"([a-z_][a-z_0-9.]*):([A-Za-z_]\w*)", constant, expression)
    return float(eval(text, {"__builtins__": {}}, names))


def text() -> str:
    """Return the page."""
    source = SOURCE.read_text().partition("-->\n")[2]
    return re.sub(r"\{([nbs]) ([^}]+)\}", lambda m: shown(value_of(m[2]), m[1]), source)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(text())
