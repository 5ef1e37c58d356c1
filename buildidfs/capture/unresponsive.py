# SPDX-License-Identifier: Apache-2.0
"""Asking filesystems that may never answer, without waiting for ever.

A server on the network, or a process that serves FUSE, may be gone or may refuse to answer on
purpose, and whoever asks then hangs in the kernel. So such filesystems are asked in a thread that
can be left behind, and after the first silence they are not asked again.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from buildidfs.capture.slow_filesystems import memory_device
from buildidfs.formats import mountinfo
from buildidfs.linux import mounts

if TYPE_CHECKING:
    from collections.abc import Callable

_NETWORK: Final = frozenset(
    (
        b"nfs", b"nfs4", b"cifs", b"smb3", b"ceph", b"9p", b"afs", b"lustre", b"gfs2", b"ocfs2",
        b"beegfs", b"gpfs", b"orangefs", b"fuse", b"fuseblk",
    )
)  # fmt: skip
_OVERLAY: Final = b"overlay"

_Device = tuple[int, int]
_T = TypeVar("_T")


def is_slow_type(fstype: bytes) -> bool:
    """Whether filesystems of this type, others than our own, depend on somebody's answer."""
    return fstype in _NETWORK or (fstype.startswith(b"fuse.") and fstype != mounts.FILESYSTEM_TYPE)


def slow_devices(text: bytes) -> set[_Device]:
    """The (major, minor) of filesystems in a mountinfo text that depend on somebody's answer."""
    return {mount.dev for mount in mountinfo.parse(text) if is_slow_type(mount.fstype)}


def has_fuse(text: bytes) -> bool:
    """Return True if a mountinfo text has a FUSE filesystem other than ours.

    A thread that waits for one cannot be ended: a process has to, see `filehelper`.
    """
    return any(
        mount.fstype.startswith(b"fuse")
        and mount.fstype not in (b"fusectl", mounts.FILESYSTEM_TYPE)
        for mount in mountinfo.parse(text)
    )


class Devices:
    """Which filesystems may not answer, learned from the mounts of one namespace after another."""

    def __init__(self) -> None:
        self._slow: set[_Device] = set()
        memory = memory_device()
        self._answering: set[_Device] = {(os.major(memory), os.minor(memory))}

    def learn(self, text: bytes, *, overlays_answer: bool) -> bool:
        """Take in a mountinfo text; whether anything in it may not answer.

        ``overlays_answer`` is false where users have mounted them: one may be made of a server of
        theirs, which need not be mounted anywhere any more.
        """
        is_slow = False
        for mount in mountinfo.parse(text):
            if is_slow_type(mount.fstype):
                self._slow.add(mount.dev)
            elif overlays_answer or mount.fstype != _OVERLAY:
                self._answering.add(mount.dev)
            is_slow |= self.may_not_answer(mount.dev)
        return is_slow

    def may_not_answer(self, device: _Device) -> bool:
        """Whether that one may keep us waiting; what has no block device has to be known."""
        return device in self._slow or (not device[0] and device not in self._answering)


class Patience:
    """Waits so many ``seconds`` for a filesystem, once."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._silent: set[_Device] = set()

    @property
    def seconds(self) -> float:
        """How long an answer is waited for."""
        return self._seconds

    def is_silent(self, device: _Device) -> bool:
        """Whether it did not answer once, and is not asked again."""
        return device in self._silent

    def ask(self, device: _Device, question: Callable[[], _T], discard: Callable[[_T], None]) -> _T:
        """The result of ``question``, or its exception.

        Raises TimeoutError if there is none in time; one that comes later is given to
        ``discard``.
        """
        if device not in self._silent:
            attempt = _Attempt(question, discard)
            if attempt.finished(self._seconds):
                return attempt.result()
            self._silent.add(device)
        raise TimeoutError(errno.ETIMEDOUT, "its filesystem does not answer")


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
        except BaseException as error:  # for who waits for the answer
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
