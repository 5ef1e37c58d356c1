# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.retention.eviction

What goes first, what never goes, and that captures get their room.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from buildidfs import names
from buildidfs.capture.base import memory_file
from buildidfs.errors import IntegrityError, Recapturable, StoreError, StoreFull
from buildidfs.linux import inodes
from buildidfs.model import (
    BuildId,
    Digest,
    Kind,
    NamespaceSet,
    Origin,
    Sighting,
    Trust,
    archive_scope,
)
from buildidfs.store import NewCapture, Store, schema
from buildidfs.store.index import environment
from buildidfs.store.retention import eviction, plan
from buildidfs.store.retention.eviction import Policy
from buildidfs.store.values import Tally
from buildidfs.store.write.uses import UseWriter
from tests.support.harness.captures import SECOND, capture, identity, read_blob, sighting
from tests.support.harness.scans import open_descriptors

DAY = 86_400
MIB = 1 << 20
SIZE = 1 << 20


@pytest.fixture
def store(directory: Path) -> Iterator[Store]:
    """A store that is sound at the end. It is on a disk, where directories take room, too."""
    with Store.create(directory / "store") as made:
        yield made
        assert list(made.check(digests=True)) == []


def _id(number: int) -> BuildId:
    return BuildId(b"%08d" % number)


def _add(
    store: Store, number: int, *, days_ago: float = 0, at: Sighting | None = None, **options: Any
) -> Digest:
    """Capture a build ID of 1 MiB that was seen so long ago."""
    now = time.time_ns() - int(days_ago * DAY * SECOND)
    if at is None:
        at = sighting(b"/opt/%d" % number, seen_ns=now, ino=number, **options)
    new = capture(store, os.urandom(SIZE), _id(number), at=at)
    digest = new.content.digest  # type: ignore[union-attr]
    store.commit([new])
    return digest


def _ids(store: Store) -> set[int]:
    return {int(bytes(build_id)) for _, build_id in store.index.build_ids_from()}


def _room_for(store: Store, blobs: float, **options: int) -> Policy:
    """A policy that leaves room for so many more blobs of 1 MiB,
    and for the index to grow."""
    held = store.stats()
    size = held.stored_bytes + held.index_bytes + int((blobs + 0.4) * SIZE)
    return Policy(max_size=size, **options)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is removed beyond what is needed now."""
    monkeypatch.setattr(eviction, "_MARGIN", 1 << 40)
    monkeypatch.setattr(eviction, "_LEAST_MARGIN", 0)


def _host_file(path: Path, number: int, days_ago: float = 0) -> Sighting:
    """A sighting of a file that this host has, and believes."""
    path.write_bytes(b"%d" % number)
    with path.open("rb") as file:
        found = inodes.identity(file.fileno())
    origin = Origin(os.fsencode(path), found, host=os.uname().nodename, trust=Trust.HOST)
    return Sighting(origin, time.time_ns() - int(days_ago * DAY * SECOND))


def _member(path: Path, days_ago: float = 0) -> Sighting:
    """A sighting of a file that is in a package file of this host."""
    path.write_bytes(b"package")
    with path.open("rb") as file:
        scope = archive_scope(inodes.identity(file.fileno()))
    member = msgspec.structs.replace(identity(), scope=scope)
    origin = Origin(b"/usr/bin/x", member, trust=Trust.PACKAGE, archive=os.fsencode(path))
    return Sighting(origin, time.time_ns() - int(days_ago * DAY * SECOND))


# --- order ---------------------------------------------------------------------------------------


def test_what_was_not_used_for_longest_goes_first(store: Store, exact: None) -> None:
    for number, days_ago in enumerate([3, 9, 1, 7, 5]):
        _add(store, number, days_ago=days_ago)
    store.retain(_room_for(store, 0))
    for number, gone in ((10, {1}), (11, {1, 3}), (12, {1, 3, 4})):
        _add(store, number)
        assert {0, 1, 2, 3, 4} - _ids(store) == gone
        assert number in _ids(store)


def test_what_can_be_had_again_goes_before_what_is_older(
    store: Store, tmp_path: Path, exact: None
) -> None:
    _add(store, 1, days_ago=50)
    _add(store, 2, at=_member(tmp_path / "package.deb", days_ago=3))
    _add(store, 7, at=_member(tmp_path / "deleted.deb", days_ago=55))
    (tmp_path / "deleted.deb").unlink()
    _add(store, 3, at=_host_file(tmp_path / "here", 3, days_ago=4))
    _add(store, 4, at=_host_file(tmp_path / "changed", 4, days_ago=40))
    _add(store, 5, at=_host_file(tmp_path / "gone", 5, days_ago=30))
    (tmp_path / "changed").write_bytes(b"other")
    (tmp_path / "gone").unlink()
    _add(store, 6, days_ago=60, trust=Trust.HOST, host="elsewhere")
    store.retain(_room_for(store, 0))
    order = []
    for number in range(10, 17):
        before = _ids(store)
        _add(store, number)
        order += sorted(before - _ids(store))
    assert order == [3, 2, 6, 7, 1, 4, 5]


def test_program_that_was_just_made_is_not_given_up_as_recapturable(
    store: Store, tmp_path: Path, exact: None
) -> None:
    """A build makes, runs and deletes it. So a gone file that was unused for long goes first."""
    _add(store, 1, days_ago=50, uid=0)
    built = _host_file(tmp_path / "built", 2)
    running = msgspec.structs.replace(built.origin, scanner="watch")
    _add(store, 2, at=Sighting(running, built.seen_ns))
    store.retain(_room_for(store, 0))
    _add(store, 10)
    assert _ids(store) == {2, 10}
    (tmp_path / "built").unlink()
    _add(store, 11)
    assert store.tally.recapturable == 0, "its removal is named as a loss"


def test_a_use_is_what_counts(store: Store, exact: None) -> None:
    first, second = _add(store, 1, days_ago=9), _add(store, 2, days_ago=8)
    store.open_blob(first).close()
    store.flush_uses()
    assert store.index.last_use(first) < time.time() - 8 * DAY, "nobody has taken it in yet"
    store.retain(_room_for(store, 0))
    _add(store, 3)
    assert _ids(store) == {1, 3}
    assert time.time() - 100 < store.index.last_use(first) <= time.time()
    assert store.index.last_use(second) == 0


def test_a_blob_that_nobody_has_any_more_is_asked_about_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: None
) -> None:
    asked: list[bytes] = []
    real = plan.recapturable_at

    def recapturable_at(origins: list[Any]) -> str:
        asked.append(origins[0].origin.path)
        return real(origins)

    monkeypatch.setattr(plan, "recapturable_at", recapturable_at)
    for number in range(6):
        _add(store, number, at=_host_file(tmp_path / str(number), number, 20 - number))
        (tmp_path / str(number)).unlink()
    for _ in range(2):  # as in two processes, one after the other
        store.retain(_room_for(store, 0))
        for number in range(10, 12):
            _add(store, number, days_ago=1)
    assert len(asked) == len(set(asked)) == 6
    assert _ids(store) & set(range(6)) == {4, 5}


# --- places --------------------------------------------------------------------------------------

VICTIM = b"/system.slice/docker-" + b"ab" * 32 + b".scope"
_MNT = 1 << NamespaceSet.__struct_fields__.index("mnt")


def _anonymous(number: int) -> dict[str, Any]:
    return {"container": f"mnt:{number}", "mnt_ns_id": number, "apart": _MNT}


def _users(group: bytes) -> bytes:
    return b"/user.slice/user-1000.slice/user@1000.service/user.slice/" + group


_FLOODS: dict[str, Callable[[int], dict[str, Any]]] = {
    "one container": lambda number: {
        "cgroup": b"/system.slice/docker-" + b"cd" * 32 + b".scope", "container": "docker:c"},
    "its control groups": lambda number: {
        "cgroup": b"/system.slice/docker-" + b"cd" * 32 + b".scope/" + b"%064x" % number},
    "a user's containers": lambda number: {
        "cgroup": _users(b"libpod-%064x.scope" % number), "container": f"podman:{number:012x}"},
    "delegated control groups": lambda number: {
        "cgroup": b"/delegated/libpod-%064x.scope" % number, "owner": 1000},
    "the label of the victim": lambda number: {
        "cgroup": b"/delegated/docker-" + b"ab" * 32 + b".scope", "owner": 1000,
        "container": "docker:abababababab"},
    "mount namespaces": _anonymous,
    "mount namespaces of a user": lambda number: {
        "cgroup": _users(b"x.scope/%d" % number), **_anonymous(number)},
    "bundles": lambda number: {
        "cgroup": b"/docker/%064x" % number, "scanner": "bundle", "host": f"h{number}"},
    "the files of a user": lambda number: {
        "uid": 1000, "apart": 0, "cgroup": b"/docker/%064x" % number},
}  # fmt: skip


@pytest.mark.parametrize("flood", _FLOODS)
def test_flood_displaces_only_files_of_its_own_place(store: Store, exact: None, flood: str) -> None:
    """The victims have one old program each, and the flood makes many places."""
    victims = [VICTIM, b"/machine.slice/machine-victim.scope"]
    for number, group in enumerate(victims):
        at = {"cgroup": group, "container": f"docker:{number}", "apart": _MNT}
        _add(store, number, days_ago=300, **at)
    store.retain(_room_for(store, 6))
    for number in range(100, 130):
        at = {"apart": _MNT, **_FLOODS[flood](number)}
        _add(store, number, days_ago=(130 - number) / 30, **at)
    left = _ids(store)
    assert left >= {0, 1}
    assert max(left) == 129
    assert len(left) >= 6, "and no more than necessary"


def test_largest_place_loses_its_oldest_files(store: Store, exact: None) -> None:
    """Places of 4, 2 and 1 files become places of 2, 2 and 1."""
    for number, (uid, days_ago) in enumerate(
        [(1, 5), (1, 4), (1, 9), (1, 1), (2, 50), (2, 40), (3, 90)]
    ):
        _add(store, number, days_ago=days_ago, uid=uid)
    store.retain(_room_for(store, 0))
    _add(store, 10, uid=9)
    _add(store, 11, uid=9)
    assert {*range(7)} - _ids(store) == {0, 2}


def test_running_a_copy_does_not_have_the_file_removed(store: Store, exact: None) -> None:
    """A file that two places have belongs to the smaller of them."""
    digest = _add(store, 1, days_ago=90, uid=1)
    for number in range(10, 16):
        _add(store, number, days_ago=20, uid=2)
    again = sighting(b"/copy", uid=2, ino=99, seen_ns=time.time_ns() - 80 * DAY * SECOND)
    store.commit([capture(store, digest, _id(1), at=again)])
    store.retain(_room_for(store, 0))
    for number in range(20, 24):
        _add(store, number, uid=2)
    assert 1 in _ids(store)


def test_shared_files_count_in_parts(store: Store, exact: None) -> None:
    """The victim has one program of its own; the flood runs the libraries of the victim, too."""
    _add(store, 1, days_ago=90, uid=1)
    for number in range(10, 16):
        digest = _add(store, number, days_ago=80, uid=1)
        when = time.time_ns() - 79 * DAY * SECOND
        again = sighting(b"/copy", uid=2, ino=number, seen_ns=when)
        store.commit([capture(store, digest, _id(number), at=again)])
    store.retain(_room_for(store, 4))
    for number in range(20, 40):
        _add(store, number, uid=2)
    assert _ids(store) >= {1, *range(10, 16)}


def test_recapturable_file_does_not_take_the_room_of_a_loss(store: Store, tmp_path: Path) -> None:
    for number in range(20):
        _add(store, number, days_ago=20 - number)
    store.retain(_room_for(store, 0))
    _add(store, 100)
    before = _ids(store)
    assert len(before) < 21, "more than necessary is removed, so that plans are rare"
    path = tmp_path / "here"
    here = _host_file(path, 50)
    with path.open("rb+") as file:
        file.write(os.urandom(SIZE))
        file.flush()
        origin = msgspec.structs.replace(here.origin, identity=inodes.identity(file.fileno()))
        with pytest.raises(Recapturable):
            store.stage(file.fileno(), origin=origin)
    assert _ids(store) == before


@pytest.mark.parametrize("is_lent", [True, False], ids=["before its commit", "being identified"])
def test_no_file_is_lost_for_a_recapturable_one_that_is_staged(
    store: Store, exact: None, tmp_path: Path, is_lent: bool
) -> None:
    for number in range(4):
        _add(store, number, days_ago=9)
    store.retain(_room_for(store, 1))
    here = _host_file(tmp_path / "here", 50)
    fd = memory_file(b"here", os.urandom(SIZE))
    staged = store.stage(fd, origin=here.origin)
    os.close(fd)
    spare = NewCapture(here, staged, _id(50), (Kind.EXECUTABLE,))
    if is_lent:
        staged.lend()
    else:
        threading.Timer(0.1, staged.lend).start()
    _add(store, 100)
    assert _ids(store) == {0, 1, 2, 3, 100}
    result = store.commit([spare])
    assert result.outcomes[0].omitted
    assert all(row.omitted for row in store.journal.of(_id(50)))
    assert _ids(store) == {0, 1, 2, 3, 100}
    _add(store, 101)
    assert len(_ids(store) & {0, 1, 2, 3}) == 3, "a loss is due"


# --- what stays ----------------------------------------------------------------------------------


def test_pinned_build_ids_stay_with_all_kinds(store: Store, exact: None) -> None:
    for number in range(4):
        _add(store, number, days_ago=20 - number)
    debug = capture(
        store,
        os.urandom(SIZE),
        _id(0),
        at=sighting(b"/0.debug", seen_ns=time.time_ns() - 15 * DAY * SECOND),
        kinds=[Kind.DEBUGINFO],
    )
    store.commit([debug])
    assert store.pin([_id(0)]) == 1
    assert store.pin([_id(2), _id(77)], b"/var/tmp/perf.data") == 2
    assert store.pin([_id(0)]) == 0
    store.retain(_room_for(store, 0))
    _add(store, 10)
    _add(store, 11)
    assert _ids(store) == {0, 2, 10, 11}
    ordinal = store.index.ordinal(_id(0)) or 0
    assert store.index.kinds(ordinal) == 1 << Kind.EXECUTABLE | 1 << Kind.DEBUGINFO
    _add(store, 77, days_ago=100)
    _add(store, 12)
    assert _ids(store) == {0, 2, 77, 12}
    assert store.unpin_name(b"/var/tmp/perf.data") == 2
    assert store.unpin([_id(0), _id(1)]) == 1
    store.retain(_room_for(store, 0))
    _add(store, 13)
    assert _ids(store) == {0, 2, 12, 13}


def test_a_container_cannot_fill_a_store_with_variants_of_what_is_pinned(
    store: Store, exact: None
) -> None:
    store.pin([_id(1)])
    best = _add(store, 1, days_ago=30, trust=Trust.HOST)
    for number in range(40):
        at = sighting(b"/x", seen_ns=time.time_ns() - DAY * SECOND, ino=number)
        store.commit([capture(store, os.urandom(SIZE), _id(1), at=at, trust=Trust.CONTAINER)])
    store.retain(Policy(max_size=1))
    store.enforce()
    left = store.index.variants(1, Kind.EXECUTABLE)
    assert len(left) == 16
    assert left[0].digest == best
    assert sorted(artifact.variant for artifact in left) == list(range(16))


def test_the_split_dwarf_of_what_is_pinned_stays(store: Store) -> None:
    package = names.package_id(_id(1))
    assert package is not None
    content = os.urandom(SIZE)
    store.commit([capture(store, content, package, kinds=[Kind.DEBUGINFO])])
    _add(store, 2)
    store.pin([_id(1)])
    store.retain(Policy(max_size=1))
    store.enforce()
    assert store.index.ordinal(package) is not None
    assert store.index.ordinal(_id(2)) is None


def test_the_dwz_file_of_what_is_pinned_stays(store: Store) -> None:
    debug, dwz, other = (_add(store, number, days_ago=9 - number) for number in (1, 2, 3))
    kinds = [Kind.DEBUGINFO]
    for digest, number in ((debug, 1), (dwz, 2), (other, 3)):
        store.commit([capture(store, digest, _id(number), kinds=kinds)])
    store.pin([_id(1)], b"a profile")
    asked: list[Digest] = []

    def altlink(digest: Digest) -> BuildId | None:
        asked.append(digest)
        return _id(2) if digest == debug else None

    store.retain(Policy(max_size=1), altlink)
    store.enforce()
    assert _ids(store) == {1, 2}
    assert asked.count(debug) == 1


def test_nothing_young_goes(store: Store, exact: None) -> None:
    _add(store, 1, days_ago=3)
    _add(store, 2, days_ago=0.5)
    store.retain(_room_for(store, 0, min_age=DAY))
    _add(store, 3)
    assert _ids(store) == {2, 3}
    with pytest.raises(StoreFull, match=r"nothing may be removed \(.*within min-age\)"):
        _add(store, 4)
    assert _ids(store) == {2, 3}
    store.pin([_id(2), _id(3)])
    store.retain(_room_for(store, 0))
    with pytest.raises(StoreFull, match=r"as large as it may be.*2 blobs are pinned"):
        _add(store, 4)
    assert _ids(store) == {2, 3}


def test_only_what_is_too_old_goes(store: Store) -> None:
    for number, days_ago in enumerate([40, 20, 35, 1]):
        _add(store, number, days_ago=days_ago)
    store.pin([_id(2)])
    store.retain(Policy(max_age=30 * DAY))
    store.enforce()
    tally = store.take_tally()
    assert (tally.aged, tally.blobs, tally.ids) == (1, 1, 1)
    assert SIZE <= tally.aged_bytes < SIZE + 16384
    assert _ids(store) == {1, 2, 3}
    store.enforce()
    assert store.tally == Tally()


# --- how much ------------------------------------------------------------------------------------


def test_nothing_goes_that_no_limit_asks_for(store: Store) -> None:
    for number in range(4):
        _add(store, number, days_ago=1000)
    for policy in (Policy(), _room_for(store, 1), Policy(keep_free=1)):
        store.retain(policy)
        store.enforce()
        assert store.tally == Tally()
    assert _ids(store) == {0, 1, 2, 3}


def test_more_goes_than_is_needed_now_if_it_can_be_had_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "_MARGIN", 4)
    for number in range(12):
        _add(store, number, at=_host_file(tmp_path / str(number), number, 20 - number))
    _add(store, 50, days_ago=90)
    store.retain(_room_for(store, 0))
    _add(store, 100)
    assert 12 - len(_ids(store) - {100, 50}) in (4, 5), "a quarter"
    before = _ids(store)
    _add(store, 101)
    _add(store, 102)
    assert _ids(store) == before | {101, 102}, "not every capture has to make room"
    assert 50 in before


def _is_full(monkeypatch: pytest.MonkeyPatch, store: Store, free: int) -> None:
    """Have so many bytes free at first; what is removed is added to it."""
    env = store._env
    assert env is not None

    def stored() -> int:
        with env.read() as txn:
            return environment.load_counters(env, txn).stored_bytes

    start = stored()

    def filesystem() -> os.statvfs_result:
        blocks = (free + start - stored()) // 4096
        return os.statvfs_result((4096, 4096, 1 << 20, blocks, blocks, 0, 0, 0, 0, 255))

    monkeypatch.setattr(store.blobs.files, "filesystem", filesystem)


def test_room_is_given_back_to_others(
    store: Store, exact: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        _add(store, number, days_ago=20 - number)
    _is_full(monkeypatch, store, MIB)
    store.retain(Policy(keep_free=3 * MIB))
    store.enforce()
    assert _ids(store) == {2, 3, 4, 5}
    _add(store, 10)
    assert _ids(store) == {3, 4, 5, 10}


def test_a_store_that_does_not_yield_ceases_to_grow(
    store: Store, exact: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        _add(store, number, days_ago=20 - number)
    _is_full(monkeypatch, store, MIB)
    store.retain(Policy(keep_free=3 * MIB, yields=False))
    store.enforce()
    assert len(_ids(store)) == 6
    left = []
    for number in range(10, 18):
        _add(store, number, days_ago=18 - number)
        left.append(len(_ids(store)))
        assert number in _ids(store)
    assert set(left[-4:]) == {left[0]}, "one goes for one that comes"
    assert left[0] >= 4, "and a little more at the beginning, for the index"
    assert store.tally.losses == 6 + 8 - left[-1]


def test_when_others_have_taken_the_room_nothing_goes_in_vain(
    store: Store, exact: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        _add(store, number, days_ago=20 - number)
    _is_full(monkeypatch, store, 0)
    for policy in (Policy(keep_free=3 * MIB), Policy(keep_free=MIB, yields=False)):
        store.retain(policy)
        fd = _file(4 * MIB)
        with pytest.raises(StoreFull, match="no space left on its filesystem"):
            store.stage(fd)
        os.close(fd)
        assert len(_ids(store)) == 3


def _file(size: int) -> int:
    fd = os.memfd_create("big")
    os.posix_fallocate(fd, 0, size)
    return fd


def test_what_will_never_fit_costs_nothing(store: Store, exact: None) -> None:
    for number in range(5):
        _add(store, number, days_ago=20 - number)
    store.retain(_room_for(store, 0))
    fd = _file(40 * MIB)
    try:
        with pytest.raises(OSError, match=f"its {40 * MIB} bytes are more"):
            store.stage(fd)
        store.stage(fd, SIZE).close()
    finally:
        os.close(fd)
    assert len(_ids(store)) == 4


def test_only_one_thread_makes_room(store: Store, exact: None) -> None:
    for number in range(20):
        _add(store, number, days_ago=40 - number)
    store.retain(_room_for(store, 0))
    staged = [capture(store, os.urandom(SIZE), _id(100 + n)) for n in range(4)]
    threads = [threading.Thread(target=store.commit, args=([each],)) for each in staged]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.enforce()
    assert len(_ids(store)) == 20


# --- a full disk ---------------------------------------------------------------------------------


class _Full:
    """Lets something fail with a full disk so many times, or until something is removed."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, work: Callable[..., object]) -> Callable[..., object]:
        def attempt(*args: object, **kwargs: object) -> object:
            if self.times > 0:
                self.times -= 1
                raise StoreFull("store x: no space left on its filesystem")
            return work(*args, **kwargs)

        return attempt


@pytest.mark.parametrize("where", ["stage", "seal"])
def test_a_full_disk_takes_the_place_of_what_is_oldest(
    store: Store, where: str, monkeypatch: pytest.MonkeyPatch, exact: None
) -> None:
    for number in range(6):
        _add(store, number, days_ago=20 - number)
    store.retain(Policy())
    before = open_descriptors()
    monkeypatch.setattr(store.blobs.files, where, _Full(3)(getattr(store.blobs.files, where)))
    _add(store, 10)
    assert _ids(store) == {3, 4, 5, 10}
    assert open_descriptors() <= before


def test_recapturable_file_takes_no_place_of_others_on_a_full_disk(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several files were admitted at a time, and do not fit together."""
    for number in range(3):
        _add(store, number)
    store.retain(Policy())
    here = _host_file(tmp_path / "here", 50)
    monkeypatch.setattr(store.blobs.files, "stage", _Full(1)(store.blobs.files.stage))
    with (tmp_path / "here").open("rb") as file, pytest.raises(Recapturable):
        store.stage(file.fileno(), origin=here.origin)
    assert _ids(store) == {0, 1, 2}


def test_a_full_index_takes_the_place_of_what_is_oldest(
    store: Store, monkeypatch: pytest.MonkeyPatch, exact: None
) -> None:
    for number in range(6):
        _add(store, number, days_ago=20 - number)
    store.retain(Policy())
    staged = capture(store, os.urandom(SIZE), _id(10))
    env = environment.acquire(store.path, read_only=False)
    full, real = _Full(1), env.write
    monkeypatch.setattr(env, "write", lambda work: full(real)(work))
    store.commit([staged])
    assert 10 in _ids(store)
    assert len(_ids(store)) < 7
    environment.release(env)


def test_when_nothing_may_go_the_disk_is_full(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    _add(store, 1)
    store.pin([_id(1)])
    store.retain(Policy())
    monkeypatch.setattr(store.blobs.files, "stage", _Full(99)(store.blobs.files.stage))
    with pytest.raises(StoreFull, match=r"no space left.*nothing may be removed \(1 blob is"):
        _add(store, 2)


def test_what_may_not_be_on_the_disk_is_not_tried_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an fsync that failed the next one may succeed, whatever became of the bytes."""
    _add(store, 1, days_ago=9)
    store.retain(Policy())
    tries = []

    def sync(fds: list[int]) -> None:
        tries.append(fds)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("buildidfs.store.blobs.files.sync_all", sync)
    with pytest.raises(StoreFull):
        _add(store, 2)
    assert len(tries) == 1
    assert _ids(store) == {1}


# --- plans ---------------------------------------------------------------------------------------


def test_a_plan_says_why(store: Store, tmp_path: Path) -> None:
    _add(store, 1, days_ago=50)
    _add(store, 2, at=_host_file(tmp_path / "here", 2, days_ago=4))
    _add(store, 3, days_ago=45)
    _add(store, 4, days_ago=44)
    store.pin([_id(3)], b"/srv/perf.data")
    _add(store, 5)
    policy = msgspec.structs.replace(_room_for(store, -1.9), max_age=48 * DAY, min_age=DAY)
    plan = list(store.plan(policy, lambda digest: None, with_kept=True))
    said = [(int(each.candidate.build_ids[0]), each.is_evicted, each.why) for each in plan]
    assert said == [
        (1, True, "max-age"),
        (2, True, "max-size; this host has it"),
        (3, False, "pinned: /srv/perf.data"),
        (4, False, "within the limits"),
        (5, False, "used within min-age"),
    ]
    assert plan[0].path == b"/opt/1"
    assert SIZE <= plan[1].candidate.size < SIZE + 16384
    assert len(_ids(store)) == 5
    plan = list(store.plan(policy, lambda digest: None))
    assert [each.is_evicted for each in plan] == [True, True]


def test_plan_names_the_share_with_the_most_bytes(store: Store) -> None:
    _add(store, 1, days_ago=2)
    _add(store, 2, days_ago=1)
    first = next(iter(store.plan(_room_for(store, -0.5), lambda digest: None)))
    assert first.why == "max-size; the most bytes belong to root of the host"


def test_store_follows_the_plan(store: Store, tmp_path: Path) -> None:
    for number in range(12):
        _add(store, number, days_ago=60 - number, uid=number % 3)
    for number in range(20, 23):
        _add(store, number, at=_host_file(tmp_path / str(number), number, days_ago=2))
    store.pin([_id(0), _id(20)])
    policy = msgspec.structs.replace(_room_for(store, -7), max_age=59 * DAY)
    plan = [int(each.candidate.build_ids[0]) for each in store.plan(policy, lambda digest: None)]
    assert set(plan[:2]) == {21, 22}
    before = _ids(store)
    store.retain(policy)
    store.enforce()
    assert before - _ids(store) == set(plan)
    assert list(store.plan(policy, lambda digest: None)) == []


def test_blobs_of_the_future_can_be_removed(store: Store) -> None:
    """An earlier version took the times of a bundle for true."""
    digest = _add(store, 1)
    env = store._env
    assert env is not None

    def claim(txn: Any) -> None:
        writer = UseWriter(env, txn)
        row = schema.DigestRow.unpack(txn.get(digest, db=env.tables["digests"]))
        writer.remove(digest, row)
        writer.add(digest, row, 2**32 - 1, Trust.UNKNOWN)
        txn.put(digest, row.pack(), db=env.tables["digests"])

    env.write(claim)
    store.retain(Policy(max_size=1))
    store.enforce()
    assert _ids(store) == set()


def test_a_policy_is_for_writers(tmp_path: Path) -> None:
    with Store.create(tmp_path / "other") as store:
        _add(store, 1)
    with Store.open(tmp_path / "other", read_only=True) as reader:
        with pytest.raises(StoreError, match="reading only"):
            reader.retain(Policy())
        with pytest.raises(StoreError, match="reading only"):
            reader.pin([_id(1)])
        reader.enforce()
        assert list(reader.plan(Policy(max_size=1), lambda digest: None)) != []


# --- everything at once --------------------------------------------------------------------------


def test_captures_readers_and_removal_at_once(store: Store) -> None:
    """What is opened is read to its end, and nothing is ever half there."""
    limit = store.stats().index_bytes + 20 * MIB
    store.retain(Policy(max_size=limit))
    ending = threading.Event()
    failures: list[BaseException] = []

    def guarded(work: Callable[[int], None], seed: int) -> None:
        try:
            number = seed
            while not ending.is_set():
                work(number)
                number += 10
        except BaseException as error:
            failures.append(error)
            ending.set()

    def write(number: int) -> None:
        at = sighting(b"/srv/%d" % (number % 300), ino=number, seen_ns=time.time_ns())
        again = [capture(store, os.urandom(SIZE), _id(number), at=at)]
        held = next(
            (store.held(each.digest) for each in store.index.variants(number // 2, 1)), None
        )
        if held is not None:
            again.append(capture(store, held.digest, held.build_id, at=at))
        store.commit(again)

    def read(number: int) -> None:
        for ordinal, _ in list(store.index.build_ids_from())[number % 7 :: 3]:
            for artifact in store.index.variants(ordinal, Kind.EXECUTABLE):
                with contextlib.suppress(IntegrityError):  # removed a moment ago
                    data = read_blob(store, artifact.digest)
                    assert hashlib.sha256(data).digest() == artifact.digest

    def tend(number: int) -> None:
        store.enforce()
        store.collect()
        victims = store.index.variants(number // 3, Kind.EXECUTABLE)
        store.remove([victim.digest for victim in victims])

    jobs = [(write, 1), (write, 2), (write, 3), (read, 4), (tend, 5)]
    threads = [threading.Thread(target=guarded, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    ending.wait(3)
    ending.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(store.check(digests=True)) == []
    store.enforce()
    stats = store.stats()
    assert 0 < stats.stored_bytes + stats.index_bytes <= limit
