# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.coordination: who names and who removes keep out of each other's way."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from buildidfs.errors import StoreError
from buildidfs.store import Store, coordination
from tests.support.harness.captures import capture, commit, stage


@pytest.fixture
def root(tmp_path: Path) -> bytes:
    Store.create(tmp_path / "store").close()
    return os.fsencode(tmp_path / "store")


def _started(work: object) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_several_may_name_at_a_time(root: bytes) -> None:
    with coordination.naming(root), coordination.naming(root):
        assert os.path.exists(os.path.join(root, b"lock"))


@pytest.mark.parametrize("first", ["naming", "removing"])
def test_nobody_removes_beside_others(root: bytes, first: str) -> None:
    order: list[str] = []

    def remove() -> None:
        with coordination.removing(root):
            order.append("removed")

    with getattr(coordination, first)(root):
        thread = _started(remove)
        time.sleep(0.05)
        order.append("first is done")
    thread.join(10)
    assert order == ["first is done", "removed"]


def test_who_wants_to_remove_gets_a_turn(root: bytes) -> None:
    ended = threading.Event()

    def name() -> None:
        while not ended.is_set():
            with coordination.naming(root):
                time.sleep(0.002)

    threads = [_started(name) for _ in range(4)]  # of which one has the lock at any time
    try:
        for _ in range(5):
            begun = time.monotonic()
            with coordination.removing(root):
                assert time.monotonic() - begun < 5
    finally:
        ended.set()
        for thread in threads:
            thread.join(10)


def test_a_forked_child_does_not_keep_it(root: bytes) -> None:
    reading, writing = os.pipe()
    with coordination.naming(root):
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    try:
        with coordination.removing(root):
            pass
    finally:
        os.close(writing)
        os.waitpid(pid, 0)
        os.close(reading)


def test_a_commit_waits_for_a_removal(root: bytes) -> None:
    with Store.open(root) as store:
        done = threading.Event()
        staged = capture(store, b"app")

        def work() -> None:
            store.commit([staged])
            done.set()

        with coordination.removing(root):
            thread = _started(work)
            assert not done.wait(0.1)
            assert store.blobs.size(staged.content.digest) is None  # type: ignore[union-attr]
            store.note_seen([])  # what names no blob does not wait
        thread.join(10)
        assert done.is_set()
        assert list(store.check()) == []


def test_a_lock_that_cannot_be_had_is_an_error_of_the_store(root: bytes) -> None:
    path = os.path.join(root, b"lock")
    os.symlink(b"elsewhere", path)
    with Store.open(root) as store:
        staged = stage(store, b"app")
        staged.close()
        with pytest.raises(StoreError, match="lock"):
            commit(store, capture(store, b"app"))
