# SPDX-License-Identifier: Apache-2.0
"""Bytes leave the store whole, verified, and with the time and mode of the original."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.errors import IntegrityError, UsageError
from buildidfs.model import (
    Artifact,
    BuildId,
    FileIdentity,
    Kind,
    Origin,
    Quality,
    Sighting,
)
from buildidfs.store import NewCapture, Store, export

BYTES = b"\x7fELF and the rest" * 1000
BUILD_ID = BuildId(b"\x12" * 20)
MTIME_NS = 1_600_000_000_123_456_789


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.create(tmp_path / "store")
    source = tmp_path / "source"
    source.write_bytes(BYTES)
    with open(source, "rb") as file:
        staged = store.stage(file.fileno())
    identity = FileIdentity(1, 2, len(BYTES), MTIME_NS, MTIME_NS, 0o100755, 0, 0)
    origin = Origin(path=b"/bin/x", identity=identity)
    store.commit(
        [
            NewCapture(
                Sighting(origin, time.time_ns()),
                staged,
                BUILD_ID,
                (Kind.EXECUTABLE,),
                Quality.NONE,
            )
        ]
    )
    yield store
    store.close()


@pytest.fixture
def artifact(store: Store) -> Artifact:
    found = store.index.artifact(store.index.ordinal(BUILD_ID) or 0, Kind.EXECUTABLE)
    assert found is not None
    return found


def _damage(store: Store, artifact: Artifact) -> None:
    path = os.fsdecode(store.blobs.path(artifact.digest))
    os.chmod(path, 0o600)
    with open(path, "r+b") as file:
        file.seek(100)
        file.write(b"?")


def test_to_stream(store: Store, artifact: Artifact) -> None:
    stream = io.BytesIO()
    export.to_stream(store, artifact, stream)
    assert stream.getvalue() == BYTES


def test_nothing_of_a_damaged_blob_reaches_the_stream(store: Store, artifact: Artifact) -> None:
    _damage(store, artifact)
    stream = io.BytesIO()
    with pytest.raises(IntegrityError, match="has not the bytes that were captured"):
        export.to_stream(store, artifact, stream)
    assert stream.getvalue() == b""


def test_to_file(store: Store, artifact: Artifact, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"what was there before")
    export.to_file(store, artifact, str(path))
    assert path.read_bytes() == BYTES
    status = path.stat()
    assert status.st_mtime_ns == MTIME_NS
    assert status.st_mode & 0o111
    assert sorted(os.listdir(tmp_path)) == ["out", "source", "store"]


def test_a_damaged_blob_leaves_the_file_as_it_was(
    store: Store, artifact: Artifact, tmp_path: Path
) -> None:
    _damage(store, artifact)
    path = tmp_path / "out"
    path.write_bytes(b"precious")
    with pytest.raises(IntegrityError):
        export.to_file(store, artifact, str(path))
    assert path.read_bytes() == b"precious"
    assert sorted(os.listdir(tmp_path)) == ["out", "source", "store"]


def test_a_device_is_written_to_and_not_replaced(store: Store, artifact: Artifact) -> None:
    before = os.stat("/dev/null")
    export.to_file(store, artifact, "/dev/null")
    after = os.stat("/dev/null")
    assert (before.st_rdev, before.st_ino) == (after.st_rdev, after.st_ino)


def test_a_place_that_cannot_be_written_is_named(store: Store, artifact: Artifact) -> None:
    with pytest.raises(UsageError, match="cannot write /proc/none/x"):
        export.to_file(store, artifact, "/proc/none/x")


def test_log_in_a_directory_of_others(tmp_path: Path) -> None:
    """It is never appended to what they have put there."""
    (tmp_path / "victim").write_text("before\n")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "link").symlink_to(tmp_path / "victim")
    os.link(tmp_path / "victim", shared / "hard")
    for name in ("link", "hard"):
        with pytest.raises(OSError, match=r"symbolic links|another user's"):
            export.open_log(os.fspath(shared / name))
    shared.chmod(0o755)
    with open(export.open_log(os.fspath(shared / "link")), "a") as log:
        log.write("a message\n")
    assert (tmp_path / "victim").read_text() == "before\na message\n"
    shared.chmod(0o777)
    for _ in range(2):
        with open(export.open_log(os.fspath(shared / "new")), "a") as log:
            log.write("a message\n")
    assert (shared / "new").read_text() == "a message\n" * 2
    assert (shared / "new").stat().st_mode & 0o777 == 0o600
