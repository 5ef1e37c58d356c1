# SPDX-License-Identifier: Apache-2.0
"""A container names no functions of the host's programs, and displaces none of the host's files.

The first half has a container that claims a build ID of the host's and brings debuginfo. The second
has the root of a container without a user namespace, whose files are root's on the host, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.clients.tools import run, tool
from tests.support.containers.ephemeral import container
from tests.support.containers.images import docker_save, layer
from tests.support.elf.programs import build_id_of, sha256
from tests.support.harness.children import cat_program, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.elf.programs import Program
    from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client, pytest.mark.host]


@contextlib.contextmanager
def believed(directory: Path) -> Iterator[Path]:
    """A directory of the host's on which owners are believed: /tmp may be mounted nosuid."""
    place = directory / "host"
    place.mkdir()
    run([tool("mount"), "-t", "tmpfs", "-o", "mode=0755", "none", place], check=True)
    try:
        yield place
    finally:
        run([tool("umount"), "-l", place], check=True)


def names(mount: Path, build_id: str) -> list[Path]:
    """Every default name of debuginfo in a mount, and links that lead there."""
    first, rest = build_id[:2], build_id[2:]
    (perf,) = ((mount / "perf/.build-id" / first / rest).resolve(),)
    return [
        mount / build_id / "debug",
        mount / build_id / "debuginfo",
        mount / "buildid" / build_id / "debuginfo",
        mount / "debug/.build-id" / first / f"{rest}.debug",
        mount / ".build-id" / first / f"{rest}.debug",
        mount / "usr/lib/debug/.build-id" / first / f"{rest}.debug",
        perf / "debug",
    ]


def function_at(mount: Path, file: Path, address: int) -> str:
    """What gdb calls the function at an address of a file."""
    return tools.gdb(f"info symbol {address:#x}", debug=mount / "debug", arguments=[file]).out


def test_a_container_names_no_functions_of_the_hosts(
    buildidfs: BuildIdFs, program: Program, directory: Path
) -> None:
    """While a mount is in use: names that were there go in the moment the host's file comes."""
    build_id = program.exe.build_id
    wanted = f"{build_id}+{program.exe.address('exe_static_hot'):#x}"
    with container("tmpfs", program, directory / "container") as inside:
        buildidfs.scan(inside.stuck)
    with believed(directory) as host, buildidfs.mounted() as mount:
        digest = sha256(next(iter(names(mount, build_id))))
        for path in names(mount, build_id):
            assert path.exists(), path
        assert "exe_static_hot" in buildidfs("symbolize", wanted).out

        shutil.copy2(program.exe.shipped, host / "hot")
        buildidfs("scan", "tree", host)
        for path in names(mount, build_id):
            assert not path.exists(), path
        assert f"{build_id[2:]}.debug" not in os.listdir(mount / "debug/.build-id" / build_id[:2])
        assert sha256(mount / build_id / "variants" / digest) == digest
        address = program.exe.address("exe_static_hot")
        assert "exe_static_hot" not in function_at(mount, host / "hot", address)
        assert "exe_static_hot" not in buildidfs("symbolize", wanted, check=False).out
        assert buildidfs("get", "--kind", "debuginfo", build_id, check=False).rc == 30

        bundle = directory / "bundle"
        buildidfs("bundle", build_id, "-o", bundle)
        listed = buildidfs("bundle", "--list", bundle, check=False)
        assert digest not in listed.out
        shown = json.loads(buildidfs("show", "--json", build_id).out)
        (withheld,) = [each for each in shown["variants"] if each["kind"] == "debuginfo"]
        assert (withheld["sha256"], withheld["served"]) == (digest, False)
        assert withheld["why"] == "is believed less than the executable: container"

        # The operator's own debug file has the names again.
        shutil.copy2(program.exe.debug, host / "hot.debug")
        buildidfs("scan", "tree", host)
        for path in names(mount, build_id):
            assert path.exists(), path
        assert "exe_static_hot" in function_at(mount, host / "hot", address)
        assert "exe_static_hot" in buildidfs("symbolize", wanted).out


@pytest.mark.parametrize("how", ["evicted", "omitted"])
def test_a_container_names_no_functions_of_a_program_that_there_is_no_room_for(
    buildidfs: BuildIdFs, program: Program, directory: Path, how: str
) -> None:
    """The host's executable makes room, or none is made for it, and an image's debug file stays."""
    build_id, digest = program.exe.build_id, sha256(program.exe.debug)
    address = program.exe.address("exe_static_hot")
    debug = f"usr/lib/debug/.build-id/{build_id[:2]}/{build_id[2:]}.debug"
    image = directory / "image.tar"
    docker_save(image, {"hot:1": [layer([(debug, program.exe.debug.read_bytes())])]})
    buildidfs("scan", "image", image)
    image.unlink()
    with believed(directory) as host, buildidfs.mounted() as mount:
        shutil.copy2(program.exe.shipped, host / "hot")
        with (host / "hot").open("ab") as file:
            file.write(os.urandom(1 << 20))
        if how == "evicted":
            buildidfs("scan", "tree", host)
            buildidfs("prune", "--max-size", str(taken(buildidfs) - (1 << 19)))
        else:
            assert "exe_static_hot" in function_at(mount, host / "hot", address)
            limits = directory / "limits.toml"
            limits.write_text(f"[retention]\nmax-size = {taken(buildidfs) + (1 << 19)}\n")
            done = buildidfs("--config", limits, "scan", "tree", "--json", host, check=False)
            assert done.rc == 14
            assert json.loads(done.out)["omitted"] == 1
        held = json.loads(buildidfs("show", "--json", build_id).out)["variants"]
        assert [each["sha256"] for each in held] == [digest], "this is the case in question"
        for path in names(mount, build_id):
            assert not path.exists(), path
        assert f"{build_id[2:]}.debug" not in os.listdir(mount / "debug/.build-id" / build_id[:2])
        assert sha256(mount / build_id / "variants" / digest) == digest
        assert "exe_static_hot" not in function_at(mount, host / "hot", address)
        done = buildidfs("symbolize", f"{build_id}+{address:#x}", check=False)
        assert "exe_static_hot" not in done.out
        assert "believed too little" in done.err
        assert buildidfs("get", "--kind", "debuginfo", build_id, check=False).rc == 30

        # The operator's own debug file has the names again.
        buildidfs("add", program.exe.debug)
        assert "exe_static_hot" in function_at(mount, host / "hot", address)


def taken(buildidfs: BuildIdFs) -> int:
    """What the blobs and the index of a store take."""
    stats = json.loads(buildidfs("stats", "--json").out)
    return int(stats["stored_bytes"] + stats["index_bytes"])


@pytest.mark.parametrize("first", ["host", "image"])
def test_a_dwz_file_of_an_image_names_nothing_in_debuginfo_of_the_hosts(
    buildidfs: BuildIdFs, dwz_program: Program, directory: Path, first: str
) -> None:
    """The names of both are in the dwz file, of which the host has none."""
    exe, supplement = dwz_program.exe, dwz_program.supplement
    assert supplement is not None
    forged = supplement.path.read_bytes().replace(b"rounds\0", b"forged\0")
    image = directory / "image.tar"
    docker_save(image, {"hot:1": [layer([(f"app/.dwz/{supplement.name}", forged)])]})
    host = ("add", exe.shipped, exe.debug)
    for command in (host, ("scan", "image", image))[:: 1 if first == "host" else -1]:
        buildidfs(*command)
    wanted = "ptype struct work"
    with buildidfs.mounted() as mount:
        debug = mount / "debug"
        names_in = tools.gdb(wanted, debug=debug, arguments=[exe.shipped])
        assert "forged" not in names_in.text, str(names_in)
        for path in names(mount, supplement.build_id)[:-1]:
            assert not path.exists(), path
        assert not (debug / ".dwz" / supplement.name).exists()
        (variant,) = (mount / supplement.build_id / "variants").iterdir()
        assert variant.read_bytes() == forged
        buildidfs("add", supplement.path)
        names_in = tools.gdb(wanted, debug=debug, arguments=[exe.shipped])
        assert "unsigned int rounds" in names_in.out, str(names_in)


@pytest.fixture
def forged(directory: Path) -> Path:
    """A copy of the host's cat that tells more than it does, and has a script for gdb."""
    made, script = directory / "forged", directory / "script"
    script.write_bytes(b"\x04gdb.inlined-script\nimport os\n\0")
    run(
        [
            tool("objcopy"), "--add-section", f".debug_gdb_scripts={script}",
            "--add-symbol", "forged=.text:0x10,function,global", cat_program(), made,
        ],
        check=True,
    )  # fmt: skip
    assert build_id_of(made) == build_id_of(cat_program())
    return made


@pytest.mark.parametrize("first", ["host", "volume"])
def test_a_file_in_a_volume_displaces_none_of_the_hosts(
    buildidfs: BuildIdFs, directory: Path, forged: Path, first: str
) -> None:
    """A user of the host runs it there: it is root's, and tells more than the host's own."""
    build_id = build_id_of(cat_program())
    with believed(directory) as volume:
        shutil.copy2(forged, volume / "cat")
        order = [cat_program(), volume / "cat"]
        for path in order if first == "host" else reversed(order):
            with running([path]) as child:
                buildidfs.scan(child.pid)
    with buildidfs.mounted() as mount:
        assert sha256(mount / build_id / "elf") == sha256(cat_program())
        assert not (mount / build_id / "debug").exists()
        kept = (mount / build_id / "variants" / sha256(forged)).read_bytes()
    original = forged.read_bytes()
    assert len(kept) == len(original)
    assert b"gdb.inlined-script" in original
    assert b"gdb.inlined-script" not in kept
    shown = json.loads(buildidfs("show", "--json", build_id).out)["variants"]
    executables = [each for each in shown if each["kind"] == "executable"]
    assert [(each["trust"], each["standing"], each["served"]) for each in executables] == [
        ("host", "system", True), ("host", "elsewhere", False),
    ]  # fmt: skip
    assert executables[1]["quality"] == "symtab"
