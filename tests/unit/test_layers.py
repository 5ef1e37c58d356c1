# SPDX-License-Identifier: Apache-2.0
"""The layers of ARCHITECTURE.md hold, and no two modules import each other."""

from __future__ import annotations

import ast
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


READERS_OF_PROC = {
    "scan/kernel.py": "/proc/kallsyms, /proc/modules, notes below /sys",
    "unresponsive/file_helper.py": "a copy of its own",
}
"""The modules of capture that open files for reading without `inodes.reopen_regular`."""


def test_files_of_others_are_opened_through_one_gate() -> None:
    found = set()
    for path in (ROOT / "buildidfs/capture").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and _opens_a_path(call):
                found.add(str(path.relative_to(ROOT / "buildidfs/capture")))
    assert found == set(READERS_OF_PROC)


def _opens_a_path(call: ast.Call) -> bool:
    """Return True for a call that opens a path, and not a descriptor or directory, for reading."""
    words = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
    if ast.unparse(call.func) == "os.open":
        return "O_RDONLY" in words and "O_DIRECTORY" not in words
    first = ast.unparse(call.args[0]) if call.args else ""
    is_descriptor = first.endswith("fd") or "inodes." in first or "memfd" in first
    return ast.unparse(call.func) == "open" and not is_descriptor


def test_modules_stay_small() -> None:
    lengths = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for path in (ROOT / "buildidfs").rglob("*.py")
    }
    assert {path: count for path, count in lengths.items() if count > 800} == {}
