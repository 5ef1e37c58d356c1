# SPDX-License-Identifier: Apache-2.0
"""The commands of README.md, run from top to bottom as a reader would.

They run in a process and mount namespace of their own, in which one program is running and `ps`
shows nothing else: so a scan of everything is a small one, and whatever is mounted or left running
goes with the namespace. Names of places are replaced by those of this test and nothing else is,
except that the virtual environment is not built anew.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients.commands import (
    ROOT,
    calling,
    client_directory,
    path_with,
    program_directory,
    script,
)
from tests.support.clients.tools import Result, run, tool
from tests.support.elf.programs import Program, line_of

if TYPE_CHECKING:
    from collections.abc import Mapping

README = ROOT / "README.md"

# They install from the package index, which `make test` has done before this test runs.
_INSTALLING = ("python3 -m venv ", "~/buildidfs-venv/bin/pip install ")

_ADDRESS = "0x1139"

# The stamps have to be newer than the checkout.
_VENV_THERE = 'cp -a "$VENV_HERE" .venv; touch .venv/.user .venv/.dev'


def blocks() -> list[str]:
    """The fenced blocks of shell commands."""
    return re.findall(r"^```sh\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def test_quick_start_is_the_shortest_there_is() -> None:
    words = [line.partition("#")[0].split() for line in blocks()[0].splitlines()]
    assert [line[:2] for line in words] == [
        ["git", "clone"], ["make", "up"], ["ln", "-sf"], ["make", "test"], ["make", "down"],
    ]  # fmt: skip


def test_only_installing_is_left_out() -> None:
    left_out = [line for block in blocks() for line in block.splitlines() if _installs(line)]
    assert len(left_out) == len(_INSTALLING)
    assert len(blocks()) >= 6


def _installs(line: str) -> bool:
    return line.startswith(_INSTALLING)


@pytest.fixture(scope="module")
def transcript(scratch: Path, program: Program) -> Result:
    """What all commands printed, each after a line `+ command`."""
    work = scratch / "readme"
    work.mkdir()
    program.install(work)
    (work / "debug").mkdir()
    core = work / "core"
    replaced = {
        "URL": str(ROOT),
        "/usr/lib/debug": str(program.exe.debug),
        "/buildid": str(work / "mnt"),
        "/usr/local/bin": str(work / "linked"),
        _ADDRESS: hex(program.exe.address("exe_static_hot")),
    }
    (work / "mnt").mkdir()
    (work / "linked").mkdir()
    programs = client_directory(program_directory(work / "programs"))
    environment = {
        "PATH": path_with(programs),
        "STORE": str(work / "store"),
        "BUILDIDFS_STORE": str(work / "store"),
        "MOUNTPOINT": str(work / "mnt"),
        "ID": program.exe.build_id,
        # One that leaves the machine alone: from in there, this run looks as if it were over.
        # Each worker would take as long to start as all the rest of it.
        "PYTEST_ARGS": "-n 0 -p no:cacheprovider tests/unit/test_model.py",
        "VENV_HERE": str(_venv(work / "venv")),
        # The clone is made from a directory that may be another user's.
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }
    hot = shlex.quote(str(work / "app/bin/hot"))
    lines = [
        f"{hot} stuck >stuck & stuck=$!",
        f"{hot} spin >spin & spin=$!",
        "until [ -s stuck ] && [ -s spin ]; do sleep 0.01; done",
        "kill -STOP $spin",  # other tests need the processors
        f"gcore -o dumped $stuck >/dev/null 2>&1 && mv dumped.$stuck {shlex.quote(str(core))}",
        "set -x",
    ]
    for block in blocks():
        text = "\n".join(line for line in block.splitlines() if not _installs(line))
        for name, value in replaced.items():
            # a whole word, or the beginning of a path
            whole = rf"(^|[\s'\"=(+]|file://){re.escape(name)}(?=[\s/'\")]|$)"
            text = re.sub(whole, rf"\g<1>{value}", text, flags=re.MULTILINE)
        # From in here the processes of the host are out of sight, which a scan says.
        looks = r"^(buildidfs (?:scan proc|where --live)[^#\n]*)"
        text = re.sub(looks, r"\1 || [ $? -eq 3 ] ", text, flags=re.MULTILINE)
        while_spinning = r"kill -CONT $spin\n\g<0>\nkill -STOP $spin"
        text = re.sub(r"^perf record .*", while_spinning, text, flags=re.MULTILINE)
        text = text.replace("&& cd buildidfs\n", f"&& cd buildidfs\n{_VENV_THERE}\n")
        lines.append(f"(\n:\n{text}\n)")
    result = _in_namespaces(lines, work, environment)
    assert result.rc == 0, str(result)
    return result


def _venv(directory: Path) -> Path:
    """What `make` takes for a virtual environment that is up to date."""
    script(
        directory / "bin/buildidfs",
        'PYTHONPATH=$(dirname "$0")/../.. exec ' + shlex.join([sys.executable, "-m", "buildidfs"])
        + ' "$@"',
    )  # fmt: skip
    calling(directory / "bin/pytest", [sys.executable, "-m", "pytest"])
    return directory


def _in_namespaces(lines: list[str], work: Path, environment: Mapping[str, str]) -> Result:
    command = work / "commands"
    command.write_text("\n".join(["set -eu", *lines, ""]))
    namespaces = ["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
    argv = [tool("unshare"), *namespaces, "--mount-proc", tool("bash"), command]
    return run(argv, env=environment, cwd=work, timeout=240)


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.client
def test_quick_start_captures_mounts_and_unmounts(transcript: Result) -> None:
    quick, _, rest = transcript.out.partition("Unmounted")
    assert "captured" in quick
    assert "Mounted at" in quick
    assert re.search(r"\d+ passed", quick)
    assert rest


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.client
@pytest.mark.parametrize(
    ("client", "says"),
    [
        ("gdb -iex", r"Reading symbols from \S+/debug\.\.\.\n"),
        ("perf --buildid-dir", r"hot +\[\.\] exe_static_hot"),
        ("eu-stack", rf"hot\.c:{line_of('exe_stuck')}"),
        ("llvm-symbolizer", r"exe_static_hot\n.*hot\.c:\d+"),
        ("addr2line", r"hot\.c:\d+"),
        ("debuginfod-find", r"/executable"),
    ],
)
def test_client_finds_what_it_is_pointed_at(transcript: Result, client: str, says: str) -> None:
    assert f"+ {client}" in transcript.err, transcript.err
    assert re.search(says, transcript.out), transcript


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.client
def test_nothing_is_left_over(transcript: Result, scratch: Path) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    assert str(scratch / "readme") not in mounts
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(scratch / "readme/app") not in running.stdout
