# SPDX-License-Identifier: Apache-2.0
"""What is left of root in a process that became somebody else: nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from buildidfs.linux import credentials, namespaces, procfs
from tests.support.children import needs_root, running
from tests.support.clients import run, tool

pytestmark = needs_root("becomes another user")

_USER = 65534


def in_a_child(what: Callable[[], str]) -> str:
    """What a child process that does this has to say: the result, or the error's name."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                said = what()
            except OSError as error:
                said = errno.errorcode[error.errno or 0]
            os.write(writing, said.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as file:
        said = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return said


def test_ids_groups_and_capabilities() -> None:
    def become() -> str:
        answer = credentials.become(_USER, _USER)
        assert answer == (_USER, _USER)
        # Before anything: /proc shows what it is, and the file is root's, so none may trace it.
        return Path("/proc/self/status").read_text()

    said = dict(line.split(":\t", 1) for line in in_a_child(become).splitlines() if ":\t" in line)
    assert said["Uid"].split() == [str(_USER)] * 4
    assert said["Gid"].split() == [str(_USER)] * 4
    assert said["Groups"].split() == []
    assert said["NoNewPrivs"] == "1"
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(said[name], 16) == 0, name


def test_there_is_no_way_back(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of root's")
    secret.chmod(0o600)
    for attempt in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0])):

        def become(attempt: Callable[[], None] = attempt) -> str:
            credentials.become(_USER, _USER)
            attempt()
            return "root"

        assert in_a_child(become) == "EPERM"

    def read() -> str:
        credentials.become(_USER, _USER)
        return secret.read_text()

    assert in_a_child(read) == "EACCES"


def test_never_root() -> None:
    assert in_a_child(lambda: str(credentials.become(0, 0))) == "EPERM"
    assert in_a_child(lambda: str(credentials.become(0, _USER))) == "EPERM"


@pytest.fixture
def user() -> list[str | Path]:
    """The words that make a user namespace in which nobody is root, and run ``cat`` there."""
    nobody = [tool("setpriv"), f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"]
    words = [*nobody, tool("unshare"), "-U", "-r"]
    if run([*words, tool("true")]).rc != 0:
        pytest.skip("this machine does not let users make user namespaces")
    return [*words, tool("cat")]


def test_ids_of_a_user_namespace(user: list[str | Path]) -> None:
    with running(user) as child:
        pid_fd = procfs.open_pid(child.pid)
        (namespace,) = namespaces.foreign_users(pid_fd)
        os.close(pid_fd)

        def become() -> str:
            answer = credentials.become(0, 0, namespace)
            return f"{answer} {os.getresuid()} {procfs_capabilities()}"

        said = in_a_child(become)
        unknown = in_a_child(lambda: str(credentials.become(1234, 0, namespace)))
        os.close(namespace)
    assert said == f"{(_USER, _USER)} (0, 0, 0) 0000000000000000"
    assert unknown == "EINVAL"


def procfs_capabilities() -> str:
    """What we may now, in our user namespace."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (said,) = [line.split()[1] for line in lines if line.startswith("CapEff:")]
    return said


def test_root_in_disguise_is_root() -> None:
    """A user namespace may well have root in it, under whatever number."""
    with running(
        [tool("unshare"), "-U", "--map-user=1000", "--map-group=1000", tool("cat")]
    ) as child:
        pid_fd = procfs.open_pid(child.pid)
        (namespace,) = namespaces.foreign_users(pid_fd)
        os.close(pid_fd)
        said = in_a_child(lambda: str(credentials.become(1000, 1000, namespace)))
        os.close(namespace)
    assert said == "EPERM"
