# SPDX-License-Identifier: Apache-2.0
"""A store keeps within its limits while it is captured into, read through a mount, and cleaned."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from buildidfs.model import BuildId, Kind
from buildidfs.store import Store
from tests.support.clients import tools
from tests.support.clients.terminals import on_terminal
from tests.support.clients.tools import run, tool, unmount
from tests.support.containers import packages
from tests.support.elf.elfwriter import TEXT, Section, elf_file
from tests.support.harness.children import running
from tests.support.harness.mounts import COMMAND, BuildIdFs
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.root

MIB = 1 << 20
SIZE = 1 << 20

_ECHO = """
#include <unistd.h>
int main(void)
{
    char text[64];
    for (ssize_t size; (size = read(0, text, sizeof text)) > 0;)
        write(1, text, size);
    return 0;
}
"""


def build_id(number: int) -> BuildId:
    return BuildId(b"%020d" % number)


def program(path: Path, number: int, size: int = SIZE) -> Path:
    """An ELF file of about that size, which nobody else has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = elf_file([TEXT, Section(b".data", os.urandom(size))], build_id=build_id(number))
    path.write_bytes(data)
    return path


def programs(directory: Path, numbers: range) -> Path:
    for number in numbers:
        program(directory / str(number), number)
    return directory


def others(directory: Path, numbers: range) -> list[Path]:
    """Files of another user: nobody says that they can be had again."""
    programs(directory, numbers)
    paths = [directory / str(number) for number in numbers]
    for path in paths:
        os.chown(path, 1000, 1000)
    return paths


def held(store: Path) -> set[int]:
    """The numbers of the programs in a store; the vDSO of their processes has none."""
    with Store.open(store, read_only=True) as opened:
        ids = [bytes(each) for _, each in opened.index.build_ids_from()]
    return {int(each) for each in ids if each.isdigit()}


def is_sound(store: Path) -> bool:
    with Store.open(store) as opened:
        assert list(opened.check(digests=True)) == []
        return True


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# --- small filesystems ---------------------------------------------------------------------------


@pytest.fixture(params=["tmpfs", "ext4"])
def small(request: pytest.FixtureRequest, directory: Path) -> Iterator[Path]:
    """A filesystem of 32 MiB."""
    point = directory / "small"
    point.mkdir()
    if request.param == "tmpfs":
        run([tool("mount"), "-t", "tmpfs", "-o", "size=32m", "tmpfs", point], check=True)
    else:
        if not Path("/dev/loop-control").exists():
            pytest.skip("this machine has no loop devices")
        with (directory / "image").open("wb") as image:
            image.truncate(32 * MIB)
        run([tool("mkfs.ext4"), "-q", "-m", "0", "-O", "^has_journal", directory / "image"],
            check=True)  # fmt: skip
        run([tool("mount"), "-o", "loop", directory / "image", point], check=True)
    yield point
    unmount(point)


def test_more_than_fits(buildidfs: BuildIdFs, directory: Path, small: Path) -> None:
    """Nothing is configured; the filesystem is simply small."""
    buildidfs.store = small / "store"
    programs(directory / "a", range(20))
    first = json.loads(buildidfs("scan", "tree", "--json", directory / "a").out)
    assert (first["captured"], first["unreadable"]) == (20, [])
    assert held(buildidfs.store) == set(range(20))
    shutil.rmtree(directory / "a")
    time.sleep(1.1)  # uses are told apart by the second
    foreign = others(directory / "b", range(100, 120))
    buildidfs("add", *foreign)
    left = held(buildidfs.store)
    assert len(left & set(range(20))) >= 8, "each owner keeps a share"
    assert len(left & set(range(100, 120))) >= 8
    assert len(left) < 40
    time.sleep(1.1)
    foreign = others(directory / "c", range(200, 270))
    summary = json.loads(buildidfs("add", "--json", *foreign).out)
    assert (summary["captured"], summary["unreadable"]) == (70, [])
    left = held(buildidfs.store)
    assert not left & set(range(100, 120)), "the oldest of the owner went first"
    assert len(left & set(range(20))) >= 8
    assert len(left) >= 20
    assert is_sound(buildidfs.store)


@pytest.mark.host
def test_one_file_that_will_never_fit(buildidfs: BuildIdFs, directory: Path, small: Path) -> None:
    buildidfs.store = small / "store"
    programs(directory / "a", range(10))
    buildidfs("scan", "tree", directory / "a")
    os.chown(program(directory / "b" / "huge", 77, 40 * MIB), 1000, 1000)
    program(directory / "b" / "large", 79, 40 * MIB)
    program(directory / "b" / "small", 78)
    done = buildidfs("scan", "tree", "--json", directory / "b", check=False)
    assert done.rc == 3, done
    summary = json.loads(done.out)
    ((unreadable),) = summary["unreadable"]
    assert unreadable["path"].endswith("/huge")
    assert "more than the store may ever take" in unreadable["reason"]
    assert summary["omitted"] == 1, "the one that this host has"
    assert held(buildidfs.store) == {*range(10), 78}, "nothing was removed for it"


def test_what_is_pinned_is_not_removed_for_others(
    buildidfs: BuildIdFs, directory: Path, small: Path
) -> None:
    buildidfs.store = small / "store"
    programs(directory / "a", range(24))
    buildidfs("scan", "tree", directory / "a")
    buildidfs("pin", *(str(build_id(number)) for number in (*range(24), *range(100, 120))))
    foreign = others(directory / "b", range(100, 120))
    done = buildidfs("add", *foreign, check=False)
    assert done.rc == 3, done
    assert "blobs are pinned" in done.err
    assert "there is nothing else in it" not in done.err
    assert held(buildidfs.store) >= set(range(24))
    assert is_sound(buildidfs.store)
    buildidfs("unpin", *(str(build_id(number)) for number in range(24)))
    buildidfs("add", *foreign)
    assert held(buildidfs.store) >= set(range(100, 120))


# --- recapturable files, and others ---------------------------------------------------------------


@pytest.mark.host
def test_what_this_host_has_is_only_noted_where_it_would_displace_what_is_gone(
    buildidfs: BuildIdFs, directory: Path, small: Path
) -> None:
    buildidfs.store = small / "store"
    gone = others(directory / "gone", range(24))
    buildidfs("add", *gone)
    shutil.rmtree(directory / "gone")
    before = held(buildidfs.store)
    assert len(before) == 24
    here = programs(directory / "here", range(100, 120))
    done = buildidfs("scan", "tree", "--json", here, check=False)
    assert done.rc == 14
    first = json.loads(done.out)
    assert f"{first['omitted']} files not stored" in done.err
    assert held(buildidfs.store) >= before
    assert first["evicted"]["lost"] == 0
    assert first["omitted"] + first["captured"] == 20
    assert first["omitted"] >= 14
    text = buildidfs("scan", "tree", here, check=False).out
    assert f"{first['omitted']} omitted" in text
    second = json.loads(buildidfs("scan", "tree", "--json", here, check=False).out)
    assert (second["captured"], second["omitted"]) == (0, first["omitted"]), "it comes to the same"

    rows = objects(buildidfs("journal", "--json").out)
    omitted = {row["build_id"]: row for row in rows if row["omitted"]}
    assert len(omitted) == first["omitted"]
    for row in omitted.values():
        status = Path(row["path"]).stat()
        assert (row["omitted"]["ino"], row["omitted"]["size"]) == (status.st_ino, status.st_size)
    assert "omitted" in buildidfs("status", check=False).out


@pytest.mark.host
def test_hosts_file_in_another_mount_namespace_displaces_nothing_that_is_gone(
    buildidfs: BuildIdFs, directory: Path, small: Path
) -> None:
    """A service with a mount namespace of its own runs what the host has, too."""
    buildidfs.store = small / "store"
    gone = others(directory / "gone", range(24))
    buildidfs("add", *gone)
    shutil.rmtree(directory / "gone")
    source, here = directory / "service.c", directory / "service"
    source.write_text(_ECHO)
    number = f"-Wl,--build-id=0x{bytes(build_id(100)).hex()}"
    run([tool("gcc"), "-static", number, "-o", here, source], check=True)
    with here.open("ab") as file:
        file.write(os.urandom(16 * MIB))
    before = held(buildidfs.store)
    omitted = json.loads(buildidfs("scan", "tree", "--json", here, check=False).out)
    assert (omitted["captured"], omitted["omitted"]) == (0, 1)

    with running([tool("unshare"), "-m", here]) as service:
        done = buildidfs("scan", "proc", "--json", "--pid", str(service.pid), check=False)
        kept = held(buildidfs.store)
        here.unlink()
        # The vDSO may be among what makes room, after the scan has met it: then it says so, and 3.
        after = buildidfs("scan", "proc", "--json", "--pid", str(service.pid), check=False)
    assert done.rc == 14
    summary = json.loads(done.out)
    assert (summary["omitted"], summary["evicted"]["lost"]) == (1, 0)
    assert kept >= before
    assert json.loads(after.out)["captured"] > 0, "the host does not have it any more"
    assert 100 in held(buildidfs.store)


@pytest.mark.host
def test_all_that_can_be_had_again_goes_before_what_is_gone(
    buildidfs: BuildIdFs, directory: Path, small: Path
) -> None:
    """A small file that is gone and old, a large store full of what the host has."""
    buildidfs.store = small / "store"
    gone = others(directory / "gone", range(4))
    buildidfs("add", *gone)
    shutil.rmtree(directory / "gone")
    time.sleep(1.1)
    here = programs(directory / "here", range(100, 130))
    assert buildidfs("scan", "tree", here, check=False).rc == 14
    room = held(buildidfs.store) - set(range(4))
    assert len(room) > 10
    foreign = others(directory / "new", range(200, 200 + len(room) - 2))
    done = buildidfs("add", *foreign)
    assert held(buildidfs.store) >= {*range(4), *range(200, 200 + len(room) - 2)}
    assert "that can be captured again" in done.out
    assert str(directory / "here") in done.out, "and which they were"

    time.sleep(1.1)
    foreign = others(directory / "more", range(300, 310))
    done = buildidfs("add", *foreign)
    left = held(buildidfs.store)
    assert left >= set(range(300, 310))
    assert not left & set(range(100, 130)), "none of them, while others were lost"
    lost = {*range(4), *range(200, 200 + len(room) - 2)} - left
    assert f"{len(lost)} that cannot be captured again" in done.err
    shown = json.loads(buildidfs("status", "--json", check=False).out)["evicted"]
    named = {int(bytes.fromhex(each["build_id"])) for each in shown["named"]}
    assert (shown["lost"], named) == (len(lost), lost)
    assert all(each["path"].startswith(str(directory)) for each in shown["named"])
    told = buildidfs("status", check=False).out
    assert "that cannot be captured again" in told
    assert " lost " in told
    known = {row["build_id"] for row in objects(buildidfs("journal", "--json").out)}
    assert known >= {str(build_id(number)) for number in lost}
    assert is_sound(buildidfs.store)


def test_a_package_that_is_there_gives_way_and_one_that_is_deleted_does_not(
    buildidfs: BuildIdFs, directory: Path, small: Path
) -> None:
    buildidfs.store = small / "store"
    for name, numbers in (("kept", range(8)), ("deleted", range(50, 58))):
        programs(directory / name / "usr", numbers)
        (directory / "out").mkdir(exist_ok=True)
        package = packages.deb(directory / name, directory / "out", "-Zgzip", "-z1")
        package.rename(directory / f"{name}.deb")
        buildidfs("scan", "package", directory / f"{name}.deb")
    (directory / "deleted.deb").unlink()
    assert held(buildidfs.store) == {*range(8), *range(50, 58)}
    foreign = others(directory / "new", range(200, 216))
    buildidfs("add", *foreign)
    left = held(buildidfs.store)
    assert left >= {*range(50, 58), *range(200, 216)}
    assert len(left & set(range(8))) < 8


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.host
def test_limits_of_the_configuration(buildidfs: BuildIdFs, directory: Path) -> None:
    settings = directory / "settings.toml"
    settings.write_text('[retention]\nmax-size = "12MiB"\n')
    programs(directory / "a", range(30))
    done = buildidfs("--config", settings, "scan", "tree", directory / "a", check=False)
    assert done.rc == 14
    with Store.open(buildidfs.store, read_only=True) as store:
        stats = store.stats()
        assert stats.stored_bytes + stats.index_bytes <= 12 * MIB
        assert stats.blobs >= 8
    shown = json.loads(buildidfs("--config", settings, "status", "--json", check=False).out)
    assert shown["max_size"] == 12 * MIB
    assert shown["stored_bytes"] + shown["index_bytes"] <= 12 * MIB
    assert "12.0 MiB at most" in buildidfs("--config", settings, "status", check=False).out
    wrong = directory / "wrong.toml"
    wrong.write_text('[retention]\nmax-size = "twelve"\n')
    done = buildidfs("--config", wrong, "scan", "tree", directory / "a", check=False)
    assert done.rc == 2
    assert "wrong.toml: retention.max-size: not a size" in done.err


def test_prune_says_what_and_why(buildidfs: BuildIdFs, directory: Path) -> None:
    programs(directory / "a", range(6))
    buildidfs("scan", "tree", directory / "a")
    one, two = str(build_id(1)), str(build_id(2))
    buildidfs("pin", "--name", "incident 7", one)
    buildidfs("pin", two)
    options = ("prune", "--dry-run", "-v", "--max-size", "0", "--json")
    plan = objects(buildidfs(*options, check=False).out)
    assert {each["build_ids"][0] for each in plan if not each["goes"]} == {one, two}
    assert {each["why"] for each in plan if not each["goes"]} == {"pinned: incident 7", "pinned"}
    assert len(plan) == 6
    assert all(each["stored_bytes"] > SIZE for each in plan)
    assert {Path(each["path"]).parent for each in plan} == {directory / "a"}
    done = buildidfs("prune", "-n", "--max-size", "0", check=False)
    assert done.out.count("remove\t") == 4
    assert "would go" in done.out
    assert done.rc == 14, "it would not be enough"
    assert "would still be exceeded: max-size by" in done.err
    why = r"^  4 blobs, \S+ MiB: max-size; (this host has it|oldest use)$"  # that in a container
    assert re.search(why, done.out, re.MULTILINE)
    assert len(held(buildidfs.store)) == 6, "so far it was only talked about"

    done = buildidfs("prune", "--max-size", "0", "--limit", "1", check=False)
    assert done.out.count("remove\t") == 1
    assert "4 blobs, " in done.out, "all that had to go is removed, whatever is printed"
    assert done.rc == 14, "the pins are in the way"
    assert "still exceeded: max-size by" in done.err
    assert held(buildidfs.store) == {1, 2}
    within = ": the store is within its limits ("
    assert buildidfs("prune").out.startswith(f"0 blobs, 0 B, removed{within}")
    assert buildidfs("prune", "-n").out.startswith(f"0 blobs, 0 B, would go{within}")
    assert buildidfs("prune", "-n", "--max-size", "1G").rc == 0
    assert buildidfs("prune", "--max-age", "x", check=False).rc == 2
    assert is_sound(buildidfs.store)


def test_terminal_shows_the_first_files_to_prune(buildidfs: BuildIdFs, directory: Path) -> None:
    programs(directory / "a", range(23))
    buildidfs("scan", "tree", directory / "a")
    words = (*COMMAND, "--store", buildidfs.store, "prune", "-n", "--max-size", "0")

    def lines(*more: str) -> list[str]:
        return on_terminal(*words, *more, env={"NO_COLOR": "1"}).lines

    def rows(*more: str) -> int:
        return sum(line.startswith("remove ") for line in lines(*more))

    assert rows() == 20
    assert "and 3 more, see --limit" in lines()
    assert rows("--limit", "99") == 23
    assert buildidfs("prune", "-n", "--max-size", "0", check=False).out.count("remove\t") == 23
    assert len(held(buildidfs.store)) == 23


def test_files_on_this_host_go_first(buildidfs: BuildIdFs, directory: Path) -> None:
    """/usr/bin/true will be there when it is wanted."""
    buildidfs("scan", "tree", "/usr/bin/true")
    time.sleep(1.1)
    programs(directory / "a", range(3))
    buildidfs("scan", "tree", directory / "a")
    with Store.open(buildidfs.store) as store:
        trust = {artifact.trust for artifact in store.index.variants(1, Kind.EXECUTABLE)}
        stats = store.stats()
    limit = stats.stored_bytes + stats.index_bytes - 1
    (choice,) = objects(buildidfs("prune", "-n", "--json", "--max-size", str(limit)).out)
    assert choice["path"].endswith("/true"), trust
    buildidfs("prune", "--max-size", str(limit))
    assert held(buildidfs.store) == {0, 1, 2}


# --- places --------------------------------------------------------------------------------------


@pytest.mark.host
def test_flood_from_mount_namespaces_displaces_no_container(
    buildidfs: BuildIdFs, directory: Path
) -> None:
    """Two containers ran one program each; then 30 mount namespaces run one new program each.

    Each container has half of the C library and its debug file, 4.5 MiB in all. The flood has more
    when the store is full.
    """
    settings = directory / "settings.toml"
    settings.write_text('[retention]\nmax-size = "24MiB"\n')
    source, template, mark = directory / "echo.c", directory / "echo", "ee" * 20
    source.write_text(_ECHO)
    run([tool("gcc"), f"-Wl,--build-id=0x{mark}", "-o", template, source], check=True)

    def scanned(numbers: range, group: str) -> None:
        with contextlib.ExitStack() as stack:
            pids = []
            for number in numbers:
                path = directory / str(number)
                data = template.read_bytes().replace(bytes.fromhex(mark), bytes(build_id(number)))
                path.write_bytes(data + os.urandom(SIZE))
                path.chmod(0o755)
                enter = _ENTER.replace("GROUP", group % number) if group else ""
                words = [tool("unshare"), "-m", "sh", "-c", f"{enter}exec {path}"]
                pid = stack.enter_context(running(words)).pid
                exe = Path(f"/proc/{pid}/exe")
                until(lambda: exe.readlink() == path, "the program")  # noqa: B023
                pids += ["--pid", str(pid)]
            buildidfs("--config", settings, "scan", "proc", *pids, check=False)
        for number in numbers:
            (directory / str(number)).unlink()
            if group:
                leave = f"mount -t cgroup2 none /mnt; rmdir /mnt/{group % number}"
                run([tool("unshare"), "-m", "sh", "-c", leave], check=True)

    scanned(range(2), "docker-%064x.scope")
    assert held(buildidfs.store) == {0, 1}
    for start in range(100, 130, 10):
        scanned(range(start, start + 10), "")
    left = held(buildidfs.store)
    assert left >= {0, 1}
    assert left & set(range(120, 130)), "the newest of the flood have room"
    assert not left >= set(range(100, 130)), "and not all of it fits"


_ENTER = (
    "mount -t cgroup2 none /mnt; mkdir -p /mnt/GROUP; echo $$ > /mnt/GROUP/cgroup.procs;"
    " umount /mnt; "
)


# --- pins ----------------------------------------------------------------------------------------


def test_pins_are_listed_and_taken_back(buildidfs: BuildIdFs, directory: Path) -> None:
    programs(directory / "a", range(0, 20, 10))
    buildidfs("scan", "tree", directory / "a")
    full, unknown = str(build_id(0)), "ab" * 20
    assert "pinned 1 build ID: " in buildidfs("pin", full).out
    assert "pinned 1 build ID, 1 of them before: " in buildidfs("pin", full[:-2]).out
    pinned = buildidfs("pin", "--name", "later", unknown).out
    assert pinned == f"pinned 1 build ID, 1 of them not in the store yet: {unknown}\n"
    listed = objects(buildidfs("pin", "--list", "--json").out)
    assert [(each["build_id"], each["name"], each["held"]) for each in listed] == [
        (full, "", True),
        (unknown, "later", False),
    ]
    assert buildidfs("pin", "--list", "--name", "later").out.startswith(unknown)
    assert buildidfs("pin", "--list", full, check=False).rc == 2
    assert buildidfs("pin", "--json", full, check=False).rc == 2
    shown = json.loads(buildidfs("stats", "--json").out)
    assert shown["pins"] == 2
    assert buildidfs("unpin", full).out == f"unpinned 1 build ID: {full}\n"
    assert buildidfs("unpin", full, check=False).rc == 30
    done = buildidfs("unpin", unknown, check=False)
    assert done.rc == 30
    assert f"{unknown} stays pinned for later" in done.err
    buildidfs("unpin", "--name", "later")
    assert buildidfs("pin", "--list").out == ""
    assert "pinned 1 build ID: " in buildidfs("pin", directory / "a" / "0").out
    assert buildidfs("pin", "--list").out.startswith(full)
    buildidfs("unpin", directory / "a" / "0")
    for words in ((), (directory / "missing",), (directory / "a",)):
        assert buildidfs("pin", *words, check=False).rc == 2, words
    assert buildidfs("pin", "1234", check=False).rc == 30
    assert buildidfs("unpin", check=False).rc == 2


@pytest.mark.client
def test_a_profile_pins_what_it_names(buildidfs: BuildIdFs, directory: Path) -> None:
    data = directory / "perf.data"
    assert tools.perf_record(data, [tool("ls"), "/usr/bin"]).rc == 0
    buildidfs("scan", "tree", tool("ls"))
    buildidfs("pin", data)
    listed = objects(buildidfs("pin", "--list", "--json", "--name", data).out)
    (ls,) = objects(buildidfs("list", "--json", "--kind", "executable").out)
    assert ls["build_id"] in {each["build_id"] for each in listed}
    assert len(listed) > 2
    assert buildidfs("prune", "--max-size", "0", check=False).rc == 14
    assert buildidfs("get", "-o", directory / "ls", ls["build_id"]).rc == 0
    data.unlink()
    buildidfs("unpin", data)
    buildidfs("prune", "--max-size", "0", check=False)
    assert buildidfs("get", "-o", directory / "ls", ls["build_id"], check=False).rc == 30
    assert "removed to make room at" in buildidfs("show", ls["build_id"]).out


# --- mounts --------------------------------------------------------------------------------------


def names(mount: Path, number: int, path: Path) -> list[Path]:
    """Where a build ID is found in a mount."""
    text = str(build_id(number))
    link = f".build-id/{text[:2]}/{text[2:]}"
    return [
        mount / text,
        mount / text / "elf",
        mount / text / "path",
        mount / f"debug/{link}",
        mount / f"perf/{link}",
        mount / f"perf{path}/{text}/elf",
        mount / f"perf{path}",
    ]


@pytest.mark.fuse
def test_names_are_gone_at_once_and_open_files_are_not(
    buildidfs: BuildIdFs, directory: Path
) -> None:
    programs(directory / "a", range(4))
    buildidfs("scan", "tree", directory / "a")
    buildidfs("pin", str(build_id(3)))
    with buildidfs.mounted("-o", "allow_other") as mount:
        found = {n: names(mount, n, directory / "a" / str(n)) for n in range(4)}
        for each in (*found[0], *found[1], *found[3]):
            assert each.lstat(), "the kernel remembers these"
        with contextlib.suppress(OSError):
            next(Path(mount, str(build_id(2))).iterdir())
        (mount / str(build_id(1)) / "elf").read_bytes()  # and its descriptor is kept for a while
        with (mount / str(build_id(0)) / "elf").open("rb") as opened:
            start = opened.read(4096)
            buildidfs("prune", "--max-size", "0", check=False)
            for number in (0, 1, 2):
                for each in found[number]:
                    with pytest.raises(FileNotFoundError):
                        each.lstat()
            assert os.listdir(mount / "perf" / (directory / "a").relative_to("/")) == ["3"]
            content = start + opened.read()
            assert content == (directory / "a" / "0").read_bytes()
            server = _server(mount)
            until(lambda: _deleted(server) <= 1, "only that one is kept open")
        assert [each.lstat().st_size > 0 for each in found[3]]
        assert str(build_id(3)) in os.listdir(mount)
        assert str(build_id(0)) not in os.listdir(mount)
        buildidfs("scan", "tree", directory / "a")
        for each in found[0]:
            assert each.lstat(), "captured again"
        assert (mount / str(build_id(0)) / "elf").read_bytes() == content


def _server(mount: Path) -> int:
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
            if b"mount" in words and os.fsencode(mount) in words:
                return int(name)
    raise AssertionError("no mount process")


def _deleted(pid: int) -> int:
    """Blobs without a name that a process has open."""
    found = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            found += "/blobs/" in target and target.endswith("(deleted)")
    return found


@pytest.mark.fuse
def test_what_is_opened_through_a_mount_is_used(buildidfs: BuildIdFs, directory: Path) -> None:
    programs(directory / "a", range(3))
    buildidfs("scan", "tree", directory / "a")
    with Store.open(buildidfs.store) as store:
        digests = {
            n: store.index.variants(store.index.ordinal(build_id(n)) or 0, 1)[0].digest
            for n in range(3)
        }
        _make_old(store)
        assert store.index.last_use(digests[1]) < time.time() - 86_400
    with buildidfs.mounted() as mount:
        (mount / str(build_id(1)) / "elf").read_bytes()
    buildidfs("prune")
    with Store.open(buildidfs.store, read_only=True) as store:
        used = {number: store.index.last_use(digest) for number, digest in digests.items()}
    assert used[1] > time.time() - 100
    assert max(used[0], used[2]) < time.time() - 86_400
    shown = json.loads(buildidfs("show", "--json", str(build_id(1))).out)
    assert [each["last_used"] for each in shown["variants"]] == [used[1]]
    buildidfs("prune", "--max-age", "1h")
    assert held(buildidfs.store) == {1}


def _make_old(store: Store) -> None:
    """As if everything had been used two days ago for the last time."""
    from buildidfs.store import schema
    from buildidfs.store.index import environment

    env = environment.acquire(store.path, read_only=False)

    def work(txn: Any) -> None:
        rows = list(txn.cursor(env.tables["digests"]))
        for digest, value in rows:
            row = schema.DigestRow.unpack(value)
            txn.delete(schema.USE.pack(row.rank, row.used, digest), db=env.tables["uses"])
            row.used -= 2 * 86_400
            txn.put(schema.USE.pack(row.rank, row.used, digest), b"", db=env.tables["uses"])
            txn.put(digest, row.pack(), db=env.tables["digests"])

    env.write(work)
    environment.release(env)


# --- everything at once --------------------------------------------------------------------------


@pytest.mark.fuse
def test_captures_readers_prune_and_gc_at_once(buildidfs: BuildIdFs, directory: Path) -> None:
    """Each several times, in processes of their own; then the store is sound."""
    settings = directory / "settings.toml"
    settings.write_text('[retention]\nmax-size = "24MiB"\n')
    sources = [programs(directory / str(n), range(n * 100, n * 100 + 12)) for n in (1, 2, 3)]
    known = {
        str(build_id(number)): hashlib.sha256((each / str(number)).read_bytes()).digest()
        for n, each in enumerate(sources, 1)
        for number in range(n * 100, n * 100 + 12)
    }
    limited = BuildIdFs(directory, buildidfs.store, settings)
    buildidfs("scan", "tree", sources[0])
    ending = threading.Event()
    failures: list[str] = []
    read = 0
    rounds: Counter[tuple[str, ...]] = Counter()

    def repeat(*words: str, codes: tuple[int, ...] = (0,)) -> None:
        rounds[words] = 0
        while not ending.is_set():
            done = limited("-q", *words, check=False)
            rounds[words] += 1
            if done.rc not in codes:
                failures.append(f"{words}: {done.rc}: {done.err}")

    def read_all(mount: Path) -> None:
        nonlocal read
        while not ending.is_set():
            for name in os.listdir(mount):
                if name not in known:
                    continue
                with contextlib.suppress(FileNotFoundError), (mount / name / "elf").open("rb") as f:
                    if hashlib.file_digest(f, "sha256").digest() != known[name]:
                        failures.append(f"{name} has other bytes")
                    read += 1

    with buildidfs.mounted("-o", "allow_other") as mount:
        threads = [
            # what a scan knew may be removed before it says so: then it says that
            *(threading.Thread(target=repeat, args=("scan", "tree", str(source)),
                               kwargs={"codes": (0, 3, 14)}) for source in sources),
            threading.Thread(target=repeat, args=("prune", "--max-size", "12M")),
            threading.Thread(target=repeat, args=("gc",)),
            threading.Thread(target=read_all, args=(mount,)),
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        try:
            until(
                lambda: len(rounds) == 5 and min(rounds.values()) >= 5 and read > 10,
                "five rounds of each",
                60,
            )
        finally:
            ending.set()
            for thread in threads:
                thread.join()
    assert failures == []
    assert read > 10
    assert is_sound(buildidfs.store)
    buildidfs("--config", settings, "prune")
    with Store.open(buildidfs.store) as store:
        stats = store.stats()
        assert stats.stored_bytes + stats.index_bytes <= 24 * MIB
