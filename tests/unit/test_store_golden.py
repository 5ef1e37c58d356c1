# SPDX-License-Identifier: Apache-2.0
"""A store of the present format that was written earlier, see ``tests/golden/make.py``."""

from __future__ import annotations

from pathlib import Path

from buildidfs.model import Kind
from buildidfs.store import Store
from tests.golden.make import APP, CONTENT, VDSO, fill
from tests.support.harness.captures import read_blob
from tests.support.harness.golden import unpack


def test_a_store_of_this_format_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Its files are others, since it was unpacked: all of them are read, and then known."""
    path = unpack(1, tmp_path / "store")
    with Store.open(path, read_only=True) as store:
        assert store.index.ordinal(VDSO) is None
        assert list(store.check(digests=True)) == []
        for artifact in store.index.variants(1, Kind.DEBUGINFO):
            assert not store.blobs.is_untouched(artifact.digest)
            assert read_blob(store, artifact.digest) in CONTENT.values()
        assert {(pin.build_id, pin.name) for pin in store.pins.every()} == {
            (APP, b"/profiles/perf.data"), (b"later", b"/profiles/perf.data"),
        }  # fmt: skip
    with Store.open(path) as store:
        assert list(store.check()) == []
        assert all(store.blobs.is_untouched(name) for name in store.blobs.names())
        assert (
            store.index.artifact(1, Kind.EXECUTABLE) == store.index.variants(1, Kind.EXECUTABLE)[0]
        )
        fill(store)
        assert list(store.check(digests=True)) == []
        assert store.index.ordinal(VDSO) is not None
