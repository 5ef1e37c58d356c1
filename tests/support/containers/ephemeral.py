# SPDX-License-Identifier: Apache-2.0
"""Containers whose filesystem is theirs alone, and is destroyed with them.

Each is a mount namespace in which one filesystem, invisible from outside, holds the program:
tmpfs, ext4, xfs or squashfs on a loop device, an overlay, or the root filesystem of a container
run by crun. Two processes run in it, ``hot stuck`` and ``hot spin``, which is stopped except for
`Container.spinning`: it would take a processor from other tests. A shell in the namespace waits
on a pipe from the test: when the test says so, or is gone for whatever reason, it kills them and
unmounts, and a filesystem that stays busy for ten seconds is a failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.clients.tools import run, tool
from tests.support.harness.mounts import is_mountpoint, loop_devices
from tests.support.harness.waiting import lines, until

if TYPE_CHECKING:
    from tests.support.clients.tools import Argument
    from tests.support.elf.programs import Program

KINDS = ("tmpfs", "ext4", "xfs", "squashfs", "overlay", "crun")

# $1 is where the filesystem goes, $2 the directory to fill it from, $3 the image
_MOUNT = {
    "tmpfs": 'mount -t tmpfs none "$1"; cp -a "$2/." "$1"',
    "ext4": 'mount -t ext4 -o loop "$3" "$1"; cp -a "$2/." "$1"',
    "xfs": 'mount -t xfs -o loop "$3" "$1"; cp -a "$2/." "$1"',
    "squashfs": 'mount -t squashfs -o loop "$3" "$1"',
    # the executable stays in the lower layer, the library is copied up
    "overlay": """
        mount -t tmpfs none "$3"; mkdir "$3/upper" "$3/work"
        mount -t overlay -o "lowerdir=$2,upperdir=$3/upper,workdir=$3/work" none "$1"
        chmod 0700 "$1/app/lib/libhot.so"; chmod 0755 "$1/app/lib/libhot.so"
        """,
}
# $1 is the stat of the process, $2 the ticks that it may use
_SPINNING = """
used() {
    read -r pid _ _ _ _ _ _ _ _ _ _ _ _ user system _ < "$1"
    used=$((user + system))
}
used "$1"
end=$((used + $2))
kill -CONT $pid
while [ $used -lt $end ]; do
    sleep 0.02
    used "$1"
done
kill -STOP $pid
"""

_UNMOUNT = {"overlay": 'end -R "$1"; end "$3"'}

# A watch of the host that another test runs may have a file open for a moment.
_END = """
end() {
    for _ in $(seq 100); do
        if umount "$@" 2>/dev/null; then return; fi
        sleep 0.1
    done
    umount "$@"
}
"""

_NAMESPACE = f"""
set -eu
{_END}
%(mount)s
"$1/app/bin/hot" spin & spin=$!
"$1/app/bin/hot" stuck & stuck=$!
echo "pid $spin $stuck"
read -r _ || :
kill -9 $spin $stuck 2>/dev/null || : # a test may have been faster
wait $spin $stuck || :
%(unmount)s
echo destroyed
"""

# crun refuses the hybrid layout of cgroups, so it is shown the unified hierarchy only
_CRUN = f"""
set -eu
{_END}
mount -t tmpfs none "$1"; cp -a "$2/." "$1"
if [ "$(stat -f -c %%T /sys/fs/cgroup)" != cgroup2fs ]; then
    umount -R /sys/fs/cgroup 2>/dev/null || : # not mounted at all, in a bare root
    mount -t cgroup2 none /sys/fs/cgroup
fi
"%(crun)s" --root "$3/state" run --bundle "$3" --pid-file "$3/pid" %(name)s & crun=$!
read -r _ || :
"%(crun)s" --root "$3/state" kill %(name)s KILL
wait $crun || :
rmdir "/sys/fs/cgroup/%(name)s"
end "$1"
echo destroyed
"""


@dataclasses.dataclass
class Container:
    """A running container: ``app`` is the program's directory as its own processes see it."""

    kind: str
    app: str
    spin: int
    stuck: int
    label: str
    _shell: subprocess.Popen[bytes]
    _directory: Path

    def spinning(self) -> list[Argument]:
        """Return a command that lets ``hot spin`` use 0.3 s of a processor, as perf records it."""
        ticks = 3 * os.sysconf("SC_CLK_TCK") // 10
        return [tool("sh"), "-c", _SPINNING, "sh", f"/proc/{self.spin}/stat", str(ticks)]

    def hide_debug(self) -> None:
        """Cover the debug files beside the program: a debugger inside finds none from now on."""
        for part in ("bin", "lib"):
            covered = f"{self.app}/{part}/.debug"
            mount = [tool("mount"), "-t", "tmpfs", "none", covered]
            run([tool("nsenter"), "-t", str(self.stuck), "-m", *mount], check=True)

    def destroy(self) -> None:
        """Kill the processes and destroy the filesystem; fails if any of it survives."""
        if self._shell.stdin is None or self._shell.stdin.closed:
            return
        assert self._shell.stdout is not None
        self._shell.stdin.close()
        lines(self._shell.stdout, lambda got: "destroyed" in got)
        assert self._shell.wait(30) == 0
        for pid in (self.spin, self.stuck):
            assert not Path(f"/proc/{pid}").exists(), f"process {pid} survived"
        # the kernel detaches a loop device after the last close, which udev may delay
        until(lambda: not loop_devices(self._directory), "release of the loop device")
        shutil.rmtree(self._directory)


@contextlib.contextmanager
def container(
    kind: str, program: Program, directory: Path, *, debug: str = "beside"
) -> Iterator[Container]:
    """Start a container of ``kind`` with the program, and destroy it at the end at the latest.

    ``debug`` is where its debug files are, see `Program.install`; those of crun are beside.

    ``directory`` must not exist; it holds the mount point and the image until `destroy`. The
    processes, unless they are crun's, work in the directory above it.
    Skips the test if the kernel has no such filesystem or no loop devices.
    """
    root, content, extra = directory / "root", directory / "content", directory / "extra"
    for part in (root, content, extra):
        part.mkdir(parents=True)
    label = ""
    if kind == "crun":
        name = f"buildidfs{os.getpid()}"
        label = "docker:" + _bundle(name, program, root, content, extra)
        script = _CRUN % {"crun": tool("crun"), "name": name}
    else:
        program.install(content, debug=debug)
        _require_filesystem(kind)
        extra = _image(kind, content, extra)
        unmount = _UNMOUNT.get(kind, 'end -R "$1"')
        script = _NAMESPACE % {"mount": _MOUNT[kind], "unmount": unmount}
    shell = subprocess.Popen(
        [tool("unshare"), "-m", "sh", "-c", script, "sh", root, content, extra],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=directory.parent,
    )
    try:
        assert shell.stdout is not None
        # the shell says which they are, beside them; crun writes it into a file
        number = 2 if kind == "crun" else 3
        got = lines(shell.stdout, lambda seen: seen.count("up") == 2 and len(seen) >= number)
        if kind == "crun":
            # crun writes it when the container runs already
            pid = until(lambda: _text_of(extra / "pid"), "the process ID of the container")
            spin, stuck = _contained(int(pid))
        else:
            pids = re.search(r"^pid (\d+) (\d+)$", "\n".join(got), re.MULTILINE)
            assert pids is not None, got
            spin, stuck = int(pids[1]), int(pids[2])
        os.kill(spin, signal.SIGSTOP)
        assert not is_mountpoint(root), "the filesystem is visible outside its namespace"
        app = "/app" if kind == "crun" else f"{root}/app"
        running = Container(kind, app, spin, stuck, label, shell, directory)
        yield running
        running.destroy()
    finally:
        # after a failure: end of input makes the shell clean up, whatever state it is in
        for pipe in (shell.stdin, shell.stdout):
            if pipe is not None:
                pipe.close()
        shell.wait(30)


def _require_filesystem(kind: str) -> None:
    def known() -> bool:
        return f"\t{kind}\n" in Path("/proc/filesystems").read_text()

    if not known():
        run(["modprobe", "-q", kind]) if shutil.which("modprobe") else None
    if not known():
        pytest.skip(f"this kernel has no {kind}")
    if kind in ("ext4", "xfs", "squashfs") and not Path("/dev/loop-control").exists():
        pytest.skip("this machine has no loop devices")


def _image(kind: str, content: Path, directory: Path) -> Path:
    """Make the file to mount through a loop device; overlay needs a directory instead."""
    image = directory / "image"
    if kind == "squashfs":
        run([tool("mksquashfs"), content, image, "-quiet", "-no-progress"], check=True)
    elif kind in ("ext4", "xfs"):
        with image.open("wb") as file:
            file.truncate(320 << 20)  # mkfs.xfs makes nothing smaller than 300 MiB
        options = ["-F"] if kind == "ext4" else []
        run([tool(f"mkfs.{kind}"), "-q", *options, image], check=True)
    else:
        return directory
    return image


def root_filesystem(program: Program, root: Path) -> None:
    """Make ``root`` a root filesystem with the program, a shell, and what both need to run."""
    program.install(root, debug="system")
    for part in ("bin", "proc", "tmp", "dev"):
        (root / part).mkdir()
    shutil.copy2(tool("busybox"), root / "bin/busybox")
    (root / "bin/sh").symlink_to("busybox")
    needed = run([tool("ldd"), *(binary.compiled for binary in program.binaries)], check=True)
    for library in set(re.findall(r"(/\S+) \(0x", needed.out)):
        if not library.startswith(str(program.lib.compiled.parent)):
            place = root / library[1:]
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, place)


def _bundle(name: str, program: Program, root: Path, content: Path, directory: Path) -> str:
    """Fill a root filesystem and write the OCI configuration; returns the short container ID."""
    root_filesystem(program, content)
    container_id = program.exe.build_id[:32] * 2
    configuration: dict[str, Any] = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/sh", "-c", "/app/bin/hot spin & /app/bin/hot stuck & wait"],
            "env": ["PATH=/bin"],
            "cwd": "/",
        },
        "root": {"path": str(root)},
        "hostname": "vanishing",
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {
            "cgroupsPath": f"/{name}/docker-{container_id}.scope",
            "namespaces": [{"type": name} for name in ("pid", "mount", "ipc", "uts", "network")],
        },
    }
    (directory / "config.json").write_text(json.dumps(configuration))
    return container_id[:12]


def _text_of(path: Path) -> str:
    """What is in a file, which may not be there yet."""
    return path.read_text() if path.exists() else ""


def _contained(init: int) -> tuple[int, int]:
    """The host's process IDs of ``hot spin`` and ``hot stuck`` in the container of ``init``."""
    namespace = os.readlink(f"/proc/{init}/ns/pid")
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        # processes come and go; some are closed even to root
        with contextlib.suppress(OSError):
            if os.readlink(process / "ns/pid") == namespace:
                words = (process / "cmdline").read_bytes().split(b"\0")
                found[words[1]] = int(process.name)
    return found[b"spin"], found[b"stuck"]
