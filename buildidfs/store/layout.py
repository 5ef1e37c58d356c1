# SPDX-License-Identifier: Apache-2.0
"""The directory of a store: how it is laid out, and recognised."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from buildidfs.errors import StoreError, StoreMissing, StoreVersionError
from buildidfs.store import environment, schema
from buildidfs.store.failures import show, translated

if TYPE_CHECKING:
    from buildidfs.store.environment import Txn

_PARTS = (b"index", b"blobs", b"staging", b"listeners")


def make(root: bytes, map_size: int | None) -> None:
    """Lay out a store; ``format`` comes last and makes it one. Raises `StoreError`."""
    with translated(root):
        os.makedirs(root, 0o700, exist_ok=True)
        foreign = set(os.listdir(root)) - set(_PARTS)
        foreign = {name for name in foreign if not name.startswith(b".format.")}
        if foreign and not os.path.exists(os.path.join(root, b"format")):
            raise StoreError(f"{show(root)} is not a store, and not empty")
        os.chmod(root, 0o700)
        for part in (b"index", b"blobs", b"listeners"):
            os.makedirs(os.path.join(root, part), 0o700, exist_ok=True)

    def begin(txn: Txn) -> None:
        meta = env.tables["meta"]
        txn.put(schema.COUNTERS_KEY, schema.Counters().pack(), overwrite=False, db=meta)

    env = environment.acquire(root, read_only=False, create=True, map_size=map_size)
    try:
        env.write(begin)
    finally:
        environment.release(env)
    with translated(root):
        draft = os.path.join(root, b".format.%d.%d" % (os.getpid(), time.monotonic_ns()))
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, schema.FORMAT_PREFIX + b"%d\n" % schema.FORMAT_VERSION)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(draft, os.path.join(root, b"format"))
        directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def check_format(root: bytes) -> None:
    """Raise `StoreMissing`, `StoreVersionError` or `StoreError` unless it is a store we read."""
    try:
        with open(os.path.join(root, b"format"), "rb") as file:
            text = file.read(64)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreMissing(
            f"no store at {show(root)}: a scan makes one, --store names another"
        ) from error
    except OSError as error:
        raise StoreError(f"store {show(root)}: {error.strerror}") from error
    version = text.removeprefix(schema.FORMAT_PREFIX).strip()
    if not text.startswith(schema.FORMAT_PREFIX) or not version.isdigit():
        raise StoreVersionError(f"store {show(root)}: its format file is not that of a store")
    if int(version) != schema.FORMAT_VERSION:
        raise StoreVersionError(
            f"store {show(root)} has format {int(version)}, this program reads "
            f"{schema.FORMAT_VERSION}: use a newer buildidfs"
        )
