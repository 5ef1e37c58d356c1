# SPDX-License-Identifier: Apache-2.0
"""``containers/<name>/``: the files of one container, which may be long gone, at their own paths.

    containers/docker:0123456789ab/root/usr/bin/app       the same file as <id>/elf
    containers/docker:0123456789ab/{id,name,pod,image,first-seen,last-seen}
    containers/web -> docker:0123456789ab                 the last container of that name

``root`` is for clients that take a sysroot. They look up the name that the dynamic loader used,
``/lib/x86_64-linux-gnu/libc.so.6``, but the captured file has the name in the kernel's mapping,
``/usr/lib/x86_64-linux-gnu/libc-2.31.so``: symbolic links are unknown. So missing names are derived
from the conventions of distributions, see `_ALIASES` and `_file_for`; such names are not listed.
``usr/lib/debug/.build-id``, where perf looks for debug files, is not listed either; if the
container had no such directory, the name leads to the debug files of all build IDs.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Final

from buildidfs import names
from buildidfs.model import Kind
from buildidfs.store import is_of, link_key
from buildidfs.store.permissions import may_see
from buildidfs.view import nodes
from buildidfs.view.attributes import moment
from buildidfs.view.layouts.debug import DEBUGINFO_BIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.model import Artifact
    from buildidfs.store import CapturedContainer, ContainerEntry, Store
    from buildidfs.store.permissions import Viewer

_ROOT: Final = 0
_ROOT_NAME: Final = b"root"
_TEXTS: Final = (b"id", b"image", b"first-seen", b"last-seen", b"name", b"pod")

_ALIASES: Final = names.MERGED
"""Directories that are links if /usr is merged. If the directory in the loader's name does not
exist (/lib64), the link leads to the directory that has the loader.
"""

_IN_USR: Final = 8

_BUCKETS: Final = b"usr/lib/debug/.build-id"
_STAND_INS: Final = (
    (b"usr", b"usr"),
    (b"usr/lib", b"usr/lib"),
    (b"usr/lib/debug", b"debug"),
    (_BUCKETS, b"debug/.build-id"),
    (b"lib/debug", b"debug"),  # if usr/lib is a link to it
    (b"lib/debug/.build-id", b"debug/.build-id"),
)
"""Directories that a container may lack, each with the directory of the mount that replaces it."""

_STAND_IN_LINK: Final = 16
_BUCKET_LINK: Final = 256
"""The first numbers of two groups of links: to `_STAND_INS`, by index, and to the directories
``debug/.build-id/ab``, by the byte in their names. Lower numbers are those of `_ALIASES`.
"""

_NAME_LINK: Final = 1024
"""The number of the link for a user-given name of a container."""
_LINKS_AFTER: Final = 1 << 32
"""In the listing of containers, links by name follow all containers."""

_UP_TO_MOUNT: Final = 3  # directories, counted from the root of a container
_LIBRARY_DIRECTORIES: Final = (b"usr/lib", b"lib", b"usr/lib64", b"lib64")
_MOST_LOOKED_AT: Final = 4096

_NUMBERS: Final = re.compile(rb"[0-9]+")


class Containers:
    """The directories of containers."""

    def __init__(self, store: Store, node_of: Callable[[Artifact], int]) -> None:
        """``node_of`` returns the node of a file, the same in all listings."""
        self._store = store
        self._node_of = node_of

    # --- containers/ and containers/<name>/ ------------------------------------------------

    def lookup_container(self, name: bytes) -> int:
        """Return the node of an entry of ``containers``, `nodes.ABSENT` if there is none."""
        number = self._number(self._store.containers.number(name))
        if number:
            return nodes.of_browsing(nodes.FORM_CONTAINER, number)
        number = self._number(self._store.containers.linked(name))
        return nodes.of_browsing(nodes.FORM_ALIAS, number, _NAME_LINK) if number else nodes.ABSENT

    def _number(self, number: int | None) -> int:
        """Return the number of a container, 0 if the store has none of its files any more."""
        container = self._store.containers.get(number) if number else None
        return 0 if container is None or container.is_empty else container.number

    def containers(self, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield the entries of ``containers`` whose offset is beyond ``after``: name,
        node, offset.
        """
        tree = self._store.containers
        # A larger number is invalid.
        for container in tree.every(after) if after < _LINKS_AFTER else ():
            if container.is_empty:
                continue
            node = nodes.of_browsing(nodes.FORM_CONTAINER, container.number)
            yield container.name, node, container.number
        start = max(after - _LINKS_AFTER, 0)
        for container in tree.every(start) if start <= nodes.NUMBER_MASK else ():
            name = b"" if container.is_empty else link_key(container.called)[1:]
            if name and tree.linked(name) == container.number and tree.number(name) is None:
                node = nodes.of_browsing(nodes.FORM_ALIAS, container.number, _NAME_LINK)
                yield name, node, _LINKS_AFTER + container.number

    def lookup(self, node: int, name: bytes) -> int:
        """Return the node of an entry of the directory of a container."""
        number, _ = nodes.container_of(node)
        if name == _ROOT_NAME:
            return nodes.of_browsing(nodes.FORM_CONTENTS, number)
        if name not in _TEXTS:
            return nodes.ABSENT
        text = nodes.of_browsing(nodes.FORM_TEXT, number, _TEXTS.index(name))
        return text if self.text(text) else nodes.ABSENT

    def children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield the entries of the directory of a container: name, node, offset."""
        for offset, name in enumerate((_ROOT_NAME, *_TEXTS)[after:], after + 1):
            found = self.lookup(node, name)
            if found:
                yield name, found, offset

    def exists(self, node: int) -> bool:
        """Return True if the container of a node still exists."""
        return self._number(nodes.container_of(node)[0]) != 0

    def text(self, node: int) -> bytes:
        """Return the text of a file about a container; empty if its content is unknown."""
        number, which = nodes.container_of(node)
        container = self._store.containers.get(number)
        if container is None or which >= len(_TEXTS):
            return b""
        return _texts_of(container)[_TEXTS[which]]

    # --- containers/<name>/root/… ----------------------------------------------------------

    def lookup_file(self, node: int, name: bytes) -> int:
        """Return the node of an entry of a directory below ``root``."""
        container, directory = nodes.container_of(node)
        entry = self._store.containers.child(container, directory, name)
        if entry is not None:
            return self._entry(container, entry)
        alias = self._alias(container, directory, name)
        if alias:
            return alias
        found = self._file_for(container, directory, name)
        if found is not None:
            return self._entry(container, found)
        return self._debug_tree(container, directory, name)

    def files(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield the entries of a directory below ``root``: name, node, offset."""
        container, directory = nodes.container_of(node)
        for entry in self._store.containers.children(container, directory, after):
            found = self._entry(container, entry)
            if found:
                yield entry.name, found, entry.offset

    def is_public(self, node: int) -> bool:
        """Return True if all users may know of a container."""
        container = self._store.containers.get(nodes.container_of(node)[0])
        return container is not None and container.public

    def is_public_file(self, node: int, name: bytes) -> bool:
        """Return True if all users may know of an entry of a directory below ``root``."""
        found = self._meant(node, name)
        if found is None:  # all users may know of a stand-in
            return self._debug_tree(*nodes.container_of(node), name) != nodes.ABSENT
        return found[1].public

    def known(self, node: int, name: bytes, child: int, viewer: Viewer) -> Iterator[bool]:
        """Yield, for each file below an entry of ``containers`` or ``root``, True if a viewer may
        know of it.
        """
        if node == nodes.CONTAINERS:
            number = nodes.container_of(child)[0]
            places = self._below(number, _ROOT)
        else:
            number = nodes.container_of(node)[0]
            found = self._meant(node, name)
            if found is None:
                return
            directory, entry = found
            places = iter((found,))
            if entry.directory:
                places = self._below(number, entry.directory)
        container = self._store.containers.get(number)
        if container is not None:
            for directory, entry in places:
                yield self._is_known(container, directory, entry, viewer)

    def _meant(self, node: int, name: bytes) -> tuple[int, ContainerEntry] | None:
        """Return the entry that a name below ``root`` stands for, and its directory.

        The name may be one that a listing leaves out.
        """
        container, directory = nodes.container_of(node)
        entry = self._store.containers.child(container, directory, name)
        if entry is not None:
            return directory, entry
        alias = self._alias(container, directory, name)
        if not alias:
            entry = self._file_for(container, directory, name)
            return None if entry is None else (directory, entry)
        path = self.target(alias)
        in_root = path.removeprefix(b"../") if path.startswith(b"../") else path
        return self._resolved(container, in_root)

    def _resolved(self, container: int, path: bytes) -> tuple[int, ContainerEntry] | None:
        """Return the entry at a path, and its directory."""
        directory, entry = _ROOT, None
        for name in filter(None, path.split(b"/")):
            if entry is not None:
                directory = entry.directory
                if not directory:
                    return None
            entry = self._store.containers.child(container, directory, name)
            if entry is None:
                return None
        return None if entry is None else (directory, entry)

    def _below(self, container: int, directory: int) -> Iterator[tuple[int, ContainerEntry]]:
        """Yield the files in a directory or below it, each with its directory."""
        waiting = [directory]
        while waiting:
            at = waiting.pop()
            for entry in self._store.containers.children(container, at):
                if entry.directory:
                    waiting.append(entry.directory)
                else:
                    yield at, entry

    def _is_known(
        self, container: CapturedContainer, directory: int, entry: ContainerEntry, viewer: Viewer
    ) -> bool:
        """Return True if a viewer could have read a file at its place in a container."""
        artifact = self._store.index.artifact_variant(entry.ordinal, entry.kind, entry.variant)
        if artifact is None:
            return False
        return any(
            record.digest == artifact.digest
            and may_see(viewer, record.origin)
            and is_of(container, record.origin)
            and self._resolved(container.number, record.origin.path) == (directory, entry)
            for record in self._store.index.origins(entry.ordinal)
        )

    def target(self, node: int) -> bytes:
        """Return the target of a link below ``root``; empty if it has none."""
        container, which = nodes.container_of(node)
        if which == _NAME_LINK:
            meant = self._store.containers.get(container)
            return b"" if meant is None else meant.name
        if which >= _STAND_IN_LINK:
            return _debug_target(which) if self.exists(node) else b""
        if which % _IN_USR >= len(_ALIASES):
            return b""
        name, in_usr = _ALIASES[which % _IN_USR], bool(which & _IN_USR)
        merged = name if in_usr else b"usr/" + name
        if self._directory(container, merged):
            return b"../" + name if in_usr else merged
        if not name.startswith(b"lib"):
            return b""
        found = self._loaders(container)
        return b"../" + found if in_usr and found else found

    def _entry(self, container: int, entry: ContainerEntry) -> int:
        if entry.directory:
            return nodes.of_browsing(nodes.FORM_CONTENTS, container, entry.directory)
        artifact = self._store.index.artifact_variant(entry.ordinal, entry.kind, entry.variant)
        return nodes.ABSENT if artifact is None else self._node_of(artifact)

    def _alias(self, container: int, directory: int, name: bytes) -> int:
        """Return the link for a missing directory, in the root or in ``usr``."""
        if name not in _ALIASES:
            return nodes.ABSENT
        in_usr = directory != _ROOT
        if in_usr and self._directory(container, b"usr") != directory:
            return nodes.ABSENT
        which = _ALIASES.index(name) | (_IN_USR if in_usr else 0)
        link = nodes.of_browsing(nodes.FORM_ALIAS, container, which)
        return link if self.target(link) else nodes.ABSENT

    def _debug_tree(self, container: int, directory: int, name: bytes) -> int:
        """Return the link for a name in ``usr/lib/debug/.build-id``, or in one of its parents."""
        for number, (path, _) in enumerate(_STAND_INS):
            parent, _, last = path.rpartition(b"/")
            if name == last and self._is_at(container, directory, parent):
                link = nodes.of_browsing(nodes.FORM_ALIAS, container, _STAND_IN_LINK + number)
                return link if self.target(link) else nodes.ABSENT
        bucket = names.bucket(name)
        if bucket is not None:
            if self._is_at(container, directory, _BUCKETS):
                return nodes.of_browsing(nodes.FORM_ALIAS, container, _BUCKET_LINK | bucket)
        elif name.endswith(names.DEBUG_SUFFIX):
            return self._debug_file(container, directory, name)
        return nodes.ABSENT

    def _debug_file(self, container: int, directory: int, name: bytes) -> int:
        """Return the link for a debug file in ``.build-id/ab``, if the container had this directory
        itself.
        """
        buckets = self._directory(container, _BUCKETS)
        known = self._some(container, buckets) if buckets else iter(())
        bucket = next((entry.name for entry in known if entry.directory == directory), b"")
        first = names.bucket(bucket)
        parsed = None if first is None else names.parse_split(first, name)
        ordinal = None if parsed is None else self._store.index.ordinal(parsed[0])
        if ordinal is None or not self._store.index.kinds(ordinal) & DEBUGINFO_BIT:
            return nodes.ABSENT
        depth = _UP_TO_MOUNT + _BUCKETS.count(b"/") + 2
        return nodes.of_id(ordinal, nodes.SLOT_DEBUGINFO_LINK, depth)

    def _is_at(self, container: int, directory: int, path: bytes) -> bool:
        if not path:
            return directory == _ROOT
        return directory != _ROOT and self._directory(container, path) == directory

    def _directory(self, container: int, path: bytes) -> int:
        """Return the number of a directory by its path, 0 if there is none."""
        directory = _ROOT
        for name in path.split(b"/"):
            entry = self._store.containers.child(container, directory, name)
            if entry is None or not entry.directory:
                return 0
            directory = entry.directory
        return directory

    def _loaders(self, container: int) -> bytes:
        """Return the path of the directory with the dynamic loader; empty if no loader was seen."""
        for path in _LIBRARY_DIRECTORIES:
            directory = self._directory(container, path)
            if not directory:
                continue
            here = list(self._some(container, directory))
            if any(map(_is_loader, here)):
                return path
            most = _MOST_LOOKED_AT
            for entry in sorted(here, key=lambda entry: (b"64" not in entry.name, entry.name)):
                if entry.directory and most > 0:
                    below = list(itertools.islice(self._some(container, entry.directory), most))
                    if any(map(_is_loader, below)):
                        return path + b"/" + entry.name
                    most -= len(below)
        return b""

    def _file_for(self, container: int, directory: int, name: bytes) -> ContainerEntry | None:
        """Return the file to which the link of a shared library leads by convention.

        ``libz.so.1`` is ``libz.so.1.3.1``, and ``libgcc_s.so.1`` may be ``libgcc_s-14.so.1``;
        libraries of glibc before 2.34 are ``libc-2.31.so`` for ``libc.so.6``, ``ld-2.31.so`` for
        ``ld-linux-x86-64.so.2``; that of musl is its loader. If several match, the latest version
        is returned.
        """
        wanted = names.targets_of_library(name)
        if wanted is None:
            return None
        fitting = [
            (found.lastindex or 0, [int(number) for number in _NUMBERS.findall(entry.name)], entry)
            for entry in self._some(container, directory)
            if entry.kind == Kind.EXECUTABLE and (found := wanted.match(entry.name))
        ]
        for *_, entry in sorted(fitting, key=lambda each: each[:2], reverse=True):
            if self._entry(container, entry):
                return entry
        return None

    def _some(self, container: int, directory: int) -> Iterator[ContainerEntry]:
        entries = self._store.containers.children(container, directory)
        return itertools.islice(entries, _MOST_LOOKED_AT)


def _debug_target(which: int) -> bytes:
    """Return the target of a link that `Containers` made for debug files; empty for others."""
    if _BUCKET_LINK <= which < 2 * _BUCKET_LINK:
        path, target = _BUCKETS + b"/", b"debug/.build-id/%02x" % (which - _BUCKET_LINK)
    elif which - _STAND_IN_LINK < len(_STAND_INS):
        path, target = _STAND_INS[which - _STAND_IN_LINK]
    else:
        return b""
    return b"../" * (_UP_TO_MOUNT + path.count(b"/")) + target


def _is_loader(entry: ContainerEntry) -> bool:
    return entry.kind == Kind.EXECUTABLE and entry.name.startswith((b"ld-", b"ld64", b"ld.so"))


def _texts_of(container: CapturedContainer) -> dict[bytes, bytes]:
    """Return the texts of the files about a container, by name."""
    lines = {
        b"id": container.id,
        b"image": container.called.image,
        b"name": container.called.name,
        b"pod": "/".join(filter(None, (container.called.namespace, container.called.pod))),
        b"first-seen": moment(container.first_seen_ns / 1e9),
        b"last-seen": moment(container.last_seen_ns / 1e9),
    }
    shown = {name: text.encode("utf-8", "surrogateescape") for name, text in lines.items()}
    return {name: text and text + b"\n" for name, text in shown.items()}
