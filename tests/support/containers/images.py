# SPDX-License-Identifier: Apache-2.0
"""Images of containers, written by hand: layouts, what ``docker save`` writes, Docker's root."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from buildidfs.formats.container.oci import chain_ids
from tests.support.filesystems.sources import tar

Json = dict[str, Any]
Members = Sequence[tuple[str | tarfile.TarInfo, bytes]]

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


def digest_of(data: bytes) -> str:
    """The digest of a blob."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class LayerBlob(NamedTuple):
    """A layer, packed and not."""

    plain: bytes
    packed: bytes

    @property
    def digest(self) -> str:
        """Of what is in the layout."""
        return digest_of(self.packed)

    @property
    def diff_id(self) -> str:
        """Of the archive."""
        return digest_of(self.plain)


def layer(members: Members, pack: Callable[[bytes], bytes] = gzip.compress) -> LayerBlob:
    """A layer with these members."""
    plain = tar(members, format_=tarfile.PAX_FORMAT)
    return LayerBlob(plain, pack(plain))


def config_of(layers: Sequence[LayerBlob], architecture: str = "amd64") -> bytes:
    """The configuration of an image of these layers, the lowest first."""
    rootfs = {"type": "layers", "diff_ids": [each.diff_id for each in layers]}
    return json.dumps({"os": "linux", "architecture": architecture, "rootfs": rootfs}).encode()


class Layout:
    """An OCI image layout in ``directory``; what `add` is told is in its index."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._listed: list[Json] = []
        (directory / "blobs/sha256").mkdir(parents=True)
        (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self._write()

    def path(self, digest: str) -> Path:
        """The file of a blob."""
        return self.directory / "blobs" / digest.replace(":", "/")

    def blob(self, data: bytes, kind: str, **fields: Any) -> Json:
        """Add a blob; returns its descriptor."""
        digest = digest_of(data)
        self.path(digest).write_bytes(data)
        return {"mediaType": kind, "digest": digest, "size": len(data), **fields}

    def manifest(
        self, layers: Sequence[LayerBlob], architecture: str = "amd64", **fields: Any
    ) -> Json:
        """Add an image of these layers, the lowest first, but do not list it."""
        document = {
            "schemaVersion": 2,
            "config": self.blob(config_of(layers, architecture), CONFIG),
            "layers": [self.blob(each.packed, LAYER) for each in layers],
        }
        return self.blob(json.dumps(document).encode(), MANIFEST, **fields)

    def image(self, name: str, *layers: LayerBlob) -> str:
        """Add an image under a name; returns its digest."""
        descriptor = self.manifest(layers)
        self.add(descriptor, name)
        return str(descriptor["digest"])

    def index(self, *manifests: Json) -> Json:
        """Add an index of images."""
        document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": list(manifests)}
        return self.blob(json.dumps(document).encode(), INDEX)

    def add(self, descriptor: Json, name: str = "") -> None:
        """List an image or an index."""
        annotations = {"org.opencontainers.image.ref.name": name} if name else None
        self._listed.append({**descriptor, "annotations": annotations})
        self._write()

    def _write(self) -> None:
        document = {"schemaVersion": 2, "manifests": self._listed}
        (self.directory / "index.json").write_text(json.dumps(document))

    def archive(self, path: Path) -> Path:
        """The layout as one tar archive."""
        with tarfile.open(path, "w") as archive:
            archive.add(self.directory, ".")
        return path


def docker_save(path: Path, images: dict[str, Sequence[LayerBlob]], *, pack: bool = False) -> Path:
    """What ``docker save`` writes; a layer that two images have is there once, and a link."""
    entries: list[Json] = []
    there: dict[str, str] = {}
    with tarfile.open(path, "w") as archive:

        def add(name: str, data: bytes) -> None:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))

        for number, (tag, layers) in enumerate(images.items()):
            config = config_of(layers)
            config_name = f"{digest_of(config).partition(':')[2]}.json"
            add(config_name, config)
            names = []
            for each in layers:
                name = f"{number}-{each.diff_id.partition(':')[2]}/layer.tar"
                if (first := there.setdefault(each.diff_id, name)) == name:
                    add(name, each.packed if pack else each.plain)
                else:
                    link = tarfile.TarInfo(name)
                    link.type, link.linkname = tarfile.SYMTYPE, f"../{first}"
                    archive.addfile(link)
                names.append(name)
            entries.append({"Config": config_name, "RepoTags": [tag], "Layers": names})
        add("manifest.json", json.dumps(entries).encode())
    return path


class DockerRoot:
    """Docker's directory with its overlay2 driver."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._store = directory / "image/overlay2"
        self._names: dict[str, dict[str, str]] = {}
        for name in ("imagedb/content/sha256", "layerdb/sha256", "layerdb/mounts"):
            (self._store / name).mkdir(parents=True)

    def diff(self, name: str) -> Path:
        """The directory of a layer, by its name in the cache."""
        path = self.directory / "overlay2" / name / "diff"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def image(self, tag: str, *caches: str) -> str:
        """An image made of these layers, the lowest first; returns its ID."""
        diff_ids = [digest_of(cache.encode()) for cache in caches]
        document = {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": diff_ids}}
        config = json.dumps(document).encode()
        digest = digest_of(config)
        (self._store / "imagedb/content/sha256" / digest.partition(":")[2]).write_bytes(config)
        for chain_id, cache in zip(chain_ids(diff_ids), caches, strict=True):
            place = self._store / "layerdb" / chain_id.replace(":", "/")
            place.mkdir(exist_ok=True)
            (place / "cache-id").write_text(cache)
        self._names.setdefault(tag.partition(":")[0], {})[tag] = digest
        (self._store / "repositories.json").write_text(json.dumps({"Repositories": self._names}))
        return digest

    def container(self, container_id: str, name: str, cache: str) -> None:
        """A container that writes to that layer."""
        place = self._store / "layerdb/mounts" / container_id
        place.mkdir()
        (place / "mount-id").write_text(cache)
        home = self.directory / "containers" / container_id
        home.mkdir(parents=True)
        (home / "config.v2.json").write_text(json.dumps({"ID": container_id, "Name": f"/{name}"}))


def whiteout(path: Path) -> None:
    """Hide what an overlay has at that path below."""
    os.mknod(path, 0o020000, os.makedev(0, 0))
