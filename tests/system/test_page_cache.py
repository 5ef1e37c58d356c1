# SPDX-License-Identifier: Apache-2.0
"""What the kernel has read of a file that was damaged is not shown when it is right again."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.elf.elfwriter import elf_file

if TYPE_CHECKING:
    from tests.support.harness.mounts import BuildIdFs


def test_right_again(directory: Path, buildidfs: BuildIdFs) -> None:
    build_id = b"\x5a" * 20
    content = elf_file(build_id=build_id) + bytes(100_000)
    (directory / "files").mkdir()
    (directory / "files" / "program").write_bytes(content)
    buildidfs("scan", "tree", directory / "files")
    digest = hashlib.sha256(content).hexdigest()
    blob = Path(buildidfs.store) / "blobs" / digest[:2] / digest
    with buildidfs.mounted() as mount:
        path = mount / build_id.hex() / "variants" / digest
        with path.open("rb") as reader:
            with blob.open("r+b") as file:
                file.seek(50_000)
                file.write(b"rot")
            with pytest.raises(OSError, match=r".") as caught:
                reader.read()
            assert caught.value.errno == errno.ESTALE
            with blob.open("r+b") as file:
                file.write(content)
            assert path.read_bytes() == content
        assert path.read_bytes() == content
