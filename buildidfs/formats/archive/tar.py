# SPDX-License-Identifier: Apache-2.0
"""Tar archives: ustar, the variant of GNU tar, and pax, with sparse files of all kinds.

Sources: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Interchange Format"; the manual of
GNU tar, "Basic Tar Format" and "Storing Sparse Files".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from buildidfs.formats.archive.common import (
    NAME_MAX_BYTES,
    ByteStream,
    Damaged,
    Member,
    Type,
    bounded_id,
    exactly,
    work_of,
)
from buildidfs.model import bounded_ns

if TYPE_CHECKING:
    from buildidfs.formats.budget import Budget

BLOCK: Final = 512

_EXTENSION_MAX: Final = 1 << 20  # no valid archive has a longer one
_EXTENTS_MAX: Final = 1 << 16
_EXTENTS_OF_BLOCK: Final = 21
_SIZE_MAX: Final = 1 << 62
_DIGITS_MAX: Final = 19
_EXTENSION_STEP_BYTES: Final = 32
_ZEROS: Final = bytes(BLOCK)
_MAGIC: Final = b"ustar"
_SPARSE_MAP: Final = b"GNU.sparse.map"

_TYPES: Final = {
    b"0": Type.FILE, b"\0": Type.FILE, b"7": Type.FILE, b"S": Type.FILE,
    b"1": Type.HARD_LINK, b"5": Type.DIRECTORY,
}  # fmt: skip
_EXTENSIONS: Final = frozenset((b"x", b"g", b"L", b"K"))
_HOLD_NO_BYTES: Final = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))

Pax = dict[bytes, bytes]
Extents = tuple[tuple[int, int], ...]


def is_header(block: bytes) -> bool:
    """Return True if a block is a header with the magic of ustar and the right checksum."""
    return len(block) == BLOCK and block[257:262] == _MAGIC and _checksum_is_right(block)


def members(source: ByteStream, *, concatenated: bool = False) -> Iterator[Member]:
    """Yield the members of an archive that begins at ``source``; raises `Damaged`.

    After each member, the source is at its stored bytes. With ``concatenated``, further archives
    may follow the first (apk); otherwise bytes after the end of the first are not read.
    """
    before = _NOTHING
    while (header := _next_header(source, concatenated)) is not None:
        kind = header[156:157]
        if kind in _EXTENSIONS:
            size = _size(header, {})
            if size > _EXTENSION_MAX:
                raise Damaged(f"a header of {size} bytes at {source.position - BLOCK}")
            source.budget.charge(1 + size // _EXTENSION_STEP_BYTES)
            data = exactly(source, size, "a header")
            source.skip(-size % BLOCK)
            before = before.and_then(kind, data, source.budget)
            continue
        member, end, padding = _member(source, header, kind, before)
        yield member
        source.skip(end - source.position)
        if len(source.take(padding)) < padding:
            return  # a layer written by umoci of Debian 13 ends with the last byte of a member
        before = _NOTHING


def _next_header(source: ByteStream, concatenated: bool) -> bytes | None:
    """Return the next block that is a header; None at the end of the archive."""
    header = source.take(BLOCK)
    while header == _ZEROS:
        header = source.take(BLOCK)
        if not concatenated:
            if header not in (_ZEROS, b""):
                raise Damaged(f"no header at {source.position - len(header)}")
            return None
    if not header:
        return None
    if len(header) < BLOCK:
        raise Damaged("ends in the middle of a header")
    if not _checksum_is_right(header):
        raise Damaged(f"no header at {source.position - BLOCK}")
    return header


def is_tar(head: bytes) -> bool:
    """Return True if a file that begins with ``head`` is an archive, even an empty one."""
    return len(head) >= BLOCK and (head[:BLOCK] == _ZEROS or _checksum_is_right(head[:BLOCK]))


def _checksum_is_right(header: bytes) -> bool:
    """Return True if the checksum is right: the sum of all bytes, its own field as blanks.

    Some old programs added signed bytes: that sum is less by 256 for each byte with the highest
    bit.
    """
    claim = _number(header[148:156])
    rest = header[:148] + header[156:]
    total = sum(rest) + 8 * 0x20
    return claim == total or claim == total - 256 * sum(byte >> 7 for byte in rest)


def _member(
    source: ByteStream, header: bytes, kind: bytes, before: _Before
) -> tuple[Member, int, int]:
    """Return the member that a header and those before it describe, the offset at which its bytes
    end, and the number of bytes from there to the next header.
    """
    pax = before.pax
    size = 0 if kind in _HOLD_NO_BYTES else _size(header, pax)
    name, target = _names(header, before, source.budget)
    whole, extents, begin = size, None, source.position
    if kind == b"S":
        whole, extents = _old_sparse(source, header)
        begin = source.position
    elif _SPARSE_MAP in pax or pax.get(b"GNU.sparse.major") == b"1":
        whole, extents = _pax_sparse(source, pax, begin + size)
    stored = begin + size - source.position
    if extents is not None:
        _check_extents(extents, whole, stored)
    type_ = _TYPES.get(kind, Type.OTHER)
    if type_ is Type.FILE and name.endswith(b"/"):
        type_ = Type.DIRECTORY  # older than the type field
    member = Member(
        name,
        type_,
        whole,
        stored,
        _number(header[100:108]) & 0o7777,
        bounded_id(_decimal(pax.get(b"uid"), _number(header[108:116]))),
        bounded_id(_decimal(pax.get(b"gid"), _number(header[116:124]))),
        _time(pax.get(b"mtime"), _number(header[136:148])),
        target,
        extents,
    )
    return member, begin + size, -size % BLOCK


def _names(header: bytes, before: _Before, budget: Budget) -> tuple[bytes, bytes]:
    """Return the name of a member, and its target if it is a link."""
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and (prefix := header[345:500].partition(b"\0")[0]):
        name = prefix + b"/" + name
    pax = before.pax
    name = pax.get(b"GNU.sparse.name", pax.get(b"path", before.name or name))
    target = pax.get(b"linkpath", before.target or header[157:257].partition(b"\0")[0])
    budget.charge(work_of(name))
    if max(len(name), len(target)) > NAME_MAX_BYTES:
        raise Damaged(f"a name of {max(len(name), len(target))} bytes")
    return name, target


def _size(header: bytes, pax: Pax) -> int:
    size = _decimal(pax.get(b"size"), _number(header[124:136]))
    if not 0 <= size <= _SIZE_MAX:
        raise Damaged(f"a member of {size} bytes")
    return size


# --- numbers -------------------------------------------------------------------------------------


def _number(field: bytes) -> int:
    """Decode octal digits, or GNU tar's big-endian number after a byte with the highest bit."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big") - (
            (1 << (8 * len(field) - 1)) if field[0] & 0x40 else 0
        )
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return 0


def _decimal(text: bytes | None, otherwise: int) -> int:
    """Return a number of a pax header; ``otherwise`` if it is missing or impossible."""
    if text is None or not text.isdigit() or len(text) > _DIGITS_MAX:
        return otherwise
    return int(text)


def _time(text: bytes | None, seconds: int) -> int:
    """Return a time in nanoseconds: ``text`` (as ``123.45``) from a pax header, or else ``seconds``
    from the main header.
    """
    if text is None:
        return bounded_ns(seconds * 1_000_000_000)
    whole, _, rest = text.partition(b".")
    sign = -1 if whole.startswith(b"-") else 1
    seconds = sign * _decimal(whole.removeprefix(b"-"), abs(seconds))
    ns = _decimal(rest[:9].ljust(9, b"0"), 0)
    return bounded_ns(seconds * 1_000_000_000 + sign * ns)


# --- headers that precede a header ---------------------------------------------------------------


class _Before:
    """Fields of a member that did not fit into its header, from the headers before it."""

    __slots__ = ("name", "pax", "target")

    def __init__(self, pax: Pax, name: bytes = b"", target: bytes = b"") -> None:
        self.pax = pax
        self.name = name
        self.target = target

    def and_then(self, kind: bytes, data: bytes, budget: Budget) -> _Before:
        """Return a copy that also has the fields of one more header."""
        if kind == b"x":
            return _Before(_pax(data, budget), self.name, self.target)
        text = data.partition(b"\0")[0]
        if kind == b"L":
            return _Before(self.pax, text, self.target)
        if kind == b"K":
            return _Before(self.pax, self.name, text)
        return self  # global headers: they have no field that is needed here


_NOTHING: Final = _Before({})


def _pax(data: bytes, budget: Budget) -> Pax:
    """Return the records of a pax header, ``LENGTH KEY=VALUE`` and a newline, up to the first
    malformed one.
    """
    found: Pax = {}
    extents: list[bytes] = []
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + _DIGITS_MAX + 1)
        length = _decimal(data[at:space], 0) if space > 0 else 0
        if not length or length <= space - at or at + length > len(data):
            break
        budget.charge(1)
        key, equals, value = data[space + 1 : at + length - 1].partition(b"=")
        if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
            extents.append(value)  # the only keys that may repeat
        elif equals:
            found[key] = value
        at += length
    if extents:
        found.setdefault(_SPARSE_MAP, b",".join(extents))
    return found


# --- sparse files --------------------------------------------------------------------------------


def _old_sparse(source: ByteStream, header: bytes) -> tuple[int, Extents]:
    """Return size and extents of a sparse file in the old format of GNU tar.

    The header has the first extents, and blocks after it have the others.
    """
    extents = _entries(header, 386, 4)
    more = header[482]
    while more:
        block = exactly(source, BLOCK, "a sparse file")
        source.budget.charge(2 * _EXTENTS_OF_BLOCK)
        extents += _entries(block, 0, _EXTENTS_OF_BLOCK)
        more = block[504]
        if len(extents) > _EXTENTS_MAX:
            raise Damaged("a sparse file of too many pieces")
    return _number(header[483:495]), tuple(extents)


def _entries(block: bytes, at: int, count: int) -> list[tuple[int, int]]:
    entries = []
    for start in range(at, at + count * 24, 24):
        if not block[start]:
            break
        entries.append(
            (_number(block[start : start + 12]), _number(block[start + 12 : start + 24]))
        )
    return entries


def _pax_sparse(source: ByteStream, pax: Pax, end: int) -> tuple[int, Extents]:
    """Return size and extents of a sparse file in the pax formats of GNU tar, 0.0 to 1.0.

    In format 1.0 the extents precede the content; they are read from ``source``, up to ``end``.
    """
    if pax.get(b"GNU.sparse.major") != b"1":
        numbers = [_decimal(text, -1) for text in pax[_SPARSE_MAP].split(b",", 2 * _EXTENTS_MAX)]
        size = _decimal(pax.get(b"GNU.sparse.size"), -1)
    else:
        numbers = _leading_numbers(source, end)
        size = _decimal(pax.get(b"GNU.sparse.realsize"), -1)
    source.budget.charge(len(numbers))
    return size, tuple(zip(numbers[::2], numbers[1::2], strict=False))


def _leading_numbers(source: ByteStream, end: int) -> list[int]:
    """Read lines of one number each, in whole blocks; the first is the number of pairs
    that follow.
    """
    lines: list[bytes] = []
    rest, wanted = b"", 1
    while len(lines) < wanted:
        if len(rest) > _DIGITS_MAX or source.position + BLOCK > end:
            raise Damaged("a sparse file without a list of its pieces")
        *whole, rest = (rest + exactly(source, BLOCK, "a sparse file")).split(b"\n")
        lines += whole
        if lines and wanted == 1:
            pairs = _decimal(lines[0], -1)
            if not 0 <= pairs <= _EXTENTS_MAX:
                raise Damaged("a sparse file of too many pieces")
            wanted += 2 * pairs
    return [_decimal(line, -1) for line in lines[1:wanted]]


def _check_extents(extents: Extents, size: int, stored: int) -> None:
    """Raise `Damaged` unless extents are in order, within the file, and cover all stored bytes."""
    at = total = 0
    for offset, length in extents:
        if offset < at or length < 0:
            raise Damaged("a sparse file whose pieces are not in order")
        at = offset + length
        total += length
    if at > size or size > _SIZE_MAX or total != stored:
        raise Damaged("a sparse file whose pieces are not all of it")
