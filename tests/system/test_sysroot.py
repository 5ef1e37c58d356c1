# SPDX-License-Identifier: Apache-2.0
"""The files of a container that is gone as a sysroot: clients say what they said inside of it.

``hot`` is at a path that the host does not have, its container's libc at one that the host may have
another libc at: whatever is read has to come from ``containers/<name>/root``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.clients.tools import Result, run, tool
from tests.support.containers.ephemeral import container, root_filesystem
from tests.support.elf import cores
from tests.support.elf.programs import SOURCE_DIR, build_id_of, line_of, sha256
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.clients.tools import Argument
    from tests.support.containers.ephemeral import Container
    from tests.support.elf.programs import Program

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]

_BACKTRACE = "bt -frame-arguments all"
_LOADER = "lib64/ld-linux-x86-64.so.2"


@dataclasses.dataclass(frozen=True)
class Left:
    """What is left of a container: ``inside`` is what gdb said of its process, inside of it."""

    program: Program
    mount: Path
    name: str
    app: str
    inside: list[str]
    libraries: list[str]
    cores: dict[str, Path]
    profile: Path

    @property
    def root(self) -> Path:
        """The container's files in the mount."""
        return self.mount / "containers" / self.name / "root"

    @property
    def exe(self) -> Path:
        """The executable there."""
        return self.root / self.app[1:] / "bin/hot"

    def outside(self, text: str) -> str:
        """A path in the mount as it was in the container."""
        return text.replace(str(self.root), "")


@pytest.fixture(scope="module", params=["tmpfs", "overlay", "squashfs", "crun"])
def left(request: pytest.FixtureRequest, scratch: Path, program: Program) -> Iterator[Left]:
    """A container of each kind that ran ``program``, was scanned, and is gone."""
    directory = scratch / f"sysroot-{request.param}"
    directory.mkdir()
    buildidfs = BuildIdFs(directory)
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(container(request.param, program, directory / "container"))
        buildidfs.scan(running.spin, running.stuck)
        inside = _inside(running)
        profile = directory / "perf.data"
        target = ["-p", str(running.spin)]
        assert tools.perf_record(profile, running.spinning(), *target).rc == 0
        files = {"gcore": cores.gcore(running.stuck, directory)}
        name = running.label or _namespace(running.stuck)
        files["kernel"] = _crash(running, directory)
        running.destroy()
        assert not os.path.exists(running.app), "the container's filesystem is still there"
        mount = stack.enter_context(buildidfs.mounted())
        libraries = _libraries(inside)
        assert len(libraries) >= 3, str(inside)
        yield Left(
            program, mount, name, running.app, _frames(inside), libraries, files, profile
        )  # fmt: skip


def _inside(running: Container) -> Result:
    return _beside(running.stuck, f"{running.app}/bin/hot")


def _beside(pid: int, executable: str) -> Result:
    root = f"/proc/{pid}/root"
    settings = [f"set sysroot {root}", f"set debug-file-directory {root}/usr/lib/debug"]
    attach = [f"{root}{executable}", str(pid)]
    result = tools.gdb(_BACKTRACE, "info sharedlibrary", settings=settings, arguments=attach)
    text = result.out.replace(root, "")
    return dataclasses.replace(result, out=text)


def _namespace(pid: int) -> str:
    return "mnt:" + re.sub(r"\D", "", os.readlink(f"/proc/{pid}/ns/mnt"))


def _crash(running: Container, directory: Path) -> Path:
    """The kernel's core of ``hot stuck``, which it writes where the process works."""
    if running.kind != "crun":
        return cores.crash(running.stuck, directory)
    core = cores.crash(running.stuck, Path(f"/proc/{running.spin}/root"))
    return Path(shutil.copy(core, directory))


def _frames(result: Result) -> list[str]:
    # gdb says by itself where a process or core file is, before it is asked
    frames = [line for line in result.out.splitlines() if line.startswith("#")]
    asked = frames[1:] if len(frames) > 1 and frames[1].startswith("#0 ") else frames
    assert len(asked) >= 5, str(result)
    return asked


def _libraries(result: Result) -> list[str]:
    """The last column of ``info sharedlibrary``: which file each library was read from."""
    return re.findall(r"^0x[0-9a-f]+ +0x[0-9a-f]+ +Yes(?: \(\*\))? +(/.*)$", result.out, re.M)


def _gdb(left: Left, core: Path, *settings: str) -> Result:
    sysroot = [f"set sysroot {left.root}", *settings]
    return tools.gdb(_BACKTRACE, "info sharedlibrary", settings=sysroot, arguments=[left.exe, core])


@pytest.mark.parametrize("made_by", ["gcore", "kernel"])
def test_gdb_says_what_it_said_inside(left: Left, made_by: str) -> None:
    debug = f"set debug-file-directory {left.mount}/debug"
    result = _gdb(left, left.cores[made_by], debug)
    assert [left.outside(frame) for frame in _frames(result)] == left.inside, str(result)
    read = _libraries(result)
    assert all(path.startswith(f"{left.root}/") for path in read), str(result)
    assert [left.outside(path) for path in read] == left.libraries, str(result)
    # Left are registers that gdb does not know yet, and the names that the kernel gives to files
    # of an overlay, which are those of the layer; gdb 14 and newer call it a warning as well that
    # the source of libc is not there.
    warnings = [line for line in result.err.splitlines() if "warning" in line]
    expected = re.compile(
        r"\.reg-xstate|file-backed mapping note|^warning: \d+\t\S+: No such file or directory$"
    )
    assert [line for line in warnings if not expected.search(line)] == [], str(result)


def test_what_was_inside_has_names_and_lines(left: Left) -> None:
    text = "\n".join(left.inside)
    for place in (
        rf"exe_static_stuck \(work=\S*0x[0-9a-f]+\) at {SOURCE_DIR}/hot\.c:{line_of('exe_stuck')}$",
        rf"lib_static_stuck \(.*\) at {SOURCE_DIR}/libhot\.c:{line_of('lib_stuck')}$",
        rf"main \(argc=.*, argv=.*\) at {SOURCE_DIR}/hot\.c:{line_of('main_stuck')}$",
    ):
        assert re.search(place, text, re.MULTILINE), text


def test_gdb_finds_debug_files_in_the_sysroot_alone(left: Left) -> None:
    # beside the files, or in the directory of debug files that the sysroot has
    result = _gdb(left, left.cores["gcore"], "set debug-file-directory /usr/lib/debug")
    assert str(left.mount / "debug") not in " ".join(result.argv)
    ours = [left.outside(frame) for frame in _frames(result) if SOURCE_DIR in frame]
    assert len(ours) == 4, str(result)
    assert ours == [frame for frame in left.inside if SOURCE_DIR in frame], str(result)


def test_without_the_sysroot_there_are_no_lines(left: Left) -> None:
    result = tools.gdb(_BACKTRACE, arguments=["-c", left.cores["kernel"]])
    assert SOURCE_DIR not in result.out, str(result)


def test_what_the_loader_was_asked_for_is_there(left: Left) -> None:
    # they are what this host's compiler asks for, and what `hot` was linked with
    libc, loader = left.root / "lib/x86_64-linux-gnu/libc.so.6", left.root / _LOADER
    needed = run([tool("ldd"), left.program.exe.compiled], check=True).out
    for path in (libc, loader):
        here = "/" + str(path.relative_to(left.root))
        assert here in needed, needed
        assert build_id_of(path) == build_id_of(Path(here))
    assert sha256(left.exe) == sha256(left.program.exe.shipped)


def test_perf_names_the_hot_functions(left: Left) -> None:
    home = left.profile.parent / "no-cache-here"
    argv: list[Argument] = [tools.perf_tool(), "--buildid-dir", home]
    argv += ["report", "--symfs", left.root]
    result = run([*argv, "--stdio", "--no-children", "-i", left.profile])
    assert re.search(r"hot +hot +\[\.\] exe_static_hot", result.out), str(result)
    assert re.search(r"hot +libhot\.so +\[\.\] lib_static_hot", result.out), str(result)


def test_perf_finds_debug_files_that_the_container_did_not_have(
    program: Program, directory: Path
) -> None:
    """The container is stripped; its debug files came from elsewhere, as packages of them do."""
    buildidfs = BuildIdFs(directory)
    profile = directory / "perf.data"
    with container("tmpfs", program, directory / "container", debug="none") as running:
        buildidfs.scan(running.spin)
        target = ["-p", str(running.spin)]
        assert tools.perf_record(profile, running.spinning(), *target).rc == 0
        name = _namespace(running.stuck)
        running.destroy()
    buildidfs("add", program.exe.debug, program.lib.debug)
    with buildidfs.mounted() as mount:
        root = mount / "containers" / name / "root"
        listed = {path.name for path in root.rglob("*.debug")}
        assert not listed & {f"{each.build_id[2:]}.debug" for each in program.binaries}
        argv = [tools.perf_tool(), "--buildid-dir", directory / "no-cache-here"]
        argv += ["report", "--symfs", root, "--stdio", "--no-children", "-i", profile]
        result = run(argv)
    assert re.search(r"hot +hot +\[\.\] exe_static_hot", result.out), str(result)
    assert re.search(r"hot +libhot\.so +\[\.\] lib_static_hot", result.out), str(result)


def test_lldb_resolves_the_whole_stack(left: Left) -> None:
    result = tools.lldb(
        f"settings set target.debug-file-search-paths {left.mount}/debug",
        f"platform select --sysroot {left.root} remote-linux",
        f"target create {left.exe} --core {left.cores['gcore']}",
        "bt",
        "image list",
    )
    for place in (
        rf"exe_static_stuck.* at hot\.c:{line_of('exe_stuck')}",
        rf"lib_static_stuck.* at libhot\.c:{line_of('lib_stuck')}",
        rf"main.* at hot\.c:{line_of('main_stuck')}",
    ):
        assert re.search(place, result.out), str(result)
    for library in ("libhot.so", "libc.so.6", _LOADER):
        assert re.search(rf"{left.root}/\S*{library} *$", result.out, re.MULTILINE), str(result)


def test_eu_stack_reads_the_executable_there(left: Left) -> None:
    core = f"--core={left.cores['gcore']}"
    debug = f"--debuginfo-path={left.mount}/debug"
    result = run([tool("eu-stack"), core, "-e", left.exe, debug, "-s"])
    for marker, file in (
        ("exe_stuck", "hot.c"), ("lib_stuck", "libhot.c"), ("main_stuck", "hot.c"),
    ):  # fmt: skip
        assert f"{SOURCE_DIR}/{file}:{line_of(marker)}:" in result.out, str(result)


_DRGN = """
import sys, drgn
core, root = sys.argv[1:]
program = drgn.Program()
program.debug_info_options.directories = (root + "/usr/lib/debug",)
program.set_core_dump(core)
program.create_loaded_modules()
for module in program.modules():
    if module.name.startswith("/"):
        module.try_file(root + module.name)
        print(module.name, module.loaded_file_path)
try:
    program.load_default_debug_info()
except drgn.MissingDebugInfoError as error:
    print("missing:", error, file=sys.stderr)  # the vDSO has none
print(program.main_thread().stack_trace())
"""


def test_drgn_is_given_the_files_one_by_one(left: Left) -> None:
    result = tools.drgn(_DRGN, left.cores["gcore"], left.root)
    assert result.rc == 0, str(result)
    read = re.findall(r"^(/\S+) (\S+)$", result.out, re.MULTILINE)
    assert len(read) >= 4, str(result)
    for path, file in read:  # which drgn spells without links
        assert file.startswith(f"{left.root}/"), str(result)
        assert os.path.samefile(file, f"{left.root}{path}"), str(result)
    for name, file, marker in (
        ("exe_static_stuck", "hot.c", "exe_stuck"),
        ("lib_static_stuck", "libhot.c", "lib_stuck"),
        ("main", "hot.c", "main_stuck"),
    ):
        assert f"{name} ({SOURCE_DIR}/{file}:{line_of(marker)}:" in result.out, str(result)


# --- other distributions -----------------------------------------------------------------------

# What was a file and what a link to it before glibc 2.34, with /usr merged as it is since; each
# process sees the kernel's names, of files, and asks for those of links.
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_RENAMED = {
    "lib/x86_64-linux-gnu/libc.so.6": f"{_LIBRARIES}/libc-2.31.so",
    _LOADER: f"{_LIBRARIES}/ld-2.31.so",
}
_LINKS = {
    "lib": "usr/lib",
    "lib64": "usr/lib64",
    f"{_LIBRARIES}/libc.so.6": "libc-2.31.so",
    "usr/lib64/ld-linux-x86-64.so.2": "../lib/x86_64-linux-gnu/ld-2.31.so",
}


def _as_it_was(program: Program, root: Path) -> None:
    """Make a root filesystem in which libc and loader have other names than they are asked for."""
    root_filesystem(program, root)
    (root / _LIBRARIES).mkdir(parents=True)
    (root / "usr/lib64").mkdir()
    for new, old in _RENAMED.items():
        (root / new).rename(root / old)
    for directory in ("lib", "lib64"):
        shutil.rmtree(root / directory)
    for link, target in _LINKS.items():
        (root / link).symlink_to(target)


@contextlib.contextmanager
def _rooted(root: Path, directory: Path) -> Iterator[int]:
    """``hot stuck`` in a copy of ``root`` that only its mount namespace has: its process ID."""
    place = directory / "root"
    place.mkdir()
    script = """
        mount -t tmpfs none "$1" && cp -a "$2/." "$1" && mount -t proc proc "$1/proc" &&
        exec chroot "$1" /app/bin/hot stuck
        """
    argv: list[Argument] = [tool("unshare"), "-m", "sh", "-c", script, "sh", place, root]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            lines(process.stdout, lambda got: got == ["up"])
            yield process.pid
        finally:
            process.kill()


def test_gdb_finds_libraries_by_names_that_were_links(program: Program, directory: Path) -> None:
    content = directory / "content"
    content.mkdir()
    _as_it_was(program, content)
    buildidfs = BuildIdFs(directory)
    with _rooted(content, directory) as pid:
        buildidfs.scan(pid)
        inside = _beside(pid, "/app/bin/hot")
        core, name = cores.gcore(pid, directory), _namespace(pid)
    with buildidfs.mounted() as mount:
        root = mount / "containers" / name / "root"
        assert sorted(path.name for path in (root / _LIBRARIES).iterdir()) == [
            "ld-2.31.so", "libc-2.31.so",
        ]  # fmt: skip
        settings = [f"set sysroot {root}", f"set debug-file-directory {mount}/debug"]
        result = tools.gdb(
            _BACKTRACE,
            "info sharedlibrary",
            settings=settings,
            arguments=[root / "app/bin/hot", core],
        )
    there = [frame.replace(str(root), "") for frame in _frames(result)]
    assert there == _frames(inside), f"{result}\n{inside}"
    read = [path.replace(str(root), "") for path in _libraries(result)]
    assert len(read) == 3, str(result)
    assert read == _libraries(inside), f"{result}\n{inside}"


# --- a library that gdb itself would load -----------------------------------------------------


_THREADS = "lib/x86_64-linux-gnu/libthread_db.so.1"


@pytest.fixture
def luring(program: Program, directory: Path) -> Iterator[tuple[Path, Path, int]]:
    """A mounted sysroot with a libthread_db of the container's, what that does to whom loads it,
    and a process of the container, which is still there.
    """
    root, marker = directory / "inside", directory / "gdb-has-run-it"
    root_filesystem(program, root)
    (directory / "evil.c").write_text(
        "#include <stdio.h>\n"
        f'__attribute__((constructor)) static void run(void) {{ fopen("{marker}", "w"); }}\n'
    )
    run([tool("gcc"), "-shared", "-fPIC", "-o", root / _THREADS, directory / "evil.c"], check=True)
    script = f"LD_LIBRARY_PATH=/app/lib LD_PRELOAD=/{_THREADS} exec /app/bin/hot stuck"
    argv = [tool("unshare"), "-m", tool("chroot"), root, "/bin/sh", "-c", script]
    buildidfs = BuildIdFs(directory)
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            lines(process.stdout, lambda got: bool(got))
            buildidfs.scan(process.pid)
            with buildidfs.mounted() as mount:
                sysroot = mount / "containers" / _namespace(process.pid) / "root"
                assert (sysroot / _THREADS).read_bytes() == (root / _THREADS).read_bytes()
                yield sysroot, marker, process.pid
        finally:
            process.kill()


def _attached(sysroot: Path, pid: int) -> Result:
    """gdb with a sysroot that its user has declared safe, as blogs advise."""
    settings = [
        f"set sysroot {sysroot}", "set auto-load safe-path /",
        # The one of this host fits by chance: a container has another libc, and then it does not.
        "set libthread-db-search-path $pdir",
    ]  # fmt: skip
    arguments: list[Argument] = [sysroot / "app/bin/hot", "-p", str(pid)]
    result = tools.gdb("info sharedlibrary", settings=settings, arguments=arguments)
    assert f"{sysroot}/lib/x86_64-linux-gnu/libc.so.6" in result.out, str(result)
    return result


def test_gdb_loads_no_library_of_a_sysroot(luring: tuple[Path, Path, int], directory: Path) -> None:
    sysroot, marker, pid = luring
    _attached(sysroot, pid)
    assert not marker.exists()
    # Nothing but the mount's noexec is in the way: of the same files elsewhere gdb loads it.
    copied = directory / "copied"
    shutil.copytree(sysroot, copied)
    result = _attached(copied, pid)
    assert marker.exists(), str(result)
