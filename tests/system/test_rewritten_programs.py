# SPDX-License-Identifier: Apache-2.0
"""Programs with one build ID whose code is at other offsets: each profile names its own program.

The right name is that of perf with the program still at its path.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from buildidfs.config import RemoteSettings
from buildidfs.fleet.push import Pusher, PushOptions
from buildidfs.store import Store
from buildidfs.store.placement import NOT_AS_MAPPED, OFFSETS_DIFFER
from tests.support.clients.tools import perf_record, perf_report, perf_tool, run
from tests.support.elf import rewritten
from tests.support.elf.programs import Binary, build_id_of
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until
from tests.support.servers.objectstorage import object_storage
from tests.system.test_symbolize import filtered

pytestmark = [pytest.mark.client, pytest.mark.root]

_ROUNDS = "150000000"
_LEAF = re.compile(r"^\s+[\d.]+%\s+\S+\s+(?:prog\S*)\s+\[\.\] (\S+)", re.MULTILINE)

_PATCHELF = rewritten.patchelf(*rewritten.LONGER)
_KINDS = {
    "patchelf-original-first": (["-no-pie"], _PATCHELF, 1),
    "patchelf-rewritten-first": (["-pie"], _PATCHELF, -1),
    "moved-original-first": (["-pie"], rewritten.moved_in_file(3), 1),
    "section-rewritten-first": (["-pie"], rewritten.with_section, -1),
}


def _leaf(text: str) -> str:
    """The function with the most samples in the program."""
    found = _LEAF.search(text)
    return found[1] if found else ""


def _recorded(app: Path, file: Path, data: Path) -> None:
    """Deploy a file as ``app``, and profile it."""
    app.unlink(missing_ok=True)
    shutil.copy2(file, app)
    assert perf_record(data, [app, _ROUNDS], "-N").rc == 0


@pytest.mark.parametrize("kind", _KINDS)
def test_profile_has_the_names_of_the_program_that_ran(scratch: Path, kind: str) -> None:
    directory = scratch / kind
    directory.mkdir()
    options, rewrite, step = _KINDS[kind]
    old, new = rewritten.pair(directory, options, rewrite)
    assert build_id_of(old) == build_id_of(new)
    app, store = directory / "prog", BuildIdFs(directory)
    profiles = []
    for number, file in enumerate([old, new][::step]):
        data = directory / f"{number}.data"
        _recorded(app, file, data)
        native = run([perf_tool(), "--buildid-dir", directory / "none", "report", "--stdio",
                      "-i", data]).out  # fmt: skip
        assert _leaf(native) == rewritten.HOT
        store("add", app)
        profiles.append(data)
    app.unlink()
    with store.mounted() as mount:
        for data in profiles:
            unrepaired = _leaf(perf_report(mount, data).out)
            assert unrepaired.startswith("0x") or unrepaired == rewritten.HOT
            fixed = data.with_suffix(".fixed")
            store("repair", data, "-o", fixed)
            assert _leaf(perf_report(mount, fixed).out) == rewritten.HOT
            options = ["--show-mmap-events", "--show-task-events", "-i", data]
            text = run([perf_tool(), "script", *options]).out
            assert "[unknown]" in text
            named = filtered(store, text).stdout
            assert f"{rewritten.HOT}+0x" in named
            assert "_filler" not in named


def test_file_that_was_never_captured_is_reported(scratch: Path) -> None:
    """The store has the original, and what was mapped has its code at other offsets."""
    directory = scratch / "unseen"
    directory.mkdir()
    old, new = rewritten.pair(directory, ["-no-pie"], _PATCHELF)
    app, store, data = directory / "prog", BuildIdFs(directory), directory / "data"
    shutil.copy2(old, app)
    store("add", app)
    _recorded(app, new, data)
    found = store("coverage", data).out
    assert re.search(rf"missing\t{build_id_of(old)}\t-\t{app}\t{NOT_AS_MAPPED}", found), found
    assert NOT_AS_MAPPED in store("why", data).out
    fixed = directory / "fixed"
    repaired = store("repair", data, "-o", fixed, check=False)
    assert (repaired.rc, NOT_AS_MAPPED in repaired.err, "--assign" in repaired.err) == (
        3,
        True,
        False,
    )
    assert store("scan", "perf-data", data).rc == 0
    assert NOT_AS_MAPPED not in store("coverage", data).out


def test_address_of_two_programs_has_no_name(scratch: Path) -> None:
    """Tools such as prelink move all code in memory, and leave it where it is in the file."""
    directory = scratch / "prelinked"
    directory.mkdir()
    low = rewritten.build(directory, "-no-pie")
    high = rewritten.build(
        directory, "-no-pie", "-Wl,-Ttext-segment=0x401000", build_id=build_id_of(low)
    )
    store = BuildIdFs(directory)
    store("add", low, high)
    address, build_id = Binary(low, low, low, "").address(rewritten.HOT), build_id_of(low)
    moved = store("symbolize", f"{build_id}+{address:#x}", check=False)
    assert (moved.rc, "loaded at different addresses" in moved.err) == (30, True)
    offset = address - 0x400000
    assert rewritten.HOT in store("symbolize", "--file-offset", f"{build_id}+{offset:#x}").out


def test_debug_file_belongs_to_both_programs(scratch: Path) -> None:
    """Both are stripped, so only the debug file has the names."""
    directory = scratch / "debug"
    directory.mkdir()
    full = rewritten.build(directory, "-g", "-no-pie")
    old, new, debug = (directory / name for name in ("old", "new", "debug"))
    rewritten.objcopy("--only-keep-debug")(full, debug)
    rewritten.objcopy("-S")(full, old)
    rewritten.patchelf(*rewritten.LONGER)(old, new)
    app, store = directory / "prog", BuildIdFs(directory)
    store("add", debug)
    profiles = [directory / "0.data", directory / "1.data"]
    for data, file in zip(profiles, (old, new), strict=True):
        _recorded(app, file, data)
        store("add", app)
    app.unlink()
    with store.mounted() as mount:
        for data in profiles:
            fixed = data.with_suffix(".fixed")
            store("repair", data, "-o", fixed)
            assert _leaf(perf_report(mount, fixed).out) == rewritten.HOT


@pytest.mark.fuse
@pytest.mark.parametrize("kind", ["patchelf-original-first", "moved-original-first"])
def test_host_that_has_the_bucket_only(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Two hosts have pushed one file of the build ID each; a third one has neither of them."""
    directory = scratch / f"bucket-{kind}"
    directory.mkdir()
    options, rewrite, _ = _KINDS[kind]
    old, new = rewritten.pair(directory, options, rewrite)
    build_id = build_id_of(old)
    app, profiles = directory / "prog", []
    with object_storage("fleet") as server:
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        for number, file in enumerate((old, new)):
            profiles.append(directory / f"{number}.data")
            _recorded(app, file, profiles[-1])
            (directory / str(number)).mkdir()
            host = BuildIdFs(directory / str(number))
            host("add", app)
            _push(host)
        app.unlink()
        settings = directory / "remote.toml"
        settings.write_text('[remote]\nurl = "s3://fleet"\ntrust = "package"\nrefresh = 1\n')
        third = BuildIdFs(directory, config=settings)
        Store.create(third.store).close()
        with third.mounted() as mount:
            for data in profiles:
                unrepaired = _leaf(perf_report(mount, data).out)
                assert unrepaired.startswith("0x") or unrepaired == rewritten.HOT
            assert (mount / build_id / "elf").read_bytes() == old.read_bytes()
            until(lambda: _variants(third) == {build_id}, "both files in the store")
            for data in profiles:
                fixed = data.with_suffix(".fixed")
                third("repair", data, "-o", fixed)
                assert _leaf(perf_report(mount, fixed).out) == rewritten.HOT
                assert NOT_AS_MAPPED not in third("why", data, check=False).out
    asked = third("symbolize", "--file-offset", f"{build_id}+0x1139", check=False)
    assert (asked.rc, OFFSETS_DIFFER in asked.err) == (30, True) or "_" in asked.out
    assert build_id in third("show", build_id).out


def _push(host: BuildIdFs) -> None:
    with (
        Store.open(host.store) as store,
        Pusher(store, RemoteSettings(url="s3://fleet"), PushOptions(patience_s=0)) as pusher,
    ):
        assert pusher.run().failed == []


def _variants(host: BuildIdFs) -> set[str]:
    """The build IDs with files that differ in the offsets of their code."""
    done = host("list", "--conflicts", "--json", check=False)
    return {json.loads(line)["build_id"] for line in done.out.splitlines()}
