# SPDX-License-Identifier: Apache-2.0
"""A profile of this kernel, looked at on what could be another host, with another kernel."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

from tests.support.clients.tools import Argument, Result, perf_tool, run, tool

NT_GNU_BUILD_ID = 3


def kernel_report(mount: Path, data: Path) -> Result:
    """``perf report`` with a mount as its cache, where the running kernel's symbols are not had.

    perf 7 does not look for those of another kernel in its cache, see docs/kernel-facts.md.
    """
    options: list[Argument] = []
    if int(run([perf_tool(), "--version"]).out.split()[2].partition(".")[0]) >= 7:
        options = [f"--kallsyms={each}" for each in mount.glob("*/kallsyms")]
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "notes").write_bytes(_other_kernel())
        (Path(directory) / "kallsyms").touch()
        script = (
            'mount --bind "$1/notes" /sys/kernel/notes && mount --bind "$1/kallsyms" /proc/kallsyms'
            ' && exec "$4" --buildid-dir "$2/perf" report --stdio --no-children -i "$3"'
            ' ${5:+"$5"}'
        )
        inside: list[Argument] = ["sh", "-c", script, "sh", directory, mount, data, perf_tool()]
        return run([tool("unshare"), "-m", *inside, *options])


def _other_kernel() -> bytes:
    """The notes of this kernel with another build ID."""
    notes = bytearray(Path("/sys/kernel/notes").read_bytes())
    offset = 0
    while offset < len(notes):
        name_size, size, kind = struct.unpack_from("=3I", notes, offset)
        name = offset + 12
        content = name + (name_size + 3 & ~3)
        if kind == NT_GNU_BUILD_ID and notes[name : name + 4] == b"GNU\0":
            notes[content] ^= 0xFF
            return bytes(notes)
        offset = content + (size + 3 & ~3)
    raise LookupError("this kernel has no build ID")
