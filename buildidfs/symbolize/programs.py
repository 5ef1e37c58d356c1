# SPDX-License-Identifier: Apache-2.0
"""The programs that read debug information for us, run as an unprivileged user.

They read files of strangers on behalf of root. So they run without privileges, within limits, and
get only the queried files, as open descriptors. A program that ends, or does not answer in time, is
started again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import select
import shutil
import subprocess
import tempfile
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

from buildidfs import names
from buildidfs.errors import CapabilityError, UsageError
from buildidfs.formats import symbolizer_output
from buildidfs.linux import sandbox
from buildidfs.log import log_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.formats.symbolizer_output import Frame, Symbol
    from buildidfs.model import BuildId

log = logging.getLogger(__name__)

NAMES: Final = ("llvm-symbolizer", "eu-addr2line")

LIMITS: Final = sandbox.SandboxLimits(memory=4 << 30, addresses=32 << 30, seconds=3600)

SLOTS: Final = 64
"""The number of files that a program can be asked about before it is started again."""

ANSWER_S: Final = 60.0
"""Seconds to wait for an answer: before its first answer, a program may read a debug file of
gigabytes.
"""

_ANSWER_BYTES: Final = 4 << 20
_CHILDREN: Final = 16  # of a program for a single file
_SPARE: Final = 8  # slots, of two descriptors each, that are given up if descriptors run out
_FEWEST: Final = 4

_MOST_BYTES: Final = 8 << 30
_MOST_BYTES_OF_MEMORY: Final = 1 << 30
_NEWEST_LLVM: Final = 40
_OLDEST_SYMBOLIZER: Final = 13
_VERSION_S: Final = 10.0

_ENDED_WELL: Final = "ended with status 0"

_SYSTEM: Final = (
    "/usr", "/bin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store", "/gnu/store",
    "/etc/ld.so.cache", "/dev/null", "/dev/urandom", "/dev/zero",
)  # fmt: skip
"""Directories of programs and their libraries: all that a symbolizer may read beside its files."""

# An unused address: its answer marks the end of the answer before.
_NOWHERE: Final = b"0xffffffffffffffff"


class SymbolizerFailed(Exception):
    """The program ended, gave a malformed answer, or gave none in time."""


class RunningSymbolizer(Protocol):
    """A running symbolizer. A file is known by its slot, see `Slots`."""

    def ask(self, slot: int, address: int) -> list[Frame]:
        """Return the frames at an address of a file; none if the program knows none. Raises
        `SymbolizerFailed`.
        """

    def symbol(self, slot: int, address: int) -> Symbol | None:
        """Return the symbol that contains an address of a file; None if unknown. Raises
        `SymbolizerFailed`.
        """

    def close(self) -> None:
        """End the program; safe to call twice."""


class Slots:
    """Files that a program may open, empty until `fill`; a context manager.

    The files are in $TMPDIR, or else in memory, and vanish with the slots. They have no names if
    the program can open them through /proc. ``directory`` is the directory in which programs look
    for debug files by build ID, see `name`; None if there is no room for it. Raises `UsageError` if
    there is no room.
    """

    def __init__(self, count: int = SLOTS) -> None:
        self._paths: list[bytes] = []
        self._writable: list[int] = []
        self._used = 0
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self.directory: str | None = None
        self.fds: list[int] = []
        """The descriptors that the program needs; empty if it opens files by name."""
        self._nameless = os.path.exists("/proc/self/fd/0") or os.path.exists("/proc/self/fd/1")
        # The files are readable by all: the program's user has no other rights. A file without a
        # name, or with a name that cannot be guessed, is reachable for us and the program only.
        self._mode = 0o444 if sandbox.changes_user() else 0o400
        try:
            self._make_directory()
            self._make_files(count)
        except OSError as error:
            self.close()
            raise _no_room(error) from error

    def _make_directory(self) -> None:
        try:
            self._directory = tempfile.TemporaryDirectory(prefix="buildidfs-")
        except OSError:
            if not self._nameless:
                raise
            return
        self.directory = self._directory.name
        os.chmod(self.directory, 0o711)

    def _make_files(self, count: int) -> None:
        try:
            while len(self._writable) < count:
                self._make_file()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or len(self._writable) < _SPARE:
                raise
            # Leaves some for pipes, and for reading the copied files.
            for _ in range(min(_SPARE, len(self._writable) - _FEWEST)):
                self._drop()

    def _make_file(self) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC
        if not self._nameless:
            assert self.directory is not None
            path = os.path.join(os.fsencode(self.directory), secrets.token_hex(16).encode())
            self._writable.append(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600))
            os.fchmod(self._writable[-1], self._mode)
            self._paths.append(path)
            return
        if self.directory is not None:
            with tempfile.TemporaryFile(buffering=0, dir=self.directory) as file:
                self._writable.append(os.dup(file.fileno()))
        else:
            self._writable.append(os.memfd_create("buildidfs-symbolizer"))
        os.fchmod(self._writable[-1], self._mode)
        self.fds.append(os.open(f"/proc/self/fd/{self._writable[-1]}", os.O_RDONLY | os.O_CLOEXEC))
        self._paths.append(b"/proc/self/fd/%d" % self.fds[-1])

    def _drop(self) -> None:
        os.close(self._writable.pop())
        if self._nameless and len(self.fds) > len(self._writable):
            os.close(self.fds.pop())
        del self._paths[len(self._writable) :]

    @property
    def most_bytes(self) -> int:
        """Return the bytes that all slots may have together."""
        return _MOST_BYTES if self.directory is not None else _MOST_BYTES_OF_MEMORY

    @property
    def count(self) -> int:
        """Return the number of slots."""
        return len(self._writable)

    @property
    def left(self) -> int:
        """Return the number of empty slots."""
        return len(self._writable) - self._used

    def path(self, slot: int) -> bytes:
        """Return the path at which the program finds a file."""
        return self._paths[slot]

    def fill(self, size: int, write: Callable[[int], None]) -> int:
        """Let ``write`` write a file of ``size`` bytes; return its slot. Check `left` first.

        Raises `UsageError`.
        """
        slot = self._used
        self._used += 1
        try:
            if size > self.most_bytes:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            write(self._writable[slot])
        except OSError as error:
            raise _no_room(error) from error
        return slot

    def name(self, slot: int, build_id: BuildId) -> None:
        """Make a file available by its build ID. Raises `UsageError`."""
        if self.directory is None:
            return
        first, rest = names.split(build_id)
        place = os.path.join(os.fsencode(self.directory), b".build-id", first)
        link = os.path.join(place, rest + names.DEBUG_SUFFIX)
        try:
            _make_searchable(place)
            with contextlib.suppress(FileExistsError):
                os.symlink(self._paths[slot], link)
        except OSError as error:
            raise _no_room(error) from error

    def close(self) -> None:
        """Close the files; safe to call twice."""
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
        for fd in (*self._writable, *self.fds):
            os.close(fd)
        self._writable, self.fds, self._paths = [], [], []

    def __enter__(self) -> Slots:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _make_searchable(place: bytes) -> None:
    """Make a directory and its parent that all may search, whatever the umask is."""
    for path in (os.path.dirname(place), place):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            os.chmod(path, 0o711)


def _no_room(error: OSError) -> UsageError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return UsageError(
            f"no temporary file for the symbolizer: {error.strerror}; raise ulimit -n"
        )
    return UsageError(
        f"no temporary file for the symbolizer in {_place()}: {error.strerror};"
        " set TMPDIR to a directory with room"
    )


def _place() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return os.environ.get("TMPDIR", "/tmp")  # the directory is not writable


def find(wanted: str | None = None) -> tuple[str, str]:
    """Return name and path of the program to use.

    ``wanted`` is one of `NAMES`, perhaps with a version (``llvm-symbolizer-19``); without it, the
    first installed program is used, in its newest version. Raises `UsageError` with the remedy if
    there is none.
    """
    for name in NAMES:
        if wanted is None or wanted == name:
            path = _newest(name, _OLDEST_SYMBOLIZER) if name == NAMES[0] else _installed(name)
        elif re.fullmatch(rf"{name}-\d+", wanted):
            path = _installed(wanted)
        else:
            continue
        if path is not None:
            return name, path
    if wanted is None:
        missing, package = f"neither {' nor '.join(NAMES)} is", "llvm (or elfutils)"
    else:
        missing = f"{wanted} is not"
        is_llvm = wanted.startswith(NAMES[0])
        package = wanted.replace("-symbolizer", "") if is_llvm else "elfutils"
    raise UsageError(f"{missing} installed; apt-get install {package}")


def find_disassembler() -> str | None:
    """Return the path of the newest llvm-objdump, which reads the code of every machine."""
    return _newest("llvm-objdump", _OLDEST_SYMBOLIZER)


def _newest(name: str, oldest: int) -> str | None:
    """Return the path of the newest program of a name; ``oldest`` is the first useful version.

    Distributions append the version to the name, and give one of them the plain name.
    """
    found = [
        (version, path)
        for version in range(_NEWEST_LLVM, oldest - 1, -1)
        if (path := _installed(f"{name}-{version}")) is not None
    ]
    plain = _installed(name)
    version = 0 if plain is None else _version(plain)
    if plain is not None and (version >= oldest or not version):
        found.append((version, plain))
    return max(found)[1] if found else None


def _version(path: str) -> int:
    """Return the version of LLVM that a program belongs to; 0 if unknown."""
    found = re.search(r"/llvm-?(\d+)(?:[./]|\Z)", os.path.realpath(path))
    if found is None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            version_text = subprocess.run(
                [path, "--version"],
                stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_VERSION_S,
            ).stdout  # fmt: skip
            found = re.search(r"LLVM version (\d{1,4})", version_text.decode("utf-8", "replace"))
    return 0 if found is None else int(found[1])


def _installed(name: str) -> str | None:
    """Return the path of a program in PATH; directories relative to the working directory are
    skipped.
    """
    places = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return shutil.which(name, path=os.pathsep.join(filter(os.path.isabs, places)) or os.sep)


def start(name: str, path: str, slots: Slots) -> RunningSymbolizer:
    """Start a program that `find` returned. Raises `CapabilityError`."""
    return Llvm(path, slots) if name == "llvm-symbolizer" else Elfutils(path, slots)


class Llvm:
    """llvm-symbolizer of LLVM 13 or newer: one process for all files."""

    def __init__(self, path: str, slots: Slots) -> None:
        self._slots = slots
        self._child = SymbolizerProcess([path, "--output-style=JSON"], slots)

    def ask(self, slot: int, address: int) -> list[Frame]:
        """Return the frames at an address."""
        self._child.write(b'"%s" 0x%x\n' % (self._slots.path(slot), address))
        return symbolizer_output.of_llvm(self._child.line(time.monotonic() + ANSWER_S))

    def symbol(self, slot: int, address: int) -> Symbol | None:
        """Return the symbol that contains an address. The query asks for data, but the answer
        includes functions.
        """
        self._child.write(b'DATA "%s" 0x%x\n' % (self._slots.path(slot), address))
        return symbolizer_output.symbol_of_llvm(self._child.line(time.monotonic() + ANSWER_S))

    def close(self) -> None:
        """End the process."""
        self._child.close()


class Elfutils:
    """eu-addr2line: a process for each file."""

    def __init__(self, path: str, slots: Slots) -> None:
        self._path = path
        self._slots = slots
        self._children: OrderedDict[int, SymbolizerProcess] = OrderedDict()

    def ask(self, slot: int, address: int) -> list[Frame]:
        """Return the frames at an address."""
        child = self._children.get(slot)
        if child is None:
            while len(self._children) >= min(_CHILDREN, self._slots.count):
                self._children.popitem(last=False)[1].close()
            file = f"--executable={os.fsdecode(self._slots.path(slot))}"
            options = ["--functions", "--inlines", "--demangle", "--addresses", "--absolute"]
            if self._slots.directory is not None:
                options.append(f"--debuginfo-path={self._slots.directory}")
            child = self._children[slot] = SymbolizerProcess(
                [self._path, file, *options], self._slots
            )
        self._children.move_to_end(slot)
        child.write(b"0x%x\n%s\n" % (address, _NOWHERE))
        deadline = time.monotonic() + ANSWER_S
        lines = []
        while (line := child.line(deadline)) != _NOWHERE:
            lines.append(line)
            if len(lines) > 2 * symbolizer_output.MOST_FRAMES + 1:
                raise SymbolizerFailed("its answer does not end")
        child.line(deadline), child.line(deadline)  # the rest of the answer for no address
        return symbolizer_output.of_elfutils(lines[1:])

    def symbol(self, slot: int, address: int) -> Symbol | None:
        """Return None: the program does not print where a symbol begins."""
        return None

    def close(self) -> None:
        """End the processes of all files."""
        while self._children:
            self._children.popitem()[1].close()


class SymbolizerProcess:
    """A confined symbolizer, which answers lines with lines, or writes lines without questions."""

    def __init__(self, argv: list[str], slots: Slots) -> None:
        """Raises `CapabilityError`, `UsageError`."""
        try:
            self._process, notes = sandbox.start(
                argv,
                LIMITS,
                env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
                pass_fds=slots.fds,
                reads=_readable(argv[0], slots),
            )
        except sandbox.NotConfined as error:
            raise CapabilityError(f"{argv[0]} was not started: {error}") from error
        except sandbox.NotStarted as error:
            raise UsageError(str(error)) from error
        for note in notes:
            log_once(log, logging.WARNING, f"{os.path.basename(argv[0])} {note}")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in = self._process.stdin
        self._out = self._process.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._waiting = b""

    def write(self, data: bytes) -> None:
        """Send a question. Raises `SymbolizerFailed`."""
        try:
            self._in.write(data)
        except OSError as error:
            raise SymbolizerFailed(self._end()) from error

    def line(self, deadline: float) -> bytes:
        """Return the next line of the answer. Raises `SymbolizerFailed`."""
        while True:
            line, newline, rest = self._waiting.partition(b"\n")
            if newline:
                self._waiting = rest
                return line
            data = self._read(deadline)
            if not data:
                raise SymbolizerFailed(self._end())
            self._waiting += data

    def lines(self, deadline: float) -> Iterator[bytes]:
        """Yield all lines of the program until it ends. Raises `SymbolizerFailed`, also for a bad
        exit.
        """
        while data := self._read(deadline):
            *whole, self._waiting = (self._waiting + data).split(b"\n")
            yield from whole
        end = self._end()
        if end != _ENDED_WELL:
            raise SymbolizerFailed(end)

    def _read(self, deadline: float) -> bytes:
        """Return the next part of the output; empty at the end. Raises `SymbolizerFailed`."""
        if len(self._waiting) > _ANSWER_BYTES:
            raise SymbolizerFailed("its answer does not end")
        left = deadline - time.monotonic()
        if left <= 0 or not self._poll.poll(left * 1000):
            raise SymbolizerFailed(f"no answer for {ANSWER_S:g} seconds")
        return os.read(self._out, 1 << 16)

    def _end(self) -> str:
        """Return a clause on how the program ended."""
        status = self._process.wait(1)
        if status is None:
            return "it has closed its output"
        return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"

    def close(self) -> None:
        """End it; safe to call twice."""
        self._process.end(1)


def _readable(path: str, slots: Slots) -> list[str]:
    """Return the files and directories that a program may read."""
    home = os.path.dirname(os.path.dirname(os.path.realpath(path)))
    own = [home] if home != os.sep else []
    return [*_SYSTEM, *own, *([slots.directory] if slots.directory is not None else [])]
