# SPDX-License-Identifier: Apache-2.0
"""No reader of a mount reads more than they could have read where it was captured.

For each way in which a file can be kept from somebody, and for each of several users: what they can
open at its own place is compared with what they can open in the mount, by every name it has there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients.tools import tool
from tests.support.elf.elfwriter import DWARF, SYMTAB, TEXT, elf_file
from tests.support.elf.programs import build_id_of, sha256
from tests.support.harness import mounts
from tests.support.harness.callers import ACL_GROUP, ACL_USER, Caller, Who, calling_all, set_acl
from tests.support.harness.children import cat_program, running
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import lines

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.root, pytest.mark.fuse]

ALICE, BOB, CAROL = 61001, 61002, 61003
STAFF, GUESTS = 62001, 62002
CALLERS = (
    Who(ALICE, ALICE),
    Who(ALICE, STAFF, (GUESTS,)),
    Who(BOB, BOB),
    Who(BOB, BOB, (STAFF, GUESTS)),
    Who(CAROL, STAFF),
    Who(CAROL, GUESTS),
)
ROOT = Who(0, 0)


@dataclasses.dataclass(frozen=True)
class Inode:
    """Mode, owner and group of a file or directory, and whom its access control list names."""

    mode: int
    uid: int = 0
    gid: int = 0
    named: Sequence[tuple[int, int, int]] = ()
    mask: int = 7

    def give_to(self, path: Path) -> None:
        os.chown(path, self.uid, self.gid)
        path.chmod(self.mode)
        if self.named:
            set_acl(path, self.mode, self.named, self.mask)


PUBLIC = Inode(0o755)
HOME = Inode(0o700, ALICE, ALICE)

# The directories above a file, from the top, and the file.
CASES: dict[str, tuple[Inode, ...]] = {
    "public": (PUBLIC, Inode(0o644)),
    "public-program": (PUBLIC, PUBLIC),
    "owner-only": (PUBLIC, Inode(0o600, ALICE, STAFF)),
    "group": (PUBLIC, Inode(0o640, ALICE, STAFF)),
    "execute-only": (PUBLIC, Inode(0o711, ALICE, STAFF)),
    "all-but-the-group": (PUBLIC, Inode(0o604, ALICE, STAFF)),
    "only-the-group": (PUBLIC, Inode(0o070, ALICE, STAFF)),
    "all-but-the-owner": (PUBLIC, Inode(0o044, ALICE, STAFF)),
    "only-others": (PUBLIC, Inode(0o004, ALICE, STAFF)),
    "nobody": (PUBLIC, Inode(0o000, ALICE, STAFF)),
    "home": (HOME, Inode(0o755, ALICE, ALICE)),
    "roots-in-a-home": (HOME, Inode(0o755)),
    "anothers-in-a-home": (HOME, Inode(0o755, BOB, BOB)),
    "home-of-a-group": (Inode(0o750, ALICE, STAFF), Inode(0o755, ALICE, STAFF)),
    "home-of-another-group": (Inode(0o750, ALICE, STAFF), Inode(0o755, BOB, GUESTS)),
    "directory-for-all-but-a-group": (Inode(0o705, 0, STAFF), Inode(0o755, ALICE, STAFF)),
    "directory-for-all-but-another-group": (Inode(0o705, 0, STAFF), Inode(0o755, ALICE, GUESTS)),
    "directory-for-all-but-its-owner": (Inode(0o055, BOB, STAFF), Inode(0o755, ALICE, STAFF)),
    "search-is-enough": (Inode(0o711, BOB, STAFF), Inode(0o755, ALICE, STAFF)),
    "two-directories": (Inode(0o750, ALICE, STAFF), Inode(0o705, ALICE, STAFF),
                        Inode(0o755, ALICE, STAFF)),
    "deep-in-a-home": (HOME, PUBLIC, PUBLIC, Inode(0o755, ALICE, ALICE)),
    "list-names-a-user": (PUBLIC, Inode(0o600, ALICE, STAFF, [(ACL_USER, 4, BOB)])),
    "list-keeps-a-user-out": (PUBLIC, Inode(0o644, ALICE, STAFF, [(ACL_USER, 0, BOB)])),
    "list-keeps-a-group-out": (PUBLIC, Inode(0o644, ALICE, STAFF, [(ACL_GROUP, 0, GUESTS)])),
    "mask-keeps-them-out": (PUBLIC, Inode(0o644, ALICE, STAFF, [(ACL_USER, 4, BOB)], 0)),
    "list-of-the-directory": (Inode(0o700, ALICE, STAFF, [(ACL_USER, 5, BOB)]),
                              Inode(0o755, ALICE, STAFF)),
    "directory-keeps-a-user-out": (Inode(0o755, ALICE, STAFF, [(ACL_USER, 0, BOB)]),
                                   Inode(0o755, ALICE, STAFF)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A file at its own place, and all its names in the mount."""

    origin: Path
    build_id: str
    names: tuple[Path, ...]


def _plant(tree: Path) -> dict[str, Path]:
    """One file for each case, which is executable and debuginfo in one."""
    files = {}
    for number, (name, (*above, file)) in enumerate(CASES.items()):
        place = tree / name
        place.mkdir()
        made = [(place, above[0])]
        for inode in above[1:]:
            place = place / "below"
            place.mkdir()
            made.append((place, inode))
        files[name] = place / "file"
        build_id = bytes([0xCA, 0x5E, number]) + name.encode()
        files[name].write_bytes(elf_file([TEXT, SYMTAB, DWARF], build_id=build_id))
        file.give_to(files[name])
        for where, inode in reversed(made):
            inode.give_to(where)
    return files


def _names(mount: Path, origin: Path, build_id: str) -> tuple[Path, ...]:
    first, rest = build_id[:2], build_id[2:]
    digest = sha256(origin)
    links = (f".build-id/{first}/{rest}", f".build-id/{first}/{rest}.debug")
    return tuple(
        mount / name
        for name in (
            *(f"{build_id}/{name}" for name in ("elf", "executable", "debug", "debuginfo")),
            f"{build_id}/variants/{digest}",
            f"buildid/{build_id}/executable",
            *(f"{where}/{link}" for where in ("debug", ".", "usr/lib/debug") for link in links),
            f"perf{origin}/{build_id}/elf",
            f"perf{origin}/{build_id}/debug",
            f"perf/.build-id/{first}/{rest}/elf",
            f".debug/.build-id/{first}/{rest}/debug",
        )
    )


@pytest.fixture(scope="module")
def tree(scratch: Path) -> Iterator[dict[str, Path]]:
    """A filesystem that is not nosuid, has lists, and on which nothing else is."""
    place = scratch / "readers"
    place.mkdir()
    place.chmod(0o755)
    yield _plant(place)
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def served(scratch: Path, tree: dict[str, Path]) -> Iterator[tuple[BuildIdFs, Path]]:
    """A mount of a store that has seen all of that."""
    directory = scratch / "readers-store"
    directory.mkdir()
    buildidfs = BuildIdFs(directory)
    buildidfs("scan", "tree", next(iter(tree.values())).parents[1])
    with buildidfs.mounted() as mount:
        yield buildidfs, mount


@pytest.fixture(scope="module")
def mount(served: tuple[BuildIdFs, Path]) -> Path:
    """The mount alone."""
    return served[1]


@pytest.fixture(scope="module")
def callers() -> Iterator[list[Caller]]:
    """Everybody who tries; root is the last."""
    with calling_all((*CALLERS, ROOT)) as everybody:
        yield everybody


@pytest.fixture(scope="module")
def cases(tree: dict[str, Path], mount: Path) -> dict[str, Case]:
    """The files by name of the case."""
    ids = {name: build_id_of(path) for name, path in tree.items()}
    return {
        name: Case(path, ids[name], _names(mount, path, ids[name])) for name, path in tree.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_no_more_than_at_its_own_place(
    cases: dict[str, Case], callers: list[Caller], name: str
) -> None:
    case = cases[name]
    *others, root = callers
    for path in case.names:
        assert root.reads(path) == 0, path
    for caller in others:
        at_origin = caller.reads(case.origin)
        answer = caller.reads(case.names[0])
        assert answer in (0, errno.EACCES)
        for path in case.names:
            # Of a name that tells where it was they do not even know that it is there.
            there = f"perf{case.origin}" not in str(path)
            assert caller.reads(path) == (answer if there else answer and errno.ENOENT), path
        if answer == 0:
            assert at_origin == 0, (caller.who, case.origin.stat())
        if "public" in name or name == "search-is-enough":
            assert answer == at_origin == 0, caller.who


def test_what_is_kept_from_whom(cases: dict[str, Case], callers: list[Caller]) -> None:
    """That it is not simply kept from everybody: what one owner and group can say, is said."""
    may_read = {
        name: {caller.who for caller in callers[:-1] if caller.reads(case.names[0]) == 0}
        for name, case in cases.items()
    }
    alice = {who for who in CALLERS if who.uid == ALICE}
    staff = {who for who in CALLERS if STAFF in (who.gid, *who.groups)} - alice
    others = set(CALLERS) - alice - staff
    exactly = {
        "owner-only": alice,
        "group": alice | staff,
        "execute-only": alice,
        "all-but-the-group": alice | others,
        "only-the-group": staff,
        "all-but-the-owner": staff | others,
        "only-others": others,
        "nobody": set(),
        "home": alice,
        "roots-in-a-home": set(),
        "anothers-in-a-home": set(),
        "home-of-a-group": alice | staff,
        "directory-for-all-but-a-group": others,
        "deep-in-a-home": alice,
        "list-names-a-user": alice,
        "list-keeps-a-user-out": alice,
        "mask-keeps-them-out": alice,
        "list-of-the-directory": alice,
    }
    assert {name: may_read[name] for name in exactly} == exactly


def test_listings_have_what_they_may_read(
    cases: dict[str, Case], callers: list[Caller], mount: Path
) -> None:
    perf = mount / f"perf{next(iter(cases.values())).origin.parents[1]}"
    for caller in callers:
        listed = caller.lists(mount)
        split = caller.lists(mount / "debug/.build-id/ca")
        by_path = caller.lists(perf)
        for name, case in cases.items():
            may_read = caller.reads(case.names[0]) == 0
            assert (case.build_id in listed) == may_read, (caller.who, name)
            assert (case.build_id[2:] in split) == may_read
            assert (f"{case.build_id[2:]}.debug" in split) == may_read
            assert (name in by_path) == may_read
            variants = caller.lists(mount / case.build_id / "variants")
            assert variants == ({sha256(case.names[0])} if may_read else set())
            assert (caller.reads(mount / case.build_id / "path") == 0) == may_read
        assert {"buildid", "debug", "perf", "usr"} <= listed


def test_a_name_that_is_known_is_answered(
    cases: dict[str, Case], callers: list[Caller], mount: Path
) -> None:
    """The kernel has one memory of names for all users: it cannot say yes to one and no to all."""
    case = cases["home"]
    stranger = callers[2]
    assert case.build_id not in stranger.lists(mount)
    assert {"elf", "variants"} <= stranger.lists(mount / case.build_id)
    assert stranger.reads(case.names[0]) == errno.EACCES
    assert stranger.reads(mount / "00112233" / "elf") == errno.ENOENT
    shown = case.names[0].stat()
    assert (stat.S_IMODE(shown.st_mode), shown.st_uid, shown.st_gid) == (0o500, ALICE, ALICE)


@pytest.mark.parametrize("how", ["option", "-o", "configuration"])
def test_everything_can_be_listed_for_everybody(
    served: tuple[BuildIdFs, Path],
    cases: dict[str, Case],
    callers: list[Caller],
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    other = BuildIdFs(scratch / "readers", served[0].store)
    options = {"option": ["--list-all"], "-o": ["-o", "list_all"]}.get(how, [])
    settings = scratch / "list-all.toml"
    settings.write_text("[mount]\nlist-all = true\n")
    if how == "configuration":
        command = [*mounts.COMMAND, "--config", str(settings)]
        monkeypatch.setattr(mounts, "COMMAND", command)
    try:
        with other.mounted(*options) as mount:
            stranger = callers[2]
            assert {case.build_id for case in cases.values()} <= stranger.lists(mount)
            private = mount / cases["home"].build_id
            assert stranger.reads(private / "elf") == errno.EACCES
            assert len(stranger.lists(private / "variants")) == 1
    finally:
        other.mountpoint.rmdir()


# --- of processes --------------------------------------------------------------------------------


@contextlib.contextmanager
def _mounted(buildidfs: BuildIdFs, *pids: int) -> Iterator[Path]:
    buildidfs.scan(*pids)
    with buildidfs.mounted() as mount:
        yield mount


_NAMESPACE = """
import ctypes, os, shutil, sys
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    assert not result, os.strerror(ctypes.get_errno())
place, program, inside = sys.argv[1], sys.argv[2], int(sys.argv[3])
check(libc.unshare(0x10000000 | 0x20000))  # CLONE_NEWUSER, CLONE_NEWNS
print("made", flush=True)
os.read(0, 1)
os.setgroups([])
os.setresgid(0, 0, 0)
os.setresuid(0, 0, 0)
check(libc.mount(b"none", place.encode(), b"tmpfs", 0, b"mode=755"))
shutil.copyfile(program, place + "/cat")
os.chmod(place + "/cat", 0o700)
os.chown(place + "/cat", inside, inside)
os.setresuid(inside, inside, inside)
os.execv(place + "/cat", ["cat"])
"""


@pytest.mark.parametrize("inside", [0, 5])
def test_root_of_a_user_namespace_is_whom_it_is_mapped_to(
    buildidfs: BuildIdFs, directory: Path, inside: int
) -> None:
    place = directory / "place"
    place.mkdir()
    place.chmod(0o777)
    first = 700_000
    child = subprocess.Popen(
        [sys.executable, "-c", _NAMESPACE, place, cat_program(), str(inside)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
    )  # fmt: skip
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert lines(child.stdout, lambda got: len(got) == 1) == ["made"]
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{child.pid}/{name}").write_text(f"0 {first} 65536\n")
            child.stdin.write(b"!there?\n")
            assert lines(child.stdout, lambda got: len(got) == 1) == ["there?"]
            buildidfs.scan(child.pid)
        finally:
            child.kill()
    owner = first + inside
    build_id = build_id_of(cat_program())
    with buildidfs.mounted() as mount:
        elf = mount / build_id / "elf"
        shown = elf.stat()
        assert (shown.st_uid, stat.S_IMODE(shown.st_mode)) == (owner, 0o500)
        uids = (owner, first + 5 - inside, first + 1, 1, inside or 1000)
        with calling_all([Who(uid, uid) for uid in uids]) as everybody:
            assert [caller.reads(elf) for caller in everybody] == [0] + [errno.EACCES] * 4


def test_a_memfd_is_its_owners(buildidfs: BuildIdFs) -> None:
    """Its mode says 0777, and only who may look into its processes gets at it."""
    code = (
        "import os, sys\n"
        "fd = os.memfd_create('nowhere')\n"
        f"os.write(fd, open({str(cat_program())!r}, 'rb').read())\n"
        f"os.setresgid({ALICE}, {ALICE}, {ALICE}); os.fchown(fd, {ALICE}, {ALICE})\n"
        f"os.setresuid({ALICE}, {ALICE}, {ALICE})\n"
        "os.execve(fd, ['cat'], {})\n"
    )
    build_id = build_id_of(cat_program())
    with running([sys.executable, "-c", code]) as child, _mounted(buildidfs, child.pid) as mount:
        elf = mount / build_id / "elf"
        assert stat.S_IMODE(elf.stat().st_mode) == 0o500
        with calling_all([Who(ALICE, ALICE), Who(BOB, ALICE)]) as (alice, bob):
            assert (alice.reads(elf), bob.reads(elf)) == (0, errno.EACCES)
            assert build_id in alice.lists(mount)
            assert build_id not in bob.lists(mount)


def test_a_program_that_may_only_be_executed(buildidfs: BuildIdFs, directory: Path) -> None:
    program = directory / "cat"
    shutil.copyfile(cat_program(), program)
    program.chmod(0o711)
    become = [f"--reuid={BOB}", f"--regid={BOB}", "--clear-groups"]
    command = [tool("setpriv"), *become, str(program)]
    build_id = build_id_of(program)
    with (
        running(command) as child,
        _mounted(buildidfs, child.pid) as mount,
        calling_all([Who(BOB, BOB), ROOT]) as (bob, root),
    ):
        assert bob.reads(program) == errno.EACCES
        assert bob.reads(mount / build_id / "elf") == errno.EACCES
        assert root.reads(mount / build_id / "elf") == 0


def test_the_same_bytes_where_all_may_read_them(buildidfs: BuildIdFs, directory: Path) -> None:
    """Seen while the store is mounted, and by who has asked before."""
    home = directory / "home"
    home.mkdir()
    shutil.copy(cat_program(), home / "cat")
    (home / "cat").chmod(0o755)
    home.chmod(0o700)
    build_id = build_id_of(home / "cat")
    buildidfs("scan", "tree", home)
    with buildidfs.mounted() as mount, calling_all([Who(BOB, BOB)]) as (bob,):
        elf = mount / build_id / "elf"
        assert bob.reads(elf) == errno.EACCES
        assert build_id not in bob.lists(mount)
        shutil.copy(home / "cat", directory / "public")
        buildidfs("scan", "tree", directory / "public")
        assert bob.reads(elf) == 0
        assert build_id in bob.lists(mount)


def test_who_is_alone_with_a_store_reads_all_of_it(buildidfs: BuildIdFs, directory: Path) -> None:
    """A user who could read a file, by whatever right, captured it into a store of their own."""
    home = directory / "home"
    home.mkdir()
    shutil.copy(cat_program(), home / "cat")
    (home / "cat").chmod(0o755)
    os.chown(home, os.geteuid(), ALICE)
    home.chmod(0o700)
    buildidfs("scan", "tree", home)
    build_id = build_id_of(cat_program())
    with buildidfs.mounted("-o", "noallow_other") as mount:
        assert (mount / build_id / "elf").read_bytes() == cat_program().read_bytes()
        options = [line.split(" - ")[1] for line in Path("/proc/self/mountinfo").read_text()
                   .splitlines() if f" {mount} " in line]  # fmt: skip
        assert "default_permissions" not in options[0]
        with calling_all([Who(BOB, BOB)]) as (bob,):
            assert bob.reads(mount / build_id / "elf") == errno.EACCES
            with pytest.raises(PermissionError):
                bob.lists(mount)
