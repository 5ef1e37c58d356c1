# SPDX-License-Identifier: Apache-2.0
"""buildidfs.profile.why: the reason why a file or a frame has no name, and the remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.catalog import remedies
from buildidfs.catalog.coverage import BinaryCoverage, Coverage
from buildidfs.errors import ArtifactMissing
from buildidfs.formats.package_databases import Package
from buildidfs.linux import machine
from buildidfs.model import BuildId, Kind, Quality
from buildidfs.profile.reading import coverage
from buildidfs.profile.selection import Selection
from buildidfs.profile.why import Explainer
from buildidfs.store import NewSeen, Store
from buildidfs.store.permissions import PUBLIC
from buildidfs.store.run_files import LossLog, LostFiles, Presence, lost_text
from tests.support.elf.corewriter import Mapped, core_file
from tests.support.elf.elfwriter import elf_file
from tests.support.elf.perfwriter import PerfWriter
from tests.support.harness.captures import NOW, capture, commit, sighting

if TYPE_CHECKING:
    from buildidfs.view import Viewer

ID = BuildId(b"\1" * 20)
OTHER = BuildId(b"\2" * 20)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as made:
        yield made


def reasons(store: Store, build_id: BuildId = ID) -> list[str]:
    return [each.reason for each in Explainer(store).build_id(build_id).findings]


def see(store: Store, quality: Quality, kind: Kind = Kind.EXECUTABLE, path: bytes = b"/x") -> None:
    seen = sighting(path, host=machine.host_name())
    content = f"{kind} {quality}".encode()
    commit(store, capture(store, content, ID, kinds=(kind,), at=seen, quality=quality))


# --- of a build ID -------------------------------------------------------------------------------


def test_nothing_is_known(store: Store) -> None:
    (finding,) = Explainer(store).build_id(ID).findings
    assert finding.reason == "never-seen"
    assert finding.command == f"buildidfs where --live {ID}"


@pytest.mark.parametrize(
    ("quality", "kind", "reason"),
    [
        (Quality.DYNSYM, Kind.EXECUTABLE, "stripped"),
        (Quality.NONE, Kind.EXECUTABLE, "no-symbols"),
        (Quality.DYNSYM, Kind.VDSO, "no-debuginfo"),
        (Quality.SYMTAB, Kind.EXECUTABLE, "no-debuginfo"),
        (Quality.DEBUGINFO, Kind.EXECUTABLE, "complete"),
        (Quality.DEBUGINFO, Kind.DEBUGINFO, "no-executable"),
    ],
)
def test_what_the_store_has(store: Store, quality: Quality, kind: Kind, reason: str) -> None:
    see(store, quality, kind)
    assert reasons(store) == [reason]


def known_to_apt(monkeypatch: pytest.MonkeyPatch, directory: Path, names: str) -> None:
    """Put an apt-cache that knows some packages into PATH."""
    program = directory / "apt-cache"
    program.write_text(f"#!/bin/sh\necho {names}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_package_of_a_file_of_this_host(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.path.realpath("/bin/sh")
    see(store, Quality.DYNSYM, path=os.fsencode(path))
    known_to_apt(monkeypatch, tmp_path, "dash-dbgsym")
    (finding,) = Explainer(store).build_id(ID).findings
    assert finding.command == "apt-get install dash-dbgsym && buildidfs scan tree /usr/lib/debug"
    assert finding.unknown is None


def test_debug_package_that_apt_does_not_know_is_not_installed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(store, Quality.DYNSYM, path=os.fsencode(os.path.realpath("/bin/sh")))
    known_to_apt(monkeypatch, tmp_path, "dash")
    explainer = Explainer(store)
    (finding,) = explainer.build_id(ID).findings
    assert finding.unknown == "dash-dbgsym"
    assert (finding.command or "").endswith(f"buildidfs fetch {ID}")
    libc = Package("libc6", "2.36", "dpkg")
    assert finding.package is not None
    assert explainer.install([finding.package, libc]) == ("", ["dash-dbgsym", "libc6-dbg"])
    known_to_apt(monkeypatch, tmp_path, "libc6-dbg")
    command, unknown = Explainer(store).install([finding.package, libc])
    assert command == "apt-get install libc6-dbg && buildidfs scan tree /usr/lib/debug"
    assert unknown == ["dash-dbgsym"]


def test_file_of_this_host_that_no_package_has(store: Store) -> None:
    see(store, Quality.DYNSYM, path=b"/srv/own/program")
    (finding,) = Explainer(store).build_id(ID).findings
    assert finding.remedy.startswith("no package of this host has it: ")
    assert finding.command == "buildidfs scan tree BUILD_DIRECTORY"
    assert finding.reason == "stripped"


def test_program_of_this_host_that_was_built_without_lines(store: Store) -> None:
    see(store, Quality.SYMTAB, path=b"/srv/own/program")
    (finding,) = Explainer(store).build_id(ID).findings
    assert finding.reason == "no-debuginfo"
    assert "build it with -g" in finding.remedy


def test_debug_archive_is_that_of_the_release() -> None:
    bookworm = {"ID": "debian", "VERSION_CODENAME": "bookworm"}
    line = "deb http://deb.debian.org/debian-debug/ bookworm-debug main"
    assert remedies.debug_archive("dpkg", bookworm).endswith(line)
    assert remedies.DEBIAN_ARCHIVE in remedies.debug_archive("dpkg", {"ID": "ubuntu"})
    assert remedies.debug_archive("rpm", {"ID": "fedora"}) == ""


@pytest.mark.parametrize(
    ("distribution", "command"),
    [
        ("debian", "DEBUGINFOD_URLS=https://debuginfod.debian.net buildidfs fetch {wanted}"),
        ("unknown", "buildidfs fetch {wanted}"),
    ],
)
def test_fetch_asks_the_server_of_the_distribution(distribution: str, command: str) -> None:
    assert remedies.fetch_command({"ID": distribution}) == command


def test_packages_are_installed_together() -> None:
    said, _ = remedies.install_debug_packages("dpkg", ["zlib1g", "libc6"])
    assert said.startswith("apt-get install zlib1g-dbgsym libc6-dbg && ")


@pytest.mark.parametrize("viewer", [None, PUBLIC])
def test_mounted_store_is_named(store: Store, viewer: Viewer | None) -> None:
    see(store, Quality.DEBUGINFO)
    with Presence(store.path, "mount", mountpoint=b"/srv/my ids"):
        (finding,) = Explainer(store, viewer).build_id(ID).findings
    assert finding.command == f"ls '/srv/my ids'/{ID}"
    assert "DEBUGINFOD_URLS=file:///srv/my ids" in finding.remedy


def test_file_that_a_watch_lost(store: Store) -> None:
    store.note_seen([NewSeen(sighting(b"/gone", container="docker:0123"), ID)])
    row = LostFiles(NOW, lost_text(b"/gone"), "No such process", "docker:0123", build_id=ID.hex())
    assert LossLog(store.path).append([row])
    (finding,) = Explainer(store).build_id(ID).findings
    assert finding.reason == "lost"
    assert "/gone in docker:0123" in finding.why
    assert "No such process" in finding.why
    assert "buildidfs doctor says if watch may run before all else" in finding.remedy


def test_file_that_there_was_no_room_for(store: Store) -> None:
    store.commit([], [], [NewSeen(sighting(b"/noted"), ID, omitted=True)])
    assert reasons(store) == ["no-room"]


def test_file_whose_bytes_are_gone(store: Store) -> None:
    store.note_seen([NewSeen(sighting(b"/gone"), ID)])
    (finding,) = Explainer(store).build_id(ID).findings
    assert (finding.reason, finding.command) == ("not-kept", f"buildidfs fetch {ID}")
    for way in ("buildidfs fetch", "scan package", "scan image", "buildidfs bundle"):
        assert way in finding.remedy


def test_file_that_is_still_there(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "a b"
    file.write_bytes(elf_file(build_id=ID))
    seen = sighting(os.fsencode(file), host=machine.host_name())
    store.note_seen([NewSeen(seen, ID)])
    first, second = Explainer(store).build_id(ID).findings
    assert (first.reason, second.reason) == ("still-here", "not-kept")
    assert first.command == f"buildidfs add '{file}'"


# --- of a profile --------------------------------------------------------------------------------


@pytest.fixture
def profile(tmp_path: Path) -> bytes:
    """Samples in a file with a build ID, in one without, and in memory without a file."""
    write = PerfWriter()
    file = tmp_path / "perf.data"
    records = write.mmap2(1, 0x10000, 0x1000, b"/app/server", build_id=bytes(ID))
    records += write.mmap2(1, 0x20000, 0x1000, b"/app/libx.so")
    records += write.mmap2(1, 0x30000, 0x1000, b"//anon")
    for address, count in ((0x10010, 6), (0x20010, 3), (0x30010, 1)):
        records += b"".join(write.sample(1, address, 9) for _ in range(count))
    file.write_bytes(write.file(records))
    return os.fsencode(file)


def test_files_of_a_profile(store: Store, profile: bytes) -> None:
    answer = Explainer(store).file(profile, None)
    found = [(each.path, each.share, each.findings[0].reason) for each in answer.files]
    assert found == [
        ("/app/server", 0.6, "not-captured"),
        ("/app/libx.so", 0.3, "no-build-id"),
        ("//anon", 0.1, "generated-code"),
    ]
    assert answer.unit == "samples"
    assert answer.files[0].findings[0].command == f"buildidfs scan perf-data {os.fsdecode(profile)}"


@pytest.mark.parametrize(
    ("mapped", "reason"),
    [
        ([b"/usr/bin/node", b"/lib/libc.so.6"], "generated-code"),
        ([b"/lib/ld-linux-x86-64.so.2", b"/lib/libc.so.6", b"[vdso]"], "moved-code"),
        ([b"/usr/bin/qemu-aarch64-static"], "emulated-code"),
        ([b"/usr/bin/qemu-system-aarch64", b"/lib/libc.so.6"], "generated-code"),
        ([], "generated-code"),
    ],
)
def test_the_files_of_a_process_tell_whose_code_is_in_memory(
    store: Store, tmp_path: Path, mapped: list[bytes], reason: str
) -> None:
    write, file = PerfWriter(), tmp_path / "perf.data"
    records = write.mmap2(1, 0x30000, 0x1000, b"//anon")
    for number, path in enumerate(mapped, 4):
        records += write.mmap2(1, number << 16, 0x1000, path)
    file.write_bytes(write.file(records + write.sample(1, 0x30010, 9)))
    (each,) = Explainer(store).file(os.fsencode(file), "//anon").files
    assert each.findings[0].reason == reason


@pytest.mark.parametrize("frame", ["0x20010", "20010", "/app/libx.so", "libx.so", "*/libx.so*"])
def test_one_frame(store: Store, profile: bytes, frame: str) -> None:
    (each,) = Explainer(store).file(profile, frame).files
    assert (each.path, each.weight) == ("/app/libx.so", 3)


def test_frame_with_names(store: Store, profile: bytes) -> None:
    see(store, Quality.DEBUGINFO)
    assert [each.path for each in Explainer(store).file(profile, None).files] == [
        "/app/libx.so", "//anon",
    ]  # fmt: skip
    (each,) = Explainer(store).file(profile, "server").files
    assert each.findings[0].reason == "complete"


def test_frame_whose_build_id_the_profile_lacks(store: Store, tmp_path: Path) -> None:
    """A client that reads this profile finds no name, although the store has it."""
    write = PerfWriter()
    place = {"dev": os.makedev(8, 1), "ino": 5, "host": machine.host_name()}
    at = sighting(b"/app/server", **place)
    commit(store, capture(store, b"its bytes", ID, at=at, quality=Quality.DEBUGINFO))
    records = write.mmap2(1, 0x10000, 0x1000, b"/app/server", dev=(8, 1), inode=5)
    records += write.sample(1, 0x10010, 9)
    file = tmp_path / "perf.data"
    file.write_bytes(write.file(records))
    (each,) = Explainer(store).file(os.fsencode(file), "server").files
    assert each.build_id == ID.hex()
    assert each.findings[0].reason == "not-repaired"
    assert each.findings[0].command == f"buildidfs repair {file} -o repaired.data"


def test_profile_without_build_ids_names_less_to_perf(store: Store, tmp_path: Path) -> None:
    """perf report shows the frames of /app/b as hexadecimal numbers until repair adds its ID."""
    write = PerfWriter()
    for number, build_id in ((5, ID), (6, OTHER)):
        place = {"dev": os.makedev(8, 1), "ino": number, "host": machine.host_name()}
        at = sighting(b"/app/%d" % number, **place)
        commit(store, capture(store, b"%d" % number, build_id, at=at, quality=Quality.SYMTAB))
    records = write.mmap2(1, 0x10000, 0x1000, b"/app/5", build_id=bytes(ID))
    records += write.mmap2(1, 0x20000, 0x1000, b"/app/6", dev=(8, 1), inode=6)
    records += write.sample(1, 0x10010, 9) + 3 * write.sample(1, 0x20010, 9)
    file = tmp_path / "perf.data"
    file.write_bytes(write.file(records))
    found = coverage(store, os.fsencode(file))
    assert found.symbols() == 1
    assert found.unrepaired() == 0.25
    assert Explainer(store).file(os.fsencode(file), None).gain == (0.25, 1.0)


def test_repair_is_no_gain_if_perf_names_as_much_as_after_it() -> None:
    """2 of 10,000 samples are in a file whose build ID the profile lacks."""
    rows = [
        BinaryCoverage("", b"/app/5", ID, 9998, symbols=Quality.SYMTAB),
        BinaryCoverage("", b"/app/6", OTHER, 2, symbols=Quality.SYMTAB),
    ]
    assert Coverage(rows, "samples", recorded=frozenset((ID,))).gain_of_repair() is None
    assert Coverage(rows, "samples", recorded=frozenset((OTHER,))).gain_of_repair() == (0.0002, 1)


def test_files_of_one_container(store: Store, tmp_path: Path) -> None:
    """Two containers have other files at the same path."""
    write = PerfWriter()
    records = b""
    for number, label in ((1, "docker:0101"), (2, "docker:0202")):
        place = {"dev": os.makedev(8, 1), "ino": number, "host": machine.host_name()}
        at = sighting(b"/app", container=label, **place)
        commit(store, capture(store, b"%d" % number, BuildId(bytes([number]) * 20), at=at))
        records += write.mmap2(number, 0x10000, 0x1000, b"/app", dev=(8, 1), inode=number)
        records += write.sample(number, 0x10010, 9)
    file = tmp_path / "perf.data"
    file.write_bytes(write.file(records))
    (each,) = Explainer(store).file(os.fsencode(file), None, container="docker:02").files
    assert (each.container, each.build_id) == ("docker:0202", OTHER.hex())


def test_profile_with_all_build_ids_needs_no_repair(store: Store, profile: bytes) -> None:
    see(store, Quality.DEBUGINFO)
    assert coverage(store, profile).unrepaired() is None


def test_profile_without_samples_has_no_weight(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "perf.data"
    file.write_bytes(PerfWriter().file(b""))
    answer = Explainer(store).file(os.fsencode(file), None)
    assert (answer.files, answer.weight) == ([], 0)


def test_frame_that_no_sample_has(store: Store, profile: bytes) -> None:
    for frame in ("0x40000", "/no/such"):
        with pytest.raises(ArtifactMissing, match="no sample of"):
            Explainer(store).file(profile, frame)


def test_thread_without_samples_is_not_among_the_names(store: Store, tmp_path: Path) -> None:
    write, file = PerfWriter(), tmp_path / "perf.data"
    records = write.mmap2(1, 0x10000, 0x1000, b"/app")
    for pid, name in enumerate((b"kthreadd", b"rare", b"often"), 1):
        records += write.comm(pid, name)
    for pid in (2, 3, 3):
        records += write.sample(pid, 0x10008, 1)
    file.write_bytes(write.file(records))
    with pytest.raises(ArtifactMissing, match=r"named kthreadd; samples are of often, rare$"):
        coverage(store, os.fsencode(file), selection=Selection.of(None, "kthreadd"))


def test_files_of_a_core_file(store: Store, tmp_path: Path) -> None:
    core = tmp_path / "core"
    core.write_bytes(core_file([Mapped(0x10000, elf_file(build_id=bytes(ID))[:4096], b"/no/app")]))
    (each,) = Explainer(store).file(os.fsencode(core), None).files
    assert (each.path, each.findings[0].reason) == ("/no/app", "not-captured")
    assert each.findings[0].command == f"buildidfs scan core {core}"


# --- remedies ------------------------------------------------------------------------------------


def test_each_reason_has_a_remedy() -> None:
    texts = [
        text
        for name, text in vars(remedies).items()
        if name.isupper() and isinstance(text, str) and not name.startswith("_")
    ]
    notes = (
        remedies.NOTHING_RECORDED, remedies.OTHER_MACHINE, remedies.MAY_BE_HERE,
        remedies.INSTALLED, remedies.DEBIAN_ARCHIVE, remedies.AT_ITS_PATH,
    )  # fmt: skip
    codes = [remedies.of_reason(text).code for text in texts if text not in notes]
    assert "other" not in codes
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(
    ("manager", "package", "command"),
    [
        ("dpkg", "libssl3", "apt-get install libssl3-dbgsym"),
        ("dpkg", "libc6", "apt-get install libc6-dbg"),
        ("apk", "musl", "apk add musl-dbg"),
        ("rpm", "glibc", "dnf debuginfo-install glibc"),
        ("", "x", ""),
        ("dpkg", "", ""),
    ],
)
def test_debug_packages(manager: str, package: str, command: str) -> None:
    said, _ = remedies.install_debug_packages(manager, [package])
    assert said.partition(" && ")[0] == command
