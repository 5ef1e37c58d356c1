# SPDX-License-Identifier: Apache-2.0
"""Make a small store with a bit of everything, as a compressed tar archive.

Run with the code whose format is wanted, once for each format, before it changes:

    git worktree add --detach /tmp/old REVISION
    PYTHONPATH=/tmp/old:. python tests/golden/make.py tests/golden/format-N.tar.xz

What is in it is in `CONTENT`, and what `tests/unit/test_store_golden.py` expects.
"""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
from pathlib import Path

import lmdb

from buildidfs.formats.elf.identify import ElfFile, classify, describe
from buildidfs.model import (
    Absence,
    BuildId,
    FileIdentity,
    Kind,
    NamespaceSet,
    Origin,
    Sighting,
    Trust,
)
from buildidfs.store import NewAbsence, NewCapture, NewSeen, Store
from tests.support.elf import elfwriter as elf

SECOND = 1_000_000_000
NOW = 1_700_000_000 * SECOND
BOOT = bytes(range(16))

APP = BuildId(bytes.fromhex("0badc0de" * 5))
DWZ = BuildId(bytes.fromhex("d0d0d0d0d0d0d0d0"))
VDSO = BuildId(b"\x7e\x57")

#: Bytes of each file: name, bytes.
CONTENT = {
    "stripped": elf.elf_file([elf.TEXT, elf.DYNSYM], build_id=APP),
    "unstripped": elf.elf_file([elf.TEXT, elf.SYMTAB], build_id=APP),
    "debug": elf.elf_file([elf.TEXT_SPLIT, elf.SYMTAB, elf.DWARF], build_id=APP),
    "scripted": elf.elf_file(
        [elf.TEXT_SPLIT, elf.SYMTAB, elf.DWARF, elf.gdb_scripts("pass")], build_id=APP
    ),
    "dwz": elf.elf_file([elf.DWARF], build_id=DWZ),
    "vdso": elf.elf_file([elf.TEXT], build_id=VDSO),
    "bare": elf.elf_file([elf.TEXT]),
}


def seen(
    path: bytes, trust: Trust, at: int, *, ino: int, container: str = "", mode: int = 0o100755
) -> Sighting:
    """A sighting ``at`` seconds after `NOW`."""
    identity = FileIdentity(
        dev=0xFE00, ino=ino, size=1, mtime_ns=NOW - 500 * SECOND, ctime_ns=NOW - 400 * SECOND,
        mode=mode, uid=0, gid=0, scope=b"",
    )  # fmt: skip
    origin = Origin(
        path=path, identity=identity, namespaces=NamespaceSet(mnt=7 if container else 1),
        mnt_ns_id=70 if container else 10, cgroup=b"/box" if container else b"/",
        container=container, host="golden", trust=trust, scanner="tree",
    )  # fmt: skip
    return Sighting(origin, NOW + at * SECOND)


def fill(store: Store) -> None:
    """Captures of all kinds, a memo, a journal."""

    def new(name: str, build_id: BuildId, kind: Kind | None, at: Sighting) -> NewCapture:
        fd = os.memfd_create(name)
        try:
            os.write(fd, CONTENT[name])
            staged = store.stage(fd)
        finally:
            os.close(fd)
        content = CONTENT[name]

        def read_at(offset: int, size: int) -> bytes:
            return content[offset : offset + size]

        file = describe(read_at, len(content))
        if file is Absence.NO_BUILD_ID:
            file = classify(build_id, content[:4096], read_at, len(content))
        assert isinstance(file, ElfFile)
        kinds = file.kinds if kind is None else (kind,)
        segments = {name: getattr(file, name) for name in ("segments",) if hasattr(file, name)}
        return NewCapture(at, staged, build_id, kinds, file.quality, file.scripts, **segments)

    inside, host = Trust.CONTAINER, Trust.HOST
    store.commit(
        [
            new(
                "stripped", APP, None,
                seen(b"/app/bin/app", inside, 0, ino=1, container="box", mode=0o100700),
            ),
            new(
                "scripted", APP, None,
                seen(b"/app/bin/app.debug", inside, 1, ino=2, container="box"),
            ),
        ]
    )  # fmt: skip
    store.commit(
        [
            new("unstripped", APP, None, seen(b"/usr/bin/app", host, 2, ino=3)),
            new("debug", APP, None, seen(b"/d/app.debug", host, 3, ino=4)),
            new("dwz", DWZ, None, seen(b"/usr/lib/debug/.dwz/x86_64/app", host, 4, ino=5)),
            new("vdso", VDSO, Kind.VDSO, seen(b"[vdso]", host, 5, ino=0)),
            # The same bytes under another build ID, which a file without one may have.
            new("bare", APP, Kind.VDSO, seen(b"[vdso]", inside, 6, ino=0)),
            new("bare", DWZ, Kind.VDSO, seen(b"[vdso]", inside, 6, ino=0)),
            # The same bytes at another place, whose name is not text.
            new("unstripped", APP, None, seen(b"/opt/\xff/app", host, 60, ino=6)),
        ],
        [NewAbsence(seen(b"/bin/sh", host, 7, ino=7).origin.identity, NOW, Absence.NOT_ELF)],
        [
            NewSeen(seen(b"/app/bin/app", inside, 8, ino=1, container="box"), APP, BOOT),
            NewSeen(seen(b"/gone", inside, 9, ino=9, container="box"), BuildId(b"gone"), BOOT),
        ],
    )  # fmt: skip


def keep(store: Store) -> None:
    """Pins, and rows that a removal left for the mounts."""
    store.pin([APP, BuildId(b"later")], b"/profiles/perf.data")
    (digest,) = (each.digest for each in store.index.variants(3, Kind.VDSO))
    store.remove([digest])


def pack(store: Path, archive: Path) -> None:
    """The store as an archive; its index without holes."""
    compact = store / "compact"
    compact.mkdir()
    with lmdb.open(str(store / "index"), readonly=True, map_size=1 << 30) as env:
        env.copy(str(compact), compact=True)
    with tarfile.open(archive, "w:xz", format=tarfile.PAX_FORMAT) as tar:
        names = [store / "format", *sorted(store.glob("blobs/**/*")), compact / "data.mdb"]
        for name in names:
            if name.is_file():
                inside = name.relative_to(store)
                info = tar.gettarinfo(name, str(inside).replace("compact", "index"))
                info.uid = info.gid = info.mtime = 0
                info.uname = info.gname = ""
                with name.open("rb") as file:
                    tar.addfile(info, file)


def main(archive: str) -> None:
    """Make it."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "store")
        with Store.create(path) as store:
            fill(store)
            if hasattr(store, "pin"):
                keep(store)
            assert list(store.check()) == []
        pack(path, Path(archive))


if __name__ == "__main__":
    main(sys.argv[1])
