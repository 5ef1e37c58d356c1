# SPDX-License-Identifier: Apache-2.0
"""Fixtures of many modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from buildidfs.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# How long an example takes depends on what else the machine does.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store, in ``store`` below ``tmp_path``."""
    with Store.create(tmp_path / "store") as made:
        yield made
