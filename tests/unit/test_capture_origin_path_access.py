# SPDX-License-Identifier: Apache-2.0
"""The users who could get at a file along its path, compared with those who really can."""

from __future__ import annotations

import ast
import errno
import os
import re
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buildidfs.capture.origin import path_access
from buildidfs.capture.origin.builder import Surroundings
from buildidfs.capture.origin.path_access import Reach, Root
from buildidfs.capture.process.process import PinnedProcess, Ways
from buildidfs.capture.unresponsive.filesystems import Patience
from buildidfs.linux import inodes, mounts, namespaces, procfs
from buildidfs.model import EVERYBODY, GROUP, OTHERS, OWNER, FileIdentity, Trust
from tests.support.clients.tools import run, tool, unmount
from tests.support.filesystems.silentfs import served
from tests.support.harness.callers import (
    ACL_GROUP,
    ACL_USER,
    Caller,
    Who,
    calling_all,
    set_acl,
)
from tests.support.harness.captures import SECOND, identity
from tests.support.harness.children import cat_program, needs_root, private_cat, running
from tests.support.harness.scans import open_descriptors

CAPTURE = Path(path_access.__file__).parents[1]

# No other user has these IDs; they own files, and are in groups of each other's.
ALICE, BOB, CAROL = 61001, 61002, 61003
STAFF, GUESTS = 62001, 62002
CALLERS = [
    Who(ALICE, ALICE),
    Who(ALICE, STAFF, (GUESTS,)),
    Who(BOB, BOB),
    Who(BOB, STAFF),
    Who(BOB, BOB, (STAFF, GUESTS)),
    Who(CAROL, CAROL),
    Who(CAROL, CAROL, (STAFF,)),
    Who(CAROL, GUESTS),
]


@pytest.fixture(autouse=True)
def _descriptors_are_closed() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() <= before


@pytest.fixture
def own_root() -> Iterator[Root]:
    fd = os.open("/", os.O_PATH)
    yield Root(fd, b"/", mounts.mountinfo, user=namespaces.of_pid(os.getpid()).user)
    os.close(fd)


def reach_of(path: Path, root: Root, finder: Reach | None = None) -> int:
    fd = os.open(path, os.O_PATH)
    try:
        return (finder or Reach()).of(fd, inodes.identity(fd), root)
    finally:
        os.close(fd)


def make(path: Path, *, mode: int, uid: int = 0, gid: int = 0, directory: bool = False) -> Path:
    if directory:
        path.mkdir()
    else:
        path.write_bytes(b"x")
    os.chown(path, uid, gid)
    path.chmod(mode)
    return path


# --- the classes ---------------------------------------------------------------------------------


@needs_root("gives files away")
@pytest.mark.parametrize(
    ("above", "file", "expected"),
    [
        pytest.param((0o755, 0, 0), (ALICE, ALICE), EVERYBODY, id="public"),
        pytest.param((0o711, BOB, STAFF), (ALICE, ALICE), EVERYBODY, id="search is enough"),
        pytest.param((0o700, ALICE, ALICE), (ALICE, ALICE), OWNER, id="home"),
        pytest.param((0o700, ALICE, ALICE), (0, 0), OWNER, id="of root's in a home: root"),
        pytest.param((0o700, ALICE, ALICE), (BOB, BOB), 0, id="of another's in a home"),
        pytest.param((0o750, ALICE, STAFF), (ALICE, STAFF), OWNER | GROUP, id="group"),
        pytest.param((0o750, ALICE, STAFF), (ALICE, GUESTS), OWNER, id="another group"),
        pytest.param((0o750, 0, STAFF), (ALICE, STAFF), GROUP, id="is the owner in the group"),
        pytest.param((0o705, 0, STAFF), (ALICE, STAFF), OTHERS, id="all but a group"),
        pytest.param((0o705, 0, STAFF), (ALICE, GUESTS), 0, id="all but another group"),
        pytest.param((0o755, BOB, 0), (ALICE, ALICE), EVERYBODY, id="of another's"),
        pytest.param((0o655, BOB, 0), (ALICE, ALICE), OWNER, id="not even its owner"),
        pytest.param((0o000, 0, 0), (ALICE, ALICE), 0, id="nobody"),
    ],
)
def test_directory_above(
    directory: Path,
    own_root: Root,
    above: tuple[int, int, int],
    file: tuple[int, int],
    expected: int,
) -> None:
    mode, uid, gid = above
    make(directory / "above", mode=0o755, directory=True)
    make(directory / "above/below", mode=0o755, directory=True)
    make(directory / "above/below/file", mode=0o755, uid=file[0], gid=file[1])
    os.chown(directory / "above", uid, gid)
    (directory / "above").chmod(mode)
    assert reach_of(directory / "above/below/file", own_root) == expected


@needs_root("gives files away")
def test_several_directories_count_together(directory: Path, own_root: Root) -> None:
    make(directory / "a", mode=0o750, uid=ALICE, gid=STAFF, directory=True)
    make(directory / "a/b", mode=0o705, uid=ALICE, gid=STAFF, directory=True)
    make(directory / "a/b/file", mode=0o755, uid=ALICE, gid=STAFF)
    assert reach_of(directory / "a/b/file", own_root) == OWNER


@needs_root("gives files away")
@pytest.mark.parametrize(
    ("mode", "named", "mask", "expected"),
    [
        (0o644, [], 4, EVERYBODY),
        pytest.param(0o604, [(ACL_USER, 4, BOB)], 4, OWNER | OTHERS, id="group bits are a mask"),
        pytest.param(0o644, [(ACL_USER, 0, BOB)], 4, OWNER, id="a user is left out"),
        pytest.param(0o644, [(ACL_GROUP, 0, GUESTS)], 4, OWNER | GROUP, id="a group is left out"),
        pytest.param(0o644, [(ACL_USER, 4, BOB)], 0, OWNER, id="the mask leaves them out"),
    ],
)
def test_lists_of_a_file(
    directory: Path,
    own_root: Root,
    mode: int,
    named: list[tuple[int, int, int]],
    mask: int,
    expected: int,
) -> None:
    file = make(directory / "file", mode=0o644, uid=ALICE, gid=STAFF)
    set_acl(file, mode, named, mask)
    assert reach_of(file, own_root) == expected


@needs_root("gives files away")
def test_lists_of_a_directory(directory: Path, own_root: Root) -> None:
    above = make(directory / "above", mode=0o755, uid=ALICE, gid=STAFF, directory=True)
    file = make(above / "file", mode=0o755, uid=ALICE, gid=STAFF)
    set_acl(above, 0o700, [(ACL_USER, 5, BOB)])
    assert stat.S_IMODE(above.stat().st_mode) & 0o070, "the mask looks like rights of the group"
    assert reach_of(file, own_root) == OWNER
    set_acl(above, 0o755, [(ACL_USER, 0, BOB)])
    assert reach_of(file, own_root) == OWNER


IDS = st.sampled_from([0, ALICE, BOB])
GROUPS = st.sampled_from([0, STAFF, GUESTS])
NAMED = st.lists(
    st.one_of(
        st.tuples(st.just(ACL_USER), st.integers(0, 7), st.sampled_from([ALICE, BOB, CAROL])),
        st.tuples(st.just(ACL_GROUP), st.integers(0, 7), st.sampled_from([STAFF, GUESTS])),
    ),
    max_size=3,
    unique_by=lambda entry: (entry[0], entry[2]),
)
INODE = st.tuples(
    st.sampled_from([0o755, 0o711, 0o750, 0o700, 0o705, 0o070, 0o007, 0o655, 0o440, 0o604, 0o644]),
    IDS,
    GROUPS,
    st.one_of(st.none(), NAMED),
)


@pytest.fixture(scope="module")
def callers() -> Iterator[list[Caller]]:
    with calling_all(CALLERS) as everybody:
        yield everybody


@needs_root("becomes other users")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(above=st.lists(INODE, min_size=1, max_size=2), file=INODE)
def test_no_more_than_the_kernel_lets_them(
    directory: Path,
    own_root: Root,
    callers: list[Caller],
    above: list[tuple[int, int, int, Any]],
    file: tuple[int, int, int, Any],
) -> None:
    """A user who may read an artifact with the original's owner and group could read that."""
    place = Path(tempfile.mkdtemp(dir=directory))
    place.chmod(0o755)
    made = []
    for number, inode in enumerate(above):
        place = make(place / f"d{number}", mode=0o755, directory=True)
        made.append((place, inode))
    path = make(place / "file", mode=0o755)
    for where, (mode, uid, gid, named) in [(path, file), *reversed(made)]:
        os.chown(where, uid, gid)
        where.chmod(mode)
        if named:
            set_acl(where, mode, sorted(named, key=lambda entry: (entry[0], entry[2])))
    found = reach_of(path, own_root)
    shown = path.stat().st_mode & 0o555 & _bits(found)
    for caller in callers:
        if _may_read(caller.who, shown, file[1], file[2]):
            assert caller.reads(path) == 0, (caller.who, oct(shown), found)
    if all(mode & 0o111 == 0o111 and not named for mode, _, _, named in above) and not file[3]:
        assert found == EVERYBODY


def _bits(found: int) -> int:
    return sum(
        bits for who, bits in ((OWNER, 0o700), (GROUP, 0o070), (OTHERS, 0o007)) if found & who
    )


def _may_read(who: Who, mode: int, uid: int, gid: int) -> int:
    """acl_permission_check() of fs/namei.c."""
    if who.uid == uid:
        return mode & 0o400
    return mode & (0o040 if gid in (who.gid, *who.groups) else 0o004)


# --- where the path leads ------------------------------------------------------------------------


@needs_root("gives files away")
def test_a_deleted_file_is_its_owners(directory: Path, own_root: Root) -> None:
    fd = os.open(make(directory / "file", mode=0o755, uid=ALICE), os.O_RDONLY)
    try:
        assert Reach().of(fd, inodes.identity(fd), own_root) == EVERYBODY
        (directory / "file").unlink()
        assert Reach().of(fd, inodes.identity(fd), own_root) == OWNER
        make(directory / "file", mode=0o755)  # another one has its name
        assert Reach().of(fd, inodes.identity(fd), own_root) == OWNER
    finally:
        os.close(fd)


@needs_root("gives files away")
@pytest.mark.parametrize("finder", [Reach(), Reach(keep_s=60)], ids=["", "remembered"])
def test_a_directory_that_was_made_again(directory: Path, own_root: Root, finder: Reach) -> None:
    """Its permissions say nothing of a file that was in the one before."""
    private = make(directory / "private", mode=0o700, uid=ALICE, directory=True)
    fd = os.open(make(private / "file", mode=0o755, uid=ALICE), os.O_RDONLY)
    try:
        assert finder.of(fd, inodes.identity(fd), own_root) == OWNER
        (private / "file").unlink()
        private.rmdir()
        for name in ("file", "file (deleted)"):
            again = make(private, mode=0o755, uid=BOB, directory=True)
            make(again / name, mode=0o755, uid=BOB)
            assert finder.of(fd, inodes.identity(fd), own_root) == OWNER
            assert reach_of(again / name, own_root, finder) == EVERYBODY
            (again / name).unlink()
            again.rmdir()
    finally:
        os.close(fd)


def test_file_named_deleted_that_is_not(directory: Path, own_root: Root) -> None:
    assert reach_of(make(directory / "x (deleted)", mode=0o755), own_root) == EVERYBODY


def test_file_that_never_had_a_name(directory: Path, own_root: Root) -> None:
    temporary = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o755)
    memory = os.memfd_create("code")
    for fd in (temporary, memory):
        try:
            assert Reach().of(fd, inodes.identity(fd), own_root) == OWNER
        finally:
            os.close(fd)


def test_directory_that_is_gone(directory: Path, own_root: Root) -> None:
    place = make(directory / "gone", mode=0o755, directory=True)
    fd = os.open(make(place / "file", mode=0o755), os.O_RDONLY)
    try:
        (place / "file").unlink()
        place.rmdir()
        assert Reach().of(fd, inodes.identity(fd), own_root) == OWNER
        make(place, mode=0o755, directory=True)
        assert Reach().of(fd, inodes.identity(fd), own_root) == OWNER, "the directory is another"
    finally:
        os.close(fd)


def test_directory_that_became_a_link(directory: Path, own_root: Root) -> None:
    """No link is followed, as there was none on the way; this one would lead to the file."""
    place = make(directory / "place", mode=0o755, directory=True)
    fd = os.open(make(place / "file", mode=0o755), os.O_RDONLY)
    try:
        finder = Reach(keep_s=60)
        assert finder.of(fd, inodes.identity(fd), own_root) == EVERYBODY
        root = Root(own_root.fd, b"/", own_root.mountinfo, 0, own_root.user)
        (directory / "other").symlink_to(place)
        way = Reach()._walked(root, [*os.fsencode(place).split(b"/")[1:]])
        os.close(way[1])
        with pytest.raises(NotADirectoryError):
            Reach()._walked(root, [*os.fsencode(directory / "other").split(b"/")[1:]])
    finally:
        os.close(fd)


def test_too_deep(directory: Path, own_root: Root) -> None:
    names = [b"d"] * (path_access.MAX_DEPTH + 1)
    with pytest.raises(OSError, match="too long"):
        Reach()._way(own_root, b"/" + b"/".join(names))


@needs_root("mounts")
def test_mounts_on_the_way(directory: Path, own_root: Root) -> None:
    """The mounted directory counts, and not the one below it."""
    point = make(directory / "point", mode=0o700, uid=ALICE, directory=True)
    run([tool("mount"), "-t", "tmpfs", "-o", "mode=755", "none", point], check=True)
    try:
        file = make(point / "file", mode=0o755, uid=ALICE)
        assert reach_of(file, own_root) == EVERYBODY
        point.chmod(0o711)
        assert reach_of(file, own_root) == EVERYBODY
        point.chmod(0o700)
        assert reach_of(file, own_root) == 0
    finally:
        unmount(point)


@needs_root("mounts")
@pytest.mark.parametrize("deleted", [False, True])
def test_file_below_another_mount(directory: Path, own_root: Root, deleted: bool) -> None:
    """No user can get there any more, and the directory that can be asked is another one."""
    point = make(directory / "point", mode=0o700, uid=ALICE, directory=True)
    fd = os.open(make(point / "file", mode=0o755, uid=ALICE), os.O_RDONLY)
    try:
        if deleted:
            (point / "file").unlink()
        assert Reach().of(fd, inodes.identity(fd), own_root) == OWNER
        run([tool("mount"), "-t", "tmpfs", "-o", "mode=755", "none", point], check=True)
        try:
            make(point / "file", mode=0o755, uid=ALICE)
            assert Reach().of(fd, inodes.identity(fd), own_root) == OWNER
        finally:
            unmount(point)
    finally:
        os.close(fd)


@needs_root("mounts")
@pytest.mark.parametrize("deleted", [False, True])
def test_file_of_a_mount_that_is_gone(directory: Path, own_root: Root, deleted: bool) -> None:
    """Its path begins at what was mounted, as if that were the root."""
    point = make(directory / "point", mode=0o755, directory=True)
    run([tool("mount"), "-t", "tmpfs", "-o", "mode=755", "none", point], check=True)
    file = make(point / "file", mode=0o755)
    fd = os.open(file, os.O_RDONLY)
    try:
        assert Reach().of(fd, inodes.identity(fd), own_root) == EVERYBODY
        if deleted:
            file.unlink()
        run([tool("umount"), "-l", point], check=True)
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/file")
        assert Reach().of(fd, inodes.identity(fd), own_root) == OWNER
    finally:
        os.close(fd)


@needs_root("mounts")
def test_file_that_is_mounted_itself(directory: Path, own_root: Root) -> None:
    home = make(directory / "home", mode=0o700, uid=ALICE, directory=True)
    file = make(home / "file", mode=0o755, uid=ALICE)
    public = make(directory / "public", mode=0o644)
    run([tool("mount"), "--bind", file, public], check=True)
    try:
        assert reach_of(public, own_root) == EVERYBODY
        assert reach_of(file, own_root) == OWNER
    finally:
        unmount(public)


@needs_root("gives files away")
def test_below_the_root_of_its_users(directory: Path, own_root: Root) -> None:
    home = make(directory / "home", mode=0o700, uid=ALICE, directory=True)
    jail = make(home / "jail", mode=0o755, directory=True)
    file = make(jail / "file", mode=0o755, uid=ALICE)
    fd = os.open(jail, os.O_PATH)
    try:
        root = Root(fd, os.fsencode(jail), mounts.mountinfo, user=own_root.user)
        assert reach_of(file, root) == OWNER, "no other user gets into the directory above"
        home.chmod(0o711)
        assert reach_of(file, root) == EVERYBODY
        assert reach_of(make(directory / "outside", mode=0o755), root) == OWNER
    finally:
        os.close(fd)


@pytest.fixture(params=["statmount", "mountinfo"])
def _source_of_mounts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to learn of a mount in another namespace; before Linux 6.11 there is one."""

    def none_or_text(*arguments: Any) -> Any:
        raise OSError(errno.EINVAL, "not before Linux 6.11")

    def never(fd: int) -> int:
        raise AssertionError("statmount should have told")

    if request.param == "mountinfo":
        monkeypatch.setattr(mounts, "placed", none_or_text)
    elif _has_statmount_of_others():
        monkeypatch.setattr(procfs, "mountinfo", never)
    else:
        pytest.skip("this kernel does not tell of mounts in other namespaces (before 6.11)")


def _has_statmount_of_others() -> bool:
    fd = os.open("/", os.O_PATH)
    pid_fd = procfs.open_pid(os.getpid())
    try:
        mounts.placed(inodes.unique_mount_id(fd) or 0, namespaces.mnt_ns_id(pid_fd))
    except OSError:
        return False
    finally:
        os.close(fd)
        os.close(pid_fd)
    return True


@needs_root("makes a mount namespace")
@pytest.mark.usefixtures("_source_of_mounts")
def test_in_a_mount_namespace(directory: Path, own_root: Root) -> None:
    with private_cat(directory) as child:
        pid_fd = procfs.open_pid(child.pid)
        root_fd = procfs.open_root(pid_fd)
        fd = os.open(f"/proc/{child.pid}/root{directory}/cat", os.O_PATH)
        try:
            root = Root(
                root_fd,
                b"/",
                lambda: procfs.mountinfo(pid_fd),
                namespaces.mnt_ns_id(pid_fd),
                own_root.user,
            )
            identity = inodes.identity(fd)
            assert Reach().of(fd, identity, root) == EVERYBODY
            assert Reach().of(fd, identity, own_root) == OWNER, "it is not to be found here"
            os.chmod(f"/proc/{child.pid}/root{directory}", 0o700)
            assert Reach().of(fd, identity, root) == OWNER
        finally:
            for one in (fd, root_fd, pid_fd):
                os.close(one)


_BOUND = """
set -eu
test -z "$3" || mount --bind "$3" "$1"
cd "$1"
if test "$2" = root; then
  mount --bind "$1" "$1"
  cd "$1"
  pivot_root . .
  exec /cat
fi
exec ./cat
"""


def _reach_in(pid: int, path: bytes) -> int:
    """`Origin.reach` of what a process has at a path of its own."""
    initial = namespaces.initial()
    with PinnedProcess(pid, Ways()) as process:
        process.look(initial, ("mnt",))
        assert process.surroundings.apart & 1 << 5
        fd = inodes.open_in_root(process.root_fd, path, os.O_PATH)
        try:
            return process.reach_of(fd, inodes.identity(fd), Reach(), None)
        finally:
            os.close(fd)


@pytest.mark.host
@needs_root("makes mount namespaces")
@pytest.mark.usefixtures("_source_of_mounts")
@pytest.mark.parametrize("whose", ["alice's", "root's"])
def test_a_directory_of_the_host_that_a_namespace_shows(directory: Path, whose: str) -> None:
    home = make(directory / "home", mode=0o700, uid=ALICE, gid=ALICE, directory=True)
    shown = make(home / "shown", mode=0o755, uid=ALICE, gid=ALICE, directory=True)
    point = make(directory / "point", mode=0o755, directory=True)
    shutil.copy(cat_program(), shown / "cat")
    os.chown(shown / "cat", ALICE, ALICE)
    unshare = [tool("unshare"), "-m"]
    if whose == "alice's":
        become = [f"--reuid={ALICE}", f"--regid={ALICE}", "--clear-groups"]
        unshare = [tool("setpriv"), *become, tool("unshare"), "-Urm"]
    with running([*unshare, "sh", "-c", _BOUND, "sh", point, "", shown]) as child:
        path = os.fsencode(point / "cat")
        assert _reach_in(child.pid, path) == OWNER
        home.chmod(0o711)
        assert _reach_in(child.pid, path) == EVERYBODY
        shown.rename(home / "hidden")
        assert _reach_in(child.pid, path) == EVERYBODY, "a mount follows what is moved"
        (home / "hidden").rename(directory / "elsewhere")
        (directory / "elsewhere").chmod(0o700)
        assert _reach_in(child.pid, path) == OWNER


@needs_root("makes mount namespaces")
@pytest.mark.usefixtures("_source_of_mounts")
def test_the_root_that_root_gives_to_a_container(directory: Path) -> None:
    """Engines keep it below directories of their own, into which no other user gets."""
    storage = make(directory / "storage", mode=0o700, directory=True)
    rootfs = make(storage / "rootfs", mode=0o755, directory=True)
    needed = re.findall(r"(/\S+) \(0x", run([tool("ldd"), cat_program()], check=True).out)
    for library in map(Path, needed):
        (rootfs / library.parent.relative_to("/")).mkdir(parents=True, exist_ok=True)
        shutil.copy(library, rootfs / library.relative_to("/"))
    shutil.copy(cat_program(), rootfs / "cat")
    with running([tool("unshare"), "-m", "sh", "-c", _BOUND, "sh", rootfs, "root", ""]) as child:
        assert os.readlink(f"/proc/{child.pid}/root") == "/"
        assert _reach_in(child.pid, b"/cat") == EVERYBODY
        rootfs.chmod(0o700)
        assert _reach_in(child.pid, b"/cat") == OWNER


# --- what is remembered, and who is asked --------------------------------------------------------


@needs_root("gives files away")
def test_directories_are_looked_at_once_in_a_scan(
    directory: Path, own_root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(Reach, "_look", _counting(Reach._look, looked))
    monkeypatch.setattr(path_access, "_TICK_NS", 0)
    files = [make(directory / f"file{number}", mode=0o755) for number in range(5)]
    finder = Reach(keep_s=60)
    assert {reach_of(file, own_root, finder) for file in files} == {EVERYBODY}
    depth = len(directory.parts)
    assert len(looked) == depth
    directory.chmod(0o700)
    assert reach_of(files[0], own_root, finder) == EVERYBODY
    assert reach_of(files[0], own_root, Reach()) == OWNER


@needs_root("gives files away")
def test_memory_does_not_hold_for_younger_files(directory: Path, own_root: Root) -> None:
    finder = Reach(keep_s=60)
    place = make(directory / "place", mode=0o755, directory=True)
    assert reach_of(make(place / "old", mode=0o755), own_root, finder) == EVERYBODY
    place.chmod(0o700)
    assert reach_of(make(place / "secret", mode=0o755, uid=ALICE), own_root, finder) == 0


@needs_root("gives files away")
def test_memory_counts_with_clocks_of_whole_seconds(directory: Path, own_root: Root) -> None:
    """On FAT a file may have been made two seconds after its change time."""
    finder = Reach(keep_s=60)
    place = make(directory / "place", mode=0o755, directory=True)
    file = make(place / "file", mode=0o755, uid=ALICE)
    now = time.time_ns()
    found = identity_at(file, now - now % SECOND - SECOND)
    assert reach_of_identity(file, found, own_root, finder) == EVERYBODY
    place.chmod(0o700)
    assert reach_of_identity(file, found, own_root, finder) == 0
    place.chmod(0o755)
    finder = Reach(keep_s=60)
    found = identity_at(file, now - now % SECOND - SECOND + 1)
    assert reach_of_identity(file, found, own_root, finder) == EVERYBODY
    place.chmod(0o700)
    assert reach_of_identity(file, found, own_root, finder) == EVERYBODY


def identity_at(path: Path, changed_ns: int) -> FileIdentity:
    fd = os.open(path, os.O_PATH)
    try:
        return msgspec.structs.replace(inodes.identity(fd), ctime_ns=changed_ns)
    finally:
        os.close(fd)


def reach_of_identity(path: Path, found: FileIdentity, root: Root, finder: Reach) -> int:
    fd = os.open(path, os.O_PATH)
    try:
        return finder.of(fd, found, root)
    finally:
        os.close(fd)


@needs_root("gives files away")
def test_memory_holds_for_the_same_directory_only(
    directory: Path, own_root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one that was moved to its name brings files that are older."""
    monkeypatch.setattr(path_access, "_TICK_NS", 0)
    finder = Reach(keep_s=60)
    private = make(directory / "private", mode=0o700, uid=ALICE, directory=True)
    make(private / "file", mode=0o755, uid=ALICE)
    public = make(directory / "public", mode=0o755, directory=True)
    assert reach_of(make(public / "file", mode=0o755), own_root, finder) == EVERYBODY
    public.rename(directory / "elsewhere")
    private.rename(public)
    assert reach_of(public / "file", own_root, finder) == OWNER


def _counting(real: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return real(*arguments)

    return counted


def test_memory_is_bounded(
    directory: Path, own_root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_access, "_MOST_KNOWN", 2)
    finder = Reach(keep_s=60)
    for number in range(6):
        place = make(directory / f"d{number}", mode=0o755, directory=True)
        assert reach_of(make(place / "file", mode=0o755), own_root, finder) == EVERYBODY
        assert len(finder._known) <= 2


@pytest.mark.fuse
@pytest.mark.root
@needs_root("mounts")
def test_silent_server_delays_no_thread(directory: Path, own_root: Root) -> None:
    point = make(directory / "point", mode=0o755, directory=True)
    with served(point, cat_program()) as server:
        fd = os.open(point / "app", os.O_PATH)
        try:
            identity = inodes.identity(fd)
            assert Reach().of(fd, identity, own_root) == OWNER, "mounted by root, for root alone"
            server.send_signal(signal.SIGSTOP)
            before = threading.active_count()
            assert Reach(ask=False).of(fd, identity, own_root) == OWNER
            assert threading.active_count() == before, "no thread was left behind"
            patience = Patience(0.1)
            assert Reach().of(fd, identity, own_root, patience) == OWNER
            assert threading.active_count() == before + 1
            assert Reach().of(fd, identity, own_root, patience) == OWNER
            assert threading.active_count() == before + 1, "asked again"
            server.send_signal(signal.SIGCONT)
            for thread in threading.enumerate():
                if thread.name == "buildidfs-ask":
                    thread.join(30)
        finally:
            server.send_signal(signal.SIGCONT)
            os.close(fd)


def test_with_patience_where_everybody_answers(directory: Path, own_root: Root) -> None:
    fd = os.open(make(directory / "file", mode=0o755), os.O_PATH)
    try:
        assert Reach().of(fd, inodes.identity(fd), own_root, Patience()) == EVERYBODY
    finally:
        os.close(fd)


MOUNTED = b"7 1 0:7 / /mnt rw - %s source rw,%s\n"


@pytest.mark.parametrize(
    ("fstype", "options", "mode", "expected"),
    [
        (b"nfs4", b"vers=4.2", 0o755, EVERYBODY),
        pytest.param(b"nfs4", b"", 0o750, OWNER, id="group bits may be a mask"),
        (b"fuse.sshfs", b"user_id=61001,group_id=0", 0o755, OWNER),
        (b"fuse.sshfs", b"user_id=61002,group_id=0", 0o755, 0),
        (b"fuseblk", b"user_id=61002,group_id=0,allow_other", 0o755, 0),
        (b"fuse", b"user_id=61002,group_id=0,allow_other,default_permissions", 0o755, EVERYBODY),
        (b"fuse", b"user_id=61002,group_id=0,allow_other,default_permissions", 0o750, OWNER),
    ],
)
@needs_root("gives files away")
def test_filesystems_that_depend_on_a_server(
    directory: Path,
    own_root: Root,
    monkeypatch: pytest.MonkeyPatch,
    fstype: bytes,
    options: bytes,
    mode: int,
    expected: int,
) -> None:
    """Told of what is an ordinary filesystem, which has no servers to disagree."""
    finder = Reach()
    monkeypatch.setattr(finder._slow, "is_slow", lambda *_: True)
    monkeypatch.setattr(mounts, "mount_id", lambda _: 7)
    root = Root(own_root.fd, b"/", lambda: MOUNTED % (fstype, options), 0, own_root.user)
    file = make(directory / "file", mode=mode, uid=ALICE, gid=STAFF)
    assert reach_of(file, root, finder) == expected
    elsewhere = Root(own_root.fd, b"/", lambda: b"", 0, own_root.user)
    assert reach_of(file, elsewhere, finder) == OWNER, "a mount that is not in the table"
    if fstype.startswith(b"fuse") and b"default_permissions" not in options:
        users = Root(own_root.fd, b"/", root.mountinfo, 0, own_root.user + 1)
        assert reach_of(file, users, finder) == OWNER, "whose number is not known"


# --- every scanner says it -----------------------------------------------------------------------


def test_scanners_make_an_origin_in_one_place_that_lets_in_root_alone() -> None:
    calls = [
        (path.name, node)
        for path in sorted(CAPTURE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Origin"
    ]
    ((name, call),) = calls
    assert name == "builder.py"
    assert "reach" in {keyword.arg for keyword in call.keywords}
    unknown = Surroundings().origin(b"/x", identity(), host="", trust=Trust.HOST, scanner="proc")
    assert unknown.reach == 0
