# SPDX-License-Identifier: Apache-2.0
"""Why one of several variants is served, in words; the order itself is `index.rank`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buildidfs.store.index import contradicts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from buildidfs.model import Artifact, Quality, Trust


def why(kept: Sequence[Artifact], executable: Artifact | None) -> list[str]:
    """For each of the variants of an artifact, best first, why it is served or is not.

    ``executable`` is the one that is served for the same build ID. Empty for the only one.
    """
    if len(kept) < 2:
        return ["" for _ in kept]
    segments = 0 if executable is None else executable.segments
    best, *others = kept
    return [_better(best, others[0], segments), *(_worse(each, best, segments) for each in others)]


def _better(best: Artifact, other: Artifact, segments: int) -> str:
    if best.trust != other.trust:
        return f"is believed most: {_name(best.trust)}"
    if contradicts(other, segments):
        return "is loaded where the executable is, and others are not"
    if best.quality != other.quality:
        return f"tells most: {_name(best.quality)}"
    return "was seen first" if best.first_seen_ns != other.first_seen_ns else "came first"


def _worse(artifact: Artifact, best: Artifact, segments: int) -> str:
    if artifact.trust != best.trust:
        return f"is believed less: {_name(artifact.trust)}"
    if contradicts(artifact, segments) and not contradicts(best, segments):
        return "is not loaded where the executable is"
    if artifact.quality != best.quality:
        return f"tells less: {_name(artifact.quality)}"
    return "was seen later" if artifact.first_seen_ns != best.first_seen_ns else "came later"


def _name(value: Trust | Quality) -> str:
    return value.name.lower()
