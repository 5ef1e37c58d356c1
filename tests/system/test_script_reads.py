# SPDX-License-Identifier: Apache-2.0
"""Reads of files with scripts for gdb, through a mount: at any offset, of any length, by any way.

What has to be shown is known from how each file was made, and not from anybody's reading of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
import os
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.elf.elfwriter import (
    DWARF,
    SHF_COMPRESSED,
    SYMTAB,
    TEXT,
    Section,
    elf_file,
)
from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse]

_NAME = b".debug_gdb_scripts"
_MIB = 1 << 20


@dataclasses.dataclass
class Sample:
    """A file as it was captured, as it has to be shown, and open in the mount in two ways.

    ``edges`` are the offsets at which what is shown begins or ends to be something else.
    ``direct`` asks the mount for each read as it is, ``cached`` for whole pages, and ahead.
    """

    original: bytes = dataclasses.field(repr=False)
    expected: bytes = dataclasses.field(repr=False)
    edges: list[int]
    cached: int = -1
    direct: int = -1


def _noise(size: int) -> bytes:
    """Bytes that do not come again, none of which is zero."""
    chosen = random.Random(size)
    return chosen.randbytes(size).replace(b"\0", b"\1")


def _sample(
    *sections: Section, hidden: tuple[bytes, ...], after: bytes = b"", **more: int
) -> Sample:
    """A file in which exactly the bytes ``hidden`` are to be zeros."""
    headers = [section._replace(data=b"") for section in sections]
    summary = hashlib.sha256(repr((headers, more)).encode())
    for section in sections:
        summary.update(section.data)
    build_id = summary.digest()[:20]
    original = elf_file([TEXT, SYMTAB, *sections], build_id=build_id, **more) + after  # type: ignore[arg-type]
    expected, edges = original, []
    for content in hidden:
        assert original.count(content) == 1
        expected = expected.replace(content, bytes(len(content)))
        edges += [original.index(content), original.index(content) + len(content)]
    return Sample(original, expected, edges)


def _scripts(data: bytes, **changes: int) -> Section:
    return Section(_NAME, data)._replace(**changes)


def _compressed(size: int) -> bytes:
    """A section as SHF_COMPRESSED has it: a header, and then what zlib made of it."""
    script = b"\x04gdb.inlined-script\n" + os.urandom(size) + b"\0"
    return struct.pack("<IIQQ", 1, 0, len(script), 1) + zlib.compress(script)


def _samples() -> dict[str, Sample]:
    small, other, third = _noise(100), _noise(37), _noise(5000)
    large, huge = _noise(_MIB + 4099), _noise(3 * _MIB + 1)
    packed = _compressed(3000)
    cut = _noise(9000)
    filler = Section(b".data", _noise(2 * _MIB + 17))
    beyond = _sample(DWARF, _scripts(cut, size=1 << 40), hidden=())
    at = beyond.original.index(cut)
    beyond.expected = beyond.original[:at] + bytes(len(beyond.original) - at)
    beyond.edges = [at]
    return {
        "one": _sample(DWARF, _scripts(small), hidden=(small,)),
        "several": _sample(
            _scripts(small), filler, _scripts(other), DWARF, _scripts(third),
            hidden=(small, other, third),
        ),
        "more than one request": _sample(_scripts(large), DWARF, filler, hidden=(large,)),
        "behind others": _sample(filler, _scripts(huge), filler, hidden=(huge,)),
        "compressed": _sample(
            filler, _scripts(packed, flags=SHF_COMPRESSED, align=8), hidden=(packed,)
        ),
        "of an old linker": _sample(
            DWARF, Section(b".zdebug_gdb_scripts", b"ZLIB" + third), hidden=(b"ZLIB" + third,)
        ),
        "of 32 bits": _sample(_scripts(other), filler, hidden=(other,), bits=32),
        "as any type": _sample(_scripts(small, type=0x12345), filler, hidden=(small,)),
        "longer than the file": beyond,
        "names that say nothing": _sample(
            _scripts(small), filler, hidden=(), names_index=77
        ),
        "with something behind": _sample(_scripts(small), hidden=(small,), after=_noise(70_001)),
    }  # fmt: skip


@pytest.fixture(scope="module")
def samples(scratch: Path) -> Iterator[dict[str, Sample]]:
    """All of them, open in a mount of a store that has nothing else."""
    tree = scratch / "scripts-tree"
    tree.mkdir()
    directory = scratch / "scripts-store"
    directory.mkdir()
    made = _samples()
    buildidfs = BuildIdFs(directory)
    for name, sample in made.items():
        (tree / name).write_bytes(sample.original)
        os.chown(tree / name, 61001, 61001)  # what is root's may be believed
    buildidfs("scan", "tree", tree)
    with buildidfs.mounted() as mount:
        opened = []
        for name, sample in made.items():
            (where,) = (mount / f"perf{tree}" / name).iterdir()
            sample.cached = os.open(where / "elf", os.O_RDONLY)
            sample.direct = os.open(where / "elf", os.O_RDONLY | os.O_DIRECT)
            opened += [sample.cached, sample.direct]
        try:
            yield made
        finally:
            for fd in opened:
                os.close(fd)


NAMES = tuple(_samples())


@pytest.mark.parametrize("name", NAMES)
def test_all_of_it(samples: dict[str, Sample], name: str) -> None:
    sample = samples[name]
    assert os.fstat(sample.cached).st_size == len(sample.original)
    for fd in (sample.direct, sample.cached):
        assert os.pread(fd, len(sample.expected) + 1, 0) == sample.expected
    with mmap.mmap(sample.cached, 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == sample.expected


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    where=st.floats(0, 1),
    off_by=st.integers(-70, 70),
    size=st.one_of(st.integers(0, 200), st.integers(0, 3 * _MIB)),
)
@example(name="behind others", where=0.5, off_by=0, size=3 * _MIB)
@example(name="more than one request", where=0.0, off_by=0, size=_MIB)
def test_any_part_of_it(
    samples: dict[str, Sample], name: str, where: float, off_by: int, size: int
) -> None:
    sample = samples[name]
    # Most often near the beginning or the end of what is hidden, which is where mistakes would be.
    edges = sample.edges or [len(sample.original) // 2]
    near = edges[int(where * (len(edges) - 1))]
    offset = max(0, near + off_by)
    expected = sample.expected[offset : offset + size]
    assert os.pread(sample.direct, size, offset) == expected
    assert os.pread(sample.cached, size, offset) == expected
