# SPDX-License-Identifier: Apache-2.0
"""What image a container is of, as a store is told: once, and when it can be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.capture.origin import container_names
from buildidfs.ingest import scans as capturing
from buildidfs.model import NO_NAMES, BuildId, ContainerNames, Kind
from buildidfs.store import CapturedContainer, Store
from tests.support.harness.captures import NOW, SECOND, capture, commit, sighting

if TYPE_CHECKING:
    from buildidfs.model import Origin, Sighting

CONTAINER = "0123456789ab" + "c" * 52
LABEL = "docker:0123456789ab"
MINUTE = 60


class Told:
    """What says what image a container is of; remembers whom it was asked about."""

    def __init__(self) -> None:
        self.image = ""
        self.asked: list[str] = []

    def __call__(self, origin: Origin) -> ContainerNames:
        self.asked.append(origin.container)
        return ContainerNames(image=self.image)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def store(tmp_path: Path, told: Told) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as made:
        made.name_containers(told)
        yield made
        assert list(made.check(digests=True)) == []


def seen(
    path: bytes = b"/usr/bin/app",
    at: int = 0,
    *,
    container: str = CONTAINER,
    label: str = LABEL,
    inside: bytes = b"",
    host: str = "",
) -> Sighting:
    cgroup = f"/docker/{container}".encode() + inside
    return sighting(path, seen_ns=NOW + at * SECOND, container=label, cgroup=cgroup, host=host)


def image(store: Store, name: bytes = LABEL.encode()) -> str:
    number = store.containers.number(name)
    assert number is not None
    found = store.containers.get(number)
    assert isinstance(found, CapturedContainer)
    return found.called.image


def test_new_container(store: Store, told: Told) -> None:
    told.image = "app:1\nsha256:abc"
    commit(store, capture(store, b"bytes", at=seen()))
    assert image(store) == "app:1\nsha256:abc"
    assert told.asked == [LABEL]


def test_asked_once_for_all_files(store: Store, told: Told) -> None:
    told.image = "app:1"
    commit(
        store,
        capture(store, b"a", b"\1\1", at=seen(b"/a")),
        capture(store, b"b", b"\2\2", at=seen(b"/b")),
        capture(store, b"c", b"\3\3", at=sighting(b"/c")),
    )
    assert told.asked == [LABEL]


def test_container_that_was_not_known_is_asked_about_again(store: Store, told: Told) -> None:
    commit(store, capture(store, b"bytes", at=seen()))
    assert image(store) == ""
    told.image = "app:1"
    assert store.touch([seen(at=2 * MINUTE)]) == []
    assert image(store) == "app:1"


def test_what_is_known_stays(store: Store, told: Told) -> None:
    told.image = "app:1"
    commit(store, capture(store, b"bytes", at=seen()))
    for later, told.image in ((2, "app:2"), (4, "")):
        assert store.touch([seen(at=later * MINUTE)]) == []
        assert image(store) == "app:1"


def test_process_further_down_in_the_container(store: Store, told: Told) -> None:
    commit(store, capture(store, b"bytes", at=seen()))
    told.image = "app:1"
    commit(store, capture(store, b"more", b"\2\2", at=seen(b"/b", inside=b"/init.scope")))
    assert image(store) == "app:1"


def test_another_one_with_its_label(store: Store, told: Told) -> None:
    """Anybody who may make control groups can make one that is called like this."""
    commit(store, capture(store, b"bytes", at=seen()))
    told.image = "app:1"
    other = CONTAINER[:12] + "d" * 52
    commit(store, capture(store, b"more", b"\2\2", at=seen(b"/b", container=other)))
    assert image(store) == ""


def test_image_that_was_scanned(store: Store, told: Told) -> None:
    digest = "sha256:" + "a" * 64
    at = seen(label="image:app:1", container="x", host=f"{digest}/layer")
    commit(store, capture(store, b"bytes", at=at))
    assert image(store, b"image:app:1") == digest
    told.image = "app:1"
    commit(store, capture(store, b"more", b"\2\2", at=seen(b"/b")))
    assert image(store, b"image:app:1") == digest


def test_store_that_is_not_told(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store") as store:
        commit(store, capture(store, b"bytes", at=seen()))
        assert image(store) == ""


def test_nobody_waits_for_the_answer(store: Store, told: Told, tmp_path: Path) -> None:
    """What is asked may write to the store itself: there is no transaction."""

    def names_of(origin: Origin) -> ContainerNames:
        with Store.open(tmp_path / "store") as another:
            commit(another, capture(another, b"meanwhile", b"\7\7"))
        return ContainerNames(image="app:1")

    store.name_containers(names_of)
    commit(store, capture(store, b"bytes", at=seen()))
    assert image(store) == "app:1"


def test_engines_of_this_host_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        container_names, "names_of", lambda origin: ContainerNames(image=f"of {origin.container}")
    )
    with Store.create(tmp_path / "other") as store:
        capturing.name_containers(store)
        commit(store, capture(store, b"bytes", at=seen()))
        assert image(store) == f"of {LABEL}"


def test_names_are_kept(store: Store) -> None:
    """A row of before the names gets them, and none is lost when less is known later."""
    known = ContainerNames("server", "cart-7d9f", "shop")
    answers = [ContainerNames(image="app:1"), known, NO_NAMES]
    store.name_containers(lambda origin: answers.pop(0))
    commit(store, capture(store, b"bytes", at=seen()))
    for minute in (2, 4):
        store.touch([seen(at=minute * MINUTE)])
    number = store.containers.number(LABEL.encode())
    found = None if number is None else store.containers.get(number)
    assert found is not None
    assert found.called == ContainerNames("server", "cart-7d9f", "shop", "app:1")
    assert found.called.shown == "shop/cart-7d9f/server"


# --- links by name -------------------------------------------------------------------------------


def known_as(store: Store, name: bytes) -> bytes | None:
    """The directory that a name of people leads to."""
    number = store.containers.linked(name)
    found = None if number is None else store.containers.get(number)
    return None if found is None else found.name


def test_name_leads_to_the_last_container_that_has_it(store: Store) -> None:
    names = {LABEL: ContainerNames("web"), "docker:ffffffffffff": ContainerNames("web")}
    store.name_containers(lambda origin: names[origin.container])
    commit(store, capture(store, b"old", at=seen()))
    assert known_as(store, b"web") == LABEL.encode()
    later = seen(at=5 * MINUTE, container="f" * 64, label="docker:ffffffffffff")
    commit(store, capture(store, b"new", b"\2\2", at=later))
    assert known_as(store, b"web") == b"docker:ffffffffffff"
    commit(store, capture(store, b"late", b"\3\3", at=seen(b"/late", at=2 * MINUTE)))
    assert known_as(store, b"web") == b"docker:ffffffffffff"
    assert store.containers.number(b"web") is None


def test_name_goes_with_the_container(store: Store) -> None:
    store.name_containers(lambda origin: ContainerNames("server", "cart", "shop"))
    commit(store, capture(store, b"bytes", b"\2\2", at=seen()))
    assert known_as(store, b"shop_cart_server") == LABEL.encode()
    artifact = store.index.artifact(store.index.ordinal(BuildId(b"\2\2")) or 0, Kind.EXECUTABLE)
    assert artifact is not None
    store.remove([artifact.digest])
    assert store.containers.linked(b"shop_cart_server") is None


def test_check_finds_a_name_of_no_container(store: Store) -> None:
    store.name_containers(lambda origin: ContainerNames("web"))
    commit(store, capture(store, b"bytes", at=seen()))
    environment = store._opened()
    environment.write(
        lambda txn: txn.put(b"/other", (1).to_bytes(4, "big"), db=environment.tables["labels"])
    )
    (fault,) = store.check()
    assert "/other" in fault
    environment.write(lambda txn: txn.delete(b"/other", db=environment.tables["labels"]))
