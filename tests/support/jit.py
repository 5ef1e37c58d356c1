# SPDX-License-Identifier: Apache-2.0
"""Dumps of JIT compilers, and programs whose code is generated."""

from __future__ import annotations

import struct


def dump(order: str, *records: bytes) -> bytes:
    """A dump with these records, in the byte order ``order`` of struct."""
    head = struct.pack(f"{order}IIIIIIQQ", 0x4A695444, 1, 40, 62, 0, 1, 0, 0)
    return head + b"".join(records)


def load(order: str, address: int, name: bytes, code: bytes, index: int) -> bytes:
    """The record of a function that was compiled."""
    body = (
        struct.pack(f"{order}IIQQQQ", 1, 1, address, address, len(code) or 16, index)
        + name
        + b"\0"
        + code
    )
    return _record(order, 0, body)


def move(order: str, old: int, new: int, size: int, index: int) -> bytes:
    """The record of a function that was moved."""
    return _record(order, 1, struct.pack(f"{order}IIQQQQQ", 1, 1, new, old, new, size, index))


def other(order: str, kind: int, body: bytes) -> bytes:
    """A record of another kind."""
    return _record(order, kind, body)


def _record(order: str, kind: int, body: bytes) -> bytes:
    return struct.pack(f"{order}IIQ", kind, 16 + len(body), 5) + body
