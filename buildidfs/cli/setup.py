# SPDX-License-Identifier: Apache-2.0
"""Settings of clients and of this program: ``buildidfs setup`` and ``buildidfs config``."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec

from buildidfs.cli import table
from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.table import Cell, Column
from buildidfs.wording import age, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
    short_help="Configure gdb, lldb, perf, debuginfod clients or core dumps.",
    epilog=exit_status(
        [
            "buildidfs setup gdb",
            "buildidfs setup gdb --write",
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
    if undo and client == "coredump" and os.path.exists(blocks[0].path):
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


_WITHOUT: Final = {
    "retention.max-size": "no limit",
    "retention.keep-free": "5%, at most 4 GiB",
    "retention.max-age": "no limit",
    "retention.compress-after": "never",
    "up.mountpoint": "/buildid",
    "watch.exclude": "nothing",
    "watch.metrics": "off",
    "serve.listen": "off",
    "config": "no file",
    "upstream.timeout": "10s",
}
"""The meaning of an unset key."""
_RATES: Final[dict[str, Callable[[Any], str]]] = {
    "serve.rate": lambda count: f"{count:g} requests a second" if count else "no limit",
    "check.scrub-rate": lambda count: f"{size(count)} a second" if count else "off",
    "remote.rate": lambda count: f"{size(count)} a second" if count else "no limit",
}
_UNITS: Final[dict[str, Callable[[Any], str]]] = {"size": size, "limit": size, "age": age}
"""Functions that show the number of a setting to a person: by its key, else by its unit. A text is
shown as it is in the file.
"""


_UPSTREAM: Final = {
    "upstream.urls": "DEBUGINFOD_URLS",
    "upstream.timeout": "DEBUGINFOD_TIMEOUT",
    "upstream.headers-file": "DEBUGINFOD_HEADERS_FILE",
}
"""The variables that provide the same setting. Servers in a variable are added to those of the
file; for other settings the file takes precedence.
"""


class _Value(NamedTuple):
    full: str
    person: str


class _Row(msgspec.Struct, frozen=True, rename={"unit": "_unit"}):
    key: str
    value: Any
    source: str
    unit: str = ""


def _in_full(row: _Row) -> str:
    """Return a value with all its digits."""
    value = row.value
    if value is None or value in ("", []):
        return _WITHOUT.get(row.key, "none")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    if all(isinstance(each, str) for each in value):
        return ", ".join(value) or _WITHOUT.get(row.key, "none")
    return msgspec.json.encode(value).decode()


def _for_person(row: _Row) -> str:
    shown = _RATES.get(row.key) or _UNITS.get(row.unit)
    if shown is not None and not isinstance(row.value, str | None):
        return shown(row.value)
    return _in_full(row)


_SOURCE: Final = Cell(
    table.TEXT.person,
    table.TEXT.full,
    colour=lambda source: None if source == "default" else "green",
)
_VALUE: Final = Cell(
    lambda value: table.LABEL.person(value.person),
    lambda value: table.LABEL.full(value.full),
    cut=True,
)
_COLUMNS: Final[tuple[Column[_Row], ...]] = (
    Column("key", "KEY", table.TEXT),
    Column("value", "VALUE", _VALUE, value=lambda row: _Value(_in_full(row), _for_person(row))),
    Column("source", "FROM", _SOURCE),
)


@click.command(
    "config",
    short_help="Show the settings in effect, and their sources.",
    epilog=exit_status(
        ["buildidfs config", "buildidfs config --json | jq 'select(.source != \"default\")'"],
        {2: "the configuration file cannot be read, or makes no sense"},
    ),
)
@table.options(_COLUMNS)
@click.pass_context
def config(ctx: click.Context, layout: table.TableOptions) -> None:
    """Show each setting with its value and its source: default, file, environment, or option.

    The first rows are the configuration file and the name of this machine. Options of single
    commands, such as prune --max-size, are no settings, and take precedence there.
    """
    layout.print(_COLUMNS, _rows(ctx, ctx.obj))


def _rows(ctx: click.Context, session: Session) -> Iterator[_Row]:
    from buildidfs import config as toml
    from buildidfs.linux import machine
    from buildidfs.upstream.options import without_password

    settings, path = session.settings, session.config_path
    given = frozenset() if path is None else toml.given_keys(session.config_text, path)
    yield _Row("config", path, _of_option(ctx, "config") or "default")
    node = os.environ.get("NODE_NAME", "")
    hostname = _of_option(ctx, "hostname")
    machine.call(session.hostname or "", node)
    name = machine.host_name()
    is_node = bool(node) and name == node
    yield _Row("hostname", name, hostname or ("environment NODE_NAME" if is_node else "default"))
    for key, what in toml.known_keys().items():
        value = toml.value_of(settings, key)
        source = f"file {path}" if key in given else "default"
        if key in _UPSTREAM and (text := os.environ.get(_UPSTREAM[key], "")):
            value, source = _with_environment(key, value, source, text)
        if key == "upstream.urls":
            value = [without_password(url) for url in value]
        if key == "store.path":
            value, source = session.store_path, _of_option(ctx, "store") or source
        yield _Row(key, value, source, toml.unit_of(what))


def _with_environment(key: str, value: Any, source: str, text: str) -> tuple[Any, str]:
    """Return a setting of ``[upstream]`` and its source, if a variable of debuginfod is set."""
    variable = f"environment {_UPSTREAM[key]}"
    if key == "upstream.urls":
        return [*value, *text.split()], f"{source}, {variable}" if value else variable
    if value:
        return value, source
    if key == "upstream.timeout":
        from buildidfs.upstream.options import seconds

        timeout = seconds(text)
        return (value, source) if timeout is None else (timeout, variable)
    return text, variable


def _of_option(ctx: click.Context, name: str) -> str:
    """Return the source of a global option that was given, before or after the command."""
    from click.core import ParameterSource

    sources = {each.get_parameter_source(name) for each in (ctx, ctx.find_root())}
    if ParameterSource.COMMANDLINE in sources:
        return f"option --{name}"
    if ParameterSource.ENVIRONMENT in sources:
        return "environment BUILDIDFS_STORE"
    return ""
