# SPDX-License-Identifier: Apache-2.0
"""The witness of losses judges the moment of each loss, not the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from buildidfs.linux import inodes, machine
from buildidfs.model import Trust
from buildidfs.store import Store
from buildidfs.store.index.environment import acquire, release
from buildidfs.store.values import Evicted, Evictions
from tests.support.containers.crowding import Witness
from tests.support.harness.captures import capture, commit, sighting

if TYPE_CHECKING:
    from pathlib import Path

    from buildidfs.store.index.environment import Txn


def _keep(store: Store, path: Path, trust: Trust = Trust.HOST) -> None:
    """Capture a file that is on this host; only if it is trusted it can be had again."""
    with path.open("rb") as file:
        identity = inodes.identity(file.fileno())
    at = sighting(bytes(path), identity=identity, host=machine.host_name())
    commit(store, capture(store, path.read_bytes(), at=at, trust=trust))


def _lose(store: Store) -> None:
    env = acquire(store.path, read_only=False)

    def work(txn: Txn) -> None:
        row = Evictions.load(env, txn)
        row.add([Evicted(b"\xab\xcd", b"/gone", 4096, 1)])
        row.save(env, txn)

    try:
        env.write(work)
    finally:
        release(env)


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ("keep look lose look look", 1),
        ("keep look look lose look look look", 1),
        ("look lose keep look look look", 0),
        ("look lose look keep look look", 0),
        ("unknown look lose look keep look look", 0),
        ("keep look look look", 0),
    ],
)
def test_a_blob_counts_if_it_could_be_had_again_before_the_loss(
    tmp_path: Path, steps: str, kept: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with Store.create(tmp_path / "store") as store:
        witness = Witness(tmp_path / "store")
        for step in steps.split():
            if step == "keep":
                _keep(store, path)
            elif step == "unknown":
                _keep(store, path, Trust.CONTAINER)
            elif step == "lose":
                _lose(store)
            else:
                witness.look()
    assert len(witness.kept) == kept
