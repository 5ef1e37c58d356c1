# SPDX-License-Identifier: Apache-2.0
"""Sending of files by the kernel, to clients of any speed."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.model import Digest
from buildidfs.serve import content
from buildidfs.serve.content import Content
from buildidfs.store import Store
from buildidfs.view import FileContent
from tests.support.harness.captures import capture

LONG, SHORT = bytes(range(256)) * 32_768, bytes(range(256)) * 8_192


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as store:
        yield store


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


def opened(store: Store, data: bytes) -> Content:
    store.commit([capture(store, data)])
    blob = store.open_blob(Digest(hashlib.sha256(data).digest()))
    return Content(FileContent(b"", (), blob), 0, len(data))


def taken(sock: socket.socket) -> bytes:
    """All that has arrived."""
    found = b""
    while True:
        try:
            found += sock.recv(1 << 20)
        except BlockingIOError:
            return found


def test_thread_stays_with_a_client_that_takes_more(
    store: Store, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    got = []

    def drained(sock: int) -> bool:
        got.append(taken(theirs))
        return True

    monkeypatch.setattr(content, "_takes_more", drained)
    monkeypatch.setattr(content, "_TURN_S", 60.0)
    file = opened(store, LONG)
    assert file.send(ours.fileno(), 0) == len(LONG)
    assert b"".join([*got, taken(theirs)]) == LONG
    assert len(got) > 2
    file.close()


def test_slow_client_and_short_file_give_the_thread_back(
    store: Store, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    file = opened(store, LONG)
    done = file.send(ours.fileno(), 0)
    assert 0 < done < len(LONG)
    assert taken(theirs) == LONG[:done]
    file.close()
    asked: list[int] = []
    monkeypatch.setattr(content, "_takes_more", lambda sock: bool(asked.append(sock)))
    short = opened(store, SHORT)
    done = short.send(ours.fileno(), 0)
    assert 0 < done < len(SHORT)
    assert asked == []
    short.close()


def test_turn_ends_for_a_client_that_is_always_ready(
    store: Store, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    monkeypatch.setattr(content, "_takes_more", lambda sock: bool(taken(theirs)))
    monkeypatch.setattr(content, "_TURN_S", 1e-4)
    file = opened(store, LONG)
    done = calls = 0
    while done < len(LONG):
        calls += 1
        taken(theirs)
        done = file.send(ours.fileno(), done)
    assert calls > 1
    file.close()
