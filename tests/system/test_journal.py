# SPDX-License-Identifier: Apache-2.0
"""The journal as a user reads it, and containers by one definition and another."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buildidfs.capture.base import Resighting
from buildidfs.capture.process.scanner import ProcScanner
from buildidfs.ingest import StoreMemo
from buildidfs.model import BuildId, NamespaceSet
from buildidfs.store import NewSeen, Store
from tests.support.clients.tools import run, tool
from tests.support.harness.captures import SECOND, capture, sighting
from tests.support.harness.children import copied_cat, running
from tests.support.harness.mounts import COMMAND, BuildIdFs
from tests.support.harness.waiting import until
from tests.support.harness.watching import watching

HELD, GONE = BuildId(b"\xaa" * 20), BuildId(b"\xbb" * 20)
NOW = time.time_ns()
HOUR = 3600 * SECOND


def seen(path: bytes, build_id: BuildId = HELD, *, ago: int = 0, **changes: Any) -> NewSeen:
    """An entry of the journal, of ``ago`` nanoseconds before these tests began."""
    return NewSeen(sighting(path, seen_ns=NOW - ago, **changes), build_id)


@pytest.fixture
def buildidfs(directory: Path) -> BuildIdFs:
    """The program on a store whose journal has four rows, oldest first a, b, c, d."""
    program = BuildIdFs(directory)
    docker = {"cgroup": b"/docker/" + b"01" * 32, "container": "docker:010101010101", "apart": 0x22}
    with Store.create(program.store) as store:
        store.commit([capture(store, b"bytes", HELD)])
        store.note_seen(
            [
                seen(b"/usr/lib/d.so"),
                seen(b"/usr/bin/a", GONE, ago=50 * HOUR),
                seen(b"/caf\xe9\n/c", GONE, ago=HOUR, namespaces=NamespaceSet(pid=9), apart=0x08),
                seen(b"/usr/bin/b", ago=2 * HOUR, **docker),
            ]
        )
    return program


def paths(program: BuildIdFs, *words: str) -> list[str]:
    """The paths in the text."""
    return [line.split("\t")[4] for line in program("journal", *words).out.splitlines()]


def rows(program: BuildIdFs, *words: str) -> list[dict[str, Any]]:
    """The objects of the JSON output."""
    return [json.loads(line) for line in program("journal", "--json", *words).out.splitlines()]


def test_text(buildidfs: BuildIdFs) -> None:
    lines = [line.split("\t") for line in buildidfs("journal").out.splitlines()]
    assert [words[1:] for words in lines] == [
        ["-", GONE.hex(), "missing", "/usr/bin/a", "-"],
        ["docker:010101010101", HELD.hex(), "held", "/usr/bin/b", "-"],
        ["-", GONE.hex(), "missing", "/caf\\xe9\\n/c", "-"],
        ["-", HELD.hex(), "held", "/usr/lib/d.so", "-"],
    ]
    oldest = time.mktime(time.strptime(lines[0][0], "%Y-%m-%dT%H:%M:%S%z"))
    assert oldest <= time.time() - 49 * 3600


def test_json(buildidfs: BuildIdFs) -> None:
    first, second, third, _ = rows(buildidfs)
    assert first["build_id"] == GONE.hex()
    assert (first["held"], second["held"], third["held"]) == (False, True, False)
    assert second["container"] == "docker:010101010101"
    assert second["apart"] == ["uts", "mnt"]
    assert base64.b64decode(third["path_b64"]) == b"/caf\xe9\n/c"
    assert third["namespaces"]["pid"] == 9
    assert first["first_seen"] == first["last_seen"] == (NOW - 50 * HOUR) / 1e9
    assert len(first["boot_id"]) == 32


def test_filters(buildidfs: BuildIdFs) -> None:
    assert len(paths(buildidfs)) == 4
    assert paths(buildidfs, "--since", "3h") == ["/usr/bin/b", "/caf\\xe9\\n/c", "/usr/lib/d.so"]
    assert paths(buildidfs, "--since", "2d") == paths(buildidfs, "--since", "3h")
    assert len(paths(buildidfs, "--since", "3d")) == 4
    assert paths(buildidfs, "--since", f"@{NOW // SECOND}") == ["/usr/lib/d.so"]
    assert paths(buildidfs, "--since", "2100-01-01") == []
    assert paths(buildidfs, "--path", "/usr/bin/*") == ["/usr/bin/a", "/usr/bin/b"]
    assert paths(buildidfs, "--path", "*/a", "--path", "*.so") == ["/usr/bin/a", "/usr/lib/d.so"]
    assert paths(buildidfs, "--path", "/usr/bin") == []
    assert paths(buildidfs, "--container", "0101") == ["/usr/bin/b"]
    assert paths(buildidfs, "--container", "docker:02") == []


def test_path_that_looks_like_a_pattern(buildidfs: BuildIdFs) -> None:
    with Store.open(buildidfs.store) as store:
        store.note_seen([seen(b"/lib[1].so", ago=-HOUR)])
    assert paths(buildidfs, "--path", "/lib[1].so") == ["/lib[1].so"]


def test_another_definition(buildidfs: BuildIdFs) -> None:
    def containers(*words: str) -> list[str]:
        return [row["container"] for row in rows(buildidfs, *words)]

    docker = "docker:010101010101"
    assert containers() == ["", docker, "", ""]
    assert containers("--namespaces", "mnt,uts") == ["", docker, "", ""]
    assert containers("--namespaces", "pid") == ["", "", "pid:9", ""]
    assert containers("--namespaces", "mnt,pid") == ["", "", "", ""]
    assert paths(buildidfs, "--namespaces", "pid", "--container", "pid:9") == ["/caf\\xe9\\n/c"]
    assert paths(buildidfs, "--namespaces", "pid", "--container", docker) == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--since", "yesterday"], "not a time: 'yesterday'"),
        (["--namespaces", "pid,disk"], "no such namespace: 'disk'"),
        (["--namespaces", ""], "no such namespace: ''"),
    ],
)
def test_wrong_usage(buildidfs: BuildIdFs, words: list[str], complaint: str) -> None:
    done = buildidfs("journal", *words, check=False)
    assert done.rc == 2
    assert complaint in done.err
    assert done.err.count("\n") == 1


def test_no_store(directory: Path) -> None:
    done = BuildIdFs(directory)("journal", check=False)
    assert (done.rc, done.err.count("\n")) == (11, 1)


def test_whoever_reads_may_have_had_enough(buildidfs: BuildIdFs) -> None:
    with Store.open(buildidfs.store) as store:
        store.note_seen([seen(b"/%d" % n) for n in range(20_000)])
    command = [*COMMAND, "--store", str(buildidfs.store), "journal"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline()
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(60) == 128 + 13


# --- what is a container, asked of the kernel and then of the store ------------------------------

UNSHARED = {
    "mount": (["-m"], ["mnt"]),
    "sandbox": (["-m", "-n", "-i"], ["net", "ipc", "mnt"]),
    "pid-uts": (["-u", "-p", "-f", "--kill-child"], ["uts", "pid"]),
    "whole": (["-m", "-u", "-p", "-f", "--kill-child"], ["uts", "pid", "mnt"]),
}


def pid_of(program: Path) -> int:
    """The process that runs ``program``."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/exe") == str(program):
                found.append(int(pid))
    (only,) = found
    return only


@pytest.fixture(scope="module")
def processes(scratch: Path) -> Iterator[dict[str, int]]:
    """Copies of cat, one in our own namespaces, the others each without some of them, by name."""
    directory = scratch / "definitions"
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        found = {"host": stack.enter_context(copied_cat(directory / "host")).pid}
        for name, (options, _) in UNSHARED.items():
            copy = directory / name
            copy.write_bytes((directory / "host").read_bytes())
            copy.chmod(0o755)
            stack.enter_context(running([tool("unshare"), *options, copy]))
            found[name] = pid_of(copy)
        yield found


def names(program: BuildIdFs, directory: Path, *words: str) -> dict[str, str]:
    """The container of each copy of cat, as ``show`` has it."""
    listed = program("list", "--json", "--path", f"{directory}/*").out.splitlines()
    (build_id,) = {json.loads(line)["build_id"] for line in listed}
    shown = json.loads(program("show", "--json", *words, build_id).out)
    text = program("show", *words, build_id).out
    found = {}
    for origin in shown["origins"]:
        if origin["path"].startswith(f"{directory}/"):
            found[origin["path"].rpartition("/")[2]] = origin["container"]
            where = origin["container"] or "the host"
            assert f"  {origin['path']}\n      in {where} on " in text
    return found


def capture_all(program: BuildIdFs, processes: dict[str, int], *options: str) -> None:
    pids = [word for pid in processes.values() for word in ("--pid", str(pid))]
    done = program(*options, "scan", "proc", *pids, check=False)
    assert done.rc in (0, 3), done


@pytest.mark.root
@pytest.mark.host
def test_two_definitions_of_the_same_captures(
    directory: Path, scratch: Path, processes: dict[str, int]
) -> None:
    place = scratch / "definitions"
    program = BuildIdFs(directory)
    capture_all(program, processes)

    def contained(*words: str) -> set[str]:
        return {name for name, label in names(program, place, *words).items() if label}

    assert set(names(program, place)) == {"host", *UNSHARED}
    assert contained() == {"mount", "sandbox", "whole"}
    assert contained("--namespaces", "mnt") == {"mount", "sandbox", "whole"}
    assert contained("--namespaces", "pid,uts") == {"pid-uts", "whole"}
    assert contained("--namespaces", "mnt,pid") == {"whole"}
    assert contained("--namespaces", "ipc,net") == {"sandbox"}
    assert contained("--namespaces", "cgroup") == set()


@pytest.mark.root
@pytest.mark.host
@pytest.mark.parametrize("definition", [["pid", "uts"], ["mnt"], ["mnt", "pid"]])
def test_definition_asked_later_says_what_the_setting_would_have_said(
    directory: Path, scratch: Path, processes: dict[str, int], definition: list[str]
) -> None:
    place = scratch / "definitions"
    config = directory / "buildidfs.toml"
    config.write_text(f"[container]\nnamespaces = {json.dumps(definition)}\n")
    by_setting = BuildIdFs(directory, directory / "by-setting")
    capture_all(by_setting, processes, "--config", str(config))
    later = BuildIdFs(directory, directory / "later")
    capture_all(later, processes)
    then = names(by_setting, place)
    assert then == names(later, place, "--namespaces", ",".join(definition))
    assert then["whole"]
    assert not then["host"]
    shown = json.loads(later("show", "--json", _build_id(later, place)).out)["origins"]
    apart = {origin["path"]: origin["apart"] for origin in shown}
    for name, (_, expected) in UNSHARED.items():
        assert apart[str(place / name)] == expected


def _build_id(program: BuildIdFs, directory: Path) -> str:
    first = program("list", "--json", "--path", f"{directory}/*").out.splitlines()[0]
    return str(json.loads(first)["build_id"])


@pytest.mark.root
@pytest.mark.host
def test_journal_of_real_processes(
    directory: Path, scratch: Path, processes: dict[str, int]
) -> None:
    """What a scanner sees goes into the journal under each definition."""
    place = scratch / "definitions"
    program = BuildIdFs(directory)

    def resighted() -> list[NewSeen]:
        """Capture and scan; return nothing while a file is too young to be recognized."""
        capture_all(program, processes)
        with Store.open(program.store) as store:
            found = list(ProcScanner(StoreMemo(store), pids=[*processes.values()]))
        known = [each for each in found if isinstance(each, Resighting) and each.known.build_id]
        names = {os.path.basename(os.fsdecode(each.sighting.origin.path)) for each in known}
        if not names.issuperset(processes):
            return []
        return [NewSeen(each.sighting, BuildId(each.known.build_id)) for each in known]

    entries = until(resighted, "a scan that recognizes all programs")
    with Store.open(program.store) as store:
        store.note_seen(entries)

    def contained(*words: str) -> set[str]:
        listed = rows(program, "--path", f"{place}/*", *words)
        assert len(listed) == len(processes)
        assert all(row["held"] for row in listed)
        return {row["path"].rpartition("/")[2] for row in listed if row["container"]}

    assert contained() == {"mount", "sandbox", "whole"}
    assert contained("--namespaces", "pid,uts") == {"pid-uts", "whole"}
    whole = os.stat(f"/proc/{processes['whole']}/ns/mnt").st_ino
    found_paths = paths(program, "--container", f"mnt:{whole}", "--path", f"{place}/*")
    assert found_paths == [str(place / "whole")]


# --- what was lost, and answers that are empty ----------------------------------------------------


@pytest.mark.root
@pytest.mark.host
def test_lost_file_is_a_row_with_path_and_reason(directory: Path) -> None:
    program = BuildIdFs(directory)
    copy = directory / "lost-cat"
    shutil.copy(tool("cat"), copy)
    with watching(program.store, "--no-scan", "--pin-bytes", "1"):
        run([copy, "/dev/null"], check=True)
        until(lambda: _lost(program, copy), "the row")
        until(lambda: program("status", check=False).rc == 5, "the verdict")
        status = program("status", check=False).out
    (row,) = _lost(program, copy)
    assert row["lost"] == "more than 0 MiB wait to be copied"
    assert (row["container"], row["held"]) == ("", False)
    assert row["build_id"]
    assert f"\tlost\t{copy}\tmore than 0 MiB" in program("journal", "--lost").out
    assert f"\tlost\t{copy}\tmore than 0 MiB" in program("journal").out
    assert "losing" in status
    assert row["lost"] in status


def _lost(program: BuildIdFs, path: Path) -> list[dict[str, Any]]:
    done = program("journal", "--lost", "--json", "--path", str(path), check=False)
    return [json.loads(line) for line in done.out.splitlines()]


def test_empty_journal_says_why(directory: Path) -> None:
    program = BuildIdFs(directory)
    program("scan", "tree", tool("cat"))
    scanned = program("journal", "--since", "1h")
    assert scanned.out == ""
    assert scanned.err.startswith(
        "buildidfs: the journal is empty: only watch writes what it sees there"
    )
    assert "buildidfs list" in scanned.err
    assert "has lost a file" in program("journal", "--lost").err
    with Store.open(program.store) as store:
        store.note_seen([seen(b"/bin/x", ago=2 * HOUR, container="docker:abc")])
    assert "nothing was seen by a watch since" in program("journal", "--since", "1h").err
    assert "docker:abc" in program("journal", "--container", "nope").err
    assert program("-q", "journal", "--container", "nope").err == ""
    assert program("journal").err == ""
