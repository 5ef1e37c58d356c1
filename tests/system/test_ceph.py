# SPDX-License-Identifier: Apache-2.0
"""A bucket of Ceph: two hosts push and eight clients read while parts of it are killed."""

from __future__ import annotations

import hashlib
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.errors import RemoteDenied, RemoteUnavailable
from buildidfs.fleet import objects
from buildidfs.fleet.bucket import Bucket, RequestLimits
from buildidfs.fleet.filters import Filter
from buildidfs.model import BuildId, Kind
from buildidfs.store import Store
from tests.support.clients.commands import ROOT
from tests.support.harness.captures import capture, commit
from tests.support.harness.mounts import COMMAND
from tests.support.harness.waiting import until
from tests.support.servers.ceph import Ceph, ceph

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.root]

_FILES = 120
_CLIENTS = 8
# Between two reads of a client: as fast as they can, they keep the processors from the cluster.
_PAUSE_S = 0.1
_SHORT = RequestLimits(timeout_s=10.0, connect_s=2.0, retries=1)


@pytest.fixture(scope="module")
def cluster(scratch: Path) -> Iterator[Ceph]:
    """Three object stores that keep two copies, and two gateways."""
    with ceph(scratch / "ceph") as running:
        running.create_bucket("fleet")
        yield running


def _data(host: int, number: int) -> tuple[BuildId, bytes]:
    # Half of the build IDs are those of both hosts, with the same bytes.
    text = b"file %d" % number if number % 2 else b"file %d of host %d" % (number, host)
    data = hashlib.sha256(text).digest() * 400
    return BuildId(hashlib.sha1(text, usedforsecurity=False).digest()), data


def _pushing(cluster: Ceph, directory: Path, host: int) -> subprocess.Popen[bytes]:
    """Let a host push until it is told to end, through a gateway of its own."""
    with Store.create(directory / f"host{host}") as store:
        every = [_data(host, number) for number in range(_FILES)]
        commit(store, *(capture(store, data, build_id) for build_id, data in every))
    file = directory / "fleet.toml"
    file.write_text('[remote]\nurl = "s3://fleet/storm"\n')
    words = ["--config", str(file), "--store", str(directory / f"host{host}"), "push", "--watch"]
    return subprocess.Popen(
        [*COMMAND, *words, "--rate", "400KiB"],
        env={**cluster.environ(host), "PATH": "/usr/bin"},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )


class _Reader:
    """Reads what is in the bucket, again and again; counts what is right and what is wrong."""

    def __init__(self, bucket: Bucket, files: dict[BuildId, bytes], stop: threading.Event) -> None:
        self.right = self.wrong = self.failed = 0
        self._bucket, self._files, self._stop = bucket, files, stop
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            for build_id, data in self._files.items():
                if self._stop.wait(_PAUSE_S):
                    return
                try:
                    found = self._bucket.get(objects.blob_key(build_id, Kind.EXECUTABLE))
                except (RemoteUnavailable, RemoteDenied):
                    self.failed += 1
                    continue
                self.right += found == data
                self.wrong += found is not None and found != data


def test_parts_of_the_cluster_are_killed(
    cluster: Ceph, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = dict(_data(host, number) for host in range(2) for number in range(_FILES))
    stop = threading.Event()
    buckets = []
    for number in range(_CLIENTS):
        for name, value in cluster.environ(number % 2).items():
            monkeypatch.setenv(name, value)
        buckets.append(Bucket("s3://fleet/storm", _SHORT))
    hosts = [_pushing(cluster, directory, host) for host in range(2)]
    readers = [_Reader(bucket, files, stop) for bucket in buckets]

    def go_on(which: list[_Reader]) -> None:
        before = [each.right for each in which]
        until(
            lambda: all(each.right > was for each, was in zip(which, before, strict=True)),
            "reads that go on",
            90,
        )

    try:
        go_on(readers)
        cluster.kill("osd.0")
        go_on(readers)
        cluster.kill("client.rgw0")
        go_on(readers[1::2])
        cluster.start_gateway(0)
        cluster.start_osd(0)
        go_on(readers)
        until(lambda: _count(buckets[1]) == len(files), "all files in the bucket", 120)
        for host in hosts:
            host.terminate()
            assert host.wait(60) == 0
    finally:
        stop.set()
        for reader in readers:
            reader.thread.join()
        for host in hosts:
            host.kill()
            host.wait()
    assert sum(each.wrong for each in readers) == 0
    bucket = buckets[1]
    for build_id, data in files.items():
        assert bucket.get(objects.blob_key(build_id, Kind.EXECUTABLE)) == data
    assert list(bucket.list("variant")) == []
    found = Filter(bucket)
    found.refresh()
    assert all(found.may_have(build_id, Kind.EXECUTABLE) for build_id in files)


def _count(bucket: Bucket) -> int:
    return sum(1 for _ in bucket.list("buildid"))


def test_one_writer_wins_across_gateways(cluster: Ceph, monkeypatch: pytest.MonkeyPatch) -> None:
    buckets = []
    for gateway in range(2):
        for name, value in cluster.environ(gateway).items():
            monkeypatch.setenv(name, value)
        buckets.append(Bucket("s3://fleet/race"))
    for attempt in range(5):
        won: list[int] = []

        def write(number: int, attempt: int = attempt, won: list[int] = won) -> None:
            if buckets[number % 2].create(f"raced/{attempt}", b"%d" % number, {}):
                won.append(number)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(won) == 1
        assert buckets[1].get(f"raced/{attempt}") == b"%d" % won[0]
    assert buckets[0].touch("raced/0")
    with pytest.raises(RemoteDenied, match="no such bucket"):
        Bucket("s3://absent").identity()
