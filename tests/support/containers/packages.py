# SPDX-License-Identifier: Apache-2.0
"""Packages of all kinds with the files of a directory, by the programs that distributions use."""

from __future__ import annotations

import gzip
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.clients.tools import Argument, run, tool
from tests.support.filesystems.sources import tar

Packer = Callable[[Path, Path], Path]
"""Makes a package of a directory's files in another directory; returns its path."""

NAME, VERSION = "hot", "1:2.0-3"
_LEAD = 96  # bytes in front of the signatures of an rpm package


def deb(root: Path, out: Path, *options: Argument) -> Path:
    """A Debian package, by dpkg-deb; ``options`` are of that (``-Zzstd``)."""
    tree = _copied(root, out)
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text(
        f"Package: {NAME}\nVersion: {VERSION}\nArchitecture: amd64\n"
        "Maintainer: Nobody <nobody@example.org>\nDescription: for a test\n"
    )
    package = out / f"{NAME}.deb"
    run([tool("dpkg-deb"), "--root-owner-group", *options, "--build", tree, package], check=True)
    shutil.rmtree(tree)
    return package


def rpm(root: Path, out: Path, *, payload: str = "w3.zstdio") -> Path:
    """An rpm package, by rpmbuild; ``payload`` says how it is compressed."""
    epoch, _, rest = VERSION.partition(":")
    version, _, release = rest.partition("-")
    files = sorted(
        (b"%dir " if entry.is_dir() and not entry.is_symlink() else b"")
        + b'"/' + os.fsencode(entry.relative_to(root)) + b'"'
        for entry in root.rglob("*")
    )  # fmt: skip
    work = out / "rpm-work"
    work.mkdir(parents=True)
    (work / "files").write_bytes(b"\n".join(files) + b"\n")
    (work / "x.spec").write_text(
        f"Name: {NAME}\nEpoch: {epoch}\nVersion: {version}\nRelease: {release}\n"
        "Summary: for a test\nLicense: none\nAutoReqProv: no\n"
        "%global __os_install_post %{nil}\n%global debug_package %{nil}\n"
        "%define _build_id_links none\n%description\nfor a test\n"
        f"%install\nmkdir -p %{{buildroot}}\ncp -a {root}/. %{{buildroot}}/\n"
        f"%files -f {work}/files\n"
    )
    defined = {
        "_topdir": work / "top", "_rpmdir": out, "_rpmfilename": f"{NAME}.rpm",
        "_binary_payload": payload, "buildroot": work / "root",
    }  # fmt: skip
    options = [word for key, value in defined.items() for word in ("--define", f"{key} {value}")]
    run([tool("rpmbuild"), "-bb", "--quiet", *options, work / "x.spec"], check=True)
    shutil.rmtree(work)
    return out / f"{NAME}.rpm"


def with_file_signatures(package: Path, signatures: Sequence[bytes]) -> None:
    """Give an rpm package IMA signatures of its files, in the order of its list of files.

    As rpmsign --signfiles, which Debian's lacks: RPMSIGTAG_FILESIGNATURES, an array of strings.
    """
    data = package.read_bytes()
    count, size = struct.unpack_from(">II", data, _LEAD + 8)
    index = data[_LEAD + 16 : _LEAD + 16 + 16 * count]
    end = _LEAD + 16 + 16 * count + size
    store = data[end - size : end]
    index += struct.pack(">IIII", 274, 8, len(store), len(signatures))
    store += b"".join(each.hex().encode() + b"\0" for each in signatures)
    signed = data[_LEAD : _LEAD + 8] + struct.pack(">II", count + 1, len(store)) + index + store
    rest = data[end + -(end - _LEAD) % 8 :]
    package.write_bytes(data[:_LEAD] + signed + bytes(-len(signed) % 8) + rest)


def apk(root: Path, out: Path) -> Path:
    """An Alpine package: three archives, of which only the last has an end, each of it gzipped."""
    pkginfo = f"pkgname = {NAME}\npkgver = {VERSION}\narch = x86_64\n".encode()
    data = _tarred(root, "--format=posix")
    package = out / f"{NAME}.apk"
    package.write_bytes(
        gzip.compress(tar([(".SIGN.RSA.test.rsa.pub", b"signature")], end=False))
        + gzip.compress(tar([(".PKGINFO", pkginfo), (".post-install", b"#!/bin/sh\n")], end=False))
        + gzip.compress(data)
    )
    return package


def arch(root: Path, out: Path, *, suffix: str = "zst") -> Path:
    """A package of Arch Linux, as makepkg makes it: by bsdtar."""
    tree = _copied(root, out)
    (tree / ".PKGINFO").write_text(f"pkgname = {NAME}\npkgver = {VERSION}\narch = x86_64\n")
    (tree / ".MTREE").write_bytes(gzip.compress(b"#mtree\n"))
    names = [".MTREE", ".PKGINFO", *sorted(set(os.listdir(tree)) - {".MTREE", ".PKGINFO"})]
    compressor = {"zst": "--zstd", "xz": "--xz", "gz": "--gzip"}[suffix]
    package = out / f"{NAME}.pkg.tar.{suffix}"
    run([tool("bsdtar"), compressor, "-cf", package, "-C", tree, *names], check=True)
    shutil.rmtree(tree)
    return package


def _copied(root: Path, out: Path) -> Path:
    """A copy in which files with several names still are one."""
    run([tool("cp"), "-a", root, out / "tree"], check=True)
    return out / "tree"


def _tarred(root: Path, *options: str) -> bytes:
    argv: Sequence[Argument] = [tool("tar"), *options, "-C", root, "-cf", "-", "."]
    return subprocess.run(argv, capture_output=True, check=True, timeout=60).stdout


PACKERS: dict[str, Packer] = {
    "deb-xz": deb,
    "deb-zstd": lambda root, out: deb(root, out, "-Zzstd"),
    "deb-gzip": lambda root, out: deb(root, out, "-Zgzip"),
    "deb-none": lambda root, out: deb(root, out, "-Znone"),
    "rpm-zstd": rpm,
    "rpm-xz": lambda root, out: rpm(root, out, payload="w2.xzdio"),
    "rpm-gzip": lambda root, out: rpm(root, out, payload="w9.gzdio"),
    "rpm-bzip2": lambda root, out: rpm(root, out, payload="w9.bzdio"),
    "apk": apk,
    "arch-zstd": arch,
    "arch-xz": lambda root, out: arch(root, out, suffix="xz"),
    "arch-gzip": lambda root, out: arch(root, out, suffix="gz"),
}
"""Every kind of package, compressed in every way that is in use."""
