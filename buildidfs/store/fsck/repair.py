# SPDX-License-Identifier: Apache-2.0
"""Faults put right: rows that follow from others are made again, and what leads nowhere goes.

What is done about each fault stands where it is found, in `rules` and `placerules`. Each is mended
in a write transaction that looks at the row once more. Mending one may bring up another, so all
rows are gone through until nothing is found.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import lmdb

from buildidfs.errors import BuildIdFsError, IntegrityError
from buildidfs.store import notify
from buildidfs.store.fsck import rebuild
from buildidfs.store.fsck.check import RULES, wrong_counts
from buildidfs.store.fsck.faults import Fault, Mending, faults_of
from buildidfs.store.fsck.rebuild import captures_of
from buildidfs.store.index.queries import DAMAGE
from buildidfs.store.retention import removal
from buildidfs.store.write.commit import Commits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.model import Digest
    from buildidfs.store.fsck.check import Checker
    from buildidfs.store.index.environment import Txn

_PASSES: Final = 5


def mend(checker: Checker, progress: Callable[[int], None] = lambda count: None) -> Iterator[Fault]:
    """Mend rows and counts; gives each fault that there was."""
    told: set[str] = set()
    for _ in range(_PASSES):
        clean = True
        for table in RULES:
            for count, suspicious in checker.batches(table):
                progress(count)
                for fault in _mend_rows(checker, table, suspicious) if suspicious else ():
                    clean = False
                    if fault.text not in told:
                        told.add(fault.text)
                        yield fault
        for fault in _mend_counts(checker):
            clean = False
            yield fault
        if clean:
            return


def _mend_rows(checker: Checker, table: str, keys: list[bytes]) -> list[Fault]:
    def work(mending: Mending) -> list[Fault]:
        found = []
        for key in keys:
            value = mending.get(table, key)
            if value is not None:
                faults = faults_of(RULES[table], table, mending, key, value)
                found += _apply(mending, faults)
        return found

    return _in_transaction(checker, work)


def _mend_counts(checker: Checker) -> list[Fault]:
    def work(mending: Mending) -> list[Fault]:
        return _apply(mending, list(wrong_counts(mending)))

    return _in_transaction(checker, work) if checker.counts() else []


def _apply(mending: Mending, faults: list[Fault]) -> list[Fault]:
    for fault in faults:
        if fault.mend is not None:
            # It may lean on a row that is damaged, too, and is mended in the next pass.
            with contextlib.suppress(*DAMAGE, BuildIdFsError, lmdb.Error):
                fault.mend(mending)
    return faults


def _in_transaction(checker: Checker, work: Callable[[Mending], list[Fault]]) -> list[Fault]:
    env = checker.env

    def write(txn: Txn) -> tuple[list[Fault], int, list[int]]:
        mending = Mending(env, txn, checker.blobs)
        found = work(mending)
        mending.finish()
        return found, mending.counters.announced, sorted(mending.changed)

    found, announced, changed = env.write(write)
    if changed:
        notify.announce(env.root, announced, changed)
    return found


def adopt(checker: Checker) -> list[Fault]:
    """Record blobs again whose rows were lost, as what they tell of themselves."""
    return [
        Fault(f"blob {digest} was recorded again", digest)
        for digest, adopted in rebuild.adopt(checker.env, checker.blobs)
        if adopted
    ]


def mend_file(checker: Checker, fault: Fault) -> None:
    """Mend what is wrong with the rows of a blob whose bytes are right."""
    if fault.mend is not None:
        _in_transaction(checker, lambda mending: _apply(mending, [fault]))
    elif fault.digest is not None:
        _read_again(checker, fault.digest)


def _read_again(checker: Checker, digest: Digest) -> None:
    """Forget what the index says of a blob, and capture it once more, as what its bytes are."""
    env, blobs = checker.env, checker.blobs
    try:
        opened = checker.verified.open(digest)
    except IntegrityError:
        return  # removed meanwhile, or damaged by now
    with opened, blobs.stage(opened.fileno()) as staged:
        adopted = captures_of(blobs, digest, opened, staged)
        removal.remove(env, blobs, [digest])
        commits = Commits(env, blobs, checker.verified)
        commits.commit([each.capture for each in adopted], (), ())
