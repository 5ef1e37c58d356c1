# SPDX-License-Identifier: Apache-2.0
"""Kernels and modules where they are installed, in directories that look like those of a system."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from buildidfs.capture.base import Known
from buildidfs.capture.scan import kernel
from buildidfs.capture.scan.kernel import InstalledKernels, KernelScanner
from buildidfs.formats.elf import identify
from buildidfs.model import Absence, BuildId, Kind, Trust
from tests.support.elf.elfwriter import (
    DWARF,
    ET_EXEC,
    ET_REL,
    SYMTAB,
    TEXT,
    TEXT_SPLIT,
    build_id_note,
    elf_file,
)
from tests.support.elf.kernels import PACKERS, bzimage_file, packed_vmlinux, unified_file
from tests.support.filesystems.filereader import FileReader
from tests.support.harness.scans import (
    Memory,
    Scan,
    open_descriptors,
    own_namespaces,
    remember,
    scan,
)

KERNEL, OTHER, MODULE = (BuildId(bytes([number]) * 20) for number in (1, 2, 3))
RELEASE = "6.1.0-1-test"
VMLINUX = elf_file([TEXT], build_id=KERNEL, etype=ET_EXEC)
VMLINUX_DEBUG = elf_file([TEXT, DWARF, SYMTAB], build_id=KERNEL, etype=ET_EXEC)
KO = elf_file([TEXT], build_id=MODULE, build_id_in="section", etype=ET_REL)
KO_DEBUG = elf_file([TEXT_SPLIT, DWARF], build_id=MODULE, build_id_in="section", etype=ET_REL)


def write(root: Path, path: str, data: bytes) -> None:
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)


def installed(root: Path, memory: Memory | None = None) -> Scan:
    before = open_descriptors()
    memo = memory if memory is not None else Memory()
    result = scan(InstalledKernels(memo, os.fsencode(root), initial=own_namespaces()))
    assert open_descriptors() <= before
    return result


def paths(result: Scan, root: Path) -> set[str]:
    return {os.fsdecode(path).removeprefix(str(root)) for path in result.paths()}


# --- what is in a file ---------------------------------------------------------------------------


@pytest.mark.parametrize("packer", PACKERS)
def test_vmlinux_out_of_a_vmlinuz(tmp_path: Path, packer: str) -> None:
    # what was linked is followed by relocations
    image = bzimage_file(packed_vmlinux(VMLINUX + b"relocations", packer))
    write(tmp_path, f"boot/vmlinuz-{RELEASE}", image)
    (seen,) = installed(tmp_path).pinned
    assert seen.data == VMLINUX + b"relocations"
    origin = seen.pinned.sighting.origin
    assert origin.path == os.fsencode(tmp_path / f"boot/vmlinuz-{RELEASE}")
    assert (origin.identity.size, origin.scanner) == (len(image), "kernel")


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("snd.ko", bytes),
        ("snd.ko.gz", gzip.compress),
        ("snd.ko.xz", lzma.compress),
        ("snd.ko.zst", zstandard.compress),
    ],
)
def test_module(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    write(tmp_path, f"lib/modules/{RELEASE}/kernel/sound/{name}", pack(KO))
    (seen,) = installed(tmp_path).pinned
    assert seen.data == KO
    assert os.path.basename(seen.path) == name.encode()


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\x02\x21\x4c\x18" + bytes(20), "damaged"),
        (PACKERS["lz4"](VMLINUX)[:-30], "damaged"),
        (b"\x89LZO\0\r\n\x1a\n" + bytes(20), "compressed with lzo, which is not read here"),
        (b"something", "holds a kernel that is compressed in an unknown way"),
        (lzma.compress(VMLINUX)[:-30], "damaged"),
        (b"\x1f\x8b\x08" + bytes(100), "damaged"),
        (zstandard.compress(VMLINUX)[:-30], "damaged"),
        (gzip.compress(VMLINUX[:-30]), "damaged"),
    ],
)
def test_kernel_that_cannot_be_read(tmp_path: Path, payload: bytes, reason: str) -> None:
    write(tmp_path, "boot/vmlinuz", bzimage_file(payload))
    write(tmp_path, "boot/vmlinux", VMLINUX)
    result = installed(tmp_path)
    (item,) = result.unreadable
    assert (item.path, reason in item.reason) == (os.fsencode(tmp_path / "boot/vmlinuz"), True)
    assert len(result.pinned) == 1


def test_kernel_without_an_elf_file_inside(tmp_path: Path) -> None:
    write(tmp_path, "boot/vmlinuz-arm64", gzip.compress(b"MZ and no ELF"))
    write(tmp_path, "boot/vmlinuz-strange", bzimage_file(gzip.compress(b"no ELF")))
    write(tmp_path, "boot/System.map", b"ffffffff81000000 T _stext\n")
    result = installed(tmp_path)
    assert (result.pinned, result.unreadable) == ([], [])
    assert [item.known.absence for item in result.again] == [Absence.NOT_ELF] * 3


@pytest.mark.parametrize("pack", [bz2.compress, zstandard.compress, gzip.compress])
def test_more_comes_out_than_any_kernel_has(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    write(tmp_path, "boot/vmlinuz", bzimage_file(pack(bytes(80 << 20)) + bytes(4)))
    (item,) = installed(tmp_path).unreadable
    assert f"more than {64 << 20} bytes" in item.reason


def test_large_ones_are_not_kept_in_memory(tmp_path: Path) -> None:
    data = KO + os.urandom(20 << 20)
    write(tmp_path, f"lib/modules/{RELEASE}/large.ko.gz", gzip.compress(data, 1))
    (seen,) = installed(tmp_path).pinned
    assert seen.data == data


# --- where they are ------------------------------------------------------------------------------


def test_all_places(tmp_path: Path) -> None:
    places = {
        "/boot/vmlinuz-1": bzimage_file(packed_vmlinux(VMLINUX, "xz")),
        "/boot/entries/2/linux": bzimage_file(packed_vmlinux(VMLINUX, "gzip")),
        "/lib/modules/1/kernel/a.ko.xz": lzma.compress(KO),
        "/lib/modules/1/vmlinuz": bzimage_file(packed_vmlinux(VMLINUX, "zstd")),
        "/lib/modules/2/vdso/vdso64.so": VMLINUX,
        "/usr/lib/modules/3/kernel/b.ko": KO,
        "/usr/lib/debug/boot/vmlinux-1": VMLINUX_DEBUG,
        "/usr/lib/debug/lib/modules/1/kernel/a.ko.debug": KO_DEBUG,
        "/usr/lib/debug/usr/lib/modules/3/vmlinux": VMLINUX_DEBUG,
    }
    for path, data in places.items():
        write(tmp_path, path, data)
    write(tmp_path, "/usr/lib/other.so", VMLINUX)
    result = installed(tmp_path)
    assert paths(result, tmp_path) == places.keys()
    assert result.unreadable == []


@pytest.mark.parametrize("place", ["efi/EFI/Linux", "boot/EFI/Linux", f"lib/modules/{RELEASE}"])
def test_kernels_inside_unified_images(tmp_path: Path, place: str) -> None:
    image = bzimage_file(packed_vmlinux(VMLINUX, "zstd"))
    write(tmp_path, f"{place}/linux.efi", unified_file(image))
    write(tmp_path, f"{place}/shell.efi", unified_file(b"MZ another program"))
    write(tmp_path, f"{place}/other.efi", unified_file(image, b".other"))
    write(tmp_path, f"{place}/cut.efi", unified_file(image)[:0x500])
    result = installed(tmp_path)
    (seen,) = result.pinned
    assert (seen.data, result.unreadable) == (VMLINUX, [])
    assert paths(result, tmp_path) == {f"/{place}/linux.efi"}


def test_kernels_of_nixos(tmp_path: Path) -> None:
    store = "nix/store/abc-linux-6.1"
    image, older = (
        bzimage_file(packed_vmlinux(elf_file([TEXT], build_id=each, etype=ET_EXEC), "xz"))
        for each in (KERNEL, OTHER)
    )
    write(tmp_path, f"{store}/bzImage", image)
    write(tmp_path, "nix/store/old-linux-5.0/bzImage", older)
    write(
        tmp_path, f"nix/store/mod-linux/lib/modules/{RELEASE}/kernel/snd.ko.xz", lzma.compress(KO)
    )
    for system, linux in (("system-1-link", "old-linux-5.0"), ("system-2-link", "abc-linux-6.1")):
        place = tmp_path / "nix/var/nix/profiles" / system
        place.mkdir(parents=True)
        (place / "kernel").symlink_to(f"/nix/store/{linux}/bzImage")
        (place / "kernel-modules").symlink_to("/nix/store/mod-linux")
    (tmp_path / "nix/var/nix/profiles/system").symlink_to("system-2-link")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/booted-system").symlink_to("/nix/var/nix/profiles/system-2-link")
    result = installed(tmp_path)
    assert not result.unreadable
    ids = [identify.identify(seen.data[:4096], FileReader(seen.data)) for seen in result.pinned]
    assert sorted(map(str, ids)) == sorted(map(str, (KERNEL, OTHER, MODULE)))


def test_kernel_of_guix(tmp_path: Path) -> None:
    write(tmp_path, "gnu/store/x-linux/bzImage", bzimage_file(packed_vmlinux(VMLINUX, "gzip")))
    write(tmp_path, f"gnu/store/x-linux/lib/modules/{RELEASE}/snd.ko.gz", gzip.compress(KO))
    (tmp_path / "run/current-system").mkdir(parents=True)
    (tmp_path / "run/current-system/kernel").symlink_to("/gnu/store/x-linux")
    result = installed(tmp_path)
    assert {seen.data for seen in result.pinned} == {VMLINUX, KO}
    assert not result.unreadable


def test_usr_merged(tmp_path: Path) -> None:
    write(tmp_path, "/usr/lib/modules/1/a.ko", KO)
    (tmp_path / "lib").symlink_to("usr/lib")
    assert paths(installed(tmp_path), tmp_path) == {"/lib/modules/1/a.ko"}


def test_kernel_where_it_was_built(tmp_path: Path) -> None:
    write(tmp_path, "/usr/src/linux/vmlinux", VMLINUX_DEBUG)
    write(tmp_path, "/usr/src/linux/other.o", VMLINUX)
    (tmp_path / "lib/modules/1").mkdir(parents=True)
    (tmp_path / "lib/modules/2").mkdir()
    # absolute, and so from the root that is scanned
    (tmp_path / "lib/modules/1/build").symlink_to("/usr/src/linux")
    assert paths(installed(tmp_path), tmp_path) == {"/lib/modules/1/build/vmlinux"}


def test_no_link_leads_out(tmp_path: Path) -> None:
    write(tmp_path, "outside/boot/vmlinux", VMLINUX)
    write(tmp_path, "outside/modules/1/vmlinux", VMLINUX)
    root = tmp_path / "root"
    (root / "lib/modules/1").mkdir(parents=True)
    (root / "boot").symlink_to("../outside/boot")
    (root / "lib/modules/1/build").symlink_to(tmp_path / "outside/modules/1")
    (root / "usr").symlink_to(tmp_path / "outside")
    result = installed(root)
    assert (result.pinned, result.unreadable) == ([], [])


def test_nothing_there(tmp_path: Path) -> None:
    (item,) = installed(tmp_path).unreadable
    assert item.reason == "has neither /boot nor /lib/modules"
    (item,) = installed(tmp_path / "missing").unreadable
    assert item.reason == "No such file or directory"


def test_known_module_is_not_unpacked_again(tmp_path: Path) -> None:
    write(tmp_path, "/lib/modules/1/a.ko.gz", gzip.compress(KO))
    write(tmp_path, "/boot/vmlinux", VMLINUX)
    memory = Memory()
    remember(memory, installed(tmp_path, memory))
    again = installed(tmp_path, memory)
    assert again.pinned == []
    assert {item.known.build_id for item in again.again} == {MODULE, KERNEL}
    for identity in memory:
        memory[identity] = Known(absence=Absence.NO_BUILD_ID)
    assert installed(tmp_path, memory).pinned == []


@pytest.mark.root
def test_trust(tmp_path: Path, as_host: object) -> None:
    write(tmp_path, "/boot/vmlinux", VMLINUX)
    (seen,) = installed(tmp_path).pinned
    assert seen.pinned.sighting.origin.trust is Trust.HOST


# --- the kernel that runs ------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A kernel that runs with one module."""
    write(tmp_path, "proc/kallsyms", b"ffffffff81000000 T _stext\n")
    write(tmp_path, "proc/modules", b"snd_dummy 16384 0 - Live 0xffffffffc0000000\n")
    write(tmp_path, "sys/kernel/notes", build_id_note(KERNEL))
    write(tmp_path, "sys/module/snd_dummy/notes/.note.gnu.build-id", build_id_note(MODULE))
    write(tmp_path, f"lib/modules/{RELEASE}/modules.dep", b"kernel/snd-dummy.ko.xz:\n")
    write(tmp_path, f"lib/modules/{RELEASE}/kernel/snd-dummy.ko.xz", lzma.compress(KO))
    return tmp_path


def running(machine: Path, *, all_files: bool = True) -> Scan:
    scanner = KernelScanner(
        Memory(), all_files=all_files, root=os.fsencode(machine), release=RELEASE
    )
    return scan(scanner)


def test_running_kernel_with_its_files(machine: Path) -> None:
    write(machine, f"boot/vmlinuz-{RELEASE}", bzimage_file(packed_vmlinux(VMLINUX, "zstd")))
    write(machine, "boot/vmlinuz-other", bzimage_file(packed_vmlinux(VMLINUX, "zstd")))
    write(machine, f"usr/lib/debug/boot/vmlinux-{RELEASE}", VMLINUX_DEBUG)
    debug = f"/usr/lib/debug/lib/modules/{RELEASE}/kernel/snd-dummy.ko"
    write(machine, debug, KO_DEBUG)
    result = running(machine)
    assert result.unreadable == []
    assert {seen.path.decode(): seen.data for seen in result.pinned} == {
        "[kernel.kallsyms]": (machine / "proc/kallsyms").read_bytes(),
        f"/boot/vmlinuz-{RELEASE}": VMLINUX,
        f"/usr/lib/debug/boot/vmlinux-{RELEASE}": VMLINUX_DEBUG,
        f"/lib/modules/{RELEASE}/kernel/snd-dummy.ko.xz": KO,
        debug: KO_DEBUG,
    }
    assert [seen.pinned.kind for seen in result.pinned].count(Kind.KALLSYMS) == 1
    assert len(running(machine, all_files=False).pinned) == 2


def test_kernel_that_was_upgraded_since(machine: Path) -> None:
    other = elf_file([TEXT], build_id=OTHER, etype=ET_EXEC)
    write(machine, f"boot/vmlinuz-{RELEASE}", bzimage_file(packed_vmlinux(other, "xz")))
    (item,) = running(machine).unreadable
    assert item.reason == "is not the kernel that runs: the build IDs differ"


def test_kernel_file_without_a_build_id(machine: Path) -> None:
    """That of another architecture: no fault at all."""
    write(machine, f"boot/vmlinuz-{RELEASE}", gzip.compress(b"MZ and no ELF"))
    result = running(machine)
    assert result.unreadable == []
    assert [item.known.absence for item in result.again] == [Absence.NOT_ELF]


@pytest.mark.parametrize("suffix", ["", ".debug"])
def test_debug_file_of_a_module(machine: Path, suffix: str) -> None:
    directory = f"usr/lib/debug/lib/modules/{RELEASE}/kernel"
    write(machine, f"{directory}/snd-dummy.ko{suffix}", KO_DEBUG)
    assert KO_DEBUG in [seen.data for seen in running(machine).pinned]
    # of another build: no debug file is looked for there
    write(machine, f"{directory}/snd-dummy.ko{suffix}", VMLINUX)
    result = running(machine)
    assert VMLINUX not in [seen.data for seen in result.pinned]
    assert result.unreadable == []


def test_debug_file_by_build_id_comes_first(machine: Path) -> None:
    by_id = f"usr/lib/debug/.build-id/{str(MODULE)[:2]}/{str(MODULE)[2:]}.debug"
    for path in (by_id, f"usr/lib/debug/lib/modules/{RELEASE}/kernel/snd-dummy.ko.debug"):
        write(machine, path, KO_DEBUG)
    assert [path for path in running(machine).paths() if b"debug" in path] == [
        b"/" + by_id.encode()
    ]


def test_names_of_modules_that_are_not_compressed() -> None:
    assert kernel.debug_files(b"/lib/modules/1/a.ko", MODULE)[1:] == [
        b"/usr/lib/debug/lib/modules/1/a.ko.debug",
        b"/usr/lib/debug/lib/modules/1/a.ko",
    ]
