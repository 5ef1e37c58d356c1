# SPDX-License-Identifier: Apache-2.0
"""Two files with the same build ID side by side: what differs of their facts and their contents."""

from __future__ import annotations

import contextlib
import hashlib
from itertools import islice
from typing import TYPE_CHECKING, Final

from buildidfs.app.page import answers
from buildidfs.app.page.build_id import public_variants, variants_of
from buildidfs.app.page.overview import text
from buildidfs.errors import IntegrityError
from buildidfs.formats.elf.header import SHT_NOBITS, SHT_NULL
from buildidfs.formats.elf.sections import Sections
from buildidfs.formats.elf.sections import functions as functions_of
from buildidfs.model import Kind
from buildidfs.view.permissions import is_public

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from buildidfs.model import Artifact, BuildId, Digest
    from buildidfs.store import Blob, Store

MOST_DIFFERENCES: Final = 200
_MOST_HASHED: Final = 256 << 20
_MOST_FUNCTIONS: Final = 50_000
_PIECE: Final = 1 << 20
_FACTS: Final = (
    "kind",
    "size",
    "quality",
    "trust",
    "standing",
    "made_of",
    "gdb_scripts",
    "adopted",
)
_ABSENT: Final = "–"


def page(store: Store, build_id: BuildId, left: Digest, right: Digest) -> answers.Compared | None:
    """The differences of two files; None if not both may be told of.

    Sections are compared byte by byte, up to 256 MiB of each file. Raises `StoreError`,
    `IntegrityError`.
    """
    ordinal = store.index.ordinal(build_id)
    if ordinal is None:
        return None
    one, other = _artifact(store, ordinal, left), _artifact(store, ordinal, right)
    if one is None or other is None:
        return None
    shown = _variant(store, build_id, one), _variant(store, build_id, other)
    differences = [
        answers.Difference("fact", name.replace("_", " "), *values)
        for name in _FACTS
        if (values := [str(getattr(each, name)) for each in shown])[0] != values[1]
    ]
    parts = [_contents(store, each) for each in (one, other)]
    sections, functions = zip(*parts, strict=True)
    differences += _different("section", *sections)
    differences += _different("function", *functions)
    same = sum(sections[1].get(name) == value for name, value in sections[0].items())
    return answers.Compared(
        build_id.hex(),
        shown[0],
        shown[1],
        same,
        differences[:MOST_DIFFERENCES],
        len(differences),
    )


def _artifact(store: Store, ordinal: int, digest: Digest) -> Artifact | None:
    """The file of a build ID with a digest, if every user may read it."""
    for kind, variant in store.index.variants_with(digest, ordinal):
        artifact = store.index.artifact_variant(ordinal, Kind(kind), variant)
        if is_public(artifact):
            return artifact
    return None


def _variant(store: Store, build_id: BuildId, artifact: Artifact) -> answers.Variant:
    """Return the entry of a file as the page of the build ID has it."""
    kept = public_variants(store, artifact.ordinal, artifact.kind)
    if artifact not in kept:
        kept.append(artifact)
    return variants_of(store, build_id, artifact.kind, kept)[kept.index(artifact)]


_Parts = dict[bytes, str]


def _contents(store: Store, artifact: Artifact) -> tuple[_Parts, _Parts]:
    """Sections of a file with size and digest, and functions with their size."""
    with contextlib.suppress(OSError, IntegrityError), store.blobs.open(artifact.digest) as blob:
        headers = Sections(blob.read_at, blob.size)
        sections: _Parts = {}
        left = _MOST_HASHED
        for each in headers.headers:
            if each.type in (SHT_NULL, SHT_NOBITS) or each.offset + each.size > blob.size:
                continue
            known = f"{each.size} bytes"
            if each.size <= left:
                left -= each.size
                known += f", {_digest(blob, each.offset, each.size)}"
            sections.setdefault(each.name, known)
        some = islice(functions_of(headers), _MOST_FUNCTIONS)
        functions = {each.name: f"{each.size} bytes" for each in some}
        return sections, functions
    return {}, {}


def _digest(blob: Blob, offset: int, size: int) -> str:
    found = hashlib.sha256()
    for at in range(offset, offset + size, _PIECE):
        found.update(blob.pread(min(_PIECE, offset + size - at), at))
    return found.hexdigest()[:12]


def _different(
    what: str, left: Mapping[bytes, str], right: Mapping[bytes, str]
) -> Iterator[answers.Difference]:
    for name in dict.fromkeys((*left, *right)):
        one, other = left.get(name, _ABSENT), right.get(name, _ABSENT)
        if one != other:
            yield answers.Difference(what, text(name), one, other)
