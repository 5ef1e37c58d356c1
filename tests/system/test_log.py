# SPDX-License-Identifier: Apache-2.0
"""A capture, a miss, an eviction and a request can be followed from the log alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.clients.tools import run
from tests.support.harness.mounts import COMMAND
from tests.support.harness.waiting import until
from tests.support.harness.watching import watching

if TYPE_CHECKING:
    from tests.support.harness.watching import Watcher

root = pytest.mark.root
PROGRAM = "/bin/true"


def rows(text: str) -> list[dict[str, Any]]:
    """The lines of a log; each must be an object."""
    return [json.loads(line) for line in text.splitlines()]


def steps(text: str, path: object) -> list[str]:
    """The processes and messages about a path, in order of time."""
    found = [each for each in rows(text) if str(path) in each["message"]]
    found.sort(key=lambda each: each["time"])
    return [f"{each['process']}: {each['message']}" for each in found]


def has_steps(text: str, path: object, *wanted: str) -> bool:
    """True if these steps are in the log, in this order."""
    left = iter(steps(text, path))
    return all(any(each in step for step in left) for each in wanted)


def catcher(watcher: Watcher) -> int:
    for pid in watcher.processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == "buildidfs-catch\n":
                return pid
    raise AssertionError("there is no catcher")


def complete(watcher: Watcher) -> str:
    """The log up to its last complete line."""
    return watcher.log.rpartition("\n")[0]


@root
def test_capture_miss_and_eviction_are_followed(tmp_path: Path) -> None:
    store, probe = tmp_path / "store", tmp_path / "probe"
    shutil.copy(PROGRAM, probe)
    gone = tmp_path / "mnt"
    gone.mkdir()
    with watching(store, "--no-scan", "-vv", "--log-format", "json") as watcher:
        subprocess.run([probe], check=True)
        captured = "pinned", "sent", "received", "waits for its copy", "staged", "new bytes"
        until(lambda: has_steps(complete(watcher), probe, *captured), "a capture", 60)
        # The file is gone with its mount namespace before the catcher can look.
        os.kill(catcher(watcher), signal.SIGSTOP)
        script = 'mount -t tmpfs none "$1" && cp /bin/true "$1/lost" && "$1/lost"'
        subprocess.run(["unshare", "-m", "sh", "-c", script, "sh", gone], check=True)
        os.kill(catcher(watcher), signal.SIGCONT)
        missed = "not pinned", "missed, pid", "watch: missed"
        until(lambda: has_steps(complete(watcher), gone / "lost", *missed), "a miss", 60)
    probe.unlink()
    words = "-vv", "--log-format", "json", "prune", "--max-size", "1"
    pruned = run([*COMMAND, "--store", store, *words])  # the index alone takes more
    assert has_steps(pruned.err, probe, ", by max-size"), pruned.err


def test_secrets_of_a_server_are_not_in_the_log(tmp_path: Path) -> None:
    config = tmp_path / "buildidfs.toml"
    config.write_text('[upstream]\nurls = ["http://user:hunter2@127.0.0.1:1/"]\n')
    config.chmod(0o600)
    words = ["--store", tmp_path / "store", "--config", config, "-vv", "fetch", "ab" * 20]
    done = run([*COMMAND, *words], check=False)
    log = done.err
    assert "requested from" in log
    assert "127.0.0.1:1" in log
    assert "hunter2" not in log
