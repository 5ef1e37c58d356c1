# SPDX-License-Identifier: Apache-2.0
"""Numbers of nodes. There is no table of nodes: the number contains all data.

A node is a file, directory or link of the view, and a mount uses its number as inode number. It
consists of numbers that the store never reuses, so it means the same after a remount. For a file it
means the same bytes for ever: a better variant is another node.

    static     below 2**16: directories and links that are always there
    of an ID   1<<60 | ordinal (31 bits) << 28 | slot (6 bits) << 22 | variant or depth (22 bits)
    path       2<<60 | path number (31 bits)                     a directory of perf's tree
    dwz        3<<60 | hash of its name (60 bits)                a directory below debug/.dwz
    perf's ID  1<<62 | path number (31 bits) << 31 | ordinal     perf/<path>/<id>
    browsing   1<<59 | form (3 bits) << 56 | A (28 bits) << 28 | B (28 bits)
               A is a number, or a container, and then B is a number within it (`of_browsing`)

0 is not a node. All numbers are below 2**63, because offsets of listings are signed.
"""

from __future__ import annotations

from typing import Final

from buildidfs.model import fingerprint

ABSENT: Final = 0

ROOT: Final = 1
BUILDID_LINK: Final = 2
DEBUG: Final = 3
DEBUG_BUCKETS: Final = 4
DWZ: Final = 5
PERF: Final = 6
PERF_BUCKETS: Final = 7
BUCKETS_LINK: Final = 8
DWZ_LINK: Final = 9
PERF_LINK: Final = 10
USR: Final = 11
USR_LIB: Final = 12
USR_LIB_DEBUG_LINK: Final = 13
DEBUG_BUCKET: Final = 0x100
"""With a byte added: the directory ``debug/.build-id/<that byte>``; `PERF_BUCKET` likewise."""
PERF_BUCKET: Final = 0x200

TAG_SHIFT: Final = 60
TAG_ID: Final = 1
TAG_PATH: Final = 2
TAG_DWZ: Final = 3
TAG_PERF_ID: Final = 4
"""The lowest of the four tags that mean this form, which has only two bits for the tag."""

SLOT_DIRECTORY: Final = 0
SLOT_PATH: Final = 16
SLOT_EXECUTABLE_LINK: Final = 17
SLOT_DEBUGINFO_LINK: Final = 18
SLOT_PERF_LINK: Final = 19
SLOT_DWZ_LINK: Final = 20
SLOT_VARIANTS: Final = 21
SLOT_BROWSE_LINK: Final = 22
"""A link to a directory of a build ID; the detail is the number of directories to go up."""
SLOT_SECTIONS: Final = 23
SLOT_SECTION: Final = 24
"""A section of a file; `layouts.id_dir.SectionDir` defines the detail."""
SLOT_README: Final = 25
"""The text in the directory of a build ID that unrelated programs share."""
SLOT_STAMPED: Final = 26
"""A file with the note of its adopted ID; `layouts.id_dir` defines the detail."""
SLOT_WANTED: Final = 27
"""A missing file that may be fetched when it is opened; the detail is its kind."""
SLOT_WANTED_LINK: Final = 28
"""A link below ``.build-id`` to a missing file that may be fetched."""
SLOT_LINKED: Final = 29
"""The directory ``.debug`` in the directory of a build ID."""
SLOT_ZEROED: Final = 32
"""Slots 1 to 15 are the kinds of artifact; with this bit, scripts in the file read as zeros."""

KIND_MASK: Final = 15
ORDINAL_SHIFT: Final = 28
SLOT_SHIFT: Final = 22
SLOT_MASK: Final = 63
SLOT_BITS: Final = SLOT_MASK << SLOT_SHIFT
DETAIL_MASK: Final = (1 << SLOT_SHIFT) - 1
VARIANT_MAX: Final = 2**16 - 1
NUMBER_MASK: Final = 2**31 - 1

FORM_FIXED: Final = 0
FORM_PATH: Final = 1
FORM_NAME: Final = 2
FORM_CONTAINER: Final = 3
"""The directory of a container; `FORM_CONTENTS` is for its ``root`` and the directories below."""
FORM_CONTENTS: Final = 4
FORM_TEXT: Final = 5
FORM_ALIAS: Final = 6
FORM_MISSING: Final = 7

BROWSE_SHIFT: Final = 59
_PLACE_TAGS: Final = frozenset((1, *range(2 * TAG_PATH, 2 * TAG_PERF_ID)))
_FORM_SHIFT: Final = 56
_CONTAINER_SHIFT: Final = 28
_FORM_MASK: Final = 7
_WITHIN_MASK: Final = (1 << _CONTAINER_SHIFT) - 1

_ID_BASE: Final = TAG_ID << TAG_SHIFT
_PATH_BASE: Final = TAG_PATH << TAG_SHIFT
_PERF_ID_BASE: Final = TAG_PERF_ID << TAG_SHIFT


def of_id(ordinal: int, slot: int = SLOT_DIRECTORY, detail: int = 0) -> int:
    """Return the node of the directory of a build ID, or of another part of it (``slot``)."""
    return _ID_BASE | ordinal << ORDINAL_SHIFT | slot << SLOT_SHIFT | detail


def ordinal_of(node: int) -> int:
    """Return the ordinal in a node made by `of_id`."""
    return node >> ORDINAL_SHIFT & NUMBER_MASK


def slot_of(node: int) -> int:
    """Return the slot in a node made by `of_id`."""
    return node >> SLOT_SHIFT & SLOT_MASK


def of_path(number: int) -> int:
    """Return the node of the directory for a path number in perf's tree; path 0 is the
    tree's root.
    """
    return _PATH_BASE | number if number else PERF


def path_of(node: int) -> int:
    """Return the path number of a node made by `of_path`."""
    return 0 if node == PERF else node & NUMBER_MASK


def of_perf_id(path: int, ordinal: int) -> int:
    """Return the node of the directory of a build ID below the path at which it was seen."""
    return _PERF_ID_BASE | path << 31 | ordinal


def any_ordinal_of(node: int) -> int:
    """Return the ordinal in a node made by `of_id` or `of_perf_id`, 0 for any other."""
    tag = node >> TAG_SHIFT
    if tag == TAG_ID:
        return node >> ORDINAL_SHIFT & NUMBER_MASK
    return node & NUMBER_MASK if tag >= TAG_PERF_ID else 0


def perf_id_of(node: int) -> tuple[int, int]:
    """Return path number and ordinal of a node made by `of_perf_id`."""
    return node >> 31 & NUMBER_MASK, node & NUMBER_MASK


def of_dwz(name: bytes) -> int:
    """Return the node of the directory ``debug/.dwz/<name>``; for the empty name that of
    ``debug/.dwz``.

    The names come from hostile files. It takes 2**60 attempts to find the hash of a given name; an
    attacker who finds two names with one hash confuses only those two.
    """
    if not name:
        return DWZ
    digest = fingerprint(name, 8)
    return TAG_DWZ << TAG_SHIFT | int.from_bytes(digest, "big") >> 4


def of_browsing(form: int, number: int = 0, within: int = 0) -> int:
    """Return a node of the trees for people: for a number, or for a number within a container."""
    return 1 << BROWSE_SHIFT | form << _FORM_SHIFT | number << _CONTAINER_SHIFT | within


def is_browsing(node: int) -> bool:
    """Return True for a node made by `of_browsing`."""
    return node >> BROWSE_SHIFT == 1


def is_place(node: int) -> bool:
    """Return True for a directory whose entries show where files were seen.

    Not every viewer may know of each entry.
    """
    return node >> BROWSE_SHIFT in _PLACE_TAGS or node in (PERF, DWZ)


def is_dwz(node: int) -> bool:
    """Return True for ``debug/.dwz`` and the directories below it."""
    return node == DWZ or node >> TAG_SHIFT == TAG_DWZ


def is_alias(node: int) -> bool:
    """Return True for the link of an alias, among the nodes in the root directory."""
    return node & SLOT_BITS != 0


def is_path_text(node: int) -> bool:
    """Return True for the file ``path`` of a build ID."""
    return node >> TAG_SHIFT == TAG_ID and node >> SLOT_SHIFT & SLOT_MASK == SLOT_PATH


def is_wanted(node: int) -> bool:
    """Return True for a missing file that may be fetched when it is opened."""
    return node >> TAG_SHIFT == TAG_ID and node >> SLOT_SHIFT & SLOT_MASK == SLOT_WANTED


def leads_to_wanted(node: int) -> bool:
    """Return True for a missing file that may be fetched, and for a link to one.

    Such a name may soon lead elsewhere.
    """
    slot = node >> SLOT_SHIFT & SLOT_MASK
    return node >> TAG_SHIFT == TAG_ID and slot in (SLOT_WANTED, SLOT_WANTED_LINK)


def form_of(node: int) -> int:
    """Return the form of a node made by `of_browsing`."""
    return node >> _FORM_SHIFT & _FORM_MASK


def number_of(node: int) -> int:
    """Return the number of a node made by `of_browsing` that is in no container."""
    return node & NUMBER_MASK


def container_of(node: int) -> tuple[int, int]:
    """Return the container of a node made by `of_browsing`, and the number in it."""
    return node >> _CONTAINER_SHIFT & _WITHIN_MASK, node & _WITHIN_MASK


README: Final = of_browsing(FORM_FIXED, within=1)
BY_PATH: Final = of_browsing(FORM_PATH)
BY_NAME: Final = of_browsing(FORM_NAME)
CONTAINERS: Final = of_browsing(FORM_FIXED, within=2)
MISSING: Final = of_browsing(FORM_FIXED, within=3)
