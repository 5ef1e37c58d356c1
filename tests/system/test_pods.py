# SPDX-License-Identifier: Apache-2.0
"""buildidfs in a container: with the host's PID namespace it sees the host, without it says so."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from buildidfs.linux import machine
from buildidfs.linux.credentials import effective_capabilities
from buildidfs.store import Store
from tests.support.clients.commands import ROOT
from tests.support.clients.tools import Argument, Result, run, tool
from tests.support.containers.pods import NAME, in_pod
from tests.support.harness.children import copied_cat
from tests.support.harness.mounts import COMMAND
from tests.support.harness.waiting import until
from tests.support.harness.watching import watching

pytestmark = [pytest.mark.root, pytest.mark.host]

UNSEEN = "only the processes of this PID namespace are seen"


def _script(store: Path, *commands: str) -> list[Argument]:
    """A shell that runs commands of buildidfs on a store one by one, and prints how each ended."""
    start = shlex.join([*COMMAND, "--store", str(store)])
    lines = [f"{start} {command}; echo code $?" for command in commands]
    return [tool("sh"), "-c", "\n".join(lines)]


def _confined(*words: Argument) -> Result:
    """Run a command in a PID namespace of its own."""
    return run([tool("unshare"), "--pid", "--fork", "--mount-proc", *words], cwd=ROOT, timeout=120)


def _codes(done: Result) -> list[int]:
    return [int(line[5:]) for line in done.out.splitlines() if line.startswith("code ")]


def _which(store: Path, path: Path) -> list[dict[str, Any]]:
    done = run(
        [*COMMAND, "--store", store, "which", "--json", "--glob", f"*{path.name}"],
        cwd=ROOT,
    )
    return [json.loads(line) for line in done.out.splitlines()]


def test_up_in_another_pid_namespace_says_what_it_does_not_see(directory: Path) -> None:
    store = directory / "store"
    log = directory / "log"
    commands = f"up --no-mount --log {log}", "status", "scan proc", "coverage --live", "down"
    done = _confined(*_script(store, *commands))
    assert _codes(done) == [3, 4, 3, 3, 0], done
    assert "in this PID namespace only" in done.out
    assert f"buildidfs: {UNSEEN}" in done.err
    assert "--pid=host" in done.err
    assert f"degraded {UNSEEN}" in done.out
    (status,) = [line for line in done.out.splitlines() if line.startswith("watch ")]
    assert "following this PID namespace only" in status
    assert UNSEEN in log.read_text()


@pytest.mark.watch
def test_watch_in_another_pid_namespace_follows_what_is_there(directory: Path) -> None:
    """Processes outside, of which the kernel tells without a number, are not taken for missed."""
    apart = [tool("unshare"), "--pid", "--fork", "--mount-proc", *COMMAND]
    store, outside, inside = directory / "store", directory / "outside", directory / "inside"
    with watching(store, "--json", "--no-scan", command=apart, code=3) as watcher:
        child = watcher.processes()[1]
        for path, enter in ((outside, []), (inside, [tool("nsenter"), "-t", str(child), "-p"])):
            shutil.copy(tool("cat"), path)
            run([*enter, path, "/dev/null"], check=True)
        until(lambda: _seen(watcher.events, inside), "the capture")
        os.kill(child, signal.SIGTERM)
    assert UNSEEN in watcher.log
    last = watcher.events[-1]
    assert (last["event"], last["mode"], last["missed"]) == ("stopped", "confined", 0)
    assert [row["held"] for row in _which(store, inside)] == [True]
    assert _which(store, outside) == []


def _seen(events: list[dict[str, Any]], path: Path) -> bool:
    return any(each.get("path") == str(path) for each in events)


def test_proc_of_another_pid_namespace_is_refused(directory: Path) -> None:
    words = [*COMMAND, "--store", directory / "store", "watch"]
    done = run([tool("unshare"), "--pid", "--fork", *words], cwd=ROOT)
    assert done.rc == 60, done
    assert "/proc shows the processes of another PID namespace" in done.err
    assert "mount -t proc" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ("", {}, machine.host_name()),
        ("", {"NODE_NAME": "node-1"}, "node-1"),
        ("--hostname node-2", {"NODE_NAME": "node-1"}, "node-2"),
    ],
)
def test_pod_with_the_pids_of_the_host_captures_the_host(
    directory: Path, words: str, environ: dict[str, str], expected: str
) -> None:
    store = directory / "store"
    with copied_cat(directory / "program") as running:
        scan = _script(store, f"{words} scan proc --pid {running.pid}", "doctor")
        done = in_pod(directory / "pod", scan, host_pid=True, environ=environ)
    assert _codes(done)[0] == 0, done
    assert "all processes are seen" in done.out
    (row,) = _which(store, directory / "program")
    assert row["host"] == expected
    assert row["container"] == ""


def test_pod_without_them_says_so_and_has_its_own_name(directory: Path) -> None:
    store = directory / "store"
    done = in_pod(directory / "pod", _script(store, "scan proc"), host_pid=False)
    assert _codes(done) == [3], done
    assert UNSEEN in done.err
    python = Path(sys.executable).resolve()
    assert {row["host"] for row in _which(store, python)} == {NAME}


# $1: work directory, $2: OCI runtime, $3: the directories of Python and of this checkout.
# The image is the host's own /usr, for there is no registry to have one from. crun refuses the
# hybrid layout of cgroups, so the engine is shown the unified hierarchy only.
_PODMAN = """
set -eu
mount --make-rprivate /
if [ "$(stat -f -c %T /sys/fs/cgroup)" != cgroup2fs ]; then
    umount -R /sys/fs/cgroup 2>/dev/null || :
    mount -t cgroup2 none /sys/fs/cgroup
fi
for each in /var/lib/containers /run/containers /run/libpod; do
    mkdir -p "$each"
    mount -t tmpfs none "$each"
done
cd "$1"
mkdir -p mnt store image/usr image/etc image/tmp image/var/lib image/buildid
for each in bin sbin lib lib64; do ln -s "usr/$each" "image/$each"; done
mount --bind mnt mnt && mount --make-shared mnt
podman="podman --cgroup-manager cgroupfs --storage-driver vfs --runtime $2"
trap '$podman rm -f -t 30 buildidfs >/dev/null' EXIT
limits="--ulimit nofile=1024:1024 --ulimit nproc=1024:1024 --net=host"
paths="-v /usr:/usr:ro -v /etc:/etc:ro"
for each in $3; do paths="$paths -v $each:$each:ro"; done
@RUN@
mounted() {
    # The name alone may be one that the kernel remembers of a dead mount.
    for _ in $(seq 300); do cat mnt/mnt/README >/dev/null 2>&1 && break; sleep 0.1; done
    cat mnt/mnt/README >/dev/null
}
mounted
# The mount is there before the watch follows.
for _ in $(seq 300); do
    status=$(@EXEC@ || :)
    case "$status" in *": following, mounted at "*) break ;; esac
    sleep 0.1
done
echo "$status" | sed 's/^/inside: /'
# The watch follows before its first scan ends.
for _ in $(seq 300); do
    [ "$(ls mnt/mnt | grep -cxE '[0-9a-f]{40}')" -gt 10 ] && break
    sleep 0.1
done
kill -9 $(ls store/run | sed -n 's/^[a-z]*-\\([0-9]*\\).*json$/\\1/p')
$podman wait buildidfs >/dev/null
if ls mnt/mnt 2>/dev/null; then exit 9; fi
$podman start buildidfs >/dev/null
mounted
$podman stop -t 30 buildidfs >/dev/null
[ ! -e mnt/mnt/README ]
"""


@pytest.mark.watch
@pytest.mark.fuse
def test_container_of_the_readme_captures_the_host(directory: Path) -> None:
    """The commands of docs/install.md, with an image that is made of this host.

    After it was killed, another container takes its mount away, on the host as well.
    """
    text = (ROOT / "docs/install.md").read_text().replace("\\\n", " ")
    (start,) = re.findall(r"^    (podman run .*)$", text, re.MULTILINE)
    (status,) = re.findall(r"^    (podman exec [^#\n]*?) *(?:#.*)?$", text, re.MULTILINE)
    command = shlex.join([*COMMAND])
    start = start.replace("podman run", "$podman run $limits $paths").replace(
        "/var/lib/buildidfs:", f"{directory}/store:"
    )
    start = start.replace("/buildid:/buildid:", f"{directory}/mnt:/buildid:")
    start = start.replace("localhost/buildidfs buildidfs", f"--rootfs {directory}/image {command}")
    if "CAP_SYS_RESOURCE" not in effective_capabilities():
        # For a filter of devices, crun raises the limit of locked memory.
        start = start.replace("--device /dev/fuse", "--privileged")
    status = status.replace("podman", "$podman").replace(" buildidfs status", f" {command} status")
    with_it = _PODMAN.replace("@RUN@", start).replace("@EXEC@", status)
    places = dict.fromkeys([sys.prefix, sys.base_prefix, str(ROOT)])
    words = [tool("sh"), "-c", with_it, "sh", directory, "crun", " ".join(places)]
    done = run([tool("unshare"), "-m", *words], cwd=ROOT, timeout=120)
    assert done.rc == 0, done
    # The verdict is of the host, on which other tests run.
    assert re.search(r"inside: \w+: following, mounted at /buildid/mnt", done.out), done
    with Store.open(directory / "store", read_only=True) as store:
        assert store.stats().ids > 10


def test_pod_looks_for_engines_on_the_host(directory: Path) -> None:
    look = """
from buildidfs.capture.origin import container_names
print(*map(bytes.decode, container_names._own_roots()))
"""
    words = [*COMMAND[:1], "-c", look]
    done = in_pod(directory / "pod", words, host_pid=True)
    assert done.out.split() in (["/", "/proc/1/root"], ["/", "/proc/2/root"]), done
    done = in_pod(directory / "pod2", words, host_pid=False)
    assert done.out.split() == ["/"], done
