# SPDX-License-Identifier: Apache-2.0
"""A capture killed at any moment leaves a store that opens, lists, verifies and goes on."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from buildidfs.model import Kind
from buildidfs.store import Store
from buildidfs.store.blobs import files
from tests.support.harness.captures import capture, read_blob, sighting
from tests.support.harness.killing import calls_of, is_killed, kill_at_call

_BATCH = 5


def _contents(round_: int) -> list[bytes]:
    return [b"%d/%d " % (round_, number) * 1000 for number in range(_BATCH)]


def _capture(path: Path, round_: int) -> None:
    """What is killed: a batch of new files, new paths, new fan-out directories."""
    with Store.create(path) as store:
        store.commit(
            [
                capture(
                    store,
                    content,
                    content[:20],
                    at=sighting(b"/round/%d/%d" % (round_, number)),
                    kinds=(Kind.EXECUTABLE, Kind.DEBUGINFO),
                )
                for number, content in enumerate(_contents(round_))
            ]
        )


def _sound(path: Path) -> int:
    """Number of build IDs in a store that has nothing wrong."""
    with Store.create(path) as store:
        assert list(store.check(digests=True)) == []
        count = 0
        for ordinal, _ in store.index.build_ids_from():
            artifact = store.index.artifact(ordinal, Kind.EXECUTABLE)
            assert artifact is not None
            assert len(read_blob(store, artifact.digest)) == artifact.size
            count += 1
        return count


@pytest.mark.parametrize("anonymous", [True, False], ids=["unnamed", "named"])
@pytest.mark.parametrize("fresh", [True, False], ids=["new", "existing"])
def test_killed_before_any_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anonymous: bool, fresh: bool
) -> None:
    """Every system call is one, and so is every step of LMDB."""
    real = files.Blobs.__init__

    def made(self: files.Blobs, root: bytes, *, writable: bool) -> None:
        real(self, root, writable=writable, anonymous=anonymous)

    monkeypatch.setattr(files.Blobs, "__init__", made)
    path = tmp_path / "store"
    # The first one imports what it needs, which takes calls, too.
    _capture(tmp_path / "first", 1000)
    if not fresh:
        _capture(path, 1000)
    calls = calls_of(lambda: _capture(path, 1001)) - 100  # no two runs are quite the same
    assert calls > 200
    before = _sound(path)
    for round_, moment in enumerate(random.Random(1).sample(range(1, calls), 15)):
        if fresh:
            path, before = tmp_path / f"{round_}", 0

        def work(path: Path = path, round_: int = round_, moment: int = moment) -> None:
            kill_at_call(moment)
            _capture(path, round_)

        assert is_killed(work)
        count = _sound(path)
        assert count in (before, before + _BATCH), "all of a batch, or nothing of it"
        _capture(path, round_)
        before = _sound(path)
        assert count in (before, before - _BATCH)
        assert not (path / "staging").exists() or list((path / "staging").iterdir()) == []


def test_killed_at_any_time(tmp_path: Path) -> None:
    """Also within system calls, which the test above cannot: an alarm clock that is not caught."""
    path = tmp_path / "store"
    choice = random.Random(2)
    _capture(path, 1000)
    begun = time.monotonic()
    _capture(path, 0)
    pace = time.monotonic() - begun
    before, killed = 2 * _BATCH, 0
    for round_ in range(1, 21):

        def work(round_: int = round_, delay: float = pace * choice.uniform(0.05, 3)) -> None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, delay)
            while True:
                _capture(path, round_)
                round_ += 1000

        assert is_killed(work)
        killed += 1
        count = _sound(path)
        assert count >= before
        assert (count - before) % _BATCH == 0
        before = count
        if before == 2 * _BATCH:
            pace *= 1.3  # a new process is slower, the more so beside others
    assert killed == 20
    assert before > 2 * _BATCH, "some got through"


def test_what_was_left_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the blobs and the index: the next capture of the same files is complete."""
    path = tmp_path / "store"
    Store.create(path).close()

    def work() -> None:
        real = files.Blobs.seal

        def killed(self: files.Blobs, *arguments: object) -> None:
            real(self, *arguments)  # type: ignore[arg-type]
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(files.Blobs, "seal", killed)
        _capture(path, 7)

    assert is_killed(work)
    with Store.open(path) as store:
        assert len(list(store.blobs.names())) == _BATCH
        assert store.stats().ids == 0
        assert list(store.check(digests=True)) == []
    _capture(path, 7)
    assert _sound(path) == _BATCH
