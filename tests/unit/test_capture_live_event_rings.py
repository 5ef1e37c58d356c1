# SPDX-License-Identifier: Apache-2.0
"""All CPUs, in the order of time, as they come and go."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.live.event_rings import Rings
from buildidfs.formats.perf.records import Entered, Exited, Forked, GroupMade, Mapped, Record
from buildidfs.linux import perf_event
from tests.support.clients.tools import run, tool
from tests.support.harness.children import cat_program, needs_root
from tests.support.harness.scans import open_descriptors
from tests.support.harness.waiting import until

pytestmark = [pytest.mark.root, needs_root("events of the whole system")]

CPU1 = Path("/sys/devices/system/cpu/cpu1/online")
CPUS = sorted(os.sched_getaffinity(0))

needs_hotplug = pytest.mark.skipif(
    not os.access(CPU1, os.W_OK), reason="no CPU can be turned off here"
)


@pytest.fixture
def rings() -> Iterator[Rings]:
    before = open_descriptors()
    rings = Rings()
    yield rings
    rings.close()
    rings.close()
    assert open_descriptors() <= before


@contextlib.contextmanager
def cpu1_can_be_turned_off() -> Iterator[None]:
    """Whatever happens it is on at the end, and we run where we ran."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        CPU1.write_text("1")
        os.sched_setaffinity(0, before)


def all_mappings(rings: Rings) -> list[Mapped]:
    found = [record for cpu in list(rings.pollers) for record in rings.mappings(cpu)]
    return [record for record in found if isinstance(record, Mapped)]


def seen(rings: Rings, path: Path) -> bool:
    return any(record.path == os.fsencode(path) for record in all_mappings(rings))


def run_on(cpu: int, program: Path) -> None:
    run([tool("taskset"), "-c", str(cpu), program, "/dev/null"], check=True)


def test_every_cpu_that_runs(rings: Rings) -> None:
    assert rings.pollers.keys() == perf_event.online_cpus()
    assert not rings.follow_cpus()


@pytest.mark.parametrize("cpu", CPUS)
def test_a_mapping_wakes_the_reader_of_its_cpu(rings: Rings, cpu: int) -> None:
    rings.mappings(cpu)
    program = cat_program()
    run_on(cpu, program)
    assert rings.pollers[cpu].poll(20)
    found = [record for record in rings.mappings(cpu) if isinstance(record, Mapped)]
    assert os.fsencode(program) in {record.path for record in found}


def test_new_control_group_wakes_a_reader(rings: Rings, tmp_path: Path) -> None:
    """The runtime of a container makes one before the container maps anything."""
    path = os.fsencode(tmp_path)
    script = 'mount -t cgroup2 none "$0"; mkdir "$0/buildidfs-$$"; rmdir "$0/buildidfs-$$"'
    all_mappings(rings)
    run([tool("unshare"), "-m", "sh", "-ec", script, path], check=True)
    found = [
        record
        for cpu, poller in rings.pollers.items()
        if poller.poll(0)
        for record in rings.mappings(cpu)
    ]
    assert any(isinstance(record, GroupMade) for record in found)


def test_forks_alone_do_not_wake_the_reader(rings: Rings) -> None:
    """A thread that forks children which end at once maps nothing."""
    ours = os.getpid()
    woken = 0
    for _ in range(20):
        all_mappings(rings)
        for poller in rings.pollers.values():
            poller.poll(0)
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        told = [
            record
            for cpu, poller in rings.pollers.items()
            if poller.poll(0)
            for record in rings.mappings(cpu)
        ]
        woken += any(isinstance(record, Entered) for record in told)
    forks = [one for one in rings.changes() if isinstance(one, Forked)]
    assert (woken, sum(one.parent == ours for one in forks)) == (0, 20)


def test_what_led_to_a_mapping_is_told_by_then(rings: Rings) -> None:
    """Whatever was mapped, the birth of its process is among the changes that are read next."""
    stop = threading.Event()
    started: set[int] = set()

    def run_programs() -> None:
        while not stop.is_set():
            with subprocess.Popen([tool("true")]) as child:
                started.add(child.pid)
            with subprocess.Popen([tool("unshare"), "-m", "true"]) as child:
                started.add(child.pid)

    threads = [threading.Thread(target=run_programs) for _ in CPUS]
    for thread in threads:
        thread.start()
    born: set[int] = set()
    strangers: list[int] = []
    told: list[Record] = []

    def look() -> bool:
        mapped = {record.pid for record in all_mappings(rings)}
        changes = rings.changes()
        told.extend(changes)
        born.update(record.pid for record in changes if isinstance(record, Forked))
        strangers.extend(mapped - born)
        return len(born & started) >= 300

    try:
        until(look, "so many programs", seconds=60)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not started.intersection(strangers)
    assert {type(record) for record in told} >= {Forked, Entered, Exited}


_FORKING = """
#include <sys/wait.h>
#include <unistd.h>
int main(void)
{
    for (int i = 0; i < 4000; i++) {
        if (fork() == 0)
            _exit(0);
        wait(NULL);
    }
}
"""


def test_the_order_of_changes_on_all_cpus(rings: Rings, tmp_path: Path) -> None:
    """Nobody ends or moves who is yet to be born, whichever CPU each of that happens on."""
    program = tmp_path / "forking"
    program.with_suffix(".c").write_text(_FORKING)
    run([tool("gcc"), "-static", "-o", program, program.with_suffix(".c")], check=True)
    born: set[int] = set()
    early: list[Entered | Exited] = []
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(subprocess.Popen([program])) for _ in CPUS]
        unborn: dict[int, Entered | Exited] = {}
        while any(child.poll() is None for child in children):
            for record in rings.changes():
                if isinstance(record, Forked):
                    born.add(record.pid)
                    earlier = unborn.get(record.pid)
                    # An older record is of another process, whose number was free again.
                    if earlier is not None and earlier.time >= record.time:
                        early.append(earlier)
                elif isinstance(record, Entered | Exited) and record.pid not in born:
                    unborn[record.pid] = record
    assert len(born) >= 4000
    assert early == []


def test_without_so_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as may be locked, down to what is no use any more."""
    real, sizes = perf_event.Ring, []

    class Limited(real):
        def __init__(self, cpu: int, events: int, *, pages: int, **options: int) -> None:
            sizes.append(pages)
            if pages > most:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            super().__init__(cpu, events, pages=pages, **options)

    monkeypatch.setattr("buildidfs.capture.live.event_rings.Ring", Limited)
    before = open_descriptors()
    most = 64
    rings = Rings()
    assert (sizes[0], sizes.count(512), sizes.count(256), min(sizes)) == (512, 1, 1, 16)
    run([tool("true")], check=True)
    assert rings.changes()
    rings.close()
    most = 0
    with pytest.raises(PermissionError):
        Rings()
    assert open_descriptors() <= before


@pytest.mark.watch  # those that watch would lose what happens on that CPU
@needs_hotplug
def test_a_cpu_that_is_off_for_a_while(rings: Rings) -> None:
    program = cat_program()
    with cpu1_can_be_turned_off():
        CPU1.write_text("0")
        assert rings.follow_cpus()
        assert 1 not in rings.pollers
        assert rings.mappings(1) == []
        assert not rings.follow_cpus()
        CPU1.write_text("1")
        assert rings.follow_cpus()
        assert not rings.follow_cpus()
        run_on(1, program)
        assert seen(rings, program)


@pytest.mark.watch  # those that watch would lose what happens on that CPU
@needs_hotplug
def test_a_cpu_that_is_on_again_before_its_rings_are_closed(rings: Rings) -> None:
    program = cat_program()
    with cpu1_can_be_turned_off():
        CPU1.write_text("0")
        assert rings.cpus_changed()
        CPU1.write_text("1")
        assert rings.follow_cpus()
        run_on(1, program)
        assert seen(rings, program)


@pytest.mark.watch  # those that watch would lose what happens on that CPU
@needs_hotplug
def test_a_cpu_that_is_off_for_a_moment() -> None:
    """Nothing else tells that its events are gone: neither the list of CPUs nor a descriptor."""
    program = cat_program()
    rings = Rings(recheck=0)
    try:
        assert not rings.follow_cpus()
        with cpu1_can_be_turned_off():
            CPU1.write_text("0")
            CPU1.write_text("1")
        poller = rings.pollers[1]
        all_mappings(rings)
        poller.poll(0)
        run_on(1, program)
        assert rings.mappings(1) == []
        assert poller.poll(0) == []
        until(rings.follow_cpus, "a CPU that makes no records to be noticed")
        assert rings.pollers[1] is not poller
        run_on(1, program)
        assert any(isinstance(record, Mapped) for record in rings.mappings(1))
        assert not rings.follow_cpus()
    finally:
        rings.close()
