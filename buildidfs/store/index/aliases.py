# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of aliases. `Aliases.resolve` finds the build ID for any name.

New aliases may show that unrelated programs share a build ID. They may also show that a debug file
without a build ID belongs to the binaries that name it in ``.gnu_debuglink`` with its checksum, or
that an unstripped program without a build ID belongs to its stripped twin.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from buildidfs.errors import ArtifactMissing, InvalidBuildId
from buildidfs.model import Alias, AliasType, BuildId, Digest, Kind
from buildidfs.store import schema
from buildidfs.store.index.queries import IndexRows, prefixed, whole
from buildidfs.store.index.ranking import belief, chosen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from buildidfs.model import Artifact
    from buildidfs.store.index.environment import Environment, Table, Txn
    from buildidfs.store.index.queries import Index

MOST_JOINED: Final = 8
"""The maximum number of blobs or build IDs that are joined because they share an alias."""
_MOST_OF_A_BELIEF: Final = 8
"""The maximum number of blobs of equal belief to which an alias leads, so that containers cannot
hide files of the host behind many files with the same alias.
"""
_SHARED_BY: Final = 3  # two may be a program and a copy that a tool has changed
_LOOKED_AT: Final = 16
_BELIEFS: Final = 8
_MOST: Final = _MOST_OF_A_BELIEF * _BELIEFS
_MOST_BUILD_IDS: Final = 16
_SHA256_DIGITS: Final = 64


class Aliases:
    """Reads of the aliases. A store of an earlier version that is open for reading only
    has none.
    """

    def __init__(self, environment: Environment, index: Index) -> None:
        self._env = environment
        self._index = index
        self._identities = environment.tables.get("identities")
        self._aliases = environment.tables.get("aliases")
        self._adopted = environment.tables.get("adopted")
        self._ambiguous = environment.tables.get("ambiguous")
        self._digests = environment.tables["digests"]

    @whole
    def of(self, digest: Digest) -> tuple[Alias, ...]:
        """Return the aliases of a blob."""
        value = None if self._identities is None else self._env.get(self._identities, digest)
        return () if value is None else schema.unpack_aliases(digest, value)

    @whole
    def blobs(self, kind: AliasType | None, value: bytes) -> list[Digest]:
        """Return a few blobs of each belief that have the alias ``value``, in no order; if ``kind``
        is None, the blob whose SHA-256 is ``value``.
        """
        if kind is None:
            is_there = self._env.get(self._digests, value) is not None
            return [Digest(value)] if is_there else []
        if self._aliases is None or len(value) > schema.MAX_ALIAS:
            return []
        prefix = schema.alias_prefix(Alias(kind, value))
        with self._env.read() as txn:
            keys = [key for key, _ in islice(prefixed(txn, self._aliases, prefix), _MOST)]
        return [schema.alias_of(key)[1] for key in keys]

    @whole
    def ordinals(self, digest: Digest) -> list[int]:
        """Return the ordinals of the build IDs that a blob belongs to; those that serve it come
        first.
        """
        with self._env.read() as txn:
            value = txn.get(digest, db=self._digests)
            if value is None:
                return []
            found = dict.fromkeys(ref[0] for ref in schema.DigestRow.unpack(value).refs)
            return sorted(found, key=lambda ordinal: self._is_ambiguous(txn, ordinal))

    def ordinal(self, text: str) -> int | None:
        """Return the ordinal of the build ID whose files have the alias ``text``; None if no file
        has it.

        If several files have the alias, returns the build ID of the best one.
        """
        found = self.named(text)
        return None if found is None else found[1]

    def named(self, text: str) -> tuple[Digest, int] | None:
        """Return the best blob with the alias ``text``, and the ordinal of its build ID."""
        from buildidfs.formats.elf.other_ids import parse_alias  # `list` does not need it

        known = [
            (artifact, (digest, ordinal))
            for kind, value in parse_alias(text)
            for digest in self.blobs(kind, value)
            for ordinal in self.ordinals(digest)[:1]
            for artifact in self._variants(digest, ordinal)
        ]
        return chosen(known, 1)[0][1] if known else None

    def _variants(self, digest: Digest, ordinal: int) -> Iterator[Artifact]:
        for ref in self._index.variants_with(digest, ordinal):
            if (artifact := self._index.artifact_variant(ordinal, *ref)) is not None:
                yield artifact

    def beginning_with(self, starts: Sequence[bytes]) -> BuildId | None:
        """Return the build ID with one of these beginnings of 16 bytes whose files have the highest
        belief; None if two are equal in that, or if an executable with more belief is gone.

        A beginning ends with zeros if it may be a whole build ID, padded. It may be the hash of the
        code of a file without a build ID, too.
        """
        ordinals = dict.fromkeys(each for start in starts for each in self._with_beginning(start))
        found = self._index.most_believed(ordinals, 2)
        gone = max(map(self._index.highest_floor, starts), default=0)
        if not found or found[0][0] < gone or (found[1:] and found[0][0] == found[1][0]):
            return None
        return self._index.build_id(found[0][1])

    def _with_beginning(self, start: bytes) -> Iterator[int]:
        """Yield the ordinals of the build IDs that a beginning may stand for."""
        for size in range(max(len(start.rstrip(b"\0")), 1), len(start)):
            if (known := self._index.ordinal(start[:size])) is not None:
                yield known
        some = islice(self._index.build_ids_with_prefix(start), _MOST_BUILD_IDS)
        yield from (ordinal for _, ordinal in some)
        for digest in self.blobs(AliasType.BEGINNING, start):
            for ordinal in self.ordinals(digest):
                if (self._index.build_id(ordinal) or b"").startswith(start):
                    yield ordinal
        yield from self._with_text(start)

    def _with_text(self, text: bytes) -> Iterator[int]:
        """Yield the ordinals of programs without a build ID whose code has that hash of Breakpad.
        Of programs with the same code, only the one with most debug information among those with
        the highest belief.
        """
        same: dict[bytes, set[int]] = {}
        for digest in self.blobs(AliasType.TEXT, text):
            code = next(
                (each.value for each in self.of(digest) if each.type is AliasType.CODE), b""
            )
            same.setdefault(code or digest, set()).update(
                filter(self.is_adopted, self.ordinals(digest))
            )
        for ordinals in same.values():
            found = self._index.most_believed(ordinals, _MOST)
            best = [ordinal for worth, ordinal in found if worth == found[0][0]]
            if best:
                yield max(best, key=self._quality)

    def _quality(self, ordinal: int) -> int:
        artifact = self._index.artifact(ordinal, Kind.DEBUGINFO)
        return 0 if artifact is None else artifact.quality

    def resolve(self, text: str) -> tuple[BuildId, Digest | None]:
        """Return the build ID that ``text`` stands for: its first digits, or an alias of a file.

        A SHA-256 names one file, whose digest is returned as well. Raises `InvalidBuildId`,
        `AmbiguousBuildId`, `ArtifactMissing`.
        """
        from buildidfs.formats.elf.other_ids import is_typed

        found = self.named(text) if len(text) == _SHA256_DIGITS or is_typed(text) else None
        if found is None:
            try:
                return self._index.match(text.removeprefix("gnu:")), None
            except (InvalidBuildId, ArtifactMissing):
                found = self.named(text)
                if found is None and is_typed(text):
                    raise ArtifactMissing(f"nothing is known of {text}") from None
                if found is None:
                    raise
        digest, ordinal = found
        build_id = self._index.build_id(ordinal)
        if build_id is None:
            raise ArtifactMissing(f"nothing is known of {text}")
        is_sha256 = text.lower().removeprefix("sha256:") == digest.hex()
        return build_id, digest if is_sha256 else None

    def is_adopted(self, ordinal: int) -> bool:
        """Return True if the build ID is the adopted ID of a file."""
        return self._has(self._adopted, ordinal)

    def is_ambiguous(self, ordinal: int) -> bool:
        """Return True if unrelated programs have the build ID, so that nothing is served."""
        return self._has(self._ambiguous, ordinal)

    def adopted_id(self, digest: Digest) -> BuildId | None:
        """Return the adopted ID of bytes whose own build ID is not usable; None if there
        is none.
        """
        for alias in self.of(digest):
            if alias.type is AliasType.HTL:
                return BuildId(alias.value)
        return None

    def _has(self, table: Table | None, ordinal: int) -> bool:
        return table is not None and self._env.get(table, schema.U64.pack(ordinal)) is not None

    def _is_ambiguous(self, txn: Txn, ordinal: int) -> bool:
        table = self._ambiguous
        return table is not None and txn.get(schema.U64.pack(ordinal), db=table) is not None


class AliasWriter:
    """Reads and writes the aliases of blobs."""

    def __init__(self, environment: Environment, txn: Txn) -> None:
        self._txn = txn
        self._identities = environment.tables["identities"]
        self._aliases = environment.tables["aliases"]
        self._rows = IndexRows(environment, txn)

    def of(self, digest: bytes) -> tuple[Alias, ...]:
        """Return the aliases of a blob."""
        value = self._txn.get(digest, db=self._identities)
        return () if value is None else schema.unpack_aliases(digest, value)

    def value(self, digest: bytes, kind: AliasType) -> bytes:
        """Return the alias of one type that a blob has, empty if there is none."""
        return next((each.value for each in self.of(digest) if each.type is kind), b"")

    def put(self, digest: bytes, aliases: Iterable[Alias]) -> bool:
        """Give a blob more aliases, which `file` makes lead to it; return False if it had them
        all.
        """
        known = self.of(digest)
        new = [each for each in dict.fromkeys(aliases) if each not in known]
        if not new:
            return False
        self._txn.put(digest, schema.pack_aliases(digest, (*known, *new)), db=self._identities)
        return True

    def file(
        self, digest: bytes, aliases: Iterable[Alias] | None = None, worth: int | None = None
    ) -> None:
        """Write the rows that lead from its aliases to a blob, as far as there is room for more
        blobs of equal belief. Call this when a blob has more aliases, or more belief.

        ``aliases`` and ``worth`` are all aliases of the blob and the belief in it, if the caller
        knows them.
        """
        mark = bytes((self._worth(digest) if worth is None else worth,))
        for each in self.of(digest) if aliases is None else aliases:
            if each.type is AliasType.OFFSETS:
                continue  # no client looks it up
            prefix = schema.alias_prefix(each)
            rows = dict(islice(prefixed(self._txn, self._aliases, prefix), _MOST))
            key = prefix + digest
            is_full = sum(value == mark for value in rows.values()) >= _MOST_OF_A_BELIEF
            if not is_full and (key not in rows or rows[key] < mark):
                self._txn.put(key, mark, db=self._aliases)

    def _worth(self, digest: bytes) -> int:
        """Return the highest belief in a blob."""
        row = self._rows.digest_row(digest)
        found = (self._rows.variant(*ref) for ref in row.refs) if row is not None else ()
        return max((belief(each) for each in found if each is not None), default=0)

    def blobs(self, alias: Alias) -> list[Digest]:
        """Return the blobs that have an alias, those of the highest belief first: at most
        `_MOST_OF_A_BELIEF` of each belief.
        """
        prefix = schema.alias_prefix(alias)
        rows = islice(prefixed(self._txn, self._aliases, prefix), _MOST)
        found = [Digest(key[len(prefix) :]) for key, _ in rows]
        return sorted(found, key=lambda digest: -self._worth(digest)) if found[1:] else found

    def drop(self, digest: bytes) -> None:
        """Remove the aliases of a blob."""
        value = self._txn.get(digest, db=self._identities)
        if value is None:
            return
        for each in schema.unpack_aliases(digest, value):
            self._txn.delete(schema.alias_prefix(each) + digest, db=self._aliases)
        self._txn.delete(digest, db=self._identities)


def is_shared_by(best: Artifact, others: Iterable[Artifact], aliases: AliasWriter) -> bool:
    """Return True if unrelated programs have the build ID of an executable.

    This is so if the files with as much belief as the ``best`` have three different code hashes.
    Files with less belief do not count: else a container could prevent that a program of the host
    is served.
    """
    equal = (each for each in others if belief(each) == belief(best))
    codes = set()
    for each in (best, *islice(equal, _LOOKED_AT)):
        if each.kind is Kind.EXECUTABLE and not each.truncated:
            codes.add(aliases.value(each.digest, AliasType.CODE))
    return len(codes - {b""}) >= _SHARED_BY
