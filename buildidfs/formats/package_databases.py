# SPDX-License-Identifier: Apache-2.0
"""The records of dpkg and apk on installed files, and the package in the note of an ELF file.

Sources: dpkg, lib/dpkg/dump.c and dpkg-query(1) (status, info/PACKAGE.list); distroless,
private/pkg (status.d); apk-tools, src/database.c (installed); for `from_note`, see
`other_ids.package_note`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_UNPRINTABLE: Final = re.compile(r"[^\w.:+~^-]", re.ASCII)
_TEXT_MAX: Final = 128
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
