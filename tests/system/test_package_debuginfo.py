# SPDX-License-Identifier: Apache-2.0
"""Debug information in packages that is not in one file: moved to another by dwz, or split."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.support.clients import tools
from tests.support.clients.tools import Argument, run, tool
from tests.support.containers import images, packages
from tests.support.elf import debugforms
from tests.support.elf.programs import build_id_of

if TYPE_CHECKING:
    from tests.support.harness.mounts import BuildIdFs

# What both programs have: enough of it, or dwz leaves it where it is.
_HEADER = """\
struct settled { unsigned long first_token_TOKEN; double second_one, third_one; };
struct shared_TOKEN {
    struct settled settled[3];
    struct shared_TOKEN *previous_of_them, *next_of_them;
    const char *described_as;
};
"""
_SOURCE = """\
#include "shared.h"
struct only_in_NAME { struct shared_TOKEN shared; long number_of_NAME; } NAME;
int main(int argc, char **argv) { NAME.number_of_NAME = argc; return argv == 0; }
"""
_MULTIARCH = "x86_64-linux-gnu"


class Packed(NamedTuple):
    """Two programs of one package: as they are installed, and what both have to do with dwz."""

    root: Path
    programs: tuple[Path, Path]
    common: Path
    token: str

    @property
    def build_ids(self) -> list[str]:
        """Of both programs, in their order."""
        return [build_id_of(path) for path in self.programs]


def debug_path(root: Path, build_id: str) -> Path:
    return root / f"usr/lib/debug/.build-id/{build_id[:2]}/{build_id[2:]}.debug"


@pytest.fixture(scope="module", params=["-gdwarf-4", "-gdwarf-5"])
def packed(scratch: Path, request: pytest.FixtureRequest) -> Packed:
    """Laid out as dh_strip and dh_dwz of Debian do."""
    token = uuid.uuid4().hex
    build, root = scratch / f"dwz{request.param}", scratch / f"dwz-root{request.param}"
    build.mkdir()
    (root / "usr/bin").mkdir(parents=True)
    (build / "shared.h").write_text(_HEADER.replace("TOKEN", token))
    debug_files: list[Argument] = []
    for name in ("first", "second"):
        source = build / f"{name}.c"
        source.write_text(_SOURCE.replace("NAME", name).replace("TOKEN", token))
        built, shipped = build / name, root / "usr/bin" / name
        options: list[Argument] = ["-g", request.param, "-Wl,--build-id", "-o", built, source]
        run([tool("gcc"), *options], check=True)
        debug = debug_path(root, build_id_of(built))
        debug.parent.mkdir(parents=True, exist_ok=True)
        run([tool("objcopy"), "--only-keep-debug", built, debug], check=True)
        run([tool("objcopy"), "--strip-all", built, shipped], check=True)
        debug_files.append(debug)
    common = root / f"usr/lib/debug/.dwz/{_MULTIARCH}/hot.debug"
    common.parent.mkdir(parents=True)
    spoken_of = f"/usr/lib/debug/.dwz/{_MULTIARCH}/hot.debug"
    run([tool("dwz"), "-m", common, "-M", spoken_of, *debug_files], check=True)
    found = Packed(root, (root / "usr/bin/first", root / "usr/bin/second"), common, token)
    for path in debug_files:
        assert "gnu_debugaltlink" in run([tool("readelf"), "-SW", path]).out
    return found


def scanned(buildidfs: BuildIdFs, root: Path, directory: Path) -> dict[str, object]:
    """The summary of a scan of the package that a directory becomes."""
    directory.mkdir()
    done = buildidfs("scan", "package", "--json", packages.deb(root, directory))
    summary: dict[str, object] = json.loads(done.out)
    return summary


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.client
@pytest.mark.parametrize("apart", [False, True])
def test_types_that_two_programs_share(
    packed: Packed, buildidfs: BuildIdFs, tmp_path: Path, *, apart: bool
) -> None:
    """gdb finds them by the link in either debug file, from one package or from a -dbgsym one."""
    roots = [packed.root]
    if apart:
        roots = [tmp_path / "programs", tmp_path / "dbgsym"]
        for root, part in zip(roots, ("usr/bin", "usr/lib/debug"), strict=True):
            shutil.copytree(packed.root / part, root / part)
    captured = [scanned(buildidfs, root, tmp_path / f"{n}") for n, root in enumerate(roots)]
    assert [each["captured"] for each in captured] == ([2, 3] if apart else [5])
    with buildidfs.mounted() as mount:
        link = mount / f"debug/.dwz/{_MULTIARCH}/hot.debug"
        assert link.read_bytes() == packed.common.read_bytes()
        for program, build_id in zip(packed.programs, packed.build_ids, strict=True):
            copied = tmp_path / f"copy-of-{program.name}"
            shutil.copyfile(program, copied)
            debug = (mount / build_id / "debug").read_bytes()
            assert debug == debug_path(packed.root, build_id).read_bytes()
            found = tools.gdb(
                f"ptype struct shared_{packed.token}", f"ptype struct only_in_{program.name}",
                debug=mount / "debug", arguments=[copied],
            )  # fmt: skip
            assert "struct settled settled[3];" in found.out, str(found)
            assert f"long number_of_{program.name};" in found.out, str(found)
            assert "gnu_debugaltlink" not in found.text, str(found)


def test_what_is_missing_without_the_common_file(
    packed: Packed, buildidfs: BuildIdFs, tmp_path: Path
) -> None:
    """What the one above finds is nowhere else; `show` names it until it is there."""
    lacking, rest = tmp_path / "lacking", tmp_path / "rest"
    shutil.copytree(packed.root, lacking)
    shutil.rmtree(lacking / "usr/lib/debug/.dwz")
    shutil.copytree(packed.root / "usr/lib/debug/.dwz", rest / "usr/lib/debug/.dwz")
    scanned(buildidfs, lacking, tmp_path / "0")
    wanted = f"dwz file {build_id_of(packed.common)}, /usr/lib/debug/.dwz/{_MULTIARCH}/hot.debug"

    def missing(build_id: str) -> list[str]:
        found: list[str] = json.loads(buildidfs("show", "--json", build_id).out)["missing"]
        return found

    assert all(wanted in missing(build_id) for build_id in packed.build_ids)
    for build_id in packed.build_ids:
        dies = run([tool("readelf"), "--debug-dump=info", debug_path(lacking, build_id)]).out
        assert not re.search(rf"DW_AT_name .*: (shared_{packed.token}|settled)$", dies, re.M)
    scanned(buildidfs, rest, tmp_path / "1")
    assert [missing(build_id) for build_id in packed.build_ids] == [[], []]


# --- split DWARF ---------------------------------------------------------------------------------


def split_library(root: Path, build: Path, version: int = 4) -> tuple[Path, Path]:
    """A library in a package, and the .dwo file of it, where the library says that it is."""
    place = "/usr/lib/debug/.dwo"
    full = debugforms.library(
        build, f"-gdwarf-{version}", "-gsplit-dwarf", f"-fdebug-prefix-map={build}={place}"
    )
    installed = root / "usr/lib" / full.name
    installed.parent.mkdir(parents=True)
    shutil.copy2(full, installed)
    (written,) = build.glob("*.dwo")
    (root / place[1:]).mkdir(parents=True)
    return installed, Path(shutil.copy2(written, root / place[1:]))


def packed_as(kind: str, root: Path, out: Path) -> tuple[str, Path]:
    """How to scan for what is in a directory, and its path as a package or image."""
    out.mkdir()
    if kind != "image":
        return "package", packages.PACKERS[kind](root, out)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    layer = images.layer([(str(path.relative_to(root)), path.read_bytes()) for path in files])
    return "image", images.docker_save(out / "image.tar", {"hot:1": [layer]})


@pytest.mark.parametrize("version", [4, 5])
def test_dwo_files_are_told_of_by_their_owner(
    buildidfs: BuildIdFs, tmp_path: Path, version: int
) -> None:
    root = tmp_path / "root"
    library, written = split_library(root, tmp_path / "build", version)
    summary = scanned(buildidfs, root, tmp_path / "0")
    assert (summary["files"], summary["captured"], summary["unreadable"]) == (2, 1, [])
    assert summary["absent"] == {"ELF file without a build ID": 1}
    shown = json.loads(buildidfs("show", "--json", build_id_of(library)).out)
    path = f"/{written.relative_to(root)}"
    assert shown["split_dwarf"] == {"units": 1, "files": [path], "package": None}
    assert any(path in text and ".dwp" in text for text in shown["missing"])


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.client
@pytest.mark.parametrize("kind", ["deb-xz", "rpm-zstd", "image"])
def test_a_dwp_file_is_kept_with_its_owner(buildidfs: BuildIdFs, tmp_path: Path, kind: str) -> None:
    root, build = tmp_path / "root", tmp_path / "build"
    library, written = split_library(root, build)
    written.unlink()
    # dwp goes by the names that the library has of its files, which are not there.
    (dwo,) = build.glob("*.dwo")
    package = library.with_name(f"{library.name}.dwp")
    run([tool("dwp"), dwo, "-o", package], check=True)
    scan, file = packed_as(kind, root, tmp_path / "0")
    summary = json.loads(buildidfs("scan", scan, "--json", file).out)
    assert (summary["files"], summary["captured"]) == (2, 2)
    build_id = build_id_of(library)
    shown = json.loads(buildidfs("show", "--json", build_id).out)
    assert shown["split_dwarf"]["package"] is not None
    again = json.loads(buildidfs("scan", scan, "--again", "--json", file).out)
    assert (again["captured"], again["held"], again["absent"]) == (0, 2, {})
    stripped = tmp_path / library.name
    run([tool("objcopy"), "--strip-all", library, stripped], check=True)
    with buildidfs.mounted() as mount:
        assert (mount / build_id / "elf.dwp").read_bytes() == package.read_bytes()
        found = tools.gdb("ptype struct part", debug=mount / "debug", arguments=[stripped])
        assert "char *name;" in found.out, str(found)
