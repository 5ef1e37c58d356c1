# SPDX-License-Identifier: Apache-2.0
"""What container engines note down of containers that run, laid out as they do it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
