# SPDX-License-Identifier: Apache-2.0
"""Time limits for questions to filesystems, and the filesystems that have exceeded theirs."""

from __future__ import annotations

import errno
import math
import threading
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Device = tuple[int, int]
"""Two numbers that stand for a filesystem, or for what else is asked for together."""

_T = TypeVar("_T")

_SILENCE: Final = "its filesystem does not answer"


class Silences:
    """The filesystems that did not answer, each of which is left alone for ``seconds``.

    Of filesystems of one owner none is asked any more after ``most_of_an_owner`` were silent: a
    user may mount any number of them, and each would be waited for once. Not thread-safe.
    """

    def __init__(self, seconds: float = math.inf, most_of_an_owner: float = math.inf) -> None:
        self._seconds = seconds
        self._most = most_of_an_owner
        self._known: dict[Device, tuple[float, object]] = {}

    def add(self, device: Device, owner: object = None) -> None:
        """Remember that a filesystem did not answer."""
        self._known[device] = time.monotonic(), owner

    def has(self, device: Device, owner: object = None) -> bool:
        """Return True if a filesystem is to be left alone."""
        if not self._known:
            return False
        begin = time.monotonic() - self._seconds
        self._known = {each: known for each, known in self._known.items() if known[0] > begin}
        others = sum(its_owner == owner for _, its_owner in self._known.values())
        return device in self._known or others >= self._most


def no_answer() -> TimeoutError:
    """Return the error for a filesystem that does not answer."""
    return TimeoutError(errno.ETIMEDOUT, _SILENCE)


class Patience:
    """Waits so many ``seconds`` for a filesystem, once."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._silences = Silences()

    @property
    def seconds(self) -> float:
        """The time limit for an answer."""
        return self._seconds

    def is_silent(self, device: Device) -> bool:
        """Return True if the filesystem did not answer once, and is not asked again."""
        return self._silences.has(device)

    def ask(self, device: Device, question: Callable[[], _T], discard: Callable[[_T], None]) -> _T:
        """Return the result of ``question``, or raise its exception.

        A thread asks, and is left behind if there is no answer in time. Raises TimeoutError then;
        ``discard`` gets an answer that comes later.
        """
        if not self._silences.has(device):
            attempt = _Attempt(question, discard)
            if attempt.finished(self._seconds):
                return attempt.result()
            self._silences.add(device)
        raise no_answer()


class _Attempt(Generic[_T]):
    def __init__(self, question: Callable[[], _T], discard: Callable[[_T], None]) -> None:
        self._question = question
        self._discard = discard
        self._lock = threading.Lock()
        self._abandoned = False
        self._answers: list[_T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="buildidfs-ask")
        self._thread.start()

    def _run(self) -> None:
        try:
            answer = self._question()
        except BaseException as error:  # the thread that asked raises it
            self._error = error
            return
        with self._lock:
            self._answers.append(answer)
            if self._abandoned:
                self._discard(answer)

    def finished(self, seconds: float) -> bool:
        self._thread.join(seconds)
        with self._lock:
            self._abandoned = not self._answers and self._error is None
        return not self._abandoned

    def result(self) -> _T:
        if self._error is not None:
            raise self._error
        return self._answers[0]
