# SPDX-License-Identifier: Apache-2.0
"""A FUSE filesystem that an ordinary user mounted, which even root is not let into.

Run as ``python -m tests.support.filesystems.userfs MOUNTPOINT FILE UID WHERE``: serves FILE as
MOUNTPOINT/app. WHERE is ``host``, or ``namespace`` for a mount in a user and a mount namespace of
that user's own, or ``shared`` for one there that everybody may use whom that namespace knows.
``public`` is on the host, for all users.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyfuse3
import trio

from tests.support.clients.tools import run, tool
from tests.support.filesystems import silentfs
from tests.support.harness.mounts import is_mountpoint
from tests.support.harness.waiting import lines

UID = 1000
"""The user who mounts; there need not be an account."""

_ON_HOST = ("host", "public")
_MS_NOSUID_NODEV, _MS_REC_PRIVATE = 6, 0x44000
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_FUSE_DEVICE = os.makedev(10, 229)

_libc = ctypes.CDLL(None, use_errno=True)


def _serve(mountpoint: str, file: str, uid: int, where: str) -> None:
    opened = os.open(file, os.O_RDONLY)
    on_host = where in _ON_HOST
    device = _open_on_host(uid) if on_host else _open_in_namespace(mountpoint, uid)
    user = uid if on_host else 0
    options = f"fd={device},rootmode=40000,user_id={user},group_id={user}"
    if where in ("shared", "public"):
        options += ",allow_other"
    _check(
        _libc.mount(
            b"userfs", os.fsencode(mountpoint), b"fuse.userfs", _MS_NOSUID_NODEV, options.encode()
        )
    )
    if on_host:
        os.setresuid(uid, uid, uid)
    os.set_inheritable(device, True)
    pyfuse3.init(silentfs.Operations(opened), f"/dev/fd/{device}", set())
    print("mounted", flush=True)
    trio.run(pyfuse3.main)


def _open_on_host(uid: int) -> int:
    device = os.open("/dev/fuse", os.O_RDWR)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    return device


def _open_in_namespace(mountpoint: str, uid: int) -> int:
    """Be that user's root; /dev/fuse has to be opened in the same user namespace."""
    _check(_libc.unshare(_CLONE_NEWNS))
    _check(_libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None))
    # Over the mount point itself, since no other place is ours for certain.
    _check(_libc.mount(b"none", os.fsencode(mountpoint), b"tmpfs", 0, b"mode=777"))
    node = f"{mountpoint}/fuse"
    os.mknod(node, stat.S_IFCHR | 0o666, _FUSE_DEVICE)
    os.chmod(node, 0o666)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _check(_libc.prctl(4, 1, 0, 0, 0))  # PR_SET_DUMPABLE, to own what is in /proc/self
    _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {uid} 1")):
        Path("/proc/self", name).write_text(text)
    return os.open(node, os.O_RDWR)


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def served(mountpoint: Path, file: Path, where: str = "host") -> Iterator[subprocess.Popen[bytes]]:
    """Serve ``file`` as ``mountpoint``/app; see `entering` for how to run it. Needs root."""
    argv: list[str | Path] = [
        sys.executable, "-m", "tests.support.filesystems.userfs", mountpoint, file, str(UID), where,
    ]  # fmt: skip
    repository = Path(__file__).resolve().parents[3]
    server = subprocess.Popen(
        argv, cwd=repository, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0
    )
    with server:
        try:
            assert server.stdout is not None
            assert lines(server.stdout, lambda got: len(got) == 1) == ["mounted"]
            yield server
        finally:
            server.kill()
            server.wait(30)
            if is_mountpoint(mountpoint):
                run([tool("umount"), "-l", mountpoint])


def entering(server: subprocess.Popen[bytes], where: str) -> list[str]:
    """The words before a command that make it run where, and as whom, it sees the mount."""
    if where in _ON_HOST:
        return [tool("setpriv"), f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
    return [tool("nsenter"), "-t", str(server.pid), "-U", "-m", "-S", "0", "-G", "0"]


if __name__ == "__main__":
    _mountpoint, _file, _uid, _where = sys.argv[1:]
    _serve(_mountpoint, _file, int(_uid), _where)
