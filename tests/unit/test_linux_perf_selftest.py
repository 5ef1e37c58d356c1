# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.perf_selftest, against the events of this kernel."""

from __future__ import annotations

import contextlib
import os

import pytest

from buildidfs.formats.perf import ring_records
from buildidfs.linux import perf_event, perf_selftest
from tests.support.scans import open_descriptors

_BUILD_ID = 1 << 14  # of misc, as in linux/perf_event.h


@pytest.fixture(autouse=True)
def _allowed() -> None:
    try:
        perf_selftest.build_ids_leak()
    except OSError as error:
        pytest.skip(f"events of one's own are not allowed here: {error.strerror}")


def test_it_is_the_same_each_time_and_leaves_nothing_open() -> None:
    before = open_descriptors()
    answers = {perf_selftest.build_ids_leak() for _ in range(5)}
    assert len(answers) == 1
    assert open_descriptors() == before


def test_an_event_that_asks_gets_build_ids_and_one_alone_that_does_not_none() -> None:
    """What the answer rests on: the mark is in records, and comes from asking."""
    assert perf_selftest._own_programs()
    marks = {}
    for more in (0, perf_event.BUILD_ID):
        with perf_selftest._OwnEvent(more) as event:
            assert list(event.mappings()) == []
            for path in perf_selftest._own_programs():
                perf_selftest._map(path)
            records = list(event.mappings())
            assert len(records) == len(perf_selftest._own_programs())
            marks[more] = any(misc & _BUILD_ID for misc in records)
    assert not marks[0]
    assert marks[perf_event.BUILD_ID] == (perf_selftest.build_ids_leak() is not None)


def test_it_tells_a_leak_in_whatever_order_the_kernel_goes() -> None:
    leaks = []
    for order in ((0, perf_event.BUILD_ID), (perf_event.BUILD_ID, 0)):
        with contextlib.ExitStack() as stack:
            events = {each: stack.enter_context(perf_selftest._OwnEvent(each)) for each in order}
            for path in perf_selftest._own_programs():
                perf_selftest._map(path)
            leaks.append(any(misc & _BUILD_ID for misc in events[0].mappings()))
    assert bool(perf_selftest.build_ids_leak()) == any(leaks)


@pytest.mark.root
def test_sessions_of_others_get_no_such_record_from_us() -> None:
    """Events of whole CPUs, opened before, as those of ``perf record -a`` are."""
    with contextlib.ExitStack() as stack:
        rings = [
            stack.enter_context(perf_event.Ring(cpu, perf_event.MMAP, pages=256, watermark=1))
            for cpu in sorted(perf_event.online_cpus())
        ]
        assert perf_selftest.build_ids_leak() is not None
        for ring in rings:
            ring.stop()
        records = [record for ring in rings for record in ring_records.decode(ring.take())]
    own = [
        record
        for record in records
        if isinstance(record, ring_records.Mapped) and record.pid == os.getpid()
    ]
    assert len(own) >= len(perf_selftest._own_programs())
    assert [record for record in own if record.build_id] == []
