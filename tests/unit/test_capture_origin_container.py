# SPDX-License-Identifier: Apache-2.0
"""Which processes are in a container, and what it is called."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.origin import builder
from buildidfs.errors import UsageError
from buildidfs.linux import namespaces, procfs
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import NamespaceSet

HOST = NamespaceSet(net=1, uts=2, ipc=3, pid=4, user=5, mnt=6, cgroup=7)


@pytest.mark.parametrize(
    ("its", "names", "expected"),
    [
        (NamespaceSet(net=1, mnt=60), ("mnt",), True),
        (NamespaceSet(net=1, mnt=6), ("mnt",), False),
        # Every one that is named has to differ.
        (NamespaceSet(net=10, mnt=60), ("mnt", "net"), True),
        (NamespaceSet(net=1, mnt=60), ("mnt", "net"), False),
        # What is not known proves nothing.
        (NamespaceSet(), ("mnt",), False),
    ],
)
def test_contained_by_namespaces(its: NamespaceSet, names: tuple[str, ...], expected: bool) -> None:
    assert builder.in_container(builder.apart(its, HOST), names) is expected


def test_unknown_host_contains_nothing() -> None:
    assert builder.apart(NamespaceSet(mnt=60), NamespaceSet()) == 0


def test_label_falls_back_to_the_namespace() -> None:
    cgroup = b"/system.slice/docker-" + b"0123456789abcdef" * 4 + b".scope"
    assert builder.label(cgroup, NamespaceSet(mnt=60)) == "docker:0123456789ab"
    assert builder.label(b"/user.slice", NamespaceSet(mnt=60)) == "mnt:60"


LABELS = {"docker:0123456789ab", "docker:0199999999aa", "podman:0123456789ab", "nspawn:web"}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("docker:0123456789ab", "docker:0123456789ab"),
        ("docker:0123", "docker:0123456789ab"),
        ("0199", "docker:0199999999aa"),
        ("0199999999aa" + "0" * 52, "docker:0199999999aa"),
        ("we", "nspawn:web"),
    ],
)
def test_beginning_of_an_id_is_enough(given: str, meant: str) -> None:
    assert builder.choose([given], LABELS) == {meant}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("01", "several containers"),
        ("0123456789ab", "several containers"),
        ("docker:", "no container"),
        ("", "no container"),
        ("dock", "no container"),
        ("0199999999aa00", "no container"),
        ("ffff", "running: docker:0123456789ab"),
    ],
)
def test_name_of_no_or_several_containers_is_refused(given: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        builder.choose([given], LABELS)


def test_exact_label_wins_over_longer_ones() -> None:
    assert builder.choose(["nspawn:a"], {"nspawn:a", "nspawn:ab"}) == {"nspawn:a"}


def test_none_running_is_said() -> None:
    with pytest.raises(UsageError, match="none is running"):
        builder.choose(["x"], set())


def test_apart_has_a_bit_for_each_namespace_that_is_not_the_hosts() -> None:
    its = NamespaceSet(net=10, uts=2, ipc=0, pid=40, user=5, mnt=60, cgroup=7)
    bits = builder.apart(its, HOST)
    assert bits == 1 << 0 | 1 << 3 | 1 << 5
    assert builder.apart_names(bits) == ["net", "pid", "mnt"]
    assert builder.apart(HOST, HOST) == builder.apart(its, NamespaceSet()) == 0
    assert builder.apart_names(builder.apart(NamespaceSet(*range(20, 27)), HOST)) == list(
        NamespaceSet.__struct_fields__
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["mnt"], "mnt:60"),
        (["pid", "mnt"], "mnt:60"),
        (["pid"], "pid:40"),
        (["pid", "net"], "pid:40"),
        (["uts"], ""),
        (["mnt", "uts"], ""),
    ],
)
def test_label_by_another_definition(names: list[str], expected: str) -> None:
    its = NamespaceSet(net=10, uts=2, ipc=3, pid=40, user=5, mnt=60, cgroup=7)
    bits = builder.apart(its, HOST)
    assert builder.label_by(b"/user.slice", its, bits, names) == expected
    docker = b"/docker/" + b"0123456789abcdef" * 4
    named = "docker:0123456789ab" if expected else ""
    assert builder.label_by(docker, its, bits, names) == named


# --- owners --------------------------------------------------------------------------------------

VICTIM = "0f5c3e8d1b2a" + "0" * 52
SCOPE = f"docker-{VICTIM}.scope"
USER = 4242


@pytest.fixture
def delegated() -> Iterator[Path]:
    """A control group of a user."""
    found = namespaces._cgroup_hierarchy()
    assert found is not None
    group = Path(os.fsdecode(found[0]), f"buildidfs-{secrets.token_hex(4)}")
    group.mkdir()
    os.chown(group, USER, USER)
    yield group
    for each in group.iterdir():
        if each.is_dir():
            each.rmdir()
    group.rmdir()


@pytest.mark.root
@pytest.mark.host
def test_control_group_of_a_user_is_no_container_of_root(delegated: Path) -> None:
    (delegated / SCOPE).mkdir()
    path = f"/{delegated.name}/{SCOPE}".encode()
    assert builder.group_maker(path) == USER
    assert builder.shown("docker:0f5c3e8d1b2a", path) == f"docker:0f5c3e8d1b2a (user {USER})"
    os.chown(delegated / SCOPE, USER, USER)
    os.chown(delegated, 0, 0)  # as crun does with a container in a user namespace
    assert builder.group_maker(path) == 0
    assert builder.shown("docker:0f5c3e8d1b2a", path) == "docker:0f5c3e8d1b2a"


@pytest.mark.root
def test_owner_is_the_user_who_made_the_outermost_user_namespace() -> None:
    argv = ["unshare", "-Urm", "unshare", "-Urm", "sh", "-c", "echo; exec sleep 60"]
    with subprocess.Popen(argv, user=USER, group=USER, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with closing_fd(procfs.open_pid(process.pid)) as pid_fd:
            its = namespaces.of(pid_fd)
            assert builder.owner(pid_fd, its.user, b"/") == USER
            assert builder.owner(pid_fd, its.user, f"/{SCOPE}".encode()) == 0
        with closing_fd(procfs.open_pid(os.getpid())) as pid_fd:
            assert builder.owner(pid_fd, namespaces.of(pid_fd).user, b"/") == 0
        process.kill()
