# SPDX-License-Identifier: Apache-2.0
"""``buildidfs setup``: lines for the configuration files of clients."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from buildidfs.cli.common import Session, exit_status

if TYPE_CHECKING:
    from collections.abc import Callable


_DEFAULT: Final = "/buildid"
# These texts mean the same in the files of all clients, without quotes.
_PLAIN: Final = re.compile(r"/[A-Za-z0-9/._+-]*")
_SYSTEMD: Final = "/run/systemd/system"
_COREDUMPS: Final = "/var/lib/systemd/coredump"
_UNIT: Final = "buildidfs-coredump"
_DONE: Final = {
    (True, True): "wrote",
    (True, False): "already in",
    (False, True): "removed from",
    (False, False): "nothing in",
}
"""Texts, by the option --write and by a change of the file."""


class _File(NamedTuple):
    path: str
    text: str


def _gdb(point: str, system: bool, session: Session) -> list[_File]:
    servers = [f"file://{point}", *os.environ.get("DEBUGINFOD_URLS", "").split()]
    text = (
        f"set debug-file-directory /usr/lib/debug:{point}/debug\n"
        f"set debuginfod urls {' '.join(dict.fromkeys(servers))}\n"
        "set debuginfod enabled on\n"
    )
    if system:
        return [_File("/etc/gdb/gdbinit.d/buildidfs.gdb", text)]
    # gdb reads one of the two: the second one if the first one does not exist.
    first = os.path.join(_config_home(), "gdb/gdbinit")
    return [_File(first if os.path.exists(first) else os.path.expanduser("~/.gdbinit"), text)]


def _lldb(point: str, system: bool, session: Session) -> list[_File]:
    if system:
        raise click.UsageError("lldb reads no file for all users: run this for each user")
    text = f"settings append target.debug-file-search-paths {point}/debug\n"
    return [_File(os.path.expanduser("~/.lldbinit"), text)]


def _perf(point: str, system: bool, session: Session) -> list[_File]:
    path = "/etc/perfconfig" if system else os.path.expanduser("~/.perfconfig")
    return [_File(path, f"[buildid]\n\tdir = {point}/perf\n")]


def _debuginfod(point: str, system: bool, session: Session) -> list[_File]:
    url = f"file://{point}"
    text = (
        f'case " $DEBUGINFOD_URLS " in *" {url} "*) ;; *)\n'
        f'    export DEBUGINFOD_URLS="{url}${{DEBUGINFOD_URLS:+ $DEBUGINFOD_URLS}}" ;;\n'
        "esac\n"
    )
    if system:  # after debuginfod.sh of elfutils, which sets the servers of the distribution
        return [_File("/etc/profile.d/zz-buildidfs.sh", text)]
    if os.path.basename(os.environ.get("SHELL", "")) == "zsh":
        return [_File(os.path.expanduser("~/.zprofile"), text)]
    names = map(os.path.expanduser, ("~/.bash_profile", "~/.bash_login", "~/.profile"))
    paths = list(names)
    return [_File(next(filter(os.path.exists, paths), paths[-1]), text)]


def _coredump(point: str, system: bool, session: Session) -> list[_File]:
    program = os.path.realpath(sys.argv[0])
    store = os.path.abspath(session.store_path)
    path = (
        "[Unit]\nDescription=Keep the binaries that core files name\n\n"
        f"[Path]\nPathChanged={_COREDUMPS}\n\n[Install]\nWantedBy=multi-user.target\n"
    )
    service = (
        "[Unit]\nDescription=Keep the binaries that core files name\nStartLimitIntervalSec=0\n\n"
        "[Service]\nType=oneshot\nNice=10\n"
        f"ExecStart={program} --store {store} pin --cores {_COREDUMPS}\n"
        "# Some core files could not be read, or there is no store yet.\n"
        "SuccessExitStatus=3 11\n"
        "CapabilityBoundingSet=CAP_DAC_READ_SEARCH\nNoNewPrivileges=yes\n"
        "PrivateNetwork=yes\nPrivateTmp=yes\nMemoryDenyWriteExecute=yes\n"
        f"ProtectSystem=strict\nReadWritePaths=-{store}\n"
    )
    place = f"/etc/systemd/system/{_UNIT}"
    return [_File(f"{place}.path", path), _File(f"{place}.service", service)]


_FILES: Final[dict[str, Callable[[str, bool, Session], list[_File]]]] = {
    "gdb": _gdb,
    "lldb": _lldb,
    "perf": _perf,
    "debuginfod": _debuginfod,
    "coredump": _coredump,
}
"""Functions that make the files of a client from the mount point; True is for all users."""


@click.command(
    "setup",
    short_help="Configure gdb, lldb, perf, debuginfod clients or core dumps once.",
    epilog=exit_status(
        [
            "buildidfs setup gdb",
            "buildidfs setup gdb --write",
            "buildidfs setup perf --system --write",
            "buildidfs setup coredump --write",
            "buildidfs setup gdb --undo",
        ],
        {2: "other users may change the file, or it is not text", 60: "only root may write it"},
    ),
)
@click.argument("client", metavar="CLIENT", type=click.Choice(list(_FILES)))
@click.option("--system", is_flag=True, help="Configure the client for all users.")
@click.option(
    "--write", is_flag=True, help="Write the lines; lines of an earlier run are replaced."
)
@click.option("--undo", is_flag=True, help="Remove the lines that --write has written.")
@click.pass_obj
def setup(session: Session, client: str, system: bool, write: bool, undo: bool) -> None:
    """Print the lines that let a client find captured files, and the files for them.

    CLIENT is gdb, lldb, perf, debuginfod (all clients that speak it) or coredump.
    The lines are for the mount point of the running mount, or for the configured one. With
    `coredump`, systemd runs `buildidfs pin --cores` at each change of /var/lib/systemd/coredump, so
    that the store keeps what the core files name for as long as they are there.
    """
    if write and undo:
        raise click.UsageError("--write and --undo exclude each other")
    from buildidfs.linux.marked_block import Block

    # The lines to remove are found by their marks.
    point = _DEFAULT if undo else _mount_point(session)
    command = f"buildidfs setup {client}{' --system' * system} --undo"
    blocks = [
        Block(path, f"buildidfs setup {client}", command, text)
        for path, text in _FILES[client](point, system, session)
    ]
    if not write and not undo:
        click.echo("\n".join(f"# for {each.path}:\n{each.marked()}" for each in blocks), nl=False)
        return
    if undo and client == "coredump":
        _systemctl(["disable", "--now", f"{_UNIT}.path"])
    for each in blocks:
        changed = each.write() if write else each.remove()
        if not session.is_quiet:
            click.echo(f"{_DONE[write, changed]} {each.path}")
    if client == "coredump":
        _systemctl(["daemon-reload"])
    if write and client == "coredump":
        _systemctl(["enable", "--now", f"{_UNIT}.path"])
        _systemctl(["start", f"{_UNIT}.service"])  # for the core files that are there
    if write and client == "debuginfod" and not session.is_quiet:
        click.echo("it takes effect at the next login")


def _mount_point(session: Session) -> str:
    """Return the mount point of a running mount, or the configured one."""
    from buildidfs.store import run_files

    configured = session.settings.up.mountpoint or _DEFAULT
    running = [
        os.fsdecode(each.path("mountpoint"))
        for each in run_files.present(session.unchecked_store_path(), "mount")
    ]
    point = configured if configured in running or not running else running[0]
    if not _PLAIN.fullmatch(point):
        raise click.UsageError(
            f"configuration files need quotes for the mount point {point!r}: mount elsewhere"
        )
    return point


def _config_home() -> str:
    return os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")


def _systemctl(words: list[str]) -> None:
    """Run systemctl(1) if systemd runs here; else print the command."""
    import subprocess

    if os.path.isdir(_SYSTEMD):
        subprocess.run(["systemctl", *words], check=False)
    else:
        click.echo(f"where systemd runs: systemctl {' '.join(words)}", err=True)
