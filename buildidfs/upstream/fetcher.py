# SPDX-License-Identifier: Apache-2.0
"""`Upstreams`: fetch missing files from servers in their order, and commit them.

    the store -> the table of absent files -> one server after another -> stage -> identify
    -> commit

No claim of a server about a file is believed. The file must contain the build ID, be complete, and
have the requested kind. Otherwise it is dropped, and the next server is asked.

All threads and processes of a store fetch a file once (`alone`). A server that fails is not
asked for a while (`Breaker`): otherwise each of hundreds of missing files would wait for a server
that hangs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import names
from buildidfs.backoff import Attempts, Backoff
from buildidfs.capture import base
from buildidfs.capture.base import PinnedFile
from buildidfs.capture.origin.builder import Surroundings
from buildidfs.errors import BuildIdFsError
from buildidfs.ingest import Ingest
from buildidfs.linux import inodes
from buildidfs.linux.file_ops import closing_fd, on_error
from buildidfs.model import (
    EVERYBODY,
    Absence,
    BuildId,
    Kind,
    Origin,
    Sighting,
    Standing,
    Trust,
    fingerprint,
)
from buildidfs.store.absent_files import AbsentFiles
from buildidfs.upstream.options import (
    DownloadSpool,
    FetchState,
    NotThere,
    RequestedFile,
    Unacceptable,
    Unavailable,
)
from buildidfs.upstream.servers import servers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from buildidfs.formats.elf.identify import ElfFile
    from buildidfs.store import Store
    from buildidfs.upstream.options import FetchOptions, Server, ServerFile


_NAME: Final = b"lock"
_RETRY_S: Final = 0.05
# struct flock, of which open file description locks use all but the process ID.
_FLOCK: Final = struct.Struct("@hhqqi4x")
_BUSY: Final = frozenset((errno.EAGAIN, errno.EACCES))


@contextlib.contextmanager
def alone(directory: bytes, key: bytes, patience_s: float) -> Iterator[bool]:
    """Lock a key against other threads and processes while the block runs; yield True if one of
    them had it at first.

    A lock on one byte of the file ``upstream/lock`` stands for a key; the kernel releases it when
    its process ends. If it is kept for longer than ``patience_s``, the block runs without it.
    """
    try:
        path = os.path.join(directory, _NAME)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False  # the store cannot be written, so no file can be added either
        return
    with closing_fd(fd):
        at = int.from_bytes(fingerprint(key, 8), "little") >> 2
        lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
        deadline = time.monotonic() + patience_s
        was_busy = False
        while not _taken(fd, lock) and time.monotonic() < deadline:
            was_busy = True
            time.sleep(_RETRY_S)
        yield was_busy


def _taken(fd: int, wanted: bytes) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
    except OSError as error:
        return error.errno not in _BUSY  # without locks a file may be fetched twice, at worst
    return True


FAILURES: Final = 3
"""The number of failures in a row after which a server is not asked any more. One is enough if the
server hangs or refuses us.
"""
_PAUSES: Final = Backoff(15.0, 600.0, jitter=0.2)
_REFUSED_S: Final = 300.0


class Breaker:
    """The state of one server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._probes = Attempts(_PAUSES)
        self._probing = False
        self.why = ""
        """The last failure as a text, while the server is not asked."""

    def admits(self) -> bool:
        """Return True if the server may be asked. The caller then reports the result to `succeeded`
        or `failed`.

        When the pause is over, one request tests the server. All others are refused until this
        request is done.
        """
        with self._lock:
            if not self._probes.failures:
                return True
            if self._probing or not self._probes.is_due:
                return False
            self._probing = True
            return True

    def succeeded(self) -> None:
        """Record that the server has answered, even if only that a file is absent."""
        with self._lock:
            self._failures = 0
            self._probes.succeeded()
            self._probing = False
            self.why = ""

    def failed(self, error: Unavailable) -> None:
        """Record that the server could not be asked."""
        with self._lock:
            self._failures += 1
            was_probe, self._probing = self._probing, False
            if not (error.hangs or error.lasting or was_probe or self._failures >= FAILURES):
                return
            if not was_probe and not self._probes.is_due:
                return  # of several requests that failed together, the first one counted
            least = _REFUSED_S if error.lasting else 0.0
            self._probes.failed(max(least, min(error.after, _PAUSES.most)))
            self.why = str(error)


log = logging.getLogger(__name__)

SCANNER: Final = "upstream"
DIRECTORY: Final = b"upstream"
_DEBUG_ROOT: Final = b"/usr/lib/debug/.build-id/"
FAILED: Final = "failed"
"""The last word of the scope of files that could not be fetched: a mount or server does not request
them for `_FAILED_S` seconds.
"""
_FAILED_S: Final = 15
_ABSENT: Final = "no server had it when the servers were last asked"
_PATIENCE: Final = 2.0
"""The factor for the time to wait for another process that fetches the same file.

The wait is the time limit of all servers together, multiplied by this.
"""


class Fetched(msgspec.Struct, frozen=True):
    """The answer for one file. If the file has not come, ``why`` is the reason."""

    build_id: BuildId
    kind: Kind
    state: FetchState
    server: str = ""
    size: int = 0
    why: str = ""


class Upstreams:
    """Servers in front of one store, which may be written. Thread-safe; close it before the store.

    ``progress`` is called with received bytes, in any thread.
    """

    def __init__(
        self,
        store: Store,
        options: FetchOptions,
        progress: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Raises `UsageError` for an invalid URL."""
        self._store = store
        self._directory = os.path.join(store.path, DIRECTORY)
        spool = DownloadSpool(store.path, options.max_size, progress)
        self._servers: Sequence[tuple[Server, Breaker]] = [
            (server, Breaker())
            for server in servers_of(options, spool, token_of(store.path))
            if server.is_local or not options.offline
        ]
        self._absent = AbsentFiles(store.path, options.scope)
        self._absent_s = options.absent_s
        self._failed = AbsentFiles(store.path, (*options.scope, FAILED))
        self._patience_s = options.timeout * max(len(self._servers), 1) * _PATIENCE
        self._committing = threading.Lock()

    def __enter__(self) -> Upstreams:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close connections; running fetches fail."""
        for server, _ in self._servers:
            server.close()

    def fetch(
        self,
        build_id: BuildId,
        kind: Kind,
        *,
        hops: int = 0,
        via: str = "",
        retry_absent: bool = False,
    ) -> Fetched:
        """Fetch a file, unless the store serves it. Errors of servers are not raised.

        With ``retry_absent``, servers are asked even if they did not have the file a while ago. For
        the other arguments see `RequestedFile`.
        """
        if self.is_held(build_id, kind):
            return Fetched(build_id, kind, FetchState.HELD)
        wanted = RequestedFile(build_id, kind, hops, via)
        key = bytes((kind,)) + build_id
        with alone(self._directory, key, self._patience_s) as was_busy:
            done = self._known(build_id, kind) if was_busy else None
            if done is None:
                done = self._fetch(wanted, retry_absent=retry_absent)
            why = done.why or done.server
            log.debug("%s, %s: %s (%s)", build_id, kind.name.lower(), done.state, why)
            if done.state in (FetchState.UNAVAILABLE, FetchState.FAILED):
                self._failed.add(build_id, kind, _FAILED_S)
        if kind is Kind.DEBUGINFO and (done.state is FetchState.FETCHED or was_busy):
            self._supplement(wanted)
        return done

    def is_held(self, build_id: BuildId, kind: Kind) -> bool:
        """Return True if the store serves a file of that kind."""
        index = self._store.index
        return index.artifact(index.ordinal(build_id) or 0, kind) is not None

    def _known(self, build_id: BuildId, kind: Kind) -> Fetched | None:
        """Return the result of another thread or process that has just requested the file."""
        if self.is_held(build_id, kind):
            return Fetched(build_id, kind, FetchState.HELD)
        if self._absent.has(build_id, kind):
            return Fetched(build_id, kind, FetchState.ABSENT, why=_ABSENT)
        if self._failed.has(build_id, kind):
            why = "another request for it failed a moment ago"
            return Fetched(build_id, kind, FetchState.UNAVAILABLE, why=why)
        return None

    def _fetch(self, wanted: RequestedFile, *, retry_absent: bool) -> Fetched:
        """Ask the servers, while no other thread or process fetches this file."""
        build_id, kind = wanted.build_id, wanted.kind
        if self.is_held(build_id, kind):  # another process was faster
            return Fetched(build_id, kind, FetchState.HELD)
        if not self._servers:
            return Fetched(build_id, kind, FetchState.ABSENT, why="there is no server to ask")
        if retry_absent:
            self._absent.forget(build_id, kind)
        elif self._absent.has(build_id, kind):
            return Fetched(build_id, kind, FetchState.ABSENT, why=_ABSENT)
        reasons: list[str] = []
        is_known = True
        for server, breaker in self._servers:
            try:
                if not breaker.admits():
                    raise Unavailable(f"not asked for a while after a failure: {breaker.why}")
                found = self._ask(server, breaker, wanted)
                size = self._take(server, wanted, found)
            except NotThere:
                log.debug("%s: not on %s", build_id, server.label)
                continue
            except Unacceptable as error:
                reasons.append(f"{server.label}: {error}")
            except Unavailable as error:
                is_known = False
                reasons.append(f"{server.label}: {error}")
            except (BuildIdFsError, OSError) as error:
                why = getattr(error, "strerror", None) or str(error)
                return Fetched(build_id, kind, FetchState.FAILED, server.label, why=why)
            else:
                return Fetched(build_id, kind, FetchState.FETCHED, server.label, size)
        why = "; ".join(reasons) or "no server has it"
        if not is_known:
            return Fetched(build_id, kind, FetchState.UNAVAILABLE, why=why)
        log.debug("%s: remembered as absent for %d s", build_id, self._absent_s)
        self._absent.add(build_id, kind, self._absent_s)
        return Fetched(build_id, kind, FetchState.ABSENT, why=why)

    def _ask(self, server: Server, breaker: Breaker, wanted: RequestedFile) -> ServerFile:
        """Ask one server, and record the result in the server's breaker."""
        log.debug("%s: requested from %s", wanted.build_id, server.label)
        try:
            found = server.fetch(wanted)
        except Unavailable as error:
            breaker.failed(error)
            log.info("%s: %s: %s", server.label, wanted.build_id, error)
            raise
        except BaseException:
            # the server has answered; that we could not take the file is not its fault
            breaker.succeeded()
            raise
        breaker.succeeded()
        return found

    # --- received files ------------------------------------------------------------------------

    def _take(self, server: Server, wanted: RequestedFile, found: ServerFile) -> int:
        """Commit a file if it is the right one; return its size.

        Raises `Unacceptable`, `StoreError`, OSError.
        """
        with on_error(found.close):
            described = _check(found.fd, wanted)
            size = os.fstat(found.fd).st_size
        # A file from a server has no namespaces and control groups.
        origin = Surroundings(container=f"{SCANNER}:{server.label}").origin(
            _path(wanted, described),
            found.identity,
            host=server.label,
            trust=Trust.PACKAGE,
            scanner=SCANNER,
            reach=EVERYBODY,
            standing=Standing.UPSTREAM,
        )
        self._commit(origin, found)
        if not self.is_held(wanted.build_id, wanted.kind):
            raise Unacceptable("sent a file that ranks behind a known one (buildidfs show)")
        return size

    def _commit(self, origin: Origin, found: ServerFile) -> None:
        """Add a file to the store as a capture. Raises `StoreError`, OSError with the reason."""
        pinned = PinnedFile(Sighting(origin, time.time_ns()), found.fd, is_copy=found.is_copy)
        found.fd = -1  # the pinned file closes it
        with self._committing:
            summary = Ingest(self._store, workers=1).run([pinned])
        if summary.unreadable:
            first = summary.unreadable[0]
            raise OSError(first.errno, first.reason)

    def _supplement(self, wanted: RequestedFile) -> None:
        """Fetch the dwz file that new debuginfo refers to. Without it half of the names are
        missing.
        """
        index = self._store.index
        artifact = index.artifact(index.ordinal(wanted.build_id) or 0, Kind.DEBUGINFO)
        if artifact is None:
            return
        try:
            with self._store.blobs.open(artifact.digest) as blob:
                described = base.describe(blob.fileno())
        except (BuildIdFsError, OSError):
            return
        if isinstance(described, Absence) or described.supplement is None:
            return
        _, build_id = described.supplement
        done = self.fetch(build_id, Kind.DEBUGINFO, hops=wanted.hops, via=wanted.via)
        if done.state not in (FetchState.FETCHED, FetchState.HELD):
            log.info("the dwz file %s of %s: %s", build_id, wanted.build_id, done.why)


def _check(fd: int, wanted: RequestedFile) -> ElfFile:
    """Describe a file, and check that it is the requested one. Raises `Unacceptable`, OSError."""
    own = base.own_id(fd)
    if isinstance(own, Absence):
        raise Unacceptable(f"sent a file that is unusable: {own}")
    if own != wanted.build_id:
        raise Unacceptable(f"sent a file with another build ID, {own}")
    described = base.describe(fd)
    if isinstance(described, Absence):
        raise Unacceptable(f"sent a file that is unusable: {described}")
    if described.truncated:
        raise Unacceptable(f"sent only part of a file: {described.truncated}")
    if wanted.kind not in described.kinds:
        raise Unacceptable(f"sent a file of another kind, not {wanted.kind.name.lower()}")
    return described


def _path(wanted: RequestedFile, described: ElfFile) -> bytes:
    """Return the path for the origin: the one where debuggers look for such a file.

    The path that the server reports does not matter.
    """
    first, rest = names.split(wanted.build_id)
    suffix = b"" if Kind.EXECUTABLE in described.kinds else names.DEBUG_SUFFIX
    return _DEBUG_ROOT + first + b"/" + rest + suffix


def token_of(store_path: bytes) -> str:
    """Return the name of a store in requests to servers, by which the store recognises its own
    requests.
    """
    return "buildidfs-" + fingerprint(inodes.boot_id() + os.path.realpath(store_path), 8).hex()
