# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.namespaces against the links in /proc, from inside and outside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from buildidfs.formats.container import cgroup
from buildidfs.linux import mounts, namespaces, procfs, syscalls
from buildidfs.model import NamespaceSet
from tests.support.clients.tools import run, tool
from tests.support.harness.children import cat_program, needs_root, private_cat, running

_KINDS = tuple(field.name for field in msgspec.structs.fields(NamespaceSet))


def _by_stat(pid: int) -> NamespaceSet:
    return NamespaceSet(*(os.stat(f"/proc/{pid}/ns/{kind}").st_ino for kind in _KINDS))


def _mnt_ns_id(pid: int) -> int:
    fd = procfs.open_pid(pid)
    try:
        return namespaces.mnt_ns_id(fd)
    finally:
        os.close(fd)


def test_all_seven_in_the_order_of_perf() -> None:
    assert _KINDS == ("net", "uts", "ipc", "pid", "user", "mnt", "cgroup")
    assert namespaces.of_pid(os.getpid()) == _by_stat(os.getpid())
    assert all(msgspec.structs.astuple(namespaces.of_pid(os.getpid())))


def test_a_child_is_in_ours() -> None:
    with running([cat_program()]) as child:
        assert namespaces.of_pid(child.pid) == namespaces.of_pid(os.getpid())
        assert _mnt_ns_id(child.pid) == _mnt_ns_id(os.getpid())


def test_a_process_that_is_gone() -> None:
    with running([cat_program()]) as child:
        fd = procfs.open_pid(child.pid)
    try:
        with pytest.raises(ProcessLookupError):
            namespaces.of(fd)
        with pytest.raises((ProcessLookupError, FileNotFoundError)):
            namespaces.mnt_ns_id(fd)
    finally:
        os.close(fd)


def test_the_initial_ones_are_those_of_the_first_process_we_may_see() -> None:
    """From an independent look at pid 1, then kthreadd, then ourselves."""
    expected = None
    for pid in (1, 2, os.getpid()):
        if pid == 2 and Path("/proc/2/comm").read_bytes() != b"kthreadd\n":
            continue
        with contextlib.suppress(PermissionError):
            expected = _by_stat(pid)
            break
    assert namespaces.initial() == expected


@pytest.mark.root
@needs_root("makes namespaces")
def test_the_initial_ones_are_seen_from_a_container(tmp_path: Path) -> None:
    with private_cat(tmp_path) as child:
        inside, host = namespaces.of_pid(child.pid), namespaces.initial()
        assert inside.mnt != host.mnt
        assert msgspec.structs.replace(inside, mnt=host.mnt) == host


@pytest.mark.root
@needs_root("makes namespaces")
@pytest.mark.parametrize("kind", ["net", "uts", "ipc", "mnt", "cgroup"])
def test_one_namespace_of_its_own(kind: str) -> None:
    option = f"--{'mount' if kind == 'mnt' else kind}"
    with running([tool("unshare"), option, cat_program()]) as child:
        inside, own = namespaces.of_pid(child.pid), namespaces.of_pid(os.getpid())
        assert inside == _by_stat(child.pid)
        assert [name for name in _KINDS if getattr(inside, name) != getattr(own, name)] == [kind]


@pytest.mark.root
@needs_root("makes namespaces")
def test_a_mount_namespace_is_never_taken_for_an_earlier_one(tmp_path: Path) -> None:
    """Inode numbers come back at once; the ID does not."""
    own = _mnt_ns_id(os.getpid())
    if not own:
        pytest.skip("this kernel does not tell the ID of a mount namespace (before 6.11)")
    seen = [own]
    for _ in range(4):
        with private_cat(tmp_path) as child:
            seen.append(_mnt_ns_id(child.pid))
            assert _mnt_ns_id(child.pid) == seen[-1]
    assert len(set(seen)) == len(seen)


def _foreign_users(pid: int) -> list[int]:
    """Inode numbers of the user namespaces above a process that are not ours."""
    pid_fd = procfs.open_pid(pid)
    try:
        fds = namespaces.foreign_users(pid_fd)
    finally:
        os.close(pid_fd)
    try:
        return [os.fstat(fd).st_ino for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)


def test_user_namespaces_from_the_inside_out() -> None:
    assert _foreign_users(os.getpid()) == []
    unshare = [tool("unshare"), "-U", "-r"]
    if run([*unshare, tool("true")]).rc != 0:
        pytest.skip("this machine does not let users make user namespaces")
    # The middle one stays a parent of the last while that runs.
    with running([*unshare, *unshare, cat_program()]) as child:
        found = _foreign_users(child.pid)
        assert len(found) == len(set(found)) == 2
        assert found[0] == os.stat(f"/proc/{child.pid}/ns/user").st_ino
        assert os.stat("/proc/self/ns/user").st_ino not in found


# --- The numbers of control groups, against what the kernel hands out as a file handl


@pytest.fixture
def hierarchy() -> Path:
    """Where findmnt says that the unified hierarchy is."""
    found = run([tool("findmnt"), "-n", "-o", "TARGET", "-t", "cgroup2"]).out.split()
    if not found:
        pytest.skip("no cgroup2 mounted here")
    return Path(found[0])


@pytest.fixture
def group(hierarchy: Path) -> Iterator[Path]:
    """A control group of this test's own."""
    path = hierarchy / f"buildidfs-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    yield path
    path.rmdir()


def handle(path: Path) -> int:
    """The number as bpf and perf know it: name_to_handle_at(2) of cgroup2 gives 8 bytes."""
    buffer = ctypes.create_string_buffer(struct.pack("=Ii", 8, 0) + bytes(8), 16)
    mount_id = ctypes.c_int()
    result = syscalls.libc.name_to_handle_at(
        syscalls.AT_FDCWD, os.fsencode(path), buffer, ctypes.byref(mount_id), 0
    )
    assert result == 0, os.strerror(ctypes.get_errno())
    (number,) = struct.unpack_from("=Q", buffer.raw, 8)
    return int(number)


def test_numbers_of_all_control_groups(hierarchy: Path) -> None:
    assert namespaces.cgroup_id(b"/") == handle(hierarchy) > 0
    for below in sorted(hierarchy.iterdir()):
        if below.is_dir():
            assert namespaces.cgroup_id(b"/" + os.fsencode(below.name)) == handle(below)


@needs_root("makes a control group")
def test_of_a_process(group: Path, hierarchy: Path) -> None:
    with running([cat_program()]) as child:
        before = cgroup.unified(Path(f"/proc/{child.pid}/cgroup").read_bytes())
        (group / "cgroup.procs").write_text(str(child.pid))
        where = cgroup.unified(Path(f"/proc/{child.pid}/cgroup").read_bytes())
        assert where == b"/" + os.fsencode(group.relative_to(hierarchy))
        number = namespaces.cgroup_id(where)
        assert number == handle(group)
        assert number != namespaces.cgroup_id(before)


@needs_root("makes a control group")
def test_a_name_used_again_has_another_number(group: Path) -> None:
    where = b"/" + os.fsencode(group.name)
    numbers = []
    for _ in range(3):
        numbers.append(namespaces.cgroup_id(where))
        group.rmdir()
        assert namespaces.cgroup_id(where) == 0
        group.mkdir()
    assert len(set(numbers)) == 3
    assert all(numbers)


@pytest.mark.parametrize("path", [b"", b"/..", b"/../../etc", b"/a\0b", b"relative", b"/none/such"])
def test_path_of_no_control_group(path: bytes) -> None:
    assert namespaces.cgroup_id(path) == 0


LINE = b"41 31 %s %s %s rw,relatime - %s none rw"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (b"", 0),
        (LINE % (b"0:28", b"/", b"/sys/fs/cgroup", b"cgroup"), 0),
        (LINE % (b"0:28", b"/../..", b"/sys/fs/cgroup", b"cgroup2"), 0),
        (LINE % (b"0:28", b"/", b"/a\\040b", b"cgroup2"), 0),
        # The device is not the one of that directory: something is mounted over it.
        (LINE % (b"250:250", b"/", b"/tmp", b"cgroup2"), 0),
    ],
)
def test_hierarchy_that_is_not_to_be_seen(
    text: bytes, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "mountinfo", lambda: text)
    namespaces._cgroup_hierarchy.cache_clear()
    try:
        assert namespaces.cgroup_id(b"/") == number
    finally:
        namespaces._cgroup_hierarchy.cache_clear()
