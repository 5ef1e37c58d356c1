# SPDX-License-Identifier: Apache-2.0
"""A fuzz target: a check, and bytes to try it with."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

MEGABYTE: Final = 1 << 20


class Target(NamedTuple):
    """One taker of bytes from strangers.

    ``check`` is given any bytes and raises only for a fault: what is documented to be raised it
    catches itself, and what else is promised it asserts. It keeps nothing from one call to the
    next. ``seeds`` are good inputs to start from. ``worst`` are those that could cost most, each of
    at most a megabyte, or of ``most`` bytes where no more is ever given to it. ``modules`` are the
    ones of ``buildidfs.formats`` that are covered. ``seconds`` of processor time and ``bytes`` of
    memory are what the worst may take, of the check, or of ``cost`` where that does it many times.
    """

    check: Callable[[bytes], object]
    seeds: Callable[[], Iterable[bytes]]
    worst: Callable[[], Iterable[bytes]]
    modules: tuple[str, ...] = ()
    most: int = MEGABYTE
    cost: Callable[[bytes], object] | None = None
    seconds: float = 1.0
    bytes: int = 64 << 20


def filled(unit: bytes, size: int = MEGABYTE) -> bytes:
    """The same again and again, whole ones."""
    return unit * (size // len(unit))


def refusal(attempt: Callable[[], object], *errors: type[Exception]) -> Exception | None:
    """The error among ``errors`` that an attempt raised, None if it went well."""
    try:
        attempt()
    except errors as error:
        return error
    return None


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="buildidfs-fuzz-")


def scratch() -> Path:
    """A directory of this process, which is taken away when it ends."""
    return Path(_temporary().name)
