# SPDX-License-Identifier: Apache-2.0
"""Run a mount or a service in the background, after the command that started it has ended.

The process detaches before it opens the index or starts an event loop, because neither survives a
fork. Through a pipe the process reports that it is ready, or its error. Then the parent returns, or
raises the error.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import signal
from typing import TYPE_CHECKING, Final, NoReturn

from msgspec import structs

from buildidfs import errors
from buildidfs.errors import StoreError, needs_extra
from buildidfs.linux.file_ops import close_fds
from buildidfs.store import Store, export

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from buildidfs.mount.mountpoint import MountOptions
    from buildidfs.upstream.agent import Agent

    Work = Callable[[Callable[[], None]], None]


_READY = b"ready"
_SYSLOG = "/dev/log"

log = logging.getLogger(__name__)


def start(
    options: MountOptions,
    log_file: str | None = None,
    agent_of: Callable[[], Agent] | None = None,
    opened: Callable[[bytes], Store] | None = None,
) -> None:
    """Mount a store in the background; return when the mount answers.

    ``opened`` opens the store. Messages then go to ``log_file``, or else to syslog if there is one.
    Raises the errors of `session.run`.
    """

    def serve(ready: Callable[[], None]) -> None:
        from buildidfs.mount import session

        session.run(options, ready, agent_of, opened)

    detach(serve, log_file)


def detach(work: Work, log_file: str | None = None) -> None:
    """Run ``work`` in a background process. ``work`` gets a function, and calls it when it is
    ready; then `detach` returns.

    The process has no terminal, and its working directory is /. Its messages go to the same place
    as those of `start`. If ``work`` raises before it is ready, the error is raised here.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        os.close(reading)
        _leave(work, writing, log_file)
    os.close(writing)
    with open(reading, "rb") as pipe:
        report = pipe.read()
    os.waitpid(child, 0)
    if report != _READY:
        raise _error(report)


def _leave(work: Work, writing: int, log_file: str | None) -> NoReturn:
    """Detach this child process, and run ``work``. Never returns into the parent's code."""
    code = 1
    try:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        os.chdir("/")
        # As after a fresh start, because the parent changed these for itself.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        code = _run(work, writing, log_file)
    except errors.BuildIdFsError as error:
        code = error.exit_code
    except BaseException:  # the top of the process: os._exit would drop it
        log.exception("ended by an error that is a fault of this program")
    finally:
        logging.shutdown()
        os._exit(code)


def _run(work: Work, writing: int, log_file: str | None) -> int:
    pending = [writing]

    def announce(text: bytes) -> None:
        while pending:
            fd = pending.pop()
            os.write(fd, text)
            os.close(fd)

    try:
        _redirect(log_file)
        work(lambda: announce(_READY))
    except errors.BuildIdFsError as error:
        if not pending:
            log.error("%s", error)  # the parent is gone
        announce(f"{type(error).__name__}\n{error}".encode(errors="surrogateescape"))
        raise
    except BaseException as error:  # the parent waits for an answer
        announce(f"BuildIdFsError\n{type(error).__name__}: {error}".encode(errors="replace"))
        raise
    return 0


def _redirect(log_file: str | None) -> None:
    """Leave the terminal; messages go to the file, or to syslog."""
    handler: logging.Handler = logging.NullHandler()
    if log_file is not None:
        try:
            target = export.open_log(log_file)
        except OSError as error:
            raise errors.MountError(f"cannot write {log_file}: {error.strerror}") from error
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    else:
        target = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if os.path.exists(_SYSLOG):
            handler = logging.handlers.SysLogHandler(
                _SYSLOG, logging.handlers.SysLogHandler.LOG_DAEMON
            )
            handler.setFormatter(logging.Formatter(f"buildidfs[{os.getpid()}]: %(message)s"))
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    close_fds(target, nothing)
    logger = logging.getLogger("buildidfs")
    logger.handlers[:] = [handler]
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    logger.propagate = False


def _error(report: bytes) -> errors.BuildIdFsError:
    """Return the error that the child has reported as text."""
    name, _, text = report.decode(errors="surrogateescape").partition("\n")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.BuildIdFsError):
        return kind(text)
    return errors.MountError("the process in the background was killed before it was ready")


_END_S: Final = 10.0


def mount(
    store_path: str | os.PathLike[str],
    mountpoint: str,
    *,
    options: Sequence[str] = (),
    gdb_scripts: str = "zero",
    list_all: bool = False,
    bundle: bool = False,
    foreground: bool = False,
    ready: Callable[[], None] = lambda: None,
    agent_of: Callable[[], Agent] | None = None,
    opened: Callable[[bytes], Store] | None = None,
    settings: dict[str, str] | None = None,
) -> None:
    """Mount the store; return when it can be read, or, in the foreground, when it is unmounted.

    With ``bundle``, ``store_path`` is a bundle. In the foreground ``ready`` is called when the
    mount can be read. ``agent_of`` returns the agent that fetches missing files; ``opened``
    replaces the usual function that opens the store; ``settings`` are the `config.marks`. Raises
    `MountError`, `StoreMissing`, `StoreVersionError`.
    """
    from buildidfs.mount import daemonize
    from buildidfs.mount import mountpoint as mount_options

    with needs_extra("mount"):
        from buildidfs.mount import session
    chosen = mount_options.parse(
        store_path, mountpoint, options, gdb_scripts, list_all=list_all, bundle=bundle
    )
    chosen = structs.replace(chosen, settings=settings or {})
    if foreground:
        session.run(chosen, ready, agent_of, opened)
    else:
        daemonize.start(chosen, agent_of=agent_of, opened=opened)


def make_store(store_path: str | os.PathLike[str], mountpoint: str) -> None:
    """Make an empty store, after a look at the mount point: a failure leaves no empty store.

    Raises `MountError`, `StoreError`.
    """
    from buildidfs.mount import mountpoint as mount_mountpoint

    mount_mountpoint.prepare(os.fsencode(os.path.abspath(mountpoint)), allow_other=False)
    Store.create(store_path).close()


def unmount(mountpoint: str, store_path: str | os.PathLike[str]) -> None:
    """Unmount a mount of ours. If it is a mount of this store, wait for the end of its process.

    The process records the opened files before it ends, and uses the store until then. If a file is
    still open, or another mount namespace has a copy of the mount, the process continues, and this
    function does not wait. Raises `MountError`.
    """
    import os
    import select

    from buildidfs.linux import procfs
    from buildidfs.mount import mountpoint as mount_mountpoint

    point = os.fsencode(os.path.abspath(mountpoint))
    with _server(store_path, mount_mountpoint.resolved(point)) as (pid, pidfd):
        is_in_use = mount_mountpoint.unmount(point)
        if pidfd >= 0 and not is_in_use and not procfs.is_stopped(pid):
            select.select([pidfd], [], [], _END_S)


@contextlib.contextmanager
def _server(store_path: str | os.PathLike[str], point: bytes) -> Iterator[tuple[int, int]]:
    """Yield the pid and a pidfd of the process that has mounted a store at ``point``; -1 if
    unknown.
    """

    from buildidfs.store import run_files

    pid = pidfd = -1
    for each in reversed(run_files.present(store_path, "mount")):
        if each.path("mountpoint") == point:  # of several stacked mounts the last one
            with contextlib.suppress(ProcessLookupError, StoreError):
                pid, pidfd = each.pid, each.pidfd()
            break
    try:
        yield pid, pidfd
    finally:
        close_fds(pidfd)
