# SPDX-License-Identifier: Apache-2.0
"""The debuginfod protocol: files, sections and sources of a build ID.

    /buildid/ID/executable, /buildid/ID/debuginfo
    /buildid/ID/section/NAME, /buildid/ID/source/PATH

Source: debuginfod(8), debuginfod.cxx of elfutils 0.194. Beyond the protocol: HEAD, a range, entity
tags, and zstd for blobs that are stored compressed.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, cast

from buildidfs import names
from buildidfs.fleet.ranges import RemoteBlob
from buildidfs.formats import source_archive
from buildidfs.linux.file_ops import on_error
from buildidfs.model import Kind, Quality, fingerprint
from buildidfs.serve import messages
from buildidfs.serve.content import Content
from buildidfs.serve.messages import UPSTREAM, NotNow, Response, Waiting, header_text, lines, text
from buildidfs.shares import Share
from buildidfs.store.permissions import PUBLIC, is_public, may_see
from buildidfs.view import FileContent, NeedsReading, View, nodes
from buildidfs.view.layouts.id_dir import SectionContent

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.model import Artifact, BuildId, ByteRange, Digest, Origin
    from buildidfs.serve.backend import Backend
    from buildidfs.serve.messages import Answer, Request
    from buildidfs.store import Store
    from buildidfs.upstream.agent import Agent

_log = logging.getLogger(__name__)

_WHOLE: Final = frozenset(("executable", "debuginfo"))
"""The types of requests for a whole blob."""

KINDS: Final = {b"executable": Kind.EXECUTABLE, b"debuginfo": Kind.DEBUGINFO}

_ATTEMPTS: Final = 3
_HOPS: Final = 8
"""The maximum number of proxies that a request may have passed. More of them mean a loop."""

_MOST_BLOCKS: Final = 4096
_BLOCK_S: Final = 60.0
"""Seconds after which the places of files are looked up again."""

_SMALL: Final = 16 << 10
_MOST_SMALL_BYTES: Final = 8 << 20
"""The maximum number of bytes of files in memory: the files served last, with up to `_SMALL` bytes
each.
"""

_MOST_LISTED: Final = 100_000
"""The maximum number of source files in the lists that are kept in memory."""

_CONDITIONS: Final = frozenset((b"range", b"if-none-match", b"if-range", b"x-debuginfod-maxsize"))
"""Headers that make the answer depend on more than the file."""

_VARY: Final = lines((b"Vary", b"Accept-Encoding"))
_ZSTD: Final = lines((b"Content-Encoding", b"zstd"))
_FIXED: Final = lines(
    (b"Content-Type", b"application/octet-stream"),
    (b"Accept-Ranges", b"bytes"),
    (b"Cache-Control", b"public"),
)


class Debuginfod:
    """Answers requests below ``/buildid/``."""

    def __init__(self, backend: Backend, agent: Agent | None = None) -> None:
        """``agent`` fetches missing files, if that is enabled."""
        self._agent = agent
        self._backend = backend
        self._store = backend.store
        self._view = backend.view
        self._small = _SmallFiles()
        self._sources = SourceFiles(backend.store)
        self._blocks: dict[tuple[int, Digest], bytes] = {}
        self._blocks_until = 0.0

    def answer(self, request: Request) -> Answer:
        """Return the answer to a request whose path begins with ``/buildid/``.

        Raises OSError and errors of the store if the store cannot be read.
        """
        parts = request.path.split(b"/", 4)
        name = parts[2].lower()  # any spelling of an ID is accepted
        what = parts[3] if len(parts) > 3 else b""
        rest = parts[4] if len(parts) > 4 else None
        if rest is None and what in KINDS:
            return self._file(request, name, what)
        if rest and what == b"section":
            return lambda: self._lasting(lambda: self._section(request, name, rest))
        if rest and what == b"source":
            return lambda: self._lasting(lambda: self._source(request, name, rest))
        return self.missing(request, "other")

    def missing(self, request: Request, kind: str) -> Response:
        """Return the answer that the file does not exist. Clients remember this answer. Raises
        `StoreError`.
        """
        self._backend.check()
        why = "not found"
        if request.header(b"x-forwarded-for").count(b",") >= _HOPS:
            why += f"; the request has passed more than {_HOPS} proxies"
        return text(404, why, kind=kind)

    def open_executable(self, build_id: BuildId) -> FileContent | None:
        """Open the executable of a build ID; None if there is none that all users may read."""
        for _ in range(_ATTEMPTS):
            found = self._find(build_id.hex().encode(), b"executable", wait=True)
            if found is None:
                return None
            try:
                return self._view.open_served(found, wait=True)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
        raise _changing()

    def open_source(self, build_id: BuildId, path: bytes) -> FileContent | None:
        """Open a source file of a build ID, by its path in the debug information."""
        ordinal = self._store.index.ordinal(build_id)
        artifact = None if ordinal is None else self._sources.artifact(ordinal)
        if not is_public(artifact):
            return None
        return self._sources.open(artifact, source_archive.normal(path))

    # --- files -------------------------------------------------------------------------------

    def _file(
        self, request: Request, name: bytes, what: bytes, *, wait: bool = False, asked: bool = False
    ) -> Answer:
        """Return the response with a file. With ``wait``, the whole file may be read first.

        ``asked`` is True if the upstream servers were asked already.
        """
        kind = what.decode()
        for _ in range(_ATTEMPTS):
            try:
                found = self._find(name, what, wait=wait)
                if found is None:
                    return self._not_here(request, name, what, wait=wait, asked=asked)
                artifact, zeroed = found
                tag = _tag(artifact, b"-z" if zeroed else b"")
                early = self._early(request, artifact, zeroed, tag, kind)
                if early is not None:
                    return early
                file = self._view.open_served(found, wait=wait)
            except NeedsReading:
                return self._later(
                    lambda: cast(
                        "Response", self._file(request, name, what, wait=True, asked=asked)
                    ),
                    kind,
                )
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                continue  # removed meanwhile: another file may be served now
            if file is None:
                return lambda: cast(
                    "Response", self._file(request, name, what, wait=True, asked=True)
                )
            if not wait:
                self._small.keep(artifact.digest, zeroed, file)
            return self._reply(request, file, artifact, tag, kind)
        raise _changing()

    # --- upstream servers --------------------------------------------------------------------

    def _later(self, work: Callable[[], Response], kind: str) -> Answer:
        """Return a function that runs ``work``. If ``work`` may ask servers, the function runs in a
        thread for long waits.
        """
        if self._agent is None:
            return work
        return Waiting(work, UPSTREAM, kind)

    def _not_here(
        self, request: Request, name: bytes, what: bytes, *, wait: bool, asked: bool
    ) -> Answer:
        """Return the answer for a missing file: an absence, or a wait for servers.

        Raises `NotNow`. ``asked`` is True if the servers were asked already, ``wait`` if this call
        may wait for them.
        """
        kind, build_id, agent = what.decode(), names.parse(name), self._agent
        _log.debug("%s: not in the store", request.path)
        if build_id is None or asked:
            return self.missing(request, kind)
        if not wait:  # a thread may not
            share = Share(f"client {request.client}")
            self._view.misses.note_build_id(build_id, KINDS[what], share=share)
        hops = request.header(b"x-forwarded-for")
        if agent is None or agent.token.encode() in request.header(b"via"):
            return self.missing(request, kind)  # a server that we have asked asks us
        if hops.count(b",") >= _HOPS:
            return self.missing(request, kind)
        if wait or not agent.is_worth_asking(build_id, KINDS[what]):  # the reason is known
            return self._fetched(request, build_id, what)
        return self._later(lambda: self._fetched(request, build_id, what), kind)

    def _fetched(self, request: Request, build_id: BuildId, what: bytes) -> Response:
        """Fetch a file from the upstream servers, and return the response with it. Raises
        `NotNow`.
        """
        agent = self._agent
        assert agent is not None
        passed = request.header(b"x-forwarded-for")
        hops = passed.count(b",") + 2 if passed else 1
        via = request.header(b"via").decode("ascii", "ignore")
        state = agent.fetch(build_id, KINDS[what], hops, "".join(filter(str.isprintable, via)))
        _log.debug("%s: upstream servers: %s", request.path, state)
        if agent.is_answer(state):
            name = build_id.hex().encode()
            return cast("Response", self._file(request, name, what, wait=True, asked=True))
        raise NotNow("an upstream server that may have it does not answer")

    # --- names -------------------------------------------------------------------------------

    def _find(self, name: bytes, what: bytes, *, wait: bool) -> tuple[Artifact, bool] | None:
        """Return the artifact of a file that all users may read, and True if its scripts read as
        zeros.
        """
        found = self._view.served(name, KINDS[what], wait=wait)
        return None if found is None or not is_public(found[0]) else found

    def _directory(self, name: bytes) -> int:
        """Return the node of a build ID; 0 if the build ID is unknown."""
        node = self._lookup(View.ROOT, name)
        if node >> nodes.TAG_SHIFT != nodes.TAG_ID:
            return 0
        return nodes.of_id(nodes.ordinal_of(node))  # an alias is a link to the directory

    def _lookup(self, node: int, name: bytes) -> int:
        """Return the node of an entry; read a file if the answer needs that."""
        try:
            return self._view.child(node, name)
        except NeedsReading:
            return self._view.lookup_slowly(node, name)

    def _early(
        self, request: Request, artifact: Artifact, zeroed: bool, tag: bytes, kind: str
    ) -> Response | None:
        """Return the answer if the file need not be opened for it; else None."""
        if not _CONDITIONS.isdisjoint(request.headers):
            return _conditional(request, artifact.size, tag, kind)
        data = self._small.get(artifact.digest, zeroed)
        if data is None:
            return None
        self._store.note_use(artifact.digest)
        _log.debug("%s: in memory, from the store", request.path)
        return Response(200, data, self._headers(artifact, len(data), tag), kind)

    def _reply(
        self,
        request: Request,
        file: FileContent,
        artifact: Artifact,
        tag: bytes,
        kind: str,
        source: bytes = b"",
    ) -> Response:
        """Return the response with a file, or a range of it. ``source`` is the path of a source
        file.
        """
        blob = file.blob
        assert blob is not None
        where = "a bucket" if isinstance(blob, RemoteBlob) else "the store"
        _log.debug("%s: in %s, kind %s", request.path, where, kind)
        wanted = request.header(b"range")
        if wanted and request.method == b"GET":
            condition = request.header(b"if-range")
            if not condition or messages.matches(condition, tag, weak=False):
                part = messages.parse_range(wanted, blob.size)
                if part is not None:
                    headers = self._headers(artifact, blob.size, tag, source)
                    return _range(file, headers, part, kind)
        is_packed = kind in _WHOLE and blob.is_packed
        if is_packed and not file.zeros:
            accepted = request.header(b"accept-encoding")
            if accepted and messages.accepts_zstd(accepted):
                headers = self._headers(artifact, blob.size, _packed(tag)) + _VARY + _ZSTD
                stored = Content(file, 0, blob.status.st_size, stored=True)
                return Response(200, stored, headers, kind)
        headers = self._headers(artifact, blob.size, tag, source) + (_VARY if is_packed else b"")
        return Response(200, Content(file, 0, blob.size), headers, kind)

    def _headers(self, artifact: Artifact, size: int, tag: bytes, source: bytes = b"") -> bytes:
        """Return the headers of a file, section or source file of that size."""
        if source:
            named = lines((b"X-DEBUGINFOD-FILE", header_text(source)))
            return b"%s%sX-DEBUGINFOD-SIZE: %d\r\nETag: %s\r\n" % (_FIXED, named, size, tag)
        now = time.monotonic()
        if now > self._blocks_until or len(self._blocks) >= _MOST_BLOCKS:
            self._blocks.clear()
            self._blocks_until = now + _BLOCK_S
        key = artifact.ordinal, artifact.digest
        block = self._blocks.get(key)
        if block is None:
            modified = messages.http_date(artifact.mtime_ns / 1e9)
            block = _FIXED + lines((b"Last-Modified", modified)) + self._place(artifact)
            self._blocks[key] = block
        return b"%sX-DEBUGINFOD-SIZE: %d\r\nETag: %s\r\n" % (block, size, tag)

    def _place(self, artifact: Artifact) -> bytes:
        """Return headers with the latest place at which all users could read the file, and a
        signature.

        If a package has a signature for the same bytes, the signature is used for any place.
        """
        records = self._store.index.origins(artifact.ordinal)
        here = [
            each.origin
            for each in records
            if each.digest == artifact.digest and may_see(PUBLIC, each.origin)
        ]
        headers = b"" if not here else _place_headers(here[0])
        signature = next((each.signature for each in here if each.signature), b"")
        if signature:
            headers += lines((b"X-DEBUGINFOD-IMASIGNATURE", signature.hex().encode()))
        return headers

    # --- sections ----------------------------------------------------------------------------

    def _lasting(self, work: Callable[[], Response]) -> Response:
        """Run ``work`` again if the file was removed meanwhile."""
        for _ in range(_ATTEMPTS):
            try:
                return work()
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
        raise _changing()

    def _section(self, request: Request, name: bytes, section: bytes) -> Response:
        """Return the response with a section; reads the headers of the file."""
        view = self._view
        directory = self._directory(name)
        node = self._lookup(directory, names.SECTION) if directory else 0
        found = view.lookup_slowly(node, section) if node else 0
        if not found:
            return self.missing(request, "section")
        artifact, zeroed = view.section_of(found)
        if not is_public(artifact):
            return self.missing(request, "section")
        tag = _tag(artifact, b"-%s%s" % (b"z-" if zeroed else b"", section.hex().encode()))
        early = _conditional(request, view.attributes(found).size, tag, "section")
        if early is not None:
            return early
        return self._reply(request, view.open(found), artifact, tag, "section")

    # --- sources -----------------------------------------------------------------------------

    def _source(self, request: Request, name: bytes, path: bytes) -> Response:
        """Return the response with a source file, by its path in the debug information."""
        directory = self._directory(name)
        artifact = self._sources.artifact(nodes.ordinal_of(directory)) if directory else None
        if not is_public(artifact):
            return self.missing(request, "source")
        path = source_archive.normal(path)
        file = self._sources.open(artifact, path)
        if file is None:
            return self.missing(request, "source")
        assert file.blob is not None
        tag = _tag(artifact, b"-" + fingerprint(path).hex().encode())
        early = _conditional(request, file.blob.size, tag, "source")
        if early is not None:
            file.close()
            return early
        return self._reply(request, file, artifact, tag, "source", path)


class _SmallFiles:
    """Small files that were served last, in memory.

    A digest means the same bytes for ever, so bytes that were read and verified once can be served
    without the file. For the thread of the loop only.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[tuple[Digest, bool], bytes] = OrderedDict()
        self._bytes = 0

    def get(self, digest: Digest, zeroed: bool) -> bytes | None:
        """Return the content of a file; None if the file is not in memory."""
        return self._files.get((digest, zeroed))

    def keep(self, digest: Digest, zeroed: bool, file: FileContent) -> None:
        """Keep the content of a file if it is small and can be read now."""
        size = 0 if file.blob is None else file.blob.size
        if not 0 < size <= _SMALL:
            return
        try:
            data = Content(file, 0, size).read_now()
        except OSError:
            return  # sending it reports what is wrong
        if data is None or (digest, zeroed) in self._files:
            return
        self._files[digest, zeroed] = data
        self._bytes += size
        while self._bytes > _MOST_SMALL_BYTES:
            self._bytes -= len(self._files.popitem(last=False)[1])


def _conditional(request: Request, size: int, tag: bytes, kind: str) -> Response | None:
    """Return the answer that a file is too large, or that the client has it; else None."""
    most = messages.number(request.header(b"x-debuginfod-maxsize"))
    if most and size > most:
        return text(406, f"File too large, max size={most}", kind=kind)
    known = request.header(b"if-none-match")
    if known and (messages.matches(known, tag) or messages.matches(known, _packed(tag))):
        headers = lines((b"ETag", tag), (b"Cache-Control", b"public"))
        return Response(304, b"", headers, kind)
    return None


def _changing() -> OSError:
    return OSError(errno.ESTALE, "the files of this build ID keep changing")


def _place_headers(origin: Origin) -> bytes:
    """Return the headers that name a file and its archive by their paths, as debuginfod does."""
    headers = lines((b"X-DEBUGINFOD-FILE", header_text(origin.path)))
    if origin.archive:
        headers += lines((b"X-DEBUGINFOD-ARCHIVE", header_text(origin.archive)))
    return headers


def _tag(artifact: Artifact, suffix: bytes) -> bytes:
    return b'"%s%s"' % (artifact.digest.hex().encode(), suffix)


def _packed(tag: bytes) -> bytes:
    """Return the entity tag of the same file in zstd."""
    return tag[:-1] + b'-zstd"'


def _range(file: FileContent, headers: bytes, part: tuple[int, int], kind: str) -> Response:
    assert file.blob is not None
    first, length = part
    size = file.blob.size
    if not length:
        file.close()
        return text(416, "no such range", lines((b"Content-Range", b"bytes */%d" % size)), kind)
    where = b"bytes %d-%d/%d" % (first, first + length - 1, size)
    headers += lines((b"Content-Range", where))
    return Response(206, Content(file, first, length), headers, kind)


class SourceFiles:
    """Finds and opens source files. May be used from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        # The lists of the archives that were asked for last; a digest is the same list for ever.
        self._lists: OrderedDict[Digest, dict[bytes, ByteRange]] = OrderedDict()

    def artifact(self, ordinal: int) -> Artifact | None:
        """Return the archive of the sources of a build ID.

        Returns None if there is none that may be served (`Index.companion`), or if not all users
        may read the debug information.
        """
        index = self._store.index
        build_id = index.build_id(ordinal)
        kept_under = None if build_id is None else names.sources_id(build_id)
        artifact = index.companion(ordinal, kept_under)
        return artifact if self._may_be_named(ordinal) else None

    def _may_be_named(self, ordinal: int) -> bool:
        """Return False if the debug information that names the sources is private."""
        for kind in (Kind.DEBUGINFO, Kind.EXECUTABLE):
            found = self._store.index.artifact(ordinal, kind)
            if found is not None and found.quality >= Quality.DEBUGINFO:
                return is_public(found)
        return True

    def open(self, artifact: Artifact, path: bytes) -> FileContent | None:
        """Open a source file of an archive; None if the archive has no file at that path.

        Raises OSError, `IntegrityError`.
        """
        blob = self._store.open_blob(artifact.digest)
        with on_error(blob.close):
            with self._lock:
                files = self._lists.get(artifact.digest)
            if files is None:
                files = source_archive.unpack(blob.read_at, blob.size) or {}
                with self._lock:
                    self._lists[artifact.digest] = files
                    while len(self._lists) > 1 and self._listed() > _MOST_LISTED:
                        self._lists.popitem(last=False)
            extent = files.get(path)
            if extent is not None:
                return FileContent(b"", (), SectionContent(blob, extent))
        blob.close()
        return None

    def _listed(self) -> int:
        return sum(map(len, self._lists.values()))
