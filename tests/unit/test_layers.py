# SPDX-License-Identifier: Apache-2.0
"""The layers of ARCHITECTURE.md hold, and no two modules import each other."""

from __future__ import annotations

import graphlib
import subprocess
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]


def test_layers_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    written = (ROOT / "pyproject.toml").read_text().count("[[tool.importlinter.contracts]]")
    assert f"Contracts: {written} kept, 0 broken" in run.stdout


def test_no_import_cycles() -> None:
    graph = grimp.build_graph("buildidfs", cache_dir=None)
    assert len(graph.modules) > 20
    imports = {
        module: graph.find_modules_directly_imported_by(module) - {module}
        for module in graph.modules
    }
    # static_order raises CycleError, whose text names the modules of the cycle.
    assert len(list(graphlib.TopologicalSorter(imports).static_order())) == len(graph.modules)


def test_modules_stay_small() -> None:
    lengths = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for path in (ROOT / "buildidfs").rglob("*.py")
    }
    assert {path: count for path, count in lengths.items() if count > 800} == {}
