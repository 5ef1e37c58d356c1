# SPDX-License-Identifier: Apache-2.0
"""buildidfs.profile.cores: binaries of a core that has no build ID of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.base import PinnedFile
from buildidfs.catalog.remedies import AMBIGUOUS
from buildidfs.config import Settings
from buildidfs.formats.elf.core import Unknown
from buildidfs.ingest import Ingest
from buildidfs.linux import inodes
from buildidfs.model import BuildId, Origin, Sighting
from buildidfs.profile import cores, inputs
from buildidfs.store import Store
from tests.support.elf.corewriter import AT_PHDR, Mapped, core_file
from tests.unit.test_ingest_aliases import htl, program

START, TEXT = 0x400000, 0x401000
APP = b"/app/hot"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as opened:
        yield opened


def seen(
    store: Store, data: bytes, path: bytes = APP, *, after: float = -60, box: str = ""
) -> BuildId:
    """A program without a build ID was there, so many seconds after now."""
    fd = os.memfd_create("captured")
    os.write(fd, data)
    when = time.time_ns() + int(after * 1e9)
    origin = Origin(path, inodes.identity(fd), container=box)
    assert Ingest(store).run([PinnedFile(Sighting(origin, when), fd, is_copy=True)]).captured == 1
    return htl(data)


def core(directory: Path, data: bytes, path: bytes = APP, *, listed: bool = True) -> bytes:
    """The core of a process that had mapped a file, with these bytes of it."""
    written = directory / "core"
    mapped = [
        Mapped(START, data[:4096], path),
        Mapped(TEXT, data[4096:8192], path, offset=4096, executable=True),
    ]
    written.write_bytes(core_file(mapped, auxiliary=[(AT_PHDR, START + 64)], file_note=listed))
    return bytes(written)


def named(store: Store, path: bytes) -> dict[bytes, BuildId | None]:
    with cores.CoreFile(path) as file:
        return {each.path: each.build_id for each, _ in cores.identified(store, file)}


def test_first_page_identifies_the_file_at_the_path(store: Store, tmp_path: Path) -> None:
    one, two = program(b"one"), program(b"two", build_id=None)
    expected = seen(store, one)
    seen(store, two, box="docker:1")
    path = core(tmp_path, one)
    assert named(store, path) == {APP: expected}
    assert [row.build_id for row in cores.coverage(store, path).rows] == [expected]
    assert inputs.build_ids_named(store, path).paths == {expected: APP}


def test_file_with_other_bytes_is_not_taken(store: Store, tmp_path: Path) -> None:
    seen(store, program(b"one"))
    with cores.CoreFile(core(tmp_path, program(b"two"))) as file:
        (found,) = cores.identified(store, file)
    assert (found[0].build_id, found[1]) == (None, Unknown.NO_BUILD_ID)


def test_path_and_time_suffice_without_pages(store: Store, tmp_path: Path) -> None:
    path = core(tmp_path, b"")
    expected = seen(store, program(b"one"))
    assert named(store, path) == {APP: expected}
    newer = seen(store, program(b"two"), after=-30)
    assert named(store, path) == {APP: newer}, "which replaced the other"
    seen(store, program(b"three"), after=-3 * 86400, path=b"/old")
    assert named(store, core(tmp_path, b"", b"/old")) == {b"/old": None}


def test_files_of_two_containers_are_ambiguous_without_pages(store: Store, tmp_path: Path) -> None:
    seen(store, program(b"one"), box="docker:1")
    seen(store, program(b"two"), box="docker:2")
    with cores.CoreFile(core(tmp_path, b"")) as file:
        ((module, why),) = cores.identified(store, file)
    assert (module.build_id, why) == (None, AMBIGUOUS)


def test_core_without_a_list_of_files_names_its_program(store: Store, tmp_path: Path) -> None:
    data = program(b"one")
    expected = seen(store, data)
    assert named(store, core(tmp_path, data, listed=False)) == {b"": expected}
    assert named(store, core(tmp_path, program(b"two"), listed=False)) == {b"": None}


def test_scan_captures_the_file_that_is_still_there(store: Store, tmp_path: Path) -> None:
    data, app = program(b"here"), tmp_path / "app"
    app.write_bytes(data)
    path = core(tmp_path, data, bytes(app))
    (dump,) = cores.scan_cores(store, Settings(), [path]).dumps
    assert [(each.build_id, each.state) for each in dump.binaries] == [(htl(data), "captured")]
    app.write_bytes(program(b"other"))
    with Store.create(tmp_path / "empty") as other:
        (dump,) = cores.scan_cores(other, Settings(), [path]).dumps
        assert [each.state for each in dump.binaries] == ["missing"]
        assert other.stats().blobs == 0
