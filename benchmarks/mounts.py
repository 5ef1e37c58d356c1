# SPDX-License-Identifier: Apache-2.0
"""The filesystems that are compared: the C example of libfuse, the product, and a slow one.

Each is a context manager around a server of its own on a fresh mount point, because a new mount
is the one cold reset that touches nothing else: no name, attribute or page of it is cached, while
the files below it stay in the page cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bench import HERE, REPOSITORY, Bench, Unusable, compile_c, run, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_EXAMPLE = "usr/share/doc/libfuse3-dev/examples/passthrough_ll.c"
_STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Mounted:
    """A mounted filesystem and the process that serves it."""

    root: Path
    pid: int

    def reads(self) -> int:
        """How many read system calls the server has made: at least one for each request."""
        for line in Path(f"/proc/{self.pid}/io").read_text().splitlines():
            if line.startswith("syscr:"):
                return int(line.split()[1])
        raise Unusable("/proc/PID/io does not count system calls (CONFIG_TASK_XACCT)")

    @property
    def read_ahead(self) -> Path:
        """The kernel's read-ahead setting of this mount, in KiB."""
        device = os.stat(self.root).st_dev
        return Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")


@contextmanager
def _serve(bench: Bench, command: Sequence[str | Path], name: str) -> Iterator[Mounted]:
    words = [str(word) for word in command]
    with bench.scratch(f"mnt-{name}") as directory:
        mount_point = directory / "mnt"
        mount_point.mkdir()
        log = directory / "log"
        with log.open("wb") as output:
            server = subprocess.Popen(
                [*words, str(mount_point)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
            )
        try:
            wait_until(lambda: _is_up(server, words, mount_point, log), f"mounting {name}", 120)
            yield Mounted(mount_point, server.pid)
        finally:
            _stop(server, mount_point)


def _is_up(
    server: subprocess.Popen[bytes], command: list[str], mount_point: Path, log: Path
) -> bool:
    if server.poll() is not None:
        raise RuntimeError(
            f"{' '.join(command)} ended with {server.returncode}: "
            f"{log.read_text(errors='replace').strip()[-400:]}"
        )
    return os.path.ismount(mount_point)


def _stop(server: subprocess.Popen[bytes], mount_point: Path) -> None:
    """Unmount; what does not end by itself is killed, so that nothing outlives the benchmark."""
    unmounted = subprocess.run(["umount", mount_point], capture_output=True, check=False)
    if unmounted.returncode:
        server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(_STOP_SECONDS)
    if server.poll() is None:
        server.kill()
        server.wait()
    if os.path.ismount(mount_point) or _is_dead_mount(mount_point):
        subprocess.run(["umount", "-l", mount_point], capture_output=True, check=False)


def _is_dead_mount(mount_point: Path) -> bool:
    try:
        os.stat(mount_point)
    except OSError:
        return True
    return False


def _baseline(bench: Bench) -> Path:
    source = Path("/") / _EXAMPLE
    if not source.exists():
        # Minimal images install packages without /usr/share/doc: take it from the package itself.
        unpacked = bench.workdir / "libfuse3-dev"
        source = unpacked / _EXAMPLE
        if not source.exists():
            unpacked.mkdir()
            run(["apt-get", "download", "-q", "libfuse3-dev"], cwd=unpacked)
            run(["dpkg-deb", "-x", *unpacked.glob("*.deb"), unpacked])
    flags = run(["pkg-config", "--cflags", "--libs", "fuse3"]).decode().split()
    return compile_c(source, bench.workdir / "passthrough_ll", flags)


@contextmanager
def passthrough(bench: Bench, source: Path, *, read_ahead_kb: int = 0) -> Iterator[Mounted]:
    """``source`` behind the C example passthrough_ll of libfuse, single-threaded, all cached."""
    options = f"source={source},cache=always,timeout=86400"
    command = bench.pinned(_baseline(bench), "-f", "-s", "-o", options)
    with _serve(bench, command, "c") as mounted:
        if read_ahead_kb:
            mounted.read_ahead.write_text(str(read_ahead_kb))
        yield mounted


def buildidfs(store: Path, *arguments: str | Path) -> list[str | Path]:
    """The command line of the product, run by this interpreter."""
    return [Path(sys.executable).with_name("buildidfs"), "--store", store, *arguments]


@contextmanager
def product(bench: Bench, store: Path, *, pinned: bool = True) -> Iterator[Mounted]:
    """``store`` mounted by the product with its defaults."""
    command = [*map(str, buildidfs(store, "mount", "--foreground"))]
    with _serve(bench, bench.pinned(*command) if pinned else command, "product") as mounted:
        yield mounted


@contextmanager
def slow(bench: Bench, source: Path, delay: float) -> Iterator[Mounted]:
    """The files of ``source``, each read of which takes ``delay`` seconds. Not pinned."""
    command = [sys.executable, str(HERE / "slowfs.py"), str(source), str(delay)]
    with _serve(bench, command, "slow") as mounted:
        yield mounted


@contextmanager
def bound(source: Path, target: Path) -> Iterator[None]:
    """``target`` replaced by ``source`` through a bind mount."""
    run(["mount", "--bind", source, target])
    try:
        yield
    finally:
        run(["umount", "-l", target])
