# SPDX-License-Identifier: Apache-2.0
"""Two hosts that share nothing but a bucket: one had a container, the other one debugs it.

A container runs on host A, which captures and pushes. The container ends, A leaves the network, and
host B opens the core and the profile of the container with gdb and perf.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.fleet import objects
from buildidfs.model import BuildId, Kind
from tests.support.clients import tools
from tests.support.clients.tools import eu_stack, gdb, perf_report, run, tool
from tests.support.containers.ephemeral import container
from tests.support.elf.cores import gcore
from tests.support.elf.programs import SOURCE_DIR, Binary, Program, line_of
from tests.support.harness.mounts import BuildIdFs
from tests.support.servers.networks import Networks, networks
from tests.support.servers.objectstorage import ObjectStorage, object_storage
from tests.support.servers.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]

_PADDING = 32 << 20
_PLACES = [
    (function, f"{SOURCE_DIR}/{file}:{line_of(marker)}")
    for function, file, marker in (
        ("exe_static_stuck", "hot.c", "exe_stuck"),
        ("lib_static_stuck", "libhot.c", "lib_stuck"),
        ("main", "hot.c", "main_stuck"),
    )
]


@pytest.fixture(scope="module")
def heavy(scratch: Path, program: Program) -> Program:
    """The program with debug files of 32 MiB each, which nobody needs as a whole."""
    directory = scratch / "heavy"
    directory.mkdir()
    padding = directory / "padding"
    padding.write_bytes(os.urandom(_PADDING))

    def padded(binary: Binary) -> Binary:
        debug = directory / binary.debug.name
        added = ["--add-section", f".padding={padding}"]
        run([tool("objcopy"), *added, binary.debug, debug], check=True)
        return dataclasses.replace(binary, debug=debug)

    return dataclasses.replace(program, exe=padded(program.exe), lib=padded(program.lib))


@dataclasses.dataclass
class Left:
    """What is left of the container: its core and its profile, the network, and the bucket."""

    program: Program
    core: Path
    profile: Path
    network: Networks
    storage: ObjectStorage

    def environ(self, host: str) -> dict[str, str]:
        """The environment of a host's processes."""
        port = self.storage.server_address[1]
        endpoint = f"http://{self.network.addresses[host]}:{port}"
        return {**self.storage.environ(), "AWS_ENDPOINT_URL": endpoint}

    def sent(self, kind: Kind) -> int:
        """Bytes that the bucket has sent of the program's files of a kind."""
        ids = [BuildId.from_hex(each.build_id) for each in self.program.binaries]
        return sum(self.storage.sent(f"debug/{objects.blob_key(each, kind)}") for each in ids)


@pytest.fixture(scope="module")
def left(scratch: Path, heavy: Program) -> Iterator[Left]:
    """A container that ran on host A, was captured and pushed, and is gone with that host."""
    home = scratch / "two-hosts"
    home.mkdir()
    config = home / "a.toml"
    config.write_text('[remote]\nurl = "s3://fleet/debug"\n')
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(networks("a", "b"))
        with network.inside("server"):
            storage = stack.enter_context(object_storage("fleet", address="0.0.0.0"))
        made = Left(heavy, home, home / "perf.data", network, storage)
        host = BuildIdFs(home / "a", config=config)
        with network.inside("a"), container("crun", heavy, home / "container") as running:
            host("scan", "proc", "--pid", str(running.spin), "--pid", str(running.stuck))
            made.core = gcore(running.stuck, home)
            target = ["-p", str(running.spin)]
            sampled = tools.perf_record(made.profile, running.spinning(), *target)
            assert sampled.rc == 0, str(sampled)
            running.destroy()
            host("push", "--all", env=made.environ("a"))
        network.cut("a")
        yield made


@pytest.fixture
def host_b(left: Left, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BuildIdFs]:
    """Host B, in whose network the test runs; its store is empty."""
    for name, value in left.environ("b").items():
        monkeypatch.setenv(name, value)
    config = directory / "b.toml"
    config.write_text('[remote]\nurl = "s3://fleet/debug"\ntrust = "package"\n')
    left.storage.requests.clear()
    host = BuildIdFs(directory, config=config)
    host("add", tool("true"))  # a store with a file that has nothing to do with it
    with left.network.inside("b"):
        yield host


def test_nothing_else_has_the_files(left: Left, directory: Path) -> None:
    nothing = directory / "nothing"
    stack = gdb("bt", debug=nothing, arguments=["-c", left.core])
    assert "static_stuck" not in stack.out, str(stack)
    report = perf_report(nothing, left.profile)
    assert "static_hot" not in report.out, str(report)


def test_mount_gives_what_is_needed_of_the_files(left: Left, host_b: BuildIdFs) -> None:
    with host_b.mounted() as mount:
        assert left.program.exe.build_id not in os.listdir(mount)
        stack = gdb("bt", debug=mount / "debug", arguments=["-c", left.core])
        # gdb finds libraries of a core by debuginfod or in a sysroot only; eu-stack by build ID.
        for function, place in (_PLACES[0], _PLACES[2]):
            assert re.search(rf"{function} .* at {place}", stack.out), str(stack)
        stack = eu_stack(left.core, mount / "debug")
        for _, place in _PLACES:
            assert f"{place}:" in stack.out, str(stack)
        report = perf_report(mount, left.profile)
        for name, function in (("hot", "exe_static_hot"), (r"libhot\.so", "lib_static_hot")):
            assert re.search(rf"hot +{name} +\[\.\] {function}", report.out), str(report)
    assert 0 < left.sent(Kind.DEBUGINFO) < 2 * _PADDING / 20
    assert left.sent(Kind.EXECUTABLE) > 0


def test_server_gives_the_files_to_debuginfod_clients(left: Left, host_b: BuildIdFs) -> None:
    assert host_b.config is not None
    with serving(host_b.store, config=host_b.config.read_text()) as server:
        cache = host_b.store.parent / "cache"
        env = {"DEBUGINFOD_URLS": server.url, "DEBUGINFOD_CACHE_PATH": str(cache)}
        enabled = ["set debuginfod enabled on"]
        stack = gdb("bt", settings=enabled, arguments=["-c", left.core], env=env)
        for function, place in _PLACES:
            assert re.search(rf"{function} .* at {place}", stack.out), str(stack)
        for binary in left.program.binaries:
            found = run([tool("debuginfod-find"), "debuginfo", binary.build_id], env=env)
            assert Path(found.out.strip()).read_bytes() == binary.debug.read_bytes()
