# SPDX-License-Identifier: Apache-2.0
"""One wrong bit in the index, or in a blob, gives nobody the bytes of another build ID."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from buildidfs.errors import BuildIdFsError, IntegrityError
from buildidfs.model import BuildId, Kind, Standing, Trust
from buildidfs.store import Store, schema
from buildidfs.store.fsck import rebuild
from buildidfs.view import View
from tests.support.harness.captures import capture, read_blob, sighting

IDS = 24
FLIPS = 30
BOTH = (Kind.EXECUTABLE, Kind.DEBUGINFO)
WRONG, RIGHT = 7, 0

Contents = dict[BuildId, bytes]


def _build_id(number: int) -> BuildId:
    return BuildId(number.to_bytes(2, "big") * 10)


@pytest.fixture(scope="module")
def contents() -> Contents:
    """What is kept under each build ID."""
    return {_build_id(number): b"bytes of %d" % number for number in range(1, IDS + 1)}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, contents: Contents) -> Path:
    """A store with them, in containers and below /.dwz/, too."""
    path = tmp_path_factory.mktemp("flips") / "store"
    with Store.create(path) as store:
        for number, (build_id, content) in enumerate(contents.items()):
            at = sighting(
                b"/usr/lib/.dwz/x%d" % number, container="docker:01", cgroup=b"/x", ino=number + 1
            )
            store.commit([capture(store, content, build_id, at=at, kinds=BOTH)])
    return path


def _read(store: Store, contents: Contents) -> bool:
    """Ask for all there is in every way; False if anything is that of another."""
    right = True

    def ask(question: Callable[[], bool]) -> None:
        nonlocal right
        with contextlib.suppress(BuildIdFsError, OSError):  # it is told of
            right = question() and right

    view = View(store)
    for number, (build_id, content) in enumerate(contents.items()):
        ask(lambda: _has(store, build_id, content))  # noqa: B023
        spelled = build_id.hex().encode()
        for path in (
            spelled + b"/elf",
            spelled + b"/debug",
            b"debug/.dwz/x%d" % number,
            b"debug/.build-id/%s/%s.debug" % (spelled[:2], spelled[2:]),
            b"containers/docker:01/root/usr/lib/.dwz/x%d" % number,
        ):
            ask(lambda: _shows(view, path, content))  # noqa: B023
    ask(lambda: all(_is(store, contents, *each) for each in store.index.build_ids_from()))
    ask(
        lambda: all(
            _is(store, contents, ordinal, build_id)
            for build_id, ordinal in store.index.build_ids_with_prefix(b"")
        )
    )
    return right


def _has(store: Store, build_id: BuildId, content: bytes) -> bool:
    ordinal = store.index.ordinal(build_id)
    for kind in BOTH if ordinal is not None else ():
        artifact = store.index.artifact(ordinal or 0, kind)
        if artifact is not None:
            found = read_blob(store, artifact.digest)
            if found != content or artifact.size != len(content):
                return False
    return True


def _is(store: Store, contents: Contents, ordinal: int, build_id: BuildId) -> bool:
    return build_id in contents and _shows_at(store, ordinal, contents[build_id])


def _shows_at(store: Store, ordinal: int, content: bytes) -> bool:
    artifact = store.index.artifact(ordinal, Kind.EXECUTABLE)
    return artifact is None or read_blob(store, artifact.digest) == content


def _shows(view: View, path: bytes, content: bytes) -> bool:
    """Whether what is at a path has that content, or is not there."""
    node = view.ROOT
    names = path.split(b"/")
    while names:
        node = view.child(node, names.pop(0))
        if not node:
            return True
        if stat.S_ISLNK(view.file_type(node)):
            target = view.readlink(node).split(b"/")
            node, names = view.ROOT, [*[name for name in target if name != b".."], *names]
    found = view.open(node)
    try:
        size = view.attributes(node).size
        data = os.pread(found.blob.fd, size + 1, 0)
    finally:
        found.close()
    return data == content and size == len(content)


def _apart(path: Path, contents: Contents) -> int:
    """`_read` in a process of its own, of which LMDB may make an end; how that ended."""
    child = os.fork()
    if not child:
        status = RIGHT
        try:
            with Store.open(path, read_only=True) as store:
                status = RIGHT if _read(store, contents) else WRONG
        except BuildIdFsError:
            pass
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("what", ["index", "blobs"])
def test_one_wrong_bit(sound: Path, tmp_path: Path, contents: Contents, what: str) -> None:
    chosen = random.Random(what)
    ended: Counter[str] = Counter()
    index = (sound / "index" / "data.mdb").read_bytes()
    used = [at for at, byte in enumerate(index) if byte]
    for number in range(FLIPS):
        path = tmp_path / f"{number}"
        shutil.copytree(sound, path)
        files = [path / "index" / "data.mdb"]
        if what == "blobs":
            files = sorted(each for each in (path / "blobs").rglob("*") if each.is_file())
        file = chosen.choice(files)
        data = bytearray(file.read_bytes())
        at = chosen.choice(used if what == "index" else range(len(data)))
        bit = chosen.randrange(8)
        data[at] ^= 1 << bit
        file.chmod(0o600)
        file.write_bytes(data)
        status = _apart(path, contents)
        assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == RIGHT, (file, at, bit)
        if what == "index":
            _assert_complete_with_new_index(path, contents)
        ended["right" if os.WIFEXITED(status) else signal.Signals(status & 127).name] += 1
        shutil.rmtree(path)
    assert ended["right"] > FLIPS // 2, ended


def _assert_complete_with_new_index(path: Path, contents: Contents) -> None:
    rebuild.rebuild(path)
    with Store.open(path) as store:
        assert list(store.check()) == []
        assert all(_has(store, build_id, content) for build_id, content in contents.items())
        assert all(store.index.ordinal(build_id) for build_id in contents)


def _rewrite(path: Path, table: str, change: Callable[[bytes, bytes], tuple[bytes, bytes]]) -> None:
    """Change the first row of a table."""
    with lmdb.open(str(path / "index"), max_dbs=32, map_size=1 << 24) as env:
        db = env.open_db(table.encode(), create=False)
        with env.begin(db=db, write=True) as txn:
            with txn.cursor() as cursor:
                assert cursor.first()
                key, value = cursor.item()
            txn.delete(key)
            txn.put(*change(key, value))


def _other(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    return key, schema.U64.pack(int.from_bytes(value[:8], "big") ^ 2) + value[8:]


def _moved(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    return bytes([*key[:7], key[7] ^ 2, *key[8:]]), value


@pytest.mark.parametrize(
    ("table", "change", "told"),
    [
        ("ids", _other, "leads to another one"),
        ("ids", lambda key, value: (bytes([key[0] ^ 1]) + key[1:], value), "leads to another one"),
        ("ordinals", lambda key, value: (key, value[:-1] + b"\xff"), "leads to another one"),
        ("artifacts", _moved, "not what was written for that build ID"),
        ("dwz", _other, "not what was written for that key"),
        ("contents", lambda key, value: (key, b"\0" * 11 + b"\7" + value[12:]), "row"),
    ],
)
def test_rows_that_are_those_of_another(
    sound: Path,
    tmp_path: Path,
    contents: Contents,
    table: str,
    change: Callable[[bytes, bytes], tuple[bytes, bytes]],
    told: str,
) -> None:
    path = tmp_path / "store"
    shutil.copytree(sound, path)
    _rewrite(path, table, change)
    errors = []
    with Store.open(path, read_only=True) as store:
        assert _read(store, contents)
        for question in (
            lambda: [store.index.ordinal(build_id) for build_id in contents],
            lambda: [store.index.build_id(number) for number in range(1, IDS + 1)],
            lambda: list(store.index.build_ids_from()),
            lambda: list(store.index.build_ids_with_prefix(b"")),
            lambda: [store.index.artifact(number, kind) for number in range(IDS) for kind in BOTH],
            lambda: list(store.index.supplementaries()),
            lambda: list(store.containers.children(1, 0)),
        ):
            try:
                question()
            except IntegrityError as error:
                errors.append(str(error))
    assert any(told in error for error in errors), errors


def test_a_size_that_is_wrong_in_a_row_of_a_blob(sound: Path, tmp_path: Path) -> None:
    """All of the blob is read then, and found to be right."""
    path = tmp_path / "store"
    shutil.copytree(sound, path)
    with Store.open(path) as store:
        assert list(store.checker().files(whole=True)) == []  # a copy is another file
    _rewrite(path, "digests", lambda key, value: (key, _bit(value, schema.FORM_AT, 1)))
    with Store.open(path, read_only=True) as store:
        for ordinal, _ in store.index.build_ids_from():
            artifact = store.index.artifact(ordinal, Kind.EXECUTABLE)
            assert artifact is not None
            assert len(read_blob(store, artifact.digest)) == artifact.size


@pytest.mark.parametrize("length", [0, 1, schema.NAME_AT])
def test_a_row_that_is_too_short(sound: Path, tmp_path: Path, length: int) -> None:
    path = tmp_path / "store"
    shutil.copytree(sound, path)
    _rewrite(path, "ordinals", lambda key, value: (key, value[:length]))
    with (
        Store.open(path, read_only=True) as store,
        pytest.raises(IntegrityError, match="a row of the index is damaged"),
    ):
        store.index.build_id(1)


@pytest.mark.parametrize("length", [1, schema.FORM_AT])
def test_a_row_of_a_blob_that_is_too_short(sound: Path, tmp_path: Path, length: int) -> None:
    """All of the blob is read then, as if there were no row."""
    path = tmp_path / "store"
    shutil.copytree(sound, path)
    with Store.open(path, read_only=True) as store:
        digests = [
            artifact.digest
            for ordinal, _ in store.index.build_ids_from()
            if (artifact := store.index.artifact(ordinal, Kind.EXECUTABLE)) is not None
        ]
    assert digests
    _rewrite(path, "digests", lambda key, value: (key, value[:length]))
    with Store.open(path, read_only=True) as store:
        assert [store.open_blob_now(digest) for digest in digests] == [None] * len(digests)


def _bit(value: bytes, at: int, bit: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1 << bit]) + value[at + 1 :]


def test_a_file_in_a_volume_takes_no_name_of_a_dwz_file(tmp_path: Path) -> None:
    """It is root's, and comes later."""
    with Store.create(tmp_path / "store") as store:
        for number, standing in enumerate((Standing.SYSTEM, Standing.ELSEWHERE)):
            at = sighting(b"/%d/.dwz/x" % number, trust=Trust.HOST, standing=standing, ino=number)
            new = capture(store, b"%d" % number, _build_id(number), at=at, kinds=(Kind.DEBUGINFO,))
            store.commit([new])
        assert store.index.supplementary(b"x") == 1
