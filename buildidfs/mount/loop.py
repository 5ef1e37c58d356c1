# SPDX-License-Identifier: Apache-2.0
"""Two ways to wait for the kernel's next request: trio's own, and one that is twice as fast.

Most of the time of a FUSE request in pyfuse3 is spent neither in Python nor in the index but on
waiting. pyfuse3 guards its descriptor with a `trio.Lock` and waits with
`trio.lowlevel.wait_readable`. So every request takes two passes through trio's scheduler, a
hand-over from one worker task to another and three system calls (epoll_ctl, twice epoll_wait),
which is two thirds of the time.

pyfuse3 looks these names up in its module attribute ``trio`` each time (its asyncio support
replaces it in the same way), so `FastLoop` puts a small object of the same shape there:

- ``wait_readable`` first waits in poll(2), for up to a millisecond. A busy client sends its next
  request within that time, so trio is not needed. If no request comes, it waits in trio. Now and
  then it goes through trio in any case, so that signals are seen within milliseconds under any
  load; while a handler works in a thread, that is often, and poll(2) does not wait at all.
- ``Lock`` is not passed on when a worker releases it: the worker that has just answered takes it
  again without a scheduler pass. Only a handler that is about to block passes it to
  another worker (`in_thread`), and a worker that ends wakes all others, so that they notice that
  the session is over.

`PlainLoop` leaves everything to trio. It helps to find faults (``-o loop=plain``): if a problem
occurs with one loop only, its cause is in this file.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any, TypeVar

import pyfuse3
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

T = TypeVar("T")

THREADS = 16
"""The maximum number of reads that wait for a disk at the same time; further reads wait for
these.
"""

SLOW_THREADS = 2
"""The maximum number of whole files that are read at the same time, or of listings that search for
visible names. Neither may delay other reads.
"""

FETCHING_THREADS = 48
"""The maximum number of opens that wait at the same time for files from upstream servers."""
REMOTE_THREADS = 32
"""The maximum number of simultaneous requests to buckets. They neither wait for disk reads nor
delay these.
"""

_PATIENCE_MS = 1
_TURNS = 512
_TURNS_BUSY = 16


class PlainLoop:
    """trio as pyfuse3 uses it by default."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(THREADS)
        self._slow_limiter = trio.CapacityLimiter(SLOW_THREADS)
        self._fetching_limiter = trio.CapacityLimiter(FETCHING_THREADS)
        self._remote_limiter = trio.CapacityLimiter(REMOTE_THREADS)

    @property
    def requests(self) -> int | None:
        """Return the number of requests since the start; None if unknown."""
        return None

    def install(self) -> None:
        """Make pyfuse3 use this loop; call it before `pyfuse3.init`."""
        _replace_trio(trio)

    async def in_thread(self, function: Callable[..., T], *args: object) -> T:
        """Call ``function`` in a thread while other requests are being answered."""
        return await self._run(self._limiter, function, *args)

    async def in_slow_thread(self, function: Callable[..., T], *args: object) -> T:
        """Do the same as `in_thread` for functions that may take seconds.

        Few of them run at a time, so that threads are left for others.
        """
        return await self._run(self._slow_limiter, function, *args)

    async def in_fetching_thread(self, function: Callable[..., T], *args: object) -> T:
        """Call a function that waits for a network. It runs in a thread that delays no other
        request.
        """
        return await self._run(self._fetching_limiter, function, *args)

    async def in_remote_thread(self, function: Callable[..., T], *args: object) -> T:
        """Do the same as `in_thread` for functions that may wait for a bucket."""
        return await self._run(self._remote_limiter, function, *args)

    async def _run(
        self, limiter: trio.CapacityLimiter, function: Callable[..., T], *args: object
    ) -> T:
        return await trio.to_thread.run_sync(function, *args, limiter=limiter)


class FastLoop(PlainLoop):
    """A loop that uses trio only if no request waits. See the module docstring."""

    def __init__(self) -> None:
        super().__init__()
        self._baton = _Baton()
        self._waiter = _Waiter()

    @property
    def requests(self) -> int | None:
        return self._waiter.requests

    def install(self) -> None:
        """Put this loop in place of trio."""
        _replace_trio(_Shim(self._baton, self._waiter))

    async def _run(
        self, limiter: trio.CapacityLimiter, function: Callable[..., T], *args: object
    ) -> T:
        self._waiter.begin()
        self._baton.wake_one()
        try:
            return await trio.to_thread.run_sync(function, *args, limiter=limiter)
        finally:
            self._waiter.end()


def _replace_trio(substitute: object) -> None:
    pyfuse3.trio = substitute  # type: ignore[attr-defined]  # its stub does not show its imports


class _Baton:
    """Held by the one worker that may wait for a request. Reused by successive sessions."""

    def __init__(self) -> None:
        self._held = False
        self._others = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> None:
        while self._held:
            await self._others.park()
        self._held = True

    async def __aexit__(self, *exc: object) -> None:
        self._held = False

    def wake_one(self) -> None:
        """Let another worker wait for requests. The caller does so when it is about to block."""
        self._others.unpark()

    def wake_all(self) -> None:
        """Let every worker check if the session goes on."""
        self._others.unpark_all()


class _Waiter:
    """Waits for one descriptor to become readable."""

    def __init__(self) -> None:
        self._fd = -1
        self._poll = select.poll()
        self._busy = 0
        self._turns = 0
        self._began = 0  # the number of turns at which `_waits` was right
        self._waits = 0
        self._patience_ms = _PATIENCE_MS

    @property
    def requests(self) -> int:
        """Return the number of calls of `wait`, one for each request. Counting costs nothing."""
        return self._waits + self._began - self._turns

    def begin(self) -> None:
        """Record that a handler runs in a thread, so that trio soon sees when the handler
        is done.
        """
        self._busy += 1
        self._patience_ms = 0
        self._turn_to(min(self._turns, _TURNS_BUSY))

    def end(self) -> None:
        """Record that a handler is back."""
        self._busy -= 1
        if not self._busy:
            self._patience_ms = _PATIENCE_MS

    def _turn_to(self, turns: int) -> None:
        self._waits = self.requests
        self._began = self._turns = turns

    async def wait(self, fd: int) -> None:
        """Return when ``fd`` is readable."""
        self._turns -= 1
        if self._turns > 0:
            # A check without waiting is cheaper than a wait that ends in vain, so it comes first.
            poll = self._poll.poll
            if poll(0) or (self._patience_ms and poll(self._patience_ms)):
                return
        self._turn_to(_TURNS_BUSY if self._busy else _TURNS)
        if fd != self._fd:
            self._fd, self._poll = fd, select.poll()
            self._poll.register(fd, select.POLLIN)
        while True:
            await trio.lowlevel.wait_readable(fd)
            # The request may have been withdrawn in between (its process was killed); a read would
            # then block the whole loop.
            if self._poll.poll(0):
                return


class _Workers:
    """A nursery whose tasks wake all others when they end."""

    def __init__(self, baton: _Baton) -> None:
        self._baton = baton
        self._manager = trio.open_nursery()
        self._nursery: trio.Nursery | None = None

    async def __aenter__(self) -> _Workers:
        self._nursery = await self._manager.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._manager.__aexit__(kind, error, traceback)

    def start_soon(
        self, function: Callable[..., Awaitable[object]], *args: object, name: str | None = None
    ) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._run, function, args, name=name)

    async def _run(
        self, function: Callable[..., Awaitable[object]], args: tuple[object, ...]
    ) -> None:
        try:
            await function(*args)
        finally:
            self._baton.wake_all()


class _Lowlevel:
    """The names of `trio.lowlevel` that pyfuse3 uses."""

    def __init__(self, waiter: _Waiter) -> None:
        self.wait_readable = waiter.wait
        self.notify_closing = trio.lowlevel.notify_closing
        self.current_task = trio.lowlevel.current_task
        self.current_trio_token = trio.lowlevel.current_trio_token


class _Shim:
    """The names of `trio` that pyfuse3 uses."""

    ClosedResourceError = trio.ClosedResourceError

    def __init__(self, baton: _Baton, waiter: _Waiter) -> None:
        self.lowlevel = _Lowlevel(waiter)
        self._baton = baton

    def Lock(self) -> _Baton:
        return self._baton

    def open_nursery(self) -> _Workers:
        return _Workers(self._baton)

    def __getattr__(self, name: str) -> Any:
        # Another version of pyfuse3 may use more of trio, which is passed through unchanged.
        return getattr(trio, name)
