# SPDX-License-Identifier: Apache-2.0
"""``buildidfs check`` finds what happened to a store, and ``--repair`` heals it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buildidfs.model import BuildId, Kind
from buildidfs.store import Store
from tests.support.clients.commands import ROOT
from tests.support.clients.tools import run, tool, unmount
from tests.support.elf.elfwriter import TEXT, Section, elf_file
from tests.support.elf.jit import jit_process
from tests.support.elf.programs import build_id_of
from tests.support.harness import damages
from tests.support.harness.captures import capture, read_blob
from tests.support.harness.children import copied_cat
from tests.support.harness.mounts import COMMAND, BuildIdFs

SIZE = 40_000


def _elf(build_id: bytes) -> bytes:
    return elf_file([TEXT, Section(b".comment", random.Random(build_id).randbytes(SIZE))],
                    build_id=build_id)  # fmt: skip


IDS = [bytes([number]) * 20 for number in range(1, 2 * len(damages.ALL) + 1)]
PAIRS = dict(zip(damages.ALL, zip(IDS[::2], IDS[1::2], strict=True), strict=True))
#: Of whom a damage is, or two when it takes two.
WRONG = [*(one for one, _ in PAIRS.values()), PAIRS[damages.swap][1]]


@pytest.fixture
def originals(buildidfs: BuildIdFs, directory: Path) -> Path:
    """Files on this host, which are captured."""
    files = directory / "originals"
    files.mkdir()
    for build_id in IDS:
        (files / build_id.hex()).write_bytes(_elf(build_id))
    buildidfs("scan", "tree", files)
    return files


def _blob(store: Path, build_id: bytes) -> Path:
    with Store.open(store) as opened:
        artifact = opened.index.artifact(
            opened.index.ordinal(BuildId(build_id)) or 0, Kind.EXECUTABLE
        )
        assert artifact is not None
        return Path(os.fsdecode(opened.blobs.path(artifact.digest)))


def _damage_all(store: Path) -> None:
    for damage, (one, other) in PAIRS.items():
        damage(_blob(store, one), _blob(store, other))


def _served(buildidfs: BuildIdFs, build_id: bytes) -> bytes:
    with Store.open(buildidfs.store, read_only=True) as store:
        artifact = store.index.artifact(
            store.index.ordinal(BuildId(build_id)) or 0, Kind.EXECUTABLE
        )
        assert artifact is not None
        return read_blob(store, artifact.digest)


def _check(buildidfs: BuildIdFs, *options: str) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    done = buildidfs("check", *options, "--json", check=False)
    *faults, summary = [json.loads(line) for line in done.out.splitlines()]
    assert done.rc in (0, 20), done
    assert "Traceback" not in done.err, done
    return done.rc, faults, summary


def test_names_of_no_process_are_a_fault(buildidfs: BuildIdFs, originals: Path) -> None:
    with Store.create(buildidfs.store) as store:
        store.jit_maps.write(jit_process(7), 0, b"1 1 a\n")
        store.jit_maps.write(jit_process(8), 0, b"1 1 a\n")
        damaged = Path(os.fsdecode(store.jit_maps.of(8)[0].path))
    damaged.write_bytes(b"{}")
    code, (fault,), _ = _check(buildidfs)
    assert (code, fault["state"]) == (20, "found")
    assert damaged.name in fault["fault"]
    code, (fault,), _ = _check(buildidfs, "--repair")
    assert (code, fault["state"]) == (0, "repaired")
    assert _check(buildidfs)[:2] == (0, [])
    (kept,) = [json.loads(line) for line in buildidfs("jit", "--json").out.splitlines()]
    assert kept["pid"] == 7


def test_every_damage_is_found_and_healed(buildidfs: BuildIdFs, originals: Path) -> None:
    assert _check(buildidfs, "--verify-data")[:2] == (0, [])
    _damage_all(buildidfs.store)
    for _ in range(2):  # what is known to be damaged is found again
        code, faults, summary = _check(buildidfs)
        assert code == 20
        assert {fault["sha256"] for fault in faults} == {
            _blob(buildidfs.store, build_id).name for build_id in WRONG
        }
        assert {fault["state"] for fault in faults} == {"found"}
        assert summary["faults"] == len(WRONG)
    code, faults, summary = _check(buildidfs, "--repair")
    assert code == 0
    assert summary["recaptured"] == summary["faults"] == len(WRONG)
    assert summary["lost"] == 0
    assert _check(buildidfs, "--verify-data")[:2] == (0, [])
    for build_id in IDS:
        assert _served(buildidfs, build_id) == _elf(build_id)
    shown = json.loads(buildidfs("show", "--json", WRONG[0].hex()).out)
    assert shown["origins"][0]["path"] == str(originals / WRONG[0].hex())


def test_what_nobody_has_any_more_is_lost(buildidfs: BuildIdFs, originals: Path) -> None:
    shutil.rmtree(originals)
    _damage_all(buildidfs.store)
    aside = [_blob(buildidfs.store, build_id) for build_id in WRONG]
    bytes_aside = {path.name: path.read_bytes() for path in aside if path.exists()}
    done = buildidfs("check", "--repair", check=False)
    assert done.rc == 20
    assert done.out.count("is lost: what is left is in quarantine") == len(WRONG)
    assert f"{len(WRONG)} lost" in done.err
    kept = {path.name: path.read_bytes() for path in (buildidfs.store / "quarantine").iterdir()}
    assert kept == bytes_aside
    assert _check(buildidfs, "--verify-data")[:2] == (0, [])
    for build_id in IDS:
        if build_id in WRONG:
            assert buildidfs("get", build_id.hex(), check=False).rc == 30
            shown = buildidfs("show", build_id.hex()).out
            assert str(originals / build_id.hex()) in shown
            assert "its blob was damaged" in shown
        else:
            assert _served(buildidfs, build_id) == _elf(build_id)


def test_a_process_has_the_bytes_still(buildidfs: BuildIdFs, directory: Path) -> None:
    """Its file is deleted, but it is mapped."""
    with copied_cat(directory / "cat") as child:
        build_id = bytes.fromhex(build_id_of(directory / "cat"))
        content = (directory / "cat").read_bytes()
        buildidfs.scan(child.pid)
        (directory / "cat").unlink()
        held = buildidfs("list", "--format", "{build_id} {kinds} {path}").out
        damages.flip(_blob(buildidfs.store, build_id), Path())
        code, faults, _ = _check(buildidfs, "--repair")
        assert code == 0
        assert [fault["state"] for fault in faults] == ["found", "captured again"]
        assert _served(buildidfs, build_id) == content
        now = buildidfs("list", "--format", "{build_id} {kinds} {path}").out
        assert now == held, "nothing else that runs"


@pytest.mark.root
def test_a_container_captures_its_own_files_again(buildidfs: BuildIdFs, directory: Path) -> None:
    """The store is filled and repaired in one mount namespace that is not the host's."""
    original = directory / "original"
    original.write_bytes(_elf(IDS[0]))
    script = """
        store=$1 original=$2; shift 2
        "$@" --store "$store" scan tree "$original"
        find "$store/blobs" -type f -exec sh -c 'printf x >>"$1"' sh {} ';'
        "$@" --store "$store" check --repair
    """
    words = ["sh", "-euc", script, "sh", buildidfs.store, original, *COMMAND]
    done = run([tool("unshare"), "-m", *words], cwd=ROOT)
    assert (done.rc, done.out.count("was captured again")) == (0, 1), str(done)
    assert _served(buildidfs, IDS[0]) == _elf(IDS[0])
    (row,) = [json.loads(line) for line in buildidfs("list", "--json").out.splitlines()]
    assert row["container"].startswith("mnt:")


def test_an_index_that_is_lost(buildidfs: BuildIdFs, originals: Path) -> None:
    for damage in (
        lambda: shutil.rmtree(buildidfs.store / "index"),
        lambda: os.truncate(buildidfs.store / "index/data.mdb", 5000),
        lambda: (buildidfs.store / "index/data.mdb").write_bytes(b"\xa5" * 100_000),
    ):
        damage()
        done = buildidfs("list", check=False)
        assert done.rc == 10
        assert "buildidfs check --repair makes a new one" in done.err
        code, faults, _ = _check(buildidfs)
        assert (code, len(faults)) == (20, 1)
        code, faults, summary = _check(buildidfs, "--repair")
        assert (code, [fault["state"] for fault in faults]) == (0, ["repaired"])
        assert (summary["blobs"], summary["unknown"]) == (len(IDS), 0)
        assert _check(buildidfs, "--verify-data")[:2] == (0, [])
        for build_id in IDS:
            assert _served(buildidfs, build_id) == _elf(build_id)


@pytest.mark.parametrize("at", [3, 9])
def test_pages_of_the_index_that_are_garbage(
    buildidfs: BuildIdFs, originals: Path, at: int
) -> None:
    """Which LMDB believes, and may well crash on: `check` does not."""
    data = buildidfs.store / "index/data.mdb"
    if data.stat().st_size <= at * 4096:
        at = data.stat().st_size // 4096 - 2
    damages.overwrite(data, random.Random(at).randbytes(4096), at * 4096)
    data.chmod(0o600)
    code, faults, _ = _check(buildidfs)
    unused = not faults  # it may be a page that is not in use
    assert code == (0 if unused else 20)
    assert _check(buildidfs, "--repair")[0] == 0
    assert _check(buildidfs, "--verify-data")[:2] == (0, [])
    for build_id in IDS:
        assert _served(buildidfs, build_id) == _elf(build_id)


def test_an_index_in_use_is_not_made_again(buildidfs: BuildIdFs, originals: Path) -> None:
    with Store.open(buildidfs.store, read_only=True):
        os.truncate(buildidfs.store / "index/data.mdb", 5000)
        done = buildidfs("check", "--repair", check=False)
    assert done.rc == 12
    assert "is in use" in done.err


@pytest.mark.fuse
def test_no_false_faults_while_it_is_used(buildidfs: BuildIdFs, originals: Path) -> None:
    """Captures, removals and a mount, all the time."""
    ended = threading.Event()
    failures: list[str] = []

    def churn() -> None:
        chosen = random.Random(7)
        with Store.open(buildidfs.store) as store:
            while not ended.is_set():
                batch = [chosen.randbytes(20) for _ in range(20)]
                store.commit([capture(store, _elf(each)[:9000], each) for each in batch])
                names = list(store.blobs.names())
                keep = {_blob(buildidfs.store, each).name for each in IDS[:2]}
                gone = [name for name in chosen.sample(names, 10) if name.hex() not in keep]
                store.remove(gone)

    thread = threading.Thread(target=churn)
    with buildidfs.mounted() as mount:
        thread.start()
        try:
            for number in range(6):
                done = buildidfs("check", *["--verify-data"][: number % 2], check=False)
                if done.rc:
                    failures.append(str(done))
                (mount / IDS[0].hex() / "elf").read_bytes()
        finally:
            ended.set()
            thread.join()
    assert failures == []


@contextlib.contextmanager
def _on_a_loop_device(directory: Path) -> Iterator[tuple[Path, Path]]:
    """An ext4 filesystem: where it is mounted, and its image."""
    point, image = directory / "point", directory / "image"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    run([tool("mkfs.ext4"), "-q", image], check=True)
    run([tool("mount"), "-o", "loop", image, point], check=True)
    try:
        yield point, image
    finally:
        unmount(point)


@pytest.mark.root
def test_a_disk_that_forgets(directory: Path, buildidfs: BuildIdFs) -> None:
    """Below the filesystem nothing of a file changes but its bytes: only reading all tells."""
    if not Path("/dev/loop-control").exists():
        pytest.skip("this machine has no loop devices")
    files = directory / "files"
    files.mkdir()
    for build_id in IDS[:2]:
        (files / build_id.hex()).write_bytes(_elf(build_id))
    with _on_a_loop_device(directory) as (point, image):
        buildidfs.store = point / "store"
        buildidfs("scan", "tree", files)
        run(["sync"], check=True)
        _rot(image, _elf(IDS[0])[-2000:-1000])
        assert _check(buildidfs)[:2] == (0, [])
        code, faults, _ = _check(buildidfs, "--verify-data")
        assert code == 20
        assert [fault["fault"] for fault in faults] == [
            f"blob {_blob(buildidfs.store, IDS[0]).name} has other bytes"
        ]
        with buildidfs.mounted() as mount:
            with pytest.raises(OSError, match=r"."):
                (mount / IDS[0].hex() / "elf").read_bytes()
            assert (mount / IDS[1].hex() / "elf").read_bytes() == _elf(IDS[1])
            assert _check(buildidfs, "--repair")[0] == 0
            assert (mount / IDS[0].hex() / "elf").read_bytes() == _elf(IDS[0])
        assert _check(buildidfs, "--verify-data", "--from-start")[:2] == (0, [])


def _rot(image: Path, content: bytes) -> None:
    """Change bytes on the disk, wherever they are on it."""
    with image.open("r+b") as file:
        at = file.read().find(content)
        assert at > 0
        file.seek(at)
        file.write(bytes(len(content)))
        os.fsync(file.fileno())
    Path("/proc/sys/vm/drop_caches").write_text("3")


def test_reading_goes_on_where_it_was_broken_off(buildidfs: BuildIdFs, originals: Path) -> None:
    with Store.open(buildidfs.store) as store:
        read: list[int] = []
        faults = store.checker().files(whole=True, progress=read.append)
        damages.flip(_blob(buildidfs.store, IDS[0]), Path())
        victim = next(iter(sorted(store.blobs.names())))
        damages.grow(Path(os.fsdecode(store.blobs.path(victim))), Path())
        assert next(faults).digest == victim
        faults.close()
        before = sum(read)
        read.clear()
        list(store.checker().files(whole=True, from_start=False, progress=read.append))
        assert 0 < before < sum(read) + SIZE
        total = sum(read) + before
        read.clear()
        list(store.checker().files(whole=True, from_start=False, progress=read.append))
        assert sum(read) >= total - 2 * SIZE, "it was finished, so it begins again"
