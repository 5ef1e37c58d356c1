# SPDX-License-Identifier: Apache-2.0
"""Bundles: collect artifacts from a store into one file, and import them into another store.

A bundle may also list the source files that its debuginfo names. The names depend on the author of
the file, so they are bounded and not trusted.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture import base
from buildidfs.capture.base import PinnedFile, reached
from buildidfs.capture.origin.builder import access_of
from buildidfs.capture.unresponsive.file_helper import check_readable
from buildidfs.catalog.containers import Names
from buildidfs.catalog.coverage import CoverageLookup
from buildidfs.catalog.source_files import named_by
from buildidfs.errors import IntegrityError, UsageError
from buildidfs.formats import bundle_archive
from buildidfs.formats.elf.identify import ElfFile
from buildidfs.linux import inodes, machine
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import NO_NAMES, QUALITIES, Absence, BuildId, Digest, Kind, Quality, Trust
from buildidfs.names import printable
from buildidfs.store.blobs import files
from buildidfs.store.bundle import (
    BundleFile,
    captures,
    names_of_containers,
    sightings,
    write_bundle,
)
from buildidfs.store.export import open_draft, open_through

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import IO

    from buildidfs.capture.base import Found, Progress
    from buildidfs.formats.elf.identify import AltLink
    from buildidfs.formats.elf.line_files import SourceNames
    from buildidfs.ingest import ScanSummary
    from buildidfs.model import Access, Artifact
    from buildidfs.store import NewCapture, OriginRecord, Store

NO_SUPPLEMENT: Final = "dwz file never captured, which debuginfo in the bundle refers to"

_PLACES: Final = 16
_BATCH: Final = 256
_PARTIAL: Final = ".partial"
NOT_WANTED: Final = "not wanted"
NO_DEBUGINFO: Final = "no debuginfo is in the bundle"
TOO_MUCH: Final = "it names more than is listed"
PARTIAL: Final = "a part of its debug information is damaged or too large to be read"
TOO_LATE: Final = "no time was left for it"
_SECONDS: Final = 1800.0  # for all files together
_LIST_BYTES: Final = 1 << 30


def collect(
    store: Store, wanted: Mapping[BuildId, bytes], inputs: Sequence[bundle_archive.Input]
) -> bundle_archive.Manifest:
    """Return the manifest of a bundle of all files served under the build IDs ``wanted``.

    It includes the dwz files that their debuginfo refers to, and lists the build IDs with missing
    files. The values of ``wanted`` are the paths of the build IDs in the input, or empty.
    """
    items: list[bundle_archive.Item] = []
    absent: list[bundle_archive.Absent] = []
    waiting = sorted(wanted, reverse=True)
    supplements: dict[BuildId, AltLink] = {}
    holdings = CoverageLookup(store)
    while waiting:
        build_id = waiting.pop()
        ordinal = store.index.ordinal(build_id)
        found = (
            [store.index.artifact(ordinal, kind) for kind in Kind] if ordinal is not None else []
        )
        artifacts = [artifact for artifact in found if artifact is not None]
        origins = store.index.origins(ordinal) if ordinal is not None else []
        if build_id in wanted:
            path = _path(store, build_id, origins, wanted[build_id])
            why = "" if artifacts else holdings.why_absent(build_id)
            absent += _missing(build_id, artifacts, path, why)
        elif not artifacts:
            name = supplements[build_id].name.decode("utf-8", "replace")
            absent.append(bundle_archive.Absent(build_id.hex(), NO_SUPPLEMENT, name))
        for artifact in artifacts:
            items.append(_item(build_id, artifact, origins))
            link = _supplement(store, build_id, artifact)
            if link is not None and link.build_id not in wanted.keys() | supplements:
                supplements[link.build_id] = link
                waiting.append(link.build_id)
    return bundle_archive.Manifest(
        bundle_archive.VERSION,
        machine.host_name(),
        tuple(inputs),
        tuple(items),
        tuple(absent),
        containers=tuple(_named_containers(store, items)),
    )


def _named_containers(
    store: Store, items: Iterable[bundle_archive.Item]
) -> Iterator[bundle_archive.LabelNames]:
    """Yield the containers with names at the places of items, each once."""
    names = Names(store)
    for label in sorted({place.container for item in items for place in item.places}):
        called = names.of(label)
        if called != NO_NAMES:
            yield bundle_archive.LabelNames(
                label, called.name, called.pod, called.namespace, called.image
            )


def _item(
    build_id: BuildId, artifact: Artifact, origins: list[OriginRecord]
) -> bundle_archive.Item:
    seen = [record for record in origins if record.digest == artifact.digest]
    # If all users may read the file, all may know at least one of its places.
    first = next((record for record in seen if record.origin.is_public), None)
    seen = [record for record in seen if record is not first]
    seen = ([] if first is None else [first]) + seen[: _PLACES - (first is not None)]
    return bundle_archive.Item(
        build_id.hex(),
        artifact.kind.name.lower(),
        artifact.digest.hex(),
        artifact.size,
        artifact.mtime_ns,
        artifact.mode,
        artifact.quality.stored,
        artifact.trust,
        f"{artifact.segments:x}",
        tuple((extent.offset, extent.size) for extent in artifact.scripts),
        tuple(_place(record) for record in seen),
        artifact.truncated,
    )


def _place(record: OriginRecord) -> bundle_archive.BundlePlace:
    origin = record.origin
    path = origin.path.decode("utf-8", "replace")
    return bundle_archive.BundlePlace(
        path,
        record.first_seen_ns,
        record.last_seen_ns,
        _plain(origin.host),
        _plain(origin.container),
        b"" if path.encode() == origin.path else origin.path,
        origin.is_public,
    )


def _plain(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _path(store: Store, build_id: BuildId, origins: list[OriginRecord], given: bytes) -> str:
    """Return a path for the list of absent files: where the build ID was seen, or ``given``."""
    path = origins[0].origin.path if origins else given
    if not path:
        rows = store.journal.of(build_id)
        path = rows[0].path if rows else b""
    return path.decode("utf-8", "replace")


def _missing(
    build_id: BuildId, artifacts: list[Artifact], path: str, why: str
) -> list[bundle_archive.Absent]:
    kinds = {artifact.kind for artifact in artifacts}
    if not kinds:
        return [bundle_archive.Absent(build_id.hex(), why, path)]
    if Kind.EXECUTABLE in kinds and Kind.DEBUGINFO not in kinds:
        return [bundle_archive.Absent(build_id.hex(), "no debuginfo was captured", path)]
    if kinds == {Kind.DEBUGINFO}:
        return [bundle_archive.Absent(build_id.hex(), "only debuginfo was captured", path)]
    return []


def _supplement(store: Store, build_id: BuildId, artifact: Artifact) -> AltLink | None:
    """Return the reference of debuginfo to a dwz file.

    The result is None for executables: strip leaves the reference in them, but removes all sections
    that need the dwz file.
    """
    if artifact.kind is not Kind.DEBUGINFO or artifact.quality < Quality.DEBUGINFO:
        return None
    with store.open_blob(artifact.digest) as blob:
        described = base.describe(blob.fileno(), build_id)
    return None if isinstance(described, Absence) else described.altlink


def create(
    store: Store,
    wanted: Mapping[BuildId, bytes],
    inputs: Sequence[bytes],
    output: str | int,
    *,
    include_inputs: bool = False,
    list_sources: bool = True,
    progress: Progress | None = None,
) -> tuple[bundle_archive.Manifest, int]:
    """Write a bundle to a file, whole or not at all, or to a descriptor.

    Returns the manifest, and the number of bytes that were kept from an interrupted attempt, which
    is ``output`` with ".partial" appended. An existing device, FIFO or symbolic link is written to,
    not replaced. With ``list_sources`` the bundle also lists the source files that its debuginfo
    names, as far as this host can find them out.

    Raises `UsageError` if a file cannot be read or written, `IntegrityError`, `StoreError`.
    """
    done = total = 0

    def report_progress(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(0, "", size=done, share=done / total if total else None)

    with contextlib.ExitStack() as stack:
        given: list[int] = []
        named = []
        for path in inputs:
            size = None
            if include_inputs:
                given.append(_opened(path))
                stack.callback(os.close, given[-1])
                size = os.fstat(given[-1]).st_size
            named.append(
                bundle_archive.Input(os.path.basename(path).decode("utf-8", "replace"), size)
            )
        manifest = collect(store, wanted, named)
        listed = stack.enter_context(_scratch())
        about = bundle_archive.SourceList(why=NOT_WANTED)
        if list_sources:
            about = _list_sources(store, manifest.items, listed, progress)
        manifest = msgspec.structs.replace(manifest, sources=about)
        total = sum(each.size for each in manifest.items) + sum(each.size or 0 for each in named)
        if isinstance(output, int):
            try:
                write_bundle(
                    store,
                    manifest,
                    given,
                    output,
                    sources=listed.fileno(),
                    progress=report_progress,
                )
            except BrokenPipeError:
                raise
            except OSError as error:
                raise UsageError(f"cannot write the output: {error.strerror}") from error
            return manifest, 0
        kept = _write_file(store, manifest, given, listed.fileno(), output, report_progress)
    return manifest, kept


def _scratch() -> IO[bytes]:
    """Return an empty file without a name; it is in memory if no directory can be written to."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return open(os.memfd_create("buildidfs-bundle"), "w+b")


def _list_sources(
    store: Store, items: Sequence[bundle_archive.Item], file: IO[bytes], progress: Progress | None
) -> bundle_archive.SourceList:
    try:
        return write_source_list(store, items, file, progress)
    except OSError as error:
        return bundle_archive.SourceList(
            why=f"no room in {tempfile.gettempdir()}: {error.strerror}"
        )


def _opened(path: bytes) -> int:
    try:
        return inodes.open_regular(path)
    except OSError as error:
        raise UsageError(f"cannot read {printable(path)}: {error.strerror}") from error


def _write_file(
    store: Store,
    manifest: bundle_archive.Manifest,
    inputs: Sequence[int],
    listed: int,
    output: str,
    progress: Callable[[int], None],
) -> int:
    draft = output + _PARTIAL
    try:
        through = open_through(output)
        if through is not None:
            with open(through, "wb", buffering=0) as stream:
                return write_bundle(
                    store, manifest, inputs, stream.fileno(), sources=listed, progress=progress
                )
        with closing_fd(open_draft(draft)) as fd:
            kept = write_bundle(
                store, manifest, inputs, fd, sources=listed, resume=True, progress=progress
            )
            os.fsync(fd)
        os.rename(draft, output)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from error
    return kept


def import_(
    store: Store, path: str, *, trust: Trust = Trust.CONTAINER, progress: Progress | None = None
) -> tuple[bundle_archive.Manifest, ScanSummary]:
    """Import the files of a bundle into the store; files that the store has are not read.

    Every file is verified first, and no file gets more trust than ``trust``. Raises `UsageError`,
    `StoreError`, and `IntegrityError` for a damaged file; files before it stay imported.
    """
    from buildidfs.ingest import Ingest

    check_readable(os.fsencode(path))
    with BundleFile(path) as file:
        access = access_of(file.fileno())
        verified: set[Digest] = set()
        store.name_containers(names_of_containers(file.manifest))
        summary = Ingest(store).run(_pinned(store, file, trust, access, verified), progress)
        _record_places(store, file.manifest, trust, access, verified)
        file.check_sources()
        return file.manifest, summary


def _pinned(
    store: Store, file: BundleFile, trust: Trust, access: Access, verified: set[Digest]
) -> Iterator[Found]:
    """Yield the files of a bundle that the store lacks; add the digest of each to ``verified``."""
    done: set[tuple[str, str]] = set()
    for item in file.manifest.items:
        digest = Digest(bytes.fromhex(item.sha256))
        if (item.sha256, item.build_id) in done or store.held(digest) is not None:
            continue
        done.add((item.sha256, item.build_id))
        with tempfile.TemporaryFile() as copy:
            file.copy(digest, copy.fileno())
            verified.add(digest)
            build_id = BuildId.from_hex(item.build_id)
            kind = item.kind_of if item.kind_of in (Kind.VDSO, Kind.KALLSYMS) else None
            has = base.describe(copy.fileno(), build_id)
            own = has if isinstance(has, Absence) else has.shared or has.build_id
            if isinstance(has, ElfFile) and build_id not in (has.build_id, has.shared):
                raise IntegrityError(f"blob {digest} of the bundle has build ID {own}")
            if isinstance(has, Absence) and kind is not Kind.KALLSYMS:
                raise IntegrityError(f"blob {digest} of the bundle: {has}")
            yield PinnedFile(
                sightings(item, trust, access)[0], os.dup(copy.fileno()), kind, build_id
            )


def _record_places(
    store: Store,
    manifest: bundle_archive.Manifest,
    trust: Trust,
    access: Access,
    verified: set[Digest],
) -> None:
    """Record the places of all files that the store has by now."""
    batch: list[NewCapture] = []
    for new in captures(manifest, trust, access, lambda digest, size: digest):
        assert isinstance(new.content, Digest)
        held = store.held(new.content)
        if held is None or held.build_id != new.build_id:
            continue  # the bytes count, not what the manifest says about them
        sighting = new.sighting
        if held.digest not in verified:
            # The maker of the bundle knows the digest, but perhaps could not read the bytes.
            sighting = reached(sighting, 0)
        batch.append(held.capture(sighting))
        if len(batch) == _BATCH:
            store.commit(batch)
            batch = []
    store.commit(batch)


def write_source_list(
    store: Store,
    items: Iterable[bundle_archive.Item],
    file: IO[bytes],
    progress: Progress | None = None,
) -> bundle_archive.SourceList:
    """Write the sources of the files of a bundle to an empty file; return its manifest entry.

    Raises OSError of that file, `IntegrityError`, `StoreError`.
    """
    chosen = _with_debuginfo(items)
    if not chosen:
        return bundle_archive.SourceList(why=NO_DEBUGINFO)
    lines = _List(file)
    absent = []
    deadline = time.monotonic() + _SECONDS
    for number, item in enumerate(chosen, 1):
        why = _list_file(store, item, lines, deadline)
        if why:
            absent.append(bundle_archive.Absent(item.build_id, why))
        if progress is not None:
            progress(number, "looking for the names of source files", share=number / len(chosen))
    return bundle_archive.SourceList(lines.size, lines.end(), lines.files, "", tuple(absent))


def _with_debuginfo(items: Iterable[bundle_archive.Item]) -> list[bundle_archive.Item]:
    """Return for each build ID the one file with debug information that a debugger would read."""
    chosen: dict[str, bundle_archive.Item] = {}
    for item in items:
        if QUALITIES[item.quality] >= Quality.DEBUGINFO and item.kind_of is not Kind.KALLSYMS:
            before = chosen.get(item.build_id)
            if before is None or item.kind_of is Kind.DEBUGINFO:
                chosen[item.build_id] = item
    return list(chosen.values())


def _list_file(store: Store, item: bundle_archive.Item, lines: _List, deadline: float) -> str:
    """List the sources of one file; return a clause why some are left out, or an empty one."""
    if time.monotonic() >= deadline:
        return TOO_LATE
    with named_by(store, Digest(bytes.fromhex(item.sha256))) as found:
        for line, is_file in _encoded(item.build_id, found):
            if time.monotonic() >= deadline:
                return TOO_LATE
            if not lines.add(line, is_file=is_file):
                return TOO_MUCH
        return PARTIAL if found.is_partial else ""


def _encoded(build_id: str, found: SourceNames) -> Iterator[tuple[bytes, bool]]:
    """Yield the lines of the source files, then those of the compilation directories, each once;
    the second part is True for a file.
    """
    known = set()
    for file in found.files():
        if file.path not in known:  # compilers may record several MD5
            known.add(file.path)
            yield bundle_archive.encode_source(build_id, path=file.path), True
    for directory in found.directories():
        yield bundle_archive.encode_source(build_id, directory=directory), False


class _List:
    """Writes the list of sources to a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hasher = files.sha256()
        self.size = 0
        self.files = 0

    def add(self, line: bytes, *, is_file: bool) -> bool:
        """Add a line; return False if there is no room for it. Raises OSError."""
        if self.size + len(line) > _LIST_BYTES:
            return False
        self._file.write(line)
        self._hasher.update(line)
        self.size += len(line)
        self.files += is_file
        return True

    def end(self) -> str:
        """Write the rest; return the digest of all lines as hex digits. Raises OSError."""
        self._file.flush()
        return self._hasher.hexdigest()
