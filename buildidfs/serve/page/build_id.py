# SPDX-License-Identifier: Apache-2.0
"""The page of a build ID, and the comparison of two files with it.

The page shows the files held, the files missing, the places, and the contents of the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import shlex
from itertools import islice
from typing import TYPE_CHECKING, Final

from buildidfs import answers
from buildidfs.catalog import artifacts
from buildidfs.errors import IntegrityError
from buildidfs.formats.elf.header import SHT_NOBITS, SHT_NULL
from buildidfs.formats.elf.sections import Sections, functions
from buildidfs.model import Kind
from buildidfs.names import is_of_sources, printable
from buildidfs.profile.why import Explainer
from buildidfs.serve.page.overview import text
from buildidfs.store import run_files
from buildidfs.store.permissions import PUBLIC, is_public, may_see

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from buildidfs.catalog.containers import Names
    from buildidfs.formats.elf.sections import FunctionSymbol
    from buildidfs.model import Artifact, BuildId, Digest
    from buildidfs.store import Blob, OriginRecord, Store

MOST_PLACES: Final = 50
MOST_VARIANTS: Final = 50
MOST_SECTIONS: Final = 200
MOST_FUNCTIONS: Final = 20
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
_BEST: Final = {0: "missing", 1: "dynsym", 2: "symbols", 3: "symbols", 4: "debuginfo"}


def page(store: Store, build_id: BuildId, names: Names) -> answers.BuildIdPage | None:
    """Return the public facts about a build ID; None if it has none.

    Raises `StoreError`, `IntegrityError`.
    """
    ordinal = store.index.ordinal(build_id)
    if ordinal is None or is_of_sources(build_id):
        return None
    variants = {kind: public_variants(store, ordinal, kind) for kind in Kind}
    variants = {kind: kept for kind, kept in variants.items() if kept}
    if not variants:
        return None
    served = {kind: store.index.artifact(ordinal, kind) for kind in Kind}
    shown = {kind: each for kind, each in served.items() if is_public(each)}
    is_open = all(each is None or is_public(each) for each in served.values())
    origins = [each for each in store.index.origins(ordinal) if may_see(PUBLIC, each.origin)]
    explained = Explainer(store, PUBLIC).build_id(build_id)
    executable, debuginfo = shown.get(Kind.EXECUTABLE), shown.get(Kind.DEBUGINFO)
    largest, count = functions_in(store, debuginfo or executable)
    best = max((each.quality for each in shown.values()), default=0)
    return answers.BuildIdPage(
        build_id=build_id.hex(),
        name=text(origins[0].origin.path.rpartition(b"/")[2]) if origins else "",
        first_seen=min((each.first_seen_ns for each in origins), default=0) / 1e9 or None,
        last_seen=max((each.last_seen_ns for each in origins), default=0) / 1e9 or None,
        coverage=_BEST[int(best)] if shown else "withheld",
        findings=explained.findings,
        missing=(
            artifacts.missing(store, build_id, artifacts.split_dwarf(store, build_id))
            if is_open
            else []
        ),
        conflicts=[
            f"{len(kept)} files have this build ID as {kind.name.lower()}"
            for kind, kept in variants.items()
            if len(kept) > 1
        ],
        variants=variants_of(store, build_id, variants),
        places=[_place(each, names) for each in origins[:MOST_PLACES]],
        places_total=len(origins),
        sections=sections_in(store, executable or debuginfo),
        functions=largest,
        functions_total=count,
        downloads=_downloads(build_id, shown),
        lines=_lines(store, build_id, shown),
    )


def public_variants(store: Store, ordinal: int, kind: Kind) -> list[Artifact]:
    """Return the files of a kind that every user may read, best first, up to the limit
    of the page.
    """
    return list(islice(filter(is_public, store.index.variants(ordinal, kind)), MOST_VARIANTS))


def variants_of(
    store: Store, build_id: BuildId, kept: dict[Kind, list[Artifact]]
) -> list[answers.Variant]:
    """Return the files ``kept`` of a build ID, without owner and mode.

    Raises `StoreError`, `IntegrityError`.
    """
    names = answers.Variant.__struct_fields__
    return [
        answers.Variant(*(getattr(each, name) for name in names))
        for each in artifacts.variants(store, build_id, kept)
    ]


def _place(record: OriginRecord, names: Names) -> answers.Place:
    origin = record.origin
    called = names.of(origin.container, origin.cgroup)
    return answers.Place(
        path=text(origin.path),
        container=text(origin.container),
        container_name=text(called.shown),
        image=text(called.image.partition("\n")[0]),
        host=text(origin.host),
        kinds=[kind.name.lower() for kind in record.kinds],
        first_seen=record.first_seen_ns / 1e9,
        last_seen=record.last_seen_ns / 1e9,
    )


_SERVED: Final = {Kind.EXECUTABLE: "executable", Kind.DEBUGINFO: "debuginfo"}


def _downloads(build_id: BuildId, shown: dict[Kind, Artifact]) -> list[answers.Download]:
    return [
        answers.Download(what, f"/buildid/{build_id.hex()}/{what}", shown[kind].size)
        for kind, what in _SERVED.items()
        if kind in shown
    ]


def _lines(store: Store, build_id: BuildId, shown: dict[Kind, Artifact]) -> list[answers.Line]:
    """Return command lines for gdb, perf and lldb, and for the machine of the store."""
    text_id = build_id.hex()
    mounted = run_files.mount_point(store.path) or b"/buildid"
    root = shlex.quote(printable(mounted))
    elf, debug = f"{root}/{text_id}/elf", f"{root}/{text_id}/debug"
    lines = []
    if Kind.DEBUGINFO in shown:
        lines.append(answers.Line("gdb, with the mount", f"gdb {elf} -s {debug}"))
    elif Kind.EXECUTABLE in shown:
        lines.append(answers.Line("gdb, with the mount", f"gdb {elf}"))
    lines += [
        answers.Line("perf, with the mount", f"perf --buildid-dir {root}/perf report"),
        answers.Line(
            "lldb, with the mount",
            f"lldb -O 'settings append target.debug-file-search-paths {root}/debug'",
        ),
        answers.Line("processes that run it now", f"buildidfs where --live {text_id}"),
        answers.Line("all that the store knows", f"buildidfs show {text_id}"),
    ]
    return lines


# --- what is in a file ---------------------------------------------------------------------------


def sections_in(store: Store, artifact: Artifact | None) -> list[answers.Section]:
    """Return the largest sections of a file; none if it cannot be read, or is not an ELF file."""
    if artifact is None:
        return []
    with contextlib.suppress(OSError, IntegrityError), store.blobs.open(artifact.digest) as blob:
        headers = Sections(blob.read_at, blob.size).headers
        real = [each for each in headers if each.size and each.type not in (SHT_NULL, SHT_NOBITS)]
        largest = heapq.nlargest(MOST_SECTIONS, real, key=lambda each: each.size)
        return [answers.Section(text(each.name), min(each.size, blob.size)) for each in largest]
    return []


def functions_in(store: Store, artifact: Artifact | None) -> tuple[list[answers.Function], int]:
    """Return the largest functions of a file, and the number of all."""
    if artifact is None:
        return [], 0
    count = 0

    def counted(found: Iterable[FunctionSymbol]) -> Iterator[FunctionSymbol]:
        nonlocal count
        for count, each in enumerate(found, 1):  # noqa: B007 - for the page
            yield each

    with contextlib.suppress(OSError, IntegrityError), store.blobs.open(artifact.digest) as blob:
        found = functions(Sections(blob.read_at, blob.size))
        largest = heapq.nlargest(MOST_FUNCTIONS, counted(found), key=lambda each: each.size)
        shown = [answers.Function(text(each.name), each.address, each.size) for each in largest]
        return shown, count
    return [], 0


# --- two files -----------------------------------------------------------------------------------

_Parts = dict[bytes, str]


def compared(
    store: Store, build_id: BuildId, left: Digest, right: Digest
) -> answers.Compared | None:
    """Return the differences of two files; None unless both are public.

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
    sections, symbols = zip(*parts, strict=True)
    differences += _different("section", *sections)
    differences += _different("function", *symbols)
    same = sum(sections[1].get(name) == value for name, value in sections[0].items())
    return answers.Compared(
        build_id.hex(), shown[0], shown[1], same, differences[:MOST_DIFFERENCES], len(differences)
    )


def _artifact(store: Store, ordinal: int, digest: Digest) -> Artifact | None:
    """Return the file of a build ID with a digest, if every user may read it."""
    for kind, variant in store.index.variants_with(digest, ordinal):
        artifact = store.index.artifact_variant(ordinal, Kind(kind), variant)
        if is_public(artifact):
            return artifact
    return None


def _variant(store: Store, build_id: BuildId, artifact: Artifact) -> answers.Variant:
    """Return the entry of a file on the page of the build ID."""
    kept = public_variants(store, artifact.ordinal, artifact.kind)
    if artifact not in kept:
        kept.append(artifact)
    return variants_of(store, build_id, {artifact.kind: kept})[kept.index(artifact)]


def _contents(store: Store, artifact: Artifact) -> tuple[_Parts, _Parts]:
    """Return the sections of a file with size and digest, and its functions with their size."""
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
        some = islice(functions(headers), _MOST_FUNCTIONS)
        return sections, {each.name: f"{each.size} bytes" for each in some}
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
