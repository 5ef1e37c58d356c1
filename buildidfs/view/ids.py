# SPDX-License-Identifier: Apache-2.0
"""``<id>/``: the directory of a build ID, and the files in it that all other trees lead to."""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import TYPE_CHECKING

from buildidfs import names
from buildidfs.model import Artifact, Kind, Trust
from buildidfs.view import nodes
from buildidfs.view.values import Attributes, Content, of_artifact

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.store import Store

_RECENT = 512
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]|\xc2[\x80-\x9f]")  # the latter are U+0080 to U+009F
_ENTRIES = (*names.KIND_OF.items(), (names.PATH, None))


class IdDirectories:
    """The files of a build ID: artifacts under all their spellings, and ``path``."""

    def __init__(self, store: Store, *, zero_scripts: bool, shared: Attributes) -> None:
        """``shared`` are the attributes of what is nobody's in particular."""
        self._store = store
        self._zero_scripts = zero_scripts
        self._shared = shared
        # What the latest lookups found, for the getattr and open that follow them. An entry can
        # only be outdated in what does not matter: the bytes of a node never change.
        self._recent: dict[int, Artifact] = {}

    def forget(self) -> None:
        """Something was committed: mode or owner of a file may have changed."""
        self._recent.clear()

    def lookup(self, node: int, name: bytes) -> int:
        """The node of an entry, `nodes.ABSENT` if there is none."""
        kind = names.KIND_OF.get(name)
        if kind is not None:
            return self.file(nodes.ordinal_of(node), kind)
        if name == names.PATH:
            ordinal = nodes.ordinal_of(node)
            return nodes.of_id(ordinal, nodes.SLOT_PATH) if self._text(ordinal) else nodes.ABSENT
        return nodes.ABSENT

    def children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Entries whose offset is beyond ``after``: name, node, offset."""
        for offset, (name, _) in enumerate(_ENTRIES[after:], after + 1):
            found = self.lookup(node, name)
            if found:
                yield name, found, offset

    def file(self, ordinal: int, kind: Kind) -> int:
        """The node of the best variant of an artifact, `nodes.ABSENT` if there is none."""
        artifact = self._store.artifact(ordinal, kind)
        if artifact is None:
            return nodes.ABSENT
        slot = kind | nodes.SLOT_ZEROED if self._is_zeroed(artifact) else kind
        node = nodes.of_id(ordinal, slot, artifact.variant)
        if len(self._recent) >= _RECENT:
            self._recent.clear()
        self._recent[node] = artifact
        return node

    def attributes(self, node: int) -> Attributes:
        """Attributes of a file; raises OSError(ESTALE) if it is gone from the store."""
        if nodes.slot_of(node) == nodes.SLOT_PATH:
            shared = self._shared
            size = len(self._text(nodes.ordinal_of(node)))
            return Attributes(
                stat.S_IFREG | 0o444, size, shared.mtime_ns, shared.uid, shared.gid, volatile=True
            )
        return of_artifact(self._artifact(node))

    def open(self, node: int) -> Content:
        """What is in a file; raises OSError(ESTALE) if it is gone from the store."""
        slot = nodes.slot_of(node)
        if slot == nodes.SLOT_PATH:
            return Content(text=self._text(nodes.ordinal_of(node)))
        artifact = self._recent.get(node) or self._artifact(node)
        zeros = artifact.scripts if slot & nodes.SLOT_ZEROED else ()
        return Content(self._store.open_blob(artifact.digest), b"", zeros)

    def _artifact(self, node: int) -> Artifact:
        artifact = self._recent.get(node)
        if artifact is None:
            artifact = self._store.artifact_variant(
                nodes.ordinal_of(node),
                Kind(nodes.slot_of(node) & nodes.KIND_MASK),
                node & nodes.DETAIL_MASK,
            )
            if artifact is None:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return artifact

    def _is_zeroed(self, artifact: Artifact) -> bool:
        return bool(artifact.scripts) and artifact.trust < Trust.HOST and self._zero_scripts

    def _text(self, ordinal: int) -> bytes:
        # What a reader wants to know is where the binary was; its debug file has a place of its
        # own, which only tells something where no binary was seen.
        origins = self._store.origins(ordinal)
        binaries = [each for each in origins if set(each.kinds) != {Kind.DEBUGINFO}]
        paths = dict.fromkeys(record.origin.path for record in binaries or origins)
        # A newline within a path is written as in /proc/PID/maps, so that a line is a path; so is
        # what else a terminal would obey, because people show this file on theirs.
        return b"".join(_CONTROL.sub(_octal, path) + b"\n" for path in paths)


def _octal(found: re.Match[bytes]) -> bytes:
    return b"".join(b"\\%03o" % byte for byte in found[0])
