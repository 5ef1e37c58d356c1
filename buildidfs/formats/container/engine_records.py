# SPDX-License-Identifier: Apache-2.0
"""State files in which container engines record images and containers.

Sources: moby, image/store.go, layer/filestore.go and container/container.go (Docker's overlay2);
containers/storage, images.go, layers.go and containers.go (Podman, Buildah, CRI-O, Skopeo);
containerd, internal/cri/annotations; CRI-O, internal/annotations.
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

from buildidfs.formats.archive.common import Damaged
from buildidfs.formats.container import oci
from buildidfs.model import ContainerNames

NOTES_MAX: Final = 64 << 20
"""The largest size of a list of all layers or images: each takes a few KB."""
SETTINGS_MAX: Final = 64 << 10
"""The largest size of a settings file, which people write, of an engine."""

_COMPONENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
_IMAGE_ID: Final = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
#: Keys of an OCI runtime's config.json: CRI-O's name of the image, the reference by which it was
#: requested, its ID or digest; then those of containerd for Kubernetes, also for the process that
#: holds the namespaces of a pod.
_ANNOTATIONS: Final = (
    "io.kubernetes.cri-o.ImageName",
    "io.kubernetes.cri-o.Image",
    "io.kubernetes.cri-o.ImageRef",
    "io.kubernetes.cri.image-name",
    "io.kubernetes.cri.podsandbox.image-name",
)
#: The same for the names of a container, its pod and the namespace of the pod. The kubelet gives
#: them as labels, which CRI-O repeats as annotations.
_NAMED: Final = (
    ("io.kubernetes.container.name", "io.kubernetes.cri.container-name", "nerdctl/name"),
    ("io.kubernetes.pod.name", "io.kubernetes.cri.sandbox-name", "io.kubernetes.cri-o.KubeName"),
    (
        "io.kubernetes.pod.namespace",
        "io.kubernetes.cri.sandbox-namespace",
        "io.kubernetes.cri-o.Namespace",
    ),
)
_LABELS: Final = "io.kubernetes.cri-o.Labels"


class RunImage(msgspec.Struct, frozen=True):
    """The image that a container runs: ``name`` is that in its engine, ``digest`` its ID.

    Either is empty if unknown. ``str()`` has a line for each known one, in printable characters.
    """

    name: str = ""
    digest: str = ""

    def __str__(self) -> str:
        return "\n".join(line for line in (oci.shown_name(self.name), self.digest) if line)


def run_image(*labels: str) -> RunImage:
    """Return the first known name and the first known ID in several records of an image."""
    name = digest = ""
    for text in labels:
        found = _IMAGE_ID.fullmatch(text)
        if found is None:
            name = name or text
        else:
            digest = digest or f"sha256:{found[1]}"
    return RunImage(name, digest)


def _names(labels: dict[str, str], image: RunImage, name: str = "") -> ContainerNames:
    """Return the names of a container from labels or annotations; the default is ``name``."""
    of_container, pod, namespace = (
        oci.shown_name(next((labels[key] for key in keys if labels.get(key)), ""))
        for keys in _NAMED
    )
    return ContainerNames(of_container or oci.shown_name(name), pod, namespace, str(image))


class Repositories(msgspec.Struct, frozen=True, rename="pascal"):
    """Docker's repositories.json: image IDs by name, for each repository."""

    repositories: dict[str, dict[str, str]] = {}


class _DockerConfig(msgspec.Struct, frozen=True, rename="pascal"):
    image: str = ""
    labels: dict[str, str] | None = None


class DockerContainer(msgspec.Struct, frozen=True, rename="pascal"):
    """Part of Docker's config.v2.json; ``image`` is an ID, and ``config`` has the requested
    reference.
    """

    name: str = ""
    image: str = ""
    config: _DockerConfig | None = None

    @property
    def run_image(self) -> RunImage:
        """Return the image it runs."""
        return run_image(self.config.image if self.config else "", self.image)

    @property
    def called(self) -> ContainerNames:
        """Return the names of the container; cri-dockerd has those of pods in labels."""
        labels = (self.config.labels if self.config else None) or {}
        return _names(labels, self.run_image, self.name.removeprefix("/"))


class DockerSettings(msgspec.Struct, frozen=True, rename="kebab"):
    """Part of Docker's daemon.json."""

    data_root: str = ""


class StorageSettings(msgspec.Struct, frozen=True):
    """Part of ``[storage]`` in storage.conf: the permanent directory, and the one for this boot."""

    graphroot: str = ""
    runroot: str = ""


class _StorageConf(msgspec.Struct, frozen=True):
    storage: StorageSettings = StorageSettings()


class RuntimeConfig(msgspec.Struct, frozen=True):
    """Part of the config.json for an OCI runtime."""

    annotations: dict[str, str] | None = None

    @property
    def run_image(self) -> RunImage:
        """Return the image it runs. This file does not name it for Docker, Podman and nerdctl."""
        annotations = self.annotations or {}
        return run_image(*(annotations.get(key, "") for key in _ANNOTATIONS))

    @property
    def called(self) -> ContainerNames:
        """Return the names of the container. This file has none for Docker and Podman."""
        annotations = self.annotations or {}
        try:
            labels = decoded(annotations.get(_LABELS, "{}").encode("utf-8", "replace"), _Labels)
        except Damaged:
            labels = {}
        return _names({**labels, **annotations}, self.run_image)


class StoredImage(msgspec.Struct, frozen=True):
    """An image in images.json of containers/storage; ``layer`` is its uppermost layer."""

    id: str
    digest: str = ""
    names: list[str] | None = None
    layer: str = ""


class StoredLayer(msgspec.Struct, frozen=True, rename="kebab"):
    """A layer in layers.json of containers/storage, on top of its ``parent``."""

    id: str
    parent: str = ""
    diff_digest: str = ""


class _StoredMetadata(msgspec.Struct, frozen=True, rename="kebab"):
    image_name: str = ""
    image_id: str = ""
    name: str = ""
    metadata_name: str = ""


class StoredContainer(msgspec.Struct, frozen=True):
    """A container in containers.json of containers/storage; it writes to ``layer``.

    ``image`` is an ID, ``metadata`` is JSON with the own records of Podman and CRI-O.
    """

    id: str
    names: list[str] | None = None
    layer: str = ""
    metadata: str = ""
    image: str = ""

    @property
    def run_image(self) -> RunImage:
        """Return the image it runs."""
        metadata = self._metadata()
        return run_image(metadata.image_name, self.image, metadata.image_id)

    @property
    def called(self) -> ContainerNames:
        """Return the names of the container. CRI-O has those of pods in another file."""
        metadata = self._metadata()
        name = metadata.name if self.manager == "podman" else metadata.metadata_name
        return _names({}, self.run_image, name)

    def _metadata(self) -> _StoredMetadata:
        try:
            return decoded(self.metadata.encode("utf-8", "replace"), _StoredMetadata)
        except Damaged:
            return _StoredMetadata()

    @property
    def manager(self) -> str:
        """Return the manager of the container as in labels: ``k8s`` if CRI-O has recorded a pod,
        else ``podman``.
        """
        return "k8s" if '"pod-id"' in self.metadata else "podman"


_Labels: Final = dict[str, str]
EngineRecord = TypeVar("EngineRecord", StoredImage, StoredLayer, StoredContainer)
_Value = TypeVar("_Value")


def decoded(data: bytes, kind: type[_Value]) -> _Value:
    """Decode JSON as one of the types above; raises `Damaged`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"notes of a container engine that are none: {error}") from error


def storage_settings(data: bytes) -> StorageSettings:
    """Decode storage.conf of containers/storage; raises `Damaged`."""
    if len(data) > SETTINGS_MAX:
        raise Damaged(f"settings of more than {SETTINGS_MAX} bytes")
    try:
        return msgspec.toml.decode(data, type=_StorageConf).storage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise Damaged(f"settings of containers/storage that are none: {error}") from error


def component(text: str) -> str:
    """Return ``text``; raises `Damaged` unless it can be the name of a directory."""
    if _COMPONENT.fullmatch(text) is None:
        raise Damaged(f"no name of a layer: {text[:80]!r}")
    return text


def stack(top: str, layers: dict[str, StoredLayer]) -> list[StoredLayer]:
    """Return a layer and those below it, the uppermost first.

    Raises `Damaged` if one is missing, or they form a cycle.
    """
    found: list[StoredLayer] = []
    seen: set[str] = set()
    while top:
        layer = layers.get(top)
        if layer is None or top in seen:
            raise Damaged(f"layer {top[:80]!r} is missing or lies on itself")
        seen.add(top)
        found.append(layer)
        top = layer.parent
    return found
