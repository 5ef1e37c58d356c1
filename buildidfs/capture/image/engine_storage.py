# SPDX-License-Identifier: Apache-2.0
"""Where engines keep what containers run: unpacked, in the directories of overlays.

They cannot be checked against their digests any more, so they are believed as far
as containers are. What a container itself has written is on top of them, in a directory of its
own: it is an `Image` of that one layer.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from buildidfs.capture.image import layers as image_files
from buildidfs.capture.image.layers import DirectoryLayer, Image, label
from buildidfs.errors import IntegrityError
from buildidfs.formats.archive.common import Damaged
from buildidfs.formats.container import engine_records, oci
from buildidfs.linux import openat2
from buildidfs.model import Trust

if TYPE_CHECKING:
    from buildidfs.capture.image.layers import DirectoryFiles

DOCKER: Final = b"/image/overlay2/imagedb/content/sha256"
STORED: Final = b"/overlay-images/images.json"

_LAYERS: Final = b"/image/overlay2/layerdb"
_NOT_THERE: Final = (FileNotFoundError, NotADirectoryError)


class Docker:
    """Docker's own image store (overlay2), below its root directory."""

    def __init__(self, files: DirectoryFiles) -> None:
        self._files = files

    def images(self) -> Iterator[Image]:
        """All images, then what all containers have written. Raises OSError, `Damaged`."""
        named = self._named()
        for digits in _listed(self._files, DOCKER):
            digest = f"sha256:{digits}"
            names, digests = _split(digest, named.get(digest, []))
            try:
                layers = self._layers(digest)
            except (IntegrityError, Damaged, OSError) as error:
                yield Image(label(names, digest), digests, names, error=error)
            else:
                yield Image(label(names, digest), digests, names, layers, Trust.CONTAINER)
        for container in _listed(self._files, _LAYERS + b"/mounts"):
            yield self._written(container)

    def _named(self) -> dict[str, list[str]]:
        """Return the names of images by their ID."""
        found: dict[str, list[str]] = {}
        try:
            data = image_files.content(
                self._files, b"/image/overlay2/repositories.json", engine_records.NOTES_MAX
            )
        except _NOT_THERE:
            return found
        for repository in engine_records.decoded(
            data, engine_records.Repositories
        ).repositories.values():
            for name, digest in repository.items():
                found.setdefault(digest, []).append(name)
        return found

    def _layers(self, digest: str) -> tuple[DirectoryLayer, ...]:
        """The layers of an image. Raises `IntegrityError`, `Damaged`, OSError."""
        digits = oci.checked_digest(digest).partition(":")[2]
        data = image_files.content(self._files, DOCKER + b"/" + digits.encode())
        hasher = oci.hasher(digest)
        hasher.update(data)
        if hasher.hexdigest() != digits:
            raise IntegrityError(f"image {digest} does not have that digest")
        diff_ids = oci.config(data).diff_ids
        layers = []
        for chain_id, diff_id in zip(oci.chain_ids(diff_ids), diff_ids, strict=True):
            place = _LAYERS + b"/" + chain_id.replace(":", "/").encode()
            layers.append(self._directory(place + b"/cache-id", diff_id))
        return tuple(reversed(layers))

    def _directory(self, note: bytes, name: str) -> DirectoryLayer:
        """The directory that a note names."""
        text = image_files.content(self._files, note).decode("ascii", "replace").strip()
        path = b"/overlay2/" + engine_records.component(text).encode() + b"/diff"
        return DirectoryLayer(self._files.root_fd, path, name)

    def _written(self, container: str) -> Image:
        digests = (container,)
        names: tuple[str, ...] = ()
        try:
            engine_records.component(container)
            note = b"/containers/" + container.encode() + b"/config.v2.json"
            config = image_files.content(self._files, note)
            names = (
                engine_records.decoded(config, engine_records.DockerContainer).name.lstrip("/"),
            )
            place = _LAYERS + b"/mounts/" + container.encode() + b"/mount-id"
            layers = (self._directory(place, "written"),)
        except (Damaged, OSError) as error:
            return Image(f"docker:{container[:12]}", digests, names, error=error)
        return Image(f"docker:{container[:12]}", digests, names, layers, Trust.CONTAINER)


class Storage:
    """containers/storage with its overlay driver, below its root directory."""

    def __init__(self, files: DirectoryFiles) -> None:
        self._files = files

    def images(self) -> Iterator[Image]:
        """All images, then what all containers have written. Raises OSError, `Damaged`."""
        layers = {
            layer.id: layer
            for name in (b"layers", b"volatile-layers")
            for layer in self._notes(b"/overlay-layers/%s.json" % name, engine_records.StoredLayer)
        }
        for image in self._notes(STORED, engine_records.StoredImage):
            own = image.digest or f"sha256:{image.id}"
            names, digests = _split(own, image.names or [])
            digests = (*digests, f"sha256:{image.id}")
            try:
                found = tuple(map(self._directory, engine_records.stack(image.layer, layers)))
            except Damaged as error:
                yield Image(label(names, own), digests, names, error=error)
            else:
                yield Image(label(names, own), digests, names, found, Trust.CONTAINER)
        for name in (b"containers", b"volatile-containers"):
            path = b"/overlay-containers/%s.json" % name
            for container in self._notes(path, engine_records.StoredContainer):
                yield self._written(container)

    def _notes(
        self, path: bytes, kind: type[engine_records.Noted]
    ) -> Sequence[engine_records.Noted]:
        try:
            data = image_files.content(self._files, path, engine_records.NOTES_MAX)
        except _NOT_THERE:
            return ()
        return engine_records.decoded(data, list[kind])  # type: ignore[valid-type]  # known at run time

    def _directory(self, layer: engine_records.StoredLayer) -> DirectoryLayer:
        path = b"/overlay/" + engine_records.component(layer.id).encode() + b"/diff"
        return DirectoryLayer(self._files.root_fd, path, layer.diff_digest or layer.id)

    def _written(self, container: engine_records.StoredContainer) -> Image:
        digests, names = (container.id,), tuple(container.names or ())
        name = f"{container.manager}:{oci.shown_name(container.id[:12])}"
        try:
            path = b"/overlay/" + engine_records.component(container.layer).encode() + b"/diff"
        except Damaged as error:
            return Image(name, digests, names, error=error)
        layer = DirectoryLayer(self._files.root_fd, path, "written")
        return Image(name, digests, names, (layer,), Trust.CONTAINER)


def _listed(files: DirectoryFiles, path: bytes) -> list[str]:
    """The names in a directory, in order; none if it is not there. Raises OSError."""
    try:
        fd = openat2.open_in_root(files.root_fd, path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return []
        raise
    try:
        return sorted(os.listdir(fd))
    finally:
        os.close(fd)


def _split(digest: str, said: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names, and digests of which some are told of as names: ``alpine@sha256:...``."""
    names = tuple(name for name in said if "@" not in name)
    others = (name.rpartition("@")[2] for name in said if "@" in name)
    return names, tuple(dict.fromkeys((digest, *others)))
