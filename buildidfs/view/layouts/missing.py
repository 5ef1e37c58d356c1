# SPDX-License-Identifier: Apache-2.0
"""``missing/<id>``: build IDs that clients asked for in vain, how often, and when last.

The latest `MOST` of them are kept in memory. A front door notes the names that it did not find; a
listing of ``missing`` turns those into build IDs, since it is rarely read. A build ID that has
arrived is not listed any more.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Final

from buildidfs import names
from buildidfs.model import BuildId, Kind
from buildidfs.view import nodes
from buildidfs.view.attributes import CONTROL, moment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.store import Store

MOST: Final = 4096
_MOST_CLIENTS: Final = 16
_OTHERS: Final = b"others"

_ANY: Final = 0
_BUCKETS_END: Final = nodes.PERF_BUCKET + 256
_NAME_OF: Final = {Kind.EXECUTABLE: "executable", Kind.DEBUGINFO: "debuginfo"}
_INSTEAD: Final = 1 << Kind.VDSO | 1 << Kind.KALLSYMS
"""The kinds that perf takes instead of an executable."""

#: How often a name was asked for, when first, and when last.
_Question = tuple[int, float, float]


class Miss:
    """One missing build ID. ``wanted`` has 1<<kind for each kind, or is 0: any."""

    __slots__ = ("build_id", "clients", "count", "first", "last", "serial", "wanted")

    def __init__(self, build_id: BuildId, serial: int, first: float) -> None:
        self.build_id = build_id
        self.serial = serial
        self.wanted = _ANY
        self.count = 0
        self.clients: dict[bytes, int] = {}
        self.first = self.last = first

    def asked(self, kind: int, client: bytes, question: _Question) -> None:
        """Count a question for it; ``kind`` 0 is any."""
        count, first, last = question
        self.wanted |= 1 << kind if kind else _ANY
        self.count += count
        self.first, self.last = min(self.first, first), max(self.last, last)
        client = CONTROL.sub(b"?", client)
        if client not in self.clients and len(self.clients) >= _MOST_CLIENTS:
            client = _OTHERS
        self.clients[client] = self.clients.get(client, 0) + count

    def text(self) -> bytes:
        """The text of the file."""
        wanted = [name for kind, name in _NAME_OF.items() if self.wanted & 1 << kind]
        often = sorted(self.clients.items(), key=lambda each: (-each[1], each[0]))
        by = b", ".join(b"%s (%d)" % each for each in often)
        lines = (
            f"build-id: {self.build_id}",
            f"wanted: {', '.join(wanted) or 'anything'}",
            f"asked: {self.count}",
            f"first: {moment(self.first)}",
            f"last: {moment(self.last)}",
        )
        return "".join(f"{line}\n" for line in lines).encode() + b"by: " + by + b"\n"


class Misses:
    """The missing build IDs. For any thread."""

    def __init__(self, store: Store, most: int = MOST) -> None:
        self._store = store
        self._most = most
        self._serials = itertools.count(1)
        self._questions: dict[tuple[int, bytes, bytes], _Question] = {}
        self._misses: dict[BuildId, Miss] = {}
        self._lock = threading.Lock()

    def note(self, directory: int, name: bytes, client: bytes) -> None:
        """``client`` looked up ``name``, which is not there. For one thread."""
        if directory >= _BUCKETS_END and directory >> nodes.TAG_SHIFT != nodes.TAG_ID:
            return  # no names of artifacts, and a client that tries paths tries many
        questions = self._questions
        key = (directory, name, client)
        now = time.time()
        count, first, _ = questions.pop(key, (0, now, now))
        if len(questions) >= self._most:
            questions.pop(next(iter(questions), key), None)
        questions[key] = (count + 1, first, now)

    def lookup(self, name: bytes) -> int:
        """The node of an entry of ``missing``, `nodes.ABSENT` if there is none."""
        self._answer()
        build_id = names.parse(name)
        miss = None if build_id is None else self._misses.get(build_id)
        return nodes.ABSENT if miss is None or self._has_come(miss) else _node(miss)

    def children(self, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Entries of ``missing`` whose offset is beyond ``after``: name, node, offset."""
        self._answer()
        for miss in list(self._misses.values()):
            if miss.serial > after and not self._has_come(miss):
                yield names.spell(miss.build_id), _node(miss), miss.serial

    def text(self, node: int) -> bytes:
        """The text of a file in ``missing``; empty if the build ID has arrived."""
        self._answer()
        serial = nodes.number_of(node)
        for miss in list(self._misses.values()):
            if miss.serial == serial and not self._has_come(miss):
                return miss.text()
        return b""

    def _answer(self) -> None:
        """Turn the names that were asked for into build IDs, as far as they are of artifacts."""
        with self._lock:
            questions, self._questions = self._questions, {}
            # A list: `note` may still change them at this moment.
            for (directory, name, client), question in list(questions.items()):
                asked = self._asked(directory, name)
                if asked is not None:
                    self._miss(asked[0], question[1]).asked(asked[1], client, question)

    def _miss(self, build_id: BuildId, first: float) -> Miss:
        miss = self._misses.get(build_id)
        if miss is None:
            if len(self._misses) >= self._most:
                self._misses.pop(next(iter(self._misses), build_id), None)
            miss = Miss(build_id, next(self._serials) & nodes.NUMBER_MASK, first)
            self._misses[build_id] = miss
        return miss

    def _asked(self, directory: int, name: bytes) -> tuple[BuildId, int] | None:
        """The artifact that a name in a directory is that of; its kind is 0 for any."""
        if directory == nodes.ROOT:
            build_id = names.parse(name)
            return None if build_id is None else (build_id, _ANY)
        if nodes.DEBUG_BUCKET <= directory < nodes.DEBUG_BUCKET + 256:
            return _of_bucket(directory - nodes.DEBUG_BUCKET, name)
        if nodes.PERF_BUCKET <= directory < nodes.PERF_BUCKET + 256:
            return _of_bucket(directory - nodes.PERF_BUCKET, name)
        is_directory = directory >> nodes.TAG_SHIFT == nodes.TAG_ID
        kind = names.KIND_OF.get(name) if is_directory else None
        if kind not in _NAME_OF or nodes.slot_of(directory) != nodes.SLOT_DIRECTORY:
            return None
        owner = self._store.index.build_id(nodes.ordinal_of(directory))
        return None if owner is None else (owner, kind)

    def _has_come(self, miss: Miss) -> bool:
        ordinal = self._store.index.ordinal(miss.build_id)
        kinds = 0 if ordinal is None else self._store.index.kinds(ordinal)
        if kinds & _INSTEAD:
            kinds |= 1 << Kind.EXECUTABLE
        if not kinds or miss.wanted & ~kinds:
            return False
        self._misses.pop(miss.build_id, None)
        return True


def _of_bucket(first: int, name: bytes) -> tuple[BuildId, int] | None:
    parsed = names.parse_split(first, name)
    if parsed is None:
        return None
    build_id, debug = parsed
    return build_id, Kind.DEBUGINFO if debug else Kind.EXECUTABLE


def _node(miss: Miss) -> int:
    return nodes.of_browsing(nodes.FORM_MISSING, within=miss.serial)
