# SPDX-License-Identifier: Apache-2.0
"""The names of containers, their files in a store, and the container that a user means by
a name.
"""

from __future__ import annotations

import heapq
import os
from typing import TYPE_CHECKING, Any, Final

import msgspec

from buildidfs.answers import IdShares
from buildidfs.catalog import remedies
from buildidfs.catalog.coverage import CoverageLookup
from buildidfs.errors import ArtifactMissing
from buildidfs.formats.container import cgroup
from buildidfs.located import name_or_label, utf8, without_suffix
from buildidfs.model import NO_NAMES, BuildId, ContainerNames, Digest, Quality
from buildidfs.names import kept_for
from buildidfs.store import CapturedContainer
from buildidfs.store.index.locations import SUFFIX_MARK, is_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.catalog.coverage import BinaryCoverage
    from buildidfs.model import Origin
    from buildidfs.store import JournalRecord, Store
    from buildidfs.store.location_rows import ContainerEntry, Removal

_MOST_LABELS = 5
_USER: Final = "uid "


class Names:
    """The names of containers, from a store if there is one; each is looked up once.

    A user can give a control group the ID of any container, so a container is its label together
    with the place of its control group. Without a place, the label is compared with those that
    reports show. If the containers are ``running``, the state files of their engines are read, too.
    """

    def __init__(self, store: Store | None = None, *, running: bool = False) -> None:
        self._store = store
        self._running = running
        self._known: dict[tuple[str, bytes], ContainerNames] = {}

    def of(self, label: str, group: bytes = b"") -> ContainerNames:
        """Return the names of a container in a control group; `NO_NAMES` if none are known."""
        if not label:
            return NO_NAMES
        key = label, cgroup.place(group)
        names = self._known.get(key)
        if names is None:
            kept = None if self._store is None else _kept(self._store, label, group)
            names = NO_NAMES if kept is None else kept.called
            if self._running and group and not names.shown:
                from buildidfs.capture.origin import container_names

                running = container_names.names_of_cgroup(group)
                names = names if running == NO_NAMES else running
            self._known[key] = names
        return names

    def short(self, label: str, group: bytes = b"") -> str:
        """Return the name of a container, or its label if no name is known."""
        return name_or_label(self.of(label, group).shown, label)

    def fields(self, label: str, group: bytes = b"") -> dict[str, Any]:
        """Return the JSON fields for a container."""
        names = self.of(label, group)
        return {
            "container": label,
            "container_name": names.name or None,
            "pod": names.pod or None,
            "pod_namespace": names.namespace or None,
            "image": names.image.partition("\n")[0] or None,
        }


def _kept(store: Store, label: str, group: bytes) -> CapturedContainer | None:
    if group:
        return store.containers.placed(without_suffix(label), group)
    found = store.containers.labelled(label)
    if found is not None and reported(found) == label:
        return found
    plain = without_suffix(label)
    with_label = (each for each in store.containers.every() if each.label == plain)
    return next((each for each in with_label if reported(each) == label), None)


def reported(container: CapturedContainer) -> str:
    """Return the label that reports show: see `capture.origin.builder.shown`."""
    return container.label + suffix(container)


def reported_at(seen: Origin | JournalRecord) -> str:
    """Return the label that reports show for the container of a sighting."""
    return cgroup.label_for_reports(seen.container, seen.cgroup, seen.owner)


def full_name(container: CapturedContainer) -> str:
    """Return the name and label that reports show for a container; without a name, the label."""
    name = container.called.shown
    return f"{name} ({reported(container)})" if name else reported(container)


def suffix(container: CapturedContainer) -> str:
    """Return the end of the label in reports: it tells an imitation from a container of root."""
    owner = container.owner
    if is_namespace(container.label) or not owner:
        return ""
    if owner.startswith(_USER):
        return f" (user {owner[len(_USER) :]})"
    outer = cgroup.container_label(owner.encode("utf-8", "surrogateescape"))
    return f" in {outer}" if outer and outer != container.label else ""


def meant(store: Store, text: str) -> Callable[[str], bool]:
    """Return a function that is true for a label in reports if the user means its container by
    ``text``.

    ``text`` may be a label, the beginning of an ID, or a name, see `ContainerNames.fits`. The
    container of another user than root, who may choose all of these, is meant by its whole label
    for reports, or if none of root fits.
    """
    from buildidfs.capture.origin.builder import fits

    every = {reported(each): each for each in store.containers.every()}
    named = {
        label for label, each in every.items() if each.called.fits(text) or fits(text, each.label)
    }
    named = {text} if text in every else named
    named = {label for label in named if not suffix(every[label])} or named

    def test(label: str) -> bool:
        if label in named or label == text:
            return True
        plain = without_suffix(label)
        return label not in every and fits(text, plain) and (plain == label or not named)

    return test


def last_ones(store: Store) -> str:
    """Return a sentence that names the containers seen last."""
    seen: dict[str, int] = {}
    for each in store.containers.every():
        name = each.called.shown or each.label
        seen[name] = max(seen.get(name, 0), each.last_seen_ns)
    if not seen:
        return "nothing was captured of a container yet"
    last = heapq.nlargest(_MOST_LABELS, seen, key=lambda name: seen[name])
    return f"the last containers seen are {', '.join(last)}"


def is_bare(container: CapturedContainer) -> bool:
    """Return True for a namespace that is not known as a container, such as that of a systemd
    service.
    """
    return is_namespace(container.label) and not container.called.shown


def shown_label(container: CapturedContainer) -> str:
    """Return the label for a person. That of a namespace is its name in the mount, because the
    kernel reuses the numbers: the second `mnt:4026532177` is ``mnt:4026532177~8589934592``.
    """
    return utf8(container.name) if is_namespace(container.label) else reported(container)


def chosen(store: Store, text: str) -> Callable[[CapturedContainer], bool]:
    """Return a function that is true for a container that the user means: by its `shown_label`, or
    as in `meant`.
    """
    name = os.fsencode(text)
    number = store.containers.number(name) if SUFFIX_MARK in name else None
    if number is not None:
        return lambda each: each.number == number
    is_meant = meant(store, text)
    return lambda each: is_meant(reported(each))


def find(store: Store, text: str) -> list[CapturedContainer]:
    """Return the containers that a user means, see `chosen`, the one seen last first.

    Raises `ArtifactMissing`.
    """
    found = list(filter(chosen(store, text), store.containers.every()))
    held = [each for each in found if not each.is_empty]
    if not held:
        why = Removals(store).why_gone(text, found)
        raise ArtifactMissing(why or f"no container {text} was seen; {last_ones(store)}")
    return sorted(held, key=lambda each: -each.last_seen_ns)


def build_ids(store: Store, text: str) -> dict[BuildId, bytes]:
    """Return the build IDs of the containers that a user means, each with a path in one of them.

    Raises `ArtifactMissing`.
    """
    found: dict[BuildId, bytes] = {}
    for container in reversed(find(store, text)):
        own: dict[BuildId, bytes] = {}
        for entry, path in files(store, container.number):
            build_id = store.index.build_id(entry.ordinal)
            if build_id is not None:
                own.setdefault(build_id, path)
        found |= own
    return found


class ContainerFiles(msgspec.Struct, frozen=True):
    """A container and the files of it that the store has.

    ``build_ids`` is the number of their build IDs, ``size`` the total bytes of the different files.
    ``removed`` is the number of its other build IDs, of which a limit has removed all bytes, the
    last at the time ``last_removed`` (Unix time in seconds; None if there was none). ``shares`` are
    the parts of all these build IDs.
    """

    container: CapturedContainer
    build_ids: int
    size: int
    removed: int
    last_removed: int | None
    shares: IdShares


class ContainerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A container, with the counts of its `ContainerFiles`. Names that are not known are None."""

    container: str
    container_name: str | None
    pod: str | None
    pod_namespace: str | None
    image: str | None
    image_id: str | None
    id: str | None
    mount_name: str
    host: str | None
    first_seen: float
    last_seen: float
    build_ids: int
    removed: int
    last_removed: int | None
    bytes: int
    coverage: IdShares

    @property
    def shown_label(self) -> str:
        """Return the label for a person, see `shown_label`."""
        return self.mount_name if is_namespace(self.container) else self.container

    @property
    def shown(self) -> str | None:
        """Return the known parts of ``NAMESPACE/POD/NAME``; None if no name is known."""
        names = (self.pod_namespace, self.pod, self.container_name)
        return "/".join(filter(None, names)) or None


class Removals:
    """The build IDs of each container of which a limit has removed files, from the journal."""

    def __init__(self, store: Store) -> None:
        self._of: dict[int, set[BuildId]] = {}
        self._last: dict[int, Removal] = {}
        self.gone: dict[str, Removal] = {}
        """The last removals of containers without a row in the store, by label."""
        numbers: dict[tuple[str, bytes], int] = {}
        for row in store.journal.removed():
            if not row.container or row.removed is None:
                continue
            key = row.container, cgroup.place(row.cgroup)
            if key not in numbers:
                found = store.containers.placed(row.container, row.cgroup)
                numbers[key] = 0 if found is None else found.number
            number = numbers[key]
            self._of.setdefault(number, set()).add(row.build_id)
            self._last[number] = row.removed | self._last.get(number)
            if not number:
                self.gone[row.container] = row.removed | self.gone.get(row.container)

    def of(self, container: CapturedContainer) -> set[BuildId]:
        """Return the build IDs of a container of which a limit has once removed files."""
        return self._of.get(container.number, set())

    def last(self, container: CapturedContainer) -> Removal | None:
        """Return the last removal of files of a container; None if there was none."""
        return self._last.get(container.number)

    def why_gone(self, text: str, found: Iterable[CapturedContainer] = ()) -> str | None:
        """Return the reason why a container that a user means has no files; None if none fits.

        ``found`` are the containers with a row that the user means.
        """
        from buildidfs.capture.origin.builder import fits

        for each in found:
            if (last := self.last(each)) is not None:
                return f"all files of container {full_name(each)} were {remedies.removed(last)}"
        for label, removed in self.gone.items():
            if fits(text, label):
                return f"all files of container {label} were {remedies.removed(removed)}"
        return None


def is_held(store: Store, build_id: BuildId) -> bool:
    """Return True if the store has bytes of a build ID."""
    return store.index.kinds(store.index.ordinal(build_id) or 0) != 0


def contents(
    store: Store,
    container: CapturedContainer,
    holdings: CoverageLookup,
    removals: Removals,
    each: Callable[[ContainerEntry, bytes, BinaryCoverage], object] = lambda entry, path, row: None,
) -> ContainerFiles:
    """Count the files of a container in the store; call ``each`` with files and paths."""
    sizes: dict[Digest, int] = {}
    rows: dict[int, BinaryCoverage | None] = {}
    for entry, path in files(store, container.number):
        ordinal = entry.ordinal
        artifact = store.index.artifact_variant(ordinal, entry.kind, entry.variant)
        if artifact is not None:
            sizes[artifact.digest] = artifact.size
        if ordinal not in rows:
            build_id = store.index.build_id(ordinal)
            if build_id is not None and kept_for(build_id) != build_id:
                continue  # split DWARF or sources of another build ID
            rows[ordinal] = (
                None if build_id is None else holdings.row(container.label, path, build_id, 1)
            )
        if (row := rows[ordinal]) is not None:
            each(entry, path, row)
    known = [row for row in rows.values() if row is not None]
    present = {row.build_id for row in known}
    removed = len(removals.of(container) - present)
    shares = IdShares.of(
        len(rows) + removed,
        sum(row.executable for row in known),
        sum(row.symbols >= Quality.SYMTAB for row in known),
        sum(row.debuginfo for row in known),
    )
    last = removals.last(container) if removed else None
    when = None if last is None else last.time
    return ContainerFiles(container, len(rows), sum(sizes.values()), removed, when, shares)


def summary(row: ContainerFiles) -> ContainerSummary:
    """Return the answer about a container for text and JSON."""
    its = row.container
    name, _, digest = its.called.image.partition("\n")
    return ContainerSummary(
        container=reported(its),
        container_name=its.called.name or None,
        pod=its.called.pod or None,
        pod_namespace=its.called.namespace or None,
        image=name or None,
        image_id=digest.partition("\n")[0] or None,
        id=its.id or None,
        mount_name=utf8(its.name),
        host=its.host or None,
        first_seen=its.first_seen_ns / 1e9,
        last_seen=its.last_seen_ns / 1e9,
        build_ids=row.build_ids,
        removed=row.removed,
        last_removed=row.last_removed,
        bytes=row.size,
        coverage=row.shares,
    )


def last_seen(
    store: Store, wanted: Callable[[CapturedContainer], bool], limit: int, removals: Removals
) -> tuple[list[ContainerFiles], int]:
    """Return the containers seen last, at most ``limit`` (0: all), and the number of all wanted."""
    every = [
        each
        for each in store.containers.every()
        if not (each.is_empty and removals.last(each) is None) and wanted(each)
    ]
    chosen = heapq.nlargest(limit or len(every), every, key=lambda each: each.last_seen_ns)
    holdings = CoverageLookup(store)
    return [contents(store, each, holdings, removals) for each in chosen], len(every)


def files(store: Store, number: int) -> Iterator[tuple[ContainerEntry, bytes]]:
    """Yield the files of the container with a number, each with its path there."""
    waiting: list[tuple[int, bytes]] = [(0, b"")]
    while waiting:
        directory, path = waiting.pop()
        for entry in store.containers.children(number, directory):
            its = path + b"/" + entry.name
            if entry.directory > directory:
                waiting.append((entry.directory, its))
            elif not entry.directory:
                yield entry, its
