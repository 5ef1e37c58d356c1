# SPDX-License-Identifier: Apache-2.0
"""Split DWARF: references to debug information in ``.dwo`` files, or in a ``.dwp`` of them all.

The linked file has only skeleton units. Each skeleton has a DWO ID of 64 bits, which identifies the
complete unit that belongs to it, and the name of the file into which the compiler wrote the
complete unit. A package has an index of DWO IDs. DWARF 5, sections 3.1.2, 7.3.5 and 7.5.1.2, and,
for version 4, gcc.gnu.org/wiki/DebugFission, whose attributes are those beginning with DW_AT_GNU.

The numbers of units, abbreviations, attributes and bytes are bounded; no input raises.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.formats.elf.sections import Sections
from buildidfs.formats.elf.units import AT_COMP_DIR, UT_SKELETON, Units

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.formats.elf.header import ReadAt

UNITS_MAX: Final = 4096
"""The most units that are read."""

# Declarations of attributes in all units together, which bounds the work for one file.
_WORK_MAX: Final = 1 << 16
_SECTION_MAX: Final = 8 << 20

_DW_AT_DWO_NAME: Final = (0x76, 0x2130)
_DW_AT_GNU_DWO_ID: Final = 0x2131

_INDEX_VERSIONS: Final = frozenset((2, 5))


class Skeleton(NamedTuple):
    """A unit whose debug information is in another file.

    ``name`` is the path of that file at compilation, relative to ``directory``; either may be
    empty.
    """

    dwo_id: int
    name: bytes
    directory: bytes


def skeletons(read_at: ReadAt, size: int, units: int = UNITS_MAX) -> Iterator[Skeleton]:
    """Yield the skeletons among the first ``units`` units in an ELF file of ``size`` bytes."""
    sections = Sections(read_at, size)
    if sections.debug(b".debug_info") is None or sections.debug(b".debug_addr") is None:
        return
    for entry in Units(sections, read_at, size, _WORK_MAX).entries(units, _may_be_skeleton):
        dwo_id = entry.number(_DW_AT_GNU_DWO_ID)
        if dwo_id is None:
            dwo_id = entry.dwo_id
        if dwo_id is not None:
            yield Skeleton(dwo_id, entry.text(*_DW_AT_DWO_NAME), entry.text(AT_COMP_DIR))


def _may_be_skeleton(version: int, kind: int) -> bool:
    return version == 4 or (version == 5 and kind == UT_SKELETON)


def packaged(read_at: ReadAt, size: int) -> frozenset[int]:
    """Return the DWO IDs of the units in a ``.dwp`` file of ``size`` bytes; empty for any other
    file.
    """
    sections = Sections(read_at, size)
    index = sections.contents(sections.named(b".debug_cu_index"), _SECTION_MAX)
    if len(index) < 16:
        return frozenset()
    order = "<" if sections.little_endian else ">"
    half, word = Struct(order + "H"), Struct(order + "4I")
    version, _, _, slots = word.unpack_from(index)
    if version not in _INDEX_VERSIONS and half.unpack_from(index)[0] not in _INDEX_VERSIONS:
        return frozenset()
    slots = min(slots, (len(index) - 16) // 8)
    return frozenset(Struct(f"{order}{slots}Q").unpack_from(index, 16)) - {0}
