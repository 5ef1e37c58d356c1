# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.run_files: who lives is found, whoever does not is not, and nothing fails."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import select
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.errors import StoreError, StoreLocked
from buildidfs.store import Store, run_files
from buildidfs.store.run_files import Presence, present
from tests.support.clients.tools import run, tool
from tests.support.harness.children import needs_root
from tests.support.harness.waiting import lines

ROOT = Path(__file__).resolve().parents[2]

_PROCESS = """
import sys
from buildidfs.store.run_files import Presence
presence = Presence(sys.argv[1], sys.argv[2], number=7)
print("there", flush=True)
sys.stdin.read()
presence.close()
"""


@contextlib.contextmanager
def _process(root: Path, role: str) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-c", _PROCESS, root, role]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert lines(child.stdout, lambda got: len(got) == 1) == ["there"]
            yield child
        finally:
            child.kill()


def _files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "run").iterdir())


def test_process_is_present_with_what_it_says(tmp_path: Path) -> None:
    before = time.time_ns()
    with Presence(tmp_path, "watch", caught=0, where=b"/mnt") as mine:
        (found,) = present(tmp_path)
        assert (found.role, found.pid) == ("watch", os.getpid())
        assert before <= found.since <= time.time_ns()
        assert found.version == run_files.__version__
        assert found.facts == {"caught": 0, "where": "/mnt"}
        mine.update(caught=12)
        (found,) = present(tmp_path)
        assert found.facts == {"caught": 12, "where": "/mnt"}
        assert found.path("where") == b"/mnt"
        assert found.path("nothing") == b""
    assert present(tmp_path) == []
    assert _files(tmp_path) == []
    mine.close()
    mine.update(caught=13)
    assert present(tmp_path) == []


def test_content_is_one_json_object_for_its_owner_only(tmp_path: Path) -> None:
    with Presence(tmp_path, "mount", long="x" * 100) as mine:
        mine.update(long="y")
        path = tmp_path / f"run/mount-{os.getpid()}.json"
        values = json.loads(path.read_text())
        assert set(values) == {"crc", "role", "pid", "since", "version", "kernel", "long"}
        assert values["long"] == "y"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", [b"/a b", b"/\xff\n", "/é".encode(), b"/\xed\xa0\x80"])
def test_paths_of_any_bytes(tmp_path: Path, name: bytes) -> None:
    with Presence(tmp_path, "mount", mountpoint=name, said=os.fsdecode(name)):
        (found,) = present(tmp_path)
        assert found.path("mountpoint") == name


def test_role_and_order(tmp_path: Path) -> None:
    with Presence(tmp_path, "watch"), Presence(tmp_path, "mount"), Presence(tmp_path, "mount"):
        assert [each.role for each in present(tmp_path)] == ["watch", "mount", "mount"]
        assert len(_files(tmp_path)) == 3
        assert [each.role for each in present(tmp_path, "watch")] == ["watch"]
        assert present(tmp_path, "up") == []


def test_killed_process_is_gone_and_its_file_too(tmp_path: Path) -> None:
    with _process(tmp_path, "watch") as child:
        (found,) = present(tmp_path)
        assert (found.pid, found.facts) == (child.pid, {"number": 7})
        child.kill()
        child.wait()
        assert _files(tmp_path) == [f"watch-{child.pid}.json"]
        assert present(tmp_path) == []
        assert _files(tmp_path) == []


def test_name_of_a_leftover_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / f"run/watch-{os.getpid()}.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"old": "x" * 1000}))
    with Presence(tmp_path, "watch", new=1):
        assert [each.facts for each in present(tmp_path)] == [{"new": 1}]
        assert _files(tmp_path) == [path.name]


def test_pid_of_another_process_is_not_alive(tmp_path: Path) -> None:
    path = tmp_path / "run/watch-1.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"role": "watch", "pid": 1}))
    assert present(tmp_path) == []
    assert not path.exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"since": "x", "version": 3}', "\xff", '{"a":' + "[" * 9000]
)
def test_what_makes_no_sense_is_alive_all_the_same(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run/watch-1.json"
    path.parent.mkdir()
    path.write_text(text)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (found,) = present(tmp_path)
        assert (found.role, found.pid, found.since, found.facts) == ("watch", 1, 0, {})


def test_path_that_is_not_one(tmp_path: Path) -> None:
    with Presence(tmp_path, "mount", mountpoint="/mnt", mountpoint_b64="\u00e9", other_b64=[1]):
        (found,) = present(tmp_path)
        assert found.path("mountpoint") == b"/mnt"
        assert found.path("other") == b""


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    for name in ("README", "watch.json", "watch-x.json", "watch-1"):
        (directory / name).touch()
    (directory / "watch-2.json").symlink_to(directory / "README")
    os.mkfifo(directory / "watch-3.json")
    assert present(tmp_path) == []
    assert {"README", "watch.json", "watch-x.json", "watch-1", "watch-2.json"} <= set(
        _files(tmp_path)
    )


def test_no_store_is_nobody(tmp_path: Path) -> None:
    assert present(tmp_path / "none") == []


def test_readers_do_not_take_each_other_for_the_process(tmp_path: Path) -> None:
    path = tmp_path / "run/watch-1.json"
    path.parent.mkdir()
    path.touch()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # somebody looks
        assert present(tmp_path) == []


def test_reader_never_sees_half_of_an_update(tmp_path: Path) -> None:
    over = threading.Event()
    with Presence(tmp_path, "watch", text="a" * 12_000, check="a") as mine:

        def write() -> None:
            for letter in itertools.cycle("abcdefgh"):
                if over.is_set():
                    return
                mine.update(text=letter * 12_000, check=letter)

        thread = threading.Thread(target=write)
        thread.start()
        seen: Counter[str] = Counter()
        try:
            while seen.total() < 300 or len(seen) < 2:
                (found,) = present(tmp_path)
                assert found.facts["text"] == found.facts["check"] * 12_000
                seen[found.facts["check"]] += 1
        finally:
            over.set()
            thread.join()


def test_update_that_stops_in_the_middle_is_not_read(tmp_path: Path) -> None:
    """The kernel may preempt a write between two pages for any time."""
    with Presence(tmp_path, "watch", text="a" * 6000, check="a") as mine:
        (path,) = (tmp_path / "run").iterdir()
        before = path.read_bytes()
        mine.update(text="b" * 6000, check="b")
        after = path.read_bytes()
        path.write_bytes(after[:4096] + before[4096:])
        (found,) = present(tmp_path)
        assert found.facts == {}
        path.write_bytes(after)
        (found,) = present(tmp_path)
        assert found.facts["check"] == "b"


def test_one_that_registers_just_now_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "run/watch-1.json"
    path.parent.mkdir()
    looked = threading.Event()
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        def write() -> None:
            assert looked.wait(20)
            file.write(run_files.encode({"since": 1, "caught": 2}).decode())
            file.flush()

        def sleep(seconds: float) -> None:
            looked.set()
            thread.join(20)

        thread = threading.Thread(target=write)
        thread.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_files.time, "sleep", sleep)
            (found,) = present(tmp_path)
        looked.set()
        thread.join()
        assert (found.since, found.facts) == (1, {"caught": 2})


# --- a descriptor of the process ------------------------------------------------------------------


def test_pidfd_is_of_the_process(tmp_path: Path) -> None:
    with _process(tmp_path, "watch") as child:
        (found,) = present(tmp_path)
        fd = found.pidfd()
        try:
            assert select.select([fd], [], [], 0)[0] == []
            assert child.stdin is not None
            child.stdin.close()
            assert select.select([fd], [], [], 20)[0] == [fd]
        finally:
            os.close(fd)
        child.wait()
        with pytest.raises(ProcessLookupError):
            found.pidfd()


def test_pidfd_is_not_of_the_next_process_with_the_pid(tmp_path: Path) -> None:
    with Presence(tmp_path, "watch"):
        (found,) = present(tmp_path)
    # its pid is alive, it is ours
    with pytest.raises(ProcessLookupError):
        found.pidfd()


@needs_root("a PID namespace")
def test_pidfd_is_refused_in_another_pid_namespace(tmp_path: Path) -> None:
    with Presence(tmp_path, "watch"):
        code = (
            "import sys; from buildidfs.store.run_files import present\n"
            "for each in present(sys.argv[1]):\n"
            "  try: each.pidfd()\n"
            "  except Exception as error: print(type(error).__name__, error)"
        )
        argv = [tool("unshare"), "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
        done = run([*argv, tmp_path], cwd=ROOT)
        assert done.out.startswith("StoreError watch"), done
        assert "another PID namespace" in done.out


# --- one at a time --------------------------------------------------------------------------------


def test_role_for_one(tmp_path: Path) -> None:
    with Presence.only(tmp_path, "up", mountpoint=b"/x"):
        with pytest.raises(StoreLocked, match=rf"pid {os.getpid()}"):
            Presence.only(tmp_path, "up")
        with Presence(tmp_path, "watch"):
            pass
    with _process(tmp_path, "up") as child:
        with pytest.raises(StoreLocked, match=rf"pid {child.pid}"):
            Presence.only(tmp_path, "up")
        child.kill()
        child.wait()
        Presence.only(tmp_path, "up").close()


def test_of_many_at_once_one_gets_the_role(tmp_path: Path) -> None:
    got: list[Presence] = []
    refused: list[StoreLocked] = []

    def attempt() -> None:
        try:
            got.append(Presence.only(tmp_path, "up"))
        except StoreLocked as error:
            refused.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 19)
    got[0].close()


# --- stores that cannot be written ----------------------------------------------------------------


@needs_root("mount")
def test_read_only_filesystem(directory: Path) -> None:
    where = directory / "ro"
    where.mkdir()
    run([tool("mount"), "-t", "tmpfs", "none", where], check=True)
    try:
        Store.create(where / "store").close()
        run([tool("mount"), "-o", "remount,ro", where], check=True)
        with Presence(where / "store", "mount", mountpoint=b"/x") as mine:
            mine.update(mountpoint=b"/y")
            assert mine.fileno() == -1
            assert present(where / "store") == []
        with pytest.raises(StoreError, match="Read-only"):
            Presence.only(where / "store", "up")
    finally:
        run([tool("umount"), "-l", where], check=True)


@needs_root("mount")
def test_full_filesystem(directory: Path) -> None:
    where = directory / "full"
    where.mkdir()
    run([tool("mount"), "-t", "tmpfs", "-o", "size=16k", "none", where], check=True)
    try:
        with Presence(where, "mount") as mine:
            with (where / "big").open("wb", 0) as file, contextlib.suppress(OSError):
                while file.write(b"x" * 4096):
                    pass
            mine.update(text="x" * 20_000)
            (found,) = present(where)
            assert (found.role, found.pid) == ("mount", os.getpid())
    finally:
        run([tool("umount"), "-l", where], check=True)


def test_room_is_kept_for_longer_facts(tmp_path: Path) -> None:
    """When the disk is full nothing more than what is written at first can be."""
    with Presence(tmp_path, "watch", mode="starting"):
        (file,) = (tmp_path / "run").glob("*.json")
        before = file.stat()
        assert before.st_size >= 16 << 10
        assert before.st_blocks * 512 >= before.st_size
        assert [each.facts["mode"] for each in present(tmp_path, "watch")] == ["starting"]
