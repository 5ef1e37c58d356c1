# SPDX-License-Identifier: Apache-2.0
"""No number and no name makes a handler raise anything but an errno, or find a fault in itself."""

from __future__ import annotations

import errno
import logging
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyfuse3
import pytest
from pyfuse3 import FUSEError

from buildidfs.model import Kind, Trust
from buildidfs.mount.invalidate import Absences
from buildidfs.mount.limits import MountLimits
from buildidfs.mount.loop import PlainLoop
from buildidfs.mount.operations import Operations
from buildidfs.store import Store
from buildidfs.view import View, nodes
from tests.support.harness.captures import capture, sighting

CTX: Any = SimpleNamespace(uid=0, gid=0, pid=os.getpid())
TOKEN: Any = None
ROUNDS = 4000
NUMBERS = (0, 1, 2, 255, 256, 4095, 1 << 20, 1 << 28, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
           1 << 32, (1 << 33) + 1, 1 << 60, 1 << 62, (1 << 63) - 1)  # fmt: skip
# What could be meant by what was asked for; EIO would be a fault of ours.
ERRNOS = {0, errno.ENOENT, errno.ESTALE, errno.EISDIR, errno.EINVAL, errno.EBADF, errno.EROFS,
          errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENODATA, errno.EOPNOTSUPP}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as made:
        for number, path in enumerate((b"/usr/bin/app", b"/lib/.dwz/x/y", b"/a/0102")):
            at = sighting(path, trust=Trust.CONTAINER, container="box")
            for kinds in ((Kind.EXECUTABLE,), (Kind.DEBUGINFO,), (Kind.VDSO, Kind.KALLSYMS)):
                build_id = bytes([number, len(kinds), kinds[0]])
                made.commit([capture(made, build_id * 99, build_id, at=at, kinds=kinds)])
        yield made


class Client:
    """Asks for anything: what it was told of before, things near that, and things made up."""

    def __init__(self, operations: Operations, seed: int) -> None:
        self.chosen = random.Random(seed)
        self.answers: Counter[str] = Counter()
        self.nodes = [nodes.ROOT]
        self.handles: list[int] = []
        self.directories: list[int] = []
        self._operations = operations

    def node(self) -> int:
        node = self.chosen.choice(self.nodes)
        if self.chosen.random() < 0.7:
            return node
        if self.chosen.random() < 0.5:
            return node ^ 1 << self.chosen.randrange(64)
        return self.chosen.randrange(1 << 64)

    def number(self) -> int:
        near = self.chosen.choice(NUMBERS) + self.chosen.randint(-1, 1)
        return max(0, min(near, (1 << 63) - 1))

    def name(self) -> bytes:
        known = (b"elf", b"debug", b"path", b"variants", b"0001", b".build-id", b".dwz", b"usr",
                 b"README", b"by-path", b"by-name", b"containers", b"missing", b"box", b"root",
                 b"bin", b"lib", b"app", b"id", b"libz.so.1", b"user.sha256", b"x", b"..", b".",
                 b"", b"a/b", b"\0", b"000101", b"A0", b"f" * 255, b"f" * 256)  # fmt: skip
        return self.chosen.choice((*known, self.chosen.randbytes(self.chosen.randrange(300))))

    async def ask(self) -> None:
        """One request."""
        which = self.chosen.choice(
            ("lookup", "lookup", "getattr", "readlink", "readdir", "open", "read", "release",
             "forget", "statfs", "opendir", "releasedir", "create", "setattr", "getxattr",
             "listxattr")
        )  # fmt: skip
        number = 0
        try:
            await getattr(self, f"_{which}")()
        except FUSEError as error:
            number = error.errno
        assert number in ERRNOS, (which, os.strerror(number))
        self.answers[f"{which} refused" if number else which] += 1

    async def _lookup(self) -> None:
        entry = await self._operations.lookup(self.node(), self.name(), CTX)
        if entry.st_ino:
            self.nodes.append(entry.st_ino)

    async def _getattr(self) -> None:
        entry = await self._operations.getattr(node := self.node(), CTX)
        assert entry.st_ino == node

    async def _readlink(self) -> None:
        assert await self._operations.readlink(self.node(), CTX)

    async def _opendir(self) -> None:
        ctx: Any = SimpleNamespace(uid=self.number(), gid=self.number(), pid=self.number())
        self.directories.append(await self._operations.opendir(self.node(), ctx))

    def _directory(self) -> int:
        if self.directories and self.chosen.random() < 0.7:
            return self.chosen.choice(self.directories)
        return self.node()

    async def _releasedir(self) -> None:
        await self._operations.releasedir(self._directory())

    async def _readdir(self) -> None:
        await self._operations.readdir(self._directory(), self.number(), TOKEN)

    async def _open(self) -> None:
        flags = self.chosen.choice(
            (os.O_RDONLY, os.O_RDONLY, os.O_RDWR, self.number() & 0x7FFFFFFF)
        )
        self.handles.append((await self._operations.open(self.node(), flags, CTX)).fh)

    def _handle(self) -> int:
        if self.handles and self.chosen.random() < 0.7:
            return self.chosen.choice(self.handles)
        return self.number()

    async def _read(self) -> None:
        size = self.chosen.choice((0, 1, 4096, 1 << 17, (1 << 20) + 1))
        assert len(await self._operations.read(self._handle(), self.number(), size)) <= size

    async def _release(self) -> None:
        if self.handles and self.chosen.random() < 0.7:
            # as the kernel does: once for each open
            handle = self.handles.pop(self.chosen.randrange(len(self.handles)))
            await self._operations.release(handle)
        else:
            await self._operations.release((1 << 40) + self.number())

    async def _forget(self) -> None:
        await self._operations.forget([(self.node(), self.number())] * 3)

    async def _statfs(self) -> None:
        await self._operations.statfs(CTX)

    async def _getxattr(self) -> None:
        assert await self._operations.getxattr(self.node(), self.name(), CTX)

    async def _listxattr(self) -> None:
        await self._operations.listxattr(self.node(), CTX)

    async def _create(self) -> None:
        anything: Any = self._operations
        await anything.create(self.node(), self.name(), 0o666, os.O_RDWR, CTX)

    async def _setattr(self) -> None:
        anything: Any = self._operations
        await anything.setattr(self.node(), None, None, None, CTX)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_any_request(
    store: Store, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listed = []

    def reply(token: Any, name: bytes, entry: Any, offset: int) -> bool:
        assert 0 < offset < 1 << 63
        listed.append(entry.st_ino)
        return len(listed) % 50 != 0

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
    descriptors = len(os.listdir("/proc/self/fd"))
    view = View(store)
    operations = Operations(
        view, PlainLoop(), Absences(MountLimits(absences=100)), store.path, list_all=False
    )
    client = Client(operations, seed)
    files = [
        view.child(nodes.of_id(ordinal), name)
        for ordinal, _ in store.index.build_ids_from()
        for name in (b"elf", b"debug", b"vdso", b"path", b"variants")
    ]
    client.nodes += filter(None, files)
    with caplog.at_level(logging.WARNING):
        for _ in range(ROUNDS):
            await client.ask()
            if len(client.nodes) > 200:
                client.nodes[1:100] = listed[-99:]
    assert caplog.messages == []
    # it was not only refused
    for which in ("lookup", "getattr", "readlink", "readdir", "open", "read", "release",
                  "listxattr"):  # fmt: skip
        assert client.answers[which], client.answers
    for which in ("lookup", "readlink", "open", "read", "release", "create", "setattr"):
        assert client.answers[f"{which} refused"], client.answers
    assert listed
    operations.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
