# SPDX-License-Identifier: Apache-2.0
"""A separate process that fetches for a mount or a server, and the client for it.

A mount and a server only read the store, and must answer even if an upstream server hangs. So
another process downloads and commits. It is started with the first request, and ends when its
socket is closed.

The first packet goes to the module that has the ``main`` of the process. Each further packet is one
question or one answer, as JSON (`Question`, `FetchOutcome`). Answers come in any order.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.errors import BuildIdFsError
from buildidfs.linux import child
from buildidfs.linux.child import Supervised
from buildidfs.log import MessageRate
from buildidfs.model import BuildId, Kind
from buildidfs.upstream.options import FetchState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from buildidfs.store import Store
    from buildidfs.store.absent_files import AbsentFiles
    from buildidfs.upstream.fetcher import Upstreams

log = logging.getLogger(__name__)

LATE: Final = "late"
"""The state of a request without an answer yet; the file may come later."""

INTRODUCTION_MAX: Final = 192 << 10
_PACKET: Final = 64 << 10
_END_S: Final = 5.0
_IMPATIENT_S: Final = 60.0
_MOST_WAITING: Final = 1024


class Question(msgspec.Struct, frozen=True):
    """A requested file; for ``hops`` and ``via`` see `options.RequestedFile`."""

    number: int
    build_id: str
    kind: int
    hops: int = 0
    via: str = ""


class FetchOutcome(msgspec.Struct, frozen=True):
    """The result of a request: the state, and the reason."""

    number: int
    state: FetchState
    why: str = ""


_encode = msgspec.json.Encoder().encode
_questions = msgspec.json.Decoder(Question)
_answers = msgspec.json.Decoder(FetchOutcome)


class Agent:
    """Sends questions to the process. Thread-safe.

    If no server has a file, or no server could be asked, the question is not repeated for a while.
    """

    def __init__(
        self,
        module: str,
        words: Sequence[str],
        introduction: bytes,
        wait_s: float,
        absent: AbsentFiles,
        failed: AbsentFiles,
        token: str = "",
    ) -> None:
        """``module`` has the ``main`` of the process, which gets the arguments ``words``, and
        ``introduction`` as the first packet.

        ``absent`` and ``failed`` have the files that the process recently found on no server, or
        could not fetch. ``token`` is our name in the requests to servers, see `fetcher.token_of`.
        """
        self.token = token
        self._absent = absent
        self._failed = failed
        self._program = Supervised(module, *words, introduction=introduction)
        self.wait_s = wait_s
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waits_from = 0.0
        self._waiting: dict[int, tuple[tuple[bytes, Kind], Future[FetchOutcome]]] = {}
        self._asked: dict[tuple[bytes, Kind], Future[FetchOutcome]] = {}
        self._reports = MessageRate()
        self._closed = False

    def is_worth_asking(self, build_id: bytes, kind: Kind) -> bool:
        """Return False if the file recently was on no server, or could not be fetched. Takes no
        lock.
        """
        return not (self._absent.has(build_id, kind) or self._failed.has(build_id, kind))

    @staticmethod
    def is_answer(state: str) -> bool:
        """Return True if a state of `fetch` is final: the file has come, or no server has it."""
        return state in (FetchState.FETCHED, FetchState.HELD, FetchState.ABSENT)

    def fetch(self, build_id: BuildId, kind: Kind, hops: int = 0, via: str = "") -> str:
        """Let the process fetch a file; return the state, after `wait_s` seconds at the latest.

        If a file has not come within that time, further calls request their files, but do not wait
        for them, until a server has answered or a minute has passed. So requests for many files of
        a hanging server wait no longer than a single request.
        """
        key = bytes(build_id), kind
        if self._absent.has(build_id, kind):
            return FetchState.ABSENT
        if self._failed.has(build_id, kind):
            return FetchState.UNAVAILABLE
        with self._lock:
            future = self._asked.get(key)
            if future is None:
                future = self._ask(key, hops, via)
            patience = self.wait_s if time.monotonic() >= self._waits_from else 0.0
        try:
            return future.result(patience).state
        except LateError:
            if patience:
                self._waits_from = time.monotonic() + _IMPATIENT_S
            return LATE

    def close(self) -> None:
        """End the process, and all waits for it."""
        with self._lock:
            self._closed = True
            self._fail_waiting()
            if not self._program.close(_END_S):
                log.warning("the process that fetches did not end in time, and was killed")

    def _ask(self, key: tuple[bytes, Kind], hops: int, via: str) -> Future[FetchOutcome]:
        """Send a question; the caller holds the lock."""
        future: Future[FetchOutcome] = Future()
        pipe = self._started() if len(self._waiting) < _MOST_WAITING else None
        if pipe is None:
            future.set_result(FetchOutcome(0, FetchState.UNAVAILABLE))
            return future
        number = next(self._numbers)
        build_id, kind = key
        self._waiting[number] = key, future
        self._asked[key] = future
        try:
            pipe.send(_encode(Question(number, build_id.hex(), int(kind), hops, via[:1024])))
        except OSError:
            self._drop()
        return future

    def _started(self) -> socket.socket | None:
        """Return the socket of the process; None if it cannot be started now."""
        if self._closed:
            return None
        if self._program.channel is not None:
            return self._program.channel
        try:
            pipe = self._program.start()
        except BlockingIOError:
            return None
        except OSError as error:
            log.warning("cannot start the process that fetches: %s", error.strerror)
            return None
        pipe.settimeout(_END_S)  # for sending, because a stopped process must not block us
        reader = threading.Thread(
            target=self._read, args=(pipe, pipe.dup()), daemon=True, name="buildidfs-fetch"
        )
        reader.start()
        return pipe

    def _read(self, pipe: socket.socket, own: socket.socket) -> None:
        own.settimeout(None)
        with own:
            while True:
                try:
                    packet = own.recv(_PACKET)
                    if not packet:
                        break
                    self._take(_answers.decode(packet))
                except (OSError, msgspec.MsgspecError):
                    break
        with self._lock:
            if self._program.channel is pipe:
                log.warning("the process that fetches has ended; the next request starts it again")
                self._drop()

    def _take(self, answer: FetchOutcome) -> None:
        with self._lock:
            self._program.restarts.succeeded()
            waiting = self._waiting.pop(answer.number, None)
            if waiting is None:
                return
            key, future = waiting
            self._asked.pop(key, None)
            if self.is_answer(answer.state):
                self._waits_from = 0.0
            elif self._reports.take(answer.why):
                log.warning("cannot fetch a file that the store lacks: %s", answer.why)
        future.set_result(answer)

    def _drop(self) -> None:
        """Kill the process, which does not answer any more; the caller holds the lock."""
        self._program.kill(0)
        self._program.restarts.failed()
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        """Answer all open questions; the caller holds the lock."""
        waiting, self._waiting = self._waiting, {}
        self._asked.clear()
        for _, future in waiting.values():
            future.set_result(FetchOutcome(0, FetchState.UNAVAILABLE))


def serve(
    pipe: socket.socket,
    opened: Callable[[], Store],
    upstreams_of: Callable[[Store], Upstreams],
    workers: int,
) -> None:
    """Answer the questions of an `Agent` until it is gone.

    ``opened`` opens the store; its errors are raised.
    """
    child.report_ready(pipe)
    with contextlib.closing(opened()) as store, upstreams_of(store) as upstreams:
        pool = ThreadPoolExecutor(workers, "fetch")

        def answer(question: Question) -> None:
            try:
                done = upstreams.fetch(
                    BuildId.from_hex(question.build_id),
                    Kind(question.kind),
                    hops=question.hops,
                    via=question.via,
                )
                state, why = done.state, done.why
            except BuildIdFsError as error:
                state, why = FetchState.UNAVAILABLE, str(error)
            except Exception:
                log.exception("a fault of this program")
                state, why = FetchState.UNAVAILABLE, "a fault of this program"
            with contextlib.suppress(OSError):
                pipe.send(_encode(FetchOutcome(question.number, state, why[:4096])))

        try:
            while packet := pipe.recv(_PACKET):
                pool.submit(answer, _questions.decode(packet))
        except OSError:
            pass  # the requesting process was killed
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            upstreams.close()
            pool.shutdown()
