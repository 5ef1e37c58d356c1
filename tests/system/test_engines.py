# SPDX-License-Identifier: Apache-2.0
"""Real engines: a container has the name that people know, while it runs and when it is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.containers.realengines import ENGINES, real_engine
from tests.support.harness.mounts import COMMAND
from tests.support.harness.waiting import until
from tests.support.harness.watching import watching

if TYPE_CHECKING:
    from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse]


@pytest.mark.parametrize("kind", ENGINES)
def test_name_and_image_of_a_container(kind: str, buildidfs: BuildIdFs, scratch: Path) -> None:
    with real_engine(kind, scratch / kind) as engine:
        container = engine.run("web")
        by_name = ("--container", container.shown)
        (scanned,) = engine.buildidfs(buildidfs.store, "scan", "proc", *by_name)
        assert scanned["captured"] >= 1, scanned
        live = engine.buildidfs(buildidfs.store, "where", "--live", "--path", "/bin/busybox")
        (mapper,) = [row for row in live if row["pid"] == container.pid]
        assert (mapper["container_name"], mapper["image"]) == ("web", container.image)
        alive = listed(buildidfs)
        engine.remove(container)
    (known,) = listed(buildidfs)
    assert alive == [known]
    assert known["container_name"] == "web"
    assert known["image"] == container.image
    assert known["build_ids"] == 1
    pod = ("shop", "cart-7d9f") if kind == "containerd" else (None, None)
    assert (known["pod_namespace"], known["pod"]) == pod
    user = known["container"].partition(" ")[2]
    shown = f"{container.shown} {user}".rstrip()  # the user of a rootless engine
    for words in (["list"], ["which", "/bin/busybox"], ["where", "/bin/busybox"]):
        out = buildidfs(*words, "--container", "web").out
        assert shown in out.rstrip().split("\t"), out
    assert container.shown in buildidfs("containers", "web").out.split("\t")
    seen = buildidfs("show", "/bin/busybox", "--container", "web").out
    assert f"in {container.shown} ({known['container']}, {container.image}) on" in seen
    link = container.shown.replace("/", "_")
    with buildidfs.mounted() as mount:
        assert (mount / "containers" / link).readlink() == Path(known["mount_name"])
        assert {each.name for each in (mount / "containers").iterdir()} == {
            link, known["mount_name"],
        }  # fmt: skip
        directory = mount / "containers" / known["mount_name"]
        assert (directory / "name").read_text() == "web\n"
        assert (directory / "image").read_text().startswith(f"{container.image}\n")
        if kind == "containerd":
            assert (directory / "pod").read_text() == "shop/cart-7d9f\n"


def test_names_of_containers_that_are_gone_after_the_index(
    buildidfs: BuildIdFs, scratch: Path
) -> None:
    """The second container has no file that the first one has not."""
    with real_engine("podman", scratch / "rebuilt") as engine:
        for name in ("web-1", "web-2"):
            container = engine.run(name)
            engine.buildidfs(buildidfs.store, "scan", "proc", "--container", container.shown)
            engine.remove(container)
    before = {each["container_name"]: each for each in listed(buildidfs)}
    assert before.keys() == {"web-1", "web-2"}
    shutil.rmtree(buildidfs.store / "index")
    assert buildidfs("check", "--repair").out.endswith(" (repaired)\n")
    after = {each["container_name"]: each for each in listed(buildidfs)}
    assert after == before
    for name in before:
        row = buildidfs("list", "--container", name).out.rstrip().split("\t")
        assert {"/bin/busybox", name} <= {*row}


def listed(buildidfs: BuildIdFs) -> list[dict[str, Any]]:
    return [json.loads(line) for line in buildidfs("containers", "--json").out.splitlines()]


@pytest.mark.watch
def test_name_of_a_container_that_its_engine_forgets_at_once(
    buildidfs: BuildIdFs, scratch: Path
) -> None:
    """The notes of the engine are read when its first file is seen."""
    with real_engine("docker", scratch / "brief") as engine:
        command = engine.entered(*COMMAND)
        with watching(buildidfs.store, "--json", "--no-scan", command=command) as watcher:
            container = engine.run("brief")
            until(
                lambda: any(
                    each["event"] == "captured" and each["path"] == "/bin/busybox"
                    for each in watcher.events
                ),
                "a capture",
            )
            engine.remove(container)
    named = [each for each in listed(buildidfs) if each["container"].startswith("docker")]
    assert [each["container_name"] for each in named] == ["brief"]
