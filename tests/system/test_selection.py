# SPDX-License-Identifier: Apache-2.0
"""``coverage`` and ``why`` of the frames and process names that perf prints.

The right counts are those of perf itself.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from buildidfs.profile.selection import Selection
from buildidfs.store import Store
from tests.support.clients.tools import perf_record, perf_tool, run, tool
from tests.support.harness.mounts import BuildIdFs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.root, pytest.mark.client]

_SOURCE = """
#include <pthread.h>
#include <sys/prctl.h>
volatile unsigned long sink;
static void *spin(void *name) {
    if (name) prctl(PR_SET_NAME, name);
    for (unsigned long i = 0; i < 200000000UL; i++) sink += i;
    return 0;
}
int main(void) {
    pthread_t one, two;
    pthread_create(&one, 0, spin, "renamed");
    pthread_create(&two, 0, spin, 0);
    pthread_join(one, 0);
    pthread_join(two, 0);
    return 0;
}
"""


@pytest.fixture(scope="module")
def spinner(scratch: Path) -> Path:
    """A stripped program with two threads, one of which has a name of its own."""
    directory = scratch / "selection"
    directory.mkdir()
    source, program = directory / "spinner.c", directory / "spinner"
    source.write_text(_SOURCE)
    run([tool("gcc"), "-O0", "-no-pie", "-pthread", "-s", source, "-o", program], check=True)
    return program


@pytest.fixture(scope="module")
def data(spinner: Path) -> Path:
    recorded = spinner.with_suffix(".data")
    assert perf_record(recorded, [spinner], "--buildid-mmap").rc == 0
    return recorded


@pytest.fixture
def program(directory: Path, spinner: Path) -> BuildIdFs:
    found = BuildIdFs(directory)
    Store.create(found.store).close()
    found("add", spinner)
    return found


def _printed(data: Path, *options: str) -> list[list[str]]:
    text = run([perf_tool(), "script", "-i", data, *options]).out
    return [line.split() for line in text.splitlines() if line.strip()]


def _weight(program: BuildIdFs, *words: object) -> int:
    return int(json.loads(program("coverage", "--json", *words).out)["weight"])


def test_names_of_threads(program: BuildIdFs, data: Path) -> None:
    counted = Counter(row[0] for row in _printed(data, "-F", "comm,ip"))
    assert {"spinner", "renamed"} <= set(counted)
    for name in ("spinner", "renamed"):
        assert _weight(program, data, "--comm", name) == counted[name]
        assert "spinner" in program("why", data, "--comm", name).out
    done = program("coverage", data, "--comm", "nginx", check=False)
    assert (done.rc, "renamed" in done.err) == (30, True)


def test_addresses_that_perf_prints(program: BuildIdFs, data: Path, spinner: Path) -> None:
    rows = _printed(data, "-F", "ip,dso")
    counted = Counter(ip for ip, dso in rows if dso == f"({spinner})")
    ip, count = counted.most_common(1)[0]
    assert _weight(program, data, ip) == _weight(program, data, f"0x{ip}") == count
    # perf report prints the offset in the file if there is no symbol
    options = ["-i", data, "--stdio", "-n", "--sort", "sym", "--dsos", "spinner"]
    text = run([perf_tool(), "--buildid-dir", "/nonexistent", "report", *options]).out
    found = re.findall(r"%\s+(\d+)\s+\[\.\] 0x([0-9a-f]+)\s*$", text, re.MULTILINE)
    offset = next(hex_ for number, hex_ in found if int(number) == count)
    for frame in (f"0x{offset}", f"spinner+0x{int(offset, 16):x}", f"({spinner}+0x{offset})"):
        assert _weight(program, data, frame) == count, frame
        assert str(spinner) in program("why", data, frame).out
    assert _weight(program, data, "*/spinner") == sum(counted.values())
    nothing = program("why", data, f"libm.so.6+0x{offset}", check=False)
    assert (nothing.rc, "libc.so.6+0x26d90" in nothing.err) == (30, True)


@pytest.mark.parametrize(
    ("frame", "selected"),
    [
        ("0x1139", (None, 0x1139, 0x1139)),
        ("7f00aa", (None, 0x7F00AA, 0x7F00AA)),
        ("libstdc++.so.6+0x10", ("libstdc++.so.6", None, 16)),
        ("(/lib/x y.so+0x10)", ("/lib/x y.so", None, 16)),
        ("libx.so", ("libx.so", None, None)),
        ("+0x10", ("+0x10", None, None)),
    ],
)
def test_forms_of_a_frame(frame: str, selected: tuple[str | None, int | None, int | None]) -> None:
    found = Selection.of(frame)
    assert (found.path, found.address, found.offset) == selected
