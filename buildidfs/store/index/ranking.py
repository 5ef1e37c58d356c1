# SPDX-License-Identifier: Apache-2.0
"""The order of files that claim the same name: the served one, the withheld ones, and the reasons.

All code that has to choose among several files asks here: `rank` orders them by belief, `chosen`
cuts the list after that. Only then does a caller look at permissions: if the best file is private,
the answer is that there is none, and never the next one, which a container may have made.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final, TypeVar

from buildidfs.model import Artifact, Kind, Standing, Trust
from buildidfs.store import schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from buildidfs.model import Quality

T = TypeVar("T")


def chosen(claims: Iterable[tuple[Artifact, T]], most: int) -> list[tuple[Artifact, T]]:
    """Return the ``most`` best of the files that claim a name, best first, each with what the
    caller knows of it. Reads all claims: bound their number by belief, not by order.
    """
    return heapq.nsmallest(most, claims, key=lambda each: rank(each[0], None))


def rank(artifact: Artifact, executable: Artifact | None, floor: int = 0) -> tuple[int, ...]:
    """Return the sort key of a variant: the best variant has the least key. ``executable`` is the
    executable that is served.
    """
    return (
        is_withheld(artifact, executable, floor),
        artifact.truncated,
        *(-each for each in precedence(artifact.kind, artifact.trust, artifact.standing)),
        artifact.adopted,  # a build ID in the file precedes a computed one
        contradicts(artifact, executable),
        artifact.first_seen_ns if is_settled(artifact) else 0,
        -artifact.quality,
        -artifact.size,  # no header shows that the file was cut beyond the last section
        artifact.first_seen_ns,
        artifact.variant,
    )


def precedence(kind: Kind, trust: Trust, standing: Standing) -> tuple[int, int]:
    """Return the sort key of files of a place: greater is better.

    Belief decides, then trust. But executables of upstream servers come after all those of the
    host: a server must not take the place of a program that the host runs.
    """
    if kind is not Kind.DEBUGINFO and trust is Trust.PACKAGE and standing is Standing.UPSTREAM:
        return 2 * belief_in(Trust.PACKAGE, Standing.IMAGE) + 1, trust
    return 2 * belief_in(trust, standing), trust


def is_settled(artifact: Artifact) -> bool:
    """Return True if, among files of equal trust and standing, the one seen first is served.

    This holds for the host's executables: a container that can write to a directory of the host can
    make a file of any quality. Among files that the operator gave, the quality decides.
    """
    return (
        artifact.kind is Kind.EXECUTABLE
        and artifact.trust is Trust.HOST
        and artifact.standing is not Standing.GIVEN
    )


def contradicts(artifact: Artifact, executable: Artifact | None) -> bool:
    """Return True if the program headers of debuginfo and executable contradict each other."""
    if artifact.kind is not Kind.DEBUGINFO or executable is None or executable.truncated:
        return False
    return 0 not in (executable.segments, artifact.segments) and (
        executable.segments != artifact.segments
    )


def is_withheld(artifact: Artifact, executable: Artifact | None, floor: int = 0) -> bool:
    """Return True for debuginfo that is not trusted enough to be served for the executable.

    That is debuginfo with less belief than the executable or the ``floor`` of the build ID.
    Packages that the operator gave, and servers that the operator named, are always believed. A
    truncated executable withholds nothing.
    """
    if artifact.kind is not Kind.DEBUGINFO:
        return False
    if executable is not None and not executable.truncated:
        floor = max(floor, belief(executable))
    return belief(artifact) < min(floor, _ENOUGH)


def belief_in(trust: Trust, standing: Standing) -> int:
    """Return the belief in files of a place as one number: the standing of files of the host and of
    packages, else the trust.
    """
    return _OF_PLACES + standing if trust >= Trust.PACKAGE else trust


def believed(place: tuple[Trust, Standing]) -> tuple[int, int]:
    """Return the sort key of claims of places: the belief, then the trust."""
    return belief_in(*place), place[0]


def belief(artifact: Artifact) -> int:
    """Return the belief in an artifact as one number: see `belief_in`."""
    return belief_in(artifact.trust, artifact.standing)


def naming_belief(artifact: Artifact) -> int:
    """Return the belief in the function names of a file. All files that may name functions of any
    program are equal in it.
    """
    return min(belief(artifact), _ENOUGH)


_OF_PLACES: Final = int(Trust.PACKAGE)


_ENOUGH: Final = _OF_PLACES + int(Standing.UPSTREAM)


def executable_in(ordinal: int, value: bytes | None) -> Artifact | None:
    """Return the executable in a row of *artifacts*; None if the row is missing."""
    return None if value is None else schema.unpack_artifact(ordinal, Kind.EXECUTABLE, value)


def executable_key(ordinal: int) -> bytes:
    return schema.ORDINAL_KIND.pack(ordinal, Kind.EXECUTABLE)


def why(kept: Sequence[Artifact], executable: Artifact | None, floor: int = 0) -> list[str]:
    """Explain for each variant of an artifact, best first, why it is served or not.

    ``executable`` is the served one of the build ID, ``floor`` the floor in the index. If there is
    only one variant, its reason is empty unless it is withheld.
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
    if best.trust > other.trust:
        return f"is believed most: {_name(best.trust)}"
    if best.trust is not other.trust or belief(best) != belief(other):
        return f"comes from the best place: {_name(best.standing)}"
    if other.adopted and not best.adopted:
        return "has that build ID in it, and others are only known by it"
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
    if artifact.trust < best.trust:
        return f"is believed less: {_name(artifact.trust)}"
    if artifact.trust is not best.trust or belief(artifact) != belief(best):
        return f"comes from a lesser place: {_name(artifact.standing)}"
    if artifact.adopted and not best.adopted:
        return "has no build ID, and is only known by this one"
    if contradicts(artifact, executable) and not contradicts(best, executable):
        return "is not loaded where the executable is"
    if artifact.quality != best.quality and not is_settled(best):
        return f"tells less: {_name(artifact.quality)}"
    if artifact.size != best.size and not is_settled(best):
        return "has fewer bytes"
    return "was seen later" if artifact.first_seen_ns != best.first_seen_ns else "came later"


def _less(artifact: Artifact, executable: Artifact) -> str:
    """Return the word for the lower belief of debuginfo, compared with the executable."""
    same = artifact.trust == executable.trust or artifact.trust is Trust.PACKAGE
    return _name(artifact.standing if same else artifact.trust)


def _name(value: Trust | Quality | Standing) -> str:
    return value.name.lower()
