# SPDX-License-Identifier: Apache-2.0
"""The source files that the debuginfo in a bundle names, as its list has them."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from buildidfs.bundle import collect
from buildidfs.catalog import source_files
from buildidfs.formats.elf import line_files, units
from buildidfs.store import Store
from buildidfs.store.bundle import BundleFile
from tests.support.clients.tools import Result, nm, run, tool
from tests.support.elf.programs import SOURCE_DIR, build_id_of
from tests.support.harness.mounts import BuildIdFs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from buildidfs.formats.bundle_archive import Manifest
    from tests.support.elf.programs import Program

_FILES = {"hot.c", "work.h"}


def compiled(directory: Path, *options: str, name: str = "program") -> Path:
    """A program of two files, one of which is in a directory below that of the compiler."""
    place = directory / "src"
    (place / "inner").mkdir(parents=True, exist_ok=True)
    (place / "inner/part.h").write_text("static inline int part(int x) { return x + 1; }\n")
    (place / "main.c").write_text(
        '#include "inner/part.h"\nint main(int argc, char **argv) { return argv ? part(argc) : 1; }'
    )
    built = directory / name
    run([tool("gcc"), "-g", *options, "-o", built, "main.c"], cwd=place, check=True)
    return built


def extracted(bundle: Path, name: str = "sources.jsonl") -> Result:
    return run([tool("tar"), "--zstd", "-xOf", bundle, name])


def listed(bundle: Path) -> list[dict[str, Any]]:
    """The list, as anybody else would read it."""
    found = extracted(bundle)
    assert found.rc == 0, str(found)
    return [json.loads(line) for line in found.out.splitlines()]


def manifest(bundle: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(extracted(bundle, "manifest.json").out)
    return value


def names(lines: list[dict[str, Any]], build_id: str, key: str = "path") -> set[str]:
    return {line[key] for line in lines if line["build_id"] == build_id and key in line}


@pytest.mark.parametrize(
    "form", ["-gdwarf-2", "-gdwarf-3", "-gdwarf-4", "-gdwarf-5", "-gz", "-gsplit-dwarf"]
)
def test_sources_of_a_program(directory: Path, buildidfs: BuildIdFs, form: str) -> None:
    program = compiled(directory, form)
    build_id = build_id_of(program)
    buildidfs("add", program)
    file = directory / "one.tar.zst"
    said = json.loads(buildidfs("bundle", build_id, "-o", file, "--json").out)
    lines = listed(file)
    src = str(directory / "src")
    assert names(lines, build_id) >= {f"{src}/main.c", f"{src}/inner/part.h"}
    assert names(lines, build_id, "directory") == {src}
    paths = [line for line in lines if "path" in line]
    assert said["sources"] == {"files": len(paths), "reason": "", "absent": []}
    about = manifest(file)["sources"]
    text = extracted(file).out.encode()
    assert (about["size"], about["files"]) == (len(text), len(paths))
    assert about["sha256"] == hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize("made", ["program", "dwz_program"])
def test_sources_of_debug_files(
    directory: Path, buildidfs: BuildIdFs, request: pytest.FixtureRequest, made: str
) -> None:
    """Which are what says it, of a program that is stripped; also where dwz has been at them."""
    program: Program = request.getfixturevalue(made)
    program.install(directory)
    buildidfs("scan", "tree", directory / "app")
    file = directory / "all.tar.zst"
    buildidfs("bundle", program.exe.build_id, "-o", file)
    lines = listed(file)
    assert names(lines, program.exe.build_id) >= {f"{SOURCE_DIR}/{name}" for name in _FILES}
    assert names(lines, program.lib.build_id) == set()


def test_names_that_are_no_text(directory: Path, buildidfs: BuildIdFs) -> None:
    odd = Path(os.fsdecode(os.fsencode(directory) + b'/a\xff"\\b'))
    program = compiled(odd)
    buildidfs("add", program)
    file = directory / "one.tar.zst"
    buildidfs("bundle", build_id_of(program), "-o", file)
    import base64

    raw = {
        key: {base64.b64decode(line[key]) for line in listed(file) if key in line}
        for key in ("path_b64", "directory_b64")
    }
    src = os.fsencode(odd / "src")
    assert raw["directory_b64"] == {src}
    assert {src + b"/main.c", src + b"/inner/part.h"} <= raw["path_b64"]


def test_names_that_a_terminal_would_obey(directory: Path, buildidfs: BuildIdFs) -> None:
    """Neither the list nor any command's JSON has them raw, and all have them."""
    odd = directory / "a\x9b31m\u202eb"
    program = compiled(odd)
    buildidfs("add", program)
    build_id = build_id_of(program)
    file = directory / "one.tar.zst"
    buildidfs("bundle", build_id, "-o", file)
    symbols = nm(program)
    (address,) = (line.split()[0] for line in symbols.splitlines() if line.endswith(" T main"))
    said = [
        extracted(file).out,
        extracted(file, "manifest.json").out,
        buildidfs("list", "--json").out,
        buildidfs("show", "--json", build_id).out,
        buildidfs("where", "--json", build_id).out,
        buildidfs("symbolize", "--json", f"{build_id}+0x{address}").out,
    ]
    for text in said:
        assert text.replace("\n", "").isprintable()
        assert "a\\u009b31m\\u202eb/" in text
    assert f"{odd}/src/main.c" in names(listed(file), build_id)


def test_the_bundle_is_what_it_was_else(directory: Path, buildidfs: BuildIdFs) -> None:
    """It is the same each time, goes on where it was cut off, and arrives elsewhere."""
    program = compiled(directory)
    build_id = build_id_of(program)
    buildidfs("add", program)
    file, again = directory / "one.tar.zst", directory / "two.tar.zst"
    words = ["bundle", program, "--include-inputs"]
    buildidfs(*words, "-o", file)
    data = file.read_bytes()
    Path(f"{again}.partial").write_bytes(data[:-10])
    Path(f"{again}.partial").chmod(0o600)
    said = json.loads(buildidfs(*words, "-o", again, "--json").out)
    assert again.read_bytes() == data
    assert said["resumed_bytes"] > 0
    (directory / "other").mkdir()
    other = BuildIdFs(directory / "other")
    other("import", file)
    copied = directory / "copied"
    other("get", build_id, "-o", copied)
    assert copied.read_bytes() == program.read_bytes()


@pytest.mark.root
@pytest.mark.fuse
def test_it_can_be_mounted(directory: Path, buildidfs: BuildIdFs) -> None:
    from tests.support.harness.mounts import is_mountpoint

    program = compiled(directory)
    buildidfs("add", program)
    file, point = directory / "one.tar.zst", directory / "point"
    buildidfs("bundle", program, "-o", file)
    point.mkdir()
    try:
        buildidfs("mount", "--bundle", file, point)
        assert (point / build_id_of(program) / "debug").read_bytes() == program.read_bytes()
        buildidfs("unmount", point)
    finally:
        if is_mountpoint(point):
            run([tool("umount"), "-l", point])


def test_a_list_with_other_bytes_is_refused(directory: Path, buildidfs: BuildIdFs) -> None:
    from buildidfs.formats import bundle_archive as bundle
    from buildidfs.store.blobs.zstd import CompressedBlob, FrameWriter

    program = compiled(directory)
    buildidfs("add", program)
    file, bad = directory / "one.tar.zst", directory / "bad.tar.zst"
    buildidfs("bundle", program, "-o", file)
    content = CompressedBlob(os.open(file, os.O_RDONLY))
    data = content.pread(content.size, 0)
    content.close()
    head, _, tail = data.rpartition(b"inner/part.h")
    with bad.open("wb") as stream:
        writer = FrameWriter(stream.fileno())
        writer.write(head + b"inner/else.h" + tail)
        writer.finish()
    (directory / "other").mkdir()
    done = BuildIdFs(directory / "other")("import", bad, check=False)
    assert (done.rc, "source list" in done.err) == (20, True), str(done)
    # Cut off within it, with a table that is whole.
    with bad.open("wb") as stream:
        writer = FrameWriter(stream.fileno())
        writer.write(data[: data.rindex(b"inner/part.h") // bundle.BLOCK * bundle.BLOCK])
        writer.finish()
    done = BuildIdFs(directory / "other")("import", bad, check=False)
    assert (done.rc, "cut off" in done.err) == (20, True), str(done)


# --- where there is none ------------------------------------------------------------------------


def bundled(
    buildidfs: BuildIdFs, file: Path, *words: str | Path, env: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is said of the list, and what the manifest has of it."""
    said = json.loads(buildidfs("bundle", *words, "-o", file, "--json", env=env).out)
    return said["sources"], manifest(file)["sources"]


def test_list_needs_no_installed_program(directory: Path, buildidfs: BuildIdFs) -> None:
    program = compiled(directory)
    buildidfs("add", program)
    file = directory / "one.tar.zst"
    environment = {**os.environ, "PATH": str(directory / "empty")}
    said, _ = bundled(buildidfs, file, program, env=environment)
    assert (said["reason"], said["absent"]) == ("", [])
    assert f"{directory}/src/main.c" in names(listed(file), build_id_of(program))


def test_where_there_is_nothing_to_list(directory: Path, buildidfs: BuildIdFs) -> None:
    program = compiled(directory)
    plain = directory / "plain"
    run([tool("objcopy"), "--strip-all", program, plain], check=True)
    buildidfs("add", plain)
    assert bundled(buildidfs, directory / "a", plain)[1] == {"why": collect.NO_DEBUGINFO}
    buildidfs("add", program)
    assert bundled(buildidfs, directory / "a", "--no-sources", program)[1] == {
        "why": collect.NOT_WANTED
    }


def test_of_a_file_that_is_damaged(directory: Path, buildidfs: BuildIdFs) -> None:
    """It costs its own sources, and no others."""
    program, hostile = compiled(directory), compiled(directory, "-O1", name="hostile")
    noise = directory / "noise"
    noise.write_bytes(random.Random(3).randbytes(5000))
    for section in (".debug_info", ".debug_line", ".debug_abbrev"):
        run([tool("objcopy"), f"--update-section={section}={noise}", hostile], check=True)
    buildidfs("add", program, hostile)
    good, bad = build_id_of(program), build_id_of(hostile)
    assert good != bad
    said, _ = bundled(buildidfs, directory / "a", bad, good)
    src = directory / "src"
    assert {f"{src}/main.c", f"{src}/inner/part.h"} <= names(listed(directory / "a"), good)
    assert {each["build_id"] for each in said["absent"]} <= {bad}


def made(directory: Path, program: Path) -> Manifest:
    from buildidfs.model import BuildId

    store_path = directory / "store"
    BuildIdFs(directory)("add", program)
    with Store.open(store_path) as store:
        build_id = BuildId.from_hex(build_id_of(program))
        result, _ = collect.create(store, {build_id: b""}, [], os.fspath(directory / "made"))
    with BundleFile(directory / "made") as file:
        assert file.manifest == result
        file.check_sources()
    return result


@pytest.mark.parametrize("form", ["zlib", "zstd"])
def test_sections_too_large_to_inflate_in_memory(
    directory: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    program = compiled(directory, "-gdwarf-4")
    run([tool("objcopy"), f"--compress-debug-sections={form}", program], check=True)
    monkeypatch.setattr(units, "SECTION_MAX", 20)
    monkeypatch.setattr(source_files, "SECTION_MAX", 20)
    about = made(directory, program).sources
    assert about is not None
    assert about.absent == ()
    lines = listed(directory / "made")
    build_id, src = build_id_of(program), str(directory / "src")
    assert names(lines, build_id) >= {f"{src}/main.c", f"{src}/inner/part.h"}
    assert names(lines, build_id, "directory") == {src}


@pytest.mark.parametrize(
    ("limits", "files", "why"),
    [
        ({(line_files, "_FILES_MAX"): 1}, 1, collect.PARTIAL),
        ({(line_files, "_BYTES_MAX"): 5}, 0, collect.PARTIAL),
        ({(line_files, "_DIRECTORIES_MAX"): 0}, 2, collect.PARTIAL),
        ({(collect, "_LIST_BYTES"): 10}, 0, collect.TOO_MUCH),
        ({(collect, "_SECONDS"): -1.0}, 0, collect.TOO_LATE),
    ],
)
def test_incomplete_list_gives_its_reason(
    directory: Path, monkeypatch: pytest.MonkeyPatch,
    limits: dict[tuple[ModuleType, str], float], files: int, why: str,
) -> None:  # fmt: skip
    program = compiled(directory)
    for (module, name), value in limits.items():
        monkeypatch.setattr(module, name, value)
    about = made(directory, program).sources
    assert about is not None
    assert about.files == pytest.approx(files, abs=1 if files > 1 else 0)
    assert [each.why for each in about.absent] == [why]
