# SPDX-License-Identifier: Apache-2.0
"""The symbols in ``.gnu_debugdata``, as debuginfo of last resort for those who do not unpack it.

gdb, elfutils and lldb read them out of the executable. valgrind, bcc and perf (before commit
b10f74308e13, Linux 6.16) do not, and most of what Fedora and its relatives ship has no others. What
is unpacked is completed (`formats.elf.minidebug`), and kept as debuginfo of the executable's build
ID, with its place. It ranks below every other debuginfo that is believed as much: its quality is
that of symbols for linking only. It is believed no more than what is in a package, so that a
debuginfo package takes its place.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture import elf_file
from buildidfs.errors import Recapturable
from buildidfs.formats.elf import minidebug
from buildidfs.formats.elf.identify import ElfFile
from buildidfs.model import Kind, Quality, Sighting, Trust
from buildidfs.store import NewCapture, Store

if TYPE_CHECKING:
    from buildidfs.store import Staged

PACKED_MAX_BYTES: Final = 16 << 20
UNPACKED_MAX_BYTES: Final = 64 << 20
"""A larger one is left where it is: libxul's, among the largest, has half of this."""

# Sections of zeros that take no room come out of nearly nothing; tables of symbols are packed to
# a fifth or a tenth.
_SMALL: Final = 1 << 20
_RATIO: Final = 50
# xz -9 takes 65 MiB.
_XZ_MEMORY: Final = 72 << 20
_EXECUTE: Final = 0o111

# Each takes a few times its size in memory.
_one_at_a_time: Final = threading.Lock()


def unpacked(
    store: Store, staged: Staged, described: ElfFile, sighting: Sighting
) -> NewCapture | None:
    """The symbols in a staged executable, staged themselves; None where they are not wanted.

    That is where it has others, or where they are damaged, too large, or not those of this file, or
    there is no room for them and the executable is still there.
    Raises OSError, `StoreError`.
    """
    if described.mini is None or described.truncated or Kind.DEBUGINFO in described.kinds:
        return None
    with _one_at_a_time:
        data = _completed(staged.fd, described)
        if data is None:
            return None
        fd = elf_file.memory_file(b"minidebuginfo", data)
        try:
            mini = store.stage(fd, origin=sighting.origin)
        except Recapturable:
            return None
        finally:
            os.close(fd)
    try:
        return _capture(mini, described, sighting)
    except BaseException:
        mini.close()
        raise


def _capture(mini: Staged, described: ElfFile, sighting: Sighting) -> NewCapture | None:
    found = elf_file.describe(mini.fd, described.build_id)
    if not isinstance(found, ElfFile) or not _belongs(found, described):
        mini.close()
        return None
    origin = sighting.origin
    identity = origin.identity
    # Without a scope: a scan that meets this file again is to be told of the executable.
    identity = msgspec.structs.replace(identity, scope=None, mode=identity.mode & ~_EXECUTE)
    trust = min(origin.trust, Trust.PACKAGE)
    return NewCapture(
        Sighting(msgspec.structs.replace(origin, identity=identity, trust=trust), sighting.seen_ns),
        mini,
        described.build_id,
        (Kind.DEBUGINFO,),
        Quality.DYNSYM,
        found.scripts,
        found.segments,
    )


def _belongs(found: ElfFile, described: ElfFile) -> bool:
    """Return True for a debug file that is that of the executable it came from."""
    return (
        found.kinds == (Kind.DEBUGINFO,)
        and not found.truncated
        and found.segments in (0, described.segments)
        and found.build_id == described.build_id
        and (found.machine, found.bits, found.little_endian)
        == (described.machine, described.bits, described.little_endian)
    )


def _completed(fd: int, described: ElfFile) -> bytes | None:
    """The debug file with all symbols of the executable; None if it is none. Raises OSError."""
    where = described.mini
    if where is None or where.size > PACKED_MAX_BYTES:
        return None
    packed = os.pread(fd, where.size, where.offset)
    limit = min(UNPACKED_MAX_BYTES, max(_SMALL, _RATIO * len(packed)))
    data = _unpacked(packed, limit)
    if data is None:
        return None
    dynamic = minidebug.dynamic_symbols(elf_file.reader(fd), os.fstat(fd).st_size)
    return None if dynamic is None else minidebug.completed(data, dynamic)


def _unpacked(packed: bytes, limit: int) -> bytes | None:
    """Unpack xz data; None where it is damaged, or more than ``limit`` bytes."""
    import lzma

    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY)
    try:
        data = decoder.decompress(packed, limit)
        # The rest may be no more than the end of the stream.
        if not decoder.eof and len(data) < limit:
            return None
        if not decoder.eof and decoder.decompress(b"", 1):
            return None
    except (lzma.LZMAError, EOFError):
        return None
    return data if decoder.eof else None
