# SPDX-License-Identifier: Apache-2.0
"""Programs without a build ID, of several languages, in namespaces that end at once."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
from pathlib import Path

import pytest

from buildidfs.store import Store
from tests.support.clients.tools import go_version, run, tool
from tests.support.harness.watching import watching

pytestmark = [pytest.mark.root, pytest.mark.host, pytest.mark.slow]

_OF_EACH = 20
_TOKEN = b"token-0123456789abcdef"
_C = 'const char token[] = "%s";\nint main(int n, char **v) { return token[n] == 1; }\n'
_GO = 'package main\nvar token = "%s"\nfunc main() { if len(token) == 1 { println(token) } }\n'
# It ends as soon as a program can, some 0.1 ms after it was mapped.
_TINY = """
__attribute__((used)) const char token[] = "%s";
__asm__(".text; .globl _start\\n_start: %s");
"""
_EXIT = {
    "x86_64": "mov $60, %eax; xor %edi, %edi; syscall",
    "aarch64": "mov x8, #93; mov x0, #0; svc #0",
}
_RUN = """
set -e
mount -t tmpfs none "$1"
cp "$2" "$1/app"
exec "$1/app"
"""


def _built(directory: Path) -> dict[str, bytes]:
    """A program of each kind, with the token in it."""
    token, none = _TOKEN.decode(), "-Wl,--build-id=none"
    c, go, tiny = directory / "main.c", directory / "main.go", directory / "tiny.c"
    c.write_text(_C % token)
    tiny.write_text(_TINY % (token, _EXIT[os.uname().machine]))
    go.write_text(_GO % token)
    out = directory / "out"
    environment = {**os.environ, "HOME": str(directory), "GO111MODULE": "off"}
    commands: dict[str, list[str | Path]] = {
        "c": [tool("gcc"), none, "-o", out, c],
        "stripped": [tool("gcc"), none, "-s", "-o", out, c],
        "static": [tool("musl-gcc"), none, "-static", "-o", out, c],
        "tiny": [tool("gcc"), none, "-static", "-nostdlib", "-o", out, tiny],
        "go": [tool("go"), "build", "-ldflags=-B none -buildid=", "-o", out, go],
    }
    if "-B none" in str(commands["go"]) and go_version() < (1, 24):
        commands["go"][2] = "-ldflags=-buildid="  # it makes no GNU build ID unless told to
    found = {}
    for kind, command in commands.items():
        run(command, check=True, env=environment)
        found[kind] = out.read_bytes()
        assert _TOKEN in found[kind]
        out.unlink()
    bare = bytearray(found["c"])
    struct.pack_into("<Q", bare, 40, 0)
    struct.pack_into("<HH", bare, 60, 0, 0)
    return {**found, "no section headers": bytes(bare)}


def test_every_program_without_a_build_id_is_held(scratch: Path) -> None:
    directory = scratch / "nameless"
    place = directory / "gone"
    place.mkdir(parents=True)
    count = _OF_EACH
    programs: dict[str, bytes] = {}
    for kind, data in _built(directory).items():
        for number in range(count):
            token = hashlib.sha256(f"{kind}{number}".encode()).hexdigest()[: len(_TOKEN)]
            unique = data.replace(_TOKEN, token.encode())
            programs[hashlib.sha256(unique).hexdigest()] = unique
    assert len(programs) == 6 * count
    source = directory / "source"
    source.mkdir()
    with watching(directory / "store", "--no-scan"):
        for number, data in enumerate(programs.values()):
            path = source / str(number)
            path.write_bytes(data)
            path.chmod(0o755)
            argv: list[str | Path] = [tool("unshare"), "-m", "sh", "-c", _RUN, "sh", place, path]
            subprocess.run(argv, check=True)
        # A watch captures all that it has pinned before it ends.
    with Store.open(directory / "store", read_only=True) as store:
        names = {each.hex() for each in store.blobs.names()}
        missing = [len(data) for digest, data in programs.items() if digest not in names]
        assert not missing, f"{len(missing)} of {len(programs)} are not held, of these sizes"
        for digest, data in programs.items():
            build_id, exact = store.aliases.resolve(digest)
            ordinal = store.index.ordinal(build_id)
            assert exact is not None
            assert ordinal is not None
            assert store.aliases.is_adopted(ordinal)
            with store.blobs.open(exact) as blob:
                assert blob.pread(len(data) + 1, 0) == data


_CHAIN = """
#include <unistd.h>
const char token[] = "%s";
int main(int n, char **v)
{
	if (n > 1)
		execv(v[1], v + 1);
	return token[n] == 1;
}
"""
_RUN_CHAIN = """
set -e
mount -t tmpfs none "$1"
cp "$2" "$3" "$4" "$1"
cd "$1"
exec "./${2##*/}" "./${3##*/}" "./${4##*/}"
"""


def test_programs_that_replace_each_other_at_one_address_are_held(scratch: Path) -> None:
    """A process executes three static programs, and the first two are gone at once."""
    directory = scratch / "chains"
    place = directory / "gone"
    place.mkdir(parents=True)
    source, built = directory / "chain.c", directory / "chain"
    source.write_text(_CHAIN % _TOKEN.decode())
    none = "-Wl,--build-id=none"
    run([tool("musl-gcc"), none, "-static", "-no-pie", "-o", built, source], check=True)
    data = built.read_bytes()
    digests = set()
    with watching(directory / "store", "--no-scan"):
        for number in range(_OF_EACH):
            paths = [directory / f"{number}-{link}" for link in range(3)]
            for path in paths:
                token = hashlib.sha256(path.name.encode()).hexdigest()[: len(_TOKEN)]
                unique = data.replace(_TOKEN, token.encode())
                path.write_bytes(unique)
                path.chmod(0o755)
                digests.add(hashlib.sha256(unique).hexdigest())
            argv = [tool("unshare"), "-m", "sh", "-c", _RUN_CHAIN, "sh", place, *paths]
            subprocess.run(argv, check=True)
    with Store.open(directory / "store", read_only=True) as store:
        names = {each.hex() for each in store.blobs.names()}
    assert len(digests) == 3 * _OF_EACH
    assert digests <= names, f"{len(digests - names)} of {len(digests)} are not held"
