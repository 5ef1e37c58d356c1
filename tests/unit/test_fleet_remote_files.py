# SPDX-License-Identifier: Apache-2.0
"""buildidfs.fleet.remote_files: hostile objects, and objects that change while they are read."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.errors import IntegrityError
from buildidfs.fleet import objects, ranges
from buildidfs.fleet.bucket import INTERACTIVE, Bucket
from buildidfs.fleet.remote_files import RemoteFile, RemoteFiles, Tier
from buildidfs.fleet.tiered_store import TieredStore
from buildidfs.model import BuildId, Kind, Trust
from buildidfs.store import Store
from tests.support.elf import elfwriter
from tests.support.harness.captures import capture, commit, sighting
from tests.support.servers.objectstorage import ObjectStorage, object_storage

if TYPE_CHECKING:
    from collections.abc import Iterator

ID = BuildId(b"\xab" * 20)
OTHER = BuildId(b"\xcd" * 20)
EXECUTABLE = objects.blob_key(ID, Kind.EXECUTABLE)
DEBUGINFO = objects.blob_key(ID, Kind.DEBUGINFO)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStorage]:
    """Object storage with two buckets, for which this process has the keys."""
    with object_storage("fleet", "hostile") as server:
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        yield server


class Files:
    """Remote files of tiers, and what was kept of them."""

    def __init__(self, directory: Path, *tiers: Tier) -> None:
        self.kept: list[RemoteFile] = []
        self.files = RemoteFiles(
            tiers, os.fsencode(directory), lambda file, fd: self.kept.append(file)
        )

    def read(self, kind: Kind, build_id: BuildId = ID) -> bytes:
        """All bytes of a file, which is looked up."""
        self.files.ask(build_id, [kind])
        found = self.files.found(build_id)[kind]
        with self.files.open(found.artifact.digest) as blob:
            return blob.pread(blob.size, 0)


@pytest.fixture
def fleet(storage: ObjectStorage, tmp_path: Path) -> Iterator[Files]:
    """The files of the bucket ``fleet``."""
    made = Files(tmp_path, Tier("s3://fleet", Trust.PACKAGE))
    yield made
    made.files.close()


def _elf(seed: int, size: int = 200_000, build_id: BuildId = ID, debug: bool = False) -> bytes:
    text = random.Random(seed).randbytes(size)
    name = b".debug_info" if debug else b".text"
    note = elfwriter.Section(
        b".note.gnu.build-id",
        elfwriter.build_id_note(build_id),
        type=elfwriter.SHT_NOTE,
        segment=elfwriter.PT_NOTE,
    )
    return elfwriter.elf_file([note, elfwriter.Section(name, text, flags=0 if debug else 6)])


def _put(bucket: str, key: str, data: bytes, claimed: bytes = b"") -> None:
    digest = hashlib.sha256(claimed or data).hexdigest()
    Bucket(f"s3://{bucket}").upload(key, [data], {"sha256": digest, "trust": "package"})


def test_claimed_digest_does_not_put_bytes_under_the_name_of_others(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    real, forged = _elf(1, debug=True), _elf(2)
    forged += bytes(len(real) - len(forged))
    _put("fleet", DEBUGINFO, real)
    _put("hostile", EXECUTABLE, forged, claimed=real)
    both = Files(tmp_path, Tier("s3://fleet", Trust.PACKAGE), Tier("s3://hostile", Trust.CONTAINER))
    both.files.ask(ID, [Kind.EXECUTABLE])
    assert both.read(Kind.DEBUGINFO) == real
    digest = both.files.found(ID)[Kind.EXECUTABLE].artifact.digest
    with both.files.open(digest) as blob:
        assert blob.pread(blob.size, 0) == forged  # before it is known that it is not what it says
        with pytest.raises(IntegrityError):
            blob.pread(1, 0)
    assert both.files.found(ID).keys() == {Kind.DEBUGINFO}
    both.files.close()


def test_claimed_digest_does_not_lead_to_a_file_of_the_store(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    secret = _elf(1, build_id=OTHER)
    with Store.create(tmp_path / "store") as store:
        hidden = sighting(b"/root/secret", mode=0o100700)
        commit(store, capture(store, secret, OTHER, at=hidden))
    forged = _elf(2)
    assert len(forged) == len(secret)
    _put("hostile", EXECUTABLE, forged, claimed=secret)
    tiers = [Tier("s3://hostile", Trust.CONTAINER)]
    tiered = TieredStore.over(
        os.fsencode(tmp_path / "store"), lambda root: RemoteFiles(tiers, root)
    )
    with tiered:
        tiered.remote.ask(ID, [Kind.EXECUTABLE])
        artifact = tiered.remote.found(ID)[Kind.EXECUTABLE].artifact
        with tiered.open_blob(artifact.digest) as blob:
            assert blob.pread(1000, 50_000) == forged[50_000:51_000]


def test_object_that_was_copied_onto_itself_is_read_on(
    storage: ObjectStorage, fleet: Files
) -> None:
    data = _elf(1, 3 << 20)
    _put("fleet", EXECUTABLE, data)
    fleet.files.ask(ID, [Kind.EXECUTABLE])
    digest = fleet.files.found(ID)[Kind.EXECUTABLE].artifact.digest
    with fleet.files.open(digest) as blob:
        assert blob.pread(10, 0) == data[:10]
        stored = storage.buckets["fleet"][EXECUTABLE]
        storage.buckets["fleet"][EXECUTABLE] = stored._replace(etag='"another"')  # touch
        assert blob.pread(blob.size, 0) == data
    assert len(fleet.kept) == 1


def test_object_that_became_another_is_looked_up_again(
    storage: ObjectStorage, fleet: Files
) -> None:
    first, second = _elf(1, 3 << 20), _elf(2, 4 << 20)
    _put("fleet", EXECUTABLE, first)
    fleet.files.ask(ID, [Kind.EXECUTABLE])
    digest = fleet.files.found(ID)[Kind.EXECUTABLE].artifact.digest
    with fleet.files.open(digest) as blob:
        _put("fleet", EXECUTABLE, second)
        with pytest.raises(OSError, match="Stale"):
            blob.pread(blob.size, 0)
    assert fleet.read(Kind.EXECUTABLE) == second


def test_removed_object_is_absent(storage: ObjectStorage, fleet: Files) -> None:
    _put("fleet", EXECUTABLE, _elf(1, 3 << 20))
    fleet.files.ask(ID, [Kind.EXECUTABLE])
    digest = fleet.files.found(ID)[Kind.EXECUTABLE].artifact.digest
    with fleet.files.open(digest) as blob:
        del storage.buckets["fleet"][EXECUTABLE]
        with pytest.raises(OSError, match="Stale"):
            blob.pread(blob.size, 0)
    fleet.files.ask(ID, [Kind.EXECUTABLE])
    assert fleet.files.found(ID) == {}


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"x" * 100, bytes(200_000)])
def test_odd_object_costs_nothing_but_itself(
    storage: ObjectStorage, fleet: Files, data: bytes
) -> None:
    _put("fleet", EXECUTABLE, data)
    other = _elf(1, build_id=OTHER)
    _put("fleet", objects.blob_key(OTHER, Kind.EXECUTABLE), other)
    fleet.files.ask(ID, [Kind.EXECUTABLE])
    assert fleet.files.found(ID) == {}
    assert fleet.read(Kind.EXECUTABLE, OTHER) == other


def test_description_of_a_hostile_file_makes_few_requests(
    storage: ObjectStorage, fleet: Files
) -> None:
    _put("fleet", EXECUTABLE, _scattered(300 << 20, 4000))
    storage.requests.clear()
    fleet.files.ask(ID, [Kind.EXECUTABLE])
    assert storage.count("GET", "buildid") < 100
    assert storage.sent("buildid") < 32 << 20


def _scattered(size: int, count: int) -> bytes:
    """A program whose notes are far from each other."""
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 2, 62, 1, 0, 64, 0, 0, 64, 56, count, 64, 0, 0
    )
    step = (size - 64 - 56 * count) // count
    table = b"".join(
        struct.pack("<IIQQQQQQ", 4, 4, 300_000 + step * each, 0, 0, 64, 64, 4)
        for each in range(count)
    )
    return header + table + bytes(size - len(header) - len(table))


@pytest.mark.parametrize("rate", [300_000, 1 << 20, 100 << 20])
def test_slow_link_makes_requests_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: int
) -> None:
    size = 64 << 20
    now = 0.0
    took: list[float] = []
    monkeypatch.setattr(ranges.time, "monotonic", lambda: now)

    def fetch(offset: int, size: int, fd: int = -1) -> bytes:
        nonlocal now
        now += size / rate
        took.append(size / rate)
        os.ftruncate(fd, max(os.fstat(fd).st_size, offset + size))
        return b""

    reader = ranges.RangeReader(size, fetch, lambda done: None, os.fsencode(tmp_path))
    assert reader.pread(16 << 20, 0) == bytes(16 << 20)
    for offset in range(16 << 20, size, 1 << 17):
        reader.pread(1 << 17, offset)
    reader.close()
    assert max(took) < INTERACTIVE.timeout_s
    assert len(took) < 64 * 1024 // 64
    if rate > 50 << 20:
        assert len(took) < 40


def test_readers_of_one_file_fetch_each_block_once(storage: ObjectStorage, fleet: Files) -> None:
    data = _elf(1, 20 << 20)
    _put("fleet", EXECUTABLE, data)
    fleet.files.ask(ID, [Kind.EXECUTABLE])
    digest = fleet.files.found(ID)[Kind.EXECUTABLE].artifact.digest
    wrong: list[int] = []

    def read(seed: int) -> None:
        chosen = random.Random(seed)
        with fleet.files.open(digest) as blob:
            for _ in range(200):
                at = chosen.randrange(len(data))
                if blob.pread(5000, at) != data[at : at + 5000]:
                    wrong.append(at)
            if blob.pread(blob.size, 0) != data:
                wrong.append(0)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []
    assert len(fleet.kept) == 1
    assert storage.sent("buildid") <= len(data) + (1 << 16)
