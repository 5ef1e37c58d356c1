# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.write.transaction: what a commit makes of captures."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from buildidfs.errors import StoreError
from buildidfs.model import Absence, BuildId, ByteRange, Digest, Kind, Quality, Sighting, Trust
from buildidfs.store import NewAbsence, NewCapture, Outcome, Remembered, Store, schema
from buildidfs.store.index.locations import APART_MNT
from tests.support.harness.captures import (
    NOW,
    SECOND,
    capture,
    commit,
    identity,
    read_blob,
    sighting,
    stage,
)

EXECUTABLE, DEBUGINFO = Kind.EXECUTABLE, Kind.DEBUGINFO
MINUTE = 60 * SECOND


@pytest.fixture
def store(store: Store) -> Iterator[Store]:
    yield store
    assert list(store.check(digests=True)) == []


def test_one_capture(store: Store) -> None:
    seen = sighting(mode=0o104755, uid=5, gid=6, mtime_ns=77, trust=Trust.HOST)
    scripts = (ByteRange(3, 4),)
    new = NewCapture(
        seen, stage(store, b"bytes"), BuildId(b"\xab\xcd"), (EXECUTABLE,), Quality.SYMTAB, scripts
    )
    result = commit(store, new)
    (outcome,) = result.outcomes
    assert outcome == Outcome(1, new_id=True, new_variant=True, new_blob=True, refused="")
    assert (result.changed, result.bytes_added) == ((outcome.ordinal,), 5)
    assert store.index.ordinal(BuildId(b"\xab\xcd")) == outcome.ordinal
    assert store.index.build_id(outcome.ordinal) == BuildId(b"\xab\xcd")
    assert store.index.kinds(outcome.ordinal) == 1 << EXECUTABLE
    artifact = store.index.artifact(outcome.ordinal, EXECUTABLE)
    assert artifact is not None
    assert (artifact.ordinal, artifact.kind, artifact.variant) == (outcome.ordinal, EXECUTABLE, 0)
    assert artifact.digest == hashlib.sha256(b"bytes").digest()
    assert (artifact.size, artifact.mtime_ns, artifact.mode) == (5, 77, 0o555)
    assert (artifact.uid, artifact.gid) == (5, 6)
    assert (artifact.quality, artifact.trust) == (Quality.SYMTAB, Trust.HOST)
    assert (artifact.first_seen_ns, artifact.scripts) == (NOW, scripts)
    assert read_blob(store, artifact.digest) == b"bytes"
    (record,) = store.index.origins(outcome.ordinal)
    assert record.origin == seen.origin
    assert record.kinds == (EXECUTABLE,)
    assert (record.first_seen_ns, record.last_seen_ns) == (NOW, NOW)
    assert store.index.artifact(outcome.ordinal, DEBUGINFO) is None


def test_the_same_again_changes_nothing(store: Store) -> None:
    first = commit(store, capture(store, b"bytes"))
    again = commit(store, capture(store, b"bytes", at=sighting(seen_ns=NOW + MINUTE)))
    (outcome,) = again.outcomes
    assert outcome.ordinal == first.outcomes[0].ordinal
    assert outcome == Outcome(outcome.ordinal), "nothing new in it"
    assert (again.changed, again.bytes_added) == ((), 0)
    (record,) = store.index.origins(outcome.ordinal)
    assert (record.first_seen_ns, record.last_seen_ns) == (NOW, NOW + MINUTE)


def test_executable_and_debuginfo_in_one_file_is_one_blob(store: Store) -> None:
    commit(store, capture(store, b"both", kinds=(EXECUTABLE, DEBUGINFO)))
    executable, debuginfo = store.index.artifact(1, EXECUTABLE), store.index.artifact(1, DEBUGINFO)
    assert executable is not None
    assert debuginfo is not None
    assert executable.digest == debuginfo.digest
    assert store.index.kinds(1) == 1 << EXECUTABLE | 1 << DEBUGINFO
    assert store.stats().blobs == 1
    (record,) = store.index.origins(1)
    assert record.kinds == (EXECUTABLE, DEBUGINFO)


def test_twenty_containers_are_one_blob_with_twenty_origins(store: Store) -> None:
    places = [
        sighting(container=f"docker:{number}", mnt_ns_id=number, dev=number, seen_ns=NOW + number)
        for number in range(20)
    ]
    result = commit(store, *(capture(store, b"libc", at=place) for place in places))
    assert [outcome.new_blob for outcome in result.outcomes] == [True] + [False] * 19
    assert store.stats().blobs == 1
    records = store.index.origins(1)
    assert [record.origin for record in records] == [place.origin for place in reversed(places)]


def test_the_same_path_in_two_images_is_two_ids(store: Store) -> None:
    commit(
        store,
        capture(store, b"one", b"\x11\x11", at=sighting(container="a")),
        capture(store, b"two", b"\x22\x22", at=sighting(container="b")),
    )
    assert list(store.index.build_ids_from()) == [
        (1, BuildId(b"\x11\x11")),
        (2, BuildId(b"\x22\x22")),
    ]
    path = store.index.primary_path(1)
    assert path is not None
    assert store.index.primary_path(2) == path
    assert list(store.paths.ids(path)) == [1, 2]


def _served(store: Store) -> bytes:
    best = store.index.artifact(1, EXECUTABLE)
    assert best is not None
    variants = store.index.variants(1, EXECUTABLE)
    assert variants[0] == best
    for variant in variants:
        assert store.index.artifact_variant(1, EXECUTABLE, variant.variant) == variant
    return read_blob(store, best.digest)


def test_trust_then_quality_then_age_decide_what_is_served(store: Store) -> None:
    def add(content: bytes, trust: Trust, quality: Quality, seen_ns: int) -> bytes:
        at = sighting(seen_ns=seen_ns)
        result = commit(store, capture(store, content, at=at, quality=quality, trust=trust))
        assert result.changed == (1,), "there is another variant, whether or not it is served"
        return _served(store)

    assert add(b"first", Trust.CONTAINER, Quality.DYNSYM, NOW) == b"first"
    assert add(b"later", Trust.CONTAINER, Quality.DYNSYM, NOW + 1) == b"first"
    assert add(b"earlier", Trust.CONTAINER, Quality.DYNSYM, NOW - 1) == b"earlier"
    assert add(b"better", Trust.CONTAINER, Quality.DEBUGINFO, NOW + 2) == b"better"
    assert add(b"unknown", Trust.UNKNOWN, Quality.DEBUGINFO, NOW - 9) == b"better"
    assert add(b"trusted", Trust.HOST, Quality.NONE, NOW + 3) == b"trusted"
    assert [variant.variant for variant in store.index.variants(1, EXECUTABLE)] == [
        5,
        3,
        2,
        0,
        1,
        4,
    ]
    assert [variant.variant for variant in store.index.variants(1, DEBUGINFO)] == []
    assert store.index.artifact_variant(1, EXECUTABLE, 6) is None
    assert store.index.artifact_variant(1, DEBUGINFO, 0) is None


def test_bytes_seen_at_a_more_trusted_place_are_trusted(store: Store) -> None:
    container, host = sighting(trust=Trust.CONTAINER), sighting(trust=Trust.HOST, ino=9)
    commit(store, capture(store, b"hostile", at=container, quality=Quality.DEBUGINFO))
    commit(store, capture(store, b"genuine", at=container, kinds=(EXECUTABLE, DEBUGINFO)))
    assert _served(store) == b"hostile"
    result = commit(store, capture(store, b"genuine", at=host))
    assert result.changed == (1,)
    assert not result.outcomes[0].new_variant
    assert _served(store) == b"genuine"
    debuginfo = store.index.artifact(1, DEBUGINFO)
    assert debuginfo is not None
    assert debuginfo.trust is Trust.HOST, "it is the same blob"
    commit(store, capture(store, b"genuine", at=container))
    assert _served(store) == b"genuine", "and stays so"


def test_another_kind_of_the_same_bytes_has_their_trust_and_mode(store: Store) -> None:
    private = sighting(mode=0o100700, uid=7, trust=Trust.HOST)
    commit(store, capture(store, b"bytes", at=private))
    later = sighting(mode=0o100700, uid=9, trust=Trust.CONTAINER)
    commit(store, capture(store, b"bytes", at=later, kinds=[DEBUGINFO]))
    first, second = store.index.artifact(1, EXECUTABLE), store.index.artifact(1, DEBUGINFO)
    assert first is not None
    assert second is not None
    assert (second.trust, second.mode, second.uid) == (Trust.HOST, 0o500, 7)
    commit(store, capture(store, b"bytes", at=sighting(ino=3), kinds=[DEBUGINFO]))
    for kind in (EXECUTABLE, DEBUGINFO):
        artifact = store.index.artifact(1, kind)
        assert artifact is not None
        assert (artifact.mode, artifact.trust) == (0o555, Trust.HOST)


def test_what_changes_of_a_variant_that_is_not_served_is_told(store: Store) -> None:
    commit(store, capture(store, b"best", trust=Trust.HOST))
    commit(store, capture(store, b"other", trust=Trust.UNKNOWN))
    assert commit(store, capture(store, b"other", trust=Trust.PACKAGE)).changed == (1,)
    assert commit(store, capture(store, b"other", trust=Trust.PACKAGE)).changed == ()
    assert [variant.trust for variant in store.index.variants(1, EXECUTABLE)] == [
        Trust.HOST,
        Trust.PACKAGE,
    ]


@pytest.mark.parametrize(
    ("modes", "shown"),
    [
        ([0o644], 0o444),
        ([0o755], 0o555),
        ([0o4755], 0o555),
        ([0o600], 0o400),
        ([0o711], 0o511),
        ([0o700, 0o640], 0o500),
        ([0o644, 0o700], 0o444),
        ([0o604], 0o404),
        ([0o070], 0o050),
        ([0o077], 0o055),
        ([0o700, 0o604], 0o500),
        ([0o700, 0o077], 0o500),
        ([0o604, 0o070], 0o404),
    ],
)
def test_mode_and_owner_bound_who_may_read(store: Store, modes: list[int], shown: int) -> None:
    for number, mode in enumerate(modes):
        at = sighting(mode=0o100000 | mode, uid=100 + number, gid=200 + number, ino=number)
        commit(store, capture(store, b"private", at=at))
    artifact = store.index.artifact(1, EXECUTABLE)
    assert artifact is not None
    assert artifact.mode == shown
    assert (artifact.uid, artifact.gid) == (100, 200), "the first owner"


@pytest.mark.parametrize("mode", [0o600, 0o604, 0o070, 0o044])
def test_where_all_could_read_it_decides_whose_it_is_shown_as(store: Store, mode: int) -> None:
    """Also for what else has these bytes. Another owner's mode alone would mean something else."""
    private = sighting(mode=0o100000 | mode, uid=7, gid=8)
    commit(store, capture(store, b"x", at=private, kinds=(EXECUTABLE, DEBUGINFO)))
    public = sighting(mode=0o100755, uid=9, gid=10, ino=2)
    assert commit(store, capture(store, b"x", at=public)).changed == (1,)
    commit(store, capture(store, b"x", at=sighting(mode=0o100700, uid=11, ino=3)))
    for kind in (EXECUTABLE, DEBUGINFO):
        artifact = store.index.artifact(1, kind)
        assert artifact is not None
        assert (artifact.mode, artifact.uid, artifact.gid) == (0o555, 9, 10)


def test_another_kind_of_known_bytes_is_for_all_who_could_read_it(store: Store) -> None:
    private = sighting(mode=0o100700, uid=7, trust=Trust.CONTAINER)
    commit(store, capture(store, b"x", at=private))
    public = sighting(mode=0o100644, ino=2, trust=Trust.HOST)
    commit(store, capture(store, b"x", at=public, kinds=[DEBUGINFO]))
    for kind in (EXECUTABLE, DEBUGINFO):
        artifact = store.index.artifact(1, kind)
        assert artifact is not None
        assert (artifact.mode, artifact.uid, artifact.trust) == (0o444, 0, Trust.HOST)


@pytest.mark.parametrize(
    ("reach", "shown"),
    [(0o7, 0o555), (0o6, 0o550), (0o5, 0o505), (0o4, 0o500), (0o1, 0o005), (0, 0)],
)
def test_who_could_not_get_at_it_may_not_read_it(store: Store, reach: int, shown: int) -> None:
    at = sighting(mode=0o104755, reach=reach)
    commit(store, capture(store, b"x", at=at))
    artifact = store.index.artifact(1, EXECUTABLE)
    assert artifact is not None
    assert artifact.mode == shown
    assert store.index.origins(1)[0].origin.reach == reach
    assert commit(store, capture(store, b"x", at=at)).changed == ()
    elsewhere = sighting(mode=0o100755, reach=0o7, ino=2)
    commit(store, capture(store, b"x", at=elsewhere))
    artifact = store.index.artifact(1, EXECUTABLE)
    assert artifact is not None
    assert artifact.mode == 0o555


@pytest.mark.parametrize("reach", [0o7, 0o4, 0])
def test_a_file_that_is_recognised_was_not_asked_about(store: Store, reach: int) -> None:
    """What was found out of a place stays, and nothing more is allowed because of it."""
    at = sighting(mode=0o100755, reach=reach)
    commit(store, capture(store, b"x", at=at))
    before = store.index.artifact(1, EXECUTABLE)
    unasked = msgspec.structs.replace(at.origin, reach=0)
    elsewhere = msgspec.structs.replace(unasked, path=b"/link")
    for seen_ns in (NOW, NOW + 5 * MINUTE):
        again = [Sighting(unasked, seen_ns), Sighting(elsewhere, seen_ns)]
        assert store.touch(again) == []
    found = {record.origin.path: record for record in store.index.origins(1)}
    assert {path: record.origin.reach for path, record in found.items()} == {
        b"/usr/bin/app": reach,
        b"/link": 0,
    }
    assert {record.last_seen_ns for record in found.values()} == {NOW + 5 * MINUTE}
    assert store.index.artifact(1, EXECUTABLE) == before


def test_a_change_of_mode_is_told(store: Store) -> None:
    commit(store, capture(store, b"x", at=sighting(mode=0o100700)))
    assert commit(store, capture(store, b"x", at=sighting(mode=0o100755, ino=2))).changed == (1,)


def test_new_paths_are_told_and_new_origins_alone_are_not(store: Store) -> None:
    commit(store, capture(store, b"x", at=sighting(b"/a")))
    assert commit(store, capture(store, b"x", at=sighting(b"/a", ino=5))).changed == ()
    assert commit(store, capture(store, b"x", at=sighting(b"/b"))).changed == (1,)


def test_origins_are_bounded_and_the_first_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MAX_ORIGINS", 4)
    for number in range(10):
        commit(store, capture(store, b"x", at=sighting(ino=number, seen_ns=NOW + number)))
    assert [record.origin.identity.ino for record in store.index.origins(1)] == [9, 8, 7, 0]
    assert store.stats().origins == 4


MALLORY: dict[str, Any] = {"apart": APART_MNT, "owner": 1001, "container": "docker:01"}
ALICE: dict[str, Any] = {"apart": APART_MNT, "cgroup": b"/docker/" + b"a" * 64}
BOB: dict[str, Any] = {"apart": APART_MNT, "cgroup": b"/docker/" + b"b" * 64}


def test_container_with_many_places_keeps_those_of_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MAX_ORIGINS", 8)
    monkeypatch.setattr(schema, "MAX_PATHS", 8)
    commit(store, capture(store, b"x", at=sighting(b"/first", container="image")))
    for number in range(3):
        commit(store, capture(store, b"x", at=sighting(b"/host%d" % number, ino=number)))
    commit(store, capture(store, b"x", at=sighting(b"/alice", **ALICE)))
    for number in range(20):
        at = sighting(b"/evil/%d" % number, seen_ns=NOW + number + 1, ino=number, **MALLORY)
        commit(store, capture(store, b"x", at=at))
    late = {b"/late": sighting(b"/late"), b"/bob": sighting(b"/bob", **BOB)}
    for at in late.values():
        commit(store, capture(store, b"x", at=at))
    kept = {record.origin.path for record in store.index.origins(1)}
    assert kept >= {b"/first", b"/host0", b"/host1", b"/host2", b"/alice", b"/late", b"/bob"}
    assert len(kept) == 8
    for path in (b"/host0", b"/host1", b"/host2", b"/alice", b"/late", b"/bob"):
        number = store.paths.number([path[1:]])
        assert number is not None, path
        assert store.paths.has(number, 1), path


def test_places_of_the_host_take_no_room_from_a_container(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MAX_ORIGINS", 8)
    for number in range(12):
        at = sighting(b"/host%d" % number, ino=number, seen_ns=NOW + number)
        commit(store, capture(store, b"x", at=at))
    commit(store, capture(store, b"x", at=sighting(b"/alice", **ALICE)))
    commit(store, capture(store, b"x", at=sighting(b"/more", seen_ns=NOW + 20)))
    assert b"/alice" in {record.origin.path for record in store.index.origins(1)}


def test_only_executables_make_paths(store: Store) -> None:
    commit(
        store,
        capture(store, b"debug", b"\x01\x01", kinds=[DEBUGINFO], at=sighting(b"/d")),
        capture(store, b"vdso", b"\x02\x02", kinds=[Kind.VDSO], at=sighting(b"[vdso]")),
        capture(
            store, b"syms", b"\x03\x03", kinds=[Kind.KALLSYMS], at=sighting(b"[kernel.kallsyms]")
        ),
    )
    assert store.index.primary_path(1) is None
    paths = [store.index.primary_path(ordinal) for ordinal in (2, 3)]
    assert [store.paths.spelled(path) for path in paths if path] == [
        b"/[vdso]",
        b"/[kernel.kallsyms]",
    ]
    commit(store, capture(store, b"exe", b"\x01\x01", at=sighting(b"/e")))
    assert store.index.primary_path(1) is not None, "known as debuginfo first"


def test_paths_of_a_build_id_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_PATHS", 3)
    for number in range(5):
        commit(store, capture(store, b"x", at=sighting(b"/bin/%d" % number)))
    parent = store.paths.child(0, b"bin")
    assert parent is not None
    ids = {name: list(store.paths.ids(path)) for name, path in store.paths.children(parent)}
    assert ids == {b"0": [1], b"1": [1], b"2": [1]}
    assert store.stats().paths == 1 + 3 + 3, "names that lead nowhere are not written"


def test_very_deep_paths_have_no_place_in_the_tree(store: Store) -> None:
    """One file seen at many of them would fill the disk, and use up the numbers of paths."""
    deep = b"/d" * 128
    commit(store, capture(store, b"x", at=sighting(deep + b"/e")))
    assert (store.stats().paths, store.index.primary_path(1)) == (0, None)
    assert [record.origin.path for record in store.index.origins(1)] == [deep + b"/e"]
    commit(store, capture(store, b"x", at=sighting(deep)))
    assert store.stats().paths == 128 + 1


def test_a_container_cannot_fill_the_names_of_dwz_files(store: Store) -> None:
    places = (
        sighting(b"/usr/lib/debug/.dwz/%d" % n, ino=n, trust=Trust.CONTAINER)
        for n in range(2 * schema.MAX_ORIGINS)
    )
    commit(store, *(capture(store, b"dwz", kinds=[DEBUGINFO], at=place) for place in places))
    assert len(list(store.index.supplementaries())) == schema.MAX_ORIGINS - 1


def test_bytes_are_believed_under_the_build_id_they_were_seen_under(store: Store) -> None:
    """A debug file without a build ID of its own is what somebody's .gnu_debuglink names."""
    mine, theirs = b"\x01" * 20, b"\x02" * 20
    evil = sighting(b"/evil.debug", trust=Trust.CONTAINER, ctime_ns=0, ino=1)
    real = sighting(b"/real.debug", trust=Trust.HOST, ctime_ns=0, ino=2)
    commit(store, capture(store, b"debug", theirs, kinds=[DEBUGINFO], at=evil))
    commit(store, capture(store, b"debug", mine, kinds=[DEBUGINFO], at=real))
    assert store.touch([real, evil]) == []

    def trust(build_id: bytes) -> Trust:
        artifact = store.index.artifact(store.index.ordinal(BuildId(build_id)) or 0, DEBUGINFO)
        assert artifact is not None
        return artifact.trust

    assert (trust(mine), trust(theirs)) == (Trust.HOST, Trust.CONTAINER)


def test_seen_again_within_a_minute_writes_nothing(store: Store) -> None:
    first = sighting(seen_ns=NOW, ctime_ns=0)
    commit(store, capture(store, b"bytes", at=first))
    (before,) = store.index.origins(1)
    assert store.touch([Sighting(first.origin, NOW + MINUTE - 1)]) == []
    assert store.index.origins(1) == [before]
    assert store.touch([Sighting(first.origin, NOW + MINUTE)]) == []
    assert store.index.origins(1)[0].last_seen_ns == NOW + MINUTE


def test_dwz_files_are_found_by_name(store: Store) -> None:
    name = b"x86_64-linux-gnu/app.debug"
    at = sighting(b"/usr/lib/debug/.dwz/" + name, trust=Trust.CONTAINER)

    def add(content: bytes, build_id: bytes, trust: Trust) -> int | None:
        commit(store, capture(store, content, build_id, kinds=[DEBUGINFO], at=at, trust=trust))
        return store.index.supplementary(name)

    assert store.index.supplementary(name) is None
    assert add(b"one", b"\x01\x01", Trust.CONTAINER) == 1
    assert add(b"two", b"\x02\x02", Trust.HOST) == 2
    assert add(b"bad", b"\x03\x03", Trust.CONTAINER) == 2, "a container does not take the name"
    assert add(b"new", b"\x04\x04", Trust.HOST) == 4, "the host's package was upgraded"
    assert list(store.index.supplementaries()) == [(name, 4)]
    assert list(store.index.supplementaries(b"x86", name)) == []
    assert list(store.index.supplementaries(b"y")) == []
    again = sighting(b"/usr/lib/debug/.dwz/" + name, trust=Trust.HOST)
    assert (
        commit(store, capture(store, b"two", b"\x02\x02", kinds=[DEBUGINFO], at=again)).changed
        == ()
    )
    assert store.index.supplementary(name) == 4, "two places seen in turn do not take it in turn"
    assert store.index.supplementary(b"") is None
    assert store.index.supplementary(b"x" * 600) is None


def _referring(store: Store, build_id: bytes, name: bytes, to: bytes, **changes: Any) -> NewCapture:
    """Debuginfo that refers to a dwz file by that name."""
    at = sighting(b"/usr/lib/debug/x", **changes)
    new = capture(store, build_id, build_id, kinds=[DEBUGINFO], at=at)
    return msgspec.structs.replace(new, supplement=(b"/d/.dwz/" + name, BuildId(to)))


@pytest.mark.parametrize("first", ["reference", "file"])
def test_dwz_files_have_the_names_by_which_debuginfo_refers_to_them(
    store: Store, first: str
) -> None:
    common = b"\xdd" * 20
    news = [
        _referring(store, b"\x01\x01", b"x86/app", common, mode=0o100644),
        capture(store, b"common", common, kinds=[DEBUGINFO], at=sighting(b"/elsewhere/common")),
    ]
    for new in news if first == "reference" else reversed(news):
        assert store.index.supplementary(b"x86/app") is None
        assert list(store.index.supplementaries()) == []
        commit(store, new)
    assert store.index.supplementary(b"x86/app") == store.index.ordinal(common)
    assert list(store.index.supplementaries()) == [(b"x86/app", store.index.ordinal(common))]
    assert store.index.is_public_supplementary(b"x86/app")
    assert list(store.checker().rows()) == []


def test_a_place_comes_before_a_reference(store: Store) -> None:
    one, two = b"\xd1" * 20, b"\xd2" * 20
    files = [
        capture(store, one, one, kinds=[DEBUGINFO], at=sighting(b"/usr/.dwz/app")),
        capture(store, two, two, kinds=[DEBUGINFO], at=sighting(b"/elsewhere")),
    ]
    commit(store, files[1], _referring(store, b"\x01\x01", b"app", two, mode=0o100644))
    assert store.index.supplementary(b"app") == store.index.ordinal(two)
    commit(store, files[0])
    assert store.index.supplementary(b"app") == store.index.ordinal(one)
    commit(store, _referring(store, b"\x02\x02", b"app", two, mode=0o100644))
    assert store.index.supplementary(b"app") == store.index.ordinal(one)


def test_references_that_not_everybody_can_read_give_no_name(store: Store) -> None:
    common = b"\xdd" * 20
    commit(store, capture(store, b"common", common, kinds=[DEBUGINFO]))
    for number, changes in enumerate(({"mode": 0o100600}, {"reach": 1, "mode": 0o100644})):
        commit(store, _referring(store, bytes([number, 1]), b"app", common, **changes))
    commit(store, _referring(store, b"\x07\x07", b"n" * 600, common, mode=0o100644))
    assert list(store.index.supplementaries()) == []


def test_ordinals_end_with_a_clear_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_NUMBER", 5)
    with pytest.raises(StoreError, match=r"as many build IDs as it can number \(5\)"):
        store.commit([capture(store, b"%d" % i, b"id%d" % i, at=sighting(b"/x")) for i in range(6)])
    assert list(store.index.build_ids_from()) == [], "all or nothing"
    with pytest.raises(StoreError, match=r"as many paths as it can number \(5\)"):
        store.commit([capture(store, b"x", at=sighting(b"/1/2/3/4/5/6"))])
    commit(store, capture(store, b"x", at=sighting(b"/1/2/3/4")))


def test_variants_beyond_their_numbers_are_refused_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile image may hold any number of files with the build ID of libc."""
    monkeypatch.setattr(schema, "MAX_VARIANT", 1)
    new = [capture(store, b"%d" % number) for number in range(4)]
    result = commit(store, *new, capture(store, b"other", b"\x05\x05"))
    assert [bool(outcome.refused) for outcome in result.outcomes] == [False] * 2 + [True] * 2 + [
        False
    ]
    assert "as many variants" in result.outcomes[2].refused
    assert len(store.index.variants(1, EXECUTABLE)) == 2
    assert store.stats().blobs == 3, "the refused are not kept"
    assert len(store.index.origins(1)) == 2


def test_the_host_has_numbers_for_variants_that_nobody_else_gets(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MAX_FOREIGN_VARIANT", 1)
    hostile = [capture(store, b"%d" % n, trust=Trust.CONTAINER) for n in range(4)]
    result = commit(store, *hostile, capture(store, b"host", trust=Trust.HOST))
    assert [bool(outcome.refused) for outcome in result.outcomes] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert [variant.trust for variant in store.index.variants(1, EXECUTABLE)] == [
        Trust.HOST,
        Trust.CONTAINER,
        Trust.CONTAINER,
    ]


def test_container_with_many_variants_leaves_numbers_for_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are never used again, so they cannot be given back."""
    monkeypatch.setattr(schema, "UNDIVIDED_VARIANTS", 4)
    monkeypatch.setattr(schema, "MAX_FOREIGN_VARIANT", 16)

    def add(name: bytes, number: int) -> bool:
        place = sighting(
            b"/app", apart=0x20, cgroup=b"/docker/" + name * 64, trust=Trust.CONTAINER,
            mnt_ns_id=number,
        )  # fmt: skip
        new = capture(store, name + b"%d" % number, at=place)
        return not commit(store, new).outcomes[0].refused

    assert sum(add(b"6", number) for number in range(30)) == 5
    assert [add(b"%x" % owner, 0) for owner in range(5)] == [True] * 5
    assert sum(add(b"a", number) for number in range(30)) == 5, "as many as the first has"


def test_a_capture_without_kind_is_a_mistake(store: Store) -> None:
    with pytest.raises(ValueError, match="at least one kind"):
        store.commit([capture(store, b"x", kinds=())])
    assert store.index.ordinal(b"\xab\xcd\xef\x01") is None


def test_a_digest_instead_of_bytes(store: Store) -> None:
    commit(store, capture(store, b"held", kinds=(EXECUTABLE, DEBUGINFO), quality=Quality.SYMTAB))
    digest = Digest(hashlib.sha256(b"held").digest())
    held = store.held(digest)
    assert held is not None
    assert (held.size, held.ordinal, held.build_id) == (4, 1, BuildId(b"\xab\xcd\xef\x01"))
    assert (held.kinds, held.quality) == ((EXECUTABLE, DEBUGINFO), Quality.SYMTAB)
    fd = os.memfd_create("again")
    os.write(fd, b"held")
    assert store.digest_of(fd) == digest
    os.close(fd)
    result = commit(store, capture(store, digest, at=sighting(ino=2)))
    assert len(store.index.origins(result.outcomes[0].ordinal)) == 2
    assert not result.outcomes[0].new_blob
    unknown = Digest(bytes(32))
    assert store.held(unknown) is None
    result = commit(store, capture(store, unknown), capture(store, b"other", b"\x01\x02"))
    assert [outcome.gone for outcome in result.outcomes] == [True, False]
    with pytest.raises(ValueError, match="at least one kind"):
        store.commit([capture(store, b"3", b"\x03\x03"), capture(store, b"4", kinds=())])
    assert store.index.ordinal(b"\x03\x03") is None, "all or nothing"


def test_the_same_bytes_under_two_build_ids(store: Store) -> None:
    """Only for what carries no build ID of its own: kallsyms of two kernels."""
    kinds = [Kind.KALLSYMS]
    commit(
        store,
        capture(store, b"same", b"\x01\x01", kinds=kinds),
        capture(store, b"same", b"\x02\x02", kinds=kinds, at=sighting(seen_ns=NOW + 1)),
    )
    assert store.stats().blobs == 1
    for ordinal in (1, 2):
        assert store.index.artifact(ordinal, Kind.KALLSYMS) is not None
        assert len(store.index.origins(ordinal)) == 1


# --- the memo --------------------------------------------------------------------------------


def test_a_captured_file_is_recalled(store: Store) -> None:
    seen = sighting()
    assert store.index.recall(seen.origin.identity) is None
    commit(store, capture(store, b"x", at=seen))
    known = Remembered(build_id=BuildId(b"\xab\xcd\xef\x01"))
    assert store.index.recall(seen.origin.identity) == known
    assert store.index.recall(identity(ino=99)) is None
    assert store.index.recall(identity(scope=None)) is None


def test_absence_is_recalled(store: Store) -> None:
    for number, absence in enumerate(Absence):
        store.remember([NewAbsence(identity(ino=number), NOW, absence)])
        assert store.index.recall(identity(ino=number)) == Remembered(absence=absence)
    assert store.stats().remembered == len(Absence)


@pytest.mark.parametrize(
    ("age_ns", "remembered"),
    [(2 * SECOND, True), (2 * SECOND - 1, False), (0, False), (-SECOND, False)],
)
def test_a_file_changed_just_now_is_not_remembered(
    store: Store, age_ns: int, remembered: bool
) -> None:
    young, other = identity(ctime_ns=NOW - age_ns), identity(ctime_ns=NOW - age_ns, ino=2)
    commit(store, capture(store, b"x", at=sighting(identity=young)))
    store.remember([NewAbsence(other, NOW, Absence.NOT_ELF)])
    assert [store.index.recall(each) is not None for each in (young, other)] == [remembered] * 2


def test_a_file_without_scope_is_not_remembered(store: Store) -> None:
    unsure = identity(scope=None)
    commit(store, capture(store, b"x", at=sighting(identity=unsure)))
    store.remember([NewAbsence(unsure, NOW, Absence.NOT_ELF)])
    assert store.stats().remembered == 0


def test_the_memo_is_bounded_and_the_old_go_first(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MAX_SEEN", 50)
    absent = [
        NewAbsence(identity(ino=number), NOW + number * 2 * 86_400 * SECOND, Absence.NOT_ELF)
        for number in range(200)
    ]
    store.remember(absent)
    assert store.stats().remembered == 50
    kept = [number for number in range(200) if store.index.recall(identity(ino=number)) is not None]
    assert len(kept) == 50
    assert sum(kept) / 50 > 130, "mostly the younger half"


def test_touch_is_a_new_sighting_of_known_bytes(store: Store) -> None:
    first = sighting()
    commit(store, capture(store, b"x", at=first, kinds=(EXECUTABLE, DEBUGINFO)))
    again = Sighting(first.origin, NOW + MINUTE)
    elsewhere = sighting(b"/other", container="c", seen_ns=NOW + 3, trust=Trust.HOST)
    unknown = sighting(ino=1000)
    store.remember([NewAbsence(identity(ino=7), NOW, Absence.NOT_ELF)])
    assert store.touch([again, elsewhere, unknown, sighting(ino=7)]) == [unknown]
    assert list(store.check()) == []
    assert [
        (record.origin, record.first_seen_ns, record.last_seen_ns)
        for record in store.index.origins(1)
    ] == [(first.origin, NOW, NOW + MINUTE), (elsewhere.origin, NOW + 3, NOW + 3)]
    artifact = store.index.artifact(1, DEBUGINFO)
    assert artifact is not None
    assert artifact.trust is Trust.HOST
    path = store.paths.child(0, b"other")
    assert path is not None
    assert store.paths.has(path, 1)
    assert store.touch([]) == []


def test_a_touched_row_of_the_memo_grows_young(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MAX_SEEN", 8)  # as many as are compared
    days = 86_400 * SECOND
    store.remember([NewAbsence(identity(ino=n), NOW + n, Absence.NOT_ELF) for n in range(8)])
    assert store.touch([sighting(ino=0, seen_ns=NOW + 10 * days)]) == []
    store.remember([NewAbsence(identity(ino=9), NOW + 5 * days, Absence.NOT_ELF)])
    assert store.index.recall(identity(ino=0)) is not None


def test_an_earlier_sighting_that_comes_late_moves_the_first(store: Store) -> None:
    commit(store, capture(store, b"x"))
    commit(store, capture(store, b"x", at=sighting(seen_ns=NOW - 7)))
    (record,) = store.index.origins(1)
    assert (record.first_seen_ns, record.last_seen_ns) == (NOW - 7, NOW)
