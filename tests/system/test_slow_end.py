# SPDX-License-Identifier: Apache-2.0
"""A watch whose disk does not finish a commit ends all the same, and names what it has lost."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from buildidfs.watch.daemon import UNCOMMITTED
from tests.support.clients.commands import ROOT
from tests.support.clients.tools import run, tool
from tests.support.harness.mounts import COMMAND
from tests.support.harness.waiting import until
from tests.support.harness.watching import watching

pytestmark = [pytest.mark.root, pytest.mark.host]

_SLOW_SYNC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

static void wait_while_slow(void)
{
    while (!access(getenv("SLOW_WHILE"), F_OK))
        usleep(10000);
}

int fsync(int fd)
{
    wait_while_slow();
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}

int fdatasync(int fd)
{
    wait_while_slow();
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
"""


def test_watch_ends_in_time_and_names_uncommitted_files(directory: Path) -> None:
    source, library, slow = directory / "sync.c", directory / "sync.so", directory / "slow"
    source.write_text(_SLOW_SYNC)
    run([tool("gcc"), "-shared", "-fPIC", "-o", library, source], check=True)
    store, program = directory / "store", directory / "program"
    words = [tool("env"), f"LD_PRELOAD={library}", f"SLOW_WHILE={slow}", *COMMAND]
    shutil.copy(tool("cat"), program)
    with watching(store, "--no-scan", command=words, code=3) as watcher:
        slow.touch()
        run([program, "/dev/null"], check=True)
        until(lambda: watcher.facts.get("waiting"), "the file that waits")
        watcher.stop(signal.SIGTERM)
    assert "ending without the commit" in watcher.log
    listed = run([*COMMAND, "--store", store, "journal", "--lost", "--json"], cwd=ROOT, check=True)
    rows = [json.loads(line) for line in listed.out.splitlines()]
    assert [row["lost"] for row in rows if row["path"] == str(program)] == [UNCOMMITTED]
