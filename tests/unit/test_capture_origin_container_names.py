# SPDX-License-Identifier: Apache-2.0
"""buildidfs.capture.origin.container_names: what a container is called, whatever its engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.origin import container_names
from buildidfs.capture.origin.container_names import EngineNames
from buildidfs.model import NO_NAMES, ContainerNames
from tests.support.containers.engines import EngineNotes
from tests.support.harness.captures import sighting
from tests.support.harness.scans import open_descriptors
from tests.support.harness.waiting import until

pytestmark = pytest.mark.root  # whose the notes have to be

CONTAINER = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
ID = "ab" * 32
BOTH = f"docker.io/library/app:1\nsha256:{ID}"
HOST = os.uname().nodename


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    before = open_descriptors()
    yield
    until(lambda: open_descriptors() <= before, "the end of threads that look")


class Looked:
    """Images of the containers of a root, at a time that tests set."""

    def __init__(self, root: Path) -> None:
        self.now = 1000.0
        self.looks = 0
        self._root = os.fsencode(root)
        self.engines = EngineNames(self._roots, lambda: self.now)

    def _roots(self) -> Iterator[bytes]:
        self.looks += 1
        yield self._root

    def __call__(
        self, container: str = CONTAINER, host: str = HOST, label: str = "docker:0123456789ab"
    ) -> str:
        return self.names(container, host, label).image

    def names(
        self, container: str = CONTAINER, host: str = HOST, label: str = "docker:0123456789ab"
    ) -> ContainerNames:
        cgroup = f"/system.slice/docker-{container}.scope/init".encode()
        return self.engines.of(sighting(cgroup=cgroup, container=label, host=host).origin)


@pytest.fixture
def notes(tmp_path: Path) -> EngineNotes:
    return EngineNotes(tmp_path)


@pytest.fixture
def image(tmp_path: Path) -> Looked:
    return Looked(tmp_path)


# --- engines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        "/var/lib/docker",
        "/var/lib/docker/165536.165536",
        "/var/snap/docker/common/var-lib-docker",
        "/srv/data of docker",
    ],
)
def test_docker(notes: EngineNotes, image: Looked, data: str) -> None:
    notes.write("/etc/docker/daemon.json", {"data-root": "/srv/data of docker"})
    notes.docker(OTHER, "other:1", f"sha256:{OTHER}", data)
    notes.docker(CONTAINER, "docker.io/library/app:1", f"sha256:{ID}", data)
    assert image() == BOTH
    assert image(OTHER) == f"other:1\nsha256:{OTHER}"


@pytest.mark.parametrize(
    "file",
    [
        "/var/lib/containers/storage/overlay-containers/containers.json",
        "/var/lib/containers/storage/overlay-containers/volatile-containers.json",
        "/run/containers/storage/overlay-containers/volatile-containers.json",
        "/var/lib/containers/storage/vfs-containers/containers.json",
        "/srv/storage/overlay-containers/containers.json",
    ],
)
def test_podman(notes: EngineNotes, image: Looked, file: str) -> None:
    notes.write("/etc/containers/storage.conf", b'[storage]\ngraphroot = "/srv/storage"\n')
    notes.write("/usr/share/containers/storage.conf", b'[storage]\ngraphroot = "/nowhere"\n')
    config = f"{Path(file).parent}/{CONTAINER}/userdata/config.json"
    notes.write(config, {"annotations": {"io.container.manager": "libpod"}})
    notes.podman((OTHER, "", ID), (CONTAINER, "docker.io/library/app:1", ID), file=file)
    assert image() == BOTH
    assert image(OTHER) == f"sha256:{ID}"


def test_crio(notes: EngineNotes, image: Looked) -> None:
    notes.crio(CONTAINER, "docker.io/library/app:1", ID)
    assert image() == BOTH


@pytest.mark.parametrize("state", ["/run/containerd", "/run/k3s/containerd"])
def test_containerd_for_kubernetes(notes: EngineNotes, image: Looked, state: str) -> None:
    notes.containerd("moby", OTHER, state)
    notes.containerd("k8s.io", CONTAINER, state, image_name="registry.k8s.io/pause:3.9")
    assert image() == "registry.k8s.io/pause:3.9"
    assert image(OTHER) == ""


def test_several_engines(notes: EngineNotes, image: Looked) -> None:
    notes.podman((OTHER, "podman:1", ID))
    notes.containerd("moby", CONTAINER)
    notes.docker(CONTAINER, "docker.io/library/app:1", f"sha256:{ID}")
    assert image() == BOTH
    assert image(OTHER) == f"podman:1\nsha256:{ID}"


# --- users' engines ------------------------------------------------------------------------------

USER = 4242
HOME = "/home/alice"
SLICE = f"/user.slice/user-{USER}.slice/user@{USER}.service/user.slice"


def of_user(engine: Looked, container: str = CONTAINER, uid: int = USER) -> ContainerNames:
    cgroup = SLICE.replace(str(USER), str(uid)) + f"/libpod-{container}.scope/container"
    engine.now += 60
    return engine.engines.of_cgroup(cgroup.encode())


@pytest.fixture
def alice(notes: EngineNotes) -> EngineNotes:
    """A user of the host, by the only place that tells where her home is."""
    notes.root.chmod(0o755)
    notes.write("/etc/passwd", f"root:x:0:0::/root:\nalice:x:{USER}:1::{HOME}:\n".encode())
    return notes


@pytest.mark.parametrize(
    "root",
    [
        f"{HOME}/.local/share/containers/storage",
        f"/run/user/{USER}/containers",
        "/srv/hers",
    ],
)
def test_podman_of_a_user(alice: EngineNotes, image: Looked, root: str) -> None:
    settings = alice.write(
        f"{HOME}/.config/containers/storage.conf", b'[storage]\ngraphroot = "/srv/hers"\n'
    )
    os.chown(settings, USER, USER)
    listed = alice.podman(
        (CONTAINER, "app:1", ID), file=f"{root}/overlay-containers/containers.json"
    )
    assert of_user(image) == NO_NAMES  # the list is private to root
    os.chown(listed, USER, USER)
    assert of_user(image) == ContainerNames("c0", image=f"app:1\nsha256:{ID}")


def test_docker_of_a_user(alice: EngineNotes, image: Looked) -> None:
    note = alice.docker(CONTAINER, "app:1", f"sha256:{ID}", f"{HOME}/.local/share/docker")
    os.chown(note, USER, USER)
    assert of_user(image).shown == "web"


def test_user_names_no_container_of_others(alice: EngineNotes, image: Looked) -> None:
    root = f"{HOME}/.local/share/containers/storage"
    listed = alice.podman(
        (CONTAINER, "app:1", ID), file=f"{root}/overlay-containers/containers.json"
    )
    os.chown(listed, USER, USER)
    assert image() == ""  # in no control group of hers
    assert of_user(image, uid=USER + 1) == NO_NAMES
    os.chown(listed, USER + 1, USER)
    assert of_user(image, OTHER) == NO_NAMES
    assert image() == ""


def test_names_of_a_user_do_not_stay_with_the_id_of_a_container_of_root(
    alice: EngineNotes, image: Looked
) -> None:
    note = alice.docker(CONTAINER, "app:1", f"sha256:{ID}", f"{HOME}/.local/share/docker")
    os.chown(note, USER, USER)
    assert of_user(image).shown == "web"
    assert image.names() == NO_NAMES
    alice.docker(CONTAINER, "real:1", f"sha256:{ID}")
    image.now += 60
    assert image() == f"real:1\nsha256:{ID}"
    assert of_user(image).image == f"app:1\nsha256:{ID}"


def test_link_of_a_user_does_not_lead_to_private_records(alice: EngineNotes, image: Looked) -> None:
    """The record belongs to the user, but lies in a directory of root."""
    victims = "/var/lib/docker-of-root"
    record = alice.docker(CONTAINER, "secret:1", f"sha256:{ID}", victims)
    data = alice.root / f"{HOME}/.local/share/docker".lstrip("/")
    data.parent.mkdir(parents=True)
    data.symlink_to(victims)
    assert of_user(image) == NO_NAMES
    os.chown(record, USER, USER)
    (alice.root / victims.lstrip("/")).chmod(0o700)
    assert of_user(image) == NO_NAMES
    (alice.root / victims.lstrip("/")).chmod(0o755)
    assert of_user(image).shown == "web"


def test_control_group_of_a_user_has_no_name_of_a_container_of_root(
    alice: EngineNotes, image: Looked
) -> None:
    """The user has given it the ID of that container."""
    alice.docker(CONTAINER, "app:1", f"sha256:{ID}")
    assert of_user(image) == NO_NAMES
    assert image.names().shown == "web"
    assert of_user(image) == NO_NAMES


# --- who is asked about --------------------------------------------------------------------------


def test_origin_outside_the_containers_of_this_host(notes: EngineNotes, image: Looked) -> None:
    notes.docker(CONTAINER, "app:1", f"sha256:{ID}")
    assert image(label="") == ""
    assert image(host="elsewhere") == ""
    assert image(CONTAINER[:12]) == ""
    assert image.looks == 0
    assert image() != ""


def test_our_own_root_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(container_names._own_roots()) == b"/"
    monkeypatch.setattr(os, "readlink", lambda path: path)
    assert list(container_names._own_roots()) == [b"/", b"/proc/1/root"]


def test_container_that_is_met_is_looked_for(notes: EngineNotes, image: Looked) -> None:
    """Its notes may be gone when a file of it is committed."""
    note = notes.docker(CONTAINER, "app:1", f"sha256:{ID}")
    cgroup = f"/system.slice/docker-{CONTAINER}.scope".encode()
    origin = sighting(cgroup=cgroup, container="docker:0123456789ab", host=HOST).origin
    for _ in range(3):
        image.engines.meet(origin)
    until(lambda: image.looks == 1, "a look")
    assert image() == f"app:1\nsha256:{ID}"
    note.unlink()
    assert image() == f"app:1\nsha256:{ID}"
    assert image.looks == 1


# --- what is remembered --------------------------------------------------------------------------


def test_known_image_is_not_looked_up_again(notes: EngineNotes, image: Looked) -> None:
    note = notes.docker(CONTAINER, "app:1", f"sha256:{ID}")
    assert image() == image() == f"app:1\nsha256:{ID}"
    note.unlink()
    image.now += 1e6
    assert image() == f"app:1\nsha256:{ID}"
    assert image.looks == 1


def test_notes_that_come_late_are_found_a_minute_later(notes: EngineNotes, image: Looked) -> None:
    assert image() == ""
    notes.docker(CONTAINER, "app:1", f"sha256:{ID}")
    image.now += 59
    assert image() == ""
    assert image.looks == 1
    image.now += 1
    assert image() == f"app:1\nsha256:{ID}"
    assert image.looks == 2


def test_list_is_read_when_it_is_another(
    notes: EngineNotes, image: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = container_names._read

    def counted(fd: int, limit: int) -> bytes:
        read.append(fd)
        return real(fd, limit)

    monkeypatch.setattr(container_names, "_read", counted)
    path = notes.podman((CONTAINER, "app:1", ID))
    assert image() == f"app:1\nsha256:{ID}"
    assert image(OTHER) == ""
    assert len(read) == 1
    path.unlink()
    notes.podman((CONTAINER, "app:1", ID), (OTHER, "app:2", ID))
    image.now += 60
    assert image(OTHER) == f"app:2\nsha256:{ID}"
    assert len(read) == 2


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert container_names._REMEMBERED == 4096
    monkeypatch.setattr(container_names, "_REMEMBERED", 64)
    image = Looked(tmp_path)
    for number in range(100):
        assert image(f"{number:064x}") == ""
    assert len(image.engines._known) == 64


# --- notes that no engine has written ------------------------------------------------------------


def test_notes_of_others_than_root(notes: EngineNotes, image: Looked) -> None:
    note = notes.docker(CONTAINER, "app:1", f"sha256:{ID}")
    os.chown(note, 1000, 0)
    assert image() == ""
    os.chown(note, 0, 0)
    for mode in (0o620, 0o602):
        note.chmod(mode)
        image.now += 60
        assert image() == ""
    note.chmod(0o644)
    image.now += 60
    assert image() == f"app:1\nsha256:{ID}"


def test_links_lead_nowhere_else(
    notes: EngineNotes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = EngineNotes(tmp_path_factory.mktemp("elsewhere"))
    secret = elsewhere.docker(CONTAINER, "secret:1", f"sha256:{ID}")
    note = notes.docker(CONTAINER, "app:1", f"sha256:{ID}")
    note.unlink()
    for target in (secret, "../" * 30 + str(secret), "/proc/self/root" + str(secret), note.name):
        note.symlink_to(target)
        assert Looked(notes.root)() == ""
        note.unlink()
    (notes.root / "var/lib/docker/containers" / CONTAINER).rmdir()
    (notes.root / "var/lib/docker/containers" / CONTAINER).symlink_to(secret.parent)
    assert Looked(notes.root)() == ""


def test_link_of_an_administrator_to_another_disk(notes: EngineNotes, image: Looked) -> None:
    notes.docker(CONTAINER, "app:1", f"sha256:{ID}", "/srv/docker")
    (notes.root / "var/lib").mkdir(parents=True)
    (notes.root / "var/lib/docker").symlink_to("/srv/docker")
    assert image() == f"app:1\nsha256:{ID}"


def test_notes_that_are_no_files(notes: EngineNotes, image: Looked) -> None:
    note = notes.docker(CONTAINER, "app:1", f"sha256:{ID}")
    note.unlink()
    os.mkfifo(note)
    assert image() == ""
    note.unlink()
    note.mkdir()
    image.now += 60
    assert image() == ""


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 1_000_000,
        b'{"Config": []}',
        b'{"Config": {"Image": 5}}',
        b'{"Config": {"Image": "\xff"}}',
        b'{"Config": {"Image": "a:1"}}'.ljust((4 << 20) + 1),
    ],
)
def test_notes_that_are_none(notes: EngineNotes, image: Looked, content: bytes) -> None:
    """They do not hide what another engine says."""
    for path in (
        f"/var/lib/docker/containers/{CONTAINER}/config.v2.json",
        f"/run/containerd/io.containerd.runtime.v2.task/a/{CONTAINER}/config.json",
        f"/run/containers/storage/overlay-containers/{CONTAINER}/userdata/config.json",
        "/run/containers/storage/overlay-containers/containers.json",
        "/etc/docker/daemon.json",
        "/etc/containers/storage.conf",
    ):
        notes.write(path, content)
    assert image() == ""
    notes.podman((CONTAINER, "docker.io/library/app:1", ID))
    image.now += 60
    assert image() == BOTH


def test_list_without_end(notes: EngineNotes, image: Looked) -> None:
    path = notes.podman((CONTAINER, "app:1", ID))
    os.truncate(path, 1 << 40)
    assert image() == ""


def test_settings_that_lead_nowhere(notes: EngineNotes, image: Looked) -> None:
    notes.docker(CONTAINER, "app:1", f"sha256:{ID}", "/srv")
    for root in ("srv", "../srv", "", "/srv\0", "/" + "x" * 5000, "/srv/../../srv"):
        notes.write("/etc/docker/daemon.json", {"data-root": root})
        image.now += 60
        assert (image() != "") is (root == "/srv/../../srv")


def test_names_of_namespaces_are_names(notes: EngineNotes, image: Looked) -> None:
    tasks = notes.root / "run/containerd/io.containerd.runtime.v2.task"
    for number in range(300):
        (tasks / f"n{number}").mkdir(parents=True)
    (tasks / "\n").mkdir()
    (tasks / ("n" * 200)).mkdir()
    assert image() == ""


def test_filesystem_that_does_not_answer() -> None:
    answered, asked = threading.Event(), []

    def silent() -> Iterator[bytes]:
        asked.append(1)
        answered.wait(30)
        yield from ()

    names = EngineNames(silent, seconds=0.01)
    origin = sighting(cgroup=b"/docker/" + CONTAINER.encode(), container="docker:0", host=HOST)
    other = sighting(cgroup=b"/docker/" + OTHER.encode(), container="docker:1", host=HOST)
    try:
        assert names.of(origin.origin) == names.of(other.origin) == NO_NAMES
        assert len(asked) == 1
    finally:
        answered.set()


def test_root_that_is_gone(tmp_path: Path) -> None:
    assert Looked(tmp_path / "gone")() == ""
