# SPDX-License-Identifier: Apache-2.0
"""buildidfs.catalog.containers: containers by the names that people know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.origin.builder import shown
from buildidfs.catalog import containers, history
from buildidfs.catalog.artifacts import ArtifactQuery, artifacts
from buildidfs.catalog.coverage import CoverageLookup
from buildidfs.catalog.survey import MOST_CONTAINERS, take
from buildidfs.config import Settings
from buildidfs.errors import ArtifactMissing
from buildidfs.located import InContainer
from buildidfs.model import NO_NAMES, BuildId, ContainerNames, NamespaceSet, Quality
from buildidfs.profile.inputs import coverage_of_processes
from buildidfs.profile.match import Matcher
from buildidfs.serve.page import overview
from buildidfs.store import NewSeen, Store
from buildidfs.watch.history_writer import group_name
from tests.support.containers.imitating import USER, container_and_imitation, entering
from tests.support.harness.captures import NOW, SECOND, capture, commit, sighting
from tests.support.harness.children import running

WEB = "docker:0123456789ab"
CART = "k8s:fedcba987654"
CALLED = {
    WEB: ContainerNames("web", image="nginx:1.27\nsha256:00"),
    CART: ContainerNames("server", "cart-7d9f", "shop"),
}
IDS = {WEB: "0123456789ab" + "0" * 52, CART: "fedcba987654" + "0" * 52}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as made:
        made.name_containers(lambda origin: CALLED.get(origin.container, ContainerNames()))
        for number, label in enumerate((WEB, CART, WEB), 1):
            group = f"/docker/{IDS[label]}".encode()
            seen = sighting(
                b"/bin/app%d" % number,
                container=label,
                cgroup=group,
                seen_ns=NOW + number * 120 * SECOND,
            )
            quality = Quality.SYMTAB if number == 1 else Quality.DYNSYM
            build_id = bytes([number]) * 20
            new = capture(made, b"bytes %d" % number, build_id, at=seen, quality=quality)
            commit(made, new)
        yield made


def test_names_of_labels(store: Store) -> None:
    names = containers.Names(store)
    assert names.short(WEB) == "web"
    assert names.short(CART) == "shop/cart-7d9f/server"
    assert names.short("mnt:1") == "mnt:1"
    assert names.short("") == ""
    assert InContainer(path="/x", **names.fields(WEB)).where == f"web ({WEB}, nginx:1.27)"
    assert InContainer(path="/x", **names.fields("")).where == "the host"
    assert names.fields(CART) == {
        "container": CART, "container_name": "server", "pod": "cart-7d9f", "pod_namespace": "shop",
        "image": None,
    }  # fmt: skip
    assert containers.Names().short(WEB) == WEB


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("web", WEB),
        ("0123", WEB),
        (WEB, WEB),
        ("server", CART),
        ("cart-7d9f", CART),
        ("shop/cart-7d9f", CART),
        ("cart-7d9f/server", CART),
        ("shop/cart-7d9f/server", CART),
    ],
)
def test_container_that_is_meant(store: Store, text: str, label: str) -> None:
    assert [each.label for each in containers.find(store, text)] == [label]


@pytest.mark.parametrize("text", ["we", "shop", "shop/", "", "shop/server", "nginx:1.27"])
def test_container_that_is_not_meant(store: Store, text: str) -> None:
    with pytest.raises(ArtifactMissing, match="the last containers seen are web, shop/cart-7d9f"):
        containers.find(store, text)


def test_containers_of_one_name_are_named_once(store: Store) -> None:
    for number in (4, 5):
        build_id = bytes([number]) * 20
        seen = sighting(b"/bin/app", container="mnt:1", mnt_ns_id=number, seen_ns=NOW + number)
        commit(store, capture(store, build_id, build_id, at=seen))
    labels = [each.label for each in store.containers.every()]
    assert labels.count("mnt:1") == 2
    assert containers.last_ones(store).count("mnt:1") == 1


def test_namespaces_with_a_reused_number_are_told_apart(store: Store) -> None:
    for number in (4, 5):
        build_id = bytes([number]) * 20
        seen = sighting(b"/bin/app", container="mnt:1", mnt_ns_id=number, seen_ns=NOW + number)
        commit(store, capture(store, build_id, build_id, at=seen))
    each = [one for one in store.containers.every() if one.label == "mnt:1"]
    assert [containers.shown_label(one) for one in each] == ["mnt:1", "mnt:1~5"]
    assert containers.find(store, "mnt:1~5") == [each[1]]
    assert list(containers.build_ids(store, "mnt:1~5")) == [b"\x05" * 20]
    assert len(containers.find(store, "mnt:1")) == 2
    with pytest.raises(ArtifactMissing):
        containers.find(store, "mnt:1~6")


def test_contents_of_containers(store: Store) -> None:
    (web, cart), count = containers.last_seen(
        store, lambda each: True, 0, containers.Removals(store)
    )
    assert count == 2
    assert (web.container.label, cart.container.label) == (WEB, CART)
    assert (web.build_ids, web.size) == (2, 14)
    assert (web.shares.executable, web.shares.symbols) == (1.0, 0.5)
    assert (cart.build_ids, cart.shares.symbols, cart.shares.debuginfo) == (1, 0.0, 0.0)
    assert set(containers.build_ids(store, WEB)) == {
        BuildId(bytes([number]) * 20) for number in (1, 3)
    }


def test_most_containers_are_counted_only(store: Store) -> None:
    rows, count = containers.last_seen(store, lambda each: True, 1, containers.Removals(store))
    assert [row.container.label for row in rows] == [WEB]
    assert count == 2


def test_namespaces_take_only_the_places_that_containers_leave(store: Store) -> None:
    bare = [
        sighting(b"/srv", container=f"mnt:{number}", mnt_ns_id=number, seen_ns=NOW + SECOND * 9999)
        for number in range(1, MOST_CONTAINERS + 1)
    ]
    commit(store, *(capture(store, b"bytes", b"\4" * 20, at=each) for each in bare))
    taken = overview.overview(store, take(store), retention=Settings().retention)
    named = [each.label for each in taken.containers if not each.unnamed]
    assert len(taken.containers) == MOST_CONTAINERS
    assert sorted(named) == [WEB, CART]
    assert (taken.left_out, taken.namespaces_left_out) == (0, 2)


def test_removed_files_do_not_count(store: Store) -> None:
    for build_id in containers.build_ids(store, "web"):
        artifact = store.index.artifact(store.index.ordinal(build_id) or 0, 1)
        assert artifact is not None
        store.remove([artifact.digest])
    after = [each for each in store.containers.every() if each.label == WEB]
    assert [
        containers.contents(store, each, CoverageLookup(store), containers.Removals(store)).size
        for each in after
    ] in ([], [0])


def test_names_of_a_container_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def engine(cgroup: bytes) -> ContainerNames:
        asked.append(cgroup)
        return CALLED[WEB]

    monkeypatch.setattr("buildidfs.capture.origin.container_names.names_of_cgroup", engine)
    names = containers.Names(running=True)
    assert names.of(WEB, b"/docker/x").name == "web"
    assert names.short(WEB, b"/docker/x") == "web"
    assert asked == [b"/docker/x"]


def test_imitation_of_a_container_has_not_its_name(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = f"/docker/{IDS[WEB]}".encode()
    imitation = b"/user.slice/user-1000.slice/docker-%s.scope" % IDS[WEB].encode()
    store.name_containers(lambda origin: ContainerNames())
    at = sighting(b"/evil", container=WEB, cgroup=imitation, seen_ns=NOW)
    commit(store, capture(store, b"evil", b"\4" * 20, at=at))
    names = containers.Names(store)
    assert (names.short(WEB, real), names.short(WEB, imitation)) == ("web", WEB)
    build_id = BuildId(bytes([1]) * 20)
    at = sighting(b"/bin/app1", container=WEB, cgroup=imitation, ino=9)
    commit(store, capture(store, b"bytes 1", build_id, at=at))
    places = history.of_build_id(store, build_id)
    shown = sorted(names.short(each.container, each.cgroup) for each in places)
    assert shown == [f"{WEB} (user 1000)", "web"]

    running = {real: CALLED[WEB], imitation: ContainerNames()}
    monkeypatch.setattr(
        "buildidfs.capture.origin.container_names.names_of_cgroup", running.__getitem__
    )
    live = containers.Names(running=True)
    assert (live.short(WEB, real), live.short(WEB, imitation)) == ("web", WEB)


def test_imitation_that_came_first_is_another_container_in_every_answer(tmp_path: Path) -> None:
    """A user has given a control group the ID of a container, and runs an engine that names it and
    its image like the container.
    """
    imitation = f"{WEB} (user 1000)"
    groups = {
        1000: b"/delegated/docker-%s.scope" % IDS[WEB].encode(),
        0: b"/system.slice/docker-%s.scope" % IDS[WEB].encode(),
    }
    path, build_id = b"/bin/app", BuildId(b"\1" * 20)
    with Store.create(tmp_path / "new") as store:
        store.name_containers(lambda origin: CALLED[WEB])
        for owner, group in groups.items():
            at = sighting(
                path, container=WEB, cgroup=group, owner=owner, apart=0x20, mnt_ns_id=owner + 1,
                namespaces=NamespaceSet(mnt=owner + 1), mode=0o100755,
            )  # fmt: skip
            commit(store, capture(store, b"%d" % owner, build_id, at=at))
            store.note_seen([NewSeen(at, build_id)])

        names = containers.Names(store)
        for text, labels in ((WEB, {WEB}), ("web", {WEB}), (imitation, {imitation})):
            found = [each.container for each in history.at_path(store, path, text)]
            assert set(found) == labels, text
            wanted = history.journal_filter(store, (), text, None)
            rows = [each for each in store.journal.since() if wanted(each)]
            assert {history.container_of(each, None) for each in rows} == labels, text
            query = ArtifactQuery(None, text)
            listed = {each.container for each in artifacts(store, query)}
            assert listed == labels, text
        assert {names.of(label) for label in (WEB, imitation)} == {CALLED[WEB]}
        assert names.of(f"{WEB} (user 7)") == NO_NAMES
        for text in (WEB, "web", imitation):
            (meant,) = containers.find(store, text)
            assert containers.reported(meant) == (imitation if text == imitation else WEB)
        assert {names.short(label) for label in (WEB, imitation)} == {"web", "web (user 1000)"}
        candidates = [*Matcher(store, {})._look_up(path)]
        assert [each.container for each in candidates] == [WEB, imitation], "and none twice"
        counted = take(store)
        assert {each.container for each in counted.lacking} <= {"web", "web (user 1000)"}
        assert set(counted.images) == {"nginx:1.27", "nginx:1.27 (user 1000)"}
        assert {group_name(each.container) for each in counted.containers} == {
            "web", "web (user 1000)",
        }  # fmt: skip
        shown = [overview.container(each) for each in counted.containers]
        assert {each.label for each in shown} == {WEB, imitation}
        assert {each.name for each in shown} == {"web", "web (user 1000)"}
        assert len({each.mount_name for each in shown}) == 2


def test_label_in_a_named_container_is_not_that_of_another_one() -> None:
    group = b"/lxc.payload.mine/docker-%s.scope" % IDS[WEB].encode()
    assert shown(WEB, group, 0) == f"{WEB} in lxc:mine"
    assert shown("lxc:mine", b"/lxc.payload.mine/system.slice", 0) == "lxc:mine"
    pod = b"/machine.slice/libpod_pod_%s/libpod-%s" % (b"a" * 64, b"b" * 64)
    assert shown("podman:" + "b" * 12, pod, 0) == "podman:" + "b" * 12


@pytest.mark.root
def test_running_imitation_has_its_own_lines_in_the_coverage(store: Store) -> None:
    argv = ["unshare", "--mount", "cat"]
    with container_and_imitation() as (real, imitation):
        label = f"docker:{real.name.removeprefix('docker-')[:12]}"
        with running([*entering(real), *argv]), running([*entering(imitation), *argv]):
            found = coverage_of_processes(store, Settings())
        assert {row.container for row in found.rows if row.container.startswith(label)} == {
            label, f"{label} (user {USER})",
        }  # fmt: skip
