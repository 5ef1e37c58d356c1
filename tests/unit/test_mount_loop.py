# SPDX-License-Identifier: Apache-2.0
"""buildidfs.mount.loop: both loops, driven the way pyfuse3 drives them, on a pipe.

`_session` does what pyfuse3's `_session_loop` does (internal.pxi): take the lock, wait for the
descriptor, read one request, start another worker if none waits, answer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pyfuse3
import pytest
import trio
import trio.testing

from buildidfs.mount.loop import FastLoop, PlainLoop

Answer = Callable[[bytes], Awaitable[None]]


class _Session:
    """A session of pyfuse3 in miniature. A request is one byte; ``q`` ends the session."""

    def __init__(self, fd: int, answer: Answer) -> None:
        self.over = False
        self.workers = 0
        self.most_workers = 0
        self._fd = fd
        self._answer = answer
        self._waiting = 0
        self._lock: Any = None

    async def run(self) -> None:
        trio_of_pyfuse3: Any = pyfuse3.trio  # type: ignore[attr-defined]
        self._lock = trio_of_pyfuse3.Lock()
        assert trio_of_pyfuse3.lowlevel.current_trio_token() is not None
        async with trio_of_pyfuse3.open_nursery() as nursery:
            self.workers = 1
            nursery.start_soon(self._work, nursery, name="first")

    def stop(self) -> None:
        self.over = True
        pyfuse3.trio.lowlevel.notify_closing(self._fd)  # type: ignore[attr-defined]

    async def _readable(self) -> bool:
        trio_of_pyfuse3: Any = pyfuse3.trio  # type: ignore[attr-defined]
        self._waiting += 1
        try:
            async with self._lock:
                if self.over:
                    return False
                await trio_of_pyfuse3.lowlevel.wait_readable(self._fd)
        except trio_of_pyfuse3.ClosedResourceError:
            return False
        finally:
            self._waiting -= 1
        return True

    async def _work(self, nursery: Any) -> None:
        while not self.over:
            if self._waiting > 1 or not await self._readable():
                break
            request = os.read(self._fd, 1)
            if not self._waiting and self.workers < 20:
                self.workers += 1
                self.most_workers = max(self.workers, self.most_workers)
                nursery.start_soon(self._work, nursery, name=f"worker {self.workers}")
            if request in (b"q", b""):
                self.over = True
            else:
                await self._answer(request)
        self.workers -= 1


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    yield reading, writing
    os.close(reading)
    os.close(writing)


@pytest.fixture(params=[FastLoop, PlainLoop])
def loop(request: pytest.FixtureRequest) -> Iterator[PlainLoop]:
    made: PlainLoop = request.param()
    made.install()
    yield made
    PlainLoop().install()


def test_plain_is_trio_itself() -> None:
    FastLoop().install()
    assert pyfuse3.trio is not trio  # type: ignore[attr-defined]
    PlainLoop().install()
    assert pyfuse3.trio is trio  # type: ignore[attr-defined]


async def test_requests_are_answered_in_order(loop: PlainLoop, pipe: tuple[int, int]) -> None:
    answered = bytearray()

    async def answer(request: bytes) -> None:
        answered.extend(request)

    text = bytes(range(97, 112)) * 200
    os.write(pipe[1], text + b"q")
    with trio.fail_after(10):
        await _Session(pipe[0], answer).run()
    assert answered == text


async def test_requests_that_come_one_by_one(loop: PlainLoop, pipe: tuple[int, int]) -> None:
    """Each is sent from the answer to the one before, so the loop has to wait every time."""
    left = 300

    async def answer(request: bytes) -> None:
        nonlocal left
        left -= 1
        threading.Timer(0, os.write, (pipe[1], b"x" if left else b"q")).start()

    os.write(pipe[1], b"x")
    with trio.fail_after(20):
        await _Session(pipe[0], answer).run()
    assert left == 0


async def test_slow_request_delays_no_other(loop: PlainLoop, pipe: tuple[int, int]) -> None:
    go_on = threading.Event()
    answered: list[bytes] = []

    async def answer(request: bytes) -> None:
        if request == b"s":
            assert await loop.in_thread(go_on.wait, 10)
        elif request == b"r":
            go_on.set()
        answered.append(request)
        if len(answered) == 44:
            os.write(pipe[1], b"q")

    # more slow ones than nothing else would be running beside; the last one releases them
    os.write(pipe[1], b"sfsff" * 3 + b"f" * 28 + b"r")
    with trio.fail_after(20):
        session = _Session(pipe[0], answer)
        await session.run()
    assert answered[-7:].count(b"s") == 6
    assert answered[:38] == [b"f"] * 37 + [b"r"]
    assert session.workers == 0


async def test_other_tasks_run_while_requests_pour_in(
    loop: PlainLoop, pipe: tuple[int, int]
) -> None:
    answered = 0
    ended_at = 0
    session: _Session

    async def answer(request: bytes) -> None:
        nonlocal answered
        answered += 1
        os.write(pipe[1], b"x")  # there is always one more

    async def other() -> None:
        nonlocal ended_at
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        ended_at = answered
        session.stop()

    os.write(pipe[1], b"x")
    session = _Session(pipe[0], answer)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            await session.run()
    assert 0 < ended_at < 5000


async def test_stopping_while_it_waits(loop: PlainLoop, pipe: tuple[int, int]) -> None:
    """Also those workers must end that wait for their turn to wait."""
    answered = 0
    all_answered = trio.Event()

    async def answer(request: bytes) -> None:
        nonlocal answered
        await loop.in_thread(lambda: None)
        answered += 1
        if answered == 5:
            all_answered.set()

    session = _Session(pipe[0], answer)
    os.write(pipe[1], b"xxxxx")
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.run)
            await all_answered.wait()
            await trio.testing.wait_all_tasks_blocked()
            session.stop()
    assert session.most_workers > 1
    assert session.workers == 0


async def test_an_error_in_a_worker_ends_the_session(
    loop: PlainLoop, pipe: tuple[int, int]
) -> None:
    async def answer(request: bytes) -> None:
        raise KeyError(request)

    os.write(pipe[1], b"x")
    with trio.fail_after(10), pytest.raises(ExceptionGroup) as caught:
        await _Session(pipe[0], answer).run()
    assert isinstance(caught.value.exceptions[0], KeyError)


async def test_a_thread_gives_back_what_the_function_does(loop: PlainLoop) -> None:
    assert await loop.in_thread(divmod, 7, 3) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        await loop.in_thread(divmod, 7, 0)
