# SPDX-License-Identifier: Apache-2.0
"""buildidfs.cli.main: imports, the end of the process, errors of any command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from buildidfs import __version__
from buildidfs.cli.main import cli, main
from buildidfs.store import Store
from tests.support.clients.commands import ROOT

_LIST = """
import sys
from buildidfs.cli.main import main
status = main(["--store", sys.argv[1], "list"])
print(*sorted(sys.modules), file=sys.stderr)
sys.exit(status)
"""


def test_list_imports_no_other_command(tmp_path: Path) -> None:
    Store.open(tmp_path / "store", create=True).close()
    command = [sys.executable, "-c", _LIST, tmp_path / "store"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = run.stderr.splitlines()[-1].split()
    assert "buildidfs.cli.contents" in modules
    ours = {name for name in modules if name.startswith("buildidfs.")}
    expected = {"main", "common", "contents", "group", "output", "table", "terminal"}
    assert {name for name in ours if name.startswith("buildidfs.cli.")} == {
        f"buildidfs.cli.{name}" for name in expected
    }
    assert not {name for name in ours if name.startswith(("buildidfs.mount", "buildidfs.view"))}
    # Each of these takes a tenth of the time of the command.
    assert {"ctypes", "hashlib", "logging", "pyfuse3", "trio", "rich"}.isdisjoint(modules)


_WITHOUT_FUSE = """
import sys
sys.modules["pyfuse3"] = None
from buildidfs.cli.main import run
sys.argv.insert(1, "--store")
sys.exit(run())
"""


@pytest.mark.parametrize("command", [["mount"], ["up"], ["up", "--foreground"]])
def test_missing_binding_of_fuse_is_named_with_its_packages(
    tmp_path: Path, command: list[str]
) -> None:
    words = [sys.executable, "-c", _WITHOUT_FUSE, tmp_path / "store", *command, tmp_path / "mnt"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pyfuse3 is missing: install buildidfs[mount] (apt install fuse3" in done.stderr
    assert not (tmp_path / "store").exists()


def test_version_names_the_commit_of_a_package(tmp_path: Path) -> None:
    tree = shutil.copytree(ROOT / "buildidfs", tmp_path / "buildidfs")
    command = [sys.executable, "-m", "buildidfs", "--version"]
    at_tree = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for commit, expected in (("", ""), ("0123456789ab\n", " (0123456789ab)")):
        if commit:
            (tree / "COMMIT").write_text(commit)
        run = subprocess.run(command, capture_output=True, text=True, env=at_tree, cwd=tmp_path)
        assert run.stdout == f"buildidfs {__version__}{expected}\n", run.stderr


def test_version_names_the_commit_of_a_checkout() -> None:
    git = ["git", "-C", ROOT, "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    command = [sys.executable, "-m", "buildidfs", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    found = re.fullmatch(r"buildidfs \S+ \(([0-9a-f]{12})\+?\)\n", shown)
    assert found is not None, shown
    assert head.startswith(found[1])


_END = """
import atexit, sys, threading
from buildidfs.cli import main
atexit.register(print, "exit function")
def last():
    threading.main_thread().join()
    print("thread")
def fail_in_the_middle():
    print("half of the output", end="")
    return 3
main.main = fail_in_the_middle
if "thread" in sys.argv:
    threading.Thread(target=last).start()
main.run()
"""


@pytest.mark.parametrize("thread", [[], ["thread"]])
def test_process_ends_with_its_output_exit_functions_and_threads(thread: list[str]) -> None:
    command = [sys.executable, "-c", _END, *thread]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 3, run.stderr
    expected = "half of the output" + "".join(f"{each}\n" for each in [*thread, "exit function"])
    assert run.stdout == expected
    assert run.stderr == ""


def test_scan_lists_its_commands_in_the_order_of_the_manual() -> None:
    import click

    context = click.Context(cli)
    scan = cli.get_command(context, "scan")
    assert isinstance(scan, click.Group)
    assert scan.list_commands(context) == [
        "proc", "tree", "kernel", "perf-data", "core", "package", "image",
    ]  # fmt: skip


@pytest.mark.parametrize("words", [("--store", "s", "list"), ("which", "./x"), ("unmount", "m")])
def test_deleted_working_directory_is_an_error_of_the_user(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    Store.open(tmp_path / "store", create=True).close()
    monkeypatch.setenv("BUILDIDFS_STORE", str(tmp_path / "store"))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(words) == 2
    said = "buildidfs: the working directory was deleted: change to another one with cd\n"
    assert capsys.readouterr().err == said


def test_names_of_arguments_stay_in_capitals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "deadbeef", "0x1"]) == 2, "before it looks for a store"
    assert capsys.readouterr().err.startswith("buildidfs: FRAME ")


@pytest.mark.parametrize("words", [["--store", "", "list"], ["list", "--store", ""]])
def test_store_without_a_name_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "'--store': the name of the directory is empty" in capsys.readouterr().err


def test_help_and_a_command_print_the_help_of_that_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["help"], ["help", "list"], ["help", "scan", "proc"]):
        assert main(words) == 0
        printed = capsys.readouterr().out
        assert main([*words[1:], "--help"]) == 0
        assert capsys.readouterr().out == printed


@pytest.mark.parametrize("command", ["list", "fleet status"])
def test_option_without_its_argument_names_the_help_of_the_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--sort"]) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"requires an argument (see buildidfs {command} --help)\n")
