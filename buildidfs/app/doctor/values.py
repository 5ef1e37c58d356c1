# SPDX-License-Identifier: Apache-2.0
"""What a check is, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

State = Literal["ok", "degraded", "failed"]


class Finding(msgspec.Struct, frozen=True):
    """What one check found.

    ``failed``: without a remedy captures are missing, or nothing can be captured or served at all.
    ``degraded``: it works, but costs more, promises less, or may fail soon. ``found`` and
    ``remedy`` are for people, on one line each; the remedy of what is ok is empty.
    """

    area: str
    name: str
    state: State
    found: str
    remedy: str = ""


class Answer(msgspec.Struct, frozen=True):
    """A finding without the name of what was asked; made by `ok`, `degraded` and `failed`."""

    state: State
    found: str
    remedy: str = ""


class Probe(msgspec.Struct, frozen=True):
    """One check: ``ask`` looks, and changes nothing.

    It may raise OSError and the like where the answer is not to be had. ``place`` is what may never
    answer: after one silence, no other probe of the same place is asked.
    """

    area: str
    name: str
    ask: Callable[[], Answer]
    place: str = ""


def ok(found: str) -> Answer:
    """All is well."""
    return Answer("ok", found)


def degraded(found: str, remedy: str) -> Answer:
    """It works, though not as it should."""
    return Answer("degraded", found, remedy)


def failed(found: str, remedy: str) -> Answer:
    """It does not work."""
    return Answer("failed", found, remedy)
