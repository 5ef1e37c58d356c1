# SPDX-License-Identifier: Apache-2.0
"""All that can happen to the file of a blob, by hand or by fate, and to a row of the index."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

from buildidfs.store import Store
from buildidfs.store.fsck import rebuild
from buildidfs.store.index import environment

Damage = Callable[[Path, Path], None]
"""What is done to the file of a blob; the second one is that of another."""


def overwrite(path: Path, content: bytes, at: int = 0) -> None:
    """Write into a file in place."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)
    path.chmod(0o400)


def flip(path: Path, other: Path) -> None:
    """One byte is another."""
    content = path.read_bytes()
    overwrite(path, bytes([content[-1] ^ 1]), len(content) - 1)


def flip_and_set_back_the_time(path: Path, other: Path) -> None:
    """One byte is another, and the time of modification does not tell."""
    before = path.stat()
    flip(path, other)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def truncate(path: Path, other: Path) -> None:
    """It ends too early."""
    path.chmod(0o600)
    os.truncate(path, path.stat().st_size // 2)


def grow(path: Path, other: Path) -> None:
    """It ends too late."""
    path.chmod(0o600)
    with path.open("ab") as file:
        file.write(b"!")


def replace(path: Path, other: Path) -> None:
    """There is another file of the same size."""
    draft = path.with_suffix(".new")
    draft.write_bytes(bytes(path.stat().st_size))
    draft.rename(path)


def swap(path: Path, other: Path) -> None:
    """It has the name of another, and that one its."""
    between = path.with_suffix(".tmp")
    path.rename(between)
    other.rename(path)
    between.rename(other)


def delete(path: Path, other: Path) -> None:
    """It is not there."""
    path.unlink()


TOUCHED: Final[tuple[Damage, ...]] = (
    flip, flip_and_set_back_the_time, truncate, grow, replace, swap,
)  # fmt: skip
"""Other bytes are where they should be."""

ALL: Final[tuple[Damage, ...]] = (*TOUCHED, delete)


def name_of(damage: Damage) -> str:
    """For the name of a test."""
    return damage.__name__


def changed_bytes(value: bytes, chosen: random.Random) -> bytes:
    """A value of a row with one thing wrong with it: its length, or some of its bytes."""
    data = bytearray(value)
    how = chosen.randrange(4)
    if how == 0:
        return bytes(data[: chosen.randrange(len(data) + 1)])
    if how == 1:
        return bytes(data) + chosen.randbytes(chosen.choice((1, 8, 300)))
    if how == 2:
        return chosen.randbytes(chosen.choice((0, 1, 2, len(data))))
    for _ in range(chosen.randint(1, 4)):
        if data:
            data[chosen.randrange(len(data))] = chosen.choice((0, 1, 0x7F, 0x80, 0xFF))
    return bytes(data)


def with_new_index(store: Store) -> Store:
    """Close a store, make a new index for it, and open it again."""
    key = environment._key(store.path)
    store.close()
    while (still := environment._open.get(key)) is not None:
        environment.release(still)
    rebuild.rebuild(store.path)
    return Store.open(store.path)
