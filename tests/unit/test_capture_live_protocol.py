# SPDX-License-Identifier: Apache-2.0
"""Every message comes out as it went in, with its descriptor, and nothing else is believed."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.capture.live import protocol
from buildidfs.capture.live.protocol import (
    CatcherFailed,
    Caught,
    Counts,
    Forget,
    Generated,
    Lost,
    Message,
    Missed,
    Outbox,
    ProcessPlace,
    receive,
)
from buildidfs.model import BuildId, NamespaceSet
from buildidfs.shares import HOST, Share
from tests.support.harness.captures import identity
from tests.support.harness.scans import open_descriptors

PLACE = ProcessPlace(
    NamespaceSet(1, 2, 3, 4, 5, 6, 7), 1 << 63, b"/a/\xff", (1 << 64) - 1, chrooted=True
)
CAUGHT = Caught(b"k" * 16, 4711, 1 << 62, b"/bin/\xff\n", identity(scope=b"s" * 24), PLACE)
ALL = [
    CAUGHT,
    msgspec.structs.replace(CAUGHT, build_id=BuildId(b"\xab" * 20)),
    msgspec.structs.replace(CAUGHT, build_id=BuildId(b"\xab" * 120), identity=identity(scope=None)),
    msgspec.structs.replace(CAUGHT, path=b"/" + b"\xff" * 4095),
    Missed(1, b"/bin/app", "No such file or directory", 2),
    Lost(1972, "too fast"),
    CatcherFailed("no"),
    Generated(7, Share("uid 1000", "mnt:7")),
    Counts(1, 2, 3, 4, 5),
    Forget((b"k" * 16,) * 512),
]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    before = open_descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs
    assert open_descriptors() <= before


Pair = tuple[socket.socket, socket.socket]


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_there_and_back(pair: Pair, message: Message) -> None:
    data = protocol.encode(message)
    assert len(data) <= protocol.MAX_BYTES
    protocol.send(pair[0], data)
    assert protocol.receive(pair[1]) == (message, -1)


def test_the_descriptor_of_the_same_file(pair: Pair) -> None:
    fd = os.memfd_create("sent")
    try:
        os.write(fd, b"content")
        protocol.send(pair[0], protocol.encode(CAUGHT), fd)
        protocol.send(pair[0], protocol.encode(CAUGHT))
        message, received = protocol.receive(pair[1]) or (None, -1)
        assert message == CAUGHT
        try:
            assert received not in (-1, fd)
            assert os.path.sameopenfile(received, fd)
            assert not os.get_inheritable(received)
        finally:
            os.close(received)
        assert protocol.receive(pair[1]) == (CAUGHT, -1)
    finally:
        os.close(fd)


def test_an_o_path_descriptor_is_one_there_as_well(pair: Pair) -> None:
    fd = os.open("/", os.O_PATH)
    try:
        protocol.send(pair[0], protocol.encode(CAUGHT), fd)
    finally:
        os.close(fd)
    _, received = protocol.receive(pair[1]) or (None, -1)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.read(received, 1)
    finally:
        os.close(received)


def test_the_end(pair: Pair) -> None:
    pair[0].shutdown(socket.SHUT_RDWR)
    assert protocol.receive(pair[1]) is None
    with pytest.raises(BrokenPipeError):
        protocol.send(pair[1], protocol.encode(CAUGHT))


def test_nothing_waiting_and_no_room(pair: Pair) -> None:
    for one in pair:
        one.setblocking(False)
    with pytest.raises(BlockingIOError):
        protocol.receive(pair[1])
    data = protocol.encode(CAUGHT)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < 1_000_000:
            protocol.send(pair[0], data)
            sent += 1
    with pytest.raises(BlockingIOError):
        protocol.send(pair[0], data)
    assert sent > 10
    for _ in range(sent):
        assert protocol.receive(pair[1]) == (CAUGHT, -1)


@pytest.mark.parametrize("data", [b"\xc1", b"\x00", b"\x91\x63", protocol.encode(CAUGHT)[:-1]])
def test_what_is_no_message(pair: Pair, data: bytes) -> None:
    """And its descriptor is not kept."""
    before = open_descriptors()
    protocol.send(pair[0], data, pair[0].fileno())
    with pytest.raises(ValueError, match="not a message"):
        protocol.receive(pair[1])
    assert open_descriptors() <= before


def test_no_room_for_the_descriptor(pair: Pair) -> None:
    """The message comes without it: whoever has no more descriptors cannot take one."""
    protocol.send(pair[0], protocol.encode(CAUGHT), pair[0].fileno())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    full = max(map(int, os.listdir("/proc/self/fd"))) + 1
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (full, hard))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        received = protocol.receive(pair[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
    assert received == (CAUGHT, -1)


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        protocol.send(ours, data)
        try:
            received = protocol.receive(theirs)
        except ValueError:
            return
        assert received is None or isinstance(received[0], Message)


def test_owner_with_many_files_leaves_room_for_those_of_others(pair: Pair) -> None:
    sender, receiver = pair
    flood, victim = Share("uid 1000", "mnt:1"), Share("/docker/victim")
    with select.epoll() as epoll:
        epoll.register(sender, select.EPOLLIN)
        outbox = Outbox(sender, epoll, 8)
        assert sum(outbox.hold(flood) for _ in range(100)) == 4
        assert not outbox.hold(Share("uid 1000", "mnt:2"))
        assert sum(outbox.hold(victim) for _ in range(100)) == 2
        assert sum(outbox.hold(HOST) for _ in range(100)) == 8
        for _ in range(2):
            outbox.put(Lost(1, ""), os.open("/dev/null", os.O_RDONLY), victim)
        outbox.flush()
        assert sum(outbox.hold(victim) for _ in range(100)) == 2
    for _ in range(2):
        found = receive(receiver)
        assert found is not None
        os.close(found[1])
