# SPDX-License-Identifier: Apache-2.0
"""What a confined program may do: read what it was given, and nothing else."""

from __future__ import annotations

import os
import subprocess

import pytest

from buildidfs.linux import confinement
from tests.support.clients import tool

LIMITS = confinement.Limits(memory=64 << 20, addresses=4 << 30, seconds=1)


def confined(script: str, limits: confinement.Limits = LIMITS) -> subprocess.CompletedProcess[str]:
    """A shell script, run as what reads hostile files is."""
    parent = os.getpid()
    return subprocess.run(
        [tool("sh"), "-c", script],
        preexec_fn=lambda: confinement.confine(parent, limits),
        capture_output=True, text=True, check=False, timeout=60, env={"PATH": os.defpath}, cwd="/",
    )  # fmt: skip


def test_nothing_of_root_is_left() -> None:
    status = dict(
        line.split(":\t", 1) for line in confined("cat /proc/self/status").stdout.splitlines()
    )
    uid = confinement.unprivileged()[0]
    assert status["Uid"].split() == [str(uid)] * 4
    assert status["NoNewPrivs"] == "1"
    assert uid != 0
    if os.geteuid() == 0:
        assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
        assert status["Groups"].strip() == ""


@pytest.mark.root
def test_no_network() -> None:
    done = confined("cat /proc/self/net/dev; readlink /proc/self/ns/net")
    assert [line.split()[0] for line in done.stdout.splitlines()[2:-1]] == ["lo:"]
    assert done.stdout.splitlines()[-1] != os.readlink("/proc/self/ns/net")


def test_limits() -> None:
    limits = confined("cat /proc/self/limits").stdout
    found = {line[:26].strip(): line[26:].split()[:2] for line in limits.splitlines()}
    assert found["Max data size"] == [str(64 << 20)] * 2
    assert found["Max address space"] == [str(4 << 30)] * 2
    assert found["Max cpu time"] == ["1", "1"]
    assert found["Max file size"] == found["Max core file size"] == ["0", "0"]


def test_endless_work_ends() -> None:
    assert confined("while :; do :; done").returncode < 0


def test_it_ends_with_its_parent() -> None:
    """A parent that is gone already."""
    done = subprocess.run(
        [tool("sleep"), "60"],
        preexec_fn=lambda: confinement.confine(1 if os.getppid() != 1 else 2, LIMITS),
        check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == -9
