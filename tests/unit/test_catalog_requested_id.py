# SPDX-License-Identifier: Apache-2.0
"""buildidfs.catalog.requested_id: the build ID that a user means by digits or by a path."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.catalog import requested_id
from buildidfs.errors import AmbiguousBuildId, ArtifactMissing, InvalidBuildId, UsageError
from buildidfs.model import BuildId
from buildidfs.store import NewSeen, Store
from tests.support.elf.elfwriter import elf_file
from tests.support.harness.captures import NOW, SECOND, capture, commit, sighting

ONE, TWO, THREE = (BuildId(bytes([number]) * 20) for number in (1, 2, 3))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as made:
        yield made


def see(store: Store, build_id: BuildId, path: bytes, container: str = "", at: int = 0) -> None:
    seen = sighting(path, container=container, seen_ns=NOW + at * SECOND)
    commit(store, capture(store, bytes(build_id), bytes(build_id), at=seen))


def test_build_ids_may_be_unknown_in_full_only(store: Store) -> None:
    known = BuildId(bytes.fromhex("abcdef0123"))
    store.commit([capture(store, b"x", known), capture(store, b"y", bytes.fromhex("abcdef99"))])
    assert requested_id.future_build_id(store, "abcdef01") == known
    unknown = "AB" * 20
    assert requested_id.future_build_id(store, unknown) == BuildId.from_hex(unknown)
    with pytest.raises(AmbiguousBuildId):
        requested_id.future_build_id(store, "abcd")
    with pytest.raises(ArtifactMissing, match="has to be given in full"):
        requested_id.future_build_id(store, "1234")
    with pytest.raises(InvalidBuildId):
        requested_id.future_build_id(store, "1" * 41)


def test_beginning_of_an_id(store: Store) -> None:
    see(store, ONE, b"/app")
    assert requested_id.build_id(store, "0101") == ONE
    with pytest.raises(ArtifactMissing):
        requested_id.build_id(store, "0303")


def test_beginning_of_an_id_in_the_journal(store: Store) -> None:
    store.note_seen([NewSeen(sighting(b"/app"), THREE)])
    assert requested_id.build_id(store, str(THREE)) == THREE
    assert requested_id.build_id(store, str(THREE)[:10].upper()) == THREE
    other = BuildId(bytes(THREE)[:5] + b"other")
    store.note_seen([NewSeen(sighting(b"/other"), other)])
    with pytest.raises(AmbiguousBuildId, match=f"{other}, {THREE}|{THREE}, {other}"):
        requested_id.build_id(store, str(THREE)[:10])


def test_path_means_the_last_file_of_this_host(store: Store) -> None:
    see(store, ONE, b"/usr/lib/libx.so", at=1)
    see(store, TWO, b"/usr/lib/libx.so", at=2)
    see(store, THREE, b"/usr/lib/libx.so", "docker:0123", at=3)
    assert requested_id.build_id(store, "/usr/lib/libx.so") == TWO
    assert requested_id.build_id(store, "/lib/libx.so") == TWO, "/usr is merged"
    assert requested_id.build_id(store, "/usr/lib/libx.so", "docker:01") == THREE


def test_path_in_containers_only(store: Store) -> None:
    see(store, ONE, b"/app", "docker:0123")
    see(store, ONE, b"/app", "docker:4567")
    assert requested_id.build_id(store, "/app") == ONE
    see(store, TWO, b"/app", "docker:89ab", at=1)
    with pytest.raises(AmbiguousBuildId) as told:
        requested_id.build_id(store, "/app")
    assert "2 build IDs were seen at /app: 020202020202 in docker:89ab" in str(told.value)


def test_file_that_is_there_comes_first(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "app"
    file.write_bytes(elf_file(build_id=ONE))
    with pytest.raises(ArtifactMissing, match="buildidfs add"):
        requested_id.build_id(store, str(file))
    see(store, TWO, os.fsencode(file), at=5)
    see(store, ONE, b"/elsewhere")
    assert requested_id.build_id(store, str(file)) == ONE
    link = tmp_path / "link"
    link.symlink_to(file)
    assert requested_id.build_id(store, str(link)) == ONE
    file.unlink()
    assert requested_id.build_id(store, str(file)) == TWO


def test_path_that_nothing_is_known_of(store: Store, tmp_path: Path) -> None:
    with pytest.raises(
        ArtifactMissing, match="nothing was ever seen at /no/such, and there is no such file"
    ):
        requested_id.build_id(store, "/no/such")
    with pytest.raises(InvalidBuildId, match="no such file, and no build ID"):
        requested_id.build_id(store, "xyz")
    empty = tmp_path / "perf.data"
    empty.touch()
    with pytest.raises(ArtifactMissing, match="is no ELF file with a build ID"):
        requested_id.build_id(store, str(empty))


def test_files_that_are_read_themselves(store: Store, tmp_path: Path) -> None:
    see(store, ONE, b"/app")
    assert requested_id.unless_file(store, "/app") == ONE
    assert requested_id.unless_file(store, str(tmp_path)) is None
    with pytest.raises(UsageError, match="no file, no build ID"):
        requested_id.unless_file(store, "/no/such")


def test_lease_of_the_owner_does_not_hold_up_a_look_at_the_file(tmp_path: Path) -> None:
    path = tmp_path / "app"
    path.write_bytes(elf_file(build_id=ONE))
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # ignored, other than SIGIO
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        assert (
            requested_id.id_at(os.fsencode(path)) is None
        )  # at once, not when the lease is broken
    finally:
        os.close(fd)
    assert requested_id.id_at(os.fsencode(path)) == ONE
