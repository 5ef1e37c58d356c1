# SPDX-License-Identifier: Apache-2.0
"""buildidfs.mount.operations without a kernel: what handlers return, and what they never raise."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import stat
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyfuse3
import pytest
from pyfuse3 import FUSEError

from buildidfs.errors import ArtifactMissing, IntegrityError, RemoteUnavailable, StoreError
from buildidfs.model import ByteRange, Trust
from buildidfs.mount import operations as operations_module
from buildidfs.mount.invalidate import Absences
from buildidfs.mount.limits import MountLimits
from buildidfs.mount.loop import PlainLoop
from buildidfs.mount.operations import FOREVER_S, VOLATILE_S, Operations, errno_of, huge_buffer
from buildidfs.store import Store
from buildidfs.view import View
from tests.support.harness.captures import NOW, capture, sighting

ID = bytes.fromhex("abcdef0123")
CTX: Any = SimpleNamespace(uid=0, gid=0, pid=os.getpid())


class NotCached(PlainLoop):
    """Counts what goes to a thread; runs it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.slow_calls = 0

    async def in_thread(self, function: Callable[..., Any], *args: object) -> Any:
        self.calls += 1
        return function(*args)

    async def in_slow_thread(self, function: Callable[..., Any], *args: object) -> Any:
        self.slow_calls += 1
        return function(*args)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as made:
        at = sighting(mode=0o100640, uid=7, gid=8, mtime_ns=NOW + 1)
        new = capture(made, bytes(range(200)), ID, at=at, trust=Trust.CONTAINER)
        made.commit([msgspec.structs.replace(new, scripts=(ByteRange(10, 5),))])
        yield made


@pytest.fixture
def absences() -> Absences:
    return Absences(MountLimits())


@pytest.fixture
def loop() -> NotCached:
    return NotCached()


@pytest.fixture
def operations(store: Store, absences: Absences, loop: NotCached) -> Iterator[Operations]:
    made = Operations(View(store), loop, absences, store.path)
    yield made
    made.close()


async def _elf(operations: Operations) -> int:
    directory = (await operations.lookup(1, ID.hex().encode(), CTX)).st_ino
    return (await operations.lookup(directory, b"elf", CTX)).st_ino


async def _refused(call: Coroutine[Any, Any, Any]) -> int:
    with pytest.raises(FUSEError) as caught:
        await call
    return caught.value.errno


# --- names and attributes ------------------------------------------------------------------------


async def test_attributes(operations: Operations) -> None:
    directory = (await operations.lookup(1, ID.hex().encode(), CTX)).st_ino
    entry = await operations.lookup(directory, b"elf", CTX)

    assert entry.st_mode == stat.S_IFREG | 0o440
    assert (entry.st_uid, entry.st_gid, entry.st_size, entry.st_blocks) == (7, 8, 200, 1)
    assert entry.st_mtime_ns == entry.st_ctime_ns == entry.st_atime_ns == NOW + 1
    assert entry.entry_timeout == entry.attr_timeout == FOREVER_S
    ino = entry.st_ino
    entry = await operations.lookup(directory, b"path", CTX)
    assert entry.attr_timeout == VOLATILE_S
    entry = await operations.getattr(ino, CTX)
    assert (entry.st_ino, entry.st_size, entry.attr_timeout) == (ino, 200, FOREVER_S)
    entry = await operations.getattr(1, CTX)
    assert (entry.st_ino, entry.st_mode, entry.st_size) == (1, stat.S_IFDIR | 0o555, 0)


async def test_absent_names_are_remembered_by_the_kernel(
    operations: Operations, absences: Absences
) -> None:
    entry = await operations.lookup(1, b"abcd", CTX)
    assert entry.st_ino == 0
    assert entry.entry_timeout == absences.limits.absence_s
    assert absences.discard(1, b"abcd")


async def test_absent_names_beyond_the_bound_are_not(store: Store, loop: NotCached) -> None:
    operations = Operations(View(store), loop, Absences(MountLimits(absences=1)), store.path)
    assert (await operations.lookup(1, b"abcd", CTX)).st_ino == 0
    assert await _refused(operations.lookup(1, b"abce", CTX)) == errno.ENOENT


async def test_names_that_no_directory_has_are_not_remembered(
    operations: Operations, absences: Absences
) -> None:
    assert await _refused(operations.lookup(1, b"x" * 256, CTX)) == errno.ENAMETOOLONG
    assert len(absences) == 0


async def test_a_commit_between_question_and_answer(store: Store, loop: NotCached) -> None:
    absences = Absences(MountLimits())

    class CommitsMeanwhile(View):
        asked = 0

        def child(self, node: int, name: bytes) -> int:
            self.asked += 1
            found = super().child(node, name)
            if self.asked == 1:
                store.commit([capture(store, b"new", b"\x12\x34")])
                absences.moment += 1
            return found

    view = CommitsMeanwhile(store)
    entry = await Operations(view, loop, absences, store.path).lookup(1, b"1234", CTX)
    assert entry.st_ino != 0
    assert view.asked == 2
    assert len(absences) == 0


# --- bytes ---------------------------------------------------------------------------------------


async def test_reading_at_any_offset(operations: Operations) -> None:
    file = await operations.open(await _elf(operations), os.O_RDONLY, CTX)
    whole = bytes(range(10)) + bytes(5) + bytes(range(15, 200))
    assert file.keep_cache
    assert not file.direct_io
    for offset, size in ((0, 200), (0, 4096), (12, 1), (9, 7), (14, 2), (199, 10), (200, 1)):
        assert bytes(await operations.read(file.fh, offset, size)) == whole[offset : offset + size]
    await operations.release(file.fh)


@pytest.mark.parametrize("is_linux_5_10", [False, True])
async def test_uncached_file_is_read_in_a_thread(
    operations: Operations, loop: NotCached, monkeypatch: pytest.MonkeyPatch, is_linux_5_10: bool
) -> None:
    """Also when only its end is missing: a short answer would be the end of the file. Linux 5.10
    returns 0 instead of EAGAIN at some pages (preadv2(2), BUGS).
    """
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            if offset >= 100:
                if is_linux_5_10:
                    return 0
                raise BlockingIOError(errno.EAGAIN, "would block")
            return real(fd, [buffers[0][: 100 - offset]], offset)
        return real(fd, [buffers[0][:33]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    file = await operations.open(await _elf(operations), os.O_RDONLY, CTX)
    whole = bytes(range(10)) + bytes(5) + bytes(range(15, 200))
    assert bytes(await operations.read(file.fh, 0, 100)) == whole[:100]
    assert loop.calls == 0
    assert bytes(await operations.read(file.fh, 0, 4096)) == whole
    assert bytes(await operations.read(file.fh, 120, 10)) == whole[120:130]
    assert bytes(await operations.read(file.fh, 120, 500)) == whole[120:]
    assert loop.calls == 3
    await operations.release(file.fh)


async def test_a_filesystem_that_cannot_tell(
    operations: Operations, loop: NotCached, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    file = await operations.open(await _elf(operations), os.O_RDONLY, CTX)
    assert bytes(await operations.read(file.fh, 0, 5)) == bytes(range(5))
    assert loop.calls == 1
    await operations.release(file.fh)


async def test_a_request_larger_than_any_so_far(operations: Operations) -> None:
    file = await operations.open(await _elf(operations), os.O_RDONLY, CTX)
    assert len(await operations.read(file.fh, 0, 8 << 20)) == 200
    await operations.release(file.fh)


async def test_texts(operations: Operations) -> None:
    directory = (await operations.lookup(1, ID.hex().encode(), CTX)).st_ino
    node = (await operations.lookup(directory, b"path", CTX)).st_ino
    file = await operations.open(node, os.O_RDONLY, CTX)
    assert file.direct_io
    assert await operations.read(file.fh, 0, 100) == b"/usr/bin/app\n"
    assert await operations.read(file.fh, 5, 3) == b"bin"
    assert await operations.read(file.fh, 13, 3) == b""
    other = await operations.open(node, os.O_RDONLY, CTX)
    assert other.fh != file.fh
    await operations.release(file.fh)
    await operations.release(other.fh)


async def test_no_descriptor_is_lost(operations: Operations) -> None:
    node = await _elf(operations)
    before = len(os.listdir("/proc/self/fd"))
    handles = [(await operations.open(node, os.O_RDONLY, CTX)).fh for _ in range(20)]
    for handle in handles:
        await operations.release(handle)
    operations.close_idle()
    assert len(os.listdir("/proc/self/fd")) == before
    await operations.open(node, os.O_RDONLY, CTX)
    operations.close()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_blob_that_was_touched_is_read_in_a_thread(
    operations: Operations, loop: NotCached, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    node = await _elf(operations)
    (digest,) = store.blobs.names()
    blob = os.fsdecode(store.blobs.path(digest))
    os.chmod(blob, 0o600)
    file = await operations.open(node, os.O_RDONLY, CTX)
    assert loop.slow_calls == 1
    assert bytes(await operations.read(file.fh, 0, 5)) == bytes(range(5))
    await operations.release(file.fh)
    file = await operations.open(node, os.O_RDONLY, CTX)
    await operations.release(file.fh)
    assert loop.slow_calls == 1
    os.truncate(blob, 3)
    for _ in range(3):
        assert await _refused(operations.open(node, os.O_RDONLY, CTX)) == errno.ESTALE
    assert loop.slow_calls == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"blob {digest} of {os.fsdecode(store.path)} has not the bytes that were captured:"
        " run buildidfs check --repair"
    ]


async def test_writing_is_refused(operations: Operations) -> None:
    node = await _elf(operations)
    assert await _refused(operations.open(node, os.O_WRONLY, CTX)) == errno.EROFS
    assert await _refused(operations.open(node, os.O_RDWR, CTX)) == errno.EROFS
    assert await _refused(operations.mkdir(1, b"x", 0o755, CTX)) == errno.EROFS
    assert await _refused(operations.unlink(1, b"debug", CTX)) == errno.EROFS
    assert await _refused(operations.write(0, 0, b"x")) == errno.EROFS


async def test_a_large_directory_is_listed_by_name(
    store: Store, operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel looks up no entry without a node ID. Both numbers are read from memory."""
    store.commit([capture(store, b"%d" % n, bytes([1, n])) for n in range(150)])
    node_ids: list[int] = []

    def reply(token: Any, name: bytes, entry: Any, offset: int) -> bool:
        assert entry.st_mode == stat.S_IFDIR or len(node_ids) < 64
        node_ids.append(entry.st_ino)
        return True

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
    token: Any = None
    await operations.readdir(1, 0, token)
    assert len(node_ids) == 163
    assert all(node_ids[:64])
    assert not any(node_ids[64:])


async def test_a_large_directory_where_pyfuse3_is_another(
    store: Store, loop: NotCached, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit([capture(store, b"%d" % n, bytes([1, n])) for n in range(150)])
    monkeypatch.setattr(operations_module, "_PROBE_AT", 1)
    operations = Operations(View(store), loop, Absences(MountLimits()), store.path)
    node_ids: list[int] = []

    def reply(token: Any, name: bytes, entry: Any, offset: int) -> bool:
        node_ids.append(entry.st_ino)
        return True

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
    token: Any = None
    await operations.readdir(1, 0, token)
    assert len(node_ids) == 163
    assert all(node_ids)


@pytest.mark.parametrize("name", ["flush", "access", "fsync", "poll"])
def test_names_that_the_kernel_may_keep(name: str) -> None:
    assert getattr(Operations, name) is getattr(pyfuse3.Operations, name), "ENOSYS"


async def test_statfs(operations: Operations, store: Store) -> None:
    shown = await operations.statfs(CTX)
    assert shown.f_blocks == os.statvfs(store.path).f_blocks
    assert shown.f_namemax == 255


# --- errors --------------------------------------------------------------------------------------


class Broken(View):
    """A view with a fault of its own in everything."""

    def _fault(self, *args: object) -> Any:
        raise KeyError("a fault of ours")

    lookup = children = attributes = readlink = open = open_now = _fault


async def test_a_fault_is_logged_and_becomes_eio(
    store: Store, loop: NotCached, caplog: pytest.LogCaptureFixture
) -> None:
    operations = Operations(Broken(store), loop, Absences(MountLimits()), b"\0")
    token: Any = None
    for call in (
        operations.lookup(1, b"x", CTX),
        operations.getattr(1, CTX),
        operations.readlink(2, CTX),
        operations.open(1, os.O_RDONLY, CTX),
        operations.readdir(1, 0, token),
        operations.statfs(CTX),
    ):
        caplog.clear()
        assert await _refused(call) == errno.EIO
        assert "fault of this program" in caplog.text
        assert caplog.records[0].levelno == logging.ERROR
    assert await _refused(operations.read(9999, 0, 1)) == errno.EBADF
    assert await _refused(operations.release(9999)) == errno.EBADF


async def test_a_row_that_cannot_be_shown_does_not_hide_the_others(
    store: Store, loop: NotCached, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneIsDamaged(View):
        def attributes(self, node: int) -> Any:
            if node == gone:
                raise IntegrityError("row")
            return super().attributes(node)

    view = OneIsDamaged(store)
    gone = view.child(view.child(1, ID.hex().encode()), b"elf")
    listed: list[bytes] = []

    def reply(token: object, name: bytes, entry: object, offset: int) -> bool:
        listed.append(name)
        return True

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
    operations = Operations(view, loop, Absences(MountLimits()), store.path)
    token: Any = None
    await operations.readdir(view.child(1, ID.hex().encode()), 0, token)
    assert listed == [b"path", b"variants"]


async def test_a_listing_ends_where_the_page_is_full(
    operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[list[bytes]] = []
    offsets: list[int] = []

    def reply(token: Any, name: bytes, entry: Any, offset: int) -> bool:
        if len(pages[-1]) == 3:
            return False
        pages[-1].append(name)
        offsets.append(offset)
        return True

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
    handle = await operations.opendir(1, CTX)
    start = 0
    while True:
        pages.append([])
        token: Any = None
        await operations.readdir(handle, start, token)
        if not pages[-1]:
            break
        start = offsets[-1]
    names = [name for page in pages for name in page]
    assert [len(page) for page in pages] == [3, 3, 3, 3, 1, 0]
    assert len(set(names)) == 13
    await operations.releasedir(handle)


async def test_attributes_in_a_large_listing_are_for_those_who_look(
    store: Store, operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ls -l does, which looks up each name before it asks for the next page."""
    store.commit([capture(store, b"%d" % n, bytes([9, n])) for n in range(200)])
    whole: list[bool] = []

    def reply(token: Any, name: bytes, entry: Any, offset: int) -> bool:
        if len(whole) == 10:
            return False
        whole.append(stat.S_IMODE(entry.st_mode) != 0)
        return True

    async def listed(directory: int, start: int) -> set[bool]:
        whole.clear()
        token: Any = None
        await operations.readdir(directory, start, token)
        assert len(whole) == 10 or directory != 1
        return set(whole)

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
    directory = (await operations.lookup(1, ID.hex().encode(), CTX)).st_ino
    assert await listed(1, 0) == {True}
    assert await listed(1, 100) == {False}
    assert await listed(1, 110) == {False}
    await operations.lookup(directory, b"elf", CTX)
    assert await listed(1, 120) == {False}, "somewhere else"
    assert (await operations.lookup(1, b"aaaa", CTX)).st_ino == 0
    assert await listed(1, 130) == {False}, "nothing was found"
    await operations.lookup(1, ID.hex().encode(), CTX)
    replies = [await listed(1, 140) for _ in range(70)]
    assert replies[:60] == [{True}] * 60
    assert replies[-1] == {False}
    await operations.lookup(1, ID.hex().encode(), CTX)
    await listed(directory, 0)
    assert await listed(1, 140) == {False}, "another directory came in between"


async def test_a_reader_is_listed_what_leads_to_something_they_may_read(
    store: Store, loop: NotCached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found out in a thread, in pages; a name they know is answered all the same."""
    public = sighting(mode=0o100755, ino=2)
    store.commit([capture(store, b"%d" % n, bytes([1, n // 256, n % 256]), at=public)
                  for n in range(600)])  # fmt: skip
    view = View(store)
    operations = Operations(view, loop, Absences(MountLimits()), store.path, list_all=False)
    listed: list[bytes] = []
    offsets: list[int] = [0]

    def reply(token: Any, name: bytes, entry: Any, offset: int) -> bool:
        listed.append(name)
        offsets.append(offset)
        return True

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    token: Any = None
    other_user: Any = SimpleNamespace(uid=1, gid=1, pid=os.getpid())
    handle = await operations.opendir(1, other_user)
    calls = 0
    while True:
        before = len(listed)
        await operations.readdir(handle, offsets[-1], token)
        calls += 1
        if len(listed) == before:
            break
    assert loop.slow_calls == calls >= 3
    assert len(listed) == len(set(listed)) == 600 + 12
    assert ID.hex().encode() not in listed
    assert (await operations.lookup(1, ID.hex().encode(), other_user)).st_ino
    await operations.releasedir(handle)

    listed.clear()
    root: Any = SimpleNamespace(uid=0, gid=0, pid=1)
    handle = await operations.opendir(1, root)
    await operations.readdir(handle, 0, token)
    assert ID.hex().encode() in listed
    assert loop.slow_calls == calls, "root waits for no thread"


async def test_error_in_thread_becomes_errno(store: Store, loop: NotCached) -> None:
    operations = Operations(
        Broken(store), loop, Absences(MountLimits()), store.path, list_all=False
    )
    other_user: Any = SimpleNamespace(uid=1, gid=1, pid=os.getpid())
    handle = await operations.opendir(1, other_user)
    token: Any = None
    assert await _refused(operations.readdir(handle, 0, token)) == errno.EIO


def _caused(cause: OSError) -> StoreError:
    error = StoreError("blob cannot be opened")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FUSEError(errno.EROFS), errno.EROFS),
        (FileNotFoundError(errno.ENOENT, "gone"), errno.ENOENT),
        (OSError("without a number"), errno.EIO),
        (ArtifactMissing("pruned"), errno.ESTALE),
        (IntegrityError("blob is missing"), errno.ESTALE),
        (_caused(OSError(errno.EMFILE, "too many")), errno.EMFILE),
        (_caused(OSError(errno.EACCES, "not allowed")), errno.EIO),
        (StoreError("index"), errno.EIO),
        (RemoteUnavailable("the bucket does not answer"), errno.EIO),
        (ValueError("a fault"), errno.EIO),
    ],
)
def test_errnos(error: Exception, expected: int) -> None:
    assert errno_of(error) == expected


# --- the buffer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1 << 20, 2 << 20, (2 << 20) + 1])
def test_huge(size: int) -> None:
    buffer = huge_buffer(size)
    assert len(buffer) >= size
    assert ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % (2 << 20) == 0
    buffer[-1] = 7
    assert buffer[0] == 0
    assert buffer[-1] == 7
