# SPDX-License-Identifier: Apache-2.0
"""Small processes to look at from outside: known to be running, and gone when the block ends.

Each is a ``cat`` that waits for its input. It has answered once before the test gets it, so its
executable and its libraries are mapped, and no test needs to wait. `end_others` is for those that a
failed test leaves.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.clients.tools import tool
from tests.support.harness.waiting import lines

_AS_ROOT = os.geteuid() == 0

# $1 is a directory, $2 a type of filesystem, $3 its options, $4 what to mount, $5 the program
_PRIVATE = """
set -eu
mount -t "$2" -o "$3" "$4" "$1"
test -e "$1/cat" || cp "$5" "$1/cat"
exec "$1/cat"
"""


def needs_root(reason: str) -> pytest.MarkDecorator:
    """Mark a test as one for root, with the reason shown when it is skipped."""
    return pytest.mark.skipif(not _AS_ROOT, reason=f"needs root: {reason}")


def pids() -> set[int]:
    """The process IDs of all children of this process, also of those that nobody waited for."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found.update(map(int, (thread / "children").read_text().split()))
    return found


def end_others(kept: set[int]) -> None:
    """Kill the children whose process IDs are not in ``kept``, and close their pipes.

    For a test that failed before it did so. Otherwise its children would take the processor from
    the tests that follow, and one of these would fail for the `ResourceWarning` that comes when the
    objects are freed.
    """
    for each in gc.get_objects():
        if isinstance(each, subprocess.Popen) and each.pid not in kept:
            if each.returncode is None:
                each.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    each.wait(30)
            for stream in (each.stdin, each.stdout, each.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()


def cat_program() -> Path:
    """The path of a cat that is a program of its own (not a link to busybox)."""
    return Path(tool("cat")).resolve()


@contextlib.contextmanager
def running(argv: Sequence[str | os.PathLike[str]]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that ends up as ``cat`` until the block ends."""
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(b"there?\n")
            child.stdin.flush()
            assert lines(child.stdout, lambda got: len(got) == 1) == ["there?"]
            yield child
        finally:
            child.kill()


@contextlib.contextmanager
def copied_cat(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a copy of ``cat`` made at ``path``, which the test may then delete or replace."""
    shutil.copy(cat_program(), path)
    with running([path]) as child:
        yield child


@contextlib.contextmanager
def private_cat(
    directory: Path, fstype: str = "tmpfs", options: str = "defaults", device: str = "none"
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``directory/cat`` on a filesystem that only its own mount namespace has.

    The namespace and with it the filesystem are gone at the end of the block. Needs root.
    """
    with running(
        [tool("unshare"), "-m", "sh", "-c", _PRIVATE, "sh",
         directory, fstype, options, device, cat_program()]
    ) as child:  # fmt: skip
        yield child
