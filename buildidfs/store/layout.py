# SPDX-License-Identifier: Apache-2.0
"""The directory of a store: how it is laid out and recognised."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING

from buildidfs.errors import StoreError, StoreMissing, StoreVersionError
from buildidfs.linux.file_ops import closing_fd, on_error, sync_directory
from buildidfs.names import printable
from buildidfs.store import schema
from buildidfs.store.errors import remedy, translated
from buildidfs.store.index import environment

if TYPE_CHECKING:
    from buildidfs.store.index.environment import Environment, Txn

_PARTS = (
    b"index",
    b"blobs",
    b"staging",
    b"listeners",
    b"lock",
    b"run",
    b"quarantine",
    b"jit",
    b"remote",
    b"upstream",
)
_FORMAT = b"format"


def make(root: bytes, map_size: int | None) -> None:
    """Lay out a store; the file ``format`` is written last. Raises `StoreError`.

    In a store that lacks only this file, the file is written anew, and all content stays.
    """
    with translated(root):
        os.makedirs(root, 0o700, exist_ok=True)
        foreign = set(os.listdir(root)) - set(_PARTS)
        foreign = {name for name in foreign if not name.startswith(b".format.")}
        if foreign and not os.path.exists(os.path.join(root, _FORMAT)):
            raise StoreError(
                f"{printable(root)} is not a store, and not empty: name another (--store)"
            )
        os.chmod(root, 0o700)
        for part in (b"index", b"blobs", b"listeners"):
            os.makedirs(os.path.join(root, part), 0o700, exist_ok=True)

    env = environment.acquire(root, read_only=False, create=True, map_size=map_size)
    try:
        env.write(lambda txn: begin(env, txn))
    finally:
        environment.release(env)
    write_format(root)


def begin(env: Environment, txn: Txn) -> None:
    """Write the first rows of an empty index."""
    meta = env.tables["meta"]
    if txn.put(schema.COUNTERS_KEY, schema.StoreCounters().pack(), overwrite=False, db=meta):
        txn.put(schema.FORMAT_KEY, schema.U32.pack(schema.FORMAT_VERSION), db=meta)


def write_format(root: bytes) -> None:
    """Write the number of the present format into the store, and sync it. Raises `StoreError`."""
    with translated(root):
        draft = os.path.join(root, b".format.%d.%d" % (os.getpid(), time.monotonic_ns()))
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with closing_fd(fd):
            os.write(fd, schema.FORMAT_PREFIX + b"%d\n" % schema.FORMAT_VERSION)
            os.fsync(fd)
        os.rename(draft, os.path.join(root, _FORMAT))
        sync_directory(root)


def read_format(root: bytes) -> int:
    """Return the format number in the file ``format`` of a store.

    Raises `StoreMissing`, `StoreError`, and `StoreVersionError` for a file without a number.
    """
    try:
        with open(os.path.join(root, _FORMAT), "rb") as file:
            text = file.read(64)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreMissing(
            f"no store at {printable(root)}: a scan makes one, --store names another"
        ) from error
    except OSError as error:
        raise StoreError(f"store {printable(root)}: {error.strerror}{remedy(error)}") from error
    digits = text.removeprefix(schema.FORMAT_PREFIX).strip()
    if not text.startswith(schema.FORMAT_PREFIX) or not digits.isdigit():
        raise StoreVersionError(f"store {printable(root)}: its format file is not that of a store")
    return int(digits)


def acquire(root: bytes, *, read_only: bool, map_size: int | None) -> Environment:
    """Open the index of a store of the present format."""
    version = read_format(root)
    if version != schema.FORMAT_VERSION:
        raise StoreVersionError(
            f"store {printable(root)} has format {version}, this program reads"
            f" {schema.FORMAT_VERSION}: use the buildidfs that wrote it, name another store"
            " (--store), or have buildidfs"
            " check --repair make a new index, which loses pins, journal and history"
        )
    env = environment.acquire(root, read_only=read_only, map_size=map_size)
    with on_error(partial(environment.release, env)):
        with env.read() as txn:
            value = txn.get(schema.FORMAT_KEY, db=env.tables["meta"])
        if value != schema.U32.pack(schema.FORMAT_VERSION):
            raise environment.damaged(root, f"has no rows of format {schema.FORMAT_VERSION}")
    return env
