# SPDX-License-Identifier: Apache-2.0
"""The limits of a mount."""

from __future__ import annotations

import msgspec


class MountLimits(msgspec.Struct, frozen=True):
    """The bounds of the tables of a mount.

    The kernel may cache ``absences`` names as absent, each for ``absence_s`` seconds.
    ``idle_files`` stay open for the next reader: as many as a debugger reopens, and fewer if the
    limit of descriptors is low. Viewers with listings of their own may have ``directories`` open at
    the same time.
    """

    absences: int = 32768
    absence_s: float = 300.0
    idle_files: int = 1024
    directories: int = 4096
