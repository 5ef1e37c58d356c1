# SPDX-License-Identifier: Apache-2.0
"""Everything that takes bytes from strangers, in one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.fuzz import (
    archived,
    compounds,
    decoders,
    elfinsides,
    givenfiles,
    insides,
    packed,
    profiled,
    symbols,
    takers,
)

if TYPE_CHECKING:
    from tests.fuzz.target import Target

TARGETS: Final[dict[str, Target]] = {
    **decoders.TARGETS,
    **compounds.TARGETS,
    **elfinsides.TARGETS,
    **profiled.TARGETS,
    **givenfiles.TARGETS,
    **takers.TARGETS,
    **insides.TARGETS,
    **packed.TARGETS,
    **symbols.TARGETS,
    **archived.TARGETS,
}
