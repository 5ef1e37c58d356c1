# SPDX-License-Identifier: Apache-2.0
"""Images show the files of their layers, each of which is read once, whole and unchanged."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.archive.stream import ArchiveLimits
from buildidfs.capture.base import Known
from buildidfs.capture.image.layers import TarLayer
from buildidfs.capture.image.scanner import ImageScanner
from buildidfs.errors import UsageError
from buildidfs.formats.container.oci import Platform
from buildidfs.model import Absence, Trust
from tests.support.containers.images import LayerBlob, Layout, docker_save, layer
from tests.support.elf.elfwriter import elf_file
from tests.support.filesystems.sources import entry
from tests.support.harness.children import needs_root
from tests.support.harness.scans import Memory, Scan, nothing_left, remember, scan

LNK, DIR = tarfile.LNKTYPE, tarfile.DIRTYPE
AMD64 = Platform(os="linux", architecture="amd64")


def elf(number: int) -> bytes:
    """An ELF file that no other number gives."""
    return elf_file(build_id=bytes([number]) * 20)


A, B, C, D = (elf(number) for number in range(1, 5))
BASE = layer([("bin/a", A), ("bin/b", B), ("lib/c", C), ("etc/text", b"x")])


@pytest.fixture(autouse=True)
def _nothing_left_open_or_running() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture
def layout(directory: Path) -> Layout:
    return Layout(directory / "layout")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers that were taken apart, in order."""
    names: list[str] = []
    real = TarLayer.found

    def found(self: TarLayer, *args: object) -> object:
        names.append(self.name)
        return real(self, *args)  # type: ignore[arg-type]  # as given

    monkeypatch.setattr(TarLayer, "found", found)
    return names


def scanner(path: Path, *, memo: Memory | None = None, **options: object) -> ImageScanner:
    memory = Memory() if memo is None else memo
    return ImageScanner(memory, [os.fsencode(path)], **options)  # type: ignore[arg-type]  # as given


def shown(result: Scan) -> dict[str, dict[bytes, bytes]]:
    """By image, the build IDs that its paths have."""
    found: dict[str, dict[bytes, bytes]] = {}
    for seen in result.pinned:
        answer = bytes(seen.data[seen.data.index(b"GNU\0") + 4 :][:20])
        found.setdefault(seen.pinned.sighting.origin.container, {})[seen.path] = answer
    for item in result.again:
        origin = item.sighting.origin
        found.setdefault(origin.container, {})[origin.path] = item.known.build_id or b""
    return found


def ids(**paths: int) -> dict[bytes, bytes]:
    """``bin_a=1`` is that /bin/a has the build ID of `elf` 1."""
    return {
        b"/" + name.replace("_", "/").encode(): bytes([each]) * 20 for name, each in paths.items()
    }


def test_sighting(layout: Layout) -> None:
    one = layer([(entry("usr/bin/app", mode=0o755, uid=3, mtime=5), A)])
    digest = layout.image("app:one", one)
    (seen,) = scan(scanner(layout.directory)).pinned
    assert seen.data == A
    origin = seen.pinned.sighting.origin
    assert (origin.path, origin.container) == (b"/usr/bin/app", "image:app:one")
    assert origin.host == f"{digest}/{one.digest}"
    assert (origin.trust, origin.scanner) == (Trust.PACKAGE, "image")
    assert (origin.identity.mode, origin.identity.uid) == (0o100755, 3)
    assert origin.identity.scope == b"layer:" + one.digest.encode()


@needs_root("gives files away")
def test_only_readers_of_a_layer_may_read_its_files(layout: Layout) -> None:
    one = layer([(entry("usr/bin/app", mode=0o755, uid=3), A)])
    layout.image("app:one", one)
    blob = layout.path(one.digest)
    os.chown(blob, 7, 8)
    memory = Memory()
    for mode, shown_as in ((0o640, (0o550, 7, 8)), (0o600, (0o500, 7, 8)), (0o644, (0o755, 3, 0))):
        blob.chmod(mode)
        scanned = scanner(layout.directory, memo=memory)
        (seen,) = scan(scanned).pinned
        identity = seen.pinned.sighting.origin.identity
        assert (identity.mode & 0o777, identity.uid, identity.gid) == shown_as
        assert scan(scanner(layout.directory, memo=memory)).pinned
        memory.update({mark: Known(absence=Absence.NOT_ELF) for mark in scanned.whole})
        assert not scan(scanner(layout.directory, memo=memory)).pinned, "it was read before"


@pytest.mark.parametrize(
    ("upper", "expected"),
    [
        ([("bin/b", C)], ids(bin_a=1, bin_b=3, lib_c=3)),
        ([("bin/.wh.b", b"")], ids(bin_a=1, lib_c=3)),
        ([(".wh.bin", b"")], ids(lib_c=3)),
        ([("bin/.wh..wh..opq", b""), ("bin/d", D)], ids(bin_d=4, lib_c=3)),
        ([("bin", b"now a file")], ids(lib_c=3)),
        ([(entry("bin/a", DIR), b"")], ids(bin_b=2, lib_c=3)),
        ([(entry("bin", tarfile.SYMTYPE, "lib"), b"")], ids(lib_c=3)),
        ([(entry("./bin/", DIR), b""), ("./bin/d", D)], ids(bin_a=1, bin_b=2, bin_d=4, lib_c=3)),
        ([(".wh.bin", b""), ("bin/d", D)], ids(bin_d=4, lib_c=3)),
        ([("../bin/.wh.b", b"")], ids(bin_a=1, lib_c=3)),
    ],
    ids=range(10),
)
def test_upper_layer_hides_files(layout: Layout, upper: list, expected: dict) -> None:  # type: ignore[type-arg]
    layout.image("app", BASE, layer(upper))
    assert shown(scan(scanner(layout.directory))) == {"image:app": expected}


def test_file_hidden_two_layers_above(layout: Layout) -> None:
    middle = layer([("bin/b", D), ("bin/x", D)])
    top = layer([(".wh.bin", b""), ("lib/d", D)])
    layout.image("app", BASE, middle, top)
    assert shown(scan(scanner(layout.directory))) == {"image:app": ids(lib_c=3, lib_d=4)}


def test_layers_are_read_once_for_all_images(layout: Layout, reads: list[str]) -> None:
    one, two = layer([("bin/.wh.b", b"")]), layer([("bin/d", D)])
    layout.image("base", BASE)
    layout.image("one", BASE, one)
    layout.image("two", BASE, one, two)
    result = scan(scanner(layout.directory))
    assert shown(result) == {
        "image:base": ids(bin_a=1, bin_b=2, lib_c=3),
        "image:one": ids(bin_a=1, lib_c=3),
        "image:two": ids(bin_a=1, lib_c=3, bin_d=4),
    }
    assert sorted(reads) == sorted([BASE.digest, one.digest, two.digest])
    assert len(result.pinned) == 4, "the bytes of each file are given out once"
    assert result.unreadable == []


def test_layers_in_other_orders(layout: Layout, reads: list[str]) -> None:
    one, two = layer([("bin/a", C)]), layer([("bin/a", D)])
    layout.image("up", BASE, one, two)
    layout.image("down", BASE, two, one)
    assert shown(scan(scanner(layout.directory))) == {
        "image:up": ids(bin_a=4, bin_b=2, lib_c=3),
        "image:down": ids(bin_a=3, bin_b=2, lib_c=3),
    }
    assert reads.count(BASE.digest) == 1
    assert len(reads) == 4


def test_layer_that_an_image_has_twice(layout: Layout, reads: list[str]) -> None:
    empty = layer([])
    layout.image("app", empty, BASE, empty, layer([("bin/.wh.a", b"")]), BASE, empty)
    assert shown(scan(scanner(layout.directory))) == {"image:app": ids(bin_a=1, bin_b=2, lib_c=3)}
    assert len(reads) == 3


def test_many_images(layout: Layout) -> None:
    for number in range(40):
        layout.image(f"app{number}", BASE, layer([(f"bin/own{number}", D)]))
    result = scan(scanner(layout.directory))
    assert len(shown(result)) == 40
    expected = {f"bin_own{7}": 4}
    assert shown(result)["image:app7"] == ids(bin_a=1, bin_b=2, lib_c=3, **expected)


def test_hard_link_of_which_the_first_name_is_hidden(layout: Layout) -> None:
    linked = layer([("bin/a", A), (entry("bin/b", LNK, "bin/a"), b""), ("bin/c", C)])
    layout.image("app", linked, layer([("bin/.wh.a", b"")]))
    layout.image("whole", linked)
    result = scan(scanner(layout.directory))
    assert shown(result) == {
        "image:app": ids(bin_b=1, bin_c=3),
        "image:whole": ids(bin_a=1, bin_b=1, bin_c=3),
    }
    only = scan(ImageScanner(Memory(), [], ["app"], [os.fsencode(layout.directory)]))
    assert shown(only) == {"image:app": ids(bin_b=1, bin_c=3)}


def test_hard_link_of_an_image_alone(layout: Layout, reads: list[str]) -> None:
    """No image shows the name that the bytes come with: the layer has to be read again."""
    linked = layer([("bin/a", A), (entry("bin/b", LNK, "bin/a"), b"")])
    layout.image("app", linked, layer([("bin/.wh.a", b"")]))
    result = scan(scanner(layout.directory))
    assert shown(result) == {"image:app": ids(bin_b=1)}
    assert result.data(b"/bin/b") == A


def test_known_members_are_not_given_out_again(layout: Layout) -> None:
    memory = Memory()
    layout.image("base", BASE)
    remember(memory, scan(scanner(layout.directory, memo=memory)))
    layout.image("app", BASE, layer([("bin/d", D)]))
    result = scan(scanner(layout.directory, memo=memory))
    assert result.paths() == [b"/bin/d"]
    assert shown(result)["image:app"] == ids(bin_a=1, bin_b=2, lib_c=3, bin_d=4)


# --- digests -------------------------------------------------------------------------------------


def spoil(path: Path, *, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_layer_with_other_bytes(layout: Layout) -> None:
    good, bad = layer([("bin/d", D)]), layer([("bin/evil", C)])
    layout.image("sound", BASE, good)
    layout.image("spoilt", BASE, bad, good)
    spoil(layout.path(bad.digest), at=len(bad.packed) - 6)
    found = scanner(layout.directory)
    result = scan(found)
    assert shown(result) == {"image:sound": ids(bin_a=1, bin_b=2, lib_c=3, bin_d=4)}
    assert result.unreadable == []
    ((error),) = found.corrupt
    assert "image:spoilt" in str(error)
    assert bad.digest in str(error)
    assert (found.images, len(found.whole)) == (2, 1)


def test_layer_of_another_size(layout: Layout) -> None:
    """Bytes behind the end of a layer change its digest only."""
    digest = layout.image("app", BASE)
    manifest = json.loads(layout.path(digest).read_bytes())
    manifest["layers"][0]["size"] += 1
    layout.add(layout.blob(json.dumps(manifest).encode(), "x"), "other")
    found = scanner(layout.directory)
    assert list(shown(scan(found))) == ["image:app"]
    assert "bytes and not" in str(found.corrupt[0])


@pytest.mark.parametrize("what", ["manifest", "config", "index"])
def test_documents_with_other_bytes(layout: Layout, what: str) -> None:
    image = layout.manifest([BASE], platform={"os": "linux", "architecture": "amd64"})
    index = layout.index(image)
    layout.add(index, "app")
    config = json.loads(layout.path(image["digest"]).read_bytes())["config"]
    document = {"manifest": image, "config": config, "index": index}[what]
    spoil(layout.path(document["digest"]))
    found = scanner(layout.directory)
    result = scan(found)
    assert (result.pinned, result.unreadable) == ([], [])
    ((error),) = found.corrupt
    assert document["digest"] in str(error)


def test_layer_that_is_changed_while_it_is_read(layout: Layout) -> None:
    layout.image("app", layer([("a", A), ("b", B)]), layer([("c", C)]))
    found = scanner(layout.directory)
    items = iter(found)
    first = next(items)
    for path in layout.directory.glob("blobs/sha256/*"):
        os.utime(path)
    rest = list(items)
    scan([first, *rest])
    ((error),) = found.corrupt
    assert "while it was read" in str(error)
    assert found.whole == []


def test_missing_blobs_are_told(layout: Layout) -> None:
    top = layer([("bin/d", D)])
    layout.image("app", BASE, top)
    layout.image("other", top)
    layout.path(BASE.digest).unlink()
    found = scanner(layout.directory)
    result = scan(found)
    assert shown(result) == {"image:other": ids(bin_d=4)}
    ((item),) = result.unreadable
    assert item.path.endswith(b"(image:app)")
    assert "No such file" in item.reason
    assert found.corrupt == []


def test_layer_that_is_no_archive(layout: Layout) -> None:
    """Its digest is right, and what is below it would be shown although it may be hidden."""
    damaged = LayerBlob(b"", b"x" * 1000)
    layout.image("app", BASE, damaged, layer([("bin/d", D)]))
    layout.image("sound", BASE)
    found = scanner(layout.directory)
    result = scan(found)
    assert shown(result) == {
        "image:app": ids(bin_d=4),
        "image:sound": ids(bin_a=1, bin_b=2, lib_c=3),
    }
    ((item),) = result.unreadable
    assert "no header" in item.reason
    assert len(found.whole) == 1


def test_bounds(layout: Layout) -> None:
    layout.image("app", BASE, layer([(f".wh.{number}", b"") for number in range(10)]))
    result = scan(scanner(layout.directory, limits=ArchiveLimits(members=5)))
    assert "more than 5 members" in result.unreadable[0].reason
    large = scan(scanner(layout.directory, limits=ArchiveLimits(member_bytes=len(A) - 1)))
    assert len(large.unreadable) == 3
    assert all(b"!/" in item.path for item in large.unreadable)


# --- which images --------------------------------------------------------------------------------


def test_unchanged_images_are_not_read_again(layout: Layout, reads: list[str]) -> None:
    layout.image("app", BASE)
    first = scanner(layout.directory)
    scan(first)
    memory = Memory({mark: Known(absence=Absence.NOT_ELF) for mark in first.whole})
    second = scanner(layout.directory, memo=memory)
    result = scan(second)
    assert (result.pinned, result.again, second.images, second.unchanged) == ([], [], 1, 1)
    layout.image("again", BASE)
    third = scanner(layout.directory, memo=memory)
    assert list(shown(scan(third))) == ["image:again"], "another name is another image"
    forced = scanner(layout.directory, memo=memory, reread=True)
    assert len(shown(scan(forced))) == 2
    assert forced.unchanged == 0


def test_image_without_a_name_is_called_by_its_digest(layout: Layout) -> None:
    layout.add(layout.manifest([BASE]))
    (label,) = shown(scan(scanner(layout.directory)))
    assert len(label) == len("image:") + 12


def test_platforms(layout: Layout) -> None:
    arm = layer([("bin/a", D)])
    images = [
        layout.manifest([each], platform={"os": "linux", "architecture": name})
        for each, name in ((BASE, "amd64"), (arm, "arm64"))
    ]
    noise = layout.blob(
        b'{"layers": []}',
        "x",
        platform={"os": "unknown", "architecture": "unknown"},
        annotations={"vnd.docker.reference.type": "attestation-manifest"},
    )
    layout.add(layout.index(*images, noise), "app")
    host = shown(scan(scanner(layout.directory, platform=AMD64)))
    assert host == {"image:app": ids(bin_a=1, bin_b=2, lib_c=3)}
    other = Platform(os="linux", architecture="arm64")
    assert shown(scan(scanner(layout.directory, platform=other))) == {"image:app": ids(bin_a=4)}
    every = scanner(layout.directory)
    assert len(scan(every).pinned) == 4
    assert every.images == 2
    none = scan(scanner(layout.directory, platform=Platform(os="plan9", architecture="mips")))
    ((item),) = none.unreadable
    assert item.reason == "no image for plan9/mips among those for linux/amd64, linux/arm64"


def test_index_without_platforms(layout: Layout) -> None:
    layout.add(layout.index(layout.manifest([BASE])), "app")
    assert len(shown(scan(scanner(layout.directory, platform=AMD64)))) == 1


def test_artifact_that_is_no_image_is_passed_over(layout: Layout) -> None:
    layout.add(layout.blob(json.dumps({"config": None, "layers": None}).encode(), "x"), "artifact")
    layout.image("app", BASE)
    found = scanner(layout.directory)
    result = scan(found)
    assert (list(shown(result)), result.unreadable, found.images) == (["image:app"], [], 1)


def test_indexes_of_indexes(layout: Layout) -> None:
    inner = layout.manifest([BASE])
    for _ in range(3):
        inner = layout.index(inner)
    layout.add(inner, "app")
    assert len(shown(scan(scanner(layout.directory)))) == 1
    layout.add(layout.index(layout.index(inner)), "deep")
    ((item),) = scan(scanner(layout.directory)).unreadable
    assert "indexes of more than" in item.reason


def test_layer_that_is_not_understood(layout: Layout) -> None:
    digest = layout.image("app", BASE)
    manifest = json.loads(layout.path(digest).read_bytes())
    manifest["layers"][0]["mediaType"] += "+encrypted"
    layout.add(layout.blob(json.dumps(manifest).encode(), "x"), "secret")
    result = scan(scanner(layout.directory))
    assert list(shown(result)) == ["image:app"]
    assert "not understood" in result.unreadable[0].reason


def test_references(layout: Layout) -> None:
    digest = layout.image("docker.io/library/app:one", BASE)
    layout.image("docker.io/library/app:two", layer([("bin/d", D)]))
    roots = [os.fsencode(layout.directory)]
    for reference in ("app:one", digest, digest[:19], digest[7:15], f"app:one@{digest}"):
        found = ImageScanner(Memory(), [], [reference], roots)
        assert list(shown(scan(found))) == ["image:docker.io/library/app:one"], reference
        assert found.images == 1
    both = ImageScanner(Memory(), [], ["app:two", "app:one", "app:one"], roots)
    assert len(shown(scan(both))) == 2
    with pytest.raises(UsageError, match="no image 'app:three'"):
        scan(ImageScanner(Memory(), [], ["app:one", "app:three"], roots))


def test_error_of_an_image_that_was_not_named(layout: Layout) -> None:
    layout.image("app", BASE)
    digest = layout.image("spoilt", layer([("bin/d", D)]))
    spoil(layout.path(digest))
    roots = [os.fsencode(layout.directory)]
    found = ImageScanner(Memory(), [], ["app"], roots)
    assert list(shown(scan(found))) == ["image:app"]
    assert found.corrupt == []
    found = ImageScanner(Memory(), [], ["spoilt"], roots)
    assert scan(found).pinned == []
    assert len(found.corrupt) == 1


# --- docker save ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [False, True], ids=["plain", "gzip"])
def test_docker_save(tmp_path: Path, pack: bool, reads: list[str]) -> None:
    top = layer([("bin/.wh.b", b"")])
    path = docker_save(tmp_path / "saved.tar", {"base:1": [BASE], "app:1": [BASE, top]}, pack=pack)
    result = scan(scanner(path))
    assert shown(result) == {
        "image:base:1": ids(bin_a=1, bin_b=2, lib_c=3),
        "image:app:1": ids(bin_a=1, lib_c=3),
    }
    assert sorted(reads) == sorted([BASE.diff_id, top.diff_id])
    assert {seen.pinned.sighting.origin.trust for seen in result.pinned} == {Trust.PACKAGE}


def test_docker_save_with_other_bytes(tmp_path: Path) -> None:
    path = docker_save(tmp_path / "saved.tar", {"app:1": [BASE]})
    data = path.read_bytes()
    path.write_bytes(data.replace(A, A[:-1] + b"!"))
    found = scanner(path)
    assert scan(found).pinned == []
    assert BASE.diff_id in str(found.corrupt[0])


def test_archive_of_a_layout(layout: Layout, tmp_path: Path) -> None:
    layout.image("app", BASE)
    archive = layout.archive(tmp_path / "layout.tar")
    packed = tmp_path / "layout.tar.gz"
    packed.write_bytes(gzip.compress(archive.read_bytes()))
    for path in (archive, packed):
        assert shown(scan(scanner(path))) == {"image:app": ids(bin_a=1, bin_b=2, lib_c=3)}
