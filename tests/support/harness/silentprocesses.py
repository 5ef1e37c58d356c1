# SPDX-License-Identifier: Apache-2.0
"""Processes of an unprivileged user whose memory maps are locked until the end of a block.

To look at them with ps or pgrep waits for ever, as reading /proc/PID/cmdline does.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.clients.tools import run, tool
from tests.support.filesystems.userfs import UID
from tests.support.harness.waiting import lines, until

_SOURCE = Path(__file__).with_name("silentprocess.c")
_FUSE_DEVICE = os.makedev(10, 229)


@contextlib.contextmanager
def silent_processes(place: Path, count: int) -> Iterator[list[int]]:
    """Run that many silent processes from a new directory; return their process IDs."""
    place.mkdir()
    place.chmod(0o755)
    directory, program, node = place / "mnt", place / "silentprocess", place / "fuse"
    directory.mkdir()
    directory.chmod(0o777)
    run([tool("gcc"), "-O1", "-pthread", "-o", program, _SOURCE], check=True)
    os.mknod(node, stat.S_IFCHR | 0o666, _FUSE_DEVICE)
    node.chmod(0o666)
    words: list[str | Path] = [
        tool("setpriv"), f"--reuid={UID}", f"--regid={UID}", "--clear-groups",
        program, directory, str(count), "/bin/true", node,
    ]  # fmt: skip
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    with server:
        try:
            assert server.stdout is not None
            told = lines(server.stdout, lambda got: "silent" in got)
            pids = [int(line) for line in told[:-1]]
            until(lambda: all(map(_is_silent, pids)), "the locks")
            yield pids
        finally:
            # Its end closes the filesystem, and so ends the waits; its children are killed with it.
            server.kill()


def _is_silent(pid: int) -> bool:
    """True if the first thread waits for a page in mmap(2)."""
    words = Path(f"/proc/{pid}/syscall").read_text().split()
    return words[0] == "9" and Path(f"/proc/{pid}/wchan").read_text() == "__folio_lock"
