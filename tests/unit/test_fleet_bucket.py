# SPDX-License-Identifier: Apache-2.0
"""buildidfs.fleet: requests, errors, and the objects of a bucket."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import threading
import time
import tracemalloc
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import zstandard

from buildidfs.errors import RemoteDamaged, RemoteDenied, RemoteError, RemoteUnavailable, UsageError
from buildidfs.fleet import filters, manifests, objects, questions
from buildidfs.fleet.bucket import Bucket, RequestLimits
from buildidfs.fleet.filters import Filter, Run
from buildidfs.fleet.manifests import ManifestPlace, ManifestRow
from buildidfs.model import BuildId, ByteRange, Digest, Kind, Quality, Trust
from tests.support.harness import memory
from tests.support.harness.waiting import until
from tests.support.servers.objectstorage import FLOODS, SECRET, ObjectStorage, object_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ID = BuildId.from_hex("00112233445566778899aabbccddeeff00112233")
SHORT = RequestLimits(timeout_s=1.0, connect_s=1.0, retries=0)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStorage]:
    """Object storage with the bucket ``fleet``, for which this process has the keys."""
    with object_storage("fleet") as server:
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def bucket(storage: ObjectStorage) -> Bucket:
    return Bucket("s3://fleet/some/prefix", SHORT)


def test_object_is_created_once(bucket: Bucket, storage: ObjectStorage) -> None:
    assert bucket.create("a/b", b"first", {"sha256": "ff"})
    assert not bucket.create("a/b", b"second", {})
    assert bucket.get("a/b") == b"first"
    assert [*storage.buckets["fleet"]] == ["some/prefix/a/b"]
    head = bucket.head("a/b")
    assert head is not None
    assert (head.size, head.metadata) == (5, {"sha256": "ff"})
    assert bucket.get_range("a/b", 1, 3, head.etag) == b"irs"
    assert bucket.head("a/c") is None
    assert bucket.get("a/c") is None


def test_one_of_many_writers_creates_an_object(bucket: Bucket) -> None:
    won: list[int] = []

    def write(number: int) -> None:
        if bucket.create("raced", b"%d" % number, {}):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert bucket.get("raced") == b"%d" % won[0]
    assert len(won) == 1


def test_range_of_a_replaced_object_is_refused(bucket: Bucket, storage: ObjectStorage) -> None:
    bucket.create("a", b"first", {})
    head = bucket.head("a")
    assert head is not None
    del storage.buckets["fleet"]["some/prefix/a"]
    bucket.create("a", b"other", {})
    with pytest.raises(FileNotFoundError):
        bucket.get_range("a", 0, 1, head.etag)


def test_large_object_goes_in_parts_and_appears_whole(
    bucket: Bucket, storage: ObjectStorage
) -> None:
    chunks = [bytes([number]) * (1 << 20) for number in range(40)]
    seen: list[bool] = []

    def watched() -> Iterator[bytes]:
        for chunk in chunks:
            seen.append("some/prefix/large" in storage.buckets["fleet"])
            yield chunk

    bucket.upload("large", watched(), {"sha256": "aa"})
    assert bucket.get("large") == b"".join(chunks)
    assert not any(seen)
    assert storage.count("PUT") > 1


def test_touch_makes_an_object_young(bucket: Bucket, storage: ObjectStorage) -> None:
    bucket.create("a", b"data", {"sha256": "ff"})
    stored = storage.buckets["fleet"]["some/prefix/a"]
    old = stored._replace(modified=stored.modified.replace(year=2020))
    storage.buckets["fleet"]["some/prefix/a"] = old
    assert bucket.touch("a")
    head = bucket.head("a")
    assert head is not None
    assert head.metadata == {"sha256": "ff"}
    assert head.modified >= stored.modified.replace(year=2021).timestamp()
    assert [*storage.buckets["fleet"]] == ["some/prefix/a"]
    assert not bucket.touch("absent")


def test_missing_bucket_is_no_missing_object(storage: ObjectStorage) -> None:
    missing = Bucket("s3://another", SHORT)
    for work in (missing.identity, lambda: missing.identity(create=True)):
        with pytest.raises(RemoteDenied, match="there is no such bucket"):
            work()
    with pytest.raises(RemoteDenied, match="there is no such bucket"):
        list(missing.list("buildid"))


def test_identity_changes_when_a_bucket_is_made_anew(
    bucket: Bucket, storage: ObjectStorage
) -> None:
    assert bucket.identity() == ""
    first = bucket.identity(create=True)
    assert first == bucket.identity() == Bucket(bucket.url).identity(create=True)
    storage.buckets["fleet"].clear()
    assert bucket.identity(create=True) not in ("", first)


@pytest.mark.parametrize("status", [401, 403])
def test_refusal_names_the_remedy_and_no_secret(
    bucket: Bucket, storage: ObjectStorage, status: int
) -> None:
    storage.fault = lambda method, key: status
    with pytest.raises(RemoteDenied, match="AWS_ACCESS_KEY_ID") as caught:
        bucket.create("a", b"", {})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("status", [500, 503, -1])
def test_failing_storage_is_unavailable(
    bucket: Bucket, storage: ObjectStorage, status: int
) -> None:
    storage.fault = lambda method, key: status
    for work in (
        lambda: bucket.head("a"),
        lambda: bucket.get("a"),
        lambda: bucket.create("a", b"", {}),
        lambda: list(bucket.list("a")),
    ):
        with pytest.raises(RemoteUnavailable):
            work()


def test_storage_that_hangs_is_unavailable_in_time(bucket: Bucket, storage: ObjectStorage) -> None:
    release = threading.Event()

    def hang(method: str, key: str) -> int:
        release.wait(20)
        return -1

    storage.fault = hang
    try:
        with pytest.raises(RemoteUnavailable, match="no answer in time"):
            bucket.head("a")
    finally:
        release.set()


def test_unreachable_storage_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    for endpoint in ("http://127.0.0.1:1", "https://nosuch.invalid"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(RemoteUnavailable):
            Bucket("s3://fleet", SHORT).head("a")


@pytest.mark.parametrize(
    "url", ["", "fleet", "http://fleet", "s3://", "s3://key:secret@fleet", "file:///etc"]
)
def test_no_bucket(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        Bucket(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:9000", "ftp://host", "http://", "http://host:99999", "http://ho st", "http://h\n/"],
)
def test_endpoint_that_is_none(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL"):
        Bucket("s3://fleet")


def test_password_of_an_endpoint_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:secret@host")
    with pytest.raises(UsageError) as caught:
        Bucket("s3://fleet")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_half_of_the_credentials(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv(name, "value")
    with pytest.raises(UsageError, match=f"{name} is set") as caught:
        Bucket("s3://fleet")
    assert "value" not in str(caught.value)


def test_endpoint_of_a_file(
    storage: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    file = tmp_path / "config"
    file.write_text(f"[profile fleet]\nendpoint_url = {storage.url}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "fleet")
    assert Bucket("s3://fleet", SHORT).create("a", b"", {})


def test_credentials_of_files(
    storage: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = storage.environ()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    file.write_text(
        f"[fleet]\naws_access_key_id = {keys['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {keys['AWS_SECRET_ACCESS_KEY']}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "fleet")
    assert Bucket("s3://fleet", SHORT).create("a", b"", {})
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(UsageError, match="'other'"):
        Bucket("s3://fleet", SHORT)


# --- metadata ------------------------------------------------------------------------------------


def test_metadata_come_back() -> None:
    given = objects.Described(
        Digest(bytes(range(32))),
        Quality.DEBUGINFO,
        Trust.PACKAGE,
        (ByteRange(5, 7), ByteRange(100, 1)),
        0xABC,
        True,
        False,
        123,
        456,
        b"/opt/\xff \n/a",
        "höst",
    )
    metadata = given.metadata()
    assert objects.described(metadata) == given
    assert all(re.fullmatch(r"[\x20-\x7e]*", value) for value in metadata.values())


def test_damaged_metadata_count_as_absent() -> None:
    found = objects.described(
        {"sha256": "x", "quality": "best", "trust": "-1", "scripts": "a+b", "mtime": "9" * 30}
    )
    assert found == objects.Described(None)


@pytest.mark.parametrize(
    "path", ["usr/bin/a", "/a/../etc/passwd", "/a%00b", "/", "//a", "/a/", "/./a", "%ff"]
)
def test_path_that_no_file_has_counts_as_absent(path: str) -> None:
    assert objects.described({"path": path}).path == b""


def test_host_name_has_no_commands_for_a_terminal() -> None:
    assert objects.described({"host": "no%1b[2Jrth%0a%e2%80%ae"}).host == "no[2Jrth"


@pytest.mark.parametrize("kind", Kind)
def test_key_of_a_blob_comes_back(kind: Kind) -> None:
    assert objects.parse_blob_key(objects.blob_key(ID, kind)) == (ID, kind)


@pytest.mark.parametrize("key", ["buildid/abc/executable", "buildid/ab/debuginfo", "buildid/00/x"])
def test_other_keys_are_none_of_a_blob(key: str) -> None:
    assert objects.parse_blob_key(key) is None


# --- filter --------------------------------------------------------------------------------------


def _ids(first: int, count: int) -> list[tuple[bytes, Kind]]:
    return [(number.to_bytes(20, "big"), Kind.EXECUTABLE) for number in range(first, first + count)]


def test_filter_has_all_members_and_few_others(bucket: Bucket) -> None:
    mine = Filter(bucket)
    assert mine.may_have(ID, Kind.EXECUTABLE)  # there is none yet
    mine.rebuild()
    assert not mine.may_have(ID, Kind.EXECUTABLE)
    assert mine.add(_ids(0, 5000)) == 5000
    assert mine.add(_ids(4000, 2000)) == 1000
    theirs = Filter(bucket)
    theirs.refresh()
    assert all(theirs.may_have(*each) for each in _ids(0, 6000))
    assert sum(theirs.may_have(*each) for each in _ids(10**6, 10_000)) <= 5
    assert not theirs.may_have((0).to_bytes(20, "big"), Kind.DEBUGINFO)


def test_filters_of_writers_at_the_same_time_lose_nothing(bucket: Bucket) -> None:
    Filter(bucket).rebuild()
    failures: list[Exception] = []

    def add(first: int) -> None:
        try:
            for start in range(first, first + 50, 10):
                Filter(bucket).add(_ids(start, 10))
        except RemoteError as error:
            failures.append(error)

    threads = [threading.Thread(target=add, args=(1000 * number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures
    found = Filter(bucket)
    found.refresh()
    wanted = [each for number in range(4) for each in _ids(1000 * number, 50)]
    assert all(found.may_have(*each) for each in wanted)
    assert found.count == len(wanted)


def test_filter_keeps_few_runs_and_generations(bucket: Bucket, storage: ObjectStorage) -> None:
    mine = Filter(bucket)
    mine.rebuild()
    for start in range(0, 640, 10):
        mine.add(_ids(start, 10))
    assert mine.generation is not None
    assert len(mine.generation.runs) <= 7
    kept = [key for key in storage.buckets["fleet"] if "/filter/" in key]
    assert len(kept) <= 16 + 2 * 16


def test_reader_that_is_far_behind_finds_the_newest_filter(bucket: Bucket) -> None:
    writer, reader = Filter(bucket), Filter(bucket)
    writer.rebuild()
    reader.refresh()
    for start in range(0, 500, 10):
        writer.add(_ids(start, 10))
    assert reader.refresh()
    assert reader.generation == writer.generation
    assert not reader.refresh()


def test_filter_is_dropped_with_the_bucket(bucket: Bucket, storage: ObjectStorage) -> None:
    reader = Filter(bucket)
    reader.rebuild()
    assert not reader.may_have(ID, Kind.EXECUTABLE)
    storage.buckets["fleet"].clear()
    assert reader.refresh()
    assert reader.may_have(ID, Kind.EXECUTABLE)
    Filter(bucket).rebuild()
    assert reader.refresh()
    assert not reader.may_have(ID, Kind.EXECUTABLE)


def test_writer_that_is_far_behind_loses_nothing(bucket: Bucket) -> None:
    late, others = Filter(bucket), Filter(bucket)
    late.rebuild()
    for start in range(0, 500, 10):
        others.add(_ids(start, 10))
    # It publishes what it made a long time ago; the number is free, because it was deleted.
    assert not late._publish([])
    late.add(_ids(1000, 10))
    found = Filter(bucket)
    found.refresh()
    assert all(found.may_have(*each) for each in (*_ids(0, 500), *_ids(1000, 10)))


def test_filter_needs_no_right_to_delete(bucket: Bucket, storage: ObjectStorage) -> None:
    storage.fault = lambda method, key: 403 if method in ("DELETE", "POST") else 0
    mine = Filter(bucket)
    mine.rebuild()
    for start in range(0, 200, 10):
        mine.add(_ids(start, 10))
    assert mine.count == 200


def test_rebuilt_filter_has_what_the_bucket_lists(bucket: Bucket) -> None:
    for build_id, kind in _ids(0, 30):
        bucket.create(objects.blob_key(build_id, kind), b"", {})
    mine = Filter(bucket)
    assert mine.rebuild() == 30
    assert all(mine.may_have(*each) for each in _ids(0, 30))
    assert not mine.may_have(ID, Kind.EXECUTABLE)


def test_claim_without_a_file_is_dropped_a_day_after_it_was_doubted(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = 86_400.0
    now = 1000.0
    monkeypatch.setattr(bucket, "now", lambda: now)
    (held, gone, again) = _ids(0, 3)
    bucket.create(objects.blob_key(*held), b"", {})
    mine = Filter(bucket)

    def claimed() -> list[bool]:
        found = Filter(bucket)
        found.refresh()
        return [found.may_have(*each) for each in (held, gone, again)]

    mine.rebuild()
    mine.add([gone, again])
    for seconds in (0, day / 2, day / 3):  # the first call doubts it
        now += seconds
        assert Filter(bucket).rebuild() == 1
        assert claimed() == [True, True, True]
    assert Filter(bucket).add([again]) == 1  # by a host that is about to upload it
    now += day / 2
    assert Filter(bucket).rebuild() == 1
    assert claimed() == [True, False, True]
    now += 2 * day
    assert Filter(bucket).rebuild() == 1
    assert claimed() == [True, False, False]


def test_claim_made_while_the_filter_is_made_anew_stays(
    bucket: Bucket, storage: ObjectStorage
) -> None:
    mine = Filter(bucket)
    mine.rebuild()
    mine.add(_ids(0, 10))
    claimed = False

    def claim(method: str, key: str) -> int:
        nonlocal claimed
        if key.endswith("/filter/00000003.json") and method == "PUT" and not claimed:
            claimed = True
            Filter(bucket).add(_ids(100, 10))
        return 0

    storage.fault = claim
    Filter(bucket).rebuild()
    assert claimed
    found = Filter(bucket)
    found.refresh()
    assert all(found.may_have(*each) for each in (*_ids(0, 10), *_ids(100, 10)))


def test_filter_of_a_bucket_that_was_filled_anew_is_read(
    bucket: Bucket, storage: ObjectStorage
) -> None:
    reader = Filter(bucket)
    for first in (0, 100):
        storage.buckets["fleet"].clear()
        Filter(bucket).rebuild()
        Filter(bucket).add(_ids(first, 10))
        reader.refresh()  # finds a generation of the number that it knows
        assert all(reader.may_have(*each) for each in _ids(first, 10))


def _damage(storage: ObjectStorage, part: str, change: Callable[[bytes], bytes]) -> None:
    for key in [key for key in storage.buckets["fleet"] if part in key]:
        stored = storage.buckets["fleet"][key]
        storage.buckets["fleet"][key] = stored._replace(data=change(stored.data))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("/runs/", lambda data: data[:-3]),
        ("/runs/", lambda data: b"BIF1" + b"\xff" * len(data)),
        ("/runs/", lambda data: data + bytes(100_000)),
        (".json", lambda data: b"[" * 50_000),
        (".json", lambda data: data + b" " * 100_000),
        (".json", lambda data: data.replace(b'"number":', b'"number":9')),
        (".json", lambda data: data.replace(b"filter/runs/", b"buildid/")),
        (".json", lambda data: re.sub(rb'"count":\d+', b'"count":900000000', data)),
        (".json", lambda data: re.sub(rb'"count":\d+', b'"count":-1', data)),
    ],
)
def test_damaged_filter_is_named_and_can_be_made_anew(
    bucket: Bucket, storage: ObjectStorage, part: str, change: Callable[[bytes], bytes]
) -> None:
    for each in _ids(0, 10):
        bucket.create(objects.blob_key(*each), b"", {})
    mine = Filter(bucket)
    mine.rebuild()
    mine.add(_ids(0, 20))
    _damage(storage, f"/filter{part}" if part == "/runs/" else "/filter/0000", change)
    with pytest.raises(RemoteDamaged, match="--rebuild"):
        Filter(bucket).refresh()
    assert Filter(bucket).rebuild() == 10
    found = Filter(bucket)
    found.refresh()
    assert all(found.may_have(*each) for each in _ids(0, 10))


_RUN = "filter/runs/" + "ab" * 16
_FAULTS = {
    "run with an odd key": {"runs": [{"key": "filter/runs/a//b", "count": 1}]},
    "run of another place": {"runs": [{"key": "filter/runs/../../host/a", "count": 1}]},
    "run that is absent": {"runs": [{"key": _RUN, "count": 1}]},
    "huge run": {"runs": [{"key": _RUN, "count": 1 << 62}]},
    "less than nothing": {"runs": [{"key": _RUN, "count": -1}]},
    "one run twice": {"runs": [{"key": _RUN, "count": 0}] * 2},
    "claims of the future": {"runs": [{"key": _RUN, "count": 0, "doubted": 1e300}]},
    "another number": {"number": 7},
    "negative time": {"made": -1},
    "no object": None,
}


def _forged(bucket: Bucket, number: int, change: dict[str, object] | None) -> None:
    """Create a generation as a host can that may create objects only."""
    data = (
        b"\xff" if change is None else msgspec.json.encode({"number": number, "made": 1} | change)
    )
    bucket.create(f"filter/{number:08d}.json", data, {})


def _refuse_deletion(method: str, key: str) -> int:
    return 403 if method in ("DELETE", "POST") else 0


@pytest.mark.parametrize("fault", _FAULTS)
def test_faulty_generations_of_another_host_stop_nobody(
    bucket: Bucket, storage: ObjectStorage, fault: str
) -> None:
    storage.fault = _refuse_deletion
    bucket.create(objects.blob_key(*_ids(0, 1)[0]), b"", {})
    reader, writer = Filter(bucket), Filter(bucket)
    writer.rebuild()
    reader.refresh()
    for number in (*range(2, 40), 998, 1001, 2001, 5000, 99_999_999):
        _forged(bucket, number, _FAULTS[fault])
    writer.add(_ids(0, 10))
    assert Filter(bucket).add(_ids(10, 10)) == 10
    assert Filter(bucket).rebuild() == 1
    for each in (reader, Filter(bucket)):
        assert each.refresh()
        assert all(each.may_have(*member) for member in _ids(0, 20))
        assert not each.may_have(ID, Kind.EXECUTABLE)
        assert not each.refresh()


def test_first_generation_of_another_host_stops_nobody(
    bucket: Bucket, storage: ObjectStorage
) -> None:
    storage.fault = _refuse_deletion
    for number in (1, 2):
        _forged(bucket, number, None)
    for junk in ("0.json", "00000000.json", "00000001.json.old", "0000-"):
        bucket.create(f"filter/{junk}", b"", {})
    reader = Filter(bucket)
    with pytest.raises(RemoteDamaged, match="--rebuild"):
        reader.refresh()
    Filter(bucket).rebuild()
    assert reader.refresh()
    assert not reader.may_have(ID, Kind.EXECUTABLE)


def test_number_far_ahead_does_not_count(bucket: Bucket, storage: ObjectStorage) -> None:
    mine = Filter(bucket)
    mine.rebuild()
    mine.add(_ids(0, 10))
    whole = storage.buckets["fleet"]["some/prefix/filter/00000002.json"].data
    for number in (1002, 5001, 99_999_999):
        bucket.create(f"filter/{number:08d}.json", whole.replace(b":2,", b":%d," % number, 1), {})
    bucket.create("filter/runs", b"", {})
    for each in (mine, Filter(bucket)):
        each.refresh()
        assert each.generation is not None
        assert each.generation.number == 2
    assert mine.add(_ids(10, 1)) == 1
    assert mine.generation.number == 3


def test_large_run_is_in_a_file(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "_MOST_HELD", 1)
    Filter(bucket).rebuild()
    Filter(bucket).add(_ids(0, 100))
    found = Filter(bucket)
    found.refresh()
    assert all(found.may_have(*each) for each in _ids(0, 100))
    assert not found.may_have(ID, Kind.EXECUTABLE)
    assert found.add(_ids(100, 100)) == 100
    assert found.count == 200


def test_unsorted_run_of_another_host_spoils_no_other(
    bucket: Bucket, storage: ObjectStorage
) -> None:
    Filter(bucket).rebuild()
    run = Run((*([0] * 256), 3), array("I", [9, 1, 5]))
    key = f"filter/runs/{hashlib.sha256(run.pack()).hexdigest()[:32]}"
    bucket.create(key, run.pack(), {})
    _forged(bucket, 2, {"runs": [{"key": key, "count": 3}]})
    Filter(bucket).add(_ids(0, 10))
    found = Filter(bucket)
    found.refresh()
    assert all(found.may_have(*each) for each in _ids(0, 10))
    assert found.count == 13


@pytest.mark.parametrize("rows", [["b", "a"], ["a", "a"]])
def test_listing_out_of_order_is_refused(
    bucket: Bucket, storage: ObjectStorage, rows: list[str]
) -> None:
    storage.listing = lambda key: [f"some/prefix/host/{each}" for each in rows]
    with pytest.raises(RemoteDamaged, match="out of order"):
        list(bucket.list("host"))


def test_listing_has_a_bound(bucket: Bucket, storage: ObjectStorage) -> None:
    for number in range(10):
        bucket.create(f"host/{number}", b"", {})
    assert len(list(bucket.list("host", most=10))) == 10
    with pytest.raises(RemoteDamaged, match="more than 9"):
        list(bucket.list("host", most=9))


# --- manifests -----------------------------------------------------------------------------------


def test_manifests_come_back(bucket: Bucket) -> None:
    rows = [
        ManifestRow(
            f"{number:040x}",
            "executable",
            "ab" * 32,
            5,
            "pushed",
            (ManifestPlace("/a\udcff"[:2], "c", 1, 2),),
        )
        for number in range(100)
    ]
    manifests.write(bucket, "host/../x", rows[:60])
    manifests.write(bucket, "other", rows[60:])
    found = list(manifests.read(bucket))
    assert [each.row for each in found] == rows
    assert {each.host for each in found} == {"host-..-x", "other"}


def test_damaged_manifest_costs_its_own_rows(bucket: Bucket, storage: ObjectStorage) -> None:
    row = ManifestRow("00" * 20, "executable", "ab" * 32, 5, "pushed")
    key = manifests.write(bucket, "damaged", [row] * 1000)
    stored = storage.buckets["fleet"][f"some/prefix/{key}"]
    storage.buckets["fleet"][f"some/prefix/{key}"] = stored._replace(data=stored.data[:40])
    manifests.write(bucket, "whole", [row])
    assert "whole" in {each.host for each in manifests.read(bucket)}


def _packed(*rows: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(b"".join(row + b"\n" for row in rows))


def _line(**changes: object) -> bytes:
    given = {"id": "ab" * 20, "kind": "executable", "sha256": "00" * 32, "size": 5}
    return msgspec.json.encode({**given, "state": "pushed", **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "x" * 40},
        {"id": "ab" * 121},
        {"id": "ab" * 20 + "\n"},
        {"kind": "executable\n"},
        {"sha256": "0" * 63},
        {"state": "gone"},
        {"size": -1},
        {"size": 1 << 60},
        {"places": [{"path": "/a", "first": -1}]},
        {"places": [{"path": "/a", "last": 1 << 62}]},
        {"places": [{"path": "/" + "a" * 5000}]},
        {"places": [{"path": "/a"}] * 65},
    ],
)
def test_odd_row_of_a_manifest_is_left_out(bucket: Bucket, changes: dict[str, object]) -> None:
    bucket.create("host/mallory/a.jsonl.zst", _packed(_line(**changes)), {})
    manifests.write(bucket, "other", [ManifestRow("00" * 20, "executable", "ab" * 32, 5, "pushed")])
    assert [each.host for each in manifests.read(bucket)] == ["other"]


@pytest.mark.parametrize("host", [".", ".."])
def test_manifest_whose_key_no_client_reads_is_left_out(
    bucket: Bucket, storage: ObjectStorage, host: str
) -> None:
    manifests.write(bucket, "other", [ManifestRow("00" * 20, "executable", "ab" * 32, 5, "pushed")])
    objects = storage.buckets["fleet"]
    objects[f"some/prefix/host/{host}/a.jsonl.zst"] = next(iter(objects.values()))
    assert [each.host for each in manifests.read(bucket)] == ["other"]


def test_small_manifest_costs_little(bucket: Bucket) -> None:
    places = [{"path": f"/{number}"} for number in range(64)]
    for number in range(3):
        rows = [_line(id=f"{each:040x}", places=places) for each in range(20_000)]
        bucket.create(f"host/mallory/{number}.jsonl.zst", _packed(*rows), {})
    manifests.write(bucket, "other", [ManifestRow("00" * 20, "executable", "ab" * 32, 5, "pushed")])
    began = time.process_time()
    tracemalloc.start()
    try:
        found = questions.which(bucket, "*")
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert len(found) <= 100_000
    assert time.process_time() - began < 20


def test_manifest_with_many_rows_is_written_as_several(bucket: Bucket) -> None:
    place = ManifestPlace("/" + "\u00fc" * 4000, "c", 1, 2)
    rows = [
        ManifestRow(f"{number:040x}", "executable", "ab" * 32, 5, "pushed", (place,) * 64)
        for number in range(60)
    ]
    manifests.write(bucket, "host", rows)
    assert len(manifests.listed(bucket)) > 1
    assert [each.row for each in manifests.read(bucket)] == rows


def test_identity_of_a_bucket_with_an_odd_marker(bucket: Bucket, storage: ObjectStorage) -> None:
    for data in (b"", b"[" * 4000, b'{"bucket": "\\u001b"}', bytes(1 << 20)):
        storage.buckets["fleet"].clear()
        bucket.create("buildidfs.json", data, {})
        assert re.fullmatch("[0-9a-f]{64}", bucket.identity(create=True))


# --- a hostile server ----------------------------------------------------------------------------


@pytest.mark.parametrize("flood", FLOODS)
def test_server_that_sends_without_end_takes_no_memory(
    bucket: Bucket, storage: ObjectStorage, flood: str
) -> None:
    bucket.create("buildid/aa/x", b"data" * 50_000, {})
    storage.flood = lambda method, key: flood
    before = memory.peak(os.getpid())
    for ask in (
        lambda: bucket.peek("buildid/aa/x", 65_536),
        lambda: bucket.get_range("buildid/aa/x", 0, 65_536),
        lambda: bucket.get_range("buildid/aa/x", 0, 1 << 20),
        lambda: bucket.get("buildid/aa/x", 1 << 20),
        lambda: bucket.head("buildid/aa/x"),
        lambda: list(bucket.list("buildid")),
        lambda: bucket.create("buildid/aa/y", b"", {}),
        lambda: bucket.upload("buildid/aa/z", [bytes(1 << 20)] * 20, {}),
        bucket.identity,
    ):
        with (
            memory.peaks(lambda: [bucket._link.pid]) as peaks,
            contextlib.suppress(RemoteError, FileNotFoundError),
        ):
            ask()
        assert max(peaks.values(), default=0) < 300 << 20
    assert memory.peak(os.getpid()) - before < 20 << 20
    storage.flood = lambda method, key: ""
    until(lambda: _answers(bucket), "the bucket")
    assert bucket.get_range("buildid/aa/x", 4, 4) == b"data"


def _answers(bucket: Bucket) -> bool:
    try:
        return bucket.head("buildid/aa/x") is not None
    except RemoteUnavailable:
        return False


@pytest.mark.parametrize(
    "odd",
    [
        "filter//x",
        "filter/00000001.jso/../x",
        "filter/0/./x",
        "filter/0\nb",
        "filter/00000003.json/",
        "filter/00000002.json/",
        "filter/00000002.json//b",
        "filter/0 %2f+&<b",
        "filter/0\u00fc",
    ],
)
def test_odd_key_of_another_host_hides_no_other(
    bucket: Bucket, storage: ObjectStorage, odd: str
) -> None:
    mine = Filter(bucket)
    mine.rebuild()
    mine.add(_ids(0, 10))
    for number in range(100):
        bucket.create(f"filter/{number + 100:08d}.json", b"", {})
    storage.buckets["fleet"][f"some/prefix/{odd}"] = next(iter(storage.buckets["fleet"].values()))
    wanted = {key.removeprefix("some/prefix/") for key in storage.buckets["fleet"]}
    assert {row.key for row in bucket.list("filter")} == {key for key in wanted if key.isascii()}
    found = Filter(bucket)
    found.refresh()
    assert found.generation == mine.generation


def test_requests_go_on_when_their_process_is_killed(bucket: Bucket) -> None:
    bucket.create("a", b"data", {})
    os.kill(bucket._link.pid, signal.SIGKILL)
    with pytest.raises(RemoteUnavailable, match="killed"):
        bucket.get("a")
    until(lambda: _reads(bucket), "the process")


def _reads(bucket: Bucket) -> bool:
    try:
        return bucket.get("a") == b"data"
    except RemoteUnavailable:
        return False


def test_process_that_is_stopped_is_replaced(bucket: Bucket) -> None:
    bucket.create("a", b"data", {})
    short = bucket.limited(RequestLimits(timeout_s=0.1, retries=0))
    os.kill(bucket._link.pid, signal.SIGSTOP)
    with pytest.raises(RemoteUnavailable, match="no answer in time"):
        short.get("a")
    until(lambda: _reads(bucket), "another process")


def test_upload_that_is_broken_off_leaves_no_object(bucket: Bucket) -> None:
    def chunks() -> Iterator[bytes]:
        yield bytes(10 << 20)
        raise KeyError

    with pytest.raises(KeyError):
        bucket.upload("a", chunks(), {})
    assert bucket.head("a") is None


def test_process_ends_with_its_bucket(storage: ObjectStorage) -> None:
    bucket = Bucket("s3://fleet", SHORT)
    bucket.head("a")
    pid = bucket._link.pid
    del bucket
    until(lambda: not memory.peak(pid), "the end of the process")
