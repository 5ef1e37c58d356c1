# SPDX-License-Identifier: Apache-2.0
"""The debuggers, profilers and symbolizers that read the mount, and the one setting of each.

Every function is the command line a user would type. Nothing here knows of buildidfs beyond the
names inside the mount: the same calls work on a plain directory tree of the same layout, which
is how they were proven. A client that is not installed fails the test, with the package to
install; it is never a reason to skip.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

import pytest

from tests.support.harness import quiet

_KILLED_S: Final = 30.0
"""The longest that a killed process is waited for."""

Argument = str | bytes | os.PathLike[str]

# name on Debian and Ubuntu of the package that has the tool, where it is not the tool's own
PACKAGES = {
    "addr2line": "binutils",
    "bsdtar": "libarchive-tools",
    "ceph": "ceph-common",
    "radosgw-admin": "ceph-common",
    "ctr": "containerd",
    "debuginfod-find": "debuginfod",
    "docker": "docker.io",
    "dockerd": "docker.io",
    "dwp": "binutils-gold",
    "eu-addr2line": "elfutils",
    "eu-elflint": "elfutils",
    "eu-readelf": "elfutils",
    "eu-stack": "elfutils",
    "eu-unstrip": "elfutils",
    "fusermount3": "fuse3",
    "go": "golang-go",
    "getfattr": "attr",
    "ip": "iproute2",
    "ld": "binutils",
    "llvm-symbolizer": "llvm",
    "llvm-symbolizer-19": "llvm-19",
    "losetup": "mount",
    "mkfs.ext4": "e2fsprogs",
    "mkfs.xfs": "xfsprogs",
    "mksquashfs": "squashfs-tools",
    "busybox": "busybox-static",
    "monmaptool": "ceph-base",
    "nm": "binutils",
    "objcopy": "binutils",
    "objdump": "binutils",
    "perf": "linux-perf",
    "readelf": "binutils",
    "rpmbuild": "rpm",
    "setpriv": "util-linux",
    "strip": "binutils",
    "systemd-analyze": "systemd",
    "unshare": "util-linux",
    "xz": "xz-utils",
}


# As in scripts/install-packages: the release tested most, else what there is.
LLDB = ("lldb-19", "lldb-20", "lldb-18", "lldb")
RECENT_LLVM_SYMBOLIZER = tuple(f"llvm-symbolizer{end}" for end in ("-19", "-20", "-18", ""))


@dataclasses.dataclass(frozen=True)
class Result:
    """How a command ended; ``str()`` is what a failed assertion should show."""

    argv: tuple[str, ...]
    rc: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Both outputs, for clients that are not consistent about which they use."""
        return self.out + self.err

    def __str__(self) -> str:
        out, err = (_shortened(text) for text in (self.out, self.err))
        return f"$ {shlex.join(self.argv)}\n[exit {self.rc}]\n{out}\n[stderr]\n{err}"


def _shortened(text: str, most: int = 10_000) -> str:
    return text if len(text) <= most else f"{text[:most]}\n[{len(text) - most} more]"


def tool(*names: str) -> str:
    """The path of the first of ``names`` that is installed; fails the test if none is."""
    for name in names:
        # sbin is not on everybody's PATH, mkfs and losetup live there
        found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
        if found is not None:
            return found
    _missing(names[0])


def _missing(name: str) -> NoReturn:
    package = PACKAGES.get(name, name)
    pytest.fail(f"{name} is not installed: apt-get install {package} (make test does)")


def run(
    argv: Sequence[Argument],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Argument | None = None,
    timeout: float = 60,
    check: bool = False,
) -> Result:
    """Run a command to its end, without a terminal or input.

    ``env`` is added to the environment. After ``timeout`` seconds the command and what it started
    are killed and the test fails; with ``check`` it also fails on any exit code but 0.
    """
    words = tuple(os.fsdecode(word) for word in argv)
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=None if env is None else {**os.environ, **env},
        cwd=cwd,
        start_new_session=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:
            waiting = _waiting(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
            out, err = _left(process)
            if isinstance(error, subprocess.TimeoutExpired):
                pytest.fail(f"not done after {timeout} s{waiting}: {Result(words, -1, out, err)}")
            raise
    result = Result(words, process.returncode, out, err)
    if check and result.rc != 0:
        pytest.fail(str(result))
    return result


def _waiting(pid: int) -> str:
    """What a process does and where in the kernel it waits, as far as this may be known."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        return f", state {state} in {Path(f'/proc/{pid}/wchan').read_text() or 'unknown'}"
    except OSError:
        return ""


def _left(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a killed process has written, unless it cannot end or another keeps its outputs open."""
    try:
        return process.communicate(timeout=_KILLED_S)
    except subprocess.TimeoutExpired:
        process.returncode = -signal.SIGKILL  # nobody waits for it
        return "", ""


def nm(*arguments: Argument) -> str:
    """What ``nm`` prints. It would first load all of LLVM if it were not given another plugin."""
    return run([tool("nm"), "--plugin", os.devnull, *arguments], check=True).out


def unmount(*points: Argument) -> None:
    """Unmount filesystems; a watch of the host that another test runs may be looking at them."""
    for point in points:
        deadline = time.monotonic() + 60
        while (result := run([tool("umount"), point])).rc != 0:
            if time.monotonic() > deadline:
                pytest.fail(str(result))
            time.sleep(0.05)


def go_version() -> tuple[int, ...]:
    """The version of Go, which makes a GNU build ID from 1.24 on."""
    words = run([tool("go"), "env", "GOVERSION"], check=True).out.strip().removeprefix("go")
    return tuple(int(part) for part in words.split(".")[:2])


def gdb(
    *commands: str,
    debug: Path | None = None,
    settings: Sequence[str] = (),
    arguments: Sequence[Argument] = (),
    env: Mapping[str, str] | None = None,
) -> Result:
    """Run gdb commands in batch mode; ``debug`` becomes debug-file-directory.

    Settings go before the program is loaded (-iex): gdb handles ``-p`` and ``-c`` before ``-ex``.
    """
    argv: list[Argument] = [tool("gdb"), "-nx", "-batch"]
    first = [] if debug is None else [f"set debug-file-directory {debug}"]
    for setting in [*first, *settings]:
        argv += ["-iex", setting]
    for command in commands:
        argv += ["-ex", command]
    return run([*argv, *arguments], env=env)


@functools.cache
def perf_tool() -> str:
    """The path of perf; on Ubuntu not that of the wrapper that wants one for the very kernel."""
    found = tool("perf")
    if run([found, "--version"]).rc == 0:
        return found
    for other in sorted(Path("/usr/lib").glob("linux*-tools-*/perf"), reverse=True):
        if run([other, "--version"]).rc == 0:
            return str(other)
    _missing("perf")


def perf_record(
    output: Path, command: Sequence[Argument], *options: str, buildid_dir: Path | None = None
) -> Result:
    """Sample ``command`` on the CPU clock, with build IDs in the mmap records."""
    argv: list[Argument] = [perf_tool()]
    if buildid_dir is not None:
        argv += ["--buildid-dir", buildid_dir]
    argv += ["record", "-o", output, "-e", "cpu-clock", "-F", "997", "--buildid-mmap"]
    with quiet.recording_turn(argv):
        return run([*argv, *options, "--", *command])


def perf(mount: Path, *arguments: Argument, timeout: float = 60) -> Result:
    """``perf --buildid-dir MOUNT/perf ...``"""
    return run([perf_tool(), "--buildid-dir", mount / "perf", *arguments], timeout=timeout)


def perf_report(mount: Path, data: Path, *options: str) -> Result:
    """The flat profile as text, by shared object and symbol."""
    return perf(mount, "report", "--stdio", "--no-children", "-i", data, *options)


def eu_stack(core: Path, debug: Path) -> Result:
    """The stacks of a core file, with source lines."""
    return run([tool("eu-stack"), f"--core={core}", f"--debuginfo-path={debug}", "-s"])


def eu_addr2line(path: Path, debug: Path, address: int) -> Result:
    """Function and source line of an address in a stripped file."""
    options = [f"--debuginfo-path={debug}", "-f", f"0x{address:x}"]
    return run([tool("eu-addr2line"), "-e", path, *options])


def debuginfod_find(urls: str, *arguments: str) -> Result:
    """Ask a debuginfod; the first line of output is the path of a copy in the client's cache."""
    return run([tool("debuginfod-find"), *arguments], env={"DEBUGINFOD_URLS": urls})


def lldb(*commands: str) -> Result:
    """Run lldb commands in batch mode, for at most a minute: some versions hang now and then."""
    argv: list[Argument] = [tool("timeout"), "-k", "5", "60", tool(*LLDB), "-x", "-b"]
    for command in commands:
        argv += ["-o", command]
    return run(argv, timeout=90)


def drgn(script: str, *arguments: Argument) -> Result:
    """Run a script that uses drgn, in a process of its own."""
    if importlib.util.find_spec("drgn") is None:
        pytest.fail("drgn is not installed: pip install drgn (make test does)")
    return run([sys.executable, "-c", script, *arguments])


def llvm_symbolizer(
    debug: Path, *arguments: str, names: Sequence[str] = ("llvm-symbolizer",)
) -> Result:
    """Symbolize an address with debug files found by build ID, by the first of ``names``."""
    return run([tool(*names), f"--debug-file-directory={debug}", *arguments])
