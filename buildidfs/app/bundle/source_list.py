# SPDX-License-Identifier: Apache-2.0
"""Which source files debuginfo names: the list that goes into a bundle, by llvm-dwarfdump(1).

The program runs as those of `symbolizers` do, for each file anew; what it says is a claim of
whoever made the file, and bounded.
"""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING, Final

from buildidfs.app.symbolize import programs
from buildidfs.app.symbolize.programs import Child, Failed, Slots
from buildidfs.capture.archive import decompress
from buildidfs.errors import CapabilityError, UsageError
from buildidfs.formats import bundle_archive, symbolizer_output
from buildidfs.linux import file_ops
from buildidfs.model import Digest, Kind, Quality
from buildidfs.store.blobs import hashing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import IO

    from buildidfs.store import Store

NOT_WANTED: Final = "not wanted"
NO_DEBUGINFO: Final = "no debuginfo is in the bundle"
NOT_INSTALLED: Final = "llvm-dwarfdump is not installed; apt-get install llvm (15 or newer)"
TOO_MUCH: Final = "it names more than is listed"
TOO_LATE: Final = "no time was left for it"

_SECONDS: Final = 1800.0  # for all files
_PATHS: Final = 1 << 20  # of a file
_DIRECTORIES: Final = 1 << 14
_LIST_BYTES: Final = 1 << 30
_NAME_BYTES: Final = 1 << 13


def write(
    store: Store,
    items: Iterable[bundle_archive.Item],
    file: IO[bytes],
    progress: Callable[[int, str], None] | None = None,
) -> bundle_archive.Sources:
    """Write the sources of what is to be in a bundle to an empty file; what its manifest has of it.

    Raises OSError of that file, `IntegrityError`, `StoreError`.
    """
    chosen = _with_debuginfo(items)
    if not chosen:
        return bundle_archive.Sources(why=NO_DEBUGINFO)
    program = programs.find_dumper()
    if program is None:
        return bundle_archive.Sources(why=NOT_INSTALLED)
    lines = _List(file)
    absent = []
    deadline = time.monotonic() + _SECONDS
    for number, item in enumerate(chosen, 1):
        try:
            _ask(store, program, item, lines, deadline)
        except (Failed, UsageError) as error:
            absent.append(bundle_archive.Absent(item.build_id, str(error)))
        except CapabilityError as error:
            return bundle_archive.Sources(why=str(error))
        if progress is not None:
            progress(number, "files asked for their sources")
    return bundle_archive.Sources(lines.size, lines.end(), lines.files, "", tuple(absent))


def _with_debuginfo(items: Iterable[bundle_archive.Item]) -> list[bundle_archive.Item]:
    """The file to ask for each build ID: that which a debugger would read."""
    chosen: dict[str, bundle_archive.Item] = {}
    for item in items:
        if item.quality >= Quality.DEBUGINFO and item.kind_of is not Kind.KALLSYMS:
            before = chosen.get(item.build_id)
            if before is None or item.kind_of is Kind.DEBUGINFO:
                chosen[item.build_id] = item
    return list(chosen.values())


def _ask(
    store: Store, program: str, item: bundle_archive.Item, lines: _List, deadline: float
) -> None:
    """List the sources of one file. Raises `Failed`, `UsageError`, `CapabilityError`."""
    if time.monotonic() >= deadline:
        raise Failed(TOO_LATE)
    with Slots(1) as slots:
        digest = Digest(bytes.fromhex(item.sha256))
        slots.fill(item.size, functools.partial(_copy, store, digest, slots))
        until = min(deadline, time.monotonic() + programs.ANSWER_S)
        # What takes longer, and more memory, comes last.
        for found, option in ((_paths, "--show-sources"), (_directories, "--recurse-depth=0")):
            child = Child([program, option, os.fsdecode(slots.path(0))], slots)
            try:
                for line in found(item.build_id, child.lines(until)):
                    lines.add(line, is_file=found is _paths)
            except Failed as error:
                raise Failed(f"{os.path.basename(program)}: {error}") from error
            finally:
                child.close()


def _copy(store: Store, digest: Digest, slots: Slots, target: int) -> None:
    try:
        with store.open_blob(digest) as blob:
            file_ops.copy(blob.fileno(), target)
        decompress.unpack_sections(target, slots.most_bytes)
    except decompress.CannotDecompress as error:
        raise Failed(f"its debug information cannot be read: {error}") from error


def _paths(build_id: str, said: Iterable[bytes]) -> Iterator[bytes]:
    """The lines for source files, which llvm-dwarfdump has sorted."""
    for number, name in enumerate(said):
        if number == _PATHS:
            raise Failed(TOO_MUCH)
        if name and len(name) <= _NAME_BYTES:
            yield bundle_archive.encode_source(build_id, path=name)


def _directories(build_id: str, said: Iterable[bytes]) -> Iterator[bytes]:
    """The lines for the directories in which compilers ran, each once."""
    known: set[bytes] = set()
    for line in said:
        name = symbolizer_output.directory_of_llvm(line)
        if name and name not in known and len(name) <= _NAME_BYTES:
            if len(known) == _DIRECTORIES:
                raise Failed(TOO_MUCH)
            known.add(name)
            yield bundle_archive.encode_source(build_id, directory=name)


class _List:
    """The list as it grows, in a file that is written from its beginning."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hasher = hashing.sha256()
        self.size = 0
        self.files = 0

    def add(self, line: bytes, *, is_file: bool) -> None:
        """One more line. Raises OSError, `Failed` where there is no room for it."""
        if self.size + len(line) > _LIST_BYTES:
            raise Failed(TOO_MUCH)
        self._file.write(line)
        self._hasher.update(line)
        self.size += len(line)
        self.files += is_file

    def end(self) -> str:
        """Write what is left; the digest of all, as hex. Raises OSError."""
        self._file.flush()
        return self._hasher.hexdigest()
