# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.coordination: a commit is not over before every listener has forgotten."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.errors import StoreError
from buildidfs.store import Store, coordination
from tests.support.harness.captures import capture, sighting

if TYPE_CHECKING:
    from buildidfs.store.coordination import ChangeListener


@contextlib.contextmanager
def _listening(store: Store) -> Iterator[ChangeListener]:
    listener = store.listen()
    try:
        yield listener
    finally:
        listener.close()


@contextlib.contextmanager
def _committing(store: Store, content: bytes, build_id: bytes) -> Iterator[threading.Thread]:
    """A commit under way in another thread; it must be over when the block is."""
    thread = threading.Thread(target=store.commit, args=([capture(store, content, build_id)],))
    thread.start()
    yield thread
    thread.join(10)
    assert not thread.is_alive()


def _heard(listener: ChangeListener) -> list[int] | None:
    ready, _, _ = select.select([listener], [], [], 10)
    assert ready, "nothing was announced"
    return listener.receive()


def test_commit_waits_for_the_acknowledgement(store: Store) -> None:
    with _listening(store) as listener:
        assert listener.receive() is None
        start = time.monotonic()
        with _committing(store, b"x", b"\x01\x01") as thread:
            assert _heard(listener) == [1]
            assert store.index.ordinal(b"\x01\x01") == 1, "it is visible before it is announced"
            assert thread.is_alive(), "it waits"
            listener.acknowledge()
            thread.join(10)
            assert not thread.is_alive()
        assert time.monotonic() - start < coordination._PATIENCE_S, "it did not give up"
        assert listener.receive() is None


def test_every_listener_is_waited_for(store: Store) -> None:
    with (
        _listening(store) as first,
        _listening(store) as second,
        _committing(store, b"x", b"\x01\x01") as thread,
    ):
        assert _heard(first) == [1]
        first.acknowledge()
        assert _heard(second) == [1]
        assert thread.is_alive()
        second.acknowledge()


def test_nothing_changed_is_not_announced(store: Store) -> None:
    store.commit([capture(store, b"x")])
    with _listening(store) as listener:
        store.commit([capture(store, b"x", at=sighting(ino=5))])
        store.touch([sighting()])
        assert listener.receive() is None


def test_a_listener_that_hangs_costs_a_bounded_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordination, "_PATIENCE_S", 0.2)
    with _listening(store), _listening(store):
        start = time.monotonic()
        store.commit([capture(store, b"x")])
        assert 0.2 <= time.monotonic() - start < 2


def test_one_that_hangs_long_enough_to_miss_some_takes_everything_for_changed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue of a datagram socket is short."""
    monkeypatch.setattr(coordination, "_PATIENCE_S", 0.0)
    limit = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
    with _listening(store) as listener:
        for number in range(limit + 5):
            store.commit([capture(store, b"%d" % number, number.to_bytes(3, "big"))])
        assert listener.receive() == list(range(1, limit + 2)), "as many as the queue holds"
        assert listener.receive() is None
        store.commit([capture(store, b"last", b"\xff\xff")])
        assert listener.receive() == [], "this one knows that some are missing"
        store.commit([capture(store, b"next", b"\xee\xee")])
        assert listener.receive() == [limit + 7]


def test_several_commits_are_read_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_PATIENCE_S", 0.0)
    with _listening(store) as listener:
        for number in range(3):
            store.commit([capture(store, b"%d" % number, number.to_bytes(2, "big"))])
        before = set(os.listdir("/proc/self/fd"))
        assert listener.receive() == [1, 2, 3]
        listener.acknowledge()
        assert set(os.listdir("/proc/self/fd")) <= before, "no descriptor is left behind"


def test_a_large_batch_is_everything(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_MOST_ORDINALS", 2)
    monkeypatch.setattr(coordination, "_PATIENCE_S", 0.0)
    with _listening(store) as listener:
        store.commit([capture(store, b"x", bytes([1, number])) for number in range(3)])
        assert listener.receive() == []


def test_the_longest_list_fits_a_message(store: Store) -> None:
    with _listening(store) as listener:
        ordinals = [2**31 - 1] * coordination._MOST_ORDINALS
        thread = threading.Thread(target=coordination.announce, args=(store.path, 1, ordinals))
        thread.start()
        assert _heard(listener) == [2**31 - 1]
        listener.acknowledge()
        thread.join(10)


def test_sockets_of_the_dead_are_removed(store: Store) -> None:
    listeners = Path(os.fsdecode(store.path)) / "listeners"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(listeners / "1-0.sock"))
    (listeners / "README").touch()
    assert (listeners / "1-0.sock").exists()
    store.commit([capture(store, b"x")])
    assert sorted(path.name for path in listeners.iterdir()) == ["README"]


def test_a_listener_that_closes_in_between_holds_nobody_up(store: Store) -> None:
    listener = store.listen()
    start = time.monotonic()
    with _committing(store, b"x", b"\x01\x01"):
        assert select.select([listener], [], [], 10)[0]
        listener.close()
    assert time.monotonic() - start < coordination._PATIENCE_S
    listener.close()
    assert list((Path(os.fsdecode(store.path)) / "listeners").iterdir()) == []


def test_rubbish_is_taken_for_everything(store: Store) -> None:
    with _listening(store) as listener:
        (path,) = (Path(os.fsdecode(store.path)) / "listeners").iterdir()
        for rubbish in (b"", b"\xff\xff", b"\x92\x01\xa1x", bytes(100_000)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(rubbish, str(path))
            assert listener.receive() == []


def test_a_store_at_a_long_path(tmp_path: Path) -> None:
    """A socket address holds 108 bytes."""
    deep = tmp_path / ("d" * 200) / ("e" * 200)
    deep.mkdir(parents=True)
    with (
        Store.create(deep / "store") as store,
        _listening(store) as listener,
        _committing(store, b"x", b"\x01\x01"),
    ):
        assert _heard(listener) == [1]
        listener.acknowledge()


def test_the_socket_of_an_earlier_process_with_our_number_is_replaced(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordination, "_numbers", iter([5, 5]))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        path = Path(os.fsdecode(store.path)) / "listeners" / f"{os.getpid()}-5.sock"
        dead.bind(str(path))
    with _listening(store) as listener, _committing(store, b"x", b"\x01\x01"):
        assert _heard(listener) == [1]
        listener.acknowledge()


def test_a_directory_that_cannot_be_written_is_a_store_error(store: Store) -> None:
    os.rmdir(store.path + b"/listeners")
    with open(store.path + b"/listeners", "wb"):
        pass
    with pytest.raises(StoreError, match=r"store .*listeners"):
        store.listen()
    store.commit([capture(store, b"x")])  # nobody to tell, and that is no failure
