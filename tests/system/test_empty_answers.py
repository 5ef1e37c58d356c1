# SPDX-License-Identifier: Apache-2.0
"""An answer that is empty says on standard error why, and with -q nothing; its status stays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from buildidfs.store import Store
from tests.support.clients.commands import ROOT
from tests.support.clients.tools import run, tool
from tests.support.elf.perfwriter import PerfWriter
from tests.support.harness.captures import capture, sighting
from tests.support.harness.mounts import COMMAND, BuildIdFs
from tests.support.harness.restricted import as_nobody


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> BuildIdFs:
    """A store with one file of a container."""
    program = BuildIdFs(tmp_path_factory.mktemp("filled"))
    label = "docker:010101010101"
    docker: dict[str, Any] = {"cgroup": b"/docker/" + b"01" * 32, "container": label, "apart": 0x22}
    with Store.create(program.store) as store:
        at = sighting(b"/bin/app", **docker)
        store.commit([capture(store, b"bytes", b"\xab\xcd\xef", at=at)])
    return program


@pytest.fixture
def empty(tmp_path: Path) -> BuildIdFs:
    """A store with nothing in it."""
    program = BuildIdFs(tmp_path)
    Store.create(program.store).close()
    return program


@pytest.mark.parametrize("json_", [False, True])
@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("list", "nothing is captured in this store yet: buildidfs scan proc"),
        ("list --conflicts", "no build ID in this store has several variants"),
        ("journal", "the journal is empty: only watch writes"),
        ("journal --since 1h", "the journal is empty: only watch writes"),
        ("journal --lost", "no watch on this store has lost a file"),
        ("jit", "no process wrote a map for perf"),
        ("pin --list", "nothing is pinned in this store: buildidfs pin"),
        ("pin --list --name x", "nothing is pinned in this store: buildidfs pin"),
    ],
)
def test_empty_store(empty: BuildIdFs, words: str, why: str, json_: bool) -> None:
    _is_empty(empty, [*words.split(), *(["--json"] if json_ else [])], why)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("list --path app", "a pattern has to match the whole path"),
        ("list --kind vdso", "nothing in this store fits --kind vdso"),
        ("list --conflicts --path /bin/app", "no build ID in this store has several variants"),
        ("prune --json --max-size 1G --keep-free 0", "the store is within its limits"),
    ],
)
def test_nothing_fits(filled: BuildIdFs, words: str, why: str) -> None:
    _is_empty(filled, words.split(), why)


def test_list_of_an_unknown_container_fails_as_containers_does(filled: BuildIdFs) -> None:
    for words in (["list", "--container", "nope"], ["containers", "nope"]):
        done = filled(*words, check=False)
        assert done.rc == 30
        assert "no container nope was seen; the last containers seen are docker:01" in done.err


def test_pins_of_another_name(filled: BuildIdFs) -> None:
    filled("pin", "--name", "incident", "abcdef")
    _is_empty(filled, ["pin", "--list", "--name", "nope"], "nothing is pinned for nope")
    shown = filled("pin", "--list", "--name", "incident")
    assert ("abcdef" in shown.out, shown.err) == (True, "")


def test_tree_without_files(empty: BuildIdFs, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    words = ["scan", "tree", "--dry-run", str(tmp_path / "tree")]
    _is_empty(empty, words, "there is no regular file below the given paths")


def test_no_address_on_standard_input(filled: BuildIdFs) -> None:
    done = run([tool("sh"), "-c", '"$@" </dev/null', "sh", *COMMAND, "--store", filled.store,
                "symbolize"], cwd=ROOT)  # fmt: skip
    assert (done.rc, done.out) == (0, "")
    assert done.err == "buildidfs: standard input has no address; one on a line, ID+0xADDR\n"


def test_profile_without_samples_is_not_called_complete(filled: BuildIdFs, tmp_path: Path) -> None:
    file = tmp_path / "perf.data"
    write = PerfWriter()
    file.write_bytes(write.file(write.mmap2(1, 0x10000, 0x1000, b"/app/server")))
    said = filled("why", file, check=False)
    assert said.rc == 30
    assert "has no samples: there is nothing to explain" in said.err
    assert "all of" not in said.text


@pytest.mark.parametrize(
    ("content", "fault"),
    [("", "is empty, not a perf.data file"), ("text", "is not a perf.data file")],
)
def test_why_refuses_the_files_that_coverage_refuses(
    filled: BuildIdFs, tmp_path: Path, content: str, fault: str
) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    for command in ("coverage", "why"):
        done = filled(command, file, check=False)
        assert (done.rc, done.err) == (2, f"buildidfs: {file} {fault}\n"), command


def test_why_explains_a_file_seen_where_another_is_now(empty: BuildIdFs, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with Store.open(empty.store) as store:
        at = sighting(str(file).encode())
        store.commit([capture(store, b"replaced", b"\xab\xcd\x12", at=at)])
    assert "abcd12" in empty("why", file).out


def test_answer_that_is_not_empty_says_nothing(filled: BuildIdFs) -> None:
    for words in (["list"], ["list", "--container", "docker:0101"], ["list", "--json"]):
        shown = filled(*words)
        assert ("abcdef" in shown.out, shown.err) == (True, "")


def test_repair_names_the_file_to_assign(filled: BuildIdFs, tmp_path: Path) -> None:
    write = PerfWriter()
    records = write.mmap2(1, 0x10000, 0x1000, b"/gone/app", time=5)
    profile, out = tmp_path / "perf.data", tmp_path / "out"
    profile.write_bytes(write.file(records + write.sample(1, 0x10008, 6)))
    words = ["repair", profile, "-o", out]
    left = filled(*words, check=False)
    assert left.rc == 3
    assert "the store has a file of that name: abcdef at /bin/app" in left.err
    assert "repair --assign PATH=ID" in left.out
    done = filled(*words, "--assign", "/gone/app=abcdef")
    assert "1 file resolved" in done.out
    assert done.err == ""
    for wrong in ("gone/app=abcdef", "/gone/app", "/gone/app=xyz", "/other=abcdef"):
        refused = filled(*words, "--assign", wrong, check=False)
        assert (refused.rc, refused.err.count("\n")) == (2, 1), refused


def test_repair_keeps_the_time_of_the_profile_and_the_profile(
    filled: BuildIdFs, tmp_path: Path
) -> None:
    """By its time a second repair finds the clock."""
    write = PerfWriter()
    profile, out, link = tmp_path / "perf.data", tmp_path / "out", tmp_path / "link"
    records = write.mmap2(1, 0x10000, 0x1000, b"/gone/app", time=5)
    content = write.file(records + write.sample(1, 0x10008, 6))
    profile.write_bytes(content)
    os.utime(profile, ns=(10**18, 10**18 + 7))
    link.symlink_to(profile)
    filled("repair", profile, "-o", out, "--assign", "/gone/app=abcdef")
    assert out.stat().st_mtime_ns == profile.stat().st_mtime_ns == 10**18 + 7
    for same in (profile, link):
        done = filled("repair", profile, "-o", same, "--assign", "/gone/app=abcdef", check=False)
        assert (done.rc, "is the profile itself" in done.err) == (2, True), done
        assert profile.read_bytes() == content


NOTHING_KNOWN = "is no file, no build ID, and nothing was ever seen there"


def test_bundle_tells_a_missing_file_and_what_captures_the_rest(
    filled: BuildIdFs, tmp_path: Path
) -> None:
    out = tmp_path / "out.tar.zst"
    for absent in ("perf.data", "./core.1", "zz"):
        done = filled("bundle", absent, "-o", out, check=False)
        assert done.rc == 2
        assert done.err == f"buildidfs: {absent} {NOTHING_KNOWN}\n"
    assert "1 artifact of 1 build ID," in filled("bundle", "abcdef", "-o", out).err
    write = PerfWriter()
    profile = tmp_path / "perf.data"
    records = write.mmap2(1, 0x10000, 0x1000, b"[vdso]", time=5, build_id=bytes(range(20)))
    profile.write_bytes(write.file(records))
    done = filled("bundle", profile, "-o", out, check=False)
    assert done.rc == 3
    assert "scan perf-data --all also captures files that no sample" in done.err


@pytest.mark.root
def test_a_store_of_another_user_comes_with_a_remedy(filled: BuildIdFs) -> None:
    filled.store.chmod(0o700)
    done = as_nobody("--store", filled.store, "list")
    assert done.rc == 10, done
    assert "Permission denied: only its owner may use it" in done.err
    assert "--store" in done.err


def _is_empty(program: BuildIdFs, words: list[str], why: str) -> None:
    done = program(*words)
    assert done.out == ""
    assert done.err.startswith("buildidfs: ")
    assert why in done.err
    assert done.err.count("\n") == 1
    quiet = program("-q", *words)
    assert (quiet.out, quiet.err) == ("", "")
