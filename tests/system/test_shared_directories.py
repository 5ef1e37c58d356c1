# SPDX-License-Identifier: Apache-2.0
"""Output into a directory that others write to: what they have put there is no way to a file of
ours, and gets nothing that we alone may read.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from buildidfs.store import Store
from tests.support.clients.tools import Result, run, tool
from tests.support.elf.perfwriter import PerfWriter
from tests.support.elf.programs import build_id_of
from tests.support.harness.mounts import BuildIdFs

pytestmark = pytest.mark.root

_OTHER = 65534
_COMMANDS = ("bundle", "get", "repair")


class Output:
    """A store, and a directory for output that everybody may write to."""

    def __init__(self, directory: Path) -> None:
        self.buildidfs = BuildIdFs(directory)
        self.program = directory / "program"
        (directory / "program.c").write_text("int main(void) { return 0; }\n")
        run([tool("gcc"), "-o", self.program, directory / "program.c"], check=True)
        self.buildidfs("add", self.program)
        self.profile = directory / "perf.data"
        writer = PerfWriter()
        self.profile.write_bytes(writer.file(writer.comm(1, b"app", 1)))
        self.shared = directory / "shared"
        self.shared.mkdir()
        self.shared.chmod(0o777)
        self.path = self.shared / "out"

    def write(self, command: str) -> Result:
        """Run a command that writes ``path``."""
        what = self.profile if command == "repair" else build_id_of(self.program)
        return self.buildidfs(command, what, "-o", self.path, check=False)


@pytest.fixture
def output(directory: Path) -> Output:
    return Output(directory)


def is_refused(done: Result, why: str) -> bool:
    return done.rc == 2 and done.err.count("\n") == 1 and why in done.err


@pytest.mark.parametrize("command", _COMMANDS)
def test_link_of_another_user(output: Output, directory: Path, command: str) -> None:
    victim = directory / "victim"
    victim.write_text("of root's")
    output.path.symlink_to(victim)
    os.lchown(output.path, _OTHER, _OTHER)
    assert is_refused(output.write(command), "a symbolic link in a directory that others may")
    assert victim.read_text() == "of root's"
    # The same in a directory of ours is what we have made it for.
    output.shared.chmod(0o755)
    assert output.write(command).rc == 0
    assert victim.read_bytes()[:9] != b"of root's"


@pytest.mark.parametrize("command", _COMMANDS)
def test_fifo_of_another_user(output: Output, command: str) -> None:
    os.mkfifo(output.path)
    os.chown(output.path, _OTHER, _OTHER)
    reading = os.open(output.path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert is_refused(output.write(command), "another user's, in a directory that others may")
        assert os.read(reading, 1) == b""
    finally:
        os.close(reading)
    # One that nobody reads keeps no command waiting.
    assert is_refused(output.write(command), "another user's, in a directory that others may")


@pytest.mark.parametrize("command", _COMMANDS)
def test_file_of_another_user_is_replaced(output: Output, command: str) -> None:
    output.path.write_text("before")
    os.chown(output.path, _OTHER, _OTHER)
    with output.path.open("rb") as before:
        assert output.write(command).rc == 0
        assert before.read() == b"before"
    assert output.path.stat().st_uid == 0


def test_device(output: Output) -> None:
    output.path = Path("/dev/null")
    for command in _COMMANDS:
        assert output.write(command).rc == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_draft_of_another_user(output: Output) -> None:
    """Who has made it has it open, whatever becomes of its name and mode."""
    draft = Path(f"{output.path}.partial")
    draft.touch()
    draft.chmod(0o666)
    os.chown(draft, _OTHER, _OTHER)
    with draft.open("rb") as watching:
        assert is_refused(output.write("bundle"), f"{draft} belongs to another user")
        assert watching.read() == b""
    assert not output.path.exists()


@pytest.mark.parametrize("what", ["mode", "link", "symbolic link"])
def test_draft_that_others_may_have_open(output: Output, directory: Path, what: str) -> None:
    draft, other = Path(f"{output.path}.partial"), directory / "other"
    other.write_bytes(b"other")
    other.chmod(0o666 if what == "mode" else 0o600)
    if what == "symbolic link":
        draft.symlink_to(other)
        assert is_refused(output.write("bundle"), "Too many levels of symbolic links")
    else:
        os.link(other, draft)
        if what == "mode":
            os.unlink(other)
            os.link(draft, other)
        with other.open("rb") as watching:
            assert output.write("bundle").rc == 0
            assert watching.read() == b"other"
        assert output.path.stat().st_mode & 0o777 == 0o600
    assert other.read_bytes() == b"other"


def test_draft_of_ours_is_used(output: Output) -> None:
    assert output.write("bundle").rc == 0
    whole = output.path.read_bytes()
    draft = Path(f"{output.path}.partial")
    draft.write_bytes(whole)
    draft.chmod(0o600)
    number = draft.stat().st_ino
    assert output.write("bundle").rc == 0
    assert (output.path.read_bytes(), output.path.stat().st_ino) == (whole, number)


def test_privileges_of_a_file_do_not_come_out_of_the_store(output: Output) -> None:
    output.program.chmod(0o6755)
    with output.program.open("ab") as program:
        program.write(b"\0")
    (output.buildidfs.store.parent / "again").mkdir()
    again = BuildIdFs(output.buildidfs.store.parent / "again")
    again("add", output.program)
    Store.open(again.store).close()
    again("get", build_id_of(output.program), "-o", output.path)
    assert output.path.stat().st_mode & 0o7000 == 0
