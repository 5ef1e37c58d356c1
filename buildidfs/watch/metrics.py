# SPDX-License-Identifier: Apache-2.0
"""Metrics of a watch and its store for Prometheus: over HTTP, or in a file for node_exporter.

The values are those that ``status`` reads: the facts of the watch, the counts of the store and the
run files of mounts. Only the coverage of this host, which takes seconds, is counted here, once in
`COVERAGE_S`. The names are documented in buildidfs(1), METRICS.

The HTTP side binds the given address only. Values are collected at most once a second, so a flood
of requests costs no more than that. One thread serves all connections (`MetricsServer`). Servers of
libraries give each connection a thread: without a limit of the threads, connections take all
memory, and with a limit, idle connections take all threads. Here a connection costs a descriptor,
and has two seconds. If there are too many, the client with the most of them loses its oldest one. A
scraper sends its request at once, so its connection is never the oldest for long, even if idle ones
come from the same address.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import selectors
import socket
import tempfile
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from buildidfs import __version__
from buildidfs.answers import Verdict
from buildidfs.client_limits import client_of, host_and_port, is_loopback, is_own
from buildidfs.errors import BuildIdFsError, UsageError
from buildidfs.located import utf8
from buildidfs.shares import FairTable, Share
from buildidfs.watch import status
from buildidfs.watch.state import as_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

    from buildidfs.answers import Status
    from buildidfs.catalog.coverage import Coverage
    from buildidfs.config import RetentionSettings, Settings
    from buildidfs.reports import WatchFacts
    from buildidfs.store import Store
    from buildidfs.watch.state import WatchState


CONNECTION_S: Final = 2.0
REQUEST_BYTES: Final = 8192
MOST_CONNECTIONS: Final = 128
BACKLOG: Final = 256
_ACCEPTED_AT_ONCE: Final = 64


class _Connection:
    """A client: its request so far, and the rest of the answer."""

    def __init__(self, client: socket.socket) -> None:
        self.socket = client
        self.deadline = time.monotonic() + CONNECTION_S
        self._request = b""
        self.answer: memoryview | None = None

    def read(self) -> bytes:
        """Return the request when it is complete, else nothing. Raises OSError at the end."""
        chunk = self.socket.recv(REQUEST_BYTES)
        self._request += chunk
        if b"\r\n\r\n" in self._request or len(self._request) >= REQUEST_BYTES:
            return self._request
        if not chunk:
            raise ConnectionResetError
        return b""

    def write(self) -> bool:
        """Send as much of the answer as there is room for; return True at its end. Raises
        OSError.
        """
        assert self.answer is not None
        self.answer = self.answer[self.socket.send(self.answer) :]
        return not self.answer


class MetricsServer:
    """Answers requests at ``listening`` with ``respond`` until ``wake`` is readable."""

    def __init__(
        self, listening: socket.socket, wake: int, respond: Callable[[bytes], bytes]
    ) -> None:
        self._listening = listening
        self._wake = wake
        self._respond = respond
        self._connections: FairTable[int, _Connection] = FairTable(MOST_CONNECTIONS)

    def run(self) -> None:
        """Work until ``wake`` is readable; closes all connections, but not ``listening``."""
        self._listening.setblocking(False)
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._listening, selectors.EVENT_READ)
            self._selector.register(self._wake, selectors.EVENT_READ)
            while self._turn():
                pass
        for each in self._connections.values():
            each.socket.close()

    def _turn(self) -> bool:
        """Handle all events, requests first; return False at the end."""
        first = self._connections.first()
        timeout = None if first is None else max(first.deadline - time.monotonic(), 0.0)
        ready = {key.fd: key for key, _ in self._selector.select(timeout)}
        if self._wake in ready:
            return False
        is_new = ready.pop(self._listening.fileno(), None) is not None
        for fd in ready:
            if (connection := self._connections.get(fd)) is not None:
                self._continue(connection)
        now = time.monotonic()
        while (first := self._connections.first()) is not None and first.deadline <= now:
            self._close(first)
        if is_new:
            self._accept()
        return True

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, address = self._listening.accept()
            except OSError:  # there is none, or no descriptor for it
                return
            client.setblocking(False)
            connection, fd = _Connection(client), client.fileno()
            self._selector.register(client, selectors.EVENT_READ)
            surplus = self._connections.put(fd, Share(client_of(address[0])), connection)
            if surplus is not None:
                self._end(surplus)
            if surplus is not connection:
                self._continue(connection)

    def _continue(self, connection: _Connection) -> None:
        try:
            if connection.answer is None:
                request = connection.read()
                if not request:
                    return
                connection.answer = memoryview(self._respond(request))
                self._selector.modify(connection.socket, selectors.EVENT_WRITE)
            if connection.write():
                self._close(connection)
        except BlockingIOError:
            return
        except OSError:  # the client is gone
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._connections.pop(connection.socket.fileno())
        self._end(connection)

    def _end(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        with contextlib.suppress(OSError):
            connection.socket.close()


log = logging.getLogger(__name__)

COVERAGE_S: Final = 600.0
"""Seconds between two counts of the coverage of the running processes."""

_FILE_S: Final = 15.0
_FRESH_S: Final = 1.0
_MOST_REASONS: Final = 64
_OTHERS: Final = "other"
_MODES: Final = ("starting", "following", "confined", "polling", "interrupted")
_HOST: Final = re.compile(rb"(?im)^host:[ \t]*([^\r\n]*?)[ \t]*\r?$")


class MetricsTarget(NamedTuple):
    """The destination of metrics: a file, or the address of a listening socket."""

    path: str = ""
    host: str = ""
    port: int = 0


def target(text: str) -> MetricsTarget:
    """Return the target in a text: ``FILE.prom``, ``ADDRESS:PORT`` or ``PORT``.

    The default address is reachable from this machine only. Raises `UsageError`.
    """
    if text.endswith(".prom"):
        return MetricsTarget(path=os.path.abspath(text))
    host, port = host_and_port(text if ":" in text else f":{text}") or ("", 0)
    if not port:
        raise UsageError(f"--metrics {text!r}: neither FILE.prom nor ADDRESS:PORT")
    host = host or "127.0.0.1"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if host != "localhost":
            raise UsageError(f"--metrics {text!r}: {host!r} is not an IP address") from None
    return MetricsTarget(host=host, port=port)


def require_library() -> None:
    """Raise `UsageError` if prometheus-client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise UsageError(
            "--metrics needs the Python package prometheus-client:"
            " pip install prometheus-client, or 'buildidfs[metrics]'"
        ) from None


class Exporter:
    """Exports the metrics of a watch until the end of the context.

    ``state`` returns the state of the watch. Raises `UsageError` if the library is missing, the
    address cannot be bound, or the file cannot be written.
    """

    def __init__(
        self,
        place: MetricsTarget,
        store: Store,
        settings: Settings,
        state: Callable[[], WatchState],
    ) -> None:
        require_library()
        self._place = place
        self._store = store
        self._settings = settings
        self._state = state
        self._since = time.time()
        self._reasons: set[str] = set()
        self._coverage: Coverage | None = None
        self._text = b""
        self._made_at = -_FRESH_S
        self._ending = threading.Event()
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC)
        self._socket: socket.socket | None = None
        if place.path:
            self._write()
        else:
            self._socket = _listening(place)
        work = self._keep_writing if self._socket is None else self._serve
        self._threads = [
            threading.Thread(target=run, daemon=True, name=name)
            for run, name in (
                (work, "buildidfs-metrics"), (self._keep_looking, "buildidfs-coverage"),
            )
        ]  # fmt: skip

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.set()
        os.close(self._woken)  # wakes the server
        for thread in self._threads:  # both read the store, which is closed after this
            thread.join()
        os.close(self._wake)
        if self._socket is not None:
            self._socket.close()
        else:
            # A reader would take old counts for present ones.
            with contextlib.suppress(OSError):
                os.unlink(self._place.path)

    @property
    def address(self) -> tuple[str, int]:
        """Return the address of the listening socket."""
        assert self._socket is not None
        host, port, *_ = self._socket.getsockname()
        return host, port

    def text(self) -> bytes:
        """Return the metrics in the text format of Prometheus, at most a second old."""
        from prometheus_client import CollectorRegistry, generate_latest

        if time.monotonic() - self._made_at >= _FRESH_S:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(_Collected(self._families))
            self._text = generate_latest(registry)
            self._made_at = time.monotonic()
        return self._text

    # --- the values --------------------------------------------------------------------------

    def _families(self) -> Iterator[Metric]:
        state = self._state()
        yield from _of_watch(as_facts(state), self._since)
        yield self._lost(state)
        yield from _of_store(self._store)
        yield from _of_status(status.of_store(self._store, self._settings.retention, public=True))
        if self._coverage is not None:
            yield from _of_coverage(self._coverage)

    def _lost(self, state: WatchState) -> Metric:
        """Return the lost files by reason; reasons beyond the limit count as one other reason."""
        from prometheus_client.core import CounterMetricFamily

        lost = CounterMetricFamily(
            "buildidfs_lost_files", "Files that were lost.", labels=["reason"]
        )
        counts: Counter[str] = Counter()
        for row in state.losses:
            if len(self._reasons) < _MOST_REASONS:
                self._reasons.add(row.reason)
            counts[row.reason if row.reason in self._reasons else _OTHERS] += row.count
        for reason, count in counts.items():
            lost.add_metric([reason], count)
        return lost

    def _keep_looking(self) -> None:
        from buildidfs.profile.inputs import coverage_of_processes

        def go_on(done: int, what: str, *, size: int = 0, share: float | None = None) -> None:
            if self._ending.is_set():
                raise _Ended

        while True:
            try:
                self._coverage = coverage_of_processes(self._store, self._settings, progress=go_on)
            except _Ended:
                return
            except (BuildIdFsError, OSError) as error:
                log.info("the coverage of this host is not known: %s", error)
            if self._ending.wait(COVERAGE_S):
                return

    # --- a file ------------------------------------------------------------------------------

    def _keep_writing(self) -> None:
        while not self._ending.wait(_FILE_S):
            try:
                self._write()
            except (BuildIdFsError, OSError) as error:
                log.warning("metrics are not written: %s", error)

    def _write(self) -> None:
        """Replace the file. Raises `UsageError`."""
        directory, name = os.path.split(self._place.path)
        try:
            # The name begins with a dot, so that no collector reads it as a file of metrics.
            fd, draft = tempfile.mkstemp(prefix=f".{name}.", dir=directory)
        except OSError as error:
            raise _not_written(self._place.path, error) from error
        try:
            with open(fd, "wb") as file:
                os.fchmod(fd, 0o644)
                file.write(self.text())
            os.replace(draft, self._place.path)
        except OSError as error:
            os.unlink(draft)
            raise _not_written(self._place.path, error) from error

    # --- HTTP --------------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._socket is not None
        MetricsServer(self._socket, self._wake, self._response).run()

    def _response(self, request: bytes) -> bytes:
        """Return the answer to a request, with its head."""
        from prometheus_client.exposition import CONTENT_TYPE_LATEST

        method, _, rest = request.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        code, kind, body = "404 Not Found", "text/plain", b"metrics are at /metrics\n"
        if method not in (b"GET", b"HEAD"):
            code, body = "405 Method Not Allowed", b"only GET\n"
        elif not self._is_own(request):
            code, body = "421 Misdirected Request", b"see hosts in buildidfs.toml\n"
        elif path == b"/metrics":
            try:
                code, kind, body = "200 OK", CONTENT_TYPE_LATEST, self.text()
            except (BuildIdFsError, OSError) as error:
                code, body = "500 Internal Server Error", f"{error}\n".encode()
        head = f"HTTP/1.0 {code}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + (b"" if method == b"HEAD" else body)

    def _is_own(self, request: bytes) -> bool:
        """Return True if a request is for a name of this server, see `hosts`."""
        if not is_loopback(self.address[0]):
            return True
        names = frozenset(name.lower() for name in self._settings.serve.hosts)
        return all(is_own(found[1], names) for found in _HOST.finditer(request))


class _Ended(Exception):
    """The exporter is closed, so no request waits for the coverage any more."""


class _Collected:
    """A collector for the registry of prometheus-client."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect


def _listening(place: MetricsTarget) -> socket.socket:
    """Return a listening socket. Raises `UsageError`."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        return socket.create_server((place.host, place.port), family=family, backlog=BACKLOG)
    except OSError as error:
        where = f"{place.host} port {place.port}"
        reason = str(error.strerror).partition(" (while attempting")[0]  # create_server adds that
        raise UsageError(f"--metrics: cannot listen at {where}: {reason}") from error


def _not_written(path: str, error: OSError) -> UsageError:
    return UsageError(f"--metrics: cannot write {path}: {error.strerror}")


def of_store(store: Store, retention: RetentionSettings) -> bytes:
    """Return the metrics of a store, its watch and its mounts, as another process sees them.

    The result is empty if prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        return b""

    def families() -> Iterator[Metric]:
        found = status.of_store(store, retention, public=True)
        if found.watch is not None and (facts := found.watch.watched) is not None:
            yield from _of_watch(facts, found.watch.since)
        yield from _of_store(store)
        yield from _of_status(found)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families))
    return generate_latest(registry)


# --- families of metrics -------------------------------------------------------------------------

_COUNTERS: Final = (
    ("captured_files", "captured", "Files that were captured."),
    ("captured_bytes", "copied_bytes", "Bytes that were copied into the store."),
    ("new_build_ids", "new_build_ids", "Build IDs that the store had not."),
    ("held_files", "held", "Files whose bytes the store had already."),
    ("absent_files", "absent", "Files without a build ID."),
    ("omitted_files", "omitted", "Files that were omitted for lack of room."),
    ("retried_files", "retried", "Attempts to capture that were put off."),
    ("kernel_events", "records", "Events of the kernel that were read."),
    ("lost_kernel_events", "records_lost", "Events that the kernel could not deliver."),
    ("missed_files", "missed", "Files that were gone before they could be opened."),
    ("dropped_mappings", "dropped", "Mappings not looked at: a container made too many."),
    ("unjournaled_files", "unjournaled", "Files that are not in the journal."),
    ("gaps", "restarts", "Times that nothing was followed until the catcher ran again."),
)
_GAUGES: Final = (
    ("waiting_files", "waiting", "Files that are open and not copied yet."),
    ("waiting_bytes", "waiting_bytes", "Bytes of these files."),
    ("lag_seconds", "lag", "Time that the oldest of these files has waited."),
)


def _gauge(name: str, text: str, value: float) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"buildidfs_{name}", text, value=value)


def _of_watch(facts: WatchFacts, since: float) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    info = GaugeMetricFamily("buildidfs_info", "The version that runs.", labels=["version"])
    info.add_metric([__version__], 1)
    yield info
    yield _gauge("start_time_seconds", "Start of the watch (Unix time).", since)
    modes = GaugeMetricFamily("buildidfs_watch_mode", "1 for the present mode.", labels=["mode"])
    for mode in _MODES:
        modes.add_metric([mode], mode == facts.mode)
    yield modes
    yield _gauge("degraded", "Restrictions that status explains.", len(facts.degraded))
    error = bool(facts.store_error)
    yield _gauge("store_error", "1 while the store cannot be written.", error)
    for name, key, text in _COUNTERS:
        yield CounterMetricFamily(f"buildidfs_{name}", text, value=getattr(facts, key))
    for name, key, text in _GAUGES:
        yield _gauge(name, text, getattr(facts, key))


def _of_store(store: Store) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    held, gone = store.stats(), store.evictions()
    _, jit_bytes = store.jit_maps.totals()
    filesystem = os.statvfs(store.path)
    for name, text, value in (
        ("store_build_ids", "Build IDs in the store.", held.ids),
        ("store_blobs", "Files of bytes in the store; each is one inode.", held.blobs),
        ("store_content_bytes", "Bytes of their content.", held.blob_bytes),
        ("store_blob_bytes", "Bytes that they take on the disk.", held.stored_bytes),
        ("store_index_bytes", "Bytes that the index takes.", held.index_bytes),
        ("store_jit_bytes", "Bytes of the names of generated code.", jit_bytes),
        ("store_pins", "Pins.", held.pins),
        ("store_free_bytes", "Free bytes of the filesystem.", held.free_bytes),
        ("store_free_inodes", "Free inodes of the filesystem.", filesystem.f_favail),
        ("store_filesystem_inodes", "All inodes of the filesystem.", filesystem.f_files),
    ):
        yield _gauge(name, text, value)
    blobs = CounterMetricFamily(
        "buildidfs_evicted_blobs", "Blobs removed to make room.", labels=["recapturable"]
    )
    sizes = CounterMetricFamily(
        "buildidfs_evicted_bytes", "Bytes of these blobs.", labels=["recapturable"]
    )
    for label, count, size in (
        ("true", gone.recapturable, gone.recapturable_bytes),
        ("false", gone.losses, gone.lost_bytes),
    ):
        blobs.add_metric([label], count)
        sizes.add_metric([label], size)
    yield blobs
    yield sizes


def _of_status(found: Status) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    health = GaugeMetricFamily(
        "buildidfs_health", "1 for the present verdict of status.", labels=["verdict"]
    )
    for verdict in Verdict:
        health.add_metric([verdict.value], verdict is found.verdict)
    yield health
    mounts = [each for each in found.processes if each.role == status.MOUNT and each.own_facts]
    yield _gauge("mounts", "Mounts of the store.", len(mounts))
    requests = CounterMetricFamily(
        "buildidfs_mount_requests", "Requests of the kernel that a mount has answered.",
        labels=["mountpoint"],
    )  # fmt: skip
    for each in mounts:
        if isinstance(count := each.own_facts.get("requests"), int):
            requests.add_metric([utf8(each.raw_mountpoint)], count)
    yield requests


def _of_coverage(coverage: Coverage) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    shares = GaugeMetricFamily(
        "buildidfs_coverage_ratio",
        "The share of the files mapped by running processes that the store can read.",
        labels=["what"],
    )
    shares.add_metric(["executable"], coverage.executable())
    shares.add_metric(["symbols"], coverage.symbols())
    shares.add_metric(["debuginfo"], coverage.debuginfo())
    yield shares
