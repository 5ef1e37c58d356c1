# SPDX-License-Identifier: Apache-2.0
"""The names by which other systems know an ELF file, with or without a GNU build ID.

- htlhash: 16 bytes of the SHA-256 of the first 4096 bytes, the last 4096 and the size. It is the
  key of OpenTelemetry's profilers (otel-ebpf-profiler:libpf/fileid.go), and the *adopted ID* of a
  program without a GNU build ID. It does not depend on the bytes in between, so it is easy to
  forge.
- Go build ID: the ASCII text of a note of Go's linker (cmd/internal/buildid/note.go).
- code hash: SHA-256 of address and bytes of the executable segments, without the headers of the
  file, which strip rewrites. A stripped file and its unstripped twin share it.
- debug ID of Breakpad: the first 16 bytes of the build ID as a GUID, and an age (samply, Firefox
  Profiler, symbol servers; rust-debugid). For a file without a build ID, the GUID is a hash of its
  first page of code.
- CRC-32 of a debug file, by which ``.gnu_debuglink`` names it.

All sizes are claims, bounded by those of the file; no input makes anything here raise, except what
``read_at`` raises itself.
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.formats.elf import identify as elf_identify
from buildidfs.formats.elf.header import (
    ET_DYN,
    ET_EXEC,
    PF_X,
    PN_XNUM,
    PT_LOAD,
    PT_NOTE,
    SHT_NOTE,
    FileBytes,
    ReadAt,
    Segment,
    code_places,
    parse_header,
    segments,
    walk,
)
from buildidfs.formats.elf.sections import Sections
from buildidfs.model import (
    Absence,
    AdoptedId,
    Alias,
    AliasType,
    BuildId,
    Kind,
    fingerprint,
    is_shared,
)

if TYPE_CHECKING:
    import hashlib
    from collections.abc import Iterator

    from buildidfs.formats.elf.header import ElfLayout

HTL_PART: Final = 4096
HTL_BYTES: Final = 16
BEGINNING_BYTES: Final = 16
GO_ID_MAX: Final = 240
LINK_NAME_MAX: Final = 200

_CHUNK: Final = 1 << 20
_NOTES_MAX: Final = 1 << 16
_NOTE_AREAS: Final = 16
_SEGMENTS_MAX: Final = 1024
_SECTIONS_MAX: Final = 4096
_CODE_SEGMENTS: Final = 16
_GO_OWNER: Final = b"Go"
_GO_TYPE: Final = 4
_PACKAGE_OWNER: Final = b"FDO"
_PACKAGE_TYPE: Final = 0xCAFE1A7E
_GO_ID: Final = re.compile(rb"[\x21-\x7e]+")
_TEXT_PART: Final = 4096
_FNV_PRIME: Final = (1 << 88) + 0x13B
_FNV_BASIS: Final = 0x6C62272E07BB014262B821756295C58D


def _sha256(data: bytes = b"") -> hashlib._Hash:
    # imports OpenSSL, which a process that only reads names does not need
    from hashlib import sha256

    return sha256(data)


# --- htlhash -------------------------------------------------------------------------------------


def htlhash(read_at: ReadAt, size: int) -> bytes:
    """Return the htlhash of a file of ``size`` bytes."""
    part = min(size, HTL_PART)
    hasher = _sha256(read_at(0, part))
    hasher.update(read_at(size - part, part))
    hasher.update(size.to_bytes(8, "big"))
    return hasher.digest()[:HTL_BYTES]


def kernel_htlhash(build_id: bytes) -> bytes:
    """Return the ID that OpenTelemetry's profilers send for a kernel or module.

    It is the FNV-1a-128 of the hexadecimal digits of its GNU build ID (libpf/fileid.go).
    """
    value = _FNV_BASIS
    for byte in build_id.hex().encode():
        value = (value ^ byte) * _FNV_PRIME & (1 << 128) - 1
    return value.to_bytes(16, "big")


def adopted_id(
    answer: BuildId | Absence, head: bytes, read_at: ReadAt, size: int
) -> BuildId | Absence:
    """Return the ID that a program is kept under, given the ``answer`` of `identify.identify`.

    An executable or shared object without a usable build ID gets its htlhash. A build ID is not
    usable if it has an impossible length, or if files share it by mistake (`model.is_shared`).
    Sections may be cut off as long as all loaded segments are complete.
    """
    if isinstance(answer, BuildId):
        if not is_shared(answer):
            return answer
    elif answer not in _ADOPTABLE:
        return answer
    parsed = parse_header(head)
    if parsed is None or parsed[1][0] not in (ET_EXEC, ET_DYN):
        return answer
    if answer is Absence.TRUNCATED and not _is_loadable(head, read_at, size):
        return answer
    return AdoptedId(htlhash(read_at, size))


def describe(
    read_at: ReadAt, size: int, given: BuildId | None = None
) -> elf_identify.ElfFile | Absence:
    """Describe a file under the ID that it is kept under, or return why it cannot be kept.

    ``given`` is the build ID for a file without one; if it is None, the adopted ID is used.
    """
    answer = elf_identify.describe(read_at, size)
    shared = None
    if not isinstance(answer, Absence):
        if not is_shared(answer.build_id):
            return answer
        shared = answer.build_id
    head = read_at(0, min(size, elf_identify.HEAD_SIZE))
    chosen: BuildId | Absence
    if answer is Absence.NO_BUILD_ID and given is not None:
        chosen = given
    else:
        own = answer if isinstance(answer, Absence) else answer.build_id
        chosen = adopted_id(own, head, read_at, size)
    if isinstance(chosen, Absence):
        return chosen
    described = elf_identify.classify(chosen, head, read_at, size)
    if isinstance(described, Absence) or shared is None or chosen == shared:
        return described
    return msgspec.structs.replace(described, shared=shared)


_ADOPTABLE: Final = frozenset((Absence.NO_BUILD_ID, Absence.BAD_BUILD_ID, Absence.TRUNCATED))


def _is_loadable(head: bytes, read_at: ReadAt, size: int) -> bool:
    loads = [each for each in _segments(head, read_at, size) if each.kind == PT_LOAD]
    return bool(loads) and all(each.offset + each.size <= size for each in loads)


def _segments(head: bytes, read_at: ReadAt, size: int) -> list[Segment]:
    """The first program headers of a file; none if their number does not fit its header."""
    parsed = parse_header(head)
    if parsed is None:
        return []
    layout, header = parsed
    phoff, count = header[4], header[9]
    if not phoff or count == PN_XNUM:
        return []
    count = min(count, _SEGMENTS_MAX)
    table = FileBytes(head, read_at, size).read(phoff, count * layout.phdr.size)
    return list(segments(layout, table))


# --- Go ------------------------------------------------------------------------------------------


def go_build_id(head: bytes, read_at: ReadAt, size: int) -> bytes:
    """Return the Go build ID of a file, empty if it has none."""
    found = _notes(_GO_OWNER, _GO_TYPE, head, read_at, size)
    return next((each for each in found if _is_go_id(each)), b"")


def package_note(head: bytes, read_at: ReadAt, size: int) -> bytes:
    """Return the JSON text of the note on the package of a file, empty if it has none.

    Source: https://uapi-group.org/specifications/specs/package_metadata_for_executable_files/
    """
    return next(_notes(_PACKAGE_OWNER, _PACKAGE_TYPE, head, read_at, size), b"").rstrip(b"\0")


def _notes(owner: bytes, kind: int, head: bytes, read_at: ReadAt, size: int) -> Iterator[bytes]:
    """Yield the descriptors of the notes of an owner and a type."""
    parsed = parse_header(head)
    if parsed is None:
        return
    layout, _ = parsed
    source = FileBytes(head, read_at, size)
    for offset, length in _note_areas(layout, head, read_at, size):
        area = source.read(offset, min(length, _NOTES_MAX))
        if owner + b"\0" not in area:
            continue
        for note in walk(area, layout.little_endian):
            if note.name == owner and note.type == kind:
                yield note.desc


def _is_go_id(text: bytes) -> bool:
    return len(text) <= GO_ID_MAX and _GO_ID.fullmatch(text) is not None


def _note_areas(
    layout: ElfLayout, head: bytes, read_at: ReadAt, size: int
) -> Iterator[tuple[int, int]]:
    """Offset and size of note segments, and of note sections if there is no such segment."""
    found = [each for each in _segments(head, read_at, size) if each.kind == PT_NOTE]
    for each in found[:_NOTE_AREAS]:
        yield each.offset, each.size
    if found:
        return
    header = layout.ehdr.unpack_from(head, 16)
    shoff, count = header[5], header[11]
    source = FileBytes(head, read_at, size)
    count = min(count, _SECTIONS_MAX)
    table = (source.table(layout.shdr, shoff, count) if shoff else b"") or b""
    areas = 0
    for _, kind, _, offset, length, _, _, _ in layout.shdr.iter_unpack(table):
        if kind == SHT_NOTE and areas < _NOTE_AREAS:
            areas += 1
            yield offset, length


# --- code ----------------------------------------------------------------------------------------


def code_hash(head: bytes, read_at: ReadAt, size: int) -> bytes:
    """Return the hash of the executable segments of a file, empty if it has none.

    The executable segments are hashed in the order of their headers, each as its address (u64,
    big-endian) and its bytes. ELF header and program headers at the start of the file are left out,
    because strip rewrites both. Reads at most as many bytes as the file has.
    """
    code = [
        each
        for each in _segments(head, read_at, size)
        if each.kind == PT_LOAD and each.flags & PF_X and each.size
    ]
    if not code or len(code) > _CODE_SEGMENTS or sum(each.size for each in code) > size:
        return b""
    first = _headers_end(head)
    hasher = _sha256()
    for each in code:
        start, end = max(each.offset, min(first, each.offset + each.size)), each.offset + each.size
        if end > size:
            return b""
        hasher.update((each.address + start - each.offset & (1 << 64) - 1).to_bytes(8, "big"))
        while start < end:
            data = read_at(start, min(_CHUNK, end - start))
            if not data:
                return b""
            hasher.update(data)
            start += len(data)
    return hasher.digest()


def _headers_end(head: bytes) -> int:
    """Return the offset at which the headers that strip rewrites end, if they are at the start of
    the file.
    """
    parsed = parse_header(head)
    if parsed is None:
        return 0
    layout, header = parsed
    phoff, count = header[4], header[9]
    if phoff != layout.ehdr_size or count == PN_XNUM:
        return layout.ehdr_size
    return layout.ehdr_size + count * int(layout.phdr.size)


def crc32(read_at: ReadAt, size: int) -> bytes:
    """Return the CRC-32 of a file, 4 bytes, big-endian."""
    crc, offset = 0, 0
    while offset < size and (data := read_at(offset, min(_CHUNK, size - offset))):
        crc = zlib.crc32(data, crc)
        offset += len(data)
    return crc.to_bytes(4, "big")


def text_hash(read_at: ReadAt, size: int) -> bytes:
    """Return Breakpad's hash of a file, 16 bytes; empty if it has no section ``.text``.

    The first 4,096 bytes of the section are divided into pieces of 16 bytes, and combined by XOR
    (breakpad: HashElfTextSection of common/linux/file_id.cc).
    """
    section = Sections(read_at, size).named(b".text")
    if section is None or section.offset + section.size > size:
        return b""
    data = read_at(section.offset, min(section.size, _TEXT_PART))
    value = 0
    for at in range(0, len(data), BEGINNING_BYTES):
        value ^= int.from_bytes(
            data[at : at + BEGINNING_BYTES].ljust(BEGINNING_BYTES, b"\0"), "big"
        )
    return value.to_bytes(BEGINNING_BYTES, "big") if value else b""


# --- all aliases ---------------------------------------------------------------------------------


def aliases(
    file: elf_identify.ElfFile,
    read_at: ReadAt,
    size: int,
    *,
    code: bool = False,
    crc: bool = False,
    text: bool = False,
) -> tuple[Alias, ...]:
    """Return the aliases of a file, of which ``file`` is the description.

    ``code`` and ``crc`` request the hashes for which the whole file has to be read, ``text`` the
    `text_hash`, which programs with an adopted ID have in any case.
    """
    head = read_at(0, min(size, HTL_PART))
    found = [Alias(AliasType.HTL, htlhash(read_at, size))]
    if go_id := go_build_id(head, read_at, size):
        found.append(Alias(AliasType.GO, go_id))
    loads = (each for each in _segments(head, read_at, size) if each.kind == PT_LOAD)
    if Kind.EXECUTABLE in file.kinds and (places := code_places(loads)):
        found.append(Alias(AliasType.OFFSETS, fingerprint(repr(places).encode(), 8)))
    if code and (value := code_hash(head, read_at, size)):
        found.append(Alias(AliasType.CODE, value))
    if crc:
        found.append(Alias(AliasType.CRC32, crc32(read_at, size)))
    if file.debuglink is not None and len(file.debuglink.name) <= LINK_NAME_MAX:
        found.append(Alias(AliasType.LINK, link_value(file.debuglink.crc, file.debuglink.name)))
    is_nameless = text or isinstance(file.build_id, AdoptedId)
    if is_nameless and (value := text_hash(read_at, size)):
        found.append(Alias(AliasType.TEXT, value))
    beginning = bytes(file.build_id[:BEGINNING_BYTES])
    if len(file.build_id) > BEGINNING_BYTES and any(beginning):
        found.append(Alias(AliasType.BEGINNING, beginning))
    return tuple(found)


def link_value(crc: int, name: bytes) -> bytes:
    """Return the value of an `AliasType.LINK` alias."""
    return crc.to_bytes(4, "big") + name


def link_of(value: bytes) -> elf_identify.DebugLink:
    """Return the link in the value of an `AliasType.LINK` alias."""
    return elf_identify.DebugLink(value[4:], int.from_bytes(value[:4], "big"))


_DEBUG_ID: Final = re.compile(r"([0-9A-Fa-f]{32})[0-9A-Fa-f]{1,8}")


def beginnings(debug_id: str) -> list[bytes]:
    """Return the build IDs that a debug ID of Breakpad may stand for, the first 16 bytes of each;
    these may also be the `text_hash` of a file without a build ID.

    Shorter build IDs are padded with zeros. A debug ID is a GUID: the first result is for files of
    little-endian machines, where the bytes of its first three fields are swapped, the second one
    for all others. The list is empty if the text is not a debug ID.
    """
    match = _DEBUG_ID.fullmatch(debug_id)
    if match is None:
        return []
    guid = bytes.fromhex(match[1])
    swapped = guid[3::-1] + guid[5:3:-1] + guid[7:5:-1] + guid[8:]
    return [each for each in (swapped, guid) if any(each)]


def is_typed(text: str) -> bool:
    """Return True if a text begins with the type of an alias, as ``htl:0123...`` does."""
    return text.partition(":")[0].lower() in _TYPES and ":" in text


def parse_alias(text: str) -> list[tuple[AliasType | None, bytes]]:
    """Return the meanings of a text: aliases by their type, and a SHA-256 with None as type.

    A type may precede it, as in ``htl:0123...``. Other texts have no meaning.
    """
    prefix, colon, rest = text.partition(":")
    name = prefix.lower() if colon else ""
    value = rest if colon else text
    found: list[tuple[AliasType | None, bytes]] = []
    if name in ("", "go") and "/" in value and value.isascii() and _is_go_id(value.encode()):
        found.append((AliasType.GO, value.encode()))
    try:
        raw = bytes.fromhex(value)
    except ValueError:
        return found
    if len(raw) * 2 != len(value):
        return found
    if len(raw) == 32 and name in ("", "sha256"):
        found.append((None, raw))
    for spelled, kind, size in _BY_SIZE:
        if len(raw) == size and name in ("", spelled):
            found.append((kind, raw))
    if name in ("", "go", "gohex") and b"/" in raw and _is_go_id(raw):
        found.append((AliasType.GO, raw))
    return found


_TYPES: Final = frozenset(("gnu", "go", "gohex", "htl", "sha256", "code", "crc32"))
_BY_SIZE: Final = (
    ("htl", AliasType.HTL, HTL_BYTES),
    ("code", AliasType.CODE, 32),
    ("crc32", AliasType.CRC32, 4),
)
