# SPDX-License-Identifier: Apache-2.0
"""Blobs that nobody uses are compressed, and read as before."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.errors import IntegrityError
from buildidfs.model import Trust
from buildidfs.store import Store, schema
from buildidfs.store.blobs import files
from buildidfs.store.retention import compress
from tests.support.harness.captures import NOW, capture, commit, read_blob

if TYPE_CHECKING:
    from buildidfs.model import Digest

_CONTENT = b"what one program says is much like what others say\n" * 20_000
_LATER = NOW // 10**9 + 100


def _digest(store: Store, content: bytes, build_id: bytes) -> Digest:
    new = capture(store, content, build_id)
    assert not isinstance(new.content, bytes)
    digest = new.content.digest
    commit(store, new)
    return digest


def _row(store: Store, digest: Digest) -> schema.DigestRow:
    env = store._opened()
    value = env.get(env.tables["digests"], digest)
    assert value is not None
    return schema.DigestRow.unpack(value)


def test_what_nobody_uses(store: Store) -> None:
    digest = _digest(store, _CONTENT, b"\x01" * 20)
    assert list(store.compress(NOW // 10**9 - 5000)) == []
    ((done, what),) = store.compress(_LATER)
    assert done == digest
    assert what.before == len(_CONTENT)
    assert what.after < len(_CONTENT) // 10
    assert os.stat(store.blobs.path(digest)).st_size == what.after
    assert _row(store, digest).form == schema.FORM_ZSTD
    assert store.stats().blob_bytes == len(_CONTENT)
    assert list(store.check()) == []
    assert read_blob(store, digest) == _CONTENT
    assert list(store.compress(_LATER)) == []


def test_reading_from_the_middle(store: Store) -> None:
    digest = _digest(store, _CONTENT, b"\x01" * 20)
    plain = store.open_blob_now(digest)
    assert plain is not None
    assert plain.is_plain
    plain.close()
    list(store.compress(_LATER))
    blob = store.open_blob_now(digest)
    assert blob is not None
    assert not blob.is_plain
    with blob:
        assert blob.size == len(_CONTENT)
        assert blob.pread(1000, 500_000) == _CONTENT[500_000:501_000]


def test_who_has_it_open_reads_on(store: Store) -> None:
    digest = _digest(store, _CONTENT, b"\x01" * 20)
    with store.open_blob(digest) as blob:
        list(store.compress(_LATER))
        assert blob.pread(blob.size, 0) == _CONTENT


def test_what_does_not_get_smaller(store: Store) -> None:
    noise = os.urandom(100_000)
    digest = _digest(store, noise, b"\x01" * 20)
    tiny = _digest(store, b"tiny", b"\x02" * 20)
    assert list(store.compress(_LATER)) == []
    assert _row(store, digest).form == schema.FORM_DENSE
    assert _row(store, tiny).form == schema.FORM_PLAIN
    assert read_blob(store, digest) == noise
    assert list(store.check()) == []


def test_damaged_ones_are_left_alone(store: Store) -> None:
    digest = _digest(store, _CONTENT, b"\x01" * 20)
    path = store.blobs.path(digest)
    os.chmod(path, 0o600)
    with open(path, "r+b") as file:
        file.write(b"rot")
    assert list(store.compress(_LATER)) == []
    assert os.stat(path).st_size == len(_CONTENT)


def test_captured_again(store: Store) -> None:
    digest = _digest(store, _CONTENT, b"\x01" * 20)
    list(store.compress(_LATER))
    assert store.held(digest) is not None, "nothing has to be copied for it"
    commit(store, capture(store, _CONTENT, b"\x02" * 20))
    assert read_blob(store, digest) == _CONTENT
    assert _row(store, digest).form == schema.FORM_ZSTD


def test_ends_early(store: Store) -> None:
    for number in range(1, 4):
        _digest(store, _CONTENT + bytes([number]), bytes([number]) * 20)
    found = []
    for digest, _ in store.compress(_LATER, lambda: len(found) == 2):
        found.append(digest)
    assert len(found) == 2
    found += [digest for digest, _ in store.compress(int(time.time()))]
    assert len(set(found)) == 3
    assert all(files.content_digest(os.open(store.blobs.path(d), 0), 1) == d for d in found)


class _KilledError(Exception):
    """What ends a process in the midst of it."""


@pytest.mark.parametrize("later", ["captured", "recognised", "known"])
def test_killed_before_it_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    replace = compress.Compressor._replace

    def die(self: compress.Compressor, *args: object) -> None:
        replace(self, *args)  # type: ignore[arg-type]
        raise _KilledError

    with Store.create(tmp_path / "store") as store:
        digest = _digest(store, _CONTENT, b"\x01" * 20)
        with monkeypatch.context() as patch:
            patch.setattr(compress.Compressor, "_replace", die)
            with pytest.raises(_KilledError):
                list(store.compress(_LATER))
        assert _row(store, digest).form == schema.FORM_PLAIN
        assert os.stat(store.blobs.path(digest)).st_size < len(_CONTENT)
    with Store.open(tmp_path / "store") as store:
        if later == "known":  # what is kept beside the blob changes its file
            store.commit([capture(store, digest, b"\x01" * 20, trust=Trust.PACKAGE)])
        elif later == "captured":
            store.commit([capture(store, _CONTENT, b"\x01" * 20)])
        else:
            assert read_blob(store, digest) == _CONTENT
    with Store.open(tmp_path / "store") as store:
        assert read_blob(store, digest) == _CONTENT
        list(store.compress(_LATER))
        assert read_blob(store, digest) == _CONTENT


def test_a_compressed_blob_that_no_row_speaks_of(store: Store) -> None:
    digest = _digest(store, _CONTENT, b"\x01" * 20)
    list(store.compress(_LATER))
    path = Path(os.fsdecode(store.blobs.path(digest)))
    kept = path.with_suffix(".kept")
    os.link(path, kept)
    store.remove([digest])
    kept.rename(path)  # as if the removal had been killed between row and file
    assert _digest(store, _CONTENT, b"\x01" * 20) == digest
    assert _row(store, digest).form == schema.FORM_ZSTD
    assert read_blob(store, digest) == _CONTENT


def test_what_was_written_to_is_not_taken_for_right(store: Store) -> None:
    digest = _digest(store, _CONTENT, b"\x01" * 20)
    path = os.fsdecode(store.blobs.path(digest))
    os.chmod(path, 0o600)
    with open(path, "r+b") as file:
        file.write(b"XXXX")
    # Believed more than before: that is kept beside the blob, and changes its file.
    store.commit([capture(store, digest, b"\x01" * 20, trust=Trust.PACKAGE)])
    with pytest.raises(IntegrityError):
        store.open_blob(digest)
