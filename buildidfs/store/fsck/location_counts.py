# SPDX-License-Identifier: Apache-2.0
"""What is counted of places, and can only be found wrong by counting all of it; see `check`."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from buildidfs.store.fsck.faults import Fault
from buildidfs.store.index.containers import pack_container, unpack_container
from buildidfs.store.index.paths import NAMES, PathWriter
from buildidfs.store.index.queries import DAMAGE
from buildidfs.store.schema import locations, schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.store.fsck.faults import Mending, Rows


def wrong(moment: Rows) -> Iterator[Fault]:
    """What is counted wrongly of file names and of containers, at one moment."""
    if _names_differ(moment):
        yield Fault("file names of paths are counted wrongly", mend=_name_again)
    for key, there in _wrong_entries(moment):
        number = int.from_bytes(key, "big")
        text = f"rows of container {number} are counted wrongly"
        yield Fault(text, mend=partial(_put_entries, key=key, there=there))


def _names_differ(moment: Rows) -> bool:
    """Whether a path has no file name to be found by, or there are more or fewer than paths."""
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
    """Keys of containers that have another number of rows than is counted, and that."""
    there = {
        number: sum(1 for _ in rows)
        for number, rows in groupby(moment.having("contents", b""), lambda row: row[0][:4])
    }
    for key, value in moment.having("containers", b""):
        try:
            row = unpack_container(0, value)[1]
        except DAMAGE:
            continue  # which a rule tells of
        if row.entries != there.get(key, 0):
            yield key, there.get(key, 0)


def _put_entries(mending: Mending, key: bytes, there: int) -> None:
    value = mending.get("containers", key) or b""
    first, last = locations.TIMES.unpack_from(value)
    row = unpack_container(0, value)[1]
    row.entries = there
    mending.put("containers", key, pack_container(first, last, row))
