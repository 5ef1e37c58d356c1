# SPDX-License-Identifier: Apache-2.0
"""The processes of a server: an owner of the sockets, and workers that answer.

The owner opens no store and answers nothing, so faults of a store or a client do not end it. It
restarts a worker that has ended; until then clients wait in the queue of the socket. A worker ends
itself if it finds another index at the place of its store. Workers are forked before they open the
index, because LMDB does not survive a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import resource
import signal
import socket
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import msgspec

from buildidfs import errors
from buildidfs import log as logs
from buildidfs.backoff import Attempts, Backoff
from buildidfs.client_limits import Lane, Places, Rate, client_of, host_and_port, is_loopback
from buildidfs.config import marks
from buildidfs.errors import BuildIdFsError, MountError, UsageError
from buildidfs.fleet.tiered_store import TieredStore
from buildidfs.linux import child, sdnotify, syscalls, threads
from buildidfs.linux.child import END_SIGNALS, SupervisorLoop
from buildidfs.linux.file_ops import closing_fd
from buildidfs.serve import messages
from buildidfs.serve.backend import Backend
from buildidfs.serve.connection import Connection, HttpServer, Shared
from buildidfs.serve.counters import ServerCounters, SharedMisses
from buildidfs.serve.page.site import Page
from buildidfs.serve.site import Site
from buildidfs.shares import Quota
from buildidfs.store.run_files import Presence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from buildidfs.config import Settings
    from buildidfs.linux.child import Child
    from buildidfs.upstream.agent import Agent

log = logging.getLogger(__name__)

ROLE: Final = "serve"
USES_S: Final = 300.0
"""Seconds between two records of blobs that were served."""

_BACKLOG: Final = 1024
_THREADS: Final = 16
_WAITS: Final = 64
"""The maximum number of requests that wait for upstream servers at the same time."""
_PAGES: Final = 3
_SEARCHES: Final = 2
"""The maximum number of pages, and of searches that take seconds, that run at the same time. Other
threads are for files.
"""
_MOST_IN_LANE: Final = 64
_CHECK_S: Final = 2.0
_GRACE_S: Final = 10.0
_MOST_DOWNLOADS: Final = 512
_RESTARTS: Final = Backoff(0.2, 5.0)
_FIRST_ACTIVATED: Final = 3  # SD_LISTEN_FDS_START


DEFAULT_LISTEN: Final = "127.0.0.1:8002"
"""The port of debuginfod, reachable from this machine only."""


class Address(msgspec.Struct, frozen=True):
    """A listening address: ``path`` of a Unix socket, or ``host`` (empty: all) and ``port``."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Options of a server: the ``store``, the listening address, and the ``settings``, of which
    ``[serve]`` has the limits. ``agent_of`` makes the agent that fetches missing files, if any.
    """

    store: str | os.PathLike[str]
    listen: Address
    settings: Settings
    agent_of: Callable[[], Agent] | None = None


def parse_address(text: str) -> Address:
    """Parse ``HOST:PORT``, ``[IPV6]:PORT``, ``:PORT`` or ``unix:PATH``.

    Raises `UsageError`.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path:
            return Address(path=os.path.abspath(path))
    elif (found := host_and_port(text)) is not None:
        return Address(*found)
    raise UsageError(f"not an address: {text!r}; try {DEFAULT_LISTEN} or unix:/run/buildidfs.sock")


def run(options: ServeOptions, environ: Mapping[str, str], ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP.

    ``ready`` is called with the addresses as URLs when requests are answered.

    Sockets that systemd passes (sd_listen_fds(3)) replace the address of the options. Raises
    `MountError` if the address is not available, and `StoreError` if the store cannot be opened.
    """
    threads.allow_many_descriptors()
    with contextlib.ExitStack() as stack:
        sockets = activated(environ)
        if not sockets:
            sockets = [stack.enter_context(_listening(options.listen))]
        for each in sockets:
            stack.callback(each.close)
        _Owner(options, sockets).run(ready)


def activated(environ: Mapping[str, str]) -> list[socket.socket]:
    """Return the listening sockets that systemd has passed to this process."""
    count = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return []
    found = []
    for fd in range(_FIRST_ACTIVATED, _FIRST_ACTIVATED + min(int(count), 64)):
        try:
            sock = socket.socket(fileno=fd)
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise OSError(0, "it does not listen")
        except OSError as error:
            raise MountError(f"descriptor {fd} is no listening socket: {error.strerror}") from error
        sock.setblocking(False)
        os.set_inheritable(fd, False)
        found.append(sock)
    return found


@contextlib.contextmanager
def _listening(address: Address) -> Iterator[socket.socket]:
    """Yield a socket that listens at an address; the file of a Unix socket is removed
    at the end.
    """
    try:
        if not address.path:
            sock = _bound(address)
        else:
            _remove_stale(address.path)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.bind(address.path)
            # As with a port on this machine, any local user may request public files.
            os.chmod(address.path, 0o666)
    except OSError as error:
        raise MountError(f"cannot listen at {address}: {error.strerror or error}") from error
    try:
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        yield sock
    finally:
        sock.close()
        if address.path:
            with contextlib.suppress(OSError):
                os.unlink(address.path)


def _bound(address: Address) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except UnicodeError:
        raise OSError(0, "no host can have that name") from None
    # Without a host the IPv6 socket accepts both families.
    found.sort(key=lambda each: each[0] != socket.AF_INET6 if not address.host else 0)
    failure = OSError(0, "no such address")
    for family, kind, protocol, _, name in found:
        sock = None
        try:
            sock = socket.socket(family, kind, protocol)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(bool(address.host)))
            sock.bind(name)
        except OSError as error:
            failure = error
            if sock is not None:
                sock.close()
        else:
            return sock
    raise failure


def _remove_stale(path: str) -> None:
    """Remove the socket of a killed server. A socket that answers is in use, and stays."""
    try:
        if not stat.S_ISSOCK(os.stat(path, follow_symlinks=False).st_mode):
            return
    except OSError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


# --- the owner ---------------------------------------------------------------------------------


class _Slot:
    """A place for a worker: the present worker, and the time to start the next one.

    ``work`` runs in the process of a worker, with the number of the place and the descriptor for
    its report. ``failed`` is called with the error that a worker reports.
    """

    def __init__(
        self,
        number: int,
        work: Callable[[int, int], None],
        failed: Callable[[BuildIdFsError], None],
    ) -> None:
        self._number = number
        self._work = work
        self._failed = failed
        self.process: Child | None = None
        self.pipe = -1
        self.starts = Attempts(_RESTARTS)
        self.was_ready = False

    @property
    def is_waiting(self) -> bool:
        """True if no worker runs."""
        return self.process is None

    def start(self) -> None:
        """Start a worker. Raises OSError."""
        self.pipe, writing = os.pipe2(os.O_CLOEXEC)
        with closing_fd(writing):
            self.was_ready = False
            self.process = child.fork(lambda: self._work(self._number, writing))
        log.debug("worker %d: started, pid %d", self._number, self.process.pid)

    def descriptors(self) -> dict[int, Callable[[], None]]:
        """Return the descriptor of the worker's report."""
        return {self.pipe: self._heard} if self.pipe >= 0 else {}

    def _heard(self) -> None:
        """Read a report of the worker. There is none if the worker has ended."""
        text = os.read(self.pipe, 4096)
        report = sdnotify.decoded(text)
        if report.get("READY") == "1":
            self.was_ready = True
            self.starts.succeeded()
            return
        os.close(self.pipe)
        self.pipe = -1
        if self.process is not None:
            code = self.process.wait(_GRACE_S)
            log.debug("worker %d: ended with %s", self._number, code)
            if code is None:
                self.process.end(_GRACE_S)
            elif code < 0:
                log.warning("a worker was killed by signal %d", -code)
        self.process = None
        self.starts.failed()
        if text:
            self._failed(_error(report))


class _Owner:
    """Keeps workers running. Needs the main thread of a process without other threads."""

    def __init__(self, options: ServeOptions, sockets: Sequence[socket.socket]) -> None:
        self._options = options
        self._sockets = sockets
        workers = options.settings.serve.workers
        self._counters = ServerCounters(workers)
        self._misses = SharedMisses(workers)
        self._owner = os.getpid()
        self._slots = [_Slot(number, self._work, self._failed) for number in range(workers)]
        self._loop = SupervisorLoop(self._slots)
        self._presence: Presence | None = None

    def run(self, ready: Callable[[str], None]) -> None:
        """Run workers until a signal comes. Raises the error of the first worker if it cannot
        start.
        """
        with self._loop.receiving(), contextlib.ExitStack() as stack:
            stack.callback(self._end)
            while not self._loop.signals:
                self._loop.start_due()
                self._loop.wait()
                if self._presence is None and all(slot.was_ready for slot in self._slots):
                    where = [_shown(each) for each in self._sockets]
                    read = marks(self._options.settings)
                    presence = Presence(self._options.store, ROLE, listen=where, settings=read)
                    self._presence = stack.enter_context(presence)
                    ready(" ".join(map(_url, self._sockets)))

    def _work(self, number: int, writing: int) -> None:
        """Run a worker in its process."""
        try:
            logs.rename(f"serve-worker-{number}")
            syscalls.end_with(self._owner, signal.SIGTERM)
            for signal_number in END_SIGNALS:
                signal.signal(signal_number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            kept = {writing, *(each.fileno() for each in self._sockets)}
            for fd in (*self._loop.descriptors, *(slot.pipe for slot in self._slots)):
                if fd >= 0 and fd not in kept:
                    os.close(fd)
            if self._presence is not None and self._presence.fileno() >= 0:
                os.close(self._presence.fileno())  # only the owner has its lock
            self._counters.choose(number)
            worker = Worker(self._options, self._sockets, self._counters, self._misses, number)
            worker.run(lambda: os.write(writing, sdnotify.encoded("READY=1")))
        except BuildIdFsError as error:
            if self._presence is not None:  # without it, the owner raises the error
                log.error("%s", error)
            report = sdnotify.encoded(f"ERROR={type(error).__name__}", f"STATUS={error}")
            os.write(writing, report)
        except BaseException:
            log.exception("a worker ended by a fault of this program")
        finally:
            logging.shutdown()

    def _failed(self, error: BuildIdFsError) -> None:
        """Raise the error of the first worker; later ones log theirs."""
        if self._presence is None:
            raise error

    def _end(self) -> None:
        """End all workers; those with requests in progress have ten seconds."""
        for sock in self._sockets:
            sock.close()
        running = [slot.process for slot in self._slots if slot.process is not None]
        for process in running:
            process.send(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S + 2
        for process in running:
            if process.wait(max(deadline - time.monotonic(), 0)) is None:
                process.end(_GRACE_S)
        for slot in self._slots:
            if slot.pipe >= 0:
                os.close(slot.pipe)


def _error(report: Mapping[str, str]) -> BuildIdFsError:
    """Return the error in the report of a worker."""
    kind, message = getattr(errors, report.get("ERROR", ""), None), report.get("STATUS", "")
    if isinstance(kind, type) and issubclass(kind, BuildIdFsError):
        return kind(message)
    return MountError(message)


def _shown(sock: socket.socket) -> str:
    """Return the address of a socket as a text."""
    name = sock.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _url(sock: socket.socket) -> str:
    """Return the URL of a socket, or ``unix:`` and its path."""
    shown = _shown(sock)
    return shown if sock.family == socket.AF_UNIX else f"http://{shown}"


# --- workers -----------------------------------------------------------------------------------


class Worker:
    """Answers requests until SIGTERM, or until the store is replaced."""

    def __init__(
        self,
        options: ServeOptions,
        sockets: Sequence[socket.socket],
        counters: ServerCounters,
        misses: SharedMisses,
        number: int,
    ) -> None:
        self._options = options
        self._sockets = sockets
        self._counters = counters
        self._misses = misses
        self._number = number

    def run(self, ready: Callable[[], object]) -> None:
        """Open the store, call ``ready``, and serve. Raises `StoreError`."""
        with contextlib.ExitStack() as stack:
            options = self._options
            backend = Backend(options.store, options.settings, self._misses, self._number)
            stack.callback(backend.close)
            if isinstance(backend.store, TieredStore):
                backend.store.remote.start()
            pages = stack.enter_context(Page(backend))
            agent_of = self._options.agent_of
            agent = None
            if agent_of is not None:
                agent = stack.enter_context(contextlib.closing(agent_of()))
            threads.collect_rarely()
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._serve(backend, pages, agent, ready))

    async def _serve(
        self,
        backend: Backend,
        pages: Page,
        agent: Agent | None,
        ready: Callable[[], object],
    ) -> None:
        limits = self._options.settings.serve
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.set_exception_handler(_failed)
        for number in END_SIGNALS:
            loop.add_signal_handler(number, ended.set)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # A symbolizer ends with the thread that starts it, and only one thread may use it.
        with (
            ThreadPoolExecutor(_THREADS, "file") as executor,
            ThreadPoolExecutor(1, "symbols") as symbolizing,
            ThreadPoolExecutor(_WAITS, "fetch") as fetching,
        ):
            site = Site(backend, self._counters, pages, agent)
            shared = Shared(
                site,
                Rate(limits.rate / limits.workers),
                # A download takes three descriptors: the connection, its duplicate, and the blob.
                Places(Quota(min(_MOST_DOWNLOADS, files // 8))),
                Quota(files // 2),
                executor,
                {
                    messages.UPSTREAM: Lane(fetching, _WAITS, _WAITS),
                    messages.SYMBOLS: Lane(symbolizing, 1, _MOST_IN_LANE),
                    messages.PAGES: Lane(executor, _PAGES, _MOST_IN_LANE),
                    messages.SEARCHES: Lane(executor, _SEARCHES, _MOST_IN_LANE),
                },
                limits.timeout,
            )
            servers = [self._server(shared, each) for each in self._sockets]
            listening = [
                await loop.create_server(server, sock=sock.dup(), backlog=_BACKLOG)
                for server, sock in zip(servers, self._sockets, strict=True)
            ]
            ready()
            ticking = loop.create_task(_tick(shared, servers, backend, ended))
            await ended.wait()
            for each in listening:
                each.close()
            ticking.cancel()
            for server in servers:
                server.pre_shutdown()
            await asyncio.gather(*(server.shutdown(_GRACE_S) for server in servers))
            if agent is not None:
                agent.close()  # no request waits for a server any more
            await loop.run_in_executor(executor, backend.misses.publish)
            await loop.run_in_executor(executor, backend.store.flush_uses)
            site.symbolication.stop()
            await loop.run_in_executor(symbolizing, site.symbolication.close)

    def _server(self, shared: Shared, sock: socket.socket) -> HttpServer:
        if sock.family == socket.AF_UNIX:
            return HttpServer(shared, lambda transport: "")
        is_local = is_loopback(str(sock.getsockname()[0]))
        hosts = frozenset(name.lower() for name in self._options.settings.serve.hosts)
        return HttpServer(shared, _peer, hosts if is_local else None)


def _peer(transport: asyncio.BaseTransport) -> str:
    """Return the client of a TCP connection."""
    name = transport.get_extra_info("peername")
    return client_of(str(name[0])) if name else "unknown"


def _failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception of a callback, and end its connection."""
    log.error("a fault of this program: %s", context["message"], exc_info=context.get("exception"))
    connection = context.get("protocol")
    if isinstance(connection, Connection):
        connection.reset()


async def _tick(
    shared: Shared, servers: Sequence[HttpServer], backend: Backend, ended: asyncio.Event
) -> None:
    """End slow connections, check the store, and record the served blobs."""
    loop = asyncio.get_running_loop()
    recorded = loop.time()
    while True:
        await asyncio.sleep(_CHECK_S)
        now = loop.time()
        for server in servers:
            server.check(now)
        if not backend.is_current():
            log.warning("the store was deleted or replaced: opening the one that is there")
            ended.set()
            return
        await loop.run_in_executor(shared.executor, backend.misses.publish)
        if shared.site.symbolication.is_idle(time.monotonic()):
            symbolizing = shared.lanes[messages.SYMBOLS].executor
            loop.run_in_executor(symbolizing, shared.site.symbolication.close)
        if now - recorded > USES_S:
            recorded = now
            await loop.run_in_executor(shared.executor, backend.store.flush_uses)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop if it is installed, because it answers two to three times as many small
    requests.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
