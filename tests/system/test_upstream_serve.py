# SPDX-License-Identifier: Apache-2.0
"""``serve`` in front of upstream servers, and behind other servers that ask it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.model import BuildId
from buildidfs.store import Store
from tests.support.clients.tools import run, tool
from tests.support.elf.elfwriter import DWARF, TEXT, TEXT_SPLIT, elf_file
from tests.support.harness.captures import capture
from tests.support.harness.waiting import until
from tests.support.servers.serving import free_port, serving
from tests.support.servers.upstreams import Handler, debuginfod, serving_files, upstream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.elf.programs import Program
    from tests.support.servers.serving import Client, Server

HELD, ID, UNKNOWN = (BuildId(bytes([number]) * 20) for number in (0xC1, 0xC2, 0xC3))
DEBUG = elf_file([TEXT_SPLIT, DWARF], build_id=ID)
PATH = f"/buildid/{ID}/debuginfo"
ELFUTILS = "elfutils/0.188,Linux/x86_64,debian/12"
WAIT_S = 1.0
PATIENCE_S = 30


@pytest.fixture
def store(directory: Path) -> Path:
    path = directory / "store"
    with Store.create(path) as store:
        store.commit([capture(store, elf_file([TEXT], build_id=HELD), HELD)])
    return path


@contextlib.contextmanager
def in_front_of(store: Path, *urls: str, **more: object) -> Iterator[Server]:
    options = {"wait": PATIENCE_S, "timeout": 2 * PATIENCE_S} | more
    lines = [f"[upstream]\nurls = {list(urls)}".replace("'", '"')]
    lines += [f"{name.replace('_', '-')} = {value}" for name, value in options.items()]
    with serving(store, config="\n".join(lines) + "\n") as server:
        yield server


@contextlib.contextmanager
def connected(server: Server) -> Iterator[Client]:
    with contextlib.closing(server.connect()) as client:
        yield client


def test_file_of_an_upstream_is_served_and_kept(store: Path) -> None:
    with upstream(serving_files({f"{ID}/debuginfo": DEBUG})) as source:
        with in_front_of(store, source.url) as server:
            reply = server.ask(PATH)
            assert (reply.status, reply.body) == (200, DEBUG)
            assert reply.headers["x-debuginfod-size"] == str(len(DEBUG))
            assert server.ask(PATH).body == DEBUG
            assert server.ask(f"/buildid/{ID}/section/.debug_info").status == 200
            metadata = json.loads(server.ask(f"/metadata?key=buildid&value={ID}").body)
            assert metadata["complete"] is False  # the upstream was not asked for metadata
        assert source.requests[PATH] == 1
        assert source.heads[0]["Via"].startswith("1.1 buildidfs-")
    with serving(store) as alone:
        assert alone.ask(PATH).body == DEBUG
        metadata = json.loads(alone.ask(f"/metadata?key=buildid&value={ID}").body)
        assert metadata["complete"] is True


def test_absence_is_the_word_of_the_upstream(store: Path) -> None:
    with upstream(serving_files({})) as source, in_front_of(store, source.url) as server:
        for _ in range(3):
            assert server.ask(f"/buildid/{UNKNOWN}/debuginfo").status == 404
        assert sum(source.requests.values()) == 1


@pytest.mark.parametrize("agent", [ELFUTILS, "curl/8"])
def test_upstream_that_fails_is_no_absence(store: Path, agent: str) -> None:
    with (
        upstream(lambda handler: handler.send(b"", 500)) as source,
        in_front_of(store, source.url) as server,
        connected(server) as client,
    ):
        if agent == ELFUTILS:
            with pytest.raises((EOFError, ConnectionResetError)):
                client.ask(PATH, User_Agent=agent)
        else:
            assert client.ask(PATH, User_Agent=agent).status == 503


def test_upstream_that_hangs_delays_nothing_else(store: Path) -> None:
    with (
        upstream(Handler.hang) as source,
        in_front_of(store, source.url) as server,
        ThreadPoolExecutor(40) as pool,
    ):
        ids = [BuildId(bytes([number]) * 20) for number in range(40)]
        waiting = [pool.submit(server.ask, f"/buildid/{each}/debuginfo") for each in ids]
        until(lambda: source.requests, "a request")
        for _ in range(20):
            assert server.ask(f"/buildid/{HELD}/executable").status == 200
        assert not all(each.done() for each in waiting)
        source.ending.set()
        assert {each.result(60).status for each in waiting} == {503}


def test_many_requests_wait_as_long_as_one(store: Path) -> None:
    limits = {"wait": WAIT_S, "timeout": 10 * WAIT_S}
    with upstream(Handler.hang) as source, in_front_of(store, source.url, **limits) as server:
        began = time.monotonic()
        for number in range(100):
            assert server.ask(f"/buildid/{bytes([number]).hex() * 20}/debuginfo").status == 503
        # One after the other, they would take 100 times as long.
        assert time.monotonic() - began < 50 * WAIT_S


def test_two_servers_that_ask_each_other_end_with_an_answer(store: Path, directory: Path) -> None:
    other = directory / "other/store"
    other.parent.mkdir()
    Store.create(other).close()
    listen = f"127.0.0.1:{free_port()}"
    with in_front_of(store, f"http://{listen}") as one:
        config = f'[upstream]\nurls = ["{one.url}"]\ntimeout = 10\n'
        with serving(other, config=config, listen=listen) as two:
            assert one.ask(PATH).status == 404
            assert two.ask(PATH).status == 404
            assert two.ask(f"/buildid/{HELD}/executable").status == 200


def test_server_that_is_its_own_upstream(store: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    config = f'[upstream]\nurls = ["http://{listen}"]\ntimeout = 10\n'
    with serving(store, config=config, listen=listen) as server:
        assert server.ask(PATH).status == 404


def test_no_fetch(store: Path) -> None:
    with upstream(serving_files({f"{ID}/debuginfo": DEBUG})) as source:
        config = f'[upstream]\nurls = ["{source.url}"]\n'
        with serving(store, "--no-fetch", config=config) as server:
            assert server.ask(PATH).status == 404
        with serving(store, config=f"{config}[serve]\nfetch = false\n") as server:
            assert server.ask(PATH).status == 404
        assert not source.requests


@pytest.mark.root
def test_store_that_cannot_be_written_is_served_alone(store: Path) -> None:
    for path in (store, *store.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    store.chmod(0o500)
    with upstream(serving_files({f"{ID}/debuginfo": DEBUG})) as source:
        config = f'[upstream]\nurls = ["{source.url}"]\n'
        under = [tool("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups"]
        store.parent.chmod(0o755)
        with serving(store, config=config, under=under) as server:
            assert server.ask(PATH).status == 404
            assert "cannot be written" in server.log()
    store.chmod(0o700)
    for path in (store, *store.rglob("*")):
        os.chown(path, 0, 0, follow_symlinks=False)


@pytest.mark.client
def test_debuginfod_of_elfutils_as_upstream_and_as_downstream(
    store: Path, directory: Path, program: Program
) -> None:
    files, nothing = directory / "files", directory / "nothing"
    for path in (files, nothing):
        path.mkdir()
    (files / "hot.debug").write_bytes(program.exe.debug.read_bytes())
    caches = [directory / f"cache-{number}" for number in range(3)]
    with (
        debuginfod(directory, files, port=free_port(), cache=caches[0]) as first,
        in_front_of(store, first) as ours,
        debuginfod(directory, nothing, port=free_port(), cache=caches[1], urls=ours.url) as last,
    ):
        env = {"DEBUGINFOD_URLS": last, "DEBUGINFOD_CACHE_PATH": str(caches[2])}
        find = [tool("debuginfod-find"), "debuginfo"]
        found = run([*find, program.exe.build_id], env=env, check=True).out.strip()
        assert Path(found).read_bytes() == program.exe.debug.read_bytes()
        assert run([*find, program.lib.build_id], env=env).rc != 0
        assert ours.ask(f"/buildid/{program.exe.build_id}/debuginfo").status == 200
    with serving(store) as alone:
        assert alone.ask(f"/buildid/{program.exe.build_id}/debuginfo").status == 200
