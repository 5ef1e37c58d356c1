# SPDX-License-Identifier: Apache-2.0
"""The names of artifacts and build IDs for every client. No other module defines them.

One artifact has many names, because each family of tools has its own: debuginfod uses
``executable`` and ``debuginfo``, perf uses ``elf`` and ``debug``, gdb and compatible tools split
the build ID into ``.build-id/ab/cdef…`` and append ``.debug``. The only spelling of a build ID is
lower-case hex: a second one would be another name for the same directory, which no client needs.

Names are bytes, like directory entries.
"""

from __future__ import annotations

import re
from binascii import hexlify, unhexlify
from typing import Final

from buildidfs.model import BuildId, Digest, Kind

README: Final = b"README"

KIND_OF: dict[bytes, Kind] = {
    b"elf": Kind.EXECUTABLE,
    b"executable": Kind.EXECUTABLE,
    b"debug": Kind.DEBUGINFO,
    b"debuginfo": Kind.DEBUGINFO,
    b"vdso": Kind.VDSO,
    b"kallsyms": Kind.KALLSYMS,
}
"""File names in ``MNT/<id>/`` (and, with their first spelling, in perf's directories)."""

PERF_KIND_OF: dict[bytes, Kind] = {
    b"elf": Kind.EXECUTABLE,
    b"debug": Kind.DEBUGINFO,
    b"vdso": Kind.VDSO,
    b"kallsyms": Kind.KALLSYMS,
}
"""File names in perf's ``<path>/<id>/`` directories [perf build-id.c build_id_cache__basename]."""

PATH = b"path"
"""The text file with the places of an artifact."""

VARIANTS = b"variants"
"""The directory of all files ever seen with a build ID, by digest."""

SECTION = b"section"
"""The directory of the sections of a file, for debuginfod clients."""

DWP_SUFFIX = b".dwp"
"""The suffix of the package of split DWARF, after the name of its binary."""

LINKED = b".debug"
"""The directory beside a binary that debuggers search for its debug file."""

DEBUG_SUFFIX = b".debug"
DWZ_MARK = b"/.dwz/"
"""The mark in the path of a dwz file.

gdb and elfutils take the part after it, and look this part up below ``.dwz/``.
"""

MERGED = (b"lib", b"lib64", b"bin", b"sbin", b"lib32", b"libx32")
"""Directories of the root that are links into /usr in distributions with a merged /usr."""


def merged(path: bytes) -> list[bytes]:
    """Return the other name of a path below /lib, /bin and similar directories, if these are links
    into /usr.

    The dynamic loader, and so ldd(1), uses one of the names, and the kernel the other.
    """
    is_in_usr = path.startswith(b"/usr/")
    first = path.removeprefix(b"/usr").split(b"/", 2)[1:2]
    if not first or first[0] not in MERGED:
        return []
    return [path.removeprefix(b"/usr") if is_in_usr else b"/usr" + path]


_HEX = re.compile(r"[0-9a-fA-F]+")
_SONAME = re.compile(rb"(?:(lib[^/]+?)|(ld)(?:-linux[^/]*|64)?)\.so((?:\.[0-9]+)+)\Z")


def targets_of_library(name: bytes) -> re.Pattern[bytes] | None:
    """Return a pattern of the files beside the link of a shared library to which the link may lead
    by convention; None for other names.

    A match with a group is better than one without.
    """
    if name.startswith((b"ld-musl-", b"libc.musl-")):
        return re.compile(rb"ld-musl-|libc\.so\Z")
    found = _SONAME.match(name)
    if found is None:
        return None
    stem, number = map(re.escape, (found[1] or found[2], found[3]))
    return re.compile(
        rb"(%s\.[0-9].*)\Z|%s-[0-9][^/]*\.so(?:%s)?\Z" % (re.escape(name), stem, number), re.DOTALL
    )


MAX_NAME = 255
"""NAME_MAX of Linux: no directory entry is longer."""


def spell(build_id: bytes) -> bytes:
    """Return a build ID as a directory entry."""
    return hexlify(build_id)


def parse(name: bytes) -> BuildId | None:
    """Return the build ID in a directory entry; None if it is anything but lower-case hex."""
    try:
        raw = unhexlify(name)
    except ValueError:
        return None
    # unhexlify accepts either case, so the result must spell the same name
    if hexlify(raw) != name or not BuildId.MIN_BYTES <= len(raw) <= BuildId.MAX_BYTES:
        return None
    return bytes.__new__(BuildId, raw)


def bucket(name: bytes) -> int | None:
    """Return the first byte of the build IDs below ``.build-id/<name>``; None if there are none."""
    if len(name) != 2:
        return None
    try:
        raw = unhexlify(name)
    except ValueError:
        return None
    return raw[0] if hexlify(raw) == name else None


def parse_split(first: int, name: bytes) -> tuple[BuildId, bool] | None:
    """Parse ``.build-id/<first>/<name>``: the build ID, and True if it ends in ``.debug``."""
    with_suffix = name.endswith(DEBUG_SUFFIX)
    rest = name[: -len(DEBUG_SUFFIX)] if with_suffix else name
    build_id = parse(b"%02x%s" % (first, rest))
    return None if build_id is None else (build_id, with_suffix)


def is_hex(text: str) -> bool:
    """Return True if a text consists of hexadecimal digits of any case."""
    return _HEX.fullmatch(text) is not None


def parse_digest(name: bytes) -> Digest | None:
    """Return the digest in a directory entry; None if it is anything but lower-case hex."""
    if len(name) != 64:
        return None
    try:
        raw = unhexlify(name)
    except ValueError:
        return None
    return Digest(raw) if hexlify(raw) == name else None


def split(build_id: bytes) -> tuple[bytes, bytes]:
    """Return directory and entry of a build ID below ``.build-id/`` (for debuginfo add
    ``.debug``).
    """
    text = hexlify(build_id)
    return text[:2], text[2:]


def package_id(build_id: BuildId) -> BuildId | None:
    """Return the build ID under which a store keeps the ``.dwp`` file of a binary.

    Such a file has no build ID itself. Returns None if the binary's build ID is too long.
    """
    return _with_prefix(DWP_SUFFIX, build_id)


def package_owner(build_id: BuildId) -> BuildId | None:
    """The inverse of `package_id`; None for other IDs."""
    if not build_id.startswith(DWP_SUFFIX):
        return None
    owner = build_id[len(DWP_SUFFIX) :]
    return BuildId(owner) if len(owner) >= BuildId.MIN_BYTES else None


_DEL: Final = 0x7F


def printable(raw: bytes | str) -> str:
    """Return a path for a person: control characters and bytes that are not UTF-8 become
    ``\\xNN``.

    In a text these bytes are surrogates, as in an argument of the command line (PEP 383).
    """
    if isinstance(raw, str):
        raw = raw.encode("utf-8", "surrogateescape")
    return one_line(raw.decode("utf-8", "backslashreplace"))


def one_line(text: str) -> str:
    """Return a message for a person, which may contain a path: control characters become
    ``\\xNN``.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def json_escaped(data: bytes) -> bytes:
    """Return the same JSON text with each unprintable character written as ``\\uNNNN``.

    JSON escapes control characters below U+0020, but not DEL, those of C1 (a terminal takes U+009B
    for ESC [), or those that turn text around (U+202E). Newlines stay. ``data`` has other
    unprintable characters within strings only.
    """
    if data.isascii() and _DEL not in data:
        return data
    text = data.decode()
    escapes = {ord(c): _escape(c) for c in set(text) if not c.isprintable() and c != "\n"}
    return text.translate(escapes).encode() if escapes else data


def _escape(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


SOURCES_PREFIX = b".src"


def sources_id(build_id: bytes) -> BuildId | None:
    """Return the build ID under which a store keeps the source files of a build ID; None if the
    latter is too long.
    """
    return _with_prefix(SOURCES_PREFIX, build_id)


def _with_prefix(prefix: bytes, build_id: bytes) -> BuildId | None:
    raw = prefix + build_id
    return BuildId(raw) if len(raw) <= BuildId.MAX_BYTES else None


def kept_for(build_id: BuildId) -> BuildId:
    """Return the binary's build ID for the build ID of its package or sources; any other ID as it
    is.
    """
    owner = package_owner(build_id)
    if owner is None and is_of_sources(build_id):
        owner = BuildId(build_id[len(SOURCES_PREFIX) :])
    return build_id if owner is None else owner


def is_of_sources(build_id: bytes) -> bool:
    """Return True if source files are kept under a build ID, see `sources_id`."""
    least = len(SOURCES_PREFIX) + BuildId.MIN_BYTES
    return build_id.startswith(SOURCES_PREFIX) and len(build_id) >= least
