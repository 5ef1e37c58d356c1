# SPDX-License-Identifier: Apache-2.0
"""A Debian or Ubuntu mirror with debug packages: build ID -> ``Build-Ids:`` -> package -> member.

    apt:URL SUITE COMPONENT... [arch=NAME] [signed-by=KEYRING]
                    dists/SUITE/COMPONENT/binary-ARCH/Packages
    apt:URL         a flat one: Packages beside the packages

A plain mirror is enough, without a debuginfod. Packages are checked against the SHA-256 in
``Packages``, ``Packages`` against ``Release``, and with a keyring ``Release`` against its
signature.

Source: sources.list(5), gpgv(1).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import urllib.parse
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import names
from buildidfs.capture import elf_file
from buildidfs.capture.archive import packages
from buildidfs.capture.archive.stream import CannotDecompress, Limits, Region, unpacked
from buildidfs.errors import UsageError
from buildidfs.formats.archive import apt_lists
from buildidfs.formats.archive.common import Damaged, Member, Type, installed
from buildidfs.linux import child, file_ops, openat2
from buildidfs.model import PUBLIC_ACCESS, Kind, fingerprint
from buildidfs.upstream import apt_index
from buildidfs.upstream.server import (
    Found,
    NotThere,
    Unacceptable,
    Unavailable,
    forwarded,
    host_of,
    identity_of_copy,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.capture.archive.stream import Stream
    from buildidfs.upstream.apt_index import AptIndex, Entry
    from buildidfs.upstream.http_client import HttpClient
    from buildidfs.upstream.server import Spool, Wanted


_FRESH_S: Final = 3600.0
"""Seconds after which the mirror is checked for changes of its lists."""
_LISTS_BYTES: Final = 1 << 30
_RELEASE_BYTES: Final = 64 << 20
_KEPT: Final = 16
_KEPT_BYTES: Final = 1 << 30
"""The number of bytes of packages that are kept for further files from them.

The number of packages is limited to twice that of simultaneous fetches, because several fetches may
need files of one package.
"""
_LIMITS: Final = Limits(unpacked_bytes=16 << 30)
_SIGNATURE_S: Final = 30.0
_SAID_BYTES: Final = 1 << 20
_RELEASES: Final = (b"InRelease", b"Release")
_PACKINGS: Final = (b".xz", b".gz", b"")
_ARCHITECTURES: Final = {
    "x86_64": "amd64", "aarch64": "arm64", "i686": "i386", "armv7l": "armhf", "ppc64le": "ppc64el",
}  # fmt: skip
_DEBUG: Final = b"/usr/lib/debug/.build-id/"
_DWZ: Final = b"/usr/lib/debug/.dwz/"


class Suite(msgspec.Struct, frozen=True):
    """The archive of an ``apt:`` line. ``url`` ends with a slash; a flat archive has no
    ``suite``.
    """

    url: str
    suite: str = ""
    components: tuple[str, ...] = ()
    architecture: str = ""
    signed_by: str = ""
    """The keyring with the accepted keys; empty if signatures are not checked."""


def parse(text: str) -> Suite:
    """Parse an ``apt:`` line. Raises `UsageError`."""
    words = text.removeprefix("apt:").split()
    options = {"arch": _ARCHITECTURES.get(os.uname().machine, os.uname().machine), "signed-by": ""}
    while len(words) > 1 and words[-1].partition("=")[0] in options:
        name, _, value = words.pop().partition("=")
        options[name] = value
    keyring = options["signed-by"]
    if keyring and not keyring.startswith("/"):
        raise UsageError(f"signed-by={keyring[:80]}: give the keyring's path from / on")
    if not words or not words[0].startswith(("http://", "https://", "file:///", "/")):
        raise UsageError(f"not a mirror: {text[:80]!r}; try apt:https://HOST/debian SUITE main")
    url = words[0].rstrip("/") + "/"
    if len(words) == 1 or words[1:] == ["./"]:
        if keyring:
            raise UsageError(f"signed-by={keyring[:80]}: a mirror without a SUITE has no signature")
        return Suite(url)
    if len(words) == 2:
        words.append("main")
    return Suite(url, words[1], tuple(words[2:]), options["arch"], keyring)


class AptMirror:
    """One suite of a mirror. ``client`` is None for a mirror on this machine."""

    def __init__(
        self, suite: Suite, client: HttpClient | None, spool: Spool, directory: bytes, token: str
    ) -> None:
        self._suite = suite
        self._client = client
        self._spool = spool
        self._token = token
        self.is_local = client is None
        url = suite.url.removeprefix("file://") if client is None else host_of(suite.url)
        self.label = f"apt:{url}"
        self._root = os.fsencode(urllib.parse.unquote(suite.url.removeprefix("file://")))
        key = fingerprint(msgspec.json.encode(suite), 8).hex().encode()
        self._path = os.path.join(directory, b"apt-" + key)
        self._lock = threading.Lock()
        self._index: AptIndex | None = None
        self._looked = 0.0
        self._packages: OrderedDict[bytes, int] = OrderedDict()
        self._downloading: dict[bytes, threading.Lock] = {}

    def fetch(self, wanted: Wanted) -> Found:
        """Return the debug file. Raises the errors of `Server.fetch`."""
        if wanted.kind is not Kind.DEBUGINFO:
            raise NotThere
        with self._lock:
            index = self._current(wanted)
            entry = index.find(wanted.build_id)
            if entry is None and wanted.near is not None:
                entry = index.find(wanted.near)  # a dwz file is in no list
        if entry is None:
            raise NotThere
        fd = self._package(entry, wanted)
        try:
            found = self._member(fd, wanted)
        except (Damaged, CannotDecompress) as error:
            raise Unacceptable(f"has a package that is damaged: {error}") from error
        finally:
            os.close(fd)
        if found is None:
            raise NotThere
        return found

    def close(self) -> None:
        """Close files and connections."""
        with self._lock:
            while self._packages:
                os.close(self._packages.popitem()[1])
            if self._index is not None:
                self._index.close()
                self._index = None
        if self._client is not None:
            self._client.close()

    # --- lists ---------------------------------------------------------------------------------

    def _current(self, wanted: Wanted) -> AptIndex:
        """Return the index. It is made anew if the lists of the mirror have changed. Raises
        `Unavailable`.
        """
        now = time.monotonic()
        if self._index is not None and now - self._looked < _FRESH_S:
            return self._index
        if self._index is None:
            with contextlib.suppress(OSError, ValueError):
                self._index = apt_index.AptIndex(self._path)
        try:
            self._refresh(wanted)
        except (Unavailable, NotThere, Unacceptable) as error:
            if self._index is None:
                if isinstance(error, Unavailable):
                    raise
                raise Unavailable(f"has no lists of packages that can be read: {error}") from error
        self._looked = now
        assert self._index is not None
        return self._index

    def _refresh(self, wanted: Wanted) -> None:
        """Make the index from the present lists of the mirror if they have changed."""
        lists, made_of = self._lists(wanted)
        if self._index is not None and self._index.made_of == made_of:
            return
        with contextlib.ExitStack() as stack:
            try:
                apt_index.write(self._path, made_of, self._listed(lists, wanted, stack))
                index = apt_index.AptIndex(self._path)
            except (Damaged, CannotDecompress, ValueError) as error:
                raise Unacceptable(f"has a list that is damaged: {error}") from error
        if self._index is not None:
            self._index.close()
        self._index = index

    def _lists(self, wanted: Wanted) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return path and SHA-256 of each list, and a hash of all lists. Without ``Release`` there
        is no SHA-256.
        """
        suite = self._suite
        if not suite.suite:
            for packing in _PACKINGS:
                with contextlib.suppress(NotThere):
                    path = b"Packages" + packing
                    fd = self._get(path, _LISTS_BYTES, wanted)
                    try:
                        return [(path, b"")], _hash(fd)
                    finally:
                        os.close(fd)
            raise NotThere
        base = f"dists/{suite.suite}/".encode()
        files = self._release(base, wanted)
        found = []
        for component in suite.components:
            listed = f"{component}/binary-{suite.architecture}/Packages".encode()
            there = [listed + each for each in _PACKINGS if listed + each in files]
            if not there:
                raise Unavailable(f"has no list {listed.decode()}", lasting=True)
            found.append((base + there[0], files[there[0]].sha256))
        made_of = hashlib.sha256(b"".join(path + digest for path, digest in found)).digest()
        return found, made_of

    def _release(self, base: bytes, wanted: Wanted) -> dict[bytes, apt_lists.ListedFile]:
        for name in _RELEASES:
            with contextlib.suppress(NotThere), contextlib.ExitStack() as stack:
                fd = self._got(base + name, wanted, stack)
                if self._suite.signed_by:
                    fd = self._signed(fd, base + name, wanted, stack)
                size = os.fstat(fd).st_size
                return apt_lists.release(Region(fd, 0, size).chunks())
        raise Unavailable(f"has no suite {self._suite.suite}", lasting=True)

    def _signed(self, fd: int, path: bytes, wanted: Wanted, stack: contextlib.ExitStack) -> int:
        """Return a descriptor of the text in ``Release`` or ``InRelease`` that keys of the keyring
        have signed.

        Raises `Unavailable`.
        """
        signed, said = self._spool.file(), self._spool.file()
        stack.callback(os.close, signed)
        stack.callback(os.close, said)
        if path.endswith(b"/InRelease"):
            # Only the signed text, without text before or after it.
            fds, files = (fd, signed), ["--output", f"/dev/fd/{signed}", f"/dev/fd/{fd}"]
        else:
            try:
                signature = self._got(path + b".gpg", wanted, stack)
            except NotThere:
                raise Unavailable("has no signature of its Release", lasting=True) from None
            fds, files, signed = (signature, fd), [f"/dev/fd/{signature}", f"/dev/fd/{fd}"], fd
        keyring = self._suite.signed_by
        words = ["gpgv", "--weak-digest", "SHA1", "--keyring", keyring, "--status-fd", "2", *files]
        try:
            gpgv = child.start(words, stdout=child.DEVNULL, stderr=said, pass_fds=fds)
        except OSError as error:
            why = f"cannot be verified: gpgv: {error.strerror}; install gpgv"
            raise Unavailable(why, lasting=True) from error
        if gpgv.wait(_SIGNATURE_S) is None:
            gpgv.end(_SIGNATURE_S)
        states = _states(os.pread(said, _SAID_BYTES, 0))
        # A second signature, by a key outside the keyring, does no harm: see apt-secure(8).
        if b"GOODSIG" not in states or b"BADSIG" in states:
            why = f"has a {os.path.basename(path).decode()} that no key in {keyring} has signed"
            raise Unavailable(why, lasting=True)
        return signed

    def _got(self, path: bytes, wanted: Wanted, stack: contextlib.ExitStack) -> int:
        """Return a descriptor of a ``Release`` or its signature, which ``stack`` closes."""
        fd = self._get(path, _RELEASE_BYTES, wanted)
        stack.callback(os.close, fd)
        return fd

    def _listed(
        self, lists: list[tuple[bytes, bytes]], wanted: Wanted, stack: contextlib.ExitStack
    ) -> Iterator[apt_lists.ListedPackage]:
        """Yield the packages of all lists. Raises the errors of `_get` and `unpacked`."""
        for path, digest in lists:
            fd = self._get(path, _LISTS_BYTES, wanted)
            stack.callback(os.close, fd)
            if digest and _hash(fd) != digest:
                raise Unavailable(f"has a list whose hash is not that in Release: {path.decode()}")
            size = os.fstat(fd).st_size
            yield from apt_lists.packages(unpacked(Region(fd, 0, size), _LISTS_BYTES).all())

    # --- packages ------------------------------------------------------------------------------

    def _package(self, entry: Entry, wanted: Wanted) -> int:
        """Return a descriptor of a package, which the caller closes. The package is cached for a
        while.
        """
        with self._lock:
            alone = self._downloading.setdefault(entry.sha256, threading.Lock())
        with alone:
            with self._lock:
                kept = self._packages.get(entry.sha256)
                if kept is not None:
                    self._packages.move_to_end(entry.sha256)
                    return os.dup(kept)
            fd = self._get(entry.path, self._spool.most(), wanted)
            try:
                if _hash(fd) != entry.sha256:
                    path = os.fsdecode(entry.path)
                    raise Unavailable(f"has a package whose hash is not that in its list: {path}")
                ours = os.dup(fd)
            except BaseException:
                os.close(fd)
                raise
            with self._lock:
                self._downloading.pop(entry.sha256, None)
                self._packages[entry.sha256] = ours
                self._drop_packages()
            return fd

    def _drop_packages(self) -> None:
        """Close the least recently used packages if there are too many; the caller
        holds the lock.
        """
        total = sum(os.fstat(fd).st_size for fd in self._packages.values())
        while len(self._packages) > _KEPT or (total > _KEPT_BYTES and len(self._packages) > 1):
            fd = self._packages.popitem(last=False)[1]
            total -= os.fstat(fd).st_size
            os.close(fd)

    def _member(self, fd: int, wanted: Wanted) -> Found | None:
        """Return the file in a package that has the wanted build ID; None if there is none.

        Raises `Damaged`, `CannotDecompress`, `Unacceptable`, OSError.
        """
        try:
            package = packages.open_package(fd, os.fstat(fd).st_size, _LIMITS)
        except packages.NotAPackage:
            raise Damaged("not a package") from None
        first, rest = names.split(wanted.build_id)
        path = _DEBUG + first + b"/" + rest + names.DEBUG_SUFFIX
        for member in package.members:
            name = installed(member.name)
            is_dwz = wanted.near is not None and name.startswith(_DWZ)
            if member.type is not Type.FILE or not (name == path or is_dwz):
                continue
            found = self._unpacked(member, package.stream)
            if name == path or elf_file.own_id(found.fd) == wanted.build_id:
                return found
            found.close()
        return None

    def _unpacked(self, member: Member, stream: Stream) -> Found:
        """Return a member as a file of its own. Raises `Unacceptable`, and errors of the stream."""
        if member.stored > self._spool.most():
            raise Unacceptable(f"has a file of {member.stored} bytes, which is too much")
        fd = self._spool.file()
        try:
            for piece in stream.rest(member.stored):
                file_ops.write_fully(fd, bytes(piece))
        except BaseException:
            os.close(fd)
            raise
        return Found(fd, identity_of_copy(member.stored, member.mtime_ns, PUBLIC_ACCESS))

    # --- bytes ---------------------------------------------------------------------------------

    def _get(self, path: bytes, most: int, wanted: Wanted) -> int:
        """Return a descriptor of a file of the mirror, which the caller closes. Raises the errors
        of `fetch`.
        """
        if self._client is None:
            return self._open(path)
        url = self._suite.url + urllib.parse.quote(path.lstrip(b"/"), safe="/~+:")
        headers = forwarded(wanted.hops, wanted.via, self._token)
        fd = self._spool.file()
        try:
            self._client.download(url, fd, most, headers, self._spool.progress)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _open(self, path: bytes) -> int:
        try:
            root_fd = os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return openat2.open_regular_in_root(root_fd, path.lstrip(b"/"))
            finally:
                os.close(root_fd)
        except FileNotFoundError:
            raise NotThere from None
        except OSError as error:
            raise Unavailable(f"cannot be read: {error.strerror}") from error


def _states(said: bytes) -> set[bytes]:
    """Return the key words of gpgv's status lines."""
    lines = (line.split() for line in said.splitlines() if line.startswith(b"[GNUPG:] "))
    return {words[1] for words in lines if len(words) > 1}


def _hash(fd: int) -> bytes:
    """Return the SHA-256 of an open file."""
    hasher = hashlib.sha256()
    for piece in Region(fd, 0, os.fstat(fd).st_size).chunks():
        hasher.update(piece)
    return hasher.digest()
