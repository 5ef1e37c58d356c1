# SPDX-License-Identifier: Apache-2.0
"""Commands that take the name of a container, a path for a build ID, or a time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from buildidfs.model import BuildId, ContainerNames, Kind, Quality
from buildidfs.serve.page.overview import container_page
from buildidfs.store import Store
from tests.support.clients.tools import Argument, run, tool
from tests.support.containers import packages
from tests.support.elf.elfwriter import elf_file
from tests.support.harness.captures import capture, commit, sighting
from tests.support.harness.mounts import COMMAND, BuildIdFs
from tests.support.harness.waiting import lines

SECOND = 1_000_000_000
SERVER, LIBRARY, OTHER = (BuildId(bytes([number]) * 20) for number in (0xA1, 0xA2, 0xB1))
GROUP = b"/kubepods/" + b"0123456789ab" + b"0" * 52
CART = "k8s:0123456789ab"


@pytest.fixture
def filled(buildidfs: BuildIdFs) -> BuildIdFs:
    """A store with two files of a pod, seen long ago, and one of the host."""
    with Store.create(buildidfs.store) as store:
        store.name_containers(lambda origin: ContainerNames("server", "cart-7d9f", "shop", "app:1"))
        for build_id, path in ((SERVER, b"/app/server"), (LIBRARY, b"/usr/lib/libx.so")):
            seen = sighting(path, container=CART, cgroup=GROUP, seen_ns=1_700_000_000 * SECOND)
            content = elf_file(build_id=build_id)
            commit(store, capture(store, content, build_id, at=seen, quality=Quality.SYMTAB))
        at = sighting(b"/usr/bin/other", seen_ns=1_790_000_000 * SECOND)
        commit(store, capture(store, elf_file(build_id=OTHER), OTHER, at=at))
    return buildidfs


def ids(filled: BuildIdFs, *words: str) -> list[str]:
    found = {json.loads(line)["build_id"] for line in filled(*words, "--json").out.splitlines()}
    return sorted(found)


def test_list_of_a_container_and_since(filled: BuildIdFs) -> None:
    both = [str(SERVER), str(LIBRARY)]
    assert ids(filled, "list", "--container", "shop/cart-7d9f") == both
    assert ids(filled, "list", "--since", "@1750000000") == [str(OTHER)]
    done = filled("list", "--since", "@1750000000", "--container", "server")
    assert (done.out, done.rc) == ("", 0)
    assert "nothing in this store fits --container server --since 2025-06-15T" in done.err
    assert ids(filled, "which", "--glob", "*", "--since", "@1750000000") == [str(OTHER)]
    done = filled("which", "/app/server", "--since", "@1750000000", check=False)
    assert done.rc == 30
    assert "nothing was seen at /app/server since" in done.err
    assert "the last time was 2023-11-14T" in done.err


def test_tables_show_names(filled: BuildIdFs) -> None:
    for words in (["list"], ["which", "/app/server"], ["where", str(SERVER)]):
        assert "shop/cart-7d9f/server" in filled(*words).out.split("\t"), words
    fields = json.loads(filled("which", "/app/server", "--json").out)
    assert fields["container"] == CART
    names = [fields[name] for name in ("container_name", "pod", "pod_namespace", "image")]
    assert names == ["server", "cart-7d9f", "shop", "app:1"]


def test_path_for_a_build_id(filled: BuildIdFs, tmp_path: Path) -> None:
    assert f"build ID   {LIBRARY}" in filled("show", "/lib/libx.so").out
    assert ids(filled, "where", "/app/server") == [str(SERVER)]
    out = tmp_path / "out"
    filled("get", "/app/server", "--container", "cart-7d9f", "-o", out)
    assert out.read_bytes() == elf_file(build_id=SERVER)
    done = filled("get", "/app/server", "--container", "other", "-o", out, check=False)
    assert done.rc == 30
    assert "nothing was ever seen at /app/server in container other" in done.err


def test_container_is_pinned_and_let_go(filled: BuildIdFs) -> None:
    assert filled("pin", "--container", "cart-7d9f").err == ""
    assert ids(filled, "pin", "--list") == [str(SERVER), str(LIBRARY)]
    filled("unpin", "--name", "cart-7d9f")
    assert ids(filled, "pin", "--list") == []
    filled("pin", "/app/server")
    assert ids(filled, "pin", "--list") == [str(SERVER)]
    filled("unpin", "/app/server")
    assert ids(filled, "pin", "--list") == []
    done = filled("pin", "--container", "nope", check=False)
    assert done.rc == 30
    assert done.err == (
        "buildidfs: no container nope was seen; the last containers seen are"
        " shop/cart-7d9f/server\n"
    )


def test_container_in_a_bundle(filled: BuildIdFs, tmp_path: Path) -> None:
    out = tmp_path / "cart.tar.zst"
    done = filled("bundle", "--container", "server", "-o", out, "--no-sources", "--json")
    assert json.loads(done.out)["build_ids"] == 2
    done = filled("bundle", "-o", out, check=False)
    assert done.rc == 2
    assert "give profiles, core files, IDs or --container" in done.err


def test_containers_that_are_not_there(filled: BuildIdFs) -> None:
    done = filled("containers", "nope", check=False)
    assert (done.rc, done.out) == (30, "")
    assert "no container nope was seen" in done.err
    done = filled("containers", "--since", "@1790000000")
    assert (done.rc, done.out) == (0, "")
    assert "no container was seen since" in done.err


def test_namespaces_without_a_container_are_counted(buildidfs: BuildIdFs) -> None:
    services = ("mnt:4026532177", "mnt:4026532179")
    with Store.create(buildidfs.store) as store:
        for number, label in enumerate((CART, *services)):
            seen = sighting(b"/app/server", container=label, mnt_ns_id=number)
            commit(store, capture(store, elf_file(build_id=SERVER), SERVER, at=seen))
    done = buildidfs("containers")
    assert CART in done.out
    assert "mnt:" not in done.out
    assert done.err == "buildidfs: 2 namespaces without a container, see --all\n"
    for words in (["--all"], ["--json"]):
        done = buildidfs("containers", *words)
        assert all(label in done.out for label in (CART, *services))
        assert done.err == ""
    done = buildidfs("containers", services[0])
    assert (services[0] in done.out, services[1] in done.out, done.err) == (True, False, "")


def test_namespace_with_a_reused_number_is_listed_as_in_the_mount(buildidfs: BuildIdFs) -> None:
    with Store.create(buildidfs.store) as store:
        for number in (4, 5):
            seen = sighting(b"/app/server", container="mnt:1", mnt_ns_id=number)
            commit(store, capture(store, elf_file(build_id=SERVER), SERVER, at=seen))
    rows = buildidfs("containers", "--all").out.splitlines()
    assert sorted(row.split("\t")[1] for row in rows) == ["mnt:1", "mnt:1~5"]
    (row,) = buildidfs("containers", "mnt:1~5").out.splitlines()
    assert row.split("\t")[1] == "mnt:1~5"


def test_names_are_completed(filled: BuildIdFs) -> None:
    environment = {
        **os.environ,
        "BUILDIDFS_STORE": str(filled.store),
        "_BUILDIDFS_COMPLETE": "bash_complete",
        "COMP_WORDS": "buildidfs list --container sh",
        "COMP_CWORD": "3",
    }
    done = subprocess.run([*COMMAND], env=environment, capture_output=True, check=False, text=True)
    assert "plain,shop/cart-7d9f/server" in done.stdout


# --- packages ------------------------------------------------------------------------------------


def test_names_of_containers_travel_in_bundles(filled: BuildIdFs, tmp_path: Path) -> None:
    packed = tmp_path / "cart.tar.zst"
    filled("bundle", "--container", "shop/cart-7d9f", "-o", packed, check=False)
    elsewhere = BuildIdFs(tmp_path)
    elsewhere("import", packed)
    (row,) = [json.loads(line) for line in elsewhere("containers", "--json").out.splitlines()]
    named = {"container": CART, "container_name": "server", "pod": "cart-7d9f",
             "pod_namespace": "shop", "image": "app:1"}  # fmt: skip
    assert named.items() <= row.items()
    (mountpoint := tmp_path / "there").mkdir()
    elsewhere("mount", "--bundle", packed, mountpoint)
    try:
        assert (mountpoint / "containers/shop_cart-7d9f_server/root/app/server").is_file()
    finally:
        elsewhere("unmount", mountpoint)


_DPKG_STATUS = """Package: libx1
Status: install ok installed
Architecture: amd64
Version: 1.0-1

Package: libx1
Status: install ok installed
Architecture: i386
Version: 0.9-1
"""
_APK = "P:musl\nV:1.2.5-r0\nF:lib\nR:other\n\nP:libx\nV:2.0-r1\nF:bin\nR:busybox\nF:lib\nR:x\n"

# $1 is the root, and the rest is run in it, in a mount namespace of its own
_IN_ROOT = """
mount --bind "$1" "$1"; cd "$1"; mkdir -p old; pivot_root . old; umount -l /old
exec /bin/busybox sh -c 'echo ready; read -r _'
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a static program in /bin."""
    for part in ("bin", "lib", "var/lib/dpkg/info", "var/lib/dpkg/status.d", "lib/apk/db"):
        (tmp_path / "root" / part).mkdir(parents=True)
    shutil.copy(tool("busybox"), tmp_path / "root/bin/busybox")
    for name in ("sh", "mkdir", "mount", "umount", "pivot_root"):
        (tmp_path / "root/bin" / name).symlink_to("busybox")
    return tmp_path / "root"


@pytest.mark.root
@pytest.mark.parametrize(
    ("notes", "package"),
    [
        ({"var/lib/dpkg/info/libx1:i386.list": "/.\n/usr\n/usr/bin/busybox\n",
          "var/lib/dpkg/status": _DPKG_STATUS}, ("libx1", "0.9-1")),
        ({"var/lib/dpkg/info/libx1.list": "/.\n/bin/busybox\n",
          "var/lib/dpkg/status": _DPKG_STATUS}, ("libx1", "1.0-1")),
        ({"var/lib/dpkg/status.d/libx": "Package: libx\nVersion: 3\n",
          "var/lib/dpkg/status.d/libx.md5sums": "0123  bin/busybox\n"}, ("libx", "3")),
        ({"lib/apk/db/installed": _APK}, ("libx", "2.0-r1")),
        ({}, (None, None)),
        # They are not obeyed: a link out of the root, a name that a terminal would obey.
        ({"var/lib/dpkg/info/x.list": "->/etc/hostname"}, (None, None)),
        ({"var/lib/dpkg/info/\x1b[2Jx.list": "/bin/busybox\n"}, ("?[2Jx".replace("[", "?"), None)),
    ],
)  # fmt: skip
def test_package_of_a_mapped_file(
    buildidfs: BuildIdFs, root: Path, notes: dict[str, str], package: tuple[str | None, str | None]
) -> None:
    for path, text in notes.items():
        if text.startswith("->"):
            (root / path).symlink_to(text[2:])
        else:
            (root / path).write_text(text)
    found = package_of_a_program(buildidfs, root)
    assert found == package


@pytest.mark.root
@pytest.mark.parametrize("place", ["var/lib/rpm", "usr/lib/sysimage/rpm"])
def test_package_in_the_database_of_rpm(
    buildidfs: BuildIdFs, root: Path, tmp_path: Path, place: str
) -> None:
    made = packages.rpm(root, tmp_path / "made")
    words: list[Argument] = [tool("rpm"), "--root", root, "--dbpath", f"/{place}"]
    words += ["--define", "_db_backend sqlite"]
    run([*words, "--initdb"], check=True)
    run([*words, "-i", "--justdb", "--nodeps", "--nosignature", made], check=True)
    assert (root / place / "rpmdb.sqlite").exists()
    found = package_of_a_program(buildidfs, root)
    assert found == (packages.NAME, packages.VERSION)
    # A database that makes no sense is passed over.
    with (root / place / "rpmdb.sqlite").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 65536)
    assert package_of_a_program(buildidfs, root) == (None, None)


def package_of_a_program(buildidfs: BuildIdFs, root: Path) -> tuple[str | None, str | None]:
    """Name and version of the package of the program that runs in a root."""
    words = [tool("unshare"), "-m", "sh", "-ec", _IN_ROOT, "sh", os.fspath(root)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines(process.stdout, lambda got: "ready" in got)
        done = buildidfs("where", "--live", "--path", "*/bin/busybox", "--json", check=False)
        found = [json.loads(line) for line in done.out.splitlines()]
        process.kill()
    (row,) = [each for each in found if each["pid"] == process.pid]
    return row["package"], row["package_version"]


def test_library_of_many_containers_is_listed_in_each_of_them(buildidfs: BuildIdFs) -> None:
    """A build ID has at most 256 places, and containers keep their own trees."""
    labels = [f"docker:{number:012x}" for number in range(300)]
    with Store.create(buildidfs.store) as store:
        digest = None
        for label in labels:
            at = sighting(b"/lib/libc.so.6", container=label, mnt_ns_id=int(label[7:], 16) + 1)
            new = capture(store, digest or b"libc", b"\x11" * 20, at=at, quality=Quality.SYMTAB)
            store.commit([new])
            ordinal = store.index.ordinal(BuildId(b"\x11" * 20))
            assert ordinal is not None
            artifact = store.index.artifact(ordinal, Kind.EXECUTABLE)
            assert artifact is not None
            digest = artifact.digest
    rows = [
        json.loads(line) for line in buildidfs("containers", "--all", "--json").out.splitlines()
    ]
    assert len(rows) == 300
    for row in rows[:3] + rows[-3:]:
        listed = buildidfs("list", "--json", "--container", row["container"]).out.splitlines()
        (file,) = [json.loads(line) for line in listed]
        assert row["build_ids"] == 1
        assert (file["path"], file["container"]) == ("/lib/libc.so.6", row["container"])
        with Store.open(buildidfs.store) as store:
            page = container_page(store, row["mount_name"].encode())
        assert page is not None
        assert page.container.coverage.build_ids == page.files_total == 1
