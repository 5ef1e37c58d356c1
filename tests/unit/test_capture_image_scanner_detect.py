# SPDX-License-Identifier: Apache-2.0
"""The content at a path tells its kind, and nothing in it leads out of it."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.capture.archive.elf_members import MemberSpool
from buildidfs.capture.archive.stream import ArchiveLimits, Region
from buildidfs.capture.image.layers import ArchiveFiles, DirectoryFiles, content, has
from buildidfs.capture.image.scanner import images_at
from buildidfs.errors import IntegrityError
from buildidfs.formats.archive.common import Damaged
from buildidfs.formats.container.oci import Platform
from buildidfs.model import PUBLIC_ACCESS, Trust
from tests.support.containers.images import DockerRoot, Layout, docker_save, layer
from tests.support.elf.elfwriter import elf_file
from tests.support.filesystems.sources import entry, tar
from tests.support.harness.scans import open_descriptors

if TYPE_CHECKING:
    from buildidfs.capture.image.layers import LayeredImage

BASE = layer([("bin/a", elf_file(build_id=b"\1" * 20))])
AMD64 = Platform(os="linux", architecture="amd64")


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() <= before


def images(path: Path, *, limits: ArchiveLimits | None = None) -> list[LayeredImage]:
    with ExitStack() as open_files:
        found = images_at(
            os.fsencode(path), AMD64, MemberSpool(), limits or ArchiveLimits(), open_files
        )
        return list(found)


def labels(path: Path) -> list[str]:
    return [image.label for image in images(path)]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    found = Layout(tmp_path / "layout")
    found.image("app", BASE)
    return found


# --- kinds ---------------------------------------------------------------------------------------


def test_layouts_and_archives(layout: Layout, tmp_path: Path) -> None:
    archive = layout.archive(tmp_path / "layout.tar")
    (tmp_path / "packed").write_bytes(gzip.compress(archive.read_bytes()))
    saved = docker_save(tmp_path / "saved.tar", {"app": [BASE]})
    with tarfile.open(saved) as content_:
        content_.extraction_filter = getattr(tarfile, "data_filter", None)  # not before 3.11.4
        content_.extractall(tmp_path / "saved")
    places = (layout.directory, archive, tmp_path / "packed", saved, tmp_path / "saved")
    for path in places:
        assert labels(path) == ["image:app"], path


def test_file_that_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"x" * 1000)
    (tmp_path / "short").write_bytes(b"")
    (tmp_path / "packed").write_bytes(gzip.compress(b"x" * 1000))
    for path in tmp_path.iterdir():
        with pytest.raises(Damaged, match="neither a tar archive nor"):
            images(path)


def test_content_of_containerd(layout: Layout, tmp_path: Path) -> None:
    arm = layout.manifest([BASE], "arm64", platform={"os": "linux", "architecture": "arm64"})
    amd = layout.manifest([BASE], platform={"os": "linux", "architecture": "amd64"})
    index = layout.index(arm, amd)
    note = layout.blob(b'{"no": "manifest"}', "x")
    (layout.path(note["digest"]).parent / "not-a-digest").write_bytes(b"{}")
    root = tmp_path / "containerd"
    shutil.copytree(layout.directory / "blobs", root / "io.containerd.content.v1.content/blobs")
    shutil.copytree(root, tmp_path / "docker/containerd/daemon")
    for path in (root, root / "io.containerd.content.v1.content", tmp_path / "docker"):
        found = images(path)
        assert [image.names for image in found] == [()]
        (image,) = found
        assert image.digests == (amd["digest"], index["digest"], *image.digests[2:])
        assert image.label == f"image:{amd['digest'][7:19]}"
        assert image.trust is Trust.PACKAGE
    (root / "io.containerd.content.v1.content/blobs/sha256" / ("0" * 64)).write_bytes(b"{ spoilt")
    spoilt, sound = images(root)
    assert isinstance(spoilt.error, IntegrityError)
    assert sound.error is None


def test_content_of_which_a_configuration_is_missing(layout: Layout, tmp_path: Path) -> None:
    root = tmp_path / "content"
    shutil.copytree(layout.directory / "blobs", root / "blobs")
    for path in (root / "blobs/sha256").iterdir():
        if b"rootfs" in path.read_bytes():
            path.unlink()
    ((image),) = images(root)
    assert isinstance(image.error, FileNotFoundError)


def test_docker_root(tmp_path: Path) -> None:
    root = DockerRoot(tmp_path / "docker")
    digest = root.image("app:1", "base", "top")
    root.image("app:2", "base")
    root.container("0123456789abcdef", "web", "rw")
    found = {image.label: image for image in images(root.directory)}
    assert set(found) == {"docker:0123456789ab", "image:app:1", "image:app:2"}
    app, written = found["image:app:1"], found["docker:0123456789ab"]
    assert app.digests == (digest,)
    assert [each.key.rpartition(b":")[2] for each in app.layers] == [
        b"/overlay2/top/diff", b"/overlay2/base/diff",
    ]  # fmt: skip
    assert {image.trust for image in found.values()} == {Trust.CONTAINER}
    assert written.names == ("web",)


def test_docker_root_that_lies(tmp_path: Path) -> None:
    root = DockerRoot(tmp_path / "docker")
    root.image("app:1", "base")
    root.image("app:2", "../../etc")
    store = root.directory / "image/overlay2"
    (store / "imagedb/content/sha256" / ("0" * 64)).write_text("{}")
    (store / "imagedb/content/sha256/no-digest").write_text("{}")
    root.container("0123", "web", "..")
    errors = {image.label: str(image.error) for image in images(root.directory)}
    assert errors["image:app:1"] == "None"
    assert "no name of a layer" in errors["image:app:2"]
    assert "does not have that digest" in errors["image:000000000000"]
    assert "no digest" in errors["image:no-digest"]
    assert "no name of a layer" in errors["docker:0123"]


def storage(directory: Path, **notes: object) -> Path:
    for name in ("images", "layers", "containers"):
        (directory / f"overlay-{name}").mkdir(parents=True)
        (directory / f"overlay-{name}/{name}.json").write_text(json.dumps(notes.get(name, [])))
    return directory


def test_containers_storage(tmp_path: Path) -> None:
    directory = storage(
        tmp_path / "storage",
        images=[
            {"id": "1" * 64, "digest": "sha256:2", "names": ["localhost/app:1"], "layer": "top"},
            {"id": "3" * 64, "layer": "gone"},
        ],
        layers=[{"id": "top", "parent": "base"}, {"id": "base", "diff-digest": "sha256:4"}],
        containers=[{"id": "a" * 64, "names": ["web"], "layer": "rw", "metadata": ""}],
    )
    app, broken, written = images(directory)
    assert (app.label, app.digests) == ("image:localhost/app:1", ("sha256:2", "sha256:" + "1" * 64))
    assert [each.name for each in app.layers] == ["top", "sha256:4"]
    assert broken.label == "image:333333333333"
    assert "missing" in str(broken.error)
    assert (written.label, written.names) == ("podman:aaaaaaaaaaaa", ("web",))
    assert {app.trust, written.trust} == {Trust.CONTAINER}


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"text"),
        lambda path: path.write_bytes(tar([("a", b"x")])),
        lambda path: path.write_bytes(gzip.compress(tar([("a", b"x")]))),
        lambda path: path.write_bytes(tar([("index.json", b"{}")])),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to("/dev/null"),
        lambda path: None,
    ],
    ids=range(9),
)
def test_path_without_images(tmp_path: Path, make: object) -> None:
    path = tmp_path / "thing"
    make(path)  # type: ignore[operator]  # one of the above
    with pytest.raises((Damaged, OSError)):
        images(path)


def test_compressed_archive_is_bounded(layout: Layout, tmp_path: Path) -> None:
    archive = layout.archive(tmp_path / "layout.tar")
    (tmp_path / "packed").write_bytes(gzip.compress(archive.read_bytes()))
    with pytest.raises(Damaged, match="more than 1000 bytes"):
        images(tmp_path / "packed", limits=ArchiveLimits(unpacked_bytes=1000))


# --- files ---------------------------------------------------------------------------------------


def test_files_of_an_archive(tmp_path: Path) -> None:
    members = [
        ("./a/file", b"content"),
        (entry("a/soft", tarfile.SYMTYPE, "../a/file"), b""),
        (entry("b/hard", tarfile.LNKTYPE, "a/soft"), b""),
        (entry("loop", tarfile.SYMTYPE, "loop"), b""),
        (entry("out", tarfile.SYMTYPE, "../../../etc/passwd"), b""),
    ]
    path = tmp_path / "archive"
    path.write_bytes(tar(members))
    with path.open("rb") as file:
        files = ArchiveFiles(Region(file.fileno(), 0, path.stat().st_size), PUBLIC_ACCESS)
        for name in (b"/a/file", b"a/file", b"../a/file", b"/a/soft", b"/b/hard"):
            assert content(files, name) == b"content", name
        for name in (b"/loop", b"/out", b"/missing", b"/etc/passwd"):
            assert not has(files, name), name
        with pytest.raises(Damaged, match="too much"):
            content(files, b"/a/file", 6)


def test_files_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "secret").write_text("outside")
    (tmp_path / "root/file").write_text("content")
    (tmp_path / "root/soft").symlink_to("/file")
    (tmp_path / "root/out").symlink_to("../secret")
    (tmp_path / "root/absolute").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "root/fifo")
    fd = os.open(tmp_path / "root", os.O_PATH)
    try:
        files = DirectoryFiles(fd)
        assert content(files, b"/file") == content(files, b"soft") == b"content"
        for name in (b"/out", b"/absolute", b"/../secret"):
            assert not has(files, name), name
        with pytest.raises(OSError, match="not a regular file"):
            content(files, b"/fifo")
    finally:
        os.close(fd)
