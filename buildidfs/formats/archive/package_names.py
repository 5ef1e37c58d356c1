# SPDX-License-Identifier: Apache-2.0
"""What packages are called: the control file of a Debian package, .PKGINFO of Alpine and Arch.

Sources: deb-control(5); the Alpine wiki, "Apk spec"; makepkg of pacman, write_pkginfo.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

PKGINFO: Final = b".PKGINFO"
METADATA: Final = frozenset(
    (PKGINFO, b".BUILDINFO", b".MTREE", b".INSTALL", b".CHANGELOG")
)  # fmt: skip
"""What only packages of Alpine and Arch have, and have first."""
SIGNATURE: Final = b".SIGN."
"""What the names of Alpine's signatures begin with, which come before anything else."""

METADATA_MAX: Final = 1 << 20
"""The most of such a file that is looked at."""

_PART_MAX: Final = 128
_UNPRINTABLE: Final = re.compile(r"[^\w.:+~@-]", re.ASCII)


class PackageName(NamedTuple):
    """The name of a package as it calls itself; any part may be empty."""

    name: bytes
    version: bytes = b""
    architecture: bytes = b""

    @property
    def text(self) -> str:
        """NAME-VERSION.ARCHITECTURE, fit to be shown on a terminal; empty without a name."""
        text = _shown(self.name)
        if text and self.version:
            text += f"-{_shown(self.version)}"
        if text and self.architecture:
            text += f".{_shown(self.architecture)}"
        return text


def _shown(part: bytes) -> str:
    return _UNPRINTABLE.sub("?", part[:_PART_MAX].decode("utf-8", "replace"))


def is_metadata(name: bytes) -> bool:
    """Whether a member of that name makes an archive a package of Alpine or Arch."""
    name = name.removeprefix(b"./")
    return name in METADATA or name.startswith(SIGNATURE)


def debian(control: bytes) -> PackageName:
    """The name in a control file; what is continued on another line is passed over."""
    fields = _fields(control, b":")
    return PackageName(
        fields.get(b"package", b""), fields.get(b"version", b""), fields.get(b"architecture", b"")
    )


def pkginfo(text: bytes) -> PackageName:
    """The name in a .PKGINFO file."""
    fields = _fields(text, b"=")
    return PackageName(
        fields.get(b"pkgname", b""), fields.get(b"pkgver", b""), fields.get(b"arch", b"")
    )


def _fields(text: bytes, separator: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for line in text.splitlines():
        if line[:1] in (b" ", b"\t", b"#", b""):
            continue
        key, given, value = line.partition(separator)
        if given:
            found.setdefault(key.strip().lower(), value.strip())
    return found
