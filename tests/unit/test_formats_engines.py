# SPDX-License-Identifier: Apache-2.0
"""What engines note down, and what nobody should have noted down."""

from __future__ import annotations

import json

import pytest

from buildidfs.formats import engines
from buildidfs.formats.archives import Damaged
from buildidfs.formats.engines import StoredContainer, StoredImage, StoredLayer


def test_repositories() -> None:
    data = {"Repositories": {"alpine": {"alpine:3": "sha256:1"}}, "More": 1}
    found = engines.decoded(json.dumps(data).encode(), engines.Repositories)
    assert found.repositories == {"alpine": {"alpine:3": "sha256:1"}}


def test_notes_of_containers_storage() -> None:
    (image,) = engines.decoded(
        b'[{"id": "1", "names": ["a"], "layer": "l2", "created": 5}]', list[StoredImage]
    )
    assert (image.id, image.digest, image.names, image.layer) == ("1", "", ["a"], "l2")
    (layer,) = engines.decoded(b'[{"id": "l2", "diff-digest": "sha256:2"}]', list[StoredLayer])
    assert (layer.parent, layer.diff_digest) == ("", "sha256:2")


def test_who_runs_a_container() -> None:
    assert StoredContainer("1", metadata='{"image-name": "a"}').manager == "podman"
    assert StoredContainer("1", metadata='{"pod-id": "2"}').manager == "k8s"


@pytest.mark.parametrize("data", [b"", b"x", b"{}", b'[{"names": []}]', b"[" * 100_000])
def test_notes_that_are_none(data: bytes) -> None:
    with pytest.raises(Damaged):
        engines.decoded(data, list[StoredImage])


@pytest.mark.parametrize(
    "text", ["", ".", "..", "a/b", "/", "a\0", "-x/..", "n" * 256, "\xe9", "a\n"]
)
def test_what_is_no_name_of_a_directory(text: str) -> None:
    with pytest.raises(Damaged):
        engines.component(text)


def test_component() -> None:
    assert engines.component("0a1b-init_2.x") == "0a1b-init_2.x"


def test_stack() -> None:
    layers = {
        name: StoredLayer(name, parent) for name, parent in (("a", ""), ("b", "a"), ("c", "b"))
    }
    assert [layer.id for layer in engines.stack("c", layers)] == ["c", "b", "a"]
    assert engines.stack("", layers) == []
    with pytest.raises(Damaged, match="missing"):
        engines.stack("d", layers)
    layers["a"] = StoredLayer("a", "c")
    with pytest.raises(Damaged, match="itself"):
        engines.stack("c", layers)
