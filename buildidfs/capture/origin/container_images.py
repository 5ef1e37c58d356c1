# SPDX-License-Identifier: Apache-2.0
"""The image that a container runs, from the notes of the engines of this host.

Engines are not asked: they may be hung, and every one has another protocol. What they keep in
directories of their own is enough. That is in no container's reach; what is not a regular file that
root alone may write, or is larger than notes are, is passed over all the same. Should they be on a
filesystem that does not answer, nothing is known from then on.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import threading
import time
from itertools import islice
from typing import TYPE_CHECKING, Final

from buildidfs.capture.unresponsive.timeouts import Patience
from buildidfs.formats.archive.common import Damaged
from buildidfs.formats.container import cgroup, engine_records, oci
from buildidfs.formats.container.engine_records import RunImage
from buildidfs.linux import machine, openat2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.model import Origin

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
_AGAIN_S: Final = 60.0
_WAIT_S: Final = 5.0
# As if they had a device of their own: who is silent once is not asked again.
_ENGINES: Final = (0, 0)
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_NOTHING: Final = RunImage()

_Lists = dict[bytes, tuple[tuple[int, ...], dict[bytes, RunImage]]]


class EngineImages:
    """The images of the containers of a host, found below its ``roots``, one after the other.

    By default they are our root, and that of the host if we are in a container ourselves. An answer
    is waited for so many ``seconds``. Methods may be called from any thread.
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
        self._known: dict[str, tuple[str, float]] = {}
        self._lists: _Lists = {}

    def of(self, origin: Origin) -> str:
        """Return the image of the container that a file was seen in: name, ID, or a line for each.

        Empty if that is not known. Looks once for each container, and for one of which nothing is
        known a minute later again, at the next call. Does not raise.
        """
        container = cgroup.container_id(origin.cgroup) if origin.container else ""
        if not container or origin.host != machine.host_name():
            return ""
        with self._lock:
            text, until = self._known.get(container, ("", -math.inf))
            if until <= self._clock():
                with contextlib.suppress(TimeoutError, RuntimeError):  # no answer, no thread
                    text = self._patience.ask(
                        _ENGINES, lambda: self._look(container), lambda answer: None
                    )
                self._remember(container, text)
            return text

    def _remember(self, container: str, text: str) -> None:
        self._known.pop(container, None)
        while len(self._known) >= _REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[container] = text, math.inf if text else self._clock() + _AGAIN_S

    def _look(self, container: str) -> str:
        for root in self._roots():
            try:
                fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                if found := str(_Host(fd, self._lists).image(container)):
                    return found
            finally:
                os.close(fd)
        return ""


def _own_roots() -> Iterator[bytes]:
    yield b"/"
    for pid in machine.first_processes():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt"):
                return
            yield b"/proc/%d/root" % pid
            return


class _Host:
    """The engines' directories below a root; what cannot be read is taken for missing.

    ``lists`` is what was read of lists that may be as they were.
    """

    def __init__(self, root_fd: int, lists: _Lists) -> None:
        self._root_fd = root_fd
        self._lists = lists

    def image(self, container: str) -> RunImage:
        """The image of a container, by the first engine that knows it."""
        name = container.encode()
        for find in (self._by_docker, self._by_containerd, self._by_storage):
            for found in find(name):
                if found != _NOTHING:
                    return found
        return _NOTHING

    # --- engines -----------------------------------------------------------------------------

    def _by_docker(self, name: bytes) -> Iterator[RunImage]:
        note = b"/containers/" + name + b"/config.v2.json"
        for root in self._docker():
            yield self._noted(root + note, engine_records.DockerContainer)
            for mapped in self._names_in(root, _MAPPED):
                yield self._noted(root + b"/" + mapped + note, engine_records.DockerContainer)

    def _docker(self) -> Iterator[bytes]:
        yield from _DOCKER
        with _as_missing():
            data = self._content(_DOCKER_SETTINGS, engine_records.SETTINGS_MAX)
            settings = engine_records.decoded(data, engine_records.DockerSettings)
            root = os.fsencode(settings.data_root)
            if root.startswith(b"/") and root not in _DOCKER:
                yield root

    def _by_containerd(self, name: bytes) -> Iterator[RunImage]:
        for state in _CONTAINERD:
            for namespace in self._names_in(state + _TASKS, _NAMESPACE):
                path = b"%s%s/%s/%s/config.json" % (state, _TASKS, namespace, name)
                yield self._noted(path, engine_records.RuntimeConfig)

    def _by_storage(self, name: bytes) -> Iterator[RunImage]:
        """Yield the image in the notes of CRI-O and Podman: its own, then the lists of all."""
        places = [
            b"%s/%s-containers/" % (root, driver) for root in self._storage() for driver in _DRIVERS
        ]
        for place in places:
            yield self._noted(place + name + b"/userdata/config.json", engine_records.RuntimeConfig)
        for place in places:
            for file in _LISTS:
                yield self._list(place + file).get(name, _NOTHING)

    def _storage(self) -> Iterator[bytes]:
        yield from _STORAGE
        for path in _STORAGE_SETTINGS:
            with _as_missing():
                data = self._content(path, engine_records.SETTINGS_MAX)
                settings = engine_records.storage_settings(data)
                for root in map(os.fsencode, (settings.runroot, settings.graphroot)):
                    if root.startswith(b"/") and root not in _STORAGE:
                        yield root
                return

    # --- notes -------------------------------------------------------------------------------

    def _noted(
        self,
        path: bytes,
        kind: type[engine_records.DockerContainer] | type[engine_records.RuntimeConfig],
    ) -> RunImage:
        with _as_missing():
            return engine_records.decoded(self._content(path, oci.DOCUMENT_MAX), kind).run_image
        return _NOTHING

    def _list(self, path: bytes) -> dict[bytes, RunImage]:
        """The images of all containers in a list, by ID."""
        with _as_missing():
            fd = self._open(path)
            try:
                status = os.fstat(fd)
                # Engines put another file in its place.
                version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
                known = self._lists.get(path)
                if known is None or known[0] != version:
                    listed = engine_records.decoded(
                        _read(fd, _LIST_MAX), list[engine_records.StoredContainer]
                    )
                    images = {container.id.encode(): container.run_image for container in listed}
                    known = self._lists[path] = version, images
                return known[1]
            finally:
                os.close(fd)
        return {}

    def _content(self, path: bytes, limit: int) -> bytes:
        """All of a file of root's; raises OSError, `Damaged` for one that is too large."""
        fd = self._open(path)
        try:
            return _read(fd, limit)
        finally:
            os.close(fd)

    def _open(self, path: bytes) -> int:
        """Open a regular file that is root's; raises OSError."""
        fd = openat2.open_regular_in_root(self._root_fd, path)
        status = os.fstat(fd)
        if status.st_uid or status.st_mode & _OTHERS_MAY_WRITE:
            os.close(fd)
            raise PermissionError(f"{os.fsdecode(path)} may be others' than root's")
        return fd

    def _names_in(self, path: bytes, wanted: re.Pattern[bytes]) -> list[bytes]:
        """The names in a directory that are wanted, of as many as are worth a look."""
        found: list[bytes] = []
        with _as_missing():
            fd = openat2.open_in_root(self._root_fd, path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with os.scandir(fd) as entries:
                    names = (os.fsencode(entry.name) for entry in islice(entries, _LISTED_MAX))
                    found.extend(name for name in names if wanted.fullmatch(name))
            finally:
                os.close(fd)
        return found


def _read(fd: int, limit: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise Damaged(f"notes of more than {limit} bytes")
    return data


def _as_missing() -> contextlib.suppress:
    """Whatever is wrong with notes, it is as if there were none."""
    return contextlib.suppress(OSError, ValueError, Damaged)


_here = EngineImages()


def image_of(origin: Origin) -> str:
    """See `EngineImages.of`, of this host."""
    return _here.of(origin)
