# SPDX-License-Identifier: Apache-2.0
"""What the layers of an image hide of those below them.

A file hides whatever has its path below, and all that is below that; a directory hides no other
directory. A *whiteout*, an empty file called ``.wh.NAME``, hides NAME and is not there itself; an
*opaque* one, ``.wh..wh..opq``, hides all that its directory has below. Of a layer's own files
neither hides anything. Source: the OCI image specification, "Representing Changes".
"""

from __future__ import annotations

from typing import Final

from buildidfs.formats.archive.common import Damaged

_WHITEOUT: Final = b".wh."
_OPAQUE: Final = b".wh..wh..opq"
_BOOKKEEPING: Final = b"/.wh..wh."  # of aufs: nothing below it is in the image
_EACH: Final = 100  # bytes that a path takes besides its own


NAMES_MAX_BYTES: Final = 512 << 20
"""What the paths of the layers that are remembered at one time may take."""


class LayerNames:
    """The paths of one layer, from `archives.installed`.

    ``size`` is about what they take; `Damaged` is raised when that is more than ``room``.
    """

    __slots__ = ("_covered", "_directories", "_opaque", "_room", "size")

    def __init__(self, room: int = NAMES_MAX_BYTES) -> None:
        self._room = room
        self.size = 0
        self._covered: set[bytes] = set()
        self._directories: set[bytes] = set()
        self._opaque: set[bytes] = set()

    def note(self, path: bytes, directory: bool) -> bool:
        """Take notice of a member; False if it is not there for those who run the image."""
        parent, _, name = path.rpartition(b"/")
        if name == _OPAQUE:
            self.clear(parent or b"/")
            return False
        if _BOOKKEEPING in path:
            return False
        if name.startswith(_WHITEOUT):
            self.remove(parent + b"/" + name[len(_WHITEOUT) :])
            return False
        self._add(self._directories if directory else self._covered, path)
        return True

    def remove(self, path: bytes) -> None:
        """What is at that path below is hidden."""
        self._add(self._covered, path)

    def clear(self, directory: bytes) -> None:
        """What is in that directory below is hidden."""
        self._add(self._opaque, directory)

    def _add(self, paths: set[bytes], path: bytes) -> None:
        self.size += len(path) + _EACH
        if self.size > self._room:
            raise Damaged("too many names in the layers of an image")
        paths.add(path)

    def hides(self, path: bytes) -> bool:
        """Whether a file, not a directory, at that path of a lower layer cannot be seen."""
        if path in self._covered or path in self._directories:
            return True
        covered, opaque = self._covered, self._opaque
        while len(path) > 1:
            path = path[: path.rfind(b"/")] or b"/"
            if path in covered or path in opaque:
                return True
        return False
