# SPDX-License-Identifier: Apache-2.0
"""The aliases of a file that is captured, and those that it makes other files need.

The code hash is one more SHA-256 over much of a file. Only files that can be of use to it have one:
those without a build ID, which may have an unstripped twin, and those whose build ID is that of
another file as well, which may be unrelated.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from buildidfs.capture import elf_file
from buildidfs.errors import BuildIdFsError
from buildidfs.formats.elf import identity
from buildidfs.model import AdoptedId, Alias, AliasType, Digest, Kind

if TYPE_CHECKING:
    from buildidfs.formats.elf.identify import ElfFile
    from buildidfs.store import Store

#: With three the build ID is known to be shared.
_OTHERS: Final = 3


def of_file(store: Store, fd: int, size: int, described: ElfFile, own: Digest) -> tuple[Alias, ...]:
    """The aliases of an open file with the digest ``own``. Raises OSError."""
    is_nameless = isinstance(described.build_id, AdoptedId)
    is_debug = described.kinds == (Kind.DEBUGINFO,)
    has_others = not is_debug and any(_others(store, described, own))
    code = is_nameless or has_others
    return identity.aliases(described, elf_file.reader(fd), size, code=code, crc=is_debug)


def codes(store: Store, described: ElfFile, own: Digest) -> tuple[tuple[Digest, Alias], ...]:
    """The code hashes of other executables with the same build ID, as far as they are missing."""
    if isinstance(described.build_id, AdoptedId) or Kind.EXECUTABLE not in described.kinds:
        return ()
    found = []
    for digest in _others(store, described, own):
        if any(alias.type is AliasType.CODE for alias in store.aliases.of(digest)):
            continue
        try:
            with store.blobs.open(digest) as blob:
                head = blob.read_at(0, identity.HTL_PART)
                code = identity.code_hash(head, blob.read_at, blob.size)
        except (OSError, BuildIdFsError):
            continue  # damaged, or removed meanwhile
        if code:
            found.append((digest, Alias(AliasType.CODE, code)))
    return tuple(found)


def _others(store: Store, described: ElfFile, own: Digest) -> list[Digest]:
    """The first other executables with the build ID of a file."""
    ordinal = store.index.ordinal(described.build_id)
    if ordinal is None:
        return []
    variants = store.index.variants_after(ordinal, Kind.EXECUTABLE)
    return [each.digest for each in islice(variants, _OTHERS + 1) if each.digest != own][:_OTHERS]
