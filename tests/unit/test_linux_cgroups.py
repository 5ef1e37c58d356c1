# SPDX-License-Identifier: Apache-2.0
"""The numbers of control groups, against what the kernel hands out as a file handle."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.formats.container import cgroup
from buildidfs.linux import cgroups, mounts, syscalls
from tests.support.children import cat_program, needs_root, running
from tests.support.clients import run, tool


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


def test_numbers_of_what_is_there(hierarchy: Path) -> None:
    assert cgroups.cgroup_id(b"/") == handle(hierarchy) > 0
    for below in sorted(hierarchy.iterdir()):
        if below.is_dir():
            assert cgroups.cgroup_id(b"/" + os.fsencode(below.name)) == handle(below)


@needs_root("makes a control group")
def test_of_a_process(group: Path, hierarchy: Path) -> None:
    with running([cat_program()]) as child:
        before = cgroup.unified(Path(f"/proc/{child.pid}/cgroup").read_bytes())
        (group / "cgroup.procs").write_text(str(child.pid))
        where = cgroup.unified(Path(f"/proc/{child.pid}/cgroup").read_bytes())
        assert where == b"/" + os.fsencode(group.relative_to(hierarchy))
        number = cgroups.cgroup_id(where)
        assert number == handle(group)
        assert number != cgroups.cgroup_id(before)


@needs_root("makes a control group")
def test_a_name_used_again_has_another_number(group: Path) -> None:
    where = b"/" + os.fsencode(group.name)
    numbers = []
    for _ in range(3):
        numbers.append(cgroups.cgroup_id(where))
        group.rmdir()
        assert cgroups.cgroup_id(where) == 0
        group.mkdir()
    assert len(set(numbers)) == 3
    assert all(numbers)


@pytest.mark.parametrize("path", [b"", b"/..", b"/../../etc", b"/a\0b", b"relative", b"/none/such"])
def test_what_is_no_group(path: bytes) -> None:
    assert cgroups.cgroup_id(path) == 0


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
    cgroups._hierarchy.cache_clear()
    try:
        assert cgroups.cgroup_id(b"/") == number
    finally:
        cgroups._hierarchy.cache_clear()
