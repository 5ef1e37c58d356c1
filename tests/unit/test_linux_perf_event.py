# SPDX-License-Identifier: Apache-2.0
"""Rings of the real kernel: what is mapped shows up in them, whole, whatever their size."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.formats.perf.records import (
    Entered,
    Exited,
    Forked,
    LostRecords,
    Mapped,
    Record,
    decode_ring,
)
from buildidfs.linux import namespaces, perf_event, syscalls
from buildidfs.linux.perf_event import Ring
from tests.support.clients.tools import run, tool
from tests.support.harness.children import needs_root
from tests.support.harness.scans import open_descriptors
from tests.support.harness.waiting import until

_WITH_BUILD_ID = 1 << 34  # commit 88a16a1309333, Linux 5.12
CPU = min(os.sched_getaffinity(0))


@pytest.fixture
def on_one_cpu() -> Iterator[None]:
    """This thread, and what it starts, on the CPU whose ring is read."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CPU})
    yield
    os.sched_setaffinity(0, before)


def map_code(path: Path, times: int = 1) -> None:
    """Map a file executable, and unmap it."""
    if not path.exists():
        path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("rb") as file:
        for _ in range(times):
            mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()


def decoded(data: bytes) -> list[Record]:
    """Take records, which have to be whole."""
    position = 0
    while position < len(data):
        position += int.from_bytes(data[position + 6 : position + 8], "little")
    assert position == len(data)
    return list(decode_ring(data))


def own(records: list[Record], path: Path) -> list[Mapped]:
    return [one for one in records if isinstance(one, Mapped) and one.path == os.fsencode(path)]


def test_lists_of_cpus() -> None:
    assert perf_event.parse_cpus("0-3,7\n") == {0, 1, 2, 3, 7}
    assert perf_event.parse_cpus("0") == {0}
    assert perf_event.parse_cpus("\n") == frozenset()


def test_online_cpus_are_those_of_the_c_library() -> None:
    assert len(perf_event.online_cpus()) == os.sysconf("SC_NPROCESSORS_ONLN")
    assert os.sched_getaffinity(0) <= perf_event.online_cpus()


@pytest.mark.root
@needs_root("events of the whole system")
@pytest.mark.usefixtures("on_one_cpu")
class TestRing:
    """Events that need the privilege."""

    def test_a_mapping_is_told_with_its_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a file"
        with Ring(CPU, perf_event.MMAP, pages=8, watermark=1) as ring:
            map_code(path)
            (found,) = own(decoded(ring.take()), path)
        status = path.stat()
        assert found.pid == os.getpid()
        assert (found.inode, found.end - found.start) == (status.st_ino, mmap.PAGESIZE)
        assert found.build_id == b""

    def test_mapping_has_its_inode_beside_an_event_with_build_ids(self, tmp_path: Path) -> None:
        """perf record --buildid-mmap makes such events."""
        source = tmp_path / "probe.c"
        source.write_text("int probe(void) { return 1; }\n")
        path = tmp_path / "libprobe.so"
        run(
            [tool("gcc"), "-shared", "-fPIC", "-Wl,--build-id=0xabcdef0102030405", "-o", path,
             source],
            check=True,
        )  # fmt: skip
        try:
            other = Ring(CPU, perf_event.MMAP | _WITH_BUILD_ID, pages=8, watermark=1)
        except OSError as error:
            assert error.errno == errno.EINVAL  # noqa: PT017 - before Linux 5.12
            pytest.skip("this kernel does not tell build IDs")
        with (
            Ring(CPU, perf_event.MMAP, pages=8, watermark=1) as before,
            other,
            Ring(CPU, perf_event.MMAP, pages=8, watermark=1) as after,
        ):
            ctypes.CDLL(str(path))
            found = [*own(decoded(before.take()), path), *own(decoded(after.take()), path)]
        assert len(found) >= 2
        assert {one.inode for one in found} == {path.stat().st_ino}

    def test_wakes_at_the_watermark_and_once(self, tmp_path: Path) -> None:
        with Ring(CPU, perf_event.MMAP, pages=8, watermark=1) as ring, select.epoll() as poll:
            poll.register(ring.fileno(), select.EPOLLIN)
            map_code(tmp_path / "file")
            assert poll.poll(20) == [(ring.fileno(), select.EPOLLIN)]
        with Ring(CPU, perf_event.MMAP, pages=8, watermark=4 * mmap.PAGESIZE) as ring:
            reader = select.poll()
            reader.register(ring.fileno(), select.POLLIN)
            map_code(tmp_path / "file")
            assert reader.poll(0) == []
            map_code(tmp_path / "file", 200)
            assert reader.poll(20_000) == [(ring.fileno(), select.POLLIN)]

    def test_records_across_the_end_of_the_ring(self, tmp_path: Path) -> None:
        """Each of many times around, with names that fit the size of the ring nowhere."""
        path = tmp_path / ("n" * 77)
        seen = lost = 0
        rounds, times = 400, 20
        with Ring(CPU, perf_event.MMAP, pages=1, watermark=1) as ring:
            # What is lost is told when there is room again: at the latest of one more.
            for count in [times] * rounds + [1]:
                map_code(path, count)
                records = decoded(ring.take())
                found = own(records, path)
                lost += sum(one.count for one in records if isinstance(one, LostRecords))
                seen += len(found)
                assert {one.inode for one in found} <= {path.stat().st_ino}
                assert [one.time for one in records] == sorted(one.time for one in records)
        assert seen > rounds  # that it went around
        assert seen + lost >= rounds * times

    def test_lost_records_are_counted(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        times = 2000
        with Ring(CPU, perf_event.MMAP, pages=8, watermark=1) as ring:
            map_code(path, times)
            first = decoded(ring.take())
            kept = len(own(first, path))
            assert 0 < kept < times
            map_code(path)
            records = decoded(ring.take())
        # Others map files, too, and a shorter record may have found room.
        lost = sum(one.count for one in [*first, *records] if isinstance(one, LostRecords))
        assert lost >= times - kept
        assert len(own(records, path)) == 1

    def test_times_are_those_of_the_monotonic_clock(self, tmp_path: Path) -> None:
        import time

        with Ring(CPU, perf_event.MMAP, pages=8, watermark=1) as ring:
            before = time.monotonic_ns()
            map_code(tmp_path / "file")
            (found,) = own(decoded(ring.take()), tmp_path / "file")
            assert before <= found.time <= time.monotonic_ns()

    def test_a_life(self) -> None:
        events = perf_event.TASK | perf_event.NAMESPACES
        with Ring(CPU, events, pages=64, watermark=1) as ring:
            with subprocess.Popen(
                [tool("unshare"), "-m", "readlink", "/proc/self/ns/mnt"], stdout=subprocess.PIPE
            ) as child:
                assert child.stdout is not None
                number = int(child.stdout.read().strip()[5:-1])
            records = [one for one in decoded(ring.take()) if getattr(one, "pid", 0) == child.pid]
        ours = namespaces.of_pid(os.getpid())
        assert [type(one) for one in records] == [Forked, Entered, Entered, Exited]
        forked, born, moved, _ = records
        assert isinstance(forked, Forked)
        assert isinstance(born, Entered)
        assert isinstance(moved, Entered)
        assert forked.parent == os.getpid()
        assert born.namespaces == ours
        assert (moved.namespaces.mnt, moved.namespaces.net) == (number, ours.net)

    def test_stopped_events_can_still_be_taken(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        with Ring(CPU, perf_event.MMAP, pages=8, watermark=1) as ring:
            map_code(path)
            ring.stop()
            map_code(path)
            assert len(own(decoded(ring.take()), path)) == 1
            assert ring.take() == b""

    def test_counting_goes_on_until_it_is_stopped(self) -> None:
        with Ring(CPU, perf_event.MMAP, pages=8, watermark=1) as ring:
            assert ring.is_counting()
            assert ring.is_counting()
            ring.stop()
            # What counts is half of the time since the call before.
            until(lambda: not ring.is_counting(), "an event that does not count")

    def test_descriptors_are_closed(self) -> None:
        before = open_descriptors()
        with Ring(CPU, perf_event.MMAP, pages=8, watermark=1) as ring:
            assert open_descriptors() > before
        ring.close()
        assert open_descriptors() <= before
        with pytest.raises(OSError, match="Invalid argument"):
            Ring(CPU, perf_event.MMAP, pages=3, watermark=1)
        assert open_descriptors() <= before

    def test_a_cpu_that_is_not_there(self) -> None:
        with pytest.raises(OSError, match=r"No such device|Invalid argument") as caught:
            Ring(9999, perf_event.MMAP, pages=8, watermark=1)
        assert caught.value.errno in (errno.ENODEV, errno.EINVAL)


@pytest.mark.root
@needs_root("drops capabilities")
def test_without_the_privilege() -> None:
    if int(Path("/proc/sys/kernel/perf_event_paranoid").read_text()) < 0:
        pytest.skip("everybody may have events on this machine")
    child = os.fork()
    if not child:
        code = 255
        try:
            os.setresuid(65534, 65534, 65534)
            Ring(CPU, perf_event.MMAP, pages=8, watermark=1)
        except OSError as error:
            code = error.errno or 254
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (errno.EACCES, errno.EPERM)


def test_unknown_machine_has_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_event, "_NUMBERS", {})
    with pytest.raises(OSError, match="no perf_event_open known") as caught:
        Ring(CPU, perf_event.MMAP, pages=8, watermark=1)
    assert caught.value.errno == errno.ENOSYS
    assert syscalls.libc is not None


# --- buildidfs.linux.perf_clock, against the events of this kernel


@pytest.fixture
def clock_events() -> None:
    try:
        perf_event.perf_offset()
    except OSError as error:
        pytest.skip(f"events of one's own are not allowed here: {error.strerror}")


@pytest.mark.usefixtures("clock_events")
def test_it_is_the_same_clock_each_time() -> None:
    first, first_error = perf_event.perf_offset()
    time.sleep(0.05)
    second, second_error = perf_event.perf_offset()
    assert abs(second - first) <= first_error + second_error + 100_000
    assert first_error < 100_000_000


@pytest.mark.usefixtures("clock_events")
def test_it_began_with_the_machine() -> None:
    offset, _ = perf_event.perf_offset()
    began = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    assert abs(offset / 1e9 - began) < 60


@pytest.mark.usefixtures("clock_events")
def test_nothing_is_left_and_the_thread_keeps_its_name() -> None:
    found = []

    def ask() -> None:
        Path("/proc/thread-self/comm").write_text("named")
        before = open_descriptors()
        perf_event.perf_offset()
        found.append((Path("/proc/thread-self/comm").read_text(), open_descriptors() - before))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [("named\n", 0)]
