# SPDX-License-Identifier: Apache-2.0
"""The front end of the Firefox Profiler, as its command-line program, gets names from `serve`.

``make test-page`` installs it from npm. Names, sources and instructions are those of the page at
profiler.firefox.com: the program runs the same code.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.commands import ROOT
from tests.support.clients.tools import Result, nm, run, tool
from tests.support.elf.programs import build_id_of
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until
from tests.support.servers.serving import Server, serving

MODULES = ROOT / ".venv/axe/node_modules"
NODE = MODULES / ".bin/node"
PROFILER = MODULES / "@firefox-devtools/profiler-cli/dist/profiler-cli.js"

CODE = """\
static volatile int sink;
static inline __attribute__((always_inline)) int square(int x)
{
    sink = x; /* in square */
    return x * x;
}
__attribute__((noinline)) int middle(int a)
{
    return square(a) + 1;
}
int main(int argc, char **argv)
{
    sink += middle(argc);
    return argv != 0;
}
"""


def debug_id(build_id: str) -> str:
    """The ID that profiles have for a build ID."""
    guid = bytes.fromhex(build_id)[:16]
    return (guid[3::-1] + guid[5:3:-1] + guid[7:5:-1] + guid[8:]).hex().upper() + "0"


def profile(name: str, build_id: str, addresses: Sequence[int]) -> dict[str, Any]:
    """A profile without names, with one sample at each of these addresses of a program.

    In the form in which samply writes it.
    """
    count = len(addresses)
    module = {
        "name": name, "path": f"/gone/{name}", "debugName": name, "debugPath": f"/gone/{name}",
        "breakpadId": debug_id(build_id), "codeId": build_id, "arch": "x86_64",
    }  # fmt: skip
    nothing, zero = [None] * count, [0] * count
    thread = {
        "name": name, "processName": name, "processType": "default", "isMainThread": True,
        "pid": "1", "tid": "1", "registerTime": 0, "unregisterTime": None, "pausedRanges": [],
        "processStartupTime": 0, "processShutdownTime": None, "showMarkersInTimeline": False,
        "stringArray": [name, *map(hex, addresses)],
        "frameTable": {
            "length": count, "address": list(addresses), "inlineDepth": zero, "category": zero,
            "subcategory": zero, "func": list(range(count)), "nativeSymbol": nothing,
            "innerWindowID": zero, "line": nothing, "column": nothing,
        },
        "funcTable": {
            "length": count, "name": list(range(1, count + 1)), "isJS": [False] * count,
            "relevantForJS": [False] * count, "resource": zero, "fileName": nothing,
            "lineNumber": nothing, "columnNumber": nothing,
        },
        "stackTable": {"length": count, "prefix": nothing, "frame": list(range(count))},
        "samples": {
            "length": count, "weightType": "samples", "weight": [1] * count,
            "stack": list(range(count)), "timeDeltas": [1.0] * count,
        },
        "resourceTable": {"length": 1, "lib": [0], "name": [0], "host": [None], "type": [1]},
        "nativeSymbols": {
            "length": 0, "address": [], "functionSize": [], "libIndex": [], "name": [],
        },
        "markers": {
            "length": 0, "category": [], "data": [], "endTime": [], "name": [], "phase": [],
            "startTime": [],
        },
    }  # fmt: skip
    return {
        "meta": {
            "version": 24, "preprocessedProfileVersion": 55, "symbolicated": False, "debug": False,
            "interval": 1, "startTime": 0, "processType": 0, "product": name, "markerSchema": [],
            "categories": [{"name": "Other", "color": "grey", "subcategories": ["Other"]}],
            "extensions": {"baseURL": [], "id": [], "length": 0, "name": []},
        },
        "libs": [module], "pages": [], "profilerOverhead": [], "counters": [], "threads": [thread],
    }  # fmt: skip


class Profiler:
    """A session of the front end, whose names are those of a server."""

    def __init__(self, home: Path, url: str, file: Path) -> None:
        self._url = url
        self._env = {"PROFILER_CLI_SESSION_DIR": str(home), "HOME": str(home)}
        self.ask("load", str(file), "--symbol-server", url, check=False)
        (session,) = home.glob("*.json")
        self._pid = int(json.loads(session.read_text())["pid"])
        log = session.with_suffix(".log")
        until(lambda: "Profile loaded" in log.read_text(), "the profile is loaded")

    def ask(self, *words: str, check: bool = True) -> Result:
        """Run one command."""
        return run([NODE, PROFILER, *words], env=self._env, check=check)

    def functions(self) -> dict[str, dict[str, Any]]:
        """The functions of the profile by their names."""
        found = json.loads(self.ask("thread", "functions", "--json").out)["functions"]
        return {each["name"]: each for each in found}

    def annotate(self, handle: str, mode: str) -> str:
        """A function as source or as instructions."""
        words = ("function", "annotate", handle, "--mode", mode, "--symbol-server", self._url)
        return self.ask(*words).out

    def close(self) -> None:
        """End the session, by the process that it runs in if it does not answer."""
        if self.ask("stop", check=False).rc:
            os.kill(self._pid, signal.SIGKILL)


@pytest.fixture
def served(directory: Path) -> Iterator[tuple[Server, Path]]:
    """A server with a program and its source, and a profile of it."""
    home = directory / "store"
    home.mkdir()
    source, program = directory / "prog.c", directory / "prog"
    source.write_text(CODE)
    run([tool("gcc"), "-g", "-O1", "-Wl,--build-id", "-o", program, source], check=True)
    buildidfs = BuildIdFs(home)
    buildidfs("scan", "tree", "--source-dir", directory, program)
    symbols = nm(program)
    starts = {line.split()[2]: int(line.split()[0], 16) for line in symbols.splitlines()
              if line.split()[1] in "tT"}  # fmt: skip
    file = directory / "profile.json"
    addresses = [starts["middle"], starts["main"] + 1]
    file.write_text(json.dumps(profile("prog", build_id_of(program), addresses)))
    with serving(buildidfs.store, "--cors", config="[serve]\nrate = 0\n") as server:
        yield server, file


def test_front_end_of_the_profiler_shows_names_sources_and_instructions(
    served: tuple[Server, Path], scratch: Path
) -> None:
    server, file = served
    home = scratch / "sessions"  # the path of a socket there has to be short
    home.mkdir()
    profiler = Profiler(home, server.url, file)
    try:
        functions = profiler.functions()
        assert {"square", "middle", "main"} <= functions.keys()
        handle = functions["square"]["functionHandle"]
        assert "sink = x; /* in square */" in profiler.annotate(handle, "src")
        code = profiler.annotate(functions["main"]["functionHandle"], "asm")
        assert "<middle>" in code
        assert "ret" in code
    finally:
        profiler.close()
