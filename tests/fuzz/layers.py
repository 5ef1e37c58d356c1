# SPDX-License-Identifier: Apache-2.0
"""Archives as scans read them: compressed, with the members that are ELF files, and in images."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from typing import Final

from buildidfs.capture.archive.elf_members import ArchiveOrigin, Members, MemberSpool
from buildidfs.capture.archive.stream import ArchiveLimits, CannotDecompress, Region, unpacked
from buildidfs.capture.base import PinnedFile
from buildidfs.capture.image.scanner import ImageScanner
from buildidfs.formats.archive import tar
from buildidfs.formats.archive.common import Damaged
from buildidfs.formats.budget import STEP_BYTES
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import PUBLIC_ACCESS, Trust
from tests.fuzz.target import MEGABYTE, Target, refusal, scratch
from tests.support.elf.elfwriter import elf_file
from tests.support.filesystems.sources import entry
from tests.support.filesystems.sources import tar as tarred
from tests.support.harness.scans import Memory

_ELF: Final = elf_file(build_id=b"\xab" * 20)
_PIECE: Final = 4 << 20


def _check_layer(data: bytes) -> None:
    """Any archive: all that is made of it is in proportion to its size."""
    whose = ArchiveOrigin("image:app", "sha256:1", Trust.PACKAGE, "image")
    with closing_fd(os.memfd_create("layer")) as fd:
        os.write(fd, data)
        members = Members(
            b"layer", b"layer", lambda path: (whose,),
            memo=Memory(), spool=MemberSpool(), limits=ArchiveLimits(), access=PUBLIC_ACCESS,
        )  # fmt: skip
        made = 0

        def attempt() -> None:
            nonlocal made
            stream = unpacked(Region(fd, 0, len(data)), ArchiveLimits().unpacked_bytes)
            for found in members.scan(tar.members(stream), stream):
                if isinstance(found, PinnedFile):
                    made += os.fstat(found.fd).st_size
                    found.close()

        refusal(attempt, Damaged, CannotDecompress)
        # the bytes in the archive, and those in holes and modules
        assert made <= STEP_BYTES * 2 * ((1 << 19) + len(data))


def _seed_layer() -> Iterator[bytes]:
    plain = tarred([("usr/bin/app", _ELF), ("x.ko.gz", gzip.compress(_ELF))])
    yield from (plain, gzip.compress(plain))


def _packed(unit: bytes, size: int = MEGABYTE) -> bytes:
    """The same again and again, in as many bytes."""
    one = gzip.compress(unit * max(1, _PIECE // len(unit)), mtime=0)
    return one * (size // len(one))


def _member(info: tarfile.TarInfo, data: bytes = b"") -> bytes:
    return tarred([(info, data)], format_=tarfile.PAX_FORMAT, end=False)


def _huge_layer() -> Iterator[bytes]:
    info = entry("x")
    yield _packed(_member(info))
    for headers in (
        {"a": ""},
        {f"{number:x}": "" for number in range(60_000)},
        {"GNU.sparse.map": "0,0," * 60_000 + "0,0", "GNU.sparse.size": "0"},
        {"path": "p" * 4000},
    ):
        info.pax_headers = headers
        yield _packed(_member(info))
    yield _packed(tarred([("n" * 4000, b"")], end=False))
    info.pax_headers = {
        "GNU.sparse.map": f"0,{len(_ELF)},{7 << 30},0",
        "GNU.sparse.size": str(7 << 30),
    }
    yield (_member(info, _ELF) * 200)[:MEGABYTE]
    yield _packed(_member(info, _ELF))
    yield gzip.compress(_member(entry("x"), bytes(64 << 20)), mtime=0) * 14
    module = gzip.compress(_ELF + bytes(60 << 20), mtime=0)
    yield tarred([(f"{number}.ko.gz", module) for number in range(15)])


# --- images --------------------------------------------------------------------------------------


def _check_image(data: bytes) -> None:
    path = scratch() / "image.tar"
    path.write_bytes(data)
    for found in ImageScanner(Memory(), [os.fsencode(path)]):
        if isinstance(found, PinnedFile):
            found.close()


def _layout(layers: list[bytes], names: int, room: int = 0) -> bytes:
    """A layout whose index lists one image under so many names; ``room`` is for its manifest."""
    blobs = dict[str, bytes]()

    def blob(content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        return {"digest": f"sha256:{digest}", "size": len(content)}

    manifest = {
        "config": blob(b"{}"),
        "layers": [{**blob(each), "mediaType": "x.tar"} for each in layers],
        "room": "x" * room,
    }
    image = blob(json.dumps(manifest).encode())
    named = [
        {**image, "annotations": {"org.opencontainers.image.ref.name": f"a:{number}"}}
        for number in range(names)
    ]
    index = json.dumps({"manifests": named}).encode()
    return tarred([("oci-layout", b"{}"), ("index.json", index), *blobs.items()])


def _seed_image() -> Iterator[bytes]:
    yield _layout([tarred([("usr/bin/app", _ELF)])], 2)
    entries = [{"Config": "c.json", "RepoTags": ["a:1"], "Layers": ["l.tar"]}]
    layer = tarred([("usr/bin/app", _ELF)])
    config = {"rootfs": {"diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]}}
    saved = io.BytesIO(json.dumps(entries).encode()).getvalue()
    yield tarred(
        [("manifest.json", saved), ("c.json", json.dumps(config).encode()), ("l.tar", layer)]
    )


def _huge_image() -> Iterator[bytes]:
    yield _layout([tarred([("usr/bin/app", _ELF)])], 2000, 600_000)
    yield _layout([_packed(_member(entry("x")), 200_000)], 2000)
    yield _layout([tarred([(f"{number}", _ELF) for number in range(200)])], 2000)
    deep = tarred([(f"d{number}/" + "a/" * 100 + "f", _ELF) for number in range(300)])
    above = [gzip.compress(tarred([(f"x{number}", b"")])) for number in range(300)]
    yield _layout([gzip.compress(deep), *above], 32)
    entries = [{"Config": "c.json", "RepoTags": [f"a:{n}"], "Layers": []} for n in range(4000)]
    config = json.dumps({"rootfs": {"diff_ids": []}, "x": "x" * 600_000}).encode()
    yield tarred([("manifest.json", json.dumps(entries).encode()), ("c.json", config)])


TARGETS: Final = {
    "layer": Target(_check_layer, _seed_layer, _huge_layer, ("budget",)),
    "image": Target(_check_image, _seed_image, _huge_image),
}
