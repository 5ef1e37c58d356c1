# SPDX-License-Identifier: Apache-2.0
"""Debug files that debuggers find by name beside a program without a build ID."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.clients.tools import LLDB, Argument, nm, run, tool
from tests.support.elf.programs import build_id_of
from tests.support.harness.catches import Program, started
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]

_SOURCE = """\
volatile unsigned long sum;
static __attribute__((noinline)) void hot(unsigned long n)
{
    for (unsigned long i = 0; i < n; i++)
        sum += i;
}
int main(int count, char **words)
{
    (void)words;
    hot(count);
    return 0;
}
"""


def answers(program: Path, address: str) -> dict[str, list[str]]:
    """The name of the source, and the rest of the line, that each client prints on its own."""
    lldb: list[Argument] = [tool(*LLDB), "--no-lldbinit", "-b"]
    commands: dict[str, list[Argument]] = {
        "gdb": [tool("gdb"), "-nx", "-q", "-batch", "-iex", "set debuginfod enabled off",
                program, "-ex", "info line hot"],
        "addr2line": [tool("addr2line"), "-e", program, address],
        "eu-addr2line": [tool("eu-addr2line"), "-e", program, address],
        "llvm-symbolizer": [tool("llvm-symbolizer"), f"--obj={program}", address],
        "lldb": [*lldb, "-o", f"target create {program}", "-o", f"image lookup -a {address}"],
    }  # fmt: skip
    return {name: re.findall(r"\bhot\.c.*", run(words).out) for name, words in commands.items()}


@pytest.mark.parametrize("place", ["hot.debug", ".debug/hot.debug"])
def test_clients_find_the_debug_file_by_its_name(directory: Path, place: str) -> None:
    (directory / "hot.c").write_text(_SOURCE)
    program, debug = directory / "hot", directory / place
    debug.parent.mkdir(exist_ok=True)
    run([tool("gcc"), "-g", "-O1", "-Wl,--build-id=none", "hot.c", "-o", program],
        cwd=directory, check=True)  # fmt: skip
    address = "0x" + next(
        line.split()[0] for line in nm(program).splitlines() if line.endswith(" hot")
    )
    run([tool("objcopy"), "--only-keep-debug", program, debug], check=True)
    run([tool("objcopy"), "-S", f"--add-gnu-debuglink={debug}", program], check=True)
    native = answers(program, address)
    assert all(native.values()), native
    buildidfs = BuildIdFs(directory, directory / "store")
    aside = debug.rename(directory / "aside")
    buildidfs("add", program)
    (build_id,) = buildidfs("list", "--format", "{build_id}").out.split()
    with buildidfs.mounted() as mount:
        # The name is announced when the debug file comes.
        linked = mount / build_id / place
        assert not linked.exists()
        aside.rename(debug)
        buildidfs("add", debug)
        until(linked.exists, "the debug file")
        assert linked.read_bytes() == debug.read_bytes()
        assert not (mount / build_id / "other.debug").exists()
        assert answers(mount / build_id / "elf", address) == native


_CONTAINER = """
mount -t tmpfs none /opt
mkdir -p /opt/bin /opt/{0}/.build-id/{1} /opt/etc
cp {3}/probe /opt/bin
cp {3}/probe.debug /opt/{0}/.build-id/{1}/{2}.debug
echo "set debug-file-directory /other:/own/debug" > /opt/etc/gdbinit
mkdir -p /opt/lib64 /opt/usr/lib/x86_64-linux-gnu /opt/lib/x86_64-linux-gnu /opt/proc
cp -L /lib64/ld-linux-x86-64.so.2 /opt/lib64
cp -L /lib/x86_64-linux-gnu/libc.so.6 /opt/lib/x86_64-linux-gnu
mount -t proc none /opt/proc
exec chroot /opt /bin/probe here wait
"""


@pytest.mark.parametrize("place", ["app/lib/debug", "run/current-system/sw/lib/debug", "own/debug"])
def test_debug_files_in_a_directory_of_the_container_are_scanned(
    directory: Path, place: str
) -> None:
    program = Program(directory)
    build_id, debug = build_id_of(program.exe), directory / "probe.debug"
    run([tool("objcopy"), "--only-keep-debug", program.exe, debug], check=True)
    script = _CONTAINER.format(place, build_id[:2], build_id[2:], directory)
    buildidfs = BuildIdFs(directory, directory / "store")
    with started([tool("unshare"), "-m", tool("sh"), "-ec", script]) as child:
        buildidfs("scan", "proc", "--pid", str(child.pid))
    rows = [json.loads(line) for line in buildidfs("list", "--json").out.splitlines()]
    paths = {each["path"] for each in rows if each["build_id"] == build_id}
    assert f"/{place}/.build-id/{build_id[:2]}/{build_id[2:]}.debug" in paths, rows
