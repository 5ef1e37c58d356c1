# SPDX-License-Identifier: Apache-2.0
"""Build IDs of the files named in a file, by one of two readers: ours|pyelftools LISTING.

Prints the seconds it took, then a line `<build ID> <path>` for each file that has one. A process
of its own, so that neither reader finds the other's garbage or the benchmark's in its heap.
"""

from __future__ import annotations

import os
import sys
import time
from itertools import chain
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection
from elftools.elf.segments import NoteSegment

from buildidfs.formats.elf.identify import identify
from buildidfs.model import BuildId

_HEAD = 4096


def ours(path: bytes) -> str | None:
    """As the product does it: one read of the head, more only where the head says so."""
    fd = os.open(path, os.O_RDONLY)
    try:

        def read_at(offset: int, size: int) -> bytes:
            return os.pread(fd, size, offset)

        found = identify(os.pread(fd, _HEAD, 0), read_at)
    finally:
        os.close(fd)
    return found.hex() if isinstance(found, BuildId) else None


def pyelftools(path: bytes) -> str | None:
    """Notes of segments, and of sections only where no segment has one."""
    with open(path, "rb") as file:
        try:
            elf = ELFFile(file)
            for part in chain(elf.iter_segments("PT_NOTE"), elf.iter_sections("SHT_NOTE")):
                if isinstance(part, NoteSegment | NoteSection):
                    for note in part.iter_notes():
                        if note["n_type"] == "NT_GNU_BUILD_ID":
                            return str(note["n_desc"])
        except (ELFError, ValueError, KeyError):
            return None
    return None


def main() -> None:
    """Time one reader over all files, warm."""
    reader = {"ours": ours, "pyelftools": pyelftools}[sys.argv[1]]
    paths = Path(sys.argv[2]).read_bytes().split(b"\n")
    for path in paths:
        ours(path)
    begin = time.perf_counter()
    found = [(reader(path), path) for path in paths]
    print(time.perf_counter() - begin)
    for build_id, path in found:
        if build_id:
            print(build_id, os.fsdecode(path))


if __name__ == "__main__":
    main()
