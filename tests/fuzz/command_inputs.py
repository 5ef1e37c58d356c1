# SPDX-License-Identifier: Apache-2.0
"""Commands that are given a profile, a core file or a bundle: whatever is in that, they end with
words and a status.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from buildidfs.cli.main import main
from buildidfs.formats import bundle_archive
from buildidfs.store.blobs.zstd import FrameWriter
from tests.fuzz import compound_files, elf_mutation
from tests.fuzz.own_formats import store
from tests.fuzz.target import MEGABYTE, Target, filled, scratch
from tests.support.elf.elfwriter import DWARF, TEXT, elf_file
from tests.support.elf.perfwriter import CALLCHAIN, USUAL, PerfWriter

_INTERNAL: Final = 1
_OF_BOTH: Final = (
    ("coverage", "--json"),
    ("coverage",),
    ("bundle", "--no-sources", "-o", "OUT", "--json"),
    ("pin",),
)
_OF_PROFILES: Final = (*_OF_BOTH, ("repair", "-o", "OUT", "--json"))
_OF_BUNDLES: Final = (("import", "--json"),)
_INODE: Final = 1234  # of all files in the store
_NUMBERS: Final = (1 << 64) - 1, (1 << 63) - 1, 1 << 62, (1 << 32) - 1, 1 << 31


@functools.cache
def _store() -> str:
    """One with a few captures, for this alone."""
    return os.fspath(shutil.copytree(os.fsdecode(store().path), scratch() / "given"))


def _run(path: Path, words: tuple[str, ...]) -> tuple[int, str, str]:
    """The status of a command with this file, and what it says."""
    out = os.fspath(scratch() / "out")
    given = [out if word == "OUT" else word for word in words]
    # Bytes for programs go to the buffer below.
    said, complaint = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complaint):
        status = main(["--store", _store(), given[0], os.fspath(path), *given[1:]])
        said.flush()
    assert isinstance(said.buffer, io.BytesIO)
    return status, said.buffer.getvalue().decode(), complaint.getvalue()


def _check(path: Path, commands: tuple[tuple[str, ...], ...]) -> None:
    for words in commands:
        status, said, complaint = _run(path, words)
        assert status != _INTERNAL, complaint
        assert status == 0 or complaint or said
        assert complaint.replace("\n", "").isprintable()
        if "--json" in words and said:
            json.loads(said)


def _check_profile(data: bytes) -> None:
    path = scratch() / "perf.data"
    path.write_bytes(data)
    _check(path, _OF_PROFILES)


def _check_core(data: bytes) -> None:
    path = scratch() / "core"
    path.write_bytes(data)
    _check(path, _OF_BOTH)


def _check_bundle(data: bytes) -> None:
    """The bytes are those of the archive, before it is compressed."""
    path = scratch() / "bundle"
    with path.open("wb") as stream:
        writer = FrameWriter(stream.fileno())
        writer.write(data)
        writer.finish()
    _check(path, _OF_BUNDLES)


# --- profiles ------------------------------------------------------------------------------------


def _records(writer: PerfWriter) -> bytes:
    """Mappings of what the store has and has not, by build ID or device; and samples in them."""
    huge = max(_NUMBERS[3:])
    return b"".join(
        (
            writer.comm(1, b"app", 1, exec_=True),
            writer.mmap2(1, 0x1000, 0x1000, b"/usr/bin/app", time=2),
            writer.mmap2(
                1, 0x4000, 0x1000, b"/usr/lib/x.so", time=2, build_id=elf_mutation.BUILD_ID
            ),
            writer.mmap2(
                1, 0x6000, 0x1000, b"/usr/bin/app", time=2, dev=(huge, huge), inode=_INODE
            ),
            writer.mmap(1, 0x8000, 0x1000, b"[vdso]", time=3),
            writer.namespaces(1, range(7), 3),
            writer.sample(1, 0x1010, 4, chain=[0x1010, 0x4010, 0x6010]),
            writer.sample(1, 0x6010, 4, chain=[0x6010]),
            writer.fork(2, 1, 5),
            writer.sample(2, 0x4010, 6),
            writer.record(80, writer.pack("Q", 3)),
            writer.record(68, b""),
        )
    )


def _seeds() -> Iterator[bytes]:
    for order in "<>":
        for sample_type in (USUAL, USUAL | CALLCHAIN):
            writer = PerfWriter(order, sample_type)
            table = writer.build_id(b"/usr/bin/app", elf_mutation.BUILD_ID)
            features = {2: table, 3: writer.text(b"host"), 21: writer.pack("QQ", 1, 9)}
            yield writer.file(_records(writer), features)
    writer = PerfWriter()
    yield writer.pipe(_records(writer), {3: writer.text(b"host")})
    yield writer.pipe(b"", {}) + writer.record(80, b"") + _records(writer)
    yield writer.file(_records(writer), {29: writer.pack("IIQQ", 1, 1, *_NUMBERS[:2])})
    named = writer.record(67, b"\xff" * 24 + b"\1" * 4 + b"x" * 65400)
    yield writer.pipe(named, {})
    yield writer.file(_records(writer), {2: named})
    good = writer.file(_records(writer), {3: writer.text(b"host")})
    for at in range(8, 104, 8):
        for number in _NUMBERS:
            yield good[:at] + writer.pack("Q", number) + good[at + 8 :]
    for number in (0, 8, 16, 72, 103):
        yield good[:40] + writer.pack("QQ", number, number) + good[56:]


def _worst() -> Iterator[bytes]:
    writer = PerfWriter()
    yield writer.file(filled(_records(writer), MEGABYTE - 4096))


# --- bundles -------------------------------------------------------------------------------------


def _bundles() -> Iterator[bytes]:
    for build_id in (None, elf_mutation.BUILD_ID):
        file = elf_file([TEXT, DWARF], build_id=build_id)
        item = bundle_archive.Item(
            elf_mutation.BUILD_ID.hex(), "executable", hashlib.sha256(file).hexdigest(), len(file),
            1, 0o755, 3, 3, "1", (),
            (bundle_archive.BundlePlace("/usr/bin/app", 1, 2, "host", "docker:x"),),
        )  # fmt: skip
        manifest = bundle_archive.Manifest(bundle_archive.VERSION, "host", (), (item,), ())
        text = bundle_archive.encode(manifest)
        (member,) = bundle_archive.members(manifest, len(text))[0].values()
        yield b"".join(
            (
                bundle_archive.header(bundle_archive.MANIFEST, len(text)),
                text.ljust(bundle_archive.padded(len(text)), b"\0"),
                bundle_archive.header(member.name, member.size),
                file.ljust(bundle_archive.padded(len(file)), b"\0"),
                bundle_archive.end(),
            )
        )


def _huge_bundles() -> Iterator[bytes]:
    for seed in _bundles():
        yield seed.ljust(MEGABYTE, b"\0")


TARGETS: Final = {
    "profile": Target(_check_profile, _seeds, _worst, seconds=10.0, bytes=256 << 20),
    "corefile": Target(
        _check_core,
        compound_files.TARGETS["core"].seeds,
        compound_files.TARGETS["core"].worst,
        seconds=10.0,
        bytes=256 << 20,
    ),
    "bundlefile": Target(_check_bundle, _bundles, _huge_bundles, seconds=10.0, bytes=256 << 20),
}
