# SPDX-License-Identifier: Apache-2.0
"""What a watch has come to so far."""

from __future__ import annotations

import msgspec


class Counters(msgspec.Struct):
    """Counts since the start; read them at any time, each for itself.

    ``captured`` counts files whose bytes are new to the store (``copied_bytes`` of them),
    ``held`` those whose bytes it had, ``new_ids`` build IDs it did not know, ``absent`` files
    without one, ``unreadable`` files that could not be read, ``let_go`` pins that there was no time
    or room for, ``noted`` files that there was no room for and that can be had again, ``retried``
    attempts that were put off, ``journaled`` entries of the journal and ``unjournaled`` those that
    had to be dropped. ``store_error`` says why the store cannot be written, and is empty when it
    can; ``store_full_since`` is Unix time in seconds, or 0.
    """

    captured: int = 0
    held: int = 0
    copied_bytes: int = 0
    new_ids: int = 0
    absent: int = 0
    unreadable: int = 0
    let_go: int = 0
    noted: int = 0
    retried: int = 0
    journaled: int = 0
    unjournaled: int = 0
    store_error: str = ""
    store_full_since: float = 0.0
