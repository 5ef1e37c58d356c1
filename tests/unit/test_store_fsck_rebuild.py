# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.fsck.rebuild: an index made from the blobs alone serves what the old one did."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from buildidfs.errors import StoreDamaged, StoreLocked, StoreMissing
from buildidfs.model import Artifact, BuildId, ContainerNames, Kind, Quality, Sighting, Trust
from buildidfs.store import NewSeen, Store, schema
from buildidfs.store.blobs import files
from buildidfs.store.fsck import rebuild
from buildidfs.store.index import environment
from tests.golden.make import fill
from tests.support.elf.elfwriter import DWARF, TEXT, altlink, elf_file
from tests.support.harness.captures import NOW, SECOND, capture, commit, read_blob, sighting
from tests.support.harness.killing import calls_of, is_killed, kill_at_call

Shown = dict[tuple[BuildId, Kind], list[Artifact]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with all kinds of captures, closed."""
    with Store.create(tmp_path / "store") as store:
        fill(store)
        at = sighting(b"/opt/first", trust=Trust.CONTAINER, mode=0o100750, uid=5, gid=6)
        store.commit([capture(store, elf_file([TEXT], build_id=b"\x01\x01"), b"\x01\x01", at=at)])
        better = sighting(b"/usr/better", trust=Trust.HOST)
        content = elf_file([TEXT], build_id=b"\x01\x01")
        store.commit([capture(store, content, b"\x01\x01", at=better)])
        assert list(store.check(digests=True)) == []
    return tmp_path / "store"


def _shown(store: Store) -> Shown:
    """What is served, without the numbers that nobody sees."""
    found: Shown = {}
    for ordinal, build_id in store.index.build_ids_from():
        for kind in Kind:
            found[build_id, kind] = [
                msgspec.structs.replace(each, ordinal=0, variant=0)
                for each in store.index.variants(ordinal, kind)
            ]
    return found


def _lose(path: Path) -> None:
    shutil.rmtree(path / "index")


def _cut(path: Path) -> None:
    os.truncate(path / "index" / "data.mdb", 20_000)


def _garble(path: Path) -> None:
    data = path / "index" / "data.mdb"
    data.write_bytes(random.Random(1).randbytes(data.stat().st_size))


@pytest.mark.parametrize("damage", [_lose, _cut, _garble])
def test_everything_is_served_again(path: Path, damage: Callable[[Path], None]) -> None:
    with Store.open(path) as store:
        before = _shown(store)
        names = {name: read_blob(store, name) for name in store.blobs.names()}
    damage(path)
    with pytest.raises(StoreDamaged, match="check --repair makes a new one"):
        Store.open(path)
    done = rebuild.rebuild(path)
    assert (done.blobs, done.unknown, done.damaged) == (len(names), [], [])
    with Store.open(path) as store:
        assert list(store.check(digests=True)) == []
        assert _shown(store) == before
        assert {name: read_blob(store, name) for name in store.blobs.names()} == names
        assert store.index.supplementary(b"x86_64/app") is not None
        ordinal = store.index.ordinal(b"\x01\x01")
        assert ordinal is not None
        (record,) = store.index.origins(ordinal)
        assert record.origin.path == b"/usr/better"
        fill(store)
        assert list(store.check(digests=True)) == []
    assert not (path / "index.new").exists()
    if damage is not _lose:
        assert len(list((path / "quarantine").glob("index.*"))) == 1


def _kept(store: Store) -> tuple[object, ...]:
    """What a store has beside the files: places, pins, journal, and the order of uses."""
    ordinal = store.index.ordinal(b"\x01\x01")
    assert ordinal is not None
    places = {
        (each.origin.path, each.first_seen_ns, each.last_seen_ns)
        for each in store.index.origins(ordinal)
    }
    env = store.checker().env
    with env.read() as txn:
        uses = list(txn.cursor(env.tables["uses"]).iternext(values=False))
    return places, list(store.pins.every()), list(store.journal.since()), uses


def test_new_index_keeps_the_rows_that_no_blob_has(path: Path) -> None:
    with Store.open(path) as store:
        content = elf_file([TEXT], build_id=b"\x01\x01")
        for number in range(20):
            at = sighting(b"/opt/%d" % number, ino=100 + number)
            commit(store, capture(store, content, b"\x01\x01", at=at))
        store.pin([BuildId(b"\x01\x01")], b"core")
        store.note_seen([NewSeen(sighting(b"/never/captured"), BuildId(b"\x07\x07"))])
        before = _kept(store)
        env = store.checker().env
        env.write(lambda txn: txn.put(b"\x03\x03", bytes(8), db=env.tables["ids"]))
        assert list(store.check()) != []
    rebuild.rebuild(path)
    with Store.open(path) as store:
        assert list(store.check()) == []
        assert _kept(store) == before


def test_new_index_keeps_no_row_that_a_check_reports(path: Path) -> None:
    with Store.open(path) as store:
        name = b"x" * (schema.MAX_PIN_NAME + 1)
        key = schema.pin_key(BuildId(b"\x01\x01"), name)
        env = store.checker().env
        env.write(lambda txn: txn.put(key, schema.U64.pack(1), db=env.tables["pins"]))
        (fault,) = store.check()
        assert "too long" in str(fault)
    rebuild.rebuild(path)
    with Store.open(path) as store:
        assert list(store.check()) == []


def test_dwz_files_have_the_names_again_by_which_debuginfo_refers_to_them(path: Path) -> None:
    mine, common = b"\x0a" * 20, b"\x0b" * 20
    debug = elf_file([DWARF, altlink(b"/usr/lib/debug/.dwz/x86/other", common)], build_id=mine)
    with Store.open(path) as store:
        for build_id, data in ((mine, debug), (common, elf_file([DWARF], build_id=common))):
            at = sighting(b"/elsewhere/" + build_id.hex().encode(), mode=0o100644)
            kinds = [Kind.DEBUGINFO]
            commit(store, capture(store, data, build_id, at=at, kinds=kinds))
        assert store.index.supplementary(b"x86/other") is None, "this capture did not say so"
    _lose(path)
    rebuild.rebuild(path)
    with Store.open(path) as store:
        assert store.index.supplementary(b"x86/other") == store.index.ordinal(common) is not None


def test_nobody_is_sent_a_blob_again_that_is_damaged(path: Path) -> None:
    with Store.open(path) as store:
        victim = next(iter(store.blobs.names()))
        blob = Path(os.fsdecode(store.blobs.path(victim)))
    blob.chmod(0o600)
    blob.write_bytes(b"others")
    _lose(path)
    assert rebuild.rebuild(path).damaged == [victim]
    with Store.open(path) as store:
        assert victim not in set(store.blobs.names())
        assert list(store.check(digests=True)) == []
    assert (path / "quarantine" / victim.hex()).read_bytes() == b"others"


def test_without_what_is_kept_beside_them_the_bytes_tell(path: Path) -> None:
    """Root alone may read them, and nothing is believed; a file without an ID gets its htlhash."""
    with Store.open(path) as store:
        for name in store.blobs.names():
            os.removexattr(store.blobs.path(name), files.ORIGIN_ATTRIBUTE)
        before = _shown(store)
    _lose(path)
    done = rebuild.rebuild(path)
    assert (done.unknown, done.damaged) == ([], [])
    with Store.open(path) as store:
        assert list(store.check(digests=True)) == []
        assert store.checker().unreferenced() == 0
        now = _shown(store)
        assert before.keys() <= now.keys()
        new = {key: now.pop(key) for key in now.keys() - before.keys()}
        adopted = {each.digest for kept in new.values() for each in kept}
        assert len(adopted) == 1
        assert all(each.adopted for kept in new.values() for each in kept)
        for key, kept in before.items():
            before[key] = [each for each in kept if each.digest not in adopted]
        for (build_id, kind), artifacts in now.items():
            if kind is Kind.VDSO:
                continue  # nothing in its bytes says so
            wanted = {each.digest: each for each in before[build_id, kind]}
            for each in artifacts:
                if each.digest in wanted:
                    old = wanted[each.digest]
                    assert (each.quality, each.scripts) == (old.quality, old.scripts)
                assert (each.trust, each.mode, each.uid) == (Trust.UNKNOWN, 0o400, 0)
            assert wanted.keys() <= {each.digest for each in artifacts}


def test_what_is_kept_beside_a_blob_does_not_overrule_its_bytes(path: Path) -> None:
    with Store.open(path) as store:
        blobs = list(store.blobs.names())
        origins = [store.blobs.files.origin(name) for name in blobs]
        for name, origin in zip(blobs, origins[1:] + origins[:1], strict=True):
            store.blobs.files.keep_origin(name, origin)
        before = _shown(store)
    _lose(path)
    rebuild.rebuild(path)
    with Store.open(path) as store:
        assert list(store.check(digests=True)) == []
        assert {build_id for build_id, _ in _shown(store)} <= {build_id for build_id, _ in before}


def test_compressed_blobs(path: Path) -> None:
    with Store.open(path) as store:
        content = elf_file([TEXT], build_id=b"\x05\x05") + bytes(100_000)
        store.commit([capture(store, content, b"\x05\x05", quality=Quality.NONE)])
        assert list(store.compress(2**32 - 1)) != []
        assert list(store.check(digests=True)) == []
        before = _shown(store)
    _lose(path)
    rebuild.rebuild(path)
    with Store.open(path) as store:
        assert _shown(store) == before
        assert list(store.check(digests=True)) == []
        artifact = store.index.artifact(store.index.ordinal(b"\x05\x05") or 0, Kind.EXECUTABLE)
        assert artifact is not None
        assert artifact.size == len(content)
        assert read_blob(store, artifact.digest) == content


@pytest.mark.parametrize("version", [0, 2, 10**9])
def test_a_store_of_another_format(path: Path, version: int) -> None:
    with Store.open(path) as store:
        before = _shown(store)
    (path / "format").write_text(f"buildidfs store {version}\n")
    rebuild.rebuild(path)
    assert environment.read_format(bytes(path)) == 1
    with Store.open(path) as store:
        assert _shown(store) == before
        assert list(store.check(digests=True)) == []


def test_not_while_it_is_in_use(path: Path) -> None:
    before = dict(environment._open)
    with Store.open(path), pytest.raises(StoreLocked, match="is open in this process"):
        rebuild.rebuild(path)
    ready, release = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with Store.open(path, read_only=True):
                os.write(ready[1], b".")
                os.read(release[0], 1)
        finally:
            os._exit(0)
    try:
        os.read(ready[0], 1)
        with pytest.raises(StoreLocked, match="is in use"):
            rebuild.rebuild(path)
    finally:
        os.write(release[1], b".")
        os.waitpid(child, 0)
        for fd in (*ready, *release):
            os.close(fd)
    assert environment._open == before


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing):
        rebuild.rebuild(tmp_path)


def test_killed_before_any_call(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one goes on with it."""
    monkeypatch.setattr(rebuild, "_BATCH", 2)
    with Store.open(path) as store:
        before = _shown(store)
    _cut(path)
    trial = tmp_path / "trial"

    def fresh() -> None:
        shutil.rmtree(trial, ignore_errors=True)
        shutil.copytree(path, trial, copy_function=_copy)

    fresh()
    rebuild.rebuild(trial)
    fresh()
    calls = calls_of(lambda: rebuild.rebuild(trial))
    assert calls > 300
    for moment in random.Random(5).sample(range(1, calls), 20):
        fresh()

        def work(moment: int = moment) -> None:
            kill_at_call(moment)
            rebuild.rebuild(trial)
            os.kill(os.getpid(), 9)

        assert is_killed(work)
        try:
            with Store.open(trial) as store:
                done = True
        except StoreDamaged:
            done = False
        if not done:
            rebuild.rebuild(trial)
        with Store.open(trial) as store:
            assert list(store.check(digests=True)) == []
            assert _shown(store) == before


def _containers(store: Store) -> dict[str, tuple[ContainerNames, int, int, list[bytes]]]:
    """The containers of a store, with the names in their roots."""
    return {
        each.label: (
            each.called,
            each.first_seen_ns,
            each.last_seen_ns,
            [entry.name for entry in store.containers.children(each.number, 0)],
        )
        for each in store.containers.every()
    }


def _in(container: str, path: bytes, minutes: int) -> Sighting:
    group = f"/libpod-{container}.scope".encode()
    label = f"podman:{container[:12]}"
    return sighting(path, seen_ns=NOW + minutes * 60 * SECOND, container=label, cgroup=group)


FIRST, OTHER, THIRD = (letter * 64 for letter in "abc")


def test_containers_have_their_names_again(tmp_path: Path) -> None:
    """Those, too, whose files were all known from another container of their image."""
    path = tmp_path / "store"
    names = {
        f"podman:{FIRST[:12]}": ContainerNames("web-1", image="shop:1\nsha256:a"),
        f"podman:{OTHER[:12]}": ContainerNames("web-2", image="shop:1\nsha256:a"),
        f"podman:{THIRD[:12]}": ContainerNames("server", "cart-7d9f", "shop", "b\udcff:2"),
    }
    with Store.create(path) as store:
        store.name_containers(lambda origin: names[origin.container])
        content = elf_file([TEXT], build_id=b"\x01\x01")
        for minutes, container in enumerate((FIRST, OTHER)):
            at = _in(container, b"/app", minutes)
            commit(store, capture(store, content, b"\x01\x01", at=at))
        # Both of them in one batch, and only the program of the one is new.
        other = elf_file([TEXT], build_id=b"\x02\x02")
        commit(
            store,
            capture(store, other, b"\x02\x02", at=_in(THIRD, b"/new", 3)),
            capture(store, content, b"\x01\x01", at=_in(THIRD, b"/old", 3)),
        )
        before = _containers(store)
    assert {label: each[0] for label, each in before.items()} == names
    _lose(path)
    rebuild.rebuild(path)
    with Store.open(path) as store:
        assert list(store.check(digests=True)) == []
        now = _containers(store)
        assert now.pop(f"podman:{THIRD[:12]}")[0] == before.pop(f"podman:{THIRD[:12]}")[0]
        assert now == before
        assert store.containers.linked(b"web-2") == store.containers.number(
            f"podman:{OTHER[:12]}".encode()
        )


def test_names_that_an_engine_noted_late(tmp_path: Path) -> None:
    path, known = tmp_path / "store", [ContainerNames(), ContainerNames("web", image="shop:1")]
    with Store.create(path) as store:
        store.name_containers(lambda origin: known[0])
        content = elf_file([TEXT], build_id=b"\x01\x01")
        commit(store, capture(store, content, b"\x01\x01", at=_in(FIRST, b"/app", 0)))
        del known[0]
        assert store.touch([_in(FIRST, b"/app", 2)]) == []
        before = _containers(store)
        assert list(store.check(digests=True)) == []
    assert before[f"podman:{FIRST[:12]}"][0] == known[0]
    _lose(path)
    rebuild.rebuild(path)
    with Store.open(path) as store:
        assert _containers(store) == before


def _copy(source: str, target: str) -> None:
    shutil.copy2(source, target)  # with attributes
