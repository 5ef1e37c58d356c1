# SPDX-License-Identifier: Apache-2.0
"""The names and the image of a container, from the state files of the engines of this host.

Names belong to the place of a control group in the hierarchy (`cgroup.place`), because a user can
give a control group of their own the ID of any container.

The engines themselves are not asked: they may hang, and each has another protocol. Their state
files are enough, and no container can reach these. An engine deletes the state file with the
container, so the file is read when the store gets the first file of a container. A state
file is skipped unless it is a regular file of limited size that only root may write, or root and
the user of the engine. If the filesystem of state files does not answer, no further names are
looked up there.

Users can run engines of their own. The state files of these engines are in directories of the user.
They are opened with the rights of that user, so that a link leads only to files that the user can
read. They count only for containers in the control groups that systemd has given to that user.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import stat
import threading
import time
from itertools import islice
from typing import TYPE_CHECKING, Final

from buildidfs.capture.origin import builder
from buildidfs.capture.unresponsive.filesystems import Patience
from buildidfs.formats.archive.common import Damaged
from buildidfs.formats.container import cgroup, engine_records, oci
from buildidfs.linux import credentials, inodes, machine
from buildidfs.linux.file_ops import closing_fd, closing_on_error
from buildidfs.model import NO_NAMES, ContainerNames
from buildidfs.shares import FairQueue, FairTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.model import Origin
    from buildidfs.shares import Share

_DOCKER: Final = (b"/var/lib/docker", b"/var/snap/docker/common/var-lib-docker")
_DOCKER_SETTINGS: Final = b"/etc/docker/daemon.json"
_CONTAINERD: Final = (
    b"/run/containerd",
    b"/run/k3s/containerd",
    b"/var/snap/microk8s/common/run/containerd",
)
_TASKS: Final = b"/io.containerd.runtime.v2.task"
_STORAGE: Final = (b"/run/containers/storage", b"/var/lib/containers/storage")
_STORAGE_SETTINGS: Final = (b"/etc/containers/storage.conf", b"/usr/share/containers/storage.conf")
_DRIVERS: Final = (b"overlay", b"vfs", b"btrfs", b"zfs")
_LISTS: Final = (b"containers.json", b"volatile-containers.json")

# With user namespaces Docker has a directory for each mapping.
_MAPPED: Final = re.compile(rb"\d{1,10}\.\d{1,10}")
_NAMESPACE: Final = re.compile(rb"[A-Za-z0-9][A-Za-z0-9_.-]{0,75}")
_LISTED_MAX: Final = 256
_LIST_MAX: Final = 8 << 20

_REMEMBERED: Final = 4096
_RETRY_S: Final = 60.0
_WAIT_S: Final = 5.0
# Pseudo device numbers, so that a filesystem that did not answer is not asked again. A user's
# engines have another one than root's, with the user's number.
_ENGINES: Final = (0, 0)
_USERS: Final = 1
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_ROOT: Final = 0
_ROOTLESS_DOCKER: Final = b"%s/.local/share/docker"
_ROOTLESS_STORAGE: Final = (
    b"%(home)s/.local/share/containers/storage",
    b"/run/user/%(uid)d/containers",
    b"/tmp/containers-user-%(uid)d/containers",
    b"/tmp/storage-run-%(uid)d/containers",
)
_ROOTLESS_SETTINGS: Final = b"%s/.config/containers/storage.conf"
_PASSWD: Final = b"/etc/passwd"
_PASSWD_MAX: Final = 1 << 20

_Lists = dict[bytes, tuple[tuple[int, ...], dict[bytes, ContainerNames]]]


class EngineNames:
    """The names of the containers of a host, found below its ``roots``, one root after another.

    The default is our root, and that of the host if we are in a container ourselves. An answer may
    take ``seconds``. Methods may be called from any thread.
    """

    def __init__(
        self,
        roots: Callable[[], Iterator[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = _WAIT_S,
    ) -> None:
        self._roots = roots or _own_roots
        self._clock = clock
        self._patience = Patience(seconds)
        self._lock = threading.Lock()
        self._known: FairTable[bytes, tuple[ContainerNames, float]] = FairTable(_REMEMBERED)
        self._lists: _Lists = {}
        self._seen_places: FairTable[bytes, None] = FairTable(_REMEMBERED)
        self._waiting: FairQueue[bytes] = FairQueue(_REMEMBERED)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def meet(self, origin: Origin) -> None:
        """Let a thread look up the names of a container now, because its state files vanish with
        it.

        Does not wait. Call it in one thread only, for each file that the thread sees.
        """
        place = cgroup.place(origin.cgroup)
        if (
            place in self._seen_places
            or not origin.container
            or not cgroup.container_id(origin.cgroup)
        ):
            return
        share = _share(origin.cgroup)
        self._seen_places.put(place, share, None)
        with self._changed:
            self._waiting.put(share, origin.cgroup)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="buildidfs-names")
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while (waiting := self._waiting.pop()) is None:
                    self._changed.wait()
            self.of_cgroup(waiting)

    def of(self, origin: Origin) -> ContainerNames:
        """Return the names of the container in which a file was seen, see `of_cgroup`."""
        if not origin.container or origin.host != machine.host_name():
            return NO_NAMES
        return self.of_cgroup(origin.cgroup)

    def of_cgroup(self, cgroup_path: bytes) -> ContainerNames:
        """Return the names of the container that a control group of this host belongs to.

        `NO_NAMES` if they are unknown. Looks once for each container; if nothing was found, a call
        at least a minute later looks again. Does not raise.
        """
        its_id = cgroup.container_id(cgroup_path)
        if not its_id:
            return NO_NAMES
        place = cgroup.place(cgroup_path)
        with self._lock:
            names, until = self._known.get(place) or (NO_NAMES, -math.inf)
            if until <= self._clock():
                # A user may have given a control group the ID of a container of root.
                names, maker = NO_NAMES, builder.group_maker(cgroup_path)
                if maker == _ROOT:
                    names = self._ask(_ENGINES, its_id, _ROOT)
                owner = maker or cgroup.user_id(cgroup_path) or os.geteuid()
                if names == NO_NAMES and owner != _ROOT:
                    names = self._ask((_USERS, owner), its_id, owner)
                self._remember(place, cgroup_path, names)
            return names

    def _ask(self, engines: tuple[int, int], container: str, owner: int) -> ContainerNames:
        with contextlib.suppress(TimeoutError, RuntimeError):  # no answer, or no thread
            return self._patience.ask(
                engines, lambda: self._look(container, owner), lambda answer: None
            )
        return NO_NAMES

    def _remember(self, place: bytes, cgroup_path: bytes, names: ContainerNames) -> None:
        self._known.pop(place)
        until = math.inf if names != NO_NAMES else self._clock() + _RETRY_S
        self._known.put(place, _share(cgroup_path), (names, until))

    def _look(self, container: str, owner: int) -> ContainerNames:
        for root in self._roots():
            try:
                fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                continue
            with closing_fd(fd):
                found = _Host(fd, self._lists, owner).names(container.encode())
            if found != NO_NAMES:
                return found
        return NO_NAMES


def _share(cgroup_path: bytes) -> Share:
    return cgroup.share(cgroup_path, 0, builder.group_maker(cgroup_path))


def _own_roots() -> Iterator[bytes]:
    yield b"/"
    for pid in machine.first_processes():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt"):
                return
            yield b"/proc/%d/root" % pid
            return


class _Host:
    """The engines' directories below a root; unreadable files count as missing.

    ``lists`` caches lists that may be unchanged. ``owner`` is the user whose engines are meant:
    only files of this user and of root count.
    """

    def __init__(self, root_fd: int, lists: _Lists, owner: int) -> None:
        self._root_fd = root_fd
        self._lists = lists
        self._owner = owner
        self._home = b""

    def names(self, container: bytes) -> ContainerNames:
        """Return the names of a container according to the first engine that knows it."""
        with contextlib.ExitStack() as rights, _as_missing():
            if self._owner != _ROOT:
                self._home, group = self._account()
                rights.enter_context(credentials.opening_as(self._owner, group))
            for engine in self._engines(container):
                if (names := _joined(engine)) != NO_NAMES:
                    return names
        return NO_NAMES

    def _engines(self, container: bytes) -> Iterator[Iterator[ContainerNames]]:
        if self._owner == _ROOT:
            yield self._by_docker(container, self._docker())
            yield self._by_containerd(container)
            storage = self._storage(_STORAGE_SETTINGS)
            yield self._by_storage(container, [*_STORAGE, *storage])
        elif (home := self._home).startswith(b"/"):
            yield self._by_docker(container, iter((_ROOTLESS_DOCKER % home,)))
            own = [path % {b"home": home, b"uid": self._owner} for path in _ROOTLESS_STORAGE]
            storage = self._storage((_ROOTLESS_SETTINGS % home,))
            yield self._by_storage(container, [*own, *storage])

    # --- engines -----------------------------------------------------------------------------

    def _by_docker(self, name: bytes, roots: Iterator[bytes]) -> Iterator[ContainerNames]:
        note = b"/containers/" + name + b"/config.v2.json"
        for root in roots:
            yield self._record_at(root + note, engine_records.DockerContainer)
            for mapped in self._names_in(root, _MAPPED):
                yield self._record_at(root + b"/" + mapped + note, engine_records.DockerContainer)

    def _docker(self) -> Iterator[bytes]:
        yield from _DOCKER
        with _as_missing():
            data = self._content(_DOCKER_SETTINGS, engine_records.SETTINGS_MAX)
            settings = engine_records.decoded(data, engine_records.DockerSettings)
            root = os.fsencode(settings.data_root)
            if root.startswith(b"/") and root not in _DOCKER:
                yield root

    def _by_containerd(self, name: bytes) -> Iterator[ContainerNames]:
        for state in _CONTAINERD:
            for namespace in self._names_in(state + _TASKS, _NAMESPACE):
                path = b"%s%s/%s/%s/config.json" % (state, _TASKS, namespace, name)
                yield self._record_at(path, engine_records.RuntimeConfig)

    def _by_storage(self, name: bytes, roots: list[bytes]) -> Iterator[ContainerNames]:
        """Yield the names in the state files of CRI-O and Podman: the container's own, then the
        lists of all.
        """
        places = [
            b"%s/%s-containers/" % (root, driver)
            for root in dict.fromkeys(roots)
            for driver in _DRIVERS
        ]
        for place in places:
            yield self._record_at(
                place + name + b"/userdata/config.json", engine_records.RuntimeConfig
            )
        for place in places:
            for file in _LISTS:
                yield self._list(place + file).get(name, NO_NAMES)

    def _storage(self, files: tuple[bytes, ...]) -> Iterator[bytes]:
        """Yield the existing directories that the first settings file names."""
        for path in files:
            with _as_missing():
                data = self._content(path, engine_records.SETTINGS_MAX)
                settings = engine_records.storage_settings(data)
                for root in map(os.fsencode, (settings.runroot, settings.graphroot)):
                    if root.startswith(b"/"):
                        yield root
                return

    def _account(self) -> tuple[bytes, int]:
        """Return home directory and group of the owner. Raises OSError, ValueError; ENOENT if
        /etc/passwd does not have them.
        """
        with closing_fd(inodes.open_regular_in_root(self._root_fd, _PASSWD)) as fd:
            text = _read(fd, _PASSWD_MAX)
        for line in text.split(b"\n"):
            fields = line.split(b":")
            if len(fields) == 7 and fields[2] == b"%d" % self._owner:
                return fields[5], int(fields[3])
        raise OSError(errno.ENOENT, "no such user")

    # --- state files --------------------------------------------------------------------------

    def _record_at(
        self,
        path: bytes,
        kind: type[engine_records.DockerContainer] | type[engine_records.RuntimeConfig],
    ) -> ContainerNames:
        with _as_missing():
            return engine_records.decoded(self._content(path, oci.DOCUMENT_MAX), kind).called
        return NO_NAMES

    def _list(self, path: bytes) -> dict[bytes, ContainerNames]:
        """Return the names of all containers in a list, by ID."""
        with _as_missing(), closing_fd(self._open(path)) as fd:
            status = os.fstat(fd)
            # Engines replace the whole file.
            version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            known = self._lists.get(path)
            if known is None or known[0] != version:
                listed = engine_records.decoded(
                    _read(fd, _LIST_MAX), list[engine_records.StoredContainer]
                )
                names = {container.id.encode(): container.called for container in listed}
                known = self._lists[path] = version, names
            return known[1]
        return {}

    def _content(self, path: bytes, limit: int) -> bytes:
        """Return all of a file of the owner; raises OSError, `Damaged` if it is too large."""
        with closing_fd(self._open(path)) as fd:
            return _read(fd, limit)

    def _open(self, path: bytes) -> int:
        """Open a regular file that only root and the owner may write to; raises OSError."""
        with closing_on_error(inodes.open_regular_in_root(self._root_fd, path)) as fd:
            status = os.fstat(fd)
            if status.st_uid not in (_ROOT, self._owner) or status.st_mode & _OTHERS_MAY_WRITE:
                raise PermissionError(f"{os.fsdecode(path)} may be written by other users")
        return fd

    def _names_in(self, path: bytes, wanted: re.Pattern[bytes]) -> list[bytes]:
        """Return the wanted names in a directory; only a limited number of entries is read."""
        found: list[bytes] = []
        with _as_missing():
            fd = inodes.open_in_root(self._root_fd, path, os.O_RDONLY | os.O_DIRECTORY)
            with closing_fd(fd), os.scandir(fd) as entries:
                names = (os.fsencode(entry.name) for entry in islice(entries, _LISTED_MAX))
                found.extend(name for name in names if wanted.fullmatch(name))
        return found


def _read(fd: int, limit: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise Damaged(f"notes of more than {limit} bytes")
    return data


def _as_missing() -> contextlib.suppress:
    """Ignore errors of state files, as if the files were missing."""
    return contextlib.suppress(OSError, ValueError, Damaged)


def _joined(candidates: Iterator[ContainerNames]) -> ContainerNames:
    """Merge the records of one engine, until name and image are known."""
    found = NO_NAMES
    for each in candidates:
        if each != NO_NAMES:
            found = ContainerNames(
                found.name or each.name,
                found.pod or each.pod,
                found.namespace or each.namespace,
                found.image or each.image,
            )
            if found.name and found.image:
                break
    return found


_here = EngineNames()

names_of = _here.of
meet = _here.meet
names_of_cgroup = _here.of_cgroup
