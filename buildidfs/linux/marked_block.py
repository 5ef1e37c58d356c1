# SPDX-License-Identifier: Apache-2.0
"""Lines of this program in a configuration file of another one, between two marks.

The marks are comments with ``#``. The first mark says how the file was before, so that `remove`
gives back the same bytes: no file, or a last line without a newline.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from typing import Final

import msgspec

from buildidfs.errors import CapabilityError, UsageError
from buildidfs.linux import ownership

_BEGIN: Final = "# begin {name}: `{undo}` removes these lines"
_END: Final = "# end {name}"
_NEW_FILE: Final = " and this file"
_NO_NEWLINE: Final = " and the newline before them"
_MODE: Final = 0o644


class Block(msgspec.Struct, frozen=True):
    """``text``, whole lines, for the file ``path``. ``name`` is unique in the file; ``undo`` is the
    command that removes the lines.
    """

    path: str
    name: str
    undo: str
    text: str

    def marked(self, before: str = "") -> str:
        """Return the lines with their marks; ``before`` says how the file was before."""
        begin = _BEGIN.format(name=self.name, undo=self.undo) + before
        return f"{begin}\n{self.text}{_END.format(name=self.name)}\n"

    def write(self) -> bool:
        """Put the lines at the end of the file, or in the place of earlier ones; return False if
        they are there already.

        Raises as `remove`.
        """
        old = _content(self.path)
        found = self._search(old or "")
        if found is not None and old is not None:
            new = old[: found.start()] + self.marked(found["before"]) + old[found.end() :]
        elif old is None:
            new = self.marked(_NEW_FILE)
        elif old and not old.endswith("\n"):
            new = f"{old}\n{self.marked(_NO_NEWLINE)}"
        else:
            new = old + self.marked()
        if new != old:
            _replace(self.path, new)
        return new != old

    def remove(self) -> bool:
        """Remove the lines, and the file if it was made for them; return False if there are none.

        Raises `UsageError` for a file that others may change or that is not text, and
        `CapabilityError` if this user may not write it.
        """
        old = _content(self.path)
        found = self._search(old or "")
        if old is None or found is None:
            return False
        before, after = old[: found.start()], old[found.end() :]
        if found["before"] == _NO_NEWLINE:
            before = before.removesuffix("\n")
        if not before + after and found["before"] == _NEW_FILE:
            try:
                os.unlink(os.path.realpath(self.path))
            except OSError as error:
                raise _refused(self.path, error) from error
        else:
            _replace(self.path, before + after)
        return True

    def _search(self, text: str) -> re.Match[str] | None:
        name, ways = re.escape(self.name), "|".join(map(re.escape, (_NEW_FILE, _NO_NEWLINE)))
        return re.search(
            rf"^# begin {name}: `[^`\n]*` removes these lines(?P<before>{ways}|)\n"
            rf"(?:.*\n)*?# end {name}\n",
            text,
            re.MULTILINE,
        )


def _content(path: str) -> str | None:
    """Return the text of a file; None if there is none."""
    try:
        weak = ownership.weak_place(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refused(path, error) from error
    if weak:
        raise UsageError(f"{path} {weak}")
    try:
        with open(path, encoding="utf-8", newline="") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"{path} is not a regular file")
            return file.read()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise _refused(path, error) from error


def _replace(path: str, text: str) -> None:
    """Give a file this text at once, with its owner and mode; a symbolic link stays one."""
    path = os.path.realpath(path)
    directory = os.path.dirname(path)
    try:
        os.makedirs(directory, exist_ok=True)
        weak = ownership.weak_place(directory)
        if weak:
            raise UsageError(f"{directory} {weak}")
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="", dir=directory,
                                         prefix=".buildidfs-", delete=False) as file:  # fmt: skip
            try:
                file.write(text)
                file.flush()
                _take_attributes(file.fileno(), path)
                os.fsync(file.fileno())
                os.rename(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise _refused(path, error) from error


def _take_attributes(fd: int, path: str) -> None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        os.fchmod(fd, _MODE)
        return
    os.fchown(fd, status.st_uid, status.st_gid)
    os.fchmod(fd, stat.S_IMODE(status.st_mode))


def _refused(path: str, error: OSError) -> UsageError | CapabilityError:
    if isinstance(error, PermissionError):
        return CapabilityError(f"cannot write {path}: permission denied; root may")
    return UsageError(f"cannot write {path}: {error.strerror or error}")
