# SPDX-License-Identifier: Apache-2.0
"""The files of short-lived items: an executable with its library, images of both, OCI bundles.

Nothing is compiled for an item: a template is, once, and its build ID and a few bytes of payload
are replaced in each copy, also in copies of an image that has the template in it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.clients.tools import Argument, run, tool

_EXE = """
#include <stdlib.h>
#include <time.h>
int item(void);
const char exe_payload[] = "%(payload)s";
int main(int argc, char **argv)
{
    long life = argc > 1 ? atol(argv[1]) : 0;
    struct timespec time = { life / 1000000, life %% 1000000 * 1000 };
    if (life)
        nanosleep(&time, 0);
    return item();
}
%(filling)s
"""
_LIBRARY = """
const char library_payload[] = "%(payload)s";
int item(void) { return 0; }
%(filling)s
"""


class Copy(NamedTuple):
    """A file like its template but for its marks, the first of which is its build ID."""

    content: bytes
    marks: tuple[bytes, ...]

    @property
    def build_id(self) -> str:
        """As hex."""
        return self.marks[0].hex()

    @property
    def sha256(self) -> str:
        """As hex."""
        return hashlib.sha256(self.content).hexdigest()


class Template(NamedTuple):
    """Bytes with marks in them that are replaced by something unique in each copy."""

    content: bytes
    marks: tuple[bytes, ...]

    def copy(self) -> Copy:
        """A copy that is unlike any other."""
        marks = tuple(secrets.token_bytes(len(mark)) for mark in self.marks)
        return Copy(self.replaced(self.content, marks), marks)

    def replaced(self, content: bytes, marks: tuple[bytes, ...]) -> bytes:
        """``content``, which contains this template, with these for its marks."""
        for old, new in zip(self.marks, marks, strict=True):
            assert content.count(old) == 1, "a mark is not there, or not once"
            content = content.replace(old, new)
        return content


def templates(directory: Path, padding: int) -> tuple[Template, Template]:
    """Compile both; ``exe`` and ``libitem.so`` stay in the directory."""
    library, exe = directory / "libitem.so", directory / "exe"
    filling = directory / "filling"
    filling.write_bytes(secrets.token_bytes(padding))
    shared: list[Argument] = ["-shared", "-fPIC", "-Wl,-soname,libitem.so"]
    of_library = _compiled(library, _LIBRARY, filling, *shared)
    # Without /proc there is no $ORIGIN.
    linked: list[Argument] = [library, "-Wl,-rpath,$ORIGIN:/"]
    return _compiled(exe, _EXE, filling, *linked), of_library


def _compiled(path: Path, source: str, filling: Path, *options: Argument) -> Template:
    build_id, payload = secrets.token_bytes(20), secrets.token_hex(32)
    section = f'__asm__(".section .rodata\\n.incbin \\"{filling}\\"\\n.text");'
    code = path.with_suffix(".c")
    code.write_text(source % {"payload": payload, "filling": section})
    identified = f"-Wl,--build-id=0x{build_id.hex()}"
    run([tool("gcc"), "-O1", identified, "-o", path, code, *options], check=True)
    return Template(path.read_bytes(), (build_id, payload.encode()))


def needed(exe: Path) -> list[str]:
    """The host's files that a program needs to run besides its own library."""
    found = re.findall(r"(/\S+) \(0x", run([tool("ldd"), exe], check=True).out)
    return [path for path in dict.fromkeys(found) if not path.endswith("/libitem.so")]


def make_image(config: str, content: Path, image: Path) -> None:
    if config == "squashfs":
        # Neither compressed nor in fragments, so that the marks can be found in it.
        options = ["-quiet", "-no-progress", "-noI", "-noD", "-noF", "-noX", "-no-fragments"]
        run([tool("mksquashfs"), content, image, *options], check=True)
        return
    size = sum(path.stat().st_size for path in content.rglob("*") if path.is_file())
    with image.open("wb") as file:
        file.truncate((2 << 20) + size * 5 // 4)
    options = ["-q", "-F", "-O", "^has_journal", "-m", "0"]
    run([tool("mkfs.ext4"), *options, "-d", content, image], check=True)


def write_bundle(place: Path, cgroup: str, life: str) -> None:
    """Write the OCI configuration of a container that runs the item, for ``life`` microseconds."""
    configuration: dict[str, Any] = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/exe", life],
            "cwd": "/",
        },
        "root": {"path": "root"},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {
            "cgroupsPath": cgroup,
            "namespaces": [{"type": name} for name in ("pid", "mount", "ipc", "uts")],
        },
    }
    (place / "config.json").write_text(json.dumps(configuration))
