# SPDX-License-Identifier: Apache-2.0
"""Programs without a build ID, and with one that others have, in containers that are gone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.tools import run, tool
from tests.support.containers.burning import Named, burner, container, recording, user_samples
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until
from tests.support.harness.watching import watching

pytestmark = [pytest.mark.root, pytest.mark.host, pytest.mark.client, pytest.mark.slow]

_NAMELESS = "-Wl,--build-id=none"
_BAZEL = "498919aff001d8366249403a2544fba2d833084f"


def htlhash(path: Path) -> str:
    """The htlhash, by its definition."""
    data = path.read_bytes()
    text = data[:4096] + data[-4096:] + struct.pack(">Q", len(data))
    return hashlib.sha256(text).digest()[:16].hex()


@pytest.fixture
def place(scratch: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix="identities-", dir=scratch))


def shown(program: BuildIdFs, name: str) -> Any:
    return json.loads(program("show", "--json", name).out)


def test_perf_names_the_functions_of_gone_programs_without_a_build_id(place: Path) -> None:
    program = BuildIdFs(place)
    links: dict[str, tuple[str, ...]] = {
        "plain": (),
        "fixed": ("-static",),
        "pie": ("-static-pie",),
    }
    every = [
        burner(place / name, name, 0.25, _NAMELESS, *options) for name, options in links.items()
    ]
    data, repaired = place / "perf.data", place / "repaired.data"
    with (
        watching(program.store, "--no-scan"),
        recording(data),
        contextlib.ExitStack() as stack,
    ):
        ran = [stack.enter_context(container("tmpfs", place / "gone", hot)) for hot in every]
    done = program("repair", data, "-o", repaired, check=False)
    assert done.rc in (0, 3), done  # 3: something else on this host has no names
    with program.mounted() as mount:
        for hot in every:
            name = htlhash(hot.directory / "app")
            assert shown(program, name)["variants"][0]["adopted"] is True
            exact = (mount / name / "elf").read_bytes()
            assert exact == (hot.directory / "app").read_bytes()
        samples = user_samples(mount, repaired, *ran)
    assert samples.share >= 99, samples
    for hot in every:
        assert samples.by_function[hot.function] > hot.least_samples, samples


@pytest.mark.parametrize(
    "options",
    [{"plain": [], "namespaces": ["--namespaces"]}, {"ids": ["--buildid-mmap", "--namespaces"]}],
    ids=["without-build-ids", "with-build-ids"],
)
def test_programs_that_share_a_build_id_are_never_taken_for_each_other(
    place: Path, options: dict[str, list[str]]
) -> None:
    """At one path, at one time, in two containers."""
    program = BuildIdFs(place)
    shared = f"-Wl,--build-id=0x{_BAZEL}"
    both = [burner(place / name, name, 0.5, shared) for name in ("one", "two")]
    assert {each.build_id for each in both} == {_BAZEL}
    with watching(program.store, "--no-scan"), contextlib.ExitStack() as stack:
        for form, words in options.items():
            stack.enter_context(recording(place / form, *words))
        ran = [stack.enter_context(container("tmpfs", place / "gone", each)) for each in both]
    with program.mounted() as mount:
        assert {entry.name for entry in (mount / _BAZEL).iterdir()} == {
            "README", "path", "variants",
        }  # fmt: skip
        for each in both:
            name = htlhash(each.directory / "app")
            assert (mount / name / "elf").read_bytes() == (each.directory / "app").read_bytes()
        for form in options:
            program("repair", place / form, "-o", place / f"{form}-repaired", check=False)
            samples = user_samples(mount, place / f"{form}-repaired", *ran)
            _assert_own_samples(samples, {each.function for each in both}, form != "plain")
    assert program("get", _BAZEL, check=False).rc == 30


def _assert_own_samples(samples: Named, known: set[str], has_namespaces: bool) -> None:
    if has_namespaces:
        assert set(samples.by_function) >= known, "the mount namespace tells them apart"
    for function in known:
        own = samples.by_function.get(function, 0)
        assert own > 200 or not has_namespaces, samples
        # Each ran for half a second, at 997 samples per second.
        assert own < 750, "the other one's samples"


def functions(backtrace: str) -> list[str]:
    """The functions of a backtrace of gdb, the innermost first."""
    # gdb shows the innermost frame also when it begins.
    last = backtrace[backtrace.rindex("\n#0 ") :]
    found = re.finditer(r"^#\d+ +(?:0x[0-9a-f]+ in )?(\S+)", last, re.MULTILINE)
    return [each[1] for each in found]


def test_gdb_and_eu_stack_read_the_core_of_a_gone_program(place: Path) -> None:
    program = BuildIdFs(place)
    hot = burner(place / "hot", "core", 60.0, _NAMELESS, "-g")
    core, gdb = place / "core", [tool("gdb"), "-nx", "-batch"]
    with watching(program.store, "--no-scan"), container("tmpfs", place / "gone", hot) as process:
        comm = Path(f"/proc/{process.pid}/comm")
        until(lambda: comm.read_text() == "app\n", "the program runs")
        dump = ["-p", str(process.pid), "-ex", f"generate-core-file {core}", "-ex", "bt"]
        inside = functions(run([*gdb, *dump], check=True).out)
        process.terminate()
    assert inside[-1] == "main"
    with program.mounted() as mount:
        where = str(place / "gone" / "app").lstrip("/")
        (root,) = (
            each / "root"
            for each in (mount / "containers").iterdir()
            if (each / "root" / where).exists()
        )
        commands = [f"set sysroot {root}", f"file {root / where}", f"core-file {core}", "bt"]
        said = run([*gdb, *(word for each in commands for word in ("-ex", each))], check=True)
        stack = run([tool("eu-stack"), f"--core={core}", f"--executable={root / where}"])
    assert functions(said.out) == inside
    # The two choose different names for a function of the vDSO or of libc that has several.
    own = {"burn_core", "now", "main"}
    frames = re.findall(r"^#\d+ +0x[0-9a-f]+ (\S+)", stack.out, re.MULTILINE)
    assert [each for each in frames if each in own] == [each for each in inside if each in own]
