# SPDX-License-Identifier: Apache-2.0
"""The owner's side of the catcher: start it, receive its messages in a thread, end it, and make the
sightings of caught files: container, trust, and the users who could reach them.

If the catcher ends by itself, `Watcher` calls its owner, who can start the catcher again, and find
the files that were mapped meanwhile with a scan.

The reach depends on the root directory of the users' paths. So a few of the caught processes of
each mount namespace are remembered, because one may live longer than the others.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from buildidfs.backoff import Backoff
from buildidfs.capture.base import reached
from buildidfs.capture.live import protocol
from buildidfs.capture.live.protocol import CatcherFailed, Forget
from buildidfs.capture.origin import builder, container_names
from buildidfs.capture.origin.builder import Owners, Surroundings, trust_of
from buildidfs.capture.origin.path_access import Reach, Root
from buildidfs.errors import BuildIdFsError, CapabilityError
from buildidfs.formats.container import cgroup
from buildidfs.linux import inodes, machine, mounts, namespaces, procfs
from buildidfs.linux.child import Supervised
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import OWNER, FileIdentity, NamespaceSet, Sighting, Standing, Trust
from buildidfs.shares import FairTable, Share, of_user

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from buildidfs.capture.live.protocol import Caught, Message, ProcessPlace
    from buildidfs.capture.unresponsive.filesystems import SlowMounts


_log = logging.getLogger(__name__)

_PROGRAM: Final = "buildidfs.capture.live.catcher"
_END_S: Final = 5.0
_PRIVILEGE: Final = frozenset((errno.EACCES, errno.EPERM))
_BUFFER: Final = 4 << 20
_RESTARTS: Final = Backoff(0.5, 60.0)
_KEYS: Final = 512  # in one message, which may have protocol.MAX_BYTES


class Watcher:
    """Starts a catcher, and another one after its end; one runs at a time.

    ``receive`` gets each message, and a descriptor that it must close (or -1), in a thread of its
    own. ``cgroup`` is the directory of the only control group to follow, with those below it;
    empty for all. ``ended`` is called in that thread if the catcher ends by itself.
    """

    def __init__(
        self,
        receive: Callable[[Message, int], None],
        ended: Callable[[str], None],
        cgroup: str = "",
    ) -> None:
        self._receive = receive
        self._ended = ended
        words = str(os.getpid()), cgroup
        self._program = Supervised(_PROGRAM, *words, restarts=_RESTARTS, buffer=_BUFFER)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._since = 0.0

    def start(self) -> tuple[str, ...]:
        """Start the catcher; return as soon as it catches every mapping, with a sentence for each
        restriction.

        Raises `CapabilityError` if the kernel refuses events, `BuildIdFsError` for other reasons.
        """
        try:
            sock = self._program.start()
        except OSError as error:
            if error.errno in _PRIVILEGE:
                raise CapabilityError(f"cannot follow what is mapped: {error.strerror}") from error
            raise BuildIdFsError(f"the catcher did not start: {error.strerror}") from error
        self._thread = threading.Thread(target=self._hear, args=(sock,), name="buildidfs-hear")
        self._thread.start()
        return (self._program.status,) if self._program.status else ()

    @property
    def is_due(self) -> bool:
        """True if a catcher that ended by itself may be started again."""
        return self._program.restarts.is_due

    @property
    def pid(self) -> int:
        """Return the process ID of the catcher; 0 if there is none."""
        return self._program.pid

    @property
    def is_stopped(self) -> bool:
        """True while a signal keeps the catcher from working (SIGSTOP)."""
        pid = self._program.pid
        return pid > 0 and procfs.is_stopped(pid)

    @property
    def busy_s(self) -> float:
        """The time in seconds for which ``receive`` handles one message; 0 while it waits."""
        since = self._since
        return time.monotonic() - since if since else 0.0

    def forget(self, keys: Iterable[bytes]) -> None:
        """Make the catcher send these files again when they are mapped again."""
        sock = self._program.channel
        if sock is not None:
            every = list(keys)
            with contextlib.suppress(OSError):  # the catcher is gone, and its memory with it
                for first in range(0, len(every), _KEYS):
                    part = tuple(every[first : first + _KEYS])
                    protocol.send(sock, protocol.encode(Forget(part)))

    def close(self) -> None:
        """End the catcher; safe to call twice, not from ``receive`` or ``ended``."""
        self._stopping = True
        if self._program.channel is not None:
            with contextlib.suppress(OSError):
                self._program.channel.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._program.close(_END_S)
        self._stopping = False

    def _hear(self, sock: socket.socket) -> None:
        reason = "it was killed"
        while True:
            try:
                received = protocol.receive(sock)
            except OSError:
                break
            except ValueError as error:
                reason = str(error)
                break
            if received is None:
                break
            message, fd = received
            if isinstance(message, CatcherFailed):
                reason = message.reason
                continue
            self._since = time.monotonic()
            try:
                self._receive(message, fd)
            except Exception:
                # An error with one message must not end the handling of the next.
                _log.exception("a message of the catcher could not be dealt with")
            self._since = 0.0
        if not self._stopping:
            self._program.restarts.failed()
            self._ended(reason)


_OWNERS_S = 60.0
_MOST_NAMESPACES = 1024
_NEIGHBOURS = 4
_INIT = 1  # lives as long as the host
# Seconds for which the access of a directory is valid for files that are older than the look at it:
# in a flood, for files that had to wait.
_KEEP_S = 0.25


class LiveSightings:
    """Makes sightings of the files that are caught on this host. Raises OSError.

    ``container_namespaces`` define a container; ``initial`` are the host's namespaces, by default
    those of this machine. ``slow`` knows the mounts that may not answer.
    """

    def __init__(
        self,
        container_namespaces: Collection[str] = ("mnt",),
        initial: NamespaceSet | None = None,
        slow: SlowMounts | None = None,
    ) -> None:
        self._container_namespaces = tuple(container_namespaces)
        self._host = machine.host_name()
        self._initial = initial or namespaces.initial()
        self._owners = Owners(mounts.initial_mountinfo)
        self._owners_since = time.monotonic()
        self._host_devices = mounts.InitialDevices()
        # No requests to filesystems: a server that delays one file would delay all others.
        self._reach = Reach(slow, ask=False, keep_s=_KEEP_S, host=self._host_devices)
        self._own_mnt = namespaces.of_pid(os.getpid()).mnt
        # The numbers of some processes in each mount namespace.
        self._neighbours: FairTable[int, list[int]] = FairTable(_MOST_NAMESPACES)

    def of(self, caught: Caught, fd: int) -> Sighting:
        """Return the sighting of a file without its reach; ``fd`` may be O_PATH or -1."""
        place = caught.place
        if place.namespaces.mnt != self._own_mnt:
            self._meet(place, caught.pid)
        apart = builder.apart(place.namespaces, self._initial)
        trust = self._trust(caught, fd)
        surroundings = Surroundings(
            place.namespaces,
            place.mnt_ns_id,
            place.cgroup,
            place.cgroup_id,
            apart,
            self.label(place),
            place.owner,
        )
        origin = surroundings.origin(
            caught.path,
            caught.identity,
            host=self._host,
            trust=trust,
            scanner="watch",
            standing=(
                self._owners.standing(caught.path) if trust is Trust.HOST else Standing.GIVEN
            ),
        )
        container_names.meet(origin)  # an engine forgets a container at its end
        return Sighting(origin, caught.seen_ns)

    def label(self, place: ProcessPlace) -> str:
        """Return the label of the container at ``place``, empty for the host."""
        apart = builder.apart(place.namespaces, self._initial)
        names = self._container_namespaces
        return builder.label_by(place.cgroup, place.namespaces, apart, names)

    def shown(self, place: ProcessPlace) -> str:
        """Return the label that reports show for a container at ``place``: see `builder.shown`."""
        return builder.shown(self.label(place), place.cgroup)

    def share(self, place: ProcessPlace) -> Share:
        """Return the share of a file: its container, else its mount namespace; on the host the
        user for whom it counts (`FileUsers`).

        In a container the owner of a file means nothing, because the maker of the container may
        become any user there.
        """
        if place.namespaces.mnt == self._initial.mnt:
            return of_user(place.owner)
        return _share(place)

    def reached(self, sighting: Sighting, caught: Caught, fd: int) -> Sighting:
        """Return the sighting with the reach of the file that is open at ``fd``; asks no
        filesystem.

        If no process of its mount namespace is left, the reach is that of the owner alone. Does not
        raise.
        """
        place = caught.place
        pids = [os.getpid()]
        if place.namespaces.mnt != self._own_mnt:
            known = self._neighbours.get(place.mnt_ns_id)
            pids = [caught.pid, *(known or ()), _INIT]
        for pid in pids:
            try:
                reach = self._reach_from(pid, place, fd, sighting.origin.identity)
            except OSError:
                self._part(place.mnt_ns_id, pid)
            else:
                return reached(sighting, reach)
        return reached(sighting, OWNER)

    def close(self) -> None:
        """Close all descriptors; safe to call twice."""
        self._host_devices.close()

    def _meet(self, place: ProcessPlace, pid: int) -> None:
        """Remember a process of another mount namespace, preferably an old one."""
        known = self._neighbours.get(place.mnt_ns_id)
        if known is None:
            known = []
            self._neighbours.put(place.mnt_ns_id, _share(place), known)
        if len(known) < _NEIGHBOURS and pid not in known:
            known.append(pid)

    def _part(self, mnt_ns_id: int, pid: int) -> None:
        """Forget a process that has left a mount namespace."""
        known = self._neighbours.get(mnt_ns_id)
        if known is not None and pid in known:
            known.remove(pid)

    def _reach_from(self, pid: int, place: ProcessPlace, fd: int, identity: FileIdentity) -> int:
        """Return the reach as seen from a process. Raises OSError if the process is not at
        ``place``.
        """
        with closing_fd(procfs.open_pid(pid)) as pid_fd:
            if namespaces.mnt(pid_fd) != place.namespaces.mnt:
                raise ProcessLookupError
            with closing_fd(procfs.open_root(pid_fd)) as root_fd:
                root = Root(
                    root_fd,
                    os.readlink(b"root", dir_fd=pid_fd),
                    functools.partial(procfs.mountinfo, pid_fd),
                    place.mnt_ns_id,
                    place.namespaces.user,
                    builder.maker(pid_fd, builder.apart(place.namespaces, self._initial)),
                )
                return self._reach.of(fd, identity, root)

    def _trust(self, caught: Caught, fd: int) -> Trust:
        mnt, initial = caught.place.namespaces.mnt, self._initial.mnt
        trust = trust_of(caught.identity, mnt, initial)
        if trust is Trust.HOST and not self._is_believed(caught, fd):
            trust = trust_of(caught.identity, mnt, initial, owners_believed=False)
        return trust

    def _is_believed(self, caught: Caught, fd: int) -> bool:
        # Files of root in a chroot may come from an archive that was unpacked there.
        if fd < 0 or (caught.place.chrooted and not _is_ours(caught.path, fd)):
            return False
        # Mounts can be remounted, so facts about them expire.
        if time.monotonic() - self._owners_since > _OWNERS_S:
            self._owners = Owners(mounts.initial_mountinfo)
            self._owners_since = time.monotonic()
        try:
            return self._owners.believed(caught.path, fd)
        except OSError:
            return False


def _share(place: ProcessPlace) -> Share:
    return cgroup.share(place.cgroup, place.namespaces.mnt, place.owner)


def _is_ours(path: bytes, fd: int) -> bool:
    """Return True if a path leads to the open file from our root as well; makes no filesystem
    request.
    """
    try:
        with (
            closing_fd(os.open(b"/", os.O_PATH | os.O_CLOEXEC)) as root_fd,
            closing_fd(inodes.open_cached_in_root(root_fd, path)) as found_fd,
        ):
            found, wanted = inodes.identity(found_fd, ask=False), inodes.identity(fd, ask=False)
    except OSError:
        return False
    return (found.dev, found.ino) == (wanted.dev, wanted.ino)
