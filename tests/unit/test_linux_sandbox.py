# SPDX-License-Identifier: Apache-2.0
"""A confined program reads what it was given, and can do nothing else."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from buildidfs.linux import child, sandbox
from tests.support.clients.commands import ROOT
from tests.support.clients.tools import run, tool
from tests.support.containers.usernamespaces import mapped
from tests.support.harness.children import needs_root
from tests.support.harness.waiting import until

LIMITS = sandbox.SandboxLimits(memory=64 << 20, addresses=4 << 30, seconds=1)
ENVIRONMENT = {"PATH": os.defpath}


class Done(NamedTuple):
    """How a confined script ended."""

    returncode: int
    stdout: str
    notes: tuple[str, ...]


def output(process: child.Child) -> str:
    """All that a program says until it ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.close()
        return process.stdout.read().decode()
    finally:
        assert process.wait(60) is not None
        assert process.end(1)


def confined(script: str, limits: sandbox.SandboxLimits = LIMITS) -> Done:
    """Run a shell script in the sandbox."""
    process, notes = sandbox.start([tool("sh"), "-c", script], limits, env=ENVIRONMENT)
    said = output(process)
    assert process.code is not None
    return Done(process.code, said, notes)


def status_of(text: str) -> dict[str, str]:
    """The fields of a text like /proc/PID/status."""
    return {
        name: value.strip()
        for name, _, value in (line.partition(":") for line in text.splitlines())
    }


def assert_without_privileges(text: str) -> None:
    status = status_of(text)
    assert status["NoNewPrivs"] == "1"
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}


def test_nothing_of_root_is_left() -> None:
    done = confined("exec cat /proc/self/status")
    assert_without_privileges(done.stdout)
    status = status_of(done.stdout)
    if os.geteuid() == 0:
        (uid,) = set(status["Uid"].split())
        assert int(uid) >= 1 << 30
        assert int(status["Gid"].split()[0]) >= 1 << 30
        assert status["Groups"] == ""
    assert done.notes == ()


@needs_root("is given users of their own")
def test_each_program_is_a_user_of_its_own() -> None:
    seen = {confined(f"exec id -{kind}").stdout for kind in "ug" for _ in range(3)}
    assert len(seen) == 6


@needs_root("is given a user of its own")
def test_process_of_user_nobody_cannot_read_its_files(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of root's")
    secret.chmod(0o444)
    tmp_path.chmod(0o700)
    fd = os.open(secret, os.O_RDONLY)
    process, _ = sandbox.start(
        [tool("cat"), "-", f"/proc/self/fd/{fd}"], LIMITS, env=ENVIRONMENT, pass_fds=[fd]
    )
    os.close(fd)
    assert process.stdin is not None
    assert process.stdout is not None
    name = f"/proc/{process.pid}/fd/{fd}"
    as_nobody = [tool("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups"]
    try:
        until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "cat\n", "cat")
        assert run([tool("cat"), name]).out == "of root's"
        for argv in ([tool("cat"), name], [tool("kill"), str(process.pid)]):
            refused = run([*as_nobody, *argv])
            assert refused.rc != 0
            assert refused.out == ""
        # The program itself may, though no other process can reach the file by its path.
        process.stdin.close()
        assert process.stdout.read() == b"of root's"
    finally:
        process.end(1)


@pytest.mark.root
def test_a_network_namespace_of_its_own() -> None:
    devices = confined("exec cat /proc/self/net/dev").stdout.splitlines()[2:]
    assert [line.split()[0] for line in devices] == ["lo:"]
    own = confined("exec readlink /proc/self/ns/net").stdout.strip()
    assert own.startswith("net:")
    assert own != os.readlink("/proc/self/ns/net")


def test_no_other_process() -> None:
    """It would have limits of its own, and not end with the caller."""
    script = "/bin/true; echo done"
    assert run([tool("sh"), "-c", script]).out == "done\n"
    assert confined(script).stdout == ""
    # Threads are not processes.
    python = "/usr/bin/python3"
    code = "import threading as t; a = t.Thread(target=print, args=['well']); a.start(); a.join()"
    assert run([python, "-c", code], check=True).out == "well\n"
    process, _ = sandbox.start([python, "-c", code], LIMITS, env=ENVIRONMENT)
    assert output(process) == "well\n"


def test_no_network_and_no_view_of_other_processes() -> None:
    """The system calls fail in a confined program that succeed in this one."""
    attempts = (
        "import ctypes, os, socket\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def said(what):\n"
        "    try: return what() and 'well' or 'well'\n"
        "    except OSError as error: return error.errno\n"
        "print(said(lambda: socket.socket(socket.AF_INET)),\n"
        "      said(lambda: socket.socket(socket.AF_UNIX)),\n"
        "      libc.ptrace(0, 0, 0, 0) and ctypes.get_errno(),\n"
        "      said(lambda: os.close(os.open('/tmp', os.O_TMPFILE | os.O_WRONLY))))\n"
    )
    python = tool("python3") if Path(tool("python3")).is_relative_to("/usr") else "/usr/bin/python3"
    before = run([python, "-c", attempts], check=True).out
    assert before == "well well 0 well\n"
    process, _ = sandbox.start([python, "-c", attempts], LIMITS, env=ENVIRONMENT)
    said = output(process)
    assert [int(word) for word in said.split()[:3]] == [errno.EPERM] * 3
    # What the kernel cannot take is refused by nothing else, as in the first run.
    assert said.split()[3] == str(errno.EACCES)


def test_limits() -> None:
    limits = confined("exec cat /proc/self/limits").stdout
    found = {line[:26].strip(): line[26:].split()[:2] for line in limits.splitlines()}
    assert found["Max data size"] == [str(64 << 20)] * 2
    assert found["Max address space"] == [str(4 << 30)] * 2
    assert found["Max cpu time"] == ["1", "1"]
    assert found["Max file size"] == found["Max core file size"] == ["0", "0"]


def test_a_caller_that_has_mapped_more_than_the_limit() -> None:
    """As every process has that opened a store: LMDB maps a tebibyte."""
    with mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | 0x4000, prot=mmap.PROT_READ):
        # Room that Python would have to map is what a fork of this process could not get.
        assert confined("echo well").stdout == "well\n"


def test_endless_work_ends() -> None:
    assert confined("while :; do :; done").returncode < 0


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from buildidfs.linux import sandbox\n"
        "started = sandbox.start(['/bin/sleep', '60'], (1 << 30, 1 << 34, 9), env={})\n"
        "print(started.process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = run([sys.executable, "-c", script], cwd=ROOT)
    assert done.rc == -signal.SIGKILL, str(done)
    child = int(done.out)

    def is_gone() -> bool:
        try:
            return b"sleep" not in Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            return True

    until(is_gone, "the end of the confined program")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["/nonexistent/program"], "cannot run /nonexistent/program: No such file or directory"),
        (["/etc/passwd"], "cannot run /etc/passwd: Permission denied"),
    ],
)
def test_failed_step_is_told(argv: list[str], told: str) -> None:
    with pytest.raises(sandbox.NotStarted) as caught:
        sandbox.start(argv, LIMITS, env={})
    assert str(caught.value) == told


def test_a_helper_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "PACKAGE_PATH", "/nonexistent")
    with pytest.raises(sandbox.NotStarted, match="its helper ended with 1"):
        sandbox.start([tool("true")], LIMITS, env={})


def test_there_is_no_process_left_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(sandbox.NotStarted) as caught:
        sandbox.start([tool("true")], LIMITS, env={})
    assert str(caught.value) == "cannot start /nonexistent/python: No such file or directory"


# --- with less than root has ---------------------------------------------------------------------

_REPORT = """
import sys
sys.path.insert(0, sys.argv[1])
from buildidfs.linux import sandbox
started = sandbox.start(
    ["/bin/cat", "/proc/self/status"], sandbox.SandboxLimits(1 << 30, 1 << 34, 9), env={}
)
print(*started.notes, sep="\\n", file=sys.stderr)
print(started.process.stdout.read().decode())
started.process.end(1)
"""


def reported(*before: str) -> tuple[str, str]:
    """The status of a program confined by a Python behind these words, and what is told of it."""
    done = run([*before, sys.executable, "-c", _REPORT, str(ROOT)], check=True)
    assert_without_privileges(done.out)
    return done.out, done.err.strip()


@needs_root("drops capabilities")
@pytest.mark.parametrize(
    ("bounding", "same_user", "told"),
    [
        ("-all,+setuid,+setgid", False, ""),
        ("-all,+setuid,+setgid,+kill,+chown,+dac_override", False, ""),
        ("-setuid", True, "needs CAP_SETUID"),
        ("-all", True, "needs CAP_SETUID"),
        ("-setgid", False, "the groups of its caller still: needs CAP_SETGID"),
        ("-sys_admin", False, ""),
        ("-sys_resource", False, ""),
    ],
)
def test_fewer_capabilities(bounding: str, same_user: bool, told: str) -> None:
    for more in ([], ["--no-new-privs"]):
        text, notes = reported(tool("setpriv"), f"--bounding-set={bounding}", *more)
        assert (status_of(text)["Uid"].split()[0] == "0") == same_user
        assert told in notes if told else notes == ""


@needs_root("makes user namespaces")
@pytest.mark.parametrize(
    ("ranges", "same_user"),
    [
        ([(0, 0, 1)], True),
        ([(0, 0, 1), (1000, 1000, 1)], False),
        ([(0, 0, 65536)], False),
    ],
)
def test_user_namespaces(ranges: list[tuple[int, int, int]], same_user: bool) -> None:
    text, notes = reported(*map(os.fsdecode, mapped(ranges)))
    assert (status_of(text)["Uid"].split()[0] == "0") == same_user
    assert ("this user namespace has no other" in notes) == same_user
    assert same_user or notes == ""


def test_its_parent_is_in_another_pid_namespace() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root makes a PID namespace")
    text, notes = reported(tool("unshare"), "--pid")
    assert (text != "", notes) == (True, "")


def test_no_file_but_those_that_it_may_read(directory: Path) -> None:
    """Others that all may read are refused, with a name or without one."""
    files = [directory / name / "file" for name in ("given", "other", "nameless")]
    for file in files:
        file.parent.mkdir()
        file.write_text(f"{file.parent.name}\n")
        file.chmod(0o444)
    fd = os.open(files[2], os.O_RDONLY)
    files[2].unlink()
    memory = os.memfd_create("memory")
    os.write(memory, b"memory\n")
    paths = [*files[:2], f"/proc/self/fd/{fd}", f"/proc/self/fd/{memory}"]
    script = "; ".join(f"read x < {path} && echo $x || echo no" for path in paths)
    said = {}
    os.fchmod(memory, 0o444)
    for reads in ((), ("/usr", "/bin", "/lib", "/lib64", str(files[0].parent), "/nonexistent")):
        process, _ = sandbox.start(
            [tool("sh"), "-c", script], LIMITS, env=ENVIRONMENT, pass_fds=[fd, memory], reads=reads
        )
        said[bool(reads)] = output(process).split()
    os.close(fd)
    os.close(memory)
    assert said == {
        False: ["given", "other", "nameless", "memory"],
        True: ["given", "no", "no", "memory"],
    }


def test_helper_imports_little() -> None:
    """Each symbolizer waits for the start of the helper, and most of that would be imports."""
    script = "import sys; from buildidfs.linux import confinement; print(*sys.modules)"
    argv = [sys.executable, "-S", "-c", script]
    imported = set(run(argv, cwd=ROOT, check=True).out.split())
    assert "buildidfs.linux.confinement" in imported
    assert not imported & {"contextlib", "enum", "re", "signal", "subprocess", "typing"}
