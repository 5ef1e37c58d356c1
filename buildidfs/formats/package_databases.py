# SPDX-License-Identifier: Apache-2.0
"""The records of the package managers dpkg and apk on installed files; see also `rpm_database`.

Sources: dpkg, lib/dpkg/dump.c and dpkg-query(1) (status, info/PACKAGE.list), lib/dpkg/log.c
(dpkg.log); distroless, private/pkg (status.d); apk-tools, src/database.c (installed); for
`from_note`, see `other_ids.package_note`.
"""

from __future__ import annotations

import calendar
import re
import time
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_UNPRINTABLE: Final = re.compile(r"[^\w.:+~^-]", re.ASCII)
_TEXT_MAX: Final = 128
_TIME: Final = "%Y-%m-%d %H:%M:%S"
_TIME_SIZE: Final = 19
_QUARTER_S: Final = 900  # time zones differ by multiples of it
_SEASONS_S: Final = (0, -3600, 3600)
_SLACK_S: Final = 0.1  # the clock of files may be late
_MANAGERS: Final = {"deb": "dpkg", "rpm": "rpm", "apk": "apk"}


class Package(msgspec.Struct, frozen=True):
    """An installed package, in printable characters; all fields are empty if none is known.

    ``manager`` is dpkg, apk or rpm.
    """

    name: str = ""
    version: str = ""
    manager: str = ""


UNKNOWN: Final = Package()


def shown(text: bytes) -> str:
    """Return a name or a version in printable characters."""
    return _UNPRINTABLE.sub("?", text[:_TEXT_MAX].decode("ascii", "replace"))


def dpkg_lists(lists: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Join the lists of files of packages, each with its name, for `dpkg_owner`."""
    return b"".join(b"\0" + name + b"\n" + text + b"\n" for name, text in lists)


def dpkg_owner(lists: bytes, paths: Iterable[bytes]) -> bytes:
    """Return the name of the package that has one of the paths, perhaps ``NAME:ARCHITECTURE``.

    The name is empty if no package has one.
    """
    for path in paths:
        at = lists.find(b"\n" + path + b"\n") if b"\n" not in path else -1
        if at >= 0:
            start = lists.rfind(b"\0", 0, at) + 1
            return lists[start : lists.index(b"\n", start)]
    return b""


def md5sums_as_list(text: bytes) -> bytes:
    """Return the paths in a file of checksums (``HASH  usr/lib/x``), one on a line."""
    found = (line.partition(b"  ")[2] for line in text.split(b"\n"))
    return b"\n".join(b"/" + path.removeprefix(b"./") for path in found if path)


def dpkg_version(status: bytes, name: bytes) -> Package:
    """Return a package with its version, from its paragraph in dpkg's status."""
    plain, _, architecture = name.partition(b":")
    version = b""
    for paragraph in _paragraphs(status, b"Package: " + plain + b"\n"):
        fields = dict(_fields(paragraph, b": "))
        if not architecture or fields.get(b"Architecture") == architecture:
            version = fields.get(b"Version", b"")
            break
    return Package(shown(plain), shown(version), "dpkg")


def apk_owner(installed: bytes, paths: Iterable[bytes]) -> Package:
    """Return apk's package that has one of the paths.

    A line ``F:DIRECTORY`` precedes the lines ``R:NAME`` of its files.
    """
    for path in paths:
        directory, _, name = path.lstrip(b"/").rpartition(b"/")
        if not name or b"\n" in path:
            continue
        above, file = b"\nF:" + directory + b"\n", b"\nR:" + name + b"\n"
        start = installed.find(above)
        while start >= 0:
            end = installed.find(b"\nF:", start + 1)
            at = installed.find(file, start, end + 1 if end >= 0 else len(installed))
            if at >= 0:
                before = installed.rfind(b"\n\n", 0, at)
                fields = dict(_fields(installed[before + 2 if before >= 0 else 0 : at], b":"))
                return Package(shown(fields.get(b"P", b"")), shown(fields.get(b"V", b"")), "apk")
            start = installed.find(above, end) if end >= 0 else -1
    return UNKNOWN


class _PackageNote(msgspec.Struct):
    type: str = ""
    name: str = ""
    version: str = ""
    epoch: str = ""


def from_note(text: bytes) -> Package:
    """Return the package in the note of an ELF file; `UNKNOWN` if the text names none."""
    try:
        note = msgspec.json.decode(text, type=_PackageNote)
    except (msgspec.MsgspecError, RecursionError):
        return UNKNOWN
    version = f"{note.epoch}:{note.version}" if note.epoch not in ("", "0") else note.version
    name, version = (shown(each.encode("utf-8", "replace")) for each in (note.name, version))
    return Package(name, version, _MANAGERS.get(note.type, "")) if name else UNKNOWN


def dpkg_version_before(
    log: bytes, written: float, package: str, replaced: float, started: float
) -> str:
    """Return the version of a package that an upgrade has replaced; empty if the log leaves a
    doubt.

    ``log`` is dpkg.log, ``written`` its time of modification. The upgrade happened at the time
    ``replaced``, or is the only one since a process ``started``. All times are Unix time in
    seconds. The log has local times, so its last line and ``written`` give the time zone.
    """
    upgrades, last = _upgrades(log, package.encode())
    zone = round((last - written) / _QUARTER_S) * _QUARTER_S
    at = {
        old
        for begin, end, old in upgrades
        for season in _SEASONS_S
        if begin - _SLACK_S <= replaced + zone + season < end + 1  # the log has whole seconds
    }
    if not at:
        at = {old for _, end, old in upgrades if end - zone > started}
    return shown(at.pop()) if len(at) == 1 else ""


def _upgrades(log: bytes, package: bytes) -> tuple[list[tuple[int, int, bytes]], int]:
    """Return begin, end and old version of each upgrade of a package, and the last time in a log.

    The times are local ones, as if they were UTC. An upgrade without an end has that of its begin.
    """
    found: list[tuple[int, int, bytes]] = []
    for line in log.split(b"\n"):
        if package not in line:
            continue
        match line.split(b" "):
            case [_, _, b"upgrade", name, old, _] if name.partition(b":")[0] == package:
                begin = _seconds(line)
                found.append((begin, begin, old))
            case [_, _, b"status", b"unpacked", name, _] if (
                found and name.partition(b":")[0] == package
            ):
                begin, _, old = found[-1]
                found[-1] = begin, max(begin, _seconds(line)), old
    return found, _seconds(log[log.rstrip(b"\n").rfind(b"\n") + 1 :])


def _seconds(line: bytes) -> int:
    """Return the time at the start of a line of dpkg.log as if it were UTC; 0 without one."""
    try:
        return calendar.timegm(time.strptime(line[:_TIME_SIZE].decode("ascii"), _TIME))
    except (UnicodeDecodeError, ValueError):
        return 0


def _paragraphs(text: bytes, line: bytes) -> Iterator[bytes]:
    """Yield the paragraphs that begin with a line."""
    at = 0 if text.startswith(line) else text.find(b"\n\n" + line)
    while at >= 0:
        start = at + 2 if at or not text.startswith(line) else 0
        end = text.find(b"\n\n", start)
        yield text[start : end if end >= 0 else len(text)]
        at = text.find(b"\n\n" + line, start)


def _fields(paragraph: bytes, colon: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the fields of a paragraph; of several fields with one name, the last comes first."""
    for line in reversed(paragraph.split(b"\n")):
        name, found, value = line.partition(colon)
        if found:
            yield name, value
