# SPDX-License-Identifier: Apache-2.0
"""The program run with fewer rights: as another user, with fewer capabilities or lower limits."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.support.clients.commands import ROOT
from tests.support.clients.tools import Argument, Result, run, tool
from tests.support.harness.mounts import COMMAND

# What is imported before has not to be readable for the other user: Python may be below /root.
# A process that changes its user is not dumpable, and then its own files in /proc are root's.
_AS_NOBODY = """
import codecs, ctypes, difflib, os, sys
import buildidfs.cli.health, buildidfs.doctor, buildidfs.log, buildidfs.mount.session
import buildidfs.watch.running, buildidfs.cli.history, buildidfs.cli.serve
import buildidfs.catalog.coverage
import buildidfs.cli.service, buildidfs.cli.output, buildidfs.watch.up
import buildidfs.store.store, buildidfs.mount.daemonize
from buildidfs.cli.main import cli, main
codecs.lookup("ascii")
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0
raise SystemExit(main(sys.argv[1:]))
"""


def as_nobody(*arguments: Argument) -> Result:
    """Run the program as a user without any privilege; needs root."""
    return run([sys.executable, "-c", _AS_NOBODY, *arguments], cwd=ROOT)


def without(capabilities: Sequence[str], *arguments: Argument) -> Result:
    """Run the program as root without these capabilities ("sys_ptrace"); needs root."""
    dropped = ",".join(f"-{name}" for name in capabilities)
    argv = [tool("setpriv"), f"--bounding-set={dropped}", *COMMAND, *arguments]
    return run(argv, cwd=ROOT)


def limited(limits: Sequence[str], *arguments: Argument) -> Result:
    """Run the program under limits as prlimit(1) has them (``--nofile=256``)."""
    return run([tool("prlimit"), *limits, *COMMAND, *arguments], cwd=ROOT)


def unshared(options: Sequence[str], *arguments: Argument) -> Result:
    """Run the program in new namespaces, as unshare(1) makes them (``--pid``, ``--fork``)."""
    return run([tool("unshare"), *options, *COMMAND, *arguments], cwd=ROOT)
