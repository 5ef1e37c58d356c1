# SPDX-License-Identifier: Apache-2.0
"""Compressed blobs through a mount: the same bytes, wherever somebody reads."""

from __future__ import annotations

import hashlib
import json
import mmap
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.store import Store
from tests.support.clients.commands import COMMAND
from tests.support.clients.terminals import on_terminal
from tests.support.elf import elfwriter
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse]

_ID = b"\x07" * 20


def test_the_command(directory: Path, buildidfs: BuildIdFs) -> None:
    buildidfs("scan", "tree", "/bin/true", "/bin/cat")
    assert json.loads(buildidfs("compress", "--json").out)["blobs"] == 0
    # Each was seen in this second, or in the one before.
    later = json.loads(buildidfs("compress", "--unused-for", "0", "--json").out)
    with Store.open(buildidfs.store) as store:
        assert len(list(store.compress(int(time.time()) + 10))) + later["blobs"] == 2
        assert list(store.check()) == []
    assert buildidfs("compress", "--unused-for", "never", check=False).rc == 2
    refused = buildidfs("compress", "--unused-for", "3", check=False)
    assert (refused.rc, "needs a unit: '3'; try 3d" in refused.err) == (2, True), refused


def test_progress_and_the_age_that_was_understood(buildidfs: BuildIdFs, directory: Path) -> None:
    data = elfwriter.elf_file(
        [elfwriter.Section(b".rodata", bytes(1 << 20), flags=2)], build_id=_ID
    )
    (directory / "file").write_bytes(data)
    buildidfs("scan", "tree", directory / "file")
    seen = int(time.time())
    until(lambda: int(time.time()) > seen, "another second than that of the scan")
    shown = on_terminal(*COMMAND, "--store", buildidfs.store, "compress", "--unused-for", "0s")
    assert shown.rc == 0
    assert b"Compressing  1 blob  " in shown.raw
    assert "compressed 1 blob unused for 0s, from 1" in shown.lines[-1]


def test_reading_through_the_mount(directory: Path, buildidfs: BuildIdFs) -> None:
    dice = random.Random(1)
    filling = b"".join(dice.randbytes(11) * 3000 for _ in range(60))
    scripts = elfwriter.gdb_scripts("print('run')")
    data = elfwriter.elf_file(
        [elfwriter.TEXT, elfwriter.Section(b".rodata", filling, flags=2), scripts], build_id=_ID
    )
    (directory / "files").mkdir()
    (directory / "files" / "file").write_bytes(data)
    (directory / "files" / "file").chmod(0o666)  # so that it is not believed
    buildidfs("scan", "tree", directory / "files")
    shown = data.replace(scripts.data, bytes(len(scripts.data)))
    assert shown != data
    with buildidfs.mounted() as mount:
        file = mount / _ID.hex() / "elf"
        with file.open("rb") as before, Store.open(buildidfs.store) as store:
            assert len(list(store.compress(int(time.time()) + 10))) == 1
            assert before.read() == shown
        Path("/proc/sys/vm/drop_caches").write_text("3")
        assert file.read_bytes() == shown
        assert file.stat().st_size == len(data)
        Path("/proc/sys/vm/drop_caches").write_text("3")
        with file.open("rb", buffering=0) as stream:
            for _ in range(50):
                offset, size = dice.randrange(len(data) + 100), dice.randrange(300_000)
                stream.seek(offset)
                assert stream.read(size) == shown[offset : offset + size][: len(shown)]
        with (
            file.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        ):
            assert hashlib.sha256(mapped).digest() == hashlib.sha256(shown).digest()
        opened = [file.open("rb") for _ in range(200)]
        assert all(each.read(4) == b"\x7fELF" for each in opened)
        for each in opened:
            each.close()
    assert buildidfs("get", _ID.hex(), "-o", directory / "got").rc == 0
    assert (directory / "got").read_bytes() == data
