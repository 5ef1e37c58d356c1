# SPDX-License-Identifier: Apache-2.0
"""Stores to measure: of files that were scanned, and synthetic ones of any size.

A synthetic store has the rows that captures make, through the code that makes them, with a blob,
an origin and a path of its own for each build ID. Only `OPENED` of the blobs have bytes: nobody
opens the others, and a million files would take an hour.
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
from benchmarks.data import build_ids, write_elf
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
from buildidfs.store import NewCapture, Staged, Store, environment
from buildidfs.store.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

OPENED = 500
_BATCH = 10_000
_SIZE = 32768


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
        ordinal = opened.ordinal(BuildId.from_hex(build_id))
        artifact = opened.artifact(ordinal, Kind.EXECUTABLE) if ordinal else None
        if artifact is None:
            raise RuntimeError(f"{store} has no executable {build_id}")
        return Path(os.fsdecode(opened.blob_path(artifact.digest)))


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


def _record(store: Store, batch: Sequence[str], begin: int, without: set[str]) -> None:
    """Rows as `Store.commit` writes them, for blobs that have no file."""
    env = environment.acquire(os.fsencode(store.path), read_only=False)
    try:

        def work(txn: environment.Txn) -> None:
            recorder = Recorder(env, txn)
            for number, build_id in enumerate(batch, begin):
                if build_id in without:
                    continue
                staged = Staged(-1, None)
                staged.size = _SIZE
                staged.digest = Digest(sha256(build_id.encode()).digest())
                recorder.capture(_capture(build_id, number, staged))
            recorder.finish()

        env.write(work)
    finally:
        environment.release(env)


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
