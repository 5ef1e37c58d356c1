# SPDX-License-Identifier: Apache-2.0
"""The page of a container: its files that every user may read, those that lack most first."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from buildidfs.app import containers, remedies
from buildidfs.app.coverage import Holdings
from buildidfs.app.page import answers, overview
from buildidfs.app.survey import severity, why_lacking

if TYPE_CHECKING:
    from buildidfs.app.coverage import Row
    from buildidfs.store import ContainerEntry, Store

MOST_FILES: Final = 200


def page(store: Store, name: bytes) -> answers.Contents | None:
    """The container with a name, or the first with a label; None if none is known to every user.

    Raises `StoreError`, `IntegrityError`.
    """
    number = store.containers.number(name)
    if number is not None:
        found = store.containers.get(number)
    else:
        found = store.containers.labelled(name.decode("utf-8", "surrogateescape"))
    if found is None or not found.public:
        return None
    worst: list[tuple[int, bytes, Row, str]] = []
    total = 0

    def each(entry: ContainerEntry, path: bytes, row: Row) -> None:
        nonlocal total
        if not entry.public:
            return
        total += 1
        why = why_lacking(row.executable, row.symbols, row.debuginfo, row.why)
        worst.append((severity(why), path, row, why))

    contents = containers.contents(store, found, Holdings(store), each)
    shown = heapq.nsmallest(MOST_FILES, worst, key=lambda file: (-file[0], file[1]))
    container = overview.container(contents)
    return answers.Contents(
        container,
        [
            answers.Lacking(
                "" if row.build_id is None else row.build_id.hex(),
                overview.text(path),
                container.name,
                1,
                container.last_seen,
                remedies.of_reason(why).code if why else "",
            )
            for _, path, row, why in shown
        ],
        total,
    )
