# SPDX-License-Identifier: Apache-2.0
"""The overview without a server: counted now, as values or as one file of HTML."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from buildidfs.app import survey, upkeep
from buildidfs.app.containers import Names
from buildidfs.app.page import overview
from buildidfs.app.page.trends import Trends

if TYPE_CHECKING:
    from buildidfs.app.page.answers import Overview
    from buildidfs.capture.base import Progress
    from buildidfs.config import Settings
    from buildidfs.store import Store


def take(store: Store, settings: Settings, progress: Progress | None) -> Overview:
    """Count, and put together what the first page shows. Raises `StoreError`, `IntegrityError`."""
    steps = itertools.count(0, survey.STEP)

    def go_on() -> None:
        if progress is not None:
            progress(next(steps), "")

    return overview.overview(
        store,
        survey.take(store, go_on),
        Names(store),
        policy=upkeep.policy(settings.retention, store.path),
        history=Trends(store).rows(),
    )


def as_html(taken: Overview) -> bytes:
    """The report as one file: its style is in it, and its policy allows nothing else."""
    from buildidfs.app.page import html

    return html.render(
        "overview.html",
        o=taken,
        style=html.style().decode(),
        style_hash=html.style_hash(),
        refresh=False,
        drops=False,
    )
