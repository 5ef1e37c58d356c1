# SPDX-License-Identifier: Apache-2.0
"""buildidfs.fleet.push: what goes where, what is left out, and what faults cost."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from buildidfs import config
from buildidfs.errors import RemoteDenied, RemoteUnavailable, UsageError
from buildidfs.fleet import manifests, objects
from buildidfs.fleet import push as pushing
from buildidfs.fleet.bucket import PATIENT, Bucket, Listed
from buildidfs.fleet.filters import Filter
from buildidfs.fleet.push import Pace, Pusher, PushOptions, PushSummary
from buildidfs.model import Kind, Trust
from buildidfs.store import Store
from tests.support.harness.captures import capture, commit, sighting
from tests.support.harness.waiting import until
from tests.support.servers.objectstorage import ObjectStorage, object_storage

if TYPE_CHECKING:
    from collections.abc import Iterator

URL, PRIVATE_URL = "s3://fleet/a", "s3://private"
SETTINGS = config.RemoteSettings(url=URL)
NO_PATIENCE = PushOptions(patience_s=0)
A, B = bytes.fromhex("aa" * 20), bytes.fromhex("bb" * 20)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStorage]:
    """Object storage with two buckets, for which this process has the keys."""
    with object_storage("fleet", "private") as server:
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        yield server


def _push(
    store: Store,
    settings: config.RemoteSettings = SETTINGS,
    options: PushOptions = NO_PATIENCE,
) -> PushSummary:
    with Pusher(store, settings, options) as pusher:
        return pusher.run()


def _keys(storage: ObjectStorage, below: str = "buildid/", bucket: str = "fleet") -> list[str]:
    prefix = "a/" if bucket == "fleet" else ""
    found = [key.removeprefix(prefix) for key in storage.buckets[bucket]]
    return sorted(key for key in found if key.startswith(below))


def test_push_uploads_what_the_bucket_lacks(store: Store, storage: ObjectStorage) -> None:
    commit(
        store,
        capture(store, b"executable", A, trust=Trust.HOST),
        capture(store, b"debuginfo", A, kinds=[Kind.DEBUGINFO], trust=Trust.HOST),
        capture(store, b"both", B, kinds=[Kind.EXECUTABLE, Kind.DEBUGINFO]),
    )
    summary = _push(store)
    assert (summary.pushed, summary.present, summary.failed) == (4, 0, [])
    expected = [
        objects.blob_key(build_id, kind)
        for build_id in (A, B)
        for kind in (Kind.DEBUGINFO, Kind.EXECUTABLE)
    ]
    assert _keys(storage) == expected
    found = storage.buckets["fleet"][f"a/{objects.blob_key(A, Kind.EXECUTABLE)}"]
    assert found.data == b"executable"
    said = objects.described(found.metadata)
    assert said.digest == hashlib.sha256(b"executable").digest()
    assert (said.trust, said.path) == (Trust.HOST, b"/usr/bin/app")
    mine = Filter(Bucket(URL))
    mine.refresh()
    assert mine.may_have(A, Kind.EXECUTABLE)
    assert not mine.may_have(A, Kind.VDSO)


def test_second_push_sends_nothing(store: Store, storage: ObjectStorage) -> None:
    commit(store, capture(store, b"one", A))
    _push(store)
    storage.requests.clear()
    summary = _push(store)
    assert (summary.pushed, summary.present) == (0, 1)
    assert storage.count("PUT") == 0
    storage.requests.clear()
    assert _push(store, options=PushOptions(verify=True, patience_s=0)).present == 1
    assert storage.count("PUT", "a/buildid") == 1  # refused: the object exists


def test_lost_or_damaged_ledger_costs_a_comparison(store: Store, storage: ObjectStorage) -> None:
    commit(store, capture(store, b"one", A))
    _push(store)
    (ledger,) = (Path(os.fsdecode(store.path)) / "remote").glob("*.sqlite")
    for change in (lambda: ledger.write_bytes(b"no database" * 1000), ledger.unlink):
        for each in ledger.parent.glob("*-wal"):
            each.unlink()
        change()
        summary = _push(store)
        assert (summary.pushed, summary.present, summary.variants) == (0, 1, 0)


def test_emptied_bucket_gets_everything_again(store: Store, storage: ObjectStorage) -> None:
    commit(store, capture(store, b"one", A))
    _push(store)
    storage.buckets["fleet"].clear()
    assert _push(store).pushed == 1
    assert _keys(storage) == [objects.blob_key(A, Kind.EXECUTABLE)]
    mine = Filter(Bucket(URL))
    mine.refresh()
    assert mine.may_have(A, Kind.EXECUTABLE)


def test_first_of_two_hosts_wins(store: Store, storage: ObjectStorage, tmp_path: Path) -> None:
    commit(store, capture(store, b"first", A))
    _push(store)
    with Store.create(tmp_path / "other") as other:
        commit(other, capture(other, b"second", A), capture(other, b"same", B))
        assert _push(other).variants == 1
    commit(store, capture(store, b"same", B))
    assert _push(store).pushed == 0
    assert storage.buckets["fleet"][f"a/{objects.blob_key(A, Kind.EXECUTABLE)}"].data == b"first"
    (variant,) = _keys(storage, "variant")
    assert variant.endswith(hashlib.sha256(b"second").hexdigest())


def test_hosts_that_race_leave_one_file_and_a_variant(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    summaries: list[PushSummary] = []

    def push(number: int) -> None:
        with Store.create(tmp_path / str(number)) as store:
            for build_id in range(20):
                raw = bytes([build_id]) * 20
                commit(store, capture(store, b"host %d, %d" % (number, build_id), raw))
            summaries.append(_push(store))

    threads = [threading.Thread(target=push, args=(number,)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sum(each.pushed for each in summaries) == 20
    assert sum(each.variants for each in summaries) == 40
    assert len(_keys(storage)) == 20
    assert len(_keys(storage, "variant")) == 40


def test_unserved_variant_of_this_host_is_a_variant(store: Store, storage: ObjectStorage) -> None:
    commit(store, capture(store, b"good", A, trust=Trust.HOST))
    commit(store, capture(store, b"hostile", A, trust=Trust.CONTAINER))
    summary = _push(store)
    assert (summary.pushed, summary.variants) == (1, 1)
    assert storage.buckets["fleet"][f"a/{objects.blob_key(A, Kind.EXECUTABLE)}"].data == b"good"


def test_private_file_stays_or_goes_to_its_bucket(store: Store, storage: ObjectStorage) -> None:
    secret = sighting(b"/home/user/secret", mode=0o100700, uid=1000)
    commit(store, capture(store, b"public", A), capture(store, b"secret", B, at=secret))
    summary = _push(store)
    assert (summary.pushed, summary.private) == (1, 1)
    everything = b"".join(each.data for each in storage.buckets["fleet"].values())
    rows = [each.row for each in manifests.read(Bucket(URL))]
    assert {row.state for row in rows} == {"pushed", "private"}
    assert B.hex() not in str(rows)
    assert "secret" not in str(rows)
    assert b"secret" not in everything
    settings = msgspec.structs.replace(SETTINGS, private=PRIVATE_URL)
    assert _push(store, settings).pushed == 1
    assert _keys(storage, bucket="private") == [objects.blob_key(B, Kind.EXECUTABLE)]
    assert len(_keys(storage)) == 1


def test_private_place_of_a_public_file_is_not_told(store: Store, storage: ObjectStorage) -> None:
    hidden = sighting(b"/home/user/hidden/app", reach=4)
    commit(store, capture(store, b"public", A), capture(store, b"public", A, at=hidden))
    _push(store)
    (row,) = [each.row for each in manifests.read(Bucket(URL))]
    assert [place.path for place in row.places] == ["/usr/bin/app"]


def test_file_of_another_program_is_compared(store: Store, storage: ObjectStorage) -> None:
    bucket = Bucket(URL)
    bucket.create(objects.blob_key(A, Kind.EXECUTABLE), b"same", {})
    bucket.create(objects.blob_key(B, Kind.EXECUTABLE), b"other", {})
    commit(store, capture(store, b"same", A), capture(store, b"mine!", B))
    summary = _push(store)
    assert (summary.present, summary.variants, summary.pushed) == (1, 1, 0)


@pytest.mark.parametrize("size", [100, (1 << 20) + 5, (64 << 20) + 7])
def test_files_of_all_sizes_arrive(store: Store, storage: ObjectStorage, size: int) -> None:
    data = os.urandom(1 << 16) * (size // (1 << 16) + 1)
    commit(store, capture(store, data[:size], A))
    assert _push(store).pushed == 1
    stored = storage.buckets["fleet"][f"a/{objects.blob_key(A, Kind.EXECUTABLE)}"]
    assert stored.data == data[:size]
    assert _keys(storage, "upload") == []
    _forget(store)
    assert _push(store).present == 1


def _forget(store: Store) -> None:
    for each in (Path(os.fsdecode(store.path)) / "remote").iterdir():
        each.unlink()


def test_large_file_that_another_host_uploads_waits(
    store: Store, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "_LARGE", 10)
    lease = objects.lease_key(A, Kind.EXECUTABLE)
    Bucket(URL).create(lease, b"another host", {})
    commit(store, capture(store, b"more than ten bytes", A))
    assert _push(store).leased == 1
    assert _keys(storage) == []
    stored = storage.buckets["fleet"][f"a/{lease}"]
    storage.buckets["fleet"][f"a/{lease}"] = stored._replace(
        modified=stored.modified.replace(year=2020)
    )
    assert _push(store).pushed == 1


def test_large_file_of_another_host_of_the_same_name_waits(
    store: Store, storage: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "_LARGE", 10)
    refused = "POST"
    storage.fault = lambda method, key: 403 if method == refused else 0
    commit(store, capture(store, b"more than ten bytes", A))
    with pytest.raises(RemoteDenied):
        _push(store)
    refused = ""
    with Store.create(tmp_path / "other") as other:
        commit(other, capture(other, b"more than ten other bytes", A))
        assert _push(other).leased == 1
    assert _push(store).pushed == 1


def test_large_file_that_came_while_the_lease_was_taken_stays(
    store: Store, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "_LARGE", 10)
    commit(store, capture(store, b"more than ten bytes", A))
    theirs = b"bytes of another host"
    digest = hashlib.sha256(theirs).hexdigest()

    def race(method: str, key: str) -> int:
        if method == "PUT" and "/upload/" in key and not _keys(storage):
            Bucket(URL).create(objects.blob_key(A, Kind.EXECUTABLE), theirs, {"sha256": digest})
        return 0

    storage.fault = race
    assert _push(store).variants == 1
    stored = storage.buckets["fleet"][f"a/{objects.blob_key(A, Kind.EXECUTABLE)}"]
    assert stored.data == theirs
    assert _keys(storage, "upload") == []


def test_damaged_blob_is_named_and_not_pushed(store: Store, storage: ObjectStorage) -> None:
    new = commit(store, capture(store, b"damaged", A), capture(store, b"whole", B))
    assert new.bytes_added == len(b"damaged" + b"whole")
    digest = hashlib.sha256(b"damaged").digest()
    path = Path(os.fsdecode(store.path)) / "blobs" / digest.hex()[:2] / digest.hex()
    path.chmod(0o600)
    path.write_bytes(b"DAMAGED")
    summary = _push(store)
    assert summary.pushed == 1
    assert len(summary.failed) == 1
    assert A.hex() in summary.failed[0]
    assert _keys(storage) == [objects.blob_key(B, Kind.EXECUTABLE)]


@pytest.mark.parametrize("status", [500, 503, -1])
def test_outage_ends_a_push_and_the_next_goes_on(
    store: Store, storage: ObjectStorage, status: int
) -> None:
    commit(store, *(capture(store, b"%d" % each, bytes([each]) * 20) for each in range(40)))
    left = 20

    def fail(method: str, key: str) -> int:
        nonlocal left
        if method == "PUT" and "/buildid/" in key:
            left -= 1
        return status if left < 0 else 0

    storage.fault = fail
    with pytest.raises(RemoteUnavailable):
        _push(store)
    before = _keys(storage)
    assert 0 < len(before) < 40
    storage.fault = lambda method, key: 0
    assert _push(store).failed == []
    assert len(_keys(storage)) == 40
    assert _keys(storage, "variant") == []
    mine = Filter(Bucket(URL))
    mine.refresh()
    assert all(mine.may_have(bytes([each]) * 20, Kind.EXECUTABLE) for each in range(40))
    told = {each.row.id for each in manifests.read(Bucket(URL))}
    assert len(told) == 40


def test_filter_never_denies_a_file_in_the_bucket(
    storage: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request finds the bucket as a kill at that moment would leave it."""
    monkeypatch.setattr(pushing, "_CLAIMED", 8)
    denied: list[str] = []
    checked = 0

    def check(method: str, key: str) -> int:
        nonlocal checked
        checked += method == "PUT" and bool(_keys(storage))
        denied.extend(_denied(storage))
        return 0

    def push(number: int) -> None:
        with Store.create(tmp_path / str(number)) as store:
            every = [bytes([build_id, number % 2]) * 10 for build_id in range(40)]
            commit(store, *(capture(store, raw, raw) for raw in every))
            assert _push(store).failed == []

    def rebuild() -> None:
        for _ in range(5):
            Filter(Bucket(URL)).rebuild()

    storage.fault = check
    threads = [threading.Thread(target=push, args=(number,)) for number in range(3)]
    threads.append(threading.Thread(target=rebuild))
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert checked > 80
    assert denied == []
    assert len(_keys(storage)) == 80


class _Held(Bucket):
    """The objects that a storage had at one moment, read without requests."""

    def __init__(self, objects_then: dict[str, bytes]) -> None:
        self.url = URL
        self._then = objects_then

    def get(self, key: str, most: int = 1 << 30) -> bytes | None:
        """The bytes of an object."""
        return self._then.get(key)

    def list(self, prefix: str, after: str = "", most: int = 0) -> Iterator[Listed]:
        """The objects below a prefix."""
        for key in sorted(self._then):
            if key.startswith(prefix) and key > after:
                yield Listed(key, len(self._then[key]), 0.0)


def _denied(storage: ObjectStorage) -> list[str]:
    """The files in the bucket of which the filter says now that they are not there."""
    held = _Held({key[2:]: each.data for key, each in [*storage.buckets["fleet"].items()]})
    found = Filter(held)
    found.refresh()
    blobs = [(row.key, objects.parse_blob_key(row.key)) for row in held.list("buildid/")]
    return [key for key, parsed in blobs if parsed and not found.may_have(*parsed)]


def test_manifest_is_written_after_an_outage(store: Store, storage: ObjectStorage) -> None:
    commit(store, capture(store, b"one", A))
    storage.fault = lambda method, key: 503 if method == "PUT" and "/host/" in key else 0
    assert _push(store).pushed == 1
    assert list(manifests.read(Bucket(URL))) == []
    storage.fault = lambda method, key: 0
    assert _push(store).present == 1
    assert [each.row.id for each in manifests.read(Bucket(URL))] == [A.hex()]


def test_file_whose_upload_begins_late_is_claimed_again(
    store: Store, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(store, capture(store, b"one", A))
    now = 1000.0
    failures = 0
    monkeypatch.setattr(pushing, "_boot_time", lambda: now)

    def late(method: str, key: str) -> int:
        nonlocal now, failures
        if method != "PUT" or "/buildid/" not in key or failures > PATIENT.retries:
            return 0
        failures += 1
        if failures == 1:
            now += 7 * 3600
            # Meanwhile the filter was made anew, without the claim.
            for each in [each for each in storage.buckets["fleet"] if "/filter/" in each]:
                del storage.buckets["fleet"][each]
            Filter(Bucket(URL)).rebuild()
        return 503

    denied = []

    def watch(method: str, key: str) -> int:
        denied.extend(_denied(storage))
        return late(method, key)

    storage.fault = watch
    assert _push(store, options=PushOptions(patience_s=60)).pushed == 1
    assert failures > PATIENT.retries
    assert denied == []


def test_push_waits_for_a_bucket_that_comes_back(store: Store, storage: ObjectStorage) -> None:
    commit(store, capture(store, b"one", A))
    asked = 0

    def fail(method: str, key: str) -> int:
        nonlocal asked
        asked += 1
        return 503 if asked < 6 else 0

    storage.fault = fail
    assert _push(store, options=PushOptions(patience_s=60)).pushed == 1


def test_refusal_ends_a_push(store: Store, storage: ObjectStorage) -> None:
    commit(store, capture(store, b"one", A))
    storage.fault = lambda method, key: 403 if method == "PUT" and "/buildid/" in key else 0
    with pytest.raises(RemoteDenied):
        _push(store, options=PushOptions(patience_s=None))


def test_push_without_a_bucket(store: Store) -> None:
    with pytest.raises(UsageError, match="url"):
        Pusher(store, config.RemoteSettings(), NO_PATIENCE)


class _Clockless(threading.Event):
    """An event that notes how long it would have been waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(round(timeout or 0, 1))
        return False


def test_rate_bounds_what_is_sent() -> None:
    stop = _Clockless()
    pace = Pace(1000, stop)
    for _ in range(3):
        pace.wait(500)
    assert stop.waited == [0.0, 0.5, 1.0]


def test_old_objects_are_touched_while_a_host_has_the_file(
    store: Store, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(store, capture(store, b"kept", A), capture(store, b"young", B))
    keep = PushOptions(patience_s=0, keep_s=1000)
    _push(store, options=keep)
    old = f"a/{objects.blob_key(A, Kind.EXECUTABLE)}"
    stored = storage.buckets["fleet"][old]
    past = stored.modified.replace(year=2020)
    storage.buckets["fleet"][old] = stored._replace(modified=past)
    _push(store, options=keep)
    assert storage.buckets["fleet"][old].modified == past  # the ledger knows that it is young
    monkeypatch.setattr("buildidfs.fleet.ledger._now", lambda: 2_000_000_000)
    _push(store, options=keep)
    assert storage.buckets["fleet"][old].modified >= stored.modified
    assert _keys(storage, "touch") == []


def test_clock_that_was_wrong_loses_nothing(
    store: Store, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(store, capture(store, b"kept", A))
    keep = PushOptions(patience_s=0, keep_s=1000)
    with monkeypatch.context() as ahead:
        ahead.setattr("buildidfs.fleet.ledger._now", lambda: 4_000_000_000)
        ahead.setattr("buildidfs.fleet.push.time.time_ns", lambda: 4_000_000_000 * 10**9)
        _push(store, options=keep)
    for key in [key for key in storage.buckets["fleet"] if "/host/" in key]:
        del storage.buckets["fleet"][key]
    key = f"a/{objects.blob_key(A, Kind.EXECUTABLE)}"
    stored = storage.buckets["fleet"][key]
    storage.buckets["fleet"][key] = stored._replace(modified=stored.modified.replace(year=2020))
    _push(store, options=keep)
    assert storage.buckets["fleet"][key].modified >= stored.modified
    assert [each.row.id for each in manifests.read(Bucket(URL))] == [A.hex()]


def test_object_that_a_rule_has_removed_is_pushed_again(
    store: Store, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(store, capture(store, b"removed", A))
    _push(store)
    del storage.buckets["fleet"][f"a/{objects.blob_key(A, Kind.EXECUTABLE)}"]
    monkeypatch.setattr("buildidfs.fleet.ledger._now", lambda: 2_000_000_000)
    _push(store, options=PushOptions(patience_s=0, keep_s=1000))
    assert _push(store).pushed == 1


def test_follow_pushes_what_is_captured(store: Store, storage: ObjectStorage) -> None:
    commit(store, capture(store, b"before", A))
    ready = threading.Event()
    with Pusher(store, SETTINGS, PushOptions(patience_s=None)) as pusher:
        thread = threading.Thread(target=pusher.follow, args=(ready.set,))
        thread.start()
        try:
            assert ready.wait(30)
            assert len(_keys(storage)) == 1
            storage.fault = lambda method, key: 503
            commit(store, capture(store, b"in an outage", B))
            until(lambda: storage.requests and storage.requests[-1].size > 0, "a failed request")
            storage.fault = lambda method, key: 0
            until(lambda: len(_keys(storage)) == 2, "the new file in the bucket", 30)
        finally:
            pusher.stop()
            thread.join()
