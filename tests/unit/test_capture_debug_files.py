# SPDX-License-Identifier: Apache-2.0
"""Debug files are found where debuggers look, inside the root given, and only if they belong."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from buildidfs.capture import base as capture_elf_file
from buildidfs.capture import debug_files
from buildidfs.capture.base import Known, Unreadable
from buildidfs.capture.debug_files import (
    DEFAULT_DIRECTORIES,
    Companion,
    Companions,
    Opener,
    debug_directories,
    have_build_ids,
    path_by_id,
)
from buildidfs.formats.elf.identify import AltLink, DebugLink, ElfFile
from buildidfs.linux import inodes
from buildidfs.model import BuildId, Kind
from tests.support.clients.tools import run, tool
from tests.support.elf.elfwriter import (
    DWARF,
    TEXT,
    TEXT_SPLIT,
    Section,
    altlink,
    debug_sup,
    debuglink,
    elf_file,
)  # fmt: skip
from tests.support.harness.scans import Memory, open_descriptors, without_privileges

ID = BuildId(bytes.fromhex("0123456789abcdef0123456789abcdef01234567"))
OTHER = BuildId(b"\xff" * 20)
DWZ = BuildId(b"\xdd" * 20)
DEBUG = elf_file([TEXT_SPLIT, DWARF], build_id=ID)
OF_OTHER = elf_file([TEXT_SPLIT, DWARF], build_id=OTHER)
NAMELESS = elf_file([TEXT_SPLIT, DWARF])
COMMON = elf_file([DWARF], build_id=DWZ)
SPLIT_PATH = "usr/lib/debug/.build-id/01/23456789abcdef0123456789abcdef01234567.debug"
NAME = b"app.debug"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A root directory; at the end every descriptor has to be closed again."""
    before = open_descriptors()
    yield tmp_path
    assert open_descriptors() <= before


def put(root: Path, path: str | bytes, data: bytes) -> Path:
    place = root / os.fsdecode(path).lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    return place


def described(data: bytes) -> ElfFile:
    fd = capture_elf_file.memory_file(b"binary", data)
    try:
        answer = capture_elf_file.describe(fd)
    finally:
        os.close(fd)
    assert isinstance(answer, ElfFile)
    return answer


def look(
    root: Path, binary: bytes, path: bytes = b"/opt/app/bin/app", memory: Memory | None = None
) -> list[tuple[bytes, bytes]]:
    """(path, bytes) of every companion found; nothing may be unreadable."""
    found = []
    root_fd = os.open(root, os.O_PATH)
    try:
        for item in Companions(root_fd, memory or Memory()).of(path, described(binary)):
            assert isinstance(item, Companion), item
            with item:
                found.append((item.path, b"" if item.fd < 0 else os.pread(item.fd, 1 << 20, 0)))
    finally:
        os.close(root_fd)
    return found


def linked(name: bytes = NAME, debug: bytes = DEBUG, crc: int | None = None) -> bytes:
    checksum = zlib.crc32(debug) if crc is None else crc
    return elf_file([TEXT, debuglink(name, checksum)], build_id=ID)


def test_by_build_id(root: Path) -> None:
    put(root, SPLIT_PATH, DEBUG)
    assert look(root, elf_file(build_id=ID)) == [(b"/" + SPLIT_PATH.encode(), DEBUG)]


def test_other_build_id_under_the_name_does_not_belong(root: Path) -> None:
    put(root, SPLIT_PATH, OF_OTHER)
    assert look(root, elf_file(build_id=ID)) == []


@pytest.mark.parametrize(
    "place",
    [
        "opt/app/bin/app.debug",
        "opt/app/bin/.debug/app.debug",
        "usr/lib/debug/opt/app/bin/app.debug",
    ],
)
def test_by_link(root: Path, place: str) -> None:
    put(root, place, DEBUG)
    assert look(root, linked()) == [(b"/" + place.encode(), DEBUG)]


def test_checksum_decides_which_file_a_link_means(root: Path) -> None:
    put(root, "opt/app/bin/app.debug", elf_file([TEXT_SPLIT, DWARF, DWARF], build_id=ID))
    put(root, "opt/app/bin/.debug/app.debug", DEBUG)
    assert look(root, linked()) == [(b"/opt/app/bin/.debug/app.debug", DEBUG)]
    assert look(root, linked(crc=1)) == []


def test_linked_file_of_another_build_id_does_not_belong(root: Path) -> None:
    put(root, "opt/app/bin/app.debug", OF_OTHER)
    assert look(root, linked(debug=OF_OTHER)) == []


def test_linked_file_without_a_build_id_is_given_that_of_the_binary(root: Path) -> None:
    put(root, "opt/app/bin/app.debug", NAMELESS)
    root_fd = os.open(root, os.O_PATH)
    binary = described(linked(debug=NAMELESS))
    try:
        (item,) = Companions(root_fd, Memory()).of(b"/opt/app/bin/app", binary)
        assert isinstance(item, Companion)
        with item:
            assert (item.kind, item.build_id) == (Kind.DEBUGINFO, ID)
    finally:
        os.close(root_fd)


def test_linked_file_that_is_not_elf_does_not_belong(root: Path) -> None:
    put(root, "opt/app/bin/app.debug", b"text")
    assert look(root, linked(debug=b"text")) == []


def test_link_is_a_name_and_not_a_path(root: Path) -> None:
    put(root, "opt/secret.debug", DEBUG)
    put(root, "opt/app/bin/x", b"")
    assert look(root, linked(b"../../secret.debug")) == []


def test_file_too_large_for_a_checksum_is_passed_over(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(root, "opt/app/bin/app.debug", DEBUG)
    monkeypatch.setattr(debug_files, "CRC_MAX_BYTES", len(DEBUG) - 1)
    assert look(root, linked()) == []
    monkeypatch.setattr(debug_files, "CRC_MAX_BYTES", len(DEBUG))
    assert len(look(root, linked())) == 1


def test_by_build_id_before_the_link(root: Path) -> None:
    put(root, SPLIT_PATH, DEBUG)
    put(root, "opt/app/bin/app.debug", DEBUG)
    assert [path for path, _ in look(root, linked())] == [b"/" + SPLIT_PATH.encode()]


@pytest.mark.parametrize("target", ["/etc/secret", "../../../../../etc/secret"])
def test_links_stay_in_the_root(root: Path, tmp_path: Path, target: str) -> None:
    inner = tmp_path / "container"
    # The same path outside has a file that would do.
    put(tmp_path, "etc/secret", DEBUG)
    place = put(inner, SPLIT_PATH, b"")
    place.unlink()
    place.symlink_to(target)
    assert look(inner, elf_file(build_id=ID)) == []
    put(inner, "etc/secret", DEBUG)
    assert look(inner, elf_file(build_id=ID)) == [(b"/" + SPLIT_PATH.encode(), DEBUG)]


def test_fifo_in_the_place_is_not_opened(root: Path) -> None:
    place = put(root, SPLIT_PATH, b"")
    place.unlink()
    os.mkfifo(place)
    assert look(root, elf_file(build_id=ID)) == []


def test_refused_devices_are_left_alone(root: Path) -> None:
    place = put(root, SPLIT_PATH, DEBUG)
    root_fd = os.open(root, os.O_PATH)
    try:
        refusing = Companions(root_fd, Memory(), {place.stat().st_dev})
        assert list(refusing.of_known(b"/app/bin", ID, None)) == []
    finally:
        os.close(root_fd)


# --- what dwz moved out ----------------------------------------------------------------------


def test_dwz_file_by_absolute_name(root: Path) -> None:
    name = b"/usr/lib/debug/.dwz/app.debug"
    debug = elf_file([TEXT_SPLIT, DWARF, altlink(name, DWZ)], build_id=ID)
    put(root, SPLIT_PATH, debug)
    put(root, name, COMMON)
    assert look(root, elf_file(build_id=ID)) == [
        (b"/" + SPLIT_PATH.encode(), debug),
        (name, COMMON),
    ]


def test_dwz_file_relative_to_the_debug_file(root: Path) -> None:
    debug = elf_file([TEXT_SPLIT, DWARF, altlink(b"../../.dwz/common", DWZ)], build_id=ID)
    put(root, "opt/app/bin/.debug/app.debug", debug)
    put(root, "opt/app/.dwz/common", COMMON)
    assert look(root, linked(debug=debug))[1:] == [(b"/opt/app/.dwz/common", COMMON)]


def test_dwz_file_relative_to_where_the_debug_file_really_is(root: Path) -> None:
    debug = elf_file([TEXT_SPLIT, DWARF, altlink(b"../.dwz/common", DWZ)], build_id=ID)
    put(root, "usr/lib/debug/real/app.debug", debug)
    put(root, "usr/lib/debug/.dwz/common", COMMON)
    link = put(root, SPLIT_PATH, b"")
    link.unlink()
    link.symlink_to("/usr/lib/debug/real/app.debug")
    found = look(root, elf_file(build_id=ID))
    assert found[1:] == [(b"/usr/lib/debug/.dwz/common", COMMON)]


def test_dwz_file_of_the_binary_itself(root: Path) -> None:
    binary = elf_file([TEXT, DWARF, altlink(b".dwz/common", DWZ)], build_id=ID)
    put(root, "opt/app/bin/.dwz/common", COMMON)
    assert look(root, binary) == [(b"/opt/app/bin/.dwz/common", COMMON)]


def test_dwz_file_elsewhere_under_its_build_id(root: Path) -> None:
    binary = elf_file([TEXT, DWARF, altlink(b"/gone/.dwz/common", DWZ)], build_id=ID)
    put(root, path_by_id(DWZ), COMMON)
    assert look(root, binary) == [(path_by_id(DWZ), COMMON)]


def test_dwz_file_of_another_build_id_does_not_belong(root: Path) -> None:
    binary = elf_file([TEXT, DWARF, altlink(b".dwz/common", DWZ)], build_id=ID)
    put(root, "opt/app/bin/.dwz/common", OF_OTHER)
    assert look(root, binary) == []


def test_supplementary_file_of_dwarf_5(root: Path, tmp_path: Path) -> None:
    """A file of dwz --dwarf-5 has no build ID, but a checksum, by which it is found and kept."""
    programs = []
    for name in ("one", "two"):
        source = tmp_path / f"{name}.c"
        source.write_text(
            "struct shared { int a; struct shared *next; char text[40]; double d[3]; };\n"
            f"int {name}(struct shared *p) {{ return p->next->a; }}\n"
            "int main(void) { return 0; }\n"
        )
        programs.append(tmp_path / name)
        run([tool("gcc"), "-gdwarf-5", "-Wl,--build-id", "-o", programs[-1], source], check=True)
    common = tmp_path / "common"
    link = "/usr/lib/debug/.dwz/common.sup"
    run([tool("dwz"), "--dwarf-5", "-m", common, "-M", link, *programs], check=True)
    assert "Build ID" not in run([tool("readelf"), "-n", common], check=True).out
    put(root, link, common.read_bytes())
    binary = programs[0].read_bytes()
    assert look(root, binary) == [(link.encode(), common.read_bytes())]
    put(root, link, elf_file([DWARF, debug_sup(b"", DWZ, is_supplementary=True)]))
    assert look(root, binary) == [], "another checksum"


def test_dwz_name_cannot_climb_out(root: Path, tmp_path: Path) -> None:
    put(tmp_path, "etc/secret", COMMON)
    binary = elf_file([TEXT, altlink(b"../" * 20 + b"etc/secret", DWZ)], build_id=ID)
    inner = tmp_path / "container"
    inner.mkdir()
    assert look(inner, binary) == []


# --- what the memo knows -----------------------------------------------------------------------


def test_known_companion_is_not_opened(root: Path) -> None:
    place = put(root, SPLIT_PATH, DEBUG)
    root_fd = os.open(root, os.O_PATH)
    fd = os.open(place, os.O_PATH)
    memory = Memory({inodes.identity(fd): Known(ID)})
    os.close(fd)
    try:
        (item,) = Companions(root_fd, memory).of_known(b"/app/bin", ID, None)
        assert isinstance(item, Companion)
        with item:
            assert (item.fd, item.known) == (-1, Known(ID))
        (wrong,) = memory
        memory[wrong] = Known(OTHER)
        assert list(Companions(root_fd, memory).of_known(b"/app/bin", ID, None)) == []
    finally:
        os.close(root_fd)


def test_tells_a_root_without_debug_files(root: Path) -> None:
    root_fd = os.open(root, os.O_PATH)
    try:
        assert not have_build_ids(root_fd, DEFAULT_DIRECTORIES)
        put(root, SPLIT_PATH, DEBUG)
        assert have_build_ids(root_fd, DEFAULT_DIRECTORIES)
    finally:
        os.close(root_fd)


_GDBINIT = """
# set debug-file-directory /commented
set debug-file-directory /opt/a/debug:/opt/b/debug:relative:/gone
python print("set debug-file-directory /printed")
"""


def test_directories_are_the_usual_ones_and_those_of_gdb(root: Path) -> None:
    for name in ("usr/lib/debug", "app/lib/debug", "opt/a/debug", "opt/b/debug", "commented"):
        (root / name).mkdir(parents=True)
    (root / "opt/link").symlink_to("/opt/b/debug")
    put(root, "etc/gdb/gdbinit", _GDBINIT.encode())
    put(root, "root/.gdbinit", b"set debug-file-directory /opt/link/../debug\n")
    root_fd = os.open(root, os.O_PATH)
    try:
        found = debug_directories(root_fd, Opener(), (b"/usr/lib/debug", b"/app/lib/debug"))
    finally:
        os.close(root_fd)
    # gdb resolves the dots in text, too.
    assert found == (b"/usr/lib/debug", b"/app/lib/debug", b"/opt/a/debug", b"/opt/b/debug")


def test_directories_of_refused_devices_are_left_out(root: Path) -> None:
    (root / "buildid/debug").mkdir(parents=True)
    put(root, "root/.gdbinit", b"set debug-file-directory /buildid/debug\n")
    root_fd = os.open(root, os.O_PATH)
    try:
        device = os.fstat(root_fd).st_dev
        assert debug_directories(root_fd, Opener(), ()) == (b"/buildid/debug",)
        assert debug_directories(root_fd, Opener(), (), {device}) == ()
    finally:
        os.close(root_fd)


@pytest.mark.parametrize("directory", [each.decode() for each in DEFAULT_DIRECTORIES])
@pytest.mark.parametrize("by", ["id", "link", "dwz"])
def test_debug_files_in_other_directories_are_found(root: Path, directory: str, by: str) -> None:
    root_fd = os.open(root, os.O_PATH)
    link = DebugLink(b"app.debug", zlib.crc32(DEBUG))
    path = path_by_id(ID, directory.encode()).decode()
    if by != "id":
        path = f"{directory}/opt/app.debug"
    put(root, path[1:], DEBUG)
    try:
        binary = described(elf_file(build_id=ID))
        if by == "link":
            binary = msgspec.structs.replace(binary, debuglink=link)
        elif by == "dwz":
            other = AltLink(b"../../.dwz/common", ID)
            binary = msgspec.structs.replace(binary, altlink=other, build_id=OTHER)
            (root / directory[1:] / ".dwz").mkdir(parents=True)
            (root / path[1:]).rename(root / directory[1:] / ".dwz/common")
            path = f"{directory}/.dwz/common"
        paths = []
        for item in Companions(root_fd, Memory()).of(b"/opt/app", binary):
            assert isinstance(item, Companion)
            with item:
                paths.append(item.path)
        assert paths == [path.encode()]
    finally:
        os.close(root_fd)


def test_unreadable_debug_file_is_said(root: Path) -> None:
    put(root, SPLIT_PATH, DEBUG).chmod(0)
    root.chmod(0o755)
    root_fd = os.open(root, os.O_PATH)
    try:
        with without_privileges():
            (item,) = Companions(root_fd, Memory()).of_known(b"/app/bin", ID, None)
        assert item == Unreadable(b"/" + SPLIT_PATH.encode(), "Permission denied", 13)
    finally:
        os.close(root_fd)


def test_uncommon_sections_do_not_confuse_it(root: Path) -> None:
    empty = Section(b".gnu_debuglink", b"")
    assert look(root, elf_file([TEXT, empty], build_id=ID)) == []
