# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.store: making, opening, and refusing what is no store or a damaged one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buildidfs.errors import StoreDamaged, StoreError, StoreMissing, StoreVersionError
from buildidfs.model import Digest, Kind
from buildidfs.store import Store
from tests.support.clients.tools import run, tool, unmount
from tests.support.harness.captures import capture, commit, read_blob, sighting, stage

_REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with something in it, closed."""
    with Store.create(tmp_path / "store") as store:
        new = [
            capture(store, b"%d" % i, i.to_bytes(20, "big"), at=sighting(b"/bin/%d" % i))
            for i in range(300)
        ]
        commit(store, *new)
    return tmp_path / "store"


def _refuses(path: Path, kind: type[StoreError], words: str) -> None:
    for read_only in (False, True):
        with pytest.raises(kind, match=words) as caught:
            Store.open(path, read_only=read_only)
        assert type(caught.value) is kind
        assert "\n" not in str(caught.value)


# --- making and opening ------------------------------------------------------------------------


def test_layout_of_a_new_store(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        Store.create(tmp_path / "a" / "store").close()
    finally:
        os.umask(old)
    store = tmp_path / "a" / "store"
    assert (store / "format").read_text() == "buildidfs store 1\n"
    assert sorted(each.name for each in store.iterdir()) == [
        "blobs",
        "format",
        "index",
        "listeners",
    ]
    assert {
        oct(each.stat().st_mode & 0o777) for each in (store, *store.iterdir()) if each.is_dir()
    } == {"0o700"}
    assert {oct(each.stat().st_mode & 0o077) for each in store.rglob("*")} == {"0o0"}


@pytest.mark.parametrize("kind", [str, os.fsencode, Path])
def test_paths_of_every_type(tmp_path: Path, kind: Callable[[str], str | bytes | Path]) -> None:
    with Store.create(kind(str(tmp_path / "store"))) as store:
        assert store.path == os.fsencode(tmp_path / "store")


def test_a_path_that_is_no_text(tmp_path: Path) -> None:
    with Store.create(os.fsencode(tmp_path) + b"/\xff\xfe") as store:
        commit(store, capture(store, b"x"))
    shutil.rmtree(store.path + b"/index")
    with pytest.raises(StoreError, match=r"\\xff\\xfe"):
        Store.open(store.path)


def test_a_relative_path_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Store.create("store") as store:
        monkeypatch.chdir("/")
        commit(store, capture(store, b"x"))


def test_create_opens_what_is_there(path: Path) -> None:
    with Store.create(path) as store:
        assert store.stats().ids == 300


def test_an_empty_directory_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o755)
    Store.create(tmp_path / "store").close()
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


def test_an_interrupted_creation_is_finished(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store"):
        pass
    (tmp_path / "store" / "format").rename(tmp_path / "store" / ".format.1.2")
    with pytest.raises(StoreMissing):
        Store.open(tmp_path / "store")
    with Store.create(tmp_path / "store") as store:
        commit(store, capture(store, b"x"))


def test_two_processes_create_one_store(tmp_path: Path) -> None:
    program = "import sys; from buildidfs.store import Store; Store.create(sys.argv[1]).close()"
    command = [sys.executable, "-c", program, str(tmp_path / "store")]
    children = [subprocess.Popen(command, cwd=_REPOSITORY) for _ in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
    with Store.open(tmp_path / "store") as store:
        commit(store, capture(store, b"x"))


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photo").touch()
    mode = tmp_path.stat().st_mode
    with pytest.raises(StoreError, match="is not a store, and not empty"):
        Store.create(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["photo"]
    assert tmp_path.stat().st_mode == mode


def test_a_store_that_lost_its_format_file_is_made_one_again(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store") as store:
        commit(store, capture(store, b"bytes"))
        (tmp_path / "store/quarantine").mkdir()
        (tmp_path / "store/run").mkdir(exist_ok=True)
    (tmp_path / "store/format").unlink()
    with pytest.raises(StoreMissing):
        Store.open(tmp_path / "store")
    with Store.open(tmp_path / "store", create=True) as store:
        assert store.stats().ids == 1
        assert list(store.check()) == []


def test_no_store_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for missing in (tmp_path, tmp_path / "none", tmp_path / "file", tmp_path / "file" / "below"):
        _refuses(missing, StoreMissing, f"^no store at {missing}: ")
    with pytest.raises(StoreError, match="File exists"):
        Store.create(tmp_path / "file")


# --- damaged and foreign ones --------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [b"", b"\0" * 100, b"\xff\xfe", b"buildidfs store", b"buildidfs store x\n"]
)
def test_garbage_for_a_format(path: Path, text: bytes) -> None:
    (path / "format").write_bytes(text)
    _refuses(path, StoreVersionError, "its format file is not that of a store$")


@pytest.mark.parametrize("version", [0, 2, 10**9])
def test_another_version(path: Path, version: int) -> None:
    (path / "format").write_text(f"buildidfs store {version}\n")
    _refuses(path, StoreVersionError, f"has format {version}, this program reads 1: ")


def test_missing_index(path: Path) -> None:
    shutil.rmtree(path / "index")
    _refuses(path, StoreDamaged, "its index cannot be found .*: buildidfs check --repair makes")


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb"])
def test_missing_files_of_the_index(path: Path, name: str) -> None:
    (path / "index" / name).unlink()
    if name == "data.mdb":
        _refuses(path, StoreDamaged, "its index is missing")
    else:
        with Store.open(path) as store:
            assert store.stats().ids == 300


def test_missing_blobs(path: Path) -> None:
    shutil.rmtree(path / "blobs")
    _refuses(path, StoreError, "blobs: No such file or directory: the store is damaged")


def test_missing_listeners_are_no_damage(path: Path) -> None:
    shutil.rmtree(path / "listeners")
    with Store.open(path) as store:
        commit(store, capture(store, b"x"))
        store.listen().close()


@pytest.mark.parametrize("size", [0, 1, 4096, 8192, 12288, 65536, 70000])
def test_an_index_cut_short(path: Path, size: int) -> None:
    """To touch a page beyond the end would be SIGBUS, the end of this very process."""
    data = path / "index" / "data.mdb"
    os.truncate(data, size if size >= 0 else data.stat().st_size + size)
    _refuses(path, StoreDamaged, "its index (is missing|is damaged|was cut short)")


def test_pages_never_written_at_the_end_are_no_damage(path: Path) -> None:
    """LMDB may allocate and give back the last pages within one transaction."""
    data = path / "index" / "data.mdb"
    with Store.open(path) as store:
        assert store._env is not None
        last = (store._env._lmdb.info()["last_pgno"] + 1) * 4096
    if data.stat().st_size > last:
        os.truncate(data, last)
    with data.open("r+b") as file:
        # both meta pages: the number of the last page, one more than there are
        for meta in (0, 4096):
            file.seek(meta + 16 + 8 + 8 + 8 + 48 + 48)
            number = int.from_bytes(file.read(8), sys.byteorder)
            file.seek(-8, os.SEEK_CUR)
            file.write((number + 1).to_bytes(8, sys.byteorder))
    with Store.open(path) as store:
        assert store._env is not None
        assert (store._env._lmdb.info()["last_pgno"] + 1) * 4096 == last + 4096
        assert store.stats().ids == 300
        commit(store, capture(store, b"more"))


@pytest.mark.parametrize("start", [0, 16, 4096])
def test_garbage_for_an_index(path: Path, start: int) -> None:
    data = path / "index" / "data.mdb"
    content = bytearray(data.read_bytes())
    content[start:] = b"\xa5" * (len(content) - start)
    data.write_bytes(content)
    _refuses_in_a_child(path)


def test_an_empty_index_is_not_taken_for_an_empty_store(path: Path, tmp_path: Path) -> None:
    with Store.create(tmp_path / "other"):
        pass
    import lmdb  # what some other program's environment looks like

    shutil.rmtree(path / "index")
    (path / "index").mkdir()
    lmdb.open(str(path / "index"), max_dbs=3, map_size=1 << 20).close()
    _refuses(path, StoreDamaged, "its index is damaged")


def _refuses_in_a_child(path: Path) -> None:
    """LMDB may well read what is there without noticing; it must not be a traceback."""
    program = """
import sys
from buildidfs.errors import StoreError
from buildidfs.store import Store
try:
    with Store.open(sys.argv[1], read_only=True) as store:
        list(store.index.build_ids_from())
except StoreError as error:
    assert "damaged" in str(error), error
    print("refused")
"""
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\n", "")


# --- read-only -----------------------------------------------------------------------------------


def test_reading_only(path: Path) -> None:
    with Store.open(path, read_only=True) as store:
        assert store.stats().ids == 300
        new = capture_of_nothing()
        for write in (
            lambda: stage(store, b"x"),
            lambda: store.commit([]),
            lambda: store.touch([new]),
            lambda: store.remember([]),
        ):
            with pytest.raises(StoreError, match="opened for reading only"):
                write()


def capture_of_nothing() -> object:
    return sighting()


@pytest.fixture
def frozen(path: Path, tmp_path: Path) -> Iterator[Path]:
    """The store on a read-only filesystem."""
    point = tmp_path / "frozen"
    point.mkdir()
    run([tool("mount"), "--bind", path, point], check=True)
    run([tool("mount"), "-o", "remount,bind,ro", point], check=True)
    yield point
    unmount(point)


@pytest.mark.root
@pytest.mark.parametrize("with_lock", [True, False])
def test_a_read_only_filesystem(path: Path, frozen: Path, with_lock: bool) -> None:
    if not with_lock:
        (path / "index" / "lock.mdb").unlink()
    with Store.open(frozen, read_only=True) as store:
        assert store.stats().ids == 300
        artifact = store.index.artifact(8, Kind.EXECUTABLE)
        assert artifact is not None
        assert read_blob(store, artifact.digest) == b"7"
        assert list(store.check()) == []
        with pytest.raises(StoreError, match="Read-only file system"):
            store.listen()
    with pytest.raises(StoreError, match=r"[Rr]ead-only file system"):
        Store.open(frozen)
    with pytest.raises(StoreError, match="Read-only file system"):
        Store.create(frozen / "new")


# --- commit --------------------------------------------------------------------------------------


def test_commit_closes_what_was_staged_whatever_happens(path: Path) -> None:
    with Store.open(path) as store:
        before = set(os.listdir("/proc/self/fd"))
        good, bad = capture(store, b"good"), capture(store, b"bad", kinds=())
        with pytest.raises(ValueError, match="at least one kind"):
            store.commit([good, bad])
        store.commit([capture(store, b"good"), capture(store, b"good")])
        assert set(os.listdir("/proc/self/fd")) == before


def test_an_empty_commit_is_nothing(path: Path) -> None:
    with Store.open(path) as store:
        assert store.commit([]).outcomes == ()
        store.remember([])


def test_a_blob_left_by_a_crash_is_taken_over(path: Path) -> None:
    with Store.open(path) as store:
        staged = stage(store, b"left")
        store.blobs.files.seal([staged], store.blobs.standing)
        staged.close()
        assert store.held(staged.digest) is None
        result = commit(store, capture(store, b"left", b"\x01\x02"))
        assert (result.bytes_added, result.outcomes[0].new_blob) == (0, True)


def test_a_lost_blob_comes_back_with_the_next_capture(path: Path) -> None:
    with Store.open(path) as store:
        digest = commit_one(store)
        os.unlink(store.blobs.path(digest))
        assert list(store.check()) == [f"blob {digest} is missing"]
        result = store.commit([capture(store, b"lost", b"\x01\x02")])
        assert result.bytes_added == len(b"lost")
        assert list(store.check(digests=True)) == []


def commit_one(store: Store) -> Digest:
    commit(store, capture(store, b"lost", b"\x01\x02"))
    ordinal = store.index.ordinal(b"\x01\x02")
    assert ordinal is not None
    artifact = store.index.artifact(ordinal, Kind.EXECUTABLE)
    assert artifact is not None
    return artifact.digest


def test_stats(path: Path) -> None:
    with Store.open(path) as store:
        commit(store, capture(store, b"0", bytes(20), kinds=[Kind.DEBUGINFO], at=sighting(b"/d")))
        stats = store.stats()
        assert (stats.ids, stats.blobs, stats.blob_bytes) == (300, 300, 10 + 180 + 600)
        assert stats.artifacts == {
            Kind.EXECUTABLE: 300,
            Kind.DEBUGINFO: 1,
            Kind.VDSO: 0,
            Kind.KALLSYMS: 0,
        }
        assert (stats.origins, stats.variants, stats.paths) == (301, 0, 603)
        data = path / "index" / "data.mdb"
        assert stats.index_bytes == data.stat().st_blocks * 512
        usage = os.statvfs(path)
        assert abs(stats.free_bytes - usage.f_bavail * usage.f_frsize) < 1 << 30
