# SPDX-License-Identifier: Apache-2.0
"""A mount and a server that read from a bucket what their store lacks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs import config
from buildidfs.fleet import objects
from buildidfs.fleet.bucket import Bucket
from buildidfs.fleet.filters import Filter
from buildidfs.fleet.push import Pusher, PushOptions
from buildidfs.model import BuildId, Kind, Trust
from buildidfs.store import Store
from tests.support.clients.tools import debuginfod_find, gdb
from tests.support.elf import elfwriter
from tests.support.filesystems.smallfs import small_filesystem
from tests.support.harness.mounts import COMMAND, BuildIdFs, start
from tests.support.harness.waiting import until
from tests.support.servers.objectstorage import SECRET, ObjectStorage, object_storage
from tests.support.servers.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.elf.programs import Program
    from tests.support.harness.mounts import Process

pytestmark = pytest.mark.fuse

_URL = "s3://fleet"


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStorage]:
    """Object storage with the bucket ``fleet``, for which all processes have the keys."""
    with object_storage("fleet", "private") as server:
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def settings(directory: Path) -> Path:
    """A configuration with that bucket."""
    file = directory / "remote.toml"
    file.write_text(f'[remote]\nurl = "{_URL}"\ntrust = "package"\nrefresh = 1\n')
    return file


def _elf(size: int, *extra: elfwriter.Section) -> tuple[BuildId, bytes]:
    data = random.Random(size).randbytes(size)
    build_id = BuildId(hashlib.sha1(data, usedforsecurity=False).digest())
    text = elfwriter.Section(b".text", data, flags=6)
    note = elfwriter.Section(
        b".note.gnu.build-id",
        elfwriter.build_id_note(build_id),
        type=elfwriter.SHT_NOTE,
        segment=elfwriter.PT_NOTE,
    )
    return build_id, elfwriter.elf_file([note, text, *extra])


def _pushed(other: BuildIdFs, *paths: Path) -> None:
    """Capture files on another host, and push them."""
    other("scan", "tree", *paths)
    with (
        Store.open(other.store) as store,
        Pusher(store, config.RemoteSettings(url=_URL), PushOptions(patience_s=0)) as pusher,
    ):
        assert pusher.run().failed == []


@pytest.fixture
def other(directory: Path) -> BuildIdFs:
    """Another host."""
    place = directory / "other"
    place.mkdir()
    return BuildIdFs(place)


@contextlib.contextmanager
def _mounted(buildidfs: BuildIdFs, settings: Path) -> Iterator[Path]:
    if not buildidfs.store.exists():
        Store.create(buildidfs.store).close()
    config_words = [*COMMAND, "--config", str(settings)]
    buildidfs.mountpoint.mkdir(exist_ok=True)
    log = buildidfs.mountpoint.with_name("remote-mount.log")
    with log.open("wb") as output:
        process = start(
            [*config_words, "--store", buildidfs.store, "mount", "--foreground",
             buildidfs.mountpoint],
            output.fileno(),
        )  # fmt: skip
    try:
        until(lambda: os.path.ismount(buildidfs.mountpoint) or process.poll(), "a mount")
        assert process.poll() is None, log.read_text()
        yield buildidfs.mountpoint
        process.terminate()
        assert process.wait(30) == 0, log.read_text()
        assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        print(log.read_text())  # for a test that fails
        if process.poll() is None:
            process.kill()
            process.wait()
            subprocess.run(["umount", "-l", buildidfs.mountpoint], check=False)


def _written(directory: Path, data: bytes, name: str = "file", mode: int = 0o755) -> Path:
    path = directory / name
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_file_of_another_host_is_read_through_the_mount(
    directory: Path, buildidfs: BuildIdFs, other: BuildIdFs, storage: ObjectStorage, settings: Path
) -> None:
    build_id, data = _elf(3 << 20)
    _pushed(other, _written(directory, data))
    with Store.open(other.store, read_only=True) as store:
        (record,) = store.index.origins(store.index.ordinal(build_id) or 0)
    # The settings set the most that is believed. The other host said less where it is a container.
    believed = min(record.origin.trust, Trust.PACKAGE).name.lower()
    with _mounted(buildidfs, settings) as mount:
        assert str(build_id) not in os.listdir(mount)
        name = mount / str(build_id) / "executable"
        assert name.read_bytes() == data
        assert name.stat().st_size == len(data)
        short = mount / "debug/.build-id" / str(build_id)[:2] / str(build_id)[2:]
        assert short.read_bytes() == data
        link = mount / "perf/.build-id" / str(build_id)[:2] / str(build_id)[2:] / "elf"
        assert link.read_bytes() == data
        assert os.getxattr(name, "user.buildid.trust") == believed.encode()
        assert not (mount / ("00" * 20)).exists()
        # It was read as a whole, so the store has it from now on.
        until(lambda: str(build_id) in os.listdir(mount), "the local copy", 15)
        assert name.read_bytes() == data
    with Store.open(buildidfs.store, read_only=True) as store:
        assert list(store.check(digests=True)) == []
        (record,) = store.index.origins(store.index.ordinal(build_id) or 0)
        assert record.origin.scanner == "remote"
    storage.requests.clear()
    with _mounted(buildidfs, settings) as mount:
        assert (mount / str(build_id) / "executable").read_bytes() == data
    assert storage.sent(objects.blob_key(build_id, Kind.EXECUTABLE)) == 0


def test_process_that_keeps_files_has_no_secrets_in_its_words(
    directory: Path, buildidfs: BuildIdFs, other: BuildIdFs, storage: ObjectStorage, settings: Path
) -> None:
    build_id, data = _elf(3 << 20)
    _pushed(other, _written(directory, data))
    with settings.open("a") as file:
        file.write('[upstream]\nurls = ["http://user:s3cret@127.0.0.1:1"]\n')
    seen: set[bytes] = set()

    def is_kept(mount: Path) -> bool:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes()
                if b"buildidfs.ingest.upkeep" in words:
                    seen.add(words)
        return bool(seen) and str(build_id) in os.listdir(mount)

    with _mounted(buildidfs, settings) as mount:
        assert (mount / str(build_id) / "elf").read_bytes() == data
        until(lambda: is_kept(mount), "the local copy", 30)
    secrets = [SECRET.encode(), b"s3cret"]
    for words in seen:
        assert not any(each in words or each.hex().encode() in words for each in secrets)


def test_first_byte_of_a_large_file_transfers_little(
    directory: Path, buildidfs: BuildIdFs, other: BuildIdFs, storage: ObjectStorage, settings: Path
) -> None:
    build_id, data = _elf(64 << 20)
    _pushed(other, _written(directory, data))
    storage.requests.clear()
    with _mounted(buildidfs, settings) as mount:
        with (mount / str(build_id) / "executable").open("rb", buffering=0) as file:
            assert file.read(1) == data[:1]
            assert storage.sent(objects.BLOBS) < 3 << 20
            file.seek(40 << 20)
            assert file.read(10) == data[40 << 20 : (40 << 20) + 10]
        assert storage.sent(objects.BLOBS) < 6 << 20


def test_absent_build_ids_make_no_request(
    directory: Path, buildidfs: BuildIdFs, other: BuildIdFs, storage: ObjectStorage, settings: Path
) -> None:
    build_id, data = _elf(5000)
    _pushed(other, _written(directory, data))
    with _mounted(buildidfs, settings) as mount:
        assert (mount / str(build_id) / "executable").exists()
        until(lambda: storage.count("GET", "filter/runs/") >= 1, "the filter")
        until(lambda: _makes_no_request(mount, storage), "the loaded filter")
        storage.requests.clear()
        for _ in range(1000):
            assert not (mount / os.urandom(20).hex()).exists()
        assert storage.count("GET", objects.BLOBS) <= 10


@pytest.mark.parametrize("request_is_lost", [True, False])
def test_files_of_a_host_that_died_while_it_pushed_are_read(
    directory: Path,
    buildidfs: BuildIdFs,
    other: BuildIdFs,
    storage: ObjectStorage,
    settings: Path,
    request_is_lost: bool,
) -> None:
    files = dict(_elf(1000 + number) for number in range(30))
    tree = directory / "tree"
    tree.mkdir()
    for build_id, data in files.items():
        _written(tree, data, str(build_id))
    other("scan", "tree", tree)
    argv = [*COMMAND, "--config", str(settings), "--store", str(other.store), "push", "--all"]
    read = 0
    for kill_at in (8, 12, 13, 33, 42, 43):
        storage.buckets["fleet"].clear()
        count = 0

        def kill(method: str, key: str, kill_at: int = kill_at) -> int:
            nonlocal count
            count += 1
            if count != kill_at:
                return 0
            until(lambda: started, "the process")  # noqa: B023
            started[0].kill()  # noqa: B023
            started[0].wait()  # noqa: B023
            return -1 if request_is_lost else 0

        started: list[Process] = []
        storage.fault = kill
        with open(os.devnull, "wb") as output:
            started.append(start(argv, output.fileno()))
        assert started[0].wait(60) == -signal.SIGKILL, (kill_at, count)
        until(lambda: count >= kill_at, "the kill")  # noqa: B023
        storage.fault = lambda method, key: 0
        left = [*map(objects.parse_blob_key, storage.buckets["fleet"])]
        here = BuildIdFs(directory / f"here{kill_at}")
        here.store.parent.mkdir()
        with _mounted(here, settings) as mount:
            for build_id, _ in filter(None, left):
                assert (mount / str(build_id) / "elf").read_bytes() == files[build_id], kill_at
                read += 1
            if read:
                until(lambda: _makes_no_request(mount, storage), "the filter")
    assert read > 60


def _makes_no_request(mount: Path, storage: ObjectStorage) -> bool:
    before = storage.count("GET", objects.BLOBS)
    assert not (mount / os.urandom(20).hex()).exists()
    return storage.count("GET", objects.BLOBS) == before


def test_file_that_is_pushed_later_appears(
    directory: Path, buildidfs: BuildIdFs, other: BuildIdFs, storage: ObjectStorage, settings: Path
) -> None:
    first, second = _elf(5000), _elf(6000)
    _pushed(other, _written(directory, first[1]))
    with _mounted(buildidfs, settings) as mount:
        assert (mount / str(first[0]) / "elf").read_bytes() == first[1]
        name = mount / str(second[0]) / "elf"
        assert not name.exists()
        _pushed(other, _written(directory, second[1], "second"))
        until(name.exists, "the new file", 60)
        assert name.read_bytes() == second[1]


@pytest.mark.root
def test_disk_that_is_full_does_not_stop_reads(
    directory: Path, other: BuildIdFs, storage: ObjectStorage, settings: Path
) -> None:
    build_id, data = _elf(8 << 20)
    _pushed(other, _written(directory, data))
    with small_filesystem(directory, "ext4", 16 << 20) as place:
        here = BuildIdFs(place)
        here("add", _written(directory, _elf(5000)[1], "here"))
        with contextlib.suppress(OSError), (place / "rest").open("wb", buffering=0) as rest:
            while True:
                rest.write(bytes(1 << 16))
        os.truncate(place / "rest", (place / "rest").stat().st_size - (2 << 20))
        here.mountpoint = directory / "small-mount"
        with _mounted(here, settings) as mount:
            name = mount / str(build_id) / "elf"
            assert name.read_bytes() == data
            assert name.read_bytes() == data
            assert str(build_id) not in os.listdir(mount)


def test_debuginfo_of_the_bucket_for_an_executable_of_this_host(
    directory: Path,
    buildidfs: BuildIdFs,
    other: BuildIdFs,
    storage: ObjectStorage,
    settings: Path,
    program: Program,
) -> None:
    program.install(directory / "here", debug="none")
    program.install(directory / "there", debug="system")
    buildidfs("scan", "tree", directory / "here")
    _pushed(other, directory / "there")
    with _mounted(buildidfs, settings) as mount:
        executable = mount / program.exe.build_id / "elf"
        debug = mount / program.exe.build_id / "debug"
        assert debug.read_bytes() == program.exe.debug.read_bytes()
        found = gdb("info functions main", debug=mount / "debug", arguments=[executable])
        assert "main" in found.out


def test_wrong_bytes_of_a_bucket_are_not_kept(
    directory: Path, buildidfs: BuildIdFs, other: BuildIdFs, storage: ObjectStorage, settings: Path
) -> None:
    build_id, data = _elf(300_000)
    _pushed(other, _written(directory, data))
    key = objects.blob_key(build_id, Kind.EXECUTABLE)
    stored = storage.buckets["fleet"][key]
    changed = bytearray(data)
    changed[200_000] ^= 1
    storage.buckets["fleet"][key] = stored._replace(data=bytes(changed))
    with _mounted(buildidfs, settings) as mount:
        name = mount / str(build_id) / "elf"
        with contextlib.suppress(OSError):
            name.read_bytes()
        until(lambda: not name.exists(), "the absence of the wrong file")
        assert str(build_id) not in os.listdir(mount)


def test_other_build_id_in_a_file_is_refused(
    directory: Path, buildidfs: BuildIdFs, other: BuildIdFs, storage: ObjectStorage, settings: Path
) -> None:
    build_id, data = _elf(5000)
    wrong = BuildId(bytes(range(20)))
    _pushed(other, _written(directory, data))
    bucket = Bucket(_URL)
    bucket.create(objects.blob_key(wrong, Kind.EXECUTABLE), data, {})
    Filter(bucket).add([(wrong, Kind.EXECUTABLE)])
    with _mounted(buildidfs, settings) as mount:
        assert (mount / str(build_id)).exists()
        assert not (mount / str(wrong) / "elf").exists()
        assert not (mount / str(wrong) / "debug").exists()
        until(lambda: not (mount / str(wrong)).exists(), "the absence of the directory")


def test_scripts_of_remote_files_read_as_zeros(
    directory: Path, buildidfs: BuildIdFs, other: BuildIdFs, storage: ObjectStorage, settings: Path
) -> None:
    build_id, data = _elf(200_000, elfwriter.gdb_scripts("print('run')"))
    path = _written(directory, data)
    _pushed(other, path)
    key = objects.blob_key(build_id, Kind.EXECUTABLE)
    stored = storage.buckets["fleet"][key]
    metadata = {name: value for name, value in stored.metadata.items() if name != "scripts"}
    storage.buckets["fleet"][key] = stored._replace(metadata=metadata)
    assert b"print('run')" in data
    with _mounted(buildidfs, settings) as mount:
        assert b"print('run')" not in (mount / str(build_id) / "elf").read_bytes()


def test_bucket_that_hangs_holds_nothing_else_up(
    directory: Path, buildidfs: BuildIdFs, other: BuildIdFs, storage: ObjectStorage, settings: Path
) -> None:
    here, there = _elf(5000), _elf(6000)
    buildidfs("add", _written(directory, here[1], "here"))
    _pushed(other, _written(directory, there[1], "there"))
    release = threading.Event()

    def hang(method: str, key: str) -> int:
        release.wait(60)
        return -1

    with _mounted(buildidfs, settings) as mount:
        until(lambda: _makes_no_request(mount, storage), "the loaded filter")
        storage.fault = hang
        waiting = threading.Thread(target=os.path.exists, args=(mount / str(there[0]) / "elf",))
        try:
            waiting.start()
            until(lambda: waiting.is_alive(), "a look-up")
            for _ in range(20):
                began = time.monotonic()
                assert str(here[0]) in os.listdir(mount)
                assert (mount / str(here[0]) / "elf").read_bytes() == here[1]
                assert time.monotonic() - began < 30
            waiting.join(30)
            assert not waiting.is_alive()
            # The bucket is left alone now, and nothing waits for it.
            began = time.monotonic()
            for _ in range(300):
                assert not (mount / os.urandom(20).hex()).exists()
            assert time.monotonic() - began < 60
        finally:
            release.set()
            waiting.join()


def test_store_is_served_while_the_bucket_is_missing(
    directory: Path, buildidfs: BuildIdFs, storage: ObjectStorage, settings: Path
) -> None:
    build_id, data = _elf(5000)
    buildidfs("add", _written(directory, data))
    storage.buckets.clear()
    with _mounted(buildidfs, settings) as mount:
        assert (mount / str(build_id) / "elf").read_bytes() == data
        with pytest.raises(OSError, match="Input/output error"):
            (mount / ("12" * 20)).stat()
    assert "there is no such bucket" in (directory / "remote-mount.log").read_text()


def test_server_relays_the_bucket(
    directory: Path, buildidfs: BuildIdFs, other: BuildIdFs, storage: ObjectStorage, settings: Path
) -> None:
    build_id, data = _elf(3 << 20)
    _pushed(other, _written(directory, data))
    Store.create(buildidfs.store).close()
    with serving(buildidfs.store, config=settings.read_text()) as server:
        found = debuginfod_find(server.url, "executable", str(build_id))
        assert Path(found.out.strip()).read_bytes() == data
        part = server.ask(f"/buildid/{build_id}/executable", Range="bytes=1000-1999")
        assert (part.status, part.body) == (206, data[1000:2000])
        section = server.ask(f"/buildid/{build_id}/section/.text")
        assert section.status == 200
        assert section.body in data
        accepted = {"Accept-Encoding": "zstd"}
        assert server.ask(f"/buildid/{build_id}/executable", **accepted).body == data
        assert server.ask(f"/buildid/{'34' * 20}/executable").status == 404
        storage.fault = lambda method, key: 503
        until(
            lambda: server.ask(f"/buildid/{os.urandom(20).hex()}/executable").status == 404,
            "answers by the filter while the bucket is away",
        )


def test_server_does_not_call_a_file_absent_that_it_cannot_ask_for(
    directory: Path, buildidfs: BuildIdFs, storage: ObjectStorage, settings: Path
) -> None:
    Store.create(buildidfs.store).close()
    storage.fault = lambda method, key: 503
    with serving(buildidfs.store, config=settings.read_text()) as server:
        assert server.ask(f"/buildid/{'34' * 20}/executable").status == 503
