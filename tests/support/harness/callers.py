# SPDX-License-Identifier: Apache-2.0
"""Other users, who try to read files: processes that have become them for good.

And the access control lists that say more of users than a mode can.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

ACL_OWNER, ACL_USER, ACL_OWNING_GROUP, ACL_GROUP, ACL_MASK, ACL_OTHER = 1, 2, 4, 8, 16, 32
_UNNAMED = 0xFFFFFFFF


class Who(NamedTuple):
    """Somebody by numbers, for which there need be no account."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


@dataclasses.dataclass
class Walked:
    """What somebody finds: ``told`` are names, targets of links, values of extended attributes and
    the content of what is no ELF file, ``read`` the SHA-256 of every file that they can read.
    """

    told: set[bytes] = dataclasses.field(default_factory=set)
    read: set[str] = dataclasses.field(default_factory=set)


class Caller:
    """A process that is somebody; see `calling`."""

    def __init__(self, who: Who, pid: int, asks: int, answers: int) -> None:
        self.who = who
        self.pid = pid
        self._asks = asks
        self._answers = os.fdopen(answers, "rb")

    def reads(self, path: str | bytes | os.PathLike[str]) -> int:
        """0 if they can open and read a file, else the errno they get."""
        return self._ask(b"r", path)

    def lists(self, path: str | bytes | os.PathLike[str]) -> set[str]:
        """The names that they get of a directory. Raises OSError as they would get it."""
        number = self._ask(b"l", path)
        if number:
            raise OSError(number, os.strerror(number), os.fsdecode(path))
        return {os.fsdecode(self._line()) for _ in range(int(self._line()))}

    def is_told(self, path: str | bytes | os.PathLike[str], name: str) -> int:
        """0 if they can read an extended attribute of a file, else the errno they get."""
        return self._ask(b"x", os.fsencode(path) + b"\0" + name.encode())

    def walks(self, path: str | bytes | os.PathLike[str]) -> Walked:
        """All that they find at or below a path, which does not lead out of it."""
        found = Walked()
        number = self._ask(b"w", path)
        assert not number, os.strerror(number)
        while (line := self._line()) != b"\0":
            what, _, rest = line.partition(b" ")
            if what == b"told":
                found.told.add(rest)
            else:
                found.read.add(rest.decode())
        return found

    def _ask(self, what: bytes, path: str | bytes | os.PathLike[str]) -> int:
        os.write(self._asks, what + os.fsencode(path).hex().encode() + b"\n")
        return int(self._line())

    def _line(self) -> bytes:
        line = self._answers.readline()
        assert line, f"{self.who} is gone"
        return bytes.fromhex(line[1:].decode()) if line.startswith(b"x") else line


@contextlib.contextmanager
def calling(who: Who) -> Iterator[Caller]:
    """Have a process that is ``who``. Needs root, and ends with the block."""
    ask_read, ask_write = os.pipe()
    answer_read, answer_write = os.pipe()
    pid = os.fork()
    if not pid:
        # Whatever happens here must not go on as a second run of the tests.
        try:
            os.close(ask_write)
            os.close(answer_read)
            _become(who)
            os.write(answer_write, b"0\n")
            _serve(ask_read, answer_write)
        finally:
            os._exit(0)
    os.close(ask_read)
    os.close(answer_write)
    caller = Caller(who, pid, ask_write, answer_read)
    try:
        assert caller._line() == b"0\n"
        yield caller
    finally:
        os.close(ask_write)
        caller._answers.close()
        os.waitpid(pid, 0)


@contextlib.contextmanager
def calling_all(everybody: Iterable[Who]) -> Iterator[list[Caller]]:
    """Have a process for each."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(calling(who)) for who in everybody]


def _become(who: Who) -> None:
    os.setgroups(who.groups)
    os.setresgid(who.gid, who.gid, who.gid)
    os.setresuid(who.uid, who.uid, who.uid)


def _serve(asks: int, answers: int) -> None:
    with os.fdopen(asks, "rb") as lines:
        for line in lines:
            path = bytes.fromhex(line[1:].decode())
            answer = b"0\n"
            try:
                if line.startswith(b"r"):
                    fd = os.open(path, os.O_RDONLY)
                    os.read(fd, 1)
                    os.close(fd)
                elif line.startswith(b"w"):
                    shown = b"".join(b"x" + each.hex().encode() + b"\n" for each in _walk(path))
                    answer += shown + b"x00\n"
                elif line.startswith(b"x"):
                    os.getxattr(*path.split(b"\0"))
                else:
                    names = os.listdir(path)
                    shown = b"".join(b"x" + name.hex().encode() + b"\n" for name in names)
                    answer += b"%d\n" % len(names) + shown
            except OSError as error:
                answer = b"%d\n" % (error.errno or -1)
            while answer:
                answer = answer[os.write(answers, answer) :]


def _walk(top: bytes) -> Iterator[bytes]:
    """What is to be found below a directory, as `Caller.walks` takes it.

    It goes from descriptor to descriptor: of a filesystem that the kernel remembers no name of,
    each path is looked up from its first name on, again and again.
    """
    for directory, directories, files, place in os.fwalk(top):
        for name in (*directories, *files):
            yield b"told " + os.path.join(directory, name)[len(top) :]
            with contextlib.suppress(OSError):
                yield from _told_of(name, place)


def _told_of(name: bytes, place: int) -> Iterator[bytes]:
    """What a file tells, and a link or directory, in a directory that is open."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=place)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISLNK(mode):
            yield b"told " + os.readlink(b"", dir_fd=fd)
            return
        path = b"/proc/self/fd/%d" % fd
        for attribute in os.listxattr(path):
            yield b"told " + os.getxattr(path, attribute)
        if stat.S_ISREG(mode):
            with open(path, "rb") as file:
                data = file.read()
            yield b"read " + hashlib.sha256(data).hexdigest().encode()
            if not data.startswith(b"\x7fELF"):
                yield b"told " + data
    finally:
        os.close(fd)


def acl(entries: Sequence[tuple[int, int, int]]) -> bytes:
    """The value of system.posix_acl_access for (kind, rights, ID of a named user or group)."""
    return struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", kind, rights, number if kind in (ACL_USER, ACL_GROUP) else _UNNAMED)
        for kind, rights, number in entries
    )


def set_acl(
    path: str | bytes | os.PathLike[str],
    mode: int,
    named: Sequence[tuple[int, int, int]],
    mask: int = 7,
) -> None:
    """Give a file a list: ``mode`` for owner, owning group and others, and the named entries.

    Raises OSError where the filesystem has no such lists.
    """
    entries = [
        (ACL_OWNER, mode >> 6 & 7, 0),
        *[entry for entry in named if entry[0] == ACL_USER],
        (ACL_OWNING_GROUP, mode >> 3 & 7, 0),
        *[entry for entry in named if entry[0] == ACL_GROUP],
        (ACL_MASK, mask, 0),
        (ACL_OTHER, mode & 7, 0),
    ]
    os.setxattr(path, "system.posix_acl_access", acl(entries))
