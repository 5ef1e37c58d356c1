# SPDX-License-Identifier: Apache-2.0
"""elfutils and its debuginfod client, beyond what every container scenario asks of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.clients.tools import run, tool
from tests.support.elf.programs import SOURCE_DIR, build_id_of, line_of, sha256
from tests.support.harness.mounts import BuildIdFs

if TYPE_CHECKING:
    from tests.support.containers.vanished import Vanished

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]

PLACES = (
    f"{SOURCE_DIR}/hot.c:{line_of('exe_stuck')}:",
    f"{SOURCE_DIR}/libhot.c:{line_of('lib_stuck')}:",
    f"{SOURCE_DIR}/hot.c:{line_of('main_stuck')}:",
)


def test_without_the_mount_there_are_no_lines(gone: Vanished) -> None:
    result = tools.eu_stack(gone.core, gone.core.parent / "no-mount-here")
    assert SOURCE_DIR not in result.out, str(result)


def test_stack_by_debuginfod(gone: Vanished) -> None:
    urls = {"DEBUGINFOD_URLS": gone.url}
    result = run([tool("eu-stack"), f"--core={gone.core}", "-s"], env=urls)
    for place in PLACES:
        assert place in result.out, str(result)


@pytest.mark.parametrize("name", ["debug", "."])
def test_stack_of_a_program_shortened_by_dwz(dwz_gone: Vanished, name: str) -> None:
    result = tools.eu_stack(dwz_gone.core, dwz_gone.mount / name)
    for place in PLACES:
        assert place in result.out, str(result)


def test_types_that_dwz_moved_to_the_common_file_by_debuginfod(dwz_gone: Vanished) -> None:
    supplement = dwz_gone.program.supplement
    assert supplement is not None
    result = tools.debuginfod_find(dwz_gone.url, "debuginfo", supplement.build_id)
    assert sha256(Path(result.out.strip())) == sha256(supplement.path), str(result)


def test_addr2line_by_debuginfod(gone: Vanished) -> None:
    address = gone.program.lib.address("lib_static_hot")
    argv = [tool("eu-addr2line"), "-e", gone.program.lib.shipped, "-f", f"0x{address:x}"]
    result = run(argv, env={"DEBUGINFOD_URLS": gone.url})
    assert result.out.startswith(f"lib_static_hot\n{SOURCE_DIR}/libhot.c:"), str(result)


def test_readelf_reads_the_debug_file(gone: Vanished) -> None:
    result = run([tool("eu-readelf"), "--debug-dump=info", gone.exe / "debug"])
    assert '"exe_static_stuck"' in result.out, str(result)


def test_unknown_build_id_is_a_miss_not_an_error(gone: Vanished) -> None:
    unknown = "00" * 20
    result = tools.debuginfod_find(gone.url, "debuginfo", unknown)
    assert result.rc == 1, str(result)
    assert "No such file or directory" in result.err, str(result)
    with pytest.raises(FileNotFoundError):
        (gone.mount / unknown / "elf").open("rb")
    with pytest.raises(FileNotFoundError):
        (gone.debug / ".build-id/00" / unknown[2:]).open("rb")


def test_any_spelling_of_the_url(gone: Vanished) -> None:
    for url in (f"file://{gone.mount}/", f"file://localhost{gone.mount}"):
        result = tools.debuginfod_find(url, "executable", gone.program.exe.build_id)
        assert result.rc == 0, str(result)


def test_one_section_by_debuginfod(gone: Vanished, directory: Path) -> None:
    """A server that is a directory: of the debug file, or where it has none, of the executable."""
    for name, file in (
        (".debug_info", gone.program.lib.debug),
        (".text", gone.program.lib.shipped),
    ):
        expected = directory / "expected"
        tools.run(
            [tools.tool("objcopy"), "--dump-section", f"{name}={expected}", file, "/dev/null"],
            check=True,
        )
        result = tools.debuginfod_find(gone.url, "section", gone.program.lib.build_id, name)
        assert Path(result.out.strip()).read_bytes() == expected.read_bytes(), result
    result = tools.debuginfod_find(gone.url, "section", gone.program.lib.build_id, ".none")
    assert result.rc != 0


def test_sections_of_private_files_are_private(buildidfs: BuildIdFs, directory: Path) -> None:
    """Nobody learns even which there are."""
    directory.chmod(0o755)
    program = directory / "program"
    program.write_bytes(Path(tool("true")).read_bytes())
    build_id = build_id_of(program)
    read = "import os, sys; os.setuid(65534); sys.stdout.write(str(os.stat(sys.argv[1]).st_size))"
    for mode, rc in ((0o755, 0), (0o700, 1)):
        program.chmod(mode)
        store = BuildIdFs(directory, directory / f"store-{mode}")
        store("scan", "tree", program)
        with store.mounted() as mount:
            section = mount / build_id / "section/.text"
            size = section.stat().st_size
            done = run([sys.executable, "-c", read, section])
            assert done.rc == rc, done
            assert done.out == ("" if rc else str(size))
            assert "FileNotFoundError" in done.err or not rc
