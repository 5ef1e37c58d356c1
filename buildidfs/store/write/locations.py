# SPDX-License-Identifier: Apache-2.0
"""Writes of the places that files were seen at, in one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from buildidfs.model import Kind, Sighting
from buildidfs.store import location_rows, schema
from buildidfs.store.index.paths import PATH_KINDS, PathWriter
from buildidfs.store.index.queries import DAMAGE, prefixed
from buildidfs.store.write.containers import NOTHING_CALLED, ContainerWriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from buildidfs.model import BuildId, ContainerNames, Digest, Origin
    from buildidfs.store.index.environment import Environment, Txn


class PlaceWriter:
    """Writes origins, and what is found by place: paths, names below /.dwz/, containers.

    ``changed`` gets the ordinals that have names they did not have, ``called`` is for
    `ContainerWriter`. Call `finish` last.
    """

    def __init__(
        self,
        environment: Environment,
        txn: Txn,
        counters: schema.Counters,
        changed: set[int],
        called: Mapping[bytes, ContainerNames] = NOTHING_CALLED,
    ) -> None:
        self._txn = txn
        self._changed = changed
        self._origins = environment.tables["origins"]
        self._dwz = environment.tables["dwz"]
        self._paths = PathWriter(environment, txn, counters)
        self._containers = ContainerWriter(environment, txn, counters, called)

    def see(
        self,
        digest: Digest,
        refs: Sequence[tuple[int, int, int]],
        named: schema.OrdinalRow,
        sighting: Sighting,
        *,
        recognised: bool,
    ) -> bool:
        """Bytes that are these artifacts of one build ID were seen; True at a new place.

        ``named`` is counted up. ``recognised`` says that access to the file was not looked at.
        """
        origin, ordinal = sighting.origin, refs[0][0]
        kinds = schema.mask_of(tuple(Kind(kind) for _, kind, _ in refs))
        key = location_rows.origin_key(ordinal, digest, origin)
        old = self._txn.get(key, db=self._origins)
        if recognised and not origin.reach and old is not None:
            origin = msgspec.structs.replace(origin, reach=location_rows.reach_in(old))
        public = origin.is_public
        primary = bool(kinds & PATH_KINDS)
        if self._paths.add(named, ordinal, origin.path, primary=primary, public=public):
            self._changed.add(ordinal)
        self._put_origin(key, old, digest, kinds, named, Sighting(origin, sighting.seen_ns))
        self._add_dwz(ordinal, named, origin, old is None)
        self._containers.see(sighting, min(refs), public=public)
        return old is None

    def refer(self, ordinal: int, path: bytes, supplement: BuildId, origin: Origin) -> None:
        """Debuginfo refers to a dwz file by its path, and was seen at ``origin``.

        The name that a dwz file was seen under comes first. References in files that not everybody
        can read are not recorded, since everybody would be told of them.
        """
        name = location_rows.dwz_name(path)
        if not name or not origin.is_public:
            return
        old = self._txn.get(name, db=self._dwz)
        before = None if old is None else _dwz_row(name, old)
        believed = origin.trust, origin.standing
        if before is not None and (not before.referred or before.believed > believed):
            return
        value = schema.DwzRow(ordinal, *believed, True, supplement).pack(name)
        if value != old:
            self._txn.put(name, value, db=self._dwz)

    def finish(self) -> None:
        """Write what is written once."""
        self._containers.finish()

    def _put_origin(
        self,
        key: bytes,
        old: bytes | None,
        digest: Digest,
        kinds: int,
        named: schema.OrdinalRow,
        sighting: Sighting,
    ) -> None:
        first = last = sighting.seen_ns
        if old is not None:
            times = location_rows.TIMES.unpack_from(old)
            first, last = min(first, times[0]), max(last, times[1])
        elif named.origins >= schema.MAX_ORIGINS:
            self._drop_origin(key[:8])
        else:
            named.origins += 1
        value = location_rows.pack_origin(digest, kinds, sighting.origin, first, last)
        self._txn.put(key, value, db=self._origins)

    def _drop_origin(self, ordinal: bytes) -> None:
        """Make room: not the first seen goes, but of the others the one last seen longest ago."""
        rows = prefixed(self._txn, self._origins, ordinal)
        times = [(*location_rows.TIMES.unpack_from(value), key) for key, value in rows]
        times.remove(min(times))
        self._txn.delete(min(times, key=lambda row: row[1])[2], db=self._origins)

    def _add_dwz(
        self, ordinal: int, named: schema.OrdinalRow, origin: Origin, new_origin: bool
    ) -> None:
        name = location_rows.dwz_name(origin.path)
        if not name:
            return
        old = self._txn.get(name, db=self._dwz)
        believed, public = (origin.trust, origin.standing), origin.is_public
        if old is None and named.origins >= schema.MAX_ORIGINS:
            return  # a container can make any number of links to one file
        before = None if old is None else _dwz_row(name, old)
        if before is not None:
            is_later = new_origin or bool(before.referred)
            if before.ordinal == ordinal and not before.referred:
                believed = max(believed, before.believed)
                public = public or before.public
            elif believed < before.believed or (believed == before.believed and not is_later):
                return
        value = schema.DwzRow(ordinal, *believed, public).pack(name)
        if value != old:
            self._txn.put(name, value, db=self._dwz)
            self._changed.add(ordinal)


def _dwz_row(name: bytes, value: bytes) -> schema.DwzRow | None:
    """A row of *dwz*; None if it is damaged, which is for `check` to tell of."""
    try:
        return schema.DwzRow.unpack(name, value)
    except DAMAGE:
        return None
