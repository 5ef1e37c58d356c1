# SPDX-License-Identifier: Apache-2.0
"""One mount from beginning to end, in the foreground: `run`. `daemonize` detaches before that.

The order matters. The mount point is prepared before the store is opened, so that faults of the
mount point are reported first; the store is opened after any fork, because LMDB does not survive
one; signals end the session by unmounting while requests are still answered, so that only clients
with an open file get an error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from functools import partial
from typing import TYPE_CHECKING

import pyfuse3
import trio

from buildidfs.errors import MountError, StoreError
from buildidfs.fleet.tiered_store import TieredStore
from buildidfs.linux import mounts, threads
from buildidfs.mount import mountpoint
from buildidfs.mount.invalidate import Absences, FuseKernel, Invalidator
from buildidfs.mount.limits import MountLimits
from buildidfs.mount.loop import FastLoop, PlainLoop
from buildidfs.mount.operations import Operations
from buildidfs.store import Store
from buildidfs.store.run_files import Presence
from buildidfs.view import view_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.mount.mountpoint import MountOptions
    from buildidfs.upstream.agent import Agent
    from buildidfs.view import View

log = logging.getLogger(__name__)

USES_S = 300.0
"""Seconds between two records of the files opened through a mount."""

_ANNOUNCE_S = 5.0
_COPY_S = 0.5  # for the end of a session without copies


def run(
    options: MountOptions,
    ready: Callable[[], None] = lambda: None,
    agent_of: Callable[[], Agent] | None = None,
    opened: Callable[[bytes], Store] | None = None,
) -> None:
    """Mount a store and answer until it is unmounted, or SIGTERM or SIGINT comes.

    ``ready`` is called when the mount answers; ``agent_of`` returns the agent that fetches missing
    files; ``opened`` replaces the usual function that opens the store. Raises `MountError`, and
    `StoreError` if the store cannot be opened.
    """
    mountpoint.prepare(options.mountpoint, allow_other=options.allow_other)
    point = os.path.realpath(options.mountpoint)
    _allow_many_files()
    presence: list[Presence] = []
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(_opened(options, opened))
        agent = None if agent_of is None else stack.enter_context(contextlib.closing(agent_of()))
        view = view_of(
            store,
            zero_scripts=options.gdb_scripts == "zero",
            may_come=None if agent is None else agent.is_worth_asking,
        )
        absences = Absences(MountLimits())
        loop = FastLoop() if options.loop == "fast" else PlainLoop()
        # Without other users there is no user from whom to hide names.
        list_all = options.list_all or not options.allow_other
        fetch = None if agent is None else agent.fetch
        operations = Operations(view, loop, absences, store.path, list_all=list_all, fetch=fetch)
        stack.callback(operations.close)
        loop.install()
        _mount(operations, point, options)
        device = _device(point)
        stack.callback(_close, point, device)
        _listen(stack, store, view, absences, operations, point)
        if isinstance(store, TieredStore):
            store.remote.start()  # its earlier output would be taken for an error of the mount
        threads.collect_rarely()

        def answering() -> None:
            presence.append(
                stack.enter_context(
                    Presence(
                        store.path,
                        "mount",
                        mountpoint=point,
                        settings=options.settings,
                        **counts(),
                    )
                )
            )
            ready()

        def counts() -> dict[str, int]:
            return {} if loop.requests is None else {"requests": loop.requests}

        def announce() -> None:
            for each in presence:
                each.update(**counts())

        try:
            trio.run(_serve, point, device, options.read_ahead_kib, answering, announce, store)
        except BaseExceptionGroup as group:
            raise MountError(f"serving {os.fsdecode(point)} failed: {_first(group)}") from group
    log.info("%s is unmounted", os.fsdecode(options.mountpoint))


def _opened(options: MountOptions, opened: Callable[[bytes], Store] | None) -> Store:
    if opened is not None:
        return opened(options.store)
    if not options.bundle:
        return Store.open(options.store, read_only=True)
    from buildidfs.capture.origin.builder import access_of
    from buildidfs.store.bundle import BundleFile, open_bundle

    file = BundleFile(options.store)
    return open_bundle(file, access_of(file.fileno()))


def _mount(operations: Operations, point: bytes, options: MountOptions) -> None:
    shown = os.fsdecode(options.mountpoint)
    _adopt_log()
    with _standard_error() as captured_errors:
        try:
            # The target of links, because fusermount3 refuses to follow them.
            pyfuse3.init(operations, os.fsdecode(point), options.for_fuse())
        except RuntimeError as error:
            failure = error
        else:
            return
    reason = captured_errors() or str(failure)
    raise MountError(f"cannot mount {shown}: {reason}") from failure


def _listen(
    stack: contextlib.ExitStack,
    store: Store,
    view: View,
    absences: Absences,
    operations: Operations,
    point: bytes,
) -> None:
    """Receive commits as long as the stack exists."""

    def close_idle() -> None:
        # in the loop's thread, which is the only one that touches them
        if pyfuse3.trio_token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                pyfuse3.trio_token.run_sync_soon(operations.close_idle)

    try:
        listener = stack.enter_context(contextlib.closing(store.listen()))
    except StoreError as error:
        # The store is on a read-only filesystem, so there are no commits either.
        log.info("what is captured later will not be seen at once: %s", error)
    else:
        begin = partial(os.stat, point)
        stack.enter_context(Invalidator(view, absences, FuseKernel(), listener, close_idle, begin))


async def _serve(
    point: bytes,
    device: tuple[int, int] | None,
    read_ahead_kib: int,
    ready: Callable[[], None],
    announce: Callable[[], None],
    store: Store,
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(_stop_on_signal, point, device)
        nursery.start_soon(_record_uses, store)
        nursery.start_soon(_keep_telling, announce)
        nursery.start_soon(_announce, point, read_ahead_kib, ready)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


async def _announce(point: bytes, read_ahead_kib: int, ready: Callable[[], None]) -> None:
    def answered() -> None:
        # The kernel takes our reply to its first request as the final read-ahead, so setting it
        # must come first.
        device = os.stat(point).st_dev
        with contextlib.suppress(OSError):  # it needs root and a sysfs
            mounts.set_read_ahead(device, read_ahead_kib)

    try:
        await trio.to_thread.run_sync(answered, abandon_on_cancel=True)
    except OSError as error:
        log.info("%s went before it was used: %s", os.fsdecode(point), error.strerror)
        return
    log.info("mounted at %s", os.fsdecode(point))
    ready()


async def _record_uses(store: Store) -> None:
    """Record opened files every `USES_S`; closing the store records the rest."""
    while True:
        await trio.sleep(USES_S)
        await trio.to_thread.run_sync(store.flush_uses)


async def _keep_telling(announce: Callable[[], None]) -> None:
    while True:
        await trio.sleep(_ANNOUNCE_S)
        announce()


async def _stop_on_signal(
    point: bytes,
    device: tuple[int, int] | None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            log.info("%s: unmounting", signal.Signals(number).name)
            if _device(point) == device is not None:
                try:
                    busy = await trio.to_thread.run_sync(mountpoint.take_away, point)
                except MountError as error:
                    log.warning("%s", error)
                    busy = True
                if not busy:
                    # The session ends by itself, and this task with it, unless another mount
                    # namespace has a copy of the mount.
                    await trio.sleep(_COPY_S)
                    log.info("the copies in other mount namespaces end, too")
            pyfuse3.terminate()


def _device(point: bytes) -> tuple[int, int] | None:
    top = mountpoint.mounted_at(point)
    return None if top is None or top.fstype != mounts.FILESYSTEM_TYPE else top.dev


def _close(point: bytes, device: tuple[int, int] | None) -> None:
    # libfuse would unmount whatever is mounted there by now.
    pyfuse3.close(unmount=_device(point) == device is not None)


def _allow_many_files() -> None:
    """Raise the limit of open files: the server has every file open that a client has open."""
    threads.allow_many_descriptors()
    # The kernel doubles the table of descriptors when it is full. In a process with threads it
    # waits several milliseconds for that each time (expand_fdtable, synchronize_rcu), so the table
    # is enlarged now.
    threads.reserve_descriptors(2 * MountLimits().idle_files + 1)


def _adopt_log() -> None:
    """Send messages of pyfuse3 to the handlers of buildidfs."""
    theirs, ours = logging.getLogger("pyfuse3"), logging.getLogger("buildidfs")
    theirs.handlers[:] = ours.handlers
    theirs.setLevel(max(ours.getEffectiveLevel(), logging.INFO))
    theirs.propagate = ours.propagate


@contextlib.contextmanager
def _standard_error() -> Iterator[Callable[[], str]]:
    """Capture the output of libfuse and fusermount3; yield a function that returns it
    as one line.
    """
    caught = os.memfd_create("stderr", os.MFD_CLOEXEC)
    saved = os.dup(2)
    os.dup2(caught, 2)

    def text() -> str:
        lines = os.pread(caught, 65536, 0).decode(errors="replace").split("\n")
        return "; ".join(line.strip() for line in lines if line.strip())

    try:
        yield text
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
