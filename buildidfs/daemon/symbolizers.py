# SPDX-License-Identifier: Apache-2.0
"""The programs that read debug information for us, run as if they were somebody else's.

They read files that strangers have made, on behalf of root: so they run as nobody, within limits,
and are given nothing but the files they are asked about, as open descriptors. One that ends, or
does not answer in time, is started again.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

from buildidfs import names
from buildidfs.errors import CapabilityError, UsageError
from buildidfs.formats import symbolized
from buildidfs.linux import confinement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.formats.symbolized import Frame
    from buildidfs.model import BuildId

NAMES: Final = ("llvm-symbolizer", "eu-addr2line")

LIMITS: Final = confinement.Limits(memory=4 << 30, addresses=32 << 30, seconds=3600)

SLOTS: Final = 64
"""How many files a program can be asked about before it is started again."""

ANSWER_S: Final = 60.0
"""How long to wait for an answer: a debug file of gigabytes is read through before the first."""

_ANSWER_BYTES: Final = 4 << 20
_CHILDREN: Final = 16  # of a program that is asked about one file only
_NEWEST_LLVM: Final = 30

_ENDED_WELL: Final = "ended with status 0"

# An address that nothing is at, to see where the answer to the one before ends.
_NOWHERE: Final = b"0xffffffffffffffff"


class Failed(Exception):
    """The program ended, said what cannot be understood, or nothing in time."""


class Program(Protocol):
    """What can be asked for names. A file is known by its slot, see `Slots`."""

    def ask(self, slot: int, address: int) -> list[Frame]:
        """The frames at an address of a file; none if it knows nothing. Raises `Failed`."""

    def close(self) -> None:
        """End; safe to call twice."""


class Slots:
    """Files without names that a program may open, empty until `fill`; a context manager.

    They are in $TMPDIR, and gone when nobody has them open any more. ``directory`` is one for
    eu-addr2line to look for debug files by build ID in, see `name`. Raises `UsageError` where there
    is no room for them.
    """

    def __init__(self, count: int = SLOTS) -> None:
        uid, gid = confinement.unprivileged()
        self.fds: list[int] = []
        self._writable = []
        self._used = 0
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        try:
            self._directory = tempfile.TemporaryDirectory(prefix="buildidfs-")
            self.directory = self._directory.name
            os.chmod(self.directory, 0o711)
            for _ in range(count):
                # Open for as long as the slots are.
                file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
                self._writable.append(file)
                os.fchmod(file.fileno(), 0o400)
                if os.geteuid() == 0:
                    os.fchown(file.fileno(), uid, gid)
                path = f"/proc/self/fd/{file.fileno()}"
                self.fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self.close()
            raise _no_room(error) from error

    @property
    def left(self) -> int:
        """How many are empty."""
        return len(self.fds) - self._used

    def fill(self, write: Callable[[int], None]) -> int:
        """Have ``write`` write a file; its slot. Ask first whether there is one left."""
        slot = self._used
        self._used += 1
        try:
            write(self._writable[slot].fileno())
        except OSError as error:
            raise _no_room(error) from error
        return slot

    def name(self, slot: int, build_id: BuildId) -> None:
        """Let a file be found by its build ID. Raises `UsageError`."""
        first, rest = names.split(build_id)
        place = os.path.join(os.fsencode(self.directory), b".build-id", first)
        try:
            os.makedirs(place, 0o711, exist_ok=True)
            link = os.path.join(place, rest + names.DEBUG_SUFFIX)
            with contextlib.suppress(FileExistsError):
                os.symlink(b"/proc/self/fd/%d" % self.fds[slot], link)
        except OSError as error:
            raise _no_room(error) from error

    def close(self) -> None:
        """Let go of the files; safe to call twice."""
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
        for file in self._writable:
            file.close()
        for fd in self.fds:
            os.close(fd)
        self._writable, self.fds = [], []

    def __enter__(self) -> Slots:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _no_room(error: OSError) -> UsageError:
    place = tempfile.gettempdir()
    return UsageError(
        f"no temporary file for the symbolizer in {place}: {error.strerror};"
        " set TMPDIR to a directory with room"
    )


def find(wanted: str | None = None) -> tuple[str, str]:
    """Name and path of the program to ask, ``wanted`` or the first of `NAMES` that is installed.

    Raises `UsageError` with the remedy if there is none.
    """
    for name in NAMES if wanted is None else (wanted,):
        spellings = [name]
        if name == "llvm-symbolizer":
            spellings += _versions(name, 13)
        path = _installed(spellings)
        if path is not None:
            return name, path
    missing = f"neither {' nor '.join(NAMES)} is" if wanted is None else f"{wanted} is not"
    raise UsageError(f"{missing} installed; apt-get install llvm (or elfutils)")


def find_dumper() -> str | None:
    """Path of an llvm-dwarfdump that lists sources, which that of LLVM 15 was the first to do.

    One with its version in its name comes first: of the other that is not known.
    """
    return _installed([*_versions("llvm-dwarfdump", 15), "llvm-dwarfdump"])


def _versions(name: str, oldest: int) -> list[str]:
    """What distributions call the program of each LLVM, the newest first."""
    return [f"{name}-{version}" for version in range(_NEWEST_LLVM, oldest - 1, -1)]


def _installed(spellings: Iterable[str]) -> str | None:
    return next(filter(None, map(shutil.which, spellings)), None)


def start(name: str, path: str, slots: Slots) -> Program:
    """Start a program that `find` has found. Raises `CapabilityError`."""
    return Llvm(path, slots) if name == "llvm-symbolizer" else Elfutils(path, slots)


class Llvm:
    """llvm-symbolizer of LLVM 13 or newer: one process for all files."""

    def __init__(self, path: str, slots: Slots) -> None:
        self._slots = slots
        self._child = Child([path, "--output-style=JSON"], slots)

    def ask(self, slot: int, address: int) -> list[Frame]:
        """The frames at an address."""
        path = b"/proc/self/fd/%d" % self._slots.fds[slot]
        self._child.write(b'"%s" 0x%x\n' % (path, address))
        return symbolized.of_llvm(self._child.line(time.monotonic() + ANSWER_S))

    def close(self) -> None:
        """End."""
        self._child.close()


class Elfutils:
    """eu-addr2line: a process for each file."""

    def __init__(self, path: str, slots: Slots) -> None:
        self._path = path
        self._slots = slots
        self._children: OrderedDict[int, Child] = OrderedDict()

    def ask(self, slot: int, address: int) -> list[Frame]:
        """The frames at an address."""
        child = self._children.get(slot)
        if child is None:
            file = f"--executable=/proc/self/fd/{self._slots.fds[slot]}"
            options = ["--functions", "--inlines", "--demangle", "--addresses", "--absolute"]
            options.append(f"--debuginfo-path={self._slots.directory}")
            child = self._children[slot] = Child([self._path, file, *options], self._slots)
            if len(self._children) > _CHILDREN:
                self._children.popitem(last=False)[1].close()
        self._children.move_to_end(slot)
        child.write(b"0x%x\n%s\n" % (address, _NOWHERE))
        deadline = time.monotonic() + ANSWER_S
        lines = []
        while (line := child.line(deadline)) != _NOWHERE:
            lines.append(line)
            if len(lines) > 2 * symbolized.MOST_FRAMES + 1:
                raise Failed("its answer does not end")
        child.line(deadline), child.line(deadline)  # what it knows of nowhere
        return symbolized.of_elfutils(lines[1:])

    def close(self) -> None:
        """End all of them."""
        while self._children:
            self._children.popitem()[1].close()


class Child:
    """A confined process that answers lines with lines, or just says some."""

    def __init__(self, argv: list[str], slots: Slots) -> None:
        """Raises `CapabilityError`, `UsageError`."""
        parent = os.getpid()
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                bufsize=0,
                env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
                pass_fds=slots.fds,
                preexec_fn=lambda: confinement.confine(parent, LIMITS),
            )
        except subprocess.SubprocessError as error:
            raise CapabilityError(
                f"cannot run {argv[0]} as another user; needs CAP_SETUID and CAP_SETGID: run it"
                " as root with all capabilities, or as an ordinary user"
            ) from error
        except OSError as error:
            user = confinement.unprivileged()[0]
            raise UsageError(f"cannot run {argv[0]} as user {user}: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in = self._process.stdin
        self._out = self._process.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._waiting = b""

    def write(self, data: bytes) -> None:
        """Ask. Raises `Failed`."""
        try:
            self._in.write(data)
        except OSError as error:
            raise Failed(self._end()) from error

    def line(self, deadline: float) -> bytes:
        """The next line of the answer. Raises `Failed`."""
        while True:
            line, newline, rest = self._waiting.partition(b"\n")
            if newline:
                self._waiting = rest
                return line
            data = self._read(deadline)
            if not data:
                raise Failed(self._end())
            self._waiting += data

    def lines(self, deadline: float) -> Iterator[bytes]:
        """All that it says, until it ends. Raises `Failed`, also where it does not end well."""
        while data := self._read(deadline):
            *whole, self._waiting = (self._waiting + data).split(b"\n")
            yield from whole
        end = self._end()
        if end != _ENDED_WELL:
            raise Failed(end)

    def _read(self, deadline: float) -> bytes:
        """More of what it says; nothing at the end. Raises `Failed`."""
        if len(self._waiting) > _ANSWER_BYTES:
            raise Failed("its answer does not end")
        left = deadline - time.monotonic()
        if left <= 0 or not self._poll.poll(left * 1000):
            raise Failed(f"no answer for {ANSWER_S:g} seconds")
        return os.read(self._out, 1 << 16)

    def _end(self) -> str:
        """How it ended, in words."""
        try:
            status = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return "it has closed its output"
        return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"

    def close(self) -> None:
        """End it; safe to call twice."""
        self._process.kill()
        with self._process:
            pass
