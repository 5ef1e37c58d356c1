# SPDX-License-Identifier: Apache-2.0
"""Fetch files from upstream servers: those that a store lacks, alone or for a profile or core file.

`main` is the process that fetches for a mount or a server, which may not write to the store.
"""

from __future__ import annotations

import functools
import os
import socket
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import config, log
from buildidfs.catalog import requested_id
from buildidfs.ingest import upkeep
from buildidfs.model import BuildId, Kind, Quality
from buildidfs.profile import inputs
from buildidfs.store.absent_files import AbsentFiles
from buildidfs.upstream import agent
from buildidfs.upstream.fetcher import FAILED, Upstreams, token_of
from buildidfs.upstream.options import DownloadSpool, FetchOptions, of_settings
from buildidfs.upstream.servers import servers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from buildidfs.capture.base import Progress
    from buildidfs.config import Settings
    from buildidfs.store import Store
    from buildidfs.upstream.agent import Agent
    from buildidfs.upstream.fetcher import Fetched


KINDS: Final = (Kind.EXECUTABLE, Kind.DEBUGINFO)
WORKERS: Final = 8
"""Files that are fetched at the same time."""

_KERNEL: Final = b"[kernel.kallsyms]"

NO_UPSTREAM: Final = (
    "no upstream is configured: set [upstream] urls in buildidfs.toml(5), or DEBUGINFOD_URLS, for"
    " Debian https://debuginfod.debian.net"
)

Lacking = tuple[BuildId, Kind]
"""A file to fetch."""


def check(options: FetchOptions) -> None:
    """Raise `UsageError` for an invalid URL or a missing Python package."""
    for server in servers_of(options, DownloadSpool(b"/", options.max_size), ""):
        server.close()


def wanted_of(
    store: Store, ids: Iterable[str], files: Iterable[str], kinds: Sequence[Kind]
) -> list[Lacking]:
    """Return the files that a user means by build IDs, profiles and core files.

    Raises as `requested_id.future_build_id` and `lacking_in`.
    """
    build_ids = [requested_id.future_build_id(store, text) for text in ids]
    found = [(build_id, kind) for build_id in build_ids for kind in kinds]
    for path in files:
        found += [each for each in lacking_in(store, os.fsencode(path)) if each[1] in kinds]
    return found


def lacking_in(store: Store, path: bytes) -> list[Lacking]:
    """Return the files that a profile or a core file names and a store lacks.

    Raises `UsageError` for a file that is neither.
    """
    found: dict[Lacking, None] = {}
    for row in inputs.coverage_of_file(store, path).rows:
        if row.build_id is None:
            continue
        if row.path.startswith(b"["):
            # No package has a vDSO. The kernel's own symbols name its functions.
            if row.path == _KERNEL and row.symbols < Quality.SYMTAB:
                found[row.build_id, Kind.DEBUGINFO] = None
            continue
        if not row.executable:
            found[row.build_id, Kind.EXECUTABLE] = None
        if not row.debuginfo:
            found[row.build_id, Kind.DEBUGINFO] = None
    return list(found)


def fetch(
    store: Store,
    options: FetchOptions,
    wanted: Iterable[Lacking],
    *,
    retry_absent: bool = False,
    progress: Progress | None = None,
) -> list[Fetched]:
    """Fetch files, several at a time; return the answers in the order of ``wanted``.

    On Ctrl-C, unfinished fetches are cancelled. Raises `UsageError` for an invalid URL.
    """
    files = list(dict.fromkeys(wanted))
    done: dict[int, Fetched] = {}
    meter = _Meter(progress, len(files), done)
    with (
        ThreadPoolExecutor(WORKERS, "fetch") as pool,
        Upstreams(store, options, meter.add) as upstreams,
    ):
        try:
            futures = {
                pool.submit(upstreams.fetch, build_id, kind, retry_absent=retry_absent): number
                for number, (build_id, kind) in enumerate(files)
            }
            for future in as_completed(futures):
                done[futures[future]] = future.result()
                meter.show(str(done[futures[future]].build_id))
        except BaseException:  # what waits must not be fetched, also after ^C
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [done[number] for number in range(len(files))]


class _Meter:
    """Reports progress by files, and by bytes, which arrive in several threads."""

    def __init__(self, progress: Progress | None, files: int, done: Mapping[int, Fetched]) -> None:
        self._progress = progress
        self._files = files
        self._done = done
        self._bytes = 0

    def add(self, count: int) -> None:
        """Count bytes that were received."""
        self._bytes += count
        self.show("")

    def show(self, what: str) -> None:
        """Report the progress."""
        if self._progress is not None:
            done = len(self._done)
            self._progress(done, what, size=self._bytes, share=done / max(self._files, 1))


# --- for mount and server, which may not write ---------------------------------------------------


def agent_maker(
    store_path: str | bytes | os.PathLike[str], settings: Settings, environ: Mapping[str, str]
) -> Callable[[], Agent] | None:
    """Return a function that makes the agent of a mount or server; None if no upstream is
    configured.

    Raises `UsageError`.
    """
    options = of_settings(settings.upstream, environ)
    if not options.urls:
        return None
    check(options)
    return functools.partial(agent_of, store_path, settings, options)


def agent_of(
    store_path: str | bytes | os.PathLike[str], settings: Settings, options: FetchOptions
) -> Agent:
    """Return an agent that fetches in another process, which starts at the first request."""
    words = (os.path.abspath(os.fsencode(store_path)).hex(),)
    # The settings have passwords and headers, but each user may read the arguments of a process.
    introduction = msgspec.json.encode((settings, options))
    path = os.fsencode(store_path)
    absent = AbsentFiles(path, options.scope)
    failed = AbsentFiles(path, (*options.scope, FAILED))
    return agent.Agent(__name__, words, introduction, options.wait, absent, failed, token_of(path))


def main(words: Sequence[str]) -> None:
    """Fetch files on request of the process at the other end of a socket, until it closes the
    socket.

    The arguments are the socket and those of `agent_of`; the first messages on the socket are the
    settings and the options.
    """
    fd, path = words
    if not log.is_set_up():
        log.setup(0, journald="JOURNAL_STREAM" in os.environ)
    with socket.socket(fileno=int(fd)) as pipe:
        introduction = pipe.recv(agent.INTRODUCTION_MAX)
        if not introduction:
            return  # the requesting process was killed
        settings, options = msgspec.json.decode(
            introduction, type=tuple[config.Settings, FetchOptions]
        )

        def opened() -> Store:
            return upkeep.open_for_capture(bytes.fromhex(path), settings)

        agent.serve(pipe, opened, lambda store: Upstreams(store, options), WORKERS)
