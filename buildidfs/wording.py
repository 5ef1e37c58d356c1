# SPDX-License-Identifier: Apache-2.0
"""Counts, sizes, ages and times in the words for people, and patterns of paths that people write.

The command line, the page and the reasons of all layers use these.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
import time
from typing import TYPE_CHECKING, Final

from buildidfs.errors import AmbiguousBuildId

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_UNITS: Final = ((1, "s"), (60, "min"), (3600, "h"), (86_400, "day"), (604_800, "week"))
_AGES: Final = 8 * 604_800  # older times are dates
_MOST_IDS: Final = 3


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number and its noun: ``1 file``, ``2 files``; ``plural`` if that is irregular."""
    return f"{count} {inflected(count, noun, plural)}"


def inflected(count: int, noun: str, plural: str = "") -> str:
    """Return the form of a noun for a number: ``file``, ``files``; see `counted`."""
    return noun if count == 1 else plural or noun + ("es" if noun.endswith("s") else "s")


def abridged(texts: Sequence[str], most: int) -> str:
    """Return the first ``most`` texts as a list: ``a, b, ...``."""
    return ", ".join(texts[:most]) + ", ..." * (len(texts) > most)


def size(count: int) -> str:
    """Return a number of bytes: ``17.3 MiB``."""
    if count < 1024:
        return f"{count} B"
    step = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**step:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[step]}"


def age(seconds: float) -> str:
    """Return a number of seconds: ``30d``, ``12h``."""
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds and seconds % length == 0:
            return f"{seconds // length:g}{unit}"
    return f"{seconds:g}s"


def moment(seconds: float) -> str:
    """Return Unix time as local time, ISO 8601 to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(seconds))


def ago(seconds: float) -> str:
    """Return a Unix time as an age: ``3 min ago``.

    A time that is long ago, or in the future, is returned as a date.
    """
    past = int(time.time() - int(seconds))
    if not -60 < past < _AGES:
        return time.strftime("%Y-%m-%d", time.localtime(seconds))
    past = max(past, 0)
    length, unit = next((n, u) for n, u in reversed(_UNITS) if past >= n or n == 1)
    count = past // length
    plural = "s" if count != 1 and unit in ("day", "week") else ""
    return f"{count} {unit}{plural} ago"


@functools.lru_cache(64)
def glob(*patterns: str | bytes) -> re.Pattern[bytes]:
    """Return the regular expression for whole paths that match one of the patterns, in which ``*``
    matches slashes, too.
    """
    # Each byte is a character, as for fnmatch: a range must not begin in the middle of one.
    texts = (os.fsencode(each).decode("latin-1") for each in patterns)
    return re.compile("|".join(map(fnmatch.translate, texts)).encode("latin-1"))


def only(start: str, ids: Collection[str]) -> str:
    """Return the only ID of those that begin with ``start``; empty if there is none. Raises
    `AmbiguousBuildId`.
    """
    if len(ids) > 1:
        raise AmbiguousBuildId(f"{start} is ambiguous: {abridged(sorted(ids), _MOST_IDS)}")
    return next(iter(ids), "")
