# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.syscalls: both ways to resolve inside a root, which must agree."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildidfs.linux import inodes, syscalls
from tests.support.filesystems.silentfs import served
from tests.support.harness.children import needs_root, private_cat

Opener = Callable[[int, bytes, int], int]

needs_openat2 = pytest.mark.skipif(
    not inodes.have_openat2(), reason="this kernel (or a filter) has no openat2"
)
both = pytest.mark.parametrize(
    "open_in_root",
    [
        pytest.param(inodes.open_in_root, marks=needs_openat2, id="openat2"),
        pytest.param(inodes.walk_in_root, id="walk"),
    ],
)


def _plant(top: Path) -> None:
    """A root with everything in it that a hostile container could put there.

    Beside it lies ``outside``, with the names of things in it: a path that leads there has escaped.
    """
    outside, root = top / "outside", top / "root"
    for place in (outside, root):
        (place / "etc").mkdir(parents=True)
        (place / "etc/file").write_text(place.name)
    (outside / "secret").write_text("escaped")
    (root / "a/b/c").mkdir(parents=True)
    (root / "a/b/c/deep").write_text("deep")
    links = {
        "absolute": "/etc/file",
        "a/b/absolute": "/etc/file",
        "a/relative": "../etc/file",
        "a/b/up": "..",
        "a/b/far-up": "../../../../../../etc",
        "escape": "../outside/secret",
        "a/escape": "../../outside/secret",
        "host": str(outside / "secret"),
        "dangling": "nowhere/at/all",
        "self": "self",
        "ping": "pong",
        "pong": "/ping",
        "top": "/",
        "slash": "etc/",
        "to-file-slash": "etc/file/",
        "dot": ".",
        "dotfile": "etc/file/.",
        "dir": "a/b",
        "chain": "dir/up/b/absolute",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    previous = "etc/file"
    for number in range(1, 44):
        (root / f"chain{number}").symlink_to(previous)
        previous = f"chain{number}"
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(root):
        listener.bind("socket")


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("planted")
    _plant(top)
    return top


@pytest.fixture(scope="module")
def root_fd(top: Path) -> Iterator[int]:
    fd = os.open(top / "root", os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def _content(open_in_root: Opener, root_fd: int, path: bytes) -> bytes:
    fd = open_in_root(root_fd, path, os.O_RDONLY)
    try:
        assert not os.get_inheritable(fd)
        return os.read(fd, 100)
    finally:
        os.close(fd)


def _outcome(open_in_root: Opener, root_fd: int, path: bytes, flags: int) -> tuple[int, int] | str:
    """Which file it was, or which error."""
    try:
        fd = open_in_root(root_fd, path, flags)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    try:
        stat = os.fstat(fd)
        return stat.st_dev, stat.st_ino
    finally:
        os.close(fd)


@both
@pytest.mark.parametrize(
    ("path", "content"),
    [
        (b"etc/file", b"root"),
        (b"/etc/file", b"root"),
        (b"//etc//file", b"root"),
        (b"./etc/./file", b"root"),
        (b"../../etc/file", b"root"),
        (b"/../etc/file", b"root"),
        (b"a/../../../../etc/file", b"root"),
        (b"absolute", b"root"),
        (b"a/b/absolute", b"root"),
        (b"a/relative", b"root"),
        (b"a/b/far-up/file", b"root"),
        (b"a/b/up/b/c/deep", b"deep"),
        (b"top/top/dot/etc/file", b"root"),
        (b"slash/file", b"root"),
        (b"chain", b"root"),
        (b"chain39", b"root"),
        (b"dir/../b/c/deep", b"deep"),
    ],
)
def test_names_lead_to_where_a_process_in_that_root_would_get(
    open_in_root: Opener, root_fd: int, path: bytes, content: bytes
) -> None:
    assert _content(open_in_root, root_fd, path) == content


@both
@pytest.mark.parametrize(
    ("path", "number"),
    [
        (b"", errno.ENOENT),
        (b"missing", errno.ENOENT),
        (b"missing/..", errno.ENOENT),
        (b"dangling", errno.ENOENT),
        (b"escape", errno.ENOENT),
        (b"a/escape", errno.ENOENT),
        (b"../outside/secret", errno.ENOENT),
        (b"host", errno.ENOENT),
        (b"etc/file/", errno.ENOTDIR),
        (b"etc/file/.", errno.ENOTDIR),
        (b"etc/file/..", errno.ENOTDIR),
        (b"etc/file/x", errno.ENOTDIR),
        (b"to-file-slash", errno.ENOTDIR),
        (b"dotfile", errno.ENOTDIR),
        (b"self", errno.ELOOP),
        (b"ping", errno.ELOOP),
        (b"chain43", errno.ELOOP),
        (b"etc/fi\0le", errno.EINVAL),
        (b"x" * 256, errno.ENAMETOOLONG),
        (b"a/../" * 1000, errno.ENAMETOOLONG),
    ],
)
def test_names_that_lead_nowhere_are_errors(
    open_in_root: Opener, root_fd: int, path: bytes, number: int
) -> None:
    text = "NUL byte" if number == errno.EINVAL else os.strerror(number)
    with pytest.raises(OSError, match=text) as caught:
        open_in_root(root_fd, path, os.O_RDONLY)
    assert errno.errorcode[caught.value.errno] == errno.errorcode[number]


@both
def test_flags_mean_the_same_as_for_open(open_in_root: Opener, root_fd: int) -> None:
    def outcome(path: bytes, flags: int) -> tuple[int, int] | str:
        return _outcome(open_in_root, root_fd, path, flags)

    link = os.stat(b"absolute", dir_fd=root_fd, follow_symlinks=False)
    assert outcome(b"absolute", os.O_PATH | os.O_NOFOLLOW) == (link.st_dev, link.st_ino)
    assert outcome(b"absolute", os.O_NOFOLLOW) == "ELOOP"
    assert outcome(b"absolute", os.O_DIRECTORY) == "ENOTDIR"
    assert outcome(b"dir", os.O_DIRECTORY) == outcome(b"a/b", os.O_DIRECTORY | os.O_PATH)
    assert outcome(b"dir/absolute", os.O_NOFOLLOW) == "ELOOP"
    assert outcome(b"socket", os.O_RDONLY) == "ENXIO"
    root = os.fstat(root_fd)
    for path in (b"/", b".", b"..", b"top", b"a/..", b"a/b/up/.."):
        assert outcome(path, os.O_PATH) == (root.st_dev, root.st_ino)


_component = st.sampled_from(
    [
        b"", b".", b"..", b"a", b"b", b"c", b"etc", b"file", b"deep", b"absolute", b"relative",
        b"up", b"far-up", b"escape", b"host", b"dangling", b"self", b"ping", b"top", b"slash",
        b"to-file-slash", b"dot", b"dotfile", b"dir", b"chain", b"chain20", b"missing", b"socket",
    ]
)  # fmt: skip
_flags = st.sampled_from(
    [
        os.O_RDONLY,
        os.O_PATH,
        os.O_PATH | os.O_NOFOLLOW,
        os.O_NOFOLLOW,
        os.O_DIRECTORY,
        os.O_DIRECTORY | os.O_NOFOLLOW,
        os.O_PATH | os.O_DIRECTORY,
        os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW,
    ]
)


@needs_openat2
@settings(max_examples=400, deadline=None, database=None)
@given(components=st.lists(_component, max_size=7), flags=_flags)
def test_the_walk_agrees_with_the_kernel(root_fd: int, components: list[bytes], flags: int) -> None:
    path = b"/".join(components)
    kernel = _outcome(inodes.open_in_root, root_fd, path, flags)
    assert _outcome(inodes.walk_in_root, root_fd, path, flags) == kernel


@both
def test_no_descriptor_is_left_open(open_in_root: Opener, root_fd: int) -> None:
    before = os.listdir("/proc/self/fd")
    for path in (b"a/b/c/deep", b"chain", b"self", b"a/b/c/missing", b"etc/file/x", b"../.."):
        _outcome(open_in_root, root_fd, path, os.O_RDONLY)
    assert os.listdir("/proc/self/fd") == before


@needs_openat2
def test_magic_links_are_refused() -> None:
    fd = os.open("/", os.O_PATH)
    try:
        outcome = _outcome(inodes.open_in_root, fd, b"proc/self/root/etc", os.O_PATH)
    finally:
        os.close(fd)
    assert outcome == "ELOOP"


def test_the_way_back_is_the_way_in(tmp_path: Path) -> None:
    """A directory that is moved out of the root during the walk does not lead out of it."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    (root / "a/b").mkdir(parents=True)
    elsewhere.mkdir()
    (tmp_path / "mark").write_text("outside")
    (root / "mark").write_text("inside")
    fd = os.open(root, os.O_PATH)

    class Moving(inodes._Walk):
        def _enter(self, name: bytes, *, last_nofollow: bool) -> None:
            super()._enter(name, last_nofollow=last_nofollow)
            if name == b"b":
                (root / "a/b").rename(elsewhere / "b")

    walk = Moving(fd, b"a/b/../../mark")
    try:
        found = walk.run(os.O_RDONLY)
        try:
            assert os.read(found, 100) == b"inside"
        finally:
            os.close(found)
    finally:
        walk.close()
        os.close(fd)


def test_without_openat2_the_walk_is_taken(root_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "SYS_OPENAT2", 0x7FFF)  # no such system call: ENOSYS
    inodes.have_openat2.cache_clear()
    try:
        assert not inodes.have_openat2()
        assert _content(inodes.open_in_root, root_fd, b"chain") == b"root"
        fd = inodes.open_regular_in_root(root_fd, b"../absolute")
        os.close(fd)
    finally:
        monkeypatch.undo()
        inodes.have_openat2.cache_clear()


@needs_openat2
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR])
@pytest.mark.parametrize("times", [1, 1000])
def test_renames_elsewhere_do_not_keep_us_out(
    root_fd: int, monkeypatch: pytest.MonkeyPatch, number: int, times: int
) -> None:
    asked = 0
    real = syscalls.syscall

    def disturbed(call: int, *args: int | bytes, filename: bytes | None = None) -> int:
        nonlocal asked
        asked += 1
        if asked <= times:
            raise OSError(number, os.strerror(number), filename)
        return real(call, *args, filename=filename)

    monkeypatch.setattr(syscalls, "syscall", disturbed)
    assert _content(inodes.open_in_root, root_fd, b"a/../chain") == b"root"
    assert 1 < asked < 100


_IN_OPEN = 0x20


@contextlib.contextmanager
def _opens_of(*paths: Path) -> Iterator[Callable[[], int]]:
    """Counts, by inotify, how often the files are opened within the block."""
    watch = syscalls.libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert watch >= 0

    def count() -> int:
        try:
            events = os.read(watch, 4096)
        except BlockingIOError:
            return 0
        return len(events) // struct.calcsize("iIII")

    try:
        for path in paths:
            name = ctypes.c_char_p(os.fsencode(path))
            assert syscalls.libc.inotify_add_watch(watch, name, _IN_OPEN) > 0
        yield count
    finally:
        os.close(watch)


def test_only_a_regular_file_is_ever_opened(top: Path, root_fd: int) -> None:
    root = top / "root"
    (root / "to-fifo").symlink_to("/fifo")
    with _opens_of(root / "fifo", root / "socket", root / "etc") as opens:
        for path in (b"fifo", b"to-fifo", b"socket", b"etc", b"slash", b"/"):
            with pytest.raises(OSError, match="not a regular file") as caught:
                inodes.open_regular_in_root(root_fd, path)
            assert caught.value.errno == errno.EINVAL
        assert opens() == 0
        os.close(os.open(root / "etc", os.O_RDONLY))
        assert opens() == 1, "the watch sees nothing at all"


def test_pipe_of_the_shell_is_opened_and_a_fifo_is_not(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        inodes.open_regular(tmp_path / "fifo", pipe=True)
    reading, writing = os.pipe()
    os.write(writing, b"x")
    opened = inodes.open_regular(f"/dev/fd/{reading}", pipe=True)
    assert os.read(opened, 1) == b"x"
    for fd in (reading, writing, opened):
        os.close(fd)


def test_a_regular_file_is_open_for_reading_only(root_fd: int) -> None:
    fd = inodes.open_regular_in_root(root_fd, b"a/b/absolute")
    try:
        assert os.read(fd, 10) == b"root"
        assert not os.get_inheritable(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
    finally:
        os.close(fd)


@pytest.mark.root
@needs_root("mounts in a namespace of its own")
@both
def test_the_root_of_a_container_is_entered_from_outside(
    open_in_root: Opener, tmp_path: Path
) -> None:
    """The path exists in that namespace only, and mounts on the way are crossed."""
    with private_cat(tmp_path) as child:
        assert not (tmp_path / "cat").exists()
        fd = os.open(f"/proc/{child.pid}/root", os.O_PATH)
        try:
            assert _content(open_in_root, fd, os.fsencode(tmp_path / "cat"))[:4] == b"\x7fELF"
            back = os.fsencode(tmp_path) + b"/../" * 20 + os.fsencode(tmp_path / "cat")
            assert _content(open_in_root, fd, back)[:4] == b"\x7fELF"
        finally:
            os.close(fd)


@pytest.fixture
def open_cached() -> Callable[[int, bytes], int]:
    try:
        os.close(inodes.open_cached_in_root(syscalls.AT_FDCWD, b"/"))
    except OSError as error:
        assert error.errno in (errno.EINVAL, errno.ENOSYS)  # noqa: PT017 - before Linux 5.12
        pytest.skip("this kernel always asks")
    return inodes.open_cached_in_root


def test_file_in_memory_is_pinned(
    top: Path, root_fd: int, open_cached: Callable[[int, bytes], int]
) -> None:
    expected = (top / "root/a/b/c/deep").stat()
    fd = open_cached(root_fd, b"/a/b/c/deep")
    try:
        assert os.path.samestat(os.fstat(fd), expected)
    finally:
        os.close(fd)
    (top / "outside/secret").stat()
    with pytest.raises(OSError, match=r"No such file|temporarily unavailable"):
        open_cached(root_fd, b"/escape")


@pytest.mark.root
@pytest.mark.fuse
@needs_root("mounts a filesystem whose server is stopped")
def test_a_silent_server_is_not_waited_for(
    tmp_path: Path, open_cached: Callable[[int, bytes], int]
) -> None:
    mountpoint, file = tmp_path / "mnt", tmp_path / "file"
    mountpoint.mkdir()
    file.write_text("x")
    with served(mountpoint, file) as server:
        fd = os.open(tmp_path, os.O_PATH)
        try:
            os.close(open_cached(fd, b"mnt"))
            (mountpoint / "app").stat()
            server.send_signal(signal.SIGSTOP)
            os.close(open_cached(fd, b"mnt"))
            with pytest.raises(BlockingIOError):
                open_cached(fd, b"mnt/app")
        finally:
            os.close(fd)


@pytest.mark.parametrize("ask", [True, False])
def test_an_entry_is_pinned_as_it_is(
    top: Path, open_cached: Callable[[int, bytes], int], ask: bool
) -> None:
    """Also a link, which is not followed, and nothing but what is right below."""
    fd = os.open(top / "root", os.O_PATH)
    try:
        for name in (b"a", b"escape", b"host"):
            (top / "root" / os.fsdecode(name)).lstat()
            entry = inodes.pin_entry(fd, name, ask=ask)
            try:
                assert os.path.samestat(os.fstat(entry), (top / "root" / os.fsdecode(name)).lstat())
                assert not os.get_inheritable(entry)
            finally:
                os.close(entry)
        for name in (b"", b".", b"..", b"a/b", b"/etc"):
            with pytest.raises(OSError, match="not the name of an entry"):
                inodes.pin_entry(fd, name, ask=ask)
    finally:
        os.close(fd)
