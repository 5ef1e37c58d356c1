# SPDX-License-Identifier: Apache-2.0
"""What container engines note down of containers that run, laid out as they do it."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from buildidfs.formats.bolt import fnv1a

_PAGE: Final = struct.Struct("=QHHI")

Bucket = dict[bytes, Any]
"""What a bucket of bbolt holds: bytes, and other buckets."""


class EngineNotes:
    """The directories of all engines below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, content: object) -> Path:
        """A note, with the directories that it needs; anything but bytes is written as JSON."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        file.chmod(0o600)
        return file

    def docker(
        self, container: str, image: str, digest: str, data: str = "/var/lib/docker"
    ) -> Path:
        """A container of Docker's."""
        config = {
            "State": {"Running": True, "Pid": 4711, "Health": None},
            "ID": container,
            "Created": "2026-11-02T09:14:31.106284153Z",
            "Config": {"Hostname": container[:12], "Image": image, "Labels": {}, "Cmd": None},
            "Image": digest,
            "Name": "/web",
            "Driver": "overlay2",
        }
        return self.write(f"{data}/containers/{container}/config.v2.json", config)

    def podman(
        self,
        *containers: tuple[str, str, str],
        file: str = "/var/lib/containers/storage/overlay-containers/containers.json",
    ) -> Path:
        """All containers of Podman's: their IDs, names and IDs of images."""
        listed = []
        for number, (container, image, digest) in enumerate(containers):
            metadata = {
                "image-name": image,
                "image-id": digest,
                "name": f"c{number}",
                "created-at": 1795401180,
            }
            listed.append(
                {
                    "id": container,
                    "names": [f"c{number}"],
                    "image": digest,
                    "layer": f"{number:064x}",
                    "metadata": json.dumps(metadata),
                    "created": "2026-11-23T02:33:00.323474227Z",
                    "flags": {"MountLabel": "", "ProcessLabel": ""},
                }
            )
        return self.write(file, listed)

    def crio(self, container: str, image: str, digest: str) -> Path:
        """A container of CRI-O's that is in no list."""
        annotations = {
            "io.container.manager": "cri-o",
            "io.kubernetes.cri-o.ContainerType": "container",
            "io.kubernetes.cri-o.Image": digest,
            "io.kubernetes.cri-o.ImageName": image,
            "io.kubernetes.cri-o.ImageRef": digest,
        }
        storage = "/run/containers/storage/overlay-containers"
        return self.write(
            f"{storage}/{container}/userdata/config.json",
            {"ociVersion": "1.0.2-dev", "annotations": annotations},
        )

    def containerd(
        self, namespace: str, container: str, state: str = "/run/containerd", **annotations: str
    ) -> Path:
        """A container of containerd's; ``annotations`` have names without what stands before."""
        config: dict[str, Any] = {"ociVersion": "1.1.0", "process": {"args": ["/app"]}}
        if annotations:
            config["annotations"] = {
                f"io.kubernetes.cri.{name.replace('_', '-')}": text
                for name, text in annotations.items()
            }
        tasks = f"{state}/io.containerd.runtime.v2.task"
        return self.write(f"{tasks}/{namespace}/{container}/config.json", config)

    def metadata(self, namespace: str, images: dict[str, str]) -> Path:
        """containerd's own notes of containers in a namespace, by ID."""
        containers = {
            container.encode(): {
                b"createdat": b"\x01" * 15,
                b"image": image.encode(),
                b"labels": {b"nerdctl/name": b"web"},
                b"snapshotter": b"overlayfs",
                b"spec": b"\n" * 3000,
            }
            for container, image in images.items()
        }
        tree = {b"v1": {b"version": b"\x04", namespace.encode(): {b"containers": containers}}}
        return self.write(
            "/var/lib/containerd/io.containerd.metadata.v1.bolt/meta.db", database(tree)
        )


def database(tree: Bucket, page_size: int = 4096, txid: int = 7) -> bytes:
    """A database of bbolt; keys are in order, buckets that are small are in their entry."""
    pages = _Pages(page_size)
    root = pages.bucket(tree)
    return pages.file(root, txid)


class _Pages:
    def __init__(self, size: int) -> None:
        self._size = size
        self._pages = [b"", b"", self._page(2, 0x10, 0, b"")]
        self._count = 3

    def bucket(self, tree: Bucket) -> int:
        """Add a bucket; returns the number of its root."""
        entries = []
        for key, value in sorted(tree.items()):
            if isinstance(value, dict):
                entries.append((1, key, self._inline(value) or self._apart(value)))
            else:
                entries.append((0, key, value))
        level = [
            (leaf[0][1] if leaf else b"", self._add(0x02, len(leaf), _leaf(leaf)))
            for leaf in self._split(entries)
        ]
        while len(level) > 1:
            level = [
                (some[0][0], self._add(0x01, len(some), _branch(some)))
                for some in (level[at : at + 20] for at in range(0, len(level), 20))
            ]
        return level[0][1]

    def file(self, root: int, txid: int) -> bytes:
        """All pages, and before them the two that say where the root is: the older leads astray."""
        for number, (at, when) in enumerate(((root, txid), (2, txid - 1))):
            fields = (0xED0CDAED, 2, self._size, 0, at, 0, 2, self._count, when)
            meta = struct.pack("=4I5Q", *fields)
            meta += struct.pack("=Q", fnv1a(meta))
            self._pages[number] = self._page(number, 0x04, 0, meta)
        return b"".join(self._pages)

    def _apart(self, tree: Bucket) -> bytes:
        return struct.pack("=QQ", self.bucket(tree), 0)

    def _inline(self, tree: Bucket) -> bytes:
        if any(isinstance(value, dict) for value in tree.values()):
            return b""
        leaf = _leaf([(0, key, value) for key, value in sorted(tree.items())])
        if len(leaf) > self._size // 4:
            return b""
        return struct.pack("=QQ", 0, 0) + _PAGE.pack(0, 0x02, len(tree), 0) + leaf

    def _split(
        self, entries: list[tuple[int, bytes, bytes]]
    ) -> list[list[tuple[int, bytes, bytes]]]:
        leaves: list[list[tuple[int, bytes, bytes]]] = [[]]
        for entry in entries:
            if leaves[-1] and len(_leaf([*leaves[-1], entry])) > self._size - _PAGE.size:
                leaves.append([])
            leaves[-1].append(entry)
        return leaves

    def _add(self, flags: int, count: int, content: bytes) -> int:
        number = self._count
        page = self._page(number, flags, count, content)
        self._pages.append(page)
        self._count += len(page) // self._size
        return number

    def _page(self, number: int, flags: int, count: int, content: bytes) -> bytes:
        overflow = (_PAGE.size + len(content) - 1) // self._size
        page = _PAGE.pack(number, flags, count, overflow) + content
        return page.ljust((overflow + 1) * self._size, b"\0")


def _leaf(entries: Sequence[tuple[int, bytes, bytes]]) -> bytes:
    heads, content = b"", b""
    for index, (flags, key, value) in enumerate(entries):
        position = (len(entries) - index) * 16 + len(content)
        heads += struct.pack("=4I", flags, position, len(key), len(value))
        content += key + value
    return heads + content


def _branch(below: Sequence[tuple[bytes, int]]) -> bytes:
    heads, content = b"", b""
    for index, (key, number) in enumerate(below):
        position = (len(below) - index) * 16 + len(content)
        heads += struct.pack("=IIQ", position, len(key), number)
        content += key
    return heads + content
