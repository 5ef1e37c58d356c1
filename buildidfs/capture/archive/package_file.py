# SPDX-License-Identifier: Apache-2.0
"""One package, recognised by its first bytes: what it is called, and its members as they come."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.capture.archive.decompress import CannotDecompress
from buildidfs.capture.archive.stream import Limits, PlainStream, Region, Stream, unpacked
from buildidfs.formats.archive import common, packages, tar
from buildidfs.formats.archive.common import Damaged, Member, installed

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD: Final = tar.BLOCK
_CONTROL_BYTES: Final = 16 << 20  # of a Debian package's control archive; most have some 10 KB
_CONTROL_MEMBERS: Final = 256
_ADB: Final = (b"ADB.", b"ADBd", b"ADBc")


class NotAPackage(Exception):
    """It is something else."""


class Package(NamedTuple):
    """A package that is being read. ``name`` is empty where it does not say.

    ``members`` take their headers from ``stream``; both raise what `formats.archive.tar` and
    `capture.archive.stream` do.
    """

    name: str
    members: Iterator[Member]
    stream: Stream


def open_package(fd: int, size: int, limits: Limits) -> Package:
    """Begin with the package in an open file of that size, which is the caller's to close.

    Raises `NotAPackage`, OSError, `Damaged`, `CannotDecompress`.
    """
    head = os.pread(fd, _HEAD, 0)
    whole = Region(fd, 0, size)
    if head.startswith(packages.AR_MAGIC):
        return _debian(whole, limits)
    if head.startswith(packages.RPM_MAGIC):
        return _rpm(whole, limits)
    if head.startswith(_ADB):
        raise Damaged("a package of Alpine's third format, which is not understood")
    if common.packing(head) is not None or tar.is_header(head):
        return _tar(whole, limits)
    raise NotAPackage


def _debian(whole: Region, limits: Limits) -> Package:
    outer = PlainStream(whole)
    parts = packages.ar_members(outer)
    if next(parts, (b"",))[0] != b"debian-binary":
        raise NotAPackage  # a static library
    name = ""
    for part in parts:
        region = Region(whole.fd, outer.position, part.size)
        if part.name.startswith(b"control.tar"):
            name = _debian_name(region)
        elif part.name.startswith(b"data.tar"):
            stream = unpacked(region, limits.unpacked_bytes)
            return Package(name, tar.members(stream), stream)
    raise Damaged("a Debian package without data")


def _debian_name(region: Region) -> str:
    """What the control file says; nothing if there is none that can be read. Raises OSError."""
    try:
        stream = unpacked(region, _CONTROL_BYTES)
        for member in itertools.islice(tar.members(stream), _CONTROL_MEMBERS):
            if installed(member.name) == b"/control":
                return packages.debian(_text(member, stream)).text
    except (Damaged, CannotDecompress):
        pass  # its data may be sound
    return ""


def _rpm(whole: Region, limits: Limits) -> Package:
    outer = PlainStream(whole)
    header = packages.rpm_header(outer)
    at = outer.position
    stream = unpacked(Region(whole.fd, whole.offset + at, whole.size - at), limits.unpacked_bytes)
    name = packages.PackageName(*header.name).text
    return Package(name, packages.cpio_members(stream, header.files), stream)


def _tar(whole: Region, limits: Limits) -> Package:
    stream = unpacked(whole, limits.unpacked_bytes)
    # The three parts of an Alpine package are archives of their own.
    members = tar.members(stream, concatenated=True)
    try:
        first = next(members, None)
    except (Damaged, CannotDecompress):
        raise NotAPackage from None
    if first is None or not packages.is_metadata(first.name):
        raise NotAPackage
    name = ""
    for member in itertools.islice(itertools.chain((first,), members), _CONTROL_MEMBERS):
        path = installed(member.name)
        if path == b"/" + packages.PKGINFO:
            name = packages.pkginfo(_text(member, stream)).text
        elif not path.startswith(b"/.") or b"/" in path[1:]:
            members = itertools.chain((member,), members)
            break
    return Package(name, members, stream)


def _text(member: Member, stream: Stream) -> bytes:
    return stream.take(min(member.stored, packages.METADATA_MAX))
