# SPDX-License-Identifier: Apache-2.0
"""Profiles that perf made: what the store has of them, and how they become readable elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buildidfs.model import BuildId, FileIdentity, Kind, Origin, Sighting
from buildidfs.profile import reading
from buildidfs.profile.perf_data import Profile
from buildidfs.store import NewSeen, Store
from tests.support.clients.tools import perf_record, perf_tool, run, tool
from tests.support.containers.burning import Burner, burner, container, recording, user_samples
from tests.support.elf import programs
from tests.support.elf.perfwriter import PerfWriter
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import lines, until
from tests.support.harness.watching import Watcher, watching

pytestmark = [pytest.mark.root, pytest.mark.host, pytest.mark.client, pytest.mark.slow]

#: What perf is told, and what it writes then.
FORMS = {
    "file": [],
    "pipe": ["-o", "-"],
    "compressed": ["-z"],
    "compressed-pipe": ["-z", "-o", "-"],
    "build-ids": ["--buildid-mmap"],
    "all-build-ids": ["--buildid-all"],
    "chains": ["-g"],
    "threads": ["--threads"],
    "more": ["-k", "mono", "--namespaces", "--all-cgroups"],
}


@pytest.fixture(scope="module")
def place(scratch: Path) -> Iterator[Path]:
    """A directory for these tests, and in it the one that all containers mount something over."""
    directory = scratch / "profiles"
    directory.mkdir()
    yield directory
    # One worker may run those that watch and the others, at different times. The process that makes
    # debug files may write into a store for a moment after its watch has ended.
    until(lambda: _is_removed(directory), "the end of the last writer")


def _is_removed(directory: Path) -> bool:
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


@pytest.fixture(scope="module")
def hot(place: Path) -> Burner:
    """A program that runs for a fifth of a second."""
    return burner(place / "hot", "hot", 0.2)


@pytest.fixture(scope="module")
def recorded(place: Path, hot: Burner) -> dict[str, Path]:
    """One profile of each form, of a container that nobody watched."""
    found = {}
    for form, options in FORMS.items():
        found[form] = place / f"{form}.data"
        with recording(found[form], *options), container("tmpfs", place / "unseen", hot):
            pass
    return found


def counts(data: Path) -> dict[str, int]:
    """What perf itself says: samples by the short name of the file, [k] for the kernel."""
    argv = [perf_tool(), "script", "-F", "ip,dso", "-G", "-i", data]
    found: dict[str, int] = {}
    for line in run(argv, check=True).out.splitlines():
        match = re.match(r"\s*([0-9a-f]+) .*?\(?([^()]*?)(?: \(deleted\))?\)$", line)
        if match is None:
            continue
        name = "[k]" if int(match[1], 16) >> 63 else match[2].rpartition("/")[2]
        found[name] = found.get(name, 0) + 1
    return found


def covered(program: BuildIdFs, data: Path) -> dict[str, Any]:
    """The JSON of coverage."""
    result: dict[str, Any] = json.loads(program("coverage", "--json", data, check=False).out)
    return result


def processor_ns(pid: int) -> int:
    """The nanoseconds of processor time that the first thread of a process has had."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def by_name(coverage: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in coverage["rows"]:
        name = row["path"].removesuffix(" (deleted)").rpartition("/")[2]
        name = "[k]" if name == "[kernel.kallsyms]" else name
        found[name] = found.get(name, 0) + row["weight"]
    return found


@pytest.fixture(scope="module")
def known(place: Path, hot: Burner) -> BuildIdFs:
    """A store that has this machine's own programs."""
    program = BuildIdFs(place)
    program("scan", "tree", hot.directory)
    return program


def test_call_chains_count_once(known: BuildIdFs, recorded: dict[str, Path], hot: Burner) -> None:
    coverage = covered(known, recorded["chains"])
    assert coverage["weight"] == sum(by_name(coverage).values())
    assert by_name(coverage)["app"] > hot.least_samples


def test_build_ids_that_a_profile_names(recorded: dict[str, Path], hot: Burner) -> None:
    named = {}
    for form, data in recorded.items():
        with Profile(bytes(data)) as profile:
            named[form] = reading.build_ids_of(profile)
    wanted = bytes.fromhex(hot.build_id)
    assert wanted in named["build-ids"]
    assert wanted not in named["file"]  # which is what repair is for
    assert len(named["all-build-ids"]) > len(named["chains"])  # of all that is mapped


@pytest.mark.parametrize("form", FORMS)
def test_samples_fall_where_perf_says_before_and_after_repair(
    known: BuildIdFs, recorded: dict[str, Path], hot: Burner, place: Path, form: str
) -> None:
    before = counts(recorded[form])
    if form != "chains":
        ours = by_name(covered(known, recorded[form]))
        assert ours["app"] == before["app"] > hot.least_samples
        assert ours["[k]"] == before["[k]"]
        assert sum(ours.values()) == sum(before.values())
    out = place / f"{form}.repaired"
    done = known("repair", recorded[form], "-o", out, check=False)
    assert done.rc in (0, 3), done
    after: dict[str, int] = {}
    for name, count in counts(out).items():
        plain = name.partition("@")[0]
        after[plain] = after.get(plain, 0) + count
    assert after == before
    report = run([perf_tool(), "report", "--stdio", "--header", "-i", out], check=True)
    assert "# os release" in report.out
    assert "rror" not in report.err, report


@pytest.mark.parametrize("is_pipe", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
def test_perf_reads_what_was_repaired_in_either_byte_order(
    known: BuildIdFs, hot: Burner, directory: Path, order: str, is_pipe: bool
) -> None:
    """What the tests of the decoders write is what perf takes for a profile, too."""
    write = PerfWriter(order)
    name = os.fsencode(hot.directory / "app")
    inode = (hot.directory / "app").stat()
    dev = os.major(inode.st_dev), os.minor(inode.st_dev)
    records = write.comm(5, b"app", 1, exec_=True)
    records += write.mmap2(5, 0x10000, 0x1000, name, time=2, dev=dev, inode=inode.st_ino)
    records += write.mmap2(5, 0x20000, 0x1000, b"/x", time=2) + write.fork(6, 5, 3)
    records += write.sample(5, 0x10008, 4) + write.sample(6, 0x20008, 5)
    data, out = directory / "perf.data", directory / "repaired.data"
    data.write_bytes(write.pipe(records) if is_pipe else write.file(records))
    assert known("repair", data, "-o", out, check=False).rc == 3
    assert counts(data) == counts(out) == {"app": 1, "x": 1}
    shown = run([perf_tool(), "script", "--show-mmap-events", "-i", out], check=True).out
    assert re.search(rf"PERF_RECORD_MMAP2 5/5: .*<{hot.build_id}>.* {name.decode()}$", shown, re.M)


# --- watched: containers that are gone ---------------------------------------------------------


@pytest.fixture(scope="module")
def watch(place: Path) -> Iterator[Watcher]:
    """A running watch."""
    with watching(place / "watched", "--no-scan") as watcher:
        yield watcher


@pytest.fixture(scope="module")
def watched(place: Path, watch: Watcher) -> BuildIdFs:
    """The program on the store of the watch."""
    (place / "for-watched").mkdir()
    return BuildIdFs(place / "for-watched", watch.store)


def is_captured(program: BuildIdFs, burner_: Burner) -> bool:
    with Store.open(program.store, read_only=True) as store:
        ordinal = store.index.ordinal(BuildId.from_hex(burner_.build_id))
        return ordinal is not None and store.index.artifact(ordinal, Kind.EXECUTABLE) is not None


@pytest.mark.fuse
@pytest.mark.parametrize(
    ("kind", "form"),
    [("tmpfs", "pipe"), ("overlay", "compressed")],
)
def test_profile_of_a_container_that_is_gone(
    watched: BuildIdFs, place: Path, directory: Path, kind: str, form: str
) -> None:
    program = burner(directory / "one", "one", 0.3)
    data, out = directory / "perf.data", directory / "repaired.data"
    with recording(data, *FORMS[form]), container(kind, place / "shared", program) as process:
        pass
    until(lambda: is_captured(watched, program), "the capture of the program")
    done = watched("repair", data, "-o", out, check=False)
    assert done.rc in (0, 3), done
    assert f"{place}/shared/app:" not in done.err, done
    with watched.mounted() as mount:
        before, after = (user_samples(mount, each, process) for each in (data, out))
    assert before.share < 10, before
    assert after.share >= 99, after
    assert after.by_function[program.function] >= 0.95 * after.total, after


@pytest.mark.fuse
@pytest.mark.parametrize(("kind", "order"), [("tmpfs", "together"), ("overlay", "in-turn")])
def test_one_path_and_different_programs(
    watched: BuildIdFs, place: Path, directory: Path, kind: str, order: str
) -> None:
    """perf tells them apart neither before, by itself, nor without other names."""
    both = [burner(directory / name, name, 0.3) for name in ("red", "blue")]
    data, out = directory / "perf.data", directory / "repaired.data"
    ran = []
    with recording(data), contextlib.ExitStack() as running:
        for program in both:
            ran.append(running.enter_context(container(kind, place / "shared", program)))
            if order == "in-turn":
                running.pop_all().close()
    for program in both:
        until(lambda program=program: is_captured(watched, program), "the captures")  # type: ignore[misc]
    done = json.loads(watched("repair", "--json", data, "-o", out, check=False).out)
    path = f"{place}/shared/app"
    renamed = {each["path"]: each["build_id"] for each in done["renamed"]}
    for program in both:
        assert renamed[f"{path}@{program.build_id[:12]}"] == program.build_id
    assert path not in {each["path"] for each in done["unresolved"]}, done
    with watched.mounted() as mount:
        after = user_samples(mount, out, *ran)
        annotated = run(
            [
                perf_tool(), "--buildid-dir", mount / "perf", "report", "--stdio", "-s", "dso,sym",
                "-i", out, "--comm", "app",
            ],
            check=True,
        )  # fmt: skip
    assert after.share >= 99, after
    for program in both:
        assert after.by_function[program.function] > 0.3 * after.total, after
        assert re.search(
            rf"app@{program.build_id[:12]} +\[\.\] {program.function}", annotated.out
        ), annotated
    rows = covered(watched, data)["rows"]
    containers = {row["build_id"]: row["container"] for row in rows if row["path"] == path}
    assert set(containers) == {program.build_id for program in both}
    assert all(label.startswith("mnt:") for label in containers.values())


@pytest.fixture(scope="module")
def ended(watched: BuildIdFs, place: Path) -> tuple[Burner, Path]:
    """A program of a container that is gone and was watched, and its profile."""
    program, data = burner(place / "one", "one", 0.3), place / "one.data"
    with recording(data), container("tmpfs", place / "shared", program):
        pass
    until(lambda: is_captured(watched, program), "the capture of the program")
    return program, data


def test_bundle_and_pin_resolve_what_has_no_build_ids(
    watched: BuildIdFs, ended: tuple[Burner, Path], place: Path, directory: Path
) -> None:
    (program, data), file = ended, directory / "all.tar.zst"
    path = f"{place}/shared/app"
    done = watched("bundle", data, "-o", file, "--json", check=False)
    said = json.loads(done.out)
    assert done.rc in (0, 3), done
    assert path not in {each["path"] for each in said["nameless"] + said["absent"]}, done
    assert "send the output of buildidfs repair" in done.err
    elsewhere = BuildIdFs(directory, directory / "elsewhere")
    elsewhere("import", file)
    assert is_captured(elsewhere, program)
    watched("pin", "--name", "one", data, check=False)
    assert program.build_id in watched("pin", "--list", "--name", "one").out
    watched("unpin", "--name", "one")
    unaware = BuildIdFs(directory, directory / "other-store")
    unaware("scan", "tree", tool("true"))
    done = unaware("bundle", data, "-o", file, "--json", check=False)
    assert done.rc == 3, done
    left = {each["path"]: each for each in json.loads(done.out)["nameless"]}
    assert left[path]["share"] > 0
    assert left[path]["reason"] == "no build ID recorded, and none in the journal"
    assert re.search(rf"^ +\d+\.\d % of the samples  {path}: no build ID", done.err, re.M), done


def test_a_program_that_runs_from_a_memfd(watched: BuildIdFs, place: Path, directory: Path) -> None:
    """It is a file like others to a store that saw it; else nothing says that it is JIT."""
    program = burner(directory / "one", "one", 0.3)
    data = directory / "perf.data"
    name = f"buildidfs-{os.getpid()}"
    with recording(data):
        fd = os.memfd_create(name, 0)
        try:
            os.write(fd, (program.directory / "app").read_bytes())
            subprocess.run([f"/proc/self/fd/{fd}"], pass_fds=[fd], check=True)
        finally:
            os.close(fd)
    until(lambda: is_captured(watched, program), "the capture")
    path = f"/memfd:{name} (deleted)"
    (row,) = [row for row in covered(watched, data)["rows"] if row["path"] == path]
    assert (row["build_id"], row["symbols"]) == (program.build_id, "symtab")
    unaware = BuildIdFs(directory, directory / "other-store")
    unaware("scan", "tree", tool("true"))
    (row,) = [row for row in covered(unaware, data)["rows"] if row["path"] == path]
    assert row["why"].startswith("a memfd that was never captured: a program run from memory, or")
    unresolved = json.loads(unaware("repair", "--json", data, "-o", "/dev/null", check=False).out)[
        "unresolved"
    ]
    assert path in {each["path"] for each in unresolved}


def test_coverage_of_a_container_that_is_gone(
    watched: BuildIdFs, ended: tuple[Burner, Path], place: Path, directory: Path
) -> None:
    (program, data), path = ended, f"{place}/shared/app"
    (row,) = [row for row in covered(watched, data)["rows"] if row["path"] == path]
    assert (row["build_id"], row["symbols"], row["why"]) == (program.build_id, "symtab", "")
    unknown = BuildIdFs(directory, directory / "other-store")
    unknown("scan", "tree", tool("true"))
    (row,) = [row for row in covered(unknown, data)["rows"] if row["path"] == path]
    assert (row["build_id"], row["executable"]) == (None, False)
    assert row["why"] == "no build ID recorded, and none in the journal"
    poor = unknown("coverage", "--fail-under", "99.9", data, check=False)
    assert poor.rc == 30, poor
    assert "wanted 99.9%" in poor.err
    assert re.search(r"^\d+ samples: executable ", poor.out, re.MULTILINE)
    assert unknown("coverage", "--fail-under", "0", data, check=False).rc == 0


# --- what can still be had -------------------------------------------------------------------


def scanned(program: BuildIdFs, *words: str | Path) -> dict[str, dict[str, Any]]:
    """What scan perf-data says of each path."""
    done = program("scan", "perf-data", "--json", *words, check=False)
    return {each["path"]: each for each in json.loads(done.out)["binaries"]}


def addresses_are_shown() -> bool:
    """Whether /proc/kallsyms is worth capturing (kptr_restrict)."""
    with open("/proc/kallsyms", "rb") as symbols:
        return symbols.readline().split()[0].strip(b"0") != b"" or any(
            line.split()[0].strip(b"0") for line in symbols
        )


def test_scan_captures_what_is_still_there(directory: Path, hot: Burner) -> None:
    """By a running process, by its path, with and without build IDs in the profile.

    The profile has only this program and the kernel: what is on a host takes long to capture.
    """
    program = BuildIdFs(directory)
    copied = directory / "app"
    shutil.copy(hot.directory / "app", copied)
    for name, options in (("plain", ["--no-buildid-mmap"]), ("build-ids", [])):
        data = directory / f"{name}.data"
        assert perf_record(data, [copied], *options).rc == 0
        store = BuildIdFs(directory, directory / name)
        found = scanned(store, data)[str(copied)]
        assert (found["build_id"], found["state"], found["why"]) == (hot.build_id, "captured", "")
        assert scanned(store, data)[str(copied)]["state"] == "held"
        # The kernel is in the profile only if a sample fell there; the first scan has it then.
        kernel = scanned(store, "--all", data).get("[kernel.kallsyms]")
        if kernel is not None and addresses_are_shown():
            assert kernel["state"] == ("held" if kernel["samples"] else "captured"), kernel
    copied.unlink()
    gone = scanned(program, directory / "build-ids.data")[str(copied)]
    assert (gone["build_id"], gone["state"]) == (hot.build_id, "missing")
    assert "no process maps it" in gone["why"]


def test_scan_captures_from_a_container_that_runs(
    directory: Path, program: programs.Program
) -> None:
    buildidfs = BuildIdFs(directory)
    content = directory / "content"
    program.install(content, debug="none")
    script = 'mount -t tmpfs none "$1"; cp -a "$2/." "$1"; exec "$1/app/bin/hot" spin'
    inside = directory / "inside"
    inside.mkdir()
    data = directory / "perf.data"
    argv = [tool("unshare"), "-m", "sh", "-c", script, "sh", inside, content]
    with programs.running(*argv) as pid:
        os.kill(pid, signal.SIGSTOP)  # it would take a processor for as long as perf starts
        with recording(data, "--buildid-mmap", "-p", str(pid)):
            before = processor_ns(pid)
            os.kill(pid, signal.SIGCONT)
            until(lambda: processor_ns(pid) > before + 200_000_000, "0.2 s of a processor")
            os.kill(pid, signal.SIGSTOP)
        found = scanned(buildidfs, data)
    for binary, path in ((program.exe, "bin/hot"), (program.lib, "lib/libhot.so")):
        each = found[f"{inside}/app/{path}"]
        assert (each["build_id"], each["state"]) == (binary.build_id, "captured")
        assert each["container"].startswith("mnt:")


def test_scan_captures_from_a_namespace_that_still_runs(directory: Path, hot: Burner) -> None:
    """The program has ended, but its container has not, and the journal knows where it was."""
    buildidfs = BuildIdFs(directory, directory / "watched")
    inside, data = directory / "inside", directory / "perf.data"
    inside.mkdir()
    script = """
        mount -t tmpfs none "$1"; cp "$2/app" "$1"; echo up; read -r _; "$1/app"; echo up; read -r _
        """
    argv = [tool("unshare"), "-m", "sh", "-c", script, "sh", str(inside), str(hot.directory)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        try:
            lines(shell.stdout, lambda got: got == ["up"])
            with (
                watching(directory / "watched", "--no-scan"),
                recording(data, "--buildid-mmap", "-p", str(shell.pid)),
            ):
                shell.stdin.write(b"\n")
                shell.stdin.flush()
                lines(shell.stdout, lambda got: got == ["up"])
                until(lambda: is_captured(buildidfs, hot), "the capture")
            path = f"{inside}/app"
            assert scanned(buildidfs, data)[path]["state"] == "held"
            # The same without the bytes: a store that has seen it, but could not take it.
            forgetful = BuildIdFs(directory, directory / "forgetful")
            _copy_journal(buildidfs, forgetful)
            assert scanned(forgetful, data)[path]["state"] == "captured"
        finally:
            shell.kill()


def _copy_journal(source: BuildIdFs, target: BuildIdFs) -> None:
    """Make a store that has only the journal of another."""
    nothing = FileIdentity(0, 0, 0, 0, 0, 0, 0, 0)
    with Store.open(source.store) as old, Store.create(target.store) as new:
        entries = []
        for row in old.journal.since(0):
            origin = Origin(
                row.path, nothing, row.namespaces, row.mnt_ns_id, row.cgroup, row.container,
                row.host, apart=row.apart, cgroup_id=row.cgroup_id,
            )  # fmt: skip
            entries.append(NewSeen(Sighting(origin, row.last_seen_ns), row.build_id, row.boot))
        new.note_seen(entries)


def test_coverage_of_what_runs(directory: Path, stripped: Path, program: programs.Program) -> None:
    buildidfs = BuildIdFs(directory)
    with programs.running(stripped, "stuck") as pid:
        buildidfs.scan(pid)
        done = buildidfs("coverage", "--live", "--json", check=False)
    assert done.rc in (0, 3), done
    coverage = json.loads(done.out)
    assert coverage["unit"] == "mapped files"
    found = {row["path"]: row for row in coverage["rows"] if row["build_id"]}
    row = found[str(stripped)]
    assert row["build_id"] == program.exe.build_id
    assert (row["executable"], row["symbols"], row["debuginfo"]) == (True, "dynsym", False)
    assert "stripped" in row["why"]
    # The test itself has not been captured, but runs.
    assert any(row["why"] == "never captured" for row in found.values())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["coverage"], "name a FILE, or use --live"),
        (["coverage", "--live", "perf.data"], "name a FILE, or use --live"),
        (["coverage", "/etc/passwd"], "is not a perf.data file"),
        (["repair", "/etc/passwd", "-o", "/dev/null"], "is not a perf.data file"),
        (["repair", "/etc/passwd"], "missing option '-o'"),
        (["coverage", "--fail-under", "101", "x"], "101"),
    ],
)
def test_wrong_usage(known: BuildIdFs, words: list[str], complaint: str) -> None:
    done = known(*words, check=False)
    assert done.rc == 2, done
    assert complaint in done.err
    assert done.err.count("\n") == 1
