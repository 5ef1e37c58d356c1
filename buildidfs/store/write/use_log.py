# SPDX-License-Identifier: Apache-2.0
"""What is opened by those who only read, so that it is known when a blob was last of use.

A reader cannot write to the index, and should not for each file that somebody opens. It remembers
digests, and every few minutes leaves a file in ``run/`` (`leave`) that whoever writes next takes in
(`fold`).
What a process that was killed remembered is lost, minutes at most.

    uses-PID-NUMBER    "buildidfs uses 1\\n", stamp u32 (Unix time in seconds), SHA-256 (32) each
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from typing import TYPE_CHECKING, Final

from buildidfs.model import Digest, Trust
from buildidfs.store.errors import show
from buildidfs.store.schema import schema
from buildidfs.store.write.last_used import UseWriter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.store.index.environment import Environment, Txn

_DIRECTORY: Final = b"run"
_PREFIX: Final = b"uses-"
_DRAFT: Final = b".draft"
_HEAD: Final = b"buildidfs uses 1\n"

#: More than anybody remembers.
_MOST_DIGESTS: Final = 1 << 17

#: Files that nobody took in. A store that nobody writes to needs none.
_MOST_FILES: Final = 64

_BATCH: Final = 1024


def leave(root: bytes, digests: Iterable[Digest]) -> None:
    """Leave word that these were opened, for the next writer; never fails."""
    directory = os.path.join(root, _DIRECTORY)
    name = b"%s%d-%d" % (_PREFIX, os.getpid(), time.time_ns())
    try:
        os.makedirs(directory, 0o700, exist_ok=True)
        if len(_files(root)) < _MOST_FILES:
            _write(os.path.join(directory, name), digests)
    except OSError as error:
        # Others may have the store on a read-only filesystem, or it is full just now.
        import logging  # which a command that reads one row does without

        logging.getLogger(__name__).debug("what was used is not recorded: %s", error.strerror)


def _write(path: bytes, digests: Iterable[Digest]) -> None:
    draft = path + _DRAFT
    stamp = schema.U32.pack(schema.stamp_of(time.time_ns()))
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(_HEAD + stamp + b"".join(digests))
        os.rename(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def fold(env: Environment) -> int:
    """Take in what readers have left, and remove their files; returns how many uses were new.

    Taken in twice it does no harm. Raises `StoreError`.
    """
    stamps: dict[Digest, int] = {}
    names = _files(env.root)
    for name in names:
        stamp, digests = _read(name)
        for digest in digests:
            stamps[digest] = max(stamp, stamps.get(digest, 0))
    noted = 0
    items = iter(stamps.items())
    while batch := list(itertools.islice(items, _BATCH)):
        noted += env.write(functools.partial(_note, env, batch))
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name)
    return noted


def drafts(root: bytes) -> list[bytes]:
    """Files that a process did not get to finish."""
    return [name for name in _listed(root) if name.endswith(_DRAFT)]


def _note(env: Environment, batch: list[tuple[Digest, int]], txn: Txn) -> int:
    uses, table = UseWriter(env, txn), env.tables["digests"]
    noted = 0
    for digest, stamp in batch:
        value = txn.get(digest, db=table)
        if value is None:
            continue
        row = schema.DigestRow.unpack(value)
        if uses.note(digest, row, stamp, Trust.UNKNOWN):
            txn.put(digest, row.pack(), db=table)
            noted += 1
    return noted


def _listed(root: bytes) -> list[bytes]:
    directory = os.path.join(root, _DIRECTORY)
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return [os.path.join(directory, name) for name in names if name.startswith(_PREFIX)]


def _files(root: bytes) -> list[bytes]:
    return [name for name in _listed(root) if not name.endswith(_DRAFT)]


def _read(path: bytes) -> tuple[int, list[Digest]]:
    """Stamp and digests; nothing of a file that is not one of ours."""
    start = len(_HEAD) + schema.U32.size
    try:
        with open(path, "rb") as file:
            data = file.read(start + 32 * _MOST_DIGESTS + 1)
    except OSError:
        return 0, []
    if not data.startswith(_HEAD) or (len(data) - start) % 32:
        import logging

        logging.getLogger(__name__).warning("%s is not a record of uses: passed over", show(path))
        return 0, []
    (stamp,) = schema.U32.unpack_from(data, len(_HEAD))
    # A clock that was wrong for a while would protect them for ever.
    stamp = min(stamp, schema.stamp_of(time.time_ns()))
    return stamp, [Digest(data[at : at + 32]) for at in range(start, len(data), 32)]
