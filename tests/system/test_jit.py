# SPDX-License-Identifier: Apache-2.0
"""Names of generated code: real compilers in containers that are gone, and perf."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from buildidfs.store import Store
from tests.support.containers.burning import recording
from tests.support.elf import jit
from tests.support.elf.jit import container, jit_samples
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until
from tests.support.harness.watching import Watcher, watching

pytestmark = [
    pytest.mark.root, pytest.mark.host, pytest.mark.client, pytest.mark.fuse,
    pytest.mark.slow,
]  # fmt: skip


@pytest.fixture
def watch(directory: Path) -> Iterator[Watcher]:
    """A running watch."""
    with watching(directory / "watched", "--no-scan") as watcher:
        yield watcher


@pytest.fixture
def watched(directory: Path, watch: Watcher) -> BuildIdFs:
    """The program on the store of the watch."""
    return BuildIdFs(directory, watch.store)


def wait_for_maps(program: BuildIdFs, pids: Iterable[int]) -> None:
    """Wait until the store has a map of each process.

    If a process begins its map more than twelve seconds after its start, the next look at it is a
    minute later.
    """
    with Store.open(program.store, read_only=True) as store:
        until(lambda: all(map(store.jit_maps.of, pids)), "the maps", 180)


@pytest.mark.parametrize("ends", ["while-recorded", "later"])
def test_generated_code_of_containers_that_are_gone_has_names(
    watched: BuildIdFs, directory: Path, ends: str
) -> None:
    programs = [jit.node("--perf-basic-prof"), jit.node("--perf-prof"), *jit.pythons()]
    data, out = directory / "perf.data", directory / "repaired.data"
    is_later = ends == "later"
    with contextlib.ExitStack() as recorder, contextlib.ExitStack() as containers:
        if not is_later:
            recorder.enter_context(recording(data))
        started = {
            containers.enter_context(container(each, None if is_later else each.seconds)): each
            for each in programs
        }
        if is_later:
            wait_for_maps(watched, started)
            for pid in started:
                os.kill(pid, signal.SIGSTOP)
            with recording(data):
                for pid, program in started.items():
                    jit.spend(pid, program.seconds)
    wait_for_maps(watched, started)
    # On the host other processes had those numbers, or so it seems.
    mislead = [Path(f"/tmp/perf-{pid}.map") for pid in started]
    try:
        for each in mislead:
            each.write_text(f"1000 {2**47 - 0x2000:x} wrong_name\n")
        done = watched("repair", "--json", data, "-o", out, check=False)
        with watched.mounted() as mount:
            before, after = (jit_samples(mount, each, list(started)) for each in (data, out))
    finally:
        for each in mislead:
            each.unlink(missing_ok=True)
    assert done.rc in (0, 3), done
    named = {each["pid"]: each for each in json.loads(done.out)["generated"]}
    for pid, program in started.items():
        said = named[pid]
        assert (said["name"], said["comm"]) == (f"[jit:{pid}]", Path(program.argv[0]).name)
        assert said["container"].startswith("mnt:")
        assert before[pid].of(*program.functions) == 0, before
        assert after[pid].total == before[pid].total >= 3, (before, after)
        assert after[pid].share >= 95, after
        assert after[pid].of("wrong_name") == 0, after
        assert after[pid].of(*program.functions) > 0.5 * after[pid].total, after
