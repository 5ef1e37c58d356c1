# SPDX-License-Identifier: Apache-2.0
"""buildidfs.formats.bolt: values in a database that somebody else has open."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from buildidfs.formats import bolt
from buildidfs.formats.archives import Damaged
from tests.support.engines import Bucket, database


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, size: data[offset : offset + size]


def value(data: bytes, *path: bytes) -> bytes | None:
    return bolt.value(reader(data), path)


TREE: Bucket = {
    b"v1": {
        b"small": {b"key": b"inside", b"other": b""},
        b"large": {b"%04d" % number: b"%d" % number * 100 for number in range(900)},
        b"deep": {b"er": {b"and deeper": {b"key": b"x" * 9000, b"l": b"y"}}},
        b"empty": {},
        b"version": b"\4",
    }
}


@pytest.mark.parametrize("page_size", [512, 4096, 65536])
def test_values(page_size: int) -> None:
    data = database(TREE, page_size)
    for number in range(900):
        assert value(data, b"v1", b"large", b"%04d" % number) == b"%d" % number * 100
    assert value(data, b"v1", b"small", b"key") == b"inside"
    assert value(data, b"v1", b"small", b"other") == b""
    assert value(data, b"v1", b"deep", b"er", b"and deeper", b"key") == b"x" * 9000
    assert value(data, b"v1", b"version") == b"\4"


@pytest.mark.parametrize(
    "path",
    [
        (b"v1",),
        (b"v1", b"large"),
        (b"v0", b"large", b"0001"),
        (b"v2", b"large", b"0001"),
        (b"v1", b"version", b"more"),
        (b"v1", b"empty", b"key"),
        (b"v1", b"large", b""),
        (b"v1", b"large", b"0001x"),
        (b"v1", b"large", b"9999"),
        (b"v1", b"small", b"z"),
    ],
)
def test_what_is_not_there(path: tuple[bytes, ...]) -> None:
    assert value(database(TREE), *path) is None


def test_latest_of_the_two_roots_counts() -> None:
    """As long as it is whole: a machine may have stopped in the middle of it."""
    old, new = database({b"a": {b"b": b"old"}}, txid=6), database({b"a": {b"b": b"new"}}, txid=7)
    assert value(new, b"a", b"b") == b"new"
    both = old[:4096] + old[:4096].replace(struct.pack("=Q", 6), struct.pack("=Q", 8)) + old[8192:]
    assert value(both, b"a", b"b") == b"old", "its checksum is wrong"
    second = bytes(4096) + old[:4096] + old[8192:]
    assert value(second, b"a", b"b") == b"old", "the first is damaged"


def test_what_was_written_to_meanwhile() -> None:
    old, new = database(TREE, txid=6), database(TREE, txid=9)
    reads = 0

    def read_at(offset: int, size: int) -> bytes:
        nonlocal reads
        reads += 1
        return (old if reads < 5 else new)[offset : offset + size]

    with pytest.raises(Damaged, match="meanwhile"):
        bolt.value(read_at, [b"v1", b"version"])


def test_what_is_no_database() -> None:
    for data in (b"", b"x" * 10_000, bytes(10_000), database(TREE)[:5000]):
        with pytest.raises(Damaged):
            value(data, b"v1", b"large", b"0001")


def test_tree_that_goes_in_a_circle() -> None:
    data = bytearray(database({b"v1": {b"%04d" % n: b"x" * 100 for n in range(900)}}, 512))
    for at in range(0, len(data), 512):
        number, flags = struct.unpack_from("=QH", data, at)
        if flags == 1:
            (position,) = struct.unpack_from("=I", data, at + 16)
            struct.pack_into("=IIQ", data, at + 16, position, 0, number)
            struct.pack_into("=H", data, at + 10, 1)
    with pytest.raises(Damaged, match="no leaves"):
        value(bytes(data), b"v1", b"0001")
