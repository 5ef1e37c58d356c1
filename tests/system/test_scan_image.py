# SPDX-License-Identifier: Apache-2.0
"""scan image, of images that umoci and skopeo have made: it finds what is there when unpacked."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.ingest import scans
from buildidfs.store import Store
from tests.support.clients.tools import run, tool, unmount
from tests.support.containers.images import DockerRoot, whiteout
from tests.support.elf.elfwriter import TEXT, elf_file
from tests.support.elf.programs import sha256

if TYPE_CHECKING:
    from tests.support.harness.mounts import BuildIdFs

pytestmark = pytest.mark.root

Paths = dict[str, str]
"""SHA-256 of ELF files by their path."""


def write(path: Path, name: str) -> None:
    """An ELF file that no other name gives."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = TEXT._replace(data=name.encode().ljust(64, b"\x90"))
    path.write_bytes(elf_file([text], build_id=name.encode().ljust(20, b".")))


def there(root: Path) -> Paths:
    """All ELF files below a directory."""
    return {
        f"/{path.relative_to(root)}": sha256(path)
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink() and path.read_bytes()[:4] == b"\x7fELF"
    }


def captured(store: Store) -> dict[str, Paths]:
    """What was captured, by the image that shows it."""
    found: dict[str, Paths] = {}
    for ordinal, _ in store.index.build_ids_from():
        for record in store.index.origins(ordinal):
            origin = record.origin
            paths = found.setdefault(origin.container, {})
            assert origin.path.decode() not in paths
            paths[origin.path.decode()] = record.digest.hex()
    return found


def first(root: Path) -> None:
    for name in ("bin/a", "bin/b", "bin/replaced", "lib/old/c", "lib/old/d", "lib/dir/e", "opt/f"):
        write(root / name, name)
    os.link(root / "bin/a", root / "bin/linked-to-a")
    (root / "bin/soft").symlink_to("a")
    (root / "etc").mkdir()
    (root / "etc/text").write_text("no ELF file\n")


def second(root: Path) -> None:
    (root / "bin/b").unlink()
    write(root / "bin/replaced", "replaced by this")
    shutil.rmtree(root / "lib/old")
    write(root / "usr/new", "new")
    (root / "bin/a").unlink()  # its other name stays


def third(root: Path) -> None:
    shutil.rmtree(root / "lib/dir")
    write(root / "lib/dir/other", "in a directory that was made anew")
    write(root / "bin/b", "b is back")


def fourth(root: Path) -> None:
    shutil.rmtree(root / "opt")
    (root / "opt").symlink_to("usr")


STEPS: dict[str, Callable[[Path], None]] = {
    "one": first, "two": second, "three": third, "four": fourth,
}  # fmt: skip


@pytest.fixture(scope="module")
def layout(scratch: Path) -> Path:
    """Four images, each with a layer more than the one before."""
    path = scratch / "umoci-layout"
    umoci = tool("umoci")
    run([umoci, "init", "--layout", path], check=True)
    run([umoci, "new", "--image", f"{path}:empty"], check=True)
    before = "empty"
    for name, change in STEPS.items():
        bundle = scratch / f"umoci-{name}"
        run([umoci, "unpack", "--image", f"{path}:{before}", bundle], check=True)
        change(bundle / "rootfs")
        run([umoci, "repack", "--image", f"{path}:{name}", bundle], check=True)
        shutil.rmtree(bundle)
        before = name
    run([umoci, "remove", "--image", f"{path}:empty"], check=True)
    return path


@pytest.fixture(scope="module")
def unpacked(scratch: Path, layout: Path) -> dict[str, Paths]:
    """What umoci unpacks."""
    found = {}
    for name in STEPS:
        bundle = scratch / f"umoci-unpacked-{name}"
        run([tool("umoci"), "unpack", "--image", f"{layout}:{name}", bundle], check=True)
        found[name] = there(bundle / "rootfs")
        shutil.rmtree(bundle)
    assert [len(paths) for paths in found.values()] == [8, 5, 6, 5]
    return found


def test_layout(layout: Path, unpacked: dict[str, Paths], tmp_path: Path) -> None:
    with Store.create(tmp_path / "store") as store:
        scan = scans.scan_images(store, [os.fsencode(layout)])
        assert (scan.images, scan.summary.unreadable, scan.corrupt) == (4, [], ())
        assert captured(store) == {f"image:{name}": paths for name, paths in unpacked.items()}
        digests = {digest for paths in unpacked.values() for digest in paths.values()}
        assert {digest.hex() for digest in store.blobs.names()} == digests
        assert scan.summary.captured == len(digests) == 11
        assert list(store.check(digests=True)) == []
        again = scans.scan_images(store, [os.fsencode(layout)])
        assert (again.images, again.unchanged, again.summary.files) == (4, 4, 0)


def skopeo(source: str, target: str, *, cwd: Path) -> None:
    """Copy an image. In a mount namespace of its own: it leaves a mount in the storage it makes."""
    policy = cwd / "policy.json"
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    argv = [tool("unshare"), "-m", tool("skopeo"), "--policy", policy, "copy", source, target]
    run(argv, cwd=cwd, check=True)


@pytest.mark.parametrize("kind", ["docker-archive", "oci-archive"])
@pytest.mark.parametrize("pack", [None, gzip.compress], ids=["plain", "gzip"])
def test_archives(
    layout: Path,
    unpacked: dict[str, Paths],
    tmp_path: Path,
    kind: str,
    pack: Callable[[bytes], bytes] | None,
) -> None:
    for name in STEPS:
        tag = f"localhost/{name}:1" if kind == "docker-archive" else name
        path = tmp_path / f"{name}.tar"
        skopeo(f"oci:{layout}:{name}", f"{kind}:{path}:{tag}", cwd=tmp_path)
        if pack is not None:
            path.write_bytes(pack(path.read_bytes()))
    with Store.create(tmp_path / "store") as store:
        paths = [os.fsencode(tmp_path / f"{name}.tar") for name in STEPS]
        scan = scans.scan_images(store, paths)
        assert (scan.images, scan.summary.unreadable, scan.corrupt) == (4, [], ())
        prefix, suffix = ("localhost/", ":1") if kind == "docker-archive" else ("", "")
        want = {f"image:{prefix}{name}{suffix}": paths for name, paths in unpacked.items()}
        assert captured(store) == want


def test_storage_of_podman(layout: Path, unpacked: dict[str, Paths], directory: Path) -> None:
    """containers/storage, in which skopeo has unpacked the layers for the kernel's overlay."""
    names = list(STEPS)[:3]  # it does not take a link in place of a directory that was deleted
    for name in names:
        target = f"containers-storage:[overlay@{directory}/root+{directory}/run]localhost/{name}:1"
        skopeo(f"oci:{layout}:{name}", target, cwd=directory)
    root = os.fsencode(directory / "root")
    with Store.create(directory / "store") as store:
        scan = scans.scan_images(store, [root])
        assert (scan.images, scan.summary.unreadable) == (3, [])
        assert captured(store) == {f"image:localhost/{name}:1": unpacked[name] for name in names}
        trusts = {
            record.origin.trust.name
            for ordinal, _ in store.index.build_ids_from()
            for record in store.index.origins(ordinal)
        }
        assert trusts == {"CONTAINER"}
        one = scans.scan_images(store, [], ["three:1"], [root])
        assert one.images == 1


# --- overlays of the kernel ----------------------------------------------------------------------


@contextlib.contextmanager
def overlay(directory: Path, lower: list[str], upper: str, *options: str) -> Iterator[Path]:
    """Where all these layers can be seen, the uppermost last; what is changed goes to another."""
    merged, work = directory / "merged", directory / f"{upper}-work"
    for path in (merged, work, layer(directory, upper)):
        path.mkdir(parents=True, exist_ok=True)
    # relative, since fsconfig(2), which mount of util-linux 2.39 and newer uses, takes 255 bytes
    above = layer(directory, upper).relative_to(directory)
    dirs = ":".join(str(layer(directory, name).relative_to(directory)) for name in reversed(lower))
    words = [f"lowerdir={dirs}", f"upperdir={above}", f"workdir={work.name}", *options]
    argv = [tool("mount"), "-t", "overlay", "-o", ",".join(words), "none", merged]
    run(argv, cwd=directory, check=True)
    try:
        yield merged
    finally:
        unmount(merged)


def layer(directory: Path, name: str) -> Path:
    return directory / "docker/overlay2" / name / "diff"


def test_docker_root(directory: Path) -> None:
    """What the kernel has written for each layer, and for a container on top of them."""
    root = DockerRoot(directory / "docker")
    first(root.diff("l1"))
    views = {"l1": there(root.diff("l1"))}
    with overlay(directory, ["l1"], "l2") as merged:
        second(merged)
        views["l2"] = there(merged)
    with overlay(directory, ["l1", "l2"], "l3") as merged:
        third(merged)
        views["l3"] = there(merged)
    with overlay(directory, ["l1", "l2", "l3"], "rw") as merged:
        write(merged / "tmp/written", "by the container")
        (merged / "bin/b").unlink()
    for number in (1, 2, 3):
        root.image(f"app:{number}", *(f"l{each}" for each in range(1, number + 1)))
    root.container("0123456789abcdef", "web", "rw")
    with Store.create(directory / "store") as store:
        scan = scans.scan_images(store, [os.fsencode(root.directory)])
        assert (scan.images, scan.summary.unreadable) == (4, [])
        found = captured(store)
        written = found.pop("docker:0123456789ab")
        assert list(written) == ["/tmp/written"]
        assert found == {f"image:app:{number}": views[f"l{number}"] for number in (1, 2, 3)}
        # Every file is a file of its own: nothing is read a second time.
        again = scans.scan_images(store, [os.fsencode(root.directory)])
        assert (again.summary.captured, again.summary.held) == (
            0,
            sum(map(len, found.values())) + 1,
        )


def test_files_of_which_only_the_permissions_were_changed(directory: Path) -> None:
    """With metacopy the upper layer has a file without bytes; those of the lower one are shown."""
    root = DockerRoot(directory / "docker")
    first(root.diff("l1"))
    with overlay(directory, ["l1"], "l2", "metacopy=on,redirect_dir=on") as merged:
        (merged / "bin/b").chmod(0o700)
        (merged / "opt").rename(merged / "opt-renamed")
        view = there(merged)
    assert not any((root.diff("l2") / "bin/b").read_bytes())
    root.image("app:2", "l1", "l2")
    with Store.create(directory / "store") as store:
        scan = scans.scan_images(store, [os.fsencode(root.directory)])
        (renamed,) = scan.summary.unreadable
        assert renamed.path.endswith(b"!/opt-renamed")
        del view["/opt-renamed/f"]
        assert captured(store) == {"image:app:2": view}


def test_whiteouts_of_other_kinds(directory: Path) -> None:
    """A device without a mount, and the empty files with an attribute of Linux 6.7."""
    root = DockerRoot(directory / "docker")
    first(root.diff("l1"))
    upper = root.diff("l2")
    (upper / "bin").mkdir()
    whiteout(upper / "bin/a")
    (upper / "bin/b").touch()
    os.setxattr(upper / "bin/b", "trusted.overlay.whiteout", b"")
    (upper / "lib").mkdir()
    (upper / "lib/.wh.old").touch()  # as fuse-overlayfs makes them
    (upper / "lib/dir").mkdir()
    os.setxattr(upper / "lib/dir", "user.overlay.opaque", b"y")
    root.image("app:2", "l1", "l2")
    with Store.create(directory / "store") as store:
        scans.scan_images(store, [os.fsencode(root.directory)])
        assert sorted(captured(store)["image:app:2"]) == [
            "/bin/linked-to-a", "/bin/replaced", "/opt/f",
        ]  # fmt: skip


# --- the command ---------------------------------------------------------------------------------


def test_what_is_said_of_it(layout: Path, buildidfs: BuildIdFs, tmp_path: Path) -> None:
    done = buildidfs("scan", "image", layout)
    assert re.fullmatch(
        r"4 images\n11 captured \(.*, 11 new build IDs\), 13 already held\n", done.out
    ), done
    assert buildidfs("scan", "image", layout).out.startswith("4 images, 4 of them unchanged\n")
    again = json.loads(buildidfs("scan", "image", "--again", "--json", layout).out)
    assert (again["images"], again["unchanged"], again["captured"], again["held"]) == (4, 0, 0, 24)
    index = json.loads((layout / "index.json").read_text())
    digest = index["manifests"][-1]["digest"]
    text = buildidfs("show", b"usr/new".ljust(20, b".").replace(b"usr/", b"").hex()[:6]).out
    seen = rf"/usr/new\n +in image:four \({digest}\) on {digest}/sha256:[0-9a-f]{{64}},"
    assert re.search(seen, text), text
    listed = buildidfs("list", "--container", "image:four").out
    assert "/usr/new" in listed
    assert "/opt/f" not in listed
    by_digest = buildidfs("scan", "image", "--again", "--root", layout, digest[7:20])
    assert by_digest.out.startswith("1 image\n"), by_digest


def test_image_that_is_not_what_its_digest_says(
    layout: Path, unpacked: dict[str, Paths], buildidfs: BuildIdFs, tmp_path: Path
) -> None:
    copy = tmp_path / "layout"
    shutil.copytree(layout, copy)
    index = json.loads((copy / "index.json").read_text())
    manifest = copy / "blobs" / index["manifests"][-1]["digest"].replace(":", "/")
    top = json.loads(manifest.read_text())["layers"][-1]["digest"]
    blob = copy / "blobs" / top.replace(":", "/")
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    done = buildidfs("scan", "image", copy, check=False)
    assert done.rc == 20, done
    assert done.out.startswith("4 images\n"), done
    assert done.err == (
        f"buildidfs: image:four in {copy}: layer {top} does not have that digest\n"
    ), done
    with Store.open(buildidfs.store) as store:
        want = {f"image:{name}": paths for name, paths in unpacked.items() if name != "four"}
        assert captured(store) == want


def test_requests_that_make_no_sense(layout: Path, buildidfs: BuildIdFs) -> None:
    missing = buildidfs("scan", "image", "--root", layout, "nowhere:1", check=False)
    assert missing.rc == 2, missing
    assert "no image 'nowhere:1', and no container, in" in missing.err, missing
    platform = buildidfs("scan", "image", "--platform", "plan9", layout, check=False)
    assert (platform.rc, "not a platform" in platform.err) == (2, True), platform
    wrong = buildidfs("scan", "image", tool("true"), check=False)
    assert wrong.rc == 3, wrong
    assert re.search(r"1 not readable: .*\n +/\S*/true\n", wrong.err), wrong
