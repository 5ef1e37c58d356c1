# SPDX-License-Identifier: Apache-2.0
"""fanotify events as the kernel lays them out, and whatever else may be in a buffer."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.formats.fanotifyevents import EVENT_SIZE, FanotifyEvent, decode


def metadata(event: FanotifyEvent, more: bytes = b"", *, version: int = 3) -> bytes:
    """An event as in linux/fanotify.h, with information records behind it."""
    return (
        struct.pack("=IBBHQii", 24 + len(more), version, 0, 24, event.mask, event.fd, event.pid)
        + more
    )


def record(kind: int, content: bytes) -> bytes:
    return struct.pack("=BBH", kind, 0, 4 + len(content)) + content


OPENED = FanotifyEvent(0x20, 7, 4711)
WITHOUT_FILE = FanotifyEvent(0x20, -1, 4712)
OVERFLOW = FanotifyEvent(0x4000, -1, 0)


def test_the_size_of_an_event() -> None:
    assert len(metadata(OPENED)) == EVENT_SIZE


def test_events_in_their_order() -> None:
    buffer = metadata(OPENED) + metadata(WITHOUT_FILE) + metadata(OVERFLOW)
    assert decode(buffer) == [OPENED, WITHOUT_FILE, OVERFLOW]
    assert decode(b"") == []


@pytest.mark.parametrize(
    "more",
    [
        record(1, bytes(24)) + record(4, bytes(4)),
        # What makes no sense costs only itself: cut off, without a length, longer than the event.
        b"\x07",
        record(7, b""),
        struct.pack("=BBH", 7, 0, 0),
        struct.pack("=BBHIQ", 7, 0, 17, 0, 1),
        # Records are not taken for events.
        metadata(OVERFLOW),
    ],
)
def test_information_records_are_passed_over(more: bytes) -> None:
    buffer = metadata(OPENED, more) + metadata(WITHOUT_FILE, more) + metadata(OVERFLOW)
    assert decode(buffer) == [OPENED, WITHOUT_FILE, OVERFLOW]


@pytest.mark.parametrize(
    "rest",
    [
        metadata(OVERFLOW)[:-1],
        struct.pack("=IBBHQii", 0, 3, 0, 24, 0, 0, 0),
        struct.pack("=IBBHQii", 24, 3, 0, 25, 0, 0, 0),
        struct.pack("=IBBHQii", 24, 3, 0, 23, 0, 0, 0),
        struct.pack("=IBBHQii", 25, 3, 0, 24, 0, 0, 0),
        struct.pack("=IBBHQii", 2**32 - 1, 3, 0, 24, 0, 0, 0),
    ],
)
def test_what_is_cut_off_is_left_out(rest: bytes) -> None:
    assert decode(metadata(OPENED) + rest) == [OPENED]


def test_another_version_means_nothing() -> None:
    with pytest.raises(ValueError, match="version 4"):
        decode(metadata(OPENED, version=4))


@given(st.binary(max_size=400))
def test_no_input_is_too_strange(buffer: bytes) -> None:
    try:
        events = decode(buffer)
    except ValueError as error:
        assert "version" in str(error)  # noqa: PT017 - either outcome is right
        return
    assert len(events) <= len(buffer) // EVENT_SIZE


EVENTS = st.lists(
    st.builds(
        FanotifyEvent,
        st.integers(0, 2**64 - 1),
        st.integers(-(2**31), 2**31 - 1),
        st.integers(-(2**31), 2**31 - 1),
    ),
    max_size=8,
)
RECORDS = st.lists(st.builds(record, st.integers(0, 255), st.binary(max_size=40)), max_size=3).map(
    b"".join
)


@given(EVENTS, RECORDS)
def test_what_goes_in_comes_out(events: list[FanotifyEvent], records: bytes) -> None:
    buffer = b"".join(metadata(event, records) for event in events)
    assert decode(buffer) == events
