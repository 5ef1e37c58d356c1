# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.machine: the name of the machine, and which processes are in sight."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from buildidfs.linux import machine
from tests.support.clients.commands import ROOT
from tests.support.clients.tools import Argument, run, tool
from tests.support.harness.children import needs_root

SAY = """
import sys
from buildidfs.linux import machine
machine.call("", sys.argv[1])
print(machine.view(), machine.host_name())
"""


@pytest.fixture(autouse=True)
def _own_name() -> Iterator[None]:
    machine.call("")
    yield
    machine.call("")


def _said(*enter: Argument, node: str = "") -> list[str]:
    """The view and the name in the namespaces that ``enter`` makes."""
    words = [*enter, sys.executable, "-c", SAY, node]
    return run(words, cwd=ROOT, check=True).out.split()


def test_name_that_is_given_comes_first() -> None:
    machine.call("given", "node")
    assert machine.host_name() == "given"


def test_node_counts_in_containers_only() -> None:
    machine.call("", "node")
    contained = machine.view() != "all" or _is_elsewhere()
    assert machine.host_name() == ("node" if contained else os.uname().nodename)


def _is_elsewhere() -> bool:
    own = {Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("uts", "mnt")}
    return own != {machine.FIRST_UTS, Path("/proc/2/ns/mnt").stat().st_ino}


@needs_root("makes namespaces")
@pytest.mark.host
def test_container_with_a_name_of_its_own() -> None:
    pod = [tool("unshare"), "--uts", "--mount", tool("sh"), "-c", 'hostname pod; exec "$@"', "sh"]
    assert _said(*pod) == ["all", os.uname().nodename]
    assert _said(*pod, node="node") == ["all", "node"]


@needs_root("makes namespaces")
@pytest.mark.host
def test_other_pid_namespaces() -> None:
    enter = [tool("unshare"), "--pid", "--fork"]
    assert _said(*enter, "--mount-proc")[0] == "own"
    assert _said(*enter)[0] == "foreign"
    assert _said()[0] == "all"


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ("5.10.0-46-amd64", "perf record"),
        ("4.19.0", "perf record"),
        ("5.12.1", "perf record --buildid-mmap"),
        ("6.1.0-30-cloud", "perf record --buildid-mmap"),
        ("unknown", "perf record --buildid-mmap"),
    ],
)
def test_perf_of_an_old_kernel_cannot_record_build_ids(
    monkeypatch: pytest.MonkeyPatch, release: str, words: str
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    assert machine.perf_record() == words
