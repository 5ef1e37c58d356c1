# SPDX-License-Identifier: Apache-2.0
"""Values that go into the store and come out of it, beside those of `model`.

All of these are plain values; how they are laid out on disk is in `schema`.
"""

from __future__ import annotations

import msgspec

from buildidfs.model import (
    Absence,
    Alias,
    BuildId,
    ByteRange,
    Digest,
    FileIdentity,
    Kind,
    Origin,
    Quality,
    Sighting,
)
from buildidfs.store.blobs.files import Staged


class NewCapture(msgspec.Struct, frozen=True):
    """One identified file to be committed: its bytes, their description, and their place.

    ``content`` is what `Store.stage` returned, or the digest of bytes that the store holds
    already (`Store.held`). A file that is executable and debuginfo in one names both kinds.
    ``remember`` is False for a file that may change without a trace in its identity: the next scan
    reads it again. ``supplement`` is the name and the build ID of the dwz file that debuginfo
    refers to, None if that is not known. ``aliases`` are other names of the bytes, and ``codes``
    those of other blobs with the same build ID that had none. ``shared`` is the build ID in the
    file if it is one that files share by mistake, and ``build_id`` another one. ``derive`` asks for
    a debug file to be made of the bytes later, see `Store.derivations`.
    """

    sighting: Sighting
    content: Staged | Digest
    build_id: BuildId
    kinds: tuple[Kind, ...]
    quality: Quality = Quality.NONE
    scripts: tuple[ByteRange, ...] = ()
    segments: int = 0
    remember: bool = True
    supplement: tuple[bytes, BuildId] | None = None
    truncated: bool = False
    aliases: tuple[Alias, ...] = ()
    codes: tuple[tuple[Digest, Alias], ...] = ()
    shared: BuildId | None = None
    derive: bool = False


class NewAbsence(msgspec.Struct, frozen=True):
    """A file that has no build ID, so that it is not read again; ``remember`` as above."""

    identity: FileIdentity
    seen_ns: int
    absence: Absence
    remember: bool = True


class NewSeen(msgspec.Struct, frozen=True):
    """A journal entry: a file with this build ID was seen. The store need not have its bytes.

    ``boot`` is the boot ID (16 bytes) of the system it was seen on; None is this one. ``noted``
    says that there was no room for its bytes, and that they can be had where it was seen.
    """

    sighting: Sighting
    build_id: BuildId
    boot: bytes | None = None
    noted: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """The result of committing one `NewCapture`.

    ``refused`` is empty, or says in words why nothing was recorded for it. ``noted`` says that its
    bytes were dropped for lack of room, because the file is recapturable. ``gone`` says that it was
    given as a digest, and that the store has removed those bytes meanwhile: nothing was recorded,
    and the file has to be read again.
    """

    ordinal: int
    new_id: bool = False
    new_variant: bool = False
    new_blob: bool = False
    new_origin: bool = False
    refused: str = ""
    gone: bool = False
    noted: bool = False


class CommitResult(msgspec.Struct, frozen=True):
    """The result of a commit; ``outcomes`` is in the order of the captures given.

    ``changed`` are the ordinals that listeners were told of: names or served bytes changed.
    """

    outcomes: tuple[Outcome, ...] = ()
    changed: tuple[int, ...] = ()
    blobs_added: int = 0
    bytes_added: int = 0


class Pin(msgspec.Struct, frozen=True):
    """A pin of a build ID, with its name and the time of its creation (Unix time, ns)."""

    build_id: BuildId
    name: bytes
    created_ns: int


class OriginRecord(msgspec.Struct, frozen=True):
    """One place where bytes of a build ID were seen, and when first and last (Unix time, ns).

    ``kinds`` are the kinds those bytes are served as.
    """

    origin: Origin
    kinds: tuple[Kind, ...]
    digest: Digest
    first_seen_ns: int
    last_seen_ns: int


class Held(msgspec.Struct, frozen=True):
    """The facts that the store has about bytes it holds."""

    digest: Digest
    size: int
    ordinal: int
    build_id: BuildId
    kinds: tuple[Kind, ...]
    quality: Quality
    scripts: tuple[ByteRange, ...]
    segments: int = 0
    truncated: bool = False


class Remembered(msgspec.Struct, frozen=True):
    """The result of an earlier look at exactly this file.

    ``build_id`` is None when it had none, and ``absence`` then says why.
    """

    build_id: BuildId | None = None
    absence: Absence | None = None


class StoreStats(msgspec.Struct, frozen=True):
    """Counts and sizes of a store. Sizes in bytes; ``artifacts`` counts (build ID, kind) by kind.

    ``variants`` counts what is kept but not served, ``remembered`` the files that will be
    recognised without being read, ``free_bytes`` what an unprivileged writer may still use,
    ``journal`` the rows of the journal, ``stored_bytes`` what the files of blobs take, ``pins`` the
    rows of pins; ``adopted`` and ``ambiguous`` count build IDs, see `Artifact.adopted` and
    `Aliases.is_ambiguous`.
    """

    ids: int
    artifacts: dict[Kind, int]
    variants: int
    blobs: int
    blob_bytes: int
    origins: int
    paths: int
    remembered: int
    index_bytes: int
    free_bytes: int
    journal: int = 0
    stored_bytes: int = 0
    pins: int = 0
    adopted: int = 0
    ambiguous: int = 0
