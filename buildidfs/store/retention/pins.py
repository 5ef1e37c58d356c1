# SPDX-License-Identifier: Apache-2.0
"""Pins: the build IDs that are kept whatever the size limits say, each under a name.

A pin without a user-given name has the empty name. A build ID may have many pins, and may be pinned
before a file of it is captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from buildidfs.errors import UsageError
from buildidfs.store import schema
from buildidfs.store.index.queries import Index, prefixed, whole
from buildidfs.store.values import Pin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from buildidfs.model import BuildId
    from buildidfs.store.index.environment import Environment, Txn


class Pins:
    """Reads of the pins."""

    def __init__(self, environment: Environment) -> None:
        self._env = environment

    def every(self, name: bytes | None = None) -> Iterator[Pin]:
        """Yield all pins, or those with one name, by length and value of the build IDs."""
        for key, value in Index(self._env).rows(self._env.tables["pins"], b"", None):
            build_id, named = schema.pin_of(key)
            if name is None or named == name:
                yield Pin(build_id, named, int.from_bytes(value, "big"))

    @whole
    def of(self, build_id: BuildId) -> list[Pin]:
        """Return the pins of one build ID."""
        with self._env.read() as txn:
            rows = list(prefixed(txn, self._env.tables["pins"], schema.pin_key(build_id, b"")))
        return [
            Pin(build_id, schema.pin_of(key)[1], int.from_bytes(value, "big"))
            for key, value in rows
        ]


def pin(env: Environment, build_ids: Iterable[BuildId], name: bytes, now_ns: int) -> int:
    """Pin build IDs under a name, and return the number of new pins.

    Raises `UsageError` for a name that is too long, and `StoreError`.
    """
    if len(name) > schema.MAX_PIN_NAME:
        raise UsageError(
            f"a name of {len(name)} bytes is too long for a pin: --name gives it another"
            f" ({schema.MAX_PIN_NAME} at most)"
        )
    keys = [schema.pin_key(build_id, name) for build_id in build_ids]
    created = schema.U64.pack(now_ns)

    def work(txn: Txn) -> int:
        table = env.tables["pins"]
        return sum(txn.put(key, created, overwrite=False, db=table) for key in keys)

    return env.write(work)


def unpin(env: Environment, build_ids: Iterable[BuildId]) -> int:
    """Remove the pins with the empty name from build IDs, and return the number removed."""
    return _delete(env, [schema.pin_key(build_id, b"") for build_id in build_ids])


def unpin_name(env: Environment, name: bytes) -> int:
    """Remove all pins with a name, and return the number removed. Reads every pin."""
    return _delete(env, [schema.pin_key(each.build_id, name) for each in Pins(env).every(name)])


def _delete(env: Environment, keys: Sequence[bytes]) -> int:
    def work(txn: Txn) -> int:
        return sum(txn.delete(key, db=env.tables["pins"]) for key in keys)

    return env.write(work)
