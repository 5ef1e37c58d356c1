# SPDX-License-Identifier: Apache-2.0
"""Search for public files by build ID, alias, path, file name, container and symbol.

A search for an ID, a path or the start of a file name follows the order of the index, with about as
many reads as there are hits. For patterns, and for parts of names with which no name starts, all
file names are kept in memory (`FileNameList`). A search for symbols reads file by file, for a
limited time.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from itertools import islice
from typing import TYPE_CHECKING, Final

from buildidfs import answers, wording
from buildidfs.errors import AmbiguousBuildId, ArtifactMissing, IntegrityError, InvalidBuildId
from buildidfs.formats.elf.sections import Sections, defines
from buildidfs.model import Kind
from buildidfs.names import is_of_sources
from buildidfs.serve.page.build_id import public_variants
from buildidfs.serve.page.overview import is_served, text
from buildidfs.store.index.locations import NAMES, components
from buildidfs.store.permissions import PUBLIC, is_public, may_see

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.catalog.containers import Names
    from buildidfs.model import BuildId
    from buildidfs.store import Store

MOST_HITS: Final = 50
MOST_QUERY: Final = 4096
LIMIT_S: Final = 1.0
SYMBOLS_S: Final = 5.0
"""The seconds that a search may take, without and with symbols."""
_MOST_LOOKED_AT: Final = 2000
_MOST_NAMES: Final = 1 << 20
_NAMES_S: Final = 60.0
_MOST_SYMBOLS: Final = 32 << 20
_HEX: Final = re.compile(r"(?:gnu:)?([0-9a-f]{2,240})")
_SPECIAL: Final = re.compile(r"[*?\[]")


class FileNameList:
    """All file names of a store, at most a minute old. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._until = 0.0
        self._joined = b""

    def containing(self, part: bytes) -> Iterator[bytes]:
        """Yield the names that contain ``part``. ``part`` must not contain a NUL."""
        joined = self._fresh()
        at = joined.find(part)
        while at >= 0:
            begin, end = joined.rfind(b"\0", 0, at) + 1, joined.find(b"\0", at)
            yield joined[begin:end]
            at = joined.find(part, end)

    def every(self) -> Iterator[bytes]:
        """Yield all names."""
        yield from self._fresh().split(b"\0")[1:-1]

    def _fresh(self) -> bytes:
        with self._lock:
            if time.monotonic() > self._until:
                rows = islice(self._store.paths.children(NAMES), _MOST_NAMES)
                self._joined = b"\0" + b"".join([name + b"\0" for name, _ in rows])
                self._until = time.monotonic() + _NAMES_S
            return self._joined


class _Enough(Exception):
    """There are enough hits, or the time is over."""


def search(
    store: Store,
    names: Names,
    files: FileNameList,
    query: str,
    *,
    symbols: bool = False,
    limit_s: float = LIMIT_S,
) -> answers.Found:
    """Find files by any word. With ``symbols``, also search inside the files, which takes longer.

    Raises `StoreError`, `IntegrityError`.
    """
    query = text(query.strip()[:MOST_QUERY])
    return _Search(store, names, files, query, time.monotonic() + limit_s).run(symbols)


class _Search:
    """One search, which ends at a time of the monotonic clock."""

    def __init__(
        self, store: Store, names: Names, files: FileNameList, query: str, until: float
    ) -> None:
        self._store = store
        self._names = names
        self._files = files
        self._query = query
        self._until = until
        self._hits: dict[tuple[str, str, str], answers.Hit] = {}

    def run(self, symbols: bool) -> answers.Found:
        ways: list[tuple[str, Callable[[], None]]] = [
            ("build IDs", self._by_id),
            ("paths", self._by_path),
            ("containers", self._by_container),
        ]
        if symbols:
            ways.append(("symbols", self._by_symbol))
        searched = []
        complete = True
        for name, way in ways if self._query else ():
            searched.append(name)
            try:
                way()
            except _Enough:
                complete = False
                break
        return answers.Found(self._query, list(self._hits.values()), complete, searched)

    def _go_on(self) -> None:
        if time.monotonic() > self._until:
            raise _Enough

    def _add(self, hit: answers.Hit) -> None:
        self._hits.setdefault((hit.kind, hit.build_id or hit.container, hit.path), hit)
        if len(self._hits) >= MOST_HITS:
            raise _Enough

    # --- build IDs ---------------------------------------------------------------------------

    def _by_id(self) -> None:
        digits = _HEX.fullmatch(self._query.lower())
        if digits is not None:
            self._with_prefix(digits[1])
        errors = (AmbiguousBuildId, ArtifactMissing, InvalidBuildId)
        with contextlib.suppress(*errors):
            build_id, _ = self._store.aliases.resolve(self._query)
            ordinal = self._store.index.ordinal(build_id)
            if ordinal is not None:
                self._add_build_id(ordinal, build_id, "other name of the file")

    def _with_prefix(self, digits: str) -> None:
        prefix = bytes.fromhex(digits[: len(digits) // 2 * 2])
        found = self._store.index.build_ids_with_prefix(prefix)
        for number, (build_id, ordinal) in enumerate(found):
            if number >= _MOST_LOOKED_AT:
                raise _Enough
            if build_id.hex().startswith(digits):
                self._add_build_id(ordinal, build_id, "build ID")

    def _add_build_id(
        self, ordinal: int, build_id: BuildId, why: str, fits: bytes | None = None
    ) -> None:
        """Add a build ID with its last public place; with ``fits``, with the last one whose path
        ends with that text.
        """
        self._go_on()
        if is_of_sources(build_id):
            return
        store = self._store
        if not is_served(store, ordinal) and not any(
            public_variants(store, ordinal, kind) for kind in Kind
        ):
            return
        for record in store.index.origins(ordinal):
            origin = record.origin
            if may_see(PUBLIC, origin) and (fits is None or _is_at(origin.path, fits)):
                container = text(self._names.short(origin.container, origin.cgroup))
                seen = record.last_seen_ns / 1e9
                self._add(
                    answers.Hit("file", build_id.hex(), text(origin.path), container, seen, why)
                )
                return
        if fits is None:
            self._add(answers.Hit("file", build_id.hex(), "", "", 0.0, why))

    # --- paths -------------------------------------------------------------------------------

    def _by_path(self) -> None:
        raw = self._query.encode("utf-8", "surrogateescape")
        if b"/" in raw:
            self._at_path(raw)
        elif _SPECIAL.search(self._query):
            self._fitting(wording.glob(self._query))
        else:
            self._with_name(raw)
            if not self._hits:
                for name in self._files.containing(raw):
                    self._with_exact_name(name)

    def _at_path(self, path: bytes) -> None:
        """Add the files at a path, or in a directory."""
        paths = self._store.paths
        number = 0
        for name in components(path) or ():
            child = paths.child(number, name)
            if child is None or not paths.is_public(number, name):
                return
            number = child
        if not number:
            return
        waiting = [number]
        while waiting:
            number = waiting.pop()
            self._go_on()
            for ordinal in paths.ids(number):
                if paths.has_publicly(number, ordinal):
                    self._add_ordinal(ordinal, "path", paths.spelled(number))
            for name, child in islice(paths.children(number), _MOST_LOOKED_AT):
                self._go_on()
                if paths.is_public(number, name):
                    waiting.append(child)

    def _with_name(self, start: bytes) -> None:
        """Add the files whose name is a text or begins with it."""
        self._with_exact_name(start)
        for name, child in self._store.paths.children(NAMES, start):
            if not name.startswith(start):
                return
            self._named(name, child)

    def _with_exact_name(self, name: bytes) -> None:
        number = self._store.file_names.number(name)
        if number is not None:
            self._named(name, number)

    def _fitting(self, pattern: re.Pattern[bytes]) -> None:
        """Add the files whose name matches a pattern."""
        for number, name in enumerate(self._files.every()):
            if not number % 256:
                self._go_on()
            if pattern.match(name):
                self._with_exact_name(name)

    def _named(self, name: bytes, number: int) -> None:
        self._go_on()
        for ordinal in self._store.file_names.ids(number):
            if self._store.file_names.has_publicly(number, ordinal):
                self._add_ordinal(ordinal, "file name", b"/" + name)

    def _add_ordinal(self, ordinal: int, why: str, fits: bytes) -> None:
        build_id = self._store.index.build_id(ordinal)
        if build_id is not None:
            self._add_build_id(ordinal, build_id, why, fits)

    # --- containers --------------------------------------------------------------------------

    def _by_container(self) -> None:
        wanted = self._query.lower()
        for each in self._store.containers.every():
            if not each.public:
                continue
            names = (each.called.shown, each.label, each.called.image, each.id)
            if any(wanted in name.lower() for name in names):
                shown = text(each.called.shown or each.label)
                label = text(each.name)
                self._add(
                    answers.Hit("container", "", label, shown, each.last_seen_ns / 1e9, "container")
                )

    # --- symbols -----------------------------------------------------------------------------

    def _by_symbol(self) -> None:
        """Add the files that define a symbol, the newest build IDs first. A reference is no hit."""
        wanted = self._query.encode("utf-8", "surrogateescape")
        for ordinal, build_id in reversed(list(self._store.index.build_ids_from())):
            self._go_on()
            if self._defines(ordinal, wanted):
                self._add_build_id(ordinal, build_id, "symbol")

    def _defines(self, ordinal: int, wanted: bytes) -> bool:
        for kind in (Kind.EXECUTABLE, Kind.DEBUGINFO):
            artifact = self._store.index.artifact(ordinal, kind)
            if not is_public(artifact):
                continue
            with (
                contextlib.suppress(OSError, IntegrityError),
                self._store.blobs.open(artifact.digest) as blob,
            ):
                if defines(Sections(blob.read_at, blob.size), wanted, _MOST_SYMBOLS):
                    return True
        return False


def _is_at(path: bytes, end: bytes) -> bool:
    """Return True if the last components of a path equal ``end``."""
    normal = b"/" + b"/".join(filter(None, path.split(b"/")))
    return normal.endswith(end)
