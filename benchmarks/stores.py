# SPDX-License-Identifier: Apache-2.0
"""Stores to measure: of files that were scanned, and synthetic ones of any size.

A synthetic store has the rows that captures make, through the code that makes them, with a blob,
an origin and a path of its own for each build ID. Only `OPENED` of the blobs have bytes: no
benchmark opens the others, and a million files would take an hour.
"""

from __future__ import annotations

import os
import re
import stat
import time
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bench import Bench, run
from benchmarks.data import build_ids, elf_head, write_elf
from benchmarks.mounts import buildidfs
from buildidfs.model import (
    BuildId,
    Digest,
    FileIdentity,
    Kind,
    Origin,
    Quality,
    Sighting,
    Trust,
)
from buildidfs.store import NewCapture, Staged, Store
from buildidfs.store.blobs.files import BlobFile, Blobs
from buildidfs.store.index import environment
from buildidfs.store.write.transaction import Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

OPENED = 500
_BATCH = 10_000
_SIZE = 32768
_SMALL = 1024


def scanned(bench: Bench, name: str, *trees: Path) -> Path:
    """A store of everything below ``trees``, captured by the command; made once a run."""
    store = bench.workdir / name
    if not store.exists():
        bench.say(f"capturing {', '.join(tree.name for tree in trees)}")
        run([*buildidfs(store, "scan", "tree"), *trees])
    return store


def blob_of(store: Path, build_id: str) -> Path:
    """The file that holds the executable with that build ID."""
    with Store.open(store, read_only=True) as opened:
        ordinal = opened.index.ordinal(BuildId.from_hex(build_id))
        artifact = opened.index.artifact(ordinal, Kind.EXECUTABLE) if ordinal else None
        if artifact is None:
            raise RuntimeError(f"{store} has no executable {build_id}")
        return Path(os.fsdecode(opened.blobs.path(artifact.digest)))


def build_id_of(path: Path) -> str:
    """The build ID of a file as readelf tells it."""
    match = re.search(rb"Build ID: ([0-9a-f]+)", run(["readelf", "-n", path]))
    if match is None:
        raise RuntimeError(f"{path} has no build ID")
    return match[1].decode()


def opened_ids(count: int) -> list[str]:
    """The build IDs of a synthetic store that can be opened, spread over all of it."""
    return build_ids(count)[:: count // OPENED][:OPENED]


def synthetic(bench: Bench, count: int) -> Path:
    """A store of ``count`` build IDs, at least `OPENED`; made once a run."""
    path = bench.workdir / f"store-{count}"
    if path.exists():
        return path
    bench.say(f"making a store of {count} build IDs")
    # Under its name only when complete: a work directory may be used again.
    part = bench.workdir / f"store-{count}.part"
    real = set(opened_ids(count))
    ids = build_ids(count)
    with Store.create(part) as store:
        for begin in range(0, count, _BATCH):
            batch = ids[begin : begin + _BATCH]
            store.commit(
                [
                    captured(store, bench.workdir / "staged", build_id, begin + number)
                    for number, build_id in enumerate(batch)
                    if build_id in real
                ]
            )
            _record(store, batch, begin, real)
    part.rename(path)
    return path


def captured(store: Store, scratch: Path, build_id: str, number: int) -> NewCapture:
    """A small file with that build ID, staged; ``scratch`` is a file to make it in."""
    write_elf(scratch, build_id, _SIZE)
    fd = os.open(scratch, os.O_RDONLY)
    try:
        staged = store.stage(fd)
    finally:
        os.close(fd)
        scratch.unlink()
    return _capture(build_id, number, staged)


class _NoFiles(Blobs):
    """Blobs of which it is believed that they have files."""

    def file(self, digest: Digest) -> BlobFile:
        return BlobFile(_SIZE, 1, 1)


def _record(store: Store, batch: Sequence[str], begin: int, without: set[str]) -> None:
    """Rows as `Store.commit` writes them, for blobs that have no file."""
    blobs = _NoFiles(os.fsencode(store.path), writable=False)
    captures = []
    for number, build_id in enumerate(batch, begin):
        if build_id not in without:
            staged = Staged(-1, None)
            staged.size = _SIZE
            staged.digest = Digest(sha256(build_id.encode()).digest())
            captures.append(_capture(build_id, number, staged))
    try:
        _write_rows(store, blobs, captures)
    finally:
        blobs.close()


def _write_rows(store: Store, blobs: Blobs, captures: Sequence[NewCapture]) -> None:
    env = environment.acquire(os.fsencode(store.path), read_only=False)

    def work(txn: environment.Txn) -> None:
        added = {new.content.digest for new in captures if isinstance(new.content, Staged)}
        recorder = Recorder(env, txn, blobs, added)
        for new in captures:
            recorder.capture(new)
        recorder.finish()

    try:
        env.write(work)
    finally:
        environment.release(env)


def whole(bench: Bench, count: int) -> Path:
    """A store of ``count`` build IDs that nothing is wrong with: all blobs are there. Made once a
    run, and not synced to the disk.
    """
    path = bench.workdir / f"whole-{count}"
    if path.exists():
        return path
    bench.say(f"making a store of {count} build IDs, with all their files")
    part = bench.workdir / f"whole-{count}.part"
    ids = build_ids(count)
    with Store.create(part) as store:
        for begin in range(0, count, _BATCH):
            captures = []
            for number, build_id in enumerate(ids[begin : begin + _BATCH], begin):
                staged = Staged(-1, None)
                content = elf_head(build_id, _SMALL).ljust(_SMALL, b"\1")
                staged.size, staged.digest = _SMALL, Digest(sha256(content).digest())
                blob = Path(os.fsdecode(store.blobs.path(staged.digest)))
                blob.parent.mkdir(exist_ok=True)
                blob.write_bytes(content)
                captures.append(_capture(build_id, number, staged))
            _write_rows(store, store.blobs.files, captures)
    part.rename(path)
    return path


def _capture(build_id: str, number: int, staged: Staged) -> NewCapture:
    now = time.time_ns()
    path = b"/usr/lib/package%d/lib%d.so" % (number // 20, number)
    identity = FileIdentity(
        dev=0xFE00,
        ino=number + 1000,
        size=_SIZE,
        mtime_ns=now - 10**15,
        ctime_ns=now - 10**15,
        mode=stat.S_IFREG | 0o755,
        uid=0,
        gid=0,
        scope=b"",
    )
    origin = Origin(path=path, identity=identity, host="host", trust=Trust.HOST, scanner="tree")
    return NewCapture(
        sighting=Sighting(origin, now),
        content=staged,
        build_id=BuildId.from_hex(build_id),
        kinds=(Kind.EXECUTABLE,),
        quality=Quality.DYNSYM,
    )
