# SPDX-License-Identifier: Apache-2.0
"""Writes of the variants of an artifact, and the choice of the served one."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.errors import IntegrityError
from buildidfs.model import Artifact, Kind, Origin, Standing, Trust, fingerprint
from buildidfs.store import schema
from buildidfs.store.index.queries import IndexRows, floor_in, prefixed
from buildidfs.store.index.ranking import belief, belief_in, is_withheld, precedence, rank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.model import Digest
    from buildidfs.store.index.environment import Environment, Txn

_READ = 0o444

#: The number of rows among which the lowest floor is replaced if the table is full.
_CANDIDATES: Final = 8


class VariantWriter:
    """Adds, changes and removes variants; the best one of each artifact is always in *artifacts*.

    Withheld debuginfo (`ranking.is_withheld`), and every file of a build ID that unrelated programs
    share, is in *variants* alone. ``changed`` collects the ordinals whose names, attributes or
    served bytes changed.
    """

    def __init__(
        self, environment: Environment, txn: Txn, counters: schema.StoreCounters, changed: set[int]
    ) -> None:
        self._txn = txn
        self._artifacts = environment.tables["artifacts"]
        self._variants = environment.tables["variants"]
        self._ordinals = environment.tables["ordinals"]
        self._ids = environment.tables["ids"]
        self._meta = environment.tables["meta"]
        self._ambiguous = environment.tables["ambiguous"]
        self._adopted = environment.tables["adopted"]
        self._rows = IndexRows(environment, txn)
        self._counters = counters
        self._changed = changed
        #: Blobs that are newly served, or served in another way.
        self.altered: set[Digest] = set()

    def best(self, ordinal: int, kind: int) -> Artifact | None:
        """Return the served variant."""
        value = self._txn.get(schema.ORDINAL_KIND.pack(ordinal, kind), db=self._artifacts)
        return None if value is None else schema.unpack_artifact(ordinal, kind, value)

    def kept(self, ordinal: int, kind: int, variant: int) -> Artifact:
        """Return a variant, served or not, to which a row of *digests* refers."""
        found = self._rows.variant(ordinal, kind, variant)
        if found is None:
            raise IntegrityError(f"the index has no variant {ordinal}/{kind}/{variant}")
        return found

    def add(self, artifact: Artifact) -> None:
        """Record a variant that is not there yet."""
        self.altered.add(artifact.digest)
        if artifact.adopted:
            self._txn.put(schema.U64.pack(artifact.ordinal), b"", db=self._adopted)
        self._place(artifact, self.best(artifact.ordinal, artifact.kind))

    def is_ambiguous(self, ordinal: int) -> bool:
        """Return True if unrelated programs have the build ID, so that nothing is served."""
        return self._rows.is_marked("ambiguous", ordinal)

    def is_adopted(self, ordinal: int) -> bool:
        """Return True if the build ID is the adopted ID of a file."""
        return self._rows.is_marked("adopted", ordinal)

    def make_ambiguous(self, ordinal: int) -> None:
        """Stop serving any file of a build ID."""
        self._txn.put(schema.U64.pack(ordinal), b"", db=self._ambiguous)
        self._changed.add(ordinal)
        for kind in Kind:
            self.choose(ordinal, kind)

    def every(self, ordinal: int, kind: int) -> Iterator[Artifact]:
        """Return the variants of an artifact in no order, served or not."""
        best = self.best(ordinal, kind)
        if best is not None:
            yield best
        rows = prefixed(self._txn, self._variants, schema.ORDINAL_KIND.pack(ordinal, kind))
        for _, value in rows:
            yield schema.unpack_artifact(ordinal, kind, value)

    def change(self, new: Artifact) -> None:
        """Replace the row of a variant by one that is at least as good.

        The caller calls `choose` after it if the row may be better.
        """
        self.altered.add(new.digest)
        best = self.best(new.ordinal, new.kind)
        if best is None or best.variant != new.variant:
            self._txn.delete(_key(new), db=self._variants)
            self._place(new, best)
        elif self._is_withheld(new):
            self._withdraw(new)
            self.choose(new.ordinal, new.kind)
        else:
            self._put_best(new, best)

    def remove(self, ordinal: int, kind: int, variant: int, *, forget: bool = False) -> bool:
        """Remove a variant; return False if no variant of the artifact is served any more.

        Unless ``forget``, an executable leaves a floor behind (see `raise_floor`).
        """
        best = self.best(ordinal, kind)
        self._changed.add(ordinal)
        if best is None or best.variant != variant:
            key = schema.ORDINAL_KIND_VARIANT.pack(ordinal, kind, variant)
            self._txn.delete(key, db=self._variants)
            return best is not None
        self._drop_best(best)
        if kind == Kind.EXECUTABLE and not forget and not best.truncated:
            self._put_floor(self._build_id(ordinal), best.trust, best.standing)
        self.choose(ordinal, kind)
        if self.best(ordinal, kind) is not None:
            return True
        if kind == Kind.EXECUTABLE:
            self.choose(ordinal, Kind.DEBUGINFO)
        return False

    def raise_to(self, ordinal: int, kind: int, variant: int, origin: Origin) -> bool:
        """Raise the trust and standing of a variant to those of the best place at which it was
        seen; return True if they grew.

        Owner and mode come from a place where all users could read the file. Without such a place
        those of the first place stay: of two private places, neither admits all readers of the
        other.
        """
        old = self.kept(ordinal, kind, variant)
        new = old
        grows = precedence(old.kind, Trust(origin.trust), Standing(origin.standing)) > precedence(
            old.kind, old.trust, old.standing
        )
        if grows:
            new = msgspec.structs.replace(
                new, trust=Trust(origin.trust), standing=Standing(origin.standing)
            )
        mode = origin.shown_mode
        if mode & _READ == _READ != old.mode & _READ:
            uid, gid = origin.identity.uid, origin.identity.gid
            new = msgspec.structs.replace(new, mode=mode, uid=uid, gid=gid)
        if new is not old:
            self.change(new)
        return grows

    def choose(self, ordinal: int, kind: int) -> None:
        """Serve the best variant, after a row that it depends on has changed."""
        best, kept = self.best(ordinal, kind), list(self.every(ordinal, kind))
        executable = self._executable(kept[0]) if kept else None
        chosen = min(
            (each for each in kept if not self._is_withheld(each)),
            key=lambda artifact: rank(artifact, executable),
            default=None,
        )
        if chosen is None:
            if best is not None:
                self._withdraw(best)
        elif best is None or chosen.variant != best.variant:
            self._txn.delete(_key(chosen), db=self._variants)
            if best is not None:
                self._put(best)
            self._put_best(chosen, best)

    def raise_floor(self, build_id: bytes, trust: Trust, standing: Standing) -> None:
        """From now on withhold debuginfo of a build ID with less belief than a place.

        The place is that of an executable which is not in the store, or of debuginfo that refers to
        the build ID. A place with less belief than a package has no effect.
        """
        value = self._txn.get(build_id, db=self._ids)
        if not self._put_floor(build_id, trust, standing) or value is None:
            return
        ordinal = int.from_bytes(value, "big")
        self._changed.add(ordinal)  # a package of split DWARF may be withheld, too
        self.choose(ordinal, Kind.DEBUGINFO)

    def forget_floor(self, ordinal: int) -> None:
        """Allow all debuginfo of a build ID to be served again."""
        self._txn.delete(schema.floor_key(self._build_id(ordinal)), db=self._meta)
        self.choose(ordinal, Kind.DEBUGINFO)

    def _put_floor(self, build_id: bytes, trust: Trust, standing: Standing) -> bool:
        """Write a floor; return False if the present one is at least as high."""
        key = schema.floor_key(build_id)
        if trust < Trust.PACKAGE or not build_id:
            return False
        if floor_in(key, self._txn.get(key, db=self._meta)) >= belief_in(trust, standing):
            return False
        self._txn.put(key, schema.pack_floor(key, trust, standing), db=self._meta)
        if self._txn.stat(self._meta)["entries"] > schema.MAX_FLOORS:
            place = fingerprint(key)  # random: the lowest of a few floors from there on goes
            prefix = schema.FLOOR_PREFIX
            rows: list[tuple[bytes, bytes]] = []
            for start in (prefix + place, prefix):
                found = prefixed(self._txn, self._meta, prefix, start)
                rows += itertools.islice(found, _CANDIDATES - len(rows))
            self._txn.delete(min(rows, key=lambda row: floor_in(*row))[0], db=self._meta)
        return True

    def _build_id(self, ordinal: int) -> bytes:
        value = self._txn.get(schema.U64.pack(ordinal), db=self._ordinals)
        return b"" if value is None else value[schema.NAME_AT :]

    def _is_withheld(self, artifact: Artifact) -> bool:
        if self.is_ambiguous(artifact.ordinal):
            return True
        if artifact.kind is not Kind.DEBUGINFO:
            return False
        floor = self._rows.floor(artifact.ordinal)
        return is_withheld(artifact, self._executable(artifact), floor)

    def _place(self, artifact: Artifact, best: Artifact | None) -> None:
        """Write the row of a new variant; ``best`` is the one that is served."""
        executable = self._executable(artifact)
        if self._is_withheld(artifact):
            self._put(artifact)
        elif best is None:
            self._put_best(artifact, None)
        elif rank(artifact, executable) < rank(best, executable):
            self._put(best)
            self._put_best(artifact, best)
        else:
            self._put(artifact)

    def _executable(self, artifact: Artifact) -> Artifact | None:
        """Return the executable that `rank` needs for debuginfo; None for other kinds."""
        if artifact.kind != Kind.DEBUGINFO:
            return None
        return self.best(artifact.ordinal, Kind.EXECUTABLE)

    def _put_best(self, artifact: Artifact, before: Artifact | None) -> None:
        key = schema.ORDINAL_KIND.pack(artifact.ordinal, artifact.kind)
        self._txn.put(key, schema.pack_artifact(artifact), db=self._artifacts)
        self._changed.add(artifact.ordinal)
        if before is None:
            self._counters.artifacts[artifact.kind - 1] += 1
            self._note(artifact.ordinal)
        if artifact.kind is Kind.EXECUTABLE and (
            before is None or _weight(before) != _weight(artifact)
        ):
            self._lift_floor(artifact)
            self.choose(artifact.ordinal, Kind.DEBUGINFO)

    def _lift_floor(self, executable: Artifact) -> None:
        """Drop the floor of a build ID if a served executable has as much belief."""
        key = schema.floor_key(self._build_id(executable.ordinal))
        value = self._txn.get(key, db=self._meta)
        if value is None or executable.truncated or floor_in(key, value) > belief(executable):
            return
        self._txn.delete(key, db=self._meta)

    def _drop_best(self, best: Artifact) -> None:
        key = schema.ORDINAL_KIND.pack(best.ordinal, best.kind)
        self._txn.delete(key, db=self._artifacts)
        self._counters.artifacts[best.kind - 1] -= 1
        self._note(best.ordinal)

    def _withdraw(self, best: Artifact) -> None:
        """Move the served file to *variants*, so that it is not served any more."""
        self._put(best)
        self._drop_best(best)

    def _note(self, ordinal: int) -> None:
        """Record which kinds are served in *ordinals*; the row of a new build ID is written
        later.
        """
        if (named := self._rows.named(ordinal)) is None:
            return
        before, named.kinds = named.kinds, self._rows.kinds(ordinal)
        if named.kinds != before:
            self._rows.put_named(ordinal, named)

    def _put(self, artifact: Artifact) -> None:
        self._changed.add(artifact.ordinal)
        self._txn.put(_key(artifact), schema.pack_artifact(artifact), db=self._variants)


def _weight(executable: Artifact) -> tuple[int, int, bool, int]:
    """Return the fields of an executable that decide which debuginfo is served."""
    return executable.trust, executable.standing, executable.truncated, executable.segments


def most_variants(trust: Trust) -> int:
    """Return the last number that a variant from a place with that trust may get."""
    if trust is Trust.HOST:
        return schema.MAX_VARIANT
    return min(schema.MAX_VARIANT, schema.MAX_FOREIGN_VARIANT)


def _key(artifact: Artifact) -> bytes:
    return schema.ORDINAL_KIND_VARIANT.pack(artifact.ordinal, artifact.kind, artifact.variant)
