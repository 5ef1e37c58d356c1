# SPDX-License-Identifier: Apache-2.0
"""A bucket whose server sends without end, and one that a hostile host has written to.

The hostile host has keys that only create objects.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import zstandard

from buildidfs.fleet import objects
from buildidfs.fleet.bucket import Bucket
from buildidfs.model import BuildId, Kind
from tests.support.elf import elfwriter
from tests.support.harness import memory
from tests.support.harness.mounts import COMMAND, BuildIdFs, start
from tests.support.harness.waiting import until
from tests.support.servers.objectstorage import FLOODS, ObjectStorage, object_storage
from tests.support.servers.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.harness.mounts import Process

pytestmark = pytest.mark.fuse

_MOST = 300 << 20
_SIZE = 1 << 20


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStorage]:
    """Object storage with the bucket ``fleet``, for which all processes have the keys."""
    with object_storage("fleet") as server:
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def settings(directory: Path) -> Path:
    """A configuration with that bucket."""
    file = directory / "remote.toml"
    file.write_text('[remote]\nurl = "s3://fleet"\ntrust = "package"\nrefresh = 1\n')
    return file


def _elf(seed: int) -> tuple[BuildId, bytes]:
    data = random.Random(seed).randbytes(_SIZE)
    build_id = BuildId(hashlib.sha1(data, usedforsecurity=False).digest())
    note = elfwriter.Section(
        b".note.gnu.build-id",
        elfwriter.build_id_note(build_id),
        type=elfwriter.SHT_NOTE,
        segment=elfwriter.PT_NOTE,
    )
    return build_id, elfwriter.elf_file([note, elfwriter.Section(b".text", data, flags=6)])


def _add(buildidfs: BuildIdFs, directory: Path, seed: int) -> tuple[BuildId, bytes]:
    build_id, data = _elf(seed)
    path = directory / f"file{seed}"
    path.write_bytes(data)
    path.chmod(0o755)
    buildidfs("add", path)
    return build_id, data


@contextlib.contextmanager
def _mounted(buildidfs: BuildIdFs, settings: Path) -> Iterator[Process]:
    buildidfs.mountpoint.mkdir(exist_ok=True)
    argv = [*COMMAND, "--config", settings, "--store", buildidfs.store, "mount", "--foreground"]
    with buildidfs.mountpoint.with_name("mount.log").open("wb") as output:
        process = start([*argv, buildidfs.mountpoint], output.fileno())
    try:
        until(lambda: os.path.ismount(buildidfs.mountpoint) or process.poll(), "a mount")
        yield process
        process.terminate()
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
            subprocess.run(["umount", "-l", buildidfs.mountpoint], check=False)


def _family(pid: int) -> list[int]:
    """The process and its children."""
    found = [pid]
    for number in found:
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{number}/task").glob("*/children"):
                found += [int(each) for each in path.read_text().split()]
    return found


def _asking(pid: int) -> int:
    """The process that makes the requests of a mount, once it runs its program; 0 before."""
    for child in _family(pid)[1:]:
        with contextlib.suppress(OSError):
            if b"buildidfs.fleet.requests" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return 0


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _told_to(storage: ObjectStorage, flood: str) -> None:
    storage.flood = lambda method, key: flood


@pytest.mark.parametrize("flood", FLOODS)
def test_mount_outlives_a_server_that_sends_without_end(
    directory: Path, buildidfs: BuildIdFs, storage: ObjectStorage, settings: Path, flood: str
) -> None:
    here = _add(buildidfs, directory, 1)
    there, data = _elf(2)
    key = objects.blob_key(there, Kind.EXECUTABLE)
    digest = hashlib.sha256(data).hexdigest()
    Bucket("s3://fleet").create(key, data, {"sha256": digest})
    name = buildidfs.mountpoint / str(there) / "elf"
    with _mounted(buildidfs, settings) as process:
        with memory.peaks(lambda: _family(process.pid)) as peaks:
            _told_to(storage, flood)
            assert _content(name) in (b"", data)
            assert _content(buildidfs.mountpoint / str(here[0]) / "elf") == here[1]
        assert process.poll() is None
        _told_to(storage, "")
        until(lambda: _content(name) == data, "the file of the bucket", 40)
    assert max(peaks.values()) < _MOST


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_mount_outlives_the_process_that_makes_its_requests(
    directory: Path,
    buildidfs: BuildIdFs,
    storage: ObjectStorage,
    settings: Path,
    number: signal.Signals,
) -> None:
    _add(buildidfs, directory, 1)
    there, data = _elf(2)
    digest = hashlib.sha256(data).hexdigest()
    Bucket("s3://fleet").create(objects.blob_key(there, Kind.EXECUTABLE), data, {"sha256": digest})
    name = buildidfs.mountpoint / str(there) / "elf"
    with _mounted(buildidfs, settings) as process:
        asking = until(lambda: _asking(process.pid), "the process that makes requests")
        os.kill(asking, number)
        with pytest.raises(OSError, match="Input/output error"):
            name.read_bytes()
        until(lambda: _content(name) == data, "the file of the bucket", 60)


def test_server_outlives_a_server_that_sends_without_end(
    directory: Path, buildidfs: BuildIdFs, storage: ObjectStorage, settings: Path
) -> None:
    here = _add(buildidfs, directory, 1)
    there, data = _elf(2)
    digest = hashlib.sha256(data).hexdigest()
    Bucket("s3://fleet").create(objects.blob_key(there, Kind.EXECUTABLE), data, {"sha256": digest})
    with serving(buildidfs.store, config=settings.read_text()) as server:
        workers = server.workers()
        with memory.peaks(lambda: _family(server.process.pid)) as peaks:
            for flood in FLOODS:
                _told_to(storage, flood)
                reply = server.ask(f"/buildid/{there}/executable")
                assert reply.status in (200, 502, 503), (flood, reply.status)
                assert reply.status != 200 or reply.body == data
                assert server.ask(f"/buildid/{here[0]}/executable").body == here[1]
        assert server.workers() == workers
        _told_to(storage, "")
        until(lambda: server.ask(f"/buildid/{there}/executable").body == data, "the file", 40)
    assert max(peaks.values()) < _MOST


@pytest.mark.parametrize("words", [["push", "--all"], ["fleet", "which", "*"], ["fleet", "filter"]])
def test_command_ends_beside_a_server_that_sends_without_end(
    directory: Path, buildidfs: BuildIdFs, storage: ObjectStorage, settings: Path, words: list[str]
) -> None:
    _add(buildidfs, directory, 1)
    argv = [*COMMAND, "--config", settings, "--store", buildidfs.store, *words]
    for flood in ("range", "missing", "listing", "headers"):
        _told_to(storage, flood)
        with (directory / "log").open("wb") as output:
            process = start(argv, output.fileno())
        with memory.peaks(lambda: _family(process.pid)) as peaks:  # noqa: B023
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)  # a push waits for the server for a minute
            process.terminate()
            assert process.wait(20) in (0, 50, -signal.SIGTERM, 143, 130)
        assert "Traceback" not in (directory / "log").read_text()
        assert max(peaks.values()) < _MOST


def _forged(bucket: Bucket, build_id: BuildId) -> None:
    """Create what a hostile host can."""
    odd = {"runs": [{"key": "filter/runs/a//b", "count": 1}]}
    for number in (2, 3, 99, 1001, 99_999_999):
        data = msgspec.json.encode({"number": number, "made": 1, **odd})
        bucket.create(f"filter/{number:08d}.json", data, {})
    bucket.create(f"upload/{build_id}/executable", bytes(1 << 20), {})
    row = {"kind": "executable", "sha256": "00" * 32, "size": 5, "state": "pushed"}
    lines = [msgspec.json.encode({"id": f"{each:040x}", **row}) for each in range(500_000)]
    for number in range(3):
        packed = zstandard.ZstdCompressor().compress(b"\n".join(lines))
        bucket.create(f"host/mallory/{number}.jsonl.zst", packed, {})


def test_hosts_push_and_read_on_beside_a_hostile_one(
    directory: Path, buildidfs: BuildIdFs, storage: ObjectStorage, settings: Path
) -> None:
    first, second = _add(buildidfs, directory, 1), _elf(2)
    config = ["--config", settings]
    bucket = Bucket("s3://fleet")
    other = BuildIdFs(directory / "other")
    other.store.parent.mkdir()
    buildidfs(*config, "push", "--all")
    _forged(bucket, second[0])
    objects_of = storage.buckets["fleet"]
    for odd in ("filter//x", "filter/../x", "host/mallory//x", "buildid//x", "buildid/ab/\nx"):
        objects_of[odd] = objects_of["buildidfs.json"]
    _add(buildidfs, directory, 2)
    buildidfs(*config, "push", "--all")
    buildidfs(*config, "fleet", "filter", "--rebuild")
    assert str(second[0]) in buildidfs(*config, "fleet", "which", "*file2").out
    assert "it is in the bucket" in buildidfs(*config, "fleet", "why", str(second[0])).out
    _add(other, directory, 3)
    with _mounted(other, settings) as process:
        for build_id, data in (first, second):
            assert _content(other.mountpoint / str(build_id) / "elf") == data
        assert max(map(memory.peak, _family(process.pid))) < _MOST
        assert not (other.mountpoint / ("12" * 20)).exists()
