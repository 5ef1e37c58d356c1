# SPDX-License-Identifier: Apache-2.0
"""The program of AsOwner, asked over its socket."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from buildidfs.capture.unresponsive import as_owner, helper_process
from buildidfs.capture.unresponsive.as_owner import _Answer as Answer
from buildidfs.capture.unresponsive.as_owner import _Request as Request
from tests.support.children import needs_root

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
