# SPDX-License-Identifier: Apache-2.0
"""Rows, messages, files of processes and nodes: what only we write, or so it should be."""

from __future__ import annotations

import array
import contextlib
import fcntl
import functools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from buildidfs.capture.live import protocol
from buildidfs.errors import IntegrityError, StoreError
from buildidfs.model import BuildId, Digest, Kind, Trust
from buildidfs.store import Store, location_rows, run_files, schema
from buildidfs.store.coordination import ChangeListener
from buildidfs.store.index.queries import whole
from buildidfs.view import View, nodes
from buildidfs.view.attributes import NeedsReading
from tests.fuzz import elf_mutation
from tests.fuzz.target import MEGABYTE, Target, filled, refusal, scratch
from tests.support.harness.captures import capture, sighting

T = TypeVar("T")

# --- rows of the store ---------------------------------------------------------------------------


def _check_rows(data: bytes) -> None:
    """A row that is not what was written is an `IntegrityError`, or a value like any other."""
    for unpack in (
        schema.StoreCounters.unpack, schema.OrdinalRow.unpack, schema.DigestRow.unpack,
        location_rows.unpack_origin,
    ):  # fmt: skip
        _row(functools.partial(unpack, data))
    for kind in Kind:
        artifact = _row(functools.partial(schema.unpack_artifact, 1, kind, data))
        assert artifact is None or artifact.kind is kind
    record = _row(lambda: location_rows.unpack_journal(data[:56], data[56:]))
    assert record is None or BuildId.MIN_BYTES <= len(record.build_id) <= BuildId.MAX_BYTES


def _row(unpack: Callable[[], T]) -> T | None:
    try:
        return whole(unpack)()
    except IntegrityError:
        return None


def _seed_rows() -> Iterator[bytes]:
    at = sighting(container="docker:0123", host="h", scanner="proc", mnt_ns_id=4, cgroup=b"/x")
    yield schema.StoreCounters(1, 2, 3).pack()
    yield schema.OrdinalRow(BuildId(elf_mutation.BUILD_ID), 6, 5, 1, 1).pack()
    yield schema.DigestRow(9, [(1, 2, 3), (4, 1, 0)]).pack()
    yield location_rows.pack_origin(Digest(bytes(32)), 2, at.origin, 1, 2)
    build_id = BuildId(elf_mutation.BUILD_ID)
    yield location_rows.journal_key(
        at.origin, build_id, bytes(16), "x"
    ) + location_rows.pack_journal(at.origin, build_id, 1, 2)


def _huge_rows() -> Iterator[bytes]:
    yield bytes(MEGABYTE)
    yield b"\xff" * MEGABYTE
    # one more field than there are, which a reader passes over however deep it is
    *_, origin, _ = _seed_rows()
    count = int.from_bytes(origin[17:19], "big")
    longer = origin[:16] + b"\xdc" + (count + 1).to_bytes(2, "big") + origin[19:]
    yield longer + filled(b"\x91", MEGABYTE - 1000)
    for form in (b"\xdd\xff\xff\xff\xff", b"\xdc\x00\x15", b"\x91", b"\xdf\xff\xff\xff\xff"):
        yield bytes(16) + form + b"\x91" * (MEGABYTE - 64)
        yield bytes(16) + form + b"\xc6\x00\x0f\x00\x00" + bytes(MEGABYTE - 64)
        yield bytes(56 + 16) + form + b"\xc6\x00\x0f\x00\x00" + bytes(MEGABYTE - 128)


# --- messages ------------------------------------------------------------------------------------


@functools.cache
def _pair() -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (one, other):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    return one, other


def _check_messages(data: bytes) -> None:
    """With a descriptor, that is closed or handed over, and the socket goes on."""
    sender, receiver = _pair()
    if not data:
        return
    before = len(os.listdir("/proc/self/fd"))
    protocol.send(sender, data[:65536], sender.fileno())
    try:
        received = protocol.receive(receiver)
        assert received is not None
        if received[1] >= 0:
            os.close(received[1])
    except ValueError:
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def _seed_messages() -> Iterator[bytes]:
    at = sighting().origin
    place = protocol.ProcessPlace(at.namespaces, 1, b"/x")
    yield protocol.encode(protocol.Caught(b"k", 1, 2, b"/x", at.identity, place, BuildId(b"abcd")))
    yield protocol.encode(protocol.Missed(1, b"/x", "gone", 2))
    yield protocol.encode(protocol.Lost(3, "x"))
    yield protocol.encode(protocol.Counts(1, 2, 3, 4, 5))
    yield protocol.encode(protocol.Forget((b"a", b"b")))
    yield protocol.encode(protocol.Flooded(place, 5, (b"/x",)))
    yield protocol.encode(protocol.CatcherFailed("x"))


def _huge_messages() -> Iterator[bytes]:
    for head in (b"\x92\x04\xdd\xff\xff\xff\xff", b"\x92\x07\xdd\x00\x00\x30\x00", b"\x91" * 100):
        for rest in (b"\x91", b"\xa0", b"\xc4\x00", b"\xdd\xff\xff\xff\xff"):
            yield (head + filled(rest, 65536))[:65536]


@functools.cache
def _listener() -> tuple[ChangeListener, socket.socket]:
    root = os.fsencode(scratch() / "listening")
    listener = ChangeListener(root, lambda: 1)
    (name,) = os.listdir(os.path.join(root, b"listeners"))
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    sender.connect(os.path.join(root, b"listeners", name))
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    return listener, sender


def _check_notify(data: bytes) -> None:
    """A broken message means that everything may have changed; descriptors are closed."""
    listener, sender = _listener()
    before = len(os.listdir("/proc/self/fd"))
    reading, writing = os.pipe()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writing]))]
    sender.sendmsg([data[:65536]], rights)
    os.close(writing)
    changed = listener.receive()
    assert changed is not None
    for ordinal in changed:
        struct.pack(">Q", ordinal)  # it is looked up next
    listener.acknowledge()
    assert os.read(reading, 1) == b""
    os.close(reading)
    assert len(os.listdir("/proc/self/fd")) == before


def _seed_notify() -> Iterator[bytes]:
    for message in ((2, [1, 2, 3]), (3, []), (1 << 63, [7])):
        yield msgspec.msgpack.encode(message)


def _huge_notify() -> Iterator[bytes]:
    yield b"\x92\x01\xdd\xff\xff\xff\xff" + bytes(65000)
    yield b"\x92\x01\xdd\x00\x00\xf0\x00" + bytes(0xF000)
    yield b"\x92" * 65000


# --- files of processes --------------------------------------------------------------------------


@functools.cache
def _presence_file() -> tuple[Path, int]:
    root = scratch() / "present"
    (root / "run").mkdir(parents=True)
    path = root / "run/watch-4242.json"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return root, fd


def _check_presence(data: bytes) -> None:
    root, fd = _presence_file()
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)
    (present,) = run_files.present(root, looks=2)
    assert (present.role, present.pid) == ("watch", 4242)
    for fact in ("mountpoint", "path"):
        assert isinstance(present.path(fact), bytes)
    with contextlib.suppress(StoreError, ProcessLookupError):
        os.close(present.pidfd())


def _seed_presence() -> Iterator[bytes]:
    yield (
        b'{"role":"watch","pid":4242,"since":1700000000000000000,"version":"0.1.0",'
        b'"kernel":"00:1","mountpoint":"/x","mountpoint_b64":"L3j/","counters":{"a":[1,2.5,null]}}\n'
    )


def _huge_presence() -> Iterator[bytes]:
    for unit in (b"[", b'{"a":', b"9", b'"\\u0000', b" ", b"\xff"):
        yield b'{"a":' + filled(unit, 65000)
    yield b'{"a":[' + filled(b"0,", 65536 - 16) + b"0]}"
    yield b"{" + b",".join(b'"%x":1' % number for number in range(7000)) + b"}"


# --- the tree ------------------------------------------------------------------------------------


@functools.cache
def store() -> Store:
    """One with a few captures, not to be changed."""
    made = Store.create(scratch() / "store")
    for number, path in enumerate((b"/usr/bin/app", b"/usr/lib/.dwz/x/y", b"/.build-id/ab/cdef")):
        for kinds in ((Kind.EXECUTABLE, Kind.DEBUGINFO), (Kind.DEBUGINFO,), (Kind.VDSO,)):
            build_id = bytes([number, len(kinds), kinds[0]]) * (number + 1)
            at = sighting(path, trust=Trust.CONTAINER)
            made.commit([capture(made, build_id * 9, build_id, at=at, kinds=kinds)])
    return made


@functools.cache
def _view() -> tuple[View, tuple[int, ...]]:
    """A tree, and nodes in it of each kind that there is."""
    view = View(store())
    found = {nodes.ROOT: None}
    for node in found.copy():
        _collect(view, node, found)
    return view, tuple(found)


def _collect(view: View, node: int, found: dict[int, None]) -> None:
    for _, child, _ in view.children(node):
        if child not in found:
            found[child] = None
            if view.file_type(child) == 0o040000:
                _collect(view, child, found)


def _check_view(data: bytes) -> None:
    """Any name below any number, and any number at all: an answer, or an errno."""
    view, known = _view()
    chosen, flip = data[0] if data else 0, int.from_bytes(data[1:9], "little")
    node = known[chosen % len(known)]
    if chosen & 0x80:
        node ^= flip
    after = flip & ((1 << 63) - 1)
    name = data[9:]
    for attempt in (
        lambda: view.attributes(view.child(node, name) or node),
        lambda: [*islice(view.children(node, after), 100)],
        lambda: view.readlink(node),
        lambda: view.open(node).close(),
        lambda: [*islice(view.spellings(node & 0xFFFF), 100)],
    ):
        error = refusal(attempt, OSError)
        # after NeedsReading the mount looks the name up in a thread that may read
        assert not isinstance(error, OSError) or error.errno or isinstance(error, NeedsReading)


def _seed_view() -> Iterator[bytes]:
    number = (1 << 20).to_bytes(8, "little")
    for chosen, name in ((0, b"000301"), (3, b"elf"), (5, b".build-id"), (0x81, b"path"), (9, b"")):
        yield bytes([chosen]) + number + name


def _huge_view() -> Iterator[bytes]:
    for chosen in range(0, 40):
        yield bytes([chosen]) + bytes(8) + b"a" * 255
    yield bytes([2]) + bytes(8) + b"ab" * 4096


TARGETS: Final = {
    "rows": Target(_check_rows, _seed_rows, _huge_rows),
    "messages": Target(_check_messages, _seed_messages, _huge_messages, most=1 << 16),
    "notify": Target(_check_notify, _seed_notify, _huge_notify, most=1 << 16),
    "presence": Target(_check_presence, _seed_presence, _huge_presence, most=1 << 16),
    "view": Target(_check_view, _seed_view, _huge_view, most=1 << 14),
}
