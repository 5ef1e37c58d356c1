# SPDX-License-Identifier: Apache-2.0
"""Manifests and names of images, as they are and as they should not be."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from buildidfs.formats.archive.common import Damaged
from buildidfs.formats.container import oci
from buildidfs.formats.container.oci import Descriptor, LayerNames, Platform

DIGEST = "sha256:" + "ab" * 32
OTHER = "sha256:" + "cd" * 32
CONFIG = "application/vnd.oci.image.config.v1+json"


def described(digest: str = DIGEST, **fields: Any) -> dict[str, Any]:
    return {"digest": digest, "size": 7, **fields}


def manifest(**fields: Any) -> bytes:
    config = described(mediaType=CONFIG)
    return json.dumps(
        {"schemaVersion": 2, "config": config, "layers": [described(OTHER)], **fields}
    ).encode()


def test_manifest() -> None:
    found = oci.document(manifest())
    assert found.is_image
    assert found.config is not None
    assert found.layers == [Descriptor(OTHER, 7)]


@pytest.mark.parametrize(
    ("fields", "is_image"),
    [
        ({}, True),
        ({"config": described(mediaType="application/vnd.docker.container.image.v1+json")}, True),
        ({"config": described()}, True),
        ({"config": described(mediaType="application/vnd.cncf.helm.config.v1+json")}, False),
        ({"config": None}, False),
        ({"layers": None}, False),
        ({"layers": []}, True),
        ({"manifests": []}, False),
    ],
)
def test_is_image(fields: dict[str, Any], is_image: bool) -> None:
    assert oci.document(manifest(**fields)).is_image is is_image


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"[]",
        b"[" * 100_000,
        b'{"manifests": [{"digest": "sha256:../../etc", "size": 1}]}',
        b'{"manifests": [{"digest": "md5:00", "size": 1}]}',
        b'{"manifests": [{"digest": "%s", "size": -1}]}' % DIGEST.encode(),
        b'{"manifests": [{"digest": "%s"}]}' % DIGEST.encode(),
        b'{"layers": 5}',
        b'{"config": {"digest": "x", "size": 1}}',
        json.dumps({"manifests": [described()] * 4097}).encode(),
        b" " * (oci.DOCUMENT_MAX + 1),
    ],
    ids=range(12),
)
def test_manifests_that_are_none(data: bytes) -> None:
    with pytest.raises(Damaged):
        oci.document(data)


@pytest.mark.parametrize(
    ("kind", "is_layer"),
    [
        ("application/vnd.oci.image.layer.v1.tar", True),
        ("application/vnd.oci.image.layer.v1.tar+gzip", True),
        ("application/vnd.oci.image.layer.v1.tar+zstd", True),
        ("application/vnd.docker.image.rootfs.diff.tar.gzip", True),
        ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", True),
        ("", True),
        ("application/vnd.oci.image.layer.v1.tar+gzip+encrypted", False),
        ("application/vnd.in-toto+json", False),
    ],
)
def test_is_layer(kind: str, is_layer: bool) -> None:
    assert Descriptor(DIGEST, 1, kind).is_layer is is_layer


def test_annotations() -> None:
    def named(**annotations: str) -> Descriptor:
        return Descriptor(DIGEST, 1, annotations=annotations)

    assert Descriptor(DIGEST, 1).name == ""
    assert named(**{"org.opencontainers.image.ref.name": "two"}).name == "two"
    both = {
        "org.opencontainers.image.ref.name": "two",
        "io.containerd.image.name": "docker.io/a:two",
    }
    assert named(**both).name == "docker.io/a:two"
    assert named(**{"vnd.docker.reference.type": "attestation-manifest"}).is_attestation
    assert not named(**both).is_attestation


def test_configuration() -> None:
    data = {
        "os": "linux",
        "architecture": "arm",
        "variant": "v7",
        "rootfs": {"diff_ids": [DIGEST, OTHER]},
    }
    found = oci.config(json.dumps(data).encode())
    assert found.diff_ids == [DIGEST, OTHER]
    assert str(found.platform) == "linux/arm/v7"
    assert oci.config(b"{}").diff_ids == []
    with pytest.raises(Damaged):
        _ = oci.config(b'{"rootfs": {"diff_ids": ["../x"]}}').diff_ids


def test_saved() -> None:
    data = [{"Config": "c.json", "RepoTags": None, "Layers": ["a/layer.tar"]}]
    (found,) = oci.saved(json.dumps(data).encode())
    assert (found.config, found.repo_tags, found.layers) == ("c.json", None, ["a/layer.tar"])
    for bad in ([{"Config": "c"}], [data[0]] * 4097, {}):
        with pytest.raises(Damaged):
            oci.saved(json.dumps(bad).encode())


def test_chain_ids() -> None:
    both = hashlib.sha256(f"{DIGEST} {OTHER}".encode()).hexdigest()
    assert oci.chain_ids([]) == []
    assert oci.chain_ids([DIGEST, OTHER]) == [DIGEST, f"sha256:{both}"]


def test_digests() -> None:
    assert oci.hasher(DIGEST).name == "sha256"
    assert oci.hasher(oci.checked_digest("sha512:" + "0" * 128)).name == "sha512"
    assert oci.short(DIGEST) == "ab" * 6


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("alpine", ["docker.io/library/alpine:latest", "localhost/alpine:latest"]),
        ("alpine:3", ["docker.io/library/alpine:3", "localhost/alpine:3"]),
        ("me/app", ["docker.io/me/app:latest", "localhost/me/app:latest"]),
        ("docker.io/alpine", ["docker.io/library/alpine:latest"]),
        ("example.org/app:1", ["example.org/app:1"]),
        ("host:5000/app", ["host:5000/app:latest"]),
        ("localhost/app", ["localhost/app:latest"]),
    ],
)
def test_full_names(name: str, names: list[str]) -> None:
    assert oci.full_names(name) == names


@pytest.mark.parametrize(
    ("reference", "meant"),
    [
        ("alpine", False),
        ("alpine:3.19", True),
        ("docker.io/library/alpine:3.19", True),
        ("library/alpine:3.19", True),
        ("localhost/alpine:3.19", False),
        ("hot", True),
        ("two", True),
        (DIGEST, True),
        (DIGEST[:20], True),
        ("abab", True),
        ("aba", False),
        ("abcd", False),
        ("sha256:abac", False),
        (f"alpine:3.19@{DIGEST}", True),
        (f"alpine:3.19@{OTHER}", False),
        (f"other@{DIGEST}", False),
        (f"@{DIGEST}", True),
        ("", False),
    ],
)
def test_is_meant(reference: str, meant: bool) -> None:
    names = ("docker.io/library/alpine:3.19", "localhost/hot:latest", "two")
    assert oci.is_meant(reference, names, (DIGEST,)) is meant


def test_container_is_meant_by_its_id() -> None:
    assert oci.is_meant("0123", ("web",), ("0123456789abcdef",))
    assert oci.is_meant("web", ("web",), ("0123456789abcdef",))


def test_shown_name() -> None:
    assert oci.shown_name("a/b:c@d\x1b[0m\n") == "a/b:c@d??0m?"
    assert len(oci.shown_name("n" * 1000)) == 255


def test_platforms() -> None:
    arm = oci.platform_of("armv7l")
    assert str(arm) == "linux/arm/v7"
    assert oci.platform_of("x86_64").takes(Platform(os="linux", architecture="amd64"))
    assert not oci.platform_of("x86_64").takes(Platform(os="windows", architecture="amd64"))
    assert arm.takes(Platform(os="linux", architecture="arm"))
    assert not arm.takes(Platform(os="linux", architecture="arm", variant="v6"))
    assert oci.parsed_platform("linux/arm64") == Platform(os="linux", architecture="arm64")
    assert oci.parsed_platform("linux/arm/v7") == arm
    for text in ("", "linux", "linux/", "/", "a/b/c/d"):
        assert oci.parsed_platform(text) is None


# --- whiteouts -----------------------------------------------------------------------------------


def layer(*paths: bytes) -> LayerNames:
    """A layer with these members; directories end with a slash."""
    names = LayerNames()
    for path in paths:
        names.note(path.rstrip(b"/") or b"/", path.endswith(b"/"))
    return names


@pytest.mark.parametrize(
    ("members", "hidden", "seen"),
    [
        ([b"/a/file"], [b"/a/file", b"/a/file/below"], [b"/a/other", b"/a", b"/file"]),
        ([b"/a/"], [b"/a"], [b"/a/file"]),
        ([b"/a/", b"/a/b/", b"/a/b/c"], [b"/a/b/c", b"/a/b"], [b"/a/b/d"]),
        ([b"/a/.wh.file"], [b"/a/file", b"/a/file/below"], [b"/a/.wh.file", b"/a/file2", b"/a"]),
        ([b"/.wh.a"], [b"/a", b"/a/b/c"], [b"/b"]),
        ([b"/a/", b"/a/.wh..wh..opq"], [b"/a/x", b"/a/b/c", b"/a"], [b"/b", b"/ab/x"]),
        ([b"/.wh..wh..opq"], [b"/a", b"/a/b"], []),
        ([b"/.wh..wh.plnk/1.2", b"/.wh..wh.aufs"], [], [b"/.wh..wh.plnk/1.2", b"/1.2", b"/plnk"]),
        ([], [], [b"/a"]),
    ],
)
def test_hides(members: list[bytes], hidden: list[bytes], seen: list[bytes]) -> None:
    names = layer(*members)
    assert [path for path in hidden if not names.hides(path)] == []
    assert [path for path in seen if names.hides(path)] == []


@pytest.mark.parametrize(
    ("path", "there"),
    [
        (b"/a/file", True),
        (b"/a/.wh.file", False),
        (b"/a/.wh..wh..opq", False),
        (b"/.wh..wh.plnk/1.2", False),
        (b"/.wh", True),
        (b"/a.wh.b", True),
    ],
)
def test_whiteouts_are_not_there(path: bytes, there: bool) -> None:
    assert LayerNames().note(path, False) is there


def test_overlays_have_other_ways_to_say_it() -> None:
    names = LayerNames()
    names.remove(b"/a/gone")
    names.clear(b"/b")
    assert names.hides(b"/a/gone/below")
    assert names.hides(b"/b/x")
    assert not names.hides(b"/a/there")


def test_layer_names_are_bounded() -> None:
    names = LayerNames(1000)
    names.note(b"/" + b"n" * 500, False)
    assert names.size > 500
    with pytest.raises(Damaged, match="too many names"):
        names.note(b"/" + b"m" * 500, True)
