# SPDX-License-Identifier: Apache-2.0
"""`TieredStore`: a store whose index and blobs include the remote files that were found.

Files of the store take precedence. No method here makes a request, except reads of blobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.fleet.objects import FIRST_ORDINAL, MOST_VARIANTS, VARIANT
from buildidfs.linux.file_ops import on_error
from buildidfs.model import Artifact, BuildId, FileIdentity, Kind, Origin
from buildidfs.store import Blob, OriginRecord, Store, is_withheld
from buildidfs.store.index.aliases import Aliases
from buildidfs.store.index.queries import Index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.fleet.remote_files import RemoteFile, RemoteFiles
    from buildidfs.model import Alias, Digest
    from buildidfs.store.blobs.files import Blobs
    from buildidfs.store.index.environment import Environment

_EXECUTABLE: Final = int(Kind.EXECUTABLE)


class TieredStore(Store):
    """A store opened for reading, and the files of buckets."""

    remote: RemoteFiles

    def __init__(self, path: bytes, env: Environment, files: Blobs, *, read_only: bool) -> None:
        super().__init__(path, env, files, read_only=read_only)
        self._environment = env

    @classmethod
    def over(cls, path: str | bytes, make: Callable[[bytes], RemoteFiles]) -> TieredStore:
        """Open the store at ``path`` for reading; ``make`` gets its absolute path.

        Raises the errors of `Store.open`, and `UsageError`.
        """
        opened = cls.open(path, read_only=True)
        assert isinstance(opened, cls)
        with on_error(opened.close):
            opened.remote = make(opened.path)
        opened.index = TieredIndex(opened._environment, opened.remote)
        opened.aliases = TieredAliases(opened._environment, opened.index, opened.remote)
        return opened

    def open_blob(self, digest: Digest) -> Blob:
        """Open a blob of the store or of a bucket; raises the errors of `Store.open_blob`, and
        OSError.
        """
        if self.remote.has_digest(digest):
            return self.remote.open(digest)
        return super().open_blob(digest)

    def open_blob_now(self, digest: Digest) -> Blob | None:
        """Do the same as `open_blob` without waiting."""
        if self.remote.has_digest(digest):
            return self.remote.open(digest)
        return super().open_blob_now(digest)

    def close(self) -> None:
        """Close the store and the remote files; safe to call twice."""
        if self._env is not None and hasattr(self, "remote"):
            self.remote.close()
        super().close()


class TieredAliases(Aliases):
    """The aliases of a store, and of the remote files that were found."""

    def __init__(self, environment: Environment, index: Index, remote: RemoteFiles) -> None:
        super().__init__(environment, index)
        self._remote = remote

    def of(self, digest: Digest) -> tuple[Alias, ...]:
        """Return the aliases of a blob or a remote file."""
        return self._remote.aliases(digest) or super().of(digest)


class TieredIndex(Index):
    """The index of a store, and the remote files that were found."""

    def __init__(self, environment: Environment, remote: RemoteFiles) -> None:
        super().__init__(environment)
        self._local = Index(environment)
        self._remote = remote

    def ordinal(self, build_id: bytes) -> int | None:
        """Return the number of a build ID."""
        found = self._local.ordinal(build_id)
        return self._remote.ordinal(build_id) if found is None else found

    def build_id(self, ordinal: int) -> BuildId | None:
        """Return the build ID with that number."""
        if ordinal >= FIRST_ORDINAL:
            return self._remote.build_id(ordinal)
        return self._local.build_id(ordinal)

    def kinds(self, ordinal: int) -> int:
        """Return the kinds with an artifact as bits 1<<kind; 0 for an unknown ordinal."""
        mask = 0 if ordinal >= FIRST_ORDINAL else self._local.kinds(ordinal)
        for kind in self._found(ordinal):
            if not mask >> kind & 1 and self.artifact(ordinal, kind) is not None:
                mask |= 1 << kind
        return mask

    def artifact(self, ordinal: int, kind: int) -> Artifact | None:
        """Return the served variant."""
        if ordinal >= FIRST_ORDINAL:
            file = self._found(ordinal).get(Kind(kind))
            return None if file is None else file.artifact
        found = self._local.artifact(ordinal, kind)
        if found is not None:
            return found
        file = self._found(ordinal).get(Kind(kind))
        if file is None or self._local.artifact_variant(ordinal, kind, VARIANT) is not None:
            return None
        artifact = msgspec.structs.replace(file.artifact, ordinal=ordinal)
        executable = self._local.artifact(ordinal, _EXECUTABLE)
        if is_withheld(artifact, executable, self.floor(file.build_id)):
            return None
        return artifact

    def artifact_variant(self, ordinal: int, kind: int, variant: int) -> Artifact | None:
        """Return a variant, served or not."""
        found = None
        if ordinal < FIRST_ORDINAL:
            found = self._local.artifact_variant(ordinal, kind, variant)
        if found is not None or variant < VARIANT - MOST_VARIANTS:
            return found
        if variant == VARIANT:
            return self.artifact(ordinal, kind)
        others = self._others(ordinal, kind)
        return next((each for each in others if each.variant == variant), None)

    def variants_after(self, ordinal: int, kind: int, after: int = -1) -> Iterator[Artifact]:
        """Yield all variants in order of their numbers, behind ``after`` (-1: from the start)."""
        if ordinal < FIRST_ORDINAL:
            yield from self._local.variants_after(ordinal, kind, after)
        found = self._others(ordinal, kind)
        if ordinal >= FIRST_ORDINAL and (first := self.artifact(ordinal, kind)) is not None:
            found.append(first)
        yield from (each for each in found if each.variant > after)

    def _others(self, ordinal: int, kind: int) -> list[Artifact]:
        """Return the remote variants of an executable that the store lacks, by their numbers."""
        build_id = self.build_id(ordinal) if kind == _EXECUTABLE else None
        if build_id is None or not (remote := self._remote.variants(build_id)):
            return []
        held: set[Digest | None] = set()
        if ordinal < FIRST_ORDINAL:
            held |= {each.digest for each in self._local.variants_after(ordinal, kind)}
        return [
            msgspec.structs.replace(each.artifact, ordinal=ordinal)
            for each in reversed(remote)
            if each.described.digest not in held
        ]

    def variants_with(self, digest: Digest, ordinal: int) -> list[tuple[int, int]]:
        """Return (kind, variant) of each variant with those bytes."""
        if ordinal < FIRST_ORDINAL:
            return self._local.variants_with(digest, ordinal)
        files = self._found(ordinal).items()
        return [(kind, VARIANT) for kind, file in files if file.artifact.digest == digest]

    def origins(self, ordinal: int) -> list[OriginRecord]:
        """Return the origins of a build ID, newest first."""
        if ordinal < FIRST_ORDINAL:
            return self._local.origins(ordinal)
        return [origin_of(file) for file in self._found(ordinal).values()]

    def _found(self, ordinal: int) -> dict[Kind, RemoteFile]:
        build_id = self.build_id(ordinal)
        return {} if build_id is None else self._remote.found(build_id)


def origin_of(file: RemoteFile) -> OriginRecord:
    """Return the place of a remote file: the place that its host recorded, or else the key of its
    object.
    """
    artifact, described = file.artifact, file.described
    identity = FileIdentity(
        0, 0, artifact.size, artifact.mtime_ns, artifact.mtime_ns, 0o100000 | artifact.mode, 0, 0
    )
    origin = Origin(
        described.path or b"/" + file.key.encode(),
        identity,
        host=described.host,
        trust=artifact.trust,
        scanner="remote",
    )
    seen = artifact.first_seen_ns
    return OriginRecord(origin, (artifact.kind,), artifact.digest, seen, seen)
