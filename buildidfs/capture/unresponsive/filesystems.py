# SPDX-License-Identifier: Apache-2.0
"""The filesystems that may never answer, recognised by their mounts without asking them.

Network filesystems and FUSE depend on a server. Stacked filesystems, such as overlayfs, are as slow
as their layers, which need not be mounted any more: in a user namespace, a user may make an overlay
with a layer from a server of that user.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from buildidfs.formats import proc_text
from buildidfs.linux import inodes, mounts, namespaces
from buildidfs.linux.file_ops import closing_fd

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.model import FileIdentity


_OVERLAY: Final = b"overlay"
_MOST: Final = 4096


def is_slow_type(fstype: bytes) -> bool:
    """Return True if filesystems of this type, other than ours, depend on a server."""
    return fstype != mounts.FILESYSTEM_TYPE and mounts.needs_server(fstype)


def fuse_devices(text: bytes) -> set[Device]:
    """Return the (major, minor) of the FUSE filesystems in a mountinfo text, without ours.

    A thread that waits for one cannot be ended: see `file_helper`.
    """
    return {
        mount.dev
        for mount in proc_text.mounts_in(text)
        if mounts.is_fuse(mount.fstype) and mount.fstype != mounts.FILESYSTEM_TYPE
    }


@functools.cache
def memory_device() -> int:
    """Return the st_dev of files that exist in memory only, which have no mount.

    The number is never reused.
    """
    with closing_fd(os.memfd_create("buildidfs", os.MFD_CLOEXEC)) as fd:
        return os.fstat(fd).st_dev


class Devices:
    """The device numbers that may not answer, collected from mountinfo texts.

    For a scan, which reads the mounts of each namespace once, and must know of a mapped file before
    it opens the file. `SlowMounts` is for the live capture: it has an open file, and no time to
    read mountinfo, in which the mount may be missing by then.
    """

    def __init__(self) -> None:
        self._slow: set[Device] = set()
        memory = memory_device()
        self._answering: set[Device] = {inodes.major_minor(memory)}

    def learn(self, text: bytes, *, overlays_answer: bool) -> bool:
        """Add a mountinfo text; return True if a filesystem in it may not answer.

        ``overlays_answer`` is False if users have mounted the overlays.
        """
        is_slow = False
        for mount in proc_text.mounts_in(text):
            if is_slow_type(mount.fstype):
                self._slow.add(mount.dev)
            elif overlays_answer or mount.fstype != _OVERLAY:
                self._answering.add(mount.dev)
            is_slow |= self.may_not_answer(mount.dev)
        return is_slow

    def may_not_answer(self, device: Device) -> bool:
        """Return True if a device may not answer. An unknown device counts as one that may not,
        unless it is a block device.
        """
        return device in self._slow or (not device[0] and device not in self._answering)


class SlowMounts:
    """The mounts that may not answer, by their numbers, which are never reused."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self.host_user = namespaces.initial().user
        self._memory = memory_device()

    def is_stacked(self, fd: int) -> bool:
        """Return True if the filesystem of a file that was passed to `is_slow` is stacked.

        No test shows in advance if such a filesystem answers.
        """
        try:
            return self._known.get(inodes.unique_mount_id(fd) or 0) == mounts.OVERLAY_MAGIC
        except OSError:
            return True

    def is_users(self, user: int) -> bool:
        """Return True if a user namespace is not the host's, or is unknown (0)."""
        return user != self.host_user

    def is_slow(self, fd: int, identity: FileIdentity, mnt_ns_id: int, user: int = 0) -> bool:
        """Return True if the filesystem of an open file (O_PATH suffices) may not answer.

        An unknown mount counts as one that may not answer, because a detached mount cannot be
        looked up. But if the unknown mount is on a block device, it counts as answering, because
        few block devices are FUSE's. ``user`` is the user namespace of the process that uses the
        file, 0 if unknown: unless it is the host's, overlays count as filesystems that may not
        answer.
        """
        if identity.dev == self._memory:
            return False
        on_disk = identity.scope == b""
        try:
            mount = inodes.unique_mount_id(fd)
        except OSError:
            mount = None
        if mount is None:
            return not on_disk
        magic = self._known.get(mount)
        if magic is None:
            try:
                magic = mounts.mount_magic(mount, mnt_ns_id)
            except OSError:
                return not on_disk
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[mount] = magic
        return magic in mounts.SERVER_MAGICS or (
            magic == mounts.OVERLAY_MAGIC and self.is_users(user)
        )


Device = tuple[int, int]
"""Two numbers that identify a filesystem, or another group of files that is given up as a whole."""

_T = TypeVar("_T")

_SILENCE: Final = "its filesystem does not answer"


class Silences:
    """The filesystems that did not answer, each of which is not asked for ``seconds``.

    Not thread-safe.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._seconds = seconds
        self._known: dict[Device, float] = {}

    def add(self, device: Device) -> None:
        """Remember that a filesystem did not answer."""
        self._known[device] = time.monotonic()

    def has(self, device: Device) -> bool:
        """Return True if a filesystem must not be asked now."""
        begin = time.monotonic() - self._seconds
        self._known = {each: since for each, since in self._known.items() if since > begin}
        return device in self._known


def no_answer() -> TimeoutError:
    """Return the error for a filesystem that does not answer."""
    return TimeoutError(errno.ETIMEDOUT, _SILENCE)


class Patience:
    """Waits up to ``seconds`` for a filesystem; after one timeout, the filesystem is not asked
    again.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._silences = Silences()

    @property
    def seconds(self) -> float:
        """Return the time limit for an answer."""
        return self._seconds

    def is_silent(self, device: Device) -> bool:
        """Return True if the filesystem did not answer once; it is not asked again."""
        return self._silences.has(device)

    def ask(self, device: Device, question: Callable[[], _T], discard: Callable[[_T], None]) -> _T:
        """Return the result of ``question``, or raise its exception.

        A thread runs it, and is abandoned if there is no answer in time. TimeoutError is raised
        then; ``discard`` gets an answer that comes later.
        """
        if self._silences.has(device):
            raise no_answer()
        attempt = Attempt(question, discard)
        thread = threading.Thread(target=attempt.run, daemon=True, name="buildidfs-ask")
        thread.start()
        if attempt.finished(self._seconds) or not attempt.abandon():
            return attempt.result()
        self._silences.add(device)
        raise no_answer()

    def ask_about(
        self,
        device: Device,
        fd: int,
        question: Callable[[int], _T],
        discard: Callable[[_T], None] = lambda answer: None,
    ) -> _T:
        """Do as `ask`, for a question about an open file (see `about_own`)."""
        if self._silences.has(device):
            raise no_answer()
        return self.ask(device, about_own(fd, question), discard)


def about_own(fd: int, question: Callable[[int], _T]) -> Callable[[], _T]:
    """Return ``question`` with a duplicate of ``fd``, for a thread that may be abandoned.

    The duplicate is made now, and closed when the question ends. Raises OSError.
    """
    own = os.dup(fd)

    def ask() -> _T:
        with closing_fd(own):
            return question(own)

    return ask


class Attempt(Generic[_T]):
    """A question that a thread asks with `run`; another thread waits for its answer.

    ``discard`` gets an answer that comes after the wait, ``late`` is called after it, even if the
    question has failed.
    """

    def __init__(
        self,
        question: Callable[[], _T],
        discard: Callable[[_T], None],
        late: Callable[[], None] = lambda: None,
    ) -> None:
        self._question = question
        self._discard = discard
        self._late = late
        self._lock = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()
        self._is_abandoned = False
        self._answers: list[_T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Ask the question, in the present thread."""
        try:
            answer = self._question()
        except BaseException as error:  # the thread that waits raises it
            self._error = error
        else:
            self._answers.append(answer)
        with self._lock:
            self._done.release()
            if not self._is_abandoned:
                return
        for answer in self._answers:
            self._discard(answer)
        self._late()

    def finished(self, seconds: float) -> bool:
        """Wait that long at most; return True if there is an answer."""
        if not self._done.acquire(timeout=seconds):
            return False
        self._done.release()
        return True

    def abandon(self) -> bool:
        """Do not wait any more; return False if there is an answer meanwhile."""
        with self._lock:
            self._is_abandoned = self._done.locked()
        return self._is_abandoned

    def result(self) -> _T:
        """Return the answer, or raise the exception of the question."""
        if self._error is not None:
            raise self._error
        return self._answers[0]
