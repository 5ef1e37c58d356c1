# SPDX-License-Identifier: Apache-2.0
"""A container is gone, and the mount still says which image it ran, whatever its engine was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients.commands import ROOT
from tests.support.clients.tools import Argument, run, tool
from tests.support.containers.engines import EngineNotes
from tests.support.containers.ephemeral import Container, container
from tests.support.harness.mounts import COMMAND, BuildIdFs

if TYPE_CHECKING:
    from tests.support.elf.programs import Program

pytestmark = [pytest.mark.root, pytest.mark.fuse]

ID = "ab" * 32
NAME = "docker.io/library/app:1"
BOTH = f"{NAME}\nsha256:{ID}\n"

# $1 has the directories that engines would have, then comes what is to be run where they are
_AMONG = 'for part in var/lib run; do mount --bind "$1/$part" "/$part"; done; shift; exec "$@"'


@pytest.fixture(scope="module")
def running(program: Program, scratch: Path) -> Iterator[Container]:
    """A container that has the name of one of Docker's, and no engine."""
    with container("crun", program, scratch / "imaged") as started:
        yield started


@pytest.fixture
def notes(tmp_path: Path) -> EngineNotes:
    """No engine has anything yet."""
    for part in ("var/lib", "run"):
        (tmp_path / "host" / part).mkdir(parents=True)
    return EngineNotes(tmp_path / "host")


def scan(buildidfs: BuildIdFs, notes: EngineNotes, running: Container) -> None:
    """Scan the container where the engines' directories are those of ``notes``."""
    pids = [word for pid in (running.spin, running.stuck) for word in ("--pid", str(pid))]
    among: list[Argument] = [tool("unshare"), "-m", "sh", "-ec", _AMONG, "sh", notes.root]
    among += [*COMMAND, "--store", buildidfs.store, "scan", "proc", *pids]
    run(among, check=True, cwd=ROOT)


def docker(notes: EngineNotes, container_id: str) -> None:
    notes.docker(container_id, NAME, f"sha256:{ID}")


def podman(notes: EngineNotes, container_id: str) -> None:
    notes.podman(("0" * 64, "other:1", "0" * 64), (container_id, NAME, ID))


def crio(notes: EngineNotes, container_id: str) -> None:
    notes.crio(container_id, NAME, ID)


def kubernetes(notes: EngineNotes, container_id: str) -> None:
    notes.containerd("k8s.io", container_id, image_name=NAME)


@pytest.mark.parametrize(
    ("engine", "image"),
    [
        (docker, BOTH),
        (podman, BOTH),
        (crio, BOTH),
        (kubernetes, f"{NAME}\n"),
    ],
)
def test_container_says_what_image_it_ran(
    buildidfs: BuildIdFs,
    program: Program,
    running: Container,
    notes: EngineNotes,
    engine: Callable[[EngineNotes, str], None],
    image: str,
) -> None:
    engine(notes, program.exe.build_id[:32] * 2)
    scan(buildidfs, notes, running)
    with buildidfs.mounted() as mount:
        directory = mount / "containers" / running.label
        assert (directory / "image").read_text() == image
        assert (directory / "id").read_text() == program.exe.build_id[:32] * 2 + "\n"


def test_engine_that_says_it_later(
    buildidfs: BuildIdFs, program: Program, running: Container, notes: EngineNotes
) -> None:
    docker(notes, "0" * 64)
    scan(buildidfs, notes, running)
    with buildidfs.mounted() as mount:
        image = mount / "containers" / running.label / "image"
        assert "image" not in {path.name for path in image.parent.iterdir()}
        assert not image.exists()
        docker(notes, program.exe.build_id[:32] * 2)
        buildidfs("remove", program.lib.build_id)  # or else nothing is written within a minute
        scan(buildidfs, notes, running)
        assert image.read_text() == BOTH
