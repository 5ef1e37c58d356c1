# SPDX-License-Identifier: Apache-2.0
"""Start and end the watch and the mount of a store together, and find running ones.

Both run as processes of ``buildidfs watch`` and ``buildidfs mount``, and `supervise` keeps them
running.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

import buildidfs
from buildidfs.capture.process.gate import ProcessGate
from buildidfs.errors import CapabilityError, MountError, UsageError
from buildidfs.linux import procfs
from buildidfs.linux.file_ops import closing_fd
from buildidfs.store import Store, run_files
from buildidfs.store.run_files import Presence, Present
from buildidfs.watch.status import MOUNT, PUSH, SERVE, UP, WATCH, PartState, parts
from buildidfs.watch.supervise import ProgramSpec

if TYPE_CHECKING:
    StorePath = str | bytes | os.PathLike[str]

_WATCH_GRACE_S = 30.0  # a commit in progress may take that long on a slow disk
_MOUNT_GRACE_S = 15.0
_SERVE_GRACE_S = 20.0  # downloads in progress may go on for ten
_PUSH_GRACE_S = 15.0


def programs(
    arguments: Sequence[str],
    mountpoint: bytes | None,
    *,
    watch: bool = True,
    serve: bool = False,
    push: bool = False,
    metrics: str = "",
) -> list[ProgramSpec]:
    """Return the programs to run, in the order in which they end.

    ``arguments`` are the global options of the command line for the same store and settings;
    ``mountpoint`` is absolute, None for no mount. ``metrics`` is the option ``--metrics`` of
    ``watch``.
    """
    command = (sys.executable, "-m", "buildidfs", *arguments)
    found = []
    if watch:
        words = (*command, "watch", *(("--metrics", metrics) if metrics else ()))
        found.append(ProgramSpec(WATCH, words, grace=_WATCH_GRACE_S))
    if serve:
        found.append(ProgramSpec(SERVE, (*command, "serve"), grace=_SERVE_GRACE_S))
    if push:
        # After the end of the watch: the next start pushes its last captures.
        found.append(ProgramSpec(PUSH, (*command, "push", "--watch"), grace=_PUSH_GRACE_S))
    if mountpoint is not None:
        words = (*command, "mount", "--foreground", "--", os.fsdecode(mountpoint))
        point = mountpoint
        found.append(
            ProgramSpec(
                MOUNT, words, needed=True, grace=_MOUNT_GRACE_S, cleanup=lambda: _clear(point)
            )
        )
    return found


def start(
    store_path: StorePath,
    wanted: Iterable[ProgramSpec],
    *,
    environ: Mapping[str, str],
    mountpoint: bytes | None,
    ready: Callable[[], None] | None = None,
    log_file: str | None = None,
    options: Mapping[str, str] | None = None,
) -> None:
    """Start the programs in the background, and return when they run.

    With ``ready`` the programs run in the foreground: ``ready`` is called when they run, and this
    function returns when they have ended. ``options`` are those of the command line, for
    `refuse_second`. Creates the store and ``mountpoint`` if they are absent.
    A program that is not ``needed`` may have failed; see `running` and `parts`. Raises
    `StoreLocked` if another supervisor runs on the store, `MountError`, and the error of a needed
    program that failed.
    """
    root = os.path.abspath(os.fsencode(store_path))
    _make_directory(mountpoint)
    if mountpoint is not None and not os.path.lexists(root):
        _check_mountpoint(mountpoint)  # a failure leaves no empty store
    Store.create(root).close()
    facts: dict[str, object] = {} if mountpoint is None else {"mountpoint": mountpoint}
    facts["options"] = dict(options or {})

    def supervise(announce: Callable[[], None]) -> None:
        from buildidfs.watch.supervise import RETRY, Supervisor

        def announce_ready() -> None:
            try:
                announce()
            except BrokenPipeError:  # the waiting parent has given up
                os.kill(os.getpid(), signal.SIGTERM)

        # Another process may find us and send the signal early: all programs are just being
        # started.
        signal.signal(RETRY, signal.SIG_IGN)
        with Presence.only(root, UP, **facts) as known:
            Supervisor(list(wanted), known, _environment(environ)).run(announce_ready)

    if ready is not None:
        supervise(ready)
    else:
        from buildidfs.mount import daemonize

        daemonize.detach(supervise, log_file)


def running(store_path: StorePath) -> Present | None:
    """Return the supervisor of a store, if one runs."""
    return next(iter(run_files.present(store_path, UP)), None)


def elsewhere(store_path: StorePath) -> list[bytes]:
    """Return the other stores on which this user runs a supervisor, as far as /proc shows."""
    own = os.path.realpath(os.fsencode(store_path))
    found: set[bytes] = set()
    gate = ProcessGate()
    for pid in procfs.pids():
        try:
            pid_fd = procfs.open_pid(pid)
        except OSError:
            continue
        with closing_fd(pid_fd):
            try:
                if b"buildidfs" not in gate.ask(pid_fd, pid, _command_line):
                    continue
                root = run_files.store_with_role(procfs.open_files(pid_fd), UP, pid)
            except OSError:
                continue
        if root is not None:
            found.add(root)
    return sorted(found - {own})


def _command_line(pid_fd: int) -> bytes:
    return procfs.read_text(pid_fd, b"cmdline")


def hurry(store_path: StorePath, seconds: float) -> None:
    """Let the supervisor restart stopped programs at once.

    Wait up to ``seconds`` until they run or fail.
    """
    from buildidfs.watch.supervise import RETRY

    supervisor = running(store_path)
    if supervisor is None:
        return
    before = {part.name: part.restarts for part in parts(supervisor)}

    def has_news(part: PartState) -> bool:
        tried = part.restarts > before.get(part.name, 0) and part.state != "starting"
        return tried or part.state == "running"

    def is_over(now: Present) -> bool:
        # A supervisor that has just started does not report its programs yet.
        return "children" in now.facts and all(map(has_news, parts(now)))

    with _process(supervisor) as pidfd:
        if pidfd is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(pidfd, RETRY)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (now := running(store_path)) is not None:
            if is_over(now) or select.select([pidfd], [], [], 0.05)[0]:
                return


def watching(store_path: StorePath) -> Present | None:
    """Return the watch on a store, if one runs."""
    return next(iter(run_files.present(store_path, WATCH)), None)


class Report(msgspec.Struct):
    """The running programs of a store by name, and the facts of its watch.

    ``is_complete`` is False if a program does not run, or the watch cannot follow everything.
    """

    mountpoint: bytes
    parts: dict[str, PartState]
    watch: dict[str, Any]
    is_complete: bool

    def runs(self, name: str) -> bool:
        """Return True if a program is to run, and does run."""
        return name in self.parts and self.parts[name].state == "running"


def report(store_path: StorePath, first_scan_s: float) -> Report:
    """Return the running programs after the first scan, which may take ``first_scan_s`` seconds.

    Raises `MountError` if the supervisor has ended.
    """
    from buildidfs.watch.state import PARTIAL

    supervisor = running(store_path)
    if supervisor is None:
        raise MountError("it has ended just after it was started")
    found = Report(
        supervisor.path("mountpoint"), {part.name: part for part in parts(supervisor)}, {}, True
    )
    found.is_complete = all(map(found.runs, found.parts))
    if found.runs(WATCH):
        settle(store_path, first_scan_s)
        watch = watching(store_path)
        found.watch = {} if watch is None else watch.facts
        found.is_complete &= found.watch.get("mode") not in PARTIAL
    return found


def settle(store_path: StorePath, seconds: float) -> None:
    """Wait until the first scan has captured the running programs, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (found := watching(store_path)) is not None:
        if found.facts.get("scans") and not found.facts.get("waiting"):
            return
        select.select([], [], [], 0.1)


def end_all(store_path: StorePath) -> None:
    """End the supervisor of a store that was just started, and wait for its end.

    A program that has not reported itself yet ends when it finds its starter gone.
    """
    supervisor = running(store_path)
    if supervisor is not None:
        end(supervisor, _WATCH_GRACE_S + _MOUNT_GRACE_S)


def end(supervisor: Present, seconds: float) -> None:
    """End a supervisor and its programs, and wait until they have ended.

    Raises `MountError` if that takes longer than ``seconds``, `CapabilityError` if the supervisor
    belongs to another user.
    """
    with _process(supervisor) as pidfd:
        if pidfd is None:
            return
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        except ProcessLookupError:
            return
        except PermissionError:
            raise CapabilityError(
                f"pid {supervisor.pid} belongs to another user, and only root may end it"
            ) from None
        if not select.select([pidfd], [], [], seconds)[0]:
            raise MountError(f"pid {supervisor.pid} has not ended within {seconds:g} s")


@contextlib.contextmanager
def _process(supervisor: Present) -> Iterator[int | None]:
    """Yield the pidfd of a supervisor; None if it has ended."""
    try:
        pidfd = supervisor.pidfd()
    except ProcessLookupError:
        yield None
        return
    with closing_fd(pidfd):
        yield pidfd


def _make_directory(mountpoint: bytes | None) -> None:
    if mountpoint is None:
        return
    try:
        os.makedirs(mountpoint, exist_ok=True)
    except FileExistsError:
        pass  # `mount` handles this, or prints an error
    except OSError as error:
        shown = os.fsdecode(mountpoint)
        raise MountError(f"cannot make {shown}: {error.strerror}; name another place") from error


def _check_mountpoint(mountpoint: bytes) -> None:
    from buildidfs.mount import mountpoint as mount_mountpoint

    mount_mountpoint.prepare(mountpoint, allow_other=False)


def _clear(mountpoint: bytes) -> None:
    """Remove the remains of a killed mount."""
    from buildidfs.mount import mountpoint as mount_mountpoint

    with contextlib.suppress(MountError):
        mount_mountpoint.clear(mount_mountpoint.resolved(mountpoint))


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the programs: without our own variables, with the package path."""
    ours = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "JOURNAL_STREAM")
    found = {name: value for name, value in environ.items() if name not in ours}
    parent = os.path.dirname(os.path.dirname(os.path.abspath(buildidfs.__file__)))
    if os.path.basename(parent) not in ("site-packages", "dist-packages"):
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [parent, environ.get("PYTHONPATH")]))
    return found


def refuse_second(
    supervisor: Present, mountpoint: bytes | None, options: Mapping[str, str]
) -> None:
    """Raise `UsageError` if the running supervisor has another mount point than ``mountpoint``
    (None: no mount), or if it would ignore one of the ``options``.
    """
    there, instead = supervisor.path("mountpoint"), "end that with buildidfs down"
    pid = supervisor.pid
    if there != (mountpoint or b""):
        where = f"with the mount at {os.fsdecode(there)}" if there else "without a mount"
        raise UsageError(f"this store is up already, {where} (pid {pid}): {instead}")
    running = supervisor.facts.get("options", {})
    ignored = [f"{name} {value}".strip() for name, value in options.items()
               if not isinstance(running, dict) or running.get(name) != value]  # fmt: skip
    if ignored:
        raise UsageError(
            f"this store is up already, without {', '.join(ignored)} (pid {pid}): {instead}"
        )
