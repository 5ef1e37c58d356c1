# SPDX-License-Identifier: Apache-2.0
"""Check that the index agrees with itself and with the blobs, and the blobs with their digests.

A store in use changes all the time. So rows are read in many short transactions, each of which sees
a row and its related rows at one moment; a row with an apparent fault is read once more. Only
counting takes one transaction for all rows; while it lasts, LMDB cannot reuse pages.

A blob without a row is not a fault: a killed process leaves such blobs, and the next capture of the
same bytes takes them over.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from buildidfs.store import schema
from buildidfs.store.fsck import id_rules, location_rules
from buildidfs.store.fsck.faults import Fault, Mending, Rows, faults_of
from buildidfs.store.fsck.scrub import Scrubber
from buildidfs.store.index.environment import load_counters
from buildidfs.store.index.queries import DAMAGE, prefixed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.model import Digest
    from buildidfs.store.blobs.files import Blobs
    from buildidfs.store.blobs.verify import VerifiedBlobs
    from buildidfs.store.fsck.faults import Rule
    from buildidfs.store.index.environment import Environment

RULES: Final[dict[str, Rule]] = {**id_rules.RULES, **location_rules.RULES}

_ROWS: Final = 512
_NUMBERS: Final = (
    ("next_ordinal", "ordinals", schema.MAX_NUMBER),
    ("next_path", "paths", schema.MAX_NUMBER),
    ("next_container", "containers", schema.MAX_CONTAINER),
)
"""Counters that only grow: (counter, table whose keys are the numbers, highest possible number)."""
_MARK: Final = b"check"
_SCRUB_MARK: Final = b"scrub"


class Checker:
    """Looks for faults in one store. It writes only to the rows of blobs that it has read (see
    `scrub`), and writes nothing if the store is open for reading only.
    """

    def __init__(self, env: Environment, blobs: Blobs, verified: VerifiedBlobs) -> None:
        self.env = env
        self.blobs = blobs
        self.verified = verified

    def rows(self, progress: Callable[[int], None] = lambda count: None) -> Iterator[Fault]:
        """Yield the faults of rows; ``progress`` is called with the number of further rows
        checked.
        """
        for table in RULES:
            for count, suspicious in self.batches(table):
                progress(count)
                for key in suspicious:
                    yield from self.look_again(table, key)

    def count_rows(self) -> int:
        """Return the number of rows to check."""
        entries = self.env.entries()
        return sum(entries[table] for table in RULES if table in entries)

    def batches(self, table: str) -> Iterator[tuple[int, list[bytes]]]:
        """Check a table in batches; for each batch yield the number of rows, and the keys of rows
        with an apparent fault.
        """
        if table not in self.env.tables:
            return  # a store of an earlier version that is open for reading
        start, rule = b"", RULES[table]
        while True:
            with self.env.read() as txn:
                moment, count, key, suspicious = Rows(self.env, txn, self.blobs), 0, b"", []
                for key, value in islice(prefixed(txn, self.env.tables[table], b"", start), _ROWS):
                    count += 1
                    if faults_of(rule, table, moment, key, value):
                        suspicious.append(key)
            yield count, suspicious
            if count < _ROWS:
                return
            start = key + b"\0"

    def look_again(self, table: str, key: bytes) -> list[Fault]:
        """Check one row again, and return its faults."""
        with self.env.read() as txn:
            moment = Rows(self.env, txn, self.blobs)
            value = moment.get(table, key)
            return [] if value is None else faults_of(RULES[table], table, moment, key, value)

    def counts(self) -> list[Fault]:
        """Return the faults of the row of counters."""
        with self.env.read() as txn:
            return list(wrong_counts(Rows(self.env, txn, self.blobs)))

    def files(
        self,
        *,
        whole: bool,
        from_start: bool = True,
        progress: Callable[[int], None] = lambda size: None,
    ) -> Iterator[Fault]:
        """Yield the faults of blobs; with ``whole`` read all blobs, else only those whose files
        were touched.

        Continues where the last call was interrupted, unless ``from_start``. ``progress`` is called
        with the number of bytes read.
        """
        mark = _MARK if whole else b""
        scrubber = Scrubber(self.env, self.blobs, self.verified, progress, mark)
        return scrubber.all(whole=lambda row: whole, from_start=from_start)

    def scrub(
        self, pace: Callable[[int], None], is_due: Callable[[schema.DigestRow], bool]
    ) -> Iterator[Fault]:
        """Read the blobs that are due or were changed, and yield their faults. Continues where an
        earlier call stopped. ``pace`` is called with the number of bytes read, and may wait.
        """
        scrubber = Scrubber(self.env, self.blobs, self.verified, pace, _SCRUB_MARK)
        return scrubber.all(whole=is_due)

    def damaged(self) -> list[Digest]:
        """Return the blobs that are known to be damaged or gone."""
        scrubber = Scrubber(self.env, self.blobs, self.verified)
        return [digest for digest, row in scrubber.digests() if schema.is_struck(row.pack())]

    def is_struck(self, digest: Digest) -> bool:
        """Return True if a blob is known to be damaged or gone."""
        value = self.env.get(self.env.tables["digests"], digest)
        return value is not None and schema.is_struck(value)

    def ordinals_of(self, digest: Digest) -> set[int]:
        """Return the ordinals of the build IDs that have a blob."""
        value = self.env.get(self.env.tables["digests"], digest)
        return set() if value is None else {ref[0] for ref in schema.DigestRow.unpack(value).refs}

    def unreferenced(self) -> int:
        """Return the number of blobs that no row refers to."""
        table = self.env.tables["digests"]
        return sum(1 for digest in self.blobs.names() if self.env.get(table, digest) is None)


def wrong_counts(moment: Rows) -> Iterator[Fault]:
    """Yield the faults of the counters at one moment."""
    counters, found = load_counters(moment.env, moment.txn), count(moment)
    for kind, (said, there) in enumerate(zip(counters.artifacts, found.artifacts, strict=True), 1):
        if said != there:
            yield Fault(f"{there} artifacts of kind {kind} are counted as {said}", mend=recount)
    for what, said, there in (
        ("blobs", counters.blobs, found.blobs),
        ("bytes of blobs", counters.blob_bytes, found.blob_bytes),
        ("bytes of files of blobs", counters.stored_bytes, found.stored_bytes),
    ):
        if said != there:
            yield Fault(f"{there} {what} are counted as {said}", mend=recount)
    for field, _, most in _NUMBERS:
        number = getattr(counters, field)
        if not 0 < number <= most + 1:
            what = field.removeprefix("next_")
            yield Fault(f"the next {what} would be {number}", mend=_number_again)
    for ordinal, field, there in _wrong_numbers(moment):
        named = moment.named(ordinal)
        text = f"{field} of {named.build_id if named else ordinal} are counted wrongly"
        mend = partial(_put_number, ordinal=ordinal, field=field, there=there)
        yield Fault(text, build_id=named.build_id if named else None, mend=mend)
    yield from location_rules.wrong(moment)


def _put_number(mending: Mending, ordinal: int, field: str, there: int) -> None:
    mending.change_named(ordinal, **{field: there})


def count(moment: Rows) -> schema.Counters:
    """Return the right counters, except for numbers that only grow."""
    counters = schema.Counters()
    for key in _keys(moment, "artifacts"):
        if 0 < key[-1] <= len(counters.artifacts):
            counters.artifacts[key[-1] - 1] += 1
    for _, value in moment.having("digests", b""):
        try:
            row = schema.DigestRow.unpack(value)
        except DAMAGE:
            continue
        counters.blobs += 1
        counters.blob_bytes += row.size
        counters.stored_bytes += row.taken
    return counters


def recount(mending: Mending) -> None:
    """Set the counts of artifacts, blobs and bytes to the right numbers."""
    found, counters = count(mending), mending.counters
    counters.artifacts, counters.blobs = found.artifacts, found.blobs
    counters.blob_bytes, counters.stored_bytes = found.blob_bytes, found.stored_bytes


def _number_again(mending: Mending) -> None:
    """If a counter that only grows is impossible, set it to one more than the highest number in
    use.
    """
    counters = mending.counters
    for field, table, most in _NUMBERS:
        if not 0 < getattr(counters, field) <= most + 1:
            numbers = (int.from_bytes(key, "big") for key in _keys(mending, table))
            setattr(counters, field, max((n for n in numbers if n <= most), default=0) + 1)


def _wrong_numbers(moment: Rows) -> Iterator[tuple[int, str, int]]:
    """Yield rows of *ordinals* with a wrong count of origins or paths, and the right count."""
    known = array("Q", (int.from_bytes(key[:8], "big") for key in _keys(moment, "ordinals")))
    origins, paths = (array("I", bytes(4 * len(known))) for _ in range(2))
    for found, table, begin in ((origins, "origins", 0), (paths, "pathids", 4)):
        for key in _keys(moment, table):
            ordinal = int.from_bytes(key[begin : begin + 8], "big")
            at = bisect_left(known, ordinal)
            if at < len(known) and known[at] == ordinal:
                found[at] += 1
    rows = moment.having("ordinals", b"")
    for (key, value), *there in zip(rows, origins, paths, strict=True):
        try:
            row = schema.OrdinalRow.unpack(value)
        except DAMAGE:
            continue
        if len(key) != schema.U64.size:
            continue  # a row without a build ID, which is the fault of another rule
        for field, said, count in zip(
            ("origins", "paths"), (row.origins, row.paths), there, strict=True
        ):
            if said != count:
                yield int.from_bytes(key, "big"), field, count


def _keys(moment: Rows, table: str) -> Iterator[bytes]:
    with moment.txn.cursor(moment.tables[table]) as cursor:
        yield from cursor.iternext(keys=True, values=False)
