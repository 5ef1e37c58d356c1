# SPDX-License-Identifier: Apache-2.0
"""Extended attributes of files: what is known of them, for `getfattr -d` and scripts.

user.sha256               digest of the file as it was captured
user.buildid.id           its build ID
user.buildid.kind         executable, debuginfo, vdso or kallsyms
user.buildid.variant      number among the files with this build ID and kind
user.buildid.trust        host, package, container or unknown
user.buildid.quality      none, dynsym, symtab or debuginfo
user.buildid.first-seen   time in UTC
user.buildid.path         where these bytes were seen last, of the places that the reader could
                          have read them at
user.buildid.container    and in which container
user.buildid.scripts      "zeroed" if sections that gdb would run read as zeros here
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from buildidfs.view.permissions import may_see
from buildidfs.view.values import moment

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.model import Artifact
    from buildidfs.store import OriginRecord, Store
    from buildidfs.view.permissions import Reader

_PREFIX: Final = b"user.buildid."
_SHA256: Final = b"user.sha256"


class ExtendedAttributes:
    """Answers for artifacts."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def names(self, artifact: Artifact, zeroed: bool, reader: Reader | None) -> list[bytes]:
        """The names that there is a value of for a reader; None: who may know all."""
        last = self._last_origin(artifact, reader)
        of_origin = [part for part, told in _OF_ORIGIN.items() if last is not None and told(last)]
        known = [b"id", *_OF_ARTIFACT, *of_origin, *([b"scripts"] if zeroed else [])]
        return [_SHA256, *(_PREFIX + part for part in known)]

    def value(
        self, artifact: Artifact, zeroed: bool, name: bytes, reader: Reader | None
    ) -> bytes | None:
        """The value of one for a reader; None if there is none."""
        if name == _SHA256:
            return artifact.digest.hex().encode()
        if not name.startswith(_PREFIX):
            return None
        part = name[len(_PREFIX) :]
        if part == b"id":
            build_id = self._store.build_id(artifact.ordinal)
            return None if build_id is None else build_id.hex().encode()
        if part == b"scripts":
            return b"zeroed" if zeroed else None
        if part in (b"path", b"container"):
            last = self._last_origin(artifact, reader)
            return None if last is None else _OF_ORIGIN[part](last) or None
        told = _OF_ARTIFACT.get(part)
        return None if told is None else told(artifact).encode()

    def _last_origin(self, artifact: Artifact, reader: Reader | None) -> OriginRecord | None:
        records = self._store.origins(artifact.ordinal)  # newest first
        fitting = (each for each in records if each.digest == artifact.digest)
        return next((each for each in fitting if may_see(reader, each.origin)), None)


_OF_ARTIFACT: Final[dict[bytes, Callable[[Artifact], str]]] = {
    b"kind": lambda artifact: artifact.kind.name.lower(),
    b"variant": lambda artifact: str(artifact.variant),
    b"trust": lambda artifact: artifact.trust.name.lower(),
    b"quality": lambda artifact: artifact.quality.name.lower(),
    b"first-seen": lambda artifact: moment(artifact.first_seen_ns / 1e9),
}
_OF_ORIGIN: Final[dict[bytes, Callable[[OriginRecord], bytes]]] = {
    b"path": lambda record: record.origin.path,
    b"container": lambda record: record.origin.container.encode("utf-8", "surrogateescape"),
}
