# SPDX-License-Identifier: Apache-2.0
"""buildidfs as its users run it: a store directory, the command line, a mount.

Also the broom: tests that were killed leave mounts, loop devices and directories behind, and the
next run must neither trip over them nor touch those of a run that is still going. So everything
lives below one directory per run that carries the process ID of its owner.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from tests.support.clients.tools import Argument, Result, run, tool
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from tests.support.harness.warm import Started, Warm

    Process = subprocess.Popen[bytes] | Started

_PROGRAM = [sys.executable, "-m", "buildidfs"]

COMMAND: list[str] = list(_PROGRAM)
"""What runs the program; a list so that it can be another program of the same interface."""

MEMORY = Path("/dev/shm")
"""Files in it are in memory."""

_PREFIX = "buildidfs-test-"
_PATIENCE_S = 60.0
_COPIES_S = 20.0


class BuildIdFs:
    """The program, on one store. The store comes into being with the first scan."""

    warm: ClassVar[Warm | None] = None
    """Runs commands without the start of Python, unless their start matters."""

    def __init__(
        self, directory: Path, store: Path | None = None, config: Path | None = None
    ) -> None:
        """Keep the mount point in ``directory``, and the store too unless it is given.

        ``config`` is the file of settings.
        """
        self.store = store or directory / "store"
        self.config = config
        self._options = [] if config is None else ["--config", str(config)]
        self.mountpoint = directory / "mnt"
        self._log = directory / "mount.log"

    def __call__(
        self, *arguments: Argument, check: bool = True, env: Mapping[str, str] | None = None
    ) -> Result:
        """Run one command to its end; with ``check``, any exit code but 0 fails the test."""
        argv = [*COMMAND, *self._options, "--store", self.store, *arguments]
        words = tuple(os.fsdecode(word) for word in argv)
        own = _own_words(words)
        if self.warm is None or env is not None or own is None or not self.warm.suits(own):
            return run(argv, check=check, env=env, cwd=_repository())
        code, out, err = self.warm.run(own, _PATIENCE_S)
        result = Result(words, -1 if code is None else code, _text(out), _text(err))
        if code is None:
            pytest.fail(f"not done after {_PATIENCE_S} s: {result}")
        if check and code != 0:
            pytest.fail(str(result))
        return result

    def scan(self, *pids: int) -> Result:
        """``scan proc`` of these processes only."""
        options = [word for pid in pids for word in ("--pid", str(pid))]
        return self("scan", "proc", *options)

    @contextlib.contextmanager
    def mounted(self, *options: str, under: Sequence[Argument] = ()) -> Iterator[Path]:
        """Mount the store in the foreground of a process of ours; unmount, and expect exit 0.

        ``options`` are those of ``mount`` (``-o allow_other``), ``under`` is a command that runs
        the command at its end. Whatever happens, neither mount nor process outlives the block.
        """
        self.mountpoint.mkdir(exist_ok=True)
        words: Sequence[Argument] = [
            *under, *COMMAND, *self._options, "--store", self.store, "mount", self.mountpoint,
            "--foreground", *options,
        ]  # fmt: skip
        with self._log.open("wb") as log:
            server = start(words, log.fileno())
        try:
            until(lambda: self._is_up(server), f"a mount at {self.mountpoint}")
            yield self.mountpoint
            self("unmount", self.mountpoint)
            _await_end(server)
            log_text = self.log()
            assert server.returncode == 0, f"mount ended with {server.returncode}: {log_text}"
            assert "Traceback" not in log_text, log_text
        finally:
            if is_mountpoint(self.mountpoint):
                run([tool("umount"), "-l", self.mountpoint])
            if server.poll() is None:
                server.kill()
            server.wait(30)

    def log(self) -> str:
        """What the mount process wrote to its outputs."""
        return self._log.read_text(errors="replace")

    def _is_up(self, server: Process) -> bool:
        code = server.poll()
        assert code is None, f"mount ended with {code}: {self.log()}"
        return is_mountpoint(self.mountpoint)


def start(
    argv: Sequence[Argument],
    output: int,
    env: Mapping[str, str] = os.environ,
    *,
    is_new: bool = False,
) -> Process:
    """Start a command without input, which writes to a descriptor.

    A command of the program is forked from the warm server if there is one, unless ``is_new``.
    A forked process has more modules in memory than one that a user starts.
    """
    words = [os.fsdecode(word) for word in argv]
    warm, own = BuildIdFs.warm, _own_words(words)
    if warm is not None and own is not None and not is_new and warm.can_start(env):
        return warm.start(own, output, output, env)
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=_repository(), env=env
    )


def _await_end(server: Process) -> None:
    """Wait until a mount process ends after the unmount.

    A mount namespace that somebody made meanwhile has a copy of the mount, for which the process
    goes on. Some containers of other tests last for minutes.
    """
    try:
        server.wait(_COPIES_S)
    except subprocess.TimeoutExpired:
        server.terminate()
        server.wait(_PATIENCE_S)


def _own_words(words: Sequence[str]) -> Sequence[str] | None:
    """The words after those that run the program; None if another command runs it."""
    count = len(_PROGRAM)
    return words[count:] if list(words[:count]) == _PROGRAM else None


def _text(output: bytes) -> str:
    """As `subprocess` gives it."""
    return output.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")


def _repository() -> Path:
    """Where ``python -m buildidfs`` finds the package, installed or not."""
    return Path(__file__).resolve().parents[3]


def mount_points() -> list[str]:
    """The mount points of this mount namespace, in the order they were mounted."""
    points = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            point = line.split(" ")[4]
            points.append(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point))
    return points


def is_mountpoint(path: Path) -> bool:
    """Whether something is mounted there; also true of a dead FUSE mount, and never blocks."""
    return str(path) in mount_points()


def loop_devices(below: Path) -> list[str]:
    """The loop devices backed by files (deleted or not) below a directory."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        # the device may be detached between the listing and the reading
        with contextlib.suppress(OSError):
            if backing.read_text().startswith(f"{below}/"):
                found.append(f"/dev/{backing.parts[3]}")
    return found


def scratch_directory(place: Path | None = None) -> Path:
    """A new directory for this run, which `sweep` will clear once this process is gone.

    It is in that of temporary files, or in ``place``, which is `MEMORY`.
    """
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))


def leftovers(directory: Path) -> list[str]:
    """The mount points and loop devices below a directory, last mounted first."""
    below = [point for point in reversed(mount_points()) if point.startswith(f"{directory}/")]
    return below + loop_devices(directory)


def clear(directory: Path) -> None:
    """Unmount, detach and delete everything below a directory made by `scratch_directory`."""
    for left in leftovers(directory):
        if left.startswith("/dev/"):
            run([tool("losetup"), "-d", left])
        else:
            run([tool("umount"), "-l", left])
    shutil.rmtree(directory, ignore_errors=True)


def sweep() -> None:
    """Clear what test runs that no longer exist have left on this machine."""
    places = [Path(tempfile.gettempdir()), MEMORY]
    for path in (path for place in places for path in place.glob(f"{_PREFIX}*")):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            clear(path)
