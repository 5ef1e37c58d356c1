# SPDX-License-Identifier: Apache-2.0
"""A Debian mirror of debug packages, made by dpkg-deb, as a directory."""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.support.clients import run, tool

SUITE = "trixie-debug"


def debug_package(
    out: Path, name: str, files: Mapping[str, bytes], others: Mapping[str, bytes] | None = None
) -> Path:
    """A -dbgsym package with debug files by build ID, and ``others`` by path."""
    tree = out / f"{name}.tree"
    for build_id, content in files.items():
        path = tree / "usr/lib/debug/.build-id" / build_id[:2] / f"{build_id[2:]}.debug"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for where, content in (others or {}).items():
        path = tree / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: 1\nArchitecture: amd64\nSection: debug\n"
        f"Build-Ids: {' '.join(files)}\n"
        "Maintainer: Nobody <nobody@example.org>\nDescription: for a test\n"
    )
    package = out / f"{name}_1_amd64.deb"
    run([tool("dpkg-deb"), "--root-owner-group", "-Znone", "--build", tree, package], check=True)
    shutil.rmtree(tree)
    return package


def mirror(root: Path, debs: Iterable[Path], *, architecture: str = "amd64") -> None:
    """A mirror with one suite, whose component is main, of packages that it copies."""
    stanzas = []
    for deb in debs:
        path = root / "pool/main" / deb.name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(deb, path)
        control = run([tool("dpkg-deb"), "-f", deb], check=True).out
        stanzas.append(control.rstrip("\n") + "\n" + _fields(path, root))
    text = "\n".join(stanzas).encode()
    lists = root / f"dists/{SUITE}/main/binary-{architecture}"
    lists.mkdir(parents=True, exist_ok=True)
    (lists / "Packages.xz").write_bytes(lzma.compress(text))
    (root / "Packages").write_bytes(text)
    write_release(root, [lists / "Packages.xz"])


def write_release(root: Path, lists: Iterable[Path]) -> None:
    """The Release file for some lists."""
    base = root / "dists" / SUITE
    rows = [
        f" {hashlib.sha256(each.read_bytes()).hexdigest()} {each.stat().st_size}"
        f" {each.relative_to(base)}"
        for each in lists
    ]
    text = "\n".join(["Origin: Test", f"Suite: {SUITE}", "MD5Sum:", " 0 1 x", "SHA256:", *rows])
    (base / "Release").write_text(text + "\n")


@contextlib.contextmanager
def signer(name: str) -> Iterator[Signer]:
    """A new key that signs while the block runs."""
    with tempfile.TemporaryDirectory(prefix="gpg-") as home:
        try:
            yield Signer(Path(home), name)
        finally:
            run([tool("gpgconf"), "--homedir", home, "--kill", "all"], check=True)


class Signer:
    """A key with which suites are signed. ``keyring`` is a file with its public part."""

    def __init__(self, home: Path, name: str) -> None:
        self._words = [tool("gpg"), "--homedir", str(home), "--batch", "--yes", "--passphrase", ""]
        run([*self._words, "--quick-gen-key", name, "ed25519"], check=True)
        self.keyring = home / "keyring.gpg"
        run([*self._words, "-o", str(self.keyring), "--export"], check=True)

    def sign(self, root: Path, *, inline: bool) -> None:
        """Sign the suite of a mirror: as InRelease, or beside Release."""
        release = root / "dists" / SUITE / "Release"
        if inline:
            out = release.with_name("InRelease")
            run([*self._words, "-o", str(out), "--clearsign", str(release)], check=True)
        else:
            out = release.with_name("Release.gpg")
            run(
                [*self._words, "-o", str(out), "--armor", "--detach-sign", str(release)], check=True
            )


def _fields(path: Path, root: Path) -> str:
    content = path.read_bytes()
    return (
        f"Filename: {os.fspath(path.relative_to(root))}\nSize: {len(content)}\n"
        f"SHA256: {hashlib.sha256(content).hexdigest()}\n"
    )
