# SPDX-License-Identifier: Apache-2.0
"""What container engines note down of images and containers in the directories they keep them in.

Sources: moby, image/store.go, layer/filestore.go and container/container.go (Docker's overlay2);
containers/storage, images.go, layers.go and containers.go (Podman, Buildah, CRI-O, Skopeo).
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

from buildidfs.formats.archives import Damaged

NOTES_MAX: Final = 64 << 20
"""A list of all layers or images is not larger: a few KB for each."""

_COMPONENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")


class Repositories(msgspec.Struct, frozen=True, rename="pascal"):
    """Docker's repositories.json: by repository, image IDs by name."""

    repositories: dict[str, dict[str, str]] = {}


class DockerContainer(msgspec.Struct, frozen=True, rename="pascal"):
    """Part of Docker's config.v2.json."""

    name: str = ""


class StoredImage(msgspec.Struct, frozen=True):
    """An image in images.json of containers/storage; ``layer`` is its uppermost."""

    id: str
    digest: str = ""
    names: list[str] | None = None
    layer: str = ""


class StoredLayer(msgspec.Struct, frozen=True, rename="kebab"):
    """A layer in layers.json of containers/storage, which lies on its ``parent``."""

    id: str
    parent: str = ""
    diff_digest: str = ""


class StoredContainer(msgspec.Struct, frozen=True):
    """A container in containers.json of containers/storage; it writes to ``layer``."""

    id: str
    names: list[str] | None = None
    layer: str = ""
    metadata: str = ""

    @property
    def manager(self) -> str:
        """Who runs it, in the words of labels: CRI-O notes down the pod."""
        return "k8s" if '"pod-id"' in self.metadata else "podman"


Noted = TypeVar("Noted", StoredImage, StoredLayer, StoredContainer)
_Value = TypeVar("_Value")


def decoded(data: bytes, kind: type[_Value]) -> _Value:
    """One of these; raises `Damaged`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"notes of a container engine that are none: {error}") from error


def component(text: str) -> str:
    """The same; raises `Damaged` unless it is fit to be the name of a directory."""
    if _COMPONENT.fullmatch(text) is None:
        raise Damaged(f"no name of a layer: {text[:80]!r}")
    return text


def stack(top: str, layers: dict[str, StoredLayer]) -> list[StoredLayer]:
    """A layer and those it lies on, the uppermost first.

    Raises `Damaged` if one is missing, or they lie on each other.
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
