# SPDX-License-Identifier: Apache-2.0
"""Fetching from real servers: the debuginfod of elfutils, another buildidfs, and directories."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.clients.commands import ROOT
from tests.support.clients.tools import run, tool
from tests.support.elf import programs
from tests.support.elf.elfwriter import DWARF, TEXT_SPLIT, Section, elf_file
from tests.support.filesystems.smallfs import small_filesystem
from tests.support.harness.mounts import COMMAND, BuildIdFs
from tests.support.harness.waiting import until
from tests.support.servers.serving import free_port, serving
from tests.support.servers.upstreams import Handler, debuginfod, serving_files, upstream

if TYPE_CHECKING:
    from tests.support.elf.programs import Program

pytestmark = [pytest.mark.root, pytest.mark.client]


@pytest.fixture
def here(directory: Path, stripped: Path, program: Program) -> BuildIdFs:
    """A store with the stripped program alone."""
    buildidfs = BuildIdFs(directory)
    buildidfs("scan", "tree", stripped.parents[2])
    missing = buildidfs("get", "--kind", "debuginfo", program.exe.build_id, check=False)
    assert missing.rc == 30
    return buildidfs


def configured(directory: Path, *urls: str, **more: object) -> list[str | Path]:
    """The options for a configuration with these upstreams."""
    lines = ["[upstream]", f"urls = {json.dumps(urls)}"]
    lines += [f"{name.replace('_', '-')} = {json.dumps(value)}" for name, value in more.items()]
    path = directory / "upstream.toml"
    path.write_text("\n".join(lines) + "\n")
    return ["--config", path]


def debug_of(buildidfs: BuildIdFs, build_id: str) -> bytes:
    out = buildidfs.store.parent / "got.debug"
    buildidfs("get", "--kind", "debuginfo", build_id, "-o", out)
    return out.read_bytes()


def test_debuginfod_of_elfutils_is_an_upstream(
    here: BuildIdFs, directory: Path, program: Program
) -> None:
    files = directory / "files"
    files.mkdir()
    for binary in program.binaries:
        shutil.copy2(binary.debug, files)
    options = {"port": free_port(), "cache": directory / "cache"}
    with debuginfod(directory, files, **options) as url:  # type: ignore[arg-type]  # both fit
        ids = [binary.build_id for binary in program.binaries]
        done = here(*configured(directory, url), "fetch", "--json", *ids)
    summary = json.loads(done.out)
    assert (summary["fetched"], summary["held"]) == (2, 2)
    for binary in program.binaries:
        assert debug_of(here, binary.build_id) == binary.debug.read_bytes()
    assert here("check").rc == 0


def test_another_buildidfs_is_an_upstream(
    here: BuildIdFs, directory: Path, program: Program
) -> None:
    other = BuildIdFs(directory / "other", directory / "other-store")
    other("add", *(binary.compiled for binary in program.binaries))
    with serving(other.store) as server:
        done = here("fetch", program.exe.build_id, env={"DEBUGINFOD_URLS": server.url})
    assert done.out.startswith("1 file fetched")
    assert debug_of(here, program.exe.build_id) == program.exe.compiled.read_bytes()


def test_fetch_for_a_core_gets_what_it_lacks_and_no_more(
    here: BuildIdFs, directory: Path, stripped: Path, program: Program
) -> None:
    with programs.running(stripped, "stuck") as pid:
        run([tool("gcore", "gdb"), "-o", directory / "core", str(pid)], check=True)
    core = directory / f"core.{pid}"
    files = {
        f"{binary.build_id}/debuginfo": binary.debug.read_bytes() for binary in program.binaries
    }
    with upstream(serving_files(files)) as server:
        options = configured(directory, server.url)
        done = here(*options, "fetch", "--for", core, "--json", check=False)
        asked = {path.removeprefix("/buildid/") for path in server.requests}
        summary = json.loads(done.out)
        # That of the C library is on no server here, nor is its debuginfo.
        assert done.rc == 3
        assert {each["build_id"] for each in summary["files"] if each["state"] == "fetched"} == {
            binary.build_id for binary in program.binaries
        }
        assert not {f"{binary.build_id}/executable" for binary in program.binaries} & asked
        again = json.loads(here(*options, "fetch", "--for", core, "--json", check=False).out)
        assert again["fetched"] == 0
        assert sum(server.requests.values()) == len(asked), "absences are remembered"


def test_fetch_for_a_profile(
    here: BuildIdFs, directory: Path, stripped: Path, program: Program
) -> None:
    profile = directory / "perf.data"
    with programs.running(stripped, "spin") as pid:
        tools.perf_record(profile, [tool("sleep"), "1"], "-p", str(pid))
    files = {
        f"{binary.build_id}/debuginfo": binary.debug.read_bytes() for binary in program.binaries
    }
    with upstream(serving_files(files)) as server:
        done = here(
            *configured(directory, server.url), "fetch", "--for", profile, "--json", check=False
        )
        files_of = json.loads(done.out)["files"]
        fetched = {each["build_id"] for each in files_of if each["state"] == "fetched"}
        assert fetched == {each.build_id for each in program.binaries}
        again = here(
            *configured(directory, server.url), "fetch", "--for", profile, "--json", check=False
        )
    assert not fetched & {each["build_id"] for each in json.loads(again.out)["files"]}


def test_exit_statuses(here: BuildIdFs, directory: Path, program: Program) -> None:
    build_id = program.exe.build_id
    assert here("fetch", build_id, check=False, env={"DEBUGINFOD_URLS": ""}).rc == 2
    assert here(*configured(directory, "nonsense"), "fetch", build_id, check=False).rc == 2
    with upstream(serving_files({})) as server:
        options = configured(directory, server.url)
        nowhere = here(*options, "fetch", "--kind", "debuginfo", build_id, check=False)
        assert (nowhere.rc, "no server has it" in nowhere.err) == (30, True)
        assert here(*options, "fetch", build_id, check=False).rc == 3, "the executable is held"
    closed = configured(directory, f"http://127.0.0.1:{free_port()}")
    failed = here(*closed, "fetch", "--kind", "debuginfo", build_id, check=False)
    assert (failed.rc, "Connection refused" in failed.err) == (50, True)
    assert here(*closed, "fetch", "--for", "/bin/true", check=False).rc == 2


def test_config_shows_the_keys(here: BuildIdFs, directory: Path) -> None:
    rows = here(*configured(directory, "http://host", timeout=3), "config", "--json").out
    shown = {row["key"]: row for row in map(json.loads, rows.splitlines())}
    assert shown["upstream.urls"]["value"] == ["http://host"]
    assert shown["upstream.timeout"]["source"].startswith("file ")
    assert shown["upstream.wait"]["source"] == "default"


def test_file_that_the_disk_has_no_room_for(directory: Path) -> None:
    build_id = "a7" * 20
    large = elf_file(
        [TEXT_SPLIT, Section(b".debug_info", bytes(24 << 20))], build_id=bytes.fromhex(build_id)
    )
    small = elf_file([TEXT_SPLIT, DWARF], build_id=bytes.fromhex("a8" * 20))
    files = {f"{build_id}/debuginfo": large, f"{'a8' * 20}/debuginfo": small}
    with small_filesystem(directory, "ext4", 32 << 20) as point:
        buildidfs = BuildIdFs(directory, point / "store")
        with upstream(serving_files(files)) as server:
            options = configured(directory, server.url)
            words = ["fetch", "--kind", "debuginfo", build_id, "a8" * 20]
            done = buildidfs(*options, *words, check=False)
        assert (done.rc, "or a full disk" in done.err) == (3, True), done.err
        assert "1 file fetched" in done.out
        assert buildidfs("check").rc == 0


def test_fetch_that_is_killed_leaves_nothing(directory: Path) -> None:
    build_id = "a9" * 20
    data = elf_file([TEXT_SPLIT, DWARF], build_id=bytes.fromhex(build_id))

    def half(handler: Handler) -> None:
        handler.send(data[:100], X_DEBUGINFOD_SIZE=str(len(data)), Content_Length=str(len(data)))
        handler.hang()

    buildidfs = BuildIdFs(directory)
    buildidfs("add", "/bin/true")
    with upstream(half) as server:
        options = configured(directory, server.url, timeout=60)
        words = [*COMMAND, *options, "--store", buildidfs.store, "fetch", build_id]
        with subprocess.Popen(words, cwd=ROOT) as process:
            until(lambda: server.requests, "a request")
            process.kill()
        server.behaviour = serving_files({f"{build_id}/debuginfo": data})
        again = buildidfs(*options, "fetch", "--kind", "debuginfo", build_id)
    assert again.out.startswith("1 file fetched")
    assert {path.name for path in (buildidfs.store / "upstream").iterdir()} == {"absent", "lock"}
    assert buildidfs("check").rc == 0
