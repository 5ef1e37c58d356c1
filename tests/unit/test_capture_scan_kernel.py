# SPDX-License-Identifier: Apache-2.0
"""The kernel and its modules, in a tree that looks like /proc, /sys and /lib/modules."""

from __future__ import annotations

import gzip
import lzma
import os
import sys
from pathlib import Path

import pytest

from buildidfs.capture.archive import stream
from buildidfs.capture.scan.kernel import KernelScanner, module_paths
from buildidfs.model import BuildId, Kind, Trust
from tests.support.elf.elfwriter import ET_REL, TEXT, build_id_note, elf_file, note
from tests.support.harness.scans import Memory, Scan, open_descriptors, remember, scan

KERNEL = BuildId(b"\x11" * 20)
MODULE = BuildId(b"\x22" * 20)
RELEASE = "6.1.0-1-test"
SYMBOLS = b"0000000000000000 A fixed_percpu_data\nffffffff81000000 T _stext\n"
HIDDEN = b"0000000000000000 A fixed_percpu_data\n0000000000000000 T _stext\n"
KO = elf_file([TEXT], build_id=MODULE, build_id_in="section", etype=ET_REL)


def write(root: Path, path: str, data: bytes) -> None:
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A kernel without modules."""
    write(tmp_path, "proc/kallsyms", SYMBOLS)
    write(tmp_path, "proc/modules", b"")
    notes = note(b"Linux\0", 0x100, b"\0") + build_id_note(KERNEL)
    write(tmp_path, "sys/kernel/notes", notes)
    write(tmp_path, "sys/module/builtin/parameters/x", b"1")
    return tmp_path


def load(machine: Path, file: str, data: bytes, *, name: str = "snd_dummy") -> None:
    """Load a module, whose file has the name and content given."""
    write(machine, f"sys/module/{name}/notes/.note.gnu.build-id", build_id_note(MODULE))
    write(machine, "proc/modules", b"%s 16384 0 - Live 0xffffffffc0000000\n" % name.encode())
    directory = f"lib/modules/{RELEASE}"
    write(machine, f"{directory}/modules.dep", f"{file}: kernel/other.ko\n".encode())
    write(machine, f"{directory}/{file}", data)


def scanned(machine: Path, memory: Memory | None = None) -> Scan:
    before = open_descriptors()
    result = scan(KernelScanner(memory or Memory(), root=os.fsencode(machine), release=RELEASE))
    assert open_descriptors() <= before
    return result


def test_symbols(machine: Path) -> None:
    result = scanned(machine)
    assert result.data(b"[kernel.kallsyms]") == SYMBOLS
    pinned = result.pinned[0].pinned
    assert (pinned.kind, pinned.build_id) == (Kind.KALLSYMS, KERNEL)
    assert pinned.sighting.origin.identity.mode & 0o7777 == 0o400
    assert pinned.sighting.origin.trust is Trust.HOST
    assert result.unreadable == []


def test_hidden_addresses_are_no_symbols(machine: Path) -> None:
    write(machine, "proc/kallsyms", HIDDEN)
    result = scanned(machine)
    assert result.pinned == []
    # This process has CAP_SYSLOG, so only the setting can hide them.
    assert "kernel.kptr_restrict=1" in result.unreadable[0].reason


def test_symbols_are_known_until_modules_move(machine: Path) -> None:
    memory = Memory()
    remember(memory, scanned(machine, memory), KERNEL)
    again = scanned(machine, memory)
    assert (again.pinned, [item.known.build_id for item in again.again]) == ([], [KERNEL])
    write(machine, "proc/modules", b"dummy 16384 0 - Live 0xffffffffc0000000\n")
    assert len(scanned(machine, memory).pinned) == 1
    remember(memory, scanned(machine, memory), KERNEL)
    # A use more or less of a module moves nothing.
    write(machine, "proc/modules", b"dummy 16384 7 - Live 0xffffffffc0000000\n")
    assert scanned(machine, memory).pinned == []


def test_kernel_without_a_build_id(machine: Path) -> None:
    write(machine, "sys/kernel/notes", note(b"Linux\0", 0x100, b"\0"))
    result = scanned(machine)
    assert result.pinned == []
    assert result.unreadable[0].reason == "tells no build ID"


@pytest.mark.parametrize("missing", ["sys/kernel/notes", "proc/kallsyms"])
def test_kernel_that_tells_nothing(machine: Path, missing: str) -> None:
    (machine / missing).unlink()
    result = scanned(machine)
    assert result.pinned == []
    assert result.unreadable[0].reason == "No such file or directory"


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("kernel/sound/snd-dummy.ko", KO),
        ("kernel/sound/snd-dummy.ko.gz", gzip.compress(KO)),
        ("kernel/sound/snd-dummy.ko.xz", lzma.compress(KO)),
        ("updates/snd_dummy.ko", KO),
    ],
)
def test_module_as_it_was_before_compression(machine: Path, file: str, data: bytes) -> None:
    load(machine, file, data)
    result = scanned(machine)
    assert result.unreadable == []
    path = f"/lib/modules/{RELEASE}/{file}"
    assert result.data(path) == KO
    origin = result.pinned[1].pinned.sighting.origin
    assert origin.identity.size == len(data)
    assert origin.scanner == "kernel"


def test_zstd_module(machine: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="needs zstandard (an extra)")
    load(machine, "kernel/snd-dummy.ko.zst", zstandard.compress(KO))
    assert scanned(machine).pinned[1].data == KO


def test_missing_decompressor_names_the_remedy(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    load(machine, "kernel/snd-dummy.ko.zst", b"(\xb5/\xfd")
    (item,) = scanned(machine).unreadable
    assert item.path == f"/lib/modules/{RELEASE}/kernel/snd-dummy.ko.zst".encode()
    assert "zstandard" in item.reason


@pytest.mark.parametrize(
    ("suffix", "data"),
    [
        (".gz", gzip.compress(KO)[:-9]),
        (".gz", b"\x1f\x8b\x08damaged"),
        (".gz", b"text"),
        (".xz", lzma.compress(KO)[:-9]),
        (".xz", b"text"),
    ],
)
def test_damaged_module(machine: Path, suffix: str, data: bytes) -> None:
    load(machine, f"kernel/snd-dummy.ko{suffix}", data)
    result = scanned(machine)
    assert len(result.pinned) == 1
    (item,) = result.unreadable
    assert "damaged" in item.reason


def test_module_too_large(tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(bytes(5000)))
    with packed.open("rb") as file:
        with pytest.raises(stream.CannotDecompress, match="more than 4999 bytes"):
            stream.decompressed(file.fileno(), b"x.ko.gz", 4999)
        plain_fd = stream.decompressed(file.fileno(), b"x.ko.gz", 5000)
        assert plain_fd is not None
        assert os.fstat(plain_fd).st_size == 5000
        os.close(plain_fd)
        assert stream.decompressed(file.fileno(), b"x.ko") is None


def test_file_of_another_build_is_not_the_loaded_module(machine: Path) -> None:
    load(machine, "kernel/snd-dummy.ko", elf_file([TEXT], build_id=KERNEL, etype=ET_REL))
    result = scanned(machine)
    assert len(result.pinned) == 1
    assert "build IDs differ" in result.unreadable[0].reason


def test_known_module_is_not_decompressed_again(machine: Path) -> None:
    load(machine, "kernel/snd-dummy.ko.gz", gzip.compress(KO))
    memory = Memory()
    remember(memory, scanned(machine, memory), MODULE)
    again = scanned(machine, memory)
    # The symbols are remembered under the wrong ID here, which is noticed.
    assert again.paths() == [b"[kernel.kallsyms]"]
    assert [item.known.build_id for item in again.again] == [MODULE]


def test_module_files_that_are_not_there(machine: Path) -> None:
    load(machine, "kernel/snd-dummy.ko", KO)
    (machine / f"lib/modules/{RELEASE}/kernel/snd-dummy.ko").unlink()
    (item,) = scanned(machine).unreadable
    assert item.reason == "No such file or directory"
    write(machine, f"lib/modules/{RELEASE}/modules.dep", b"")
    (item,) = scanned(machine).unreadable
    assert item.path == b"snd_dummy"
    (machine / f"lib/modules/{RELEASE}/modules.dep").unlink()
    (item,) = scanned(machine).unreadable
    assert "1 loaded modules not captured" in item.reason


def test_names_of_modules(tmp_path: Path) -> None:
    dep = tmp_path / "modules.dep"
    dep.write_bytes(b"kernel/a-b.ko.xz: kernel/c.ko\nextra/c.ko:\n\nkernel/readme: x\n")
    assert module_paths(os.fsencode(dep)) == {b"a_b": b"kernel/a-b.ko.xz", b"c": b"extra/c.ko"}
