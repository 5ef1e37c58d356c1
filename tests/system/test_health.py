# SPDX-License-Identifier: Apache-2.0
"""status, report, page, API, metrics and readiness agree on the health of a watch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from buildidfs.config import Settings
from buildidfs.serve.page import api, overview
from buildidfs.store import Store
from buildidfs.store.run_files import present
from buildidfs.watch import metrics
from tests.support.clients.tools import run, tool
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from buildidfs.answers import Overview
    from tests.support.harness.mounts import BuildIdFs

FOLLOWING = {"mode": "following", "degraded": [], "losses": [], "captured": 7}
LOSS = {"reason": "not copied within 30 s", "container": "docker:ab", "count": 3, "recent": 3}
STATES: dict[str, tuple[dict[str, Any] | None, int | None, str, str]] = {
    # facts of the watch, a signal for it, the verdict, the mode
    "starting": ({"mode": "starting"}, None, "degraded", "starting"),
    "following": (FOLLOWING, None, "healthy", "following"),
    "losing": ({**FOLLOWING, "losses": [LOSS]}, None, "losing", "following"),
    "stopped": (FOLLOWING, signal.SIGSTOP, "down", "stopped"),
    "killed": (FOLLOWING, signal.SIGKILL, "down", "not running"),
    "no watch": (None, None, "down", "not running"),
}
EXIT = {"healthy": 0, "degraded": 4, "losing": 5, "down": 3}

PROGRAM = """
import json, sys, time
from buildidfs.store.run_files import Presence
with Presence(sys.argv[1], "watch", told=time.monotonic(), **json.loads(sys.argv[2])):
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def watch_in(root: Path, facts: dict[str, Any] | None, number: int | None) -> Iterator[None]:
    """A process that reports the facts of a watch, and gets a signal."""
    if facts is None:
        yield
        return
    words = [sys.executable, "-c", PROGRAM, root, json.dumps(facts)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            if number is not None:
                process.send_signal(number)
            if number == signal.SIGSTOP:
                os.waitpid(process.pid, os.WUNTRACED)
            elif number == signal.SIGKILL:
                process.wait()
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("state", STATES)
def test_all_views_agree_on_the_health(buildidfs: BuildIdFs, state: str) -> None:
    facts, number, verdict, mode = STATES[state]
    Store.create(buildidfs.store).close()
    with watch_in(buildidfs.store, facts, number):
        status = buildidfs("status", "--json", check=False)
        readiness = buildidfs("-q", "status", check=False)
        report = buildidfs("report").out
        with Store.open(buildidfs.store) as store:
            taken: Overview = overview.take(store, Settings(), None)
            page = overview.as_html(taken).decode()
            answer = json.loads(api.encode(taken))["health"]
            exported = metrics.of_store(store, Settings().retention).decode()
    found = json.loads(status.out)
    assert found["verdict"] == verdict
    assert status.rc == readiness.rc == EXIT[verdict]
    assert f"capture {verdict}: watch {mode}" in report
    assert (answer["verdict"], answer["mode"]) == (verdict, mode)
    assert len(answer["findings"]) == len(found["findings"])
    assert f">{verdict}</span> watch {mode}" in page
    assert f'buildidfs_health{{verdict="{verdict}"}} 1.0' in exported
    assert exported.count("buildidfs_health{") == 4
    if facts == FOLLOWING and number is None:
        assert "7 captured" in report
        assert answer["captured"] == 7
    assert "1970" not in report + page


def test_health_of_the_page_names_no_container(buildidfs: BuildIdFs) -> None:
    Store.create(buildidfs.store).close()
    with watch_in(buildidfs.store, {**FOLLOWING, "losses": [LOSS]}, None):
        assert "docker:ab" in buildidfs("status", check=False).out
        assert "docker:ab" not in buildidfs("report").out


def test_watch_whose_report_cannot_be_read_is_starting(buildidfs: BuildIdFs) -> None:
    Store.create(buildidfs.store).close()
    with watch_in(buildidfs.store, FOLLOWING, None):
        (there,) = present(buildidfs.store)
        with open(there.file, "r+b") as file:  # torn by a write
            file.truncate(40)
        out = buildidfs("report").out
    assert "capture degraded: watch starting" in out
    assert "1970" not in out


def test_status_shows_the_limits_of_the_running_watch(buildidfs: BuildIdFs, tmp_path: Path) -> None:
    Store.create(buildidfs.store).close()
    limits = {"max_size": 2 << 30, "keep_free": 0, "max_age": None, "min_age": 0}
    config = tmp_path / "buildidfs.toml"
    config.write_text('[retention]\nmax-size = "3GiB"\nkeep-free = "0"\n')
    with watch_in(buildidfs.store, {**FOLLOWING, "limits": limits}, None):
        found = json.loads(buildidfs("--config", config, "status", "--json").out)
        text = buildidfs("--config", config, "status").out
    assert (found["max_size"], found["configured"]["max_size"]) == (2 << 30, 3 << 30)
    assert "keeps 2.0 GiB at most;" in text
    assert "the settings say 3.0 GiB at most: takes effect after" in text
    text = buildidfs("--config", config, "status", check=False).out
    assert "keeps 3.0 GiB at most;" in text
    assert "takes effect" not in text


@pytest.mark.fuse
def test_dead_mount_beside_a_watch_is_down(buildidfs: BuildIdFs, tmp_path: Path) -> None:
    Store.create(buildidfs.store).close()
    point = tmp_path / "mount"
    point.mkdir()
    buildidfs("mount", point)
    (mount,) = present(buildidfs.store, "mount")
    with contextlib.ExitStack() as stack:
        stack.callback(run, [tool("umount"), "-l", point])
        stack.enter_context(watch_in(buildidfs.store, FOLLOWING, None))
        assert buildidfs("status").rc == 0
        os.kill(mount.pid, signal.SIGKILL)
        until(lambda: not present(buildidfs.store, "mount"), 10)
        dead = buildidfs("status", check=False)
        assert dead.rc == EXIT["down"]
        assert f"the mount at {point} is dead" in dead.out
        assert "capture down" in buildidfs("report").out
        buildidfs("unmount", point)
        assert buildidfs("status").rc == 0
