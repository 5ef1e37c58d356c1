# SPDX-License-Identifier: Apache-2.0
"""Run a program on a terminal of a given size, and read all that it writes there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class Shown(NamedTuple):
    """The exit status of a program, and the bytes that its terminal got."""

    rc: int
    raw: bytes

    @property
    def lines(self) -> list[str]:
        """The lines of the terminal, as if each escape sequence were ignored."""
        return self.raw.decode().replace("\r\n", "\n").splitlines()


class Terminal:
    """A program whose standard streams are a terminal. Reads as the program writes."""

    def __init__(
        self, argv: Sequence[object], *, columns: int = 80, rows: int = 24,
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
        self.process = subprocess.Popen(
            [os.fsencode(str(each)) for each in argv],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env={**inherited, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **(env or {})},
            start_new_session=True,
            preexec_fn=_log_in,
        )
        os.close(follower)
        self.raw = b""

    def read_until(self, text: bytes) -> None:
        """Read until the program has written a text. Raises `AssertionError` if it ends before."""
        while text not in self.raw:
            assert self._read(), self.raw

    def read_more(self, text: bytes, times: int) -> None:
        """Read until the program has written a text so many times more."""
        wanted = self.raw.count(text) + times
        while self.raw.count(text) < wanted:
            assert self._read(), self.raw

    def type(self, text: bytes) -> None:
        """Type on the keyboard; 3 is Ctrl-C."""
        os.write(self._leader, text)

    def end(self, timeout: float = 60) -> Shown:
        """Read the rest, and wait for the end of the program."""
        while self._read():
            pass
        return Shown(self.process.wait(timeout), self.raw)

    def close(self) -> None:
        """Kill the program if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._leader)

    def _read(self) -> bool:
        try:
            chunk = os.read(self._leader, 65536)
        except OSError:  # EIO: no process has the terminal any more
            return False
        self.raw += chunk
        return bool(chunk)


def _log_in() -> None:
    """Be as a program that is started on a terminal: it has one, and Ctrl-C ends it.

    What a shell starts in the background ignores SIGINT, and so do its children: tests, too.
    """
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def terminal(
    *argv: object, columns: int = 80, env: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """A program on a terminal, killed at the end of the block."""
    running = Terminal(argv, columns=columns, env=env)
    try:
        yield running
    finally:
        running.close()


def on_terminal(
    *argv: object, columns: int = 80, env: Mapping[str, str] | None = None
) -> Shown:  # fmt: skip
    """Run a program on a terminal to its end."""
    with terminal(*argv, columns=columns, env=env) as running:
        return running.end()
