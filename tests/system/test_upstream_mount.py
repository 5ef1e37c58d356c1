# SPDX-License-Identifier: Apache-2.0
"""``mount --fetch``: debuginfo that comes when it is opened, from servers that may hang."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.model import BuildId, Kind
from buildidfs.store import Store
from tests.support.clients import tools
from tests.support.clients.tools import run, tool
from tests.support.elf import programs
from tests.support.elf.elfwriter import DWARF, TEXT, TEXT_SPLIT, elf_file
from tests.support.elf.programs import line_of
from tests.support.harness.captures import capture
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until
from tests.support.servers.upstreams import Handler, serving_files, upstream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.elf.programs import Program
    from tests.support.servers.upstreams import Upstream

pytestmark = [pytest.mark.root, pytest.mark.fuse]

LIBRARIES = 300
IDS = [BuildId(b"\xb7" + number.to_bytes(19, "big")) for number in range(LIBRARIES)]
ID = IDS[0]
DEBUG = {each: elf_file([TEXT_SPLIT, DWARF], build_id=each) for each in IDS}
WAIT_S = 2.0
PATIENCE_S = 30


@pytest.fixture
def buildidfs(directory: Path) -> BuildIdFs:
    """A store with programs and without debuginfo."""
    with Store.create(directory / "store") as store:
        store.commit([capture(store, elf_file([TEXT], build_id=each), each) for each in IDS])
    return BuildIdFs(directory)


def test_missing_store_is_made_if_its_files_can_come_from_a_server(directory: Path) -> None:
    buildidfs = BuildIdFs(directory, store=directory / "none-yet")
    point = directory / "mnt"
    point.mkdir()
    elsewhere = {"DEBUGINFOD_URLS": f"file://{directory}"}
    assert buildidfs("mount", point, check=False, env=elsewhere).rc == 11
    assert buildidfs("mount", "--fetch", point / "x", check=False, env=elsewhere).rc == 40
    assert not buildidfs.store.exists(), "a failure leaves no empty store"
    buildidfs("mount", "--fetch", point, env=elsewhere)
    assert (point / "README").exists() or list(point.iterdir())
    buildidfs("unmount", point)
    assert buildidfs("list").out == ""


@contextlib.contextmanager
def mounted(buildidfs: BuildIdFs, server: Upstream, **more: object) -> Iterator[Path]:
    """A mount of the store that fetches from a server."""
    options = {"wait": PATIENCE_S, "timeout": 2 * PATIENCE_S} | more
    lines = [f'[upstream]\nurls = ["{server.url}"]']
    lines += [f"{name.replace('_', '-')} = {value}" for name, value in options.items()]
    path = buildidfs.store.parent / "upstream.toml"
    path.write_text("\n".join(lines) + "\n")
    with buildidfs.mounted("--fetch", "--config", str(path)) as mountpoint:
        yield mountpoint


def links(mountpoint: Path) -> list[Path]:
    """The names by which gdb looks for the debuginfo of all programs."""
    root = mountpoint / "debug/.build-id"
    return [root / each.hex()[:2] / f"{each.hex()[2:]}.debug" for each in IDS]


def files(*ids: BuildId) -> dict[str, bytes]:
    return {f"{each}/debuginfo": DEBUG[each] for each in ids}


def opened(path: Path) -> int:
    """The errno of an attempt to read a file, 0 if it can be read."""
    try:
        path.read_bytes()
    except OSError as error:
        return error.errno or -1
    return 0


def test_debuginfo_comes_when_it_is_opened(buildidfs: BuildIdFs) -> None:
    with upstream(serving_files(files(*IDS))) as server, mounted(buildidfs, server) as mountpoint:
        for name in (mountpoint / str(ID) / "debug", links(mountpoint)[1]):
            assert name.stat().st_size == 0
        assert set(os.listdir(mountpoint / str(ID))).isdisjoint({"debug", "debuginfo"})
        run([tool("ls"), "-lR", mountpoint / "debug", mountpoint / str(ID)], check=True)
        assert not server.requests, "neither stat nor ls fetches"
        assert (mountpoint / str(ID) / "debug").read_bytes() == DEBUG[ID]
        assert links(mountpoint)[1].read_bytes() == DEBUG[IDS[1]]
        assert (mountpoint / str(ID) / "debug").stat().st_size == len(DEBUG[ID])
        assert "debug" in os.listdir(mountpoint / str(ID))
        assert sum(server.requests.values()) == 2
    assert buildidfs("check").rc == 0


def test_other_users_fetch_and_read(buildidfs: BuildIdFs) -> None:
    with upstream(serving_files(files(*IDS))) as server, mounted(buildidfs, server) as mountpoint:
        words = [tool("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups"]
        done = run([*words, tool("sha256sum"), mountpoint / str(ID) / "debug"], check=True)
        import hashlib

        assert done.out.split()[0] == hashlib.sha256(DEBUG[ID]).hexdigest()


def test_mount_without_the_option_asks_no_server(buildidfs: BuildIdFs) -> None:
    with upstream(serving_files(files(*IDS))) as server:
        path = buildidfs.store.parent / "upstream.toml"
        path.write_text(f'[upstream]\nurls = ["{server.url}"]\n')
        with buildidfs.mounted("--config", str(path)) as mountpoint:
            assert opened(mountpoint / str(ID) / "debug") == errno.ENOENT
    assert not server.requests


def test_absence_is_a_name_that_is_not_there(buildidfs: BuildIdFs) -> None:
    with upstream(serving_files({})) as server, mounted(buildidfs, server) as mountpoint:
        name = mountpoint / str(ID) / "debug"
        assert opened(name) == errno.ENOENT
        assert not name.exists()
        assert opened(links(mountpoint)[0]) == errno.ENOENT
        assert sum(server.requests.values()) == 1
        with Store.open(buildidfs.store) as store:
            store.commit([capture(store, DEBUG[ID], ID, kinds=(Kind.DEBUGINFO,))])
        assert name.read_bytes() == DEBUG[ID], "a capture counts at once"
        assert links(mountpoint)[0].read_bytes() == DEBUG[ID]


def test_file_that_comes_late_is_there_later(buildidfs: BuildIdFs) -> None:
    go_on = threading.Event()

    def slow(handler: Handler) -> None:
        go_on.wait(60)
        handler.send(DEBUG[ID])

    with upstream(slow) as server, mounted(buildidfs, server, wait=0.2) as mountpoint:
        name = mountpoint / str(ID) / "debug"
        assert opened(name) == errno.ENOENT
        go_on.set()
        until(lambda: opened(name) == 0, "the file")
        assert name.read_bytes() == DEBUG[ID]


@pytest.mark.parametrize("timeout", [WAIT_S, 20 * WAIT_S])
def test_server_that_hangs_holds_up_one_open_and_not_each(
    buildidfs: BuildIdFs, timeout: float
) -> None:
    with (
        upstream(Handler.hang) as server,
        mounted(buildidfs, server, wait=WAIT_S, timeout=timeout) as mountpoint,
    ):
        began = time.monotonic()
        for _ in range(2):  # what is still on its way is not waited for again
            assert {opened(each) for each in links(mountpoint)} == {errno.ENOENT}
        # One after the other, they would take 300 times as long.
        assert time.monotonic() - began < 100 * WAIT_S


def test_hanging_server_holds_up_nothing_else(buildidfs: BuildIdFs) -> None:
    with (
        upstream(Handler.hang) as server,
        mounted(buildidfs, server) as mountpoint,
        ThreadPoolExecutor(LIBRARIES // 3) as pool,
    ):
        waiting = [pool.submit(opened, each) for each in links(mountpoint)[: LIBRARIES // 3]]
        until(lambda: server.requests, "a request")
        for each in IDS:
            assert (mountpoint / str(each) / "elf").read_bytes()
            (mountpoint / str(each) / "debug").stat()
        assert len(os.listdir(mountpoint)) > LIBRARIES
        assert not all(each.done() for each in waiting), "some still wait"
        server.ending.set()
        assert {each.result(60) for each in waiting} == {errno.ENOENT}


def test_fetching_process_is_started_again(buildidfs: BuildIdFs) -> None:
    with upstream(serving_files(files(*IDS))) as server, mounted(buildidfs, server) as mountpoint:
        assert opened(mountpoint / str(ID) / "debug") == 0
        (child,) = until(lambda: fetching_processes(buildidfs), "the process")
        os.kill(child, signal.SIGKILL)
        second = mountpoint / str(IDS[1]) / "debug"
        until(lambda: opened(second) == 0, "a file of the next process", seconds=60)
    assert not fetching_processes(buildidfs), "it ends with the mount"


def test_password_is_told_to_the_server_alone(buildidfs: BuildIdFs) -> None:
    with upstream(serving_files(files(*IDS))) as server:
        config = buildidfs.store.parent / "upstream.toml"
        url = server.url.replace("://", "://user:s3cret@")
        headers = buildidfs.store.parent / "headers"
        headers.write_text("X-Token: s3cret\n")
        config.write_text(f'[upstream]\nurls = ["{url}"]\nheaders-file = "{headers}"\n')
        options = ["--config", str(config)]
        with buildidfs.mounted("--fetch", *options) as mountpoint:
            assert opened(mountpoint / str(ID) / "debug") == 0
            (child,) = until(lambda: fetching_processes(buildidfs), "the process")
            words = Path(f"/proc/{child}/cmdline").read_bytes()
            told = [words, buildidfs.log().encode()]
        assert server.heads[0]["Authorization"].startswith("Basic ")
        assert server.heads[0]["X-Token"] == "s3cret"
        commands = (["config"], ["config", "--json"], ["show", str(ID)])
        told += [buildidfs(*options, *each).out.encode() for each in commands]
        assert not any(b"s3cret" in each for each in told)
        server.ending.set()
        failed = buildidfs(*options, "fetch", "--kind", "debuginfo", "ab" * 20, check=False)
        assert "s3cret" not in failed.out + failed.err


def fetching_processes(buildidfs: BuildIdFs) -> list[int]:
    """The processes that fetch for this store."""
    wanted = os.fsencode(buildidfs.store).hex().encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if wanted in words and b"buildidfs.profile.fetch" in words:
                    found.append(int(entry.name))
    return found


def test_fetch_needs_an_upstream_and_a_store(buildidfs: BuildIdFs, tmp_path: Path) -> None:
    environment = {"DEBUGINFOD_URLS": ""}
    done = buildidfs("mount", "--fetch", tmp_path, check=False, env=environment)
    assert (done.rc, "no upstream is configured" in done.err) == (2, True)
    done = buildidfs("mount", "--fetch", "--bundle", "x.tar", tmp_path, check=False)
    assert (done.rc, "--fetch is for a store" in done.err) == (2, True)


@pytest.mark.client
def test_gdb_finds_the_debuginfo_that_it_opens(
    directory: Path, stripped: Path, program: Program
) -> None:
    with programs.running(stripped, "stuck") as pid:
        run([tool("gcore", "gdb"), "-o", directory / "core", str(pid)], check=True)
    buildidfs = BuildIdFs(directory)
    buildidfs("scan", "tree", stripped.parents[2])
    sent = {each.build_id: each.debug.read_bytes() for each in program.binaries}
    answers = serving_files({f"{build_id}/debuginfo": data for build_id, data in sent.items()})
    with upstream(answers) as server, mounted(buildidfs, server) as mountpoint:
        arguments = [stripped, "-c", directory / f"core.{pid}"]
        shown = tools.gdb("bt", debug=mountpoint / "debug", arguments=arguments).out
        assert f"hot.c:{line_of('exe_stuck')}" in shown
        assert f"libhot.c:{line_of('lib_stuck')}" in shown
        assert set(server.requests.values()) == {1}
