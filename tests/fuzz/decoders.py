# SPDX-License-Identifier: Apache-2.0
"""The decoders of ``buildidfs.formats``: a new one is a line in `TARGETS`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from buildidfs.formats import proc_text
from buildidfs.formats.container import cgroup
from buildidfs.formats.elf import added_note, header, identify, other_ids
from buildidfs.formats.perf.records import Mapped, decode_ring
from buildidfs.linux import mounts
from buildidfs.model import BuildId
from tests.fuzz import elf_mutation
from tests.fuzz.target import MEGABYTE, Target, filled
from tests.support.elf.elfwriter import PT_NOTE, SHT_NOTE, Section, build_id_note, elf_file, note
from tests.support.filesystems.filereader import FileReader

# --- ELF -----------------------------------------------------------------------------------------


def _huge_elves() -> Iterator[bytes]:
    """As many sections, segments, notes and names as fit, in all forms."""
    for bits, order in ((64, "<"), (32, ">")):
        yield from _tables(bits, order)
    build_id = elf_mutation.BUILD_ID
    empty = note(b"", 0, b"")
    yield elf_file([Section(b".note", filled(empty, MEGABYTE - 4096), SHT_NOTE, segment=PT_NOTE)])
    half = filled(empty, MEGABYTE // 2)
    for align in (4, 8):
        # thousands of sections, and of segments, over the same notes
        at = 64 + 56 * 3001
        over = Section(
            b".n", b"", SHT_NOTE, segment=PT_NOTE, align=align, offset=at, size=len(half)
        )
        yield elf_file([Section(b"", half, segment=PT_NOTE, align=align), *[over] * 3000])
    names = Section(b".names", b"x" * (MEGABYTE // 2), 3)
    scripts = Section(b".debug_gdb_scripts", b"x", offset=1, size=1 << 62)
    yield elf_file([names, *[scripts] * 4000], build_id=build_id, names_index=2)
    apart = [scripts._replace(offset=2 * index, size=1) for index in range(6000)]
    yield elf_file(apart, build_id=build_id)


def _tables(bits: int, order: str) -> Iterator[bytes]:
    """A file that is one table of headers, of sections or of segments, of each that costs."""
    word, entry, phentry = ("Q", 64, 56) if bits == 64 else ("I", 40, 32)
    form = f"{order}4sBBB9xHHI{word * 3}I6H"
    head = struct.calcsize(form)
    identified = build_id_note(elf_mutation.BUILD_ID, little_endian=order == "<")
    for kind in (7, 1, 2, 8):
        for table in ("sections", "segments"):
            start = head + len(identified)
            size = entry if table == "sections" else phentry
            count = (MEGABYTE - start - entry) // size
            many = (0, 0, count) if table == "sections" else (0xFFFF, count, 0)
            # section 0 holds the numbers that do not fit the header
            zero = struct.pack(
                f"{order}II{word * 4}II{word * 2}",
                *(0, 0, 0, 0, 0, many[2], 0, many[1], 0, 0),
            )
            phoff = 0 if table == "sections" else start + entry
            phnum = 0xFFFF if table == "segments" else 0
            header = struct.pack(
                form,
                *(b"\x7fELF", bits // 32, 1 if order == "<" else 2, 1, 3, 62, 1, 0, phoff, start),
                *(0, head, phentry, phnum, entry, 0, 1),
            )
            if table == "sections":
                one = struct.pack(
                    f"{order}II{word * 4}II{word * 2}", 1, kind, 2, 0, head, 4096, 0, 0, 4, 0
                )
            elif bits == 64:
                one = struct.pack(f"{order}IIQQQQQQ", kind, 5, head, 0, 0, 4096, 4096, 4)
            else:
                one = struct.pack(f"{order}IIIIIIII", kind, head, 0, 0, 4096, 4096, 5, 4)
            yield header + identified + zero + one * (count - 1)


# --- notes ---------------------------------------------------------------------------------------


def _check_notes(data: bytes) -> None:
    for little_endian in (True, False):
        for align in (4, 8):
            found = list(header.walk(data, little_endian, align))
            assert sum(len(each.name) + len(each.desc) + 12 for each in found) <= len(data) + 16
            wanted = next(
                (each.desc for each in found if (each.name, each.type) == (b"GNU", 3)), None
            )
            got = header.gnu_build_id(data, little_endian, align)
            assert got == wanted or got is None or wanted is None or len(got) == len(wanted)


def _seed_notes() -> Iterator[bytes]:
    for little_endian in (True, False):
        ours = build_id_note(elf_mutation.BUILD_ID, little_endian=little_endian)
        yield ours
        yield note(b"Go\0\0", 4, b"abc", little_endian=little_endian) + ours
        yield note(b"GNU\0", 5, bytes(16), little_endian=little_endian, align=8) + ours


def _huge_notes() -> Iterator[bytes]:
    yield bytes(MEGABYTE)
    yield filled(note(b"GNU\0", 3, b""))[12:]
    yield note(b"x" * (MEGABYTE - 64), 1, b"")
    yield filled(note(b"\0" * 4096, 1, b"")) + b"\0"


# --- text of /proc -------------------------------------------------------------------------------


def _check_mountinfo(text: bytes) -> None:
    for mount in proc_text.mounts_in(text):
        assert isinstance(mount.dev[0] + mount.mount_id, int)
        proc_text.option(mount.super_options, b"lowerdir")
    proc_text.option(text, b"user_id")
    mounts.own_mount_devices(text)


def _seed_mountinfo() -> Iterator[bytes]:
    yield (
        b"36 35 98:0 /mnt1 /mnt/with\\040blank rw,noatime master:1 shared:2 - ext3 /dev/root rw\n"
        b"40 36 0:44 / /merged rw - overlay overlay rw,lowerdir=/a\\054b:/c,upperdir=/u\n"
        b"41 36 0:45 / /m rw - fuse.buildidfs buildidfs ro,user_id=0,group_id=0\n"
    )


def _huge_mountinfo() -> Iterator[bytes]:
    yield bytes(b"\n" * MEGABYTE)
    yield b" " * MEGABYTE
    yield filled(b"1 1 1:1 a b c - d e f\n")
    yield b"1 1 1:1 a b c " + b"- " * (MEGABYTE // 2 - 8)
    yield b"1 1 1:1 " + filled(b"\\040", MEGABYTE - 64) + b" b c - d e f"
    yield b"9" * (MEGABYTE - 32) + b" 1 1:1 a b c - d e f"
    yield b"1 1 1:1 a b c - d e " + filled(b"x=y,", MEGABYTE - 64)
    yield b"," * MEGABYTE


def _check_cgroup(text: bytes) -> None:
    for path in (cgroup.path(text), cgroup.unified(text), text):
        label = cgroup.container_label(path)
        assert label is None or label.isprintable()


def _seed_cgroup() -> Iterator[bytes]:
    hexadecimal = b"0123456789abcdef" * 4
    pod = b"kubepods-burstable-pod01234567_89ab_cdef_0123_456789abcdef.slice"
    yield b"0::/system.slice/docker-%s.scope\n" % hexadecimal
    yield b"12:cpu,cpuacct:/kubepods.slice/%s/cri-containerd-%s.scope\n0::/\n" % (pod, hexadecimal)
    yield b"1:name=systemd:/machine.slice/libpod-%s.scope/container\n" % hexadecimal
    yield b"0::/ecs/%s/%s-1234567890 (deleted)\n" % (hexadecimal[:32], hexadecimal[:32])
    yield b"0::/machine.slice/machine-lxc\\x2d12\\x2dname\\x2e.scope\n"
    yield b"0::/machine.slice/systemd-nspawn@a\\x2db.service/payload\n0::/lxc.payload.name/x\n"


def _huge_cgroup() -> Iterator[bytes]:
    hexadecimal = b"0123456789abcdef" * 4
    for unit in (
        *(b"/conmon-" + hexadecimal, b"/ecs/", b"/ecs/x", b"/machine-lxc\\x2d1\\x2dx", b"machine-"),
        *(b"/systemd-nspawn@x.service/supervisor", b"f", b"pod0123456789ab-", hexadecimal + b"-"),
        *(b"\\x2d", b" (deleted)", b"/", b"/lxc/", b"1"),
    ):
        yield b"0::" + filled(unit, MEGABYTE - 64)
        # as many lines of the longest path there is
        yield filled(b"0::" + filled(unit, 4096) + b"\n")
    yield b"0::/machine-lxc\\x2d" + b"1" * (MEGABYTE - 64)
    yield b"0::/lxc/" + filled(b"\\x2d", MEGABYTE - 64)
    for line in (b"0::/ecs/x\n", b"1:\n", b"1:x:/\n", b"0::/docker/" + hexadecimal + b"\n"):
        yield filled(line)


def _check_procmaps(text: bytes) -> None:
    for mapping in proc_text.mappings_in(text):
        assert isinstance(mapping.start + mapping.inode, int)


def _seed_procmaps() -> Iterator[bytes]:
    yield (
        b"55d0c0000000-55d0c0001000 r-xp 00001000 fe:00 1234                       /usr/bin/a b\n"
        b"7ffd1000-7ffd2000 r-xp 00000000 00:00 0 [vdso]\n"
        b"7f00-7f10 rw-s 00000000 00:01 99 /memfd:a\\012b (deleted)\n"
    )


def _huge_procmaps() -> Iterator[bytes]:
    yield b"\n" * MEGABYTE
    yield b" " * MEGABYTE
    yield filled(b"0-1 x 0 0:0 0\n")
    yield filled(b"0 1 2 3 4\n")
    yield b"0-1 r-xp 0 0:0 0 /" + filled(b"\\012", MEGABYTE - 64)
    yield b"f" * (MEGABYTE - 64) + b"-1 r-xp 0 0:0 0 /x"
    yield b"0-1 r-xp 0 0:0 " + b"9" * (MEGABYTE - 64)
    yield b"0-1 r-xp 0 0:0 0 " + b"\\" * (MEGABYTE - 64)


# --- records of the kernel -----------------------------------------------------------------------


def _check_perfrecords(data: bytes) -> None:
    everything = list(decode_ring(data))
    fewer = list(decode_ring(data, paths=True))
    assert len(fewer) <= len(everything) <= len(data) // 8
    for record in everything:
        if isinstance(record, Mapped):
            assert b"\0" not in record.path
            assert len(record.build_id) <= 20
            assert not record.build_id or len(BuildId(record.build_id.ljust(2))) <= 20


def _record(kind: int, body: bytes, misc: int = 0) -> bytes:
    return struct.pack("=IHH", kind, misc, 8 + len(body)) + body


def _seed_perfrecords() -> Iterator[bytes]:
    name = b"/usr/bin/app\0\0\0\0"
    time = struct.pack("=Q", 7)
    mapped = struct.pack("=IIQQQIIQQI4x", 1, 1, 4096, 4096, 0, 254, 0, 99, 5, 5)
    identified = mapped[:32] + b"\x14\0\0\0" + elf_mutation.BUILD_ID + mapped[56:]
    task = struct.pack("=IIIIQ", 2, 1, 2, 1, 7)
    spaces = b"".join(struct.pack("=QQ", 4, 4026531840 + number) for number in range(7))
    namespaces = struct.pack("=IIQ", 2, 2, 7) + spaces + time
    yield b"".join(
        (
            _record(10, mapped + name + time),
            _record(10, identified + name + time, 1 << 14),
            _record(7, task),
            _record(4, task),
            _record(16, namespaces),
            _record(2, struct.pack("=QQ", 1, 5) + time),
        )
    )


def _huge_perfrecords() -> Iterator[bytes]:
    (seed,) = _seed_perfrecords()
    yield filled(seed)
    yield filled(_record(9, b""))
    yield filled(_record(2, bytes(24)))
    yield filled(_record(10, struct.pack("=IIQQQIIQQI4x", *(9,) * 9, 4) + b"/" * 60_000))
    yield filled(_record(16, struct.pack("=IIQ", 1, 1, 3000) + bytes(48_008)))


# --- IDs of ELF files ----------------------------------------------------------------------------


def _check_identity(data: bytes) -> None:
    """Any file: as many bytes are read as it has, a few times over."""
    reader = FileReader(data)
    head, size = data[: identify.HEAD_SIZE], len(data)
    answer = identify.identify(head, reader, size)
    reader.bytes_read = 0
    adopted = other_ids.adopted_id(answer, head, reader, size)
    if adopted is not answer:
        assert adopted == other_ids.htlhash(reader, size)
    assert len(other_ids.code_hash(head, reader, size)) in (0, 32)
    go_id = other_ids.go_build_id(head, reader, size)
    assert len(go_id) <= other_ids.GO_ID_MAX
    assert reader.bytes_read <= 4 * size + (2 << 20)
    described = identify.describe(reader, size)
    if isinstance(described, identify.ElfFile):
        for alias in other_ids.aliases(described, reader, size, code=True, crc=True):
            assert 0 < len(alias.value) <= 255
    text = data[:256].decode("latin-1")
    for _, value in other_ids.parse_alias(text):
        assert value


def _check_noted(data: bytes) -> None:
    """Any file: the parts are small, and lie where they should."""
    reader = FileReader(data)
    parts = added_note.with_note(reader, len(data), bytes(16))
    assert reader.bytes_read <= 4 << 20
    if parts is not None:
        assert len(parts.head) in (52, 64)
        assert len(data) <= parts.at < len(data) + 16


TARGETS: Final = {
    "noted": Target(_check_noted, elf_mutation.seeds, _huge_elves, ("elf.added_note",)),
    "identity": Target(_check_identity, elf_mutation.seeds, _huge_elves, ("elf.other_ids",)),
    "elf": Target(
        elf_mutation.examine,
        elf_mutation.seeds,
        _huge_elves,
        ("elf.identify", "elf.header"),
        cost=lambda data: identify.describe(FileReader(data), len(data)),
    ),
    "notes": Target(
        _check_notes,
        _seed_notes,
        _huge_notes,
        ("elf.header",),
        cost=lambda data: sum(1 for _ in header.walk(data, True)),
    ),
    "mountinfo": Target(_check_mountinfo, _seed_mountinfo, _huge_mountinfo, ("proc_text",)),
    "cgroup": Target(
        _check_cgroup, _seed_cgroup, _huge_cgroup, ("container.cgroup",), cost=cgroup.path
    ),
    "procmaps": Target(_check_procmaps, _seed_procmaps, _huge_procmaps, ("proc_text",)),
    "perfrecords": Target(
        _check_perfrecords, _seed_perfrecords, _huge_perfrecords, ("perf.records",)
    ),
}
