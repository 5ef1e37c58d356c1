# SPDX-License-Identifier: Apache-2.0
"""What is left of a container: a store that scanned it, and what its processes recorded.

The order is that of a bad night: the container runs, somebody scans it, profiles it, takes a core
file; it ends, and its filesystem ends with it. Everything a test then looks at was recorded here,
and every answer has to come through the mount.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.clients import tools
from tests.support.containers.ephemeral import container
from tests.support.harness.mounts import BuildIdFs

if TYPE_CHECKING:
    from tests.support.clients.tools import Argument, Result
    from tests.support.elf.programs import Program


@dataclasses.dataclass(frozen=True)
class Vanished:
    """A container that is gone, and the mounted store that saw it.

    ``app`` is where the program was, for its own processes. ``core`` is of ``hot stuck``,
    ``profile`` and ``unwound`` (with DWARF call chains) are perf.data of ``hot spin``. ``live``
    is what gdb printed while the process still ran, ``unaided`` what it printed without the mount.
    """

    program: Program
    app: str
    label: str
    buildidfs: BuildIdFs
    mount: Path
    core: Path
    profile: Path
    unwound: Path
    live: Result
    unaided: Result

    @property
    def exe(self) -> Path:
        """The directory of the executable's build ID in the mount."""
        return self.mount / self.program.exe.build_id

    @property
    def lib(self) -> Path:
        """The directory of the library's build ID in the mount."""
        return self.mount / self.program.lib.build_id

    @property
    def debug(self) -> Path:
        """What debuggers get as their debug file directory."""
        return self.mount / "debug"

    @property
    def url(self) -> str:
        """What debuginfod clients get as DEBUGINFOD_URLS."""
        return f"file://{self.mount}"


@contextlib.contextmanager
def vanished(kind: str, program: Program, directory: Path) -> Iterator[Vanished]:
    """Run a container of ``kind``, scan, mount, record, destroy it; unmount at the end."""
    directory.mkdir()
    buildidfs = BuildIdFs(directory)
    profile, unwound = directory / "perf.data", directory / "perf.unwound"
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(container(kind, program, directory / "container"))
        buildidfs.scan(running.spin, running.stuck)
        mount = stack.enter_context(buildidfs.mounted())
        if kind != "crun":
            # gdb would find them by itself, through the process's own root
            running.hide_debug()
        attach: list[Argument] = ["-p", str(running.stuck)]
        if kind == "crun":
            # gdb 15 and newer look for /proc/PID/exe in the container, where it has another PID
            attach.insert(0, f"/proc/{running.stuck}/root{running.app}/bin/hot")
        unaided = tools.gdb("bt", debug=directory / "nothing", arguments=attach)
        live = tools.gdb("bt", debug=mount / "debug", arguments=attach)
        tools.run(
            [tools.tool("gcore", "gdb"), "-o", directory / "core", str(running.stuck)], check=True
        )
        target = ["-p", str(running.spin)]
        assert tools.perf_record(profile, running.spinning(), *target).rc == 0
        chains = ["--call-graph", "dwarf", "-F", "497"]
        assert tools.perf_record(unwound, running.spinning(), *target, *chains).rc == 0
        running.destroy()
        assert not os.path.exists(running.app), "the container's filesystem is still there"
        core = directory / f"core.{running.stuck}"
        yield Vanished(
            program, running.app, running.label, buildidfs, mount, core, profile, unwound,
            live, unaided,
        )  # fmt: skip
