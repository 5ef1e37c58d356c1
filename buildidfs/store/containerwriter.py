# SPDX-License-Identifier: Apache-2.0
"""The files of containers in one write transaction: what comes and what goes. See `containers`."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from buildidfs.formats import cgroup
from buildidfs.model import Kind
from buildidfs.store import schema
from buildidfs.store.containers import (
    KEY,
    MAX_CONTAINERS,
    MAX_CONTENTS,
    MAX_ENTRIES,
    ROOT,
    VALUE,
    ContainerRow,
    as_bytes,
    image_of,
    names_of,
    offset_of,
    pack_container,
    token_of,
    unpack_container,
)
from buildidfs.store.index import prefixed
from buildidfs.store.paths import components
from buildidfs.store.places import TIMES

if TYPE_CHECKING:
    from buildidfs.model import Origin, Sighting
    from buildidfs.store.environment import Environment, Txn

_EVICTED_AT_ONCE: Final = 2048


class ContainerWriter:
    """Writes to the tables within one transaction; call `finish` last."""

    def __init__(self, environment: Environment, txn: Txn, counters: schema.Counters) -> None:
        self._txn = txn
        self._counters = counters
        tables = environment.tables
        self._containers = tables["containers"]
        self._labels = tables["labels"]
        self._contents = tables["contents"]
        self._rows: dict[int, tuple[int, int, ContainerRow]] = {}
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._directories: dict[tuple[int, int, bytes], int] = {}
        self._grown = False

    def see(self, sighting: Sighting, artifact: tuple[int, int, int]) -> None:
        """A file of a container, which is that (ordinal, kind, variant), was seen."""
        origin = sighting.origin
        if not origin.container or artifact[1] > Kind.DEBUGINFO:
            return
        names = components(origin.path)
        if names is None or not origin.path.startswith(b"/"):
            return
        container = self._number(origin)
        if not container:
            return
        first, last, row = self._rows[container]
        seen = min(max(sighting.seen_ns, 0), 2**63 - 1)
        if not first <= seen < last + schema.LAST_SEEN_SLACK_NS:
            self._rows[container] = (min(first, seen), max(last, seen), row)
        directory = ROOT
        for name in names[:-1]:
            directory = self._enter(container, row, directory, name)
            if not directory:
                return
        self._put_file(container, row, directory, names[-1], artifact, schema.stamp_of(seen))

    def finish(self) -> None:
        """Write the rows of containers, and make room if there are too many."""
        for number, (first, last, row) in self._rows.items():
            value = pack_container(first, last, row)
            key = schema.U32.pack(number)
            if self._txn.get(key, db=self._containers) != value:
                self._txn.put(key, value, db=self._containers)
        if self._grown:
            self._make_room()

    # --- containers ------------------------------------------------------------------------

    def _number(self, origin: Origin) -> int:
        """The number of a container, given now if it has none; 0 if all are given out."""
        key = (origin.container, origin.host, origin.mnt_ns_id)
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = self._find(origin)
        return known

    def _find(self, origin: Origin) -> int:
        token = token_of(origin)
        number = 0
        for candidate in names_of(origin, token):
            value = self._txn.get(candidate, db=self._labels)
            if value is None:
                return self._new(candidate, origin)
            number = int.from_bytes(value, "big")
            if number in self._rows:
                row = self._rows[number][2]
            else:
                raw = self._txn.get(value, db=self._containers)
                if raw is None:  # damage, which `check` tells of
                    return self._new(candidate, origin)
                row = unpack_container(number, raw)[1]
                self._rows[number] = (*TIMES.unpack_from(raw), row)
            if not token or row.token in (token, b""):
                break
        return number

    def _new(self, name: bytes, origin: Origin) -> int:
        number = self._counters.next_container
        if number > schema.MAX_CONTAINER:
            return 0
        self._counters.next_container += 1
        key = schema.U32.pack(number)
        image = image_of(origin)
        row = ContainerRow(
            name,
            as_bytes(origin.container),
            as_bytes(cgroup.container_id(origin.cgroup) or origin.container.partition(":")[2]),
            as_bytes(image),
            b"" if image else as_bytes(origin.host),
            token_of(origin),
        )
        self._txn.put(name, key, db=self._labels)
        self._rows[number] = (2**63 - 1, 0, row)
        self._grown = True
        return number

    # --- contents --------------------------------------------------------------------------

    def _enter(self, container: int, row: ContainerRow, directory: int, name: bytes) -> int:
        """The number of a directory in a directory; 0 if there is no room for it."""
        known = self._directories.get((container, directory, name))
        if known is not None:
            return known
        key = KEY.pack(container, directory, offset_of(name))
        value = self._txn.get(key, db=self._contents)
        found = 0 if value is None else VALUE.unpack_from(value)[0]
        if not found:
            # What was a file may be a directory by now.
            if value is None and not self._count_up(row):
                return 0
            found = row.next_directory
            row.next_directory += 1
            self._txn.put(key, VALUE.pack(found, 0, 0, 0, 0) + name, db=self._contents)
        self._directories[container, directory, name] = found
        return found

    def _put_file(
        self,
        container: int,
        row: ContainerRow,
        directory: int,
        name: bytes,
        artifact: tuple[int, int, int],
        stamp: int,
    ) -> None:
        key = KEY.pack(container, directory, offset_of(name))
        old = self._txn.get(key, db=self._contents)
        if old is None:
            if not self._count_up(row):
                return
        else:
            is_directory, *was, then = VALUE.unpack_from(old)
            if is_directory or then > stamp or tuple(was) == artifact:
                return
        self._txn.put(key, VALUE.pack(0, *artifact, stamp) + name, db=self._contents)

    def _count_up(self, row: ContainerRow) -> bool:
        if row.entries >= MAX_ENTRIES or row.next_directory >= schema.MAX_CONTAINER:
            return False
        row.entries += 1
        self._grown = True
        return True

    # --- room ------------------------------------------------------------------------------

    def _make_room(self) -> None:
        count = self._txn.stat(self._containers)["entries"]
        if count <= MAX_CONTAINERS and self._txn.stat(self._contents)["entries"] <= MAX_CONTENTS:
            return
        rows = prefixed(self._txn, self._containers, b"")
        # Not one that was just written: its rows are known here as they were.
        others = (
            (value[8:16], key, value)
            for key, value in rows
            if int.from_bytes(key, "big") not in self._rows
        )
        oldest = min(others, default=None)
        if oldest is None:
            return
        _, key, value = oldest
        contents = prefixed(self._txn, self._contents, key)
        going = [found for found, _ in islice(contents, _EVICTED_AT_ONCE)]
        for found in going:
            self._txn.delete(found, db=self._contents)
        if len(going) < _EVICTED_AT_ONCE:
            row = unpack_container(int.from_bytes(key, "big"), value)[1]
            if self._txn.get(row.name, db=self._labels) == key:
                self._txn.delete(row.name, db=self._labels)
            self._txn.delete(key, db=self._containers)


class ContainerPruner:
    """Takes files out of containers, within one transaction."""

    def __init__(self, environment: Environment, txn: Txn) -> None:
        self._txn = txn
        tables = environment.tables
        self._artifacts = tables["artifacts"]
        self._variants = tables["variants"]
        self._containers = tables["containers"]
        self._labels = tables["labels"]
        self._contents = tables["contents"]

    def drop(self, origin: Origin, ordinal: int) -> None:
        """What a place had of a build ID is removed; directories and containers that are empty
        then go as well.
        """
        names = components(origin.path) if origin.container else None
        if names is None:
            return
        for name in names_of(origin, token_of(origin)):
            number = self._txn.get(name, db=self._labels)
            if number is not None:
                self._drop(number, names, ordinal)

    def _drop(self, container: bytes, names: list[bytes], ordinal: int) -> None:
        number = int.from_bytes(container, "big")
        keys, directory, value = [], ROOT, None
        for name in names:
            keys.append(KEY.pack(number, directory, offset_of(name)))
            value = self._txn.get(keys[-1], db=self._contents)
            if value is None:
                return
            directory = VALUE.unpack_from(value)[0]
        if directory or value is None:
            return
        _, of, kind, variant, _ = VALUE.unpack_from(value)
        if of != ordinal or self._has(of, kind, variant):
            return
        dropped = 0
        for key in reversed(keys):
            dropped += self._txn.delete(key, db=self._contents)
            if next(prefixed(self._txn, self._contents, key[:8]), None) is not None:
                break
        raw = self._txn.get(container, db=self._containers)
        if raw is None:
            return
        row = unpack_container(number, raw)[1]
        if next(prefixed(self._txn, self._contents, container), None) is not None:
            row.entries = max(row.entries - dropped, 0)
            first, last = TIMES.unpack_from(raw)
            self._txn.put(container, pack_container(first, last, row), db=self._containers)
            return
        self._txn.delete(container, db=self._containers)
        if self._txn.get(row.name, db=self._labels) == container:
            self._txn.delete(row.name, db=self._labels)

    def _has(self, ordinal: int, kind: int, variant: int) -> bool:
        best = self._txn.get(schema.ORDINAL_KIND.pack(ordinal, kind), db=self._artifacts)
        if best is not None and int.from_bytes(best[:2], "big") == variant:
            return True
        key = schema.ORDINAL_KIND_VARIANT.pack(ordinal, kind, variant)
        return self._txn.get(key, db=self._variants) is not None
