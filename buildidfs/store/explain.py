# SPDX-License-Identifier: Apache-2.0
"""Why one of several variants is served, in words; the order itself is `index.rank`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buildidfs.model import Trust
from buildidfs.store.index.queries import belief, contradicts, is_settled, is_withheld

if TYPE_CHECKING:
    from collections.abc import Sequence

    from buildidfs.model import Artifact, Quality, Standing


def why(kept: Sequence[Artifact], executable: Artifact | None, floor: int = 0) -> list[str]:
    """For each of the variants of an artifact, best first, why it is served or is not.

    ``executable`` is the one that is served for the same build ID, ``floor`` that of the index.
    Empty for the only one, unless it is withheld.
    """
    if not kept:
        return []
    best, *others = kept
    if executable is not None and is_withheld(best, executable):
        return [f"is believed less than the executable: {_less(each, executable)}" for each in kept]
    if is_withheld(best, None, floor):
        text = "is believed less than the executable, which is not here, or than what refers to it"
        names = (each.standing if each.trust >= Trust.PACKAGE else each.trust for each in kept)
        return [f"{text}: {_name(name)}" for name in names]
    first = _better(best, others[0], executable) if others else ""
    return [first, *(_worse(each, best, executable) for each in others)]


def _better(best: Artifact, other: Artifact, executable: Artifact | None) -> str:
    if other.truncated and not best.truncated:
        return "is whole"
    if best.trust != other.trust:
        return f"is believed most: {_name(best.trust)}"
    if belief(best) != belief(other):
        return f"comes from the best place: {_name(best.standing)}"
    if contradicts(other, executable):
        return "is loaded where the executable is, and others are not"
    if best.quality != other.quality and not is_settled(best):
        return f"tells most: {_name(best.quality)}"
    if best.size != other.size and not is_settled(best):
        return "has more bytes"
    return "was seen first" if best.first_seen_ns != other.first_seen_ns else "came first"


def _worse(artifact: Artifact, best: Artifact, executable: Artifact | None) -> str:
    if artifact.truncated and not best.truncated:
        return "is truncated"
    if artifact.trust != best.trust:
        return f"is believed less: {_name(artifact.trust)}"
    if belief(artifact) != belief(best):
        return f"comes from a lesser place: {_name(artifact.standing)}"
    if contradicts(artifact, executable) and not contradicts(best, executable):
        return "is not loaded where the executable is"
    if artifact.quality != best.quality and not is_settled(best):
        return f"tells less: {_name(artifact.quality)}"
    if artifact.size != best.size and not is_settled(best):
        return "has fewer bytes"
    return "was seen later" if artifact.first_seen_ns != best.first_seen_ns else "came later"


def _less(artifact: Artifact, executable: Artifact) -> str:
    """In what debuginfo is believed less than the executable, in one word."""
    same = artifact.trust == executable.trust or artifact.trust is Trust.PACKAGE
    return _name(artifact.standing if same else artifact.trust)


def _name(value: Trust | Quality | Standing) -> str:
    return value.name.lower()
