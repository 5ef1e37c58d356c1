# SPDX-License-Identifier: Apache-2.0
"""Proof that the symbolizer on this host reads the debug information of a file.

A store knows that a file has DWARF. The program that people use may still not read its form: a
kind of compression, a version, or the name of a section. So a few addresses whose units have line
tables are looked up.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Final

from buildidfs.errors import BuildIdFsError, UsageError
from buildidfs.formats.elf.header import ET_DYN, ET_EXEC, parse_header
from buildidfs.formats.elf.sections import Sections
from buildidfs.formats.elf.units import AT_LOW_PC, AT_STMT_LIST, FORM_ADDRESS, Units
from buildidfs.model import Kind, Quality
from buildidfs.symbolize.addresses import NOT_LOADED, Symbolizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.formats.elf.header import ReadAt
    from buildidfs.model import BuildId
    from buildidfs.store import Store

_TRIED: Final = 8
_UNITS: Final = 1024
_WORK: Final = 1 << 16
_HEADER_BYTES: Final = 64

_log = logging.getLogger(__name__)


def unread(store: Store, build_id: BuildId) -> str | None:
    """Return the name of the symbolizer that finds no line at any of some addresses of a file whose
    units have line tables; None if it finds one, or if that cannot be tried.
    """
    ordinal = store.index.ordinal(build_id) or 0
    artifact = store.index.artifact(ordinal, Kind.DEBUGINFO)
    if artifact is None or artifact.quality < Quality.DEBUGINFO:
        return None
    try:
        with store.open_blob(artifact.digest) as blob:
            addresses = list(islice(_addresses(blob.read_at, blob.size), _TRIED))
        if not addresses:
            return None
        with Symbolizer(store) as symbolizer:
            answers = [symbolizer.at_address(build_id, each) for each in addresses]
            is_read = any(frame.line for each in answers for frame in each.frames)
            is_tried = any(each.why != NOT_LOADED for each in answers)
            return symbolizer.name if is_tried and not is_read else None
    except (UsageError, BuildIdFsError, OSError) as error:
        _log.info("the symbolizer cannot be tried: %s", error)
        return None


def _addresses(read_at: ReadAt, size: int) -> Iterator[int]:
    """Yield addresses at which code of units with line tables begins, in a linked file."""
    parsed = parse_header(read_at(0, _HEADER_BYTES))
    if parsed is None or parsed[1][0] not in (ET_EXEC, ET_DYN):
        return
    units = Units(Sections(read_at, size), read_at, size, _WORK)
    for entry in units.entries(_UNITS, lambda version, kind: True):
        form, address = entry.numbers.get(AT_LOW_PC, (0, 0))
        if form == FORM_ADDRESS and address and entry.number(AT_STMT_LIST) is not None:
            yield address
