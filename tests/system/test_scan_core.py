# SPDX-License-Identifier: Apache-2.0
"""``scan core``: which binaries a core file is about, and what of them can still be had."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from buildidfs.capture.scan.core import CoreFile
from buildidfs.capture.unresponsive.filesystems import Patience
from buildidfs.config import Settings
from buildidfs.errors import UsageError
from buildidfs.formats.elf.core import VDSO, Unknown
from buildidfs.model import BuildId
from buildidfs.profile import cores
from buildidfs.store import Store
from tests.support.containers.ephemeral import container
from tests.support.elf.cores import crash, gcore, stuck, unstripped
from tests.support.elf.corewriter import PAGE, Mapped, core_file
from tests.support.elf.elfwriter import elf_file
from tests.support.filesystems import silentfs
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from tests.support.clients.tools import Result
    from tests.support.containers.vanished import Vanished
    from tests.support.elf.programs import Program

pytestmark = pytest.mark.client


def scanned(done: Result) -> dict[str, dict[str, Any]]:
    """The binaries of the only core, by the names of their files."""
    assert done.rc in (0, 3), done
    (dump,) = json.loads(done.out)["cores"]
    return {each["path"].rpartition("/")[2]: each for each in dump["binaries"]}


def states(binaries: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {
        name: each["state"] for name, each in binaries.items() if name.startswith(("hot", "libhot"))
    }


@pytest.fixture(scope="module", params=["kernel", "gcore"])
def host_core(request: pytest.FixtureRequest, scratch: Path, stripped: Path) -> Path:
    """The core of a process of the host, made by either."""
    directory = scratch / f"host-{request.param}"
    directory.mkdir()
    with stuck(stripped, directory) as pid:
        return crash(pid, directory) if request.param == "kernel" else gcore(pid, directory)


def test_modules_are_those_that_elfutils_find(host_core: Path, program: Program) -> None:
    with CoreFile(os.fsencode(host_core)) as file:
        found = {hex(module.start): str(module.build_id) for module in file.core.modules}
        assert found == unstripped(host_core)
        (main,) = [module for module in file.core.modules if module.main]
        assert str(main.build_id) == program.exe.build_id
        assert main.path.endswith(b"/app/bin/hot")
        assert file.core.name == b"hot"
        assert file.core.pid == int(host_core.name.rpartition(".")[2])
        # gdb does not know of arguments, nor of a signal that there was none of.
        by_kernel = host_core.name.startswith("crashed")
        assert file.core.arguments.endswith(b"/app/bin/hot" + b" stuck" * by_kernel)
        assert file.core.signal == (signal.SIGSEGV if by_kernel else 0)
        assert file.cut_off == ""
        named = {str(module.build_id) for module in file.core.modules if module.build_id}
        assert named == set(found.values())
    assert cores.is_core(os.fsencode(host_core))


def test_it_is_captured_from_where_it_is(
    host_core: Path, program: Program, directory: Path
) -> None:
    buildidfs = BuildIdFs(directory)
    done = buildidfs("scan", "core", host_core)
    assert f"{host_core}: hot (pid " in done.out
    assert "0 missing" in done.out
    again = scanned(buildidfs("scan", "core", "--json", host_core))
    assert {each["state"] for each in again.values()} == {"held"}
    assert again["hot"]["build_id"] == program.exe.build_id
    assert again["[vdso]"]["why"] == ""


def test_vdso_is_that_of_the_process(host_core: Path, directory: Path) -> None:
    """The same bytes that a live capture takes, and served as such."""
    with CoreFile(os.fsencode(host_core)) as file:
        (build_id,) = [each.build_id for each in file.core.modules if each.path == VDSO]
        assert build_id is not None
        found = file.vdso(Nothing(), {build_id})
        assert file.vdso(Nothing(), {BuildId(bytes(20))}) is None
    live = BuildIdFs(directory)
    live.scan(os.getpid())
    with Store.open(live.store) as store:
        held = store.index.artifact(store.index.ordinal(build_id) or 0, 3)
        assert held is not None
        assert found is not None
        assert hasattr(found, "fd")
        with found:
            assert store.digest_of(found.fd) == held.digest


class Nothing:
    """A memo that knows nothing."""

    def recall(self, identity: object) -> None:
        """Never."""

    def knows_place(self, origin: object) -> bool:
        """Never asked."""
        return False

    def debug_link(self, build_id: object) -> None:
        """Never asked."""


@pytest.mark.root
def test_container_that_is_gone(program: Program, directory: Path) -> None:
    buildidfs = BuildIdFs(directory)
    with container("tmpfs", program, directory / "container") as running:
        core = crash(running.stuck, directory)
    done = buildidfs("scan", "core", "--json", core)
    found = scanned(done)
    assert states(found) == {"hot": "missing", "libhot.so": "missing"}
    assert "no process maps it" in found["hot"]["why"]
    assert found["hot"]["build_id"] == program.exe.build_id
    assert found["hot"]["path"] == f"{running.app}/bin/hot"
    # What the host has, too, and what is in the core itself.
    others = [each for name, each in found.items() if name not in ("hot", "libhot.so")]
    assert {each["state"] for each in others} == {"captured"}
    text = buildidfs("scan", "core", core).out
    assert text.startswith(f"0 captured (0 B, 0 new build IDs), {len(others)} already held\n")
    assert f"2 missing\n    {program.exe.build_id:40}  {running.app}/bin/hot: no process" in text


@pytest.mark.root
def test_container_that_was_captured(gone: Vanished) -> None:
    done = gone.buildidfs("scan", "core", "--json", gone.core)
    (dump,) = json.loads(done.out)["cores"]
    assert {each["state"] for each in dump["binaries"]} == {"held"}
    (label,) = dump["containers"]
    assert label.startswith("mnt:")
    assert f" of {label}: " in gone.buildidfs("scan", "core", gone.core).out


@pytest.mark.root
def test_coverage(gone: Vanished, directory: Path) -> None:
    said = json.loads(gone.buildidfs("coverage", "--json", gone.core).out)
    assert (said["unit"], said["weight"], said["incomplete"]) == ("binaries", 5, "")
    rows = {row["path"].rpartition("/")[2]: row for row in said["rows"]}
    assert (rows["hot"]["symbols"], rows["hot"]["why"]) == ("debuginfo", "")
    assert rows["hot"]["container"].startswith("mnt:")
    assert rows["[vdso]"]["executable"]
    assert (rows["[vdso]"]["symbols"], rows["[vdso]"]["why"]) == ("symtab", "")
    assert said["coverage"]["executable"] == 1.0
    empty = BuildIdFs(directory)
    Store.create(empty.store).close()
    nothing = empty("coverage", "--fail-under", "1", gone.core, check=False)
    assert nothing.rc == 30
    assert f"\tmissing\t{gone.program.exe.build_id}\t-\t" in nothing.out
    frame = empty("why", gone.core, "hot").out
    assert "  1 binary: never captured\n" in frame
    gone.core.with_name("cut").write_bytes(gone.core.read_bytes()[:-5000])
    cut = gone.buildidfs("coverage", gone.core.with_name("cut"), check=False)
    assert (cut.rc, cut.err.partition("cut off after")[1]) == (3, "cut off after")


@pytest.mark.root
def test_another_process_still_runs_it(program: Program, directory: Path) -> None:
    buildidfs = BuildIdFs(directory)
    with container("tmpfs", program, directory / "container") as running:
        core = crash(running.stuck, directory)
        found = scanned(buildidfs("scan", "core", "--json", core))
        assert states(found) == {"hot": "captured", "libhot.so": "captured"}
    listed = [json.loads(line) for line in buildidfs("list", "--json").out.splitlines()]
    debug = [each["build_id"] for each in listed if each["kind"] == "debuginfo"]
    assert program.exe.build_id in debug
    # From processes that map libc, say, comes libc, and nothing else.
    assert {each["build_id"] for each in listed} == {each["build_id"] for each in found.values()}


@pytest.mark.root
def test_debug_files_that_dwz_has_made_smaller(dwz_program: Program, directory: Path) -> None:
    buildidfs = BuildIdFs(directory)
    with container("tmpfs", dwz_program, directory / "container") as running:
        core = crash(running.stuck, directory)
        assert scanned(buildidfs("scan", "core", "--json", core))["hot"]["state"] == "captured"
    assert dwz_program.supplement is not None
    assert dwz_program.supplement.build_id in buildidfs("list").out


@pytest.mark.root
def test_nobody_runs_it_and_its_filesystem_is_there(program: Program, directory: Path) -> None:
    """A shell that waits is all that is left of the container."""
    buildidfs = BuildIdFs(directory)
    with container("tmpfs", program, directory / "container") as running:
        core = crash(running.stuck, directory)
        os.kill(running.spin, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{running.spin}/exe").exists(), "its end")
        found = scanned(buildidfs("scan", "core", "--json", core))
        assert states(found) == {"hot": "captured", "libhot.so": "captured"}
    listed = buildidfs("show", "--json", program.exe.build_id).out
    (origin,) = json.loads(listed)["origins"]
    assert origin["scanner"] == "core"
    assert origin["container"].startswith("mnt:")


@pytest.mark.root
@pytest.mark.fuse
def test_path_that_leads_to_a_server_that_does_not_answer(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever crashed chose the paths."""
    place = scratch / "silent-core"
    (place / "mnt").mkdir(parents=True)
    binary = elf_file(build_id=b"\x5e" * 20)
    (place / "program").write_bytes(binary)
    mapping = Mapped(0x10000, binary[:PAGE], os.fsencode(place / "mnt/app"))
    link = mapping._replace(start=0x20000, path=b"/proc/self/root" + os.fsencode(place / "program"))
    (place / "core").write_bytes(core_file([mapping, link]))
    monkeypatch.setattr(Patience.__init__, "__defaults__", (0.3,))
    scans: list[cores.CoreScan] = []
    with silentfs.served(place / "mnt", place / "program") as server:
        server.send_signal(signal.SIGSTOP)

        def scan() -> None:
            with Store.create(place / "store") as store:
                scans.append(cores.scan_cores(store, Settings(), [os.fsencode(place / "core")]))

        thread = threading.Thread(target=scan, daemon=True)
        thread.start()
        thread.join(30)
    assert scans, "it waits for a filesystem that does not answer"
    # Nor is anything reached through a process.
    assert [each.state for each in scans[0].dumps[0].binaries] == ["missing", "missing"]


def test_core_that_was_cut_off(stripped: Path, directory: Path) -> None:
    with stuck(stripped, directory) as pid:
        core = crash(pid, directory, size=64 << 10)
    done = BuildIdFs(directory)("scan", "core", "--json", core, check=False)
    assert done.rc == 3
    summary = json.loads(done.out)
    (unreadable,) = summary["unreadable"]
    assert unreadable["path"] == str(core)
    assert unreadable["reason"].startswith("cut off after ")
    whole = {each["path"]: each for each in summary["cores"][0]["binaries"]}
    assert str(stripped) in whole
    assert any(each["why"] == Unknown.CUT_OFF for each in whole.values())
    os.truncate(core, 600)
    done = BuildIdFs(directory)("scan", "core", core, check=False)
    assert f"{core}: of an unknown process: " in done.out


def test_core_without_first_pages(stripped: Path, directory: Path) -> None:
    with stuck(stripped, directory) as pid:
        Path(f"/proc/{pid}/coredump_filter").write_text("0x23")
        core = crash(pid, directory)
    found = scanned(BuildIdFs(directory)("scan", "core", "--json", core))
    assert found["hot"]["why"] == Unknown.NOT_DUMPED
    assert found["hot"]["build_id"] is None
    assert found["[vdso]"]["state"] == "captured"


def test_program_that_was_deleted(program: Program, directory: Path) -> None:
    program.install(directory, debug="none")
    hot = directory / "app/bin/hot"
    with stuck(hot, directory) as pid:
        hot.unlink()
        core = gcore(pid, directory)
        found = scanned(BuildIdFs(directory)("scan", "core", "--json", core))
    assert found["hot"]["deleted"]
    assert found["hot"]["path"] == str(hot)
    assert found["hot"]["state"] == "captured"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        (b"", "not an ELF core file"),
        (b"\x04\x22\x4d\x18" + bytes(99), "compressed with lz4"),
    ],
)
def test_what_is_no_core(directory: Path, content: bytes | None, reason: str) -> None:
    path = directory / "core"
    if content is not None:
        path.write_bytes(content)
    done = BuildIdFs(directory)("scan", "core", path, check=False)
    assert done.rc == 3
    assert reason in done.err
    assert not cores.is_core(os.fsencode(path))
    with pytest.raises(UsageError, match=reason):
        cores.CoreFile(os.fsencode(path))


def test_what_is_no_file(directory: Path) -> None:
    os.mkfifo(directory / "fifo")
    with pytest.raises(UsageError, match="not a regular file"):
        cores.CoreFile(os.fsencode(directory / "fifo"))
    with pytest.raises(UsageError, match="not a regular file"):
        cores.CoreFile(os.fsencode(directory))
    assert not cores.is_core(b"/dev/null")
