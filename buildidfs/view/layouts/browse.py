# SPDX-License-Identifier: Apache-2.0
"""The trees for people: ``README``, ``by-path``, ``by-name``, ``containers``, ``missing``.

A front door should not remember their names for long: it is not told when one comes or goes.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Final

from buildidfs.view import nodes
from buildidfs.view.attributes import Attributes, FileContent, stale
from buildidfs.view.layouts.by_path import ByName, ByPath
from buildidfs.view.layouts.containers import Containers
from buildidfs.view.layouts.missing import Misses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.store import Store
    from buildidfs.view.layouts.id_dir import IdDirectories
    from buildidfs.view.permissions import Viewer

_FILES = (nodes.FORM_TEXT, nodes.FORM_MISSING)


class Browse:
    """All of those trees."""

    def __init__(self, store: Store, ids: IdDirectories, shared: Attributes) -> None:
        """``shared`` are the attributes of directories, which belong to the store."""
        self._by_path = ByPath(store)
        self._by_name = ByName(store)
        self._containers = Containers(store, ids.node_of)
        self.misses = Misses(store)
        self._shared = shared
        # Only root may see what other users look for.
        self._private = Attributes(stat.S_IFDIR | 0o500, 0, shared.mtime_ns, shared.uid, shared.gid)

    def lookup(self, node: int, name: bytes) -> int:
        """The node of an entry of a directory, `nodes.ABSENT` if there is none."""
        form = nodes.form_of(node)
        if form == nodes.FORM_CONTENTS:
            return self._containers.lookup_file(node, name)
        if form == nodes.FORM_PATH:
            return self._by_path.lookup(node, name)
        if form == nodes.FORM_NAME:
            return self._by_name.lookup(node, name)
        if form == nodes.FORM_CONTAINER:
            return self._containers.lookup(node, name)
        if node == nodes.CONTAINERS:
            return self._containers.lookup_container(name)
        return self.misses.lookup(name) if node == nodes.MISSING else nodes.ABSENT

    def children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Entries of a directory whose offset is beyond ``after``: name, node, offset."""
        form = nodes.form_of(node)
        if form == nodes.FORM_CONTENTS:
            return self._containers.files(node, after)
        if form == nodes.FORM_PATH:
            return self._by_path.children(node, after)
        if form == nodes.FORM_NAME:
            return self._by_name.children(node, after)
        if form == nodes.FORM_CONTAINER:
            return self._containers.children(node, after)
        if node == nodes.CONTAINERS:
            return self._containers.containers(after)
        return self.misses.children(after) if node == nodes.MISSING else iter(())

    def file_type(self, node: int) -> int:
        """The type bits of st_mode, told by the number alone."""
        form = nodes.form_of(node)
        if form == nodes.FORM_ALIAS:
            return stat.S_IFLNK
        return stat.S_IFREG if form in _FILES or node == nodes.README else stat.S_IFDIR

    def attributes(self, node: int) -> Attributes:
        """The attributes of a node; raises OSError(ESTALE) for one that is gone."""
        kind = self.file_type(node)
        if kind == stat.S_IFLNK:
            return self._of(stat.S_IFLNK | 0o777, len(self.readlink(node)))
        if kind == stat.S_IFREG:
            private = nodes.form_of(node) == nodes.FORM_MISSING
            mode = stat.S_IFREG | (0o400 if private else 0o444)
            return self._of(mode, len(self._text(node)), volatile=node != nodes.README)
        form = nodes.form_of(node)
        in_container = form in (nodes.FORM_CONTAINER, nodes.FORM_CONTENTS)
        if in_container and not self._containers.exists(node):
            raise stale()
        return self._private if node == nodes.MISSING else self._shared

    def readlink(self, node: int) -> bytes:
        """The target of a link; raises OSError (EINVAL: not a link, ESTALE: gone)."""
        if nodes.form_of(node) != nodes.FORM_ALIAS:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        target = self._containers.target(node)
        if not target:
            raise stale()
        return target

    def open(self, node: int) -> FileContent:
        """Open a file; raises OSError (EISDIR: not a file, ESTALE: gone)."""
        if self.file_type(node) != stat.S_IFREG:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        return FileContent(text=self._text(node))

    def is_public(self, node: int, name: bytes, child: int) -> bool:
        """Return True if everybody may know of an entry of a directory.

        A viewer who may know of a container may know its properties. The kernel decides who may
        enter ``missing``.
        """
        form = nodes.form_of(node)
        if form == nodes.FORM_PATH:
            return self._by_path.is_public(node, name, child)
        if form == nodes.FORM_NAME:
            return self._by_name.is_public(node, name, child)
        if form == nodes.FORM_CONTENTS:
            return self._containers.is_public_file(node, name)
        return node != nodes.CONTAINERS or self._containers.is_public(child)

    def places(
        self, node: int, name: bytes, child: int
    ) -> tuple[Callable[[bytes], bool], Iterable[int]]:
        """A test for the paths that an entry stands for, and the build IDs to look for them in.

        For directories of paths or names.
        """
        tree = self._by_path if nodes.form_of(node) == nodes.FORM_PATH else self._by_name
        return tree.places(node, name, child)

    def in_container(self, node: int, name: bytes, child: int, viewer: Viewer) -> Iterator[bool]:
        """Yield for each file of a container that an entry leads to, if a viewer may know of it."""
        return self._containers.known(node, name, child, viewer)

    def _text(self, node: int) -> bytes:
        if node == nodes.README:
            return _README
        is_miss = nodes.form_of(node) == nodes.FORM_MISSING
        text = self.misses.text(node) if is_miss else self._containers.text(node)
        if not text:
            raise stale()
        return text

    def _of(self, mode: int, size: int, *, volatile: bool = False) -> Attributes:
        shared = self._shared
        return Attributes(mode, size, shared.mtime_ns, shared.uid, shared.gid, volatile)


_README: Final = b"""\
This is buildidfs: binaries and debuginfo by build ID, also of containers that are gone.

<id>/elf, <id>/debug            the executable or library, and its debuginfo
<id>/path                       where it was seen
<id>/variants/<sha256>          every file that was ever seen with this build ID
by-path/usr/bin/app/<id>        everything that was ever seen at a path
by-name/app/<id>                and under a file name
containers/<name>/root/...      the files of one container at their own paths: a sysroot
missing/<id>                    what was asked for here and is not there (for root)

Point your tools here, MNT being this directory:
  gdb      set debug-file-directory MNT/debug    (never MNT itself: see SECURITY.md)
           set sysroot MNT/containers/<name>/root
  perf     perf --buildid-dir MNT/perf report
  lldb     settings set target.debug-file-search-paths MNT/debug
  others   DEBUGINFOD_URLS=file://MNT (elfutils, drgn), or MNT/debug as debug directory

What a file is: getfattr -d -m user. <id>/elf     What is known of it: buildidfs show <id>
Nothing can be written here. More: man 7 buildidfs-mount
"""
