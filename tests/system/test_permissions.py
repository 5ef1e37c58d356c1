# SPDX-License-Identifier: Apache-2.0
"""Who may read what through a mount: what they could have read where it was captured."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.clients.tools import run, tool
from tests.support.elf.programs import SOURCE_DIR, line_of
from tests.support.harness.mounts import BuildIdFs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.support.clients.tools import Argument
    from tests.support.containers.vanished import Vanished
    from tests.support.elf.programs import Program

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]

NOBODY = ("--reuid=65534", "--regid=65534", "--clear-groups")
PLACE = f"{SOURCE_DIR}/hot.c:{line_of('exe_stuck')}"


def _as_nobody(argv: Sequence[Argument], home: Path) -> tools.Result:
    env = {name: str(home) for name in ("HOME", "XDG_CACHE_HOME", "DEBUGINFOD_CACHE_PATH")}
    return run([tool("setpriv"), *NOBODY, *argv], env=env, cwd="/")


@pytest.fixture
def borrowed(scratch: Path, gone: Vanished, request: pytest.FixtureRequest) -> Path:
    """A directory that everybody may write to, with a core file and a profile to read."""
    directory = scratch / f"borrowed-{request.node.name}"
    directory.mkdir()
    directory.chmod(0o777)
    for source, name in ((gone.core, "core"), (gone.profile, "perf.data")):
        shutil.copyfile(source, directory / name)
        (directory / name).chmod(0o644)
    return directory


def test_nobody_may_debug_what_everybody_could_read(gone: Vanished, borrowed: Path) -> None:
    gdb = [tool("gdb"), "-nx", "-batch", "-iex", f"set debug-file-directory {gone.debug}"]
    result = _as_nobody([*gdb, "-ex", "bt", "-c", borrowed / "core"], borrowed)
    assert re.search(rf"exe_static_stuck .* at {PLACE}", result.out), str(result)
    options = [f"--core={borrowed}/core", f"--debuginfo-path={gone.debug}", "-s"]
    result = _as_nobody([tool("eu-stack"), *options], borrowed)
    assert f"{PLACE}:" in result.out, str(result)
    report = ["report", "--stdio", "--no-children", "-i", borrowed / "perf.data"]
    result = _as_nobody(
        [tools.perf_tool(), "--buildid-dir", gone.mount / "perf", *report], borrowed
    )
    assert "exe_static_hot" in result.out, str(result)


def test_a_user_namespace_changes_nothing(gone: Vanished, borrowed: Path) -> None:
    inside = [tool("unshare"), "-Ur", tool("cat"), gone.exe / "path"]
    if _as_nobody([*inside[:2], tool("true")], borrowed).rc != 0:
        pytest.skip("this machine does not let users make user namespaces")
    result = _as_nobody(inside, borrowed)
    assert result.out == f"{gone.app}/bin/hot\n", str(result)


def test_noallow_other_keeps_everybody_else_out(
    gone: Vanished, borrowed: Path, buildidfs: BuildIdFs
) -> None:
    private = BuildIdFs(buildidfs.store.parent, gone.buildidfs.store)
    with private.mounted("-o", "noallow_other") as mount:
        assert (mount / gone.program.exe.build_id).is_dir()
        for path in (mount, mount / gone.program.exe.build_id / "elf"):
            result = _as_nobody([tool("stat"), path], borrowed)
            assert result.rc != 0, str(result)
            assert "Permission denied" in result.err, str(result)


def test_what_only_its_owner_could_read_stays_so(
    buildidfs: BuildIdFs, program: Program, borrowed: Path
) -> None:
    # two files, so that one shows that the other would be readable but for its mode
    tree = buildidfs.store.parent / "tree"
    tree.mkdir()
    for binary, mode in ((program.exe, 0o750), (program.lib, 0o644)):
        shutil.copy2(binary.shipped, tree)
        (tree / binary.shipped.name).chmod(mode)
    buildidfs("scan", "tree", tree)
    with buildidfs.mounted() as mount:
        secret, public = (mount / binary.build_id / "elf" for binary in program.binaries)
        assert secret.read_bytes() == program.exe.shipped.read_bytes()
        assert _as_nobody([tool("cmp"), public, program.lib.shipped], borrowed).rc == 0
        result = _as_nobody([tool("cat"), secret], borrowed)
        assert "Permission denied" in result.err, str(result)
        assert result.out == ""
        again = mount / f"perf{tree}/hot/{program.exe.build_id}/elf"
        assert "No such file" in _as_nobody([tool("cat"), again], borrowed).err
        assert again.read_bytes() == secret.read_bytes()
        assert secret.stat().st_mode & 0o222 == 0, "shown as if it could be written"


def test_addresses_of_the_kernel_are_not_for_everybody(
    buildidfs: BuildIdFs, borrowed: Path
) -> None:
    buildidfs("scan", "proc", check=False)
    with buildidfs.mounted() as mount:
        found = list((mount / "perf/[kernel.kallsyms]").glob("*/kallsyms"))
        assert len(found) == 1
        assert re.search(r"^ffff[0-9a-f]{12} ", found[0].read_text(), re.MULTILINE)
        by_id = mount / found[0].parent.name / "kallsyms"
        for path, reason in ((by_id, "Permission denied"), (found[0], "No such file")):
            result = _as_nobody([tool("head"), "-n1", path], borrowed)
            assert reason in result.err, str(result)
