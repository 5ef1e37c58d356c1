# SPDX-License-Identifier: Apache-2.0
"""Bundles that say of themselves what is not so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buildidfs.formats import bundle_archive
from buildidfs.store.blobs.zstd import FrameWriter
from tests.support.clients.tools import run, tool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def rewrite(file: Path, directory: Path, change: Callable[[str], str]) -> None:
    """Have the manifest of a bundle say something else; ``directory`` gets what is in it."""
    run([tool("tar"), "--zstd", "-xf", file, "-C", directory], check=True)
    text = change((directory / "manifest.json").read_text())
    manifest = bundle_archive.decode(text.encode())
    with file.open("wb") as stream:
        writer = FrameWriter(stream.fileno())
        data = bundle_archive.encode(manifest)
        writer.write(bundle_archive.header(bundle_archive.MANIFEST, len(data)))
        writer.write(data.ljust(bundle_archive.padded(len(data)), b"\0"))
        for digest, member in bundle_archive.members(manifest, len(data))[0].items():
            blob = (directory / "blobs" / digest.hex()).read_bytes()
            writer.write(bundle_archive.header(member.name, member.size))
            writer.write(blob.ljust(bundle_archive.padded(len(blob)), b"\0"))
        writer.write(bundle_archive.end())
        writer.finish()
