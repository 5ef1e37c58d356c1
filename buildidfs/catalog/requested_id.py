# SPDX-License-Identifier: Apache-2.0
"""The build ID that a user means: its first digits, an alias, or the path of a file that has it."""

from __future__ import annotations

import os
from itertools import islice
from typing import TYPE_CHECKING, Final

from buildidfs.capture.unresponsive.file_helper import check_readable
from buildidfs.catalog import history
from buildidfs.catalog.containers import Names
from buildidfs.catalog.coverage import CoverageLookup
from buildidfs.errors import AmbiguousBuildId, ArtifactMissing, InvalidBuildId, UsageError
from buildidfs.formats.elf.other_ids import is_typed
from buildidfs.linux import inodes
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import BuildId, Digest, Kind
from buildidfs.names import is_hex, printable
from buildidfs.wording import abridged

if TYPE_CHECKING:
    from buildidfs.catalog.history import SightedPath
    from buildidfs.model import Artifact
    from buildidfs.store import Store

_LEAST_DIGITS: Final = 16
_MOST_SHOWN: Final = 4
_SHA256_DIGITS: Final = 64


def is_path(text: str) -> bool:
    """Return True if ``text`` is meant as the path of a file.

    Hexadecimal digits are a build ID or an alias, and so is a text that begins with the type of an
    alias (``htl:``). A Go build ID looks like a path.
    """
    return bool(text) and not is_hex(text) and not is_typed(text)


def build_id(store: Store, text: str, container: str | None = None) -> BuildId:
    """Return the build ID that a user means by the beginning of a known build ID, an alias, or a
    path.

    A path means the file that is there now if the store knows it, else the last file that was seen
    there on this host, or in containers if all had the same build ID. ``container`` restricts the
    search to one container. If the store has no such build ID, one that only the journal has is
    meant. Raises `InvalidBuildId`, `AmbiguousBuildId`, `ArtifactMissing`.
    """
    if is_path(text):
        if not os.path.lexists(text) and (found := store.aliases.named(text)) is not None:
            return store.match(f"sha256:{found[0]}")
        return _at_path(store, text, container)
    try:
        return store.match(text)
    except ArtifactMissing:
        seen = store.journal.beginning(text.lower()) if is_hex(text) else set()
        if not seen:
            raise
    if len(seen) > 1:
        shown = abridged(sorted(map(str, seen)), _MOST_SHOWN)
        raise AmbiguousBuildId(f"{text} is ambiguous: {shown}")
    return seen.pop()


def file(store: Store, build_id: BuildId, text: str) -> Artifact | None:
    """Return the file that a user means by its SHA-256; None if ``text`` is not a SHA-256."""
    digits = text.lower().removeprefix("sha256:")
    ordinal = store.index.ordinal(build_id)
    if len(digits) != _SHA256_DIGITS or not is_hex(digits) or ordinal is None:
        return None
    refs = store.index.variants_with(Digest(bytes.fromhex(digits)), ordinal)
    return store.index.artifact_variant(ordinal, *min(refs)) if refs else None


def artifact(store: Store, build_id: BuildId, text: str, kind: str | None) -> Artifact:
    """Return the file that a user means: by a SHA-256 (``text``), by the name of a ``kind``, or by
    default that of the first kind.

    Raises `ArtifactMissing`.
    """
    if (exact := file(store, build_id, text)) is not None:
        return exact
    ordinal = store.index.ordinal(build_id) or 0
    for each in list(Kind) if kind is None else [Kind[kind.upper()]]:
        if (found := store.index.artifact(ordinal, each)) is not None:
            return found
    shared = why_ambiguous(store, build_id)
    removed = CoverageLookup(store).removed(build_id)
    removed = removed and f": {removed}"
    raise ArtifactMissing(shared or f"no {kind or 'file'} is kept for build ID {build_id}{removed}")


def why_ambiguous(store: Store, build_id: BuildId) -> str | None:
    """Return a note that unrelated programs share a build ID, with their other IDs; None
    otherwise.
    """
    ordinal = store.index.ordinal(build_id)
    if ordinal is None or not store.aliases.is_ambiguous(ordinal):
        return None
    kept = store.index.variants(ordinal, Kind.EXECUTABLE)
    adopted = [store.aliases.adopted_id(each.digest) for each in islice(kept, _MOST_SHOWN + 1)]
    shown = [str(each) for each in adopted if each is not None]
    return (
        f"unrelated programs have build ID {build_id}, and nothing is served under it; the adopted"
        f" IDs tell them apart: {abridged(shown, _MOST_SHOWN)}"
    )


def future_build_id(store: Store, text: str, container: str | None = None) -> BuildId:
    """Do as `build_id`, but also accept a whole build ID that the store does not know yet."""
    try:
        return build_id(store, text, container)
    except ArtifactMissing:
        if is_path(text):
            raise
        if len(text) < _LEAST_DIGITS:
            raise ArtifactMissing(
                f"nothing is known of build ID {text}: what is not here yet has to be given in full"
            ) from None
        return BuildId.from_hex(text.lower())


def unless_file(store: Store, text: str) -> BuildId | None:
    """Return the build ID that a user means; None if the text is a file to be read for build IDs.

    Such a file is a profile, a core file or a binary. Raises as `future_build_id`, and `UsageError`
    for a path that is not known.
    """
    if is_path(text) and os.path.lexists(text):
        return None
    try:
        return future_build_id(store, text)
    except (ArtifactMissing, InvalidBuildId):
        if not is_path(text):
            raise
        shown = printable(text)
        raise UsageError(
            f"{shown} is no file, no build ID, and nothing was ever seen there"
        ) from None


def _at_path(store: Store, text: str, container: str | None) -> BuildId:
    path = os.fsencode(text)
    here = [] if container is not None else [os.path.abspath(path), os.path.realpath(path)]
    places = history.at_path(store, path, container, others=here)
    present = None if container is not None else id_at(path)
    if present is not None and (
        store.index.ordinal(present) is not None
        or any(place.build_id == present for place in places)
    ):
        return present
    on_host = [place for place in places if not place.container]
    distinct = {place.build_id: place for place in reversed(on_host[:1] or places)}
    if len(distinct) == 1:
        return next(iter(distinct))
    if distinct:
        raise AmbiguousBuildId(_several(store, path, list(reversed(distinct.values()))))
    if present is not None:
        raise ArtifactMissing(
            f"{printable(path)} has build ID {present}, of which nothing is known:"
            f" buildidfs add {printable(path)} captures it"
        )
    if b"/" not in path and not os.path.lexists(path):
        raise InvalidBuildId(f"no such file, and no build ID or the start of one: {text!r}")
    if container is None and os.path.lexists(path):
        fault = "is no ELF file with a build ID" if os.access(path, os.R_OK) else "cannot be read"
        raise ArtifactMissing(f"{printable(path)} {fault}, and nothing was ever seen there")
    where = ", and there is no such file" if container is None else f" in container {container}"
    name = os.path.basename(text)
    raise ArtifactMissing(
        f"nothing was ever seen at {printable(path)}{where}; for a part of a path try"
        f" buildidfs which --glob '*/{printable(name)}'"
    )


def id_at(path: bytes) -> BuildId | None:
    """Return the build ID of the file that is at a path now; None if it has none or
    cannot be read.

    The owner of the path cannot make the caller wait, neither with a lease on the file nor with a
    FIFO that replaces it.
    """
    from buildidfs.capture import base

    try:
        check_readable(path)
        with closing_fd(inodes.open_regular(path)) as fd:
            found = base.identify(fd)
    except (OSError, UsageError):
        return None
    return found if isinstance(found, BuildId) else None


def _several(store: Store, path: bytes, places: list[SightedPath]) -> str:
    names = Names(store)
    shown = [
        f"{place.build_id.hex()[:12]} in {names.short(place.container, place.cgroup) or 'the host'}"
        for place in places[: _MOST_SHOWN + 1]
    ]
    return (
        f"{len(places)} build IDs were seen at {printable(path)}: {abridged(shown, _MOST_SHOWN)};"
        " give one of them, or the container"
    )
