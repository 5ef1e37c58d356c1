# SPDX-License-Identifier: Apache-2.0
"""The archive of a bundle: its manifest, and the place of each file.

A bundle is a tar archive in the seekable format of zstd (`formats.archive.seekable_zstd`):

    manifest.json        one JSON object, `Manifest`
    blobs/SHA256         each file once, in the order in which the manifest first names it
    inputs/NUMBER-NAME   the profile or core file of the bundle, if requested
    sources.jsonl        the source files that its debuginfo names, one `SourceLine` per line
    buildid/ID/KIND      symbolic links to the files, for people who unpack it; readers ignore them

Sizes are in the manifest, so a reader can compute the place of a file. The same input gives the
same bytes. All content is a claim until its digest is verified.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from buildidfs import names
from buildidfs.errors import IntegrityError
from buildidfs.model import Digest, Kind

VERSION: Final = 1
MANIFEST: Final = b"manifest.json"
SOURCES: Final = b"sources.jsonl"
BLOCK: Final = 512
MANIFEST_MAX: Final = 256 << 20
# Our own manifests grow to 5 to 10 times when decompressed, because digests do not compress; more
# is hostile.
_MANIFEST_RATIO: Final = 16
# As for packages.
_CONTENT_LEAST: Final = 128 << 20
_CONTENT_RATIO: Final = 256
_MANIFEST_LEAST: Final = 1 << 20

_ITEMS_MAX: Final = 1 << 20
_PLACES_MAX: Final = 256
_END: Final = bytes(2 * BLOCK)
_NAME_MAX: Final = 100

Hex = Annotated[str, Meta(pattern="^([0-9a-f]{2}){2,120}$")]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Meta(ge=0, le=1 << 48)]
Time = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Text = Annotated[str, Meta(max_length=8192)]


class BundlePlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """A place where bytes were seen, with the first and last time (Unix time, ns).

    ``path`` is text; ``path_b64`` has the bytes if they are not UTF-8. ``public`` is True if all
    users could read the file there.
    """

    path: Text
    first_seen_ns: Time
    last_seen_ns: Time
    host: Text = ""
    container: Text = ""
    path_b64: Annotated[bytes, Meta(max_length=8192)] = b""
    public: bool = False

    @property
    def raw_path(self) -> bytes:
        """Return the path as it was seen."""
        return self.path_b64 or self.path.encode()


class Item(msgspec.Struct, frozen=True, omit_defaults=True):
    """An artifact. ``scripts`` has offset and size of each script that gdb would run; ``mode`` has
    the permissions.
    """

    build_id: Hex
    kind: Annotated[str, Meta(pattern="^(executable|debuginfo|vdso|kallsyms)$")]
    sha256: Sha256
    size: Size
    mtime_ns: Time
    mode: Annotated[int, Meta(ge=0, le=0o7777)]
    quality: Annotated[int, Meta(ge=0, le=4)]
    trust: Annotated[int, Meta(ge=0, le=3)]
    segments: Annotated[str, Meta(pattern="^[0-9a-f]{1,16}$")] = "0"
    scripts: Annotated[tuple[tuple[Size, Size], ...], Meta(max_length=64)] = ()
    places: Annotated[tuple[BundlePlace, ...], Meta(max_length=_PLACES_MAX)] = ()
    truncated: bool = False

    @property
    def kind_of(self) -> Kind:
        """Return the kind as a value."""
        return Kind[self.kind.upper()]


class Absent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file that should be in the bundle, but is missing."""

    build_id: Hex
    why: Text
    path: Text = ""


class Input(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file that the bundle was made for; ``size`` is set if the bundle contains it."""

    name: Text
    size: Size | None = None


class SourceList(msgspec.Struct, frozen=True, omit_defaults=True):
    """The list of source files, or the reason ``why`` there is none.

    ``files`` is the number of files in it. ``absent`` are debug files whose sources it does not
    list completely.
    """

    size: Size | None = None
    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    files: Size = 0
    why: Text = ""
    absent: Annotated[tuple[Absent, ...], Meta(max_length=_ITEMS_MAX)] = ()


class SourceLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the list of source files. It has either the ``path`` of a source file that a debug
    file names, or a compilation ``directory``; a relative path starts at one of these directories.

    A name that is not UTF-8 has its bytes in ``path_b64`` or ``directory_b64``.
    """

    build_id: str
    path: str = ""
    directory: str = ""
    path_b64: bytes = b""
    directory_b64: bytes = b""


class LabelNames(msgspec.Struct, frozen=True, omit_defaults=True):
    """The names of the container with a label, as in `model.ContainerNames`."""

    label: Text
    name: Text = ""
    pod: Text = ""
    namespace: Text = ""
    image: Text = ""


class Manifest(msgspec.Struct, frozen=True):
    """The contents of a bundle, and the files that it lacks. Bundles of earlier versions have no
    ``sources``.
    """

    bundle: int
    host: Text
    inputs: Annotated[tuple[Input, ...], Meta(max_length=1024)]
    items: Annotated[tuple[Item, ...], Meta(max_length=_ITEMS_MAX)]
    absent: Annotated[tuple[Absent, ...], Meta(max_length=_ITEMS_MAX)]
    sources: SourceList | None = None
    containers: Annotated[tuple[LabelNames, ...], Meta(max_length=_ITEMS_MAX)] = ()


class BundleMember(NamedTuple):
    """A file of the archive: ``size`` bytes from ``offset``, after its header."""

    name: bytes
    offset: int
    size: int


class BundleMembers(NamedTuple):
    """All files of the archive except the manifest, in order."""

    blobs: dict[Digest, BundleMember]
    inputs: list[BundleMember]
    sources: BundleMember | None


class _Version(msgspec.Struct):
    bundle: int = 0


def encode(manifest: Manifest) -> bytes:
    """Return the manifest in the form of the archive: with line breaks, because people read it."""
    return msgspec.json.format(names.json_escaped(msgspec.json.encode(manifest)), indent=1) + b"\n"


def encode_source(build_id: str, *, path: bytes = b"", directory: bytes = b"") -> bytes:
    """Return a line of the source list, for a file or a directory."""
    source = SourceLine(
        build_id,
        path.decode("utf-8", "replace"),
        directory.decode("utf-8", "replace"),
        b"" if _is_text(path) else path,
        b"" if _is_text(directory) else directory,
    )
    return names.json_escaped(msgspec.json.encode(source)) + b"\n"


def _is_text(data: bytes) -> bool:
    return data.decode("utf-8", "replace").encode() == data


def decode(data: bytes) -> Manifest:
    """The inverse of `encode`. Raises `IntegrityError` for other bytes, or a later version."""
    try:
        version = msgspec.json.decode(data, type=_Version).bundle
        if version != VERSION:
            raise IntegrityError(f"a bundle of version {version}: use a newer buildidfs")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise IntegrityError(f"the manifest of the bundle makes no sense: {error}") from error
    return manifest


def manifest_size(header: bytes, packed: int) -> int:
    """Return the size of the manifest, from the first block of an archive of ``packed`` bytes.

    Raises `IntegrityError`.
    """
    name, _, _ = header[:100].partition(b"\0")
    text = header[124:136].rstrip(b"\0 ")
    if len(header) != BLOCK or name != MANIFEST or not text.isdigit():
        raise IntegrityError("not a bundle: it does not begin with a manifest")
    try:
        size = int(text, 8)
    except ValueError:
        size = MANIFEST_MAX + 1
    if size > min(MANIFEST_MAX, _MANIFEST_LEAST + _MANIFEST_RATIO * packed):
        raise IntegrityError("the manifest of the bundle is larger than any that is written")
    return size


def check_content(size: int, packed: int) -> None:
    """Raise `IntegrityError` if an archive of ``packed`` bytes has more content than files that are
    worth a bundle compress to.
    """
    if size > _CONTENT_LEAST + _CONTENT_RATIO * packed:
        raise IntegrityError(f"the bundle has {size} bytes in only {packed} compressed ones")


def members(manifest: Manifest, manifest_bytes: int) -> BundleMembers:
    """Return the places of all files. Raises `IntegrityError` if the manifest gives two sizes for
    one blob.
    """
    position = BLOCK + padded(manifest_bytes)
    blobs: dict[Digest, BundleMember] = {}
    for item in manifest.items:
        digest = Digest(bytes.fromhex(item.sha256))
        before = blobs.get(digest)
        if before is None:
            name = b"blobs/" + item.sha256.encode()
            blobs[digest] = BundleMember(name, position + BLOCK, item.size)
            position += BLOCK + padded(item.size)
        elif before.size != item.size:
            raise IntegrityError(f"the bundle says two sizes of blob {digest}")
    inputs = []
    for number, each in enumerate(manifest.inputs):
        if each.size is not None:
            base = each.name.rpartition("/")[2].encode("utf-8", "replace")[:80]
            name = b"inputs/%d-%s" % (number, base)
            inputs.append(BundleMember(name, position + BLOCK, each.size))
            position += BLOCK + padded(each.size)
    sources = None
    if manifest.sources is not None and manifest.sources.size is not None:
        sources = BundleMember(SOURCES, position + BLOCK, manifest.sources.size)
    return BundleMembers(blobs, inputs, sources)


def links(manifest: Manifest) -> bytes:
    """Return the blocks of the symbolic links that give each file the name of its build ID.

    They follow all files, so they move none. A build ID of more than 40 bytes has none: its name
    does not fit into a header.
    """
    targets: dict[bytes, bytes] = {}
    for item in manifest.items:
        name = f"buildid/{item.build_id}/{item.kind}".encode()
        if len(name) <= _NAME_MAX:
            targets.setdefault(name, b"../../blobs/" + item.sha256.encode())
    return b"".join(header(name, 0, target) for name, target in targets.items())


def header(name: bytes, size: int, link: bytes = b"") -> bytes:
    """Return the block before a file (POSIX ustar; in GNU's form if the size exceeds
    octal digits), or of a symbolic link to ``link``.
    """
    field = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    before = name.ljust(100, b"\0") + b"0000444\0" + b"0000000\0" * 2 + field + b"%011o\0" % 0
    kind = b"2" if link else b"0"
    after = kind + link.ljust(100, b"\0") + b"ustar\x0000" + bytes(64) + b"0000000\0" * 2
    block = (before + b" " * 8 + after).ljust(BLOCK, b"\0")
    return before + b"%06o\0 " % sum(block) + block[156:]


def padded(size: int) -> int:
    """Return ``size`` rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def end() -> bytes:
    """Return the bytes that end the archive."""
    return _END
