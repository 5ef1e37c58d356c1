# SPDX-License-Identifier: Apache-2.0
"""docs/concurrency.md names each lock, queue, thread and process of the code, and no other lock."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = ROOT / "buildidfs"
PAGE: Final = (ROOT / "docs/concurrency.md").read_text()

LOCKS: Final = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier"}
QUEUES: Final = {"Queue", "SimpleQueue", "FairQueue", "LifoQueue", "PriorityQueue"}
POOLS: Final = {"ThreadPoolExecutor", "ProcessPoolExecutor"}
CONSTRUCTORS: Final = LOCKS | QUEUES | POOLS | {"Thread"}
STARTS: Final = re.compile(
    r"\b(?:subprocess\.(?:run|Popen)|os\.(?:fork|posix_spawn|execve)"
    r"|child\w*\.(?:start|fork)|processes\.start|sandbox\.start|Supervised)\("
)
FILE_LOCKS: Final = re.compile(r"\bfcntl\.(?:flock|lockf)\(|\bF_OFD_SETLK")


class Call(NamedTuple):
    """A call of a constructor in a module. ``owner`` is the class, ``function`` the function that
    contains it, ``target`` the name that its result gets.
    """

    module: str
    owner: str
    function: str
    target: str
    name: str
    node: ast.Call

    def __str__(self) -> str:
        return f"{self.module} {self.owner}.{self.target or self.function} {self.name}"


def called(function: ast.expr) -> str:
    """The last part of the name of what is called, such as ``Queue`` of ``queue.Queue[int]``."""
    if isinstance(function, ast.Subscript):
        return called(function.value)
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def calls_in(module: str, tree: ast.AST) -> list[Call]:
    """All calls of the constructors that the page is about."""
    found = []

    def walk(node: ast.AST, owner: str, function: str, target: ast.expr | None) -> None:
        if isinstance(node, ast.ClassDef):
            owner = node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign):
            target = node.target
        elif isinstance(node, ast.Call) and (name := called(node.func)) in CONSTRUCTORS:
            place = "" if target is None else ast.unparse(target)
            found.append(Call(module, owner, function, place, name, node))
        for each in ast.iter_child_nodes(node):
            walk(each, owner, function, target)

    walk(tree, "", "", None)
    return found


def module_name(path: Path) -> str:
    return str(path.relative_to(PACKAGE).with_suffix(""))


MODULES: Final = {module_name(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
CALLS: Final = [
    call
    for module, text in MODULES.items()
    if any(name in text for name in CONSTRUCTORS)  # each worker parses them when it collects
    for call in calls_in(module, ast.parse(text))
]


def made(names: set[str]) -> list[Call]:
    return [call for call in CALLS if call.name in names]


def attribute(call: Call) -> str:
    name = call.target.removeprefix("self.")
    return f"{call.owner}.{name}" if call.owner else name


def words(node: ast.AST | None) -> str:
    """The constant text of a name, up to its first variable part."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr) and node.values:
        return words(node.values[0])
    return ""


def thread_names(call: Call) -> list[str]:
    """The names of a thread, of which the page has one: its own, or that of its function."""
    given = {each.arg: each.value for each in call.node.keywords}
    if isinstance(given.get("name"), ast.Name):  # from a table of names in the same function
        return re.findall(r'"(buildidfs-\w+)"', MODULES[call.module])
    name = words(given.get("name"))
    if name == "buildidfs-":  # names that `Pipeline` and its subclasses complete
        return [name + each for each in ("stage", "commit", "capture", "expire")]
    return [name or ast.unparse(given["target"]).rpartition(".")[2]]


def rows_of(table: str) -> list[list[str]]:
    section = PAGE.partition(f"## {table}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    return [row.split(" | ") for row in rows if "---" not in row]


LOCK_ROWS: Final = rows_of("Locks within a process")


@pytest.mark.parametrize("call", made(LOCKS), ids=str)
def test_lock_has_a_row(call: Call) -> None:
    if call.function and not call.target.startswith("self."):
        return  # a local name: the lock is that of the conditions made of it
    name, module = f"`{attribute(call)}`", f"`{call.module}`"
    assert any(name in row[0] and row[1] == module for row in LOCK_ROWS)


def test_row_of_a_lock_is_a_lock() -> None:
    every = {(call.module, attribute(call)) for call in made(LOCKS)}
    named = {
        (row[1].strip("`"), name)
        for row in LOCK_ROWS[1:]
        for name in re.findall(r"`([^`]+)`", row[0])
    }
    assert named <= every
    assert len(named) > 40


@pytest.mark.parametrize("call", [each for each in made(QUEUES) if each.owner], ids=str)
def test_queue_is_named_with_its_limit(call: Call) -> None:
    section = PAGE.partition("## Queues\n")[2].partition("\n## ")[0]
    assert f"`{attribute(call)}`" in section


@pytest.mark.parametrize("call", made({"Thread"}), ids=str)
def test_thread_is_named(call: Call) -> None:
    section = PAGE.partition("## Threads\n")[2].partition("\n## ")[0]
    names = thread_names(call)
    assert names
    assert [name for name in names if f"`{name}`" not in section] == []


@pytest.mark.parametrize("call", made(POOLS), ids=str)
def test_pool_is_named(call: Call) -> None:
    section = PAGE.partition("## Threads\n")[2].partition("\n## ")[0]
    prefix = words(call.node.args[1]) if len(call.node.args) > 1 else call.function
    assert f"`{prefix}`" in section


def test_modules_that_start_processes_are_named() -> None:
    section = PAGE.partition("## Processes\n")[2].partition("\n## ")[0]
    starting = {module for module, text in MODULES.items() if STARTS.search(text)}
    assert starting - {"linux/child"} != set()
    assert [module for module in sorted(starting) if f"`{module}`" not in section] == []


def test_modules_that_lock_files_are_named() -> None:
    section = PAGE.partition("## Locks between processes\n")[2].partition("\n## ")[0]
    locking = {module for module, text in MODULES.items() if FILE_LOCKS.search(text)}
    assert [module for module in sorted(locking) if f"`{module}`" not in section] == []
