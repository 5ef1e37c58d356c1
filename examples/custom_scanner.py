#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A scanner of your own: capture the shared libraries inside Python wheels, or any zip file.

    custom_scanner.py STORE WHEEL...

A scanner yields what it finds, with an open descriptor of the bytes; `Ingest` copies, identifies
and records. A scanner decides nothing: what a file is, is read from the bytes that were stored.
Exits with the codes of buildidfs(1).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from buildidfs.capture.base import Found, Memo, PinnedFile, SeenAgain, Unreadable
from buildidfs.errors import BuildIdFsError
from buildidfs.ingest import Ingest, StoreMemo
from buildidfs.linux import statx
from buildidfs.model import OWNER, FileIdentity, Origin, Sighting, Trust
from buildidfs.store import Store

_ELF = b"\x7fELF"


class WheelScanner:
    """The ELF files in zip archives. What ``memo`` knows is not unpacked again."""

    def __init__(self, memo: Memo, paths: Sequence[str]) -> None:
        self._memo = memo
        self._paths = [Path(path) for path in paths]

    def __iter__(self) -> Iterator[Found]:
        for path in self._paths:
            try:
                with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                    identity = statx.identity(file.fileno())
                    yield from self._members(path.absolute(), identity, archive)
            except (OSError, zipfile.BadZipFile) as error:
                # One archive that cannot be read must not stop the scan.
                yield Unreadable(os.fsencode(path), str(error), getattr(error, "errno", 0) or 0)

    def _members(
        self, path: Path, archive_identity: FileIdentity, archive: zipfile.ZipFile
    ) -> Iterator[Found]:
        for member in archive.infolist():
            with archive.open(member) as content:
                if content.read(len(_ELF)) != _ELF:
                    continue
            # The member is unchanged if the archive is; so its identity, with the name added to
            # what makes it unambiguous. None would say that it has to be unpacked each time.
            scope = archive_identity.scope
            identity = msgspec.structs.replace(
                archive_identity,
                size=member.file_size,
                scope=None if scope is None else scope + b"!" + os.fsencode(member.filename),
            )
            origin = Origin(
                os.fsencode(path / member.filename),
                identity,
                host=os.uname().nodename,
                trust=Trust.UNKNOWN,
                scanner="wheel",
                # Nobody looked at the directories above the archive; `capture.origin.path_access`
                # would.
                reach=OWNER,
            )
            sighting = Sighting(origin, time.time_ns())
            known = self._memo.recall(identity)
            if known is not None:
                yield SeenAgain(sighting, known)
            else:
                yield PinnedFile(sighting, _unpack(archive, member))


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """A descriptor of the member's bytes, in a file that is gone when it is closed."""
    with tempfile.TemporaryFile() as file, archive.open(member) as content:
        shutil.copyfileobj(content, file)
        file.flush()
        return os.dup(file.fileno())


def main(arguments: Sequence[str]) -> int:
    """Capture from the wheels named on the command line."""
    if len(arguments) < 2:
        print(f"usage: {Path(sys.argv[0]).name} STORE WHEEL...", file=sys.stderr)
        return 2
    try:
        with Store.create(arguments[0]) as store:
            summary = Ingest(store).run(WheelScanner(StoreMemo(store), arguments[1:]))
    except BuildIdFsError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for item in summary.unreadable:
        print(f"{os.fsdecode(item.path)}: {item.reason}", file=sys.stderr)
    print(f"{summary.captured} captured, {summary.held} already held")
    return 3 if summary.unreadable else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
