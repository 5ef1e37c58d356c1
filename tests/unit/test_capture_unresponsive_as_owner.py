# SPDX-License-Identifier: Apache-2.0
"""AsOwner reads files as another user; tests/system/test_fuse_as_owner has real FUSE mounts."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from buildidfs.capture.unresponsive import as_owner, helper_process
from buildidfs.capture.unresponsive.as_owner import AsOwner, Mounter, OwnedFile, mounters
from buildidfs.capture.unresponsive.as_owner import _Answer as Answer
from buildidfs.capture.unresponsive.as_owner import _Request as Request
from tests.support.children import needs_root
from tests.support.scans import open_descriptors
from tests.support.waiting import until

_USER = Mounter(65534, 65534)


@pytest.fixture(autouse=True)
def _descriptors_are_closed() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() <= before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that everybody may read."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3 << 20))
    path.chmod(0o4755)
    return path


@pytest.fixture
def place(path: Path) -> Iterator[OwnedFile]:
    """The same."""
    fd = os.open(path, os.O_PATH)
    status = os.fstat(fd)
    device = os.major(status.st_dev), os.minor(status.st_dev)
    yield OwnedFile(fd, device, status.st_ino, _USER)
    os.close(fd)


def test_mounters() -> None:
    text = b"""\
21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 21 0:40 / /home/me/mnt rw,nosuid,nodev - fuse.sshfs me@there: rw,user_id=1000,group_id=100
31 21 0:41 / /proc/x rw - fuse x rw,user_id=0,group_id=0,allow_other
32 21 0:42 / /buildid rw - fuse.buildidfs buildidfs ro,user_id=0,group_id=0
33 21 0:43 / /sys/fs/fuse/connections rw - fusectl fusectl rw
34 21 0:44 / /odd rw - fuse.odd odd rw,user_id=x,group_id=0
35 21 0:45 / /nfs rw - nfs4 there:/ rw,user_id=5,group_id=5
"""
    assert mounters(text) == {(0, 40): Mounter(1000, 100), (0, 41): Mounter(0, 0)}


@needs_root("becomes another user")
def test_file_is_read_as_its_user(path: Path, place: OwnedFile) -> None:
    with AsOwner() as as_owner:
        identity = as_owner.look(place)
        again, fd = as_owner.read(place)
        with open(fd, "rb") as copy:
            assert copy.read() == path.read_bytes()
        with pytest.raises(OSError, match="Bad file"):
            os.write(fd, b"x")
    assert identity == again
    assert (identity.uid, identity.gid) == (_USER.uid, _USER.gid)
    assert stat.filemode(identity.mode) == "-rwx------"
    assert identity.size == path.stat().st_size


@needs_root("becomes another user")
def test_file_that_the_user_may_not_read(path: Path, place: OwnedFile) -> None:
    path.chmod(0o600)
    with AsOwner() as as_owner:
        for mounter, number in ((_USER, errno.EACCES), (Mounter(0, 0), errno.EPERM)):
            with pytest.raises(OSError, match=r"ermi|give up") as refused:
                as_owner.read(OwnedFile(place.path_fd, place.device, place.inode, mounter))
            assert refused.value.errno == number


@needs_root("becomes another user")
def test_only_the_file_that_is_meant(tmp_path: Path, place: OwnedFile) -> None:
    with AsOwner() as as_owner:
        with pytest.raises(OSError, match="another file"):
            as_owner.look(OwnedFile(place.path_fd, place.device, place.inode + 1, _USER))
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo, 0o644)
        fd = os.open(fifo, os.O_PATH)
        with pytest.raises(OSError, match="not a regular file"):
            as_owner.look(OwnedFile(fd, place.device, os.fstat(fd).st_ino, _USER))
        os.close(fd)


@needs_root("becomes another user")
def test_helper_ends_with_us(place: OwnedFile) -> None:
    """The helper notices the end of its client, however that ends."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            as_owner = AsOwner()
            as_owner.look(place)
            os.write(writing, str(as_owner.pid).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb", buffering=0) as pipe:
        helper = int(pipe.read(20))
    helper_fd = os.pidfd_open(helper)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    try:
        until(lambda: not _lives(helper), "the end of the helper")
    finally:
        os.close(helper_fd)


def _lives(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


@needs_root("becomes another user")
def test_no_room_for_copies_on_a_disk(
    path: Path, place: OwnedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buildidfs.capture.elf_file._COPIES", "/nowhere")
    with AsOwner() as as_owner:
        _, fd = as_owner.read(place)
    with open(fd, "rb") as copy:
        assert copy.read() == path.read_bytes()


# --- The program of AsOwner, asked over its socket


pytestmark = needs_root("becomes another user")


@pytest.fixture
def channel() -> Iterator[socket.socket]:
    """The way to a helper, in a process of its own as always."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            as_owner.main([str(its.detach())])
        finally:
            os._exit(0)
    its.close()
    with ours:
        ours.settimeout(20)
        assert ours.recv(100) == helper_process._STARTED
        yield ours
    assert os.waitpid(pid, 0)[1] == 0


def request(path: Path, *, copy: bool = False, uid: int = 65534, seconds: float = 5) -> Request:
    status = path.stat()
    return Request(uid, uid, status.st_dev, status.st_ino, copy, seconds)


def ask(channel: socket.socket, asked: Request, *fds: int) -> Answer:
    socket.send_fds(channel, [msgspec.msgpack.encode(asked)], fds)
    return msgspec.msgpack.decode(channel.recv(helper_process.MESSAGE_MAX), type=Answer)


def test_it_goes_on_after_errors(channel: socket.socket, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    path.chmod(0o600)
    fd = os.open(path, os.O_PATH)
    assert ask(channel, request(path), fd).errno == errno.EACCES
    path.chmod(0o644)
    answer = ask(channel, request(path), fd)
    assert answer.identity is not None
    assert answer.identity.size == 7
    assert ask(channel, request(path, uid=0), fd).errno == errno.EPERM
    os.close(fd)


def test_no_more_is_copied_than_fits(channel: socket.socket, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o644)
    os.truncate(path, helper_process.MAX_BYTES + 1)
    fd, copy_fd = os.open(path, os.O_PATH), os.memfd_create("copy")
    assert ask(channel, request(path, copy=True), fd, copy_fd).errno == errno.EFBIG
    assert os.fstat(copy_fd).st_size == 0
    os.close(fd)
    os.close(copy_fd)


def test_copy_that_cannot_be_written(channel: socket.socket, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    path.chmod(0o644)
    fd, full_fd = os.open(path, os.O_PATH), os.open("/dev/full", os.O_RDWR)
    assert ask(channel, request(path, copy=True), fd, full_fd).errno == errno.ENOSPC
    os.close(fd)
    os.close(full_fd)
