# SPDX-License-Identifier: Apache-2.0
"""Names that the program reads in the root of a container lead to FIFOs and to interfaces of the
kernel. None of these is opened for reading.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.origin.container_names import EngineNames
from buildidfs.capture.process.jit_files import JitFinder
from buildidfs.capture.process.package_databases import PackageDatabases
from buildidfs.capture.process.process import PinnedProcess, Ways
from buildidfs.capture.process.scanner import ProcScanner
from buildidfs.capture.scan.kernel import InstalledKernels
from buildidfs.capture.scan.tree import TreeScanner, identify_tree
from buildidfs.capture.unresponsive.file_helper import FileHelper
from buildidfs.capture.unresponsive.filesystems import SlowMounts
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import NO_NAMES, BuildId
from buildidfs.store import Store
from buildidfs.watch.running import ids_in_use
from tests.support.clients.commands import ROOT
from tests.support.clients.tools import run, tool
from tests.support.elf import echo
from tests.support.filesystems import opens
from tests.support.harness.children import running
from tests.support.harness.mounts import COMMAND, BuildIdFs
from tests.support.harness.scans import Memory, own_namespaces, scan
from tests.support.harness.waiting import until
from tests.support.harness.watching import watching

pytestmark = pytest.mark.root

ID = b"\x1e" * 20
CONTAINER = "0123456789abcdef" * 4
ENGINES = (
    "etc/docker/daemon.json",
    f"var/lib/docker/containers/{CONTAINER}/config.v2.json",
    f"run/containerd/io.containerd.runtime.v2.task/k8s.io/{CONTAINER}/config.json",
    "etc/containers/storage.conf",
    f"run/containers/storage/overlay-containers/{CONTAINER}/userdata/config.json",
    "run/containers/storage/overlay-containers/containers.json",
    "var/lib/containers/storage/overlay-containers/volatile-containers.json",
    "etc/passwd",
)
NAMES = (
    *ENGINES,
    f"usr/lib/debug/.build-id/1e/{'1e' * 19}.debug",
    "bin/name.debug",
    "bin/.debug/name.debug",
    "usr/lib/debug/bin/name.debug",
    "usr/lib/debug/.dwz/app",
    "bin/app.dwp",
    "var/lib/dpkg/status",
    "var/lib/dpkg/info/app.list",
    "var/lib/dpkg/status.d/app.md5sums",
    "var/lib/rpm/rpmdb.sqlite",
    "usr/lib/sysimage/rpm/rpmdb.sqlite",
    "lib/apk/db/installed",
    "usr/lib/apk/db/installed",
    "etc/os-release",
    "boot/vmlinuz-1",
    "boot/System.map-1",
    "lib/modules/1/kernel/x.ko",
    "lib/modules/1/modules.dep",
)
PROC, SYSFS = Path("/proc/sys/fs/pipe-user-pages-soft"), Path("/sys/kernel/fscaps")


@pytest.fixture
def place(directory: Path) -> Iterator[Path]:
    """A filesystem that is gone, with all that is mounted in it, after the test."""
    run([tool("mount"), "-t", "tmpfs", "-o", "mode=0755", "none", directory], check=True)
    try:
        yield directory
    finally:
        run([tool("umount"), "-R", "-l", directory], check=True)


@pytest.fixture(scope="module")
def app(scratch: Path) -> Path:
    """A program with names of debug files of all kinds."""
    path, part = scratch / "foreign-files-app", scratch / "foreign-files-section"
    echo.build(path, f"-Wl,--build-id=0x{ID.hex()}")
    for section, content in (
        ("gnu_debuglink", b"name.debug\0\0" + bytes(4)),
        ("gnu_debugaltlink", b"/usr/lib/debug/.dwz/app\0" + b"\x2e" * 20),
    ):
        part.write_bytes(content)
        run([tool("objcopy"), "--add-section", f".{section}={part}", path], check=True)
    return path


class Trap:
    """Puts one file at many names of a root, and notices each open of it."""

    def __init__(self, root: Path, way: str) -> None:
        self._root, self._way = root, way
        self.target = {"fifo": root / "fifo", "sysfs": SYSFS}.get(way, PROC)

    def set(self, name: str) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._way == "fifo":
            os.link(self.target, path)
        elif self._way == "link":
            path.symlink_to(PROC)
        else:
            path.touch(0o644)
            run([tool("mount"), "--bind", self.target, path], check=True)


@contextlib.contextmanager
def trap(place: Path, way: str) -> Iterator[tuple[Trap, Path]]:
    root = place / "root"
    (root / "proc").mkdir(parents=True)
    run([tool("mount"), "-t", "proc", "none", root / "proc"], check=True)
    os.mkfifo(root / "fifo")
    trap = Trap(root, way)
    for name in NAMES:
        trap.set(name)
    yield trap, root


@pytest.mark.parametrize("way", ["fifo", "link", "proc", "sysfs"])
def test_no_foreign_file_but_a_stored_one_is_opened(place: Path, app: Path, way: str) -> None:
    with contextlib.ExitStack() as stack:
        trapped, root = stack.enter_context(trap(place, way))
        (root / "bin/app").write_bytes(app.read_bytes())
        (root / "bin/app").chmod(0o755)
        pid = stack.enter_context(running([tool("chroot"), root, "/bin/app"])).pid
        trapped.set(f"tmp/perf-{pid}.map")
        noticed = stack.enter_context(opens.watched(trapped.target))

        found = scan(ProcScanner(Memory(), pids=[pid], initial=own_namespaces()))
        assert {seen.path for seen in found.pinned} == {b"/bin/app", b"[vdso]"}
        assert not noticed.any(), "scan proc"
        _read_as_why_and_watch_do(pid)
        assert not noticed.any(), "why, watch"
        ids_in_use()
        assert not noticed.any(), "where --live"
        path = os.fsencode(root)
        list(identify_tree([path]))
        assert {seen.path for seen in scan(TreeScanner(Memory(), [path])).pinned} == {
            os.path.join(path, b"bin/app")
        }
        assert not noticed.any(), "scan tree"
        scan(InstalledKernels(Memory(), path))
        assert not noticed.any(), "scan kernel"
        names = EngineNames(lambda: iter([path]))
        for slice_of in (b"", b"/user.slice/user-4242.slice"):
            assert names.of_cgroup(slice_of + b"/docker-%s.scope" % CONTAINER.encode()) == NO_NAMES
        assert not noticed.any(), "names of containers"

        with closing_fd(os.open(trapped.target, os.O_RDONLY | os.O_NONBLOCK)):
            assert noticed.any(), "the test would notice an open"


def is_held(path: Path, build_id: BuildId) -> bool:
    with Store.open(path, read_only=True) as store:
        return store.index.ordinal(build_id) is not None


def test_watch_opens_no_foreign_file_but_a_stored_one(
    directory: Path, place: Path, app: Path
) -> None:
    with trap(place, "proc") as (trapped, root), opens.watched(trapped.target) as noticed:
        (root / "bin/app").write_bytes(app.read_bytes())
        (root / "bin/app").chmod(0o755)
        with (
            watching(directory / "store", "--no-scan") as watcher,
            running([tool("unshare"), "-m", tool("chroot"), root, "/bin/app"]),
        ):
            until(lambda: is_held(watcher.store, BuildId(ID)), "the capture", 60)
            until(lambda: watcher.facts["idle"], "rest", 60)
        assert not noticed.any()


def _read_as_why_and_watch_do(pid: int) -> None:
    with PinnedProcess(pid, Ways()) as process:
        PackageDatabases().owner(process, b"/bin/app")
    with FileHelper() as helper:
        for file in JitFinder(("mnt",), SlowMounts(), helper).find(pid):
            file.close()
            raise AssertionError("names of generated code from no regular file")


# --- files that the operator names ---------------------------------------------------------------

COMMANDS = (
    "--config {} stats",
    "add {}",
    "bundle {} -o-",
    "coverage {}",
    "import {}",
    "pin {}",
    "repair {} -o-",
    "scan core {}",
    "scan image {}",
    "scan package {}",
    "scan perf-data {}",
    "scan tree {}",
    "show {}",
    "symbolize --perf-script --buildid-list {}",
    "why {}",
)


@pytest.mark.parametrize(
    "command", COMMANDS, ids=[command.replace(" {}", "").replace(" ", "") for command in COMMANDS]
)
def test_file_given_by_the_operator_must_be_a_stored_one(
    directory: Path, buildidfs: BuildIdFs, command: str
) -> None:
    Store.create(buildidfs.store).close()
    fifo = directory / "fifo"
    os.mkfifo(fifo)
    paths = [Path("/dev/zero"), PROC]
    if "--buildid-list" not in command:  # which may be a pipe of the shell
        paths.append(fifo)
    with opens.watched(*paths[1:]) as noticed:
        for path in paths:
            done = buildidfs(*(word.format(path) for word in command.split()), check=False)
            assert done.rc not in (0, 1), done
            assert str(path) in done.err, done
            assert "Traceback" not in done.err
            assert not noticed.any(), path


def test_list_of_build_ids_may_be_a_pipe(buildidfs: BuildIdFs) -> None:
    Store.create(buildidfs.store).close()
    script = '"$@" --buildid-list <(printf "%040d /bin/x\\n" 1)'
    argv = [*COMMAND, "--store", buildidfs.store, "symbolize", "--perf-script"]
    done = run([tool("bash"), "-c", script, "bash", *argv], cwd=ROOT)
    assert (done.rc, "standard input is empty" in done.err) == (0, True), done


def test_configuration_is_bounded(directory: Path, buildidfs: BuildIdFs) -> None:
    large = directory / "large.toml"
    large.write_bytes(b"#" * (2 << 20))
    done = buildidfs("--config", large, "stats", check=False)
    assert (done.rc, "has more than 1048576 bytes" in done.err) == (2, True), done
    large.write_bytes(b"\xff\xfe")
    done = buildidfs("--config", large, "stats", check=False)
    assert (done.rc, "not UTF-8 text" in done.err) == (2, True), done


def test_configuration_that_others_may_change_is_refused(
    directory: Path, buildidfs: BuildIdFs
) -> None:
    Store.create(buildidfs.store).close()
    file = directory / "own.toml"
    file.write_text("")
    buildidfs("--config", file, "stats")
    file.chmod(0o666)
    done = buildidfs("--config", file, "stats", check=False)
    complaint = f"cannot read configuration file {file}: it may be changed by all users: chmod go-w"
    assert done.rc == 2
    assert f"{complaint} {file}\n" in done.err


def test_store_that_others_may_change_is_named(buildidfs: BuildIdFs) -> None:
    store = buildidfs.store
    Store.create(store).close()
    assert buildidfs("stats").err == ""
    store.chmod(0o777)
    warning = f"buildidfs: warning: store {store} may be changed by all users: chmod go-w {store}\n"
    assert buildidfs("stats").err == warning
    assert buildidfs("-q", "stats").err == ""
    store.chmod(0o700)
    os.chown(store, 4242, 0)
    assert "belongs to user 4242: chown 0" in buildidfs("stats").err
