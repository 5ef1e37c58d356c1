# SPDX-License-Identifier: Apache-2.0
"""One value out of a database of bbolt, which is open elsewhere and may be written to meanwhile.

A database is a tree of pages of which none is changed in place: what a transaction writes is in
pages that were free, and the last that it writes is one of the two meta pages, which says where the
root is now. Its pages are free for the transaction after the next. So what was read of a root is
right if the meta page still is the latest afterwards, and no lock is needed.

Numbers are in the byte order of the machine. Source: go.etcd.io/bbolt, internal/common.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from buildidfs.formats.archives import Damaged

ReadAt = Callable[[int, int], bytes]
"""``read_at(offset, size)`` gives up to ``size`` bytes of a file, fewer only at its end."""

_MAGIC: Final = 0xED0CDAED
_VERSION: Final = 2
_META: Final = struct.Struct("=4I 6Q")  # magic, version, page size; root, sequence, ..., checksum
_CHECKSUM: Final = struct.Struct("=Q")
_PAGE: Final = struct.Struct("=Q H H I")  # number, flags, count, overflow
_BRANCH: Final = struct.Struct("=I I Q")  # position, key, page
_LEAF: Final = struct.Struct("=4I")  # flags, position, key, value
_BUCKET: Final = struct.Struct("=Q Q")  # page of the root, sequence

_IS_BRANCH: Final = 0x01
_IS_LEAF: Final = 0x02
_HOLDS_BUCKET: Final = 0x01

_PAGE_SIZES: Final = frozenset(1 << power for power in range(9, 17))
_DEFAULT_SIZE: Final = 4096
_DEPTH_MAX: Final = 32
_PAGE_MAX: Final = 1 << 20


class _Meta(NamedTuple):
    txid: int
    root: int
    page_size: int


def value(read_at: ReadAt, path: Sequence[bytes]) -> bytes | None:
    """The value under the last key of ``path``, in the bucket that the keys before it lead to.

    None if there is none. Costs a few pages for each key, however large the database is, and at
    most a MiB of memory. Raises `Damaged`, also when too much was written meanwhile.
    """
    try:
        meta = _latest(read_at)
        found = _Tree(read_at, meta.page_size).value(meta.root, path)
        if _latest(read_at).txid != meta.txid:
            raise Damaged("a database that was written to meanwhile")
    except struct.error as error:
        raise Damaged(f"a database that ends in the middle: {error}") from error
    return found


def _latest(read_at: ReadAt) -> _Meta:
    metas = list(_metas(read_at))
    if not metas:
        raise Damaged("no database of bbolt")
    return max(metas)


def _metas(read_at: ReadAt) -> Iterator[_Meta]:
    """The meta pages that are whole: pages 0 and 1. The first says where the second is."""
    first = _meta(read_at(_PAGE.size, _META.size))
    if first is not None:
        yield first
    size = _DEFAULT_SIZE if first is None else first.page_size
    second = _meta(read_at(size + _PAGE.size, _META.size))
    if second is not None and second.page_size == size:
        yield second


def _meta(data: bytes) -> _Meta | None:
    if len(data) < _META.size:
        return None
    magic, version, page_size, _, root, _, _, _, txid, checksum = _META.unpack(data)
    if (magic, version) != (_MAGIC, _VERSION) or page_size not in _PAGE_SIZES:
        return None
    if checksum != fnv1a(data[: -_CHECKSUM.size]):
        return None
    return _Meta(txid, root, page_size)


def fnv1a(data: bytes) -> int:
    """The checksum of a meta page (FNV-1a, 64 bits)."""
    number = 0xCBF29CE484222325
    for byte in data:
        number = (number ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return number


class _Tree:
    """Pages, which may be anything. Raises `Damaged`, struct.error."""

    def __init__(self, read_at: ReadAt, page_size: int) -> None:
        self._read_at = read_at
        self._page_size = page_size

    def value(self, root: int, path: Sequence[bytes]) -> bytes | None:
        *buckets, last = path
        page = self._page(root)
        for key in buckets:
            found = self._find(page, key)
            if found is None or not found[0] & _HOLDS_BUCKET:
                return None
            number, _ = _BUCKET.unpack_from(found[1])
            # A small bucket is in the value itself, a page without a number.
            page = self._page(number) if number else found[1][_BUCKET.size :]
        found = self._find(page, last)
        return None if found is None or found[0] & _HOLDS_BUCKET else found[1]

    def _page(self, number: int) -> bytes:
        offset = number * self._page_size
        head = self._read_at(offset, _PAGE.size) if 1 < number < 2**40 else b""
        its_number, _, _, overflow = _PAGE.unpack(head)
        size = (overflow + 1) * self._page_size
        if its_number != number or size > _PAGE_MAX:
            raise Damaged(f"page {number} of a database is none")
        return self._read_at(offset, size)

    def _find(self, page: bytes, key: bytes) -> tuple[int, bytes] | None:
        """The flags and the value under a key of the bucket whose root is that page."""
        for _ in range(_DEPTH_MAX):
            _, flags, count, _ = _PAGE.unpack_from(page)
            if flags == _IS_LEAF:
                return _in_leaf(page, count, key)
            if flags != _IS_BRANCH:
                break
            page = self._page(_below(page, count, key))
        raise Damaged("a tree in a database that has no leaves")


def _in_leaf(page: bytes, count: int, key: bytes) -> tuple[int, bytes] | None:
    def key_at(index: int) -> bytes:
        at = _PAGE.size + index * _LEAF.size
        _, position, key_size, _ = _LEAF.unpack_from(page, at)
        return page[at + position : at + position + key_size]

    index = _bisect_left(key_at, count, key)
    if index == count or key_at(index) != key:
        return None
    at = _PAGE.size + index * _LEAF.size
    flags, position, key_size, size = _LEAF.unpack_from(page, at)
    begin = at + position + key_size
    if begin + size > len(page):
        raise Damaged("a value that is not within its page")
    return flags, page[begin : begin + size]


def _below(page: bytes, count: int, key: bytes) -> int:
    """The page in which a key is, if it is there at all."""

    def key_at(index: int) -> bytes:
        at = _PAGE.size + index * _BRANCH.size
        position, key_size, _ = _BRANCH.unpack_from(page, at)
        return page[at + position : at + position + key_size]

    index = _bisect_left(key_at, count, key)
    if index == count or key_at(index) != key:
        index = max(index - 1, 0)
    number: int = _BRANCH.unpack_from(page, _PAGE.size + index * _BRANCH.size)[2]
    return number


def _bisect_left(key_at: Callable[[int], bytes], count: int, key: bytes) -> int:
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if key_at(middle) < key:
            low = middle + 1
        else:
            high = middle
    return low
