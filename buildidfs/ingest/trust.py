# SPDX-License-Identifier: Apache-2.0
"""The operator's own rules for how far files are believed (``[trust]`` of buildidfs.toml(5)).

They decide in one place, when captures and sightings are written down; what scanners find out about
owners, mounts and namespaces stands where no rule fits.
"""

from __future__ import annotations

import fnmatch
import os
import re
from typing import TYPE_CHECKING

from buildidfs.model import Origin, Standing, Trust

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from buildidfs.config import TrustRule


def judge(rules: Sequence[TrustRule]) -> Callable[[Origin], tuple[Trust, Standing]]:
    """Return a function that says how far a file is believed, by the first rule that fits its
    place. A rule is the operator's word: it gives `Standing.GIVEN` at least.
    """
    compiled = [
        (_matcher(rule.path), _matcher(rule.container), Trust[rule.level.upper()]) for rule in rules
    ]

    def believed(origin: Origin) -> tuple[Trust, Standing]:
        for path, container, level in compiled:
            if path(origin.path) and container(os.fsencode(origin.container)):
                return level, max(origin.standing, Standing.GIVEN)
        return origin.trust, origin.standing

    return believed


def _matcher(glob: str | None) -> Callable[[bytes], object]:
    """Return a function that is true of bytes that a glob fits; of all for None."""
    if glob is None:
        return lambda text: True
    # As bytes: the paths of containers may be no text.
    return re.compile(os.fsencode(fnmatch.translate(glob))).match
