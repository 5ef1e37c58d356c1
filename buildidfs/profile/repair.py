# SPDX-License-Identifier: Apache-2.0
"""Write a profile again, with the build IDs and file names that its mappings need.

perf knows one file for each name. So if several files had one name, their mappings get different
names. The records are copied one by one; a profile is never in memory as a whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from array import array
from collections import Counter
from functools import partial
from struct import Struct
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs.catalog.remedies import TOO_LONG, WITHOUT_FILE
from buildidfs.errors import UsageError
from buildidfs.formats.perf import headers, records
from buildidfs.formats.perf import record_stream as perf_stream
from buildidfs.formats.perf.headers import CPUMODE, KERNEL, MAX_ID, USER, BuildIdEntry
from buildidfs.formats.perf.records import Events, Rewriter
from buildidfs.linux.file_ops import on_error, sync_directory
from buildidfs.model import BuildId, ByteRange
from buildidfs.profile.jit import GeneratedCode, JitNames
from buildidfs.profile.match import KALLSYMS, namesakes, plain
from buildidfs.profile.perf_data import Profile
from buildidfs.profile.reading import NamedFile, NamelessFile, Reading, SampleSite, is_anonymous
from buildidfs.store.export import open_through

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from buildidfs.capture.base import Progress
    from buildidfs.formats.perf.address_spaces import File
    from buildidfs.formats.perf.record_stream import Raw
    from buildidfs.formats.perf.records import Mapped
    from buildidfs.profile.match import Match
    from buildidfs.profile.perf_data import ProfilePart
    from buildidfs.store import Store

_COPY: Final = 1 << 20
# the heaviest unresolved files, for which files of the same name are looked up
_HINTED: Final = 100
_MAX_INDEX: Final = 64 << 20
_EVERY: Final = 1 << 16  # records between two reports of progress
_FEATURE_LEAST: Final = 16  # bytes of a record that give the number of the feature
_OWN: Final = 64  # records from this number on are perf's own
_SUFFIX_DIGITS: Final = 12
_NAME_MAX: Final = 4095


class Repaired(msgspec.Struct):
    """The result of a repair, in numbers of files that were mapped.

    ``known`` files had a build ID before, ``resolved`` files got one. ``renamed`` has the new names
    with their build IDs. ``unresolved`` are files with samples, the heaviest first. ``generated``
    are the processes whose generated code got names. ``notes`` and ``incomplete`` are as in
    `coverage.Coverage`.
    """

    known: int
    resolved: int
    renamed: list[NamedFile]
    unresolved: list[NamelessFile]
    notes: list[str]
    incomplete: str
    generated: list[GeneratedCode] = []


def repair(
    store: Store,
    path: bytes,
    out: bytes,
    *,
    assigned: Mapping[bytes, BuildId] | None = None,
    progress: Progress | None = None,
) -> Repaired:
    """Write the profile ``path`` to ``out`` with the build IDs that store and journal know.

    ``assigned`` has build IDs by path for files without one. ``out`` is written whole or not at
    all. Raises `UsageError` if the file is no profile, an assigned path is not in it, or ``out``
    cannot be written.
    """
    with Profile(path) as profile:
        with contextlib.suppress(OSError):
            if os.path.samefile(path, out):
                raise UsageError(f"{_shown(out)} is the profile itself: name another file")
        if not profile.header.is_pipe:
            try:
                headers.require_usual(profile.header)
            except UsageError as error:
                raise UsageError(f"{_shown(path)} {error}") from error
        reading = Reading(profile, store, progress, assigned)
        _check_assigned(reading, assigned or {})
        names = JitNames(store, reading)
        names.make()
        renaming = Renaming(reading, names)
        unresolved = [
            msgspec.structs.replace(each, namesakes=_namesakes(store, each.path))
            if number < _HINTED and plain(each.path) not in reading.contested
            else each
            for number, each in enumerate(unresolved_in(reading, reading.hits(chains=True), names))
        ]
        notes = reading.notes() if renaming.resolved or unresolved else []
        notes += reading.remedies({each.why for each in unresolved})
        if names.failed:
            notes.append(f"generated code of some processes has no names: {names.failed}")
        with _replacing(out) as file:
            _Writer(reading, renaming, file, progress).write()
            # The next reader uses its mtime to find the clock of the recording.
            file.flush()
            os.utime(file.fileno(), ns=(profile.mtime_ns, profile.mtime_ns))
        return Repaired(
            renaming.known,
            renaming.resolved,
            [NamedFile(build_id, name) for name, build_id in renaming.renamed.items()],
            unresolved,
            notes,
            f"{_shown(path)} is not whole: {profile.truncated}" if profile.truncated else "",
            names.found,
        )


def _namesakes(store: Store, path: bytes) -> tuple[NamedFile, ...]:
    return tuple(NamedFile(*each) for each in namesakes(store, path))


def _check_assigned(reading: Reading, assigned: Mapping[bytes, BuildId]) -> None:
    """Raise `UsageError` if no file with an assigned path needs a build ID: it has none, or one
    that does not identify it.
    """
    files, believes = reading.spaces.files, reading.matcher.believes
    nameless = {plain(file.path) for file in files if not believes(file)}
    for hit in reading.everything() if assigned else ():
        reading.answer(hit)
    nameless |= reading.contested
    named = {plain(file.path) for file in files if believes(file)}
    for path in assigned:
        if path not in nameless:
            what = "has a build ID in" if path in named else "is no file of"
            raise UsageError(f"{_shown(path)} {what} this profile: nothing can be assigned to it")


def unresolved_in(
    reading: Reading, hits: Counter[SampleSite], names: JitNames | None = None
) -> list[NamelessFile]:
    """Return the files without a build ID among ``hits``, the heaviest first.

    Anonymous memory, and generated code that has ``names``, is left out.
    """
    found: Counter[tuple[str, bytes, str]] = Counter()
    for hit, count in hits.items():
        if hit.file < 0 or (names is not None and names.at(hit) is not None):
            continue
        path, answer = reading.describe(hit)
        why = answer.why
        if answer.build_id is not None and not why:
            if len(answer.build_id) <= headers.MAX_ID:
                continue
            why = TOO_LONG
        if path.startswith(b"/") and why not in WITHOUT_FILE:
            found[answer.container or "", path, why] += count
    whole = max(reading.samples, 1)
    return [
        NamelessFile(container, path, count, why, 100 * count / whole)
        for (container, path, why), count in found.most_common()
    ]


class _Writer:
    """Writes a profile, record by record."""

    def __init__(
        self, reading: Reading, renaming: Renaming, file: IO[bytes], progress: Progress | None
    ) -> None:
        profile = reading.profile
        self._reading = reading
        self._profile = profile
        self._renaming = renaming
        self._file = file
        self._progress = progress
        self._order = profile.header.order
        self._events = Events(profile.layouts, self._order)
        self._rewriter = Rewriter(profile.layouts, self._order)
        self._word = Struct(f"{self._order}Q")
        self._at = 0
        # The old and new offsets of records with hardware traces.
        self._old, self._new = array("Q"), array("Q")

    def write(self) -> None:
        header = self._profile.header
        begin = header.data.offset
        original = self._profile.read_at(0, headers.HEADER_SIZE)
        self._copy(self._profile.parts[0], ByteRange(0, begin))
        if header.is_pipe:
            self._pipe()
            return
        is_merged = len(self._profile.parts) > 1
        for number, raw, part in self._records():
            # In one file, all records of a round are later than those of earlier rounds.
            if not is_merged or raw.kind != perf_stream.FINISHED_ROUND:
                self._put_record(number, raw, part)
        size = self._at - begin
        features = dict(sorted(self._features()))
        sizes = [
            each.size if isinstance(each, ByteRange) else len(each) for each in features.values()
        ]
        self._put(headers.section_table(header, self._at, sizes))
        for content in features.values():
            if isinstance(content, ByteRange):
                self._copy(self._profile.parts[0], content)
            else:
                self._put(content)
        self._file.seek(0)
        self._file.write(headers.beginning(original, header, size, features))

    def _pipe(self) -> None:
        """Write a profile for a pipe: the table precedes the first record of the kernel."""
        is_reported = False
        order = self._order
        for number, raw, part in self._records():
            if raw.kind < _OWN and not is_reported:
                self._put(headers.build_id_feature(self._renaming.table(), order))
                is_reported = True
            if raw.kind == records.HEADER_BUILD_ID:
                continue
            if raw.kind == records.HEADER_FEATURE and raw.size >= _FEATURE_LEAST:
                (which,) = self._word.unpack_from(raw.data, raw.at + 8)
                if which in headers.NOT_KEPT:
                    continue
            self._put_record(number, raw, part)

    def _records(self) -> Iterator[tuple[int, Raw, ProfilePart]]:
        number = 0
        for part in self._profile.parts:
            for raw in self._profile.records_of(part):
                number += 1
                if self._progress is not None and not number % _EVERY:
                    self._progress(number, "writing")
                yield number, raw, part

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._at += len(data)

    def _put_record(self, number: int, raw: Raw, part: ProfilePart) -> None:
        _, _, data, at, size, position, payload = raw
        if raw.kind in (records.MMAP, records.MMAP2):
            self._put(self._fixed(number, raw))
            return
        if raw.kind == perf_stream.AUXTRACE:
            self._old.append(position)
            self._new.append(self._at)
        self._put(data[at : at + size])
        if payload is not None:
            self._copy(part, payload)

    def _fixed(self, number: int, raw: Raw) -> bytes:
        event = self._events.mapped(raw)
        if event is not None:
            time = self._reading.time_of(event, number)
            build_id, name, offset = self._renaming.fix(event, time)
            if build_id or name is not None:
                return self._rewriter.mapped(raw, build_id, name, offset)
        return raw.data[raw.at : raw.at + raw.size]

    def _copy(self, part: ProfilePart, place: ByteRange) -> None:
        at, end = place.offset, place.offset + place.size
        while at < end:
            data = part.read_at(at, min(_COPY, end - at))
            if not data:
                return
            self._put(data)
            at += len(data)

    def _features(self) -> Iterator[tuple[int, bytes | ByteRange]]:
        """Yield the sections behind the records: bytes, or their place in the original."""
        profile, header = self._profile, self._profile.header
        for number, place in header.features.items():
            if number == headers.AUXTRACE:
                index = profile.read_at(place.offset, min(place.size, _MAX_INDEX))
                yield number, headers.moved_traces(index, self._order, self._old, self._new)
            elif number != headers.BUILD_ID and number not in headers.NOT_KEPT:
                yield number, place
        table = headers.build_id_feature(self._renaming.table(), self._order)
        if table:
            yield headers.BUILD_ID, table


@contextlib.contextmanager
def _replacing(path: bytes) -> Iterator[IO[bytes]]:
    """Return a file that replaces ``path`` at the end of the block, unless the block raises.

    If ``path`` is a device, FIFO or symbolic link, the file is copied into it.
    """
    directory = os.path.dirname(os.path.abspath(path))
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        through = open_through(path)
        if through is not None:
            with open(through, "wb") as stream, tempfile.TemporaryFile() as copy:
                yield copy
                copy.seek(0)
                shutil.copyfileobj(copy, stream)
            return
        fd, name = tempfile.mkstemp(prefix=b".buildidfs-", dir=directory)
        with on_error(partial(os.unlink, name)):  # half a profile must not stay
            with open(fd, "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        sync_directory(directory)
    except OSError as error:
        raise UsageError(f"cannot write {_shown(path)}: {error.strerror or error}") from error


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


class Fix(NamedTuple):
    """The fields to write for a mapping; an empty ``build_id`` and None leave the
    others unchanged.
    """

    build_id: bytes = b""
    name: bytes | None = None
    offset: int | None = None


class Renaming:
    """The decisions for all mappings of a profile.

    ``known`` and ``resolved`` count files (by name, device and inode) that had a build ID in the
    profile, and that got one. ``renamed`` has all new names with the build IDs they stand for.
    """

    def __init__(self, reading: Reading, names: JitNames) -> None:
        self._reading = reading
        self._names = names
        self._ids: dict[bytes, dict[BuildId | None, bool]] = {}
        self._table = dict(reading.named)
        self.renamed: dict[bytes, BuildId] = {}
        known: set[int] = set()
        resolved: set[int] = set()
        for hit in reading.everything():
            file = reading.spaces.files[hit.file]
            answer = reading.answer(hit)
            if answer.build_id is not None and not answer.why:
                is_known = answer.build_id == file.build_id or self._says(file, answer.build_id)
                (known if is_known else resolved).add(hit.file)
            if _has_name(file):
                build_id = _held(answer)
                ids = self._ids.setdefault(file.path, {})
                ids[build_id] = ids.get(build_id, False) or answer.container == ""
            elif answer.build_id is not None and len(answer.build_id) <= MAX_ID:
                self._add_special(file, answer.build_id)
        self.known, self.resolved = len(known), len(resolved - known)
        self._kept = {path: self._keeper(path, ids) for path, ids in self._ids.items()}

    def fix(self, event: Mapped, time: int) -> Fix:
        """Return the fields to write for a mapping; ``time`` is its time in the reading."""
        spaces = self._reading.spaces
        number = spaces.number(event)
        file = spaces.files[number]
        image = spaces.image(event.pid, time)
        hit = SampleSite(number, time, event.pid, image)
        if (generated := self._names.at(hit)) is not None:
            # In the file each function has an offset equal to its address.
            return Fix(bytes(generated.build_id), generated.name, event.start)
        answer = self._reading.answer(hit)
        build_id = _held(answer)
        is_believed = build_id is None or build_id == file.build_id
        if not _has_name(file):
            # The record of a kernel module has the build ID of another module.
            return Fix(bytes(build_id)) if file.build_id and build_id and not is_believed else Fix()
        name = self._name(file, build_id)
        return Fix(b"" if is_believed or build_id is None else bytes(build_id), name)

    def table(self) -> Iterator[BuildIdEntry]:
        """Yield the build IDs by name, including those of the profile that are still right."""
        for path, ids in self._ids.items():
            keeper = self._kept[path]
            if len(ids) > 1 or keeper is not None:
                self._table.pop(path, None)
            if keeper is not None:
                yield BuildIdEntry(path, keeper)
        for name, build_id in self.renamed.items():
            yield BuildIdEntry(name, build_id)
        for generated in self._names.found:
            yield BuildIdEntry(generated.name, generated.build_id)
        yield from self._table.values()

    def _says(self, file: File, build_id: BuildId) -> bool:
        named = self._reading.named.get(file.path)
        return named is not None and named.build_id == build_id

    def _add_special(self, file: File, build_id: BuildId) -> None:
        """Add kernel, modules and vDSO: perf looks them up in the table."""
        name = KALLSYMS if file.path.startswith(KALLSYMS) else file.path
        mode = file.cpumode & CPUMODE
        if mode == KERNEL or (name.startswith(b"[") and mode == USER):
            self._table.setdefault(name, BuildIdEntry(name, build_id, mode))

    def _keeper(self, path: bytes, ids: dict[BuildId | None, bool]) -> BuildId | None:
        """Return the build ID whose file keeps the name ``path`` in the written profile; None if
        all files with this path get new names.
        """
        known = [build_id for build_id in ids if build_id is not None]
        if len(ids) == 1:
            return known[0] if known else None
        hosts = [build_id for build_id in known if ids[build_id]]
        if len(hosts) == 1:
            return hosts[0]
        named = self._reading.named.get(path)
        same_id = [each for each in known if named is not None and each == named.build_id]
        return same_id[0] if same_id else None

    def _name(self, file: File, build_id: BuildId | None) -> bytes | None:
        ids = self._ids[file.path]
        if len(ids) == 1 or (build_id is not None and build_id == self._kept[file.path]):
            return None
        if build_id is None:
            name = b"%b@%d:%d:%d" % (file.path, *file.dev, file.inode)
        else:
            name = b"%b@%b" % (file.path, build_id.hex()[:_SUFFIX_DIGITS].encode())
        if len(name) > _NAME_MAX:
            return None
        if build_id is not None:
            self.renamed[name] = build_id
        return name


def _has_name(file: File) -> bool:
    """Return True for a file of a process, whose record may hold a build ID."""
    return (
        file.cpumode & CPUMODE == USER
        and file.path.startswith(b"/")
        and not (is_anonymous(file) and not file.build_id and not file.inode)
    )


def _held(answer: Match) -> BuildId | None:
    """Return the build ID if it fits into a record of perf, and identifies the mapped file."""
    if answer.build_id is None or answer.why or len(answer.build_id) > MAX_ID:
        return None
    return answer.build_id
