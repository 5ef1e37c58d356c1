# SPDX-License-Identifier: Apache-2.0
"""Names of generated code: real compilers in containers that are gone, and perf."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.containers.burning import recording
from tests.support.elf import jit
from tests.support.elf.jit import Jit, container, jit_samples
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until
from tests.support.harness.watching import Watcher, watching

pytestmark = [
    pytest.mark.root, pytest.mark.host, pytest.mark.client, pytest.mark.fuse,
    pytest.mark.slow,
]  # fmt: skip

PROGRAMS: dict[str, Callable[[], Jit]] = {
    "node": lambda: jit.node("--perf-basic-prof"),
    "node-dump": lambda: jit.node("--perf-prof"),
    "python": jit.python,
}


@pytest.fixture(scope="module")
def place(scratch: Path) -> Path:
    """A directory for these tests."""
    directory = scratch / "jit"
    directory.mkdir()
    return directory


@pytest.fixture(scope="module")
def watch(place: Path) -> Iterator[Watcher]:
    """A running watch."""
    with watching(place / "watched", "--no-scan") as watcher:
        yield watcher


@pytest.fixture(scope="module")
def watched(place: Path, watch: Watcher) -> BuildIdFs:
    """The program on the store of the watch."""
    return BuildIdFs(place, watch.store)


def maps(program: BuildIdFs) -> list[dict[str, object]]:
    """What the store says of the maps it has."""
    lines = program("jit", "--json", check=False).out.splitlines()
    return [json.loads(line) for line in lines]


def has_map(program: BuildIdFs, pid: int) -> bool:
    return any(each["pid"] == pid for each in maps(program))


@pytest.mark.parametrize("ends", ["while-recorded", "later"])
@pytest.mark.parametrize("kind", PROGRAMS)
def test_generated_code_of_a_container_that_is_gone_has_names(
    watched: BuildIdFs, directory: Path, kind: str, ends: str
) -> None:
    program = PROGRAMS[kind]()
    data, out = directory / "perf.data", directory / "repaired.data"
    with contextlib.ExitStack() as stack:
        if ends == "while-recorded":
            stack.enter_context(recording(data))
            with container(program, program.seconds) as pid:
                pass
        else:
            pid = stack.enter_context(container(program))
            until(lambda: has_map(watched, pid), "the map")
            with recording(data):
                jit.spend(pid, program.seconds)
    until(lambda: has_map(watched, pid), "the map")
    # On the host another process had that number, or so it seems.
    mislead = Path(f"/tmp/perf-{pid}.map")
    mislead.write_text(f"1000 {2**47 - 0x2000:x} wrong_name\n")
    try:
        done = watched("repair", "--json", data, "-o", out, check=False)
        with watched.mounted() as mount:
            before, after = jit_samples(mount, data, pid), jit_samples(mount, out, pid)
    finally:
        mislead.unlink()
    assert done.rc in (0, 3), done
    (named,) = [each for each in json.loads(done.out)["generated"] if each["pid"] == pid]
    assert (named["name"], named["comm"]) == (f"[jit:{pid}]", Path(program.argv[0]).name)
    assert named["container"].startswith("mnt:")
    assert before.of(*program.functions) == 0, before
    assert after.total == before.total >= 3, (before, after)
    assert after.share >= 95, after
    assert after.of("wrong_name") == 0, after
    assert after.of(*program.functions) > 0.5 * after.total, after
