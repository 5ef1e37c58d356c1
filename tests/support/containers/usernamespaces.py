# SPDX-License-Identifier: Apache-2.0
"""Commands in a user namespace with the IDs that a test wants: no unshare(1) writes every map."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.clients.tools import Argument

# The parent, which stays outside, may write any map; the command is its child.
_SCRIPT = """
import ctypes, os, sys
ready, mapped = os.pipe(), os.pipe()
child = os.fork()
if not child:
    assert ctypes.CDLL(None).unshare(0x10000000) == 0
    os.write(ready[1], b"x")
    os.read(mapped[0], 1)
    os.setresgid(0, 0, 0), os.setresuid(0, 0, 0)
    os.execvp(sys.argv[2], sys.argv[2:])
os.read(ready[0], 1)
for name in ("uid_map", "gid_map"):
    with open(f"/proc/{child}/{name}", "w") as file:
        file.write(sys.argv[1])
os.write(mapped[1], b"x")
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def mapped(ranges: Sequence[tuple[int, int, int]], *argv: Argument) -> list[Argument]:
    """The command ``argv`` as root of a new user namespace with these (first inside, first outside,
    count), for users and groups. Needs root.
    """
    text = "".join(f"{inside} {outside} {count}\n" for inside, outside, count in ranges)
    return [sys.executable, "-c", _SCRIPT, text, *argv]
