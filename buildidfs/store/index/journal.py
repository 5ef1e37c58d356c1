# SPDX-License-Identifier: Apache-2.0
"""The journal: which build ID was at which path, for which container, and when.

A profile or a core file says (time, mount namespace, path); the journal answers with the build ID
that was seen there then, also where the bytes were gone before they could be taken.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from buildidfs.errors import IntegrityError
from buildidfs.model import fingerprint
from buildidfs.store import location_rows, schema
from buildidfs.store.index.queries import prefixed, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.model import BuildId, Origin
    from buildidfs.store.index.environment import Environment, Txn
    from buildidfs.store.location_rows import JournalRecord
    from buildidfs.store.values import NewSeen

#: Rows read in one transaction.
_ROWS = 1024

_MAX_TIME = 2**63 - 1


class Journal:
    """Reads of the journal."""

    def __init__(self, environment: Environment) -> None:
        self._env = environment
        self._rows = environment.tables["journal"]
        self._recent = environment.tables["recent"]

    def since(self, since_ns: int = 0) -> Iterator[JournalRecord]:
        """Rows last seen at ``since_ns`` or later, in order of last seen.

        No transaction is held while the caller works: what is seen again meanwhile comes again.
        """
        start = schema.U64.pack(_clamped(since_ns))
        while True:
            records, last = self._batch(start)
            yield from records
            if last is None:
                return
            start = last + b"\0"

    @whole
    def last(self) -> JournalRecord | None:
        """The row that was last seen last."""
        with self._env.read() as txn, txn.cursor(self._recent) as cursor:
            if not cursor.last():
                return None
            key = cursor.key()[8:]
            value = txn.get(key, db=self._rows)
        if value is None:
            raise IntegrityError(f"the journal has no row {key.hex()}")
        return location_rows.unpack_journal(key, value)

    @whole
    def _batch(self, start: bytes) -> tuple[list[JournalRecord], bytes | None]:
        """Some rows from the key ``start`` of *recent* on; and its last key, None at the end."""
        with self._env.read() as txn:
            keys = [key for key, _ in islice(prefixed(txn, self._recent, b"", start), _ROWS)]
            rows = [(key[8:], txn.get(key[8:], db=self._rows)) for key in keys]
        records = []
        for key, value in rows:
            if value is None:
                raise IntegrityError(f"the journal has no row {key.hex()}")
            records.append(location_rows.unpack_journal(key, value))
        return records, keys[-1] if len(keys) == _ROWS else None

    @whole
    def at(
        self, mnt_ns_id: int | None, path: bytes, boot: bytes | None = None
    ) -> list[JournalRecord]:
        """The rows of a path in a mount namespace or (None) in any, last seen first.

        ``boot`` is a boot ID; None looks at all boots, among which the number is ambiguous.
        """
        if mnt_ns_id is None:
            prefix = fingerprint(path)
        else:
            prefix = location_rows.journal_prefix(path, mnt_ns_id, boot)
        with self._env.read() as txn:
            rows = list(prefixed(txn, self._rows, prefix))
        records = [location_rows.unpack_journal(key, value) for key, value in rows]
        # A hash stands for the path.
        return _last_first(record for record in records if record.path == path)

    @whole
    def of(self, build_id: BuildId) -> list[JournalRecord]:
        """Where a build ID was seen, last seen first; looks at every row."""
        wanted = bytes(build_id)
        found: list[JournalRecord] = []
        start = b""
        while True:
            with self._env.read() as txn:
                rows = list(islice(prefixed(txn, self._rows, b"", start), _ROWS))
            # Most rows are not worth decoding.
            found += [location_rows.unpack_journal(key, row) for key, row in rows if wanted in row]
            if len(rows) < _ROWS:
                return _last_first(record for record in found if record.build_id == build_id)
            start = rows[-1][0] + b"\0"


class JournalWriter:
    """The entries of one write transaction."""

    def __init__(self, environment: Environment, txn: Txn) -> None:
        from buildidfs.linux import statx

        self._txn = txn
        self._rows = environment.tables["journal"]
        self._recent = environment.tables["recent"]
        self._boot = statx.boot_id()
        self._count: int = txn.stat(self._rows)["entries"]
        self._labels: dict[bytes, str | None] = {}
        self.noted = 0
        """Files that are in the journal now, and not in the store, since there was no room."""

    def add(self, entries: Iterable[NewSeen]) -> None:
        """Write what is not known, or was last seen more than a minute ago."""
        for new in entries:
            self._add(new)

    def _add(self, new: NewSeen) -> None:
        origin, seen = new.sighting.origin, _clamped(new.sighting.seen_ns)
        boot = self._boot if new.boot is None else new.boot
        key = location_rows.journal_key(origin, new.build_id, boot, self._label(origin))
        old = self._txn.get(key, db=self._rows)
        if old is None:
            row = location_rows.pack_journal(origin, new.build_id, seen, seen, noted=new.noted)
            self._put(key, row, seen)
            self._count += 1
            self.noted += new.noted
            if self._count > schema.MAX_JOURNAL:
                self._drop_oldest()
            return
        first, last = location_rows.TIMES.unpack_from(old)
        newly = new.noted and not location_rows.is_noted(old)
        self.noted += newly
        if seen < first:
            # Of sightings within a minute the first describes the row. They are not committed in
            # their order: a scan of a process may overtake the catch that led to it.
            row = location_rows.TIMES.pack(seen, last) + old[location_rows.TIMES.size :]
            is_soon = last < seen + schema.LAST_SEEN_SLACK_NS
            if newly or (is_soon and new.noted == location_rows.is_noted(old)):
                row = location_rows.pack_journal(origin, new.build_id, seen, last, noted=new.noted)
            self._txn.put(key, row, db=self._rows)
        elif seen >= last + schema.LAST_SEEN_SLACK_NS or newly:
            self._txn.delete(schema.U64.pack(last) + key, db=self._recent)
            seen = max(seen, last)
            row = location_rows.pack_journal(origin, new.build_id, first, seen, noted=new.noted)
            self._put(key, row, seen)

    def _label(self, origin: Origin) -> str | None:
        """The label of the container that the control group tells under any definition."""
        if not origin.apart:
            return None
        try:
            return self._labels[origin.cgroup]
        except KeyError:
            from buildidfs.formats.container import cgroup

            label = self._labels[origin.cgroup] = cgroup.container_label(origin.cgroup)
            return label

    def _put(self, key: bytes, row: bytes, last: int) -> None:
        self._txn.put(key, row, db=self._rows)
        self._txn.put(schema.U64.pack(last) + key, b"", db=self._recent)

    def _drop_oldest(self) -> None:
        """Make room: the row last seen longest ago goes."""
        with self._txn.cursor(self._recent) as cursor:
            if not cursor.first():
                return
            order = cursor.key()
        self._txn.delete(order, db=self._recent)
        self._txn.delete(order[8:], db=self._rows)
        self._count -= 1


def _last_first(records: Iterable[JournalRecord]) -> list[JournalRecord]:
    return sorted(records, key=lambda record: (-record.last_seen_ns, -record.first_seen_ns))


def _clamped(ns: int) -> int:
    """A time that fits the row, whatever the clock says."""
    return min(max(ns, 0), _MAX_TIME)
