# SPDX-License-Identifier: Apache-2.0
"""Records of container engines, and damaged ones."""

from __future__ import annotations

import json

import pytest

from buildidfs.formats.archive.common import Damaged
from buildidfs.formats.container import engine_records
from buildidfs.formats.container.engine_records import (
    RunImage,
    StorageSettings,
    StoredContainer,
    StoredImage,
    StoredLayer,
)
from buildidfs.model import ContainerNames


def test_repositories() -> None:
    data = {"Repositories": {"alpine": {"alpine:3": "sha256:1"}}, "More": 1}
    found = engine_records.decoded(json.dumps(data).encode(), engine_records.Repositories)
    assert found.repositories == {"alpine": {"alpine:3": "sha256:1"}}


def test_notes_of_containers_storage() -> None:
    (image,) = engine_records.decoded(
        b'[{"id": "1", "names": ["a"], "layer": "l2", "created": 5}]', list[StoredImage]
    )
    assert (image.id, image.digest, image.names, image.layer) == ("1", "", ["a"], "l2")
    (layer,) = engine_records.decoded(
        b'[{"id": "l2", "diff-digest": "sha256:2"}]', list[StoredLayer]
    )
    assert (layer.parent, layer.diff_digest) == ("", "sha256:2")


def test_manager_of_container() -> None:
    assert StoredContainer("1", metadata='{"image-name": "a"}').manager == "podman"
    assert StoredContainer("1", metadata='{"pod-id": "2"}').manager == "k8s"


@pytest.mark.parametrize("data", [b"", b"x", b"{}", b'[{"names": []}]', b"[" * 100_000])
def test_notes_that_are_none(data: bytes) -> None:
    with pytest.raises(Damaged):
        engine_records.decoded(data, list[StoredImage])


@pytest.mark.parametrize(
    "text", ["", ".", "..", "a/b", "/", "a\0", "-x/..", "n" * 256, "\xe9", "a\n"]
)
def test_component_refuses_other_names(text: str) -> None:
    with pytest.raises(Damaged):
        engine_records.component(text)


def test_component() -> None:
    assert engine_records.component("0a1b-init_2.x") == "0a1b-init_2.x"


def test_stack() -> None:
    layers = {
        name: StoredLayer(name, parent) for name, parent in (("a", ""), ("b", "a"), ("c", "b"))
    }
    assert [layer.id for layer in engine_records.stack("c", layers)] == ["c", "b", "a"]
    assert engine_records.stack("", layers) == []
    with pytest.raises(Damaged, match="missing"):
        engine_records.stack("d", layers)
    layers["a"] = StoredLayer("a", "c")
    with pytest.raises(Damaged, match="itself"):
        engine_records.stack("c", layers)


# --- what containers run -------------------------------------------------------------------------

ID = "ab" * 32
OTHER = "cd" * 32


def test_image_of_dockers_containers() -> None:
    data = {"ID": "1", "Config": {"Image": "nginx:1.27", "Labels": None}, "Image": f"sha256:{ID}"}
    found = engine_records.decoded(json.dumps(data).encode(), engine_records.DockerContainer)
    assert found.run_image == RunImage("nginx:1.27", f"sha256:{ID}")
    assert str(found.run_image) == f"nginx:1.27\nsha256:{ID}"
    for less in ({}, {"Config": None}, {"Config": {}, "Image": ""}):
        empty = engine_records.decoded(json.dumps(less).encode(), engine_records.DockerContainer)
        assert empty.run_image == RunImage()
        assert str(empty.run_image) == ""


def test_image_of_stored_containers() -> None:
    said = {"image-name": "quay.io/app:1", "image-id": OTHER, "name": "c1", "created-at": 1}
    (both,) = engine_records.decoded(
        json.dumps([{"id": "1", "image": ID, "metadata": json.dumps(said)}]).encode(),
        list[StoredContainer],
    )
    assert both.run_image == RunImage("quay.io/app:1", f"sha256:{ID}")
    assert StoredContainer("1", metadata=json.dumps(said)).run_image.digest == f"sha256:{OTHER}"
    for metadata in ("", "[", "[]", '{"image-name": 1}', "[" * 100_000, "\ud800"):
        only = StoredContainer("1", image=ID, metadata=metadata)
        assert only.run_image == RunImage("", f"sha256:{ID}")


@pytest.mark.parametrize(
    ("annotations", "image"),
    [
        (None, RunImage()),
        ({"io.container.manager": "libpod", "nerdctl/name": "web"}, RunImage()),
        ({"io.kubernetes.cri.image-name": "docker.io/a:1"}, RunImage("docker.io/a:1")),
        ({"io.kubernetes.cri.image-name": f"sha256:{ID}"}, RunImage("", f"sha256:{ID}")),
        ({"io.kubernetes.cri.podsandbox.image-name": "pause:3"}, RunImage("pause:3")),
        (
            {
                "io.kubernetes.cri-o.Image": ID,
                "io.kubernetes.cri-o.ImageName": "quay.io/a:1",
                "io.kubernetes.cri-o.ImageRef": f"quay.io/a@sha256:{OTHER}",
            },
            RunImage("quay.io/a:1", f"sha256:{ID}"),
        ),
        (
            {
                "io.kubernetes.cri-o.Image": "quay.io/a:1",
                "io.kubernetes.cri-o.ImageName": "",
                "io.kubernetes.cri-o.ImageRef": ID,
            },
            RunImage("quay.io/a:1", f"sha256:{ID}"),
        ),
    ],
)
def test_image_of_what_a_runtime_was_given(
    annotations: dict[str, str] | None, image: RunImage
) -> None:
    data = json.dumps({"ociVersion": "1.0.2", "annotations": annotations}).encode()
    assert engine_records.decoded(data, engine_records.RuntimeConfig).run_image == image


def test_names_that_would_mislead_a_terminal() -> None:
    image = engine_records.run_image("a\x1b]0;b\n" + "c" * 300, f"sha256:{ID}")
    name, digest = str(image).split("\n")
    assert name == "a??0?b?" + "c" * 248
    assert digest == f"sha256:{ID}"
    assert engine_records.run_image(ID[:-1], "sha512:" + ID * 2).digest == ""


def test_settings() -> None:
    docker = engine_records.decoded(
        b'{"data-root": "/srv", "debug": true}', engine_records.DockerSettings
    )
    assert docker.data_root == "/srv"
    text = b'[storage]\ndriver = "overlay"\ngraphroot = "/srv"\n[storage.options]\nx = 1\n'
    assert engine_records.storage_settings(text) == StorageSettings("/srv", "")
    assert engine_records.storage_settings(b"") == StorageSettings()
    for bad in (b"[", b"\xff", b"storage = 1", b"a=" + b"[" * 10_000, b"#" * (1 << 20)):
        with pytest.raises(Damaged):
            engine_records.storage_settings(bad)


# --- what containers are called ------------------------------------------------------------------

KUBERNETES = {
    "io.kubernetes.container.name": "server",
    "io.kubernetes.pod.name": "cart-7d9f",
    "io.kubernetes.pod.namespace": "shop",
}


def _docker(**fields: object) -> ContainerNames:
    data = json.dumps(fields).encode()
    return engine_records.decoded(data, engine_records.DockerContainer).called


def _runtime(annotations: dict[str, str]) -> ContainerNames:
    data = json.dumps({"annotations": annotations}).encode()
    return engine_records.decoded(data, engine_records.RuntimeConfig).called


def test_names_of_dockers_containers() -> None:
    found = _docker(Name="/web", Image=f"sha256:{ID}", Config={"Image": "a:1", "Labels": None})
    assert found == ContainerNames("web", image=f"a:1\nsha256:{ID}")
    assert found.shown == "web"
    pod = _docker(Name="/k8s_server_cart", Config={"Labels": KUBERNETES})
    assert pod.shown == "shop/cart-7d9f/server"
    assert _docker(Name="/\x1b[31mweb").name == "??31mweb"


@pytest.mark.parametrize(
    "annotations",
    [
        KUBERNETES,
        {"io.kubernetes.cri-o.Labels": json.dumps(KUBERNETES)},
        {
            "io.kubernetes.cri.container-name": "server",
            "io.kubernetes.cri.sandbox-name": "cart-7d9f",
            "io.kubernetes.cri.sandbox-namespace": "shop",
        },
    ],
)
def test_names_of_what_a_runtime_was_given(annotations: dict[str, str]) -> None:
    assert _runtime(annotations) == ContainerNames("server", "cart-7d9f", "shop")


def test_names_of_a_runtime_that_was_given_none() -> None:
    assert _runtime({"io.container.manager": "libpod"}) == ContainerNames()
    assert _runtime({"io.kubernetes.cri-o.Labels": "{"}) == ContainerNames()
    assert _runtime({"nerdctl/name": "web"}).shown == "web"


def test_names_of_stored_containers() -> None:
    podman = StoredContainer("1", names=["web"], metadata='{"name": "web", "image-name": "a:1"}')
    assert podman.called == ContainerNames("web", image="a:1")
    crio = {"pod-id": "2", "name": "k8s_server_cart_shop_0", "metadata-name": "server"}
    assert StoredContainer("1", metadata=json.dumps(crio)).called.shown == "server"
