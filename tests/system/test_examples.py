# SPDX-License-Identifier: Apache-2.0
"""Every file in examples/ does what it is an example of."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from buildidfs.cli.main import cli
from buildidfs.linux.sdnotify import Inbox
from tests.support.clients import tools
from tests.support.clients.commands import (
    ROOT,
    calling,
    client_directory,
    path_with,
    program_directory,
    script,
)
from tests.support.clients.tools import Result, run, tool
from tests.support.containers import packages
from tests.support.elf.elfwriter import ET_REL, elf_file
from tests.support.elf.programs import line_of
from tests.support.harness.children import copied_cat
from tests.support.harness.mounts import BuildIdFs, is_mountpoint
from tests.support.harness.waiting import until
from tests.support.servers.serving import Server, free_port

if TYPE_CHECKING:
    from tests.support.containers.vanished import Vanished

EXAMPLES = ROOT / "examples"
UNITS = (
    "buildidfs.service", "buildidfs-watch.service", "buildidfs-scan.service",
    "buildidfs-scan.timer", "buildidfs-serve.service", "buildidfs-serve.socket",
)  # fmt: skip


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.iterdir() if path.name not in tested] == []


def test_pods_of_the_daemonset_see_the_host_and_run_commands_that_exist() -> None:
    text = (EXAMPLES / "daemonset.yaml").read_text()
    for needed in ("hostPID: true", "privileged: true", "mountPropagation: Bidirectional"):
        assert f" {needed}" in text
    commands = [json.loads(found) for found in re.findall(r"command: (\[.*\])", text)]
    assert [words[0] for words in commands] == ["buildidfs", "sh"]
    for words in (commands[0], shlex.split(commands[1][2].partition("||")[0])):
        assert cli.make_context("buildidfs", [*words[1:], "--help"], resilient_parsing=True)
        name = next(word for word in words[1:] if not word.startswith("-"))
        rest = words[words.index(name) + 1 :]
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert command.make_context(name, rest)


@pytest.fixture
def programs(scratch: Path) -> Path:
    """A directory with ``buildidfs`` in it."""
    return program_directory(scratch / "example-programs")


# --- gdbinit -----------------------------------------------------------------------------------


@pytest.mark.client
def test_gdbinit_is_understood() -> None:
    shown = tools.gdb(
        "show debug-file-directory", "show debuginfod urls",
        arguments=["-ix", EXAMPLES / "gdbinit"],
    )  # fmt: skip
    assert shown.rc == 0, shown
    assert "/buildid/debug" in shown.out, shown
    assert "file:///buildid" in shown.out, shown
    assert "rror" not in shown.err, shown


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.client
def test_gdbinit_resolves_a_core_file(gone: Vanished, tmp_path: Path) -> None:
    text = (EXAMPLES / "gdbinit").read_text()
    here = tmp_path / "gdbinit"
    here.write_text(text.replace("/buildid", str(gone.mount)))
    unaided = tools.gdb("bt", arguments=["-c", gone.core])
    assert "hot.c" not in unaided.out
    # of the executable and of the library, which gdb 13 finds through debuginfod only
    resolved = tools.gdb("bt", arguments=["-ix", here, "-c", gone.core])
    assert re.search(rf"exe_static_stuck .* at .*hot\.c:{line_of('exe_stuck')}\b", resolved.out)
    assert re.search(rf"lib_static_stuck .* at .*libhot\.c:{line_of('lib_stuck')}\b", resolved.out)


# --- scripts -----------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.client
@pytest.mark.parametrize("own_places", [True, False], ids=["temporary", "given"])
def test_container_exit(programs: Path, tmp_path: Path, own_places: bool) -> None:
    temporary, place = tmp_path / "tmp", tmp_path / "place"
    temporary.mkdir()
    env = {"PATH": path_with(programs), "TMPDIR": str(temporary)}
    if not own_places:
        env |= {"STORE": str(place / "store"), "MOUNTPOINT": str(place / "mnt")}
    done = run([EXAMPLES / "container-exit.sh"], env=env, check=True)
    assert re.search(r"wait_for_godot \(days=2\) at .*godot\.c:9", done.out), done
    assert list(temporary.iterdir()) == []
    assert (place / "store/format").exists() is not own_places
    assert not is_mountpoint(place / "mnt")


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.client
def test_container_exit_leaves_a_mount_that_was_there(programs: Path, buildidfs: BuildIdFs) -> None:
    buildidfs("scan", "tree", tool("gcc"))
    env = {"PATH": path_with(programs), "STORE": str(buildidfs.store)}
    with buildidfs.mounted() as mount:
        done = run(
            [EXAMPLES / "container-exit.sh"], env=env | {"MOUNTPOINT": str(mount)}, check=True
        )
        assert "wait_for_godot (days=2)" in done.out, done
        assert is_mountpoint(mount)


@pytest.mark.root
@pytest.mark.client
def test_container_exit_cleans_up_after_a_failure(programs: Path, tmp_path: Path) -> None:
    broken = script(tmp_path / "broken/buildidfs", "exit 14")
    env = {"PATH": path_with(programs), "TMPDIR": str(tmp_path), "BUILDIDFS": str(broken)}
    done = run([EXAMPLES / "container-exit.sh"], env=env)
    assert done.rc == 14, done
    assert [path for path in tmp_path.iterdir() if path.name != "broken"] == []


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.client
def test_perf_report_elsewhere(gone: Vanished, tmp_path: Path) -> None:
    programs = client_directory(tmp_path / "programs")
    example = EXAMPLES / "perf-report-elsewhere.sh"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    archive = tmp_path / "profile.tar"
    env = {"MOUNTPOINT": str(gone.mount), "TMPDIR": str(temporary), "PATH": path_with(programs)}
    packed = run([example, "pack", gone.profile, archive], env=env, check=True)
    assert re.search(r"the profile and [2-9]\d* binaries", packed.out), packed
    # There, nothing is mounted, and the profile is not where it was.
    report = [example, "report", archive, "--stdio", "--no-children"]
    env["MOUNTPOINT"] = str(tmp_path / "nothing")
    there = run(report, env=env, check=True)
    assert "exe_static_hot" in there.out, there
    assert "lib_static_hot" in there.out, there
    assert list(temporary.iterdir()) == []
    wrong = run([example, "pak"], env=env)
    assert wrong.rc == 2
    assert "pack PERF.DATA OUT.TAR" in wrong.err


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.client
def test_crash_elsewhere(programs: Path, gone: Vanished, tmp_path: Path) -> None:
    root, debug, temporary = tmp_path / "root", tmp_path / "debug", tmp_path / "tmp"
    gone.program.install(root, debug="none")
    gone.program.install(debug, debug="system")
    shutil.rmtree(debug / "app")
    temporary.mkdir()
    layout = tmp_path / "layout"
    run([tool("umoci"), "init", "--layout", layout], check=True)
    run([tool("umoci"), "new", "--image", f"{layout}:hot"], check=True)
    run([tool("umoci"), "insert", "--image", f"{layout}:hot", root, "/"], check=True)
    example = EXAMPLES / "crash-elsewhere.sh"
    env = {"PATH": path_with(programs), "TMPDIR": str(temporary)}
    done = run([example, gone.core, layout, packages.rpm(debug, tmp_path)], env=env, check=True)
    place = rf"exe_static_stuck .* at .*hot\.c:{line_of('exe_stuck')}\b"
    assert re.search(place, done.out), done
    assert list(temporary.iterdir()) == []
    without = run([example, gone.core, layout], env=env, check=True)
    assert not re.search(place, without.out), without
    assert run([example, gone.core], env=env).rc == 2


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.client
def test_core_of_a_gone_container(gone: Vanished, tmp_path: Path) -> None:
    example = EXAMPLES / "core-of-a-gone-container.sh"
    env = {"MOUNTPOINT": str(gone.mount)}
    (name,) = [path.name for path in (gone.mount / "containers").iterdir()]
    listed = run([example], env=env, check=True)
    assert re.fullmatch(rf"\d{{4}}-\S+Z {re.escape(name)}\n", listed.out), listed
    arguments: list[tools.Argument] = [f"{gone.app}/bin/hot", gone.core]
    for spelled in (name, name.partition(":")[2][1:]):
        done = run([example, spelled, *arguments], env=env, check=True)
        place = rf"lib_static_stuck .* at .*libhot\.c:{line_of('lib_stuck')}\b"
        assert re.search(place, done.out), done
        assert re.search(rf"Yes +{gone.mount}/containers/{name}/root/\S+/libc\.so", done.out), done
    asked = run([example, name, *arguments, "-batch", "-ex", "info line main"], env=env, check=True)
    assert "hot.c" in asked.out, asked
    unknown = run([example, "nobody", *arguments], env=env)
    assert (unknown.rc, unknown.err) == (1, "no container nobody\n"), unknown
    assert run([example, name], env=env).rc == 2
    # with no mount there, none are listed
    nothing = run([example], env={"MOUNTPOINT": str(tmp_path)}, check=True)
    assert nothing.out == "", nothing


# --- custom_scanner.py -------------------------------------------------------------------------


def test_custom_scanner(tmp_path: Path, buildidfs: BuildIdFs) -> None:
    build_id = bytes.fromhex("5ca1ab1e" * 5)
    wheel, broken = tmp_path / "thing-1.0.whl", tmp_path / "broken.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing/__init__.py", "print('not ELF')\n")
        archive.writestr("thing/_fast.so", elf_file(build_id=build_id))
        archive.writestr("thing/without.so", elf_file(build_id=None))  # gets an adopted ID
        archive.writestr("thing/without.o", elf_file(build_id=None, etype=ET_REL))
    broken.write_bytes(b"not a zip")

    def scan(*wheels: Path) -> Result:
        argv = [sys.executable, EXAMPLES / "custom_scanner.py", buildidfs.store, *wheels]
        return run(argv, env={"PYTHONPATH": str(ROOT)})

    first = scan(wheel, broken)
    assert first.rc == 3, first
    assert first.out == "2 captured, 0 already held\n"
    assert str(broken) in first.err
    listed = buildidfs("list").out
    assert build_id.hex() in listed
    for name in ("_fast.so", "without.so"):
        assert f"{wheel}/thing/{name}" in listed
    assert "without.o\n" not in listed
    copied = tmp_path / "copy.so"
    buildidfs("get", build_id.hex(), "-o", copied)
    assert copied.read_bytes() == elf_file(build_id=build_id)
    again = scan(wheel)
    assert (again.rc, again.out) == (0, "0 captured, 2 already held\n"), again
    assert scan().rc == 2


# --- units of systemd --------------------------------------------------------------------------


class _Unit(configparser.RawConfigParser):
    """A unit file; keys keep their case, and lists that go on with the same key are one."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr

    @classmethod
    def load(cls, name: str) -> _Unit:
        unit = cls(strict=True, interpolation=None)
        text = (EXAMPLES / name).read_text()
        unit.read_string(re.sub(r"^(\w+)=(.*)\n\1=", r"\1=\2 ", text, flags=re.MULTILINE))
        return unit

    def command(self, key: str, changes: dict[str, str]) -> list[str]:
        """The command line of ``key``, confined as the unit says, with ``changes`` to words."""
        words = shlex.split(self["Service"][key])
        wanted = self["Service"]["CapabilityBoundingSet"].lower().replace("cap_", "+").split()
        confined = [
            tool("setpriv"),
            f"--bounding-set={','.join(['-all', *wanted])}",
            "--no-new-privs",
        ]
        return [*confined, *(changes.get(word, word) for word in words)]


@pytest.fixture
def places(programs: Path, buildidfs: BuildIdFs) -> dict[str, str]:
    """What the units name, and what to use in its place."""
    command = calling(
        buildidfs.store.parent / "here", [programs / "buildidfs", "--store", buildidfs.store]
    )
    return {"/usr/local/bin/buildidfs": str(command), "/buildid": str(buildidfs.mountpoint)}


@pytest.mark.parametrize("name", UNITS)
def test_unit_is_valid(name: str, tmp_path: Path) -> None:
    for each in UNITS:
        text = (EXAMPLES / each).read_text()
        # verify wants to see the program
        assert each.endswith(("timer", "socket")) or "/usr/local/bin/buildidfs" in text
        (tmp_path / each).write_text(text.replace("/usr/local/bin/buildidfs", "/bin/true"))

    def verify() -> str:
        argv = [tool("systemd-analyze"), "verify", "--man=no", tmp_path / name]
        done = run(argv, env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:"})
        return "".join(line for line in done.err.splitlines(True) if "buildidfs" in line)

    assert verify() == ""
    with (tmp_path / name).open("a") as file:
        file.write("NoSuchKey=1\n")
    assert "NoSuchKey" in verify()


@pytest.mark.root
def test_scan_service_captures_with_the_privileges_it_has(
    places: dict[str, str], buildidfs: BuildIdFs, cat: Callable[[], subprocess.Popen[bytes]]
) -> None:
    unit = _Unit.load("buildidfs-scan.service")
    child = cat()
    command = [*unit.command("ExecStart", places), "--pid", str(child.pid)]
    done = run(command)
    ok = {0, *map(int, unit["Service"]["SuccessExitStatus"].split())}
    assert done.rc in ok, done
    assert f"{Path(tool('cat')).resolve()}" in buildidfs("list").out, done
    assert "refused" not in done.text
    assert done.rc == 0, done


@pytest.fixture
def cat() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts a process of another user, which the service can look into only by its privileges."""
    children = []

    def start() -> subprocess.Popen[bytes]:
        argv = [tool("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups", tool("cat")]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        children.append(child)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"x")
        child.stdin.flush()
        assert child.stdout.read(1) == b"x"  # by now it is cat, and of that user
        return child

    yield start
    for child in children:
        with child:
            child.kill()


@contextlib.contextmanager
def _service(
    argv: list[str], log: Path, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], Inbox]]:
    """A service that is ready, started as systemd does, and what it says from then on."""
    with contextlib.closing(Inbox()) as inbox, log.open("wb") as output:
        server = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env={**os.environ, **environment, "NOTIFY_SOCKET": inbox.name},
        )  # fmt: skip

        def ready() -> bool:
            assert server.poll() is None, log.read_text()
            return (inbox.receive() or {}).get("READY") == "1"

        try:
            until(ready, "that it is ready", 60)
            yield server, inbox
        finally:
            server.kill()
            server.wait()


@pytest.mark.root
@pytest.mark.fuse
def test_service_mounts_until_it_is_stopped(places: dict[str, str], buildidfs: BuildIdFs) -> None:
    buildidfs.scan(os.getpid())
    unit = _Unit.load("buildidfs.service")
    assert unit["Service"]["Type"] == "notify"
    before = unit.command("ExecStartPre", places)
    run(before, check=True)
    run(before, check=True)  # at every start
    with _service(unit.command("ExecStart", places), buildidfs.store.parent / "service.log") as (
        server,
        _,
    ):
        assert is_mountpoint(buildidfs.mountpoint)
        shown = [path.read_bytes()[:4] for path in buildidfs.mountpoint.glob("*/elf")]
        assert len(shown) > 2
        assert set(shown) == {b"\x7fELF"}
        # what is captured while it runs shows up: it can hear of commits
        late = bytes.fromhex("1a7e" * 10)
        path = buildidfs.store.parent / "late.so"
        assert not (buildidfs.mountpoint / late.hex()).exists()
        path.write_bytes(elf_file(build_id=late))
        buildidfs("scan", "tree", path)
        assert (buildidfs.mountpoint / late.hex() / "elf").exists()
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert not is_mountpoint(buildidfs.mountpoint)


@pytest.mark.watch
@pytest.mark.root
@pytest.mark.host
def test_watch_service_follows_with_the_privileges_it_has(
    places: dict[str, str], buildidfs: BuildIdFs, tmp_path: Path
) -> None:
    unit = _Unit.load("buildidfs-watch.service")
    assert unit["Service"]["Type"] == "notify"
    allowed = int(unit["Service"]["WatchdogSec"])
    # no scan: what is captured was seen while it was mapped
    argv = [*unit.command("ExecStart", places), "--no-scan"]
    log = buildidfs.store.parent / "service.log"
    with _service(argv, log, WATCHDOG_USEC=f"{allowed * 1_000_000}") as (server, inbox):
        with copied_cat(tmp_path / "later"):
            until(lambda: f"{tmp_path}/later" in buildidfs("list").out, "the capture", 60)
        until(lambda: "WATCHDOG" in (inbox.receive() or {}), "a sign of life")
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0, log.read_text()


@pytest.mark.root
def test_serve_service_serves_with_the_privileges_it_has(
    places: dict[str, str], buildidfs: BuildIdFs
) -> None:
    path = buildidfs.store.parent / "served.so"
    path.write_bytes(elf_file(build_id=bytes(range(20))))
    buildidfs("scan", "tree", path)
    unit = _Unit.load("buildidfs-serve.service")
    assert unit["Service"]["Type"] == "notify"
    assert unit["Unit"]["Requires"] == "buildidfs-serve.socket"
    assert _Unit.load("buildidfs-serve.socket")["Socket"]["ListenStream"] == "127.0.0.1:8002"
    port = free_port()
    activated = [tool("systemd-socket-activate"), "-l", f"127.0.0.1:{port}", "-E", "NOTIFY_SOCKET"]
    argv = [*activated, *unit.command("ExecStart", places)]
    log = buildidfs.store.parent / "service.log"
    with log.open("wb") as output, subprocess.Popen(argv, stdout=output, stderr=output) as service:
        try:
            server = Server(service, log, f"127.0.0.1:{port}")
            until(lambda: _answers(server), "an answer", 60)
            reply = server.ask(f"/buildid/{bytes(range(20)).hex()}/executable")
            assert reply.body == path.read_bytes()
        finally:
            service.terminate()


def _answers(server: Server) -> bool:
    with contextlib.suppress(OSError, EOFError):
        return server.ask("/healthz").status == 200
    return False


def test_units_agree_with_each_other() -> None:
    mount, timer = _Unit.load("buildidfs.service"), _Unit.load("buildidfs-scan.timer")
    watch = "buildidfs-watch.service"
    assert watch in mount["Unit"]["Wants"]
    assert watch in mount["Unit"]["After"]
    scan = "buildidfs-scan.service"
    assert timer["Timer"].get("Unit", "buildidfs-scan.service") == scan
    # A mount in a mount namespace of the service would be seen by nobody.
    private = {
        "PrivateTmp", "PrivateDevices", "PrivateMounts", "ProtectSystem", "ProtectHome",
        "ProtectProc", "ProtectKernelTunables", "ProtectControlGroups", "ReadOnlyPaths",
        "InaccessiblePaths", "TemporaryFileSystem", "BindPaths", "RootDirectory", "DynamicUser",
    }  # fmt: skip
    assert private & set(mount["Service"]) == set()
    assert private & set(_Unit.load(watch)["Service"]) == set()


def test_every_capability_has_its_reason() -> None:
    text = (EXAMPLES / "buildidfs-watch.service").read_text()
    granted = _Unit.load("buildidfs-watch.service")["Service"]["CapabilityBoundingSet"].split()
    assert len(granted) == len(set(granted)) == 10
    assert [name for name in granted if not re.search(rf"^# {name} +\w", text, re.M)] == []


# buildidfs.toml is compared with the settings in tests/unit/test_docs.py
