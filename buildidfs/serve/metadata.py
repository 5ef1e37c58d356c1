# SPDX-License-Identifier: Apache-2.0
"""The debuginfod request ``/metadata``: the files that were seen at paths, or with a build ID.

    key=glob   paths whose directory and name match the value, split at its last slash
    key=file   the path equals the value
    key=buildid   the build ID equals the value

Reply: ``{"results": [{"type", "buildid", "file", "archive"?}, ...], "complete": bool}``. The reply
has only places at which all users could read the file. Upstream servers and buckets are not asked,
so if any are configured, no reply is complete. Source: debuginfod(8), handle_metadata() of
debuginfod.cxx in elfutils 0.195.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import names
from buildidfs.fleet.tiered_store import TieredStore
from buildidfs.serve.debuginfod import KINDS
from buildidfs.serve.messages import BadRequest, Response, lines, parse_query
from buildidfs.store.index.locations import components
from buildidfs.store.permissions import PUBLIC, is_public, may_see
from buildidfs.wording import glob

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.model import BuildId
    from buildidfs.serve.backend import Backend
    from buildidfs.serve.messages import Request

_LIMIT_S: Final = 5.0
_MOST_RESULTS: Final = 10_000
_MOST_VALUE: Final = 4096
_SPECIAL: Final = re.compile(rb"[*?\[]")

_HEADERS: Final = lines((b"Content-Type", b"application/json"), (b"Cache-Control", b"no-cache"))

_Row = dict[str, str]


class _Enough(Exception):
    """Raised if the limit of time or of results is reached."""


def answer(backend: Backend, request: Request, *, is_all: bool) -> Response:
    """Return the reply to a query, which may take seconds. ``is_all`` is True if no files are
    served that the store lacks. Raises `BadRequest`, `StoreError`, `IntegrityError`.
    """
    query = parse_query(request.query)
    key, value = query.get(b"key", b""), query.get(b"value", b"")
    if not value or len(value) > _MOST_VALUE:
        raise BadRequest("/metadata takes key=glob|file|buildid and value=...")
    search = _Search(backend, time.monotonic() + _LIMIT_S)
    rows: dict[tuple[tuple[str, str], ...], _Row] = {}
    is_complete = is_all and not isinstance(backend.store, TieredStore)
    try:
        for row in search.run(key, value):
            rows[tuple(row.items())] = row
            if len(rows) >= _MOST_RESULTS:
                raise _Enough
    except _Enough:
        is_complete = False
    backend.check()
    reply = {"results": list(rows.values()), "complete": is_complete}
    return Response(200, msgspec.json.encode(reply), _HEADERS, "metadata")


class _Search:
    """One search, which ends at a time of the monotonic clock."""

    def __init__(self, backend: Backend, until: float) -> None:
        self._store = backend.store
        self._until = until

    def run(self, key: bytes, value: bytes) -> Iterator[_Row]:
        """Yield the rows of the reply. Raises `BadRequest`, `_Enough`."""
        if key == b"buildid":
            raw = names.parse(value.lower())
            ordinal = None if raw is None else self._store.index.ordinal(raw)
            return iter(()) if ordinal is None else self._rows(ordinal, None)
        if key == b"file":
            return self._at(value)
        if key == b"glob":
            return self._matching(value)
        raise BadRequest("the key of /metadata is glob, file or buildid")

    def _at(self, path: bytes) -> Iterator[_Row]:
        if number := self._store.paths.number(components(path) or ()):
            yield from self._hanging(number, path)

    def _matching(self, pattern: bytes) -> Iterator[_Row]:
        directory, _, name = pattern.rpartition(b"/")
        found = _SPECIAL.search(directory)
        fixed = directory if found is None else directory[: found.start()].rpartition(b"/")[0]
        parts = [part for part in fixed.split(b"/") if part]
        start = self._store.paths.number(parts)
        if start is None:
            return
        # SQLite's GLOB negates a class with ^
        wanted = glob(directory.replace(b"[^", b"[!")), glob(name.replace(b"[^", b"[!"))
        yield from self._below(start, b"".join(b"/" + part for part in parts), wanted)

    def _below(
        self, start: int, path: bytes, wanted: tuple[re.Pattern[bytes], re.Pattern[bytes]]
    ) -> Iterator[_Row]:
        """Yield rows of files below a directory, through public names only."""
        directories = [(start, path)]
        while directories:
            number, path = directories.pop()
            fits = wanted[0].match(path) is not None
            for name, child in self._store.paths.children(number):
                self._go_on()
                if not self._store.paths.is_public(number, name):
                    continue
                directories.append((child, path + b"/" + name))
                if fits and wanted[1].match(name):
                    yield from self._hanging(child, path + b"/" + name)

    def _hanging(self, number: int, path: bytes) -> Iterator[_Row]:
        for ordinal in self._store.paths.ids(number):
            self._go_on()
            if self._store.paths.has_publicly(number, ordinal):
                yield from self._rows(ordinal, path)

    def _rows(self, ordinal: int, path: bytes | None) -> Iterator[_Row]:
        """Yield rows of a build ID at a path, or at all paths, for the files that a request for it
        would get.
        """
        index = self._store.index
        served = {kind: index.artifact(ordinal, kind) for kind in KINDS.values()}
        build_id = index.build_id(ordinal)
        if build_id is None or names.is_of_sources(build_id):
            return
        if not any(map(is_public, served.values())):
            return
        for record in index.origins(ordinal):
            self._go_on()
            origin = record.origin
            if not may_see(PUBLIC, origin) or (path is not None and origin.path != path):
                continue
            for what, kind in KINDS.items():
                if kind in record.kinds and is_public(served[kind]):
                    yield _row(what, build_id, origin.path, origin.archive)

    def _go_on(self) -> None:
        if time.monotonic() > self._until:
            raise _Enough


def _row(what: bytes, build_id: BuildId, path: bytes, archive: bytes) -> _Row:
    row = {"type": what.decode(), "buildid": str(build_id), "file": path.decode("utf-8", "replace")}
    if archive:
        row["archive"] = archive.decode("utf-8", "replace")
    return row
