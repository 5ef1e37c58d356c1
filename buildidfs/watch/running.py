# SPDX-License-Identifier: Apache-2.0
"""The processes that have certain files mapped now. Needs no store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from buildidfs import wording
from buildidfs.capture.base import Unreadable
from buildidfs.capture.origin import container_names
from buildidfs.capture.origin.builder import fits, shown
from buildidfs.capture.process.mapped_by import Mapper, Mappers
from buildidfs.capture.process.process import Ways
from buildidfs.capture.process.silent_processes import described
from buildidfs.catalog.containers import Names
from buildidfs.errors import InvalidBuildId
from buildidfs.located import InContainer, path_fields
from buildidfs.model import BuildId
from buildidfs.names import is_hex, merged, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.capture.base import Progress
    from buildidfs.capture.process.mapped_by import Successor
    from buildidfs.config import Settings
    from buildidfs.model import Mapping


class MappingFilter(NamedTuple):
    """The conditions for mapped files; a file must meet all that are given.

    ``id_or_path`` is the beginning of a build ID, or a path, ``glob`` a pattern of paths, in which
    ``*`` matches slashes, too. ``deleted`` selects files whose path at the time of the mapping is
    gone.
    """

    id_or_path: str | None = None
    glob: str | None = None
    container: str | None = None
    deleted: bool = False

    def __str__(self) -> str:
        what = "a file" if self.id_or_path is None else printable(self.id_or_path)
        where = "" if self.glob is None else f" at {printable(self.glob)}"
        lost = " that was deleted" if self.deleted else ""
        inside = "" if self.container is None else f" in container {self.container}"
        return f"{what}{where}{lost}{inside}"


class FileNow(msgspec.Struct, frozen=True):
    """The file at the path of a deleted one; what is not known is None."""

    build_id: BuildId | None
    package: str | None
    package_version: str | None


class MappedFile(InContainer, frozen=True, kw_only=True):
    """A file that a running process has mapped; a row of ``where --live``.

    ``package`` and ``package_version`` are those of this file, None if they are not known.
    ``deleted`` is True if the path does not lead to the file any more: then ``now`` is the file
    that has its path.
    """

    build_id: BuildId
    pid: int
    comm: str
    deleted: bool
    package: str | None
    package_version: str | None
    now: FileNow | None


class IdsInUse(msgspec.Struct):
    """The ``build_ids`` of the files that ``processes`` have mapped executable.

    ``unseen`` processes, which are among them, could not be examined. ``silent`` is a clause that
    names the processes that do not answer, empty if there are none.
    """

    processes: int
    unseen: int
    silent: str
    build_ids: set[BuildId]


def ids_in_use(progress: Progress | None = None) -> IdsInUse:
    """Return the build IDs whose code the processes of this host have mapped."""
    ways = Ways()
    build_ids, seen, unseen = set[BuildId](), set[int](), 0
    for item in Mappers(lambda build_id, mapping: True, nameless=True, ways=ways):
        if isinstance(item, Unreadable):
            unseen += item.path != b"/proc"
            continue
        if isinstance(item, Mapper):
            build_ids.add(item.build_id)
        seen.add(item.pid)
        if progress is not None:
            progress(len(seen), f"/proc/{item.pid}")
    silent = described(ways.gate.silent.rows(), ways.gate.silent.unasked())
    return IdsInUse(len(seen) + unseen, unseen, silent, build_ids)


def who_maps(settings: Settings, asked: MappingFilter) -> tuple[list[MappedFile], list[Unreadable]]:
    """Return the processes that map matching files, and those that could not be inspected.

    The result is sorted by container, then by process. Raises `InvalidBuildId`, and
    `AmbiguousBuildId` if several mapped build IDs begin with the given digits.
    """
    text = asked.id_or_path
    digits = text.lower() if text is not None and is_hex(text) else ""
    scan = Mappers(
        _test(asked, digits), packages=True, container_namespaces=settings.container.namespaces
    )
    found: list[Mapper] = []
    refused: list[Unreadable] = []
    for item in scan:
        if isinstance(item, Unreadable):
            refused.append(item)
        elif isinstance(item, Mapper) and _is_in(asked.container, item):
            found.append(item)
    if digits:
        found = _only(digits, found)
    found.sort(key=lambda mapper: (mapper.container, mapper.pid, mapper.path))
    names = Names(running=True)
    return [_named(names, each) for each in found], refused


def _named(names: Names, mapper: Mapper) -> MappedFile:
    return MappedFile(
        **path_fields(mapper.path),
        **names.fields(shown(mapper.container, mapper.cgroup), mapper.cgroup),
        build_id=mapper.build_id,
        pid=mapper.pid,
        comm=mapper.comm.decode("utf-8", "replace"),
        deleted=mapper.deleted,
        package=mapper.package.name or None,
        package_version=mapper.package.version or None,
        now=None if mapper.successor is None else _now(mapper.successor),
    )


def _now(successor: Successor) -> FileNow:
    package = successor.package
    return FileNow(successor.build_id, package.name or None, package.version or None)


def _test(asked: MappingFilter, digits: str) -> Callable[[BuildId, Mapping], bool]:
    """Return the test that a mapping has to pass."""
    paths: frozenset[bytes] = frozenset()
    if asked.id_or_path is not None and not digits:
        path = os.fsencode(asked.id_or_path)
        if b"/" not in path and not os.path.lexists(path):
            raise InvalidBuildId(
                f"neither a build ID, nor the start of one, nor a path: {asked.id_or_path!r}"
            )
        names = (path, os.path.abspath(path), os.path.realpath(path))
        paths = frozenset(each for name in names for each in (name, *merged(name)))
    pattern = wording.glob(asked.glob or "*")

    def wanted(build_id: BuildId, mapping: Mapping) -> bool:
        return (
            build_id.hex().startswith(digits)
            and (not paths or mapping.path in paths)
            and pattern.match(mapping.path) is not None
            and (mapping.deleted or not asked.deleted)
        )

    return wanted


def _is_in(container: str | None, mapper: Mapper) -> bool:
    if container is None:
        return True
    names = container_names.names_of_cgroup(mapper.cgroup)
    return fits(container, mapper.container, names)


def _only(digits: str, found: list[Mapper]) -> list[Mapper]:
    """Return the mappers if all have one build ID. Raises `AmbiguousBuildId`."""
    if any(mapper.build_id.hex() == digits for mapper in found):
        return [mapper for mapper in found if mapper.build_id.hex() == digits]
    wording.only(digits, {mapper.build_id.hex() for mapper in found})
    return found
