# SPDX-License-Identifier: Apache-2.0
"""The content of a blob's file, in whatever form it is there, in the way decoders ask for it."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple

from buildidfs.store.schema import schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.formats.elf.identify import ReadAt
    from buildidfs.store.blobs.verify import OpenBlob


class Content(NamedTuple):
    """``size`` bytes, read with ``read_at``, which raises OSError and `IntegrityError`."""

    read_at: ReadAt
    size: int


@contextlib.contextmanager
def content_of(opened: OpenBlob) -> Iterator[Content]:
    """The content of an open blob, whose descriptor stays open."""
    fd = opened.fd
    if opened.form != schema.FORM_ZSTD:
        yield Content(lambda offset, size: os.pread(fd, size, offset), os.fstat(fd).st_size)
        return
    from buildidfs.store.blobs.zstd import CompressedBlob

    with contextlib.closing(CompressedBlob(os.dup(fd))) as blob:
        yield Content(lambda offset, size: blob.pread(size, offset), blob.size)


def plain(opened: OpenBlob) -> int:
    """Another descriptor, of the content itself."""
    if opened.form != schema.FORM_ZSTD:
        return os.dup(opened.fd)
    from buildidfs.store.blobs.zstd import inflate

    return inflate(os.dup(opened.fd))
