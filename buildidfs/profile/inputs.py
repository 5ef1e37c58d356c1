# SPDX-License-Identifier: Apache-2.0
"""Profiles and core files: the build IDs that they name, and the share of them that a store has.

The first bytes of a file show which of the two it is.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.catalog import containers, requested_id
from buildidfs.catalog.containers import Names
from buildidfs.catalog.coverage import BinaryCoverage, Coverage, CoverageLookup
from buildidfs.errors import ArtifactMissing, UsageError
from buildidfs.formats.perf.headers import CPUMODE, USER
from buildidfs.linux import inodes
from buildidfs.model import BuildId
from buildidfs.names import printable
from buildidfs.profile import cores, reading
from buildidfs.profile.reading import NamelessFile
from buildidfs.profile.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from buildidfs.capture.base import Progress
    from buildidfs.config import Settings
    from buildidfs.profile.reading import Reading
    from buildidfs.store import Pin, Store

_PERF: Final = (b"PERFILE2", b"2ELIFREP")
_ET_CORE: Final = 4
_REPORTED: Final = 64  # files between two reports of progress
_NAMELESS: Final = "the file has no build ID"


class NamedIds(msgspec.Struct):
    """The build IDs that a file names, each with a path or name that it has there.

    ``nameless`` are the files without a build ID, the heaviest first. ``is_resolved`` is True if
    some of the build IDs come from the store, because the file lacks them. ``incomplete`` is the
    reason if the file is not whole or is empty. ``is_profile`` is False for core files and
    binaries. ``is_file`` is False if the user gave a build ID and no file.
    """

    paths: dict[BuildId, bytes]
    nameless: list[NamelessFile] = []
    is_resolved: bool = False
    incomplete: str = ""
    is_profile: bool = False
    is_file: bool = True


def build_ids_named(store: Store, path: bytes, *, progress: Progress | None = None) -> NamedIds:
    """Return the build IDs that a profile of perf or a core file names, or the one of a binary.

    Raises `UsageError` for any other file, and for one that cannot be read.
    """
    head = _head(path)
    if head[:8] in _PERF:
        return _of_profile(store, path, progress)
    if head[:4] == b"\x7fELF":
        kind = int.from_bytes(head[16:18], "big" if head[5:6] == b"\2" else "little")
        return _of_core(store, path) if kind == _ET_CORE else NamedIds({_own(path): path})
    if cores.is_core(path):  # a compressed one
        return _of_core(store, path)
    raise UsageError(
        f"{printable(path)} is neither a profile of perf, nor a core file, nor a binary"
    )


def _head(path: bytes) -> bytes:
    """The first bytes of a regular file, or those of a profile for a directory.

    Raises `UsageError` for a file that is not regular, or cannot be read.
    """
    if os.path.isdir(path):  # perf record --threads
        return _PERF[0]
    try:
        with open(inodes.open_regular(path), "rb") as file:
            return file.read(18)
    except OSError as error:
        raise UsageError(f"cannot read {printable(path)}: {error.strerror}") from error


def named_by(
    store: Store, text: str, looking: Callable[[], AbstractContextManager[Progress | None]]
) -> NamedIds:
    """The build ID that a user means, or those that the file at that path names.

    ``looking`` shows the progress of reading a file. Raises as `requested_id.unless_file` and
    `build_ids_named`.
    """
    build_id = requested_id.unless_file(store, text)
    if build_id is not None:
        return NamedIds({build_id: b""}, is_file=False)
    with looking() as progress:
        return build_ids_named(store, os.fsencode(text), progress=progress)


def wanted(
    store: Store,
    words: Iterable[str],
    labels: Iterable[str],
    looking: Callable[[], AbstractContextManager[Progress | None]],
) -> tuple[dict[BuildId, bytes], dict[bytes, NamedIds]]:
    """The build IDs of files, IDs and containers, with their paths; and the files that name them.

    A word that is the path of an existing file means that file, even if the word may also be an ID
    or a container. Raises as `named_by`, and `ArtifactMissing` for a container that was never seen.
    """
    found: dict[BuildId, bytes] = {}
    for label in labels:
        found = containers.build_ids(store, label) | found
    inputs: dict[bytes, NamedIds] = {}
    for text in words:
        path = os.fsencode(text)
        if os.path.exists(path):
            with looking() as progress:
                named = build_ids_named(store, path, progress=progress)
        else:
            named = named_by(store, text, looking)
        if named.is_file:
            inputs[path] = named
        found = named.paths | found
    return found, inputs


def pin(
    store: Store,
    text: str,
    name: bytes | None,
    looking: Callable[[], AbstractContextManager[Progress | None]],
) -> tuple[NamedIds, int]:
    """Pin the build IDs that `named_by` finds; return them, and the number that were not pinned
    before.

    Without a ``name``, the build IDs of a file are pinned under the path of the file.
    """
    named = named_by(store, text, looking)
    if name is None:
        name = _pin_name(text) if named.is_file else b""
    return named, store.pin(sorted(named.paths), name) if named.paths else 0


def unpin(store: Store, text: str) -> tuple[int, list[Pin]]:
    """Take back the pins of a build ID, a file or a container; return the number of removed pins,
    and the pins that a build ID still has.

    Raises as `requested_id.future_build_id`.
    """
    if not requested_id.is_path(text):
        build_id = requested_id.future_build_id(store, text)
        return store.unpin([build_id]), store.pins.of(build_id)
    count = store.unpin_name(_pin_name(text)) or store.unpin_name(os.fsencode(text))
    if not count and not os.path.lexists(text):
        count = store.unpin([requested_id.build_id(store, text)])
    return count, []


class CorePins(msgspec.Struct):
    """The result of `pin_cores`: core files with new pins, those that are gone, and a reason for
    each file that names no build ID or cannot be read.
    """

    pinned: list[bytes] = []
    gone: list[bytes] = []
    unread: dict[bytes, str] = {}


def pin_cores(store: Store, directory: bytes) -> CorePins:
    """Pin the build IDs that the core files in a directory name, and remove the pins of core files
    that are gone from it.

    The name of a pin is the path of its core file. A core file that has pins is not read. Raises
    `UsageError` if the directory cannot be read.
    """
    top = os.path.join(os.path.abspath(directory), b"")
    known = {each.name for each in store.pins.every() if each.name.startswith(top)}
    done = CorePins()
    # A core that is written meanwhile starts no second run of the service that runs this.
    while new := sorted(_files_in(top) - known - done.unread.keys()):
        for path in new:
            known.add(path)
            try:
                named = build_ids_named(store, path)
            except UsageError as error:
                done.unread[path] = str(error)
                continue
            if not named.paths:
                done.unread[path] = f"{printable(path)} names no build ID"
                continue
            store.pin(sorted(named.paths), path)
            done.pinned.append(path)
    done.gone = sorted(known - _files_in(top) - done.unread.keys())
    for path in done.gone:
        store.unpin_name(path)
    return done


def _files_in(directory: bytes) -> set[bytes]:
    """Return the paths of the files in a directory, without hidden ones. Raises `UsageError`."""
    try:
        return {
            each.path
            for each in os.scandir(directory)
            if not each.name.startswith(b".") and each.is_file(follow_symlinks=False)
        }
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise UsageError(f"cannot read {printable(directory)}: {error.strerror}") from error


def _pin_name(path: str) -> bytes:
    return os.path.abspath(os.fsencode(path))


def _of_profile(store: Store, path: bytes, progress: Progress | None) -> NamedIds:
    """Return the build IDs in a profile, and those that the store knows for other sampled files."""
    from buildidfs.catalog.remedies import TOO_LONG
    from buildidfs.profile import repair
    from buildidfs.profile.perf_data import Profile

    with Profile(path) as profile:
        named = NamedIds(reading.build_ids_of(profile), is_profile=True)
        read = reading.Reading(profile, store, progress)
        if _lacks_build_ids(read):
            hits = read.hits(chains=True)
            for hit in hits:
                name, answer = read.describe(hit)
                if answer.build_id is not None and answer.build_id not in named.paths:
                    named.paths[answer.build_id] = name
                    named.is_resolved = True
            names = Names(store)
            named.nameless = [
                msgspec.structs.replace(each, called=names.short(each.container))
                for each in repair.unresolved_in(read, hits)
                if each.why != TOO_LONG  # perf cannot record it, but the store may have it
            ]
        if profile.truncated:
            named.incomplete = f"{printable(path)} is not whole: {profile.truncated}"
    return named


def _lacks_build_ids(read: Reading) -> bool:
    """Return True unless each mapping of a file in the profile has its build ID."""
    return any(
        not file.build_id
        and file.cpumode & CPUMODE == USER
        and file.path.startswith(b"/")
        and not reading.is_anonymous(file)
        for file in read.spaces.files
    )


def _of_core(store: Store, path: bytes) -> NamedIds:
    named = NamedIds({})
    with cores.CoreFile(path) as file:
        for module, why in cores.identified(store, file):
            if module.build_id is not None:
                named.paths.setdefault(module.build_id, module.path)
            else:
                named.nameless.append(NamelessFile("", module.path, None, why))
        if file.cut_off:
            named.incomplete = f"{printable(path)} is {file.cut_off}"
    return named


def _own(path: bytes) -> BuildId:
    from buildidfs.capture import base
    from buildidfs.model import Absence

    with open(inodes.open_regular(path), "rb") as file:
        found = base.identify(file.fileno())
    if isinstance(found, Absence):
        raise UsageError(f"{printable(path)}: {found.value}")
    return found


def build_id_of_binary(path: bytes) -> BuildId:
    """Return the build ID of a binary. Raises `UsageError` for a file without one."""
    try:
        return _own(path)
    except OSError as error:
        raise UsageError(f"cannot read {printable(path)}: {error.strerror}") from error


def coverage_of_file(
    store: Store,
    path: bytes,
    *,
    selection: Selection | None = None,
    container: str | None = None,
    progress: Progress | None = None,
) -> Coverage:
    """Return the coverage of a profile or a core file, with ``container`` only of its files.

    With a ``selection``, only its samples of a profile count; `at_frame` selects the files. Raises
    `UsageError` for any other file, `ArtifactMissing` if no thread has the selected name.
    """
    selection = selection or Selection()
    if not cores.is_core(path):
        found = reading.coverage(store, path, selection=selection, progress=progress)
    elif selection.comm is not None or selection.has_address:
        raise UsageError(f"{printable(path)} is a core file: only profiles have samples to select")
    else:
        found = cores.coverage(store, path)
    if container is not None:
        is_meant = containers.meant(store, container)
        found.rows = [row for row in found.rows if is_meant(row.container)]
    return found


def at_frame(
    rows: Iterable[BinaryCoverage], path: bytes, selection: Selection
) -> list[BinaryCoverage]:
    """Return the rows of the files at a selected frame. Raises `ArtifactMissing` for none."""
    found = [row for row in rows if selection.is_at(row.path)]
    if selection.text is not None and not found:
        raise ArtifactMissing(
            f"no sample of {printable(path)} is at {printable(selection.text)}; a"
            " frame is an address (0x7f12ab34), an offset in a file (libc.so.6+0x26d90), or the"
            " path of a file, as perf prints them"
        )
    return found


def is_profile_or_core(path: bytes) -> bool:
    """Return True if `coverage_of_file` accepts this file."""
    try:
        return _head(path)[:8] in _PERF or cores.is_core(path)
    except (OSError, UsageError):
        return False


def refuse_other_file(path: bytes) -> None:
    """Raise `UsageError` as `coverage_of_file` does if a readable file is neither a profile nor an
    ELF file.
    """
    from buildidfs.profile.perf_data import Profile

    try:
        head = _head(path)
    except UsageError:
        return  # there is no such file, or it cannot be read
    if head[:4] != b"\x7fELF":
        Profile(path).close()


def coverage_of_processes(
    store: Store,
    settings: Settings,
    *,
    comm: str | None = None,
    container: str | None = None,
    progress: Progress | None = None,
) -> Coverage:
    """Return the coverage of all files that running processes have mapped executable, or only
    those of processes named ``comm``, or of a ``container``.

    Each mapping of each process counts.
    """
    from buildidfs.capture.base import Unreadable
    from buildidfs.capture.origin.builder import shown
    from buildidfs.capture.process.mapped_by import Mapper, Mappers

    rows: Counter[tuple[str, bytes, BuildId | None, str]] = Counter()
    refused: Counter[str] = Counter()
    found = Mappers(
        lambda build_id, mapping: True,
        nameless=True,
        container_namespaces=settings.container.namespaces,
    )
    for number, each in enumerate(found):
        if isinstance(each, Unreadable):
            refused[each.reason] += 1
            continue
        if comm is not None and (not isinstance(each, Mapper) or each.comm != os.fsencode(comm)):
            continue
        label = shown(each.container, each.cgroup)
        if isinstance(each, Mapper):
            rows[label, each.path, each.build_id, ""] += 1
        else:
            rows[label, each.path, None, _NAMELESS] += 1
        if progress is not None and not number % _REPORTED:
            progress(number, each.path.decode("utf-8", "surrogateescape"))
    holdings = CoverageLookup(store)
    if container is not None:
        is_meant = containers.meant(store, container)
        rows = Counter({key: count for key, count in rows.items() if is_meant(key[0])})
    coverage = Coverage(
        [holdings.row(*key[:3], count, key[3]) for key, count in rows.items()], "mapped files"
    )
    if refused:
        reasons = ", ".join(f"{count}: {why}" for why, count in refused.most_common())
        coverage.incomplete = f"some processes could not be looked at ({reasons})"
    return coverage
