# SPDX-License-Identifier: Apache-2.0
"""Rules for rows about places: origins, paths, names, memo, journal; see `faults`.

The docstring of a rule is the statement that must be true of each row.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final

from buildidfs.model import BuildId
from buildidfs.store import location_rows, schema
from buildidfs.store.fsck.faults import Fault, Rows, lacking, stray
from buildidfs.store.index.locations import MAX_LABEL, NAMES, ROOT, link_key
from buildidfs.store.index.queries import DAMAGE
from buildidfs.store.location_rows import (
    ContainerRow,
    offset_of,
    pack_container,
    unpack_container,
    unpack_entry,
)
from buildidfs.store.write.locations import PathWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.store.fsck.faults import Mending, Rows, Rule

_MEMO_HEAD: Final = schema.SEEN.size
_DIGEST_BYTES: Final = 32


def origins(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """The build ID of an origin exists and has, or had, its blob; the key is right for the row."""
    digest = location_rows.place_of(key, value)
    if not rows.is_there(key[:8]):
        yield stray(f"origin {key.hex()} is of an unknown build ID", "origins", key, digest=digest)
        return
    if digest is None:
        yield Fault(
            f"origin {key.hex()} is not where it should be",
            mend=lambda mending: _drop_origin(mending, key),
        )
        return
    row = rows.get("digests", digest)
    known = row is not None and schema.has_ref(row, key[:8])
    if not known and rows.get("gone", key[:8]) is None:
        yield Fault(
            f"origin {key.hex()} is of a blob that its build ID does not have",
            digest,
            mend=lambda mending: _drop_origin(mending, key),
        )


def _drop_origin(mending: Mending, key: bytes) -> None:
    mending.delete("origins", key)
    count = sum(1 for _ in mending.having("origins", key[:8]))
    mending.change_named(int.from_bytes(key[:8], "big"), origins=count)


def names(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A name in a directory leads to a path, and this path has the name."""
    number = value[:4]
    if value[4:] not in (b"", schema.PUBLIC):
        raise ValueError("of another length")
    if rows.get("paths", number) != key:
        yield stray(f"name {key.hex()} leads to a path that has another", "names", key)


def paths(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """The parent of a path exists, and lists the path."""
    (number,) = schema.U32.unpack(key)
    if not 0 < number <= schema.MAX_NUMBER:
        raise ValueError("there is no such number")
    (parent,) = schema.U32.unpack_from(value)
    if number >= rows.said.next_path:
        yield Fault(
            f"the next path would be {rows.said.next_path}, but {number} is used",
            mend=lambda mending: mending.count_up(next_path=number + 1),
        )
    is_orphan = parent >= number or (parent != ROOT and rows.get("paths", value[:4]) is None)
    if is_orphan and parent != NAMES:
        yield Fault(
            f"path {number} has no parent", mend=lambda mending: _drop_path(mending, key, value)
        )
        return
    there = rows.get("names", value)
    if there is None or there[:4] != key:
        yield Fault(
            f"path {number} is not in its parent",
            mend=lambda mending: _name_path(mending, key, value, there),
        )


def _drop_path(mending: Mending, key: bytes, value: bytes) -> None:
    mending.delete("paths", key)
    if (mending.get("names", value) or b"")[:4] == key:
        mending.delete("names", value)


def _name_path(mending: Mending, key: bytes, value: bytes, there: bytes | None) -> None:
    """Make the parent lead to a path, unless the name belongs to another path there."""
    if there is not None and mending.get("paths", there[:4]) == value:
        mending.delete("paths", key)
    elif 4 < len(value) <= 4 + 255:
        mending.put("names", value, key)
    else:
        mending.delete("paths", key)


def pathids(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A path and a build ID that was seen there both exist."""
    if value not in (b"", schema.PUBLIC):
        raise ValueError("of another length")
    return _hanging("pathids", rows, key)


def nameids(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A file name and a build ID that has it both exist; `wrong` checks the counts of names."""
    schema.U16.unpack_from(value)
    if value[schema.U16.size :] not in (b"", schema.PUBLIC):
        raise ValueError("of another length")
    yield from _hanging("nameids", rows, key)
    path = rows.get("paths", key[:4])
    if path is not None and path[:4] != schema.U32.pack(NAMES):
        yield stray(
            f"what hangs from path {key[:4].hex()} as from a name hangs from none", "nameids", key
        )


def _hanging(table: str, rows: Rows, key: bytes) -> Iterator[Fault]:
    number, ordinal = schema.PATH_ORDINAL.unpack(key)
    if rows.get("paths", key[:4]) is None:
        what = f"path {number} does not exist, and build ID number {ordinal} hangs from it"
    elif not rows.is_there(key[4:]):
        what = f"an unknown build ID number {ordinal} hangs from path {number}"
    else:
        return
    yield stray(what, table, key)


def dwz(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A name below /.dwz/ belongs to a build ID."""
    referred = schema.DwzRow.unpack(key, value).referred
    is_id = not referred or BuildId.MIN_BYTES <= len(referred) <= BuildId.MAX_BYTES
    if not rows.is_there(value[:8]) or not is_id:
        yield stray(f"/.dwz/ name {key!r} is of an unknown build ID", "dwz", key)


def seen(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A row of the memo has the length that belongs to its tag."""
    _, tag = schema.SEEN.unpack_from(value)
    length = len(value) - _MEMO_HEAD
    if len(key) != 16 or length != (0 if tag else _DIGEST_BYTES):
        raise ValueError("of another length")
    yield from ()


def journal(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A row of the journal has its row in *recent*."""
    record = location_rows.unpack_journal(key, value)
    if record.last_seen_ns < record.first_seen_ns:
        first = record.last_seen_ns
        row = location_rows.TIMES.pack(first, first) + value[location_rows.TIMES.size :]
        yield lacking(
            f"journal row {key.hex()} was last seen before it was first seen", "journal", key, row
        )
    order = schema.U64.pack(record.last_seen_ns) + key
    if rows.get("recent", order) is None:
        yield lacking(
            f"journal row {key.hex()} has no place in the order of time", "recent", order, b""
        )


def recent(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A row of *recent* leads to a row of the journal."""
    row = rows.get("journal", key[8:])
    if row is None or row[8:16] != key[:8]:
        yield stray(
            f"the order of time has a place for journal row {key[8:].hex()} that is not its own",
            "recent",
            key,
        )


def containers(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A container has a name, and the name leads to the container."""
    (number,) = schema.U32.unpack(key)
    container, row = unpack_container(number, value)
    if not 0 < number <= schema.MAX_CONTAINER or not 0 < len(container.name) <= MAX_LABEL:
        raise ValueError("no number, or no name, of a container")
    if number >= rows.said.next_container:
        yield Fault(
            f"the next container would be {rows.said.next_container}, but {number} is used",
            mend=lambda mending: mending.count_up(next_container=number + 1),
        )
    if container.first_seen_ns > container.last_seen_ns:
        both = pack_container(container.last_seen_ns, container.last_seen_ns, row)
        yield lacking(
            f"container {number} was last seen before it was first seen", "containers", key, both
        )
    there = rows.get("labels", container.name)
    if there == key:
        return
    other = None if there is None else _container_row(rows, there)
    if other is None or other.name != container.name:
        yield lacking(
            f"container {number} is not found under its name", "labels", container.name, key
        )
    else:
        yield stray(f"container {number} has the name of another", "containers", key)


def _container_row(rows: Rows, key: bytes) -> ContainerRow | None:
    """Return the row of a container; None if it is missing or does not decode."""
    value = rows.get("containers", key)
    try:
        return None if value is None else unpack_container(0, value)[1]
    except DAMAGE:
        return None


def labels(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A name of a container leads to a container that has this name."""
    schema.U32.unpack(value)
    row = _container_row(rows, value)
    if row is None or key not in (row.name, link_key(row.names)):
        yield stray(
            f"name {key!r} leads to a container that there is not, or has another", "labels", key
        )


def contents(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """An entry of a container has the key of its name. Its artifact may be gone."""
    entry, container = unpack_entry(key, value), _container_row(rows, key[:4])
    below = int.from_bytes(key[4:8], "big")
    if (
        container is None
        or entry.offset != offset_of(entry.name)
        or 0 < entry.directory <= below  # numbers are given from the root down
        or entry.directory > schema.MAX_CONTAINER
    ):
        yield stray(
            f"row {key.hex()} of contents is of no container, or not where its name belongs",
            "contents",
            key,
        )
    elif max(entry.directory, below) >= container.next_directory:
        yield Fault(
            f"the next directory of container {key[:4].hex()} would be one that it has",
            mend=lambda mending: _number_directory(mending, key[:4], max(entry.directory, below)),
        )


def history(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """The check at the end of a row of the history is right. No other row depends on the row."""
    schema.unpack_history(key, value)
    yield from ()


def _number_directory(mending: Mending, key: bytes, used: int) -> None:
    first, last = location_rows.TIMES.unpack_from(mending.get("containers", key) or b"")
    row = _container_row(mending, key)
    if row is not None:
        row.next_directory = max(row.next_directory, used + 1)
        mending.put("containers", key, pack_container(first, last, row))


RULES: Final[dict[str, Rule]] = {
    "origins": origins,
    "names": names,
    "paths": paths,
    "pathids": pathids,
    "nameids": nameids,
    "dwz": dwz,
    "seen": seen,
    "journal": journal,
    "recent": recent,
    "containers": containers,
    "labels": labels,
    "contents": contents,
    "history": history,
}


def wrong(moment: Rows) -> Iterator[Fault]:
    """Yield file names and containers whose counts are wrong at one moment."""
    if _names_differ(moment):
        yield Fault("file names of paths are counted wrongly", mend=_name_again)
    for key, there in _wrong_entries(moment):
        number = int.from_bytes(key, "big")
        text = f"rows of container {number} are counted wrongly"
        yield Fault(text, mend=partial(_put_entries, key=key, there=there))


def _names_differ(moment: Rows) -> bool:
    """Return True if a path lacks its file name, or the numbers of names and paths differ."""
    names = paths = 0
    for _, value in moment.having("nameids", b""):
        names += int.from_bytes(value[:2], "big")
    prefix = schema.U32.pack(NAMES)
    for number, rows in groupby(moment.having("pathids", b""), lambda row: row[0][:4]):
        path = moment.get("paths", number)
        name = None if path is None else moment.get("names", prefix + path[4:])
        for key, _ in rows:
            paths += 1
            if path is not None and (
                name is None or moment.get("nameids", name[:4] + key[4:]) is None
            ):
                return True
    return names != paths


def _name_again(mending: Mending) -> None:
    """Make all rows of *nameids* again."""
    for key in [key for key, _ in mending.having("nameids", b"")]:
        mending.delete("nameids", key)
    writer = PathWriter(mending.env, mending.txn, mending.counters)
    for key, value in list(mending.having("pathids", b"")):
        path = mending.get("paths", key[:4])
        if path is not None:
            writer.add_name(int.from_bytes(key[4:], "big"), path[4:], public=bool(value))


def _wrong_entries(moment: Rows) -> Iterator[tuple[bytes, int]]:
    """Yield the keys of containers with a wrong count of entries, and the right count."""
    there = {
        number: sum(1 for _ in rows)
        for number, rows in groupby(moment.having("contents", b""), lambda row: row[0][:4])
    }
    for key, value in moment.having("containers", b""):
        try:
            row = unpack_container(0, value)[1]
        except DAMAGE:
            continue  # the fault of another rule
        if row.entries != there.get(key, 0):
            yield key, there.get(key, 0)


def _put_entries(mending: Mending, key: bytes, there: int) -> None:
    value = mending.get("containers", key) or b""
    first, last = location_rows.TIMES.unpack_from(value)
    row = unpack_container(0, value)[1]
    row.entries = there
    mending.put("containers", key, pack_container(first, last, row))
