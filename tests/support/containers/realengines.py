# SPDX-License-Identifier: Apache-2.0
"""Containers that real engines run: Podman with and without root, Docker, and containerd.

Each engine lives in a mount namespace of its own, in which its directories are on a tmpfs: nothing
of it is left behind, and the engines of the machine see nothing of it. The image has busybox alone.
A shell in the namespace waits on a pipe from the test; when the test says so, or is gone, it ends
what it has started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Any

from tests.support.clients.commands import ROOT
from tests.support.clients.tools import Argument, Result, run, tool
from tests.support.harness.mounts import COMMAND
from tests.support.harness.waiting import lines, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENGINES = ("podman", "rootless", "docker", "containerd")

USER = 42421  # of no one else: all processes of this user are ended
_CGROUP = f"user.slice/user-{USER}.slice/user@{USER}.service/user.slice"

_HIDDEN = (
    "/var/lib/containers", "/run/containers", "/run/libpod", "/var/lib/docker", "/run/docker",
    "/var/lib/containerd", "/run/containerd", "/var/lib/cni",
)  # fmt: skip

# $1 is the directory of the test, then come directories to be covered
_NAMESPACE = """
set -eu
mount --make-rprivate /
work=$1; shift
for each; do mkdir -p "$each"; mount -t tmpfs none "$each"; done
mkdir -p /etc/docker && mount -t tmpfs none /etc/docker
echo "{}" >/etc/docker/daemon.json
echo ready
read -r _ || :
echo gone
"""

# A user with a part of the tree of control groups, as systemd gives it to each. crun and runc
# refuse the hybrid layout without root, so they are shown the unified hierarchy only.
_ROOTLESS = f"""
set -eu
cp /etc/passwd "$1/passwd"
echo "w6:x:{USER}:{USER}::$1/home:/bin/sh" >>"$1/passwd"
echo "w6:300000:65536" >"$1/subuid"
mount --bind "$1/passwd" /etc/passwd
mount --bind "$1/subuid" /etc/subuid
mount --bind "$1/subuid" /etc/subgid
if [ "$(stat -f -c %T /sys/fs/cgroup)" != cgroup2fs ]; then
    umount -R /sys/fs/cgroup 2>/dev/null || :
    mount -t cgroup2 none /sys/fs/cgroup
fi
mkdir -p "$1/home" "$1/run" "/sys/fs/cgroup/{_CGROUP}/app"
chown -R {USER}:{USER} "$1/home" "$1/run" /sys/fs/cgroup/user.slice/user-{USER}.slice/user@*
"""

_LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")  # we may not raise ours


@dataclasses.dataclass
class RealContainer:
    """A container that runs ``busybox``. ``shown`` is what people call it."""

    name: str
    shown: str
    image: str
    pid: int


class RealEngine:
    """One engine in a mount namespace; `inside` runs a command there."""

    def __init__(self, kind: str, directory: Path, holder: int) -> None:
        self.kind = kind
        self._directory = directory
        self._holder = holder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._running: list[int] = []
        self._socket = directory / "engine.sock"

    def inside(self, *words: Argument, check: bool = True) -> Result:
        """Run a command in the mount namespace of the engine."""
        return run(self.entered(*words), check=check, cwd=ROOT)

    def buildidfs(self, store: Path, *words: Argument) -> list[dict[str, Any]]:
        """Run buildidfs there with ``--json``; the objects that it prints."""
        done = self.inside(*COMMAND, "--store", store, *words, "--json", check=False)
        assert done.rc in (0, 3), done  # not all processes can be looked into here
        return [json.loads(line) for line in done.out.splitlines()]

    def start(self) -> None:
        """Start what the engine needs before it can run a container."""
        if self.kind == "docker":
            options = ("--iptables=false", "--bridge=none", "--storage-driver=vfs")
            pidfile = self._directory / "pid"
            self._daemon(tool("dockerd"), "-H", f"unix://{self._socket}", "-p", pidfile, *options)
        elif self.kind == "containerd":
            settings = self._directory / "config.toml"
            settings.write_text(f'version = 2\n[grpc]\naddress = "{self._socket}"\n')
            self._daemon(tool("containerd"), "-c", settings)
        elif self.kind == "rootless":
            self.inside("sh", "-ec", _ROOTLESS, "sh", self._directory)
        tree = self._directory / "tree"
        (tree / "bin").mkdir(parents=True)
        shutil.copy(tool("busybox"), tree / "bin/busybox")
        run([tool("tar"), "-C", tree, "-cf", self._directory / "image.tar", "."], check=True)
        os.chmod(self._directory, 0o755)
        if self.kind != "containerd":
            self._engine("import", self._directory / "image.tar", "shop:1.2")

    def run(self, name: str, *command: str, remove: bool = False) -> RealContainer:
        """Run a container in the background, by default for ten minutes."""
        words = ("/bin/busybox", *(command or ("sleep", "600")))
        if self.kind == "containerd":
            return self._run_in_pod(name, words)
        options: tuple[str, ...] = ("--name", name, "--network", "none")
        options += ("--rm",) * remove
        if self.kind != "docker":
            options += (*_LIMITS, "--pids-limit", "0")
        self._engine("run", "-d", *options, "shop:1.2", *words)
        pid = 0
        if not remove:
            pid = int(self._engine("inspect", "-f", "{{.State.Pid}}", name).out)
            self._running.append(pid)
        image = "shop:1.2" if self.kind == "docker" else "localhost/shop:1.2"
        return RealContainer(name, name, image, pid)

    def remove(self, container: RealContainer) -> None:
        """End a container, and let its engine forget it."""
        self._running.remove(container.pid)
        os.kill(container.pid, signal.SIGKILL)
        until(lambda: not os.path.exists(f"/proc/{container.pid}/exe"), "end of the container")
        if self.kind == "containerd":
            until(
                lambda: self._ctr("tasks", "delete", container.name, check=False).rc == 0,
                "end of the task",
            )
            self._ctr("containers", "delete", container.name)
        else:
            self._engine("rm", "-f", container.name)

    def close(self) -> None:
        """End the containers that still run, and the daemons."""
        for pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(30)

    def _daemon(self, *words: Argument) -> None:
        log = open(self._directory / "daemon.log", "ab")  # noqa: SIM115
        with log:
            self._daemons.append(
                subprocess.Popen(self.entered(*words), stdout=log, stderr=log, cwd="/")
            )
        check = ("version",) if self.kind == "containerd" else ("info",)
        command = self._ctr if self.kind == "containerd" else self._engine
        until(lambda: command(*check, check=False).rc == 0, "an answer of the engine", 60)

    def entered(self, *words: Argument) -> list[Argument]:
        """Return the command that runs a command in the mount namespace of the engine."""
        return [tool("nsenter"), f"--mount=/proc/{self._holder}/ns/mnt", "--", *words]

    def _engine(self, *words: Argument, check: bool = True) -> Result:
        if self.kind == "docker":
            return self.inside(tool("docker"), "-H", f"unix://{self._socket}", *words, check=check)
        options = ["--cgroup-manager", "cgroupfs", "--storage-driver", "vfs", "--runtime", "runc"]
        podman: list[Argument] = [tool("podman"), *options, *words]
        if self.kind == "podman":
            return self.inside(*podman, check=check)
        script = (
            f"echo $$ >/sys/fs/cgroup/{_CGROUP}/app/cgroup.procs; cd {self._directory}/home;"
            f' exec env -i PATH="$PATH" HOME="$PWD" XDG_RUNTIME_DIR={self._directory}/run'
            f' setpriv --reuid {USER} --regid {USER} --clear-groups "$@"'
        )
        return self.inside("sh", "-ec", script, "sh", *podman, check=check)

    def _ctr(self, *words: Argument, check: bool = True) -> Result:
        return self.inside(tool("ctr"), "-a", self._socket, "-n", "k8s.io", *words, check=check)

    def _run_in_pod(self, name: str, words: tuple[str, ...]) -> RealContainer:
        """A container with the annotations that the CRI plugin gives to those of pods."""
        container = (name.encode().hex() * 64)[:64]
        said = {
            "container-name": name, "sandbox-name": "cart-7d9f", "sandbox-namespace": "shop",
            "container-type": "container", "image-name": "docker.io/library/shop:1.2",
        }  # fmt: skip
        notes = [f"--annotation=io.kubernetes.cri.{key}={text}" for key, text in said.items()]
        tree = self._directory / "tree"
        self._ctr("run", "-d", *notes, "--rootfs", tree, container, *words)
        listed = self._ctr("tasks", "ls").out.splitlines()
        pid = next(int(line.split()[1]) for line in listed if line.startswith(container))
        self._running.append(pid)
        return RealContainer(container, f"shop/cart-7d9f/{name}", said["image-name"], pid)


@contextlib.contextmanager
def real_engine(kind: str, directory: Path) -> Iterator[RealEngine]:
    """Start an engine, and end it with all that it has started."""
    directory.mkdir()
    before = _groups()
    holder = subprocess.Popen(
        [tool("unshare"), "-m", "sh", "-c", _NAMESPACE, "sh", directory, *_HIDDEN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    engine = RealEngine(kind, directory, holder.pid)
    try:
        lines(holder.stdout, lambda got: "ready" in got)
        engine.start()
        yield engine
    finally:
        engine.close()
        _end_all(directory, holder.pid)
        holder.stdin.close()
        holder.wait(30)
        holder.stdout.close()
        _remove_groups(before)


def _end_all(directory: Path, holder: int) -> None:
    """End the processes in the namespace, and those of the user."""

    def left() -> list[int]:
        wanted = os.stat(f"/proc/{holder}/ns/mnt").st_ino
        found = []
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                mnt = os.stat(f"/proc/{entry}/ns/mnt").st_ino
                owner = os.stat(f"/proc/{entry}").st_uid
                if int(entry) != holder and (mnt == wanted or owner == USER):
                    found.append(int(entry))
        return found

    for pid in left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not left(), f"end of the processes in {directory}")


def _groups() -> list[str]:
    """All control groups, each behind those in it."""
    return [top for top, _, _ in os.walk("/sys/fs/cgroup", topdown=False)]


def _remove_groups(before: list[str]) -> None:
    """Remove the control groups that an engine has left behind, and not those of others."""
    names = ("libpod_parent", "docker", "k8s.io", "user.slice")
    for path in _groups():
        if path not in before and any(f"/{name}" in path for name in names):
            with contextlib.suppress(OSError):
                os.rmdir(path)
