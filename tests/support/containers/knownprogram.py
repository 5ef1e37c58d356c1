# SPDX-License-Identifier: Apache-2.0
"""A known program that loads unknown libraries, each from a filesystem that ends with the program.

All of this happens in one mount namespace (knownprogram.c, loader.c). A library may have the device
and inode number of the one before.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.clients.tools import run, tool
from tests.support.containers.shortlife import Expected

if TYPE_CHECKING:
    from tests.support.clients.tools import Argument
    from tests.support.containers.shortlife import ShortLife

_SOURCES = Path(__file__).parent
_KNOWN = 'for n in 1 2 3; do "$0" 0 "$1"; sleep 0.1; done; shift; exec "$@"'


class KnownProgram:
    """Makes ``count`` libraries in a directory. ``expected`` has them only: each stands for its
    executable, too, in its sums.
    """

    def __init__(self, made: ShortLife, place: Path, count: int) -> None:
        place.mkdir(exist_ok=True)
        self.expected = Expected()
        self._mounted = place / "mounted"
        self._mounted.mkdir()
        self._known = place / "known.so"
        self._files = [place / f"library{number}.so" for number in range(count)]
        unused = place / "executable"
        made.write(unused, self._known)
        for path in self._files:
            libraries = made.write(unused, path).shared_objects
            self.expected.add(Expected(libraries, libraries))
        self._loader, self._launcher = place / "loader", place / "launcher"
        for source, target in (("loader", self._loader), ("knownprogram", self._launcher)):
            argv: list[Argument] = [tool("gcc"), "-O2", "-w", "-o", target]
            run([*argv, _SOURCES / f"{source}.c"], check=True)

    def run(self, life: float) -> Expected:
        """Let the program become known, then load each library, and end ``life`` seconds later."""
        load: list[Argument] = [self._launcher, self._loader, str(round(life * 1e6)), self._mounted]
        inside: list[Argument] = [tool("unshare"), "--mount", "sh", "-c", _KNOWN]
        run([*inside, self._loader, self._known, *load, *self._files], check=True)
        return self.expected
