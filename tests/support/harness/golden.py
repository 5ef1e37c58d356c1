# SPDX-License-Identifier: Apache-2.0
"""Stores as they were written earlier, see ``tests/golden/make.py``."""

from __future__ import annotations

import tarfile
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


def unpack(version: int, path: Path) -> Path:
    """Make ``path`` the store of that format."""
    with tarfile.open(GOLDEN / f"format-{version}.tar.xz") as tar:
        tar.extraction_filter = getattr(tarfile, "tar_filter", None)  # not before 3.11.4
        tar.extractall(path)
    path.chmod(0o700)
    return path
