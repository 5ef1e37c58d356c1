# SPDX-License-Identifier: Apache-2.0
"""The trees for people: ``README``, ``by-path``, ``by-name``, ``containers``, ``missing``.

A front door should not cache these names for long, because their changes are not announced.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
import time
from typing import TYPE_CHECKING, Final

from buildidfs import names
from buildidfs.model import BuildId, Kind
from buildidfs.shares import HOST, FairTable, Share
from buildidfs.view import nodes
from buildidfs.view.attributes import CONTROL, Attributes, FileContent, moment, stale
from buildidfs.view.layouts.by_path import ByName, ByPath
from buildidfs.view.layouts.containers import Containers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.store import Store
    from buildidfs.store.permissions import Viewer
    from buildidfs.view.layouts.id_dir import IdDirectories


_FILES = (nodes.FORM_TEXT, nodes.FORM_MISSING)


class Browse:
    """All of those trees together."""

    def __init__(self, store: Store, ids: IdDirectories, shared: Attributes) -> None:
        """``shared`` are the attributes that all directories have: those of the store's
        directory.
        """
        self._by_path = ByPath(store)
        self._by_name = ByName(store)
        self._containers = Containers(store, ids.node_of)
        self.misses = Misses(store)
        self._shared = shared
        # Only root may see the lookups of other users.
        self._private = Attributes(stat.S_IFDIR | 0o500, 0, shared.mtime_ns, shared.uid, shared.gid)

    def lookup(self, node: int, name: bytes) -> int:
        """Return the node of an entry of a directory, `nodes.ABSENT` if there is none."""
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
        """Yield the entries of a directory whose offset is beyond ``after``: name, node, offset."""
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
        """Return the type bits of st_mode, derived from the number alone."""
        form = nodes.form_of(node)
        if form == nodes.FORM_ALIAS:
            return stat.S_IFLNK
        return stat.S_IFREG if form in _FILES or node == nodes.README else stat.S_IFDIR

    def attributes(self, node: int) -> Attributes:
        """Return the attributes of a node; raises OSError(ESTALE) if it is gone."""
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
        """Return the target of a link; raises OSError (EINVAL: not a link, ESTALE: gone)."""
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
        """Return True if all users may know of an entry of a directory.

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
        """Return the data that decide if a viewer may know of an entry: a test for paths, and build
        IDs.

        The viewer may know of the entry if they could have read a file with one of these build IDs
        at a path that passes the test. For directories of paths or names.
        """
        tree = self._by_path if nodes.form_of(node) == nodes.FORM_PATH else self._by_name
        return tree.places(node, name, child)

    def in_container(self, node: int, name: bytes, child: int, viewer: Viewer) -> Iterator[bool]:
        """Yield, for each file of a container below an entry, True if a viewer may know of it."""
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


MOST: Final = 4096
_MOST_CLIENTS: Final = 16
_OTHERS: Final = b"others"

_ANY: Final = 0
_BUCKETS_END: Final = nodes.PERF_BUCKET + 256
_NAME_OF: Final = {Kind.EXECUTABLE: "executable", Kind.DEBUGINFO: "debuginfo"}
_INSTEAD: Final = 1 << Kind.VDSO | 1 << Kind.KALLSYMS
"""The kinds that perf uses instead of an executable."""

#: Directory, name, program, and share.
_Key = tuple[int, bytes, bytes, Share]

#: The number of lookups of a name, the first and the last time.
_Question = tuple[int, float, float]


class Miss:
    """One missing build ID.

    ``wanted`` has 1<<kind for each kind that was looked up; it is 0 if any kind was wanted.
    ``share`` is the one for which it counts.
    """

    __slots__ = ("build_id", "clients", "count", "first", "last", "serial", "share", "wanted")

    def __init__(self, build_id: BuildId, serial: int, first: float, share: Share) -> None:
        self.build_id = build_id
        self.share = share
        self.serial = serial
        self.wanted = _ANY
        self.count = 0
        self.clients: dict[bytes, int] = {}
        self.first = self.last = first

    def asked(self, kind: int, client: bytes, question: _Question) -> None:
        """Count the lookups in ``question`` by a client; ``kind`` 0 means any kind."""
        count, first, last = question
        self.wanted |= 1 << kind if kind else _ANY
        self.count += count
        self.first, self.last = min(self.first, first), max(self.last, last)
        client = CONTROL.sub(b"?", client)
        if client not in self.clients and len(self.clients) >= _MOST_CLIENTS:
            client = _OTHERS
        self.clients[client] = self.clients.get(client, 0) + count

    def text(self) -> bytes:
        """Return the text of the file for this build ID in ``missing``."""
        wanted = [name for kind, name in _NAME_OF.items() if self.wanted & 1 << kind]
        often = sorted(self.clients.items(), key=lambda each: (-each[1], each[0]))
        by = b", ".join(b"%s (%d)" % each for each in often)
        lines = (
            f"build-id: {self.build_id}",
            f"wanted: {', '.join(wanted) or 'anything'}",
            f"asked: {self.count}",
            f"first: {moment(self.first)}",
            f"last: {moment(self.last)}",
        )
        return "".join(f"{line}\n" for line in lines).encode() + b"by: " + by + b"\n"


class Misses:
    """The build IDs that clients looked up in vain: how often, when first, and when last.

    `MOST` are kept in memory: the users of a mount, or the clients of a server, divide the room, a
    quarter is for root only, and the latest of each are kept. A front door records the names that
    it did not find; a listing of ``missing`` converts them to build IDs, because listings are rare.
    A build ID that has arrived is no longer listed. Thread-safe.
    """

    def __init__(self, store: Store, most: int = MOST) -> None:
        self._store = store
        self._most = most
        self._serials = itertools.count(1)
        self._questions = self._no_questions()
        self._misses: FairTable[BuildId, Miss] = FairTable(most, most // 4)
        self._lock = threading.Lock()
        self._asking = threading.Lock()

    def _no_questions(self) -> FairTable[_Key, _Question]:
        return FairTable(self._most, self._most // 4)

    def note(self, directory: int, name: bytes, client: bytes, share: Share = HOST) -> None:
        """Record that the program ``client`` looked up ``name``, which does not exist; it counts
        for ``share``.
        """
        if directory >= _BUCKETS_END and directory >> nodes.TAG_SHIFT != nodes.TAG_ID:
            return  # these are no names of artifacts, and clients try many paths
        key = (directory, name, client, share)
        now = time.time()
        with self._asking:
            if known := self._questions.get(key):
                self._questions.renew(key, (known[0] + 1, known[1], now))
            else:
                self._questions.put(key, share, (1, now, now))

    def note_build_id(
        self, build_id: BuildId, kind: int, client: bytes = b"", share: Share = HOST
    ) -> None:
        """Record that ``client`` requested a missing build ID; ``kind`` 0 means any kind."""
        first, rest = names.split(build_id)
        directory = nodes.DEBUG_BUCKET + build_id[0]
        if not kind:
            directory, rest = nodes.ROOT, first + rest
        elif kind == Kind.DEBUGINFO:
            rest += names.DEBUG_SUFFIX
        self.note(directory, rest, client, share)

    def every(self) -> list[Miss]:
        """Return all build IDs that were looked up in vain, including those that have arrived
        since.
        """
        self._answer()
        with self._lock:
            return self._misses.values()

    def lookup(self, name: bytes) -> int:
        """Return the node of an entry of ``missing``, `nodes.ABSENT` if there is none."""
        self._answer()
        build_id = names.parse(name)
        with self._lock:
            miss = None if build_id is None else self._misses.get(build_id)
        return nodes.ABSENT if miss is None or self._has_come(miss) else _node(miss)

    def children(self, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield the entries of ``missing`` whose offset is beyond ``after``: name, node, offset."""
        for miss in sorted(self.every(), key=lambda each: each.serial):
            if miss.serial > after and not self._has_come(miss):
                yield names.spell(miss.build_id), _node(miss), miss.serial

    def text(self, node: int) -> bytes:
        """Return the text of a file in ``missing``; empty if the build ID has arrived."""
        serial = nodes.number_of(node)
        for miss in self.every():
            if miss.serial == serial and not self._has_come(miss):
                return miss.text()
        return b""

    def _answer(self) -> None:
        """Convert the names that were looked up into build IDs, if they are names of artifacts."""
        with self._lock:
            with self._asking:
                questions, self._questions = self._questions, self._no_questions()
            for (directory, name, client, share), question in questions.items():
                asked = self._asked(directory, name)
                if asked is not None:
                    miss = self._miss(asked[0], question[1], share)
                    miss.asked(asked[1], client, question)

    def _miss(self, build_id: BuildId, first: float, share: Share) -> Miss:
        miss = self._misses.get(build_id)
        if miss is None or share == HOST:  # what root looks up is root's
            known = self._misses.pop(build_id)
            miss = known or Miss(build_id, next(self._serials) & nodes.NUMBER_MASK, first, share)
            miss.share = share
            self._misses.put(build_id, share, miss)
        return miss

    def _asked(self, directory: int, name: bytes) -> tuple[BuildId, int] | None:
        """Return the build ID and the kind that a name in a directory stands for; kind 0 means any
        kind.
        """
        if directory == nodes.ROOT:
            build_id = names.parse(name)
            return None if build_id is None else (build_id, _ANY)
        if nodes.DEBUG_BUCKET <= directory < nodes.DEBUG_BUCKET + 256:
            return _of_bucket(directory - nodes.DEBUG_BUCKET, name)
        if nodes.PERF_BUCKET <= directory < nodes.PERF_BUCKET + 256:
            return _of_bucket(directory - nodes.PERF_BUCKET, name)
        is_directory = directory >> nodes.TAG_SHIFT == nodes.TAG_ID
        kind = names.KIND_OF.get(name) if is_directory else None
        if kind not in _NAME_OF or nodes.slot_of(directory) != nodes.SLOT_DIRECTORY:
            return None
        owner = self._store.index.build_id(nodes.ordinal_of(directory))
        return None if owner is None else (owner, kind)

    def _has_come(self, miss: Miss) -> bool:
        kinds = self._store.index.kinds(self._store.index.ordinal(miss.build_id) or 0)
        if kinds & _INSTEAD:
            kinds |= 1 << Kind.EXECUTABLE
        if not kinds or miss.wanted & ~kinds:
            return False
        with self._lock:
            self._misses.pop(miss.build_id)
        return True


def _of_bucket(first: int, name: bytes) -> tuple[BuildId, int] | None:
    parsed = names.parse_split(first, name)
    if parsed is None:
        return None
    build_id, debug = parsed
    return build_id, Kind.DEBUGINFO if debug else Kind.EXECUTABLE


def _node(miss: Miss) -> int:
    return nodes.of_browsing(nodes.FORM_MISSING, within=miss.serial)
