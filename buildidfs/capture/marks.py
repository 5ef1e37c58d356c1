# SPDX-License-Identifier: Apache-2.0
"""What strict watching is told and asked about by fanotify, and where.

Two groups, because an exec that waits for its answer must not queue behind anything else:

- *execs* (permission events: OPEN_EXEC_PERM) on the filesystems of the host and of containers;
- *opens* (OPEN) on the private superblocks of containers only. On the host's they were measured
  as 12,200 events in 3 s of compiling, four fifths of them not ELF, which starved everything.

There could be a third one, for what containers mount (FAN_MARK_MNTNS, Linux 6.14). It must not be:
with Linux 6.18 the end of a mount namespace that has such a mark takes a mutex in a softirq
(mnt_ns_release, from an RCU callback), and was seen to take the kernel down with it.

What is opened in a container whose filesystem is an overlay of the host's is also told for the
host's filesystem that the layers are on ("ovl: enable fsnotify events on underlying real files",
Linux 6.5), so that marks on a few superblocks cover many containers.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

from buildidfs.capture import superblocks
from buildidfs.errors import CapabilityError
from buildidfs.linux import fanotify, namespaces, procfs

if TYPE_CHECKING:
    from collections.abc import Collection

    from buildidfs.formats.mountinfo import MountInfo

_NO_EXECS: Final = (
    "strict watching needs a kernel that asks before an exec: Linux 5.0 with"
    " CONFIG_FANOTIFY_ACCESS_PERMISSIONS"
)


def open_exec_group() -> int:
    """The group that execs will wait for, once something is marked.

    It lives as long as any copy of the descriptor is open. Raises `CapabilityError`.
    """
    try:
        # Ignored files are marks as well, and must not use up what is meant for filesystems.
        return fanotify.init(fanotify.CLASS_CONTENT | fanotify.UNLIMITED_MARKS)
    except OSError as error:
        if error.errno == errno.EPERM:
            raise CapabilityError(
                "strict watching needs CAP_SYS_ADMIN, to be asked before an exec; run it as root"
            ) from error
        if error.errno in (errno.ENOSYS, errno.EINVAL):
            raise CapabilityError(_NO_EXECS) from error
        raise CapabilityError(
            f"strict watching gets no fanotify group: {error.strerror}"
        ) from error


class Marks:
    """The two groups. ``degraded`` has a line for a person for each thing that is refused.

    ``exec_group`` is what `open_exec_group` gave; it is closed with the others. ``store_dev`` is
    the st_dev of the store. ``only_at`` limits the host's filesystems to those mounted there.
    """

    def __init__(
        self, exec_group: int, store_dev: int | None, only_at: Collection[bytes] | None = None
    ) -> None:
        self.degraded: list[str] = []
        self.execs = exec_group
        self.host = superblocks.HostMounts()
        self.opens = self._group(
            fanotify.CLASS_NOTIF | fanotify.UNLIMITED_MARKS,
            "libraries that containers open are not held",
        )
        self._store_dev = store_dev
        self._only_at = only_at
        self._marked: set[tuple[int, int]] = set()
        self._refused: set[tuple[bytes, int]] = set()
        self._can_ignore = True
        self._user = namespaces.initial().user
        self._opens_paused = False

    def close(self) -> None:
        """Ask and be told no more; whoever waits goes on."""
        for group in (self.execs, self.opens):
            if group >= 0:
                os.close(group)
        self.execs = self.opens = -1
        self.host.close()

    def _group(self, flags: int, without: str) -> int:
        try:
            return fanotify.init(flags)
        except OSError as error:
            self.degraded.append(f"strict: {without}: {error.strerror}")
            return -1

    # --- the host --------------------------------------------------------------------------

    def start(self) -> None:
        """Ask for execs on the host's filesystems from now on.

        Raises `CapabilityError` if that is refused for all of them.
        """
        failures = self.mark_host()
        if failures and not self._marked:
            if failures[0].errno == errno.EPERM:
                raise CapabilityError("strict watching needs CAP_SYS_ADMIN; run it as root")
            raise CapabilityError(_NO_EXECS)

    def mark_host(self) -> list[OSError]:
        """Ask on those of the host's filesystems that are new; what was refused."""
        found = superblocks.watchable(self.host.visible, self.host.slow_points)
        devices = {mount.dev for mount in found}
        self._marked &= devices
        # Most programs are on that of the root.
        found.sort(key=lambda mount: mount.mount_point != b"/")
        failures: list[OSError] = []
        root_fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for mount in found:
                if mount.dev not in self._marked and self.is_wanted(mount):
                    self._mark_host_mount(root_fd, mount, failures)
        finally:
            os.close(root_fd)
        return failures

    def is_wanted(self, mount: MountInfo) -> bool:
        """Whether to ask about execs on a mount of the host.

        The superblock of the store is left alone, unless it is the one everything is on.

        There it is asked about execs only, and nobody runs what is in the store: neither the
        process that answers nor any it waits for. Opens, which the store does all the time, are
        told of private superblocks alone.
        """
        if self._only_at is not None and mount.mount_point not in self._only_at:
            return False
        return mount.mount_point == b"/" or not self._is_store(mount)

    def _is_store(self, mount: MountInfo) -> bool:
        return self._store_dev is not None and os.makedev(*mount.dev) == self._store_dev

    def _mark_host_mount(self, root_fd: int, mount: MountInfo, failures: list[OSError]) -> None:
        try:
            fd = superblocks.open_mount(root_fd, mount, may_ask=not self.host.slow_points)
        except OSError:
            return  # hidden under another mount, or below one that may not answer
        try:
            self._mark(self.execs, fanotify.OPEN_EXEC_PERM, mount, fd)
            self._marked.add(mount.dev)
        except OSError as error:
            failures.append(error)
        finally:
            os.close(fd)

    def follow_host(self) -> bool:
        """Mark what is new on the host; whether its mounts have changed."""
        changed = self.host.refresh()
        if changed:
            self.mark_host()
        return changed

    # --- containers ------------------------------------------------------------------------

    def mark_private(self, pid_fd: int) -> None:
        """Mark the superblocks in the process's mount namespace that the host does not have.

        Those that are marked already are marked again, because device numbers tell nothing: they
        are given to the next as soon as they are free. Raises OSError if the process is gone or may
        not be looked at.
        """
        self.follow_host()
        text = superblocks.read(pid_fd)
        private = superblocks.without(text, self.host.devices)
        slow = superblocks.slow_points(private)
        found = superblocks.watchable(private, [*slow, *self.host.slow_points])
        if namespaces.user(pid_fd) != self._user:
            # Who is root there can put an overlay on a server of his own that may not answer, and
            # hide it. Layers on the filesystems of the host are asked about all the same.
            found = [mount for mount in found if mount.fstype != b"overlay"]
        if not found or b"/" in slow:
            return  # even to get at its root may mean to ask a server
        # Without a mount of its own as root nobody knows what it is on.
        may_ask = not slow and not self.host.slow_points and b" / / " in text
        done: set[tuple[int, int]] = set()
        root_fd = procfs.open_root(pid_fd)
        try:
            for mount in found:
                if mount.dev not in done and self._mark_private_mount(root_fd, mount, may_ask):
                    done.add(mount.dev)
        finally:
            os.close(root_fd)

    def _mark_private_mount(self, root_fd: int, mount: MountInfo, may_ask: bool) -> bool:
        try:
            fd = superblocks.open_mount(root_fd, mount, may_ask=may_ask)
        except OSError:
            return False  # perhaps it is mounted at another place as well
        try:
            self._mark_quietly(self.execs, fanotify.OPEN_EXEC_PERM, mount, fd)
            if self.opens >= 0 and not self._opens_paused and not self._is_store(mount):
                self._mark_quietly(self.opens, fanotify.OPEN, mount, fd)
        finally:
            os.close(fd)
        return True

    def _mark_quietly(self, group: int, mask: int, mount: MountInfo, fd: int) -> None:
        try:
            self._mark(group, mask, mount, fd)
        except OSError:
            return

    def _mark(self, group: int, mask: int, mount: MountInfo, fd: int) -> None:
        try:
            fanotify.mark(group, fanotify.MARK_FILESYSTEM, mask, fanotify.path_of(fd))
        except OSError as error:
            what = "execs are not held up" if group == self.execs else "opens are not seen"
            self._once(mount.fstype, f"{what} there", error)
            raise

    def _once(self, where: bytes, what: str, error: OSError) -> None:
        key = (where, error.errno or 0)
        if key not in self._refused:
            self._refused.add(key)
            name = where.decode(errors="replace")
            self.degraded.append(f"strict: {name} cannot be marked, {what}: {error.strerror}")

    # --- less of it ------------------------------------------------------------------------

    def ignore_exec(self, fd: int) -> None:
        """Do not ask about execs of this file again until it is modified."""
        self._ignore(self.execs, fanotify.OPEN_EXEC_PERM, fd)

    def ignore_open(self, fd: int) -> None:
        """Do not tell of opens of this file again until it is modified."""
        self._ignore(self.opens, fanotify.OPEN, fd)

    def _ignore(self, group: int, mask: int, fd: int) -> None:
        if not self._can_ignore:
            return
        try:
            fanotify.ignore(group, mask, fd)
        except OSError as error:
            if error.errno == errno.EINVAL:
                self._can_ignore = False
                self.degraded.append(
                    "strict: execs of what is captured already are still asked about (Linux 5.19"
                    " can be told not to)"
                )

    def pause_opens(self) -> None:
        """Be told of no opens until `resume_opens`."""
        self._opens_paused = True
        fanotify.flush(self.opens, fanotify.MARK_FILESYSTEM)

    def resume_opens(self) -> None:
        """Mark opens again, beginning with the next namespace that is looked at."""
        self._opens_paused = False
