# SPDX-License-Identifier: Apache-2.0
"""make install, clean and down: units that start what is installed, and nothing left running."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.store.run_files import present
from tests.support.clients.commands import ROOT, calling, script
from tests.support.clients.tools import Result, run, tool
from tests.support.harness.mounts import BuildIdFs, is_mountpoint
from tests.support.harness.waiting import until

UNITS = ("buildidfs.service", "buildidfs-watch.service", "buildidfs-scan.service",
         "buildidfs-scan.timer")  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone as `make up` leaves it: its command runs the program of this checkout."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("Makefile", "scripts", "man", "examples"):
        (clone / name).symlink_to(ROOT / name)
    python = clone / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(Path(sys.executable).resolve())
    site = next(each for each in sys.path if each.endswith("site-packages"))
    script(
        clone / ".venv/bin/buildidfs",
        f'PYTHONPATH={ROOT}:{site} exec "{python}" -m buildidfs "$@"',
    )
    return clone


@pytest.fixture
def environ(buildidfs: BuildIdFs) -> Iterator[dict[str, str]]:
    yield {"STORE": str(buildidfs.store), "MOUNTPOINT": str(buildidfs.mountpoint)}
    for each in present(buildidfs.store):
        os.kill(each.pid, 9)
    while is_mountpoint(buildidfs.mountpoint):
        run([tool("umount"), "-l", buildidfs.mountpoint], check=True)


def _make(checkout: Path, environ: dict[str, str], target: str) -> Result:
    return run([tool("make"), "-C", checkout, target], env=environ, timeout=200)


def _up(checkout: Path, environ: dict[str, str]) -> list[int]:
    """Run `up` of that checkout, without following; pidfds of what runs."""
    words = ["up", "--no-watch", environ["MOUNTPOINT"]]
    run([checkout / ".venv/bin/buildidfs", "--store", environ["STORE"], *words], check=True)
    assert is_mountpoint(Path(environ["MOUNTPOINT"]))
    found = [each.pidfd() for each in present(environ["STORE"])]
    assert len(found) == 2
    return found


def _have_ended(pidfds: list[int]) -> None:
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 30)[0]
        os.close(pidfd)


def test_pip_is_heard_only_if_it_fails(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    python = 'case "$*" in *"import "*) exit 0 ;; esac; echo "WARNING: ignored" >&2; exit $FAILS'
    (venv / "bin").mkdir(parents=True)
    script(venv / "bin/python", python)
    words = [ROOT / "scripts/make-venv", sys.executable, venv, "all"]
    done = run(words, env={"FAILS": "0"})
    assert (done.rc, done.out, done.err) == (0, "", "")
    failed = run(words, env={"FAILS": "1"})
    assert (failed.rc, failed.err) == (1, "WARNING: ignored\n")


@pytest.mark.fuse
def test_clean_refuses_while_something_runs(checkout: Path, environ: dict[str, str]) -> None:
    pidfds = _up(checkout, environ)
    done = _make(checkout, environ, "clean")
    assert done.rc != 0
    assert "make down" in done.err
    for each in present(environ["STORE"]):
        assert f" {each.pid}" in done.err
    assert (checkout / ".venv/bin/buildidfs").exists()
    scripts = run(
        [ROOT / "scripts/down", checkout / ".venv/bin/buildidfs"], env=environ, check=True
    )
    assert "Ended mount" in scripts.out
    _have_ended(pidfds)
    assert _make(checkout, environ, "clean").rc == 0
    assert not (checkout / ".venv").exists()


@pytest.mark.fuse
@pytest.mark.root
@pytest.mark.parametrize("broken", [False, True])
def test_down_without_the_command_ends_everything(
    checkout: Path, environ: dict[str, str], broken: bool
) -> None:
    pidfds = _up(checkout, environ)
    pids = {each.role: each.pid for each in present(environ["STORE"])}
    if broken:
        script(checkout / ".venv/bin/buildidfs", "exit 127")
    else:
        shutil.rmtree(checkout / ".venv")
    done = _make(checkout, environ, "down")
    assert done.rc == 0, done
    assert f"Ended up (pid {pids['up']})." in done.out
    _have_ended(pidfds)
    assert not is_mountpoint(Path(environ["MOUNTPOINT"]))
    assert present(environ["STORE"]) == []
    again = _make(checkout, environ, "down")
    assert (again.rc, "Ended" in again.out) == (0, False)


@pytest.mark.fuse
@pytest.mark.root
def test_down_without_the_command_ends_a_mount_without_supervisor(
    checkout: Path, environ: dict[str, str]
) -> None:
    command = [checkout / ".venv/bin/buildidfs", "--store", environ["STORE"]]
    pidfds = _up(checkout, environ)
    run([*command, "down"], check=True)
    _have_ended(pidfds)
    run([*command, "mount", environ["MOUNTPOINT"]], check=True)
    (mount,) = present(environ["STORE"])
    pidfd = mount.pidfd()
    shutil.rmtree(checkout / ".venv")
    done = _make(checkout, environ, "down")
    assert done.rc == 0, done
    assert f"Ended mount (pid {mount.pid})." in done.out
    _have_ended([pidfd])
    assert not is_mountpoint(Path(environ["MOUNTPOINT"]))


@pytest.mark.root
def test_up_says_how_to_get_the_command_into_path(tmp_path: Path) -> None:
    """The line that it prints does what it says, and there is nothing left to say then."""
    clone, places = tmp_path / "clone", tmp_path / "places"
    command = script(clone / ".venv/bin/buildidfs", "echo started")
    places.mkdir()
    programs = f"{places}:/usr/sbin:/usr/bin:/sbin:/bin"
    environ = {"PATH": programs, "STORE": "/var/lib/buildidfs", "MOUNTPOINT": "/buildid"}

    def up() -> list[str]:
        words = [ROOT / "scripts/up", ".venv/bin/buildidfs"]
        return run(words, env=environ, cwd=clone, check=True).out.splitlines()

    started, empty, how, line = up()
    assert (started, empty) == ("started", "")
    assert how == "To have the command buildidfs in PATH, run"
    assert line == f"    ln -sf {command} /usr/local/bin/"
    here = line.replace("/usr/local/bin", str(places))
    run(["sh", "-c", here], env=environ, cwd=tmp_path, check=True)
    assert run(["sh", "-c", "buildidfs"], env=environ, cwd=tmp_path, check=True).out == "started\n"
    assert up()[2:] == ["The command is buildidfs."]
    (places / "buildidfs").unlink()
    script(places / "buildidfs", "echo another")
    assert up()[2:] == [f"The command is {command}; {places}/buildidfs is another one."]


def test_units_start_what_make_install_installs(tmp_path: Path) -> None:
    """Everything but building the package, which takes the package index."""
    prefix, programs = tmp_path / "prefix", tmp_path / "programs"
    made = script(programs / "made", 'mkdir -p "$2/bin"; cp "$0" "$2/bin/buildidfs"')
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", clone / "scripts")
    for name in ("man", "examples"):
        (clone / name).symlink_to(ROOT / name)
    shutil.copy(made, clone / "scripts/make-venv")
    calling(programs / "systemctl", ["true"])
    environ = {"PATH": f"{programs}:{os.environ['PATH']}"}
    for _ in range(2):
        run(["scripts/install", "python3", prefix], env=environ, cwd=clone, check=True)
        command = prefix / "bin/buildidfs"
        assert os.access(command, os.X_OK)
        for name in UNITS:
            text = (prefix / "lib/systemd/system" / name).read_text()
            programs_started = re.findall(r"^Exec\w+=(\S+buildidfs)", text, re.MULTILINE)
            assert set(programs_started) == ({str(command)} if name.endswith("service") else set())
        assert (prefix / "share/man/man1/buildidfs.1").exists()
        assert (prefix / "share/man/man1/buildidfs-capture.1").exists()
        assert (prefix / "share/man/man7/buildidfs-mount.7").exists()
    run(["scripts/install", "remove", prefix], env=environ, cwd=clone, check=True)
    assert [path for path in prefix.rglob("*") if not path.is_dir()] == []


def test_units_name_the_default_place_of_make_install() -> None:
    plan = run([tool("make"), "-n", "-C", ROOT, "install"], check=True).out
    assert "scripts/install python3 /usr/local\n" in plan
    for name in UNITS[:3]:
        assert "=/usr/local/bin/buildidfs " in (ROOT / "examples" / name).read_text()
    assert "make install" in (ROOT / "README.md").read_text()


def test_uninstall_of_nothing_says_so(tmp_path: Path) -> None:
    done = run([ROOT / "scripts/install", "remove", tmp_path], cwd=ROOT)
    assert done.rc == 0
    assert done.out == f"Nothing of buildidfs is installed in {tmp_path}.\n"


def test_uninstall_is_refused_while_a_process_of_the_prefix_runs(tmp_path: Path) -> None:
    """A process that up has started, without systemd, would lose its program."""
    program = tmp_path / "lib/buildidfs/bin/python3"
    program.parent.mkdir(parents=True)
    shutil.copy(tool("sleep"), program)
    with subprocess.Popen([program, "60"]) as process:
        try:
            until(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"/"), 10)
            done = run([ROOT / "scripts/install", "remove", tmp_path], cwd=ROOT)
            assert done.rc == 1
            assert f"end them first (buildidfs down): {process.pid}" in done.err
            assert program.exists()
        finally:
            process.kill()
    assert run([ROOT / "scripts/install", "remove", tmp_path], cwd=ROOT).rc == 0
    assert not program.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="root has directories that others may not enter")
def test_install_takes_an_interpreter_that_all_users_may_execute(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    script(own / "python3", 'exec /usr/bin/python3 "$@"')
    path = {"PATH": f"{own}:{os.environ['PATH']}"}
    chosen = run([ROOT / "scripts/choose-python", "python3"], env=path, check=True)
    assert chosen.out == "/usr/bin/python3\n"
    assert f"only root may execute {own}/python3" in chosen.err
    chosen = run([ROOT / "scripts/choose-python", own / "python3"], check=True)
    assert chosen.out == f"{own}/python3\n", "the one that was named"
    assert "only root can run what is installed (make install PYTHON=" in chosen.err
    chosen = run([ROOT / "scripts/choose-python", "/usr/bin/python3"], check=True)
    assert (chosen.out, chosen.err) == ("/usr/bin/python3\n", "")
