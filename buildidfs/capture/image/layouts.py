# SPDX-License-Identifier: Apache-2.0
"""The places of images: layouts, archives of them, ``docker save``, containerd, storage of engines.

In layouts and in containerd's content, all files are named by their digests, from the manifest down
to the layers. Manifests without a name, as in containerd, are named by their digest.

`Docker` and `Storage` hold unpacked layers, in the directories of overlays. Their digests can no
longer be verified, so their files get the trust of containers. The writable directory of a
container gives a `LayeredImage`: that directory is a layer above those of the container's image.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from buildidfs.capture.image import layers as image_files
from buildidfs.capture.image.layers import DirectoryLayer, LayeredImage, TarLayer, label
from buildidfs.errors import IntegrityError
from buildidfs.formats.archive.common import Damaged
from buildidfs.formats.budget import STEP_BYTES, Budget
from buildidfs.formats.container import engine_records, oci
from buildidfs.linux import inodes
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import Trust

if TYPE_CHECKING:
    from buildidfs.capture.image.layers import DirectoryFiles, Files
    from buildidfs.formats.container.oci import Descriptor, Document, Platform


LAYOUT: Final = b"/oci-layout"
INDEX: Final = b"/index.json"
SAVED: Final = b"/manifest.json"
CONTENT: Final = b"/io.containerd.content.v1.content"
DOCKERS_CONTENT: Final = b"/containerd/daemon" + CONTENT

_DEPTH_MAX: Final = 4
_DOCUMENTS_MAX: Final = 10_000
_BLOBS_MAX: Final = 1_000_000
_DOCUMENT_BYTES: Final = 256 << 20  # of all documents of a place


def _budget() -> Budget:
    """Return the budget for the documents of a place, some of which it may list many times."""
    reason = "its manifests are too many or too large"
    return Budget(_DOCUMENT_BYTES // STEP_BYTES, lambda: Damaged(reason))


class DigestFiles:
    """Blobs by digest. They are below the directory ``prefix`` of a `Files` object."""

    def __init__(self, files: Files, prefix: bytes = b"") -> None:
        self.files = files
        self.budget = _budget()
        self._prefix = prefix
        self._decoded: dict[str, Document] = {}

    def path(self, digest: str) -> bytes:
        """Return the path of the blob with a digest, whose form the decoder has checked."""
        return b"%s/blobs/%s" % (self._prefix, digest.replace(":", "/").encode())

    def document(self, digest: str, size: int | None = None) -> bytes:
        """Return a small blob. Raises OSError, `Damaged`, and `IntegrityError` if its digest
        differs.
        """
        data = image_files.content(self.files, self.path(digest), budget=self.budget)
        if oci.digest_of(data, digest) != digest or size not in (None, len(data)):
            raise IntegrityError(f"{digest} does not have that digest")
        return data

    def decoded(self, digest: str, size: int | None = None) -> Document:
        """Return a manifest or index, which is read once however often it is listed. Raises the
        errors of `document`.
        """
        found = self._decoded.get(digest)
        if found is None:
            found = self._decoded[digest] = oci.document(self.document(digest, size))
        return found

    def layer(self, descriptor: Descriptor) -> TarLayer:
        """Return a layer of an image."""
        path = self.path(descriptor.digest)
        return TarLayer(self.files, path, descriptor.digest, size=descriptor.size, plain=False)


class OciLayout:
    """An OCI image layout in any `Files`. ``wanted`` is the platform of the images; None for any.

    Other artifacts, such as attestations and charts, are skipped.
    """

    def __init__(self, files: Files, wanted: Platform | None) -> None:
        self._blobs = DigestFiles(files)
        self._wanted = wanted
        self._left = _DOCUMENTS_MAX
        self._images_of: dict[str, LayeredImage] = {}

    def images(self) -> Iterator[LayeredImage]:
        """Yield the images that index.json lists. Raises OSError, `Damaged`."""
        top = oci.document(image_files.content(self._blobs.files, INDEX))
        for descriptor in top.manifests or ():
            names = tuple(filter(None, (descriptor.name,)))
            yield from self._images(descriptor, names, ())

    def _images(
        self, descriptor: Descriptor, names: tuple[str, ...], above: tuple[str, ...]
    ) -> Iterator[LayeredImage]:
        """Yield the images that a descriptor leads to; ``above`` are the indexes on the way."""
        digests = (descriptor.digest, *above)
        self._left -= 1
        if self._left < 0:
            raise Damaged(f"more than {_DOCUMENTS_MAX} manifests")
        try:
            found = self._blobs.decoded(descriptor.digest, descriptor.size)
            self._blobs.budget.charge(len(found.manifests or ()))
            if found.is_image:
                yield self._image(found, names, digests)
            if len(above) == _DEPTH_MAX and found.manifests:
                raise Damaged(f"indexes of more than {_DEPTH_MAX} indexes")
            chosen = _chosen(found.manifests or (), self._wanted)
        except (IntegrityError, Damaged, OSError) as error:
            yield LayeredImage(label(names, digests[0]), digests, names, error=error)
            return
        for each in chosen:
            yield from self._images(each, names, digests)

    def _image(
        self, manifest: Document, names: tuple[str, ...], digests: tuple[str, ...]
    ) -> LayeredImage:
        """Return an image; of one that is listed several times only the names differ."""
        known = self._images_of.get(digests[0])
        if known is None:
            known = self._images_of[digests[0]] = _image(self._blobs, manifest, names, digests)
            return known
        config = known.digests[-1]
        return LayeredImage(label(names, digests[0]), (*digests, config), names, known.layers)


def _chosen(manifests: Sequence[Descriptor], wanted: Platform | None) -> list[Descriptor]:
    """Return the manifests for the wanted platform; raises `Damaged` if there are only others."""
    candidates = [each for each in manifests if not each.is_attestation]
    if wanted is None:
        return candidates
    fitting = [each for each in candidates if each.platform is None or wanted.takes(each.platform)]
    if candidates and not fitting:
        has = sorted({str(each.platform) for each in candidates})
        raise Damaged(f"no image for {wanted} among those for {', '.join(has)}")
    return fitting


def _image(
    blobs: DigestFiles, manifest: Document, names: tuple[str, ...], digests: tuple[str, ...]
) -> LayeredImage:
    assert manifest.config is not None
    # Its content is not needed, but its digest is verified, and users may refer to an image by its
    # ID.
    blobs.document(manifest.config.digest, manifest.config.size)
    layers = []
    for descriptor in reversed(manifest.layers or ()):
        if not descriptor.is_layer:
            raise Damaged(
                f"a layer of type {descriptor.media_type[:80]!r}, which is not understood"
            )
        layers.append(blobs.layer(descriptor))
    digests = (*digests, manifest.config.digest)
    return LayeredImage(label(names, digests[0]), digests, names, tuple(layers))


# --- docker save ---------------------------------------------------------------------------------


class SavedImages:
    """The images that ``docker save`` has written, in any `Files`."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._budget = _budget()

    def images(self) -> Iterator[LayeredImage]:
        """Yield the images that manifest.json lists. Raises OSError, `Damaged`."""
        for entry in oci.saved(image_files.content(self._files, SAVED)):
            names = tuple(entry.repo_tags or ())
            claimed = f"sha256:{os.path.basename(entry.config).removesuffix('.json')}"
            try:
                yield self._image(entry, names)
            except (IntegrityError, Damaged, OSError) as error:
                yield LayeredImage(label(names, claimed), (claimed,), names, error=error)

    def _image(self, entry: oci.SavedImage, names: tuple[str, ...]) -> LayeredImage:
        """Return the image: its ID is the digest of its configuration, which has the digests of its
        layers.
        """
        data = image_files.content(self._files, os.fsencode(entry.config), budget=self._budget)
        digest = oci.digest_of(data, "sha256")
        diff_ids = oci.config(data).diff_ids
        if len(diff_ids) != len(entry.layers):
            raise Damaged(f"{len(entry.layers)} layers, and digests of {len(diff_ids)}")
        layers = tuple(
            TarLayer(self._files, os.fsencode(path), diff_id, plain=True)
            for path, diff_id in zip(reversed(entry.layers), reversed(diff_ids), strict=True)
        )
        return LayeredImage(label(names, digest), (digest,), names, layers)


# --- containerd ----------------------------------------------------------------------------------


class ContentStore:
    """containerd's content store: blobs, and among them manifests without names."""

    def __init__(self, files: DirectoryFiles, prefix: bytes, wanted: Platform | None) -> None:
        self._blobs = DigestFiles(files, prefix)
        self._root_fd = files.root_fd
        self._prefix = prefix
        self._wanted = wanted

    def images(self) -> Iterator[LayeredImage]:
        """Yield each image that has a manifest. Raises OSError, `Damaged`."""
        documents: dict[str, Document] = {}
        for digest, found in self._documents():
            if isinstance(found, IntegrityError):
                yield LayeredImage(label((), digest), (digest,), error=found)
            else:
                documents[digest] = found
        listed: dict[str, list[tuple[Descriptor, str]]] = {}
        for index, found in documents.items():
            for each in found.manifests or ():
                listed.setdefault(each.digest, []).append((each, index))
        for digest, found in documents.items():
            places = listed.get(digest, [])
            if not found.is_image or (places and not any(map(self._is_wanted, places))):
                continue
            digests = (digest, *(index for _, index in places))
            try:
                yield _image(self._blobs, found, (), digests)
            except (IntegrityError, Damaged, OSError) as error:
                yield LayeredImage(label((), digest), digests, error=error)

    def _is_wanted(self, place: tuple[Descriptor, str]) -> bool:
        """Return True if an index lists the blob as an image for the wanted platform."""
        descriptor, _ = place
        if descriptor.is_attestation:
            return False
        wanted, platform = self._wanted, descriptor.platform
        return wanted is None or platform is None or wanted.takes(platform)

    def _documents(self) -> Iterator[tuple[str, Document | IntegrityError]]:
        """Yield the manifests and indexes among the blobs; or an error for a blob that claims to be
        one and does not have its digest.
        """
        fd = inodes.open_in_root(
            self._root_fd, self._prefix + b"/blobs/sha256", os.O_RDONLY | os.O_DIRECTORY
        )
        with closing_fd(fd):
            names = sorted(os.listdir(fd))
        for name in names[:_BLOBS_MAX]:
            try:
                digest = oci.checked_digest(f"sha256:{name}")
                with self._blobs.files.open(self._blobs.path(digest)) as region:
                    if region.size > oci.DOCUMENT_MAX or next(region.chunks(), b"")[:1] != b"{":
                        continue
                yield digest, self._blobs.decoded(digest)
            except IntegrityError as error:
                yield digest, error
            except (Damaged, FileNotFoundError):
                continue  # another kind of file, or deleted meanwhile


DOCKER: Final = b"/image/overlay2/imagedb/content/sha256"
STORED: Final = b"/overlay-images/images.json"

_LAYERS: Final = b"/image/overlay2/layerdb"
_NOT_THERE: Final = (FileNotFoundError, NotADirectoryError)


class Docker:
    """Docker's own image store (overlay2), below its root directory."""

    def __init__(self, files: DirectoryFiles) -> None:
        self._files = files

    def images(self) -> Iterator[LayeredImage]:
        """Yield all images, then the writable layers of all containers. Raises OSError,
        `Damaged`.
        """
        named = self._named()
        for digits in _listed(self._files, DOCKER):
            digest = f"sha256:{digits}"
            names, digests = _split(digest, named.get(digest, []))
            try:
                layers = self._layers(digest)
            except (IntegrityError, Damaged, OSError) as error:
                yield LayeredImage(label(names, digest), digests, names, error=error)
            else:
                yield LayeredImage(label(names, digest), digests, names, layers, Trust.CONTAINER)
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
        """Return the layers of an image. Raises `IntegrityError`, `Damaged`, OSError."""
        digits = oci.checked_digest(digest).partition(":")[2]
        data = image_files.content(self._files, DOCKER + b"/" + digits.encode())
        if oci.digest_of(data, digest) != digest:
            raise IntegrityError(f"image {digest} does not have that digest")
        diff_ids = oci.config(data).diff_ids
        layers = []
        for chain_id, diff_id in zip(oci.chain_ids(diff_ids), diff_ids, strict=True):
            place = _LAYERS + b"/" + chain_id.replace(":", "/").encode()
            layers.append(self._directory(place + b"/cache-id", diff_id))
        return tuple(reversed(layers))

    def _directory(self, note: bytes, name: str) -> DirectoryLayer:
        """Return the directory that a state file names."""
        text = image_files.content(self._files, note).decode("ascii", "replace").strip()
        path = b"/overlay2/" + engine_records.component(text).encode() + b"/diff"
        return DirectoryLayer(self._files.root_fd, path, name)

    def _written(self, container: str) -> LayeredImage:
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
            return LayeredImage(f"docker:{container[:12]}", digests, names, error=error)
        return LayeredImage(f"docker:{container[:12]}", digests, names, layers, Trust.CONTAINER)


class Storage:
    """containers/storage with its overlay driver, below its root directory."""

    def __init__(self, files: DirectoryFiles) -> None:
        self._files = files

    def images(self) -> Iterator[LayeredImage]:
        """Yield all images, then the writable layers of all containers. Raises OSError,
        `Damaged`.
        """
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
                yield LayeredImage(label(names, own), digests, names, error=error)
            else:
                yield LayeredImage(label(names, own), digests, names, found, Trust.CONTAINER)
        for name in (b"containers", b"volatile-containers"):
            path = b"/overlay-containers/%s.json" % name
            for container in self._notes(path, engine_records.StoredContainer):
                yield self._written(container)

    def _notes(
        self, path: bytes, kind: type[engine_records.EngineRecord]
    ) -> Sequence[engine_records.EngineRecord]:
        try:
            data = image_files.content(self._files, path, engine_records.NOTES_MAX)
        except _NOT_THERE:
            return ()
        return engine_records.decoded(data, list[kind])  # type: ignore[valid-type]  # known at run time

    def _directory(self, layer: engine_records.StoredLayer) -> DirectoryLayer:
        path = b"/overlay/" + engine_records.component(layer.id).encode() + b"/diff"
        return DirectoryLayer(self._files.root_fd, path, layer.diff_digest or layer.id)

    def _written(self, container: engine_records.StoredContainer) -> LayeredImage:
        digests, names = (container.id,), tuple(container.names or ())
        name = f"{container.manager}:{oci.shown_name(container.id[:12])}"
        try:
            path = b"/overlay/" + engine_records.component(container.layer).encode() + b"/diff"
        except Damaged as error:
            return LayeredImage(name, digests, names, error=error)
        layer = DirectoryLayer(self._files.root_fd, path, "written")
        return LayeredImage(name, digests, names, (layer,), Trust.CONTAINER)


def _listed(files: DirectoryFiles, path: bytes) -> list[str]:
    """Return the names in a directory, in order; none if it does not exist. Raises OSError."""
    try:
        fd = inodes.open_in_root(files.root_fd, path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return []
        raise
    with closing_fd(fd):
        return sorted(os.listdir(fd))


def _split(digest: str, references: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return names and digests; digests may be among the names: ``alpine@sha256:...``."""
    names = tuple(name for name in references if "@" not in name)
    others = (name.rpartition("@")[2] for name in references if "@" in name)
    return names, tuple(dict.fromkeys((digest, *others)))
