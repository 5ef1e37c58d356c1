# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.sdnotify: messages arrive, and a missing listener is no failure."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.linux.sdnotify import Inbox, Notifier
from tests.support.clients.tools import run, tool
from tests.support.harness.children import needs_root


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    yield made
    made.close()


def _told(inbox: Inbox) -> dict[str, str] | None:
    assert select.select([inbox], [], [], 10)[0]
    return inbox.receive()


def test_everything_that_can_be_said(inbox: Inbox) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": inbox.name})
    assert inbox.receive() is None
    notifier.ready("two\nlines")
    assert _told(inbox) == {"READY": "1", "STATUS": "two lines"}
    notifier.status("é = \udcff")
    assert _told(inbox) == {"STATUS": "é = ?"}
    notifier.alive()
    assert _told(inbox) == {"WATCHDOG": "1"}
    notifier.stopping()
    assert _told(inbox) == {"STOPPING": "1"}
    assert inbox.receive() is None


def test_status_is_sent_once_until_it_changes(inbox: Inbox) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": inbox.name})
    notifier.ready("idle")
    for text in ("idle", "idle", "busy", "busy", "idle"):
        notifier.status(text)
    messages = list(iter(inbox.receive, None))
    assert [each["STATUS"] for each in messages] == ["idle", "busy", "idle"]


def test_status_that_did_not_arrive_is_sent_at_the_next_report(tmp_path: Path) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    notifier.ready("idle")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        notifier.status("idle")
        assert manager.recv(100) == b"STATUS=idle"


def test_long_status_is_cut(inbox: Inbox) -> None:
    Notifier({"NOTIFY_SOCKET": inbox.name}).status("x" * 100_000)
    told = _told(inbox)
    assert told is not None
    assert set(told["STATUS"]) == {"x"}


def test_socket_with_a_path(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")}).ready()
        assert manager.recv(100) == b"READY=1\nSTATUS="


def test_systemds_own_program_is_understood(inbox: Inbox) -> None:
    run([tool("systemd-notify"), "--no-block", "--ready", "--status=as told"],
        env={"NOTIFY_SOCKET": inbox.name}, check=True)  # fmt: skip
    told = _told(inbox) or {}
    assert {"READY": "1", "STATUS": "as told"}.items() <= told.items()


@needs_root("another user")
def test_other_users_say_nothing(inbox: Inbox) -> None:
    other = [tool("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups"]
    for words in (other, []):
        run(
            [*words, tool("systemd-notify"), "--no-block", "--ready"],
            env={"NOTIFY_SOCKET": inbox.name},
        )
    assert _told(inbox) == {}
    assert (_told(inbox) or {})["READY"] == "1"


@pytest.mark.parametrize("name", [None, "", "/nothing/there", "@nobody" * 3, "relative", "@"])
def test_socket_without_a_listener(name: str | None) -> None:
    Notifier({} if name is None else {"NOTIFY_SOCKET": name}).ready("yes")


def test_manager_that_does_not_read(inbox: Inbox) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": inbox.name})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as other:
        other.connect(b"\0" + inbox.name[1:].encode())
        while select.select([], [other], [], 0)[1]:
            other.send(b"X=1")
    notifier.ready()
    while (told := inbox.receive()) is not None:
        assert told == {"X": "1"}


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"WATCHDOG_USEC": "3000000"}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_how_often_to_say_that_we_live(environ: dict[str, str], seconds: float | None) -> None:
    assert Notifier(environ).watchdog_s == seconds
