# SPDX-License-Identifier: Apache-2.0
"""The lists of a Debian mirror, well-formed and not."""

from __future__ import annotations

import pytest

from buildidfs.formats.archive import apt_lists

DIGEST = "ab" * 32
RELEASE = f"""-----BEGIN PGP SIGNED MESSAGE-----
Hash: SHA256

Suite: trixie-debug
MD5Sum:
 00112233445566778899aabbccddeeff 12 main/binary-amd64/Packages
SHA256:
 {DIGEST} 12 main/binary-amd64/Packages.xz
 {DIGEST} x main/binary-i386/Packages
 short 12 contrib/Packages
Acquire-By-Hash: yes
"""
PACKAGES = f"""Package: a-dbgsym
Build-Ids: aabbcc xyz ddeeff
 00112233
Filename: pool/a.deb
Size: 7
SHA256: {DIGEST}

Package: without
Filename: pool/b.deb
Size: 7
SHA256: {DIGEST}

Package: c-dbgsym
Build-Ids: 0011
SHA256: {DIGEST}
Size: 8
Filename: pool/c.deb"""


def test_release_has_the_sha256_of_each_list() -> None:
    found = apt_lists.release([RELEASE.encode()])
    listed = apt_lists.ListedFile(bytes.fromhex(DIGEST), 12)
    assert found == {b"main/binary-amd64/Packages.xz": listed}


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_packages_with_build_ids(size: int) -> None:
    text = PACKAGES.encode()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = list(apt_lists.packages(pieces))
    assert [(each.path, each.size, each.build_ids) for each in found] == [
        (b"pool/a.deb", 7, (b"\xaa\xbb\xcc", b"\xdd\xee\xff")),
        (b"pool/c.deb", 8, (b"\x00\x11",)),
    ]


def test_line_that_is_too_long_is_passed_over() -> None:
    long = b"x" * (apt_lists.LINE_MAX + 1)
    assert list(apt_lists.lines([b"a\n", long, b"more\nb\n", b"c"])) == [b"a", b"b", b"c"]
