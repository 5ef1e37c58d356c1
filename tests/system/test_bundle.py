# SPDX-License-Identifier: Apache-2.0
"""Bundles: packed here, looked at elsewhere, and never believed without having been read."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from tests.support.clients.tools import run, tool
from tests.support.elf.perfwriter import PerfWriter
from tests.support.harness.bundles import rewrite
from tests.support.harness.crashing import Ledger, make_files
from tests.support.harness.mounts import COMMAND, BuildIdFs

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ledger(directory: Path, buildidfs: BuildIdFs) -> Ledger:
    """Files that the store has."""
    ledger = Ledger()
    make_files(directory / "files", 12, ledger, random.Random(7))
    buildidfs("scan", "tree", directory / "files")
    return ledger


def _other(directory: Path) -> BuildIdFs:
    (directory / "other").mkdir()
    return BuildIdFs(directory / "other")


def test_all_of_it_arrives(directory: Path, buildidfs: BuildIdFs, ledger: Ledger) -> None:
    file = directory / "all.tar.zst"
    said = json.loads(buildidfs("bundle", *ledger.made, "-o", file, "--json").out)
    assert said["build_ids"] == said["blobs"] == 12
    assert {each["reason"] for each in said["absent"]} == {"no debuginfo was captured"}

    other = _other(directory)
    done = json.loads(other("import", file, "--json").out)
    assert (done["captured"], done["new_build_ids"]) == (12, 12)
    ledger.told = dict(ledger.made)
    assert ledger.lost(other.store) == []
    other("check", "--verify-data")
    shown = json.loads(other("show", "--json", next(iter(ledger.made))).out)
    assert shown["variants"][0]["trust"] in ("unknown", "container")
    assert str(directory / "files") in shown["origins"][0]["path"]

    again = json.loads(other("import", file, "--json").out)
    assert (again["captured"], again["copied_bytes"]) == (0, 0)


def test_tar_can_read_it(directory: Path, buildidfs: BuildIdFs, ledger: Ledger) -> None:
    file = directory / "all.tar.zst"
    buildidfs("bundle", *ledger.made, "-o", file)
    run([tool("tar"), "--zstd", "-xf", file, "-C", directory], check=True)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert len(manifest["items"]) == 12
    for item in manifest["items"]:
        data = (directory / "blobs" / item["sha256"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == item["sha256"]
        link = directory / "buildid" / item["build_id"] / item["kind"]
        assert link.read_bytes() == data


def test_the_same_bytes_each_time(directory: Path, buildidfs: BuildIdFs, ledger: Ledger) -> None:
    buildidfs("bundle", *ledger.made, "-o", directory / "one")
    argv = [*COMMAND, "--store", buildidfs.store, "bundle", *reversed(ledger.made), "-o", "-"]
    with (directory / "two").open("wb") as pipe:
        subprocess.run(argv, stdout=pipe, check=True, cwd=_ROOT)
    assert (directory / "one").read_bytes() == (directory / "two").read_bytes()


def test_goes_on_where_it_was_cut_off(
    directory: Path, buildidfs: BuildIdFs, ledger: Ledger
) -> None:
    whole, file = directory / "whole", directory / "all.tar.zst"
    buildidfs("bundle", *ledger.made, "-o", whole)
    data = whole.read_bytes()
    partial = Path(f"{file}.partial")
    for cut in (0, 100, len(data) - 10, len(data)):
        partial.write_bytes(data[:cut])
        partial.chmod(0o600)
        said = json.loads(buildidfs("bundle", *ledger.made, "-o", file, "--json").out)
        assert file.read_bytes() == data
        assert (said["resumed_bytes"] > 0) == (cut > len(data) // 2)
        assert not partial.exists()
    partial.write_bytes(b"something else" + data[14:])
    partial.chmod(0o600)
    buildidfs("bundle", *ledger.made, "-o", file)
    assert file.read_bytes() == data


def test_killed_while_it_writes(directory: Path, buildidfs: BuildIdFs, ledger: Ledger) -> None:
    file = directory / "all.tar.zst"
    argv = [*COMMAND, "--store", buildidfs.store, "bundle", *ledger.made, "-o", file]
    for delay in (0.2, 0.3, 0.4):
        process = subprocess.Popen([os.fspath(word) for word in argv], cwd=_ROOT)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    buildidfs("bundle", *ledger.made, "-o", file)
    _other(directory)("import", file)


def test_damage_is_refused(directory: Path, buildidfs: BuildIdFs, ledger: Ledger) -> None:
    file = directory / "all.tar.zst"
    buildidfs("bundle", *ledger.made, "-o", file)
    good = file.read_bytes()
    other = _other(directory)
    dice = random.Random(2)
    for at in (0, 5, 700, *(dice.randrange(len(good)) for _ in range(6)), len(good) - 1):
        bad = bytearray(good)
        bad[at] ^= 0x40
        file.write_bytes(bad)
        done = other("import", file, check=False)
        assert done.rc == 20, done
        assert done.err.count("\n") == 1
        assert str(file) in done.err
    for cut in (0, 10, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:cut])
        assert other("import", file, check=False).rc == 20
    if other.store.exists():
        other("check", "--verify-data")


def test_what_a_manifest_says_is_not_believed(
    directory: Path, buildidfs: BuildIdFs, ledger: Ledger
) -> None:
    file = directory / "all.tar.zst"
    buildidfs("bundle", "--no-sources", *ledger.made, "-o", file)
    liar = next(iter(ledger.made))
    rewrite(
        file,
        directory,
        lambda text: text.replace(liar, "ee" * 20).replace('"trust": 0', '"trust": 3'),
    )
    other = _other(directory)
    done = other("import", file, check=False)
    assert done.rc == 20
    assert "has build ID" in done.err
    assert other("show", "ee" * 20, check=False).rc == 30


def test_inputs_and_what_was_never_captured(
    directory: Path, buildidfs: BuildIdFs, ledger: Ledger
) -> None:
    binary = directory / "files" / "file0"
    file = directory / "all.tar.zst"
    buildidfs("bundle", binary, "--include-inputs", "-o", file)
    plain = run([tool("zstd"), "-dc", file, "-o", directory / "plain.tar"], check=True)
    assert plain.rc == 0
    with tarfile.open(directory / "plain.tar") as archive:
        member = archive.extractfile("inputs/0-file0")
        assert member is not None
        assert member.read() == binary.read_bytes()
    unknown = directory / "unknown"
    make_files(unknown, 1, Ledger(), random.Random(1))
    done = buildidfs("bundle", unknown / "file0", "-o", file, check=False)
    assert done.rc == 3
    assert "never captured" in done.err
    assert buildidfs("bundle", "-o", file, directory / "plain.tar", check=False).rc == 2
    content = binary.read_bytes()
    assert buildidfs("bundle", binary, "-o", binary, check=False).rc == 2
    assert binary.read_bytes() == content


def test_a_profile_without_build_ids_is_not_passed_over_in_silence(
    directory: Path, buildidfs: BuildIdFs, ledger: Ledger
) -> None:
    profile, write = directory / "perf.data", PerfWriter()
    profile.write_bytes(write.file(write.mmap2(1, 0x10000, 0x1000, b"/app")))
    file = directory / "all.tar.zst"
    done = buildidfs("bundle", profile, next(iter(ledger.made)), "-o", file, check=False)
    assert done.rc == 3
    assert file.exists()
    assert f"{profile} is about no file with a build ID" in done.err
    done = buildidfs("pin", profile, check=False)
    assert done.rc == 2
    assert f"{profile} names no build ID: nothing is pinned" in done.err


def test_debians_own_ls_lacks_no_dwz_file(directory: Path, buildidfs: BuildIdFs) -> None:
    """Its .gnu_debugaltlink is a leftover: the program is stripped."""
    sections = run([tool("readelf"), "-SW", "/bin/ls"], check=True).out
    assert ".gnu_debugaltlink" in sections
    buildidfs("scan", "tree", "/bin/ls")
    done = buildidfs("bundle", "/bin/ls", "-o", directory / "ls.tar.zst", "--json")
    (absent,) = json.loads(done.out)["absent"]
    assert absent["reason"] == "no debuginfo was captured"
    assert absent["path"].endswith("/bin/ls")
    assert "dwz" not in buildidfs("show", absent["build_id"]).out


@pytest.mark.parametrize("command", [["import"], ["mount", "--bundle"]])
def test_what_is_no_file_is_no_bundle(
    directory: Path, buildidfs: BuildIdFs, command: list[str]
) -> None:
    os.mkfifo(directory / "fifo")
    (directory / "empty").mkdir()
    point = [directory / "empty"] if command != ["import"] else []
    for each in (directory, directory / "fifo"):
        done = buildidfs(*command, each, *point, check=False)
        assert done.rc == 2, done
        assert f"cannot read {each}: not a regular file" in done.err


@pytest.mark.parametrize("command", [["pin"], ["bundle", "-o", "/dev/null"]])
def test_a_fifo_is_not_waited_for(
    directory: Path, buildidfs: BuildIdFs, ledger: Ledger, command: list[str]
) -> None:
    os.mkfifo(directory / "fifo")
    done = buildidfs(*command, directory / "fifo", check=False)
    assert (done.rc, ": not a regular file" in done.err) == (2, True), done


def test_standard_output_without_room(buildidfs: BuildIdFs, ledger: Ledger) -> None:
    argv = [tool("sh"), "-c", '"$@" > /dev/full', "sh", *COMMAND, "--store", buildidfs.store,
            "bundle", next(iter(ledger.made)), "-o", "-"]  # fmt: skip
    done = run(argv, cwd=_ROOT)
    complaint = "buildidfs: cannot write the output: No space left on device\n"
    assert (done.rc, done.err) == (2, complaint)
