# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.index.environment

The map has its limit, other processes are seen, the dead are forgotten.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from buildidfs.errors import StoreError
from buildidfs.model import Absence, BuildId
from buildidfs.store import NewAbsence, Store
from buildidfs.store.index import environment
from tests.support.clients.tools import tool
from tests.support.harness.captures import NOW, capture, commit, identity
from tests.support.harness.children import needs_root
from tests.support.harness.waiting import lines

#: A map that the rows below do not fit into.
_SMALL = 256 << 10

_REPOSITORY = Path(__file__).resolve().parents[2]


def _absent(first: int, count: int) -> list[NewAbsence]:
    numbers = range(first, first + count)
    return [NewAbsence(identity(ino=number), NOW, Absence.NOT_ELF) for number in numbers]


@contextlib.contextmanager
def _other_process(program: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has run ``program`` as far as its first line of output."""
    child = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=_REPOSITORY,
    )
    with child:
        assert child.stdout is not None
        try:
            assert lines(child.stdout, lambda got: len(got) == 1) == ["ready"]
            yield child
        finally:
            child.kill()


def test_a_process_with_little_address_space_has_a_smaller_map(tmp_path: Path) -> None:
    program = """
import resource, sys
from buildidfs.store import Store
from buildidfs.store.index import environment
from tests.unit.test_store_index_environment import _absent
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
with Store.create(sys.argv[1]) as store:
    store.remember(_absent(0, 5000))
    assert store.stats().remembered == 5000
    (env,) = environment._open.values()
    assert env._lmdb.info()["map_size"] == 1 << 30
    assert environment.is_readable(env.path)
print("ready", flush=True)
"""
    assert resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY
    with _other_process(program, str(tmp_path / "store")):
        pass
    with Store.open(tmp_path / "store", read_only=True) as store:
        assert store.stats().remembered == 5000


def test_an_index_that_outgrows_the_map_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as small:
        small.setattr(environment, "MAP_SIZES", (_SMALL,))
        with Store.create(tmp_path / "store") as store:
            commit(store, capture(store, b"x"))
            with pytest.raises(StoreError, match="address space"):
                store.remember(_absent(0, 20_000))
            assert store.stats().remembered == 1  # all or nothing, and reads go on
            assert store.index.build_id(1) == BuildId(b"\xab\xcd\xef\x01")
    with Store.open(tmp_path / "store") as store:
        store.remember(_absent(0, 20_000))
        assert store.stats().remembered == 20_000


def test_an_index_that_another_process_made_too_large_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import sys
from buildidfs.store import Store
from tests.unit.test_store_index_environment import _absent
with Store.open(sys.argv[1]) as store:
    store.remember(_absent(0, 20_000))
print("ready", flush=True)
"""
    monkeypatch.setattr(environment, "MAP_SIZES", (_SMALL,))
    path = tmp_path / "store"
    with Store.create(path) as store, _other_process(program, str(path)):
        with pytest.raises(StoreError, match="address space"):
            store.index.recall(identity(ino=19_999))
        with pytest.raises(StoreError, match="address space"):
            store.remember(_absent(20_000, 1))


def test_slots_of_killed_readers_are_freed(tmp_path: Path) -> None:
    program = """
import sys
from buildidfs.store import Store; from buildidfs.store.index import environment
store = Store.open(sys.argv[1], read_only=True)
(env,) = environment._open.values()
with env.read():
    print("ready", flush=True)
    sys.stdin.read()
"""
    path = tmp_path / "store"
    Store.create(path).close()

    def readers() -> str:
        raw = lmdb.open(str(path / "index"), max_dbs=64, map_size=1 << 40)
        with contextlib.closing(raw):
            return raw.readers()

    with _other_process(program, str(path)) as living:  # else LMDB begins with new slots
        for read_only in (False, True):
            with _other_process(program, str(path)) as child:
                child.send_signal(signal.SIGKILL)
                child.wait()
            assert f" {child.pid} " in readers(), "LMDB itself leaves the slot"
            with Store.open(path, read_only=read_only):
                pass
            assert f" {child.pid} " not in readers()
            assert f" {living.pid} " in readers()


def test_one_environment_is_shared_in_a_process(tmp_path: Path) -> None:
    before = dict(environment._open)
    first = Store.create(tmp_path / "store")
    (tmp_path / "link").symlink_to(tmp_path / "store")
    second = Store.open(tmp_path / "link")
    third = Store.open(tmp_path / "store", read_only=True)
    commit(second, capture(second, b"x"))
    assert first.index.ordinal(b"\xab\xcd\xef\x01") == third.index.ordinal(b"\xab\xcd\xef\x01") == 1
    with pytest.raises(StoreError, match="reading only: its filesystem is read-only"):
        third.commit([])
    first.close()
    second.close()
    assert third.index.ordinal(b"\xab\xcd\xef\x01") == 1
    third.close()
    words = "is open for reading only in this process"
    with Store.open(tmp_path / "store", read_only=True), pytest.raises(StoreError, match=words):
        Store.open(tmp_path / "store")
    with Store.open(tmp_path / "store") as again:
        commit(again, capture(again, b"y"))
    assert environment._open == before


def test_commits_of_other_processes_are_seen_at_once(tmp_path: Path) -> None:
    program = """
import sys
from buildidfs.store import Store
from tests.support.harness.captures import capture
with Store.open(sys.argv[1]) as store:
    print("ready", flush=True)
    for number, _ in enumerate(sys.stdin, 1):
        store.commit([capture(store, b"x", bytes([1, number]))])
        print(f"done {number}", flush=True)
"""
    with (
        Store.create(tmp_path / "store") as store,
        _other_process(program, str(store.path, "ascii")) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        for number in range(1, 20):
            child.stdin.write(b"go\n")
            child.stdin.flush()
            assert lines(child.stdout, lambda got: len(got) == 1) == [f"done {number}"]
            assert store.index.ordinal(bytes([1, number])) == number
            ours = store.commit([capture(store, b"y", bytes([1, number]))])
            assert ours.outcomes[0].ordinal == number


def test_threads_commit_and_read_together(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store") as store:

        def work(number: int) -> None:
            for count in range(10):
                build_id = bytes([number, count])
                store.commit([capture(store, build_id * 100, build_id)])
                assert store.index.ordinal(build_id) is not None

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.stats().ids == 60
        assert sorted(ordinal for ordinal, _ in store.index.build_ids_from()) == list(range(1, 61))
        assert list(store.check(digests=True)) == []


def test_errors_of_lmdb_do_not_get_out(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store") as store:
        env = environment.acquire(store.path, read_only=False)
        with pytest.raises(StoreError, match=r"its index: .*BAD_VALSIZE") as caught:
            env.write(lambda txn: txn.put(b"", b"", db=env.tables["ids"]))
        assert isinstance(caught.value.__cause__, lmdb.Error)
        with pytest.raises(StoreError, match="its index"), env.read() as txn:
            txn.put(b"x", b"", db=env.tables["ids"])
        environment.release(env)


# --- readers in other PID namespaces --------------------------------------------------------------

_SAME_NUMBER = """
import os, sys
from buildidfs.errors import StoreLocked
from buildidfs.store import Store; from buildidfs.store.index import environment
assert os.getpid() == 1
sleep = environment.time.sleep
def tell(seconds):
    print("waits", flush=True)
    sleep(seconds)
environment.time.sleep = tell
environment._READER_WAIT_S = float(sys.argv[3])
try:
    with Store.open(sys.argv[1], read_only=sys.argv[2] == "reads") as store:
        print("ready", flush=True)
        sys.stdin.readline()
except StoreLocked as error:
    print(error)
"""


@contextlib.contextmanager
def _first_of_a_namespace(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the number 1, in a PID namespace of its own, that opens a store."""
    child = subprocess.Popen(
        [
            *(tool("unshare"), "--pid", "--fork", "--kill-child"),
            *(sys.executable, "-c", _SAME_NUMBER, *map(str, arguments)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=_REPOSITORY,
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


@needs_root("PID namespaces")
@pytest.mark.parametrize("how", ["reads", "writes"])
def test_process_waits_for_another_of_its_number(tmp_path: Path, how: str) -> None:
    Store.create(tmp_path / "store").close()
    with (
        _first_of_a_namespace(tmp_path / "store", how, 60) as first,
        contextlib.ExitStack() as stack,
    ):
        assert first.stdout is not None
        assert lines(first.stdout, lambda got: len(got) == 1) == ["ready"]
        second = stack.enter_context(_first_of_a_namespace(tmp_path / "store", how, 60))
        assert second.stdout is not None
        assert lines(second.stdout, lambda got: len(got) >= 1)[0] == "waits"
        first.communicate(b"\n")
        assert lines(second.stdout, lambda got: "ready" in got)[-1] == "ready"


@needs_root("PID namespaces")
@pytest.mark.parametrize("how", ["reads", "writes"])
def test_another_process_of_the_same_number_is_named(tmp_path: Path, how: str) -> None:
    Store.create(tmp_path / "store").close()
    with _first_of_a_namespace(tmp_path / "store", how, 60) as first:
        assert first.stdout is not None
        assert lines(first.stdout, lambda got: len(got) == 1) == ["ready"]
        with _first_of_a_namespace(tmp_path / "store", how, 0) as second:
            assert second.stdout is not None
            (said,) = lines(second.stdout, lambda got: len(got) == 1)
    assert "another PID namespace that has the same number, 1, has its index open" in said
    assert "--pid=host" in said
