# SPDX-License-Identifier: Apache-2.0
"""What was seen waits once for each place, and what is dropped when there is no end of it."""

from __future__ import annotations

from buildidfs.ingest.committer import Sightings
from buildidfs.model import BuildId
from tests.support.harness.captures import NOW, SECOND, sighting

A, B = BuildId(b"\xaa" * 20), BuildId(b"\xbb" * 20)


def times(sightings: Sightings) -> list[tuple[bytes, BuildId, int]]:
    return sorted(
        (entry.sighting.origin.path, entry.build_id, (entry.sighting.seen_ns - NOW) // SECOND)
        for entry in sightings.entries()
    )


def test_each_place_is_kept_once_with_first_and_last() -> None:
    seen = Sightings()
    for second in (5, 3, 9, 4):
        seen.add(sighting(b"/a", seen_ns=NOW + second * SECOND, mnt_ns_id=1), A)
    seen.add(sighting(b"/a", mnt_ns_id=1), B)
    seen.add(sighting(b"/a", mnt_ns_id=2), A)
    assert len(seen) == 3
    assert times(seen) == [(b"/a", A, 0), (b"/a", A, 3), (b"/a", A, 9), (b"/a", B, 0)]


def test_only_what_the_store_holds_is_touched() -> None:
    seen = Sightings()
    seen.add(sighting(b"/a"), A)
    seen.add(sighting(b"/b"), B, held=True)
    later = sighting(b"/a", seen_ns=NOW + SECOND)
    assert [item.origin.path for item in seen.touched()] == [b"/b"]
    seen.add(later, A, held=True)
    assert later in seen.touched()


def test_what_could_not_be_written_is_taken_back() -> None:
    old, new = Sightings(), Sightings()
    old.add(sighting(b"/a", seen_ns=NOW + SECOND), A, held=True)
    old.add(sighting(b"/old"), A)
    new.add(sighting(b"/a", seen_ns=NOW + 2 * SECOND), A)
    new.merge(old)
    assert times(new) == [(b"/a", A, 1), (b"/a", A, 2), (b"/old", A, 0)]
    assert len(new.touched()) == 1
    new.add(sighting(b"/new"), A)
    assert len(new) == 3


def test_namespaces_of_one_container_go_before_any_identity_does() -> None:
    seen = Sightings(100)
    for number in range(60):
        seen.add(sighting(b"/only/%d" % number), A)
    for number in range(60):
        at = NOW + number * SECOND
        seen.add(sighting(b"/often", seen_ns=at, mnt_ns_id=number, container="docker:x"), B)
    assert seen.dropped == 0
    assert len(seen) <= 100
    found = times(seen)
    assert {path for path, *_ in found} == {b"/often"} | {b"/only/%d" % n for n in range(60)}
    assert (b"/often", B, 59) in found


def test_the_oldest_go_when_there_is_no_end() -> None:
    seen = Sightings(100)
    for number in range(150):
        seen.add(sighting(b"/%d" % number, seen_ns=NOW + number * SECOND), A)
    assert len(seen) <= 100
    assert seen.dropped == 150 - len(seen)
    kept = {path for path, *_ in times(seen)}
    assert kept == {b"/%d" % number for number in range(seen.dropped, 150)}
