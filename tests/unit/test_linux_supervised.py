# SPDX-License-Identifier: Apache-2.0
"""Programs behind a socket: how they report that they are ready, and when they start again."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buildidfs.backoff import Backoff
from buildidfs.linux import child
from buildidfs.linux.child import Supervised
from tests.support.harness.scans import open_descriptors

READY = "child.report_ready(sock, 'with less')"

Make = Callable[[str], Supervised]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes a program with a body, which has its socket and arguments."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def of(body: str) -> Supervised:
        (tmp_path / "supervised_program.py").write_text(
            "import os, socket, time\nfrom buildidfs.linux import child\n"
            "def main(words):\n"
            f"    sock = socket.socket(fileno=int(words[0]))\n    {body}\n"
        )
        restarts = Backoff(0.2, 10)
        made.append(Supervised("supervised_program", "word", restarts=restarts, quiet=True))
        return made[-1]

    yield of
    for program in made:
        program.kill(10)


def test_program_is_started_once_and_answers_when_it_is_ready(make: Make) -> None:
    before = open_descriptors()
    program = make(f"{READY}; sock.send(sock.recv(9) + words[1].encode()); sock.recv(1)")
    assert program.pid == 0
    channel = program.start()
    assert program.status == "with less"
    assert program.start() is channel
    channel.send(b"my ")
    assert channel.recv(100) == b"my word"
    pid = program.pid
    assert program.close(10)
    assert not Path(f"/proc/{pid}").exists()
    assert (program.pid, program.channel) == (0, None)
    assert open_descriptors() == before


def test_introduction_is_the_first_packet(make: Make) -> None:
    make("")
    program = Supervised("supervised_program", introduction=b"hello", quiet=True)
    make("child.report_ready(sock, sock.recv(9).decode()); sock.recv(1)")
    program.start()
    assert program.status == "hello"
    program.kill(10)


def test_reason_of_a_program_that_cannot_work_is_raised(make: Make) -> None:
    program = make("child.report_failure(sock, 13, 'no rights')")
    with pytest.raises(PermissionError, match="no rights"):
        program.start()
    assert program.pid == 0


def test_program_that_ends_early_is_not_started_at_once(make: Make) -> None:
    program = make("raise SystemExit(3)")
    with pytest.raises(OSError, match="before it was ready") as caught:
        program.start()
    assert caught.value.errno == errno.ECHILD
    with pytest.raises(BlockingIOError):
        program.start()


def test_program_that_never_gets_ready_is_killed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "START_S", 0.5)
    program = make("time.sleep(1000)")
    with pytest.raises(TimeoutError, match=r"not ready within 0\.5 s"):
        program.start()
    assert program.pid == 0


def test_killed_program_starts_again_after_its_delay(make: Make) -> None:
    program = make(f"{READY}; sock.recv(1)")
    channel = program.start()
    os.kill(program.pid, signal.SIGKILL)
    assert channel.recv(1) == b""
    program.kill(0)
    program.restarts.failed()
    with pytest.raises(BlockingIOError):
        program.start()
    program.restarts.succeeded()
    program.start()
    assert program.pid


def test_program_that_ignores_the_end_of_its_socket_is_killed(make: Make) -> None:
    program = make(f"{READY}; time.sleep(1000)")
    program.start()
    pid = program.pid
    assert not program.close(0.2)
    assert not Path(f"/proc/{pid}").exists()
