# SPDX-License-Identifier: Apache-2.0
"""Start and end the programs of a store together, keep them running, and find running ones.

The programs are processes of ``buildidfs watch``, ``mount``, ``serve`` and ``push``. `Supervisor`
starts them, passes on their messages, and restarts them; one loop waits for the descriptors of all
programs at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

import buildidfs
from buildidfs import errors
from buildidfs import log as logs
from buildidfs.backoff import Attempts, Backoff
from buildidfs.capture.process.silent_processes import ProcessGate
from buildidfs.errors import CapabilityError, IncompleteError, MountError, UsageError
from buildidfs.linux import child as processes
from buildidfs.linux import procfs
from buildidfs.linux.child import END_SIGNALS, SupervisorLoop
from buildidfs.linux.file_ops import closing_fd
from buildidfs.linux.sdnotify import Inbox
from buildidfs.reports import WatchFacts, watch_facts
from buildidfs.store import Store, run_files
from buildidfs.store.run_files import Presence, Present
from buildidfs.watch.status import MOUNT, PUSH, SERVE, UP, WATCH, PartState, parts

if TYPE_CHECKING:
    StorePath = str | bytes | os.PathLike[str]


log = logging.getLogger(__name__)

_MOST_OF_A_LINE = 4096
_CHUNK = 65536
_END_S = 5.0

# A watch with restrictions says so when it ends.
_ENDED_WELL = frozenset((0, IncompleteError.exit_code))

RETRY: Final = signal.SIGUSR1
"""The signal that makes a supervisor start at once all programs that do not run."""


class ProgramSpec(msgspec.Struct, frozen=True):
    """A program to be kept running.

    If a ``needed`` program fails with an error of ours at its first start, the supervisor ends.
    After SIGTERM it has ``grace`` seconds. ``cleanup`` is called when it will not be started again.
    """

    name: str
    argv: tuple[str | bytes, ...]
    needed: bool = False
    grace: float = 15
    cleanup: Callable[[], object] = lambda: None


class SupervisedProgram:
    """A `ProgramSpec` and the process that runs it now, if any."""

    def __init__(self, program: ProgramSpec, environ: Mapping[str, str], backoff: Backoff) -> None:
        self.program = program
        self.part = PartState(program.name, "waiting")
        self.code: int | None = None
        """The result of the last process: an exit status, or minus the number of a signal."""
        self.starts = Attempts(backoff)
        self._inbox = Inbox()
        self._environ = {**environ, "NOTIFY_SOCKET": self._inbox.name}
        self._process: processes.Child | None = None
        self._output = -1
        self._line = b""
        self._last_line = ""

    # --- start and end -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the program now."""
        log.info("%s: starting", self.program.name)
        self._line, self._last_line, self.code = b"", "", None
        self._output, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(writing, True)
        try:
            process = processes.start(
                self.program.argv,
                stdout=writing,
                stderr=writing,
                env=self._environ,
                new_session=True,  # the terminal's ^C is for the supervisor
                end_with_us=signal.SIGTERM,
            )
            try:
                process.fileno()
            except OSError:
                process.end(_END_S)
                raise
        except OSError as error:
            self._close_output()
            self._failed(str(error))
        else:
            self._process = process
            restarts = self.part.restarts + (self.part.since > 0)
            self._change(
                state="starting",
                pid=process.pid,
                since=time.time_ns(),
                restarts=restarts,
                due=0,
            )
        finally:
            os.close(writing)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program. SIGKILL goes to its whole process group."""
        if self._process is not None:
            self._process.send(number, group=number == signal.SIGKILL)

    def disable_restart(self) -> None:
        """Do not start the program again; if it runs, it continues."""
        if self._process is None:
            self._change(state="ended", due=0)

    def hurry(self) -> None:
        """If the program does not run, start it as soon as possible."""
        if self._process is None:
            self.starts.succeeded()
            self._change(state="waiting", due=time.time_ns())

    @property
    def is_waiting(self) -> bool:
        """True if it is to be started when that is due."""
        return self.part.state == "waiting"

    @property
    def is_alive(self) -> bool:
        """True if a process runs, or has ended and was not reaped yet."""
        return self._process is not None

    def close(self) -> None:
        """Close the descriptors of its output."""
        self._inbox.close()

    # --- events ------------------------------------------------------------------------------

    def descriptors(self) -> dict[int, Callable[[], None]]:
        """Return the descriptors to wait for, each with the function to call when it is
        readable.
        """
        found: dict[int, Callable[[], None]] = {self._inbox.fileno(): self._read_messages}
        if self._process is not None:
            found[self._process.fileno()] = self._ended
            if self._output >= 0:
                found[self._output] = self._relay_output
        return found

    def _read_messages(self) -> None:
        while (message := self._inbox.receive()) is not None:
            if self._process is None:
                continue  # the last output of an ended process
            if message.get("READY") == "1" and self.part.state == "starting":
                log.info("%s: ready (pid %d)", self.program.name, self._process.pid)
                self._change(state="running")
            if "STATUS" in message:
                self._change(status=message["STATUS"])

    def _relay_output(self) -> None:
        """Pass on the output of the program, line by line."""
        if self._output < 0:
            return  # it ended just now, and all its output was read
        try:
            text = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return
        if not text:
            self._close_output()
        *lines, self._line = (self._line + text).split(b"\n")
        if not text or len(self._line) > _MOST_OF_A_LINE:
            lines.append(self._line)
            self._line = b""
        for line in lines:
            self._pass_on(line)

    def _pass_on(self, line: bytes) -> None:
        text = line[:_MOST_OF_A_LINE].decode("utf-8", "backslashreplace").strip()
        text = text if text.isprintable() else repr(text)[1:-1]
        found = logs.parsed(text)
        if not found.message:
            return
        if found.complete:
            logs.relay(found)
        else:
            log.log(found.level, "%s: %s", self.program.name, found.message)
        self._last_line = found.message

    def _ended(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.send(signal.SIGKILL, group=True)  # processes left in its group end with it
        self.code = process.wait()
        assert self.code is not None
        self._read_messages()
        self._relay_output()  # all of it: one read takes the whole content of a pipe
        self._pass_on(self._line)
        self._close_output()
        if self.code in _ENDED_WELL:
            log.info("%s: ended", self.program.name)
            self._change(state="ended", pid=0, since=time.time_ns(), status="")
        elif self.code < 0:
            self._failed(f"killed by {_signal_name(-self.code)}")
        else:
            self._failed(self._last_line or f"ended with exit status {self.code}")

    def _failed(self, reason: str) -> None:
        delay = self.starts.failed()
        log.warning("%s: %s; again in %g s", self.program.name, reason, delay)
        self._change(
            state="waiting", pid=0, since=time.time_ns(), reason=reason, status="",
            due=time.time_ns() + int(delay * 1e9),
        )  # fmt: skip

    def _change(self, **values: object) -> None:
        self.part = msgspec.structs.replace(self.part, **values)

    def _close_output(self) -> None:
        if self._output >= 0:
            os.close(self._output)
            self._output = -1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


BACKOFF: Final = Backoff(0.5, 60.0)


class Supervisor:
    """Runs programs until it is asked to end. Needs the main thread of a process without other
    threads.

    ``presence`` gets their states: ``children``, a list of `PartState`. The programs get
    ``environ``.
    """

    def __init__(
        self,
        programs: Sequence[ProgramSpec],
        presence: Presence,
        environ: Mapping[str, str],
        backoff: Backoff = BACKOFF,
    ) -> None:
        self._children = [SupervisedProgram(each, environ, backoff) for each in programs]
        self._presence = presence
        self._shown: list[PartState] = []
        self._loop = SupervisorLoop(self._children, (*END_SIGNALS, RETRY))

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Run the programs until SIGTERM, SIGINT or SIGHUP, or until all have ended by themselves.

        ``ready`` is called when each of them runs, or, if it is not needed, has failed once. At the
        end they are ended in the order in which they were given. If a needed program fails at its
        first start, the others are ended and its error is raised.
        """
        announced = False
        with self._loop.receiving():
            try:
                while not self._is_over():
                    self._loop.start_due()
                    self._show()
                    if not announced and all(map(_is_settled, self._children)):
                        announced = True
                        ready()
                    self._wait()
                    if not announced:
                        self._give_up_if_pointless()
            finally:
                self._end_all()

    def _is_over(self) -> bool:
        if any(number in END_SIGNALS for number in self._loop.signals):
            return True
        if RETRY in self._loop.signals:
            self._loop.signals.clear()
            for child in self._children:
                child.hurry()
        return all(child.part.state == "ended" for child in self._children)

    def _give_up_if_pointless(self) -> None:
        for child in self._children:
            part, code = child.part, child.code
            if child.program.needed and part.state == "waiting" and code is not None:
                kind = _class_of(code)
                if kind is not None:
                    raise kind(part.reason)

    def _wait(self, until: float | None = None) -> None:
        self._loop.wait(until)
        self._show()

    def _show(self) -> None:
        parts = [child.part for child in self._children]
        if parts != self._shown:
            self._shown = parts
            self._presence.update(children=parts)

    # --- the end -----------------------------------------------------------------------------

    def _end_all(self) -> None:
        self._loop.signals.clear()
        for child in self._children:
            child.disable_restart()
            self._end(child)
            child.program.cleanup()
        for child in self._children:
            child.close()

    def _end(self, child: SupervisedProgram) -> None:
        """Ask a program to end; kill it after its grace, or when asked again."""
        child.send(signal.SIGTERM)
        deadline = time.monotonic() + child.program.grace
        while child.is_alive:
            if time.monotonic() >= deadline or self._loop.signals:
                log.warning("%s does not end: killing it", child.program.name)
                child.send(signal.SIGKILL)
                deadline = time.monotonic() + child.program.grace
                self._loop.signals.clear()
            self._wait(deadline)
            for each in self._children:
                each.disable_restart()


def _is_settled(child: SupervisedProgram) -> bool:
    """Return True if the supervisor need not wait for this program any longer before it calls
    ``ready``.
    """
    part = child.part
    if part.state in ("running", "ended"):
        return True
    return not child.program.needed and part.reason != ""


def _class_of(code: int) -> type[errors.BuildIdFsError] | None:
    """Return the error class with which a process of ours ended; None for a fault or a signal."""

    def classes(kind: type[errors.BuildIdFsError]) -> Iterator[type[errors.BuildIdFsError]]:
        for each in kind.__subclasses__():
            yield each
            yield from classes(each)

    return next((x for x in classes(errors.BuildIdFsError) if x.exit_code == code), None)


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
    settings: Mapping[str, str] | None = None,
) -> None:
    """Start the programs in the background, and return when they run.

    With ``ready`` the programs run in the foreground: ``ready`` is called when they run, and this
    function returns when they have ended. ``options`` are those of the command line, for
    `refuse_second`, ``settings`` the `config.marks` of the configuration. Creates the store and
    ``mountpoint`` if they are absent.
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
    facts |= {"options": dict(options or {}), "settings": dict(settings or {})}

    def supervise(announce: Callable[[], None]) -> None:
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


def running(store_path: StorePath, role: str = UP) -> Present | None:
    """Return the supervisor of a store, or its process with another ``role``, if one runs."""
    return next(iter(run_files.present(store_path, role)), None)


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


class Report(msgspec.Struct):
    """The running programs of a store by name, and the facts of its watch.

    ``is_complete`` is False if a program does not run, or the watch cannot follow everything.
    """

    mountpoint: bytes
    parts: dict[str, PartState]
    watch: WatchFacts
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
    by_name = {part.name: part for part in parts(supervisor)}
    found = Report(supervisor.path("mountpoint"), by_name, WatchFacts(), True)
    found.is_complete = all(map(found.runs, found.parts))
    if found.runs(WATCH):
        settle(store_path, first_scan_s)
        watch = running(store_path, WATCH)
        if watch is not None:
            found.watch = watch_facts(watch.facts) or found.watch
        found.is_complete &= found.watch.mode not in PARTIAL
    return found


def settle(store_path: StorePath, seconds: float) -> None:
    """Wait until the first scan has captured the running programs, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (found := running(store_path, WATCH)) is not None:
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
