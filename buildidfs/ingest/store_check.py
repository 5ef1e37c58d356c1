# SPDX-License-Identifier: Apache-2.0
"""Check a store: find faults, repair them, and capture lost bytes again.

Any fault of the index has one remedy: a new index, made from the blobs and from the rows of the old
one that still decode.

The check first marks a damaged blob in the index, so that no reader gets it. Then it looks for the
same bytes at the paths where the blob was seen on this host, and in running processes; a capture of
the same bytes replaces the blob and keeps all its rows. If they are not found, the check removes
the blob from the index and moves its file to quarantine.
"""

from __future__ import annotations

import os
import stat
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from buildidfs.capture.base import PinnedFile
from buildidfs.errors import StoreDamaged, StoreLocked
from buildidfs.ingest import scans
from buildidfs.linux import machine
from buildidfs.names import printable
from buildidfs.store import Store, schema
from buildidfs.store.fsck import rebuild
from buildidfs.store.fsck.rules import StoreFault
from buildidfs.store.index import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from buildidfs.capture.base import Found
    from buildidfs.config import Settings
    from buildidfs.model import Digest

State = Literal["found", "repaired", "captured again", "lost"]

READING: Final = "Reading blobs"
"""The step of a check whose progress is counted in bytes."""

_MOST_NAMED: Final = 1000
"""The number of faults of rows that a repair names; it counts further ones."""


class CheckOptions(NamedTuple):
    """``verify_data`` reads all blobs; it continues an interrupted check unless ``from_start``.
    ``repair`` mends faults. ``progress`` is called with the step, the amount done and the total.
    """

    verify_data: bool = False
    from_start: bool = False
    repair: bool = False
    progress: Callable[[str, int, int], None] = lambda what, done, of: None


class Result(NamedTuple):
    """A fault, and its repair if there was one."""

    fault: StoreFault
    state: State


class Checked(msgspec.Struct):
    """The result of a check. ``unreferenced`` blobs are not a fault. ``unknown`` are blobs that a
    new index lacks because their origin is unknown; they are in quarantine. ``named`` is the number
    of blobs of an earlier version that got their aliases. ``check --json`` prints these fields.
    """

    faults: int = 0
    repaired: int = 0
    recaptured: int = 0
    lost: int = 0
    blobs: int = 0
    read_bytes: int = 0
    unreferenced: int = 0
    unknown: int = 0
    named: int = 0

    @property
    def is_sound(self) -> bool:
        """True if no fault is left and no bytes were lost."""
        return self.faults == self.repaired + self.recaptured


def check(
    path: str, settings: Settings, options: CheckOptions, checked: Checked
) -> Iterator[Result]:
    """Look for faults in a store; yield each one when it is found, and count in ``checked``.

    Raises `StoreMissing`, `StoreVersionError`, `StoreError`, and `StoreLocked` if the index has to
    be made again while the store is in use.
    """
    for found in _check(path, settings, options, checked):
        checked.faults += found.state in ("found", "repaired")
        checked.repaired += found.state == "repaired"
        checked.recaptured += found.state == "captured again"
        checked.lost += found.state == "lost"
        yield found


def _check(
    path: str, settings: Settings, options: CheckOptions, checked: Checked
) -> Iterator[Result]:
    damage = _damage(path)
    if damage is not None:
        yield Result(StoreFault(damage), "repaired" if options.repair else "found")
        if not options.repair:
            return
        yield from _new_index(path, options, checked)
    elif options.repair:
        faults = _faults_of_rows(path, options)
        yield from _mended(path, faults, options, checked)
    with _opened(path) as store:
        scans.believe(store, settings)
        scans.name_containers(store)
        if not options.repair:
            for fault in store.checker().rows(_progress_of_rows(store, options)):
                yield Result(fault, "found")
        else:
            checked.named = rebuild.name_blobs(store.checker())
        differing = yield from _check_files(store, settings, options, checked)
        yield from _check_names(store, options)
        checked.blobs = store.stats().blobs
        checked.unreferenced = store.checker().unreferenced()
    yield from _mended(path, differing, options, checked)


def _opened(path: str) -> Store:
    return Store.open(path, read_only=not os.access(path, os.W_OK))


def _damage(path: str) -> str | None:
    """Return the damage of an index that cannot be used at all; None if it can be used."""
    root = os.path.abspath(os.fsencode(path))
    if (version := environment.read_format(root)) != schema.FORMAT_VERSION:
        return f"the index has format {version}, not {schema.FORMAT_VERSION}"
    try:
        if os.path.exists(os.path.join(root, b"index")) and not rebuild.is_readable(root):
            return "the index cannot be read"
        _opened(path).close()
    except StoreDamaged as error:
        return str(error).partition(": buildidfs check")[0]
    return None


def _faults_of_rows(path: str, options: CheckOptions) -> list[StoreFault]:
    """Return the faults of rows; those beyond `_MOST_NAMED` are one fault that counts them."""
    with _opened(path) as store:
        faults = store.checker().rows(_progress_of_rows(store, options))
        named = list(islice(faults, _MOST_NAMED))
        more = sum(1 for _ in faults)
    return [*named, StoreFault(f"{more} more rows have faults")] if more else named


def _progress_of_rows(store: Store, options: CheckOptions) -> Callable[[int], None]:
    total, done = store.checker().count_rows(), 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        options.progress("Looking at rows", done, total)

    return progress


def _mended(
    path: str, faults: list[StoreFault], options: CheckOptions, checked: Checked
) -> Iterator[Result]:
    """Make a new index if there are faults, and yield these. Raises `StoreLocked`."""
    if not faults:
        return
    try:
        yield from _new_index(path, options, checked)
    except StoreLocked:
        yield from (Result(fault, "found") for fault in faults)
        raise
    yield from (Result(fault, "repaired") for fault in faults)


def _new_index(path: str, options: CheckOptions, checked: Checked) -> Iterator[Result]:
    """Make a new index. Raises `StoreLocked` if the store is in use."""
    made = 0

    def progress(count: int) -> None:
        nonlocal made
        made += count
        options.progress("Making a new index", made, 0)

    rebuilt = rebuild.rebuild(path, progress)
    checked.unknown = len(rebuilt.unknown)
    for digest in rebuilt.damaged:
        yield Result(StoreFault(f"blob {digest} has other bytes", digest), "found")
        yield _lost(digest)


def _check_names(store: Store, options: CheckOptions) -> Iterator[Result]:
    """Check the files with names of generated code; remove those that are invalid."""
    for path in list(store.jit_maps.damaged()):
        fault = StoreFault(
            f"jit/{printable(os.path.basename(path))} does not say of which process it is"
        )
        if options.repair:
            store.jit_maps.remove(path)
        yield Result(fault, "repaired" if options.repair else "found")


def _check_files(
    store: Store, settings: Settings, options: CheckOptions, checked: Checked
) -> Generator[Result, None, list[StoreFault]]:
    """Check the blobs, and capture damaged ones again; return the faults that a new index mends."""
    checker = store.checker()
    total = store.stats().stored_bytes if options.verify_data else 0

    def progress(size: int) -> None:
        checked.read_bytes += size
        options.progress(READING, checked.read_bytes, total)

    faults = checker.files(
        whole=options.verify_data, from_start=options.from_start, progress=progress
    )
    if not options.repair:
        for fault in faults:
            yield Result(fault, "found")
        return []
    differing = []
    for fault in faults:
        if fault.digest is not None and checker.is_struck(fault.digest):
            yield Result(fault, "found")
        else:
            differing.append(fault)
    yield from restore(store, settings)
    return differing


def restore(store: Store, settings: Settings) -> Iterator[Result]:
    """Capture damaged blobs again; move those whose bytes are found nowhere to quarantine."""
    checker = store.checker()
    damaged = checker.damaged()
    if not damaged:
        return
    recapture(store, settings, damaged)
    lost = set(checker.damaged()).intersection(damaged)
    for digest in damaged:
        if digest not in lost:
            yield Result(StoreFault(f"blob {digest} was captured again", digest), "captured again")
    yield from map(_lost, lost)
    store.set_aside(lost)


def _lost(digest: Digest) -> Result:
    return Result(
        StoreFault(f"blob {digest} is lost: what is left is in quarantine", digest), "lost"
    )


def recapture(store: Store, settings: Settings, digests: Iterable[Digest]) -> None:
    """Capture bytes again that the store has lost, from their places on this host or from running
    processes.
    """
    from buildidfs.capture.origin.builder import Here
    from buildidfs.capture.scan.tree import TreeScanner
    from buildidfs.ingest import Ingest, StoreMemo

    wanted = set(digests)
    own = Here("tree", container_namespaces=settings.container.namespaces).container
    paths = list(_paths(store, wanted, own))
    if paths:
        scanner = TreeScanner(
            StoreMemo(store), paths, container_namespaces=settings.container.namespaces, given=False
        )
        Ingest(store).run(_those(scanner, store, wanted))
    if any(store.checker().is_struck(digest) for digest in wanted):
        Ingest(store).run(_those(scans.ProcessFiles(store, settings), store, wanted))


def _paths(store: Store, digests: set[Digest], container: str) -> Iterator[bytes]:
    """Yield the paths of sightings of ``digests`` that may lead to the same file from here.

    They are paths of the host, which a service with a mount namespace of its own also has, and
    paths in ``container``, if this process runs in it. Paths in other containers lead nowhere here.
    """
    host, seen = machine.host_name(), set()
    for digest in digests:
        for ordinal in store.checker().ordinals_of(digest):
            for record in store.index.origins(ordinal):
                origin = record.origin
                here = origin.container in ("", container) and origin.host in ("", host)
                if here and record.digest == digest and origin.path not in seen:
                    seen.add(origin.path)
                    if _is_file(origin.path):
                        yield origin.path


def _is_file(path: bytes) -> bool:
    try:
        return path.startswith(b"/") and stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def _those(found: Iterable[Found], store: Store, digests: set[Digest]) -> Iterator[Found]:
    """Yield those of the found files whose bytes have one of the digests."""
    for item in found:
        if not isinstance(item, PinnedFile):
            continue
        if store.digest_of(item.fd) in digests:
            yield item
        else:
            item.close()
