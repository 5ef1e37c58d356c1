# SPDX-License-Identifier: Apache-2.0
"""Through a mount and through ``get`` nobody gets other bytes than those that were captured."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.model import BuildId
from buildidfs.store import Store
from tests.support.elf.elfwriter import TEXT, Section, elf_file
from tests.support.harness import damages
from tests.support.harness.captures import capture

if TYPE_CHECKING:
    from tests.support.harness.mounts import BuildIdFs

pytestmark = pytest.mark.fuse

#: For each damage the build ID of a file, and of another that some damages need.
PAIRS = {
    damage: (bytes([number, 1]) * 10, bytes([number, 2]) * 10)
    for number, damage in enumerate(damages.ALL)
}
IDS = [each for pair in PAIRS.values() for each in pair]
WRONG = [*(one for one, _ in PAIRS.values()), PAIRS[damages.swap][1]]


def _elf(build_id: bytes) -> bytes:
    padding = Section(b".comment", bytes(range(256)) * 1000)
    return elf_file([TEXT, padding], build_id=build_id)


@pytest.fixture
def store(buildidfs: BuildIdFs) -> Iterator[Store]:
    with Store.create(buildidfs.store) as made:
        made.commit([capture(made, _elf(each), each) for each in IDS])
        yield made


def _blob(store: Store, build_id: bytes) -> Path:
    artifact = store.index.artifact(store.index.ordinal(BuildId(build_id)) or 0, 1)
    assert artifact is not None
    return Path(os.fsdecode(store.blobs.path(artifact.digest)))


def _damage_all(store: Store) -> None:
    for damage, (one, other) in PAIRS.items():
        damage(_blob(store, one), _blob(store, other))


@pytest.mark.parametrize("mounted", ["before", "after", "open"])
def test_what_is_damaged_is_not_there(buildidfs: BuildIdFs, store: Store, mounted: str) -> None:
    """Whether it was damaged while it was mounted, before, or while somebody had it open."""
    if mounted == "after":
        _damage_all(store)
    with buildidfs.mounted() as mount:
        if mounted == "open":
            # Somebody was here, and what he opened is kept for the next; but not read.
            for build_id in IDS:
                os.close(os.open(mount / build_id.hex() / "elf", os.O_RDONLY))
        if mounted != "after":
            _damage_all(store)
        for build_id in IDS:
            path = mount / build_id.hex() / "elf"
            if build_id not in WRONG:
                assert path.read_bytes() == _elf(build_id)
                continue
            for _ in range(3):
                with pytest.raises(OSError, match=r".") as caught:
                    path.read_bytes()
                assert caught.value.errno in (errno.ENOENT, errno.ESTALE)
    lines = [line for line in buildidfs.log().splitlines() if "blob" in line]
    assert len(lines) == len(WRONG), "each is said once"
    out = buildidfs.mountpoint.with_name("out")
    for build_id in WRONG[-2:]:
        done = buildidfs("get", build_id.hex(), "-o", out, check=False)
        assert done.rc == 20
        assert not out.exists()


def test_whoever_has_it_open_is_not_given_what_was_written_over_it(
    buildidfs: BuildIdFs, store: Store
) -> None:
    build_id = IDS[0]
    with buildidfs.mounted() as mount:
        path = mount / build_id.hex() / "elf"
        with path.open("rb", buffering=0) as stream:
            assert stream.read(4) == b"\x7fELF"
            with _blob(store, build_id).open("r+b") as blob:
                blob.write(b"else")
            Path("/proc/sys/vm/drop_caches").write_text("3")
            stream.seek(0)
            with pytest.raises(OSError, match=r".") as caught:
                stream.read(4)
            assert caught.value.errno == errno.ESTALE


def test_a_store_that_was_copied_is_served(buildidfs: BuildIdFs, store: Store) -> None:
    """All files are others, and nothing is damaged."""
    moved = buildidfs.store.with_name("moved")
    store.close()
    shutil.copytree(buildidfs.store, moved)
    shutil.rmtree(buildidfs.store)
    moved.rename(buildidfs.store)
    with buildidfs.mounted() as mount:
        for build_id in IDS:
            for _ in range(2):
                assert (mount / build_id.hex() / "elf").read_bytes() == _elf(build_id)
    assert "blob" not in buildidfs.log()
