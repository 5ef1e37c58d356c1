# SPDX-License-Identifier: Apache-2.0
"""``buildidfs watch`` as a service manager runs it: started, ready, measured, told to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buildidfs.store.run_files import present
from tests.support.containers.shortlife import Expected, Result, compare
from tests.support.harness import quiet
from tests.support.harness.mounts import COMMAND, start
from tests.support.harness.own_group import own_group
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from tests.support.clients.tools import Argument
    from tests.support.harness.mounts import Process

# To compare is work for a CPU that the watch may need.
_PACE_S = 0.2
_TICK = 1 / os.sysconf("SC_CLK_TCK")
# The clock of another process has its ID in the upper bits: clock_getcpuclockid(3).
_CPUCLOCK_SCHED = 2


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of all processes together: ``pss`` counts what they share once, ``rss`` each time."""

    pss: int
    rss: int


class Told:
    """What a process tells its service manager, message by message, from now to `close`."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("")  # the kernel finds a name
        self.address = "@" + self._socket.getsockname()[1:].decode()
        # Whoever tells waits while nobody listens.
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    @property
    def lines(self) -> list[str]:
        """All assignments (``READY=1``)."""
        return [line for message in self.messages for line in message.split("\n")]

    def close(self) -> None:
        """Hear no more."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while message := self._socket.recv(8192):
            self.messages.append(message.decode())


class Watcher:
    """A running ``buildidfs watch``."""

    def __init__(self, store: Path, process: Process, log: Path, told: Told, code: int = 0) -> None:
        self.store = store
        self.pid = process.pid
        self.told = told
        self._process = process
        self._log = log
        self._code = code

    @property
    def log(self) -> str:
        """What it wrote to its outputs."""
        return self._log.read_text(errors="replace")

    @property
    def events(self) -> list[dict[str, Any]]:
        """What it printed with ``--json``."""
        lines = self.log.split("\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith("{")]

    @property
    def facts(self) -> dict[str, Any]:
        """What it says of itself in the store, two seconds after a change; empty at its start."""
        return next((each.facts for each in present(self.store, "watch")), {})

    def processes(self) -> list[int]:
        """The process IDs of it and of all its descendants."""
        parents = {}
        for entry in os.listdir("/proc"):
            # Processes come and go; some are closed even to root.
            with contextlib.suppress(OSError):
                if entry.isdecimal():
                    parents[int(entry)] = int(_stat(int(entry))[1])
        found = [self.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def cpu_seconds(self) -> float:
        """The processor time all of it has used, with that of children it has waited for.

        The kernel counts the former in nanoseconds, the latter in ticks of 10 ms.
        """
        seconds = 0.0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                seconds += time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
                seconds += sum(int(value) for value in _stat(pid)[13:15]) * _TICK
        return seconds

    def memory(self) -> Memory:
        """What all of it has in memory now."""
        sums = {"Pss": 0, "Rss": 0}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                for name, kilobytes in re.findall(r"^(Pss|Rss): +(\d+) kB", rollup, re.MULTILINE):
                    sums[name] += int(kilobytes) << 10
        return Memory(sums["Pss"], sums["Rss"])

    def captured(self, expected: Expected, patience: float = 30.0) -> Result:
        """Compare when all is in the store, or nothing more came for ``patience`` seconds."""
        result = compare(self.store, expected)
        changed = looked = time.monotonic()

        def settled() -> bool:
            nonlocal result, changed, looked
            assert self._process.poll() is None, f"watch ended: {self.log[-2000:]}"
            now = time.monotonic()
            if now - looked > _PACE_S and not result.complete:
                before, result = result, compare(self.store, expected)
                looked = time.monotonic()
                if result != before:
                    changed = looked
            return result.complete or now - changed > patience

        until(settled, "an end of what is captured", 300)
        return result

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Tell it to stop as a service manager does; fails unless it ends well and soon."""
        if self._process.returncode is None:
            self._process.send_signal(number)
        code = self._process.wait(60)
        assert code == self._code, f"watch ended with {code}: {self.log[-2000:]}"
        assert "Traceback" not in self.log, self.log[-4000:]

    def crash(self) -> None:
        """Kill the process that was started, and none of those that it has started."""
        self._code = -signal.SIGKILL
        self._process.kill()
        self._process.wait(30)

    def kill(self) -> None:
        """Leave no process of it behind."""
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(30)


@contextlib.contextmanager
def followed() -> Iterator[Path | None]:
    """Make the control group that a watch is to follow; None for the whole host."""
    if quiet.has_host() or os.geteuid() != 0:
        yield None
        return
    with own_group() as group:
        yield group


@contextlib.contextmanager
def watching(
    store: Path,
    *options: str,
    command: Sequence[Argument] = tuple(COMMAND),
    code: int = 0,
    is_measured: bool = False,
) -> Iterator[Watcher]:
    """Run ``watch`` on a store, from when it says it is ready; expect that it ends with ``code``.

    It follows the processes of this test, unless the test is marked ``watch``: then, the host.
    With ``is_measured`` its memory is that of a watch that a user starts.
    The log is beside the store. Whatever happens, no process of it outlives the block.
    """
    log = Path(f"{store}.log")
    with (
        followed() as group,
        contextlib.closing(Told()) as told,
        log.open("wb") as output,
    ):
        scope = [] if group is None or "--cgroup" in options else ["--cgroup", os.fspath(group)]
        words = [*command, "--store", store, "watch", *scope, *options]
        environ = {**os.environ, "NOTIFY_SOCKET": told.address}
        process = start(words, output.fileno(), environ, is_new=is_measured)
        watcher = Watcher(store, process, log, told, code)
        try:
            until(lambda: _is_ready(process, watcher), "READY=1 of watch", 60)
            yield watcher
            watcher.stop()
        finally:
            if process.poll() is None:
                watcher.kill()


def _is_ready(process: Process, watcher: Watcher) -> bool:
    code = process.poll()
    assert code is None, f"watch ended with {code}: {watcher.log[-2000:]}"
    return "READY=1" in watcher.told.lines


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (proc(5)): the parent is number 1."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
