# SPDX-License-Identifier: Apache-2.0
"""The mount as a person walks through it, after the container is gone: every name, once.

And who may see what of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import functools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.store import Store
from tests.support.clients.tools import run, tool
from tests.support.containers.ephemeral import container
from tests.support.elf.elfwriter import TEXT, elf_file
from tests.support.elf.programs import sha256
from tests.support.harness.browsed import see, seen_in
from tests.support.harness.callers import Who, calling
from tests.support.harness.captures import capture
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.elf.programs import Program

pytestmark = [pytest.mark.root, pytest.mark.fuse]

ALICE, BOB = 61001, 61002
TEXTS = {"id", "first-seen", "last-seen"}


@dataclasses.dataclass(frozen=True)
class Ended:
    """A container that is gone, in a mount that was there before it was scanned.

    ``root`` is where the mount has its files, ``before`` and ``after`` what ``missing/`` had before
    the scan and right after it, by name.
    """

    program: Program
    mount: Path
    app: str
    label: str
    root: Path
    before: dict[str, str]
    after: set[str]


def _missing(mount: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (mount / "missing").iterdir()}


def _held(*names: str) -> list[str]:
    """Open files with these names, of all processes: a watch of the user's own may be at work."""
    found = []
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # gone by now
            if os.path.basename(os.readlink(fd)) in names:
                found.append(str(fd))
    return found


@pytest.fixture(scope="module", params=["crun", "overlay"])
def ended(request: pytest.FixtureRequest, scratch: Path, program: Program) -> Iterator[Ended]:
    """Somebody asks for its files in vain; it is scanned, and destroyed."""
    directory = scratch / f"browsed-{request.param}"
    nothing = directory / "nothing"
    nothing.mkdir(parents=True)
    buildidfs = BuildIdFs(directory)
    buildidfs("scan", "tree", nothing)
    exe, lib = program.binaries
    with (
        container(request.param, program, directory / "container") as running,
        buildidfs.mounted() as mount,
    ):
        debug = mount / f"debug/.build-id/{exe.build_id[:2]}/{exe.build_id[2:]}.debug"
        for path in (debug, mount / exe.build_id / "elf", mount / lib.build_id):
            assert run([tool("cat"), path]).rc != 0
        # A name that the kernel knows to be absent it does not ask for again, for some minutes.
        asked = mount / f"perf/.build-id/{exe.build_id[:2]}/{exe.build_id[2:]}"
        assert run([tool("head"), asked]).rc != 0
        before = _missing(mount)
        buildidfs.scan(running.spin, running.stuck)
        after = set(os.listdir(mount / "missing"))
        until(lambda: not _held("hot", "libhot.so"), "that no watch of this machine has it open")
        running.destroy()
        assert not os.path.exists(running.app)
        shown = json.loads(buildidfs("show", "--json", exe.build_id).out)
        (label,) = {origin["container"] for origin in shown["origins"]}
        root = mount / "containers" / label / "root"
        yield Ended(program, mount, running.app, label, root, before, after)


def test_what_was_missing_says_who_asked_and_goes_when_it_comes(ended: Ended) -> None:
    exe, lib = (binary.build_id for binary in ended.program.binaries)
    assert {exe, lib} <= ended.before.keys()
    told = dict(line.split(": ", 1) for line in ended.before[exe].splitlines())
    assert told["build-id"] == exe
    assert "debuginfo" in told["wanted"]
    asked = dict(re.findall(r"(\S+) \((\d+)\)", told["by"]))
    assert asked.keys() == {"cat", "head"}
    assert sum(map(int, asked.values())) == int(told["asked"])
    assert told["first"] <= told["last"]
    assert dict(line.split(": ", 1) for line in ended.before[lib].splitlines())["by"] == "cat (1)"
    assert not {exe, lib} & ended.after, "in the moment that they are there"


def test_a_container_that_is_gone(ended: Ended) -> None:
    place = ended.root.parent
    assert ended.label in os.listdir(ended.mount / "containers")
    assert set(os.listdir(place)) == TEXTS | {"root"}
    first, last = (
        datetime.datetime.fromisoformat((place / name).read_text().strip())
        for name in ("first-seen", "last-seen")
    )
    assert first <= last
    assert last.utcoffset() == datetime.timedelta(0)
    assert (place / "id").read_text().strip().startswith(ended.label.partition(":")[2])
    for binary, directory in zip(ended.program.binaries, ("bin", "lib"), strict=True):
        path = Path(f"{ended.root}{ended.app}/{directory}/{binary.shipped.name}")
        assert path.read_bytes() == binary.shipped.read_bytes()
        assert os.path.samefile(path, ended.mount / binary.build_id / "elf")


def test_all_its_files_are_what_they_were(ended: Ended) -> None:
    """Each is also among the variants of its build ID, and says the digest of its bytes."""
    count = 0
    for directory, _, names in os.walk(ended.root):
        for path in (Path(directory, name) for name in names):
            digest = sha256(path)
            assert os.getxattr(path, "user.sha256").decode() == digest
            build_id = os.getxattr(path, "user.buildid.id").decode()
            assert os.path.samefile(path, ended.mount / build_id / "variants" / digest)
            count += 1
    assert count >= 2
    debug = {sha256(binary.debug) for binary in ended.program.binaries}
    assert all((ended.mount / each.build_id / "debug").exists() for each in ended.program.binaries)
    assert {
        sha256(ended.mount / each.build_id / "debug") for each in ended.program.binaries
    } == debug


def test_by_path_and_by_name(ended: Ended) -> None:
    for binary, directory in zip(ended.program.binaries, ("bin", "lib"), strict=True):
        elf = ended.mount / binary.build_id / "elf"
        name = binary.shipped.name
        for link in (
            Path(f"{ended.mount}/by-path{ended.app}/{directory}/{name}/{binary.build_id}"),
            ended.mount / "by-name" / name / binary.build_id,
        ):
            assert link.is_symlink()
            assert binary.build_id in os.listdir(link.parent)
            assert os.path.samefile(link / "elf", elf)
            assert (link / "path").read_text() == (elf.parent / "path").read_text()
        assert name in os.listdir(ended.mount / "by-name")
    assert not (ended.mount / "by-name/nobody-has-this").exists()
    assert not (ended.mount / "by-path/nobody/has/this").exists()


def test_a_loader_finds_what_it_was_told(ended: Ended) -> None:
    """As far as its container has it: under the name that the program asks for."""
    interpreter = run([tool("readelf"), "-l", ended.program.exe.shipped], check=True).out
    found = re.search(r"interpreter: (/[^]]+)\]", interpreter)
    assert found is not None
    loader = Path(f"{ended.root}{found[1]}")
    assert sha256(loader) == sha256(Path(found[1]))


def test_extended_attributes(ended: Ended) -> None:
    exe = ended.program.exe
    elf = ended.mount / exe.build_id / "elf"
    names = os.listxattr(elf)
    told = {name: os.getxattr(elf, name).decode() for name in names}
    assert told["user.sha256"] == sha256(exe.shipped)
    assert told["user.buildid.id"] == exe.build_id
    assert told["user.buildid.kind"] == "executable"
    assert told["user.buildid.path"] == f"{ended.app}/bin/hot"
    assert told["user.buildid.container"] == ended.label
    inside = Path(f"{ended.root}{ended.app}/bin/hot")
    assert {name: os.getxattr(inside, name).decode() for name in os.listxattr(inside)} == told
    printed = run([tool("getfattr"), "-d", "-m", "user.", elf], check=True).out
    for name, value in told.items():
        assert f'{name}="{value}"' in printed
    link = ended.mount / "by-name/hot" / exe.build_id
    for path in (
        ended.mount, elf.parent, ended.root, ended.mount / "README", elf.parent / "path", link,
    ):  # fmt: skip
        assert os.listxattr(path, follow_symlinks=False) == []
        ask = functools.partial(os.getxattr, path, "user.sha256", follow_symlinks=False)
        _refused(errno.ENODATA, ask)
    _refused(errno.ENODATA, lambda: os.getxattr(elf, "user.nothing"))
    _refused(errno.EOPNOTSUPP, lambda: os.getxattr(elf, "security.selinux"))
    _refused(errno.EROFS, lambda: os.setxattr(elf, "user.sha256", b"x"))
    _refused(errno.EROFS, lambda: os.removexattr(elf, "user.sha256"))


def _refused(number: int, call: Callable[[], object]) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is what is looked at
        call()
    assert caught.value.errno == number


@pytest.mark.parametrize(
    "command", [["find", "-ls"], ["find", "-L", "by-path", "by-name", "containers", "-type", "f"],
                ["ls", "-lR"], ["du", "-a"], ["grep", "-rc", "nothing", "containers", "missing"]],
    ids=" ".join,
)  # fmt: skip
def test_walking_through_all_of_it(ended: Ended, command: list[str]) -> None:
    """With the names of it all in what is printed, and no complaint."""
    words = [command[0], *command[1:]]
    if command == ["find", "-ls"]:
        words = ["find", ".", "-ls"]
    result = run([tool(words[0]), *words[1:]], cwd=ended.mount)
    assert result.err == "", str(result)
    assert result.rc == (1 if command[0] == "grep" else 0)
    assert "hot" in result.out


def test_readme(ended: Ended) -> None:
    text = (ended.mount / "README").read_text()
    for name in re.findall(r"^([a-z-]+)/", text, re.MULTILINE):
        assert (ended.mount / name).is_dir(), name
    assert "set sysroot" in text


# --- who may see what ----------------------------------------------------------------------------


@pytest.fixture
def filled(directory: Path) -> BuildIdFs:
    """A store with a container of Alice's, and one of everybody's."""
    with Store.create(directory / "store") as store:
        mine = seen_in("mnt:7", b"/home/alice/game", mode=0o100700, uid=ALICE, gid=ALICE)
        see(store, elf_file([TEXT], build_id=b"\x01\x01"), mine, build_id=b"\x01\x01")
        see(store, elf_file([TEXT], build_id=b"\x01\x02"), seen_in("x/y"), build_id=b"\x01\x02")
    return BuildIdFs(directory)


def test_other_users(filled: BuildIdFs) -> None:
    with (
        filled.mounted() as mount,
        calling(Who(ALICE, ALICE)) as alice,
        calling(Who(BOB, BOB)) as bob,
    ):
        assert not (mount / "deadbeef").exists()
        assert os.listdir(mount / "missing") == ["deadbeef"]
        assert alice.lists(mount / "containers") == {"mnt:7", "x%2Fy"}
        assert bob.lists(mount / "containers") == {"x%2Fy"}
        assert bob.lists(mount / "by-name") == {"app"}
        assert alice.lists(mount / "by-name") == {"app", "game"}
        assert bob.lists(mount / "by-path") == {"usr"}
        private = mount / "containers/mnt:7/root/home/alice/game"
        assert (alice.reads(private), bob.reads(private)) == (0, errno.ENOENT)
        name = "user.buildid.path"
        assert (alice.is_told(private, name), bob.is_told(private, name)) == (0, errno.ENOENT)
        assert bob.is_told(mount / "0101/elf", name) == errno.EACCES
        public = mount / "containers/x%2Fy/root/usr/bin/app"
        assert (bob.reads(public), bob.is_told(public, name)) == (0, 0)
        for who in (alice, bob):
            assert who.reads(mount / "missing/deadbeef") == errno.EACCES
            assert {"missing", "README", "containers"} <= who.lists(mount)
            assert who.reads(mount / "README") == 0
            with pytest.raises(PermissionError):
                who.lists(mount / "missing")


def test_everything_is_listed_if_root_says_so(filled: BuildIdFs) -> None:
    with filled.mounted("--list-all") as mount, calling(Who(BOB, BOB)) as bob:
        assert bob.lists(mount / "containers") == {"mnt:7", "x%2Fy"}
        assert bob.lists(mount / "containers/mnt:7/root/home/alice") == {"game"}
        assert bob.reads(mount / "containers/mnt:7/root/home/alice/game") == errno.EACCES
        with pytest.raises(PermissionError):
            bob.lists(mount / "missing")


# --- names and numbers ---------------------------------------------------------------------------


def test_odd_names(directory: Path) -> None:
    odd = [b"/\xff\xfe/" + b"n" * 255, b"/a\n\x1b[2J/b c", b"/" + b"d/" * 100 + b"deep"]
    with Store.create(directory / "store") as store:
        for number, path in enumerate(odd):
            see(store, b"%d" % number, seen_in("..", path), build_id=b"\x01%d" % number)
    with BuildIdFs(directory).mounted() as mount:
        top = os.fsencode(mount)
        for number, path in enumerate(odd):
            build_id = (b"\x01%d" % number).hex().encode()
            for name in (
                b"/containers/%2E./root" + path,
                b"/by-path" + path + b"/" + build_id + b"/elf",
                b"/by-name/" + os.path.basename(path) + b"/" + build_id + b"/elf",
            ):
                assert Path(os.fsdecode(top + name)).read_bytes() == b"%d" % number
        assert set(os.listdir(top + b"/by-name")) == {os.path.basename(path) for path in odd}
        assert os.listdir(mount / "containers") == ["%2E."]
        for long in ("n" * 256, "lib" + "x" * 300 + ".so.1"):
            for place in ("by-path", "by-name", "containers", "missing", "containers/%2E./root"):
                _refused(errno.ENAMETOOLONG, (mount / place / long).stat)


def test_what_is_removed_while_somebody_looks(filled: BuildIdFs) -> None:
    with filled.mounted() as mount:
        public = mount / "containers/x%2Fy/root/usr/bin/app"
        held = os.open(public.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            before = public.read_bytes()
            with public.open("rb") as file:
                filled("remove", "0102")
                assert file.read() == before, "whoever has it open keeps it"
            assert os.listdir(mount / "containers") == ["mnt:7"]
            assert os.listdir(mount / "by-name") == ["game"]
            assert os.listdir(mount / "by-path") == ["home"]
            assert os.listdir(held) == []
        finally:
            os.close(held)


def test_a_large_container_is_listed_whole(directory: Path) -> None:
    """More names than fit into one reply, or into many."""
    with Store.create(directory / "store") as store:
        names = {f"lib{number:04}.so" for number in range(800)}
        _see_many(store, sorted(names))
    with BuildIdFs(directory).mounted() as mount:
        for place in ("containers/box/root/lib", "by-path/lib", "by-name"):
            assert sorted(os.listdir(mount / place)) == sorted(names)
            with os.scandir(mount / place) as entries:
                seen = {entry.name: entry.inode() for entry in entries}
            assert len(set(seen.values())) == 800
        shown = run([tool("ls"), "-l", mount / "containers/box/root/lib"], check=True)
        assert shown.out.count(".so") == 800
        shutil.copytree(mount / "containers/box", directory / "copied")
    assert len(os.listdir(directory / "copied/root/lib")) == 800


def _see_many(store: Store, names: list[str]) -> None:
    store.commit(
        [
            capture(store, b"same", name.encode()[:8], at=seen_in("box", b"/lib/" + name.encode()))
            for name in names
        ]
    )
