#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A scanner of your own: capture the shared libraries inside Python wheels, or any zip file.

    custom_scanner.py STORE WHEEL...

The scanner yields open files, each with the path to record. `Store.add_files` copies, identifies
and records them: a scanner decides nothing, and the bytes tell what a file is. Exits with the codes
of buildidfs(1).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from buildidfs import Store
from buildidfs.errors import BuildIdFsError, IncompleteError

_ELF = b"\x7fELF"


class WheelScanner:
    """The ELF files in zip archives; ``failures`` has a line for each that cannot be read."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.failures: list[str] = []
        self._paths = [Path(path) for path in paths]

    def __iter__(self) -> Iterator[tuple[Path, IO[bytes]]]:
        for path in self._paths:
            try:
                with zipfile.ZipFile(path) as archive:
                    yield from _members(path.absolute(), archive)
            except (OSError, zipfile.BadZipFile) as error:
                # One archive that cannot be read must not stop the scan.
                self.failures.append(f"{path}: {error}")


def _members(path: Path, archive: zipfile.ZipFile) -> Iterator[tuple[Path, IO[bytes]]]:
    for member in archive.infolist():
        with archive.open(member) as content:
            if content.read(len(_ELF)) != _ELF:
                continue
        with archive.open(member) as content, tempfile.TemporaryFile() as file:
            shutil.copyfileobj(content, file)
            yield path / member.filename, file


def main(arguments: Sequence[str]) -> int:
    """Capture from the wheels named on the command line."""
    if len(arguments) < 2:
        print(f"usage: {Path(sys.argv[0]).name} STORE WHEEL...", file=sys.stderr)
        return 2
    scanner = WheelScanner(arguments[1:])
    try:
        with Store.open(arguments[0], create=True) as store:
            summary = store.add_files(scanner)
    except BuildIdFsError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for failure in scanner.failures:
        print(failure, file=sys.stderr)
    print(f"{summary.captured} captured, {summary.held} already held")
    return IncompleteError.exit_code if scanner.failures else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
