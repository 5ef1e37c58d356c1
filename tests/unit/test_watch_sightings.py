# SPDX-License-Identifier: Apache-2.0
"""What was caught, as a sighting: where it was, and how far it is believed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buildidfs.capture.live.protocol import Caught, ProcessPlace
from buildidfs.capture.origin.path_access import Reach, Root
from buildidfs.linux import inodes, machine, mounts, namespaces, procfs
from buildidfs.model import EVERYBODY, OWNER, BuildId, NamespaceSet, Sighting, Trust
from buildidfs.watch.catcher_client import LiveSightings
from tests.support.harness.captures import identity
from tests.support.harness.children import needs_root, private_cat
from tests.support.harness.scans import open_descriptors
from tests.support.harness.waiting import until

HOST = NamespaceSet(1, 2, 3, 4, 5, 6, 7)
CONTAINER = NamespaceSet(1, 20, 3, 4, 5, 60, 7)
DOCKER = b"/system.slice/docker-" + b"0123456789abcdef" * 4 + b".scope"


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sightings look at directories anew for each file."""
    monkeypatch.setattr("buildidfs.watch.catcher_client._KEEP_S", -1.0)


@pytest.fixture(autouse=True)
def _descriptors_are_closed() -> Iterator[None]:
    before = open_descriptors()
    yield
    until(lambda: open_descriptors() <= before, "all descriptors to be closed")  # by threads, too


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> LiveSightings:
    """Of a host whose mounts are believed to be ours, as far as they are not nosuid."""

    def believed() -> bytes:
        return mounts.mountinfo().replace(b"nosuid", b"suid")

    monkeypatch.setattr(mounts, "initial_mountinfo", believed)
    return LiveSightings(initial=HOST)


def caught(path: bytes = b"/bin/app", **changes: Any) -> Caught:
    """Something that was caught; ``changes`` are fields of the place, or of its identity."""
    place = {"namespaces": HOST, "mnt_ns_id": 99, "cgroup": b"/init.scope", "cgroup_id": 5}
    place |= {
        name: changes.pop(name) for name in [*changes] if name in ProcessPlace.__struct_fields__
    }
    return Caught(b"k" * 16, 4711, 1234, path, identity(**changes), ProcessPlace(**place))


def sighting_of_file(live: LiveSightings, path: Path, shown: bytes = b"", **place: Any) -> Sighting:
    """Of a file that is root's, whoever runs the test."""
    fd = os.open(path, os.O_PATH)
    try:
        own = inodes.identity(fd)
        changes = {"dev": own.dev, "ino": own.ino, "scope": own.scope}
        return live.of(caught(shown or os.fsencode(path), **changes, **place), fd)
    finally:
        os.close(fd)


def test_everything_that_is_known(host: LiveSightings) -> None:
    seen = host.of(caught(), -1)
    origin = seen.origin
    assert (origin.path, origin.identity, seen.seen_ns) == (b"/bin/app", identity(), 1234)
    assert (origin.namespaces, origin.mnt_ns_id) == (HOST, 99)
    assert (origin.cgroup, origin.cgroup_id) == (b"/init.scope", 5)
    assert (origin.host, origin.scanner, origin.container, origin.apart) == (
        machine.host_name(),
        "watch",
        "",
        0,
    )


def test_in_a_container(host: LiveSightings) -> None:
    origin = host.of(caught(namespaces=CONTAINER, cgroup=DOCKER), -1).origin
    assert (origin.container, origin.trust) == ("docker:0123456789ab", Trust.CONTAINER)
    assert origin.apart == 1 << 1 | 1 << 5
    origin = host.of(caught(namespaces=CONTAINER), -1).origin
    assert origin.container == "mnt:60"


def test_what_a_container_is_can_be_chosen() -> None:
    live = LiveSightings(("net",), HOST)
    assert live.of(caught(namespaces=CONTAINER, cgroup=DOCKER), -1).origin.container == ""
    apart = NamespaceSet(10, 2, 3, 4, 5, 6, 7)
    assert live.of(caught(namespaces=apart), -1).origin.container == "net:10"


def test_where_nobody_knows(host: LiveSightings) -> None:
    origin = host.of(caught(namespaces=NamespaceSet(), mnt_ns_id=0), -1).origin
    assert (origin.trust, origin.apart, origin.container) == (Trust.UNKNOWN, 0, "")


def test_a_file_of_roots_on_the_host(host: LiveSightings, tmp_path: Path) -> None:
    (tmp_path / "app").touch()
    assert sighting_of_file(host, tmp_path / "app").origin.trust is Trust.HOST


def test_a_file_that_others_can_write(host: LiveSightings, tmp_path: Path) -> None:
    (tmp_path / "app").touch()
    for changes in ({"uid": 1000}, {"mode": 0o100777}):
        assert sighting_of_file(host, tmp_path / "app", **changes).origin.trust is Trust.UNKNOWN


def test_a_file_that_is_not_held(host: LiveSightings) -> None:
    found = Caught(b"k", 1, 2, b"/bin/app", identity(), caught().place, BuildId(b"\xab" * 20))
    assert host.of(found, -1).origin.trust is Trust.UNKNOWN


def test_a_mount_that_is_not_the_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "app").touch()
    monkeypatch.setattr(mounts, "initial_mountinfo", lambda: b"")
    live = LiveSightings(initial=HOST)
    assert sighting_of_file(live, tmp_path / "app").origin.trust is Trust.UNKNOWN


def test_what_was_unpacked_into_a_chroot(host: LiveSightings, tmp_path: Path) -> None:
    """Unless the host has that very file at that path; so it is when nobody knows of a chroot."""
    (tmp_path / "app").touch()
    seen = sighting_of_file(host, tmp_path / "app", b"/app", chrooted=True)
    assert seen.origin.trust is Trust.UNKNOWN
    (tmp_path / "other").touch()
    shown = os.fsencode(tmp_path / "other")
    seen = sighting_of_file(host, tmp_path / "app", shown, chrooted=True)
    assert seen.origin.trust is Trust.UNKNOWN
    seen = sighting_of_file(host, tmp_path / "app", chrooted=True)
    assert seen.origin.trust is Trust.HOST


def test_mounts_are_looked_at_again(host: LiveSightings, tmp_path: Path) -> None:
    (tmp_path / "app").touch()
    assert sighting_of_file(host, tmp_path / "app").origin.trust is Trust.HOST
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mounts, "initial_mountinfo", lambda: b"")
        assert sighting_of_file(host, tmp_path / "app").origin.trust is Trust.HOST
        patch.setattr("buildidfs.watch.catcher_client._OWNERS_S", -1.0)
        assert sighting_of_file(host, tmp_path / "app").origin.trust is Trust.UNKNOWN


# --- who could get at it -------------------------------------------------------------------------


def reach_of(live: LiveSightings, path: str, pid: int, place: ProcessPlace) -> int:
    """Of a file that is held open at a path of ours, caught in a process that may be gone."""
    fd = os.open(path, os.O_PATH)
    try:
        message = Caught(b"k", pid, 1, b"/any", inodes.identity(fd), place)
        return reach_in(live, message, fd)
    finally:
        os.close(fd)


def reach_in(live: LiveSightings, message: Caught, fd: int) -> int:
    seen = live.of(message, fd)
    assert seen.origin.reach == 0, "nobody has asked yet"
    return live.reached(seen, message, fd).origin.reach


def place_of(pid: int) -> ProcessPlace:
    pid_fd = procfs.open_pid(pid)
    try:
        return ProcessPlace(namespaces.of(pid_fd), namespaces.mnt_ns_id(pid_fd), b"/")
    finally:
        os.close(pid_fd)


@needs_root("gives files away")
@pytest.mark.usefixtures("forgetful")
def test_reach_on_the_host_needs_no_process(directory: Path) -> None:
    here = place_of(os.getpid())
    live = LiveSightings(initial=here.namespaces)
    (directory / "app").touch()
    gone = 1 << 22
    assert reach_of(live, str(directory / "app"), gone, here) == EVERYBODY
    directory.chmod(0o700)
    assert reach_of(live, str(directory / "app"), gone, here) == OWNER
    os.chown(directory, 61001, 61001)
    os.chown(directory / "app", 61002, 61002)
    assert reach_of(live, str(directory / "app"), gone, here) == 0, "looked at anew each time"


@needs_root("makes mount namespaces")
@pytest.mark.usefixtures("forgetful")
def test_reach_in_a_container_needs_one_of_its_processes(directory: Path) -> None:
    live = LiveSightings(initial=place_of(os.getpid()).namespaces)
    other_place = directory / "other"
    other_place.mkdir()
    with private_cat(directory) as child, private_cat(other_place) as stranger:
        place = place_of(child.pid)
        path = f"/proc/{child.pid}/root{directory}/cat"
        fd = os.open(path, os.O_PATH)
        try:
            # The one it was caught in is gone, and no other was ever seen.
            identity = inodes.identity(fd)
            gone = Caught(b"k", 1 << 22, 1, b"/any", identity, place)
            assert reach_in(live, gone, fd) == OWNER
            assert reach_of(live, path, stranger.pid, place) == OWNER, "it lives elsewhere"
            assert reach_of(live, path, child.pid, place) == EVERYBODY
            assert reach_in(live, gone, fd) == EVERYBODY, "another one is known by now"
            os.chmod(f"/proc/{child.pid}/root{directory}", 0o700)
            assert reach_in(live, gone, fd) == OWNER
            os.chmod(f"/proc/{child.pid}/root{directory}", 0o755)
            assert reach_in(live, gone, fd) == EVERYBODY
            child.kill()
            child.wait(30)
            assert reach_in(live, gone, fd) == OWNER, "and now there is none"
        finally:
            os.close(fd)
            live.close()


@needs_root("makes mount namespaces")
def test_files_that_had_to_wait_share_one_look_at_their_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buildidfs.watch.catcher_client._KEEP_S", 60.0)
    looked: list[bytes] = []
    look = Reach._walked

    def counted(self: Reach, root: Root, names: list[bytes]) -> tuple[Any, int]:
        looked.append(names[-1])
        return look(self, root, names)

    monkeypatch.setattr(Reach, "_walked", counted)
    live = LiveSightings(initial=place_of(os.getpid()).namespaces)
    with private_cat(directory) as child, contextlib.closing(live):
        place, top = place_of(child.pid), Path(f"/proc/{child.pid}/root{directory}")
        for number in range(5):
            (top / str(number)).touch()
        now = time.time()
        until(lambda: time.time() > now + 0.05, "a later tick of the clock")
        for number in range(5):
            assert reach_of(live, f"{top}/{number}", child.pid, place) == EVERYBODY
        assert looked == [os.fsencode(directory.name)]
        os.chmod(top, 0o700)
        (top / "younger").touch()
        assert reach_of(live, f"{top}/younger", child.pid, place) == OWNER
        assert len(looked) == 2


def test_processes_that_are_remembered_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildidfs.watch.catcher_client._MOST_NAMESPACES", 3)
    live = LiveSightings(initial=HOST)
    for number in range(1, 9):
        place = ProcessPlace(CONTAINER, number, b"/")
        for pid in range(100, 120):
            live.of(Caught(b"k", pid, 1, b"/any", identity(), place), -1)
    assert [number for number in range(1, 9) if number in live._neighbours] == [6, 7, 8]
    assert live._neighbours.get(8) == [100, 101, 102, 103], "the eldest"
